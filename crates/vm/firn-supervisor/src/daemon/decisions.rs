//! The state machine of a supervisor, a pure core: events in, actions out.
//!
//! ```text
//!                     checkpoint, suspend                     started by a restore
//!            idle --------------------------> saving                |
//!             ^  <-----------------------------' |                  v
//!             |     save ended (a suspend        |              restoring
//!             |     continues to stop)           | cancel           |
//!             +----------------------------------+------------------+  restore ended
//!
//!     merging: from idle, until the layers are merged, or a stop ends the merge.
//!
//!     protecting: from idle, by `protect`, until `release`, a stop or the loss of its connection
//!     ends it. Standby: started as one, until a failover makes it idle.
//!
//!     stop: from idle and restoring, from saving only by force.
//!     end of the hypervisor: from anywhere, and the supervisor ends.
//!     detach, SIGTERM: at once when idle, else when the operation has ended (SIGTERM cancels a
//!     save). Not while the VM needs this process for its disks or its network.
//! ```
//!
//! The event loop around it performs the actions and reports back. Every slow operation, such as a
//! save, a restore or a stop, runs on a thread of its own, and its end is an event: nothing here
//! waits.

use std::collections::BTreeSet;

use firn_image::ImageKey;

use crate::processes::lock::ProcessRole;
use crate::records::control_protocol::{
    FailoverRequest, MemberRequest, OperationProgress, ProtectRequest, SaveRequest, StopRequest,
    SupervisorReply, SupervisorRequest,
};
use crate::records::failure::{Failure, FailureKind};
use crate::records::process_exit::ProcessExit;

/// A connection of a `firn` command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

/// Something that happened to a supervisor.
#[derive(Clone, Debug, PartialEq)]
pub enum SupervisorEvent {
    /// A command sent a request.
    Request(ClientId, SupervisorRequest),
    /// A command sent a line that is no request.
    Garbled(ClientId, Failure),
    /// A command has disconnected.
    ClientGone(ClientId),
    /// A save or restore has made progress.
    Progress(OperationProgress),
    /// A merge of disk layers has ended.
    MergeEnded(Result<serde_json::Value, Failure>),
    /// A save has ended; with its report, if there is an image.
    SaveEnded(Result<serde_json::Value, Failure>),
    /// A restore has ended: all memory is in place, or never will be.
    RestoreEnded(Result<serde_json::Value, Failure>),
    /// A standby can't become the VM now.
    FailoverRefused(ClientId, Failure),
    /// The first epoch is committed.
    Protected(serde_json::Value),
    /// The protection has ended: it was released, or could not continue.
    ProtectionEnded(Result<serde_json::Value, Failure>),
    /// The hypervisor did not end as requested (for example, the guest ignores its power button).
    StopFailed(Failure),
    /// The hypervisor process has ended.
    HypervisorGone(ProcessExit),
    /// A save or restore that lost its hypervisor had enough time to end.
    GraceOver,
    /// One of the guards has ended.
    GuardGone(ProcessRole),
    /// A guard that dies repeatedly may be started again.
    GuardDue(ProcessRole),
    /// SIGTERM.
    Terminate,
}

