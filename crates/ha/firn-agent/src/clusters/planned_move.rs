//! A planned move of a VM of this host to its backup (`docs/design/028-planned-moves.md`).
//!
//! ```text
//!   the primary's agent              its supervisor     the backup's agent            the record
//!     |--- final cut ----------------->| pauses, cuts                                  { a, backup b }
//!     |<-- committed, output has left -|
//!     |--- run --------------------------------------->| its standby runs; nothing leaves yet
//!     |<-- runs ---------------------------------------|
//!     | gives up the lease
//!     |-------------------------------------------------------------------------->     { b, generation + 1 }
//!     |--- moved ------------------------------------->| requests the lease: frames leave
//!     | ends the old VM                                | protects the VM again, by a
//! ```
//!
//! Before the lease is given up, a failure is simple: the VM resumes here. After that, the proposal
//! may have arrived without an answer. So the move is called off by a change of the record, which
//! the proposal can't follow any more. In each case the VM resumes by itself after [`HOLD`].

use std::sync::Arc;
use std::time::Duration;

use firn_cluster::HostId;
use firn_cluster::failover::FailoverRecord;
use firn_control::HostName;
use firn_control::api::{MOVED, MoveReport, MoveVmRequest, RUN_MOVED, RunMovedRequest, VMS};
use firn_membership::{
    ChangeResult, ClusterMember, ClusterName, ClusterRecord, RecordView, VersionedRecord,
};
use firn_supervisor::{
    Failure, FailureContext as _, FailureKind, SupervisorRequest, VmName, VmStatus,
};
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};

use super::cluster_lock::ClusterLock;
use super::cluster_manager::{LocalNode, RETRY_INTERVAL, lock_mutex};
use super::failover_unit::FailoverUnit;
use super::membership_access::{has_membership, membership_failure, newest_host, record_name};
use super::reconciler::ensure_reconciler;
use crate::agent::{Agent, VmClaim};
use crate::peer_connection::PeerConnection;

/// How long a VM stays paused by its final cut at most. After that it resumes here, and sends
/// nothing until it is known which host runs it.
const HOLD: Duration = Duration::from_secs(5);
/// How long the backup may take to run the VM.
const RUN_WAIT: Duration = Duration::from_secs(3);
/// How long the backup may take to get the lease.
const LEASE_WAIT: Duration = Duration::from_secs(3);
/// How often the patience of hosts the result of a proposal is asked for. After that the reconcile
/// loop finds it out.
const RESULT_PATIENCES: u32 = 20;

/// Moves a VM of this host to its backup; returns when it runs there and may send.
pub(crate) async fn move_vm(
    agent: &Arc<Agent>,
    wanted: &MoveVmRequest,
) -> Result<MoveReport, Failure> {
    let moving = PlannedMove::prepare(agent, wanted).await?;
    let mut link = agent.open_peer(&wanted.to).await?;
    let cut = moving.cut_finally().await?;
    if let Err(failure) = moving.run_there(&mut link).await {
        moving.resume_vm().await;
        return Err(failure.while_doing(format!(
            "running it at host {} (it continues at host {}, and is protected again there)",
            wanted.to, agent.config.name
        )));
    }
    firn_fault::pass_point("move.running");
    let run_ms = cut.elapsed_ms();
    moving.give_up_lease().await?;
    firn_fault::pass_point("move.given-up");
    moving.propose_move().await?;
    firn_fault::pass_point("move.recorded");
    let record_ms = cut.elapsed_ms();
    moving.report_moved(&mut link).await;
    let pause_ms = cut.elapsed_ms();
    // The old VM ends here.
    moving.member.poll_now();
    let MoveVmRequest { vm, to } = wanted.clone();
    let (from, generation) = (agent.config.name.clone(), moving.request.generation);
    tracing::warn!("{vm} was moved to host {to}: generation {generation}, {pause_ms:.0} ms");
    let (epoch, commit_ms, backup) = (cut.epoch, cut.commit_ms, None);
    Ok(MoveReport {
        vm,
        from,
        to,
        generation,
        epoch,
        pause_ms,
        commit_ms,
        run_ms,
        record_ms,
        backup,
    })
}

/// The committed final cut.
struct CommittedCut {
    epoch: u64,
    commit_ms: f64,
    since: Instant,
}

impl CommittedCut {
    /// Milliseconds since the VM was paused.
    fn elapsed_ms(&self) -> f64 {
        self.commit_ms + self.since.elapsed().as_secs_f64() * 1e3
    }
}

/// A move that can be made. While this exists, no other task of the agent acts on the VM.
struct PlannedMove<'a> {
    agent: &'a Arc<Agent>,
    vm: VmName,
    to: HostName,
    node: LocalNode,
    member: Arc<ClusterMember>,
    cluster: ClusterName,
    /// The record that the move changes.
    known: VersionedRecord,
    record: ClusterRecord,
    backup: HostId,
    request: RunMovedRequest,
    _claim: VmClaim,
    _sole: ClusterLock,
}

