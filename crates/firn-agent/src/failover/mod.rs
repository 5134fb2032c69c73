//! Failover of single VMs without a person: a VM that another host protects is a cluster of one
//! VM. Its record is named after the VM.
//!
//! ```text
//!   firn protect web --backup b
//!     |                                                       the record of "web"
//!     v                                                         (firn-membership)
//!   acquire_lease: the record exists and names this host,
//!                  and this host holds the lease <--------->  { primary: a, backup: - }
//!   protect: epochs go to b, the lease covers the frames                |
//!   record_committed_backup: b has committed an epoch ----->  { primary: a, backup: b }
//!                                                                       |  a's lease expires
//!   at b: the ClusterMember runs the VM <------------------  { primary: b, generation + 1 }
//! ```
//!
//! Each VM that a record may name has a [`ClusterMember`], which requests the lease and obeys the
//! record. Beside it a reconcile loop carries out one planned action at a time ([`plan_action`]):
//! it keeps the record correct, and protects a VM that has lost its backup by another host. This
//! state is in memory only: an agent that starts adopts the VMs of its predecessor, unless another
//! host runs them.
//!
//! [`plan_action`]: reconcile::plan_action

mod by_hand;
mod due;
mod hosts;
mod tend;

pub(crate) use by_hand::fail_over;
pub(crate) use hosts::end;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use firn_cluster::failover::{Place, Register, Terms};
use firn_cluster::{Host, Vm};
use firn_membership::{Changed, Cluster, Members, Post, Record, Revision, Trouble, View, control};
use firn_supervisor::{Failure, FailureKind, PrimaryEnd, Status, VmName};
use serde_json::Value;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use crate::agent::Agent;
use crate::api::Protect;
use crate::host::HostName;
use crate::together;

/// Polls in the time of one lease: lease requests of a VM, and runs of its reconcile loop.
pub(crate) const LOOKS: u32 = 5;

/// Time between two tries, where another component has to act first.
const RETRY: Duration = Duration::from_millis(100);

/// Failover state of this agent, for the VMs of its host.
#[derive(Default)]
pub(crate) struct Failover {
    ours: OnceLock<Ours>,
    tended: Mutex<BTreeMap<VmName, Tended>>,
    /// VMs that could not be run on this host.
    given_up: Mutex<BTreeSet<VmName>>,
    /// Why a VM has no backup.
    troubles: Mutex<BTreeMap<VmName, String>>,
    /// The supervisor's answer when a VM was run on this host.
    ran: Mutex<BTreeMap<VmName, Value>>,
    /// The request by which a VM was protected last.
    wanted: Mutex<BTreeMap<VmName, Protect>>,
}

/// This host's access to membership: the store, the terms of leases, and this host's number.
#[derive(Clone)]
pub(crate) struct Ours {
    pub members: Arc<dyn Members>,
    pub terms: Terms,
    pub host: Host,
}

struct Tended {
    post: Arc<Post>,
    task: AbortHandle,
}

pub(crate) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Failover {
    /// Why a VM is not protected, though it should be.
    pub(crate) fn trouble(&self, vm: &VmName) -> Option<String> {
        lock(&self.troubles).get(vm).cloned()
    }

    /// Forgets failures of a VM whose record a user has ended.
    pub(crate) fn forget(&self, vm: &VmName) {
        lock(&self.given_up).remove(vm);
        lock(&self.troubles).remove(vm);
    }

    /// Returns the access to membership: `None` without membership, or before this host has joined.
    pub(crate) fn ours(&self) -> Option<Ours> {
        self.ours.get().cloned()
    }
}

/// Reconciles the VMs of this host, if membership is configured. Never returns.
pub(crate) async fn run(agent: Arc<Agent>) {
    let Some((members, terms)) = agent.membership.members() else {
        return std::future::pending().await;
    };
    let host = joined(&*members, agent.config.name.as_str(), terms).await;
    tracing::info!("this agent has joined membership as {host}");
    let _ = agent.failover.ours.set(Ours { members: Arc::clone(&members), terms, host });
    let name = agent.config.name.to_string();
    tokio::spawn(async move { control(members, &name, terms).await });
    loop {
        let statuses = agent.blocking(|vms| vms.list()).await.unwrap_or_default();
        let given_up = lock(&agent.failover.given_up).clone();
        let concerns = |it: &&Status| concerns(&agent, it) && !given_up.contains(&it.name);
        statuses.iter().filter(concerns).for_each(|it| drop(tend(&agent, &it.name)));
        let clusters = statuses.iter().filter_map(|it| agent.place.cluster_of(&it.name));
        clusters.collect::<BTreeSet<_>>().iter().for_each(|it| drop(together::tend(&agent, it)));
        sleep(terms.ttl / LOOKS).await;
    }
}

async fn joined(members: &dyn Members, name: &str, terms: Terms) -> Host {
    loop {
        match members.join(name).await {
            Ok(host) => return host,
            Err(trouble) => tracing::warn!("this agent can't join membership: {trouble}"),
        }
        sleep(terms.ttl / LOOKS).await;
    }
}

/// Whether a record of its own may cover the VM: the VM obeys a lease, or is a standby of another
/// host's VM.
fn concerns(agent: &Agent, status: &Status) -> bool {
    let is_member = status.standby.as_ref().is_some_and(|standby| standby.member);
    if is_member || agent.place.cluster_of(&status.name).is_some() {
        return false;
    }
    let is_standby = status.standby.is_some() && agent.place.origin(&status.name).is_some();
    let has_panicked = status.protection_end == Some(PrimaryEnd::Panicked);
    (status.lease.is_some() && (status.state != "ended" || has_panicked)) || is_standby
}

