//! The controllers: the leading host polls each cluster, and changes its record if that is
//! necessary. They retain no state from one poll to the next that a successor would need.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use firn_cluster::failover::{Controller, Next, Register, Terms};
use tokio::time::sleep;

use crate::post::LOOKS;
use crate::{Changed, Cluster, Known, Members, Record, Revision, now};

/// Runs the controllers of all clusters while this host leads. Never returns.
pub async fn control(members: Arc<dyn Members>, name: &str, terms: Terms) {
    let (mut troubles, mut missing) = (Troubles::default(), Missing::default());
    loop {
        if members.lead(name).await.is_ok_and(|leader| leader == name) {
            for cluster in members.clusters().await.unwrap_or_default() {
                let looked = look(&*members, &cluster, terms, &mut missing).await;
                troubles.note(&cluster, looked.err());
            }
        }
        sleep(terms.ttl / LOOKS).await;
    }
}

/// Polls one cluster, and changes its record at most once.
async fn look(
    members: &dyn Members,
    cluster: &Cluster,
    terms: Terms,
    missing: &mut Missing,
) -> Result<(), String> {
    let view = members.view(cluster).await.map_err(|trouble| trouble.to_string())?;
    let Known { revision, record: Some(record) } = view.known else { return Ok(()) };
    record.check().map_err(|trouble| trouble.to_string())?;
    let next = Controller::new(record.register.clone(), view.leases).next();
    let is_backup = matches!(&next, Next::Propose(register) if register.layout != record.register.layout
        && register.generation == record.register.generation);
    if !missing.is_time(cluster, is_backup, terms, now()) {
        return Ok(());
    }
    match next {
        Next::Wait => Ok(()),
        Next::Propose(register) => {
            propose(members, cluster, revision, Record { register, vms: record.vms }).await
        }
        Next::Lost(vm) => {
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
struct Missing(BTreeMap<Cluster, Duration>);

impl Missing {
    /// Whether it is time for the next change: at once, or, if it chooses another backup, once it
    /// has been the next change for as long as two leases.
    fn is_time(&mut self, cluster: &Cluster, is_backup: bool, terms: Terms, now: Duration) -> bool {
        if !is_backup {
            self.0.remove(cluster);
            return true;
        }
        let since = *self.0.entry(cluster.clone()).or_insert(now);
        now - since > 2 * terms.ttl
    }
}

async fn propose(
    members: &dyn Members,
    cluster: &Cluster,
    from: Revision,
    record: Record,
) -> Result<(), String> {
    let Register { generation, layout, fence, .. } = &record.register;
    let what =
        format!("generation {}, layout {layout}, {} hosts fenced", generation.0, fence.len());
    match members.change(cluster, from, &record).await {
        Ok(Changed::Done(_)) => tracing::info!("cluster {cluster}: {what}"),
        // Another host was quicker; the next poll reads its change.
        Ok(Changed::Other(_)) => {}
        Err(trouble) => return Err(trouble.to_string()),
    }
    Ok(())
}

/// The newest failure of each cluster, so that it is logged once although it repeats.
#[derive(Default)]
struct Troubles(BTreeMap<Cluster, String>);

impl Troubles {
    fn note(&mut self, cluster: &Cluster, trouble: Option<String>) {
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
        let (mut missing, terms) = (Missing::default(), Terms { ttl: 3 * S, drift_ppm_max: 0 });
        let web = Cluster::new("web").unwrap();
        assert!(missing.is_time(&web, false, terms, 9 * S), "anything else is done at once");
        assert!(!missing.is_time(&web, true, terms, 10 * S));
        assert!(!missing.is_time(&web, true, terms, 16 * S));
        assert!(missing.is_time(&web, true, terms, 17 * S));
        missing.is_time(&web, false, terms, 18 * S);
        assert!(!missing.is_time(&web, true, terms, 19 * S), "it was there again");
    }
}
