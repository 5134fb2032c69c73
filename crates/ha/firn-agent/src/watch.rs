//! Observes this host's VMs every two seconds, and all hosts while a page is open; and whether the
//! hosts' consensus answers.

use std::sync::Arc;
use std::time::Duration;

use firn_control::api::AgentStatus;
use firn_supervisor::Failure;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::agent::Agent;
use crate::membership::MembershipHealth;
use crate::status;

/// The time between two observations.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// The time between two checks of the consensus, and how long one may take.
const HEALTH_INTERVAL: Duration = Duration::from_secs(5);
const HEALTH_WAIT: Duration = Duration::from_secs(3);

/// The greatest age of a status that a page shows.
const STATUS_AGE_MAX: Duration = Duration::from_secs(5);

/// Observes for ever.
pub(crate) async fn watch_forever(agent: Arc<Agent>) {
    tokio::join!(watch_vms(&agent), watch_membership(&agent));
}

async fn watch_vms(agent: &Arc<Agent>) {
    let mut ticks = interval(WATCH_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match status::list_vms(agent).await {
            Ok(vms) => agent.observations.add_local_vms(&vms),
            Err(failure) => tracing::debug!("the VMs are not observed: {failure}"),
        }
        if agent.observations.is_viewed() {
            if let Err(failure) = observe_all(agent).await {
                tracing::debug!("the hosts are not observed: {failure}");
            }
        }
    }
}

async fn watch_membership(agent: &Arc<Agent>) {
    let mut ticks = interval(HEALTH_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let health = timeout(HEALTH_WAIT, agent.membership.check_health()).await;
        let silent = || Some(MembershipHealth::silent(HEALTH_WAIT));
        agent.observations.set_membership(health.unwrap_or_else(|_| silent()));
    }
}

/// The status of all hosts, as a page shows it: a few seconds old at most.
pub(crate) async fn recent_status(agent: &Arc<Agent>) -> Result<Arc<AgentStatus>, Failure> {
    agent.observations.note_view();
    match agent.observations.status_within(STATUS_AGE_MAX) {
        Some(status) => Ok(status),
        None => observe_all(agent).await,
    }
}

async fn observe_all(agent: &Arc<Agent>) -> Result<Arc<AgentStatus>, Failure> {
    let status = Arc::new(status::collect_status(agent).await?);
    agent.observations.add_status(Arc::clone(&status));
    Ok(status)
}
