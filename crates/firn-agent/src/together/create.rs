//! Creation of a cluster: its VMs are located, and the addresses of their cards read.

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use firn_cluster::Generation;
use firn_supervisor::{
    Context as _, Failure, FailureKind, MemberCard, MemberRequest, Request, VmName,
};

use super::far::{ASK_WAIT, Far};
use super::record::{Placed, Record, Records, State};
use super::{VMS_MAX, about, release};
use crate::agent::Agent;
use crate::api::Create;
use crate::host::HostName;

pub(super) async fn create(agent: &Arc<Agent>, wanted: Create) -> Result<Record, Failure> {
    let Create { name, vms } = wanted;
    let mut sole = agent.together.locks.lock(&name).await;
    let records = Records::of(&agent.place);
    let before = release::kept(agent, &mut sole, &name).await?;
    if let Some(State::Protected | State::FailingOver) = before.as_ref().map(|it| it.state) {
        let text = format!("there is a cluster {name} already, and it is protected");
        return Err(Failure::new(FailureKind::Busy, text).hint(format!(
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
        placed.push(found(agent, vm, host).await?);
    }
    let record = made(&name, placed, before.as_ref())?;
    records.store(&record)?;
    Ok(record)
}

/// Makes a cluster of these VMs, which no host protects yet.
pub(super) fn made(
    name: &VmName,
    vms: Vec<Placed>,
    before: Option<&Record>,
) -> Result<Record, Failure> {
    let macs: BTreeSet<_> = vms.iter().map(|placed| placed.mac).collect();
    if macs.len() < vms.len() {
        let text = "two of the VMs have the same Ethernet address";
        return Err(Failure::new(FailureKind::Refused, text).hint("give each `-device ...,mac=`"));
    }
    let generation = before.map_or(Generation(0), |before| before.generation);
    // A random number, so that frames of another cluster of this name are not taken for its own.
    let id = RandomState::new().hash_one(name) as u32;
    let (name, state, interval_ms, term) = (name.clone(), State::Made, 100, 0);
    let (checkpoint, trouble) = (None, None);
    Ok(Record { name, id, state, interval_ms, term, generation, vms, checkpoint, trouble })
}

/// Locates a VM on another host, and reads the address of its card.
pub(super) async fn found(
    agent: &Arc<Agent>,
    vm: VmName,
    host: Option<HostName>,
) -> Result<Placed, Failure> {
    let host = match host {
        Some(host) => host,
        None => somewhere(agent, &vm).await?,
    };
    if host == agent.config.name {
        let text = format!("{vm} runs on this host, which is to be the backup");
        let hint = "create the cluster on a host that runs none of its VMs";
        return Err(Failure::new(FailureKind::Usage, text).hint(hint));
    }
    agent.address(&host)?;
    let mac = firn_cluster::switch::Mac::BROADCAST;
    let placed = Placed { vm, host, mac };
    let asked = Far::new(agent, &placed).ask(Request::Member(MemberRequest::Card), ASK_WAIT).await;
    let card = asked.map_err(|failure| about(&placed, failure))?;
    let MemberCard { mac, .. } = serde_json::from_value(card).doing("reading the answer")?;
    Ok(Placed { mac, ..placed })
}

async fn somewhere(agent: &Arc<Agent>, vm: &VmName) -> Result<HostName, Failure> {
    let all = crate::cluster::cluster(agent).await?.vms;
    let runs = all.into_iter().filter(|it| it.name == *vm && it.state != "standby");
    let hosts: Vec<HostName> = runs.map(|it| it.host).collect();
    match &hosts[..] {
        [host] => Ok(host.clone()),
        [] => {
            Err(Failure::new(FailureKind::NoSuchVm, format!("no host that answers has a VM {vm}")))
        }
        _ => {
            let text = format!("several hosts have a VM {vm}");
            Err(Failure::new(FailureKind::Usage, text).hint(format!("give --vm {vm}@HOST")))
        }
    }
}
