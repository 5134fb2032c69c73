//! Standing by for a peer's VM: a standby is started here, and gets the epochs that come in.
//!
//! Who holds a peer's certificate says how a QEMU is to be started here, and so may do here what this agent's user may.

use std::sync::Arc;
use std::time::Duration;

use firn_supervisor::{Context as _, Failure, FailureKind, Readiness, VmName};
use hyper::Request;
use hyper::body::Incoming;
use hyper::header::UPGRADE;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::agent::{Agent, Claim};
use crate::api::EPOCHS;
use crate::detect::Health;
use crate::host::HostName;
use crate::http::{self, Answer};
use crate::place;
use crate::tunnel::{self, End};

/// How long the name of a standby may take to be free. Less than until a host counts as lost: a peer that asks twice is refused.
const CLAIM_WAIT: Duration = Duration::from_secs(2);

/// How long the end of a stream may take to be noted by the standby.
const END_WAIT: Duration = Duration::from_secs(5);

/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Answers a peer that wants a standby.
pub(crate) async fn start(
    agent: &Arc<Agent>,
    peer: HostName,
    vm: &str,
    request: Request<Incoming>,
) -> Answer {
    // From here on: a standby that is set up for a host which is lost meanwhile is for nobody.
    let begun = match (wanted(vm, &request), agent.health(&peer)) {
        (Ok(vm), Ok(health)) => begin(agent, &peer, vm).await.map(|begun| (begun, health)),
        (Err(failure), _) | (_, Err(failure)) => Err(failure),
    };
    match begun {
        Ok(((vm, near), health)) => {
            tokio::spawn(receive(Arc::clone(agent), peer, vm, near, request, health));
            http::switching(EPOCHS)
        }
        Err(failure) => {
            tracing::warn!("no standby of {vm} for host {peer}: {failure}");
            http::refusal(&failure)
        }
    }
}

fn wanted(vm: &str, request: &Request<Incoming>) -> Result<VmName, Failure> {
    let is_stream = request.headers().get(UPGRADE).is_some_and(|it| it == EPOCHS);
    if !is_stream {
        let text = format!("a standby needs a connection that can become {EPOCHS}");
        return Err(Failure::new(FailureKind::Usage, text));
    }
    VmName::new(vm).doing_or(FailureKind::Usage, "naming a standby")
}

/// A standby that waits for its primary to introduce itself.
async fn begin(
    agent: &Arc<Agent>,
    peer: &HostName,
    vm: VmName,
) -> Result<(VmName, UnixStream), Failure> {
    let claim = claim_soon(agent, &vm).await?;
    let path = agent.place.epochs(peer, &vm);
    place::check_length(&path)?;
    place::clear(&path).doing("clearing the standby's socket")?;
    let (shared, peer, name) = (Arc::clone(agent), peer.clone(), vm.clone());
    let near = agent.blocking(move |vms| {
        make_room(&shared, &peer, &name)?;
        let (place, vm) = (shared.place.clone(), name.clone());
        let on_ready = move |result: Result<_, Failure>| {
            drop(claim);
            match result {
                Ok(_) => note_origin(&place, &vm, &peer),
                Err(failure) => tracing::warn!("{vm} for host {peer}: {failure}"),
            }
        };
        vms.stand_by(&name, &path, Box::new(on_ready))
    });
    let near = near.await?;
    near.set_nonblocking(true).doing("preparing the standby's connection")?;
    let near = UnixStream::from_std(near).doing("preparing the standby's connection")?;
    Ok((vm, near))
}

/// One that is over may just be being removed.
async fn claim_soon(agent: &Arc<Agent>, vm: &VmName) -> Result<Claim, Failure> {
    let deadline = Instant::now() + CLAIM_WAIT;
    loop {
        match agent.claim(vm) {
            Err(_) if Instant::now() < deadline => sleep(LOOK).await,
            claimed => return claimed,
        }
    }
}

/// A standby of the same peer's VM that was released or stopped, or that has nothing to run, gives way. One that may be all that is left of a
/// VM, or that is just made to run, is not for a peer to end.
fn make_room(agent: &Agent, peer: &HostName, vm: &VmName) -> Result<(), Failure> {
    let standby = agent.vms.status(vm).ok().and_then(|status| status.standby);
    let Some(standby) = standby else { return Ok(()) };
    if !is_useless(&standby) {
        let text = format!("{vm} has a standby already, which may be made to run");
        let failure = Failure::new(FailureKind::Busy, text);
        return Err(failure.hint(format!("`firn stop {vm}` there ends it, if it is not needed")));
    }
    match agent.place.origin(vm).as_ref() == Some(peer) {
        true => {
            agent.vms.stop(vm).map_err(|failure| failure.while_doing("ending the last standby"))
        }
        false => Ok(()),
    }
}

fn note_origin(place: &place::Place, vm: &VmName, peer: &HostName) {
    tracing::info!("{vm} stands by for host {peer}");
    if let Err(error) = place.set_origin(vm, peer) {
        tracing::warn!("it will not be known whom {vm} stands by for: {error}");
    }
}

/// A connection that does not become a stream is dropped, and the standby with it.
async fn receive(
    agent: Arc<Agent>,
    peer: HostName,
    vm: VmName,
    near: UnixStream,
    request: Request<Incoming>,
    health: watch::Receiver<Health>,
) {
    let upgraded = timeout(http::REQUEST_WAIT, hyper::upgrade::on(request)).await;
    if let Ok(Ok(far)) = upgraded {
        tell(&vm, &peer, &tunnel::carry(near, TokioIo::new(far), health).await);
        remove_if_over(&agent, &vm).await;
    }
}

/// Removes a standby whose primary has reported that it was stopped or released, or shut down. Where hosts agree it goes when their record
/// has ended.
async fn remove_if_over(agent: &Arc<Agent>, vm: &VmName) {
    let deadline = Instant::now() + END_WAIT;
    while Instant::now() < deadline {
        let name = vm.clone();
        let status = agent.blocking(move |vms| vms.status(&name)).await;
        let Some(standby) = status.ok().and_then(|status| status.standby) else { return };
        if standby.ended.is_some() {
            if !standby.member && !standby.leased && is_useless(&standby) {
                remove(agent, vm).await;
            }
            return;
        }
        sleep(LOOK).await;
    }
}

/// Whether it is never run: nothing is lost with it.
fn is_useless(standby: &Readiness) -> bool {
    standby.is_over() || (standby.ended.is_some() && standby.committed == 0)
}

async fn remove(agent: &Arc<Agent>, vm: &VmName) {
    // Else another standby of that name is being set up, which makes room for itself.
    let Ok(_claim) = agent.claim(vm) else { return };
    let name = vm.clone();
    let removed = agent.blocking(move |vms| {
        let standby = vms.status(&name)?.standby;
        match standby.is_some_and(|standby| is_useless(&standby)) {
            true => vms.stop(&name),
            false => Ok(()),
        }
    });
    match removed.await {
        Ok(()) => tracing::info!("the standby of {vm} is removed: its VM was not lost"),
        Err(failure) => tracing::warn!("the standby of {vm} stays: {failure}"),
    }
}

/// Tells how a stream of epochs ended.
pub(crate) fn tell(vm: &VmName, peer: &HostName, end: &End) {
    match end {
        End::Said => tracing::info!("epochs of {vm}, with host {peer}: the stream has ended"),
        End::Broken(error) => {
            tracing::warn!("epochs of {vm}, with host {peer}: the stream broke: {error}");
        }
        End::Lost => tracing::warn!("epochs of {vm}, with host {peer}: the host is lost"),
    }
}
