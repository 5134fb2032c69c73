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

use firn_control::HostName;
use firn_control::api::FRAMES;
use firn_supervisor::{Failure, FailureKind};
use hyper::Request;
use hyper::body::Incoming;
use hyper::header::UPGRADE;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::time::sleep;

use super::carry;
use super::counters::LinkTarget;
use super::network::NetworkSwitch;
use crate::agent::Agent;
use crate::http::{self, HttpResponse};
use crate::peer_connection::PeerConnection;
use crate::tunnel;

/// Time between two tries to open a link.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Links a network to a peer's. Never returns.
pub(super) async fn dial_peer(agent: Arc<Agent>, network: Arc<NetworkSwitch>, peer: HostName) {
    let to = LinkTarget::Host(peer.clone());
    loop {
        match open_link(&agent, &network, &peer).await {
            Ok(stream) => carry_link(&agent, &network, &peer, stream).await,
            Err(failure) => network.record_trouble(&to, &failure.to_string()),
        }
        sleep(RETRY_INTERVAL).await;
    }
}

async fn open_link(
    agent: &Agent,
    network: &NetworkSwitch,
    peer: &HostName,
) -> Result<TokioIo<Upgraded>, Failure> {
    let link = PeerConnection::open(&agent.identity, peer, agent.peer_address(peer)?).await?;
    link.link_network(&network.name).await
}

/// Carries frames until the link breaks, or the peer is lost.
async fn carry_link(
    agent: &Agent,
    network: &Arc<NetworkSwitch>,
    peer: &HostName,
    stream: TokioIo<Upgraded>,
) {
    let to = LinkTarget::Host(peer.clone());
    let (Some(port), Ok(health)) = (network.connect_port(&to), agent.peer_health(peer)) else {
        return;
    };
    tracing::info!("network {}: linked to host {peer}", network.name);
    let why = tokio::select! {
        done = carry::carry_stream(stream, &port) => match done {
            Ok(()) => "it has closed the link".to_owned(),
            Err(error) => error.to_string(),
        },
        () = tunnel::wait_for_loss(health) => "the host is lost".to_owned(),
    };
    drop(port);
    network.record_trouble(&to, &why);
}

/// Answers a peer that requests a link.
pub(crate) fn accept_link(
    agent: &Arc<Agent>,
    peer: HostName,
    name: &str,
    request: Request<Incoming>,
) -> HttpResponse {
    let network = match check_request(agent, &peer, name, &request) {
        Ok(network) => Arc::clone(network),
        Err(failure) => {
            tracing::debug!("no link of network {name} for host {peer}: {failure}");
            return http::failure_response(&failure);
        }
    };
    let (shared, held, from) = (Arc::clone(agent), Arc::clone(&network), peer.clone());
    let link = tokio::spawn(async move {
        // A connection that does not become a link is dropped.
        if let Ok(stream) = hyper::upgrade::on(request).await {
            carry_link(&shared, &held, &from, TokioIo::new(stream)).await;
        }
    });
    network.replace_link(&peer, link.abort_handle());
    http::upgrade_response(FRAMES)
}

fn check_request<'a>(
    agent: &'a Agent,
    peer: &HostName,
    name: &str,
    request: &Request<Incoming>,
) -> Result<&'a Arc<NetworkSwitch>, Failure> {
    if request.headers().get(UPGRADE).is_none_or(|it| it != FRAMES) {
        let text = format!("a link needs a connection that can become {FRAMES}");
        return Err(Failure::new(FailureKind::Usage, text));
    }
    if *peer > agent.config.name {
        let text = format!("host {} links itself to {peer}, not the other way", agent.config.name);
        return Err(Failure::new(FailureKind::Usage, text));
    }
    agent.networks.find_network(name).ok_or_else(|| {
        let text = format!("host {} has no network {name}", agent.config.name);
        Failure::new(FailureKind::Usage, text).with_hint("name it in the configuration there")
    })
}
