//! The event loop of a supervisor: it passes events to the state machine and performs the actions.
//!
//! ```text
//!    control socket --.                                    .--> replies
//!    hypervisor pidfd --\                                 /---> save, stop   (threads of their own)
//!    guard pidfd --------+--> one channel --> the core --+----> journal
//!    signals ----------/                                  \---> new guard
//!    save, restore --'                                     '--> exit
//! ```

use std::cell::Cell;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use firn_epochs::primary::EndRequest;

use crate::daemon::control_server::{self, ClientConnections};
use crate::daemon::decisions::{ClientId, SupervisorAction, SupervisorCore, SupervisorEvent};
use crate::daemon::event_sources;
use crate::daemon::status::VmStatus;
use crate::devices::disk_snapshots;
use crate::devices::network::CardStatus;
use crate::operations::protection::ProtectionStatus;
use crate::operations::restore_task::RestoreTask;
use crate::operations::standby::StandbyControl;
use crate::processes::descriptors;
use crate::processes::identity::ProcessHandle;
use crate::processes::kept_keys;
use crate::processes::lock::{self, ProcessRole};
use crate::processes::restarts::RestartBackoff;
use crate::processes::runtime::{RuntimeDir, VmDir};
use crate::processes::spawn;
use crate::records::control_protocol::{
    FailoverRequest, MemberRequest, OperationProgress, ProtectRequest, SaveRequest, StopRequest,
    SupervisorReply,
};
use crate::records::failure::{Failure, FailureKind};
use crate::records::journal::{Journal, JournalFile, VmPhase, unix_seconds};
use crate::records::process_exit::ProcessExit;
use crate::recovery::guard;

/// The minimum time between two progress reports.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// The operations on a VM. Each may take long, and is called on a thread of its own.
pub(crate) trait VmOperations: Send + Sync + 'static {
    /// Writes an image; returns facts about it.
    fn save_vm(
        &self,
        request: &SaveRequest,
        then_stop: bool,
        cancel: &AtomicBool,
        progress: &dyn Fn(OperationProgress),
    ) -> Result<serde_json::Value, Failure>;

    /// Merges layers of the VM's disks: those that no image needs, or all.
    fn merge_layers(
        &self,
        all: bool,
        cancel: &AtomicBool,
        progress: &dyn Fn(OperationProgress),
    ) -> Result<serde_json::Value, Failure>;

    /// Sends the VM's epochs to a backup until `ending` requests an end; `begun` is called when the
    /// first epoch is committed.
    fn protect_vm(
        &self,
        request: &ProtectRequest,
        ending: &EndRequest,
        begun: &dyn Fn(),
        progress: &dyn Fn(OperationProgress),
    ) -> Result<serde_json::Value, Failure>;

    /// The state of the VM's protection, if it is protected.
    fn protection(&self) -> Option<ProtectionStatus>;

    /// The state of its network cards.
    fn network_cards(&self) -> Vec<CardStatus>;

    /// Releases the output that its network cards buffer, and lets later output pass. `false` if
    /// there was nothing to release.
    fn release_output(&self) -> Result<bool, Failure>;

    /// Releases the buffered output, and lets later output pass while the lease is held.
    fn resume_output(&self) -> Result<(), Failure>;

    /// Makes the final cut of a planned move; the VM stays paused, for `hold` at most. Returns when
    /// the backup has committed it, and all output up to it has left.
    fn cut_finally(&self, hold: Duration) -> Result<serde_json::Value, Failure>;

    /// Resumes the VM after its final cut.
    fn resume_after_cut(&self) -> Result<serde_json::Value, Failure>;

    /// Answers a request of the coordinator of a cluster's global checkpoints.
    fn answer_member_request(&self, request: &MemberRequest) -> Result<serde_json::Value, Failure>;

    /// Whether the VM belongs to a cluster.
    fn is_member(&self) -> bool;

    /// Whether filters of QEMU pass the frames of the VM's cards to Firn.
    fn has_filters(&self) -> bool;

    /// Starts the work that is done while no operation runs. May be called again.
    fn start_idle_work(&self);

    /// Ends what [`Self::start_idle_work`] started, because Firn detaches from the VM.
    fn stop_idle_work(&self);

    /// Ends the hypervisor as requested. It is an error if it continues to run.
    fn end_hypervisor(&self, request: StopRequest) -> Result<(), Failure>;

    /// Whether the hypervisor did not answer the last query, and does not answer now.
    fn is_hung(&self) -> bool;

    /// Returns the command line that starts the VM on its current disks.
    fn command_line(&self) -> Result<serde_json::Value, Failure>;

    /// Checks which operations on the VM work. Changes nothing.
    fn check_operations(&self) -> Result<serde_json::Value, Failure>;

    /// Whether the vCPUs are paused, if the hypervisor reports that without delay.
    fn is_paused(&self) -> Option<bool>;
}

