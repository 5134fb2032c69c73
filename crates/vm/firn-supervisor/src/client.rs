//! The client side of the control socket: how `firn` commands reach a VM's supervisor.
//!
//! A command that finds no supervisor for a VM that needs one starts a successor first. So any
//! command recovers a VM whose supervisor and guards were all killed. In the middle of a restore it
//! leaves that to a guard that lives, which has the open files and the keys of the image.

use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ChildStdout;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::daemon::status::VmStatus;
use crate::devices::disk_snapshots;
use crate::processes::identity::is_stopped;
use crate::processes::lock::{self, ProcessRole};
use crate::processes::runtime::{RuntimeDir, VmDir};
use crate::processes::spawn;
use crate::records::control_protocol::{
    self, LINE_BYTES_MAX, OperationProgress, SupervisorPlan, SupervisorReply, SupervisorRequest,
};
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{Journal, JournalResult, VmPhase};
use crate::records::name::VmName;
use crate::recovery::vm_survey;
use crate::recovery::{guard, image_files};

/// The maximum time that a new supervisor may take to open its control socket. Recovery takes some
/// milliseconds; a host that is out of memory or disk may take longer.
const SOCKET_WAIT: Duration = Duration::from_secs(10);

/// The maximum time that a command leaves to the guards to start a supervisor. The watcher leaves
/// the guard a second; a supervisor that dies repeatedly is started after growing delays.
const GUARDS_WAIT: Duration = Duration::from_secs(10);

/// The interval between attempts to connect to the control socket.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// The maximum time that a supervisor may take to answer a request that needs no work.
const ANSWER_WAIT: Duration = Duration::from_secs(30);

/// The maximum time that a supervisor may take to answer a status query for a list.
const QUICK_STATUS_WAIT: Duration = Duration::from_secs(2);

/// The number of times that a supervisor that dies is replaced before a command gives up.
const ATTEMPTS_MAX: usize = 5;

/// A callback for progress reports.
pub type OnProgress<'a> = &'a mut dyn FnMut(&OperationProgress);

/// Starts a supervisor for a VM; returns the facts that it reports once the VM runs.
pub fn start_supervisor(
    base: &RuntimeDir,
    name: &VmName,
    plan: &SupervisorPlan,
    on_progress: OnProgress<'_>,
) -> Result<serde_json::Value, Failure> {
    SupervisorStart::begin_start(base, name, plan)?.wait_until_started(on_progress)
}

/// A supervisor that has received its plan and has not sent its last reply yet.
#[derive(Debug)]
pub struct SupervisorStart {
    base: RuntimeDir,
    vm: VmDir,
    from: Option<ChildStdout>,
}

impl SupervisorStart {
    /// Starts it. A standby that still waits for its primary ends when this value is dropped.
    pub fn begin_start(
        base: &RuntimeDir,
        name: &VmName,
        plan: &SupervisorPlan,
    ) -> Result<Self, Failure> {
        let vm = base.vm_dir(name);
        if has_journal(&vm) {
            ensure_supervisor(base, &vm)?;
        }
        let mut child = spawn::spawn_supervisor(base, &vm).while_doing("starting a supervisor")?;
        if let Some(mut to) = child.stdin.take() {
            // A supervisor that ends before it has read the plan sends the reason in its reply.
            let _ = control_protocol::write_message(&mut to, plan);
        }
        Ok(Self { base: base.clone(), vm, from: child.stdout.take() })
    }

    /// Whether the supervisor has sent all replies, so that [`Self::wait_until_started`] does not
    /// wait: the other end of its pipe is closed.
    pub fn is_over(&self) -> bool {
        let Some(from) = &self.from else { return true };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut polled = [PollFd::new(from, PollFlags::empty())];
        poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(PollFlags::HUP)
    }

    /// Returns the facts that the supervisor reports once the VM runs.
    pub fn wait_until_started(
        self,
        on_progress: OnProgress<'_>,
    ) -> Result<serde_json::Value, Failure> {
        let replied = match self.from {
            Some(from) => read_replies(&mut BufReader::new(from), on_progress)?,
            None => None,
        };
        match replied {
            Some(result) => result,
            None => {
                wait_for_successor(&self.vm);
                result_after_start(&self.base, &self.vm)
            }
        }
    }
}

