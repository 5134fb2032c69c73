//! The status of this host's VMs, and of all hosts.

use std::sync::Arc;
use std::time::Duration;

use firn_control::api::{AgentStatus, VMS, VmView};
use firn_control::{HostHealth, HostName};
use firn_supervisor::{Failure, ProtectionEnd, StandbyStatus, VmName, VmStatus};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::agent::Agent;
use crate::peer_connection::PeerConnection;

/// How long a peer may take to list its VMs.
const LIST_WAIT: Duration = Duration::from_secs(4);

/// Collects the status of all hosts, and the VMs of those that answer.
pub(crate) async fn collect_status(agent: &Arc<Agent>) -> Result<AgentStatus, Failure> {
    let mut vms = list_vms(agent).await?;
    let peers = agent.peers.peer_views();
    let mut asked = JoinSet::new();
    for peer in peers.iter().filter(|peer| peer.health != HostHealth::Lost) {
        asked.spawn(list_vms_in_time(Arc::clone(agent), peer.name.clone()));
    }
    while let Some(reply) = asked.join_next().await {
        vms.extend(reply.ok().flatten().unwrap_or_default());
    }
    correct_advice(&mut vms);
    vms.sort_by(|one, other| (&one.name, &one.host).cmp(&(&other.name, &other.host)));
    let (host, listen) = (agent.config.name.clone(), agent.listen);
    let (networks, refused) = (agent.networks.network_views(), agent.rejections.counts_by_word());
    let drained = agent.paths.is_drained();
    Ok(AgentStatus { host, listen, peers, vms, networks, refused, drained })
}

/// The VMs of a peer, if it lists them in time.
pub(crate) async fn list_vms_in_time(agent: Arc<Agent>, peer: HostName) -> Option<Vec<VmView>> {
    match timeout(LIST_WAIT, fetch_vms(agent, peer)).await {
        Ok(Ok(vms)) => Some(vms),
        // Its heartbeat reports why it does not answer.
        Ok(Err(failure)) => {
            tracing::debug!("a host does not list its VMs: {failure}");
            None
        }
        Err(_) => {
            tracing::debug!("a host does not list its VMs within {} s", LIST_WAIT.as_secs());
            None
        }
    }
}

async fn fetch_vms(agent: Arc<Agent>, peer: HostName) -> Result<Vec<VmView>, Failure> {
    let mut link = PeerConnection::open(&agent.identity, &peer, agent.peer_address(&peer)?).await?;
    let mut vms: Vec<VmView> = link.get_json(VMS).await?;
    // A host reports its own VMs only.
    vms.retain(|vm| vm.host == peer);
    Ok(vms)
}

/// The VMs of this host.
pub(crate) async fn list_vms(agent: &Arc<Agent>) -> Result<Vec<VmView>, Failure> {
    let statuses = agent.run_blocking(|vms| vms.list_vms()).await;
    let statuses = statuses.map_err(|failure| failure.while_doing("listing VMs"))?;
    Ok(statuses.into_iter().map(|status| view_vm(agent, status)).collect())
}

fn view_vm(agent: &Agent, status: VmStatus) -> VmView {
    let primary = agent.paths.primary_host(&status.name).filter(|_| status.standby.is_some());
    let health = primary.as_ref().and_then(|host| agent.peers.health(host));
    let advice = match (&status.standby, &primary) {
        (Some(standby), Some(host)) => {
            let health = health.map_or(HostHealth::Lost, |health| *health.borrow());
            advise_owner(&status, standby, host, health)
        }
        _ => agent.clusters.unprotected_reason(&status.name),
    };
    let cluster = agent.paths.cluster_of(&status.name);
    let held = |generation| agent.clusters.holds_lease(&status.name, cluster.as_ref(), generation);
    let lease_held = status.lease.map(held);
    VmView {
        host: agent.config.name.clone(),
        backup: agent.backup_of(&status.name),
        cluster,
        committed: status.standby.as_ref().map(|standby| standby.committed),
        name: status.name,
        state: status.state,
        protection: status.protection,
        lease: status.lease,
        lease_held,
        primary,
        advice,
        network: status.network,
        checkpoints: status.checkpoints,
        recoveries: status.recoveries,
        supervised: status.supervisor_pid.is_some(),
    }
}

/// Advice to the owner of a standby. The agent takes no action itself: this host cannot be sure
/// that the primary has ended.
fn advise_owner(
    status: &VmStatus,
    standby: &StandbyStatus,
    host: &HostName,
    health: HostHealth,
) -> Option<String> {
    let name = &status.name;
    if let Some(advice) = advice_by_end(status, standby, host) {
        return Some(advice);
    }
    let gone = match (health, &standby.ended) {
        (HostHealth::Lost, Some(_)) => format!("its primary's host {host} is lost"),
        (_, Some(why)) => format!("no more epochs come from host {host}, which answers ({why})"),
        (HostHealth::Lost, None) => {
            return Some(format!(
                "its primary's host {host} does not answer, but its epochs have not ended: {name} may well run there"
            ));
        }
        (_, None) => return None,
    };
    Some(match standby.committed {
        0 => format!("{gone}, and there is no checkpoint to run: `firn stop {name}`"),
        _ if standby.member => {
            format!(
                "{gone}: it belongs to a cluster, and fails over with it by `firn cluster failover` here"
            )
        }
        epoch => format!(
            "{gone}: when you are sure that {name} does not run there any more, `firn failover {name}` here continues from \
             epoch {epoch}"
        ),
    })
}

