//! Clusters: VMs of several hosts that are marked together, and fail over together to this host, which keeps their copies.
//!
//! ```text
//!   create    ask each VM for its address                                        record: made
//!   protect   all gates join, all VMs are protected by this host                 record: protected
//!             global checkpoints, several a second (cuts)                          and the newest of them
//!   failover  no more of them; all standbys run from the newest, generation + 1  record: failing over, failed over
//!   release   each backup agrees, each gate opens and leaves                     record: made
//! ```
//!
//! The host that keeps the copies makes the global checkpoints and has the record: who is lost with it takes no VM along, and what is
//! needed for a failover is where it is done. Nothing fails over by itself: whoever asks for it knows that the primaries are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_cluster::{Generation, Vm};
use firn_supervisor::{
    Context as _, FailoverMember, FailoverRequest, Failure, FailureKind, MemberCard, MemberRequest,
    Request, VmName,
};
use hyper::Method;
use hyper::body::Incoming;
use serde_json::Value;
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::JoinSet;

use crate::agent::Agent;
use crate::api::{CLUSTERS, Create, ProtectHere};
use crate::host::HostName;
use crate::http::{self, Answer};
use crate::vms::Vms;

mod cuts;
mod far;
mod record;

pub(crate) use far::answer;
pub use record::{Placed, Record, State};

use cuts::Cutting;
use far::{ASK_WAIT, Far, RELEASE_WAIT};
use record::Records;

/// Most VMs of a cluster.
const VMS_MAX: usize = 64;
/// How long what was under way may take to arrive after a failover, and how often that is asked.
const SETTLE_WAIT: Duration = Duration::from_secs(10);
const SETTLE_LOOK: Duration = Duration::from_millis(100);

/// Clusters of which global checkpoints are being made. Commands are done one after another.
#[derive(Default)]
pub(crate) struct Together(Mutex<BTreeMap<VmName, Cutting>>);

/// Answers a command of this host.
pub(crate) async fn command(agent: &Arc<Agent>, request: hyper::Request<Incoming>) -> Answer {
    let path = request.uri().path().to_owned();
    let rest = path.strip_prefix(CLUSTERS).unwrap_or_default();
    let parts: Vec<&str> = rest.split('/').skip(1).collect();
    let told = match (request.method().clone(), &parts[..]) {
        (Method::GET, []) => list(agent).await.map(|records| http::json(&records)),
        (Method::POST, []) => match http::read(request).await {
            Ok(wanted) => create(agent, wanted).await.map(|record| http::json(&record)),
            Err(failure) => Err(failure),
        },
        (Method::POST, [name, verb]) => match VmName::new(*name) {
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
            tokio::spawn(async move { protect(&agent, &name, interval_ms).await })
        }
        "checkpoint" => tokio::spawn(async move { checkpoint(&agent, &name).await }),
        "failover" => tokio::spawn(async move { failover(&agent, &name).await }),
        "release" => tokio::spawn(async move { release(&agent, &name).await }),
        _ => return Err(Failure::new(FailureKind::Usage, format!("a cluster has no {verb}"))),
    };
    done.await.doing("asking the agent")?
}

async fn list(agent: &Arc<Agent>) -> Result<Vec<Record>, Failure> {
    let mut records = Records::of(&agent.place).list()?;
    // Something that takes long may be going on.
    if let Ok(cutting) = agent.together.0.try_lock() {
        for record in &mut records {
            record.trouble = match (cutting.get(&record.name), record.state) {
                (Some(cutting), _) => cutting.trouble(),
                (None, State::Protected) => Some(no_cuts(&record.name)),
                _ => None,
            };
        }
    }
    Ok(records)
}

fn no_cuts(name: &VmName) -> String {
    format!(
        "no global checkpoints are made since this agent was started: `firn cluster failover {name}`, or `firn cluster release {name}`"
    )
}

