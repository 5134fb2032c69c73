//! One run of raft, from the opening of the store to its failure.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use openraft::error::{CheckIsLeaderError, ClientWriteError, ForwardToLeader, RaftError};
use openraft::{BasicNode, Config, Raft, SnapshotPolicy};
use sha2::{Digest as _, Sha256};

use super::foundings::Foundings;
use super::machine::Machine;
use super::message::Told;
use super::network::Network;
use super::state::{Done, Op, State};
use super::store::{Founded, Store};
use super::{Types, Wire};
use crate::Trouble;

/// Log entries from one snapshot to the next, and those that are retained before it.
const SNAPSHOT_EVERY: u64 = 1000;
const KEPT_MAX: u64 = 200;

/// Maximum size of a message: entries of the largest size, or bytes of a snapshot.
const ENTRIES_MAX: u64 = 3;
const PIECE_BYTES: u64 = 32 << 10;

/// One run of raft. Clones share it.
#[derive(Clone)]
pub struct Running {
    pub raft: Raft<Types>,
    pub machine: Machine,
    pub servers: BTreeMap<u64, String>,
    pub foundings: Foundings,
    me: u64,
}

/// The leader, and its term.
pub type Leader = openraft::LeaderId<u64>;

/// The number by which raft knows the server of that host. It must not change when other servers
/// come or go.
pub fn number(name: &str) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&Sha256::digest(name)[..8]);
    u64::from_le_bytes(first)
}

impl Running {
    /// Confirms that this server leads, and has applied all entries that were committed before.
    pub async fn confirmed(&self) -> Result<Leader, Told> {
        match self.raft.ensure_linearizable().await {
            // The newest entry is the leader's own: its term begins with one.
            Ok(Some(last)) if last.leader_id.node_id == self.me => Ok(last.leader_id),
            Ok(_) => Err(Told::Elsewhere(None)),
            Err(RaftError::APIError(CheckIsLeaderError::ForwardToLeader(to))) => Err(elsewhere(to)),
            Err(error) => Err(Told::Trouble(Trouble::Unreachable(error.to_string()))),
        }
    }

    /// Reads the state, if no other server has led since that leader.
    pub fn seen<T>(&self, leader: &Leader, look: impl FnOnce(&State) -> T) -> Result<T, Told> {
        self.machine.applied().of(leader).map(look).ok_or(Told::Elsewhere(None))
    }

    pub async fn write(&self, op: Op) -> Result<Done, Told> {
        match self.raft.client_write(op).await {
            Ok(written) => Ok(written.data),
            Err(RaftError::APIError(ClientWriteError::ForwardToLeader(to))) => Err(elsewhere(to)),
            Err(error) => Err(Told::Trouble(Trouble::Unknown(error.to_string()))),
        }
    }

    pub fn has_failed(&self) -> Option<String> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        metrics.running_state.as_ref().err().map(ToString::to_string)
    }
}

fn elsewhere(to: ForwardToLeader<u64, BasicNode>) -> Told {
    Told::Elsewhere(to.leader_node.map(|node| node.addr))
}

/// Starts raft with the contents of the store.
pub async fn run(directory: &Path, me: &str, wire: &Arc<dyn Wire>) -> Result<Running, Trouble> {
    let (store, Founded { founding, servers }) = Store::open(directory, number(me))?;
    let failed = |error: &dyn std::fmt::Display| {
        Trouble::Unreachable(format!("raft does not begin: {error}"))
    };
    if !servers.contains_key(&number(me)) {
        let names: Vec<&str> = servers.values().map(String::as_str).collect();
        return Err(Trouble::Refused(format!(
            "{me} is not one of the servers: {}",
            names.join(", ")
        )));
    }
    let machine = Machine::open(store.clone()).map_err(|error| failed(&error))?;
    let foundings = Foundings::open(store.clone(), founding).map_err(|error| failed(&error))?;
    let network = Network { wire: Arc::clone(wire), foundings: foundings.clone() };
    let raft = Raft::new(number(me), Arc::new(config()?), network, store, machine.clone()).await;
    let raft = raft.map_err(|error| failed(&error))?;
    if !raft.is_initialized().await.map_err(|error| failed(&error))? {
        let nodes = servers.iter().map(|(id, name)| (*id, BasicNode::new(name)));
        let nodes: BTreeMap<u64, BasicNode> = nodes.collect();
        // Every server proposes the same, so it does no harm if another one was quicker.
        if let Err(error) = raft.initialize(nodes).await {
            tracing::debug!("membership has begun already: {error}");
        }
    }
    Ok(Running { raft, machine, servers, foundings, me: number(me) })
}

fn config() -> Result<Config, Trouble> {
    let config = Config {
        cluster_name: "firn".to_owned(),
        heartbeat_interval: 250,
        election_timeout_min: 1000,
        election_timeout_max: 2000,
        install_snapshot_timeout: 1000,
        max_payload_entries: ENTRIES_MAX,
        snapshot_policy: SnapshotPolicy::LogsSinceLast(SNAPSHOT_EVERY),
        snapshot_max_chunk_size: PIECE_BYTES,
        max_in_snapshot_log_to_keep: KEPT_MAX,
        ..Config::default()
    };
    config.validate().map_err(|error| Trouble::Refused(error.to_string()))
}