/// A VM, with everything that its supervisor needs to manage it.
pub(crate) struct VmSupervisor {
    pub(crate) base: RuntimeDir,
    pub(crate) vm: VmDir,
    pub(crate) journal: Arc<JournalFile>,
    pub(crate) hypervisor: Arc<ProcessHandle>,
    pub(crate) operations: Arc<dyn VmOperations>,
    pub(crate) restoring: Option<RestoreTask>,
    /// The open files of the image that is being restored.
    pub(crate) files: Vec<File>,
    /// The failover of a standby.
    pub(crate) standby: Option<Arc<StandbyControl>>,
    /// The guards that run already.
    pub(crate) guards: Vec<(ProcessRole, ProcessHandle)>,
}

/// The loop around the state machine.
struct EventLoop {
    keeper: VmSupervisor,
    core: SupervisorCore,
    clients: ClientConnections,
    sender: Sender<SupervisorEvent>,
    events: Receiver<SupervisorEvent>,
    cancel: Arc<AtomicBool>,
    ending: Arc<EndRequest>,
    restarts: HashMap<ProcessRole, RestartBackoff>,
    is_idle: bool,
}

impl VmSupervisor {
    /// Opens the control socket, calls `ready`, and manages the VM until there is nothing left to
    /// do.
    pub(crate) fn run_event_loop(mut self, ready: impl FnOnce()) -> io::Result<()> {
        let (sender, events) = crossbeam_channel::unbounded();
        event_sources::watch_hypervisor(Arc::clone(&self.hypervisor), sender.clone())?;
        event_sources::watch_signals(sender.clone())?;
        for role in [ProcessRole::Guard, ProcessRole::Watcher] {
            match self.guards.iter().position(|(it, _)| *it == role) {
                Some(at) => {
                    event_sources::watch_guard(self.guards.swap_remove(at).1, role, sender.clone())?
                }
                None => ensure_guard(&self.base, &self.vm, role, &self.files, &sender)?,
            }
        }
        let core = match &self.standby {
            Some(_) => SupervisorCore::new_standby(),
            None => SupervisorCore::new(self.restoring.is_some()),
        };
        let hypervisor_record = self.journal.current_journal().hypervisor_record;
        let keeps_vm = self.journal.current_journal().phase.leaves_vm_to_successor();
        let core = core.with_vm_left_to_successor(keeps_vm).with_served_disks(
            hypervisor_record.is_some_and(|hypervisor_record| !hypervisor_record.served.is_empty()),
        );
        if let Some(restoring) = self.restoring.take() {
            start_restoring(restoring, sender.clone())?;
        }
        let clients =
            control_server::serve_control_socket(&self.vm.control_socket(), sender.clone())?;
        ready();
        let (cancel, ending, restarts) = (Arc::default(), Arc::default(), HashMap::default());
        let is_idle = false;
        EventLoop { keeper: self, core, clients, sender, events, cancel, ending, restarts, is_idle }
            .run()
    }
}

