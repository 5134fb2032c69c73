//! The controllers: the leading host polls each cluster, and changes its record if that is
//! necessary. They retain no state from one poll to the next that a successor would need.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use firn_cluster::HostId;
use firn_cluster::failover::{ControllerDecision, FailoverController, FailoverRecord};
use tokio::time::sleep;

use crate::cluster_member::POLLS_PER_LEASE;
use crate::timing::{AgentEvidence, FailoverTiming};
use crate::{
    ChangeResult, ClusterName, ClusterRecord, MembershipStore, RecordView, Revision,
    VersionedRecord, read_boot_clock,
};

/// Maximum number of changes of one record in one poll: the fence, its removal, and one more.
const CHANGES_MAX: u32 = 3;

/// Runs the controllers of all clusters while this host leads. Never returns.
pub async fn run_controllers(
    members: Arc<dyn MembershipStore>,
    name: &str,
    timing: FailoverTiming,
    evidence: Arc<dyn AgentEvidence>,
) {
    let mut controllers = Controllers {
        members: &*members,
        evidence: &*evidence,
        pending: PendingChanges::new(timing),
    };
    let mut troubles = FailureLog::default();
    loop {
        if members.request_leadership(name).await.is_ok_and(|leader| leader == name) {
            for cluster in members.list_clusters().await.unwrap_or_default() {
                let polled = controllers.update_record(&cluster).await;
                troubles.record_failure(&cluster, polled.err());
            }
        }
        sleep(timing.lease.ttl / POLLS_PER_LEASE).await;
    }
}

struct Controllers<'a> {
    members: &'a dyn MembershipStore,
    evidence: &'a dyn AgentEvidence,
    pending: PendingChanges,
}

impl Controllers<'_> {
    /// Changes the record of one cluster until nothing is due. The removal of a fence may be due at
    /// once: the lease of the fenced host was over before.
    async fn update_record(&mut self, cluster: &ClusterName) -> Result<(), String> {
        for _ in 0..CHANGES_MAX {
            if !self.poll_cluster(cluster).await? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Polls one cluster, and changes its record at most once. Returns whether it has changed.
    async fn poll_cluster(&mut self, cluster: &ClusterName) -> Result<bool, String> {
        let members = self.members;
        let view = members.read_view(cluster).await.map_err(|trouble| trouble.to_string())?;
        let VersionedRecord { revision, record: Some(record) } = &view.known else {
            return Ok(false);
        };
        record.check_rules().map_err(|trouble| trouble.to_string())?;
        let controller = FailoverController::new(record.register.clone(), view.leases.clone());
        let next = controller.next_decision();
        if let ControllerDecision::Lost(vm) = next {
            // Its backup may only have stalled: what was pending before stays pending.
            let name = record.vms.get(&vm).map_or("?", String::as_str);
            return Err(format!(
                "{vm} ({name}) cannot be recovered: its host is lost, and no other host has a copy that counts"
            ));
        }
        let kind = self.classify_change(&view, &record.register, &next);
        if !self.pending.is_change_due(cluster, kind, read_boot_clock()) {
            return Ok(false);
        }
        let ControllerDecision::Propose(register) = next else { return Ok(false) };
        let to = ClusterRecord { register, vms: record.vms.clone() };
        propose_record(members, cluster, *revision, to).await
    }

    fn classify_change(
        &self,
        view: &RecordView,
        now: &FailoverRecord,
        next: &ControllerDecision,
    ) -> ChangeKind {
        let ControllerDecision::Propose(next) = next else { return ChangeKind::Other };
        match (next.generation != now.generation, next.layout != now.layout) {
            (true, _) if self.is_loss_explained(view, now) => ChangeKind::Other,
            (true, _) => ChangeKind::UnexplainedFailover,
            (false, true) => ChangeKind::Backup,
            (false, false) => ChangeKind::Other,
        }
    }

    /// Whether a primary without a lease has given it up, or its agent has ended.
    fn is_loss_explained(&self, view: &RecordView, now: &FailoverRecord) -> bool {
        let has_ended =
            |host: &HostId| view.names.get(host).is_some_and(|name| self.evidence.has_ended(name));
        let primaries = now.primaries();
        let mut lost = primaries.iter().filter(|host| !view.leases.contains(host));
        lost.any(|host| view.given_up.contains(host) || has_ended(host))
    }
}

/// The kinds of changes that are not all due at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChangeKind {
    /// A failover from a host whose lease is over, and which may only have stalled.
    UnexplainedFailover,
    /// Another backup. To choose it gives up the copies that the missing one has, and that one may
    /// only have waited for a server that has just died, as its primary did.
    Backup,
    /// Any other change.
    Other,
}

