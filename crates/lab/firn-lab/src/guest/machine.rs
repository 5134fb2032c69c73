//! Plain guest: a guest under QEMU, without Firn.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use thiserror::Error;

use super::qemu_args::QemuArgs;
use crate::disk_profile::DiskThrottle;

/// What a guest prints on its console once its services answer.
pub const READY_LINE: &str = "firn: ready";

/// A guest did not start.
#[derive(Debug, Error)]
pub enum MachineError {
    /// Files of the guest could not be created.
    #[error("cannot create a directory for the guest")]
    Directory(#[source] io::Error),
    /// QEMU could not be started.
    #[error("cannot start {0}")]
    Start(String, #[source] io::Error),
    /// QEMU ended before the guest was ready.
    #[error("QEMU ended ({status}): {said}")]
    Ended {
        /// Its exit status.
        status: String,
        /// The last lines of its log.
        said: String,
    },
    /// The guest was not ready in time.
    #[error("the guest was not ready after {seconds} s; its console ends with: {console}")]
    NotReady {
        /// The time limit.
        seconds: u64,
        /// The last lines of its console.
        console: String,
    },
}

/// A running QEMU without Firn; dropping it kills the process.
#[derive(Debug)]
pub struct UnmanagedGuest {
    child: Child,
    console: PathBuf,
    log: PathBuf,
    started: Instant,
    _directory: TempDir,
}

impl UnmanagedGuest {
    /// Starts QEMU. The console goes to a temporary file unless the arguments name one.
    pub fn start(args: QemuArgs) -> Result<Self, MachineError> {
        let command = Command::new(args.program_name());
        Self::start_command(command, args)
    }

    /// Starts QEMU under a disk profile.
    pub fn start_throttled(args: QemuArgs, throttle: &DiskThrottle) -> Result<Self, MachineError> {
        let command = throttle.command(args.program_name());
        Self::start_command(command, args)
    }

    fn start_command(mut command: Command, args: QemuArgs) -> Result<Self, MachineError> {
        let directory = tempfile::tempdir().map_err(MachineError::Directory)?;
        let console = args.console_file().map(Path::to_owned);
        let (args, console) = match console {
            Some(console) => (args, console),
            None => {
                let console = directory.path().join("console");
                (args.with_console(&console), console)
            }
        };
        // The output of an earlier guest would look like this one's.
        let _ = fs::remove_file(&console);
        let log = directory.path().join("qemu.log");
        let program = args.program_name().to_string_lossy().into_owned();
        let child = command
            .args(args.args())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).map_err(MachineError::Directory)?)
            .spawn()
            .map_err(|error| MachineError::Start(program, error))?;
        Ok(Self { child, console, log, started: Instant::now(), _directory: directory })
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the guest prints that its services answer; returns the time since the start.
    pub fn wait_ready(&mut self, limit: Duration) -> Result<Duration, MachineError> {
        self.wait_for_output(READY_LINE, limit)
    }

    /// Waits until the guest has written `words` to its console; returns the time since the start.
    pub fn wait_for_output(
        &mut self,
        words: &str,
        limit: Duration,
    ) -> Result<Duration, MachineError> {
        loop {
            let console = self.console();
            let elapsed = self.started.elapsed();
            if console.contains(words) {
                return Ok(elapsed);
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                let said = last_lines(&fs::read_to_string(&self.log).unwrap_or_default());
                return Err(MachineError::Ended { status: status.to_string(), said });
            }
            if elapsed > limit {
                let console = last_lines(&console);
                return Err(MachineError::NotReady { seconds: limit.as_secs(), console });
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// Everything the guest wrote to its console.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.console).unwrap_or_default()).into_owned()
    }

    /// Ends QEMU at once.
    pub fn kill(mut self) {
        self.kill_and_reap();
    }

    fn kill_and_reap(&mut self) {
        // It may have ended by itself; either way it is reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for UnmanagedGuest {
    fn drop(&mut self) {
        self.kill_and_reap();
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join(" | ")
}
