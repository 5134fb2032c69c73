//! Running all VMs of a cluster on this host, from the newest global checkpoint.
//!
//! ```text
//!   no membership     firn cluster failover ----------------------------------> go_on     who asks knows that the primaries are gone
//!   with it           firn cluster failover --> the record says: here --.
//!                     a lease is over --------> the record says: here --+--> run_here     nobody else can send any more
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

/// How long what was under way may take to arrive after a failover, and how often that is asked.
const SETTLE_WAIT: Duration = Duration::from_secs(10);
const SETTLE_LOOK: Duration = Duration::from_millis(100);

/// By hand.
pub(super) async fn failover(agent: &Arc<Agent>, name: &VmName) -> Result<Record, Failure> {
    if agreed::is_agreed(agent) {
        return by_record(agent, name).await;
    }
    let mut sole = agent.together.locks.lock(name).await;
    go_on(agent, &mut sole, name, None).await
}

/// Hosts agree first, and do it then.
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

/// Hosts have agreed that all VMs run here, and what they send obeys the lease of this timeline. Nothing is done by a host that has no
/// copies: it is the first that runs them.
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
        let text = format!("cluster {name} is not protected: there is nothing here to go on from");
        return Err(Failure::new(FailureKind::Refused, text));
    }
    // Nothing is put on record any more, and nothing is let out by it.
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
        // They run here, whatever one of them says: hosts have agreed on it.
        Err(failure) if lease.is_some() => tracing::warn!("cluster {name}: {failure}"),
        left => drop(left?),
    }
    record.state = State::FailedOver;
    records.store(&record)?;
    Ok(record)
}

/// The VMs that have to be run, of which each can be. A failover that was cut short has run some.
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
                return Err(failure.hint(format!("`firn status {vm}` says more")));
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

/// Waits until what was under way has arrived. What has not by then is lost, as in any network.
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
    tracing::warn!("cluster {}: what was under way has not all arrived", record.name);
}
