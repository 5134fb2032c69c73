//! One of the servers: raft, and the requests to its leader.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firn_cluster::Host;
use firn_cluster::failover::Terms;
use tokio::time::{sleep, timeout};

use super::Wire;
use super::message::{self, Ask, Letter, Message, Reply, Rpc, Told};
use super::offices::Offices;
use super::running::{Running, number, run};
use super::state::{Done, Op, State};
use super::store::Store;
use crate::{Cluster, Known, Leased, Trouble, View, now};

/// Maximum time of a server for an answer: an election, and a disk that is busy.
pub(super) const ANSWER_WAIT: Duration = Duration::from_secs(3);

/// Time between two checks whether raft still runs, and the time until a store that failed is
/// opened again.
const LOOK_EVERY: Duration = Duration::from_millis(200);
const AGAIN_AFTER: Duration = Duration::from_secs(2);

/// A server of membership.
pub struct Server {
    me: String,
    directory: PathBuf,
    wire: Arc<dyn Wire>,
    offices: Mutex<Offices>,
    running: Mutex<Result<Running, Trouble>>,
}

/// Prepares this host to be one of these servers, of a new cluster of hosts.
///
/// # Errors
/// If it is one already, isn't one of them, or they are too few for a majority after the loss of
/// one.
pub fn found(directory: &Path, me: &str, servers: &[String]) -> Result<(), Trouble> {
    let numbered: BTreeMap<u64, String> =
        servers.iter().map(|name| (number(name), name.clone())).collect();
    if !servers.iter().any(|name| name == me) {
        return Err(Trouble::Refused(format!(
            "{me} is not one of the servers: {}",
            servers.join(", ")
        )));
    }
    if numbered.len() < 3 {
        return Err(Trouble::Refused(format!(
            "{} servers are too few: of two, none is a majority when the other is lost, and no server can tell a host that is lost from a \
             network that is cut. Give three; the third needs no VMs",
            numbered.len()
        )));
    }
    Store::found(directory, &numbered)
}

impl Server {
    /// Starts a server. The runtime must be multi-threaded.
    ///
    /// # Errors
    /// If this host was not [prepared](bootstrap_server), or its store can't be used.
    pub async fn begin(
        directory: &Path,
        me: &str,
        terms: Terms,
        wire: Arc<dyn Wire>,
    ) -> Result<Arc<Self>, Trouble> {
        let running = run(directory, me, &wire).await?;
        let server = Arc::new(Self {
            me: me.to_owned(),
            directory: directory.to_owned(),
            wire,
            offices: Mutex::new(Offices::new(terms)),
            running: Mutex::new(Ok(running)),
        });
        tokio::spawn(keep_running(Arc::downgrade(&server)));
        Ok(server)
    }

    /// The names of all servers.
    ///
    /// # Errors
    /// If it can't use its store.
    pub fn servers(&self) -> Result<Vec<String>, Trouble> {
        Ok(self.running()?.servers.into_values().collect())
    }

    /// Answers a message of the host of that name, or of this process.
    pub async fn answer(&self, from: Option<&str>, bytes: &[u8]) -> Vec<u8> {
        let answered = match message::decode(bytes) {
            Ok(Message::Ask(ask)) => message::encode(&self.asked(from, ask).await),
            Ok(Message::Raft(letter)) => self.told_by_raft(from, letter).await,
            Err(trouble) => message::encode(&Told::Trouble(trouble)),
        };
        // No client can decode an empty answer: it reports an error.
        answered.unwrap_or_default()
    }

    async fn told_by_raft(&self, from: Option<&str>, letter: Letter) -> Result<Vec<u8>, Trouble> {
        let Running { raft, servers, foundings, .. } = self.running()?;
        let name = from.unwrap_or(&self.me);
        if !servers.contains_key(&number(name)) {
            return Err(Trouble::Refused("it is none of the servers".to_owned()));
        }
        // On an error there is no answer: a refused server must not take this one for a server of
        // its own.
        foundings.meet((number(name), name), letter.from, letter.to).await?;
        let answer = match letter.rpc {
            Rpc::Append(rpc) => message::encode(&raft.append_entries(rpc).await),
            Rpc::Vote(rpc) => message::encode(&raft.vote(rpc).await),
            Rpc::Snapshot(rpc) => message::encode(&raft.install_snapshot(rpc).await),
        };
        message::encode(&Reply { from: foundings.own(), answer: answer? })
    }

    async fn asked(&self, from: Option<&str>, ask: Ask) -> Told {
        match timeout(ANSWER_WAIT, self.decide(from, ask)).await {
            Ok(Ok(told) | Err(told)) => told,
            Err(_) => {
                let wait = ANSWER_WAIT.as_secs();
                let text = format!("{} does not reach a majority within {wait} s", self.me);
                Told::Trouble(Trouble::Unknown(text))
            }
        }
    }

