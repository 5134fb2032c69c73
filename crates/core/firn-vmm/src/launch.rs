//! Starting a hypervisor that outlives the process that starts it.
//!
//! It gets a session of its own (no terminal, no signal meant for its starter), its output goes to
//! a log file that only its owner can read, and it inherits exactly the given descriptors, under
//! their own numbers: so QEMU finds Firn's RAM files as `/proc/self/fd/N`.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;

use rustix::fs::OFlags;
use rustix::io::FdFlags;
use rustix::process::{Pid, PidfdFlags};
use thiserror::Error;

/// Makes a session and executes a program in the same process. Part of util-linux.
const SESSION: &str = "setsid";

/// Locked while descriptors are inheritable, so that a concurrent launch does not inherit them.
static INHERITING: Mutex<()> = Mutex::new(());

/// The reason why a hypervisor could not be started.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// There is no program in the command line.
    #[error("the command line is empty")]
    Empty,
    /// The program does not exist.
    #[error(
        "{program}: no such program{place}",
        place = if .program.contains('/') { ", or it is not executable" } else { " in PATH" }
    )]
    NoProgram {
        /// Its name.
        program: String,
    },
    /// The log file cannot be written.
    #[error("cannot write the log file {path}")]
    Log {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A descriptor cannot be passed on.
    #[error("cannot pass a descriptor on to {program}")]
    Inherit {
        /// The program.
        program: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The process cannot be started.
    #[error("cannot start {program}")]
    Start {
        /// The program.
        program: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// A hypervisor that was started. Dropping this does not end it.
#[derive(Debug)]
pub struct LaunchedProcess {
    child: Child,
    pidfd: OwnedFd,
}

impl LaunchedProcess {
    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// A descriptor of the process; readable once it has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Its exit status; `None` while it runs. Only the process that started it can read it.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits until it has ended.
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        self.child.wait()
    }

    /// Kills it with SIGKILL, and waits until it has ended.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }
}

/// Starts `command`, the program first, with `inherit` open under their own numbers and its output
/// appended to `log`.
pub fn launch_hypervisor(
    command: &[String],
    inherit: &[BorrowedFd<'_>],
    log: &Path,
) -> Result<LaunchedProcess, LaunchError> {
    let (name, args) = command.split_first().ok_or(LaunchError::Empty)?;
    let program = find_program(name)?;
    let (out, err) =
        open_log(log).map_err(|source| LaunchError::Log { path: log.to_owned(), source })?;
    let mut starter = Command::new(SESSION);
    // No hypervisor needs the credentials of object storage, with which its image may be read.
    let variables = std::env::vars_os().map(|(name, _)| name);
    for name in variables.filter(|name| name.as_encoded_bytes().starts_with(b"AWS_")) {
        starter.env_remove(name);
    }
    starter.arg(program).args(args).stdin(Stdio::null()).stdout(out).stderr(err);
    let child = spawn_inheriting(&mut starter, inherit, name)?;
    let start_error = |source| LaunchError::Start { program: name.clone(), source };
    let pidfd = open_pidfd(&child).map_err(start_error)?;
    Ok(LaunchedProcess { child, pidfd })
}

fn spawn_inheriting(
    starter: &mut Command,
    inherit: &[BorrowedFd<'_>],
    name: &str,
) -> Result<Child, LaunchError> {
    let _alone = INHERITING.lock();
    let inherit_error = |source: rustix::io::Errno| LaunchError::Inherit {
        program: name.to_owned(),
        source: source.into(),
    };
    set_flags(inherit, FdFlags::empty()).map_err(inherit_error)?;
    let child = starter.spawn();
    set_flags(inherit, FdFlags::CLOEXEC).map_err(inherit_error)?;
    child.map_err(|source| LaunchError::Start { program: name.to_owned(), source })
}

fn set_flags(fds: &[BorrowedFd<'_>], flags: FdFlags) -> rustix::io::Result<()> {
    fds.iter().try_for_each(|fd| rustix::io::fcntl_setfd(fd, flags))
}

fn open_pidfd(child: &Child) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(child.id() as i32).ok_or(io::ErrorKind::NotFound)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// The file of a program name: the name itself if it has a slash, else the first of that name in
/// PATH.
///
/// # Errors
/// If there is no such program.
pub fn find_program(name: &str) -> Result<PathBuf, LaunchError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let candidates: Vec<PathBuf> = match name.contains('/') {
        true => vec![PathBuf::from(name)],
        false => std::env::split_paths(&path).map(|dir| dir.join(name)).collect(),
    };
    let found = candidates.into_iter().find(|candidate| is_program(candidate));
    found.ok_or_else(|| LaunchError::NoProgram { program: name.to_owned() })
}

fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

fn open_log(path: &Path) -> io::Result<(File, File)> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600);
    options.custom_flags(OFlags::NOFOLLOW.bits() as i32);
    let file = options.open(path)?;
    Ok((file.try_clone()?, file))
}

/// The last lines of a log, at most `bytes` of it: a QEMU that died has left its reason there.
pub fn read_log_tail(path: &Path, bytes: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
    let mut tail = Vec::new();
    file.take(bytes).read_to_end(&mut tail)?;
    let tail = String::from_utf8_lossy(&tail).into_owned();
    match tail.split_once('\n') {
        Some((_cut, whole)) if length > bytes => Ok(whole.to_owned()),
        _ => Ok(tail),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn run(script: &str, inherit: &[BorrowedFd<'_>], log: &Path) -> LaunchedProcess {
        let command = ["sh", "-c", script].map(str::to_owned);
        launch_hypervisor(&command, inherit, log).unwrap()
    }

    #[test]
    fn a_child_has_its_own_session_and_a_private_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let mut child = run("cut -d' ' -f1,6 /proc/$$/stat; echo oops >&2", &[], &log);
        let pid = child.pid();
        assert!(child.wait().unwrap().success());
        assert_eq!(read_log_tail(&log, 100).unwrap(), format!("{pid} {pid}\noops\n"));
        assert_eq!(read_log_tail(&log, 7).unwrap(), "oops\n");
        assert_eq!(log.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn only_what_is_given_is_inherited_and_only_by_the_child() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let [given, kept] = [(); 2].map(|()| tempfile::tempfile().unwrap());
        let script = format!(
            "[ -e /proc/$$/fd/{} ] && [ ! -e /proc/$$/fd/{} ]",
            given.as_raw_fd(),
            kept.as_raw_fd()
        );
        assert!(run(&script, &[given.as_fd()], &log).wait().unwrap().success());
        assert_eq!(rustix::io::fcntl_getfd(&given).unwrap(), FdFlags::CLOEXEC);
    }

    #[test]
    fn the_pidfd_is_that_of_the_child() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = run("exec sleep 100", &[], &dir.path().join("log"));
        assert!(child.try_wait().unwrap().is_none());
        rustix::process::pidfd_send_signal(child.pidfd(), rustix::process::Signal::KILL).unwrap();
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    fn a_program_that_cannot_start_is_an_error() {
        let log = Path::new("/nonexistent/log");
        let message = |command: &[&str]| {
            let command: Vec<String> = command.iter().map(|word| (*word).to_owned()).collect();
            launch_hypervisor(&command, &[], log).unwrap_err().to_string()
        };
        assert_eq!(message(&[]), "the command line is empty");
        assert_eq!(message(&["no-such-qemu"]), "no-such-qemu: no such program in PATH");
        let file = "/proc/self/status: no such program, or it is not executable";
        assert_eq!(message(&["/proc/self/status"]), file);
        assert_eq!(message(&["sh"]), "cannot write the log file /nonexistent/log");
    }
}
