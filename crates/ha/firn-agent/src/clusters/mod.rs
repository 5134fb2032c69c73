//! Virtual clusters: VMs of several hosts that are checkpointed as one, and fail over as one to
//! this host, their backup.
//!
//! ```text
//!   create    get the address of each VM's card                      state: made
//!   protect   all VMs join, and are protected by this host           state: protected, and the
//!             global checkpoints, several a second (checkpoints)       newest checkpoint
//!   failover  no more of them; all standbys run from the newest,     state: failing over,
//!             in the next generation                                   failed over
//!   release   each backup agrees, each VM's output is released,      state: made
//!             each VM leaves
//!   forget    all hosts that the record names are gone               the record has ended
//! ```
//!
//! The host that is the backup of all VMs makes the global checkpoints, and stores the cluster in a
//! file: its loss stops no VM, and the state that a failover needs is at the host that fails over.
//! Which host may run the VMs is decided apart. Without `[membership]`, the user who requests a
//! failover knows that the primaries are gone. With it, a record decides, output obeys leases, and
//! all VMs fail over without a person (`cluster_record`; the planning in `reconcile` is pure).

use std::sync::Arc;
use std::time::Duration;

use firn_cluster::VmId;
use firn_control::api::{CLUSTERS, ProtectionOptions};
use firn_control::{ClusterState, ClusterVm, StoredCluster};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, SupervisorRequest, VmName};
use hyper::Method;
use hyper::body::Incoming;
use serde_json::Value;

use crate::agent::Agent;
use crate::http::{self, HttpResponse};

mod checkpoints;
mod cluster_lock;
mod cluster_record;
mod cluster_store;
mod create;
mod failover;
mod forget;
mod host_actions;
mod host_evidence;
mod protect;
mod reconcile;
mod reconciler;
mod release;
mod remote_vm;
mod reprotect;

pub(crate) use cluster_record::acquire_lease;
pub(crate) use reconciler::ensure_reconciler;
pub(crate) use remote_vm::answer_peer;
pub(crate) use reprotect::answer_reprotect;

use checkpoints::CheckpointTask;
use cluster_lock::ClusterLocks;
use cluster_store::ClusterStore;
use remote_vm::RemoteVm;

/// Maximum number of VMs of a cluster.
const VMS_MAX: usize = 64;

/// The clusters of this agent: locks, so that commands about a cluster run one after another, and
/// reconcile loops.
#[derive(Default)]
pub(crate) struct ClusterManager {
    locks: ClusterLocks,
    reconcilers: reconciler::ClusterReconcilers,
}

/// Answers a `firn cluster` command of this host.
pub(crate) async fn answer_command(
    agent: &Arc<Agent>,
    request: hyper::Request<Incoming>,
) -> HttpResponse {
    let path = request.uri().path().to_owned();
    let rest = path.strip_prefix(CLUSTERS).unwrap_or_default();
    let parts: Vec<&str> = rest.split('/').skip(1).collect();
    let reply = match (request.method().clone(), &parts[..]) {
        (Method::GET, []) => {
            list_clusters(agent).await.map(|records| http::json_response(&records))
        }
        (Method::POST, []) => match http::read_json(request).await {
            Ok(wanted) => create::create_cluster(agent, wanted)
                .await
                .map(|record| http::json_response(&record)),
            Err(failure) => Err(failure),
        },
        (Method::POST, [name, verb]) => match VmName::new(*name) {
            Ok(name) if *verb == "forget" => forget::forget_record(agent, &name)
                .await
                .map(|forgotten| http::json_response(&forgotten)),
            Ok(name) => run_command(agent, name, verb, request)
                .await
                .map(|record| http::json_response(&record)),
            Err(error) => Err(error).while_doing_as(FailureKind::Usage, "naming a cluster"),
        },
        _ => return http::not_found_response(&request),
    };
    reply.unwrap_or_else(|failure| http::failure_response(&failure))
}

/// Runs a command about one cluster. It continues when the client disconnects.
async fn run_command(
    agent: &Arc<Agent>,
    name: VmName,
    verb: &str,
    request: hyper::Request<Incoming>,
) -> Result<StoredCluster, Failure> {
    let agent = Arc::clone(agent);
    let done = match verb {
        "protect" => {
            let ProtectionOptions { interval_ms, .. } = http::read_json(request).await?;
            tokio::spawn(async move { protect::protect_cluster(&agent, &name, interval_ms).await })
        }
        "checkpoint" => tokio::spawn(async move { take_checkpoint(&agent, &name).await }),
        "failover" => tokio::spawn(async move { failover::fail_over_cluster(&agent, &name).await }),
        "release" => tokio::spawn(async move { release::release_cluster(&agent, &name).await }),
        _ => return Err(Failure::new(FailureKind::Usage, format!("a cluster has no {verb}"))),
    };
    done.await.while_doing("asking the agent")?
}

async fn list_clusters(agent: &Arc<Agent>) -> Result<Vec<StoredCluster>, Failure> {
    let mut records = ClusterStore::from_paths(&agent.paths).list_clusters()?;
    for record in &mut records {
        // A locked cluster may be busy with a long command.
        let Some(sole) = agent.clusters.locks.try_lock(&record.name) else { continue };
        record.trouble = match (&*sole, record.state) {
            (Some(cutting), _) => cutting.last_failure(),
            (None, ClusterState::Protected) => Some(no_checkpoints_text(&record.name)),
            _ => None,
        };
    }
    Ok(records)
}

fn no_checkpoints_text(name: &VmName) -> String {
    format!(
        "no global checkpoints are made since this agent was started: `firn cluster failover {name}`, or `firn cluster release {name}`"
    )
}

async fn take_checkpoint(agent: &Arc<Agent>, name: &VmName) -> Result<StoredCluster, Failure> {
    let sole = agent.clusters.locks.lock_cluster(name).await;
    let records = ClusterStore::from_paths(&agent.paths);
    let record = records.require_cluster(name)?;
    let order = sole.as_ref().map(CheckpointTask::request_checkpoint).ok_or_else(|| {
        let text = match record.state {
            ClusterState::Protected => no_checkpoints_text(name),
            _ => format!("cluster {name} is not protected"),
        };
        Failure::new(FailureKind::Usage, text).with_hint(format!("`firn cluster protect {name}`"))
    })?;
    drop(sole);
    let checkpoint = order.await?;
    Ok(StoredCluster { checkpoint: Some(checkpoint), ..record })
}

/// Asks the supervisors of all VMs at once; returns their answers in order, or the first failure.
async fn ask_all_vms(
    agent: &Arc<Agent>,
    record: &StoredCluster,
    request: impl Fn(VmId) -> SupervisorRequest,
    wait: Duration,
) -> Result<Vec<Value>, Failure> {
    ask_each_vm(agent, record, request, wait).await.into_iter().collect()
}

async fn ask_each_vm(
    agent: &Arc<Agent>,
    record: &StoredCluster,
    request: impl Fn(VmId) -> SupervisorRequest,
    wait: Duration,
) -> Vec<Result<Value, Failure>> {
    let asked: Vec<_> = record
        .numbered_vms()
        .map(|(vm, placed)| {
            let (mut far, placed, request) =
                (RemoteVm::new(agent, placed), placed.clone(), request(vm));
            tokio::spawn(async move {
                far.ask_supervisor(request, wait)
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

fn with_vm_context(placed: &ClusterVm, failure: Failure) -> Failure {
    failure.while_doing(format!("VM {} on host {}", placed.vm, placed.host))
}
