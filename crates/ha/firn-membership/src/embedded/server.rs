//! One of the servers: raft, and the requests to its leader.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firn_cluster::failover::LeaseTerms;
use firn_cluster::{Generation, HostId};
use tokio::time::{sleep, timeout};

use super::lease_table::LeaseTable;
use super::log_store::LogStore;
use super::message::{
    self, RaftEnvelope, RaftReply, RaftRequest, ServerMessage, StoreRequest, StoreResponse,
};
use super::running_raft::{RunningRaft, server_number, start_raft};
use super::state::{OperationResult, ReplicatedState, StateOperation};
use super::transport::MessageTransport;
use crate::{
    ClusterName, LeaseResult, MembershipError, RecordView, VersionedRecord, read_boot_clock,
};

/// Maximum time of a server for an answer: an election, and a disk that is busy.
pub(super) const ANSWER_WAIT: Duration = Duration::from_secs(3);

/// Time between two checks whether raft still runs, and the time until a store that failed is
/// opened again.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
const REOPEN_DELAY: Duration = Duration::from_secs(2);

/// Why a host gets no lease that it would hold for longer than the server counts.
const LONGER_LEASE: &str = "lease-ms is longer on this host than on the leading server: it has to be the same on all hosts";

/// A server of membership.
pub struct RaftServer {
    me: String,
    directory: PathBuf,
    wire: Arc<dyn MessageTransport>,
    terms: LeaseTerms,
    lease_table: Mutex<LeaseTable>,
    running: Mutex<Result<RunningRaft, MembershipError>>,
}

/// Prepares this host to be one of these servers, of a new cluster of hosts.
///
/// # Errors
/// If it is one already, isn't one of them, or they are too few for a majority after the loss of
/// one.
pub fn bootstrap_server(
    directory: &Path,
    me: &str,
    servers: &[String],
) -> Result<(), MembershipError> {
    let numbered: BTreeMap<u64, String> =
        servers.iter().map(|name| (server_number(name), name.clone())).collect();
    if !servers.iter().any(|name| name == me) {
        return Err(MembershipError::Refused(format!(
            "{me} is not one of the servers: {}",
            servers.join(", ")
        )));
    }
    if numbered.len() < 3 {
        return Err(MembershipError::Refused(format!(
            "{} servers are too few: of two, none is a majority when the other is lost, and no server can tell a host that is lost from a \
             network that is cut. Give three; the third needs no VMs",
            numbered.len()
        )));
    }
    LogStore::create_new(directory, &numbered)
}

impl RaftServer {
    /// Starts a server. The runtime must be multi-threaded.
    ///
    /// # Errors
    /// If this host was not [prepared](bootstrap_server), or its store can't be used.
    pub async fn start_server(
        directory: &Path,
        me: &str,
        terms: LeaseTerms,
        wire: Arc<dyn MessageTransport>,
    ) -> Result<Arc<Self>, MembershipError> {
        let running = start_raft(directory, me, &wire).await?;
        let server = Arc::new(Self {
            me: me.to_owned(),
            directory: directory.to_owned(),
            wire,
            terms,
            lease_table: Mutex::new(LeaseTable::new(terms)),
            running: Mutex::new(Ok(running)),
        });
        tokio::spawn(restart_failed_raft(Arc::downgrade(&server)));
        Ok(server)
    }

    /// The names of all servers.
    ///
    /// # Errors
    /// If it can't use its store.
    pub fn servers(&self) -> Result<Vec<String>, MembershipError> {
        Ok(self.current_raft()?.servers.into_values().collect())
    }

    /// Starts an election if the host of that name leads: its agent has ended.
    pub async fn replace_leader(&self, name: &str) {
        if let Ok(running) = self.current_raft() {
            running.replace_leader(server_number(name)).await;
        }
    }

    /// Answers a message of the host of that name, or of this process.
    pub async fn answer_message(&self, from: Option<&str>, bytes: &[u8]) -> Vec<u8> {
        let answered = match message::decode_message(bytes) {
            Ok(ServerMessage::Ask(ask)) => {
                message::encode_message(&self.answer_request(from, ask).await)
            }
            Ok(ServerMessage::Raft(letter)) => self.answer_raft(from, letter).await,
            Err(trouble) => message::encode_message(&StoreResponse::Trouble(trouble)),
        };
        // No client can decode an empty answer: it reports an error.
        answered.unwrap_or_default()
    }

