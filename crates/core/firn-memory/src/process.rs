//! Another process, referenced so that its number cannot come to mean a different one.
//!
//! The kernel may reuse a process id as soon as its process is gone. A [`Process`] holds a pidfd
//! and the directory `/proc/PID`, which both stay with the process they were opened for.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::time::Duration;

use firn_types::ThreadId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, Stat, openat, readlinkat, statat};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use thiserror::Error;

pub(crate) mod maps;

/// Why another process could not be used.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// The process does not exist, or not any more.
    #[error("process {pid} does not exist (any more)")]
    Gone {
        /// Its process id.
        pid: i32,
    },
    /// Firn does not work on itself.
    #[error("process {pid} is Firn itself; give the process id of the hypervisor")]
    Own {
        /// Its process id.
        pid: i32,
    },
    /// The number is that of a thread.
    #[error("{pid} is a thread, not a process; give the process id of the hypervisor")]
    NotAProcess {
        /// The number.
        pid: i32,
    },
    /// The kernel does not allow access to it.
    #[error(
        "may not access process {pid} ({what}): run as root, with CAP_SYS_PTRACE, or as the user the process runs as \
         (then with kernel.yama.ptrace_scope=0); a sandbox or container may also forbid it"
    )]
    Forbidden {
        /// Its process id.
        pid: i32,
        /// The operation that failed.
        what: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
    /// Anything else.
    #[error("{what} of process {pid} failed")]
    Failed {
        /// Its process id.
        pid: i32,
        /// The operation that failed.
        what: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl ProcessError {
    pub(crate) fn new(pid: i32, what: &'static str, source: impl Into<io::Error>) -> Self {
        let source = source.into();
        match source.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::SRCH) => Self::Gone { pid },
            Some(Errno::PERM | Errno::ACCESS) => Self::Forbidden { pid, what, source },
            _ => Self::Failed { pid, what, source },
        }
    }
}

/// Another process, never Firn's own.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    pidfd: OwnedFd,
    proc: OwnedFd,
}

/// A descriptor in the table of a process, and its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessDescriptor {
    pub(crate) number: i32,
    pub(crate) target: OsString,
}

