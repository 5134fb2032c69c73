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
//!     save).
//! ```
//!
//! The event loop around it performs the actions and reports back. Every slow operation, such as a
//! save, a restore or a stop, runs on a thread of its own, and its end is an event: nothing here
//! waits.

use std::collections::BTreeSet;

use crate::failure::{Failure, FailureKind};
use crate::journal::Exit;
use crate::lock::Role;
use crate::protocol::{
    FailoverRequest, MemberRequest, Progress, ProtectRequest, Reply, Request, SaveRequest,
    StopRequest,
};

/// A connection of a `firn` command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

/// Something that happened to a supervisor.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A command sent a request.
    Request(ClientId, Request),
    /// A command sent a line that is no request.
    Garbled(ClientId, Failure),
    /// A command has disconnected.
    ClientGone(ClientId),
    /// A save or restore has made progress.
    Progress(Progress),
    /// A merge of disk layers has ended.
    MergeEnded(Result<serde_json::Value, Failure>),
    /// A save has ended; with its report, if there is an image.
    SaveEnded(Result<serde_json::Value, Failure>),
    /// A restore has ended: all memory is in place, or never will be.
    RestoreEnded(Result<serde_json::Value, Failure>),
    /// A standby can't become the VM now.
    TakeUpRefused(ClientId, Failure),
    /// The first epoch is committed.
    Protected(serde_json::Value),
    /// The protection has ended: it was released, or could not continue.
    ProtectionEnded(Result<serde_json::Value, Failure>),
    /// The hypervisor did not end as requested (for example, the guest ignores its power button).
    StopFailed(Failure),
    /// The hypervisor process has ended.
    HypervisorGone(Exit),
    /// A save or restore that lost its hypervisor had enough time to end.
    GraceOver,
    /// One of the guards has ended.
    GuardGone(Role),
    /// A guard that dies repeatedly may be started again.
    GuardDue(Role),
    /// SIGTERM.
    Terminate,
}

/// A response of the supervisor to an event.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Answer a command.
    Reply(ClientId, Reply),
    /// Answer a command with the VM's status.
    ReplyStatus(ClientId),
    /// Answer a command with the current command line of the VM.
    CommandLine(ClientId),
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
    TakeUp(ClientId, FailoverRequest),
    /// Answer the coordinator of a cluster's global checkpoints.
    Member(ClientId, MemberRequest),
    /// Release the output that the VM's network cards buffer, and report to this command whether
    /// there was any.
    LetOut(Option<ClientId>),
    /// Release the buffered output while the lease is held, and report to this command.
    GoOn(ClientId),
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
    RestartGuard(Role),
    /// Start a new guard now.
    StartGuard(Role),
    /// Exit, and leave the VM as it is to a successor: this process can't serve it.
    Resign(Failure),
    /// Detach from the VM, and exit.
    LetGo,
    /// Record how the VM ended, and exit.
    RecordEnd {
        /// How it ended.
        exit: Exit,
        /// The reason, if Firn knows one.
        reason: Option<Failure>,
    },
}

/// The operation that runs beside the guest.
#[derive(Clone, Debug, PartialEq)]
enum Activity {
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
        taken_up: bool,
    },
}

/// The state machine.
#[derive(Debug)]
pub struct Core {
    activity: Activity,
    /// The progress of the activity.
    progress: Option<Progress>,
    watchers: BTreeSet<ClientId>,
    /// Commands that wait for the hypervisor's end. `Some` once it was requested to end.
    stopping: Option<Vec<(ClientId, serde_json::Value)>>,
    /// The hypervisor has ended while a save or restore is still to be finished.
    gone: Option<Exit>,
    /// The failure of a save or restore because the hypervisor ended. It is reported only when the
    /// supervisor knows how the hypervisor ended.
    lost: Option<Failure>,
    /// Detach once idle.
    leaving: bool,
    /// The VM's disks are served by this supervisor, without which the guest would block.
    serves: bool,
    /// The VM belongs to a cluster: requests that concern all of the cluster are refused for it
    /// alone.
    is_member: bool,
    /// The reason why the hypervisor is being killed.
    reason: Option<Failure>,
    /// A restore that can't continue here does not end the VM.
    keeps_vm: bool,
}