/// The result of a start whose supervisor died.
fn result_after_start(base: &RuntimeDir, vm: &VmDir) -> Result<serde_json::Value, Failure> {
    let status = status_after(base, vm, "the VM was not started, and nothing is left of it")?;
    match (&status.last, status.state.as_str()) {
        (Some(note), _) => reply_of_result(&status, note),
        (None, "running" | "restoring" | "paused") => Ok(recovered_facts(&status)),
        (None, state) => supervisor_died(format!("the VM is {state}")),
    }
}

/// The result of a save whose supervisor died. `before` is the last event before the save; if there
/// is no later one, the save never began: `None`.
fn result_after_save(
    base: &RuntimeDir,
    vm: &VmDir,
    before: Option<&JournalResult>,
) -> Option<Result<serde_json::Value, Failure>> {
    match status_after(base, vm, "the VM is gone") {
        Ok(status) => match &status.last {
            Some(note) if Some(note) != before => Some(reply_of_result(&status, note)),
            _ => None,
        },
        Err(failure) => Some(Err(failure)),
    }
}

/// The result of a failover whose supervisor died.
fn result_after_failover(base: &RuntimeDir, vm: &VmDir) -> Result<serde_json::Value, Failure> {
    let lost = "the standby is lost: the VM can't be continued here";
    let status = status_after(base, vm, lost)?;
    match status.state.as_str() {
        "running" | "paused" => Ok(recovered_facts(&status)),
        state => supervisor_died(format!("the VM is {state}")),
    }
}

/// The status of a VM whose supervisor died. `gone` is the error text if there is no such VM.
fn status_after(base: &RuntimeDir, vm: &VmDir, gone: &str) -> Result<VmStatus, Failure> {
    match query_status(base, vm) {
        Err(failure) if failure.kind == FailureKind::NoSuchVm => supervisor_died(gone.to_owned()),
        found => found.map_err(|failure| failure.while_doing("the supervisor died")),
    }
}

fn reply_of_result(status: &VmStatus, note: &JournalResult) -> Result<serde_json::Value, Failure> {
    if note.good { Ok(recovered_facts(status)) } else { supervisor_died(note.text.clone()) }
}

fn supervisor_died<T>(text: String) -> Result<T, Failure> {
    Err(Failure::new(FailureKind::Interrupted, "the supervisor died").while_doing(text))
}

fn recovered_facts(status: &VmStatus) -> serde_json::Value {
    serde_json::json!({ "recovered": true, "status": status })
}

/// Waits until the guard, if there is one, has started a successor.
fn wait_for_successor(vm: &VmDir) {
    let deadline = Instant::now() + SOCKET_WAIT;
    while Instant::now() < deadline
        && has_journal(vm)
        && matches!(lock::role_holder(vm.path(), ProcessRole::Supervisor), Ok(None))
        && matches!(lock::role_holder(vm.path(), ProcessRole::Guard), Ok(Some(_)))
    {
        thread::sleep(RETRY_INTERVAL);
    }
}

/// Sends a request to a supervisor and waits for its last reply.
///
/// A supervisor that dies meanwhile is replaced, and gets the request again where that is harmless.
pub fn send_request(
    base: &RuntimeDir,
    name: &VmName,
    request: &SupervisorRequest,
    on_progress: OnProgress<'_>,
) -> Result<serde_json::Value, Failure> {
    let vm = base.vm_dir(name);
    let before = load_journal(&vm)?.and_then(|journal| journal.last);
    refuse_stopped_supervisor(base, &vm)?;
    for _ in 0..ATTEMPTS_MAX {
        let answer = send_request_once(base, &vm, request, on_progress);
        if let Some(result) = answer.map_err(|failure| explain_late_watch(&vm, request, failure))? {
            return result;
        }
        wait_for_successor(&vm);
        match request {
            SupervisorRequest::Status
            | SupervisorRequest::Watch
            | SupervisorRequest::CommandLine
            | SupervisorRequest::AddKeys { .. }
            | SupervisorRequest::CheckOperations => {}
            SupervisorRequest::Protect(_)
            | SupervisorRequest::Release
            | SupervisorRequest::ReleaseMember
            | SupervisorRequest::Member(_)
            | SupervisorRequest::FinalCut { .. }
            | SupervisorRequest::ResumeAfterCut
            | SupervisorRequest::Fence { .. } => return died_during_request(),
            // A successor has ended the merge; the remaining part can be done.
            SupervisorRequest::GoOn
            | SupervisorRequest::MergeDisks
            | SupervisorRequest::CommitDisks => {}
            SupervisorRequest::Failover(_) => return result_after_failover(base, &vm),
            SupervisorRequest::Detach if !is_detached(&vm)? => {}
            SupervisorRequest::Detach => return Ok(serde_json::Value::Null),
            SupervisorRequest::Stop(stop) => return result_after_stop(base, &vm, stop.discard),
            SupervisorRequest::Checkpoint(_)
            | SupervisorRequest::Suspend(_)
            | SupervisorRequest::SealedCheckpoint(_)
            | SupervisorRequest::SealedSuspend(_)
            | SupervisorRequest::StoredCheckpoint(_)
            | SupervisorRequest::StoredSuspend(_) => {
                if let Some(result) = result_after_save(base, &vm, before.as_ref()) {
                    return result;
                }
            }
        }
    }
    Err(Failure::new(FailureKind::Other, format!("the supervisor of {name} dies repeatedly"))
        .with_hint("its log has the reason"))
}

