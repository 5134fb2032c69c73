//! The record of a cluster: which host may run its VMs, and which agent manages them at this host.
//!
//! ```text
//!   host c: firn cluster protect shop                        the record "shop" (firn-membership)
//!     begin_record: its VMs run where they do, no copies -> { web: a, db: b }
//!     a, b: acquire_lease: the record names the host,
//!           the lease is held <--------------------------->
//!     the first global checkpoint is in the file of c
//!     record_backup --------------------------------------> { web: a, backup c; db: b, backup c }
//!                                                                 |  the lease of a expires
//!     run_here: all VMs, from the newest checkpoint <------ { web: c; db: c; generation + 1 }
//!     a, b: VMs that continue there are ended <------------      |  when a and b can't send
//! ```
//!
//! Each host that has VMs or copies of the cluster has one
//! [`ClusterMember`](firn_membership::ClusterMember), which requests one lease for all its VMs
//! there. Beside it a reconcile loop carries out the planned actions
//! ([`reconcile`](super::reconcile)). Which VMs belong to the cluster is stored in their runtime
//! directories ([`AgentPaths::cluster_of`](crate::paths::AgentPaths::cluster_of)), so that an agent
//! that starts again knows them.
//!
//! The generation in frames is taken from the layout of the record, which each protection and each
//! failover changes. The record's own generation changes with a failover only: a VM that runs in an
//! older one is ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use firn_cluster::failover::{Place, Register};
use firn_cluster::{Generation, Host, Vm};
use firn_membership::{Cluster, Record, Trouble, View};
use firn_supervisor::{Failure, FailureKind, VmName};
use tokio::time::{Instant, sleep};

use super::record::{self, Placed};
use super::tend::{takes_part_again, tend};
use crate::agent::Agent;
use crate::failover::{Ours, change, newest};
use crate::host::HostName;

/// Time between two tries, where another component has to act first.
pub(super) const RETRY: Duration = Duration::from_millis(100);

/// Whether this agent has membership, and so clusters have records.
pub(super) fn is_agreed(agent: &Agent) -> bool {
    agent.membership.members().is_some()
}

pub(super) fn ours(agent: &Agent) -> Result<Ours, Trouble> {
    let none = || Trouble::Unreachable("this agent has not joined membership yet".to_owned());
    agent.failover.ours().ok_or_else(none)
}

pub(super) fn cluster(name: &VmName) -> Result<Cluster, Trouble> {
    Cluster::new(name.as_str())
}

/// The generation in frames that a change of the record begins.
fn timeline(register: &Register) -> Generation {
    Generation(u32::try_from(register.layout + 1).unwrap_or(u32::MAX))
}

/// Repeats an attempt until it succeeds or is refused, at most for the time of a failover.
async fn tried<T, F: Future<Output = Result<Option<T>, Trouble>>>(
    agent: &Agent,
    what: &str,
    mut try_it: impl FnMut(Ours) -> F,
) -> Result<T, Failure> {
    let ttl = agent.membership.members().map_or(RETRY, |(_, terms)| terms.ttl);
    let (until, mut why) = (Instant::now() + 6 * ttl, "no server has answered".to_owned());
    while Instant::now() < until {
        let tried = match ours(agent) {
            Ok(ours) => try_it(ours).await,
            Err(trouble) => Err(trouble),
        };
        match tried {
            Ok(Some(done)) => return Ok(done),
            Ok(None) => "something else has to happen first".clone_into(&mut why),
            Err(Trouble::Refused(text)) => return Err(Failure::new(FailureKind::Busy, text)),
            Err(trouble) => why = trouble.to_string(),
        }
        sleep(RETRY).await;
    }
    let failure = Failure::new(FailureKind::Host, format!("{what}: {why}"));
    Err(failure.hint(
        "`firn cluster status` shows which hosts answer; `firn cluster forget` ends the record if all its hosts are gone",
    ))
}

/// Records where the VMs run, and that there are no copies. Returns the generation in frames that
/// begins, and whether the cluster had a record before.
pub(super) async fn begun(
    agent: &Agent,
    of: &record::Record,
) -> Result<(Generation, bool), Failure> {
    let what = format!("{} gets no record", of.name);
    tried(agent, &what, |ours| async move {
        let cluster = cluster(&of.name)?;
        let View { known, names, .. } = ours.members.view(&cluster).await?;
        let Some(places) = places(of, &names) else { return Ok(None) };
        let vms = of.numbered().map(|(vm, placed)| (vm, placed.vm.to_string())).collect();
        let was_there = known.record.as_ref().is_some_and(|it| !it.register.is_ended());
        let register = match &known.record {
            None => Register::new(places),
            Some(record) if record.register.is_ended() => record.register.again(places),
            Some(record) if record.vms != vms => return Err(taken(&of.name)),
            // One of its agents was started again, and has to adopt its VM.
            Some(record) if is_elsewhere(&record.register, &places) => return Ok(None),
            Some(record) => record.register.backed_by(None),
        };
        let begins = (timeline(&register), was_there);
        let to = Record { register, vms };
        Ok(change(&*ours.members, &cluster, known.revision, &to).await?.then_some(begins))
    })
    .await
}

