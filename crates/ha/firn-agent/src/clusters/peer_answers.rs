//! The answers to requests of peers that concern a cluster.

use std::sync::Arc;

use firn_control::HostName;
use firn_control::api::{
    MEMBER, MOVE_VM, MOVED, MoveReport, MoveVmRequest, PROTECTED, ProtectVmRequest,
    ProtectionOptions, RUN_MOVED, RunMovedRequest,
};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, SupervisorRequest, VmName};
use hyper::body::Incoming;
use serde_json::Value;

use super::moved_here::{begin_generation, run_moved_vm};
use super::protect::protect_cluster;
use crate::agent::Agent;
use crate::http::{self, HttpResponse};
use crate::moves::spawn_move;
use crate::protect;

/// Answers a peer that makes the global checkpoints of a cluster with a VM of this host.
pub(crate) async fn answer_peer(
    agent: &Arc<Agent>,
    peer: HostName,
    path: &str,
    request: hyper::Request<Incoming>,
) -> HttpResponse {
    if let Some((vm, MOVE_VM)) = path.split_once('/') {
        return match answer_move(agent, vm, request).await {
            Ok(report) => http::json_response(&report),
            Err(failure) => http::failure_response(&failure),
        };
    }
    let reply = match path.split_once('/') {
        Some((vm, what @ (RUN_MOVED | MOVED))) => {
            answer_moved(agent, peer, vm, what, request).await
        }
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

/// Answers a peer whose user moves a VM of this host.
async fn answer_move(
    agent: &Arc<Agent>,
    vm: &str,
    request: hyper::Request<Incoming>,
) -> Result<MoveReport, Failure> {
    let vm = parse_vm_name(vm)?;
    let MoveVmRequest { to, .. } = http::read_json(request).await?;
    spawn_move(agent, MoveVmRequest { vm, to }).await
}

/// Answers the primary of a VM that moves here. The work continues when the peer disconnects.
async fn answer_moved(
    agent: &Arc<Agent>,
    peer: HostName,
    vm: &str,
    what: &str,
    request: hyper::Request<Incoming>,
) -> Result<Value, Failure> {
    let vm = parse_vm_name(vm)?;
    let wanted: RunMovedRequest = http::read_json(request).await?;
    let (agent, is_run) = (Arc::clone(agent), what == RUN_MOVED);
    let done = tokio::spawn(async move {
        match is_run {
            true => run_moved_vm(&agent, &peer, &vm, &wanted).await,
            false => begin_generation(&agent, &peer, &vm, &wanted).await,
        }
    });
    done.await.while_doing("running the VM that moves here")?
}

fn parse_vm_name(vm: &str) -> Result<VmName, Failure> {
    VmName::new(vm).while_doing_as(FailureKind::Usage, "naming a VM")
}

/// Answers a peer that runs VMs of a cluster, and requests that this host protects it.
pub(crate) async fn answer_reprotect(
    agent: &Arc<Agent>,
    name: &str,
    request: hyper::Request<Incoming>,
) -> HttpResponse {
    let kept = async {
        let name = VmName::new(name).while_doing_as(FailureKind::Usage, "naming a cluster")?;
        let ProtectionOptions { interval_ms, .. } = http::read_json(request).await?;
        // The work continues when the peer disconnects.
        let agent = Arc::clone(agent);
        let begun = tokio::spawn(async move { protect_cluster(&agent, &name, interval_ms).await });
        begun.await.while_doing("protecting the cluster")?
    };
    match kept.await {
        Ok(record) => http::json_response(&record),
        Err(failure) => http::failure_response(&failure),
    }
}
