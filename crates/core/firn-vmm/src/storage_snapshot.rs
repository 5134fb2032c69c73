//! Snapshots that the storage of a disk makes itself, by a command of the user's: for LVM, ZFS, Ceph
//! and others, whose snapshots cost nothing and need no file beside the disk.
//!
//! ```text
//!   COMMAND path      before the pause       prints where the snapshot will be
//!   COMMAND create    in the pause           makes it, while the VM waits
//!   COMMAND finish    when the VM runs       makes it readable at that path, if that takes time
//!   COMMAND remove    if there is no image   removes it; succeeds if there is none
//! ```
//!
//! The shell runs the command, with the variables of [`StorageSnapshot::variables`]. The path is
//! known before the pause, so that the journal has it before there is a snapshot.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::wait::wait_readable;

/// The maximum time of a command. In the pause the VM waits for it.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum time until a device has its name, which another process gives it (udev).
const DEVICE_TIMEOUT: Duration = Duration::from_secs(10);
const DEVICE_POLL: Duration = Duration::from_millis(10);
/// The maximum number of bytes that a command's message or path may have.
const OUTPUT_MAX: u64 = 4096;

/// A command by which storage makes snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageCommand {
    /// The command, which the shell runs.
    pub command: String,
    /// The directory in which it runs; absolute.
    pub directory: PathBuf,
}

/// A snapshot of one disk that the user's command makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageSnapshot {
    /// The command that makes it.
    pub command: StorageCommand,
    /// The VM.
    pub vm: String,
    /// QEMU's name of the drive.
    pub drive: String,
    /// The file or device that the VM writes to.
    pub disk: PathBuf,
    /// A name for the snapshot that no other has.
    pub name: String,
    /// Where the snapshot will be. Empty until the command has named it.
    pub path: PathBuf,
}

/// What the command is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SnapshotAction {
    Path,
    Create,
    Finish,
    Remove,
}

/// The reason why the storage has no snapshot.
#[derive(Debug, Error)]
#[error("`{command} {action}` for {disk} {problem}", disk = .disk.display())]
pub struct StorageSnapshotError {
    command: String,
    action: &'static str,
    disk: PathBuf,
    problem: SnapshotProblem,
}

#[derive(Debug, Error)]
enum SnapshotProblem {
    #[error("can't be run: {0}")]
    Run(io::Error),
    #[error("had not ended after {} s and was killed", TIMEOUT.as_secs())]
    TimedOut,
    #[error("failed ({status}){message}")]
    Failed { status: ExitStatus, message: String },
    #[error("printed {0:?}, which is not one absolute path")]
    NoPath(String),
    #[error("named {path}, which {fault}", path = .path.display())]
    Path { path: PathBuf, fault: String },
}

impl SnapshotAction {
    fn word(self) -> &'static str {
        match self {
            Self::Path => "path",
            Self::Create => "create",
            Self::Finish => "finish",
            Self::Remove => "remove",
        }
    }
}

impl StorageSnapshot {
    /// Asks the command where the snapshot will be. Nothing may be there yet.
    ///
    /// # Errors
    /// If the command fails, or names no path that is free.
    pub fn plan(mut self) -> Result<Self, StorageSnapshotError> {
        let printed = self.run(SnapshotAction::Path)?;
        let problem = match parse_path(&printed) {
            None => SnapshotProblem::NoPath(printed),
            Some(path) if path.symlink_metadata().is_ok() => {
                SnapshotProblem::Path { path, fault: "is there already".to_owned() }
            }
            Some(path) => {
                self.path = path;
                return Ok(self);
            }
        };
        Err(self.error(SnapshotAction::Path, problem))
    }

    /// Makes the snapshot. The VM is paused, and what QEMU has written to the disk may still be in
    /// the page cache, where a storage does not see it.
    pub(crate) fn create(&self) -> Result<(), StorageSnapshotError> {
        let flushed = firn_files::open_disk(&self.disk).and_then(|disk| disk.sync_all());
        flushed.map_err(|source| {
            let problem = SnapshotProblem::Run(io::Error::new(
                source.kind(),
                format!("flushing {} before it: {source}", self.disk.display()),
            ));
            self.error(SnapshotAction::Create, problem)
        })?;
        self.run(SnapshotAction::Create).map(drop)
    }