impl Core {
    /// The core of a supervisor whose VM runs, with or without a restore that still runs.
    pub fn new(restoring: bool) -> Self {
        Self::with(if restoring { Activity::Restoring } else { Activity::Idle })
    }

    /// The core of a supervisor whose VM does not run yet.
    pub fn standby() -> Self {
        Self::with(Activity::Standby { taken_up: false })
    }

    fn with(activity: Activity) -> Self {
        Self {
            activity,
            progress: None,
            watchers: BTreeSet::new(),
            stopping: None,
            gone: None,
            lost: None,
            leaving: false,
            serves: false,
            is_member: false,
            reason: None,
            keeps_vm: false,
        }
    }

    /// Sets whether a restore that can't continue leaves the VM to a successor, instead of ending
    /// it.
    pub fn keeping_vm(self, keeps_vm: bool) -> Self {
        Self { keeps_vm, ..self }
    }

    /// Sets whether the supervisor serves the VM's disks.
    pub fn serving(self, serves: bool) -> Self {
        Self { serves, ..self }
    }

    /// Sets whether the VM belongs to a cluster.
    pub fn belongs(&mut self, is_member: bool) {
        self.is_member = is_member;
    }

    /// The progress of the operation that runs.
    pub fn progress(&self) -> Option<&Progress> {
        self.progress.as_ref()
    }

    /// Whether no operation runs, and none is about to.
    pub fn is_idle(&self) -> bool {
        let ends = self.stopping.is_some() || self.gone.is_some() || self.leaving;
        self.activity == Activity::Idle && !ends
    }