/// Refuses a supervisor that is stopped by a signal, because it would never answer.
fn refuse_stopped_supervisor(base: &RuntimeDir, vm: &VmDir) -> Result<(), Failure> {
    let holder = lock::role_holder(vm.path(), ProcessRole::Supervisor)
        .while_doing("finding the supervisor")?;
    match holder.filter(|&pid| is_stopped(pid)) {
        Some(_) => vm_survey::examine_vm(base, vm)?.unattended_failure().map_or(Ok(()), Err),
        None => Ok(()),
    }
}

fn died_during_request() -> Result<serde_json::Value, Failure> {
    let died = Failure::new(FailureKind::Interrupted, "the supervisor died");
    Err(died.with_hint("`firn status` shows the state of the VM"))
}

/// A command that watches too late gets the failure that one in time would have got.
fn explain_late_watch(vm: &VmDir, request: &SupervisorRequest, failure: Failure) -> Failure {
    let is_late = *request == SupervisorRequest::Watch && failure.kind == FailureKind::NoSuchVm;
    let journal = load_journal(vm).ok().flatten().filter(|_| is_late);
    journal.and_then(|journal| journal.last?.failure).unwrap_or(failure)
}

/// `None` if the supervisor ends without a last reply.
fn send_request_once(
    base: &RuntimeDir,
    vm: &VmDir,
    request: &SupervisorRequest,
    on_progress: OnProgress<'_>,
) -> Result<Option<Result<serde_json::Value, Failure>>, Failure> {
    let stream = connect_to_supervisor(base, vm)?;
    // When `firn stop` returns, the VM's disks and its name are free.
    let supervisor = match request {
        SupervisorRequest::Stop(_) => {
            guard::find_supervisor(vm).while_doing("finding the supervisor")?
        }
        _ => None,
    };
    let quick = matches!(
        request,
        SupervisorRequest::Status
            | SupervisorRequest::CommandLine
            | SupervisorRequest::AddKeys { .. }
            | SupervisorRequest::CheckOperations
            | SupervisorRequest::Detach
            | SupervisorRequest::Member(_)
    );
    stream.set_read_timeout(quick.then_some(ANSWER_WAIT)).while_doing("preparing to wait")?;
    if control_protocol::write_message(&mut &stream, request).is_err() {
        return Ok(None);
    }
    let replied = read_replies(&mut BufReader::new(&stream), on_progress)?;
    // Without a reply it dies, or exits because the VM has ended by itself.
    if let (Some(supervisor), None | Some(Ok(_))) = (supervisor, &replied) {
        supervisor.wait_gone(SOCKET_WAIT).while_doing("waiting for the supervisor to exit")?;
    }
    Ok(replied)
}

fn is_detached(vm: &VmDir) -> Result<bool, Failure> {
    Ok(load_journal(vm)?.is_none_or(|journal| journal.phase == VmPhase::Detached))
}

