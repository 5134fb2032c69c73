//! Requests to a VM of a cluster, at its host.

use std::sync::Arc;
use std::time::Duration;

use firn_supervisor::{Context as _, Failure, FailureKind, Request, VmName};
use hyper::body::Incoming;
use serde::Serialize;
use serde_json::Value;
use tokio::time::timeout;

use super::record::Placed;
use crate::agent::Agent;
use crate::api::{MEMBER, PROTECTED, Protect, ProtectHere, VMS};
use crate::host::HostName;
use crate::http::{self, Answer};
use crate::link::Link;
use crate::protect;

/// How long a VM's supervisor may take for an answer that needs no other work.
pub(super) const ASK_WAIT: Duration = Duration::from_secs(10);
/// How long a VM may take until a failover is possible: all of its memory is copied.
pub(super) const PROTECT_WAIT: Duration = Duration::from_secs(3600);
/// How long a backup may take to agree that it never runs the VM.
pub(super) const RELEASE_WAIT: Duration = Duration::from_secs(30);

/// A VM of a cluster, and the connection to its host, which is reused from request to request.
pub(super) struct Far {
    agent: Arc<Agent>,
    placed: Placed,
    link: Option<Link>,
}

impl Far {
    pub(super) fn new(agent: &Arc<Agent>, placed: &Placed) -> Self {
        Self { agent: Arc::clone(agent), placed: placed.clone(), link: None }
    }

    /// Sends a request to its supervisor.
    pub(super) async fn ask(&mut self, request: Request, wait: Duration) -> Result<Value, Failure> {
        if self.placed.host == self.agent.config.name {
            let vm = self.placed.vm.clone();
            return self.agent.blocking(move |vms| vms.ask(&vm, &request)).await;
        }
        self.post(MEMBER, &request, wait).await
    }

    /// Has the VM protected by this host; returns when a failover is possible.
    pub(super) async fn protect(
        &mut self,
        interval_ms: u64,
        cluster: Option<VmName>,
    ) -> Result<Value, Failure> {
        let how = ProtectHere { interval_ms, predicts: true, cluster };
        self.post(PROTECTED, &how, PROTECT_WAIT).await
    }

    async fn post(
        &mut self,
        what: &str,
        body: &impl Serialize,
        wait: Duration,
    ) -> Result<Value, Failure> {
        let Placed { vm, host, .. } = &self.placed;
        let path = format!("{VMS}/{vm}/{what}");
        let body = serde_json::to_vec(body).doing("writing a request")?;
        let mut link = match self.link.take().filter(|link| !link.is_closed()) {
            Some(link) => link,
            None => Link::open(&self.agent.identity, host, self.agent.address(host)?).await?,
        };
        let late = |_| {
            let text = format!("host {host} has not answered within {} s", wait.as_secs());
            Failure::new(FailureKind::Other, text)
        };
        // After a failure the connection is not reused.
        let told = timeout(wait, link.post(&path, body)).await.map_err(late)??;
        self.link = Some(link);
        serde_json::from_slice(&told).doing("reading the answer")
    }
}

/// Answers a peer that makes the global checkpoints of a cluster with a VM of this host.
pub(crate) async fn answer(
    agent: &Arc<Agent>,
    peer: HostName,
    path: &str,
    request: hyper::Request<Incoming>,
) -> Answer {
    let told = match path.split_once('/') {
        Some((vm, MEMBER)) => member(agent, vm, request).await,
        Some((vm, PROTECTED)) => protected(agent, peer, vm, request).await,
        _ => return http::unknown(&request),
    };
    match told {
        Ok(facts) => http::json(&facts),
        Err(failure) => http::refusal(&failure),
    }
}

async fn member(
    agent: &Arc<Agent>,
    vm: &str,
    request: hyper::Request<Incoming>,
) -> Result<Value, Failure> {
    let vm = named(vm)?;
    let request: Request = http::read(request).await?;
    if !matches!(request, Request::Member(_) | Request::ReleaseMember) {
        let text = "a peer may send a VM only requests that concern its cluster";
        return Err(Failure::new(FailureKind::Usage, text));
    }
    agent.blocking(move |vms| vms.ask(&vm, &request)).await
}

async fn protected(
    agent: &Arc<Agent>,
    backup: HostName,
    vm: &str,
    request: hyper::Request<Incoming>,
) -> Result<Value, Failure> {
    let ProtectHere { interval_ms, predicts, cluster } = http::read(request).await?;
    let wanted = Protect { vm: named(vm)?, backup, interval_ms, predicts };
    // The work continues when the peer disconnects.
    let agent = Arc::clone(agent);
    let begun = tokio::spawn(async move { protect::protect_member(&agent, wanted, cluster).await });
    begun.await.doing("protecting the VM")?
}

fn named(vm: &str) -> Result<VmName, Failure> {
    VmName::new(vm).doing_or(FailureKind::Usage, "naming a VM")
}