/// A response of the supervisor to an event.
#[derive(Clone, Debug, PartialEq)]
pub enum SupervisorAction {
    /// Answer a command.
    Reply(ClientId, SupervisorReply),
    /// Answer a command with the VM's status.
    ReplyStatus(ClientId),
    /// Answer a command with the current command line of the VM.
    CommandLine(ClientId),
    /// Answer a command with the operations that work on the VM.
    CheckOperations(ClientId),
    /// Use keys of sealed images, and report to this command.
    AddKeys {
        /// The command.
        client: ClientId,
        /// The keys.
        keys: Vec<ImageKey>,
    },
    /// Start a save; it reports by [`SupervisorEvent::Progress`] and
    /// [`SupervisorEvent::SaveEnded`].
    BeginSave {
        /// The command's request.
        request: SaveRequest,
        /// Leave the VM stopped.
        then_stop: bool,
    },
    /// Merge layers of the VM's disks; reports by [`SupervisorEvent::Progress`] and
    /// [`SupervisorEvent::MergeEnded`].
    BeginMerge {
        /// Merge all layers, into the files that the command line names.
        all: bool,
    },
    /// Cancel the running save, merge or protection.
    CancelSave,
    /// End the protection once the backup has agreed never to run the VM.
    Release,
    /// End the protection because the user stops the VM; the backup is informed.
    StopProtection,
    /// Begin to protect; reports by [`SupervisorEvent::Protected`] and
    /// [`SupervisorEvent::ProtectionEnded`].
    BeginProtection(ProtectRequest),
    /// Run the standby's VM; reports by [`SupervisorEvent::RestoreEnded`], or
    /// [`SupervisorEvent::FailoverRefused`].
    BeginFailover(ClientId, FailoverRequest),
    /// Answer the coordinator of a cluster's global checkpoints.
    Member(ClientId, MemberRequest),
    /// Make the final cut of a planned move, and report it to this command.
    FinalCut {
        /// The command.
        client: ClientId,
        /// How long the VM stays paused at most, in milliseconds.
        hold_ms: u64,
    },
    /// Resume the VM after its final cut, and report to this command.
    ResumeAfterCut(ClientId),
    /// Release the output that the VM's network cards buffer, and report to this command whether
    /// there was any.
    ReleaseOutput(Option<ClientId>),
    /// Release the buffered output while the lease is held, and report to this command.
    ResumeOutput(ClientId),
    /// End the hypervisor; reports by [`SupervisorEvent::HypervisorGone`], or
    /// [`SupervisorEvent::StopFailed`].
    EndHypervisor(StopRequest),
    /// End the hypervisor at once, whatever operation runs.
    KillHypervisor {
        /// Remove the files that the VM writes to.
        discard: bool,
    },
    /// Report [`SupervisorEvent::GraceOver`] after the grace period.
    StartGrace,
    /// Start a new guard, at once or after a delay.
    RestartGuard(ProcessRole),
    /// Start a new guard now.
    StartGuard(ProcessRole),
    /// Exit, and leave the VM as it is to a successor: this process can't serve it.
    Resign(Failure),
    /// Detach from the VM, and exit.
    DetachVm,
    /// Record how the VM ended, and exit.
    RecordEnd {
        /// How it ended.
        exit: ProcessExit,
        /// The reason, if Firn knows one.
        reason: Option<Failure>,
    },
}

/// The operation that runs beside the guest.
#[derive(Clone, Debug, PartialEq)]
enum VmActivity {
    Idle,
    Saving {
        client: ClientId,
        cancel_with_client: bool,
        then_stop: bool,
    },
    /// Layers of disks are being merged; afterwards the VM may have to end.
    Merging {
        client: ClientId,
        then_stop: Option<StopRequest>,
    },
    Restoring,
    /// `asked` gets a reply when the first epoch is committed, `releasing` when the protection is
    /// over; afterwards the VM may have to end. `alone`: buffered output is released when the
    /// backup is lost.
    Protecting {
        alone: bool,
        asked: Option<ClientId>,
        releasing: Vec<ClientId>,
        then_stop: Option<StopRequest>,
    },
    /// The VM runs elsewhere; `taken_up`: it is about to run here.
    Standby {
        is_failing_over: bool,
    },
}

/// The state machine.
#[derive(Debug)]
pub struct SupervisorCore {
    activity: VmActivity,
    /// The progress of the activity.
    progress: Option<OperationProgress>,
    watchers: BTreeSet<ClientId>,
    /// Commands that wait for the hypervisor's end. `Some` once it was requested to end.
    stopping: Option<Vec<(ClientId, serde_json::Value)>>,
    /// The hypervisor has ended while a save or restore is still to be finished.
    hypervisor_exit: Option<ProcessExit>,
    /// The failure of a save or restore because the hypervisor ended. It is reported only when the
    /// supervisor knows how the hypervisor ended.
    unreported_failure: Option<Failure>,
    /// Detach once idle.
    detaches_when_idle: bool,
    /// The VM's disks are served by this supervisor, without which the guest would block.
    serves_disks: bool,
    /// Filters of QEMU pass the frames of the VM's cards to this supervisor, without which the
    /// guest would have no network.
    has_filters: bool,
    /// The VM belongs to a cluster: requests that concern all of the cluster are refused for it
    /// alone.
    is_member: bool,
    /// The reason why the hypervisor is being killed.
    reason: Option<Failure>,
    /// A restore that can't continue here does not end the VM.
    leaves_vm_to_successor: bool,
}

impl SupervisorCore {
    /// The core of a supervisor whose VM runs, with or without a restore that still runs.
    pub fn new(restoring: bool) -> Self {
        Self::with_activity(if restoring { VmActivity::Restoring } else { VmActivity::Idle })
    }

    /// The core of a supervisor whose VM does not run yet.
    pub fn new_standby() -> Self {
        Self::with_activity(VmActivity::Standby { is_failing_over: false })
    }

    fn with_activity(activity: VmActivity) -> Self {
        Self {
            activity,
            progress: None,
            watchers: BTreeSet::new(),
            stopping: None,
            hypervisor_exit: None,
            unreported_failure: None,
            detaches_when_idle: false,
            serves_disks: false,
            has_filters: false,
            is_member: false,
            reason: None,
            leaves_vm_to_successor: false,
        }
    }

