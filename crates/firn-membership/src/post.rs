//! The shells around the cores of failover: a host that follows the register, and the controllers.
//!
//! ```text
//!   at every host, for each cluster: Post               where one leads: control
//!
//!     members.lease --- asked, register ---> Guard       members.view ---> Controller ---> members.change
//!                                              |                             (nothing is kept from one look to the next)
//!                 may_send?  <-----------------+
//!                 Hosts::stop, Hosts::run <----'
//! ```
//!
//! A host says nothing to the controller but that it is there: it asks for its lease. One that has failed to run a VM asks no more,
//! which is what a host does that died. A host that was fenced and has stopped is taken out of the fence when its lease is over.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firn_cluster::failover::{Action, Controller, Guard, Next, Register, Terms};
use firn_cluster::{Epoch, Generation, Host, Vm};
use tokio::time::{sleep, timeout};

use crate::{Changed, Cluster, Known, Later, Leased, Members, Record, Revision, Trouble, now};

/// How often the controllers look, and a host asks: so often within the time of a lease.
const LOOKS: u32 = 5;

/// What is done at a host.
pub trait Hosts: Send + Sync + 'static {
    /// Ends the VMs of a timeline, and drops what they have not sent; returns when they have ended.
    fn stop<'a>(&'a self, cluster: &'a Cluster, generation: Generation) -> Later<'a, ()>;

    /// Runs these VMs from their copies of these epochs.
    fn run<'a>(&'a self, cluster: &'a Cluster, start: &'a Start) -> Later<'a, ()>;
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
}

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
        Self { members, hosts, cluster, host, terms, guard }
    }

    /// Whether a frame may leave now. To be asked for every frame, right before it is sent.
    pub fn may_send(&self) -> bool {
        let guard = self.guard();
        guard.may_send(now())
    }

    /// Asks for the lease and does what the register says, until a VM could not be run, or stopped.
    ///
    /// # Errors
    /// Why not.
    pub async fn keep(&self) -> Result<(), Trouble> {
        loop {
            let asked = now();
            // An answer that comes later than that is worth nothing.
            match timeout(self.terms.ttl, self.members.lease(&self.cluster, self.host)).await {
                Ok(Ok(Leased::Granted(known))) => {
                    self.obey(known, |guard, register| guard.granted(asked, register)).await?;
                }
                Ok(Ok(Leased::Refused(known))) => {
                    self.obey(known, |guard, register| guard.learned(register)).await?;
                }
                Ok(Err(trouble)) => tracing::debug!("no lease of {}: {trouble}", self.cluster),
                Err(_) => tracing::debug!("no lease of {}: no answer", self.cluster),
            }
            sleep(self.terms.ttl / LOOKS).await;
        }
    }

    async fn obey(
        &self,
        known: Known,
        tell: impl FnOnce(&mut Guard, &Register) -> Vec<Action>,
    ) -> Result<(), Trouble> {
        if let Some(Err(trouble)) = known.record.as_ref().map(Record::check) {
            tracing::warn!("cluster {} is not obeyed: {trouble}", self.cluster);
            return Ok(());
        }
        let (actions, vms) = match known.record {
            Some(Record { register, vms }) => (tell(&mut self.guard(), &register), vms),
            // Clusters leave something behind when they end.
            None => (self.guard().unknown().into_iter().collect(), BTreeMap::new()),
        };
        for action in actions {
            match action {
                Action::Stop(generation) => self.hosts.stop(&self.cluster, generation).await?,
                // Nobody has to be told: it gets no lease, and the last one ends.
                Action::Stopped(_) => {}
                Action::Run { generation, vms: epochs } => {
                    let start = Start { generation, vms: epochs, names: vms.clone() };
                    self.hosts.run(&self.cluster, &start).await?;
                }
            }
        }
        Ok(())
    }

    fn guard(&self) -> MutexGuard<'_, Guard> {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the controllers of all clusters whenever the host of this name leads; for ever.
