//! The identity of a process: a pid alone may belong to another process by now.
//!
//! A pid is reused once its process has been reaped. The pair (pid, start time) is not reused
//! within one boot, so that is what the journal contains, with the id of the boot. All code that
//! sends a signal or attaches uses a pidfd that was checked against the pair *after* it was opened:
//! from then on it can't come to mean another process.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use serde::{Deserialize, Serialize};

use crate::processes::ownership::QemuOwnership;
use crate::records::process_exit::ProcessExit;

/// A process that can't be mistaken for a later one with the same pid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// The process id, in Firn's own PID namespace.
    pub pid: i32,
    /// When it started, in clock ticks since boot: field 22 of proc(5) `/proc/PID/stat`.
    pub start_time: u64,
    /// `/proc/sys/kernel/random/boot_id` of the boot it runs under.
    pub boot_id: String,
}

impl ProcessIdentity {
    /// The identity of a running process. A zombie counts as ended (`NotFound`).
    pub fn from_pid(pid: i32) -> io::Result<Self> {
        let start_time = start_time(pid)?;
        Ok(Self { pid, start_time, boot_id: boot_id()? })
    }

    /// Whether the process still runs.
    pub fn is_alive(&self) -> bool {
        Self::from_pid(self.pid).is_ok_and(|now| now == *self)
    }

    /// A handle on the process, or `None` if it has ended.
    pub fn open_handle(&self) -> io::Result<Option<ProcessHandle>> {
        let Some(pid) = Pid::from_raw(self.pid) else { return Ok(None) };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        Ok(self.is_alive().then(|| ProcessHandle {
            pidfd,
            ownership: Mutex::new(None),
            known_exit: Mutex::default(),
        }))
    }
}

/// A pidfd: it means one process, for as long as the handle lives.
#[derive(Debug)]
pub struct ProcessHandle {
    pidfd: OwnedFd,
    ownership: Mutex<Option<QemuOwnership>>,
    /// How it ended, once that is known. The kernel reports it to one caller only (waitid(2)).
    known_exit: Mutex<Option<ProcessExit>>,
}

impl ProcessHandle {
    /// Keeps the ownership: no other supervisor may manage the process for as long as the handle
    /// lives.
    pub(crate) fn keep_ownership(&self, ownership: QemuOwnership) {
        self.set_ownership(Some(ownership));
    }

    /// Releases the ownership: another supervisor may manage the process from now on.
    pub(crate) fn release_ownership(&self) {
        self.set_ownership(None);
    }

    fn set_ownership(&self, ownership: Option<QemuOwnership>) {
        *self.ownership.lock().unwrap_or_else(PoisonError::into_inner) = ownership;
    }

    /// Waits until the process has ended; `false` if the time is over first.
    pub fn wait_gone(&self, timeout: Duration) -> io::Result<bool> {
        let timeout =
            Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        self.poll_gone(Some(&timeout))
    }

    /// Waits until the process has ended, however long that takes.
    pub fn wait_gone_forever(&self) -> io::Result<()> {
        while !self.poll_gone(None)? {}
        Ok(())
    }

    fn poll_gone(&self, timeout: Option<&Timespec>) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        match poll(&mut fds, timeout) {
            Ok(ready) => Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sends SIGKILL. It is no error if the process has ended already.
    pub fn send_kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// How the process ended, without reaping it, so that it can be queried once more.
    pub fn peek_exit(&self) -> ProcessExit {
        self.exit_with(WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT)
    }

    /// How the process ended. The kernel reports that only to the parent; every other process gets
    /// [`ProcessExit::Unknown`]. Reaps a child.
    pub fn reap_exit(&self) -> ProcessExit {
        self.exit_with(WaitIdOptions::EXITED | WaitIdOptions::NOHANG)
    }

    fn exit_with(&self, options: WaitIdOptions) -> ProcessExit {
        let mut known = self.known_exit.lock().unwrap_or_else(PoisonError::into_inner);
        // Queried each time, because that reaps a child whose end is known already.
        *known = self.wait_for_exit(options).or(*known);
        known.unwrap_or(ProcessExit::Unknown)
    }

    fn wait_for_exit(&self, options: WaitIdOptions) -> Option<ProcessExit> {
        let status = waitid(WaitId::PidFd(self.pidfd.as_fd()), options).ok()??;
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Some(ProcessExit::Code(code)),
            (None, Some(signal)) => Some(ProcessExit::Signal(signal)),
            (None, None) => None,
        }
    }
}

