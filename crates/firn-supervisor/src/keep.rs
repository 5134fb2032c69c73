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
use firn_epochs::primary::Ending;

use crate::decisions::{Action, ClientId, Core, Event};
use crate::disks;
use crate::failure::{Failure, FailureKind};
use crate::guard;
use crate::held;
use crate::identity::ProcessHandle;
use crate::journal::{Exit, Journal, JournalFile, Phase, now};
use crate::lock::{self, Role};
use crate::network::CardStatus;
use crate::protection::Protection;
use crate::protocol::{
    FailoverRequest, MemberRequest, Progress, ProtectRequest, Reply, SaveRequest, StopRequest,
};
use crate::restarts::Restarts;
use crate::runtime::{RuntimeDir, VmDir};
use crate::server::{self, Clients};
use crate::spawn;
use crate::standby::Takeover;
use crate::status::Status;
use crate::watch;

/// The minimum time between two progress reports.
const PROGRESS_EVERY: Duration = Duration::from_millis(50);

/// The operations on a VM. Each may take long, and is called on a thread of its own.
pub(crate) trait Operations: Send + Sync + 'static {
    /// Writes an image; returns facts about it.
    fn save(
        &self,
        request: &SaveRequest,
        then_stop: bool,
        cancel: &AtomicBool,
        progress: &dyn Fn(Progress),
    ) -> Result<serde_json::Value, Failure>;

    /// Merges layers of the VM's disks: those that no image needs, or all.
    fn merge(
        &self,
        all: bool,
        cancel: &AtomicBool,
        progress: &dyn Fn(Progress),
    ) -> Result<serde_json::Value, Failure>;

    /// Sends the VM's epochs to a backup until `ending` requests an end; `begun` is called when the
    /// first epoch is committed.
    fn protect(
        &self,
        request: &ProtectRequest,
        ending: &Ending,
        begun: &dyn Fn(),
        progress: &dyn Fn(Progress),
    ) -> Result<serde_json::Value, Failure>;

    /// The state of the VM's protection, if it is protected.
    fn protection(&self) -> Option<Protection>;

    /// The state of its network cards.
    fn network(&self) -> Vec<CardStatus>;

    /// Releases the output that its network cards buffer, and lets later output pass. `false` if
    /// there was nothing to release.
    fn let_out(&self) -> Result<bool, Failure>;

    /// Releases the buffered output, and lets later output pass while the lease is held.
    fn go_on(&self) -> Result<(), Failure>;

    /// Answers a request of the coordinator of a cluster's global checkpoints.
    fn member(&self, request: &MemberRequest) -> Result<serde_json::Value, Failure>;

    /// Whether the VM belongs to a cluster.
    fn is_member(&self) -> bool;

    /// Starts the work that is done while no operation runs. May be called again.
    fn rest(&self);

    /// Ends what [`Self::start_idle_work`] started, because Firn detaches from the VM.
    fn leave(&self);

    /// Ends the hypervisor as requested. It is an error if it continues to run.
    fn end(&self, request: StopRequest) -> Result<(), Failure>;

    /// Whether the hypervisor did not answer the last query, and does not answer now.
    fn is_hung(&self) -> bool;

    /// Returns the command line that starts the VM on its current disks.
    fn command_line(&self) -> Result<serde_json::Value, Failure>;

    /// Whether the vCPUs are paused, if the hypervisor reports that without delay.
    fn is_paused(&self) -> Option<bool>;
}

/// The rest of a restore whose guest runs already; it reports progress and returns facts.
pub(crate) type Restoring =
    Box<dyn FnOnce(&dyn Fn(Progress)) -> Result<serde_json::Value, Failure> + Send>;

