//! The client of the servers: it asks them in turn.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firn_cluster::{Generation, HostId};
use tokio::time::timeout;

use super::message::{ServerMessage, StoreRequest, StoreResponse};
use super::transport::MessageTransport;
use super::{message, server};
use crate::{
    ChangeResult, ClusterName, ClusterRecord, LeaseResult, MembershipError, MembershipFuture,
    MembershipStore, RecordView, Revision, VersionedRecord,
};

/// How long one server may take: for a change, longer than it takes by itself. For a request that
/// may be sent to another server as well, no longer than a healthy server needs.
const SINGLE_SERVER_WAIT: Duration = server::ANSWER_WAIT.saturating_add(Duration::from_millis(500));
const ASK_WAIT_MIN: Duration = Duration::from_millis(300);
const ASK_WAIT_MAX: Duration = Duration::from_millis(1500);

/// The membership store by the servers in the agents.
pub struct EmbeddedStore {
    wire: Arc<dyn MessageTransport>,
    /// The duration of a lease, as this host counts it.
    ttl: Duration,
    /// In the order in which they are asked: the last known leader first, a server that did not
    /// answer in time last.
    servers: Mutex<Vec<String>>,
}

impl EmbeddedStore {
    /// A store that uses these servers. Leases last as long as on the servers, or shorter.
    pub fn new(servers: Vec<String>, wire: Arc<dyn MessageTransport>, ttl: Duration) -> Self {
        Self { wire, ttl, servers: Mutex::new(servers) }
    }

    /// How long one server may take. A request for a lease has to reach another server before the
    /// lease is over.
    fn answer_wait(&self, is_sure: bool) -> Duration {
        match is_sure {
            true => SINGLE_SERVER_WAIT,
            false => (self.ttl / 2).clamp(ASK_WAIT_MIN, ASK_WAIT_MAX),
        }
    }

    /// Sends a request to the leader.
    async fn ask_leader(&self, ask: StoreRequest) -> Result<StoreResponse, MembershipError> {
        let is_sure = matches!(ask, StoreRequest::Change(..));
        let message = message::encode_message(&ServerMessage::Ask(ask))?;
        let (mut left, mut troubles) = (VecDeque::from(self.servers()), Vec::new());
        while let Some(to) = left.pop_front() {
            match self.ask_server(&to, message.clone(), is_sure).await {
                Ok(StoreResponse::Elsewhere(hint)) => {
                    move_to_front(left.make_contiguous(), hint.as_deref());
                    troubles.push(format!(
                        "{to} reports that {} leads",
                        hint.as_deref().unwrap_or("no server")
                    ));
                }
                Ok(StoreResponse::Trouble(MembershipError::Unreachable(why)))
                | Err(MembershipError::Unreachable(why)) => {
                    troubles.push(format!("{to}: {why}"));
                }
                Ok(StoreResponse::Trouble(MembershipError::Unknown(why)))
                | Err(MembershipError::Unknown(why)) => {
                    self.move_to_end(&to);
                    if is_sure {
                        return Err(MembershipError::Unknown(why));
                    }
                    troubles.push(why);
                }
                Ok(StoreResponse::Trouble(trouble)) | Err(trouble) => return Err(trouble),
                Ok(answer) => {
                    move_to_front(&mut self.servers_mut(), Some(&to));
                    return Ok(answer);
                }
            }
        }
        Err(MembershipError::Unreachable(format!("no server leads: {}", troubles.join("; "))))
    }

    async fn ask_server(
        &self,
        to: &str,
        message: Vec<u8>,
        is_sure: bool,
    ) -> Result<StoreResponse, MembershipError> {
        match timeout(self.answer_wait(is_sure), self.wire.call_server(to, message)).await {
            Ok(answer) => message::decode_message(&answer?)
                .map_err(|error| MembershipError::Unknown(error.to_string())),
            Err(_) => Err(MembershipError::Unknown(format!("{to} does not answer"))),
        }
    }