/// The result of a stop whose supervisor died, or exited because the VM ended by itself at that
/// moment. A VM that has ended is forgotten, as after any other stop: its name is free. If it has
/// not ended, a successor manages it.
fn result_after_stop(
    base: &RuntimeDir,
    vm: &VmDir,
    discard: bool,
) -> Result<serde_json::Value, Failure> {
    match query_status(base, vm) {
        Err(failure) if failure.kind == FailureKind::NoSuchVm => Ok(serde_json::Value::Null),
        Ok(status) if status.state == "ended" => {
            if let Some(journal) = load_journal(vm)?.filter(|_| discard) {
                disk_snapshots::discard_overlays(&journal);
            }
            vm.remove_dir().while_doing("removing the VM's directory")?;
            Ok(serde_json::Value::Null)
        }
        Ok(_) => Err(Failure::new(FailureKind::Interrupted, "the supervisor died")
            .while_doing("the VM was not stopped")
            .with_hint("run the command again")),
        Err(failure) => Err(failure),
    }
}

/// A VM's status: from its supervisor, or from the journal if the VM is over.
pub fn query_status(base: &RuntimeDir, vm: &VmDir) -> Result<VmStatus, Failure> {
    ensure_supervisor(base, vm)?;
    let journal = load_journal(vm)?.ok_or_else(|| no_such_vm(vm))?;
    if !needs_supervisor(&journal) {
        return Ok(VmStatus::from_journal(&journal));
    }
    match send_request(base, vm.name(), &SupervisorRequest::Status, &mut |_| ()) {
        Ok(facts) => serde_json::from_value(facts).while_doing("decoding the supervisor's reply"),
        // The VM may have ended meanwhile.
        Err(failure) => match load_journal(vm)?.filter(|journal| !needs_supervisor(journal)) {
            Some(journal) => Ok(VmStatus::from_journal(&journal)),
            None => Err(failure),
        },
    }
}

/// A VM's current status, for frequent polling: no supervisor is restarted, and the wait is short.
/// If no supervisor answers, the status comes from the journal.
pub fn quick_status(vm: &VmDir) -> Result<VmStatus, Failure> {
    let journal = load_journal(vm)?.ok_or_else(|| no_such_vm(vm))?;
    Ok(poll_status(vm).unwrap_or_else(|| VmStatus::from_journal(&journal)))
}

/// The [`quick_status`] of each VM. All supervisors are queried at once, so that those that don't
/// answer delay none of the others. A VM that ends meanwhile is left out.
pub fn quick_statuses(vms: &[VmDir]) -> Vec<VmStatus> {
    thread::scope(|scope| {
        let ask = |vm| {
            let asked = thread::Builder::new().name("glance".into());
            asked.spawn_scoped(scope, move || quick_status(vm).ok()).ok()
        };
        let asked: Vec<_> = vms.iter().map(ask).collect();
        asked.into_iter().flatten().filter_map(|query| query.join().ok().flatten()).collect()
    })
}

fn poll_status(vm: &VmDir) -> Option<VmStatus> {
    poll_status_within(vm, QUICK_STATUS_WAIT)
}

/// The supervisor's status of its VM, if it answers within this time.
pub(crate) fn poll_status_within(vm: &VmDir, time: Duration) -> Option<VmStatus> {
    let stream = connect_without_waiting(&vm.control_socket()).ok()?;
    stream.set_read_timeout(Some(time)).ok()?;
    control_protocol::write_message(&mut &stream, &SupervisorRequest::Status).ok()?;
    let facts = read_replies(&mut BufReader::new(&stream), &mut |_| ()).ok()??.ok()?;
    serde_json::from_value(facts).ok()
}