/// A VM, with everything that its supervisor needs to manage it.
pub(crate) struct Keeper {
    pub(crate) base: RuntimeDir,
    pub(crate) vm: VmDir,
    pub(crate) journal: Arc<JournalFile>,
    pub(crate) hypervisor: Arc<ProcessHandle>,
    pub(crate) operations: Arc<dyn Operations>,
    pub(crate) restoring: Option<Restoring>,
    /// The open files of the image that is being restored.
    pub(crate) files: Vec<File>,
    /// The failover of a standby.
    pub(crate) standby: Option<Arc<Takeover>>,
    /// The guards that run already.
    pub(crate) guards: Vec<(Role, ProcessHandle)>,
}

/// The loop around the state machine.
struct Loop {
    keeper: Keeper,
    core: Core,
    clients: Clients,
    sender: Sender<Event>,
    events: Receiver<Event>,
    cancel: Arc<AtomicBool>,
    ending: Arc<Ending>,
    restarts: HashMap<Role, Restarts>,
    resting: bool,
}

impl Keeper {
    /// Opens the control socket, calls `ready`, and manages the VM until there is nothing left to
    /// do.
    pub(crate) fn keep(mut self, ready: impl FnOnce()) -> io::Result<()> {
        let (sender, events) = crossbeam_channel::unbounded();
        watch::hypervisor(Arc::clone(&self.hypervisor), sender.clone())?;
        watch::signals(sender.clone())?;
        for role in [Role::Guard, Role::Watcher] {
            match self.guards.iter().position(|(it, _)| *it == role) {
                Some(at) => watch::guard(self.guards.swap_remove(at).1, role, sender.clone())?,
                None => watch_guard(&self.base, &self.vm, role, &self.files, &sender)?,
            }
        }
        let core = match &self.standby {
            Some(_) => Core::standby(),
            None => Core::new(self.restoring.is_some()),
        };
        let machine = self.journal.read().machine;
        let keeps_vm = self.journal.read().phase.keeps_vm();
        let core = core
            .keeping_vm(keeps_vm)
            .serving(machine.is_some_and(|machine| !machine.served.is_empty()));
        if let Some(restoring) = self.restoring.take() {
            start_restoring(restoring, sender.clone())?;
        }
        let clients = server::listen(&self.vm.control(), sender.clone())?;
        ready();
        let (cancel, ending, restarts) = (Arc::default(), Arc::default(), HashMap::default());
        let resting = false;
        Loop { keeper: self, core, clients, sender, events, cancel, ending, restarts, resting }
            .run()
    }
}

impl Loop {
    fn run(mut self) -> io::Result<()> {
        self.rest();
        while let Ok(event) = self.events.recv() {
            self.core.belongs(self.keeper.operations.is_member());
            let actions = self.core.on(event);
            let over = actions
                .iter()
                .any(|action| matches!(action, Action::LetGo | Action::RecordEnd { .. }));
            for action in actions {
                self.perform(action)?;
            }
            if over {
                break;
            }
            self.rest();
        }
        Ok(())
    }

    /// Starts idle work each time that the last operation has ended.
    fn rest(&mut self) {
        let was_resting = std::mem::replace(&mut self.resting, self.core.is_idle());
        if self.resting {
            // The guards close their copies when they see that the restore is over.
            self.keeper.files.clear();
        }
        if self.resting && !was_resting {
            self.keeper.operations.rest();
        }
    }

    fn perform(&mut self, action: Action) -> io::Result<()> {
        match action {
            Action::Reply(client, reply) => self.clients.send(client, &reply),
            Action::ReplyStatus(client) => self.reply_status(client)?,
            Action::BeginSave { request, then_stop } => self.begin_save(request, then_stop)?,
            Action::BeginMerge { all } => self.begin_merge(all)?,
            Action::BeginProtection(request) => self.begin_protection(request)?,
            Action::TakeUp(client, how) => self.take_up(client, how),
            Action::GoOn(client) => self.go_on(client),
            Action::Member(client, request) => {
                self.answer(client, move |operations| operations.member(&request))?;
            }
            Action::CommandLine(client) => {
                self.answer(client, |operations| operations.command_line())?;
            }
            Action::LetOut(client) => self.let_out(client),
            Action::CancelSave => self.cancel(),
            Action::Release => self.ending.release(),
            Action::StopProtection => self.ending.stop(),
            Action::EndHypervisor(request) => self.end_hypervisor(request)?,
            Action::KillHypervisor { discard } => self.kill(discard)?,
            Action::StartGrace => watch::grace(self.sender.clone())?,
            Action::RestartGuard(role) => self.restart_guard(role)?,
            Action::StartGuard(role) => self.start_guard(role)?,
            Action::Resign(failure) => return Err(self.resign(&failure)),
            Action::LetGo => self.let_go()?,
            Action::RecordEnd { exit, reason } => self.record_end(exit, reason)?,
        }
        Ok(())
    }

