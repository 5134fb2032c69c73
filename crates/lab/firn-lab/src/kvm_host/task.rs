//! A running first-level guest, over its three ports: `control`, `stdout`, `stderr` (see
//! `guests/kvm-host/start`).

use std::fs;
use std::io::{self, BufRead as _, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use super::error::KvmHostError;

/// Names of the ports, in the order in which the guest knows them.
pub(super) const PORTS: [&str; 3] = ["control", "stdout", "stderr"];
/// How long the control port is read before QEMU is checked again.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// How many lines of a log or console an error contains.
const ERROR_LINES: usize = 8;

/// A running first-level guest; dropping it kills the guest.
pub(super) struct FirstLevelGuest {
    child: Child,
    directory: PathBuf,
    control: BufReader<UnixStream>,
    outputs: [UnixStream; 2],
}

impl FirstLevelGuest {
    /// Connects to the ports of a QEMU that was just started.
    pub(super) fn connect(
        mut child: Child,
        directory: &Path,
        limit: Duration,
    ) -> Result<Self, KvmHostError> {
        let start = Instant::now();
        let mut connect = |name: &str| loop {
            match UnixStream::connect(directory.join(name)) {
                Ok(stream) => return Ok(stream),
                Err(_) if start.elapsed() < limit && matches!(child.try_wait(), Ok(None)) => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(_) => return Err(lost_guest("does not start", directory)),
            }
        };
        let [control, stdout, stderr] = PORTS;
        let streams = connect(control)
            .and_then(|control| Ok((control, [connect(stdout)?, connect(stderr)?])));
        match streams {
            Ok((control, outputs)) => {
                let directory = directory.to_owned();
                Ok(Self { child, directory, control: BufReader::new(control), outputs })
            }
            Err(error) => {
                kill_and_reap(&mut child);
                Err(error)
            }
        }
    }

    /// Waits until the guest has booted.
    pub(super) fn wait_ready(&mut self, limit: Duration) -> Result<(), KvmHostError> {
        match self.read_line(Instant::now() + limit)?.as_str() {
            "ready" => Ok(()),
            other => Err(self.lost_error(&format!("sent {other:?} instead of ready"))),
        }
    }

    /// Makes the guest run the command of the tar on its second disk; returns its exit code.
    pub(super) fn run_command(
        &mut self,
        tar_bytes: u64,
        limit: Duration,
        stdout: &mut (dyn Write + Send),
        stderr: &mut (dyn Write + Send),
    ) -> Result<i32, KvmHostError> {
        let go = writeln!(self.control.get_mut(), "go {tar_bytes}");
        go.map_err(|error| self.lost_error(&format!("cannot be started: {error}")))?;
        let copies = [self.outputs[0].try_clone(), self.outputs[1].try_clone()];
        let [Ok(out), Ok(err)] = copies else { return Err(self.lost_error("has no ports left")) };
        thread::scope(|scope| {
            scope.spawn(|| copy_output(out, stdout));
            scope.spawn(|| copy_output(err, stderr));
            let status = self.read_status(limit);
            // Ends the copying threads.
            kill_and_reap(&mut self.child);
            status
        })
    }

    fn read_status(&mut self, limit: Duration) -> Result<i32, KvmHostError> {
        let said = self.read_line(Instant::now() + limit)?;
        let status = said.strip_prefix("exit ").and_then(|status| status.parse().ok());
        let status = status
            .ok_or_else(|| self.lost_error(&format!("sent {said:?} instead of an exit code")))?;
        // The guest powers off after its last line; until then output may still arrive.
        let patience = Instant::now() + Duration::from_secs(10);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < patience {
            thread::sleep(Duration::from_millis(5));
        }
        Ok(status)
    }

    /// The next line from the control port.
    fn read_line(&mut self, deadline: Instant) -> Result<String, KvmHostError> {
        let mut line = String::new();
        loop {
            if Instant::now() > deadline {
                return Err(self.lost_error("took too long"));
            }
            // A limit of more than zero cannot be refused.
            let _ = self.control.get_ref().set_read_timeout(Some(POLL_INTERVAL));
            match self.control.read_line(&mut line) {
                Ok(0) => return Err(self.lost_error("closed its control port")),
                Ok(_) if line.ends_with('\n') => return Ok(line.trim().to_owned()),
                Ok(_) => {}
                Err(error) if is_timeout(&error) => {}
                Err(error) => {
                    return Err(self.lost_error(&format!("broke its control port: {error}")));
                }
            }
        }
    }

    fn lost_error(&self, how: &str) -> KvmHostError {
        lost_guest(how, &self.directory)
    }
}

impl Drop for FirstLevelGuest {
    fn drop(&mut self) {
        kill_and_reap(&mut self.child);
    }
}

fn is_timeout(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

fn kill_and_reap(child: &mut Child) {
    // It may have ended by itself; either way it is reaped.
    let _ = child.kill();
    let _ = child.wait();
}

/// Copies data until the other end closes.
fn copy_output(mut from: UnixStream, to: &mut (dyn Write + Send)) {
    // Whether the output is still read does not matter to the guest.
    let _ = io::copy(&mut from, to);
    let _ = to.flush();
}

fn lost_guest(how: &str, directory: &Path) -> KvmHostError {
    let tail = |name: &str| {
        let text = fs::read(directory.join(name)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(ERROR_LINES)..].join(" | ")
    };
    KvmHostError::Lost { how: how.to_owned(), said: tail("qemu.log"), console: tail("console") }
}