impl EventLoop {
    fn run(mut self) -> io::Result<()> {
        self.update_idle_work();
        while let Ok(event) = self.events.recv() {
            self.core.set_member(self.keeper.operations.is_member());
            self.core.set_filtered(self.keeper.operations.has_filters());
            let actions = self.core.handle_event(event);
            let is_over = actions.iter().any(|action| {
                matches!(action, SupervisorAction::DetachVm | SupervisorAction::RecordEnd { .. })
            });
            for action in actions {
                self.perform_action(action)?;
            }
            if is_over {
                break;
            }
            self.update_idle_work();
        }
        Ok(())
    }

    /// Starts idle work each time that the last operation has ended.
    fn update_idle_work(&mut self) {
        let was_idle = std::mem::replace(&mut self.is_idle, self.core.is_idle());
        if self.is_idle {
            // The guards close their copies when they see that the restore is over.
            self.keeper.files.clear();
        }
        if self.is_idle && !was_idle {
            self.keeper.operations.start_idle_work();
        }
    }

    fn perform_action(&mut self, action: SupervisorAction) -> io::Result<()> {
        match action {
            SupervisorAction::Reply(client, reply) => self.clients.send_reply(client, &reply),
            SupervisorAction::ReplyStatus(client) => self.reply_status(client)?,
            SupervisorAction::BeginSave { request, then_stop } => {
                self.begin_save(request, then_stop)?
            }
            SupervisorAction::BeginMerge { all } => self.begin_merge(all)?,
            SupervisorAction::BeginProtection(request) => self.begin_protection(request)?,
            SupervisorAction::BeginFailover(client, how) => self.begin_failover(client, how),
            SupervisorAction::ResumeOutput(client) => self.resume_output(client),
            SupervisorAction::Member(client, request) => {
                self.answer_on_thread(client, move |operations| {
                    operations.answer_member_request(&request)
                })?;
            }
            SupervisorAction::FinalCut { client, hold_ms } => {
                let hold = Duration::from_millis(hold_ms);
                self.answer_on_thread(client, move |operations| operations.cut_finally(hold))?;
            }
            SupervisorAction::ResumeAfterCut(client) => {
                self.answer_on_thread(client, |operations| operations.resume_after_cut())?;
            }
            SupervisorAction::AddKeys { client, keys } => {
                let used = kept_keys::use_given_keys(&self.keeper.journal.current_journal(), &keys);
                let done = |()| SupervisorReply::Done { facts: serde_json::Value::Null };
                self.clients.send_reply(client, &used.map_or_else(SupervisorReply::Failed, done));
            }
            SupervisorAction::CommandLine(client) => {
                self.answer_on_thread(client, |operations| operations.command_line())?;
            }
            SupervisorAction::CheckOperations(client) => {
                self.answer_on_thread(client, |operations| operations.check_operations())?;
            }
            SupervisorAction::ReleaseOutput(client) => self.release_output(client),
            SupervisorAction::CancelSave => self.cancel_operation(),
            SupervisorAction::Release => self.ending.request_release(),
            SupervisorAction::StopProtection => self.ending.request_stop(),
            SupervisorAction::EndHypervisor(request) => self.end_hypervisor(request)?,
            SupervisorAction::KillHypervisor { discard } => self.kill_hypervisor(discard)?,
            SupervisorAction::StartGrace => event_sources::start_grace_period(self.sender.clone())?,
            SupervisorAction::RestartGuard(role) => self.restart_guard(role)?,
            SupervisorAction::StartGuard(role) => self.start_guard(role)?,
            SupervisorAction::Resign(failure) => return Err(self.resign_to_successor(&failure)),
            SupervisorAction::DetachVm => self.detach_vm()?,
            SupervisorAction::RecordEnd { exit, reason } => self.record_end(exit, reason)?,
        }
        Ok(())
    }

    /// Cancels the save or merge, or ends the protection: only one of them runs.
    fn cancel_operation(&self) {
        self.cancel.store(true, Ordering::Relaxed);
        self.ending.request_end();
    }

    fn restart_guard(&mut self, role: ProcessRole) -> io::Result<()> {
        let pause = self.restarts.entry(role).or_default().next_delay(Instant::now());
        let when = match pause {
            Duration::ZERO => "at once".to_owned(),
            pause => format!("in {} s", pause.as_secs()),
        };
        tracing::warn!("the {} has died: another one starts {when}", role.as_word());
        match pause {
            Duration::ZERO => self.start_guard(role),
            pause => event_sources::delay_guard(role, pause, self.sender.clone()),
        }
    }

