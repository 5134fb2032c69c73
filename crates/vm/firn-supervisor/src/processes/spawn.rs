//! The start of Firn's own processes: supervisors and guards, detached from the process that starts
//! them.
//!
//! They run the same program as the process that starts them, by `/proc/self/exe`. So a successor
//! understands the journal of its predecessor even when the file has been replaced by a newer Firn
//! meanwhile. A fault point that a test has armed (`FIRN_FAULT`) is for the first process only: a
//! successor that dies at the same point again would show nothing new.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::processes::descriptors;
use crate::processes::lock::ProcessRole;
use crate::processes::runtime::{self, RuntimeDir, VmDir};

/// The hidden verb of a supervisor.
pub const SUPERVISE: &str = "__supervise";

/// The hidden verb of a guard.
pub const GUARD: &str = "__guard";

/// The hidden verb of the holder of a template.
pub const HOLD_TEMPLATE: &str = "__hold-template";

/// The option of [`GUARD`] that makes it the watcher.
pub const WATCHER: &str = "--watcher";

/// The option of [`SUPERVISE`] that takes over from a dead supervisor.
pub const RECOVER: &str = "--recover";

/// Starts the first supervisor of a VM. It reads a [`crate::SupervisorPlan`] from its standard
/// input and replies on its standard output.
pub(crate) fn spawn_supervisor(base: &RuntimeDir, vm: &VmDir) -> io::Result<Child> {
    let mut command = firn_command(base, SUPERVISE, vm);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    command.spawn()
}

/// Starts the holder of a template. It reads a plan from its standard input and replies on its
/// standard output.
pub(crate) fn spawn_template_holder(base: &RuntimeDir) -> io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("firn").arg(HOLD_TEMPLATE).env(runtime::VARIABLE, base.path()).current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    command.spawn()
}

/// Starts a successor, which receives these open files of the image.
pub(crate) fn spawn_successor(base: &RuntimeDir, vm: &VmDir, files: &[File]) -> io::Result<Child> {
    let mut command = firn_command(base, SUPERVISE, vm);
    command.arg(RECOVER).env_remove(firn_fault::VARIABLE);
    if files.is_empty() {
        return spawn_in_background(&mut command, Stdio::null(), &vm.log_file());
    }
    let (to, from) = UnixStream::pair()?;
    descriptors::send_files(&to, files)?;
    spawn_in_background(&mut command, OwnedFd::from(from).into(), &vm.log_file())
}

/// Starts one of the guards. It keeps open files that it receives by the socket
/// ([`descriptors::send_files`]).
pub(crate) fn spawn_guard(
    base: &RuntimeDir,
    vm: &VmDir,
    role: ProcessRole,
) -> io::Result<(Child, UnixStream)> {
    let mut command = firn_command(base, GUARD, vm);
    command.env_remove(firn_fault::VARIABLE);
    if role == ProcessRole::Watcher {
        command.arg(WATCHER);
    }
    let (to, from) = UnixStream::pair()?;
    let child = spawn_in_background(&mut command, OwnedFd::from(from).into(), &vm.log_file())?;
    Ok((child, to))
}

fn firn_command(base: &RuntimeDir, verb: &str, vm: &VmDir) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("firn").arg(verb).arg(vm.name().as_str()).env(runtime::VARIABLE, base.path());
    command
}

fn spawn_in_background(command: &mut Command, stdin: Stdio, log: &Path) -> io::Result<Child> {
    let log = open_append(log)?;
    command.stdin(stdin).stdout(Stdio::null()).stderr(log).current_dir("/").spawn()
}

/// Opens a log for appending, with mode 0600.
pub(crate) fn open_append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Leaves the session, and so the terminal, of the process that started this one, and sets the
/// process name, because a program started by `/proc/self/exe` has the name `exe` otherwise.
pub(crate) fn detach_session() {
    // It fails for a process that leads its process group already, which does no harm.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(c"firn");
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
}
