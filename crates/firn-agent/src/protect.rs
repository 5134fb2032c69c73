//! Protection of a VM of this host by a peer: a standby there, a tunnel to it, and the VM's
//! supervisor at the end of the tunnel here.

use std::sync::Arc;
use std::time::Duration;

use firn_supervisor::{
    Context as _, Failure, FailureKind, Progress, ProtectRequest, Status, VmName,
};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use crate::agent::Agent;
use crate::api::Protect;
use crate::detect::Health;
use crate::failover;
use crate::host::HostName;
use crate::link::Link;
use crate::place::Socket;
use crate::standbys::tell;
use crate::together;
use crate::tunnel;
use crate::vms::Vms;

/// How long the VM's supervisor may take to connect. It scans all of the VM's memory before.
const SUPERVISOR_WAIT: Duration = Duration::from_secs(60);

/// Protects a VM; returns when a failover is possible.
pub(crate) async fn protect(
    agent: &Arc<Agent>,
    wanted: Protect,
    on_progress: impl FnMut(&Progress) + Send + 'static,
) -> Result<Value, Failure> {
    if let Some(cluster) = agent.place.cluster_of(&wanted.vm) {
        let text =
            format!("{} belongs to cluster {cluster}, and is protected with all of it", wanted.vm);
        let hint =
            format!("`firn cluster protect {cluster}` on the host that is to be the backup");
        return Err(Failure::new(FailureKind::Refused, text).hint(hint));
    }
    begin(agent, wanted, As::Itself, on_progress).await
}

/// Protects a member of a cluster. It does not fail over by itself, but with the whole cluster, if
/// that has a record.
pub(crate) async fn protect_member(
    agent: &Arc<Agent>,
    wanted: Protect,
    cluster: Option<VmName>,
) -> Result<Value, Failure> {
    begin(agent, wanted, As::Member(cluster), |_| ()).await
}

/// Whether a VM is protected by itself or as a member of a cluster.
enum As {
    Itself,
    /// As a member of a cluster; the cluster's name is given if it has a record.
    Member(Option<VmName>),
}

async fn begin(
    agent: &Arc<Agent>,
    wanted: Protect,
    of: As,
    mut on_progress: impl FnMut(&Progress) + Send + 'static,
) -> Result<Value, Failure> {
    let Protect { vm, backup, interval_ms, predicts } = wanted.clone();
    let address = agent.address(&backup)?;
    let _claim = agent.claim(&vm)?;
    let was_leased = is_free(agent, &vm).await?.lease.is_some();
    // Before any other host could run it.
    let lease = lease_as(agent, &of, &wanted, was_leased).await?;
    let path = agent.place.epochs(&backup, &vm);
    let to = format!("unix:{}", path.display());
    let to = to.parse().doing_or(FailureKind::Usage, "naming the VM's socket")?;
    let socket = agent.place.listen(path)?;
    // Subscribed from here on: a protection by a host that is lost meanwhile fails.
    let health = agent.health(&backup)?;
    let far = standing_by(agent, &backup, address, &vm, health.clone()).await?;
    let (tell, connected) = oneshot::channel();
    let (name, to_host) = (vm.clone(), backup.clone());
    let stream = Stream { agent: Arc::clone(agent), backup, vm: vm.clone(), socket, far, health };
    let sending = tokio::spawn(stream.send(tell));
    let how = ProtectRequest { to, interval_ms, predicts, alone: false, lease };
    let begun = tokio::select! {
        begun = agent.blocking(move |vms| vms.protect(&vm, how, &mut on_progress)) => begun,
        () = too_late(connected) => Err(silent()),
    };
    match &begun {
        Ok(_) if lease.is_some() && matches!(of, As::Itself) => {
            failover::backed(agent, &name, &to_host).await
        }
        Ok(_) => {}
        Err(_) => {
            sending.abort();
            if lease.is_some() && !was_leased {
                let _ = agent.blocking(move |vms| leave_as_it_was(vms, &name)).await;
            }
        }
    }
    begun
}

/// Acquires the lease that is to cover a VM's output, if there is membership; returns its
/// generation.
async fn lease_as(
    agent: &Arc<Agent>,
    of: &As,
    wanted: &Protect,
    was_leased: bool,
) -> Result<Option<u32>, Failure> {
    let vm = &wanted.vm;
    match of {
        As::Itself => failover::lease_for(agent, wanted).await,
        As::Member(None) => Ok(None),
        As::Member(Some(cluster)) => {
            let belongs = agent.place.cluster_of(vm).as_ref() == Some(cluster);
            if was_leased && !belongs {
                let text = format!("{vm} is under a record of its own, or of another cluster");
                let failure = Failure::new(FailureKind::Busy, text);
                return Err(failure.hint(format!("`firn release {vm}` ends that")));
            }
            together::lease_for(agent, cluster, vm).await.map(Some)
        }
    }
}

/// Has the backup start a standby, and returns the connection to it.
async fn standing_by(
    agent: &Agent,
    backup: &HostName,
    address: &str,
    vm: &VmName,
    health: watch::Receiver<Health>,
) -> Result<TokioIo<Upgraded>, Failure> {
    let asked = async { Link::open(&agent.identity, backup, address).await?.stand_by(vm).await };
    tokio::select! {
        answer = asked => answer,
        () = tunnel::loss(health) => {
            let text = format!("host {backup} was lost before its standby was ready");
            Err(Failure::new(FailureKind::Other, text))
        }
    }
}

/// Returns if the supervisor has not connected in time.
async fn too_late(connected: oneshot::Receiver<()>) {
    if timeout(SUPERVISOR_WAIT, connected).await.is_ok() {
        std::future::pending().await
    }
}

fn silent() -> Failure {
    let text =
        format!("the VM's supervisor has not begun to send within {} s", SUPERVISOR_WAIT.as_secs());
    Failure::new(FailureKind::Other, text).hint("the VM's log may say what it is doing")
}

/// Releases a VM of which no epoch was cut: it needs no lease, for no other host can run it.
fn leave_as_it_was(vms: &dyn Vms, vm: &VmName) -> Result<(), Failure> {
    let status = vms.status(vm)?;
    match status.lease.is_some() && status.network.iter().all(|card| card.open) {
        true => vms.release(vm),
        false => Ok(()),
    }
}

/// Checks that the VM can be protected now, before a standby is requested. Its supervisor checks
/// again.
async fn is_free(agent: &Agent, vm: &VmName) -> Result<Status, Failure> {
    let name = vm.clone();
    let status = agent.blocking(move |vms| vms.status(&name)).await?;
    match status.state.as_str() {
        "running" | "paused" => Ok(status),
        state => {
            let text = format!("VM {vm} is {state}: only one that runs can be protected");
            Err(Failure::new(FailureKind::Busy, text).hint("`firn status` shows more"))
        }
    }
}

/// The connection to a standby, before the supervisor sends to it.
struct Stream {
    agent: Arc<Agent>,
    backup: HostName,
    vm: VmName,
    socket: Socket,
    far: TokioIo<Upgraded>,
    health: watch::Receiver<Health>,
}

impl Stream {
    /// Carries the supervisor's stream, from when it connects; `connected` is notified then.
    async fn send(self, connected: oneshot::Sender<()>) {
        let Self { agent, backup, vm, socket, far, health } = self;
        let Ok((near, _)) = socket.listener.accept().await else { return };
        // The receiver is gone if the supervisor has connected too late.
        let _ = connected.send(());
        drop(socket);
        let _noted = agent.note_carried(&vm, &backup);
        tell(&vm, &backup, &tunnel::carry(near, far, health).await);
    }
}
