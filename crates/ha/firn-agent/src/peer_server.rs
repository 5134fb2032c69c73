//! The server for peers, and for clients of the page: a TLS handshake, then requests.
//!
//! A client that has not proved its identity yet costs a socket and a TLS state, for at most 5 s.
//! At most 64 clients are in that state: when one more connects, the oldest handshake is aborted.
//! So a peer, whose handshake takes milliseconds, gets through while other clients flood the port.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use firn_control::HostName;
use firn_control::api::{
    DRAINED, DrainMark, HEARTBEAT, HeartbeatAnswer, KEEP_PROTECTED_PATH, MEMBERS, NETWORKS,
    STANDBYS, VMS,
};
use hyper::body::Incoming;
use hyper::{Method, Request};
use tokio::io::{self, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::agent::Agent;
use crate::http::{self, HttpResponse};
use crate::identity::peer_of;
use crate::page::access::Entrance;
use crate::page::routes;
use crate::rejections::RejectionReason;
use crate::{clusters, moves, standbys, status, switch, tunnel};

/// Maximum time of a handshake.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(5);

/// Maximum number of handshakes at once.
const HANDSHAKES_MAX: usize = 64;

/// How long, and how many bytes, a refused client is read from.
const DRAIN_WAIT: Duration = Duration::from_secs(1);
const DRAIN_BYTES_MAX: u64 = 64 << 10;

/// Maximum number of connections of peers at once.
const CONNECTIONS_MAX: usize = 512;

/// How long to wait when the system has no more descriptors.
const EXHAUSTED_WAIT: Duration = Duration::from_millis(100);

/// Accepts connections of peers. Never returns.
pub(crate) async fn accept_peers(agent: Arc<Agent>, listener: TcpListener) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut greetings = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                abort_oldest_handshake(&agent, &mut greetings);
                let greeting = accept_connection(Arc::clone(&agent), Arc::clone(&room), stream);
                greetings.push_back(tokio::spawn(greeting).abort_handle());
            }
            Err(error) => {
                tracing::warn!("can't take a connection: {error}");
                sleep(EXHAUSTED_WAIT).await;
            }
        }
    }
}

fn abort_oldest_handshake(agent: &Agent, greetings: &mut VecDeque<AbortHandle>) {
    greetings.retain(|greeting| !greeting.is_finished());
    if greetings.len() >= HANDSHAKES_MAX {
        if let Some(oldest) = greetings.pop_front() {
            oldest.abort();
            agent.rejections.add_rejection(RejectionReason::Crowd);
        }
    }
}

/// Handles one connection until its handshake is done; a new task serves it from then on.
async fn accept_connection(agent: Arc<Agent>, room: Arc<Semaphore>, stream: TcpStream) {
    let (peer, stream) = match authenticate_peer(&agent, stream).await {
        Ok(met) => met,
        Err(refusal) => {
            tracing::debug!("a connection is refused: {}", refusal.as_word());
            return agent.rejections.add_rejection(refusal);
        }
    };
    let Ok(permit) = room.try_acquire_owned() else {
        return agent.rejections.add_rejection(RejectionReason::Crowd);
    };
    tokio::spawn(async move {
        let handle = |request| answer_peer(Arc::clone(&agent), peer.clone(), request);
        if let Err(error) = http::serve_connection(stream, handle).await {
            tracing::debug!("a connection of host {peer} ends: {error}");
        }
        drop(permit);
    });
}

async fn authenticate_peer(
    agent: &Agent,
    stream: TcpStream,
) -> Result<(HostName, TlsStream<TcpStream>), RejectionReason> {
    tunnel::configure_socket(&stream).map_err(|_| RejectionReason::Protocol)?;
    let server = agent.identity.server.clone().ok_or(RejectionReason::Protocol)?;
    let acceptor = TlsAcceptor::from(server);
    let greeted = timeout(HANDSHAKE_WAIT, acceptor.accept(stream).into_fallible()).await;
    let stream = match greeted.map_err(|_| RejectionReason::Slow)? {
        Ok(stream) => stream,
        Err((error, stream)) => {
            drain_refused(stream).await;
            return Err(RejectionReason::from_handshake_error(&error));
        }
    };
    let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let certificate = certificates.first().ok_or(RejectionReason::NoCertificate)?;
    let peer =
        peer_of(certificate, &agent.config.client_names()).map_err(|_| RejectionReason::Name)?;
    Ok((peer, stream))
}

/// Reads from a refused client, which has been sent the reason and may still be sending. If the
/// connection were closed at once, it would be reset, and the reason could be lost on the way.
async fn drain_refused(mut stream: TcpStream) {
    let mut sink = io::sink();
    let rest = async {
        stream.shutdown().await?;
        io::copy(&mut (&mut stream).take(DRAIN_BYTES_MAX), &mut sink).await
    };
    // A failure here matters to the client only.
    let _ = timeout(DRAIN_WAIT, rest).await;
}

async fn answer_peer(
    agent: Arc<Agent>,
    peer: HostName,
    request: Request<Incoming>,
) -> HttpResponse {
    if routes::is_for_page(&request) {
        return routes::answer_page(agent, Entrance::Certificate, request).await;
    }
    if !agent.config.peers.contains_key(&peer) {
        return http::not_found_response(&request);
    }
    let path = request.uri().path().to_owned();
    let standby = path.strip_prefix(STANDBYS);
    if let (&Method::POST, Some(network)) = (request.method(), path.strip_prefix(NETWORKS)) {
        return switch::links::accept_link(&agent, peer, network, request);
    }
    let vm = path.strip_prefix(VMS).and_then(|rest| rest.strip_prefix('/'));
    if let (&Method::POST, Some(rest)) = (request.method(), vm) {
        return clusters::peer_answers::answer_peer(&agent, peer, rest, request).await;
    }
    match (request.method(), path.as_str(), standby) {
        (&Method::GET, HEARTBEAT, _) => {
            http::json_response(&HeartbeatAnswer { host: agent.config.name.clone() })
        }
        (&Method::GET, VMS, _) => match status::list_vms(&agent).await {
            Ok(vms) => http::json_response(&vms),
            Err(failure) => http::failure_response(&failure),
        },
        (&Method::POST, DRAINED, _) => answer_mark(&agent, request).await,
        (&Method::POST, MEMBERS, _) => agent.membership.answer_peer(&peer, request).await,
        (&Method::POST, path, _) if path.starts_with(KEEP_PROTECTED_PATH) => {
            clusters::peer_answers::answer_reprotect(
                &agent,
                &path[KEEP_PROTECTED_PATH.len()..],
                request,
            )
            .await
        }
        (&Method::POST, _, Some(vm)) => standbys::answer_standby(&agent, peer, vm, request).await,
        _ => http::not_found_response(&request),
    }
}

/// Answers a peer whose user drains this host, or ends that.
async fn answer_mark(agent: &Agent, request: Request<Incoming>) -> HttpResponse {
    let mark = http::read_json::<DrainMark>(request).await;
    match mark.and_then(|mark| moves::set_mark(agent, mark).map(|()| mark)) {
        Ok(mark) => http::json_response(&mark),
        Err(failure) => http::failure_response(&failure),
    }
}
