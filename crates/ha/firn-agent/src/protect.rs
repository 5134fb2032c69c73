//! Protection of a VM of this host by a peer: a standby there, a tunnel to it, and the VM's
//! supervisor at the end of the tunnel here.

use std::sync::Arc;
use std::time::Duration;

use firn_control::api::ProtectVmRequest;
use firn_control::{HostHealth, HostName};
use firn_supervisor::{
    Failure, FailureContext as _, FailureKind, OperationProgress, ProtectRequest, VmName, VmStatus,
};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use crate::agent::Agent;
use crate::clusters::failover_unit::FailoverUnit;
use crate::clusters::{lease, vm_record};
use crate::peer_connection::PeerConnection;
use crate::sockets::{ListeningSocket, listen_at};
use crate::standbys::log_tunnel_end;
use crate::tunnel;
use crate::vms::LocalVms;

/// How long the VM's supervisor may take to connect. It scans all of the VM's memory before.
const SUPERVISOR_WAIT: Duration = Duration::from_secs(60);

/// Protects a VM; returns when a failover is possible.
pub(crate) async fn protect_vm(
    agent: &Arc<Agent>,
    wanted: ProtectVmRequest,
    on_progress: impl FnMut(&OperationProgress) + Send + 'static,
) -> Result<Value, Failure> {
    if let Some(cluster) = agent.paths.cluster_of(&wanted.vm) {
        let text =
            format!("{} belongs to cluster {cluster}, and is protected with all of it", wanted.vm);
        let hint = format!("`firn cluster protect {cluster}` on the host that is to be the backup");
        return Err(Failure::new(FailureKind::Refused, text).with_hint(hint));
    }
    let unit = FailoverUnit::Vm(wanted.vm.clone());
    begin_protection(agent, wanted, Some(unit), on_progress).await
}

/// Protects a member of a cluster. It does not fail over by itself, but with the whole cluster, if
/// that has a record.
pub(crate) async fn protect_member(
    agent: &Arc<Agent>,
    wanted: ProtectVmRequest,
    cluster: Option<VmName>,
) -> Result<Value, Failure> {
    begin_protection(agent, wanted, cluster.map(FailoverUnit::Cluster), |_| ()).await
}

/// A member of a cluster that has no record is part of no unit.
async fn begin_protection(
    agent: &Arc<Agent>,
    wanted: ProtectVmRequest,
    unit: Option<FailoverUnit>,
    mut on_progress: impl FnMut(&OperationProgress) + Send + 'static,
) -> Result<Value, Failure> {
    let ProtectVmRequest { vm, backup, interval_ms, predicts } = wanted.clone();
    let address = agent.peer_address(&backup)?;
    let _claim = agent.claim_vm(&vm)?;
    let was_leased = check_protectable(agent, &vm).await?.lease.is_some();
    // Before any other host could run it.
    let lease = acquire_lease(agent, unit.as_ref(), &wanted, was_leased).await?;
    let path = agent.paths.epochs_socket(&backup, &vm);
    let to = format!("unix:{}", path.display());
    let to = to.parse().while_doing_as(FailureKind::Usage, "naming the VM's socket")?;
    let socket = listen_at(path)?;
    // Subscribed from here on: a protection by a host that is lost meanwhile fails.
    let health = agent.peer_health(&backup)?;
    let remote = request_standby(agent, &backup, address, &vm, health.clone()).await?;
    let (on_connected, connected) = oneshot::channel();
    let (name, to_host) = (vm.clone(), backup.clone());
    let stream =
        StandbyStream { agent: Arc::clone(agent), backup, vm: vm.clone(), socket, remote, health };
    let sending = tokio::spawn(stream.carry_epochs(on_connected));
    let how = ProtectRequest { to, interval_ms, predicts, alone: false, lease };
    let begun = tokio::select! {
        begun = agent.run_blocking(move |vms| vms.protect_vm(&vm, how, &mut on_progress)) => begun,
        () = connection_timeout(connected) => Err(silent_supervisor()),
    };
    match &begun {
        Ok(_) if lease.is_some() && matches!(unit, Some(FailoverUnit::Vm(_))) => {
            vm_record::record_committed_backup(agent, &name, &to_host).await
        }
        Ok(_) => {}
        Err(_) => {
            sending.abort();
            if lease.is_some() && !was_leased {
                let _ = agent.run_blocking(move |vms| release_unprotected(vms, &name)).await;
            }
        }
    }
    begun
}

