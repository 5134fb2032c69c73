//! Membership without another server: raft between the agents.
//!
//! ```text
//!   any host                          the server that leads               the other servers
//!     Embedded --- Ask, by a Wire ---> Server ------ raft, by a Wire ----> Server
//!       ^                                | store: log and vote, on disk      | store
//!       '------ Told, or Elsewhere ------' state: records, hosts             | state
//!                                          offices: leases, in memory
//! ```
//!
//! Three hosts or more are servers; any host may ask. With a majority of them, records can be read and changed, and leases be granted.
//! Without one, nothing can: VMs whose leases end run on and aren't heard, and nothing fails over. Of two hosts none is a
//! majority, so two are refused ([`found`]).
//!
//! Leases are not in the log (`offices`): a new leader counts all of them from its own beginning.

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
    /// How raft is used here.
    pub Types: D = state::Op, R = state::Done, SnapshotData = Cursor<Vec<u8>>,
);

/// How long one server may take: for a change, longer than it takes by itself; for what may be asked of another one as well, no
/// longer than a server needs that is there.
const SURE_WAIT: Duration = server::ANSWER_WAIT.saturating_add(Duration::from_millis(500));
const ASK_WAIT: Duration = Duration::from_millis(1500);

/// How messages get to a server.
pub trait Wire: Send + Sync + 'static {
    /// Sends one to the server of that name, and brings its answer. [`Trouble::Unreachable`] says that it was not sent.
    fn call<'a>(&'a self, to: &'a str, message: Vec<u8>) -> Later<'a, Vec<u8>>;
}

/// Membership by the servers among the agents.
pub struct Embedded {
    wire: Arc<dyn Wire>,
    /// In the order in which they are asked: who led is the first, and who kept somebody waiting the last.
    servers: Mutex<Vec<String>>,
}

impl Embedded {
    /// To ask these servers.
    pub fn new(servers: Vec<String>, wire: Arc<dyn Wire>) -> Self {
        Self { wire, servers: Mutex::new(servers) }
    }

    /// Asks whoever leads.
    async fn ask(&self, ask: Ask) -> Result<Told, Trouble> {
        let is_sure = matches!(ask, Ask::Change(..));
        let message = message::encode(&Message::Ask(ask))?;
        let (mut left, mut troubles) = (VecDeque::from(self.servers()), Vec::new());
        while let Some(to) = left.pop_front() {
            match self.call(&to, message.clone(), is_sure).await {
                Ok(Told::Elsewhere(hint)) => {
                    first(left.make_contiguous(), hint.as_deref());
                    troubles.push(format!(
                        "{to} says that {} leads",
                        hint.as_deref().unwrap_or("nobody")
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

/// Moves one to the beginning, if it is there.
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
    Trouble::Refused(format!("a server answers something else than was asked: {told:?}"))
}
