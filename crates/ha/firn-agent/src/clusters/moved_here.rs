//! The backup's part in a planned move ([`planned_move`](super::planned_move)): it runs its standby,
//! requests the lease when the record names this host, and has the VM protected again by the host
//! that it came from.
//!
//! The VM runs a moment before the record names this host. Until then it holds no lease, so no frame
//! of it leaves; and if the record never does, the reconcile loop ends it.

use std::sync::Arc;
use std::time::Duration;

use firn_cluster::Generation;
use firn_control::HostName;
use firn_control::api::{ProtectVmRequest, RunMovedRequest};
use firn_membership::{ClusterMember, ClusterRecord, VersionedRecord};
use firn_supervisor::{Failure, FailureKind, VmName};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::cluster_manager::lock_mutex;
use super::failover_unit::FailoverUnit;
use super::host_actions::describe_start;
use super::membership_access::{local_node, membership_failure, record_name};
use super::reconciler::ensure_reconciler;
use crate::agent::Agent;

/// How long the lease may take. Then the new primary gets it by the next poll.
const LEASE_WAIT: Duration = Duration::from_secs(2);
/// The time between two checks of that.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How often, and how long apart, the old host is asked to be the backup. Its VM has to end first.
const PROTECT_TRIES: u32 = 20;
const PROTECT_RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// Runs the standby of a VM that its primary, at host `peer`, moves here. Returns when it runs.
pub(super) async fn run_moved_vm(
    agent: &Arc<Agent>,
    peer: &HostName,
    vm: &VmName,
    wanted: &RunMovedRequest,
) -> Result<Value, Failure> {
    let member = local_member(agent, vm)?;
    check_request(agent, peer, vm, wanted, &member).await?;
    firn_fault::pass_point("move.asked");
    let (name, generation) = (vm.clone(), wanted.generation);
    agent.observations.begin_move(vm);
    let facts = agent.run_blocking(move |vms| vms.fail_over_vm(&name, generation)).await;
    let facts = facts.inspect_err(|_| agent.observations.end_move(vm))?;
    firn_fault::pass_point("move.ran");
    let from = describe_start(&facts);
    tracing::warn!("{vm} is moved here from host {peer}{from}: generation {generation} begins");
    Ok(facts)
}

fn local_member(agent: &Arc<Agent>, vm: &VmName) -> Result<Arc<ClusterMember>, Failure> {
    local_node(agent).map_err(membership_failure)?;
    let unit = FailoverUnit::Vm(vm.clone());
    agent.clusters.clear_given_up(&unit);
    ensure_reconciler(agent, &unit).ok_or_else(|| {
        Failure::new(FailureKind::Host, format!("this host's agent does not follow {vm}"))
    })
}

/// Checks that the record names this host as the backup, and that the peer is the VM's primary.
async fn check_request(
    agent: &Agent,
    peer: &HostName,
    vm: &VmName,
    wanted: &RunMovedRequest,
    member: &ClusterMember,
) -> Result<(), Failure> {
    let node = local_node(agent).map_err(membership_failure)?;
    let refused = |why: &str| Err(Failure::new(FailureKind::Refused, format!("{vm}: {why}")));
    if agent.paths.primary_host(vm).as_ref() != Some(peer) {
        return refused("its primary is on another host");
    }
    if agent.paths.is_drained() {
        return refused("this host is drained");
    }
    let names_me = |known: VersionedRecord| {
        let Some(ClusterRecord { register, .. }) = known.record else { return false };
        let mut placements = register.placements.values();
        let is_next = register.generation.next() == Generation(wanted.generation);
        is_next && placements.all(|placement| placement.backup == Some(node.host))
    };
    // The record that this host has read last may be old.
    if member.newest_record().is_some_and(names_me) {
        return Ok(());
    }
    let cluster = record_name(vm).map_err(membership_failure)?;
    let known = node.members.read_record(&cluster).await.map_err(membership_failure)?;
    match names_me(known) {
        true => Ok(()),
        false => refused("the record does not name this host as its backup"),
    }
}

/// The record names this host now: requests the lease, and has the VM protected by the peer.
/// Returns when frames may leave.
pub(super) async fn begin_generation(
    agent: &Arc<Agent>,
    peer: &HostName,
    vm: &VmName,
    wanted: &RunMovedRequest,
) -> Result<Value, Failure> {
    let member = local_member(agent, vm)?;
    member.poll_now();
    let deadline = Instant::now() + LEASE_WAIT;
    while !member.may_send_in(Generation(wanted.generation)) {
        if Instant::now() > deadline {
            let text = format!("{vm} has no lease here yet");
            return Err(Failure::new(FailureKind::Other, text));
        }
        sleep(POLL_INTERVAL).await;
    }
    let RunMovedRequest { interval_ms, predicts, .. } = *wanted;
    let request = ProtectVmRequest { vm: vm.clone(), backup: peer.clone(), interval_ms, predicts };
    lock_mutex(&agent.clusters.protect_requests).insert(vm.clone(), request.clone());
    let again = ProtectingAgain::begin(agent, vm);
    tokio::spawn(async move {
        protect_again(&again.agent, request).await;
        drop(again);
    });
    Ok(json!({ "generation": wanted.generation }))
}

/// A VM that is being protected again after its move. Meanwhile the reconcile loop does not ask other
/// hosts.
struct ProtectingAgain {
    agent: Arc<Agent>,
    vm: VmName,
}

impl ProtectingAgain {
    fn begin(agent: &Arc<Agent>, vm: &VmName) -> Self {
        lock_mutex(&agent.clusters.protecting_again).insert(vm.clone());
        Self { agent: Arc::clone(agent), vm: vm.clone() }
    }
}

impl Drop for ProtectingAgain {
    fn drop(&mut self) {
        lock_mutex(&self.agent.clusters.protecting_again).remove(&self.vm);
    }
}

/// Has the VM protected by the host that it came from. If that host can't, the reconcile loop asks
/// others.
async fn protect_again(agent: &Arc<Agent>, request: ProtectVmRequest) {
    let ProtectVmRequest { vm, backup, .. } = &request;
    for _ in 0..PROTECT_TRIES {
        match crate::protect::protect_vm(agent, request.clone(), |_| ()).await {
            Ok(_) => return tracing::info!("{vm} is protected again, by host {backup}"),
            // It is protected already, or its host does not accept standbys.
            Err(failure) if failure.kind == FailureKind::Refused => {
                return tracing::info!("{vm} is not protected by host {backup}: {failure}");
            }
            Err(failure) => {
                tracing::debug!("{vm} is not protected by host {backup} yet: {failure}")
            }
        }
        sleep(PROTECT_RETRY_INTERVAL).await;
    }
}
