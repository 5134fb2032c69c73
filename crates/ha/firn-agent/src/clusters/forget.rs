//! Ends the record of a cluster, or of one protected VM, whose hosts are all gone. Nothing else
//! would end it, and its name would stay taken.
//!
//! A power failure of all hosts leaves such a record: each agent starts as another host, and no VM
//! of the record exists any more. So does the loss of a VM's host together with its backup's host.
//! A VM of the record that appears later is ended on its host, as after a failover.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use firn_cluster::HostId;
use firn_control::api::{ForgottenRecord, VmView};
use firn_control::{HostHealth, HostName};
use firn_membership::{ClusterRecord, MembershipError, RecordView};
use firn_supervisor::{Failure, FailureKind, VmName};

use super::host_evidence::{HostEvidence, RecordedHost};
use super::membership_access::{change_record, record_name};
use super::release;
use crate::agent::Agent;
use crate::status;

/// How often the record is read again if other hosts change it meanwhile.
const ATTEMPTS_MAX: usize = 5;

/// Ends the record if all hosts that it names are gone.
pub(super) async fn forget_record(
    agent: &Arc<Agent>,
    name: &VmName,
) -> Result<ForgottenRecord, Failure> {
    let Some((members, _)) = agent.membership.store_and_timing() else {
        let text = format!("host {} has no membership", agent.config.name);
        let hint = format!("`firn release {name}` or `firn cluster release {name}` ends it here");
        return Err(Failure::new(FailureKind::Usage, text).with_hint(hint));
    };
    let mut sole = agent.clusters.locks.lock_cluster(name).await;
    let cluster = record_name(name).map_err(membership_failure)?;
    for _ in 0..ATTEMPTS_MAX {
        let RecordView { known, leases, names, .. } =
            members.read_view(&cluster).await.map_err(membership_failure)?;
        let Some(record) = known.record.filter(|it| !it.register.is_ended()) else {
            let text = format!("there is no record called {name}: the name is free");
            return Err(Failure::new(FailureKind::NoSuchVm, text));
        };
        let hosts = check_hosts_gone(agent, &record, &leases, &names).await?;
        let ended = change_record(&*members, &cluster, known.revision, &record.to_ended()).await;
        if ended.map_err(membership_failure)? {
            let grounds: Vec<String> =
                hosts.iter().map(|(host, why)| format!("host {host} {why}")).collect();
            tracing::warn!("{name} is forgotten: {}", grounds.join("; "));
            release::load_current(agent, &mut sole, name).await?;
            agent.clusters.forget_failures(name);
            return Ok(ForgottenRecord {
                name: name.clone(),
                vms: record.vms.into_values().collect(),
                hosts,
            });
        }
    }
    let text = format!("the record of {name} changes all the time: some host works on it");
    Err(Failure::new(FailureKind::Busy, text)
        .with_hint("`firn cluster status` shows it; ask again"))
}

fn membership_failure(trouble: MembershipError) -> Failure {
    let failure = Failure::new(FailureKind::Host, trouble.to_string());
    failure.with_hint("`firn cluster status` shows which hosts answer")
}

/// Returns each host that the record names, with the reason why nothing of the record runs there.
async fn check_hosts_gone(
    agent: &Arc<Agent>,
    record: &ClusterRecord,
    leases: &BTreeSet<HostId>,
    names: &BTreeMap<HostId, String>,
) -> Result<BTreeMap<String, String>, Failure> {
    let vms: BTreeSet<&str> = record.vms.values().map(String::as_str).collect();
    let mut rests = BTreeMap::new();
    for host in record.named_hosts() {
        let called = names.get(&host);
        let named = RecordedHost {
            host: format!("{} ({})", called.map_or("?", String::as_str), host.0),
            has_lease: leases.contains(&host),
            seen: observe_host(agent, called, &vms).await,
        };
        let why = named
            .describe_absence()
            .map_err(|(why, hint)| Failure::new(FailureKind::Refused, why).with_hint(hint))?;
        rests.insert(named.host, why);
    }
    Ok(rests)
}

async fn observe_host(
    agent: &Arc<Agent>,
    host: Option<&String>,
    vms: &BTreeSet<&str>,
) -> HostEvidence {
    let Some(host) = host.and_then(|name| HostName::new(name.clone()).ok()) else {
        return HostEvidence::NoPeer;
    };
    let listed = if host == agent.config.name {
        status::list_vms(agent).await.ok()
    } else {
        let Some(peer) = agent.peers.peer_views().into_iter().find(|peer| peer.name == host) else {
            return HostEvidence::NoPeer;
        };
        if peer.health == HostHealth::Lost {
            return HostEvidence::Lost(peer.heard_s);
        }
        status::list_vms_in_time(Arc::clone(agent), host).await
    };
    let Some(listed) = listed else { return HostEvidence::Silent };
    let has = listed.into_iter().filter(|vm| vms.contains(vm.name.as_str()) && is_of_a_record(vm));
    HostEvidence::Has(has.map(|vm| (vm.name.to_string(), vm.state)).collect())
}

/// Whether it is a standby, or obeys a lease. A VM that obeys none was released, or was started
/// after the VM of the record had ended.
fn is_of_a_record(vm: &VmView) -> bool {
    vm.state == "standby" || (vm.state != "ended" && vm.lease.is_some())
}