    async fn decide(&self, from: Option<&str>, ask: Ask) -> Result<Told, Told> {
        let running = self.running().map_err(Told::Trouble)?;
        match ask {
            Ask::Join(name) => {
                self.check(from.is_none_or(|from| from == name), "joins for another host")?;
                match running.write(Op::Join(name)).await? {
                    Done::Joined(Some(host)) => Ok(Told::Joined(host)),
                    _ => Err(refused("all numbers of hosts are taken: found the cluster anew")),
                }
            }
            Ask::Change(cluster, from, to) => {
                to.to_json().map_err(Told::Trouble)?;
                let leader = running.confirmed().await?;
                let are_there = running.seen(&leader, |state| state.has(&to.hosts()))?;
                self.check(are_there, "the record names a host that has never joined")?;
                match running.write(Op::Change(cluster, from, to)).await? {
                    Done::Changed(changed) => Ok(Told::Changed(changed)),
                    _ => Err(refused("a change that changed nothing")),
                }
            }
            Ask::Clusters => {
                let leader = running.confirmed().await?;
                Ok(Told::Clusters(running.seen(&leader, State::clusters)?))
            }
            Ask::Read(cluster) => {
                let leader = running.confirmed().await?;
                Ok(Told::Read(running.seen(&leader, |state| state.known(&cluster))?))
            }
            Ask::Lease(cluster, host) => self.lease(&running, from, &cluster, host).await,
            Ask::View(cluster) => self.view(&running, &cluster).await,
            Ask::Lead => {
                running.confirmed().await?;
                Ok(Told::Leads(self.me.clone()))
            }
        }
    }

    async fn lease(
        &self,
        running: &Running,
        from: Option<&str>,
        cluster: &Cluster,
        host: Host,
    ) -> Result<Told, Told> {
        let is_its = |name: &str| {
            running.machine.applied().state.names().get(&host).is_none_or(|it| it == name)
        };
        self.check(from.is_none_or(is_its), "asks for another host's lease")?;
        // A request of a fenced host is not noted: its lease would never expire.
        let early = running.machine.applied().state.known(cluster);
        if is_fenced(&early, host) {
            let leader = running.confirmed().await?;
            let known = running.seen(&leader, |state| state.known(cluster))?;
            return Ok(Told::Leased(Leased::Refused(known)));
        }
        self.offices().note(cluster, host, now());
        let leader = running.confirmed().await?;
        let known = running.seen(&leader, |state| state.known(cluster))?;
        if is_fenced(&known, host) {
            return Ok(Told::Leased(Leased::Refused(known)));
        }
        match self.offices().enter(cluster, leader.term, &known, now()) {
            true => Ok(Told::Leased(Leased::Granted(known))),
            false => Err(Told::Elsewhere(None)),
        }
    }

    async fn view(&self, running: &Running, cluster: &Cluster) -> Result<Told, Told> {
        let leader = running.confirmed().await?;
        let (known, names, there) = running.seen(&leader, |state| {
            (state.known(cluster), state.names().clone(), state.clusters())
        })?;
        let (mut offices, now) = (self.offices(), now());
        offices.retain(|cluster| there.contains(cluster));
        if !offices.enter(cluster, leader.term, &known, now) {
            return Err(Told::Elsewhere(None));
        }
        let leases = offices.not_over(cluster, now);
        Ok(Told::View(View { known, leases, names }))
    }

    fn check(&self, holds: bool, why: &str) -> Result<(), Told> {
        if holds { Ok(()) } else { Err(refused(why)) }
    }

    fn offices(&self) -> MutexGuard<'_, Offices> {
        self.offices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> Result<Running, Trouble> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_running(&self, running: Result<Running, Trouble>) {
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = running;
    }
}

/// Whether the host gets no lease.
fn is_fenced(known: &Known, host: Host) -> bool {
    known
        .record
        .as_ref()
        .is_none_or(|record| record.register.is_ended() || record.register.fence.contains(&host))
}

fn refused(why: &str) -> Told {
    Told::Trouble(Trouble::Refused(why.to_owned()))
}

/// Restarts raft, which ends when its store fails. It starts with the contents of the disk, as
/// after a crash, once the store can be used again.
async fn keep_running(server: std::sync::Weak<Server>) {
    loop {
        sleep(LOOK_EVERY).await;
        let Some(server) = server.upgrade() else { return };
        let why = match server.running() {
            Ok(running) => match running.has_failed() {
                None => continue,
                Some(why) => {
                    tracing::error!("this host is no server of the cluster for now: {why}");
                    server.set_running(Err(Trouble::Unreachable(why.clone())));
                    let _ = running.raft.shutdown().await;
                    why
                }
            },
            Err(trouble) => trouble.to_string(),
        };
        sleep(AGAIN_AFTER).await;
        match run(&server.directory, &server.me, &server.wire).await {
            Ok(running) => {
                tracing::info!("this host is a server of the cluster again");
                server.set_running(Ok(running));
            }
            Err(trouble) => {
                tracing::debug!("still no server: {trouble} (first: {why})");
                server.set_running(Err(trouble));
            }
        }
    }
}
