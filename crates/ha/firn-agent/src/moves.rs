//! `firn move` and `firn agent drain`: this host's agent finds the host that runs a VM, asks it to
//! move the VM, and waits until the VM is protected again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use firn_control::HostName;
use firn_control::api::{
    DRAINED, DrainMark, DrainReport, DrainRequest, MOVE_VM, MoveReport, MoveVmRequest, VMS, VmView,
};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, OperationProgress, VmName};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::agent::Agent;
use crate::clusters::planned_move;
use crate::status;

/// How long the host of a VM may take to move it.
const MOVE_WAIT: Duration = Duration::from_secs(120);
/// How long a moved VM may take until it is protected again, before that is left to the agents.
const PROTECT_WAIT: Duration = Duration::from_secs(120);
/// The time between two checks of that.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The maximum number of VMs that are moved at once.
const AT_ONCE_MAX: u32 = 16;

/// Receives the progress of a request.
pub(crate) type ProgressSender = mpsc::Sender<OperationProgress>;

fn report_stage(progress: &ProgressSender, stage: String, done: u64, total: u64) {
    // A client that does not read, or has disconnected, misses it.
    let _ = progress.try_send(OperationProgress::new(&stage, done, total));
}

/// Moves a VM, wherever it runs; returns when it is protected again, or that takes too long.
pub(crate) async fn move_vm(
    agent: &Arc<Agent>,
    wanted: MoveVmRequest,
    progress: &ProgressSender,
) -> Result<MoveReport, Failure> {
    let host = find_host(agent, &wanted.vm).await?;
    let MoveVmRequest { vm, to } = &wanted;
    report_stage(progress, format!("moving {vm} from host {host} to host {to}"), 0, 0);
    let report = move_at(agent, &host, &wanted).await?;
    report_stage(progress, format!("{vm} runs at host {to}, and is being protected again"), 0, 0);
    let backup = wait_until_protected(agent, vm, to).await;
    Ok(MoveReport { backup, ..report })
}

/// The host that runs a VM.
async fn find_host(agent: &Arc<Agent>, vm: &VmName) -> Result<HostName, Failure> {
    let all = status::collect_status(agent).await?.vms;
    let runs = |it: &VmView| it.name == *vm && !matches!(it.state.as_str(), "standby" | "ended");
    let hosts: Vec<VmView> = all.into_iter().filter(runs).collect();
    // Where a move was called off, or a host has failed, two may run it for a moment. One of them
    // holds the lease of the newest generation.
    let newest = hosts.iter().max_by_key(|it| (it.protection.is_some(), it.lease));
    newest.map(|it| it.host.clone()).ok_or_else(|| {
        let text = format!("no host that answers runs a VM {vm}");
        Failure::new(FailureKind::NoSuchVm, text).with_hint("`firn agent status` lists all VMs")
    })
}

/// Has a host move its VM.
async fn move_at(
    agent: &Arc<Agent>,
    host: &HostName,
    wanted: &MoveVmRequest,
) -> Result<MoveReport, Failure> {
    if *host == agent.config.name {
        return spawn_move(agent, wanted.clone()).await;
    }
    let mut link = agent.open_peer(host).await?;
    let body = serde_json::to_vec(wanted).while_doing("writing a request")?;
    let path = format!("{VMS}/{}/{MOVE_VM}", wanted.vm);
    let late = |_| {
        let text = format!("host {host} has not answered within {} s", MOVE_WAIT.as_secs());
        Failure::new(FailureKind::Other, text)
            .with_hint("`firn agent status` shows which host runs it")
    };
    let reply = timeout(MOVE_WAIT, link.post_bytes(&path, body)).await.map_err(late)??;
    serde_json::from_slice(&reply).while_doing("reading the answer")
}

/// Moves a VM of this host. A move that has begun continues if its client disconnects.
pub(crate) async fn spawn_move(
    agent: &Arc<Agent>,
    wanted: MoveVmRequest,
) -> Result<MoveReport, Failure> {
    let agent = Arc::clone(agent);
    let moved = tokio::spawn(async move { planned_move::move_vm(&agent, &wanted).await });
    moved.await.while_doing("moving the VM")?
}

/// Waits until a VM that was moved is protected again; returns its backup, if it has one in time.
async fn wait_until_protected(
    agent: &Arc<Agent>,
    vm: &VmName,
    host: &HostName,
) -> Option<HostName> {
    let deadline = Instant::now() + PROTECT_WAIT;
    while Instant::now() < deadline {
        let views = match *host == agent.config.name {
            true => status::list_vms(agent).await.ok(),
            false => status::list_vms_in_time(Arc::clone(agent), host.clone()).await,
        };
        let view = views.into_iter().flatten().find(|it| it.name == *vm);
        let is_committed = |it: &VmView| it.protection.as_ref().is_some_and(|it| it.committed > 0);
        if let Some(backup) = view.filter(is_committed).and_then(|it| it.backup) {
            return Some(backup);
        }
        sleep(POLL_INTERVAL).await;
    }
    None
}

/// Moves all VMs of a host to their backups, and marks the host, so that it accepts no standbys; or
/// removes that mark.
pub(crate) async fn drain_host(
    agent: &Arc<Agent>,
    wanted: DrainRequest,
    progress: &ProgressSender,
) -> Result<DrainReport, Failure> {
    let DrainRequest { host, at_once, undo } = wanted;
    if !(1..=AT_ONCE_MAX).contains(&at_once) {
        let text = format!("1 to {AT_ONCE_MAX} VMs can be moved at once");
        return Err(Failure::new(FailureKind::Usage, text));
    }
    let views = list_host(agent, &host).await?;
    let (moves, standbys) = match undo {
        true => Default::default(),
        false => plan_drain(&host, &views)?,
    };
    mark_host(agent, &host, DrainMark { drained: !undo }).await?;
    let (moved, failed) = move_all(agent, &host, moves, at_once, progress).await;
    Ok(DrainReport { host, drained: !undo, moved, failed, standbys })
}