/// Acquires the lease that is to cover a VM's output, if there is membership; returns its
/// generation.
async fn acquire_lease(
    agent: &Arc<Agent>,
    unit: Option<&FailoverUnit>,
    wanted: &ProtectVmRequest,
    was_leased: bool,
) -> Result<Option<u32>, Failure> {
    let Some(unit) = unit else { return Ok(None) };
    let vm = &wanted.vm;
    if let FailoverUnit::Cluster(cluster) = unit {
        if was_leased && agent.paths.cluster_of(vm).as_ref() != Some(cluster) {
            let text = format!("{vm} is under a record of its own, or of another cluster");
            let failure = Failure::new(FailureKind::Busy, text);
            return Err(failure.with_hint(format!("`firn release {vm}` ends that")));
        }
    }
    lease::acquire_lease(agent, unit, wanted).await
}

/// Has the backup start a standby, and returns the connection to it.
async fn request_standby(
    agent: &Agent,
    backup: &HostName,
    address: &str,
    vm: &VmName,
    health: watch::Receiver<HostHealth>,
) -> Result<TokioIo<Upgraded>, Failure> {
    let asked = async {
        PeerConnection::open(&agent.identity, backup, address).await?.request_standby(vm).await
    };
    tokio::select! {
        answer = asked => answer,
        () = tunnel::wait_for_loss(health) => {
            let text = format!("host {backup} was lost before its standby was ready");
            Err(Failure::new(FailureKind::Other, text))
        }
    }
}

/// Returns if the supervisor has not connected in time.
async fn connection_timeout(connected: oneshot::Receiver<()>) {
    if timeout(SUPERVISOR_WAIT, connected).await.is_ok() {
        std::future::pending().await
    }
}

fn silent_supervisor() -> Failure {
    let text =
        format!("the VM's supervisor has not begun to send within {} s", SUPERVISOR_WAIT.as_secs());
    Failure::new(FailureKind::Other, text).with_hint("the VM's log may say what it is doing")
}

/// Releases a VM of which no epoch was cut: it needs no lease, for no other host can run it.
fn release_unprotected(vms: &dyn LocalVms, vm: &VmName) -> Result<(), Failure> {
    let status = vms.vm_status(vm)?;
    match status.lease.is_some() && status.network.iter().all(|card| card.open) {
        true => vms.release_vm(vm),
        false => Ok(()),
    }
}

/// Checks that the VM can be protected now, before a standby is requested. Its supervisor checks
/// again.
async fn check_protectable(agent: &Agent, vm: &VmName) -> Result<VmStatus, Failure> {
    let name = vm.clone();
    let status = agent.run_blocking(move |vms| vms.vm_status(&name)).await?;
    match status.state.as_str() {
        "running" | "paused" => Ok(status),
        state => {
            let text = format!("VM {vm} is {state}: only one that runs can be protected");
            Err(Failure::new(FailureKind::Busy, text).with_hint("`firn status` shows more"))
        }
    }
}

/// The connection to a standby, before the supervisor sends to it.
struct StandbyStream {
    agent: Arc<Agent>,
    backup: HostName,
    vm: VmName,
    socket: ListeningSocket,
    remote: TokioIo<Upgraded>,
    health: watch::Receiver<HostHealth>,
}

impl StandbyStream {
    /// Carries the supervisor's stream, from when it connects; `connected` is notified then.
    async fn carry_epochs(self, connected: oneshot::Sender<()>) {
        let Self { agent, backup, vm, socket, remote, health } = self;
        let Ok((local, _)) = socket.listener.accept().await else { return };
        // The receiver is gone if the supervisor has connected too late.
        let _ = connected.send(());
        drop(socket);
        let _noted = agent.record_relayed(&vm, &backup);
        log_tunnel_end(&vm, &backup, &tunnel::carry_stream(local, remote, health).await);
    }
}
