//! A failover that a user requests, decided by the record
//! ([`firn_cluster::failover::decide_manual_failover`]).
//!
//! ```text
//!   firn failover web, at b                 the record               at b
//!     |                                     { a, backup b }
//!     |-- the lease of a has expired, ----> { b, generation + 1, --> its ClusterMember runs the VM
//!     |   or a is declared dead               fence a }              when the fence is empty
//!     '-- the lease of a is held: refused
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use firn_cluster::HostId;
use firn_cluster::failover::{ManualDecision, ManualRefusal, decide_manual_failover};
use firn_control::api::FailoverVmRequest;
use firn_membership::{ClusterRecord, FailoverTiming, MembershipError, RecordView};
use firn_supervisor::{Failure, FailureKind, VmName, VmStatus};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::cluster_manager::{LocalNode, RETRY_INTERVAL, lock_mutex};
use super::failover_unit::FailoverUnit;
use super::membership_access::{change_record, record_name};
use super::reconciler::ensure_reconciler;
use crate::agent::Agent;

/// Runs a standby's VM on this host; returns when it runs.
pub(crate) async fn fail_over(
    agent: &Arc<Agent>,
    wanted: &FailoverVmRequest,
) -> Result<Value, Failure> {
    let node = agent.clusters.local_node().ok_or_else(no_agreement)?;
    let vm = wanted.vm.clone();
    let status = agent.run_blocking(move |vms| vms.vm_status(&vm)).await?;
    check_standby(&status)?;
    agent.clusters.clear_given_up(&FailoverUnit::Vm(wanted.vm.clone()));
    let hand = ManualFailover { agent, wanted, ours: &node };
    let deadlines = FailoverDeadlines::for_status(&node.timing, &status);
    hand.fail_over(&deadlines).await
}

fn no_agreement() -> Failure {
    let text = "this host's agent has no record of who runs what";
    Failure::new(FailureKind::Host, text).with_hint("`firn cluster status` shows why")
}

/// Refuses a VM that is no standby, or that belongs to a cluster of several VMs.
fn check_standby(status: &VmStatus) -> Result<(), Failure> {
    match &status.standby {
        Some(standby) if standby.member => {
            let text = "the VM belongs to a cluster, and fails over with all of it";
            Err(Failure::new(FailureKind::Refused, text).with_hint("`firn cluster failover`"))
        }
        Some(_) => Ok(()),
        None => {
            let failure = Failure::new(FailureKind::Usage, "the VM is no standby");
            Err(failure.with_hint("`firn ls` shows what it is"))
        }
    }
}

/// How long to wait.
struct FailoverDeadlines {
    /// For the lease of its primary, if the epochs have ended. While epochs arrive, there is no
    /// wait.
    lease: Instant,
    /// For everything.
    last: Instant,
}

impl FailoverDeadlines {
    fn for_status(timing: &FailoverTiming, status: &VmStatus) -> Self {
        let now = Instant::now();
        let comes = status.standby.as_ref().is_some_and(|standby| standby.ended.is_none());
        let lease = if comes { now } else { now + timing.patience() };
        // Time for the fence, an election, and another lease.
        Self { lease, last: now + 10 * timing.patience() }
    }
}

struct ManualFailover<'a> {
    agent: &'a Arc<Agent>,
    wanted: &'a FailoverVmRequest,
    ours: &'a LocalNode,
}

