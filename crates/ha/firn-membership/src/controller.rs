//! The controllers: the leading host polls each cluster, and changes its record if that is
//! necessary. They retain no state from one poll to the next that a successor would need.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use firn_cluster::failover::{ControllerDecision, FailoverController, FailoverRecord, LeaseTerms};
use tokio::time::sleep;

use crate::cluster_member::POLLS_PER_LEASE;
use crate::{
    ChangeResult, ClusterName, ClusterRecord, MembershipStore, Revision, VersionedRecord,
    read_boot_clock,
};

/// Runs the controllers of all clusters while this host leads. Never returns.
pub async fn run_controllers(members: Arc<dyn MembershipStore>, name: &str, terms: LeaseTerms) {
    let (mut troubles, mut missing) = (FailureLog::default(), MissingBackups::default());
    loop {
        if members.request_leadership(name).await.is_ok_and(|leader| leader == name) {
            for cluster in members.list_clusters().await.unwrap_or_default() {
                let polled = poll_cluster(&*members, &cluster, terms, &mut missing).await;
                troubles.record_failure(&cluster, polled.err());
            }
        }
        sleep(terms.ttl / POLLS_PER_LEASE).await;
    }
}

/// Polls one cluster, and changes its record at most once.
async fn poll_cluster(
    members: &dyn MembershipStore,
    cluster: &ClusterName,
    terms: LeaseTerms,
    missing: &mut MissingBackups,
) -> Result<(), String> {
    let view = members.read_view(cluster).await.map_err(|trouble| trouble.to_string())?;
    let VersionedRecord { revision, record: Some(record) } = view.known else { return Ok(()) };
    record.check_rules().map_err(|trouble| trouble.to_string())?;
    let next = FailoverController::new(record.register.clone(), view.leases).next_decision();
    let is_backup = matches!(&next, ControllerDecision::Propose(register) if register.layout != record.register.layout
        && register.generation == record.register.generation);
    if !missing.is_change_due(cluster, is_backup, terms, read_boot_clock()) {
        return Ok(());
    }
    match next {
        ControllerDecision::Wait => Ok(()),
        ControllerDecision::Propose(register) => {
            propose_record(members, cluster, revision, ClusterRecord { register, vms: record.vms })
                .await
        }
        ControllerDecision::Lost(vm) => {
            let name = record.vms.get(&vm).map_or("?", String::as_str);
            Err(format!(
                "{vm} ({name}) cannot be recovered: its host is lost, and no other host has a copy that counts"
            ))
        }
    }
}

/// Since when backups are missing. To choose another backup gives up the copies that the missing
/// one has, and that one may only have waited for a server that has just died, as its primary did.
#[derive(Default)]
struct MissingBackups(BTreeMap<ClusterName, Duration>);

impl MissingBackups {
    /// Whether it is time for the next change: at once, or, if it chooses another backup, once it
    /// has been the next change for as long as two leases.
    fn is_change_due(
        &mut self,
        cluster: &ClusterName,
        is_backup: bool,
        terms: LeaseTerms,
        now: Duration,
    ) -> bool {
        if !is_backup {
            self.0.remove(cluster);
            return true;
        }
        let since = *self.0.entry(cluster.clone()).or_insert(now);
        now - since > 2 * terms.ttl
    }
}

async fn propose_record(
    members: &dyn MembershipStore,
    cluster: &ClusterName,
    from: Revision,
    record: ClusterRecord,
) -> Result<(), String> {
    let FailoverRecord { generation, layout, fence, .. } = &record.register;
    let what =
        format!("generation {}, layout {layout}, {} hosts fenced", generation.0, fence.len());
    match members.change_record(cluster, from, &record).await {
        Ok(ChangeResult::Done(_)) => tracing::info!("cluster {cluster}: {what}"),
        // Another host was quicker; the next poll reads its change.
        Ok(ChangeResult::Other(_)) => {}
        Err(trouble) => return Err(trouble.to_string()),
    }
    Ok(())
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
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_backup_that_is_missing_for_a_moment_is_kept() {
        let (mut missing, terms) =
            (MissingBackups::default(), LeaseTerms { ttl: 3 * S, drift_ppm_max: 0 });
        let web = ClusterName::new("web").unwrap();
        assert!(missing.is_change_due(&web, false, terms, 9 * S), "anything else is done at once");
        assert!(!missing.is_change_due(&web, true, terms, 10 * S));
        assert!(!missing.is_change_due(&web, true, terms, 16 * S));
        assert!(missing.is_change_due(&web, true, terms, 17 * S));
        missing.is_change_due(&web, false, terms, 18 * S);
        assert!(!missing.is_change_due(&web, true, terms, 19 * S), "it was there again");
    }
}