    async fn leader_name(&self) -> Result<String, MembershipError> {
        match self.ask_leader(StoreRequest::Lead).await? {
            StoreResponse::Leads(name) => Ok(name),
            other => Err(unexpected_response(&other)),
        }
    }

    fn servers(&self) -> Vec<String> {
        self.servers_mut().clone()
    }

    fn servers_mut(&self) -> MutexGuard<'_, Vec<String>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn move_to_end(&self, name: &str) {
        self.servers_mut().sort_by_key(|it| it == name);
    }
}

/// Moves one name to the front, if it is in the list.
fn move_to_front(names: &mut [String], name: Option<&str>) {
    names.sort_by_key(|it| Some(it.as_str()) != name);
}

impl MembershipStore for EmbeddedStore {
    fn join_host<'a>(&'a self, name: &'a str) -> MembershipFuture<'a, HostId> {
        Box::pin(async {
            match self.ask_leader(StoreRequest::Join(name.to_owned())).await? {
                StoreResponse::Joined(host) => Ok(host),
                other => Err(unexpected_response(&other)),
            }
        })
    }

    fn list_clusters(&self) -> MembershipFuture<'_, Vec<ClusterName>> {
        Box::pin(async {
            match self.ask_leader(StoreRequest::Clusters).await? {
                StoreResponse::Clusters(clusters) => Ok(clusters),
                other => Err(unexpected_response(&other)),
            }
        })
    }

    fn read_record<'a>(
        &'a self,
        cluster: &'a ClusterName,
    ) -> MembershipFuture<'a, VersionedRecord> {
        Box::pin(async {
            match self.ask_leader(StoreRequest::Read(cluster.clone())).await? {
                StoreResponse::Read(known) => Ok(known),
                other => Err(unexpected_response(&other)),
            }
        })
    }

    fn change_record<'a>(
        &'a self,
        cluster: &'a ClusterName,
        from: Revision,
        to: &'a ClusterRecord,
    ) -> MembershipFuture<'a, ChangeResult> {
        Box::pin(async move {
            match self.ask_leader(StoreRequest::Change(cluster.clone(), from, to.clone())).await? {
                StoreResponse::Changed(changed) => Ok(changed),
                other => Err(unexpected_response(&other)),
            }
        })
    }

    fn request_lease<'a>(
        &'a self,
        cluster: &'a ClusterName,
        host: HostId,
    ) -> MembershipFuture<'a, LeaseResult> {
        Box::pin(async move {
            let ttl_ms = u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX);
            match self.ask_leader(StoreRequest::Lease(cluster.clone(), host, ttl_ms)).await? {
                StoreResponse::Leased(leased) => Ok(leased),
                other => Err(unexpected_response(&other)),
            }
        })
    }

    fn report_lease_given_up<'a>(
        &'a self,
        cluster: &'a ClusterName,
        host: HostId,
        generation: Generation,
    ) -> MembershipFuture<'a, ()> {
        Box::pin(async move {
            let report = StoreRequest::LeaseGivenUp(cluster.clone(), host, generation);
            match self.ask_leader(report).await? {
                StoreResponse::Noted => Ok(()),
                other => Err(unexpected_response(&other)),
            }
        })
    }

    fn read_view<'a>(&'a self, cluster: &'a ClusterName) -> MembershipFuture<'a, RecordView> {
        Box::pin(async {
            match self.ask_leader(StoreRequest::View(cluster.clone())).await? {
                StoreResponse::View(view) => Ok(view),
                other => Err(unexpected_response(&other)),
            }
        })
    }

    fn request_leadership<'a>(&'a self, _name: &'a str) -> MembershipFuture<'a, String> {
        Box::pin(self.leader_name())
    }

    fn current_leader(&self) -> MembershipFuture<'_, Option<String>> {
        Box::pin(async { self.leader_name().await.map(Some) })
    }
}

fn unexpected_response(response: &StoreResponse) -> MembershipError {
    MembershipError::Refused(format!("a server sends an unexpected response: {response:?}"))
}