fn taken(name: &VmName) -> Trouble {
    let text = format!(
        "there is a record of a cluster {name} of other VMs: `firn cluster release {name}` where it was made ends that, or \
         `firn cluster forget {name}` if all its hosts are gone"
    );
    Trouble::Refused(text)
}

/// Places each VM at the most recently started agent of its host; `None` if one has no number.
fn places(of: &record::Record, names: &BTreeMap<Host, String>) -> Option<BTreeMap<Vm, Place>> {
    let place = |(vm, placed): (Vm, &Placed)| {
        Some((vm, Place { primary: newest(names, &placed.host)?, backup: None }))
    };
    of.numbered().map(place).collect()
}

fn is_elsewhere(register: &Register, places: &BTreeMap<Vm, Place>) -> bool {
    let primaries = |places: &BTreeMap<Vm, Place>| -> Vec<Host> {
        places.values().map(|place| place.primary).collect()
    };
    primaries(&register.places) != primaries(places) || !register.fence.is_empty()
}

/// Whether no host has changed the record since a protection began in that generation. If seeding
/// takes long, the controller names a backup, which does not have copies by that.
fn is_unchanged(register: &Register, begun: Generation) -> bool {
    let is_named = register.places.values().any(|place| place.backup.is_some());
    match is_named && !register.is_protected() {
        true => timeline(register) == begun.next(),
        false => timeline(register) == begun,
    }
}

/// Records this host as the backup of all VMs, so that it may run them from now on: it has a global
/// checkpoint of the generation that was begun.
pub(super) async fn backed(agent: &Arc<Agent>, of: &record::Record) -> Result<(), Failure> {
    for placed in &of.vms {
        belongs(agent, &placed.vm, &of.name)?;
    }
    let what = format!("{} does not fail over yet", of.name);
    tried(agent, &what, |ours| async move {
        let cluster = cluster(&of.name)?;
        let View { known, .. } = ours.members.view(&cluster).await?;
        let over = || Trouble::Refused(format!("{} was changed by another host", of.name));
        let record = known.record.ok_or_else(over)?;
        let register = &record.register;
        let is_here = register.places.values().all(|place| place.backup == Some(ours.host));
        if is_here && register.is_protected() {
            return Ok(Some(()));
        }
        if !is_unchanged(register, of.generation) {
            return Err(over());
        }
        let to = Record { register: record.register.backed_by(Some(ours.host)), ..record };
        Ok(change(&*ours.members, &cluster, known.revision, &to).await?.then_some(()))
    })
    .await?;
    tend(agent, &of.name);
    Ok(())
}

/// Stores with a VM which cluster it belongs to.
fn belongs(agent: &Agent, vm: &VmName, cluster: &VmName) -> Result<(), Failure> {
    let kept = agent.place.set_cluster(vm, cluster);
    kept.map_err(|error| Failure::from_error(FailureKind::Other, &error))
        .map_err(|failure| failure.while_doing(format!("noting that {vm} belongs to {cluster}")))
}

/// Acquires the lease that is to cover the frames of a VM of a cluster, and returns its generation.
/// By then the record names this host as the VM's primary.
pub(crate) async fn lease_for(
    agent: &Arc<Agent>,
    name: &VmName,
    vm: &VmName,
) -> Result<u32, Failure> {
    if !is_agreed(agent) {
        let text = format!(
            "host {} has no membership, and {name} is a cluster of hosts that have",
            agent.config.name
        );
        let hint = "give its agent's configuration the [membership] of the others";
        return Err(Failure::new(FailureKind::Host, text).hint(hint));
    }
    belongs(agent, vm, name)?;
    takes_part_again(agent, name);
    tried(agent, &format!("{vm} gets no lease"), |ours| async move {
        let cluster = cluster(name)?;
        let known = ours.members.read(&cluster).await?;
        let Some(Record { register, vms }) = known.record else { return Ok(None) };
        let number = vms.iter().find(|(_, it)| *it == vm.as_str()).map(|(number, _)| number);
        let place = number.and_then(|number| register.places.get(number));
        let is_here = place.is_some_and(|place| place.primary == ours.host);
        let post = tend(agent, name);
        let holds = post.is_some_and(|post| post.may_send_in(register.generation));
        Ok((is_here && holds).then_some(register.generation.0))
    })
    .await
}