    fn start_guard(&self, role: ProcessRole) -> io::Result<()> {
        let VmSupervisor { base, vm, files, .. } = &self.keeper;
        ensure_guard(base, vm, role, files, &self.sender)
    }

    /// Records why this supervisor exits. The VM stays as it is: its memory is missing, not wrong,
    /// and a successor tries again.
    fn resign_to_successor(&self, failure: &Failure) -> io::Error {
        tracing::error!("{failure}: a successor tries again");
        let text = format!("the supervisor could not continue the restore: {failure}");
        let _ = self.keeper.journal.update(|journal| journal.record_failure(text));
        io::Error::other(failure.to_string())
    }

    /// Replies on a thread of its own, because QEMU may be slow to answer.
    fn reply_status(&self, client: ClientId) -> io::Result<()> {
        let status = VmStatus::from_journal(&self.keeper.journal.current_journal());
        let mut status = status.with_progress(self.core.progress().cloned());
        status.supervisor_pid = Some(std::process::id() as i32);
        status.protection = self.keeper.operations.protection();
        status.network = self.keeper.operations.network_cards();
        let standby = self.keeper.standby.as_ref().filter(|_| status.state == "standby");
        status.standby = standby.map(|standby| standby.current_status());
        status.guard_pid = lock::role_holder(self.keeper.vm.path(), ProcessRole::Guard)?;
        status.watcher_pid = lock::role_holder(self.keeper.vm.path(), ProcessRole::Watcher)?;
        let (operations, clients) = (Arc::clone(&self.keeper.operations), self.clients.clone());
        event_sources::spawn_thread("status", move || {
            if status.state == "running" && operations.is_hung() {
                status.state = "hung".to_owned();
            }
            if status.state == "running" && operations.is_paused() == Some(true) {
                status.state = "paused".to_owned();
            }
            let facts = serde_json::to_value(status).unwrap_or_default();
            clients.send_reply(client, &SupervisorReply::Done { facts });
        })
    }

    fn begin_save(&mut self, request: SaveRequest, then_stop: bool) -> io::Result<()> {
        self.cancel = Arc::default();
        let (operations, cancel) = (Arc::clone(&self.keeper.operations), Arc::clone(&self.cancel));
        let sender = self.sender.clone();
        event_sources::spawn_thread("save", move || {
            let progress = |now| drop(sender.send(SupervisorEvent::Progress(now)));
            let saved = catch_panic("the save", || {
                operations.save_vm(&request, then_stop, &cancel, &progress)
            });
            let _ = sender.send(SupervisorEvent::SaveEnded(saved));
        })
    }

    fn begin_merge(&mut self, all: bool) -> io::Result<()> {
        self.cancel = Arc::default();
        let (operations, cancel) = (Arc::clone(&self.keeper.operations), Arc::clone(&self.cancel));
        let sender = self.sender.clone();
        event_sources::spawn_thread("merge", move || {
            let throttle = ProgressThrottle::default();
            let progress =
                |now| throttle.run_throttled(|| drop(sender.send(SupervisorEvent::Progress(now))));
            let merged =
                catch_panic("the merge", || operations.merge_layers(all, &cancel, &progress));
            let _ = sender.send(SupervisorEvent::MergeEnded(merged));
        })
    }

    fn begin_protection(&mut self, request: ProtectRequest) -> io::Result<()> {
        self.ending = Arc::default();
        let (operations, ending) = (Arc::clone(&self.keeper.operations), Arc::clone(&self.ending));
        let sender = self.sender.clone();
        event_sources::spawn_thread("protect", move || {
            let throttle = ProgressThrottle::default();
            let progress =
                |now| throttle.run_throttled(|| drop(sender.send(SupervisorEvent::Progress(now))));
            let begun = || {
                let facts = serde_json::to_value(operations.protection()).unwrap_or_default();
                drop(sender.send(SupervisorEvent::Protected(facts)));
            };
            let protect = || operations.protect_vm(&request, &ending, &begun, &progress);
            let ended = catch_panic("the protection", protect);
            let _ = sender.send(SupervisorEvent::ProtectionEnded(ended));
        })
    }

