//! Links to the switches of other hosts: one for each network and host, opened by the host whose
//! name sorts first.
//!
//! ```text
//!   a: POST /v1/networks/lan, Upgrade: firn-frames  ------>  b
//!      101  <------------------------------------------------'     then frames in both directions,
//!                                                                  in QEMU's framing
//! ```

use std::sync::Arc;
use std::time::Duration;

use firn_supervisor::{Failure, FailureKind};
use hyper::Request;
use hyper::body::Incoming;
use hyper::header::UPGRADE;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::time::sleep;

use super::carry;
use super::lane::To;
use super::network::Network;
use crate::agent::Agent;
use crate::api::FRAMES;
use crate::host::HostName;
use crate::http::{self, Answer};
use crate::link::Link;
use crate::tunnel;

/// Time between two tries to open a link.
const RETRY: Duration = Duration::from_millis(500);

/// Links a network to a peer's. Never returns.
pub(super) async fn dial(agent: Arc<Agent>, network: Arc<Network>, peer: HostName) {
    let to = To::Host(peer.clone());
    loop {
        match reach(&agent, &network, &peer).await {
            Ok(stream) => hold(&agent, &network, &peer, stream).await,
            Err(failure) => network.trouble(&to, &failure.to_string()),
        }
        sleep(RETRY).await;
    }
}

async fn reach(
    agent: &Agent,
    network: &Network,
    peer: &HostName,
) -> Result<TokioIo<Upgraded>, Failure> {
    let link = Link::open(&agent.identity, peer, agent.address(peer)?).await?;
    link.network(&network.name).await
}

/// Carries frames until the link breaks, or the peer is lost.
async fn hold(agent: &Agent, network: &Arc<Network>, peer: &HostName, stream: TokioIo<Upgraded>) {
    let to = To::Host(peer.clone());
    let (Some(port), Ok(health)) = (network.join(&to), agent.health(peer)) else { return };
    tracing::info!("network {}: linked to host {peer}", network.name);
    let why = tokio::select! {
        done = carry::stream(stream, &port) => match done {
            Ok(()) => "it has closed the link".to_owned(),
            Err(error) => error.to_string(),
        },
        () = tunnel::loss(health) => "the host is lost".to_owned(),
    };
    drop(port);
    network.trouble(&to, &why);
}

/// Answers a peer that requests a link.
pub(crate) fn accept(
    agent: &Arc<Agent>,
    peer: HostName,
    name: &str,
    request: Request<Incoming>,
) -> Answer {
    let network = match wanted(agent, &peer, name, &request) {
        Ok(network) => Arc::clone(network),
        Err(failure) => {
            tracing::debug!("no link of network {name} for host {peer}: {failure}");
            return http::refusal(&failure);
        }
    };
    let (shared, held, from) = (Arc::clone(agent), Arc::clone(&network), peer.clone());
    let link = tokio::spawn(async move {
        // A connection that does not become a link is dropped.
        if let Ok(stream) = hyper::upgrade::on(request).await {
            hold(&shared, &held, &from, TokioIo::new(stream)).await;
        }
    });
    network.replace(&peer, link.abort_handle());
    http::switching(FRAMES)
}

fn wanted<'a>(
    agent: &'a Agent,
    peer: &HostName,
    name: &str,
    request: &Request<Incoming>,
) -> Result<&'a Arc<Network>, Failure> {
    if request.headers().get(UPGRADE).is_none_or(|it| it != FRAMES) {
        let text = format!("a link needs a connection that can become {FRAMES}");
        return Err(Failure::new(FailureKind::Usage, text));
    }
    if *peer > agent.config.name {
        let text = format!("host {} links itself to {peer}, not the other way", agent.config.name);
        return Err(Failure::new(FailureKind::Usage, text));
    }
    agent.networks.get(name).ok_or_else(|| {
        let text = format!("host {} has no network {name}", agent.config.name);
        Failure::new(FailureKind::Usage, text).hint("name it in the configuration there")
    })
}
