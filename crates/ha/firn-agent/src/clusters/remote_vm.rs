//! Requests to a VM of a cluster, at its host.

use std::sync::Arc;
use std::time::Duration;

use firn_control::api::{MEMBER, PROTECTED, ProtectVmRequest, ProtectionOptions, VMS};
use firn_control::{ClusterVm, HostName};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, SupervisorRequest, VmName};
use hyper::body::Incoming;
use serde::Serialize;
use serde_json::Value;
use tokio::time::timeout;

use crate::agent::Agent;
use crate::http::{self, HttpResponse};
use crate::peer_connection::PeerConnection;
use crate::protect;

/// How long a VM's supervisor may take for an answer that needs no other work.
pub(super) const ASK_WAIT: Duration = Duration::from_secs(10);
/// How long a VM may take until a failover is possible: all of its memory is copied.
pub(super) const PROTECT_WAIT: Duration = Duration::from_secs(3600);
/// How long a backup may take to agree that it never runs the VM.
pub(super) const RELEASE_WAIT: Duration = Duration::from_secs(30);

/// A VM of a cluster, and the connection to its host, which is reused from request to request.
pub(super) struct RemoteVm {
    agent: Arc<Agent>,
    placed: ClusterVm,
    link: Option<PeerConnection>,
}

impl RemoteVm {
    pub(super) fn new(agent: &Arc<Agent>, placed: &ClusterVm) -> Self {
        Self { agent: Arc::clone(agent), placed: placed.clone(), link: None }
    }

    /// Sends a request to its supervisor.
    pub(super) async fn ask_supervisor(
        &mut self,
        request: SupervisorRequest,
        wait: Duration,
    ) -> Result<Value, Failure> {
        if self.placed.host == self.agent.config.name {
            let vm = self.placed.vm.clone();
            return self.agent.run_blocking(move |vms| vms.ask_supervisor(&vm, &request)).await;
        }
        self.post_request(MEMBER, &request, wait).await
    }

    /// Has the VM protected by this host; returns when a failover is possible.
    pub(super) async fn request_protection(
        &mut self,
        interval_ms: u64,
        cluster: Option<VmName>,
    ) -> Result<Value, Failure> {
        let how = ProtectionOptions { interval_ms, predicts: true, cluster };
        self.post_request(PROTECTED, &how, PROTECT_WAIT).await
    }

    async fn post_request(
        &mut self,
        what: &str,
        body: &impl Serialize,
        wait: Duration,
    ) -> Result<Value, Failure> {
        let ClusterVm { vm, host, .. } = &self.placed;
        let path = format!("{VMS}/{vm}/{what}");
        let body = serde_json::to_vec(body).while_doing("writing a request")?;
        let mut link = match self.link.take().filter(|link| !link.is_closed()) {
            Some(link) => link,
            None => {
                PeerConnection::open(&self.agent.identity, host, self.agent.peer_address(host)?)
                    .await?
            }
        };
        let late = |_| {
            let text = format!("host {host} has not answered within {} s", wait.as_secs());
            Failure::new(FailureKind::Other, text)
        };
        // After a failure the connection is not reused.
        let reply = timeout(wait, link.post_bytes(&path, body)).await.map_err(late)??;
        self.link = Some(link);
        serde_json::from_slice(&reply).while_doing("reading the answer")
    }
}

/// Answers a peer that makes the global checkpoints of a cluster with a VM of this host.
pub(crate) async fn answer_peer(
    agent: &Arc<Agent>,
    peer: HostName,
    path: &str,
    request: hyper::Request<Incoming>,
) -> HttpResponse {
    let reply = match path.split_once('/') {
        Some((vm, MEMBER)) => answer_member(agent, vm, request).await,
        Some((vm, PROTECTED)) => answer_protect(agent, peer, vm, request).await,
        _ => return http::not_found_response(&request),
    };
    match reply {
        Ok(facts) => http::json_response(&facts),
        Err(failure) => http::failure_response(&failure),
    }
}

async fn answer_member(
    agent: &Arc<Agent>,
    vm: &str,
    request: hyper::Request<Incoming>,
) -> Result<Value, Failure> {
    let vm = parse_vm_name(vm)?;
    let request: SupervisorRequest = http::read_json(request).await?;
    if !matches!(request, SupervisorRequest::Member(_) | SupervisorRequest::ReleaseMember) {
        let text = "a peer may send a VM only requests that concern its cluster";
        return Err(Failure::new(FailureKind::Usage, text));
    }
    agent.run_blocking(move |vms| vms.ask_supervisor(&vm, &request)).await
}

async fn answer_protect(
    agent: &Arc<Agent>,
    backup: HostName,
    vm: &str,
    request: hyper::Request<Incoming>,
) -> Result<Value, Failure> {
    let ProtectionOptions { interval_ms, predicts, cluster } = http::read_json(request).await?;
    let wanted = ProtectVmRequest { vm: parse_vm_name(vm)?, backup, interval_ms, predicts };
    // The work continues when the peer disconnects.
    let agent = Arc::clone(agent);
    let begun = tokio::spawn(async move { protect::protect_member(&agent, wanted, cluster).await });
    begun.await.while_doing("protecting the VM")?
}

fn parse_vm_name(vm: &str) -> Result<VmName, Failure> {
    VmName::new(vm).while_doing_as(FailureKind::Usage, "naming a VM")
}