/// Starts the reconcile loop of a VM, unless it runs already.
fn tend(agent: &Arc<Agent>, vm: &VmName) -> Option<Arc<Post>> {
    let Ours { members, terms, host } = agent.failover.ours.get()?.clone();
    let cluster = Cluster::new(vm.as_str()).ok()?;
    let mut tended = lock(&agent.failover.tended);
    tended.retain(|_, it| !it.task.is_finished());
    if let Some(it) = tended.get(vm) {
        return Some(Arc::clone(&it.post));
    }
    let local = hosts::Local { agent: Arc::downgrade(agent), vm: vm.clone() };
    let post = Arc::new(Post::new(members, Arc::new(local), cluster, host, terms));
    let task = tokio::spawn(tend::keep(Arc::clone(agent), vm.clone(), Arc::clone(&post)));
    tended.insert(vm.clone(), Tended { post: Arc::clone(&post), task: task.abort_handle() });
    Some(post)
}

/// Acquires the lease that is to cover a VM's frames, and returns its generation. By then the
/// record names this host as the primary. Returns `None` without membership.
pub(crate) async fn lease_for(
    agent: &Arc<Agent>,
    wanted: &Protect,
) -> Result<Option<u32>, Failure> {
    let Some((_, terms)) = agent.membership.members() else { return Ok(None) };
    let vm = &wanted.vm;
    lock(&agent.failover.given_up).remove(vm);
    lock(&agent.failover.wanted).insert(vm.clone(), wanted.clone());
    // Two things may take long: the lease of an earlier generation has to expire, and the
    // membership servers may have to elect a leader.
    let (until, mut why) = (Instant::now() + 6 * terms.ttl, String::new());
    while Instant::now() < until {
        match primary(agent, vm).await {
            Ok(Some(generation)) => return Ok(Some(generation)),
            Ok(None) => "the lease is not held yet".clone_into(&mut why),
            Err(Trouble::Refused(text)) => return Err(refused(vm, text)),
            Err(trouble) => why = trouble.to_string(),
        }
        sleep(RETRY).await;
    }
    let failure = Failure::new(FailureKind::Host, format!("{vm} gets no lease: {why}"));
    Err(failure.hint("`firn cluster status` shows which hosts answer"))
}

fn refused(vm: &VmName, why: String) -> Failure {
    let failure = Failure::new(FailureKind::Busy, why);
    failure.hint(format!(
        "`firn release {vm}` there ends that; `firn cluster forget {vm}` does if that host and its backup's are gone"
    ))
}

/// Makes the record name this host as the primary; returns the generation once its lease is held.
async fn primary(agent: &Arc<Agent>, vm: &VmName) -> Result<Option<u32>, Trouble> {
    let none = || Trouble::Unreachable("this agent has not joined membership yet".to_owned());
    let Ours { members, host, .. } = agent.failover.ours.get().ok_or_else(none)?.clone();
    let cluster = Cluster::new(vm.as_str())?;
    let View { known, names, .. } = members.view(&cluster).await?;
    let place = Place { primary: host, backup: None };
    let places = BTreeMap::from([(Vm(0), place)]);
    let vms = BTreeMap::from([(Vm(0), vm.to_string())]);
    let begun = |register| Record { register, vms: vms.clone() };
    let next = match &known.record {
        None => begun(Register::new(places)),
        Some(record) if record.register.is_ended() => begun(record.register.again(places)),
        Some(record) => {
            let register = &record.register;
            let primary = register.primaries().first().copied().unwrap_or(host);
            if primary != host {
                let name = names.get(&primary).map_or("?", String::as_str);
                let text =
                    format!("{vm} is protected already, and runs at host {name} ({})", primary.0);
                return Err(Trouble::Refused(text));
            }
            let post = tend(agent, vm).ok_or_else(none)?;
            let holds = register.fence.is_empty() && post.may_send();
            return Ok(holds.then_some(register.generation.0));
        }
    };
    change(&*members, &cluster, known.revision, &next).await?;
    tend(agent, vm);
    Ok(None)
}

pub(crate) async fn change(
    members: &dyn Members,
    cluster: &Cluster,
    from: Revision,
    to: &Record,
) -> Result<bool, Trouble> {
    let changed = members.change(cluster, from, to).await?;
    Ok(matches!(changed, Changed::Done(_)))
}

/// Records the backup that has committed an epoch of a VM, so that it may run the VM from now on.
/// If the record cannot be changed now, the reconcile loop does it later.
pub(crate) async fn backed(agent: &Arc<Agent>, vm: &VmName, backup: &HostName) {
    lock(&agent.failover.troubles).remove(vm);
    let Some(ours) = agent.failover.ours.get() else { return };
    let until = Instant::now() + ours.terms.ttl;
    while Instant::now() < until {
        match record_backup(ours, vm, backup).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(trouble) => tracing::warn!("{vm} can't fail over to {backup} yet: {trouble}"),
        }
        sleep(RETRY).await;
    }
}

async fn record_backup(ours: &Ours, vm: &VmName, backup: &HostName) -> Result<bool, Trouble> {
    let cluster = Cluster::new(vm.as_str())?;
    let View { known, names, .. } = ours.members.view(&cluster).await?;
    let Some(record) = known.record else { return Ok(false) };
    let Some(backup) = newest(&names, backup) else { return Ok(false) };
    if record.register.primaries() != [ours.host].into() {
        return Ok(false);
    }
    let register = record.register.backed_by(Some(backup));
    change(&*ours.members, &cluster, known.revision, &Record { register, ..record }).await
}

/// Returns the number of the most recently started agent of a host.
pub(crate) fn newest(names: &BTreeMap<Host, String>, name: &HostName) -> Option<Host> {
    names.iter().rev().find(|(_, it)| *it == name.as_str()).map(|(host, _)| *host)
}
