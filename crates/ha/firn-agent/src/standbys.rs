//! Standbys of peers' VMs: this agent starts a standby, and carries the epochs that arrive to it.
//!
//! A host with a peer's certificate determines how a QEMU is started here, and so may do here what
//! this agent's user may.

use std::sync::Arc;
use std::time::Duration;

use firn_control::api::EPOCHS;
use firn_control::paths::remove_if_present;
use firn_control::{AgentPaths, HostHealth, HostName};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, StandbyStatus, VmName};
use hyper::Request;
use hyper::body::Incoming;
use hyper::header::UPGRADE;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::agent::{Agent, VmClaim};
use crate::http::{self, HttpResponse};
use crate::sockets::check_length;
use crate::tunnel::{self, TunnelEnd};

/// How long the name of a standby may take to become free. It is shorter than the time until a host
/// counts as lost: a peer that asks twice is refused.
const CLAIM_WAIT: Duration = Duration::from_secs(2);

/// How long the standby may take to notice the end of a stream.
const END_WAIT: Duration = Duration::from_secs(5);

/// Time between two polls of that.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Answers a peer that requests a standby.
pub(crate) async fn answer_standby(
    agent: &Arc<Agent>,
    peer: HostName,
    vm: &str,
    request: Request<Incoming>,
) -> HttpResponse {
    // Subscribed from here on: a standby that starts for a host that is lost meanwhile is of no
    // use.
    let begun = match (parse_request(vm, &request), agent.peer_health(&peer)) {
        (Ok(vm), Ok(health)) => begin_standby(agent, &peer, vm).await.map(|begun| (begun, health)),
        (Err(failure), _) | (_, Err(failure)) => Err(failure),
    };
    match begun {
        Ok(((vm, local), health)) => {
            tokio::spawn(receive_epochs(Arc::clone(agent), peer, vm, local, request, health));
            http::upgrade_response(EPOCHS)
        }
        Err(failure) => {
            tracing::warn!("no standby of {vm} for host {peer}: {failure}");
            http::failure_response(&failure)
        }
    }
}

fn parse_request(vm: &str, request: &Request<Incoming>) -> Result<VmName, Failure> {
    let is_stream = request.headers().get(UPGRADE).is_some_and(|it| it == EPOCHS);
    if !is_stream {
        let text = format!("a standby needs a connection that can become {EPOCHS}");
        return Err(Failure::new(FailureKind::Usage, text));
    }
    VmName::new(vm).while_doing_as(FailureKind::Usage, "naming a standby")
}

/// Starts a standby, which waits for its primary to introduce itself.
async fn begin_standby(
    agent: &Arc<Agent>,
    peer: &HostName,
    vm: VmName,
) -> Result<(VmName, UnixStream), Failure> {
    if agent.paths.is_drained() {
        let text = format!("host {} is drained, and accepts no standbys", agent.config.name);
        let hint = format!("`firn agent undrain {}` ends that", agent.config.name);
        return Err(Failure::new(FailureKind::Refused, text).with_hint(hint));
    }
    let claim = claim_within_wait(agent, &vm).await?;
    let path = agent.paths.epochs_socket(peer, &vm);
    check_length(&path)?;
    remove_if_present(&path).while_doing("clearing the standby's socket")?;
    let (shared, peer, name) = (Arc::clone(agent), peer.clone(), vm.clone());
    let local = agent.run_blocking(move |vms| {
        make_room(&shared, &peer, &name)?;
        let (paths, vm) = (shared.paths.clone(), name.clone());
        let on_ready = move |result: Result<_, Failure>| {
            drop(claim);
            match result {
                Ok(_) => store_primary_host(&paths, &vm, &peer),
                Err(failure) => tracing::warn!("{vm} for host {peer}: {failure}"),
            }
        };
        vms.start_standby(&name, &path, Box::new(on_ready))
    });
    let local = local.await?;
    local.set_nonblocking(true).while_doing("preparing the standby's connection")?;
    let local = UnixStream::from_std(local).while_doing("preparing the standby's connection")?;
    Ok((vm, local))
}