/// The advice that follows from the end that its primary has reported: no failover of a VM that was
/// not lost.
fn advice_by_end(status: &VmStatus, standby: &StandbyStatus, host: &HostName) -> Option<String> {
    let name = &status.name;
    match &standby.end {
        _ if standby.released => Some(format!(
            "{name} continues alone on host {host}: `firn stop {name}` here ends this standby"
        )),
        Some(end @ (ProtectionEnd::Stopped | ProtectionEnd::ShutDown)) => Some(format!(
            "{name} was not lost on host {host} ({end}): `firn stop {name}` here ends this standby"
        )),
        Some(ProtectionEnd::Panicked) => Some(format!(
            "the guest of {name} panicked on host {host}: `firn stop {name}` here ends this standby, a failover goes back to epoch {}, \
             before the panic",
            standby.committed
        )),
        Some(ProtectionEnd::Unprotected(why)) => Some(format!(
            "{name} runs on host {host} without protection ({why}): `firn stop {name}` here ends this standby"
        )),
        Some(ProtectionEnd::Lost(_) | ProtectionEnd::Released) | None => None,
    }
}

/// Corrects the advice on standbys whose primaries could not report their ends, if the VM is seen
/// to run on the primary's host.
fn correct_advice(vms: &mut [VmView]) {
    let runs = |vm: &VmView| matches!(vm.state.as_str(), "running" | "paused" | "protected");
    let running: Vec<(HostName, VmName)> =
        vms.iter().filter(|vm| runs(vm)).map(|vm| (vm.host.clone(), vm.name.clone())).collect();
    let standbys = vms.iter_mut().filter(|vm| vm.advice.is_some());
    for vm in standbys.filter(|vm| vm.committed.is_some()) {
        let Some(host) = vm.primary.clone() else { continue };
        if running.contains(&(host.clone(), vm.name.clone())) {
            let name = &vm.name;
            vm.advice = Some(format!(
                "{name} runs on host {host}, whose epochs do not come here: `firn stop {name}` here ends this standby"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(committed: u64, ended: Option<&str>) -> VmStatus {
        serde_json::from_value(json!({
            "name": "web", "state": "standby", "launched": true, "memory_bytes": 0, "vcpus": 1, "qemu": "",
            "accel": "tcg", "since": 0, "recoveries": 0,
            "standby": { "complete": committed + 1, "committed": committed, "ended": ended },
        }))
        .unwrap()
    }

    fn advice_for(committed: u64, ended: Option<&str>, health: HostHealth) -> String {
        advice_for_status(&status(committed, ended), health)
    }

    fn advice_for_status(status: &VmStatus, health: HostHealth) -> String {
        let host = HostName::new("a").unwrap();
        let standby = status.standby.clone().unwrap();
        advise_owner(status, &standby, &host, health).unwrap_or_default()
    }

    #[test]
    fn a_standby_without_a_primary_shows_the_next_command() {
        assert_eq!(advice_for(7, None, HostHealth::Alive), "");
        assert_eq!(advice_for(7, None, HostHealth::Suspected), "");
        let lost = advice_for(7, Some("the connection failed"), HostHealth::Lost);
        assert!(lost.contains("a is lost") && lost.contains("`firn failover web`"), "{lost}");
        assert!(lost.contains("epoch 7"), "{lost}");
        let ended = advice_for(7, Some("the connection failed"), HostHealth::Alive);
        assert!(ended.contains("the connection failed") && ended.contains("failover"), "{ended}");
        let nothing = advice_for(0, Some("x"), HostHealth::Lost);
        assert!(nothing.contains("`firn stop web`") && !nothing.contains("failover"), "{nothing}");
    }

    #[test]
    fn a_failover_is_advised_only_for_lost_vms() {
        let advice_at_end = |end: ProtectionEnd| {
            let mut status = status(7, Some("it ended"));
            status.standby.as_mut().unwrap().end = Some(end);
            advice_for_status(&status, HostHealth::Alive)
        };
        let lost = advice_at_end(ProtectionEnd::Lost("killed by signal 9".into()));
        assert!(lost.contains("`firn failover web`"), "{lost}");
        let ends = [
            ProtectionEnd::Stopped,
            ProtectionEnd::ShutDown,
            ProtectionEnd::Unprotected("x".into()),
        ];
        for end in ends {
            let advice = advice_at_end(end);
            assert!(advice.contains("`firn stop web`") && !advice.contains("failover"), "{advice}");
        }
    }

    #[test]
    fn a_vm_that_is_seen_to_run_is_not_to_be_failed_over() {
        let view = |host: &str, state: &str, standby: bool| -> VmView {
            let view = match standby {
                true => json!({ "host": host, "name": "web", "state": state, "primary": "a",
                    "committed": 7, "advice": "`firn failover web`" }),
                false => json!({ "host": host, "name": "web", "state": state }),
            };
            serde_json::from_value(view).unwrap()
        };
        let mut vms = [view("a", "running", false), view("b", "standby", true)];
        correct_advice(&mut vms);
        let advice = vms[1].advice.clone().unwrap();
        assert!(advice.contains("runs on host a") && !advice.contains("failover"), "{advice}");
        let mut vms = [view("a", "ended", false), view("b", "standby", true)];
        correct_advice(&mut vms);
        assert!(vms[1].advice.clone().unwrap().contains("failover"));
    }

    #[test]
    fn no_failover_is_advised_of_a_vm_that_may_run() {
        let still = advice_for(7, None, HostHealth::Lost);
        assert!(still.contains("may well run there") && !still.contains("failover"), "{still}");
        let mut released = status(7, Some("its primary has released it"));
        released.standby.as_mut().unwrap().released = true;
        for health in [HostHealth::Alive, HostHealth::Suspected, HostHealth::Lost] {
            let advice = advice_for_status(&released, health);
            assert!(advice.contains("`firn stop web`") && !advice.contains("failover"), "{advice}");
        }
    }
}