    /// Sets whether a restore that can't continue leaves the VM to a successor, instead of ending
    /// it.
    pub fn with_vm_left_to_successor(self, leaves_vm_to_successor: bool) -> Self {
        Self { leaves_vm_to_successor, ..self }
    }

    /// Sets whether the supervisor serves the VM's disks.
    pub fn with_served_disks(self, serves_disks: bool) -> Self {
        Self { serves_disks, ..self }
    }

    /// Sets whether the VM belongs to a cluster.
    pub fn set_member(&mut self, is_member: bool) {
        self.is_member = is_member;
    }

    /// Sets whether filters pass the frames of the VM's cards to this supervisor.
    pub fn set_filtered(&mut self, has_filters: bool) {
        self.has_filters = has_filters;
    }

    /// The progress of the operation that runs.
    pub fn progress(&self) -> Option<&OperationProgress> {
        self.progress.as_ref()
    }

    /// Whether no operation runs, and none is about to.
    pub fn is_idle(&self) -> bool {
        let ends =
            self.stopping.is_some() || self.hypervisor_exit.is_some() || self.detaches_when_idle;
        self.activity == VmActivity::Idle && !ends
    }

    /// Handles an event; returns the actions to perform, in order.
    pub fn handle_event(&mut self, event: SupervisorEvent) -> Vec<SupervisorAction> {
        match event {
            SupervisorEvent::Request(client, request) => self.handle_request(client, request),
            SupervisorEvent::Garbled(client, failure) => vec![failure_reply(client, failure)],
            SupervisorEvent::ClientGone(client) => self.client_disconnected(client),
            SupervisorEvent::Progress(progress) => self.report_progress(progress),
            SupervisorEvent::SaveEnded(result) => self.save_ended(result),
            SupervisorEvent::MergeEnded(result) => self.merge_ended(result),
            SupervisorEvent::RestoreEnded(result) => self.restore_ended(result),
            SupervisorEvent::FailoverRefused(client, failure) => {
                self.failover_refused(client, failure)
            }
            SupervisorEvent::Protected(facts) => self.first_epoch_committed(facts),
            SupervisorEvent::ProtectionEnded(result) => self.protection_ended(result),
            SupervisorEvent::StopFailed(failure) => self.stop_failed(failure),
            SupervisorEvent::HypervisorGone(exit) => self.hypervisor_gone(exit),
            SupervisorEvent::GraceOver => self.grace_over(),
            SupervisorEvent::GuardGone(role) => vec![SupervisorAction::RestartGuard(role)],
            SupervisorEvent::GuardDue(role) => vec![SupervisorAction::StartGuard(role)],
            SupervisorEvent::Terminate => self.handle_sigterm(),
        }
    }

    fn handle_request(
        &mut self,
        client: ClientId,
        request: SupervisorRequest,
    ) -> Vec<SupervisorAction> {
        match request {
            SupervisorRequest::Status => vec![SupervisorAction::ReplyStatus(client)],
            SupervisorRequest::Watch => self.add_watcher(client),
            SupervisorRequest::CommandLine if self.is_idle() => {
                vec![SupervisorAction::CommandLine(client)]
            }
            SupervisorRequest::CommandLine => vec![done_reply(client, serde_json::Value::Null)],
            SupervisorRequest::CheckOperations if self.is_idle() => {
                vec![SupervisorAction::CheckOperations(client)]
            }
            SupervisorRequest::CheckOperations => {
                let text = "the VM can be checked when no operation runs on it";
                vec![failure_reply(
                    client,
                    Failure::new(FailureKind::Busy, text)
                        .with_hint("`firn status NAME` shows the operation"),
                )]
            }
            SupervisorRequest::Checkpoint(request) => self.begin_save(client, request, false),
            SupervisorRequest::Suspend(request) => self.begin_save(client, request, true),
            SupervisorRequest::SealedCheckpoint(save) | SupervisorRequest::SealedSuspend(save)
                if save.choices.seal.is_none() =>
            {
                let text = "the request for a sealed image has no key";
                vec![failure_reply(client, Failure::new(FailureKind::Usage, text))]
            }
            SupervisorRequest::StoredCheckpoint(save) | SupervisorRequest::StoredSuspend(save)
                if save.store.is_none() =>
            {
                let text = "the request for an image in object storage names no object";
                vec![failure_reply(client, Failure::new(FailureKind::Usage, text))]
            }
            SupervisorRequest::SealedCheckpoint(save)
            | SupervisorRequest::StoredCheckpoint(save) => self.begin_save(client, save, false),
            SupervisorRequest::SealedSuspend(save) | SupervisorRequest::StoredSuspend(save) => {
                self.begin_save(client, save, true)
            }
            SupervisorRequest::MergeDisks => self.begin_merge(client, false),
            SupervisorRequest::CommitDisks => self.begin_merge(client, true),
            SupervisorRequest::Stop(request) => self.stop_vm(client, request),
            SupervisorRequest::Detach => self.detach_vm(client),
            SupervisorRequest::Protect(request) => self.begin_protection(client, request),
            SupervisorRequest::Release => match (self.is_member, &self.activity) {
                (true, VmActivity::Protecting { .. }) => {
                    vec![failure_reply(client, cluster_refusal())]
                }
                _ => self.release_protection(client),
            },
            SupervisorRequest::ReleaseMember => self.release_protection(client),
            SupervisorRequest::GoOn => self.resume_output(client),
            SupervisorRequest::Failover(how) => self.begin_failover(client, how),
            SupervisorRequest::Member(request) => self.forward_member_request(client, request),
            SupervisorRequest::AddKeys { keys } => vec![SupervisorAction::AddKeys { client, keys }],
            SupervisorRequest::Fence { why } => self.fence_vm(client, why),
            SupervisorRequest::FinalCut { hold_ms } => self.cut_finally(client, hold_ms),
            // A successor has resumed the VM already.
            SupervisorRequest::ResumeAfterCut => vec![SupervisorAction::ResumeAfterCut(client)],
        }
    }