/// Claims a VM, and waits for a short time if a standby of that name is just being removed.
async fn claim_within_wait(agent: &Arc<Agent>, vm: &VmName) -> Result<VmClaim, Failure> {
    let deadline = Instant::now() + CLAIM_WAIT;
    loop {
        match agent.claim_vm(vm) {
            Err(_) if Instant::now() < deadline => sleep(POLL_INTERVAL).await,
            claimed => return claimed,
        }
    }
}

/// Ends an older standby of the same peer's VM if it was released or stopped, or has nothing to
/// run. A peer may not end a standby that may be the last copy of a VM, or that is about to run.
fn make_room(agent: &Agent, peer: &HostName, vm: &VmName) -> Result<(), Failure> {
    let standby = agent.vms.vm_status(vm).ok().and_then(|status| status.standby);
    let Some(standby) = standby else { return Ok(()) };
    if !is_useless(&standby) {
        let text = format!("{vm} has a standby already, which may be made to run");
        let failure = Failure::new(FailureKind::Busy, text);
        return Err(
            failure.with_hint(format!("`firn stop {vm}` there ends it, if it is not needed"))
        );
    }
    match agent.paths.primary_host(vm).as_ref() == Some(peer) {
        true => agent
            .vms
            .stop_standby(vm)
            .map_err(|failure| failure.while_doing("ending the last standby")),
        false => Ok(()),
    }
}

fn store_primary_host(paths: &AgentPaths, vm: &VmName, peer: &HostName) {
    tracing::info!("{vm} is a standby for host {peer}");
    if let Err(error) = paths.set_primary_host(vm, peer) {
        tracing::warn!("the host of {vm}'s primary is not stored: {error}");
    }
}

/// Carries the epochs. A connection that does not become a stream is dropped, and the standby with
/// it.
async fn receive_epochs(
    agent: Arc<Agent>,
    peer: HostName,
    vm: VmName,
    local: UnixStream,
    request: Request<Incoming>,
    health: watch::Receiver<HostHealth>,
) {
    let upgraded = timeout(http::REQUEST_WAIT, hyper::upgrade::on(request)).await;
    if let Ok(Ok(remote)) = upgraded {
        log_tunnel_end(
            &vm,
            &peer,
            &tunnel::carry_stream(local, TokioIo::new(remote), health).await,
        );
        remove_if_over(&agent, &vm).await;
    }
}

/// Removes a standby whose primary has reported that it was stopped or released, or shut down. If
/// it has a record, it is removed when the record has ended.
async fn remove_if_over(agent: &Arc<Agent>, vm: &VmName) {
    let deadline = Instant::now() + END_WAIT;
    while Instant::now() < deadline {
        let name = vm.clone();
        let status = agent.run_blocking(move |vms| vms.vm_status(&name)).await;
        let Some(standby) = status.ok().and_then(|status| status.standby) else { return };
        if standby.ended.is_some() {
            if !standby.member && !standby.leased && is_useless(&standby) {
                remove_standby(agent, vm).await;
            }
            return;
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Whether the standby is never run, so that nothing is lost with it.
fn is_useless(standby: &StandbyStatus) -> bool {
    standby.is_over() || (standby.ended.is_some() && standby.committed == 0)
}

async fn remove_standby(agent: &Arc<Agent>, vm: &VmName) {
    // Otherwise another standby of that name is about to start, which removes this one.
    let Ok(_claim) = agent.claim_vm(vm) else { return };
    let name = vm.clone();
    let removed = agent.run_blocking(move |vms| {
        let standby = vms.vm_status(&name)?.standby;
        match standby.is_some_and(|standby| is_useless(&standby)) {
            true => vms.stop_standby(&name),
            false => Ok(()),
        }
    });
    match removed.await {
        Ok(()) => tracing::info!("the standby of {vm} is removed: its VM was not lost"),
        Err(failure) => tracing::warn!("the standby of {vm} stays: {failure}"),
    }
}

/// Logs how a stream of epochs ended.
pub(crate) fn log_tunnel_end(vm: &VmName, peer: &HostName, end: &TunnelEnd) {
    match end {
        TunnelEnd::Finished => {
            tracing::info!("epochs of {vm}, with host {peer}: the stream has ended")
        }
        TunnelEnd::Broken(error) => {
            tracing::warn!("epochs of {vm}, with host {peer}: the stream broke: {error}");
        }
        TunnelEnd::Lost => tracing::warn!("epochs of {vm}, with host {peer}: the host is lost"),
    }
}