    /// Cancels the save or merge, or ends the protection: only one of them runs.
    fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
        self.ending.leave();
    }

    fn restart_guard(&mut self, role: Role) -> io::Result<()> {
        let pause = self.restarts.entry(role).or_default().pause(Instant::now());
        tracing::warn!("the {role:?} has died: starting another one after {pause:?}");
        match pause {
            Duration::ZERO => self.start_guard(role),
            pause => watch::guard_pause(role, pause, self.sender.clone()),
        }
    }

    fn start_guard(&self, role: Role) -> io::Result<()> {
        let Keeper { base, vm, files, .. } = &self.keeper;
        watch_guard(base, vm, role, files, &self.sender)
    }

    /// Records why this supervisor exits. The VM stays as it is: its memory is missing, not wrong,
    /// and a successor tries again.
    fn resign(&self, failure: &Failure) -> io::Error {
        tracing::error!("{failure}: a successor tries again");
        let text = format!("the supervisor could not continue the restore: {failure}");
        let _ = self.keeper.journal.update(|journal| journal.note_failure(text));
        io::Error::other(failure.to_string())
    }

    /// Replies on a thread of its own, because QEMU may be slow to answer.
    fn reply_status(&self, client: ClientId) -> io::Result<()> {
        let status = Status::of(&self.keeper.journal.read());
        let mut status = status.with_progress(self.core.progress().cloned());
        status.supervisor_pid = Some(std::process::id() as i32);
        status.protection = self.keeper.operations.protection();
        status.network = self.keeper.operations.network();
        let standby = self.keeper.standby.as_ref().filter(|_| status.state == "standby");
        status.standby = standby.map(|standby| standby.now());
        status.guard_pid = lock::holder(self.keeper.vm.path(), Role::Guard)?;
        status.watcher_pid = lock::holder(self.keeper.vm.path(), Role::Watcher)?;
        let (operations, clients) = (Arc::clone(&self.keeper.operations), self.clients.clone());
        watch::spawn("status", move || {
            if status.state == "running" && operations.is_hung() {
                status.state = "hung".to_owned();
            }
            if status.state == "running" && operations.is_paused() == Some(true) {
                status.state = "paused".to_owned();
            }
            let facts = serde_json::to_value(status).unwrap_or_default();
            clients.send(client, &Reply::Done { facts });
        })
    }

    fn begin_save(&mut self, request: SaveRequest, then_stop: bool) -> io::Result<()> {
        self.cancel = Arc::default();
        let (operations, cancel) = (Arc::clone(&self.keeper.operations), Arc::clone(&self.cancel));
        let sender = self.sender.clone();
        watch::spawn("save", move || {
            let progress = |now| drop(sender.send(Event::Progress(now)));
            let saved =
                catch("the save", || operations.save(&request, then_stop, &cancel, &progress));
            let _ = sender.send(Event::SaveEnded(saved));
        })
    }

    fn begin_merge(&mut self, all: bool) -> io::Result<()> {
        self.cancel = Arc::default();
        let (operations, cancel) = (Arc::clone(&self.keeper.operations), Arc::clone(&self.cancel));
        let sender = self.sender.clone();
        watch::spawn("merge", move || {
            let pace = Pace::default();
            let progress = |now| pace.pass(|| drop(sender.send(Event::Progress(now))));
            let merged = catch("the merge", || operations.merge(all, &cancel, &progress));
            let _ = sender.send(Event::MergeEnded(merged));
        })
    }

    fn begin_protection(&mut self, request: ProtectRequest) -> io::Result<()> {
        self.ending = Arc::default();
        let (operations, ending) = (Arc::clone(&self.keeper.operations), Arc::clone(&self.ending));
        let sender = self.sender.clone();
        watch::spawn("protect", move || {
            let pace = Pace::default();
            let progress = |now| pace.pass(|| drop(sender.send(Event::Progress(now))));
            let begun = || {
                let facts = serde_json::to_value(operations.protection()).unwrap_or_default();
                drop(sender.send(Event::Protected(facts)));
            };
            let protect = || operations.protect(&request, &ending, &begun, &progress);
            let ended = catch("the protection", protect);
            let _ = sender.send(Event::ProtectionEnded(ended));
        })
    }

    /// Answers on a thread of its own, because QEMU may have to be queried.
    fn answer(
        &self,
        client: ClientId,
        ask: impl FnOnce(&dyn Operations) -> Result<serde_json::Value, Failure> + Send + 'static,
    ) -> io::Result<()> {
        let (operations, clients) = (Arc::clone(&self.keeper.operations), self.clients.clone());
        watch::spawn("answer", move || {
            let reply = match ask(&*operations) {
                Ok(facts) => Reply::Done { facts },
                Err(failure) => Reply::Failed(failure),
            };
            clients.send(client, &reply);
        })
    }

    /// Begins the failover of a standby. If that is impossible, the client learns it at once.
    fn take_up(&self, client: ClientId, how: FailoverRequest) {
        let none = || Failure::new(FailureKind::Usage, "the VM is no standby");
        let begun = self.keeper.standby.as_ref().ok_or_else(none).and_then(|it| it.begin(how));
        if let Err(failure) = begun {
            let _ = self.sender.send(Event::TakeUpRefused(client, failure));
        }
    }

    /// Releases buffered output. There is no client if this follows from another operation.
    fn let_out(&self, client: Option<ClientId>) {
        let nothing = || {
            let text = "the VM is not being protected";
            Failure::new(FailureKind::Usage, text).hint("`firn protect` protects it")
        };
        let reply = match self.keeper.operations.let_out() {
            Ok(true) => Reply::Done { facts: serde_json::json!({ "released": true }) },
            Ok(false) => Reply::Failed(nothing()),
            Err(failure) => {
                tracing::error!("{failure}");
                Reply::Failed(failure)
            }
        };
        client.into_iter().for_each(|client| self.clients.send(client, &reply));
    }

    fn go_on(&self, client: ClientId) {
        let reply = match self.keeper.operations.go_on() {
            Ok(()) => Reply::Done { facts: serde_json::Value::Null },
            Err(failure) => Reply::Failed(failure),
        };
        self.clients.send(client, &reply);
    }

    fn end_hypervisor(&self, request: StopRequest) -> io::Result<()> {
        let (operations, sender) = (Arc::clone(&self.keeper.operations), self.sender.clone());
        watch::spawn("stop", move || {
            if let Err(failure) = operations.end(request) {
                let _ = sender.send(Event::StopFailed(failure));
            }
        })
    }

    fn kill(&self, discard: bool) -> io::Result<()> {
        if let Some(standby) = &self.keeper.standby {
            standby.decline("its user stopped the standby");
        }
        let discard = |journal: &mut Journal| journal.discard |= discard;
        if let Err(error) = self.keeper.journal.update(discard) {
            tracing::error!("{}", Failure::from_error(FailureKind::Other, &error));
        }
        self.keeper.hypervisor.kill()
    }

    /// Detaches from the VM, which continues to run. Of a VM that Firn attached to, no file
    /// remains; of one that Firn started, the monitor socket remains, because QEMU has no other.
    fn let_go(&self) -> io::Result<()> {
        tracing::info!("detaching from the VM");
        let keeper = &self.keeper;
        keeper.operations.leave();
        keeper
            .journal
            .update(|journal| {
                disks::settle(journal);
                journal.phase = Phase::Detached;
            })
            .map_err(io::Error::other)?;
        keeper.hypervisor.release_ownership();
        let launched = keeper.journal.read().machine.is_none_or(|machine| machine.launched);
        match launched {
            true => remove_file(&keeper.vm.control()),
            false => keeper.vm.remove().map_err(io::Error::other),
        }
    }

    /// Records how the VM ended. A VM that a user ended is forgotten; any other is listed until its
    /// name is used again.
    fn record_end(&self, exit: Exit, reason: Option<Failure>) -> io::Result<()> {
        if let Some(standby) = &self.keeper.standby {
            standby.decline("its hypervisor ended");
        }
        let vm = &self.keeper.vm;
        tracing::info!("the VM has ended: {exit}");
        let journal = &self.keeper.journal;
        if let Phase::Saving { image, .. } = journal.read().phase {
            abandon(&image);
            match journal.image_whole() {
                true => journal.update(disks::hand_over).map_err(io::Error::other)?,
                false => disks::give_up(journal, None),
            }
        }
        if journal.read().discard {
            disks::discard(&journal.read());
        }
        let ended = journal.update(|journal| {
            journal.phase = Phase::Ended { exit, at: now() };
            if let Some(reason) = reason {
                journal.note_end(reason);
            }
        });
        ended.map_err(io::Error::other)?;
        match exit {
            Exit::Stopped => vm.remove().map_err(io::Error::other),
            _ => remove_sockets(vm),
        }
    }
}

