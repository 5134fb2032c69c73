//! Clusters: VMs of several hosts that are marked together, and fail over together to this host, which keeps their copies.
//!
//! ```text
//!   create    ask each VM for its address                                        record: made
//!   protect   all gates join, all VMs are protected by this host                 record: protected
//!             global checkpoints, several a second (cuts)                          and the newest of them
//!   failover  no more of them; all standbys run from the newest, timeline + 1    record: failing over, failed over
//!   release   each backup agrees, each gate opens and leaves                     record: made
//!   forget    all hosts that what hosts agreed on names are gone                 that has ended
//! ```
//!
//! The host that keeps the copies makes the global checkpoints and has the record: who is lost with it takes no VM along, and what is
//! needed for a failover is where it is done. Who may run the VMs is another thing. Where hosts agree on nothing, whoever asks for a
//! failover knows that the primaries are gone. Where they do (`[membership]`), that is in a record of theirs, gates obey leases, and
//! all VMs fail over without a person (`agreed`; what is `due` is pure).

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

/// Most VMs of a cluster.
const VMS_MAX: usize = 64;

/// Clusters of which global checkpoints are being made. Commands about one are done one after another.
#[derive(Default)]
pub(crate) struct Together {
    locks: Locks,
    tending: tend::Tending,
}

/// Answers a command of this host.
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

/// It goes on also when whoever asked for it has gone.
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
        // Something that takes long may be in progress.
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

/// Asks all VMs at once; their answers, in their order, if all answer.
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
