//! Requests of `firn` commands to the agent of their host.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use firn_supervisor::{
    Failure, FailureContext as _, FailureKind, OnProgress, RuntimeDir, SupervisorReply,
};
use http_body_util::{BodyExt as _, Full};
pub use hyper::Method;
use hyper::body::Incoming;
use hyper::client::conn::http1::handshake;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::api::{
    AgentStatus, FAILOVER, FailoverVmRequest, MEMBERS, MembershipView, PROTECT, ProtectVmRequest,
    STATUS,
};
use crate::http_client;
use crate::paths::AgentPaths;

/// How long an agent may take to begin its answer. It needs some seconds to ask its peers.
const ANSWER_WAIT: Duration = Duration::from_secs(15);

/// Maximum length of a reply, in bytes.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Reads the status of all hosts and VMs, as this host's agent sees them.
///
/// # Errors
/// If there is no agent, or the failure that it reports.
pub fn read_status(base: &RuntimeDir) -> Result<AgentStatus, Failure> {
    block_on(async {
        let asked = send_request(base, Method::GET, STATUS, None::<&()>);
        let answer = timeout(ANSWER_WAIT, async { http_client::read_answer(asked.await?).await });
        answer.await.map_err(|_| silent_agent())?
    })
}

/// Reads the records of the hosts' consensus from this host's agent.
///
/// # Errors
/// If there is no agent, or it has no membership.
pub fn read_records(base: &RuntimeDir) -> Result<MembershipView, Failure> {
    block_on(async {
        let asked = send_request(base, Method::GET, MEMBERS, None::<&()>);
        let answer = timeout(ANSWER_WAIT, async { http_client::read_answer(asked.await?).await });
        answer.await.map_err(|_| silent_agent())?
    })
}

/// Protects a VM; returns when a failover is possible. The protection continues when the caller
/// ends.
///
/// # Errors
/// Why it is not protected.
pub fn protect_vm(
    base: &RuntimeDir,
    wanted: &ProtectVmRequest,
    on_progress: OnProgress<'_>,
) -> Result<Value, Failure> {
    send_long_request(base, PROTECT, wanted, on_progress)
}

/// Sends a request that takes long: the agent reports its progress. It continues when the caller
/// ends.
///
/// # Errors
/// The failure that the agent reports, or that there is none.
pub fn send_long_request(
    base: &RuntimeDir,
    path: &str,
    wanted: &impl Serialize,
    on_progress: OnProgress<'_>,
) -> Result<Value, Failure> {
    block_on(async {
        let asked = timeout(ANSWER_WAIT, send_request(base, Method::POST, path, Some(wanted)));
        let answer = asked.await.map_err(|_| silent_agent())??;
        match answer.status().is_success() {
            true => read_replies(answer, on_progress).await,
            false => Err(http_client::read_failure(answer).await),
        }
    })
}

/// Runs a standby's VM on this host, by its record; returns when it runs. That may take the time of
/// some leases.
///
/// # Errors
/// Why it does not run, or that there is no agent.
pub fn fail_over_vm(base: &RuntimeDir, wanted: &FailoverVmRequest) -> Result<Value, Failure> {
    block_on(async {
        http_client::read_answer(send_request(base, Method::POST, FAILOVER, Some(wanted)).await?)
            .await
    })
}

/// Sends a request of `firn cluster` to this host's agent: about virtual clusters, or to forget a
/// record. This function has no timeout, because a failover or a protection may take long.
///
/// # Errors
/// The failure that the agent reports.
pub fn send_cluster_request<T: DeserializeOwned>(
    base: &RuntimeDir,
    method: Method,
    path: &str,
    body: Option<&impl Serialize>,
) -> Result<T, Failure> {
    block_on(async {
        http_client::read_answer(send_request(base, method, path, body).await?).await
    })
}

fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.while_doing("preparing to ask the agent")?.block_on(work)
}

async fn send_request(
    base: &RuntimeDir,
    method: Method,
    path: &str,
    body: Option<&impl Serialize>,
) -> Result<Response<Incoming>, Failure> {
    let request: Request<Full<Bytes>> =
        http_client::build_request(method, "firn-agent", path, body)?;
    let socket = AgentPaths::new(base.clone()).control_socket();
    let stream = UnixStream::connect(&socket).await.map_err(|_| no_agent(&socket))?;
    let (mut sender, connection) =
        handshake(TokioIo::new(stream)).await.while_doing("asking the agent")?;
    tokio::spawn(connection);
    sender.send_request(request).await.while_doing("asking the agent")
}

/// Reads replies up to the last one, a line each.
async fn read_replies(
    answer: Response<Incoming>,
    on_progress: OnProgress<'_>,
) -> Result<Value, Failure> {
    let mut body = answer.into_body();
    let mut rest = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.while_doing("reading the agent's reply")?;
        rest.extend_from_slice(&frame.into_data().unwrap_or_default());
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            match serde_json::from_slice(&line).while_doing("reading the agent's reply")? {
                SupervisorReply::Progress(progress) => on_progress(&progress),
                SupervisorReply::Done { facts } => return Ok(facts),
                SupervisorReply::Failed(failure) => return Err(failure),
            }
        }
        if rest.len() > LINE_BYTES_MAX {
            return Err(Failure::new(FailureKind::Other, "the agent's reply has no end"));
        }
    }
    Err(Failure::new(FailureKind::Interrupted, "the agent ended before it had answered")
        .with_hint("`firn status` shows the state of the VM"))
}

fn no_agent(socket: &Path) -> Failure {
    let text = format!("no agent runs here: no process answers at {}", socket.display());
    Failure::new(FailureKind::Host, text).with_hint("start one: `firn-agent run FILE`")
}

fn silent_agent() -> Failure {
    Failure::new(FailureKind::Other, "the agent does not answer").with_hint("its log shows why")
}
