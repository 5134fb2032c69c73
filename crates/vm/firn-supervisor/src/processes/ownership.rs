//! The ownership of a QEMU: it has one owner, over all users of the host.
//!
//! The supervisor of a VM holds flock(2) on the directory `/proc/PID` of its QEMU. That directory
//! is the same for all users of the host, belongs to exactly this process and ends with it: no file
//! is left behind, and the lock never applies to a later process with the same pid. The kernel
//! releases the lock when the supervisor ends, however it ends. `/proc/locks` names the process
//! that holds the lock, so that an error can name also a process that holds it without reason.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::processes::identity::ProcessIdentity;
use crate::processes::process_names::{self, ProcessName};
use crate::records::failure::{Failure, FailureContext, FailureKind};

/// The maximum wait for a process that holds the lock briefly: a supervisor that ends, or one that
/// was about to attach and could not.
const LOCK_WAIT: Duration = Duration::from_secs(1);
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The ownership of a QEMU by this process, until the value is dropped or the process ends.
#[derive(Debug)]
pub(crate) struct QemuOwnership {
    _directory: File,
}

impl QemuOwnership {
    /// Takes the ownership of a process.
    ///
    /// # Errors
    /// If another process holds it, which the error names; or if the process has ended.
    pub(crate) fn take_process(process: &ProcessIdentity) -> Result<Self, Failure> {
        Self::take_within(process, LOCK_WAIT)
    }

    /// Takes the ownership of the process of a VM whose supervisor died. A process that holds the
    /// lock but cannot be a supervisor of that VM does not prevent a new supervisor: then there is
    /// no ownership.
    ///
    /// # Errors
    /// As [`Self::take_process`].
    pub(crate) fn take_again(process: &ProcessIdentity) -> Result<Option<Self>, Failure> {
        match Self::try_take(process, LOCK_WAIT)? {
            Ok(owned) => Ok(Some(owned)),
            Err(Some(holder)) if !may_supervise(holder) => {
                tracing::warn!("{}", taken_failure(process.pid, Some(holder)));
                Ok(None)
            }
            Err(holder) => Err(taken_failure(process.pid, holder)),
        }
    }

    fn take_within(process: &ProcessIdentity, wait: Duration) -> Result<Self, Failure> {
        Self::try_take(process, wait)?.map_err(|holder| taken_failure(process.pid, holder))
    }

    /// Tries to take it. The error of the inner result is the process that holds it, if that can be
    /// seen.
    fn try_take(
        process: &ProcessIdentity,
        wait: Duration,
    ) -> Result<Result<Self, Option<i32>>, Failure> {
        const TAKING: &str = "checking that no other supervisor manages this VM";
        let directory = File::open(format!("/proc/{}", process.pid)).while_doing(TAKING)?;
        let deadline = Instant::now() + wait;
        while !try_lock(&directory).while_doing(TAKING)? {
            if Instant::now() >= deadline {
                return Ok(Err(lock_holder(&directory)));
            }
            thread::sleep(RETRY_INTERVAL);
        }
        // The process lived before and still lives, so the directory belongs to no other process.
        match process.is_alive() {
            true => Ok(Ok(Self { _directory: directory })),
            false => Err(Failure::new(FailureKind::Ended, "QEMU has ended")),
        }
    }
}

/// Whether a process can be a supervisor of a VM of this user: it must run as this user or as root.
fn may_supervise(holder: i32) -> bool {
    let own = rustix::process::geteuid().as_raw();
    process_names::user_of(holder).is_none_or(|user| user == 0 || user == own)
}

fn try_lock(directory: &File) -> io::Result<bool> {
    match flock(directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// The process that holds the lock.
fn lock_holder(directory: &File) -> Option<i32> {
    let inode = directory.metadata().ok()?.ino();
    parse_holder(&fs::read_to_string("/proc/locks").ok()?, inode)
}

/// Parses lines such as `1: FLOCK  ADVISORY  WRITE 24910 00:15:22101 0 EOF`; the inode ends the
/// sixth word. In the line of a process that waits for a lock the second word is an arrow.
fn parse_holder(locks: &str, inode: u64) -> Option<i32> {
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let (_, locked) = words.get(5)?.rsplit_once(':')?;
        let is_it = words.get(1) == Some(&"FLOCK") && locked.parse() == Ok(inode);
        words.get(4).filter(|_| is_it)?.parse().ok()
    })
}

fn taken_failure(pid: i32, holder: Option<i32>) -> Failure {
    let busy = |text| Failure::new(FailureKind::Busy, text);
    let Some(holder) = holder.filter(|&holder| holder > 0) else {
        return busy(format!("process {pid} is held by a process that cannot be seen from here"));
    };
    let user =
        process_names::user_of(holder).map_or_else(String::new, |id| format!(" of user {id}"));
    match process_names::supervised_by(holder) {
        Some(name) => {
            let text =
                format!("process {pid} is VM {name}{user} already: supervisor {holder} manages it");
            busy(text).with_hint(format!("`firn detach {name}`{} releases it", as_user(&user)))
        }
        None => {
            let text = format!("process {pid} is held by {}{user}", ProcessName::with_id(holder));
            busy(text).with_hint(format!(
                "only a supervisor of Firn needs this lock: end process {holder}"
            ))
        }
    }
}

fn as_user(user: &str) -> String {
    if user.is_empty() { String::new() } else { format!(", as a command{user},") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    fn sleeper() -> (Child, ProcessIdentity) {
        let mut command = Command::new("cat");
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let identity = ProcessIdentity::from_pid(child.id() as i32).unwrap();
        (child, identity)
    }

    #[test]
    fn a_process_has_one_owner_which_an_error_names() {
        let (mut child, identity) = sleeper();
        let owned = QemuOwnership::take_process(&identity).unwrap();
        let refused = QemuOwnership::take_within(&identity, Duration::ZERO).unwrap_err();
        assert_eq!(refused.kind, FailureKind::Busy);
        let text = refused.to_string();
        assert!(text.contains(&format!("process {} is held", identity.pid)), "{text}");
        assert!(text.contains(&format!("process {} (", std::process::id())), "{text}");
        drop(owned);
        drop(QemuOwnership::take_process(&identity).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(QemuOwnership::take_within(&identity, Duration::ZERO).is_err());
    }

    #[test]
    fn the_holder_is_found_among_other_locks() {
        let locks = "1: POSIX  ADVISORY  WRITE 7 00:15:22101 0 EOF\n\
            2: FLOCK  ADVISORY  WRITE 24910 00:15:22101 0 EOF\n\
            2: -> FLOCK  ADVISORY  WRITE 8 00:15:22101 0 EOF\n\
            3: FLOCK  ADVISORY  WRITE 9 fe:00:2101 0 EOF\n";
        assert_eq!(parse_holder(locks, 22101), Some(24910));
        assert_eq!(parse_holder(locks, 101), None);
    }
}