async fn create(agent: &Arc<Agent>, wanted: Create) -> Result<Record, Failure> {
    let _sole = agent.together.0.lock().await;
    let Create { name, vms } = wanted;
    let records = Records::of(&agent.place);
    let before = records.load(&name)?;
    if let Some(State::Protected | State::FailingOver) = before.as_ref().map(|it| it.state) {
        let text = format!("there is a cluster {name} already, and it is protected");
        return Err(Failure::new(FailureKind::Busy, text).hint("`firn cluster release` ends that"));
    }
    let names: BTreeSet<&VmName> = vms.iter().map(|(vm, _)| vm).collect();
    if vms.is_empty() || vms.len() > VMS_MAX || names.len() < vms.len() {
        let text = format!("a cluster has 1 to {VMS_MAX} VMs, each with its own name");
        return Err(Failure::new(FailureKind::Usage, text));
    }
    let mut placed = Vec::new();
    for (vm, host) in vms {
        placed.push(found(agent, vm, host).await?);
    }
    let macs: BTreeSet<_> = placed.iter().map(|placed| placed.mac).collect();
    if macs.len() < placed.len() {
        let text = "two of the VMs have the same Ethernet address";
        return Err(Failure::new(FailureKind::Refused, text).hint("give each `-device ...,mac=`"));
    }
    let generation = before.map_or(Generation(0), |before| before.generation);
    // Frames of another cluster of this name are not taken for its.
    let id = RandomState::new().hash_one(&name) as u32;
    let (state, interval_ms, term, checkpoint) = (State::Made, 100, 0, None);
    let record = Record {
        name,
        id,
        state,
        interval_ms,
        term,
        generation,
        vms: placed,
        checkpoint,
        trouble: None,
    };
    records.store(&record)?;
    Ok(record)
}

/// A VM of another host, with its address.
async fn found(agent: &Arc<Agent>, vm: VmName, host: Option<HostName>) -> Result<Placed, Failure> {
    let host = match host {
        Some(host) => host,
        None => somewhere(agent, &vm).await?,
    };
    if host == agent.config.name {
        let text = format!("{vm} runs on this host, which is to keep the copies");
        let hint = "make the cluster on a host that none of its VMs runs on";
        return Err(Failure::new(FailureKind::Usage, text).hint(hint));
    }
    agent.address(&host)?;
    let mac = firn_cluster::switch::Mac::BROADCAST;
    let placed = Placed { vm, host, mac };
    let asked = Far::new(agent, &placed).ask(Request::Member(MemberRequest::Card), ASK_WAIT).await;
    let card = asked.map_err(|failure| about(&placed, failure))?;
    let MemberCard { mac, .. } = serde_json::from_value(card).doing("reading the answer")?;
    Ok(Placed { mac, ..placed })
}

async fn somewhere(agent: &Arc<Agent>, vm: &VmName) -> Result<HostName, Failure> {
    let all = crate::cluster::cluster(agent).await?.vms;
    let runs = all.into_iter().filter(|it| it.name == *vm && it.state != "standby");
    let hosts: Vec<HostName> = runs.map(|it| it.host).collect();
    match &hosts[..] {
        [host] => Ok(host.clone()),
        [] => {
            Err(Failure::new(FailureKind::NoSuchVm, format!("no host that answers has a VM {vm}")))
        }
        _ => {
            let text = format!("several hosts have a VM {vm}");
            Err(Failure::new(FailureKind::Usage, text).hint(format!("give --vm {vm}@HOST")))
        }
    }
}

fn about(placed: &Placed, failure: Failure) -> Failure {
    failure.while_doing(format!("VM {} on host {}", placed.vm, placed.host))
}

async fn protect(agent: &Arc<Agent>, name: &VmName, interval_ms: u64) -> Result<Record, Failure> {
    let mut cutting = agent.together.0.lock().await;
    let records = Records::of(&agent.place);
    let mut record = records.known(name)?;
    if record.state != State::Made {
        let text = match record.state {
            State::FailedOver => {
                format!("the VMs of {name} run on this host, which can't keep their copies")
            }
            _ => format!("cluster {name} is protected already"),
        };
        return Err(Failure::new(FailureKind::Busy, text).hint(
            "`firn cluster release` ends it; `firn cluster create` on another host makes it there",
        ));
    }
    record.term += 1;
    record.generation = record.generation.next();
    (record.interval_ms, record.checkpoint) = (interval_ms, None);
    records.store(&record)?;
    let begun = begin(agent, &record).await;
    if let Err(failure) = begun {
        // Nothing can be gone back to yet: each goes on alone.
        if let Err(left) = let_go(agent, &record).await {
            tracing::warn!("cluster {name}: {left}");
        }
        return Err(failure);
    }
    record.state = State::Protected;
    records.store(&record)?;
    let begun = Cutting::begin(agent, records.clone(), record);
    let first = begun.order();
    cutting.insert(name.clone(), begun);
    first.await?;
    records.known(name)
}

