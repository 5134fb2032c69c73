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

use firn_cluster::Vm;
use firn_supervisor::{Context as _, Failure, FailureKind, Request, VmName};
use hyper::Method;
use hyper::body::Incoming;
use serde_json::Value;

use crate::agent::Agent;
use crate::api::{CLUSTERS, ProtectHere};
use crate::http::{self, Answer};

mod again;
mod agreed;
mod create;
mod cuts;
mod due;
mod failover;
mod far;
mod forget;
mod local;
mod protect;
mod record;
mod release;
mod rests;
mod sole;
mod tend;

pub(crate) use again::keep;
pub(crate) use agreed::lease_for;
pub(crate) use far::answer;
pub use record::{Placed, Record, State};
pub(crate) use tend::tend;

use cuts::Cutting;
use far::Far;
use record::Records;
use sole::Locks;

/// Maximum number of VMs of a cluster.
const VMS_MAX: usize = 64;

/// The clusters of this agent: locks, so that commands about a cluster run one after another, and
/// reconcile loops.
#[derive(Default)]
pub(crate) struct Together {
    locks: Locks,
    tending: tend::Tending,
}

/// Answers a `firn cluster` command of this host.
pub(crate) async fn command(agent: &Arc<Agent>, request: hyper::Request<Incoming>) -> Answer {
    let path = request.uri().path().to_owned();
    let rest = path.strip_prefix(CLUSTERS).unwrap_or_default();
    let parts: Vec<&str> = rest.split('/').skip(1).collect();
    let told = match (request.method().clone(), &parts[..]) {
        (Method::GET, []) => list(agent).await.map(|records| http::json(&records)),
        (Method::POST, []) => match http::read(request).await {
            Ok(wanted) => create::create(agent, wanted).await.map(|record| http::json(&record)),
            Err(failure) => Err(failure),
        },
        (Method::POST, [name, verb]) => match VmName::new(*name) {
            Ok(name) if *verb == "forget" => {
                forget::forget(agent, &name).await.map(|forgotten| http::json(&forgotten))
            }
            Ok(name) => told(agent, name, verb, request).await.map(|record| http::json(&record)),
            Err(error) => Err(error).doing_or(FailureKind::Usage, "naming a cluster"),
        },
        _ => return http::unknown(&request),
    };
    told.unwrap_or_else(|failure| http::refusal(&failure))
}

/// Runs a command about one cluster. It continues when the client disconnects.
async fn told(
    agent: &Arc<Agent>,
    name: VmName,
    verb: &str,
    request: hyper::Request<Incoming>,
) -> Result<Record, Failure> {
    let agent = Arc::clone(agent);
    let done = match verb {
        "protect" => {
            let ProtectHere { interval_ms, .. } = http::read(request).await?;
            tokio::spawn(async move { protect::protect(&agent, &name, interval_ms).await })
        }
        "checkpoint" => tokio::spawn(async move { checkpoint(&agent, &name).await }),
        "failover" => tokio::spawn(async move { failover::failover(&agent, &name).await }),
        "release" => tokio::spawn(async move { release::release(&agent, &name).await }),
        _ => return Err(Failure::new(FailureKind::Usage, format!("a cluster has no {verb}"))),
    };
    done.await.doing("asking the agent")?
}

async fn list(agent: &Arc<Agent>) -> Result<Vec<Record>, Failure> {
    let mut records = Records::of(&agent.place).list()?;
    for record in &mut records {
        // A locked cluster may be busy with a long command.
        let Some(sole) = agent.together.locks.try_lock(&record.name) else { continue };
        record.trouble = match (&*sole, record.state) {
            (Some(cutting), _) => cutting.trouble(),
            (None, State::Protected) => Some(no_cuts(&record.name)),
            _ => None,
        };
    }
    Ok(records)
}

fn no_cuts(name: &VmName) -> String {
    format!(
        "no global checkpoints are made since this agent was started: `firn cluster failover {name}`, or `firn cluster release {name}`"
    )
}

async fn checkpoint(agent: &Arc<Agent>, name: &VmName) -> Result<Record, Failure> {
    let sole = agent.together.locks.lock(name).await;
    let records = Records::of(&agent.place);
    let record = records.known(name)?;
    let order = sole.as_ref().map(Cutting::order).ok_or_else(|| {
        let text = match record.state {
            State::Protected => no_cuts(name),
            _ => format!("cluster {name} is not protected"),
        };
        Failure::new(FailureKind::Usage, text).hint(format!("`firn cluster protect {name}`"))
    })?;
    drop(sole);
    let checkpoint = order.await?;
    Ok(Record { checkpoint: Some(checkpoint), ..record })
}

/// Asks the supervisors of all VMs at once; returns their answers in order, or the first failure.
async fn all(
    agent: &Arc<Agent>,
    record: &Record,
    request: impl Fn(Vm) -> Request,
    wait: Duration,
) -> Result<Vec<Value>, Failure> {
    each(agent, record, request, wait).await.into_iter().collect()
}

async fn each(
    agent: &Arc<Agent>,
    record: &Record,
    request: impl Fn(Vm) -> Request,
    wait: Duration,
) -> Vec<Result<Value, Failure>> {
    let asked: Vec<_> = record
        .numbered()
        .map(|(vm, placed)| {
            let (mut far, placed, request) = (Far::new(agent, placed), placed.clone(), request(vm));
            tokio::spawn(async move {
                far.ask(request, wait).await.map_err(|failure| about(&placed, failure))
            })
        })
        .collect();
    let mut answers = Vec::new();
    for asked in asked {
        answers.push(asked.await.doing("asking a VM").and_then(|answer| answer));
    }
    answers
}

fn about(placed: &Placed, failure: Failure) -> Failure {
    failure.while_doing(format!("VM {} on host {}", placed.vm, placed.host))
}
