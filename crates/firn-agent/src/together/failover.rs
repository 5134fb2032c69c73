//! Failover of a cluster: all its VMs run on this host, from the newest global checkpoint.
//!
//! ```text
//!   without membership    firn cluster failover -----------------------> run_from_checkpoint
//!                           (the user knows that the primaries are gone)
//!   with membership       firn cluster failover --> the record: here --.
//!                         a lease expires --------> the record: here --+--> run_here
//!                                                      (no other host can send any more)
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_cluster::Generation;
use firn_supervisor::{
    Context as _, FailoverMember, FailoverRequest, Failure, FailureKind, MemberCard, MemberRequest,
    Request, VmName,
};
use tokio::task::JoinSet;

use super::far::ASK_WAIT;
use super::record::{Placed, Record, Records, State};
use super::sole::{self, Sole};
use super::tend::given_up;
use super::{agreed, all};
use crate::agent::Agent;

/// How long frames that are under way may take to arrive after a failover, and the time between two
/// polls.
const SETTLE_WAIT: Duration = Duration::from_secs(10);
const SETTLE_LOOK: Duration = Duration::from_millis(100);

/// Fails a cluster over because a user requests it.
pub(super) async fn failover(agent: &Arc<Agent>, name: &VmName) -> Result<Record, Failure> {
    if agreed::is_agreed(agent) {
        return by_record(agent, name).await;
    }
    let mut sole = agent.together.locks.lock(name).await;
    go_on(agent, &mut sole, name, None).await
}

/// Requests the failover in the record, and waits until it is done.
async fn by_record(agent: &Arc<Agent>, name: &VmName) -> Result<Record, Failure> {
    let records = Records::of(&agent.place);
    records.known(name)?;
    agreed::fails_over(agent, name).await?;
    loop {
        let record = records.known(name)?;
        if record.state == State::FailedOver {
            return Ok(record);
        }
        if let Some(why) = given_up(agent, name) {
            let hint = format!("`firn cluster failover {name}` again runs those that do not run");
            return Err(Failure::new(FailureKind::Other, why).hint(hint));
        }
        tokio::time::sleep(SETTLE_LOOK).await;
    }
}

/// Runs all VMs here, as the record requires. Their output obeys the lease of this generation. A
/// host without copies does nothing: it is the first one that runs the VMs.
pub(super) async fn run_here(
    agent: &Arc<Agent>,
    name: &VmName,
    lease: Generation,
) -> Result<(), Failure> {
    let mut sole = agent.together.locks.lock(name).await;
    match Records::of(&agent.place).load(name)?.map(|record| record.state) {
        Some(State::Protected | State::FailingOver) => {
            let record = go_on(agent, &mut sole, name, Some(lease.0)).await?;
            let number = record.checkpoint.map_or(0, |checkpoint| checkpoint.number);
            tracing::warn!("cluster {name} runs here now, from global checkpoint {number}");
            Ok(())
        }
        _ => Ok(()),
    }
}

async fn go_on(
    agent: &Arc<Agent>,
    sole: &mut Sole,
    name: &VmName,
    lease: Option<u32>,
) -> Result<Record, Failure> {
    let records = Records::of(&agent.place);
    let state = records.known(name)?.state;
    if !matches!(state, State::Protected | State::FailingOver) {
        let text = format!("cluster {name} is not protected: there is no checkpoint here to run");
        return Err(Failure::new(FailureKind::Refused, text));
    }
    // From here on no checkpoint is recorded, so none releases output.
    sole::end(sole).await;
    let mut record = records.known(name)?;
    let waiting = standing_by(agent, &record).await?;
    if record.state == State::Protected {
        record.generation = record.generation.next();
        record.state = State::FailingOver;
        records.store(&record)?;
    }
    firn_fault::point("cluster.failover");
    run_all(agent, &record, waiting, lease).await?;
    let host = agent.config.name.clone();
    record.vms.iter_mut().for_each(|placed| placed.host = host.clone());
    settle(agent, &record).await;
    let left = all(agent, &record, |_| Request::Member(MemberRequest::Leave), ASK_WAIT).await;
    match left {
        // They run here, even if one of them reports a failure: the record requires it.
        Err(failure) if lease.is_some() => tracing::warn!("cluster {name}: {failure}"),
        left => drop(left?),
    }
    record.state = State::FailedOver;
    records.store(&record)?;
    Ok(record)
}

/// Returns the VMs that have to be run, after a check that each can be. A failover that was
/// interrupted has run some already.
async fn standing_by(
    agent: &Arc<Agent>,
    record: &Record,
) -> Result<Vec<(VmName, FailoverMember)>, Failure> {
    let generation = match record.state {
        State::Protected => record.generation.next(),
        _ => record.generation,
    };
    let mut waiting = Vec::new();
    for (number, Placed { vm, .. }) in record.numbered() {
        let none = || {
            let text = format!("there is no global checkpoint of {} yet", record.name);
            Failure::new(FailureKind::Refused, text)
        };
        let epoch = record.epoch(number).ok_or_else(none)?;
        let name = vm.clone();
        let status = agent.blocking(move |vms| vms.status(&name)).await?;
        match (&status.standby, record.state) {
            (Some(standby), _) if standby.committed >= epoch.0 && !standby.released => {
                waiting.push((vm.clone(), FailoverMember { epoch, generation }));
            }
            (None, State::FailingOver) if ["running", "paused"].contains(&&*status.state) => {}
            _ => {
                let text = format!("{vm} can't be run here from {epoch}: it is {}", status.state);
                let failure = Failure::new(FailureKind::Refused, text);
                return Err(failure.hint(format!("`firn status {vm}` shows more")));
            }
        }
    }
    Ok(waiting)
}

async fn run_all(
    agent: &Arc<Agent>,
    record: &Record,
    waiting: Vec<(VmName, FailoverMember)>,
    lease: Option<u32>,
) -> Result<(), Failure> {
    let mut begun = JoinSet::new();
    for (vm, to) in waiting {
        let agent = Arc::clone(agent);
        begun.spawn(async move {
            let how = FailoverRequest { lease, member: Some(to), accept_stopped: false };
            let request = Request::Failover(how);
            let name = vm.clone();
            let run = agent.blocking(move |vms| vms.ask(&name, &request)).await;
            run.map_err(|failure| failure.while_doing(format!("running {vm}")))
        });
    }
    let mut ended = Ok(());
    while let Some(done) = begun.join_next().await {
        ended = ended.and(done.doing("running a VM").and_then(|done| done.map(drop)));
    }
    ended.map_err(|failure| {
        let hint =
            format!("`firn cluster failover {}` again runs those that do not run", record.name);
        failure.hint(hint)
    })
}

/// Waits until frames that are under way have arrived. Later ones are lost, as in any network.
pub(super) async fn settle(agent: &Arc<Agent>, record: &Record) {
    let since = Instant::now();
    while since.elapsed() < SETTLE_WAIT {
        let cards = all(agent, record, |_| Request::Member(MemberRequest::Card), ASK_WAIT).await;
        let is_settled =
            |value| serde_json::from_value(value).is_ok_and(|it: MemberCard| it.is_settled);
        if cards.is_ok_and(|cards| cards.into_iter().all(is_settled)) {
            return;
        }
        tokio::time::sleep(SETTLE_LOOK).await;
    }
    tracing::warn!("cluster {}: not all frames under way have arrived", record.name);
}