    /// Answers on a thread of its own, because QEMU may have to be queried.
    fn answer_on_thread(
        &self,
        client: ClientId,
        ask: impl FnOnce(&dyn VmOperations) -> Result<serde_json::Value, Failure> + Send + 'static,
    ) -> io::Result<()> {
        let (operations, clients) = (Arc::clone(&self.keeper.operations), self.clients.clone());
        event_sources::spawn_thread("answer", move || {
            let reply = match ask(&*operations) {
                Ok(facts) => SupervisorReply::Done { facts },
                Err(failure) => SupervisorReply::Failed(failure),
            };
            clients.send_reply(client, &reply);
        })
    }

    /// Begins the failover of a standby. If that is impossible, the client learns it at once.
    fn begin_failover(&self, client: ClientId, how: FailoverRequest) {
        let none = || Failure::new(FailureKind::Usage, "the VM is no standby");
        let begun =
            self.keeper.standby.as_ref().ok_or_else(none).and_then(|it| it.begin_failover(how));
        if let Err(failure) = begun {
            let _ = self.sender.send(SupervisorEvent::FailoverRefused(client, failure));
        }
    }

    /// Releases buffered output. There is no client if this follows from another operation.
    fn release_output(&self, client: Option<ClientId>) {
        let nothing = || {
            let text = "the VM is not being protected";
            Failure::new(FailureKind::Usage, text).with_hint("`firn protect` protects it")
        };
        let reply = match self.keeper.operations.release_output() {
            Ok(true) => SupervisorReply::Done { facts: serde_json::json!({ "released": true }) },
            Ok(false) => SupervisorReply::Failed(nothing()),
            Err(failure) => {
                tracing::error!("{failure}");
                SupervisorReply::Failed(failure)
            }
        };
        client.into_iter().for_each(|client| self.clients.send_reply(client, &reply));
    }

    fn resume_output(&self, client: ClientId) {
        let reply = match self.keeper.operations.resume_output() {
            Ok(()) => SupervisorReply::Done { facts: serde_json::Value::Null },
            Err(failure) => SupervisorReply::Failed(failure),
        };
        self.clients.send_reply(client, &reply);
    }

    fn end_hypervisor(&self, request: StopRequest) -> io::Result<()> {
        let (operations, sender) = (Arc::clone(&self.keeper.operations), self.sender.clone());
        event_sources::spawn_thread("stop", move || {
            if let Err(failure) = operations.end_hypervisor(request) {
                let _ = sender.send(SupervisorEvent::StopFailed(failure));
            }
        })
    }

    fn kill_hypervisor(&self, discard: bool) -> io::Result<()> {
        if let Some(standby) = &self.keeper.standby {
            standby.decline_vm("its user stopped the standby");
        }
        let discard = |journal: &mut Journal| journal.discard |= discard;
        if let Err(error) = self.keeper.journal.update(discard) {
            tracing::error!("{}", Failure::from_error(FailureKind::Other, &error));
        }
        self.keeper.hypervisor.send_kill()
    }

    /// Detaches from the VM, which continues to run. Of a VM that Firn attached to, no file
    /// remains; of one that Firn started, the monitor socket remains, because QEMU has no other.
    fn detach_vm(&self) -> io::Result<()> {
        tracing::info!("detaching from the VM");
        let keeper = &self.keeper;
        keeper.operations.stop_idle_work();
        keeper
            .journal
            .update(|journal| {
                disk_snapshots::finish_unrecorded_save(journal);
                journal.phase = VmPhase::Detached;
            })
            .map_err(io::Error::other)?;
        keeper.hypervisor.release_ownership();
        let launched = keeper
            .journal
            .current_journal()
            .hypervisor_record
            .is_none_or(|hypervisor_record| hypervisor_record.launched);
        match launched {
            true => remove_file(&keeper.vm.control_socket()),
            false => keeper.vm.remove_dir().map_err(io::Error::other),
        }
    }

