//! The reconcile loop of one cluster at this host: its cluster member, and the planned actions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use firn_cluster::Host;
use firn_membership::{Post, Record, Trouble, View};
use firn_supervisor::{FailureKind, MemberRequest, Request, VmName};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use super::again::Again;
use super::agreed::{RETRY, cluster, ours};
use super::due::{self, Deed, Here, due};
use super::local::Local;
use super::record::{self, Records};
use super::release;
use crate::agent::Agent;
use crate::detect::Health;
use crate::failover::{LOOKS, Ours, change, end, lock, newest};
use crate::host::HostName;

/// The reconcile loops of this agent, for clusters of several VMs.
#[derive(Default)]
pub(crate) struct Tending {
    tended: Mutex<BTreeMap<VmName, Tended>>,
    /// Clusters that could not be run here, and why.
    given_up: Mutex<BTreeMap<VmName, String>>,
}

struct Tended {
    post: Arc<Post>,
    task: AbortHandle,
}

/// Why a cluster could not be run on this host, if a failover here has failed.
pub(super) fn given_up(agent: &Agent, name: &VmName) -> Option<String> {
    lock(&agent.together.tending.given_up).get(name).cloned()
}

/// Forgets an earlier failure, so that this host tries again.
pub(super) fn takes_part_again(agent: &Agent, name: &VmName) {
    lock(&agent.together.tending.given_up).remove(name);
}

/// Starts the reconcile loop of a cluster, unless it runs already or has failed before.
pub(crate) fn tend(agent: &Arc<Agent>, name: &VmName) -> Option<Arc<Post>> {
    let Ours { members, terms, host } = agent.failover.ours()?;
    let agreed = &agent.together.tending;
    if lock(&agreed.given_up).contains_key(name) {
        return None;
    }
    let mut tended = lock(&agreed.tended);
    tended.retain(|_, it| !it.task.is_finished());
    if let Some(it) = tended.get(name) {
        return Some(Arc::clone(&it.post));
    }
    let local = Local::new(agent, name);
    let post = Post::new(members, Arc::new(local), cluster(name).ok()?, host, terms);
    let post = Arc::new(post);
    let task = tokio::spawn(keep(Arc::clone(agent), name.clone(), Arc::clone(&post)));
    tended.insert(name.clone(), Tended { post: Arc::clone(&post), task: task.abort_handle() });
    Some(post)
}

async fn keep(agent: Arc<Agent>, name: VmName, post: Arc<Post>) {
    tokio::select! {
        done = post.keep() => {
            if let Err(trouble) = done {
                tracing::error!("cluster {name} can't run here, so this host does nothing more for it: {trouble}");
                lock(&agent.together.tending.given_up).insert(name.clone(), trouble.to_string());
            }
        }
        () = look_after(&agent, &name, &post) => {}
    }
    // Later VMs of the same names must not use these leases.
    grant(&agent, &name, None);
}

pub(super) fn grant(agent: &Agent, name: &VmName, until: Option<(u32, Duration)>) {
    agent.place.members(name).iter().for_each(|vm| agent.vms.grant(vm, until));
}

async fn look_after(agent: &Arc<Agent>, name: &VmName, post: &Post) {
    let mut looked = Looked::default();
    loop {
        match look(agent, name, post, &mut looked).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(trouble) => {
                tracing::debug!("no action is planned for cluster {name}: {trouble}")
            }
        }
        let ttl = agent.membership.members().map_or(RETRY, |(_, terms)| terms.ttl);
        sleep(ttl / LOOKS).await;
    }
}

/// State that the loop retains from one run to the next.
#[derive(Default)]
struct Looked {
    deed: Deed,
    again: Again,
    /// Since when the epochs of a VM that runs here are not sent.
    unprotected: Option<Instant>,
}

impl Looked {
    /// Whether epochs have not been sent for so long that the cause is no loss of a backup: a lost
    /// host still has its lease for a while, and longer if an election came with the loss.
    fn is_cut_off(&mut self, here: &Here, are_heard: impl Fn() -> bool, ours: &Ours) -> bool {
        let since =
            here.is_unprotected().then(|| *self.unprotected.get_or_insert_with(Instant::now));
        self.unprotected = since;
        let ttl = ours.terms.ttl;
        since.is_some_and(|since| {
            let long = since.elapsed();
            long > 4 * ttl || (long > ttl && are_heard())
        })
    }
}

/// Whether the hosts that have copies are alive, as this host sees them.
fn are_heard(agent: &Agent, record: &Record, names: &BTreeMap<Host, String>) -> bool {
    let backups: BTreeSet<Host> =
        record.register.places.values().filter_map(|place| place.backup).collect();
    backups.iter().all(|host| {
        let name = names.get(host).and_then(|name| HostName::new(name.clone()).ok());
        let is_newest = name.as_ref().and_then(|name| newest(names, name)) == Some(*host);
        let health = name.and_then(|name| agent.peers.health(&name));
        is_newest && health.is_some_and(|it| *it.borrow() == Health::Alive)
    })
}

