//! The server for this host: `firn` commands, at a socket for its owner alone; metrics, and the page.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firn_control::api::{
    CLUSTERS, DRAIN, FAILOVER, MEMBERS, METRICS, MOVE, PROTECT, ProtectVmRequest, STATUS,
};
use firn_supervisor::{Failure, FailureKind, SupervisorReply};
use http_body_util::channel::Channel;
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use serde_json::Value;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::sleep;

use crate::agent::Agent;
use crate::http::{self, HttpResponse};
use crate::metrics::MetricSources;
use crate::page::access::{self, Entrance};
use crate::page::routes;
use crate::replies::{REPLIES_MAX, answer_with_progress, forward_replies};
use crate::{clusters, metrics, moves, protect, status};

/// Maximum number of connections at once.
const CONNECTIONS_MAX: usize = 64;

/// How long to wait when the system has no more descriptors.
const EXHAUSTED_WAIT: Duration = Duration::from_millis(100);

/// Answers commands. Never returns.
pub(crate) async fn serve_commands(agent: Arc<Agent>, listener: UnixListener) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            sleep(EXHAUSTED_WAIT).await;
            continue;
        };
        let agent = Arc::clone(&agent);
        tokio::spawn(async move {
            // A client that disconnects is no error.
            let _ = http::serve_connection(stream, |request| {
                answer_command(Arc::clone(&agent), request)
            })
            .await;
            drop(permit);
        });
    }
}

/// Answers requests for metrics and for the page. Never returns.
pub(crate) async fn serve_metrics(agent: Arc<Agent>, listener: TcpListener) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            sleep(EXHAUSTED_WAIT).await;
            continue;
        };
        let agent = Arc::clone(&agent);
        tokio::spawn(async move {
            let _ = http::serve_connection(stream, |request| {
                answer_loopback(Arc::clone(&agent), request)
            })
            .await;
            drop(permit);
        });
    }
}

async fn answer_command(agent: Arc<Agent>, request: Request<Incoming>) -> HttpResponse {
    if routes::is_for_page(&request) {
        return routes::answer_page(agent, Entrance::Socket, request).await;
    }
    if request.uri().path() != METRICS && !access::is_of_command(request.headers()) {
        let text = "this is the API of commands, which no page in a browser may use";
        return http::failure_response(&Failure::new(FailureKind::Refused, text));
    }
    if request.uri().path().starts_with(CLUSTERS) {
        return clusters::commands::answer_command(&agent, request).await;
    }
    match (request.method(), request.uri().path()) {
        (&Method::GET, STATUS) => match status::collect_status(&agent).await {
            Ok(cluster) => http::json_response(&cluster),
            Err(failure) => http::failure_response(&failure),
        },
        (&Method::GET, MEMBERS) => match agent.membership.membership_view(&agent.config.name).await
        {
            Ok(view) => http::json_response(&view),
            Err(failure) => http::failure_response(&failure),
        },
        (&Method::POST, FAILOVER) => match answer_failover(agent, request).await {
            Ok(facts) => http::json_response(&facts),
            Err(failure) => http::failure_response(&failure),
        },
        (&Method::POST, PROTECT) => match http::read_json(request).await {
            Ok(wanted) => answer_protect(agent, wanted),
            Err(failure) => http::failure_response(&failure),
        },
        (&Method::POST, MOVE) => match http::read_json(request).await {
            Ok(wanted) => answer_with_progress(|progress| async move {
                moves::move_vm(&agent, wanted, &progress).await
            }),
            Err(failure) => http::failure_response(&failure),
        },
        (&Method::POST, DRAIN) => match http::read_json(request).await {
            Ok(wanted) => answer_with_progress(|progress| async move {
                moves::drain_host(&agent, wanted, &progress).await
            }),
            Err(failure) => http::failure_response(&failure),
        },
        _ => answer_metrics(agent, request).await,
    }
}

/// Answers a request at the address for metrics.
async fn answer_loopback(agent: Arc<Agent>, request: Request<Incoming>) -> HttpResponse {
    match routes::is_for_page(&request) {
        true => routes::answer_page(agent, Entrance::Loopback, request).await,
        false => answer_metrics(agent, request).await,
    }
}

async fn answer_metrics(agent: Arc<Agent>, request: Request<Incoming>) -> HttpResponse {
    if (request.method(), request.uri().path()) != (&Method::GET, METRICS) {
        return http::not_found_response(&request);
    }
    let sources = MetricSources {
        vms: status::list_vms(&agent).await.unwrap_or_default(),
        peers: agent.peers.peer_views(),
        networks: agent.networks.network_views(),
        refused: agent.rejections.counts_by_word(),
        membership: agent.observations.membership(),
        takeovers: agent.observations.takeovers(),
        drained: agent.paths.is_drained(),
        now_s: unix_seconds(),
    };
    match metrics::render_metrics(&sources) {
        Ok(text) => http::bytes_response(StatusCode::OK, metrics::CONTENT_TYPE, text.into_bytes()),
        Err(error) => http::failure_response(&Failure::from_error(FailureKind::Other, &error)),
    }
}

/// The time, in seconds since 1970.
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

async fn answer_failover(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Value, Failure> {
    let wanted = http::read_json(request).await?;
    clusters::manual::fail_over(&agent, &wanted).await
}

/// Protects a VM. That continues when the client disconnects.
fn answer_protect(agent: Arc<Agent>, wanted: ProtectVmRequest) -> HttpResponse {
    let (reply_sender, replies) = mpsc::channel(REPLIES_MAX);
    let (lines, body) = Channel::new(REPLIES_MAX);
    tokio::spawn(forward_replies(replies, lines));
    tokio::spawn(async move {
        let progress = reply_sender.clone();
        let on_progress =
            move |now: &_| drop(progress.try_send(SupervisorReply::Progress(Clone::clone(now))));
        let last = match protect::protect_vm(&agent, wanted, on_progress).await {
            Ok(facts) => SupervisorReply::Done { facts },
            Err(failure) => SupervisorReply::Failed(failure),
        };
        // The client may have disconnected.
        let _ = reply_sender.send(last).await;
    });
    http::response_with_body(StatusCode::OK, "application/x-ndjson", body)
}