    fn add_watcher(&mut self, client: ClientId) -> Vec<SupervisorAction> {
        if self.activity == VmActivity::Idle {
            return vec![SupervisorAction::ReplyStatus(client)];
        }
        self.watchers.insert(client);
        self.progress.iter().map(|now| progress_reply(client, now)).collect()
    }

    fn begin_save(
        &mut self,
        client: ClientId,
        request: SaveRequest,
        then_stop: bool,
    ) -> Vec<SupervisorAction> {
        if let Some(busy) = self.busy_failure() {
            return vec![failure_reply(client, busy)];
        }
        let cancel_with_client = request.cancel_with_client;
        self.activity = VmActivity::Saving { client, cancel_with_client, then_stop };
        vec![SupervisorAction::BeginSave { request, then_stop }]
    }

    fn begin_merge(&mut self, client: ClientId, all: bool) -> Vec<SupervisorAction> {
        if let Some(busy) = self.busy_failure() {
            return vec![failure_reply(client, busy)];
        }
        self.activity = VmActivity::Merging { client, then_stop: None };
        vec![SupervisorAction::BeginMerge { all }]
    }

    fn merge_ended(&mut self, result: Result<serde_json::Value, Failure>) -> Vec<SupervisorAction> {
        let VmActivity::Merging { then_stop, .. } = &mut self.activity else { return Vec::new() };
        let then_stop = then_stop.take();
        let mut actions = match result {
            Err(failure) => self.activity_failed(failure),
            result => self.finish_activity(result),
        };
        if self.hypervisor_exit.is_none() {
            actions.extend(then_stop.map(SupervisorAction::EndHypervisor));
        }
        actions
    }

    /// The reason why no new operation can begin, if there is one.
    fn busy_failure(&self) -> Option<Failure> {
        let busy = |what, hint| Some(Failure::new(FailureKind::Busy, what).with_hint(hint));
        match (&self.activity, &self.stopping) {
            (_, Some(_)) => busy("the VM is being stopped", "wait for it to end"),
            (VmActivity::Saving { .. }, _) => {
                busy("a checkpoint is being written", "wait for it: `firn status --watch` shows it")
            }
            (VmActivity::Merging { .. }, _) => busy(
                "layers of the VM's disks are being merged",
                "wait for it: `firn status --watch` shows it",
            ),
            (VmActivity::Restoring, _) => busy(
                "the VM is still being restored: part of its memory is only in the image",
                "wait for it: `firn status --watch` shows it",
            ),
            (VmActivity::Protecting { .. }, _) => {
                busy("the VM is being protected", "`firn release` ends that; the VM runs on")
            }
            (VmActivity::Standby { .. }, _) => {
                busy("the VM is a standby and does not run here", "`firn failover` runs it")
            }
            (VmActivity::Idle, None) if self.detaches_when_idle => {
                busy("the supervisor is detaching from the VM", "run `firn attach`")
            }
            (VmActivity::Idle, None) => None,
        }
    }