    /// Records how the VM ended. A VM that a user ended is forgotten; any other is listed until its
    /// name is used again.
    fn record_end(&self, exit: ProcessExit, reason: Option<Failure>) -> io::Result<()> {
        if let Some(standby) = &self.keeper.standby {
            standby.decline_vm("its hypervisor ended");
        }
        let vm = &self.keeper.vm;
        tracing::info!("the VM has ended: {exit}");
        let journal = &self.keeper.journal;
        if let VmPhase::Saving { image, .. } = journal.current_journal().phase {
            abandon_image(&image);
            match journal.is_image_complete() {
                true => {
                    journal.update(disk_snapshots::hand_over_files).map_err(io::Error::other)?
                }
                false => disk_snapshots::abandon_snapshots(journal, None),
            }
        }
        if journal.current_journal().discard {
            disk_snapshots::discard_overlays(&journal.current_journal());
        }
        let ended = journal.update(|journal| {
            journal.phase = VmPhase::Ended { exit, at: unix_seconds() };
            if let Some(reason) = reason {
                journal.record_end_reason(reason);
            }
        });
        ended.map_err(io::Error::other)?;
        match exit {
            ProcessExit::Stopped => vm.remove_dir().map_err(io::Error::other),
            _ => remove_sockets(vm),
        }
    }
}

/// Removes the partial image of a save that has not ended by now and never will: its thread is
/// stuck, and ends with this process.
fn abandon_image(image: &Path) {
    if let Err(error) = firn_image::abandon_partial(image) {
        tracing::warn!("{}", Failure::from_error(FailureKind::Other, &error));
    }
}

pub(crate) fn remove_sockets(vm: &VmDir) -> io::Result<()> {
    let launched_socket = vm.qmp_socket();
    [vm.control_socket(), launched_socket, vm.presence_file()]
        .iter()
        .try_for_each(|path| remove_file(path))
}

fn remove_file(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn start_restoring(restoring: RestoreTask, sender: Sender<SupervisorEvent>) -> io::Result<()> {
    event_sources::spawn_thread("restore", move || {
        let throttle = ProgressThrottle::default();
        let progress =
            |now| throttle.run_throttled(|| drop(sender.send(SupervisorEvent::Progress(now))));
        let restored = catch_panic("the restore", || restoring(&progress));
        let _ = sender.send(SupervisorEvent::RestoreEnded(restored));
    })
}

/// Limits the rate of progress reports to what a user can read.
#[derive(Default)]
struct ProgressThrottle {
    passed: Cell<Option<Instant>>,
}

impl ProgressThrottle {
    fn run_throttled(&self, report: impl FnOnce()) {
        if self.passed.get().is_none_or(|passed| passed.elapsed() >= PROGRESS_INTERVAL) {
            self.passed.set(Some(Instant::now()));
            report();
        }
    }
}

/// Turns a panic of a thread into a failure, because vCPUs may be waiting for the thread.
fn catch_panic<T>(what: &str, run: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_or_else(|_| {
        let failure = Failure::new(FailureKind::Other, format!("a bug in Firn ended {what}"));
        Err(failure.with_hint("the log in the VM's runtime directory has the details"))
    })
}

/// Watches one of the guards, after starting it if it does not run.
fn ensure_guard(
    base: &RuntimeDir,
    vm: &VmDir,
    role: ProcessRole,
    files: &[File],
    sender: &Sender<SupervisorEvent>,
) -> io::Result<()> {
    let guard = match guard::role_holder(vm, role)? {
        Some(guard) => Some(guard),
        None => {
            let (child, socket) = spawn::spawn_guard(base, vm, role)?;
            // If the guard has died already, the loop starts another one.
            let _ = descriptors::send_files(&socket, files);
            guard::handle_of(&child)?
        }
    };
    match guard {
        Some(guard) => event_sources::watch_guard(guard, role, sender.clone()),
        None => sender.send(SupervisorEvent::GuardGone(role)).map_err(io::Error::other),
    }
}