/// Observes once, and performs the planned action. Returns whether the loop continues.
async fn look(
    agent: &Arc<Agent>,
    name: &VmName,
    post: &Post,
    looked: &mut Looked,
) -> Result<bool, Trouble> {
    // A command may be changing the cluster.
    let Some(mut sole) = agent.together.locks.try_lock(name) else { return Ok(true) };
    if agent.place.members(name).iter().any(|vm| agent.is_claimed(vm)) {
        return Ok(true);
    }
    let ours = ours(agent)?;
    let cluster = cluster(name)?;
    let View { known, leases, names } = ours.members.view(&cluster).await?;
    let Some(record) = known.record else { return Ok(true) };
    let Some(mut here) = here(agent, name, &record, ours.host).await else { return Ok(true) };
    here.is_cut_off = looked.is_cut_off(&here, || are_heard(agent, &record, &names), &ours);
    let own = agent.config.name.as_str();
    let mine = names.iter().filter(|(host, it)| **host < ours.host && *it == own);
    let mine: BTreeSet<Host> = mine.map(|(host, _)| *host).collect();
    let deed = due(ours.host, &mine, &record, &leases, &here);
    if deed != looked.deed {
        tracing::info!("cluster {name}: {deed:?}, for {here:?}");
    }
    looked.deed = deed.clone();
    let register = &record.register;
    let next = match deed {
        Deed::Unback => register.backed_by(None),
        Deed::TakeUp(before) => register.taken_up(before, ours.host),
        Deed::Inherit(before) => register.inherited(before, ours.host),
        Deed::End => register.ended(),
        Deed::GiveUp => {
            if let Err(failure) = release::give_up(agent, &mut sole, name).await {
                tracing::warn!("copies of cluster {name} can't be dropped: {failure}");
            }
            return Ok(true);
        }
        Deed::Protect => {
            let called = register.primaries().into_iter().filter_map(|host| names.get(&host));
            let runs = called.filter_map(|it| HostName::new(it.clone()).ok()).collect();
            looked.again.ask(agent, name, &runs);
            return Ok(true);
        }
        Deed::Nothing => return Ok(!is_over(agent, name, &record, &here)),
        other => {
            drop(sole);
            perform(agent, name, post, &record, other).await;
            return Ok(true);
        }
    };
    let vms = if next.is_ended() { BTreeMap::new() } else { record.vms };
    change(&*ours.members, &cluster, known.revision, &Record { register: next, vms }).await?;
    Ok(true)
}

/// Whether nothing of an ended cluster is on this host any more. If so, its VMs are forgotten.
fn is_over(agent: &Agent, name: &VmName, record: &Record, here: &Here) -> bool {
    let obeys = |vm: &due::Vm| matches!(vm, due::Vm::Runs { lease: Some(_), .. });
    let is_over = record.register.is_ended() && !here.is_kept && !here.vms.values().any(obeys);
    if is_over {
        agent.place.members(name).iter().for_each(|vm| agent.place.forget_cluster(vm));
    }
    is_over
}

/// Observes the cluster on this host; `None` if its state cannot be read now.
async fn here(agent: &Arc<Agent>, name: &VmName, record: &Record, me: Host) -> Option<Here> {
    let mut vms: BTreeSet<VmName> = agent.place.members(name).into_iter().collect();
    let placed = record.register.places.iter().filter(|(_, place)| place.primary == me);
    let names = placed.filter_map(|(vm, _)| record.vms.get(vm));
    vms.extend(names.filter_map(|vm| VmName::new(vm.clone()).ok()));
    let state = Records::of(&agent.place).load(name).ok()?.map(|record| record.state);
    let is_kept = matches!(state, Some(record::State::Protected | record::State::FailingOver));
    let looked = agent.blocking(move |them| {
        let mut seen = BTreeMap::new();
        for vm in vms {
            let is = match them.status(&vm) {
                Ok(status) => due::Vm::of(&status),
                Err(failure) if failure.kind == FailureKind::NoSuchVm => due::Vm::Nothing,
                Err(failure) => return Err(failure),
            };
            seen.insert(vm, is);
        }
        Ok(seen)
    });
    looked.await.ok().map(|vms| Here { vms, is_kept, is_cut_off: false })
}

async fn perform(agent: &Arc<Agent>, name: &VmName, post: &Post, record: &Record, deed: Deed) {
    match deed {
        Deed::Yield => {
            post.yields(record.register.generation);
        }
        Deed::Fence(vm) => {
            let generation = record.register.generation.0;
            let why = format!("its cluster {name} continues elsewhere, in generation {generation}");
            end(agent, &vm, &why).await;
        }
        Deed::LetGo(vm) => let_go(agent, &vm).await,
        Deed::GoOn(vms) => {
            for vm in vms {
                let on = vm.clone();
                let done = agent.blocking(move |them| them.go_on(&on)).await;
                if let Err(failure) = done {
                    tracing::warn!("{vm} should release its output, and does not: {failure}");
                }
            }
        }
        _ => {}
    }
}

/// The cluster has ended: the VM continues by itself.
async fn let_go(agent: &Arc<Agent>, vm: &VmName) {
    let name = vm.clone();
    let done = agent.blocking(move |them| {
        them.ask(&name, &Request::ReleaseMember)?;
        them.ask(&name, &Request::Member(MemberRequest::Leave)).map(drop)
    });
    if let Err(failure) = done.await {
        tracing::warn!("{vm} should leave its cluster, and does not: {failure}");
    }
}