    fn stop_vm(&mut self, client: ClientId, request: StopRequest) -> Vec<SupervisorAction> {
        if let Some(waiting) = &mut self.stopping {
            waiting.push((client, serde_json::Value::Null));
            return Vec::new();
        }
        let saving = matches!(self.activity, VmActivity::Saving { .. });
        if saving && !request.force {
            let busy = Failure::new(FailureKind::Busy, "a checkpoint is being written");
            return vec![failure_reply(
                client,
                busy.with_hint("wait for it, or give it up: `firn stop --force NAME`"),
            )];
        }
        self.stopping = Some(vec![(client, serde_json::Value::Null)]);
        if let VmActivity::Protecting { then_stop, .. } = &mut self.activity {
            if request.powerdown_s.is_some() {
                // The guest may be slow, or ignore the button: it stays protected until it ends.
                return vec![SupervisorAction::EndHypervisor(request)];
            }
            *then_stop = Some(request);
            return vec![SupervisorAction::StopProtection];
        }
        // The monitor belongs to the merge until that has ended.
        if let VmActivity::Merging { then_stop, .. } = &mut self.activity {
            *then_stop = Some(request);
            return vec![SupervisorAction::CancelSave];
        }
        let kill = SupervisorAction::KillHypervisor { discard: request.discard };
        match self.activity {
            VmActivity::Saving { .. } => vec![SupervisorAction::CancelSave, kill],
            // The standby's VM has never run.
            VmActivity::Standby { is_failing_over: false } => vec![kill],
            _ => vec![SupervisorAction::EndHypervisor(request)],
        }
    }

    fn begin_protection(
        &mut self,
        client: ClientId,
        request: ProtectRequest,
    ) -> Vec<SupervisorAction> {
        if let Some(busy) = self.busy_failure() {
            return vec![failure_reply(client, busy)];
        }
        let (releasing, then_stop, alone) = (Vec::new(), None, request.alone);
        self.activity = VmActivity::Protecting { alone, asked: Some(client), releasing, then_stop };
        vec![SupervisorAction::BeginProtection(request)]
    }

    fn first_epoch_committed(&mut self, facts: serde_json::Value) -> Vec<SupervisorAction> {
        let VmActivity::Protecting { asked, .. } = &mut self.activity else { return Vec::new() };
        self.progress = None;
        asked.take().into_iter().map(|client| done_reply(client, facts.clone())).collect()
    }

    /// Ends the protection. A VM that is not protected any more may still buffer output.
    fn release_protection(&mut self, client: ClientId) -> Vec<SupervisorAction> {
        match &mut self.activity {
            VmActivity::Protecting { releasing, .. } => {
                releasing.push(client);
                vec![SupervisorAction::Release]
            }
            VmActivity::Standby { .. } => {
                let standby = Failure::new(FailureKind::Usage, "the VM is a standby");
                vec![failure_reply(client, standby.with_hint("`firn release` is for its primary"))]
            }
            _ => vec![SupervisorAction::ReleaseOutput(Some(client))],
        }
    }

    fn protection_ended(
        &mut self,
        result: Result<serde_json::Value, Failure>,
    ) -> Vec<SupervisorAction> {
        let VmActivity::Protecting { alone, asked, releasing, then_stop } = &mut self.activity
        else {
            return Vec::new();
        };
        let then_stop = then_stop.take();
        // The standby of a VM that ends may continue it. With `alone` the user released the output
        // for the case that the backup is lost: not for a backup that ends the connection for a
        // reason, and not for a failure on this host.
        let releases_output = match &result {
            Ok(_) => !releasing.is_empty() && then_stop.is_none() && !self.detaches_when_idle,
            Err(failure) => *alone && asked.is_none() && failure.kind == FailureKind::Lost,
        };
        let mut actions = Vec::new();
        actions.extend(
            (releases_output && self.hypervisor_exit.is_none())
                .then_some(SupervisorAction::ReleaseOutput(None)),
        );
        actions.extend(match result {
            Err(failure) => self.activity_failed(failure),
            Ok(facts) => self.finish_activity(Ok(facts)),
        });
        if self.hypervisor_exit.is_none() {
            actions.extend(then_stop.map(SupervisorAction::EndHypervisor));
        }
        actions
    }

    fn resume_output(&self, client: ClientId) -> Vec<SupervisorAction> {
        match &self.activity {
            VmActivity::Protecting { .. } | VmActivity::Standby { .. } => {
                let text = "the VM is protected, or a standby: its output can't be released";
                vec![failure_reply(client, Failure::new(FailureKind::Busy, text))]
            }
            _ => vec![SupervisorAction::ResumeOutput(client)],
        }
    }

