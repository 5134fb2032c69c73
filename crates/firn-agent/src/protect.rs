//! Protecting a VM of this host by a peer: a standby there, a tunnel to it, and the VM's supervisor at the near end.

use std::sync::Arc;

use firn_supervisor::{
    Context as _, Failure, FailureKind, Progress, ProtectRequest, Status, VmName,
};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde_json::Value;

use crate::agent::Agent;
use crate::api::Protect;
use crate::host::HostName;
use crate::link::Link;
use crate::place::Socket;
use crate::standbys::tell;
use crate::tunnel;

/// Returns when there is something to fail over to.
pub(crate) async fn protect(
    agent: &Arc<Agent>,
    wanted: Protect,
    mut on_progress: impl FnMut(&Progress) + Send + 'static,
) -> Result<Value, Failure> {
    let Protect { vm, backup, interval_ms, predicts } = wanted;
    let address = agent.address(&backup)?;
    let _claim = agent.claim(&vm)?;
    is_free(agent, &vm).await?;
    let path = agent.place.epochs(&backup, &vm);
    let to = format!("unix:{}", path.display());
    let to = to.parse().doing_or(FailureKind::Usage, "naming the VM's socket")?;
    let socket = agent.place.listen(path)?;
    let far = Link::open(&agent.identity, &backup, address).await?.stand_by(&vm).await?;
    let sending = tokio::spawn(send(Arc::clone(agent), backup, vm.clone(), socket, far));
    let how = ProtectRequest { to, interval_ms, predicts, alone: false };
    let begun = agent.blocking(move |vms| vms.protect(&vm, how, &mut on_progress)).await;
    if begun.is_err() {
        sending.abort();
    }
    begun
}

/// Nobody is asked to stand by for a VM that can't be protected now. Its supervisor looks again.
async fn is_free(agent: &Agent, vm: &VmName) -> Result<(), Failure> {
    let name = vm.clone();
    let Status { state, .. } = agent.blocking(move |vms| vms.status(&name)).await?;
    match state.as_str() {
        "running" | "paused" => Ok(()),
        state => {
            let text = format!("VM {vm} is {state}: only one that runs can be protected");
            Err(Failure::new(FailureKind::Busy, text).hint("`firn status` says more"))
        }
    }
}

/// Carries what the supervisor sends, from when it connects.
async fn send(
    agent: Arc<Agent>,
    backup: HostName,
    vm: VmName,
    socket: Socket,
    far: TokioIo<Upgraded>,
) {
    let Ok((near, _)) = socket.listener.accept().await else { return };
    drop(socket);
    let Ok(health) = agent.health(&backup) else { return };
    let _noted = agent.note_carried(&vm, &backup);
    tell(&vm, &backup, &tunnel::carry(near, far, health).await);
}
