//! The end of a cluster: its VMs continue, each by itself.

use std::sync::Arc;

use firn_supervisor::{Failure, FailureKind, MemberRequest, Request, VmName};

use super::failover::settle;
use super::far::{ASK_WAIT, RELEASE_WAIT};
use super::record::{Placed, Record, Records, State};
use super::sole::{self, Sole};
use super::{agreed, all, each};
use crate::agent::Agent;
use crate::vms::Vms;

pub(super) async fn release(agent: &Arc<Agent>, name: &VmName) -> Result<Record, Failure> {
    let mut sole = agent.together.locks.lock(name).await;
    let record = Records::of(&agent.place).known(name)?;
    match record.state {
        State::FailedOver if agreed::is_agreed(agent) => {
            // They obey the cluster's lease, though no host has copies of them.
            let left = let_go(agent, &record).await;
            left.and(agreed::ended(agent, name).await).map(|()| record)
        }
        State::FailingOver | State::FailedOver => {
            let text = format!("the VMs of {name} run on this host, each for itself");
            Err(Failure::new(FailureKind::Usage, text))
        }
        State::Made | State::Protected => ended(agent, &mut sole, record).await,
    }
}

async fn ended(agent: &Arc<Agent>, sole: &mut Sole, mut record: Record) -> Result<Record, Failure> {
    sole::end(sole).await;
    // From here on no host runs the VMs from its checkpoints, so each may be released by itself.
    (record.state, record.checkpoint) = (State::Made, None);
    Records::of(&agent.place).store(&record)?;
    let left = let_go(agent, &record).await;
    left.and(agreed::ended(agent, &record.name).await)?;
    no_copies(agent, &record).await?;
    Ok(record)
}

/// Undoes a protection that failed. If the cluster had a record before, the record stays, and the
/// VMs continue to obey its lease.
pub(super) async fn undo(agent: &Arc<Agent>, sole: &mut Sole, record: Record, was_there: bool) {
    let name = record.name.clone();
    let undone = match was_there {
        true => give_up(agent, sole, &name).await,
        false => ended(agent, sole, record).await.map(drop),
    };
    if let Err(left) = undone {
        tracing::warn!("cluster {name}: {left}");
    }
}

/// Drops the copies on this host: no record counts them as backups.
pub(super) async fn give_up(
    agent: &Arc<Agent>,
    sole: &mut Sole,
    name: &VmName,
) -> Result<(), Failure> {
    sole::end(sole).await;
    let records = Records::of(&agent.place);
    let mut record = records.known(name)?;
    (record.state, record.checkpoint) = (State::Made, None);
    records.store(&record)?;
    no_copies(agent, &record).await
}

/// Loads the stored cluster. If its record has ended, its copies are dropped first.
pub(super) async fn kept(
    agent: &Arc<Agent>,
    sole: &mut Sole,
    name: &VmName,
) -> Result<Option<Record>, Failure> {
    let records = Records::of(&agent.place);
    let kept = records.load(name)?;
    let state = kept.as_ref().map(|record| record.state);
    let counts = matches!(state, Some(State::Protected | State::FailingOver));
    if !counts || !agreed::is_over(agent, name).await? {
        return Ok(kept);
    }
    give_up(agent, sole, name).await?;
    records.load(name)
}

async fn no_copies(agent: &Arc<Agent>, record: &Record) -> Result<(), Failure> {
    for Placed { vm, .. } in record.vms.clone() {
        agent.blocking(move |vms| no_copy(vms, &vm)).await?;
    }
    Ok(())
}

/// Stops a standby of a cluster. After its VM continues alone it never runs, and would be in the
/// way of the next standby.
fn no_copy(vms: &dyn Vms, vm: &VmName) -> Result<(), Failure> {
    match vms.status(vm).ok().and_then(|status| status.standby) {
        Some(standby) if standby.member => vms.stop(vm),
        _ => Ok(()),
    }
}

/// Releases all VMs: their backups agree never to run them, their output is released, and each VM
/// leaves the cluster.
async fn let_go(agent: &Arc<Agent>, record: &Record) -> Result<(), Failure> {
    let release = || each(agent, record, |_| Request::ReleaseMember, RELEASE_WAIT);
    let mut released = release().await;
    // A VM whose standby was lost a moment ago may notice that only now, and not be released. The
    // second request needs no answer from a standby that does not count any more.
    if released.iter().any(|it| it.as_ref().is_err_and(|it| it.kind == FailureKind::Lost)) {
        released = release().await;
    }
    settle(agent, record).await;
    let left = all(agent, record, |_| Request::Member(MemberRequest::Leave), ASK_WAIT).await;
    // A VM that was not protected has nothing to be released from.
    let failed = released.into_iter().filter_map(Result::err);
    let mut failed = failed.filter(|failure| failure.kind != FailureKind::Usage);
    failed.next().map_or(Ok(()), Err).and(left.map(drop))
}
