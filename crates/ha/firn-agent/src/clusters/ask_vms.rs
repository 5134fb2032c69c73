//! Requests to all VMs of a cluster at once.

use std::sync::Arc;
use std::time::Duration;

use firn_cluster::VmId;
use firn_control::{ClusterVm, StoredCluster};
use firn_supervisor::{Failure, FailureContext as _, SupervisorRequest};
use serde_json::Value;

use super::remote_vm::RemoteVm;
use crate::agent::Agent;

/// Asks the supervisors of all VMs at once; returns their answers in order, or the first failure.
pub(super) async fn ask_all_vms(
    agent: &Arc<Agent>,
    record: &StoredCluster,
    request: impl Fn(VmId) -> SupervisorRequest,
    wait: Duration,
) -> Result<Vec<Value>, Failure> {
    ask_each_vm(agent, record, request, wait).await.into_iter().collect()
}

pub(super) async fn ask_each_vm(
    agent: &Arc<Agent>,
    record: &StoredCluster,
    request: impl Fn(VmId) -> SupervisorRequest,
    wait: Duration,
) -> Vec<Result<Value, Failure>> {
    let asked: Vec<_> = record
        .numbered_vms()
        .map(|(vm, placed)| {
            let (mut vm, placed, request) =
                (RemoteVm::new(agent, placed), placed.clone(), request(vm));
            tokio::spawn(async move {
                vm.ask_supervisor(request, wait)
                    .await
                    .map_err(|failure| with_vm_context(&placed, failure))
            })
        })
        .collect();
    let mut answers = Vec::new();
    for asked in asked {
        answers.push(asked.await.while_doing("asking a VM").and_then(|answer| answer));
    }
    answers
}

pub(super) fn with_vm_context(placed: &ClusterVm, failure: Failure) -> Failure {
    failure.while_doing(format!("VM {} on host {}", placed.vm, placed.host))
}