    /// Only a VM that is protected, and has a committed epoch, can be moved to its backup.
    fn cut_finally(&self, client: ClientId, hold_ms: u64) -> Vec<SupervisorAction> {
        match &self.activity {
            VmActivity::Protecting { asked: None, then_stop: None, releasing, .. }
                if releasing.is_empty() && !self.is_member =>
            {
                vec![SupervisorAction::FinalCut { client, hold_ms }]
            }
            VmActivity::Protecting { .. } if self.is_member => {
                vec![failure_reply(client, cluster_refusal())]
            }
            VmActivity::Protecting { .. } => {
                let text = "its protection is just beginning or ending";
                let failure = Failure::new(FailureKind::Busy, text);
                vec![failure_reply(client, failure.with_hint("try again in a moment"))]
            }
            _ => {
                let failure = Failure::new(FailureKind::Refused, "the VM is not protected");
                vec![failure_reply(client, failure.with_hint("`firn protect` protects it"))]
            }
        }
    }

    /// Kills the hypervisor; the operation that runs fails by that. A standby has never run.
    fn fence_vm(&mut self, client: ClientId, why: String) -> Vec<SupervisorAction> {
        if self.activity == (VmActivity::Standby { is_failing_over: false }) {
            let text = "the VM is a standby and does not run here";
            return vec![failure_reply(client, Failure::new(FailureKind::Usage, text))];
        }
        self.reason = Some(Failure::new(FailureKind::Lost, why));
        vec![
            SupervisorAction::KillHypervisor { discard: false },
            done_reply(client, serde_json::Value::Null),
        ]
    }

    /// Forwards a request. A VM joins or leaves a cluster only while no operation runs on it.
    fn forward_member_request(
        &mut self,
        client: ClientId,
        request: MemberRequest,
    ) -> Vec<SupervisorAction> {
        let needs_idle = match request {
            MemberRequest::Join(_) | MemberRequest::Leave => true,
            // QEMU would have to be queried, and it is busy during an operation.
            MemberRequest::Card => !self.is_member,
            MemberRequest::Mark { .. } | MemberRequest::Globally { .. } => false,
        };
        match self.busy_failure().filter(|_| needs_idle) {
            Some(busy) => vec![failure_reply(client, busy)],
            None => vec![SupervisorAction::Member(client, request)],
        }
    }

    fn begin_failover(&mut self, client: ClientId, how: FailoverRequest) -> Vec<SupervisorAction> {
        match &mut self.activity {
            VmActivity::Standby { is_failing_over: taken_up } if self.stopping.is_none() => {
                *taken_up = true;
                self.watchers.insert(client);
                vec![SupervisorAction::BeginFailover(client, how)]
            }
            _ => {
                let no_standby = Failure::new(FailureKind::Usage, "the VM is no standby");
                vec![failure_reply(client, no_standby.with_hint("`firn standby` makes one"))]
            }
        }
    }

    fn failover_refused(&mut self, client: ClientId, failure: Failure) -> Vec<SupervisorAction> {
        if let VmActivity::Standby { is_failing_over: taken_up } = &mut self.activity {
            *taken_up = false;
        }
        let is_waiting = self.watchers.remove(&client);
        is_waiting.then(|| failure_reply(client, failure)).into_iter().collect()
    }

    fn detach_vm(&mut self, client: ClientId) -> Vec<SupervisorAction> {
        match self.busy_failure() {
            Some(busy) => vec![failure_reply(client, busy)],
            None if self.serves_disks => {
                let text = "Firn serves the VM's disks: without Firn the VM would block";
                let failure = Failure::new(FailureKind::Refused, text);
                vec![failure_reply(client, failure.with_hint("`firn stop` ends the VM"))]
            }
            None if self.has_filters => vec![failure_reply(client, filters_refusal())],
            None => vec![SupervisorAction::DetachVm, done_reply(client, serde_json::Value::Null)],
        }
    }

    fn client_disconnected(&mut self, gone: ClientId) -> Vec<SupervisorAction> {
        self.watchers.remove(&gone);
        match self.activity {
            VmActivity::Saving { client, cancel_with_client: true, .. } if client == gone => {
                vec![SupervisorAction::CancelSave]
            }
            _ => Vec::new(),
        }
    }

    fn report_progress(&mut self, now: OperationProgress) -> Vec<SupervisorAction> {
        let actions =
            self.listeners().into_iter().map(|client| progress_reply(client, &now)).collect();
        self.progress = Some(now);
        actions
    }

