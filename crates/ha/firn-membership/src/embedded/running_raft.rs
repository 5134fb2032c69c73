//! One run of raft, from the opening of the store to its failure.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use openraft::error::{CheckIsLeaderError, ClientWriteError, ForwardToLeader, RaftError};
use openraft::{BasicNode, Config, Raft, SnapshotPolicy};
use sha2::{Digest as _, Sha256};
use tokio::time::sleep;

use super::bootstrap_ids::BootstrapIds;
use super::log_store::{BootstrapRecord, LogStore};
use super::message::StoreResponse;
use super::network::RaftTransport;
use super::state::{OperationResult, ReplicatedState, StateOperation};
use super::state_machine::StateMachine;
use super::transport::MessageTransport;
use super::types::Types;
use crate::MembershipError;

/// Log entries from one snapshot to the next, and those that are retained before it.
const SNAPSHOT_ENTRIES: u64 = 1000;
const KEPT_MAX: u64 = 200;

/// Maximum size of a message: entries of the largest size, or bytes of a snapshot.
const ENTRIES_MAX: u64 = 3;
const PIECE_BYTES: u64 = 32 << 10;

/// Times of raft, in milliseconds. A server that hears nothing of the leader votes for another one
/// after the longest timeout (openraft's leader lease), and starts an election after that and a random
/// timeout between these: after 1.1 to 1.4 s. A leader that stalls for longer is replaced; that
/// delays requests, and does no harm.
const HEARTBEAT_MS: u64 = 250;
const ELECTION_MS_MIN: u64 = 400;
const ELECTION_MS_MAX: u64 = 700;

/// The time that a server has for an election, before the next one starts one.
const TURN_MS: u64 = 200;

/// One run of raft. Clones share it.
#[derive(Clone)]
pub struct RunningRaft {
    pub raft: Raft<Types>,
    pub machine: StateMachine,
    pub servers: BTreeMap<u64, String>,
    pub foundings: BootstrapIds,
    me: u64,
}

/// The leader, and its term.
pub type RaftLeader = openraft::LeaderId<u64>;

/// The number by which raft knows the server of that host. It must not change when other servers
/// come or go.
pub fn server_number(name: &str) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&Sha256::digest(name)[..8]);
    u64::from_le_bytes(first)
}

impl RunningRaft {
    /// Confirms that this server leads, and has applied all entries that were committed before.
    pub async fn confirm_leadership(&self) -> Result<RaftLeader, StoreResponse> {
        match self.raft.ensure_linearizable().await {
            // The newest entry is the leader's own: its term begins with one.
            Ok(Some(last)) if last.leader_id.node_id == self.me => Ok(last.leader_id),
            Ok(_) => Err(StoreResponse::Elsewhere(None)),
            Err(RaftError::APIError(CheckIsLeaderError::ForwardToLeader(to))) => {
                Err(forward_response(to))
            }
            Err(error) => {
                Err(StoreResponse::Trouble(MembershipError::Unreachable(error.to_string())))
            }
        }
    }

    /// Reads the state, if no other server has led since that leader.
    pub fn read_state<T>(
        &self,
        leader: &RaftLeader,
        read: impl FnOnce(&ReplicatedState) -> T,
    ) -> Result<T, StoreResponse> {
        self.machine
            .lock_applied()
            .state_under(leader)
            .map(read)
            .ok_or(StoreResponse::Elsewhere(None))
    }

    pub async fn write_entry(&self, op: StateOperation) -> Result<OperationResult, StoreResponse> {
        match self.raft.client_write(op).await {
            Ok(written) => Ok(written.data),
            Err(RaftError::APIError(ClientWriteError::ForwardToLeader(to))) => {
                Err(forward_response(to))
            }
            Err(error) => Err(StoreResponse::Trouble(MembershipError::Unknown(error.to_string()))),
        }
    }

    /// Starts an election if that server leads, as far as this one knows, once others may vote. A
    /// leader that lives is replaced.
    pub async fn replace_leader(&self, server: u64) {
        let leads = || self.raft.metrics().borrow().current_leader == Some(server);
        if !leads() || server == self.me {
            return;
        }
        // One after another: servers that are candidates at the same time get no majority.
        let before_me = self.servers.keys().filter(|it| **it != server && **it < self.me).count();
        sleep(Duration::from_millis(ELECTION_MS_MAX + TURN_MS * before_me as u64)).await;
        // Another server may have been elected meanwhile: a second election would depose it.
        if leads() {
            if let Err(error) = self.raft.trigger().elect().await {
                tracing::debug!("no election: {error}");
            }
        }
    }

    pub fn failure_reason(&self) -> Option<String> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        metrics.running_state.as_ref().err().map(ToString::to_string)
    }
}

fn forward_response(to: ForwardToLeader<u64, BasicNode>) -> StoreResponse {
    StoreResponse::Elsewhere(to.leader_node.map(|node| node.addr))
}

/// Starts raft with the contents of the store.
pub async fn start_raft(
    directory: &Path,
    me: &str,
    wire: &Arc<dyn MessageTransport>,
) -> Result<RunningRaft, MembershipError> {
    let (store, BootstrapRecord { founding, servers }) =
        LogStore::open(directory, server_number(me))?;
    let failed = |error: &dyn std::fmt::Display| {
        MembershipError::Unreachable(format!("raft does not begin: {error}"))
    };
    if !servers.contains_key(&server_number(me)) {
        let names: Vec<&str> = servers.values().map(String::as_str).collect();
        return Err(MembershipError::Refused(format!(
            "{me} is not one of the servers: {}",
            names.join(", ")
        )));
    }
    let machine = StateMachine::open(store.clone()).map_err(|error| failed(&error))?;
    let foundings = BootstrapIds::open(store.clone(), founding).map_err(|error| failed(&error))?;
    let network = RaftTransport { wire: Arc::clone(wire), foundings: foundings.clone() };
    let raft =
        Raft::new(server_number(me), Arc::new(raft_config()?), network, store, machine.clone())
            .await;
    let raft = raft.map_err(|error| failed(&error))?;
    if !raft.is_initialized().await.map_err(|error| failed(&error))? {
        let nodes = servers.iter().map(|(id, name)| (*id, BasicNode::new(name)));
        let nodes: BTreeMap<u64, BasicNode> = nodes.collect();
        // Every server proposes the same, so it does no harm if another one was quicker.
        if let Err(error) = raft.initialize(nodes).await {
            tracing::debug!("membership has begun already: {error}");
        }
    }
    Ok(RunningRaft { raft, machine, servers, foundings, me: server_number(me) })
}

fn raft_config() -> Result<Config, MembershipError> {
    let config = Config {
        cluster_name: "firn".to_owned(),
        heartbeat_interval: HEARTBEAT_MS,
        election_timeout_min: ELECTION_MS_MIN,
        election_timeout_max: ELECTION_MS_MAX,
        install_snapshot_timeout: 1000,
        max_payload_entries: ENTRIES_MAX,
        snapshot_policy: SnapshotPolicy::LogsSinceLast(SNAPSHOT_ENTRIES),
        snapshot_max_chunk_size: PIECE_BYTES,
        max_in_snapshot_log_to_keep: KEPT_MAX,
        ..Config::default()
    };
    config.validate().map_err(|error| MembershipError::Refused(error.to_string()))
}
