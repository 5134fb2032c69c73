//! Access to the records of the hosts: changes of a record, and attempts that are repeated.

use std::collections::BTreeMap;
use std::time::Duration;

use firn_cluster::failover::{FailoverRecord, VmPlacement};
use firn_cluster::{HostId, VmId};
use firn_control::HostName;
use firn_membership::{
    ChangeResult, ClusterName, ClusterRecord, FailoverTiming, MembershipError, MembershipStore,
    Revision,
};
use firn_supervisor::{Failure, FailureKind, VmName};
use tokio::time::{Instant, sleep};

use super::cluster_manager::{LocalNode, RETRY_INTERVAL};
use crate::agent::Agent;

/// Whether this agent has membership, and so clusters have records.
pub(super) fn has_membership(agent: &Agent) -> bool {
    agent.membership.store_and_timing().is_some()
}

pub(super) fn local_node(agent: &Agent) -> Result<LocalNode, MembershipError> {
    let none =
        || MembershipError::Unreachable("this agent has not joined membership yet".to_owned());
    agent.clusters.local_node().ok_or_else(none)
}

/// The failure of a command that can't read or change a record.
pub(super) fn membership_failure(trouble: MembershipError) -> Failure {
    let failure = Failure::new(FailureKind::Host, trouble.to_string());
    failure.with_hint("`firn cluster status` shows which hosts answer")
}

pub(super) async fn change_record(
    members: &dyn MembershipStore,
    cluster: &ClusterName,
    from: Revision,
    to: &ClusterRecord,
) -> Result<bool, MembershipError> {
    let changed = members.change_record(cluster, from, to).await?;
    Ok(matches!(changed, ChangeResult::Done(_)))
}

/// The register of a cluster that begins, where its name had no record or one that has ended.
pub(super) fn begin_register(
    before: Option<&ClusterRecord>,
    placements: BTreeMap<VmId, VmPlacement>,
) -> FailoverRecord {
    match before {
        None => FailoverRecord::new(placements),
        Some(ended) => ended.register.with_restart(placements),
    }
}

/// The record's name of a cluster.
pub(super) fn record_name(name: &VmName) -> Result<ClusterName, MembershipError> {
    ClusterName::new(name.as_str())
}

/// Returns the number of the most recently started agent of a host.
pub(super) fn newest_host(names: &BTreeMap<HostId, String>, name: &HostName) -> Option<HostId> {
    names.iter().rev().find(|(_, it)| *it == name.as_str()).map(|(host, _)| *host)
}

/// The time that a failover may take to begin: a fence, an election, and another lease.
pub(super) fn failover_wait(agent: &Agent) -> Duration {
    let patience = |(_, timing): (_, FailoverTiming)| timing.patience();
    6 * agent.membership.store_and_timing().map_or(RETRY_INTERVAL, patience)
}

/// Repeats an attempt until it succeeds or is refused, at most for the time of a failover.
pub(super) async fn retry_attempt<T, F: Future<Output = Result<Option<T>, MembershipError>>>(
    agent: &Agent,
    what: &str,
    mut try_it: impl FnMut(LocalNode) -> F,
) -> Result<T, Failure> {
    let (until, mut why) =
        (Instant::now() + failover_wait(agent), "no server has answered".to_owned());
    while Instant::now() < until {
        let tried = match local_node(agent) {
            Ok(ours) => try_it(ours).await,
            Err(trouble) => Err(trouble),
        };
        match tried {
            Ok(Some(done)) => return Ok(done),
            Ok(None) => "something else has to happen first".clone_into(&mut why),
            Err(MembershipError::Refused(text)) => {
                return Err(Failure::new(FailureKind::Busy, text));
            }
            Err(trouble) => why = trouble.to_string(),
        }
        sleep(RETRY_INTERVAL).await;
    }
    let failure = Failure::new(FailureKind::Host, format!("{what}: {why}"));
    Err(failure.with_hint(
        "`firn cluster status` shows which hosts answer; `firn cluster forget` ends the record if all its hosts are gone",
    ))
}
