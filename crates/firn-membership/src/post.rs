//! A host that follows the register of one cluster: the shell around `Guard`.
//!
//! ```text
//!   at every host that the record names: Post           where one leads: control
//!
//!     members.lease --- asked, register ---> Guard       members.view ---> Controller ---> members.change
//!                                              |                             (nothing is kept from one look to the next)
//!                 Hosts::may_send <------------+
//!                 Hosts::stop, Hosts::run <----'         one after another, while the lease is asked for on
//! ```
//!
//! A host says nothing to the controller but that it is there: it asks for its lease, if the record has it as a primary or a backup; others
//! look only. One that has failed to run a VM asks no more, which is what a host does that died; so does one that [yields](Post::yields). A host that was fenced and has
//! stopped is taken out of the fence when its lease is over.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firn_cluster::failover::{Action, Guard, Register, Terms};
use firn_cluster::{Epoch, Generation, Host, Vm};
use tokio::time::{sleep, timeout};

use crate::{Cluster, Known, Later, Leased, Members, Record, Trouble, now};

/// How often the controllers look, and a host asks: so often within the time of a lease.
pub(crate) const LOOKS: u32 = 5;

/// What is done at a host.
pub trait Hosts: Send + Sync + 'static {
    /// Ends the VMs of a timeline, and drops what they have not sent; returns when they have ended.
    fn stop<'a>(&'a self, cluster: &'a Cluster, generation: Generation) -> Later<'a, ()>;

    /// Runs these VMs from their copies of these epochs.
    fn run<'a>(&'a self, cluster: &'a Cluster, start: &'a Start) -> Later<'a, ()>;

    /// Frames of this timeline may leave until then, and no others: told whenever that has changed, before anything is done.
    fn may_send(&self, _cluster: &Cluster, _until: Option<(Generation, Duration)>) {}
}

/// What is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The timeline.
    pub generation: Generation,
    /// The VMs, and the epochs that they go on from.
    pub vms: BTreeMap<Vm, Epoch>,
    /// What VMs are called.
    pub names: BTreeMap<Vm, String>,
}

/// A host of one cluster.
pub struct Post {
    members: Arc<dyn Members>,
    hosts: Arc<dyn Hosts>,
    cluster: Cluster,
    host: Host,
    terms: Terms,
    guard: Mutex<Guard>,
    /// The newest record that was obeyed.
    known: Mutex<Option<Known>>,
    /// The timeline whose lease is not asked for any more.
    yielded: Mutex<Option<Generation>>,
}

/// Something that is being done.
type Work<'a> = Pin<Box<dyn Future<Output = Result<(), Trouble>> + Send + 'a>>;

impl Post {
    /// A host that runs nothing yet.
    pub fn new(
        members: Arc<dyn Members>,
        hosts: Arc<dyn Hosts>,
        cluster: Cluster,
        host: Host,
        terms: Terms,
    ) -> Self {
        let guard = Mutex::new(Guard::new(host, terms));
        let (known, yielded) = Default::default();
        Self { members, hosts, cluster, host, terms, guard, known, yielded }
    }

    /// Asks for no lease in this timeline any more, as if the host had died, and goes on to obey.
    pub fn yields(&self, generation: Generation) {
        *self.yielded.lock().unwrap_or_else(PoisonError::into_inner) = Some(generation);
    }

    /// Whether a frame of this timeline may leave now.
    pub fn may_send_in(&self, generation: Generation) -> bool {
        let guard = self.guard();
        guard.runs() == Some(generation) && guard.may_send(now())
    }

    /// Whether a frame may leave now. To be asked for every frame, right before it is sent.
    pub fn may_send(&self) -> bool {
        let guard = self.guard();
        guard.may_send(now())
    }

    /// The newest record that was obeyed; none if none was seen.
    pub fn known(&self) -> Option<Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks for the lease and does what the register says, until a VM could not be run, or stopped. Meanwhile it asks on.
    ///
    /// # Errors
    /// Why not.
    pub async fn keep(&self) -> Result<(), Trouble> {
        let (mut waiting, mut work): (VecDeque<Work<'_>>, Option<Work<'_>>) = Default::default();
        loop {
            waiting.extend(self.ask().await);
            let mut next = std::pin::pin!(sleep(self.terms.ttl / LOOKS));
            loop {
                work = work.or_else(|| waiting.pop_front());
                let Some(doing) = &mut work else {
                    next.await;
                    break;
                };
                tokio::select! {
                    done = doing => {
                        work = None;
                        done?;
                    }
                    () = &mut next => break,
                }
            }
        }
    }

    /// Asks once; gives back what is to be done by that.
    async fn ask(&self) -> Vec<Work<'_>> {
        let asked = now();
        let answer = async {
            match self.is_named() {
                true => self.members.lease(&self.cluster, self.host).await,
                false => self.members.read(&self.cluster).await.map(Leased::Refused),
            }
        };
        // An answer that comes later than that is worth nothing.
        match timeout(self.terms.ttl, answer).await {
            Ok(Ok(Leased::Granted(known))) => {
                self.obey(known, |guard, register| guard.granted(asked, register))
            }
            Ok(Ok(Leased::Refused(known))) => {
                self.obey(known, |guard, register| guard.learned(register))
            }
            Ok(Err(trouble)) => {
                tracing::debug!("no lease of {}: {trouble}", self.cluster);
                Vec::new()
            }
            Err(_) => {
                tracing::debug!("no lease of {}: no answer", self.cluster);
                Vec::new()
            }
        }
    }

    /// Whether the record has a place for this host.
    fn is_named(&self) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let record = known.as_ref().and_then(|known| known.record.as_ref());
        let yielded = *self.yielded.lock().unwrap_or_else(PoisonError::into_inner);
        let asks = |record: &&Record| yielded != Some(record.register.generation);
        record.filter(asks).is_some_and(|record| {
            let mut places = record.register.places.values();
            places.any(|place| place.primary == self.host || place.backup == Some(self.host))
        })
    }

    fn obey(
        &self,
        known: Known,
        tell: impl FnOnce(&mut Guard, &Register) -> Vec<Action>,
    ) -> Vec<Work<'_>> {
        if let Some(Err(trouble)) = known.record.as_ref().map(Record::check) {
            tracing::warn!("cluster {} is not obeyed: {trouble}", self.cluster);
            return Vec::new();
        }
        let mut guard = self.guard();
        let (actions, vms) = match &known.record {
            Some(Record { register, vms }) => (tell(&mut guard, register), vms.clone()),
            // Clusters leave something behind when they end.
            None => (guard.unknown().into_iter().collect(), BTreeMap::new()),
        };
        self.hosts.may_send(&self.cluster, guard.may_send_until());
        drop(guard);
        let mut newest = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.as_ref().is_none_or(|it| it.revision <= known.revision) {
            *newest = Some(known);
        }
        drop(newest);
        actions.into_iter().filter_map(|action| self.work(action, &vms)).collect()
    }

    fn work(&self, action: Action, names: &BTreeMap<Vm, String>) -> Option<Work<'_>> {
        match action {
            Action::Stop(generation) => Some(self.hosts.stop(&self.cluster, generation)),
            // Nobody has to be told: it gets no lease, and the last one ends.
            Action::Stopped(_) => None,
            Action::Run { generation, vms } => {
                let start = Start { generation, vms, names: names.clone() };
                Some(Box::pin(async move { self.hosts.run(&self.cluster, &start).await }))
            }
        }
    }

    fn guard(&self) -> MutexGuard<'_, Guard> {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
