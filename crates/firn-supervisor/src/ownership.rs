//! One QEMU has one owner, over all users of the host.
//!
//! The supervisor of a VM holds flock(2) on the directory `/proc/PID` of its QEMU. That directory is the same for all users of
//! the host, belongs to exactly this process and goes away with it: no file stays behind, and a later process of that pid is
//! not meant. The kernel releases the lock when the supervisor ends, however it ends. `/proc/locks` names the process that
//! holds the lock, so a process that holds it for no reason is named too.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::failure::{Context, Failure, FailureKind};
use crate::identity::ProcessIdentity;
use crate::processes::{self, Named};

/// How long another may hold it for a moment: a supervisor that ends, or one that was about to attach and could not.
const WAIT: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(10);

/// A QEMU is this process's own until the value is dropped or the process ends.
#[derive(Debug)]
pub(crate) struct Ownership {
    _directory: File,
}

impl Ownership {
    /// Takes a process.
    ///
    /// # Errors
    /// If another process holds it, which the error names; or if the process has ended.
    pub(crate) fn take(process: &ProcessIdentity) -> Result<Self, Failure> {
        Self::take_within(process, WAIT)
    }

    /// Takes the process of a VM whose supervisor died. A process that cannot be a supervisor of that VM does not keep the VM
    /// from getting a new one: then there is no ownership.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub(crate) fn take_again(process: &ProcessIdentity) -> Result<Option<Self>, Failure> {
        match Self::attempt(process, WAIT)? {
            Ok(owned) => Ok(Some(owned)),
            Err(Some(holder)) if !may_supervise(holder) => {
                tracing::warn!("{}", taken(process.pid, Some(holder)));
                Ok(None)
            }
            Err(holder) => Err(taken(process.pid, holder)),
        }
    }

    fn take_within(process: &ProcessIdentity, wait: Duration) -> Result<Self, Failure> {
        Self::attempt(process, wait)?.map_err(|holder| taken(process.pid, holder))
    }

    /// The error of the inner result is the process that holds it, if that can be seen.
    fn attempt(
        process: &ProcessIdentity,
        wait: Duration,
    ) -> Result<Result<Self, Option<i32>>, Failure> {
        const TAKING: &str = "making sure that no other Firn has this VM";
        let directory = File::open(format!("/proc/{}", process.pid)).doing(TAKING)?;
        let deadline = Instant::now() + wait;
        while !try_lock(&directory).doing(TAKING)? {
            if Instant::now() >= deadline {
                return Ok(Err(holder(&directory)));
            }
            thread::sleep(RETRY);
        }
        // The process lived before and does now: the directory is that of no other.
        match process.is_alive() {
            true => Ok(Ok(Self { _directory: directory })),
            false => Err(Failure::new(FailureKind::Ended, "QEMU has ended")),
        }
    }
}

/// A supervisor of a VM of this user is a process of this user or of root.
fn may_supervise(holder: i32) -> bool {
    let own = rustix::process::geteuid().as_raw();
    processes::user_of(holder).is_none_or(|user| user == 0 || user == own)
}

fn try_lock(directory: &File) -> io::Result<bool> {
    match flock(directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// The process that holds the lock.
fn holder(directory: &File) -> Option<i32> {
    let inode = directory.metadata().ok()?.ino();
    parse_holder(&fs::read_to_string("/proc/locks").ok()?, inode)
}

/// Lines such as `1: FLOCK  ADVISORY  WRITE 24910 00:15:22101 0 EOF`; the inode ends the sixth word. Of one that waits for a lock the
/// second word is an arrow.
fn parse_holder(locks: &str, inode: u64) -> Option<i32> {
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let (_, locked) = words.get(5)?.rsplit_once(':')?;
        let is_it = words.get(1) == Some(&"FLOCK") && locked.parse() == Ok(inode);
        words.get(4).filter(|_| is_it)?.parse().ok()
    })
}

fn taken(pid: i32, holder: Option<i32>) -> Failure {
    let busy = |text| Failure::new(FailureKind::Busy, text);
    let Some(holder) = holder.filter(|&holder| holder > 0) else {
        return busy(format!("process {pid} is held by a process that cannot be seen from here"));
    };
    let user = processes::user_of(holder).map_or_else(String::new, |id| format!(" of user {id}"));
    match processes::supervised_by(holder) {
        Some(name) => {
            let text =
                format!("process {pid} is VM {name}{user} already: supervisor {holder} has it");
            busy(text).hint(format!("`firn detach {name}`{} releases it", by(&user)))
        }
        None => {
            let text = format!("process {pid} is held by {}{user}", Named::with_id(holder));
            busy(text).hint(format!(
                "only a supervisor of Firn has a reason for that: end process {holder}"
            ))
        }
    }
}

fn by(user: &str) -> String {
    if user.is_empty() { String::new() } else { format!(", as a command{user},") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    fn sleeper() -> (Child, ProcessIdentity) {
        let mut command = Command::new("cat");
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let identity = ProcessIdentity::of(child.id() as i32).unwrap();
        (child, identity)
    }

    #[test]
    fn a_process_has_one_owner_who_is_named() {
        let (mut child, identity) = sleeper();
        let owned = Ownership::take(&identity).unwrap();
        let refused = Ownership::take_within(&identity, Duration::ZERO).unwrap_err();
        assert_eq!(refused.kind, FailureKind::Busy);
        let text = refused.to_string();
        assert!(text.contains(&format!("process {} is held", identity.pid)), "{text}");
        assert!(text.contains(&format!("process {} (", std::process::id())), "{text}");
        drop(owned);
        drop(Ownership::take(&identity).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Ownership::take_within(&identity, Duration::ZERO).is_err());
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
