//! Requests to a VM of a cluster, at its host.

use std::sync::Arc;
use std::time::Duration;

use firn_control::ClusterVm;
use firn_control::api::{MEMBER, PROTECTED, ProtectionOptions, VMS};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, SupervisorRequest, VmName};
use serde::Serialize;
use serde_json::Value;
use tokio::time::timeout;

use crate::agent::Agent;
use crate::peer_connection::PeerConnection;

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
