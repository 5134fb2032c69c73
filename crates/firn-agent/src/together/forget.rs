//! Ends the record of a cluster, or of one protected VM, whose hosts are all gone. Nothing else
//! would end it, and its name would stay taken.
//!
//! A power failure of all hosts leaves such a record: each agent starts as another host, and no VM
//! of the record exists any more. So does the loss of a VM's host together with its backup's host.
//! A VM of the record that appears later is ended on its host, as after a failover.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use firn_cluster::Host;
use firn_membership::{Record, Trouble, View};
use firn_supervisor::{Failure, FailureKind, VmName};

use super::rests::{Named, Seen};
use super::tend::takes_part_again;
use super::{agreed, release};
use crate::agent::Agent;
use crate::api::{Forgotten, VmView};
use crate::cluster;
use crate::detect::Health;
use crate::failover::change;
use crate::host::HostName;

/// How often the record is read again if other hosts change it meanwhile.
const TRIES: usize = 5;

/// Ends the record if all hosts that it names are gone.
pub(super) async fn forget(agent: &Arc<Agent>, name: &VmName) -> Result<Forgotten, Failure> {
    let Some((members, _)) = agent.membership.members() else {
        let text = format!("host {} has no membership", agent.config.name);
        let hint = format!("`firn release {name}` or `firn cluster release {name}` ends it here");
        return Err(Failure::new(FailureKind::Usage, text).hint(hint));
    };
    let mut sole = agent.together.locks.lock(name).await;
    let cluster = agreed::cluster(name).map_err(trouble)?;
    for _ in 0..TRIES {
        let View { known, leases, names } = members.view(&cluster).await.map_err(trouble)?;
        let Some(record) = known.record.filter(|it| !it.register.is_ended()) else {
            let text = format!("there is no record called {name}: the name is free");
            return Err(Failure::new(FailureKind::NoSuchVm, text));
        };
        let hosts = rests_on(agent, &record, &leases, &names).await?;
        let ended = change(&*members, &cluster, known.revision, &record.ended()).await;
        if ended.map_err(trouble)? {
            tracing::warn!("{name} is forgotten: {hosts:?}");
            release::kept(agent, &mut sole, name).await?;
            takes_part_again(agent, name);
            agent.failover.forget(name);
            return Ok(Forgotten {
                name: name.clone(),
                vms: record.vms.into_values().collect(),
                hosts,
            });
        }
    }
    let text = format!("the record of {name} changes all the time: some host works on it");
    Err(Failure::new(FailureKind::Busy, text).hint("`firn cluster status` shows it; ask again"))
}

fn trouble(trouble: Trouble) -> Failure {
    let failure = Failure::new(FailureKind::Host, trouble.to_string());
    failure.hint("`firn cluster status` shows which hosts answer")
}

/// Returns each host that the record names, with the reason why nothing of the record runs there.
async fn rests_on(
    agent: &Arc<Agent>,
    record: &Record,
    leases: &BTreeSet<Host>,
    names: &BTreeMap<Host, String>,
) -> Result<BTreeMap<String, String>, Failure> {
    let vms: BTreeSet<&str> = record.vms.values().map(String::as_str).collect();
    let mut rests = BTreeMap::new();
    for host in record.hosts() {
        let called = names.get(&host);
        let named = Named {
            host: format!("{} ({})", called.map_or("?", String::as_str), host.0),
            has_lease: leases.contains(&host),
            seen: seen(agent, called, &vms).await,
        };
        let why = named
            .describe()
            .map_err(|(why, hint)| Failure::new(FailureKind::Refused, why).hint(hint))?;
        rests.insert(named.host, why);
    }
    Ok(rests)
}

async fn seen(agent: &Arc<Agent>, host: Option<&String>, vms: &BTreeSet<&str>) -> Seen {
    let Some(host) = host.and_then(|name| HostName::new(name.clone()).ok()) else {
        return Seen::NoPeer;
    };
    let listed = if host == agent.config.name {
        cluster::vms(agent).await.ok()
    } else {
        let Some(peer) = agent.peers.views().into_iter().find(|peer| peer.name == host) else {
            return Seen::NoPeer;
        };
        if peer.health == Health::Lost {
            return Seen::Lost(peer.heard_s);
        }
        cluster::vms_in_time(Arc::clone(agent), host).await
    };
    let Some(listed) = listed else { return Seen::Silent };
    let has = listed.into_iter().filter(|vm| vms.contains(vm.name.as_str()) && is_of_a_record(vm));
    Seen::Has(has.map(|vm| (vm.name.to_string(), vm.state)).collect())
}

/// Whether it is a standby, or obeys a lease. A VM that obeys none was released, or was started
/// after the VM of the record had ended.
fn is_of_a_record(vm: &VmView) -> bool {
    vm.state == "standby" || (vm.state != "ended" && vm.lease.is_some())
}