    /// The clients that get reports on the activity: those that requested it, and the watchers.
    fn listeners(&self) -> BTreeSet<ClientId> {
        let mut listeners = self.watchers.clone();
        match &self.activity {
            VmActivity::Saving { client, .. } | VmActivity::Merging { client, .. } => {
                listeners.insert(*client);
            }
            VmActivity::Protecting { asked, releasing, .. } => {
                listeners.extend(asked.iter().chain(releasing));
            }
            VmActivity::Idle | VmActivity::Restoring | VmActivity::Standby { .. } => {}
        }
        listeners
    }

    fn save_ended(&mut self, result: Result<serde_json::Value, Failure>) -> Vec<SupervisorAction> {
        match (self.activity.clone(), result) {
            (VmActivity::Saving { .. }, Err(failure)) => self.activity_failed(failure),
            (VmActivity::Saving { then_stop: true, .. }, Ok(facts))
                if self.hypervisor_exit.is_none() =>
            {
                self.end_suspended_vm(&facts)
            }
            (VmActivity::Saving { .. }, Ok(facts)) => self.finish_activity(Ok(facts)),
            _ => Vec::new(),
        }
    }

    fn end_suspended_vm(&mut self, facts: &serde_json::Value) -> Vec<SupervisorAction> {
        let waiting = self.listeners().into_iter().map(|client| (client, facts.clone()));
        self.stopping.get_or_insert_default().extend(waiting);
        self.become_idle();
        // It is paused, its disks are flushed, and the image has the rest: killing QEMU loses
        // nothing.
        vec![SupervisorAction::EndHypervisor(StopRequest { force: true, ..StopRequest::default() })]
    }

    fn restore_ended(
        &mut self,
        result: Result<serde_json::Value, Failure>,
    ) -> Vec<SupervisorAction> {
        match result {
            _ if !matches!(self.activity, VmActivity::Restoring | VmActivity::Standby { .. }) => {
                Vec::new()
            }
            Ok(facts) => self.finish_activity(Ok(facts)),
            Err(failure) if failure.kind.is_cut_short() => self.activity_failed(failure),
            Err(failure) => {
                if self.hypervisor_exit.is_none() && self.leaves_vm_to_successor {
                    return vec![SupervisorAction::Resign(failure)];
                }
                self.reason = Some(failure.clone());
                if self.hypervisor_exit.is_some() {
                    return self.finish_activity(Err(failure));
                }
                // vCPUs wait for pages that no process will install: ending the VM is better than a
                // hang.
                self.unreported_failure = Some(failure);
                vec![SupervisorAction::KillHypervisor { discard: false }]
            }
        }
    }

    /// Handles the failure of the activity, by itself or because the hypervisor has ended. In the
    /// latter case the reply includes how the hypervisor ended, which may be known only later.
    fn activity_failed(&mut self, failure: Failure) -> Vec<SupervisorAction> {
        match self.hypervisor_exit {
            Some(exit) if failure.kind.is_cut_short() => self.ended_during(exit),
            None if failure.kind == FailureKind::Ended => {
                self.unreported_failure = Some(failure);
                Vec::new()
            }
            _ => self.finish_activity(Err(failure)),
        }
    }

    /// Ends the activity: replies to its listeners and becomes idle.
    fn finish_activity(
        &mut self,
        result: Result<serde_json::Value, Failure>,
    ) -> Vec<SupervisorAction> {
        let replies = self.reply_to_listeners(result);
        self.become_idle();
        self.after_activity(replies)
    }

    fn reply_to_listeners(
        &mut self,
        result: Result<serde_json::Value, Failure>,
    ) -> Vec<SupervisorAction> {
        let reply = match result {
            Ok(facts) => SupervisorReply::Done { facts },
            Err(failure) => SupervisorReply::Failed(failure),
        };
        self.listeners()
            .into_iter()
            .map(|client| SupervisorAction::Reply(client, reply.clone()))
            .collect()
    }

    fn become_idle(&mut self) {
        self.activity = VmActivity::Idle;
        self.progress = None;
        self.watchers.clear();
    }

    /// The actions that follow the end of an activity, after these replies.
    fn after_activity(&mut self, mut actions: Vec<SupervisorAction>) -> Vec<SupervisorAction> {
        match self.hypervisor_exit {
            Some(exit) => return self.record_end(exit, actions),
            // After a protection whose output stays blocked.
            None if self.has_filters => self.detaches_when_idle = false,
            None if self.detaches_when_idle && self.stopping.is_none() => {
                actions.push(SupervisorAction::DetachVm)
            }
            None => {}
        }
        actions
    }

    fn stop_failed(&mut self, failure: Failure) -> Vec<SupervisorAction> {
        let waiting = self.stopping.take().unwrap_or_default();
        let replies: Vec<_> =
            waiting.into_iter().map(|(client, _)| failure_reply(client, failure.clone())).collect();
        match self.activity {
            VmActivity::Idle => self.after_activity(replies),
            _ => replies,
        }
    }