impl ManualFailover<'_> {
    async fn fail_over(&self, deadlines: &FailoverDeadlines) -> Result<Value, Failure> {
        let mut why = "no majority of the hosts' servers answers".to_owned();
        while Instant::now() < deadlines.last {
            match self.check_record(deadlines).await {
                Ok(Some(facts)) => return Ok(facts),
                Ok(None) => {
                    "its record waits for the lease of its old primary".clone_into(&mut why)
                }
                Err(FailoverObstacle::Refused(failure)) => return Err(failure),
                Err(FailoverObstacle::Trouble(trouble)) => why = trouble.to_string(),
            }
            sleep(RETRY_INTERVAL).await;
        }
        let text = format!("{} does not run here yet: {why}", self.wanted.vm);
        let failure = Failure::new(FailureKind::Interrupted, text);
        Err(failure.with_hint("`firn cluster status` shows the record and the leases"))
    }

    /// Reads the record once and acts on it; returns the facts if the VM runs.
    async fn check_record(
        &self,
        deadlines: &FailoverDeadlines,
    ) -> Result<Option<Value>, FailoverObstacle> {
        let (vm, LocalNode { members, host, .. }) = (&self.wanted.vm, self.ours);
        let cluster = record_name(vm)?;
        let RecordView { known, leases, names, .. } = members.read_view(&cluster).await?;
        let record = known.record.ok_or_else(|| no_record(vm))?;
        let dead = self.dead_hosts(&record, &names)?;
        // The loop requests this host's lease, and runs the VM.
        ensure_reconciler(self.agent, &FailoverUnit::Vm(vm.clone()));
        match decide_manual_failover(&record.register, &leases, *host, &dead) {
            ManualDecision::Runs => self.failover_result(record.register.generation.0).await,
            ManualDecision::Wait => Ok(None),
            ManualDecision::Propose(register) => {
                let generation = register.generation.0;
                let next = ClusterRecord { register, ..record };
                if change_record(&**members, &cluster, known.revision, &next).await? {
                    let dead = match &self.wanted.dead {
                        Some(host) => format!(", and host {host} is declared dead"),
                        None => String::new(),
                    };
                    tracing::warn!("{vm} is failed over by hand: generation {generation}{dead}");
                }
                Ok(None)
            }
            ManualDecision::Refused(ManualRefusal::LeaseHeld(_))
                if Instant::now() < deadlines.lease =>
            {
                Ok(None)
            }
            ManualDecision::Refused(refusal) => Err(self.refusal_failure(refusal, &names)),
        }
    }

    /// Returns the numbers of the host that is declared dead, among the primaries of the record.
    fn dead_hosts(
        &self,
        record: &ClusterRecord,
        names: &BTreeMap<HostId, String>,
    ) -> Result<BTreeSet<HostId>, FailoverObstacle> {
        let Some(dead) = &self.wanted.dead else { return Ok(BTreeSet::new()) };
        let primaries = record.register.primaries();
        let is_dead = |host: &HostId| names.get(host).is_some_and(|name| name == dead.as_str());
        let hosts: BTreeSet<HostId> = primaries.iter().copied().filter(is_dead).collect();
        let runs_here = primaries.contains(&self.ours.host);
        match (hosts.is_empty() && !runs_here, primaries.first()) {
            (true, Some(primary)) => {
                Err(self.refusal_failure(ManualRefusal::OtherPrimary(*primary), names))
            }
            _ => Ok(hosts),
        }
    }

    /// Returns the supervisor's answer, once the VM runs in this generation.
    async fn failover_result(&self, generation: u32) -> Result<Option<Value>, FailoverObstacle> {
        let vm = self.wanted.vm.clone();
        if self.agent.clusters.give_up_reason(&FailoverUnit::Vm(vm.clone())).is_some() {
            let text = format!("{vm} could not be run here");
            let failure = Failure::new(FailureKind::Other, text);
            return Err(FailoverObstacle::Refused(
                failure.with_hint("the log of the agent shows why"),
            ));
        }
        let status = self.agent.run_blocking(move |vms| vms.vm_status(&vm)).await?;
        if status.standby.is_some() || status.lease != Some(generation) {
            return Ok(None);
        }
        let ran = lock_mutex(&self.agent.clusters.failover_facts).get(&self.wanted.vm).cloned();
        let mut facts = ran.unwrap_or_else(|| json!({}));
        facts["generation"] = generation.into();
        Ok(Some(facts))
    }

    fn refusal_failure(
        &self,
        refusal: ManualRefusal,
        names: &BTreeMap<HostId, String>,
    ) -> FailoverObstacle {
        let vm = &self.wanted.vm;
        let name = |host: HostId| names.get(&host).map_or("?", String::as_str);
        let lease_s = self.ours.timing.lease.ttl.as_secs_f64();
        let (text, hint) = match refusal {
            ManualRefusal::Ended => return no_record(vm).into(),
            ManualRefusal::LeaseHeld(host) => (
                format!(
                    "host {} holds the lease of {vm}, and so runs it: until {lease_s} s after its last request for the lease",
                    name(host)
                ),
                format!(
                    "`firn stop {vm}` there ends it; if the VM is dead there though its host is not, \
                     `firn failover {vm} --i-know-it-is-dead {}` fences that host",
                    name(host)
                ),
            ),
            ManualRefusal::OtherPrimary(host) => (
                format!(
                    "the record says that {vm} runs at host {}, not at the one that is declared dead",
                    name(host)
                ),
                "`firn cluster status` shows the record".to_owned(),
            ),
            ManualRefusal::OtherBackup(Some(host)) => (
                format!(
                    "the record names host {} as the backup of {vm}, not this host",
                    name(host)
                ),
                format!("`firn failover {vm}` there"),
            ),
            ManualRefusal::OtherBackup(None) | ManualRefusal::NoStandby => (
                format!(
                    "the record names no backup of {vm}: the copy here may be older than output that has left the VM"
                ),
                "`firn cluster status` shows the record".to_owned(),
            ),
        };
        Failure::new(FailureKind::Refused, text).with_hint(hint).into()
    }
}

fn no_record(vm: &VmName) -> Failure {
    let text = format!("the record of {vm} has ended: it was stopped or released, and not lost");
    let failure = Failure::new(FailureKind::Refused, text);
    failure.with_hint(format!("`firn stop {vm}` ends this standby"))
}

/// Why one read of the record did not lead to a result.
enum FailoverObstacle {
    /// The failover is refused.
    Refused(Failure),
    /// The next try may succeed.
    Trouble(MembershipError),
}

impl From<Failure> for FailoverObstacle {
    fn from(failure: Failure) -> Self {
        Self::Refused(failure)
    }
}

impl From<MembershipError> for FailoverObstacle {
    fn from(trouble: MembershipError) -> Self {
        match trouble {
            MembershipError::Refused(why) => Self::Refused(Failure::new(FailureKind::Refused, why)),
            trouble => Self::Trouble(trouble),
        }
    }
}