/// Connects without waiting: a supervisor that is stopped by a signal accepts no connections once
/// its queue is full, and a connection to it would block for ever.
fn connect_without_waiting(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Forgets a VM that is over.
pub fn forget_vm(base: &RuntimeDir, name: &VmName) -> Result<(), Failure> {
    let vm = base.vm_dir(name);
    let observed = vm_survey::examine_vm(base, &vm)?;
    if observed.journal.as_ref().is_none_or(needs_supervisor) {
        return Err(observed.unattended_failure().unwrap_or_else(|| {
            let hint = format!("stop it first: `firn stop {name}`");
            Failure::new(FailureKind::Busy, format!("VM {name} runs")).with_hint(hint)
        }));
    }
    vm.remove_dir().while_doing("removing the VM's directory")
}

/// Starts a successor if a VM needs a supervisor and has none. It is an error if there is no such
/// VM.
pub fn ensure_supervisor(base: &RuntimeDir, vm: &VmDir) -> Result<(), Failure> {
    let Some(journal) = load_journal(vm)? else {
        return match find_supervisor(vm)? {
            Some(_) => Ok(()),
            None => Err(no_such_vm(vm)),
        };
    };
    if !needs_supervisor(&journal) || find_supervisor(vm)?.is_some() {
        return Ok(());
    }
    if image_files::are_kept_in(&journal.phase) && is_started_by_guards(vm)? {
        return Ok(());
    }
    match spawn::spawn_successor(base, vm, &[]) {
        Ok(mut child) => wait_for_socket(vm, &mut || matches!(child.try_wait(), Ok(None))),
        // Another process was faster, and found that nothing was left to manage.
        Err(_) if !has_journal(vm) => Err(no_such_vm(vm)),
        Err(error) => Err(error).while_doing("starting a supervisor"),
    }
}

/// Waits until a guard has started a supervisor; false if none does. A supervisor that a guard
/// starts receives the open files and the keys of the image. One that a command starts lacks them.
fn is_started_by_guards(vm: &VmDir) -> Result<bool, Failure> {
    let deadline = Instant::now() + GUARDS_WAIT;
    while is_guarded(vm)? && Instant::now() < deadline {
        thread::sleep(RETRY_INTERVAL);
        if find_supervisor(vm)?.is_some() {
            return Ok(true);
        }
    }
    Ok(find_supervisor(vm)?.is_some())
}

/// Whether a guard can start a supervisor: one that is stopped by a signal cannot.
fn is_guarded(vm: &VmDir) -> Result<bool, Failure> {
    for role in [ProcessRole::Guard, ProcessRole::Watcher] {
        let holder = lock::role_holder(vm.path(), role).while_doing("finding the guards")?;
        if holder.is_some_and(|pid| !is_stopped(pid)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Waits until the control socket accepts a connection, or the successor has ended.
fn wait_for_socket(vm: &VmDir, alive: &mut dyn FnMut() -> bool) -> Result<(), Failure> {
    let deadline = Instant::now() + SOCKET_WAIT;
    while alive() && Instant::now() < deadline {
        if UnixStream::connect(vm.control_socket()).is_ok() {
            break;
        }
        thread::sleep(RETRY_INTERVAL);
    }
    Ok(())
}

fn connect_to_supervisor(base: &RuntimeDir, vm: &VmDir) -> Result<UnixStream, Failure> {
    let deadline = Instant::now() + SOCKET_WAIT;
    loop {
        // Each time, because the supervisor that was there may have been dying.
        ensure_supervisor(base, vm)?;
        match UnixStream::connect(vm.control_socket()) {
            Ok(stream) => return Ok(stream),
            Err(error) if !is_socket_missing(&error) => {
                return Err(error)
                    .while_doing_as(FailureKind::Host, "connecting to the supervisor");
            }
            Err(_) => {}
        }
        check_supervisor_expected(vm)?;
        if Instant::now() >= deadline {
            let silent = format!("the supervisor of {} does not open its socket", vm.name());
            let hint = format!("see its log; `firn stop --force {}` ends the VM", vm.name());
            return Err(Failure::new(FailureKind::Other, silent).with_hint(hint));
        }
        thread::sleep(RETRY_INTERVAL);
    }
}

fn is_socket_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Checks whether there will be a control socket; the failure is the reason why not.
fn check_supervisor_expected(vm: &VmDir) -> Result<(), Failure> {
    match load_journal(vm)?.map(|journal| journal.phase) {
        None => Err(no_such_vm(vm)),
        Some(phase) if phase.is_over() => Err(over_failure(vm, &phase)),
        Some(_) => Ok(()),
    }
}

fn over_failure(vm: &VmDir, phase: &VmPhase) -> Failure {
    match phase {
        VmPhase::Detached => {
            let text =
                format!("VM {} is not managed any more: Firn is detached from it", vm.name());
            let hint = format!("attach to it again: `firn attach {}`", vm.name());
            Failure::new(FailureKind::NoSuchVm, text).with_hint(hint)
        }
        VmPhase::Ended { exit, .. } => {
            let text = format!("VM {} does not run: {exit}", vm.name());
            let hint = format!("`firn rm {}` forgets it", vm.name());
            Failure::new(FailureKind::NoSuchVm, text).with_hint(hint)
        }
        _ => no_such_vm(vm),
    }
}

pub(crate) fn no_such_vm(vm: &VmDir) -> Failure {
    let text = format!("there is no VM called {}", vm.name());
    Failure::new(FailureKind::NoSuchVm, text).with_hint("`firn ls` lists the VMs")
}

fn needs_supervisor(journal: &Journal) -> bool {
    !journal.phase.is_over()
}

fn has_journal(vm: &VmDir) -> bool {
    vm.journal_file().exists()
}

fn load_journal(vm: &VmDir) -> Result<Option<Journal>, Failure> {
    Journal::load(&vm.journal_file())
        .while_doing(format!("reading the journal of VM {}", vm.name()))
}

fn find_supervisor(vm: &VmDir) -> Result<Option<()>, Failure> {
    Ok(guard::find_supervisor(vm).while_doing("finding the supervisor")?.map(drop))
}

/// Reads replies up to the last one; `None` if the supervisor ends without one.
pub(crate) fn read_replies(
    from: &mut BufReader<impl Read>,
    on_progress: OnProgress<'_>,
) -> Result<Option<Result<serde_json::Value, Failure>>, Failure> {
    loop {
        let line = match control_protocol::read_line(from, LINE_BYTES_MAX) {
            Ok(Some(line)) => line,
            Ok(None) => return Ok(None),
            Err(control_protocol::MessageError::Io(error)) if is_timeout(&error) => {
                let silent = Failure::new(FailureKind::Other, "the supervisor does not answer");
                return Err(silent.with_hint("`firn ls` shows what helps"));
            }
            Err(control_protocol::MessageError::Io(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        match control_protocol::decode_message(&line)? {
            SupervisorReply::Progress(progress) => on_progress(&progress),
            SupervisorReply::Done { facts } => return Ok(Some(Ok(facts))),
            SupervisorReply::Failed(failure) => return Ok(Some(Err(failure))),
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// The absolute form of a path that a user gave: the supervisor has another working directory.
pub fn absolute_path(path: &Path) -> Result<std::path::PathBuf, Failure> {
    let absolute = std::path::absolute(path)
        .while_doing_as(FailureKind::Usage, format!("{}", path.display()))?;
    match absolute.to_str() {
        Some(_) => Ok(absolute),
        None => {
            let text = format!("{} is not UTF-8, as paths of a VM have to be", absolute.display());
            Err(Failure::new(FailureKind::Usage, text)
                .with_hint("rename it, or name a link to it that is UTF-8"))
        }
    }
}

/// The replying side of [`start_supervisor`]: a supervisor's standard output.
pub(crate) struct StartReplyWriter<W: Write> {
    to: W,
}

impl<W: Write> StartReplyWriter<W> {
    pub(crate) fn new(to: W) -> Self {
        Self { to }
    }

    /// Sends a reply to the command that started this supervisor. A failure is ignored: the
    /// supervisor continues even if the command has exited.
    pub(crate) fn send_reply(&mut self, reply: &SupervisorReply) {
        let _ = control_protocol::write_message(&mut self.to, reply);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir() -> (tempfile::TempDir, RuntimeDir, VmDir) {
        let dir = tempfile::tempdir().unwrap();
        let base = RuntimeDir::from_path(dir.path().join("firn"));
        let vm = base.vm_dir(&VmName::new("web").unwrap());
        (dir, base, vm)
    }

    #[test]
    fn asking_for_a_vm_that_is_not_there_names_it() {
        let (_dir, base, vm) = dir();
        let failure =
            send_request(&base, vm.name(), &SupervisorRequest::Status, &mut |_| ()).unwrap_err();
        assert_eq!(failure.kind, FailureKind::NoSuchVm);
        assert!(failure.to_string().contains("web"));
    }

    #[test]
    fn a_vm_that_has_ended_is_shown_refuses_requests_and_can_be_forgotten() {
        let (_dir, base, vm) = dir();
        vm.create_private().unwrap();
        let mut journal = Journal::new(vm.name().clone(), None);
        journal.phase =
            VmPhase::Ended { exit: crate::records::process_exit::ProcessExit::Signal(6), at: 1 };
        journal.write_file(&vm.journal_file()).unwrap();
        assert_eq!(query_status(&base, &vm).unwrap().state, "ended");
        let failure =
            send_request(&base, vm.name(), &SupervisorRequest::Detach, &mut |_| ()).unwrap_err();
        assert_eq!(failure.to_string(), "VM web does not run: killed by signal 6");
        forget_vm(&base, vm.name()).unwrap();
        assert_eq!(forget_vm(&base, vm.name()).unwrap_err().kind, FailureKind::NoSuchVm);
    }

    /// QEMU was killed at the same moment, and the supervisor exited without a reply.
    #[test]
    fn a_vm_that_ends_while_it_is_stopped_is_forgotten() {
        let (dir, base, vm) = dir();
        for discard in [false, true] {
            let overlay = dir.path().join("disk0.qcow2.web");
            std::fs::write(&overlay, "layer").unwrap();
            vm.create_private().unwrap();
            let mut journal = Journal::new(vm.name().clone(), None);
            journal.overlays = vec![overlay.clone()];
            journal.phase = VmPhase::Ended {
                exit: crate::records::process_exit::ProcessExit::Signal(9),
                at: 1,
            };
            journal.write_file(&vm.journal_file()).unwrap();
            result_after_stop(&base, &vm, discard).unwrap();
            assert_eq!(query_status(&base, &vm).unwrap_err().kind, FailureKind::NoSuchVm);
            assert_eq!(overlay.exists(), !discard);
        }
    }

    #[test]
    fn a_late_client_learns_why_the_vm_was_ended() {
        let (_dir, base, vm) = dir();
        vm.create_private().unwrap();
        let damaged = Failure::new(FailureKind::Damaged, "memory block 7 is damaged");
        let mut journal = Journal::new(vm.name().clone(), None);
        journal.phase =
            VmPhase::Ended { exit: crate::records::process_exit::ProcessExit::Signal(9), at: 1 };
        journal.record_end_reason(damaged.clone());
        journal.write_file(&vm.journal_file()).unwrap();
        let asked = |request| send_request(&base, vm.name(), &request, &mut |_| ()).unwrap_err();
        assert_eq!(asked(SupervisorRequest::Watch), damaged);
        assert_eq!(asked(SupervisorRequest::Detach).kind, FailureKind::NoSuchVm);
    }

    /// Some supervisors don't answer, and one does not even accept connections any more: all of
    /// them are listed, from their journals.
    #[test]
    fn stopped_supervisors_do_not_hide_other_vms() {
        let (_dir, base, _) = dir();
        let vms: Vec<VmDir> =
            (0..8).map(|n| base.vm_dir(&VmName::new(format!("vm{n}")).unwrap())).collect();
        let stands_still = |vm: &VmDir| {
            vm.create_private().unwrap();
            let mut journal = Journal::new(vm.name().clone(), None);
            journal.phase = VmPhase::Running;
            journal.write_file(&vm.journal_file()).unwrap();
            crate::daemon::control_server::bind_private(&vm.control_socket()).unwrap()
        };
        let sockets: Vec<_> = vms.iter().map(stands_still).collect();
        let mut crowd = Vec::new();
        while let Ok(stream) = connect_without_waiting(&vms[0].control_socket()) {
            crowd.push(stream);
        }
        let since = Instant::now();
        let statuses = quick_statuses(&vms);
        assert!(since.elapsed() < 2 * QUICK_STATUS_WAIT, "{:?}", since.elapsed());
        let names: Vec<&str> = statuses.iter().map(|status| status.name.as_str()).collect();
        assert_eq!(names, ["vm0", "vm1", "vm2", "vm3", "vm4", "vm5", "vm6", "vm7"]);
        drop((crowd, sockets));
    }

    #[test]
    fn replies_are_read_up_to_the_last() {
        let mut lines = Vec::new();
        let now = OperationProgress::new("saving", 1, 2);
        control_protocol::write_message(&mut lines, &SupervisorReply::Progress(now.clone()))
            .unwrap();
        control_protocol::write_message(
            &mut lines,
            &SupervisorReply::Done { facts: serde_json::json!(1) },
        )
        .unwrap();
        let mut heard = Vec::new();
        let mut from = BufReader::new(io::Cursor::new(lines));
        let result = read_replies(&mut from, &mut |progress| heard.push(progress.clone())).unwrap();
        assert_eq!((heard, result), (vec![now], Some(Ok(serde_json::json!(1)))));
        assert_eq!(read_replies(&mut from, &mut |_| ()).unwrap(), None);
    }
}