    async fn answer_raft(
        &self,
        from: Option<&str>,
        letter: RaftEnvelope,
    ) -> Result<Vec<u8>, MembershipError> {
        let RunningRaft { raft, servers, foundings, .. } = self.current_raft()?;
        let name = from.unwrap_or(&self.me);
        if !servers.contains_key(&server_number(name)) {
            return Err(MembershipError::Refused("it is none of the servers".to_owned()));
        }
        // On an error there is no answer: a refused server must not take this one for a server of
        // its own.
        foundings.check_identities((server_number(name), name), letter.from, letter.to).await?;
        let answer = match letter.rpc {
            RaftRequest::Append(rpc) => message::encode_message(&raft.append_entries(rpc).await),
            RaftRequest::Vote(rpc) => message::encode_message(&raft.vote(rpc).await),
            RaftRequest::Snapshot(rpc) => {
                message::encode_message(&raft.install_snapshot(rpc).await)
            }
        };
        message::encode_message(&RaftReply { from: foundings.own_id(), answer: answer? })
    }

    async fn answer_request(&self, from: Option<&str>, ask: StoreRequest) -> StoreResponse {
        match timeout(ANSWER_WAIT, self.execute_request(from, ask)).await {
            Ok(Ok(answer) | Err(answer)) => answer,
            Err(_) => {
                let wait = ANSWER_WAIT.as_secs();
                let text = format!("{} does not reach a majority within {wait} s", self.me);
                StoreResponse::Trouble(MembershipError::Unknown(text))
            }
        }
    }

    async fn execute_request(
        &self,
        from: Option<&str>,
        ask: StoreRequest,
    ) -> Result<StoreResponse, StoreResponse> {
        let running = self.current_raft().map_err(StoreResponse::Trouble)?;
        match ask {
            StoreRequest::Join(name) => {
                self.require(from.is_none_or(|from| from == name), "joins for another host")?;
                match running.write_entry(StateOperation::Join(name)).await? {
                    OperationResult::Joined(Some(host)) => Ok(StoreResponse::Joined(host)),
                    _ => Err(refused_response(
                        "all numbers of hosts are taken: found the cluster anew",
                    )),
                }
            }
            StoreRequest::Change(cluster, from, to) => {
                to.to_json().map_err(StoreResponse::Trouble)?;
                let leader = running.confirm_leadership().await?;
                let are_there = running
                    .read_state(&leader, |state| state.have_all_joined(&to.named_hosts()))?;
                self.require(are_there, "the record names a host that has never joined")?;
                match running.write_entry(StateOperation::Change(cluster, from, to)).await? {
                    OperationResult::Changed(changed) => Ok(StoreResponse::Changed(changed)),
                    _ => Err(refused_response("a change that changed nothing")),
                }
            }
            StoreRequest::Clusters => {
                let leader = running.confirm_leadership().await?;
                Ok(StoreResponse::Clusters(running.read_state(&leader, ReplicatedState::clusters)?))
            }
            StoreRequest::Read(cluster) => {
                let leader = running.confirm_leadership().await?;
                Ok(StoreResponse::Read(
                    running.read_state(&leader, |state| state.record_of(&cluster))?,
                ))
            }
            StoreRequest::Lease(cluster, host, ttl_ms) => {
                self.require(u128::from(ttl_ms) <= self.terms.ttl.as_millis(), LONGER_LEASE)?;
                self.grant_lease(&running, from, &cluster, host).await
            }
            StoreRequest::LeaseGivenUp(cluster, host, generation) => {
                self.remove_lease(&running, from, &cluster, (host, generation)).await
            }
            StoreRequest::View(cluster) => self.read_view(&running, &cluster).await,
            StoreRequest::Lead => {
                running.confirm_leadership().await?;
                Ok(StoreResponse::Leads(self.me.clone()))
            }
        }
    }

    async fn grant_lease(
        &self,
        running: &RunningRaft,
        from: Option<&str>,
        cluster: &ClusterName,
        host: HostId,
    ) -> Result<StoreResponse, StoreResponse> {
        self.require_own_number(running, from, host)?;
        // A request of a fenced host is not recorded: its lease would never expire.
        let early = running.machine.lock_applied().state.record_of(cluster);
        if is_fenced(&early, host) {
            let leader = running.confirm_leadership().await?;
            let known = running.read_state(&leader, |state| state.record_of(cluster))?;
            return Ok(StoreResponse::Leased(LeaseResult::Refused(known)));
        }
        self.lock_leases().record_grant(cluster, host, read_boot_clock());
        let leader = running.confirm_leadership().await?;
        let known = running.read_state(&leader, |state| state.record_of(cluster))?;
        if is_fenced(&known, host) {
            return Ok(StoreResponse::Leased(LeaseResult::Refused(known)));
        }
        match self.lock_leases().enter_term(cluster, leader.term, &known, read_boot_clock()) {
            true => Ok(StoreResponse::Leased(LeaseResult::Granted(known))),
            false => Err(StoreResponse::Elsewhere(None)),
        }
    }