/// The processes of this user that have `text` in their command line. This finds a hypervisor whose
/// supervisor died before it could record the pid.
pub fn find_by_argument(text: &str) -> io::Result<Vec<ProcessIdentity>> {
    let user = rustix::process::geteuid().as_raw();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let ours = entry.metadata().is_ok_and(|metadata| metadata.uid() == user);
        if ours && has_argument(&entry.path(), text) {
            found.extend(ProcessIdentity::from_pid(pid));
        }
    }
    Ok(found)
}

fn has_argument(process: &Path, text: &str) -> bool {
    let line = fs::read(process.join("cmdline")).unwrap_or_default();
    line.split(|&byte| byte == 0).any(|argument| contains_part(argument, text.as_bytes()))
}

fn contains_part(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len().max(1)).any(|window| window == part)
}

/// Field 22 of `/proc/PID/stat`. `NotFound` for a process that has ended or is a zombie.
fn start_time(pid: i32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_start_time(&stat).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Parses the field. The command name (field 2) may contain blanks and parentheses, so fields are
/// counted after its last `)`.
fn parse_start_time(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Whether a process is stopped by a signal or a debugger: it lives, and does nothing.
pub(crate) fn is_stopped(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().next());
    matches!(state, Some("T" | "t"))
}

fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn finds_the_start_time_behind_an_odd_name() {
        let stat = "42 (a) b (c)) S 1 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 777 9 10";
        assert_eq!(parse_start_time(stat), Some(777));
        assert_eq!(parse_start_time(&stat.replace(" S ", " Z ")), None);
        assert_eq!(parse_start_time("42 (x"), None);
    }

    #[test]
    fn a_recycled_pid_is_another_process() {
        let me = ProcessIdentity::from_pid(std::process::id() as i32).unwrap();
        assert!(me.is_alive());
        let before_me = ProcessIdentity { start_time: me.start_time - 1, ..me };
        assert!(!before_me.is_alive());
        assert!(before_me.open_handle().unwrap().is_none());
    }

    #[test]
    fn a_process_is_found_by_its_arguments() {
        let token = format!("firn-test-{}", std::process::id());
        let mut command = Command::new("sh");
        command.args(["-c", "read x", &format!("path=/x/{token}/qmp.sock")]).stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // The kernel resumes a parent just before the child's new command line is in place.
        let text = format!("/x/{token}/qmp.sock");
        let mut tries = (0..1000).map(|_| find_by_argument(&text).unwrap());
        let found = tries.find(|found| !found.is_empty()).unwrap();
        assert_eq!(
            found.iter().map(|process| process.pid).collect::<Vec<_>>(),
            [child.id() as i32]
        );
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(find_by_argument(&token).unwrap(), []);
    }

    #[test]
    #[expect(clippy::zombie_processes, reason = "the handle waits for it")]
    fn the_end_of_a_child_is_reported_to_its_parent() {
        let mut command = Command::new("sh");
        command.args(["-c", "read x; exit 3"]).stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let handle =
            ProcessIdentity::from_pid(child.id() as i32).unwrap().open_handle().unwrap().unwrap();
        assert!(!handle.wait_gone(Duration::from_millis(1)).unwrap());
        drop(child.stdin.take());
        assert!(handle.wait_gone(Duration::from_secs(10)).unwrap());
        assert_eq!(handle.reap_exit(), ProcessExit::Code(3));
        assert_eq!(handle.reap_exit(), ProcessExit::Code(3), "it is remembered");
        handle.send_kill().unwrap();
    }
}