pub async fn control(members: Arc<dyn Members>, name: &str, terms: Terms) {
    let (mut troubles, mut missing) = (Troubles::default(), Missing::default());
    loop {
        if members.lead(name).await.is_ok_and(|leader| leader == name) {
            for cluster in members.clusters().await.unwrap_or_default() {
                let looked = look(&*members, &cluster, terms, &mut missing).await;
                troubles.note(&cluster, looked.err());
            }
        }
        sleep(terms.ttl / LOOKS).await;
    }
}

/// One look at a cluster, and one change at most.
async fn look(
    members: &dyn Members,
    cluster: &Cluster,
    terms: Terms,
    missing: &mut Missing,
) -> Result<(), String> {
    let view = members.view(cluster).await.map_err(|trouble| trouble.to_string())?;
    let Known { revision, record: Some(record) } = view.known else { return Ok(()) };
    record.check().map_err(|trouble| trouble.to_string())?;
    let next = Controller::new(record.register.clone(), view.leases).next();
    let is_backup = matches!(&next, Next::Propose(register) if register.layout != record.register.layout
        && register.generation == record.register.generation);
    if !missing.is_time(cluster, is_backup, terms, now()) {
        return Ok(());
    }
    match next {
        Next::Wait => Ok(()),
        Next::Propose(register) => {
            propose(members, cluster, revision, Record { register, vms: record.vms }).await
        }
        Next::Lost(vm) => {
            let name = record.vms.get(&vm).map_or("?", String::as_str);
            Err(format!(
                "{vm} ({name}) can't be had back: its host is lost, and no other one has a copy that counts"
            ))
        }
    }
}

/// Since when backups are missing. To take another one gives up the copies that the missing one has, and it may have been kept
/// waiting by a server that has just died, as its primary was.
#[derive(Default)]
struct Missing(BTreeMap<Cluster, Duration>);

impl Missing {
    /// Whether it is time to do what is next: at once, or if that is to take another backup, when it was next for as long as two leases.
    fn is_time(&mut self, cluster: &Cluster, is_backup: bool, terms: Terms, now: Duration) -> bool {
        if !is_backup {
            self.0.remove(cluster);
            return true;
        }
        let since = *self.0.entry(cluster.clone()).or_insert(now);
        now - since > 2 * terms.ttl
    }
}

async fn propose(
    members: &dyn Members,
    cluster: &Cluster,
    from: Revision,
    record: Record,
) -> Result<(), String> {
    let Register { generation, layout, fence, .. } = &record.register;
    let what =
        format!("generation {}, layout {layout}, {} hosts fenced", generation.0, fence.len());
    match members.change(cluster, from, &record).await {
        Ok(Changed::Done(_)) => tracing::info!("cluster {cluster}: {what}"),
        // Somebody else was quicker; the next look sees what it is.
        Ok(Changed::Other(_)) => {}
        Err(trouble) => return Err(trouble.to_string()),
    }
    Ok(())
}

/// What is told once, though it is seen again and again.
#[derive(Default)]
struct Troubles(BTreeMap<Cluster, String>);

impl Troubles {
    fn note(&mut self, cluster: &Cluster, trouble: Option<String>) {
        if let Some(trouble) = &trouble {
            if self.0.get(cluster) != Some(trouble) {
                tracing::warn!("cluster {cluster}: {trouble}");
            }
        }
        match trouble {
            Some(trouble) => drop(self.0.insert(cluster.clone(), trouble)),
            None => drop(self.0.remove(cluster)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_backup_that_is_missing_for_a_moment_is_kept() {
        let (mut missing, terms) = (Missing::default(), Terms { ttl: 3 * S, drift_ppm_max: 0 });
        let web = Cluster::new("web").unwrap();
        assert!(missing.is_time(&web, false, terms, 9 * S), "anything else is done at once");
        assert!(!missing.is_time(&web, true, terms, 10 * S));
        assert!(!missing.is_time(&web, true, terms, 16 * S));
        assert!(missing.is_time(&web, true, terms, 17 * S));
        missing.is_time(&web, false, terms, 18 * S);
        assert!(!missing.is_time(&web, true, terms, 19 * S), "it was there again");
    }
}
