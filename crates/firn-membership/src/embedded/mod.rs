//! Membership without another system: raft between the agents.
//!
//! ```text
//!   any host                                  the server that leads            the other servers
//!     EmbeddedStore --- StoreRequest -------> RaftServer ----- raft ---------> RaftServer
//!       ^                                       | store: log and vote, on disk   | store
//!       '-- StoreResponse, or Elsewhere --------' state: records, hosts          | state
//!                                                 lease_table: leases, in memory
//!
//!     each message by a MessageTransport
//! ```
//!
//! Three hosts or more are servers; any host may send requests. With a majority of the servers,
//! records can be read and changed, and leases be granted. Without one, nothing can: VMs whose
//! leases expire continue to run, but their output is blocked, and nothing fails over. Of two hosts
//! none is a majority, so two are refused ([`bootstrap_server`]).
//!
//! Leases are not in the log (`lease_table`): a new leader counts all of them from the start of its
//! own term.

#![expect(
    clippy::result_large_err,
    reason = "those of raft and redb are, and only failures cost it"
)]

mod foundings;
mod machine;
mod message;
mod network;
mod offices;
mod running;
mod server;
mod state;
mod store;

use std::collections::VecDeque;
use std::io::Cursor;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firn_cluster::Host;
use tokio::time::timeout;

use self::message::{Ask, Message, Told};
pub use self::server::{Server, found};
use crate::{Changed, Cluster, Known, Later, Leased, Members, Record, Revision, Trouble, View};

openraft::declare_raft_types!(
    /// The types that raft is used with.
    pub Types: D = state::Op, R = state::Done, SnapshotData = Cursor<Vec<u8>>,
);

/// How long one server may take: for a change, longer than it takes by itself. For a request that
/// may be sent to another server as well, no longer than a healthy server needs.
const SURE_WAIT: Duration = server::ANSWER_WAIT.saturating_add(Duration::from_millis(500));
const ASK_WAIT: Duration = Duration::from_millis(1500);

/// The transport of messages to servers.
pub trait Wire: Send + Sync + 'static {
    /// Sends a message to the server of that name, and returns its answer.
    /// [`MembershipError::Unreachable`] means that it was not sent.
    fn call<'a>(&'a self, to: &'a str, message: Vec<u8>) -> Later<'a, Vec<u8>>;
}

/// The membership store by the servers in the agents.
pub struct Embedded {
    wire: Arc<dyn Wire>,
    /// In the order in which they are asked: the last known leader first, a server that did not
    /// answer in time last.
    servers: Mutex<Vec<String>>,
}

impl Embedded {
    /// A store that uses these servers.
    pub fn new(servers: Vec<String>, wire: Arc<dyn Wire>) -> Self {
        Self { wire, servers: Mutex::new(servers) }
    }

    /// Sends a request to the leader.
    async fn ask(&self, ask: Ask) -> Result<Told, Trouble> {
        let is_sure = matches!(ask, Ask::Change(..));
        let message = message::encode(&Message::Ask(ask))?;
        let (mut left, mut troubles) = (VecDeque::from(self.servers()), Vec::new());
        while let Some(to) = left.pop_front() {
            match self.call(&to, message.clone(), is_sure).await {
                Ok(Told::Elsewhere(hint)) => {
                    first(left.make_contiguous(), hint.as_deref());
                    troubles.push(format!(
                        "{to} reports that {} leads",
                        hint.as_deref().unwrap_or("no server")
                    ));
                }
                Ok(Told::Trouble(Trouble::Unreachable(why))) | Err(Trouble::Unreachable(why)) => {
                    troubles.push(format!("{to}: {why}"));
                }
                Ok(Told::Trouble(Trouble::Unknown(why))) | Err(Trouble::Unknown(why)) => {
                    self.ask_last(&to);
                    if is_sure {
                        return Err(Trouble::Unknown(why));
                    }
                    troubles.push(why);
                }
                Ok(Told::Trouble(trouble)) | Err(trouble) => return Err(trouble),
                Ok(told) => {
                    first(&mut self.servers_mut(), Some(&to));
                    return Ok(told);
                }
            }
        }
        Err(Trouble::Unreachable(format!("no server leads: {}", troubles.join("; "))))
    }

    async fn call(&self, to: &str, message: Vec<u8>, is_sure: bool) -> Result<Told, Trouble> {
        let wait = if is_sure { SURE_WAIT } else { ASK_WAIT };
        match timeout(wait, self.wire.call(to, message)).await {
            Ok(answer) => {
                message::decode(&answer?).map_err(|error| Trouble::Unknown(error.to_string()))
            }
            Err(_) => Err(Trouble::Unknown(format!("{to} does not answer"))),
        }
    }

    async fn led(&self) -> Result<String, Trouble> {
        match self.ask(Ask::Lead).await? {
            Told::Leads(name) => Ok(name),
            other => Err(strange(&other)),
        }
    }

    fn servers(&self) -> Vec<String> {
        self.servers_mut().clone()
    }

    fn servers_mut(&self) -> MutexGuard<'_, Vec<String>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask_last(&self, name: &str) {
        self.servers_mut().sort_by_key(|it| it == name);
    }
}

/// Moves one name to the front, if it is in the list.
fn first(names: &mut [String], name: Option<&str>) {
    names.sort_by_key(|it| Some(it.as_str()) != name);
}

impl Members for Embedded {
    fn join<'a>(&'a self, name: &'a str) -> Later<'a, Host> {
        Box::pin(async {
            match self.ask(Ask::Join(name.to_owned())).await? {
                Told::Joined(host) => Ok(host),
                other => Err(strange(&other)),
            }
        })
    }

    fn clusters(&self) -> Later<'_, Vec<Cluster>> {
        Box::pin(async {
            match self.ask(Ask::Clusters).await? {
                Told::Clusters(clusters) => Ok(clusters),
                other => Err(strange(&other)),
            }
        })
    }

    fn read<'a>(&'a self, cluster: &'a Cluster) -> Later<'a, Known> {
        Box::pin(async {
            match self.ask(Ask::Read(cluster.clone())).await? {
                Told::Read(known) => Ok(known),
                other => Err(strange(&other)),
            }
        })
    }

    fn change<'a>(
        &'a self,
        cluster: &'a Cluster,
        from: Revision,
        to: &'a Record,
    ) -> Later<'a, Changed> {
        Box::pin(async move {
            match self.ask(Ask::Change(cluster.clone(), from, to.clone())).await? {
                Told::Changed(changed) => Ok(changed),
                other => Err(strange(&other)),
            }
        })
    }

    fn lease<'a>(&'a self, cluster: &'a Cluster, host: Host) -> Later<'a, Leased> {
        Box::pin(async move {
            match self.ask(Ask::Lease(cluster.clone(), host)).await? {
                Told::Leased(leased) => Ok(leased),
                other => Err(strange(&other)),
            }
        })
    }

    fn view<'a>(&'a self, cluster: &'a Cluster) -> Later<'a, View> {
        Box::pin(async {
            match self.ask(Ask::View(cluster.clone())).await? {
                Told::View(view) => Ok(view),
                other => Err(strange(&other)),
            }
        })
    }

    fn lead<'a>(&'a self, _name: &'a str) -> Later<'a, String> {
        Box::pin(self.led())
    }

    fn leader(&self) -> Later<'_, Option<String>> {
        Box::pin(async { self.led().await.map(Some) })
    }
}

fn strange(told: &Told) -> Trouble {
    Trouble::Refused(format!("a server sends an unexpected response: {told:?}"))
}