    /// Makes the snapshot readable, and checks that it has all of a disk of this many bytes.
    ///
    /// # Errors
    /// If the command fails, or if there is no such snapshot at the path after some seconds.
    pub fn finish(&self, bytes: u64) -> Result<(), StorageSnapshotError> {
        self.run(SnapshotAction::Finish)?;
        self.check_size(bytes).map_err(|problem| self.error(SnapshotAction::Finish, problem))
    }

    fn check_size(&self, bytes: u64) -> Result<(), SnapshotProblem> {
        let problem = |fault: String| SnapshotProblem::Path { path: self.path.clone(), fault };
        let size = wait_for_size(&self.path).map_err(|error| problem(error.to_string()))?;
        match size >= bytes {
            true => Ok(()),
            false => Err(problem(format!("has {size} bytes, but the disk has {bytes}"))),
        }
    }

    /// Removes the snapshot, if there is one.
    ///
    /// # Errors
    /// If the command fails.
    pub fn remove(&self) -> Result<(), StorageSnapshotError> {
        self.run(SnapshotAction::Remove).map(drop)
    }

    /// The environment of the command.
    fn variables(&self) -> [(&'static str, &std::ffi::OsStr); 5] {
        [
            ("FIRN_VM", self.vm.as_ref()),
            ("FIRN_DRIVE", self.drive.as_ref()),
            ("FIRN_DISK", self.disk.as_os_str()),
            ("FIRN_SNAPSHOT", self.name.as_ref()),
            ("FIRN_SNAPSHOT_PATH", self.path.as_os_str()),
        ]
    }

    /// Runs the command, and returns what it printed.
    fn run(&self, action: SnapshotAction) -> Result<String, StorageSnapshotError> {
        self.run_within(action, TIMEOUT).map_err(|problem| self.error(action, problem))
    }

    fn run_within(
        &self,
        action: SnapshotAction,
        timeout: Duration,
    ) -> Result<String, SnapshotProblem> {
        let (stdout, stderr) = (output_file()?, output_file()?);
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &format!("{} \"$1\"", self.command.command), "firn", action.word()]);
        command.envs(self.variables()).current_dir(&self.command.directory);
        command.process_group(0).stdin(Stdio::null());
        command.stdout(stdout.try_clone().map_err(SnapshotProblem::Run)?);
        command.stderr(stderr.try_clone().map_err(SnapshotProblem::Run)?);
        let child = command.spawn().map_err(SnapshotProblem::Run)?;
        let status = wait_for_end(child, timeout)?;
        match status.success() {
            true => read_output(stdout),
            false => Err(SnapshotProblem::Failed { status, message: describe(stderr) }),
        }
    }

    fn error(&self, action: SnapshotAction, problem: SnapshotProblem) -> StorageSnapshotError {
        let (command, disk) = (self.command.command.clone(), self.disk.clone());
        StorageSnapshotError { command, action: action.word(), disk, problem }
    }
}

/// A file in memory. A pipe would be kept open by a process that the command leaves behind.
fn output_file() -> Result<File, SnapshotProblem> {
    let file = memfd_create("firn-output", MemfdFlags::CLOEXEC);
    file.map(File::from).map_err(|errno| SnapshotProblem::Run(errno.into()))
}

fn read_output(mut file: File) -> Result<String, SnapshotProblem> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).map_err(SnapshotProblem::Run)?;
    file.take(OUTPUT_MAX).read_to_end(&mut bytes).map_err(SnapshotProblem::Run)?;
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// The message of a command that failed, on one line.
fn describe(stderr: File) -> String {
    let message = read_output(stderr).unwrap_or_default();
    let lines: Vec<&str> = message.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if lines.is_empty() { String::new() } else { format!(": {}", lines.join("; ")) }
}