    /// Removes a lease that its holder uses no more. A grant that is confirmed only now is removed,
    /// too: its holder ignores it. A report that arrives late, in a later generation, is ignored: the
    /// host may have been granted a lease in that one.
    async fn remove_lease(
        &self,
        running: &RunningRaft,
        from: Option<&str>,
        cluster: &ClusterName,
        (host, generation): (HostId, Generation),
    ) -> Result<StoreResponse, StoreResponse> {
        self.require_own_number(running, from, host)?;
        let leader = running.confirm_leadership().await?;
        let known = running.read_state(&leader, |state| state.record_of(cluster))?;
        let (mut leases, now) = (self.lock_leases(), read_boot_clock());
        if !leases.enter_term(cluster, leader.term, &known, now) {
            return Err(StoreResponse::Elsewhere(None));
        }
        let register = known.record.map(|record| record.register);
        if register.is_some_and(|register| register.generation == generation) {
            leases.remove_grant(cluster, host);
        }
        Ok(StoreResponse::Noted)
    }

    /// Refuses a request about the lease of another host than the sender.
    fn require_own_number(
        &self,
        running: &RunningRaft,
        from: Option<&str>,
        host: HostId,
    ) -> Result<(), StoreResponse> {
        let is_its = |name: &str| {
            running.machine.lock_applied().state.names().get(&host).is_none_or(|it| it == name)
        };
        self.require(from.is_none_or(is_its), "asks for another host's lease")
    }

    async fn read_view(
        &self,
        running: &RunningRaft,
        cluster: &ClusterName,
    ) -> Result<StoreResponse, StoreResponse> {
        let leader = running.confirm_leadership().await?;
        let (known, names, there) = running.read_state(&leader, |state| {
            (state.record_of(cluster), state.names().clone(), state.clusters())
        })?;
        let (mut offices, now) = (self.lock_leases(), read_boot_clock());
        offices.retain_clusters(|cluster| there.contains(cluster));
        if !offices.enter_term(cluster, leader.term, &known, now) {
            return Err(StoreResponse::Elsewhere(None));
        }
        let leases = offices.unexpired_hosts(cluster, now);
        let given_up = offices.hosts_without_lease(cluster);
        Ok(StoreResponse::View(RecordView { known, leases, given_up, names }))
    }

    fn require(&self, holds: bool, why: &str) -> Result<(), StoreResponse> {
        if holds { Ok(()) } else { Err(refused_response(why)) }
    }

    fn lock_leases(&self) -> MutexGuard<'_, LeaseTable> {
        self.lease_table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current_raft(&self) -> Result<RunningRaft, MembershipError> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_current_raft(&self, running: Result<RunningRaft, MembershipError>) {
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = running;
    }
}

/// Whether the host gets no lease.
fn is_fenced(known: &VersionedRecord, host: HostId) -> bool {
    known
        .record
        .as_ref()
        .is_none_or(|record| record.register.is_ended() || record.register.fence.contains(&host))
}

fn refused_response(why: &str) -> StoreResponse {
    StoreResponse::Trouble(MembershipError::Refused(why.to_owned()))
}

/// Restarts raft, which ends when its store fails. It starts with the contents of the disk, as
/// after a crash, once the store can be used again.
async fn restart_failed_raft(server: std::sync::Weak<RaftServer>) {
    loop {
        sleep(CHECK_INTERVAL).await;
        let Some(server) = server.upgrade() else { return };
        let why = match server.current_raft() {
            Ok(running) => match running.failure_reason() {
                None => continue,
                Some(why) => {
                    tracing::error!("this host is no server of the cluster for now: {why}");
                    server.set_current_raft(Err(MembershipError::Unreachable(why.clone())));
                    let _ = running.raft.shutdown().await;
                    why
                }
            },
            Err(trouble) => trouble.to_string(),
        };
        sleep(REOPEN_DELAY).await;
        match start_raft(&server.directory, &server.me, &server.wire).await {
            Ok(running) => {
                tracing::info!("this host is a server of the cluster again");
                server.set_current_raft(Ok(running));
            }
            Err(trouble) => {
                tracing::debug!("still no server: {trouble} (first: {why})");
                server.set_current_raft(Err(trouble));
            }
        }
    }
}