impl<'a> PlannedMove<'a> {
    /// Checks everything that can be checked before the VM is paused.
    async fn prepare(agent: &'a Arc<Agent>, wanted: &MoveVmRequest) -> Result<Self, Failure> {
        let MoveVmRequest { vm, to } = wanted.clone();
        let node = check_host(agent, &vm, &to)?;
        let name = vm.clone();
        let status = agent.run_blocking(move |vms| vms.vm_status(&name)).await?;
        check_backup(agent, &vm, &to, &status)?;
        let unit = FailoverUnit::Vm(vm.clone());
        let sole = agent.clusters.locks.lock_cluster(&vm).await;
        let claim = agent.claim_vm(&vm)?;
        let cluster = record_name(&vm).map_err(membership_failure)?;
        let view = node.members.read_view(&cluster).await.map_err(membership_failure)?;
        let RecordView { known, names, .. } = view;
        let record = known.record.clone().ok_or_else(|| not_ready(&vm, "it has no record yet"))?;
        let backup = newest_host(&names, &to)
            .filter(|to| record.register.with_move(node.host, *to).is_some())
            .ok_or_else(|| not_ready(&vm, "the record does not name that backup yet"))?;
        let member = ensure_reconciler(agent, &unit)
            .filter(|member| member.may_send_in(record.register.generation))
            .ok_or_else(|| not_ready(&vm, "this host does not hold its lease"))?;
        let requested = lock_mutex(&agent.clusters.protect_requests).get(&vm).cloned();
        let generation = record.register.generation.next().0;
        let interval_ms = status.protection.as_ref().map_or(100, |it| it.interval_ms);
        let predicts = requested.is_none_or(|it| it.predicts);
        let request = RunMovedRequest { generation, interval_ms, predicts };
        let (_claim, _sole) = (claim, sole);
        Ok(Self {
            agent,
            vm,
            to,
            node,
            member,
            cluster,
            known,
            record,
            backup,
            request,
            _claim,
            _sole,
        })
    }

    async fn ask_supervisor(&self, request: SupervisorRequest) -> Result<Value, Failure> {
        let vm = self.vm.clone();
        self.agent.run_blocking(move |vms| vms.ask_supervisor(&vm, &request)).await
    }

    async fn cut_finally(&self) -> Result<CommittedCut, Failure> {
        let hold_ms = u64::try_from(HOLD.as_millis()).unwrap_or(u64::MAX);
        let facts = self.ask_supervisor(SupervisorRequest::FinalCut { hold_ms }).await?;
        let (epoch, commit_ms) = (facts["epoch"].as_u64(), facts["commit_ms"].as_f64());
        let (epoch, commit_ms) = (epoch.unwrap_or_default(), commit_ms.unwrap_or_default());
        Ok(CommittedCut { epoch, commit_ms, since: Instant::now() })
    }

    async fn resume_vm(&self) {
        if let Err(failure) = self.ask_supervisor(SupervisorRequest::ResumeAfterCut).await {
            tracing::warn!("{} resumes by itself: {failure}", self.vm);
        }
    }

    async fn ask_backup(
        &self,
        link: &mut PeerConnection,
        what: &str,
        wait: Duration,
    ) -> Result<(), Failure> {
        let path = format!("{VMS}/{}/{what}", self.vm);
        let body = serde_json::to_vec(&self.request).while_doing("writing a request")?;
        let late = |_| {
            let text = format!("it has not answered within {} s", wait.as_secs());
            Failure::new(FailureKind::Other, text)
        };
        timeout(wait, link.post_bytes(&path, body)).await.map_err(late)?.map(drop)
    }

    async fn run_there(&self, link: &mut PeerConnection) -> Result<(), Failure> {
        self.ask_backup(link, RUN_MOVED, RUN_WAIT).await
    }

    /// Reports to the new host that the record names it. A host that misses this reads the record
    /// by itself, later.
    async fn report_moved(&self, link: &mut PeerConnection) {
        if let Err(failure) = self.ask_backup(link, MOVED, LEASE_WAIT).await {
            tracing::warn!(
                "host {} does not yet run {} by the record: {failure}",
                self.to,
                self.vm
            );
        }
    }

    /// No frame of the VM leaves here from now on, whoever reads the lease.
    async fn give_up_lease(&self) -> Result<(), Failure> {
        self.member.give_up_lease(&self.record.register);
        let vm = self.vm.clone();
        match self.agent.run_blocking(move |vms| vms.revoke_lease(&vm)).await {
            Ok(()) => Ok(()),
            Err(failure) => {
                self.call_off().await;
                Err(failure)
            }
        }
    }

