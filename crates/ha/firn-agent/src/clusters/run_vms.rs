//! Failover of a cluster: all its VMs run on this host, from the newest global checkpoint.
//!
//! ```text
//!   without membership    firn cluster failover -----------------------> run_from_checkpoint
//!                           (the user knows that the primaries are gone)
//!   with membership       firn cluster failover --> the record: here --.
//!                         a lease expires --------> the record: here --+--> run_here
//!                                                      (no other host can send any more)
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_cluster::Generation;
use firn_control::{ClusterState, ClusterVm, StoredCluster};
use firn_supervisor::{
    FailoverMember, FailoverRequest, Failure, FailureContext as _, FailureKind, MemberCard,
    MemberRequest, SupervisorRequest, VmName,
};
use tokio::task::JoinSet;

use super::ask_vms::ask_all_vms;
use super::cluster_lock::{self, ClusterLock};
use super::cluster_store::ClusterStore;
use super::remote_vm::ASK_WAIT;
use crate::agent::Agent;

/// How long frames that are under way may take to arrive after a failover, and the time between two
/// polls.
const SETTLE_WAIT: Duration = Duration::from_secs(10);
const SETTLE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Runs all VMs here, as the record requires. Their output obeys the lease of this generation. A
/// host without copies does nothing: it is the first one that runs the VMs.
pub(super) async fn run_here(
    agent: &Arc<Agent>,
    name: &VmName,
    lease: Generation,
) -> Result<(), Failure> {
    let mut sole = agent.clusters.locks.lock_cluster(name).await;
    match ClusterStore::from_paths(&agent.paths).load_cluster(name)?.map(|record| record.state) {
        Some(ClusterState::Protected | ClusterState::FailingOver) => {
            let record = run_from_checkpoint(agent, &mut sole, name, Some(lease.0)).await?;
            let number = record.checkpoint.map_or(0, |checkpoint| checkpoint.number);
            tracing::warn!("cluster {name} runs here now, from global checkpoint {number}");
            Ok(())
        }
        _ => Ok(()),
    }
}

pub(super) async fn run_from_checkpoint(
    agent: &Arc<Agent>,
    sole: &mut ClusterLock,
    name: &VmName,
    lease: Option<u32>,
) -> Result<StoredCluster, Failure> {
    let records = ClusterStore::from_paths(&agent.paths);
    let state = records.require_cluster(name)?.state;
    if !matches!(state, ClusterState::Protected | ClusterState::FailingOver) {
        let text = format!("cluster {name} is not protected: there is no checkpoint here to run");
        return Err(Failure::new(FailureKind::Refused, text));
    }
    // From here on no checkpoint is recorded, so none releases output.
    cluster_lock::end_checkpoints(sole).await;
    let mut record = records.require_cluster(name)?;
    let waiting = find_standbys(agent, &record).await?;
    if record.state == ClusterState::Protected {
        record.generation = record.generation.next();
        record.state = ClusterState::FailingOver;
        records.store_cluster(&record)?;
    }
    firn_fault::pass_point("cluster.failover");
    run_standbys(agent, &record, waiting, lease).await?;
    let host = agent.config.name.clone();
    record.vms.iter_mut().for_each(|placed| placed.host = host.clone());
    wait_settled(agent, &record).await;
    let left =
        ask_all_vms(agent, &record, |_| SupervisorRequest::Member(MemberRequest::Leave), ASK_WAIT)
            .await;
    match left {
        // They run here, even if one of them reports a failure: the record requires it.
        Err(failure) if lease.is_some() => tracing::warn!("cluster {name}: {failure}"),
        left => drop(left?),
    }
    record.state = ClusterState::FailedOver;
    records.store_cluster(&record)?;
    Ok(record)
}

/// Returns the VMs that have to be run, after a check that each can be. A failover that was
/// interrupted has run some already.
async fn find_standbys(
    agent: &Arc<Agent>,
    record: &StoredCluster,
) -> Result<Vec<(VmName, FailoverMember)>, Failure> {
    let generation = match record.state {
        ClusterState::Protected => record.generation.next(),
        _ => record.generation,
    };
    let mut waiting = Vec::new();
    for (number, ClusterVm { vm, .. }) in record.numbered_vms() {
        let none = || {
            let text = format!("there is no global checkpoint of {} yet", record.name);
            Failure::new(FailureKind::Refused, text)
        };
        let epoch = record.epoch_of(number).ok_or_else(none)?;
        let name = vm.clone();
        let status = agent.run_blocking(move |vms| vms.vm_status(&name)).await?;
        match (&status.standby, record.state) {
            (Some(standby), _) if standby.committed >= epoch.0 && !standby.released => {
                waiting.push((vm.clone(), FailoverMember { epoch, generation }));
            }
            (None, ClusterState::FailingOver)
                if ["running", "paused"].contains(&&*status.state) => {}
            _ => {
                let text = format!("{vm} can't be run here from {epoch}: it is {}", status.state);
                let failure = Failure::new(FailureKind::Refused, text);
                return Err(failure.with_hint(format!("`firn status {vm}` shows more")));
            }
        }
    }
    Ok(waiting)
}

async fn run_standbys(
    agent: &Arc<Agent>,
    record: &StoredCluster,
    waiting: Vec<(VmName, FailoverMember)>,
    lease: Option<u32>,
) -> Result<(), Failure> {
    let mut begun = JoinSet::new();
    for (vm, to) in waiting {
        let agent = Arc::clone(agent);
        begun.spawn(async move {
            let how = FailoverRequest { lease, member: Some(to), accept_stopped: false };
            let request = SupervisorRequest::Failover(how);
            let name = vm.clone();
            let run = agent.run_blocking(move |vms| vms.ask_supervisor(&name, &request)).await;
            run.map_err(|failure| failure.while_doing(format!("running {vm}")))
        });
    }
    let mut ended = Ok(());
    while let Some(done) = begun.join_next().await {
        ended = ended.and(done.while_doing("running a VM").and_then(|done| done.map(drop)));
    }
    ended.map_err(|failure| {
        let hint =
            format!("`firn cluster failover {}` again runs those that do not run", record.name);
        failure.with_hint(hint)
    })
}

/// Waits until frames that are under way have arrived. Later ones are lost, as in any network.
pub(super) async fn wait_settled(agent: &Arc<Agent>, record: &StoredCluster) {
    let since = Instant::now();
    while since.elapsed() < SETTLE_WAIT {
        let cards = ask_all_vms(
            agent,
            record,
            |_| SupervisorRequest::Member(MemberRequest::Card),
            ASK_WAIT,
        )
        .await;
        let is_settled =
            |value| serde_json::from_value(value).is_ok_and(|it: MemberCard| it.is_settled);
        if cards.is_ok_and(|cards| cards.into_iter().all(is_settled)) {
            return;
        }
        tokio::time::sleep(SETTLE_POLL_INTERVAL).await;
    }
    tracing::warn!("cluster {}: not all frames under way have arrived", record.name);
}