/// Removes the partial image of a save that has not ended by now and never will: its thread is
/// stuck, and ends with this process.
fn abandon(image: &Path) {
    if let Err(error) = firn_image::abandon_partial(image) {
        tracing::warn!("{}", Failure::from_error(FailureKind::Other, &error));
    }
}

pub(crate) fn remove_sockets(vm: &VmDir) -> io::Result<()> {
    let launched_socket = vm.qmp();
    [vm.control(), launched_socket, vm.presence()].iter().try_for_each(|path| remove_file(path))
}

fn remove_file(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn start_restoring(restoring: Restoring, sender: Sender<Event>) -> io::Result<()> {
    watch::spawn("restore", move || {
        let pace = Pace::default();
        let progress = |now| pace.pass(|| drop(sender.send(Event::Progress(now))));
        let restored = catch("the restore", || restoring(&progress));
        let _ = sender.send(Event::RestoreEnded(restored));
    })
}

/// Limits the rate of progress reports to what a user can read.
#[derive(Default)]
struct Pace {
    passed: Cell<Option<Instant>>,
}

impl Pace {
    fn pass(&self, tell: impl FnOnce()) {
        if self.passed.get().is_none_or(|passed| passed.elapsed() >= PROGRESS_EVERY) {
            self.passed.set(Some(Instant::now()));
            tell();
        }
    }
}

/// Turns a panic of a thread into a failure, because vCPUs may be waiting for the thread.
fn catch<T>(what: &str, run: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_or_else(|_| {
        let failure = Failure::new(FailureKind::Other, format!("a bug in Firn ended {what}"));
        Err(failure.hint("the log in the VM's runtime directory has the details"))
    })
}

/// Watches one of the guards, after starting it if it does not run.
fn watch_guard(
    base: &RuntimeDir,
    vm: &VmDir,
    role: Role,
    files: &[File],
    sender: &Sender<Event>,
) -> io::Result<()> {
    let guard = match guard::holder(vm, role)? {
        Some(guard) => Some(guard),
        None => {
            let (child, to) = spawn::guard(base, vm, role)?;
            // If the guard has died already, the loop starts another one.
            let _ = held::send(&to, files);
            guard::handle_of(&child)?
        }
    };
    match guard {
        Some(guard) => watch::guard(guard, role, sender.clone()),
        None => sender.send(Event::GuardGone(role)).map_err(io::Error::other),
    }
}