/// All join, and are protected.
async fn begin(agent: &Arc<Agent>, record: &Record) -> Result<(), Failure> {
    let join = |vm| Request::Member(MemberRequest::Join(record.membership(vm)));
    all(agent, record, join, ASK_WAIT).await?;
    let mut begun = JoinSet::new();
    for placed in record.vms.clone() {
        let mut far = Far::new(agent, &placed);
        let interval_ms = record.interval_ms;
        begun.spawn(async move {
            far.protect(interval_ms).await.map_err(|failure| about(&placed, failure))
        });
    }
    let mut ended = Ok(());
    while let Some(done) = begun.join_next().await {
        ended = ended.and(done.doing("protecting a VM").and_then(|done| done.map(drop)));
    }
    ended
}

async fn checkpoint(agent: &Arc<Agent>, name: &VmName) -> Result<Record, Failure> {
    let cutting = agent.together.0.lock().await;
    let records = Records::of(&agent.place);
    let record = records.known(name)?;
    let order = cutting.get(name).map(Cutting::order).ok_or_else(|| {
        let text = match record.state {
            State::Protected => no_cuts(name),
            _ => format!("cluster {name} is not protected"),
        };
        Failure::new(FailureKind::Usage, text).hint(format!("`firn cluster protect {name}`"))
    })?;
    drop(cutting);
    let checkpoint = order.await?;
    Ok(Record { checkpoint: Some(checkpoint), ..record })
}

async fn failover(agent: &Arc<Agent>, name: &VmName) -> Result<Record, Failure> {
    let mut cutting = agent.together.0.lock().await;
    let records = Records::of(&agent.place);
    let state = records.known(name)?.state;
    if !matches!(state, State::Protected | State::FailingOver) {
        let text = format!("cluster {name} is not protected: there is nothing here to go on from");
        return Err(Failure::new(FailureKind::Refused, text));
    }
    // Nothing is put on record any more, and nothing is let out by it.
    end(&mut cutting, name).await;
    let mut record = records.known(name)?;
    let waiting = standing_by(agent, &record).await?;
    if record.state == State::Protected {
        record.generation = record.generation.next();
        record.state = State::FailingOver;
        records.store(&record)?;
    }
    firn_fault::point("cluster.failover");
    run_all(agent, &record, waiting).await?;
    let host = agent.config.name.clone();
    record.vms.iter_mut().for_each(|placed| placed.host = host.clone());
    settle(agent, &record).await;
    all(agent, &record, |_| Request::Member(MemberRequest::Leave), ASK_WAIT).await?;
    record.state = State::FailedOver;
    records.store(&record)?;
    Ok(record)
}

async fn end(cutting: &mut MutexGuard<'_, BTreeMap<VmName, Cutting>>, name: &VmName) {
    if let Some(cutting) = cutting.remove(name) {
        cutting.end().await;
    }
}

/// The VMs that have to be run, of which each can be. A failover that was cut short has run some.
async fn standing_by(
    agent: &Arc<Agent>,
    record: &Record,
) -> Result<Vec<(VmName, FailoverMember)>, Failure> {
    let generation = match record.state {
        State::Protected => record.generation.next(),
        _ => record.generation,
    };
    let mut waiting = Vec::new();
    for (number, Placed { vm, .. }) in record.numbered() {
        let none = || {
            let text = format!("there is no global checkpoint of {} yet", record.name);
            Failure::new(FailureKind::Refused, text)
        };
        let epoch = record.epoch(number).ok_or_else(none)?;
        let name = vm.clone();
        let status = agent.blocking(move |vms| vms.status(&name)).await?;
        match (&status.standby, record.state) {
            (Some(standby), _) if standby.committed >= epoch.0 && !standby.released => {
                waiting.push((vm.clone(), FailoverMember { epoch, generation }));
            }
            (None, State::FailingOver) if ["running", "paused"].contains(&&*status.state) => {}
            _ => {
                let text = format!("{vm} can't be run here from {epoch}: it is {}", status.state);
                let failure = Failure::new(FailureKind::Refused, text);
                return Err(failure.hint(format!("`firn status {vm}` says more")));
            }
        }
    }
    Ok(waiting)
}