/// Since when a change has been the next one of a cluster.
struct PendingChanges {
    timing: FailoverTiming,
    since: BTreeMap<ClusterName, (ChangeKind, Duration)>,
}

impl PendingChanges {
    fn new(timing: FailoverTiming) -> Self {
        Self { timing, since: BTreeMap::new() }
    }

    /// Whether it is time for the next change.
    fn is_change_due(&mut self, cluster: &ClusterName, kind: ChangeKind, now: Duration) -> bool {
        let delay = match kind {
            ChangeKind::UnexplainedFailover => self.timing.unexplained_delay(),
            ChangeKind::Backup => 2 * self.timing.patience(),
            ChangeKind::Other => {
                self.since.remove(cluster);
                return true;
            }
        };
        let pending = self.since.entry(cluster.clone()).or_insert((kind, now));
        if pending.0 != kind {
            *pending = (kind, now);
        }
        now - pending.1 >= delay
    }
}

async fn propose_record(
    members: &dyn MembershipStore,
    cluster: &ClusterName,
    from: Revision,
    record: ClusterRecord,
) -> Result<bool, String> {
    let FailoverRecord { generation, layout, fence, .. } = &record.register;
    let what =
        format!("generation {}, layout {layout}, {} hosts fenced", generation.0, fence.len());
    match members.change_record(cluster, from, &record).await {
        Ok(ChangeResult::Done(_)) => {
            tracing::info!("cluster {cluster}: {what}");
            Ok(true)
        }
        // Another host was quicker; the next poll reads its change.
        Ok(ChangeResult::Other(_)) => Ok(false),
        Err(trouble) => Err(trouble.to_string()),
    }
}

/// The newest failure of each cluster, so that it is logged once although it repeats.
#[derive(Default)]
struct FailureLog(BTreeMap<ClusterName, String>);

impl FailureLog {
    fn record_failure(&mut self, cluster: &ClusterName, trouble: Option<String>) {
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
    use firn_cluster::failover::LeaseTerms;

    use super::*;
    use crate::STALL_MAX;

    const S: Duration = Duration::from_secs(1);

    fn web() -> ClusterName {
        ClusterName::new("web").unwrap()
    }

    fn pending(lease_ms: u64, silence_ms: u64) -> PendingChanges {
        let ms = Duration::from_millis;
        let lease = LeaseTerms { ttl: ms(lease_ms), drift_ppm_max: 0 };
        PendingChanges::new(FailoverTiming { lease, silence: ms(silence_ms) })
    }

    #[test]
    fn a_backup_that_is_missing_for_a_moment_is_kept() {
        let mut pending = pending(6000, 0);
        assert!(pending.is_change_due(&web(), ChangeKind::Other, 9 * S), "at once");
        assert!(!pending.is_change_due(&web(), ChangeKind::Backup, 10 * S));
        assert!(!pending.is_change_due(&web(), ChangeKind::Backup, 21 * S));
        assert!(pending.is_change_due(&web(), ChangeKind::Backup, 22 * S));
        pending.is_change_due(&web(), ChangeKind::Other, 23 * S);
        assert!(!pending.is_change_due(&web(), ChangeKind::Backup, 24 * S), "it was there again");
    }

    #[test]
    fn a_primary_that_stalls_keeps_its_vms() {
        let (mut pending, ms) = (pending(800, 1500), Duration::from_millis);
        let failover = ChangeKind::UnexplainedFailover;
        // Its lease is over after 800 ms, so this is noticed after 800 to 960 ms.
        assert!(!pending.is_change_due(&web(), failover, ms(10_900)));
        assert!(!pending.is_change_due(&web(), failover, ms(11_500)));
        assert!(pending.is_change_due(&web(), failover, ms(11_600)), "it is lost");
        assert!(!pending.is_change_due(&web(), ChangeKind::Backup, ms(11_700)), "another change");
        assert!(!pending.is_change_due(&web(), failover, ms(11_800)), "counted anew");
    }

    #[test]
    fn a_lease_that_is_longer_than_the_silence_is_enough() {
        let (mut pending, failover) = (pending(3000, 1500), ChangeKind::UnexplainedFailover);
        assert!(!pending.is_change_due(&web(), failover, 10 * S), "frames may be on the way");
        assert!(pending.is_change_due(&web(), failover, 10 * S + STALL_MAX));
    }
}
