//! Creation of a cluster: its VMs are located, and the addresses of their cards read.

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use firn_cluster::Generation;
use firn_control::api::CreateCluster;
use firn_control::{ClusterState, ClusterVm, HostName, StoredCluster};
use firn_supervisor::{
    Failure, FailureContext as _, FailureKind, MemberCard, MemberRequest, SupervisorRequest, VmName,
};

use super::ask_vms::with_vm_context;
use super::cluster_store::ClusterStore;
use super::release;
use super::remote_vm::{ASK_WAIT, RemoteVm};
use crate::agent::Agent;

/// Maximum number of VMs of a cluster.
const VMS_MAX: usize = 64;

pub(super) async fn create_cluster(
    agent: &Arc<Agent>,
    wanted: CreateCluster,
) -> Result<StoredCluster, Failure> {
    let CreateCluster { name, vms } = wanted;
    let mut sole = agent.clusters.locks.lock_cluster(&name).await;
    let records = ClusterStore::from_paths(&agent.paths);
    let before = release::load_current(agent, &mut sole, &name).await?;
    if let Some(ClusterState::Protected | ClusterState::FailingOver) =
        before.as_ref().map(|it| it.state)
    {
        let text = format!("there is a cluster {name} already, and it is protected");
        return Err(Failure::new(FailureKind::Busy, text).with_hint(format!(
            "`firn cluster release {name}` ends that; `firn cluster forget {name}` does if all its hosts are gone"
        )));
    }
    let names: BTreeSet<&VmName> = vms.iter().map(|(vm, _)| vm).collect();
    if vms.is_empty() || vms.len() > VMS_MAX || names.len() < vms.len() {
        let text = format!("a cluster has 1 to {VMS_MAX} VMs, each with its own name");
        return Err(Failure::new(FailureKind::Usage, text));
    }
    let mut placed = Vec::new();
    for (vm, host) in vms {
        placed.push(locate_vm(agent, vm, host).await?);
    }
    let record = build_cluster(&name, placed, before.as_ref())?;
    records.store_cluster(&record)?;
    Ok(record)
}

/// Makes a cluster of these VMs, which no host protects yet.
pub(super) fn build_cluster(
    name: &VmName,
    vms: Vec<ClusterVm>,
    before: Option<&StoredCluster>,
) -> Result<StoredCluster, Failure> {
    let macs: BTreeSet<_> = vms.iter().map(|placed| placed.mac).collect();
    if macs.len() < vms.len() {
        let text = "two of the VMs have the same Ethernet address";
        return Err(
            Failure::new(FailureKind::Refused, text).with_hint("give each `-device ...,mac=`")
        );
    }
    let generation = before.map_or(Generation(0), |before| before.generation);
    // A random number, so that frames of another cluster of this name are not taken for its own.
    let id = RandomState::new().hash_one(name) as u32;
    let (name, state, interval_ms, term) = (name.clone(), ClusterState::Made, 100, 0);
    let (checkpoint, trouble) = (None, None);
    Ok(StoredCluster { name, id, state, interval_ms, term, generation, vms, checkpoint, trouble })
}

/// Locates a VM on another host, and reads the address of its card.
pub(super) async fn locate_vm(
    agent: &Arc<Agent>,
    vm: VmName,
    host: Option<HostName>,
) -> Result<ClusterVm, Failure> {
    let host = match host {
        Some(host) => host,
        None => find_host(agent, &vm).await?,
    };
    if host == agent.config.name {
        let text = format!("{vm} runs on this host, which is to be the backup");
        let hint = "create the cluster on a host that runs none of its VMs";
        return Err(Failure::new(FailureKind::Usage, text).with_hint(hint));
    }
    agent.peer_address(&host)?;
    let mac = firn_cluster::switch::MacAddress::BROADCAST;
    let placed = ClusterVm { vm, host, mac };
    let asked = RemoteVm::new(agent, &placed)
        .ask_supervisor(SupervisorRequest::Member(MemberRequest::Card), ASK_WAIT)
        .await;
    let card = asked.map_err(|failure| with_vm_context(&placed, failure))?;
    let MemberCard { mac, .. } = serde_json::from_value(card).while_doing("reading the answer")?;
    Ok(ClusterVm { mac, ..placed })
}

async fn find_host(agent: &Arc<Agent>, vm: &VmName) -> Result<HostName, Failure> {
    let all = crate::status::collect_status(agent).await?.vms;
    let runs = all.into_iter().filter(|it| it.name == *vm && it.state != "standby");
    let hosts: Vec<HostName> = runs.map(|it| it.host).collect();
    match &hosts[..] {
        [host] => Ok(host.clone()),
        [] => {
            Err(Failure::new(FailureKind::NoSuchVm, format!("no host that answers has a VM {vm}")))
        }
        _ => {
            let text = format!("several hosts have a VM {vm}");
            Err(Failure::new(FailureKind::Usage, text).with_hint(format!("give --vm {vm}@HOST")))
        }
    }
}
