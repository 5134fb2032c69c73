//! The answers to `firn cluster` commands of this host.

use std::sync::Arc;

use firn_control::api::{CLUSTERS, ProtectionOptions};
use firn_control::{ClusterState, StoredCluster};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, VmName};
use hyper::Method;
use hyper::body::Incoming;

use super::checkpoint_task::CheckpointTask;
use super::cluster_store::ClusterStore;
use super::{create, failover, forget, protect, release};
use crate::agent::Agent;
use crate::http::{self, HttpResponse};

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