/// Ends the record of a cluster, if it has one.
pub(super) async fn ended(agent: &Agent, name: &VmName) -> Result<(), Failure> {
    if !is_agreed(agent) {
        return Ok(());
    }
    tried(agent, &format!("the record of {name} stays"), |ours| async move {
        let cluster = cluster(name)?;
        let known = ours.members.read(&cluster).await?;
        let Some(record) = known.record.filter(|it| !it.register.is_ended()) else {
            return Ok(Some(()));
        };
        let is_done = change(&*ours.members, &cluster, known.revision, &record.ended()).await?;
        Ok(is_done.then_some(()))
    })
    .await
}

/// Whether the record of a cluster has ended.
pub(super) async fn is_over(agent: &Agent, name: &VmName) -> Result<bool, Failure> {
    if !is_agreed(agent) {
        return Ok(false);
    }
    tried(agent, &format!("{name} is not known"), |ours| async move {
        let known = ours.members.read(&cluster(name)?).await?;
        Ok(Some(known.record.is_some_and(|record| record.register.is_ended())))
    })
    .await
}

/// Records that all VMs run on this host, unless the record has that already. They are run when no
/// other host can send any more.
pub(super) async fn fails_over(agent: &Arc<Agent>, name: &VmName) -> Result<(), Failure> {
    takes_part_again(agent, name);
    tried(agent, &format!("{name} does not fail over"), |ours| async move {
        let cluster = cluster(name)?;
        let View { known, leases, .. } = ours.members.view(&cluster).await?;
        let not_here = || {
            let text =
                "its record does not name this host as the backup of all its VMs";
            Trouble::Refused(format!("{name} can't be run here: {text}"))
        };
        let record = known.record.ok_or_else(not_here)?;
        let places = &record.register.places;
        let is_here = |host: Option<Host>| host == Some(ours.host);
        if !places.is_empty() && places.values().all(|place| is_here(Some(place.primary))) {
            return Ok(Some(()));
        }
        if places.is_empty() || !places.values().all(|place| is_here(place.backup)) {
            return Err(not_here());
        }
        // This host's own lease may just be requested.
        let Some(register) = record.register.failed_over(&leases) else { return Ok(None) };
        let to = Record { register, ..record };
        Ok(change(&*ours.members, &cluster, known.revision, &to).await?.then_some(()))
    })
    .await?;
    tend(agent, name);
    Ok(())
}

/// Returns the VMs of a cluster, and the hosts that run them, as its record names them.
pub(super) async fn known(
    agent: &Agent,
    name: &VmName,
) -> Result<Vec<(VmName, HostName)>, Failure> {
    if !is_agreed(agent) {
        return Ok(Vec::new());
    }
    tried(agent, &format!("{name} is not known"), |ours| async move {
        let View { known, names, .. } = ours.members.view(&cluster(name)?).await?;
        let Some(Record { register, vms }) = known.record else { return Ok(Some(Vec::new())) };
        let at = |(vm, place): (&Vm, &Place)| {
            let vm = VmName::new(vms.get(vm)?.clone()).ok()?;
            Some((vm, HostName::new(names.get(&place.primary)?.clone()).ok()?))
        };
        Ok(Some(register.places.iter().filter_map(at).collect()))
    })
    .await
}

#[cfg(test)]
mod tests {
    use firn_cluster::failover::{Controller, Next};

    use super::*;

    const BACKUP: Host = Host(2);

    #[test]
    fn a_backup_that_the_controller_names_has_no_copies() {
        let place = Place { primary: Host(1), backup: None };
        let begun = Register::new(BTreeMap::from([(Vm(0), place)]));
        let since = timeline(&begun);
        let hosts = [Host(1), BACKUP].into();
        let Next::Propose(named) = Controller::new(begun.clone(), hosts).next() else {
            panic!("no backup is named")
        };
        assert_eq!(named.places[&Vm(0)].backup, Some(BACKUP));
        assert!(!named.is_protected() && is_unchanged(&named, since));
        let backed = named.backed_by(Some(BACKUP));
        assert!(backed.is_protected() && !is_unchanged(&backed, since));
        assert!(is_unchanged(&begun, since));
        assert!(!is_unchanged(&begun.backed_by(Some(BACKUP)), since), "by another host");
        assert!(!is_unchanged(&begun.backed_by(None), since), "another host has begun");
    }
}