async fn run_all(
    agent: &Arc<Agent>,
    record: &Record,
    waiting: Vec<(VmName, FailoverMember)>,
) -> Result<(), Failure> {
    let mut begun = JoinSet::new();
    for (vm, to) in waiting {
        let agent = Arc::clone(agent);
        begun.spawn(async move {
            let how = FailoverRequest { lease: None, member: Some(to) };
            let request = Request::Failover(how);
            let name = vm.clone();
            let run = agent.blocking(move |vms| vms.ask(&name, &request)).await;
            run.map_err(|failure| failure.while_doing(format!("running {vm}")))
        });
    }
    let mut ended = Ok(());
    while let Some(done) = begun.join_next().await {
        ended = ended.and(done.doing("running a VM").and_then(|done| done.map(drop)));
    }
    ended.map_err(|failure| {
        let hint =
            format!("`firn cluster failover {}` again runs those that do not run", record.name);
        failure.hint(hint)
    })
}

/// Waits until what was under way has arrived. What has not by then is lost, as in any network.
async fn settle(agent: &Arc<Agent>, record: &Record) {
    let since = Instant::now();
    while since.elapsed() < SETTLE_WAIT {
        let cards = all(agent, record, |_| Request::Member(MemberRequest::Card), ASK_WAIT).await;
        let is_settled =
            |value| serde_json::from_value(value).is_ok_and(|it: MemberCard| it.is_settled);
        if cards.is_ok_and(|cards| cards.into_iter().all(is_settled)) {
            return;
        }
        tokio::time::sleep(SETTLE_LOOK).await;
    }
    tracing::warn!("cluster {}: what was under way has not all arrived", record.name);
}

async fn release(agent: &Arc<Agent>, name: &VmName) -> Result<Record, Failure> {
    let mut cutting = agent.together.0.lock().await;
    let records = Records::of(&agent.place);
    end(&mut cutting, name).await;
    let mut record = records.known(name)?;
    if matches!(record.state, State::FailingOver | State::FailedOver) {
        let text = format!("the VMs of {name} run on this host, each for itself");
        return Err(Failure::new(FailureKind::Usage, text));
    }
    // From here on nobody goes back to its checkpoints: so each may be let go of by itself.
    (record.state, record.checkpoint) = (State::Made, None);
    records.store(&record)?;
    let_go(agent, &record).await?;
    for Placed { vm, .. } in record.vms.clone() {
        agent.blocking(move |vms| no_copy(vms, &vm)).await?;
    }
    Ok(record)
}

/// A copy that is left when its VM goes on alone would be in the way of the next, and never runs.
fn no_copy(vms: &dyn Vms, vm: &VmName) -> Result<(), Failure> {
    match vms.status(vm).ok().and_then(|status| status.standby) {
        Some(standby) if standby.member => vms.stop(vm),
        _ => Ok(()),
    }
}

/// Backups agree that they never run their VM, what was held leaves, and each VM is for itself.
async fn let_go(agent: &Arc<Agent>, record: &Record) -> Result<(), Failure> {
    let released = each(agent, record, |_| Request::ReleaseMember, RELEASE_WAIT).await;
    settle(agent, record).await;
    let left = all(agent, record, |_| Request::Member(MemberRequest::Leave), ASK_WAIT).await;
    // One that was not protected had nothing to be released from.
    let failed = released.into_iter().filter_map(Result::err);
    let mut failed = failed.filter(|failure| failure.kind != FailureKind::Usage);
    failed.next().map_or(Ok(()), Err).and(left.map(drop))
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