    /// Handles an event; returns the actions to perform, in order.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Request(client, request) => self.request(client, request),
            Event::Garbled(client, failure) => vec![failed(client, failure)],
            Event::ClientGone(client) => self.client_gone(client),
            Event::Progress(progress) => self.progressed(progress),
            Event::SaveEnded(result) => self.save_ended(result),
            Event::MergeEnded(result) => self.merge_ended(result),
            Event::RestoreEnded(result) => self.restore_ended(result),
            Event::TakeUpRefused(client, failure) => self.take_up_refused(client, failure),
            Event::Protected(facts) => self.protected(facts),
            Event::ProtectionEnded(result) => self.protection_ended(result),
            Event::StopFailed(failure) => self.stop_failed(failure),
            Event::HypervisorGone(exit) => self.hypervisor_gone(exit),
            Event::GraceOver => self.grace_over(),
            Event::GuardGone(role) => vec![Action::RestartGuard(role)],
            Event::GuardDue(role) => vec![Action::StartGuard(role)],
            Event::Terminate => self.terminate(),
        }
    }

    fn request(&mut self, client: ClientId, request: Request) -> Vec<Action> {
        match request {
            Request::Status => vec![Action::ReplyStatus(client)],
            Request::Watch => self.watch(client),
            Request::CommandLine if self.is_idle() => vec![Action::CommandLine(client)],
            Request::CommandLine => vec![done(client, serde_json::Value::Null)],
            Request::Checkpoint(request) => self.save(client, request, false),
            Request::Suspend(request) => self.save(client, request, true),
            Request::MergeDisks => self.merge(client, false),
            Request::CommitDisks => self.merge(client, true),
            Request::Stop(request) => self.stop(client, request),
            Request::Detach => self.detach(client),
            Request::Protect(request) => self.protect(client, request),
            Request::Release => match (self.is_member, &self.activity) {
                (true, Activity::Protecting { .. }) => vec![failed(client, of_a_cluster())],
                _ => self.release(client),
            },
            Request::ReleaseMember => self.release(client),
            Request::GoOn => self.go_on(client),
            Request::Failover(how) => self.failover(client, how),
            Request::Member(request) => self.member(client, request),
            Request::Fence { why } => self.fence(client, why),
        }
    }

    fn watch(&mut self, client: ClientId) -> Vec<Action> {
        if self.activity == Activity::Idle {
            return vec![Action::ReplyStatus(client)];
        }
        self.watchers.insert(client);
        self.progress.iter().map(|now| progress(client, now)).collect()
    }

    fn save(&mut self, client: ClientId, request: SaveRequest, then_stop: bool) -> Vec<Action> {
        if let Some(busy) = self.busy() {
            return vec![failed(client, busy)];
        }
        let cancel_with_client = request.cancel_with_client;
        self.activity = Activity::Saving { client, cancel_with_client, then_stop };
        vec![Action::BeginSave { request, then_stop }]
    }

    fn merge(&mut self, client: ClientId, all: bool) -> Vec<Action> {
        if let Some(busy) = self.busy() {
            return vec![failed(client, busy)];
        }
        self.activity = Activity::Merging { client, then_stop: None };
        vec![Action::BeginMerge { all }]
    }

    fn merge_ended(&mut self, result: Result<serde_json::Value, Failure>) -> Vec<Action> {
        let Activity::Merging { then_stop, .. } = &mut self.activity else { return Vec::new() };
        let then_stop = then_stop.take();
        let mut actions = match result {
            Err(failure) => self.failed(failure),
            result => self.over(result),
        };
        if self.gone.is_none() {
            actions.extend(then_stop.map(Action::EndHypervisor));
        }
        actions
    }

    /// The reason why no new operation can begin, if there is one.
    fn busy(&self) -> Option<Failure> {
        let busy = |what, hint| Some(Failure::new(FailureKind::Busy, what).hint(hint));
        match (&self.activity, &self.stopping) {
            (_, Some(_)) => busy("the VM is being stopped", "wait for it to end"),
            (Activity::Saving { .. }, _) => {
                busy("a checkpoint is being written", "wait for it: `firn status --watch` shows it")
            }
            (Activity::Merging { .. }, _) => busy(
                "layers of the VM's disks are being merged",
                "wait for it: `firn status --watch` shows it",
            ),
            (Activity::Restoring, _) => busy(
                "the VM is still being restored: part of its memory is only in the image",
                "wait for it: `firn status --watch` shows it",
            ),
            (Activity::Protecting { .. }, _) => {
                busy("the VM is being protected", "`firn release` ends that; the VM runs on")
            }
            (Activity::Standby { .. }, _) => {
                busy("the VM is a standby and does not run here", "`firn failover` runs it")
            }
            (Activity::Idle, None) if self.leaving => {
                busy("the supervisor is detaching from the VM", "run `firn attach`")
            }
            (Activity::Idle, None) => None,
        }
    }

    fn stop(&mut self, client: ClientId, request: StopRequest) -> Vec<Action> {
        if let Some(waiting) = &mut self.stopping {
            waiting.push((client, serde_json::Value::Null));
            return Vec::new();
        }
        let saving = matches!(self.activity, Activity::Saving { .. });
        if saving && !request.force {
            let busy = Failure::new(FailureKind::Busy, "a checkpoint is being written");
            return vec![failed(client, busy.hint("wait for it, or give it up with --force"))];
        }
        self.stopping = Some(vec![(client, serde_json::Value::Null)]);
        if let Activity::Protecting { then_stop, .. } = &mut self.activity {
            if request.powerdown_s.is_some() {
                // The guest may be slow, or ignore the button: it stays protected until it ends.
                return vec![Action::EndHypervisor(request)];
            }
            *then_stop = Some(request);
            return vec![Action::StopProtection];
        }
        // The monitor belongs to the merge until that has ended.
        if let Activity::Merging { then_stop, .. } = &mut self.activity {
            *then_stop = Some(request);
            return vec![Action::CancelSave];
        }
        let kill = Action::KillHypervisor { discard: request.discard };
        match self.activity {
            Activity::Saving { .. } => vec![Action::CancelSave, kill],
            // The standby's VM has never run.
            Activity::Standby { taken_up: false } => vec![kill],
            _ => vec![Action::EndHypervisor(request)],
        }
    }

    fn protect(&mut self, client: ClientId, request: ProtectRequest) -> Vec<Action> {
        if let Some(busy) = self.busy() {
            return vec![failed(client, busy)];
        }
        let (releasing, then_stop, alone) = (Vec::new(), None, request.alone);
        self.activity = Activity::Protecting { alone, asked: Some(client), releasing, then_stop };
        vec![Action::BeginProtection(request)]
    }

    fn protected(&mut self, facts: serde_json::Value) -> Vec<Action> {
        let Activity::Protecting { asked, .. } = &mut self.activity else { return Vec::new() };
        self.progress = None;
        asked.take().into_iter().map(|client| done(client, facts.clone())).collect()
    }

    /// Ends the protection. A VM that is not protected any more may still buffer output.
    fn release(&mut self, client: ClientId) -> Vec<Action> {
        match &mut self.activity {
            Activity::Protecting { releasing, .. } => {
                releasing.push(client);
                vec![Action::Release]
            }
            Activity::Standby { .. } => {
                let standby = Failure::new(FailureKind::Usage, "the VM is a standby");
                vec![failed(client, standby.hint("`firn release` is for its primary"))]
            }
            _ => vec![Action::LetOut(Some(client))],
        }
    }

    fn protection_ended(&mut self, result: Result<serde_json::Value, Failure>) -> Vec<Action> {
        let Activity::Protecting { alone, asked, releasing, then_stop } = &mut self.activity else {
            return Vec::new();
        };
        let then_stop = then_stop.take();
        // The standby of a VM that ends may continue it. With `alone` the user released the output
        // for the case that the backup is lost: not for a backup that ends the connection for a
        // reason, and not for a failure on this host.
        let lets_out = match &result {
            Ok(_) => !releasing.is_empty() && then_stop.is_none() && !self.leaving,
            Err(failure) => *alone && asked.is_none() && failure.kind == FailureKind::Lost,
        };
        let mut actions = Vec::new();
        actions.extend((lets_out && self.gone.is_none()).then_some(Action::LetOut(None)));
        actions.extend(match result {
            Err(failure) => self.failed(failure),
            Ok(facts) => self.over(Ok(facts)),
        });
        if self.gone.is_none() {
            actions.extend(then_stop.map(Action::EndHypervisor));
        }
        actions
    }

    fn go_on(&self, client: ClientId) -> Vec<Action> {
        match &self.activity {
            Activity::Protecting { .. } | Activity::Standby { .. } => {
                let text = "the VM is protected, or a standby: its output can't be released";
                vec![failed(client, Failure::new(FailureKind::Busy, text))]
            }
            _ => vec![Action::GoOn(client)],
        }
    }

    /// Kills the hypervisor; the operation that runs fails by that. A standby has never run.
    fn fence(&mut self, client: ClientId, why: String) -> Vec<Action> {
        if self.activity == (Activity::Standby { taken_up: false }) {
            let text = "the VM is a standby and does not run here";
            return vec![failed(client, Failure::new(FailureKind::Usage, text))];
        }
        self.reason = Some(Failure::new(FailureKind::Lost, why));
        vec![Action::KillHypervisor { discard: false }, done(client, serde_json::Value::Null)]
    }

    /// Forwards a request. A VM joins or leaves a cluster only while no operation runs on it.
    fn member(&mut self, client: ClientId, request: MemberRequest) -> Vec<Action> {
        let waits = match request {
            MemberRequest::Join(_) | MemberRequest::Leave => true,
            // QEMU would have to be queried, and it is busy during an operation.
            MemberRequest::Card => !self.is_member,
            MemberRequest::Mark { .. } | MemberRequest::Globally { .. } => false,
        };
        match self.busy().filter(|_| waits) {
            Some(busy) => vec![failed(client, busy)],
            None => vec![Action::Member(client, request)],
        }
    }

    fn failover(&mut self, client: ClientId, how: FailoverRequest) -> Vec<Action> {
        match &mut self.activity {
            Activity::Standby { taken_up } if self.stopping.is_none() => {
                *taken_up = true;
                self.watchers.insert(client);
                vec![Action::TakeUp(client, how)]
            }
            _ => {
                let no_standby = Failure::new(FailureKind::Usage, "the VM is no standby");
                vec![failed(client, no_standby.hint("`firn standby` makes one"))]
            }
        }
    }

    fn take_up_refused(&mut self, client: ClientId, failure: Failure) -> Vec<Action> {
        if let Activity::Standby { taken_up } = &mut self.activity {
            *taken_up = false;
        }
        let is_waiting = self.watchers.remove(&client);
        is_waiting.then(|| failed(client, failure)).into_iter().collect()
    }

    fn detach(&mut self, client: ClientId) -> Vec<Action> {
        match self.busy() {
            Some(busy) => vec![failed(client, busy)],
            None if self.serves => {
                let text = "Firn serves the VM's disks: without Firn the VM would block";
                let failure = Failure::new(FailureKind::Refused, text);
                vec![failed(client, failure.hint("`firn stop` ends the VM"))]
            }
            None => vec![Action::LetGo, done(client, serde_json::Value::Null)],
        }
    }

    fn client_gone(&mut self, gone: ClientId) -> Vec<Action> {
        self.watchers.remove(&gone);
        match self.activity {
            Activity::Saving { client, cancel_with_client: true, .. } if client == gone => {
                vec![Action::CancelSave]
            }
            _ => Vec::new(),
        }
    }

    fn progressed(&mut self, now: Progress) -> Vec<Action> {
        let actions = self.listeners().into_iter().map(|client| progress(client, &now)).collect();
        self.progress = Some(now);
        actions
    }

    /// The clients that get reports on the activity: those that requested it, and the watchers.
    fn listeners(&self) -> BTreeSet<ClientId> {
        let mut listeners = self.watchers.clone();
        match &self.activity {
            Activity::Saving { client, .. } | Activity::Merging { client, .. } => {
                listeners.insert(*client);
            }
            Activity::Protecting { asked, releasing, .. } => {
                listeners.extend(asked.iter().chain(releasing));
            }
            Activity::Idle | Activity::Restoring | Activity::Standby { .. } => {}
        }
        listeners
    }

    fn save_ended(&mut self, result: Result<serde_json::Value, Failure>) -> Vec<Action> {
        match (self.activity.clone(), result) {
            (Activity::Saving { .. }, Err(failure)) => self.failed(failure),
            (Activity::Saving { then_stop: true, .. }, Ok(facts)) if self.gone.is_none() => {
                self.suspended(&facts)
            }
            (Activity::Saving { .. }, Ok(facts)) => self.over(Ok(facts)),
            _ => Vec::new(),
        }
    }

    fn suspended(&mut self, facts: &serde_json::Value) -> Vec<Action> {
        let waiting = self.listeners().into_iter().map(|client| (client, facts.clone()));
        self.stopping.get_or_insert_default().extend(waiting);
        self.idle();
        // It is paused, its disks are flushed, and the image has the rest: killing QEMU loses
        // nothing.
        vec![Action::EndHypervisor(StopRequest { force: true, ..StopRequest::default() })]
    }

    fn restore_ended(&mut self, result: Result<serde_json::Value, Failure>) -> Vec<Action> {
        match result {
            _ if !matches!(self.activity, Activity::Restoring | Activity::Standby { .. }) => {
                Vec::new()
            }
            Ok(facts) => self.over(Ok(facts)),
            Err(failure) if failure.kind.is_cut_short() => self.failed(failure),
            Err(failure) => {
                if self.gone.is_none() && self.keeps_vm {
                    return vec![Action::Resign(failure)];
                }
                self.reason = Some(failure.clone());
                if self.gone.is_some() {
                    return self.over(Err(failure));
                }
                // vCPUs wait for pages that no process will install: ending the VM is better than a
                // hang.
                self.lost = Some(failure);
                vec![Action::KillHypervisor { discard: false }]
            }
        }
    }

    /// Handles the failure of the activity, by itself or because the hypervisor has ended. In the
    /// latter case the reply includes how the hypervisor ended, which may be known only later.
    fn failed(&mut self, failure: Failure) -> Vec<Action> {
        match self.gone {
            Some(exit) if failure.kind.is_cut_short() => self.ended_during(exit),
            None if failure.kind == FailureKind::Ended => {
                self.lost = Some(failure);
                Vec::new()
            }
            _ => self.over(Err(failure)),
        }
    }

    /// Ends the activity: replies to its listeners and becomes idle.
    fn over(&mut self, result: Result<serde_json::Value, Failure>) -> Vec<Action> {
        let told = self.tell_listeners(result);
        self.idle();
        self.after_activity(told)
    }

    fn tell_listeners(&mut self, result: Result<serde_json::Value, Failure>) -> Vec<Action> {
        let reply = match result {
            Ok(facts) => Reply::Done { facts },
            Err(failure) => Reply::Failed(failure),
        };
        self.listeners().into_iter().map(|client| Action::Reply(client, reply.clone())).collect()
    }

    fn idle(&mut self) {
        self.activity = Activity::Idle;
        self.progress = None;
        self.watchers.clear();
    }

    /// The actions that follow the end of an activity, after these replies.
    fn after_activity(&mut self, mut told: Vec<Action>) -> Vec<Action> {
        match self.gone {
            Some(exit) => return self.end(exit, told),
            None if self.leaving && self.stopping.is_none() => told.push(Action::LetGo),
            None => {}
        }
        told
    }

    fn stop_failed(&mut self, failure: Failure) -> Vec<Action> {
        let waiting = self.stopping.take().unwrap_or_default();
        let told: Vec<_> =
            waiting.into_iter().map(|(client, _)| failed(client, failure.clone())).collect();
        match self.activity {
            Activity::Idle => self.after_activity(told),
            _ => told,
        }
    }

    /// Handles the end of the hypervisor. The activity notices it by itself and reports a result of
    /// its own, if it has one.
    fn hypervisor_gone(&mut self, exit: Exit) -> Vec<Action> {
        self.gone = Some(exit);
        match (&self.activity, self.lost.take()) {
            (Activity::Idle, _) => self.end(exit, Vec::new()),
            (_, Some(failure)) => self.failed(failure),
            // No failover has begun that would notice it.
            (Activity::Standby { taken_up: false }, None) => self.ended_during(exit),
            (_, None) => vec![Action::CancelSave, Action::StartGrace],
        }
    }

    fn grace_over(&mut self) -> Vec<Action> {
        let Some(exit) = self.gone else { return Vec::new() };
        self.ended_during(exit)
    }

    /// What the VM was being, as a participle for a sentence.
    fn verb(&self) -> &'static str {
        match self.activity {
            Activity::Restoring => "restored",
            Activity::Merging { .. } => "merged",
            Activity::Protecting { .. } => "protected",
            Activity::Standby { .. } => "kept ready",
            _ => "saved",
        }
    }

    /// The VM ended during an activity, which has failed by that.
    fn ended_during(&mut self, exit: Exit) -> Vec<Action> {
        let what = self.verb();
        let shown = if self.stopping.is_some() { Exit::Stopped } else { exit };
        let ended = format!("the VM ended while it was being {what} ({shown})");
        let told = self.tell_listeners(Err(Failure::new(FailureKind::Ended, ended)));
        self.end(exit, told)
    }

    fn end(&mut self, exit: Exit, told: Vec<Action>) -> Vec<Action> {
        let asked = self.stopping.is_some();
        let waiting = self.stopping.take().unwrap_or_default();
        let exit = if asked { Exit::Stopped } else { exit };
        // The end is recorded first, so that a client that gets a reply finds it recorded.
        let record = Action::RecordEnd { exit, reason: self.reason.take() };
        let waiting = waiting.into_iter().map(|(client, facts)| done(client, facts));
        std::iter::once(record).chain(told).chain(waiting).collect()
    }

    fn terminate(&mut self) -> Vec<Action> {
        let runs = !matches!(self.activity, Activity::Standby { taken_up: false });
        if self.stopping.is_some() || self.leaving || (self.serves && runs) {
            return Vec::new();
        }
        self.leaving = true;
        match self.activity {
            Activity::Idle => vec![Action::LetGo],
            Activity::Saving { .. } | Activity::Merging { .. } | Activity::Protecting { .. } => {
                vec![Action::CancelSave]
            }
            Activity::Restoring | Activity::Standby { taken_up: true } => Vec::new(),
            Activity::Standby { taken_up: false } => {
                vec![Action::KillHypervisor { discard: false }]
            }
        }
    }
}

fn of_a_cluster() -> Failure {
    let text = "the VM is protected with the cluster that it belongs to";
    let hint = "run `firn cluster release` on the host where the cluster was made";
    Failure::new(FailureKind::Refused, text).hint(hint)
}

fn failed(client: ClientId, failure: Failure) -> Action {
    Action::Reply(client, Reply::Failed(failure))
}

fn done(client: ClientId, facts: serde_json::Value) -> Action {
    Action::Reply(client, Reply::Done { facts })
}

fn progress(client: ClientId, now: &Progress) -> Action {
    Action::Reply(client, Reply::Progress(now.clone()))
}

#[cfg(test)]
#[path = "decisions_tests.rs"]
mod tests;
