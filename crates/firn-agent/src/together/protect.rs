//! Protection of all VMs of a cluster by this host.

use std::sync::Arc;

use firn_supervisor::{Context as _, Failure, FailureKind, MemberRequest, Request, VmName};
use tokio::task::JoinSet;

use super::create::{found, made};
use super::cuts::Cutting;
use super::far::{ASK_WAIT, Far};
use super::record::{Record, Records, State};
use super::sole::Sole;
use super::{about, agreed, all, release};
use crate::agent::Agent;

/// Returns when there is a global checkpoint, and all VMs can be run here.
pub(super) async fn protect(
    agent: &Arc<Agent>,
    name: &VmName,
    interval_ms: u64,
) -> Result<Record, Failure> {
    // Held while the copies are seeded, which may take an hour: the lock of this cluster only.
    let mut sole = agent.together.locks.lock(name).await;
    let records = Records::of(&agent.place);
    let mut record = to_protect(agent, &mut sole, &records, name).await?;
    record.term += 1;
    let was_there;
    (record.generation, was_there) = match agreed::is_agreed(agent) {
        true => agreed::begun(agent, &record).await?,
        false => (record.generation.next(), false),
    };
    (record.interval_ms, record.checkpoint) = (interval_ms, None);
    records.store(&record)?;
    if let Err(failure) = begin(agent, &record).await {
        // No failover is possible yet: each VM continues alone.
        release::undo(agent, &mut sole, record, was_there).await;
        return Err(failure);
    }
    record.state = State::Protected;
    records.store(&record)?;
    let begun = Cutting::begin(agent, records.clone(), record.clone());
    let first = begun.order();
    *sole = Some(begun);
    let first = first.await;
    if !agreed::is_agreed(agent) {
        return first.and_then(|_| records.known(name));
    }
    // From then on this host may run them.
    let backed = match first {
        Ok(_) => agreed::backed(agent, &record).await,
        Err(failure) => Err(failure),
    };
    if let Err(failure) = backed {
        release::undo(agent, &mut sole, record, was_there).await;
        return Err(failure);
    }
    records.known(name)
}

/// Returns the cluster that is to be protected: the one stored here, or the one in the record,
/// whichever host created it.
async fn to_protect(
    agent: &Arc<Agent>,
    sole: &mut Sole,
    records: &Records,
    name: &VmName,
) -> Result<Record, Failure> {
    let kept = release::kept(agent, sole, name).await?;
    if let Some(State::Protected | State::FailingOver) = kept.as_ref().map(|it| it.state) {
        return Err(busy(format!("cluster {name} is protected already")));
    }
    let agreed = agreed::known(agent, name).await?;
    let is_moved = kept.as_ref().is_none_or(|kept| {
        let vms = || kept.vms.iter().zip(&agreed);
        let is_same = kept.vms.len() == agreed.len() && vms().all(|(it, (vm, _))| it.vm == *vm);
        is_same && vms().any(|(it, (_, host))| it.host != *host)
    });
    if is_moved && !agreed.is_empty() {
        let mut placed = Vec::new();
        for (vm, host) in agreed {
            placed.push(found(agent, vm, Some(host)).await?);
        }
        return made(name, placed, kept.as_ref());
    }
    match records.known(name)? {
        kept if kept.state == State::FailedOver => {
            Err(busy(format!("the VMs of {name} run on this host, which can't be their backup")))
        }
        kept => Ok(kept),
    }
}

fn busy(text: String) -> Failure {
    Failure::new(FailureKind::Busy, text).hint(
        "`firn cluster release` ends it, `firn cluster forget` if all its hosts are gone; `firn cluster create` on another host creates it there",
    )
}

/// Makes all VMs join the cluster, and protects them.
async fn begin(agent: &Arc<Agent>, record: &Record) -> Result<(), Failure> {
    let join = |vm| Request::Member(MemberRequest::Join(record.membership(vm)));
    all(agent, record, join, ASK_WAIT).await?;
    let mut begun = JoinSet::new();
    for placed in record.vms.clone() {
        let mut far = Far::new(agent, &placed);
        let interval_ms = record.interval_ms;
        let cluster = agreed::is_agreed(agent).then(|| record.name.clone());
        begun.spawn(async move {
            far.protect(interval_ms, cluster).await.map_err(|failure| about(&placed, failure))
        });
    }
    let mut ended = Ok(());
    while let Some(done) = begun.join_next().await {
        ended = ended.and(done.doing("protecting a VM").and_then(|done| done.map(drop)));
    }
    ended
}
