//! The roles of a VM's supervisor and guards: the process that holds the lock file has the role.
//!
//! POSIX record locks (`F_SETLK`, fcntl(2)) suit this better than flock(2): the kernel drops them
//! when their process dies, however it dies, a forked child does not share them, and `F_GETLK`
//! names the holder, so that no pid file can be stale. They have one trap: closing *any* descriptor
//! of the file drops the process's lock. So the process that has the role opens the role's file
//! once, and [`role_holder`] is for other processes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::{Flock, FlockType, fcntl_getlk};

/// One of the three processes that manage a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProcessRole {
    /// Serves requests and page faults.
    Supervisor,
    /// Restarts the supervisor.
    Guard,
    /// Restarts the supervisor where the guard does not.
    Watcher,
}

impl ProcessRole {
    /// The role as a word.
    pub(crate) fn as_word(self) -> &'static str {
        match self {
            Self::Supervisor => "supervisor",
            Self::Guard => "guard",
            Self::Watcher => "watcher",
        }
    }

    fn lock_file(self, dir: &Path) -> PathBuf {
        dir.join(match self {
            Self::Supervisor => "supervisor.lock",
            Self::Guard => "guard.lock",
            Self::Watcher => "watcher.lock",
        })
    }
}

/// A role of this process, until the value is dropped or the process ends.
#[derive(Debug)]
pub struct RoleLock {
    file: File,
    path: PathBuf,
}

impl RoleLock {
    /// Takes a role in a VM's runtime directory; `None` if another process has it.
    pub fn try_take(dir: &Path, role: ProcessRole) -> io::Result<Option<Self>> {
        let path = role.lock_file(dir);
        let file = open_lock_file(&path)?;
        match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(has_same_name(&file, &path).then_some(Self { file, path })),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Whether the directory is still the one in which the role was taken: another one of that name
    /// belongs to another VM.
    pub fn is_current(&self) -> bool {
        has_same_name(&self.file, &self.path)
    }
}

/// The pid of the process that has a role, if there is one. Not for the process that has it itself.
pub fn role_holder(dir: &Path, role: ProcessRole) -> io::Result<Option<i32>> {
    let file = match File::options().read(true).write(true).open(role.lock_file(dir)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let found = fcntl_getlk(&file, &Flock::from(FlockType::WriteLock))?;
    Ok(found.and_then(|lock| lock.pid).map(|pid| pid.as_raw_nonzero().get()))
}

fn open_lock_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Whether the file still has its name. The directory may have been removed, and created anew,
/// between opening the file and locking it.
fn has_same_name(file: &File, path: &Path) -> bool {
    match (file.metadata(), path.metadata()) {
        (Ok(locked), Ok(there)) => locked.ino() == there.ino() && locked.dev() == there.dev(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_role_is_taken_in_an_empty_directory() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(role_holder(dir.path(), ProcessRole::Supervisor).unwrap(), None);
    }

    #[test]
    fn roles_are_separate_and_free_again_when_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let supervisor = RoleLock::try_take(dir.path(), ProcessRole::Supervisor).unwrap();
        assert!(supervisor.is_some());
        assert!(RoleLock::try_take(dir.path(), ProcessRole::Guard).unwrap().is_some());
        drop(supervisor);
        assert!(RoleLock::try_take(dir.path(), ProcessRole::Supervisor).unwrap().is_some());
    }

    #[test]
    fn a_role_belongs_to_a_directory_and_not_to_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let web = dir.path().join("web");
        std::fs::create_dir(&web).unwrap();
        let role = RoleLock::try_take(&web, ProcessRole::Supervisor).unwrap().unwrap();
        assert!(role.is_current());
        std::fs::remove_dir_all(&web).unwrap();
        assert!(!role.is_current());
        std::fs::create_dir(&web).unwrap();
        let other = RoleLock::try_take(&web, ProcessRole::Supervisor).unwrap().unwrap();
        assert!(!role.is_current() && other.is_current());
    }
}