impl Process {
    /// Opens process `pid`.
    ///
    /// # Errors
    /// If there is none, if `pid` is a thread of another process, or if it is Firn itself.
    pub fn open(pid: i32) -> Result<Self, ProcessError> {
        let wanted = Pid::from_raw(pid.max(0)).ok_or(ProcessError::Gone { pid })?;
        if wanted == rustix::process::getpid() {
            return Err(ProcessError::Own { pid });
        }
        let pidfd = pidfd_open(wanted, PidfdFlags::empty()).map_err(|errno| match errno {
            Errno::INVAL | Errno::NOENT => ProcessError::NotAProcess { pid },
            _ => ProcessError::new(pid, "pidfd_open", errno),
        })?;
        let process = Self { pid: wanted, pidfd, proc: open_proc(pid)? };
        // Alive after both were opened: both refer to the same process.
        process.is_alive().then_some(process).ok_or(ProcessError::Gone { pid })
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Its pidfd, which becomes readable when the process ends.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether it has not ended. A zombie has ended, even if its parent has not yet waited for it.
    pub fn is_alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(0))
    }

    /// Whether it has ended or is about to: it has given up its memory, and requests that concern
    /// its memory fail with misleading errors (unregistering a userfaultfd with "out of memory",
    /// for one).
    pub(crate) fn is_dying(&self) -> bool {
        let no_memory = || self.read_proc_file("statm").is_ok_and(|pages| pages.starts_with("0 "));
        !self.is_alive() || no_memory()
    }

    /// Its threads, the first one first.
    pub fn list_threads(&self) -> Result<Vec<ThreadId>, ProcessError> {
        self.list_numbers("task").map(|tids| tids.into_iter().map(ThreadId).collect())
    }

    /// The processor time of one of its threads (`/proc/PID/task/TID/schedstat`, first field, in
    /// nanoseconds). `None` if there is no such thread.
    pub fn thread_run_time(&self, tid: ThreadId) -> Option<Duration> {
        let line = self.read_proc_file(&format!("task/{}/schedstat", tid.0)).ok()?;
        line.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    }

    /// The entries of a directory of `/proc/PID` that are named by numbers, ascending.
    fn list_numbers(&self, directory: &'static str) -> Result<Vec<i32>, ProcessError> {
        let names = || -> io::Result<Vec<i32>> {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let directory = openat(&self.proc, directory, flags, Mode::empty())?;
            let mut numbers = Vec::new();
            for entry in Dir::read_from(&directory)? {
                numbers
                    .extend(entry?.file_name().to_str().ok().and_then(|n| i32::from_str(n).ok()));
            }
            numbers.sort_unstable();
            Ok(numbers)
        };
        names().map_err(|error| self.operation_error(directory, error))
    }

    /// Reads a file of `/proc/PID`.
    pub(crate) fn read_proc_file(&self, name: &str) -> io::Result<String> {
        io::read_to_string(std::fs::File::from(self.open_file(name, OFlags::RDONLY)?))
    }

    /// Opens a file of `/proc/PID`.
    pub(crate) fn open_file(&self, name: &str, flags: OFlags) -> io::Result<OwnedFd> {
        Ok(openat(&self.proc, name, flags | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// The status (stat(2)) of the target of a link in `/proc/PID`.
    pub(crate) fn status_of(&self, name: &str) -> io::Result<Stat> {
        Ok(statat(&self.proc, name, AtFlags::empty())?)
    }

    /// The mappings of its address space, by address.
    pub(crate) fn read_mappings(&self) -> Result<Vec<maps::MemoryMapping>, ProcessError> {
        let text = self
            .read_proc_file("maps")
            .map_err(|error| self.operation_error("reading the maps", error))?;
        Ok(maps::parse_maps(&text))
    }

    /// Its descriptors, ascending.
    pub(crate) fn list_descriptors(&self) -> Result<Vec<ProcessDescriptor>, ProcessError> {
        let numbers = self.list_numbers("fd")?;
        Ok(numbers.into_iter().filter_map(|number| self.read_descriptor(number)).collect())
    }

    /// One of its descriptors; `None` if it is not open (any more).
    fn read_descriptor(&self, number: i32) -> Option<ProcessDescriptor> {
        use std::os::unix::ffi::OsStringExt;
        let target = readlinkat(&self.proc, format!("fd/{number}"), Vec::new()).ok()?;
        Some(ProcessDescriptor { number, target: OsString::from_vec(target.into_bytes()) })
    }

    /// Copies one of its descriptors. `number` is its number in that process.
    ///
    /// # Errors
    /// If the process has no such descriptor or is gone, or if this user may not trace it
    /// (`pidfd_getfd(2)`).
    pub fn copy_descriptor(&self, number: i32) -> Result<OwnedFd, ProcessError> {
        pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty())
            .map_err(|errno| self.operation_error("copying a descriptor (pidfd_getfd)", errno))
    }

    pub(crate) fn operation_error(
        &self,
        what: &'static str,
        source: impl Into<io::Error>,
    ) -> ProcessError {
        let pid = self.pid();
        let source = source.into();
        if self.is_dying() {
            ProcessError::Gone { pid }
        } else {
            ProcessError::new(pid, what, source)
        }
    }
}

fn open_proc(pid: i32) -> Result<OwnedFd, ProcessError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT => ProcessError::Gone { pid },
        _ => ProcessError::new(pid, "opening /proc", errno),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firn_is_not_a_hypervisor() {
        let pid = std::process::id() as i32;
        assert!(matches!(Process::open(pid), Err(ProcessError::Own { .. })));
    }

    #[test]
    fn numbers_that_name_no_process_are_refused() {
        for pid in [0, -1, i32::MIN, i32::MAX] {
            assert!(matches!(Process::open(pid), Err(ProcessError::Gone { .. })), "{pid}");
        }
    }

    #[test]
    fn a_process_is_seen_to_end() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::open(child.id() as i32).unwrap();
        assert!(process.is_alive() && !process.is_dying());
        assert_eq!(process.list_threads().unwrap(), [ThreadId(child.id() as i32)]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.is_alive() && process.is_dying());
        assert!(matches!(process.list_threads(), Err(ProcessError::Gone { .. })));
    }
}