    /// Handles the end of the hypervisor. The activity notices it by itself and reports a result of
    /// its own, if it has one.
    fn hypervisor_gone(&mut self, exit: ProcessExit) -> Vec<SupervisorAction> {
        self.hypervisor_exit = Some(exit);
        match (&self.activity, self.unreported_failure.take()) {
            (VmActivity::Idle, _) => self.record_end(exit, Vec::new()),
            (_, Some(failure)) => self.activity_failed(failure),
            // No failover has begun that would notice it.
            (VmActivity::Standby { is_failing_over: false }, None) => self.ended_during(exit),
            (_, None) => vec![SupervisorAction::CancelSave, SupervisorAction::StartGrace],
        }
    }

    fn grace_over(&mut self) -> Vec<SupervisorAction> {
        let Some(exit) = self.hypervisor_exit else { return Vec::new() };
        self.ended_during(exit)
    }

    /// What the VM was being, as a participle for a sentence.
    fn activity_participle(&self) -> &'static str {
        match self.activity {
            VmActivity::Restoring => "restored",
            VmActivity::Merging { .. } => "merged",
            VmActivity::Protecting { .. } => "protected",
            VmActivity::Standby { .. } => "kept ready",
            _ => "saved",
        }
    }

    /// The VM ended during an activity, which has failed by that.
    fn ended_during(&mut self, exit: ProcessExit) -> Vec<SupervisorAction> {
        let what = self.activity_participle();
        let shown = if self.stopping.is_some() { ProcessExit::Stopped } else { exit };
        let ended = format!("the VM ended while it was being {what} ({shown})");
        let replies = self.reply_to_listeners(Err(Failure::new(FailureKind::Ended, ended)));
        self.record_end(exit, replies)
    }

    fn record_end(
        &mut self,
        exit: ProcessExit,
        replies: Vec<SupervisorAction>,
    ) -> Vec<SupervisorAction> {
        let was_requested = self.stopping.is_some();
        let waiting = self.stopping.take().unwrap_or_default();
        let exit = if was_requested { ProcessExit::Stopped } else { exit };
        // The end is recorded first, so that a client that gets a reply finds it recorded.
        let record = SupervisorAction::RecordEnd { exit, reason: self.reason.take() };
        let waiting = waiting.into_iter().map(|(client, facts)| done_reply(client, facts));
        std::iter::once(record).chain(replies).chain(waiting).collect()
    }

    fn handle_sigterm(&mut self) -> Vec<SupervisorAction> {
        let runs = !matches!(self.activity, VmActivity::Standby { is_failing_over: false });
        let is_needed =
            self.serves_disks && runs || self.has_filters && self.activity == VmActivity::Idle;
        if self.stopping.is_some() || self.detaches_when_idle || is_needed {
            return Vec::new();
        }
        self.detaches_when_idle = true;
        match self.activity {
            VmActivity::Idle => vec![SupervisorAction::DetachVm],
            VmActivity::Saving { .. }
            | VmActivity::Merging { .. }
            | VmActivity::Protecting { .. } => {
                vec![SupervisorAction::CancelSave]
            }
            VmActivity::Restoring | VmActivity::Standby { is_failing_over: true } => Vec::new(),
            VmActivity::Standby { is_failing_over: false } => {
                vec![SupervisorAction::KillHypervisor { discard: false }]
            }
        }
    }
}

fn filters_refusal() -> Failure {
    let text = "the VM's network cards have filters that pass its frames to Firn: without Firn it \
                would have no network";
    let hint = "if no other host runs the VM, `firn release` removes them (of a cluster: `firn \
                cluster release`)";
    Failure::new(FailureKind::Refused, text).with_hint(hint)
}

fn cluster_refusal() -> Failure {
    let text = "the VM is protected with the cluster that it belongs to";
    let hint = "run `firn cluster release` on the host where the cluster was made";
    Failure::new(FailureKind::Refused, text).with_hint(hint)
}

fn failure_reply(client: ClientId, failure: Failure) -> SupervisorAction {
    SupervisorAction::Reply(client, SupervisorReply::Failed(failure))
}

fn done_reply(client: ClientId, facts: serde_json::Value) -> SupervisorAction {
    SupervisorAction::Reply(client, SupervisorReply::Done { facts })
}

fn progress_reply(client: ClientId, now: &OperationProgress) -> SupervisorAction {
    SupervisorAction::Reply(client, SupervisorReply::Progress(now.clone()))
}

#[cfg(test)]
#[path = "decisions_tests.rs"]
mod tests;
