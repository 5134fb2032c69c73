//! The server for this host: `firn` commands, at a socket for its owner alone, and metrics.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use firn_supervisor::{Failure, FailureKind, Reply};
use http_body_util::channel::{Channel, Sender};
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use serde_json::Value;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::sleep;

use crate::agent::Agent;
use crate::api::{CLUSTERS, FAILOVER, MEMBERS, METRICS, PROTECT, Protect, STATUS};
use crate::http::{self, Answer};
use crate::{cluster, failover, metrics, protect, together};

/// Maximum number of connections at once.
const CONNECTIONS_MAX: usize = 64;

/// How long to wait when the system has no more descriptors.
const EXHAUSTED_WAIT: Duration = Duration::from_millis(100);

/// Maximum number of replies that wait for the client. Progress that finds no room is dropped.
const REPLIES_MAX: usize = 16;

/// Answers commands. Never returns.
pub(crate) async fn serve(agent: Arc<Agent>, listener: UnixListener) {
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
            let _ = http::serve(stream, |request| answer(Arc::clone(&agent), request)).await;
            drop(permit);
        });
    }
}

/// Answers requests for metrics. Never returns.
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
            let _ =
                http::serve(stream, |request| answer_metrics(Arc::clone(&agent), request)).await;
            drop(permit);
        });
    }
}

async fn answer(agent: Arc<Agent>, request: Request<Incoming>) -> Answer {
    if request.uri().path().starts_with(CLUSTERS) {
        return together::command(&agent, request).await;
    }
    match (request.method(), request.uri().path()) {
        (&Method::GET, STATUS) => match cluster::cluster(&agent).await {
            Ok(cluster) => http::json(&cluster),
            Err(failure) => http::refusal(&failure),
        },
        (&Method::GET, MEMBERS) => match agent.membership.view(&agent.config.name).await {
            Ok(view) => http::json(&view),
            Err(failure) => http::refusal(&failure),
        },
        (&Method::POST, FAILOVER) => match failing_over(agent, request).await {
            Ok(facts) => http::json(&facts),
            Err(failure) => http::refusal(&failure),
        },
        (&Method::POST, PROTECT) => match http::read(request).await {
            Ok(wanted) => protecting(agent, wanted),
            Err(failure) => http::refusal(&failure),
        },
        _ => answer_metrics(agent, request).await,
    }
}

async fn answer_metrics(agent: Arc<Agent>, request: Request<Incoming>) -> Answer {
    if (request.method(), request.uri().path()) != (&Method::GET, METRICS) {
        return http::unknown(&request);
    }
    let vms = cluster::vms(&agent).await.unwrap_or_default();
    let (peers, networks) = (agent.peers.views(), agent.networks.views());
    let text = metrics::text(&vms, &peers, &networks, agent.refused.counts().iter());
    match text {
        Ok(text) => http::answer(StatusCode::OK, metrics::KIND, text.into_bytes()),
        Err(error) => http::refusal(&Failure::from_error(FailureKind::Other, &error)),
    }
}

async fn failing_over(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Value, Failure> {
    let wanted = http::read(request).await?;
    failover::fail_over(&agent, &wanted).await
}

/// Protects a VM. That continues when the client disconnects.
fn protecting(agent: Arc<Agent>, wanted: Protect) -> Answer {
    let (tell, replies) = mpsc::channel(REPLIES_MAX);
    let (lines, body) = Channel::new(REPLIES_MAX);
    tokio::spawn(pass_on(replies, lines));
    tokio::spawn(async move {
        let progress = tell.clone();
        let on_progress =
            move |now: &_| drop(progress.try_send(Reply::Progress(Clone::clone(now))));
        let last = match protect::protect(&agent, wanted, on_progress).await {
            Ok(facts) => Reply::Done { facts },
            Err(failure) => Reply::Failed(failure),
        };
        // The client may have disconnected.
        let _ = tell.send(last).await;
    });
    http::answer_with(StatusCode::OK, "application/x-ndjson", body)
}

async fn pass_on(mut replies: mpsc::Receiver<Reply>, mut lines: Sender<Bytes>) {
    while let Some(reply) = replies.recv().await {
        // It consists of strings and numbers, so nothing in it can fail to serialize.
        let mut line = serde_json::to_vec(&reply).unwrap_or_default();
        line.push(b'\n');
        if lines.send_data(line.into()).await.is_err() {
            return;
        }
    }
}