/// Waits for the end of a process, or ends it with all that it started.
fn wait_for_end(mut child: Child, timeout: Duration) -> Result<ExitStatus, SnapshotProblem> {
    let run = SnapshotProblem::Run;
    let pid = Pid::from_child(&child);
    let pidfd: OwnedFd = pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| run(errno.into()))?;
    let has_ended = wait_readable(&pidfd, Instant::now() + timeout).map_err(run)?;
    if !has_ended {
        // The group ends at once or has ended.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    let status = child.wait().map_err(run)?;
    if has_ended { Ok(status) } else { Err(SnapshotProblem::TimedOut) }
}

fn parse_path(printed: &str) -> Option<PathBuf> {
    let path = Path::new(printed);
    (path.is_absolute() && !printed.contains('\n')).then(|| path.to_owned())
}

/// The size of a file or block device, once it is there.
fn wait_for_size(path: &Path) -> io::Result<u64> {
    let deadline = Instant::now() + DEVICE_TIMEOUT;
    loop {
        match read_size(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < deadline => {
                thread::sleep(DEVICE_POLL);
            }
            other => return other,
        }
    }
}

fn read_size(path: &Path) -> io::Result<u64> {
    let kind = path.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(io::Error::other("is neither a file nor a block device"));
    }
    File::open(path)?.seek(SeekFrom::End(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(dir: &Path, command: &str) -> StorageSnapshot {
        std::fs::write(dir.join("disk"), [7; 8192]).unwrap();
        StorageSnapshot {
            command: StorageCommand { command: command.to_owned(), directory: dir.to_owned() },
            vm: "web".to_owned(),
            drive: "disk0".to_owned(),
            disk: dir.join("disk"),
            name: "firn-1".to_owned(),
            path: PathBuf::new(),
        }
    }

    /// A command as a user would write it: it copies.
    fn script(dir: &Path) -> String {
        let path = dir.join("snapshot");
        let text = "case $1 in\n\
            path) echo \"$FIRN_DISK.$FIRN_SNAPSHOT\" ;;\n\
            create) cp \"$FIRN_DISK\" \"$FIRN_SNAPSHOT_PATH\" ;;\n\
            remove) rm -f \"$FIRN_SNAPSHOT_PATH\" ;;\n\
            esac\n";
        std::fs::write(&path, text).unwrap();
        format!("sh {}", path.display())
    }

    #[test]
    fn a_command_makes_and_removes_a_snapshot() {
        let dir = tempfile::tempdir().unwrap();
        let planned = snapshot(dir.path(), &script(dir.path())).plan().unwrap();
        assert_eq!(planned.path, dir.path().join("disk.firn-1"));
        planned.create().unwrap();
        planned.finish(8192).unwrap();
        assert_eq!(std::fs::read(&planned.path).unwrap(), [7; 8192]);
        let error = planned.finish(8193).unwrap_err().to_string();
        assert!(error.contains("has 8192 bytes, but the disk has 8193"), "{error}");
        let error = planned.clone().plan().unwrap_err().to_string();
        assert!(error.contains("is there already"), "{error}");
        planned.remove().unwrap();
        planned.remove().unwrap();
        assert!(!planned.path.exists());
    }

    #[test]
    fn what_a_command_reports_is_in_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let failing = snapshot(dir.path(), "echo no room >&2; exit 3 #");
        let error = failing.plan().unwrap_err().to_string();
        assert!(error.contains("path` for") && error.contains(": no room"), "{error}");
        assert!(error.contains("exit status: 3"), "{error}");
        for printed in ["relative", "/a\n/b", ""] {
            let command = format!("printf '{}' #", printed.replace('\n', "\\n"));
            let error = snapshot(dir.path(), &command).plan().unwrap_err().to_string();
            assert!(error.contains("not one absolute path"), "{error}");
        }
    }

    #[test]
    fn a_command_that_does_not_end_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let slow = snapshot(dir.path(), "sleep 1000; true");
        let problem =
            slow.run_within(SnapshotAction::Create, Duration::from_millis(50)).unwrap_err();
        assert!(matches!(problem, SnapshotProblem::TimedOut), "{problem}");
    }
}