async fn list_host(agent: &Arc<Agent>, host: &HostName) -> Result<Vec<VmView>, Failure> {
    if *host == agent.config.name {
        return status::list_vms(agent).await;
    }
    agent.peer_address(host)?;
    status::list_vms_in_time(Arc::clone(agent), host.clone()).await.ok_or_else(|| {
        let text = format!("host {host} does not list its VMs");
        Failure::new(FailureKind::Other, text)
            .with_hint("`firn agent status` shows whether it is alive")
    })
}

/// The moves that drain a host, and the standbys that stay there.
///
/// # Errors
/// If VMs are in the way: they run there, and no other host has their memory.
pub(crate) fn plan_drain(
    host: &HostName,
    views: &[VmView],
) -> Result<(Vec<MoveVmRequest>, Vec<VmName>), Failure> {
    let (mut moves, mut standbys, mut obstacles) = (Vec::new(), Vec::new(), Vec::new());
    for view in views {
        let vm = view.name.clone();
        match (view.state.as_str(), &view.backup, view.lease) {
            ("ended", ..) => {}
            ("standby", ..) => standbys.push(vm),
            _ if view.cluster.is_some() => obstacles.push(format!("{vm} (of a cluster)")),
            ("protected", Some(to), Some(_)) => moves.push(MoveVmRequest { vm, to: to.clone() }),
            ("protected", ..) => obstacles.push(format!("{vm} (protected without a record)")),
            (state, ..) => obstacles.push(format!("{vm} ({state}, not protected)")),
        }
    }
    if obstacles.is_empty() {
        return Ok((moves, standbys));
    }
    let text = format!("host {host} can't be drained: {} in the way", obstacles.join(", "));
    let hint = "protect them (`firn protect NAME --backup HOST`), or end them (`firn stop`, `firn suspend`)";
    Err(Failure::new(FailureKind::Refused, text).with_hint(hint))
}

async fn mark_host(agent: &Arc<Agent>, host: &HostName, mark: DrainMark) -> Result<(), Failure> {
    if *host == agent.config.name {
        return set_mark(agent, mark);
    }
    let mut link = agent.open_peer(host).await?;
    let body = serde_json::to_vec(&mark).while_doing("writing a request")?;
    link.post_bytes(DRAINED, body).await.map(drop)
}

/// Stores whether this host is drained.
pub(crate) fn set_mark(agent: &Agent, mark: DrainMark) -> Result<(), Failure> {
    tracing::warn!("this host is {}drained", if mark.drained { "" } else { "not " });
    agent.paths.set_drained(mark.drained).while_doing("marking this host")
}

/// Makes the moves, some at a time.
async fn move_all(
    agent: &Arc<Agent>,
    host: &HostName,
    moves: Vec<MoveVmRequest>,
    at_once: u32,
    progress: &ProgressSender,
) -> (Vec<MoveReport>, BTreeMap<VmName, String>) {
    let (total, mut waiting) = (moves.len() as u64, moves.into_iter());
    let (mut moved, mut failed, mut running) = (Vec::new(), BTreeMap::new(), JoinSet::new());
    loop {
        while running.len() < at_once as usize {
            let Some(wanted) = waiting.next() else { break };
            let MoveVmRequest { vm, to } = &wanted;
            let done = (moved.len() + failed.len()) as u64;
            report_stage(
                progress,
                format!("moving {vm} to host {to} ({done} of {total} done)"),
                0,
                0,
            );
            let (agent, host) = (Arc::clone(agent), host.clone());
            running.spawn(async move {
                let result = move_at(&agent, &host, &wanted).await;
                (wanted.vm, result)
            });
        }
        match running.join_next().await {
            Some(Ok((_, Ok(report)))) => moved.push(report),
            Some(Ok((vm, Err(failure)))) => drop(failed.insert(vm, failure.to_string())),
            // A task that panicked has reported it.
            Some(Err(_)) => {}
            None => return (moved, failed),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn view(name: &str, state: &str, backup: Option<&str>, lease: Option<u32>) -> VmView {
        let view = json!({ "host": "a", "name": name, "state": state, "backup": backup,
            "lease": lease });
        serde_json::from_value(view).unwrap()
    }

    #[test]
    fn a_drain_moves_each_vm_to_its_backup() {
        let host = HostName::new("a").unwrap();
        let views = [
            view("web", "protected", Some("b"), Some(0)),
            view("db", "protected", Some("c"), Some(2)),
            view("old", "ended", None, None),
            view("other", "standby", None, None),
        ];
        let (moves, standbys) = plan_drain(&host, &views).unwrap();
        let moves: Vec<String> = moves.iter().map(|it| format!("{} {}", it.vm, it.to)).collect();
        assert_eq!(moves, ["web b", "db c"]);
        assert_eq!(standbys, [VmName::new("other").unwrap()]);
    }

    #[test]
    fn vms_in_the_way_are_named() {
        let host = HostName::new("a").unwrap();
        let member = VmView {
            cluster: Some(VmName::new("shop").unwrap()),
            ..view("cart", "protected", Some("c"), Some(1))
        };
        let views = [
            view("web", "protected", Some("b"), Some(0)),
            view("alone", "running", None, None),
            view("two", "protected", Some("b"), None),
            member,
        ];
        let failure = plan_drain(&host, &views).unwrap_err();
        let text = failure.to_string();
        assert_eq!(failure.kind, FailureKind::Refused);
        for part in ["alone (running, not protected)", "two (protected without", "cart (of a"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("web"), "{text}");
    }
}