    /// Has the record name the backup; returns when it does.
    async fn propose_move(&self) -> Result<(), Failure> {
        let register = &self.record.register;
        let Some(next) = register.with_move(self.node.host, self.backup) else {
            return Err(not_ready(&self.vm, "the record has changed"));
        };
        let next = ClusterRecord { register: next, ..self.record.clone() };
        let members = &self.node.members;
        match members.change_record(&self.cluster, self.known.revision, &next).await {
            Ok(ChangeResult::Done(_)) => Ok(()),
            other => {
                let why = match other {
                    Err(trouble) => trouble.to_string(),
                    Ok(_) => "it has changed meanwhile".to_owned(),
                };
                tracing::warn!("the record of {} may not name host {}: {why}", self.vm, self.to);
                match self.call_off().await {
                    true => Err(not_ready(&self.vm, "its record has changed meanwhile")),
                    false => Ok(()),
                }
            }
        }
    }

    /// Calls the move off by a change of the record. Returns `false` if the record names the new
    /// host already. The VM here resumes, and may send again once its host has the lease.
    async fn call_off(&self) -> bool {
        let deadline = Instant::now() + RESULT_PATIENCES * self.node.timing.patience();
        while Instant::now() < deadline {
            if let Some(was_moved) = self.read_result().await {
                if !was_moved {
                    self.member.poll_now();
                    self.resume_vm().await;
                }
                return !was_moved;
            }
            sleep(RETRY_INTERVAL).await;
        }
        true
    }

    /// Whether the VM was moved; if not, it can't be any more. `None` if that is not known yet.
    async fn read_result(&self) -> Option<bool> {
        let members = &self.node.members;
        let known = members.read_record(&self.cluster).await.ok()?;
        let record = known.record?;
        let is_ours = |it: &FailoverRecord| it.primaries().contains(&self.node.host);
        if !is_ours(&record.register) {
            return Some(true);
        }
        if record.register.version > self.record.register.version {
            return Some(false);
        }
        let register = record.register.with_backup(None);
        let next = ClusterRecord { register, ..record };
        let changed = members.change_record(&self.cluster, known.revision, &next).await;
        matches!(changed, Ok(ChangeResult::Done(_))).then_some(false)
    }
}

/// Checks that this host can move the VM to another one.
fn check_host(agent: &Agent, vm: &VmName, to: &HostName) -> Result<LocalNode, Failure> {
    if let Some(cluster) = agent.paths.cluster_of(vm) {
        let text = format!(
            "{vm} belongs to cluster {cluster}, whose VMs fail over as one: Firn does not move clusters yet"
        );
        let hint = format!("`firn cluster release {cluster}` makes its VMs independent");
        return Err(Failure::new(FailureKind::Refused, text).with_hint(hint));
    }
    if !has_membership(agent) {
        let text = format!(
            "host {} has no [membership]: without a record of who runs {vm}, two hosts could run it",
            agent.config.name
        );
        let hint = "three hosts with [membership], or etcd, keep such records; see the manual, \"Three hosts\"";
        return Err(Failure::new(FailureKind::Host, text).with_hint(hint));
    }
    if agent.config.name == *to {
        return Err(Failure::new(FailureKind::Usage, format!("{vm} runs on host {to} already")));
    }
    agent.peer_address(to)?;
    agent.clusters.local_node().ok_or_else(|| {
        let text = "this host's agent has not joined membership yet";
        Failure::new(FailureKind::Host, text).with_hint("`firn cluster status` shows why")
    })
}

/// Checks that the VM is protected, by that host.
fn check_backup(
    agent: &Agent,
    vm: &VmName,
    to: &HostName,
    status: &VmStatus,
) -> Result<(), Failure> {
    if status.standby.is_some() {
        let text = format!("{vm} is a standby on host {}: it runs elsewhere", agent.config.name);
        return Err(Failure::new(FailureKind::Usage, text));
    }
    let hint = format!("`firn protect {vm} --backup {to}` protects it there; then move it");
    match (status.state.as_str(), agent.backup_of(vm)) {
        ("protected", Some(backup)) if backup == *to => Ok(()),
        ("protected", Some(backup)) => {
            let text =
                format!("the backup of {vm} is host {backup}: only that host has its memory");
            Err(Failure::new(FailureKind::Refused, text).with_hint(format!(
                "`firn move {vm} --to {backup}`; or `firn release {vm}`, and {hint}"
            )))
        }
        ("protected", None) => Err(not_ready(vm, "its epochs are not sent by the agent")),
        ("paused", _) => {
            let text = format!("{vm} is paused: resume it first");
            Err(Failure::new(FailureKind::Busy, text))
        }
        (state, _) => {
            let text = format!("{vm} is {state}, not protected: no other host has its memory");
            Err(Failure::new(FailureKind::Refused, text).with_hint(hint))
        }
    }
}

fn not_ready(vm: &VmName, why: &str) -> Failure {
    let text = format!("{vm} can't be moved now: {why}");
    let hint = "try again in a moment; `firn cluster status` shows the record and the leases";
    Failure::new(FailureKind::Busy, text).with_hint(hint)
}
