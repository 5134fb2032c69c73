//! `firn-store`, the program with the clients of object storage, as a child of this process.
//!
//! It is beside `firn`. It replies on its standard output, one JSON value per line: progress, then facts
//! or a failure. It ends with the thread that started it.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::records::control_protocol::{OperationProgress, SupervisorReply};
use crate::records::failure::{Failure, FailureContext as _, FailureKind};
use crate::records::store_target::StoreCredentials;

/// How often a running program checks whether it is to end.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A call of `firn-store`.
pub struct StoreProgram<'a> {
    /// Instead of the credentials in the environment of this process.
    pub credentials: Option<&'a StoreCredentials>,
    /// Ends the program when it is set.
    pub cancel: &'a AtomicBool,
}

impl StoreProgram<'_> {
    /// Runs a command; returns its facts.
    ///
    /// # Errors
    /// If the program can't be run, fails, or is cancelled ([`FailureKind::Interrupted`]).
    pub fn run<I: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = I>,
        on_progress: &mut dyn FnMut(&OperationProgress),
    ) -> Result<Value, Failure> {
        let mut child = self.spawn(args)?;
        let (out, is_over) = (child.stdout.take(), AtomicBool::new(false));
        let replied = thread::scope(|scope| {
            scope.spawn(|| self.end_if_cancelled(&mut child, &is_over));
            let replied = read_replies(out, on_progress);
            is_over.store(true, Ordering::Release);
            replied
        });
        // If its reply is no reply, it may still run, and be blocked.
        if replied.is_err() {
            let _ = child.kill();
        }
        let status = child.wait().while_doing("waiting for firn-store")?;
        match replied? {
            Some(SupervisorReply::Done { facts }) => Ok(facts),
            Some(SupervisorReply::Failed(failure)) => Err(failure),
            _ if self.cancel.load(Ordering::Acquire) => {
                Err(Failure::new(FailureKind::Interrupted, "it was cancelled"))
            }
            _ => Err(Failure::new(FailureKind::Other, describe_end(status))),
        }
    }

    fn spawn<I: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = I>) -> Result<Child, Failure> {
        let program = find_program()?;
        let mut command = Command::new(&program);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped());
        if let Some(credentials) = self.credentials {
            credentials.apply_to(&mut command);
        }
        command.spawn().while_doing(format!("running {}", program.display()))
    }

    fn end_if_cancelled(&self, child: &mut Child, is_over: &AtomicBool) {
        while !is_over.load(Ordering::Acquire) {
            if self.cancel.load(Ordering::Acquire) {
                let _ = child.kill();
                return;
            }
            thread::sleep(CANCEL_POLL_INTERVAL);
        }
    }
}

/// The program beside this one.
fn find_program() -> Result<PathBuf, Failure> {
    let this = std::env::current_exe().while_doing("finding the program firn")?;
    let program = this.with_file_name(firn_cache::PROGRAM);
    match program.exists() {
        true => Ok(program),
        false => {
            let text = format!("there is no {}, which object storage needs", program.display());
            let hint = "install all programs of Firn in one directory (`make install`)";
            Err(Failure::new(FailureKind::Host, text).with_hint(hint))
        }
    }
}

/// Its last reply. `None` if it ended without one.
fn read_replies(
    out: Option<ChildStdout>,
    on_progress: &mut dyn FnMut(&OperationProgress),
) -> Result<Option<SupervisorReply>, Failure> {
    const READING: &str = "reading the reply of firn-store";
    let lines = out.map(BufReader::new).into_iter().flat_map(BufReader::lines);
    for line in lines {
        match serde_json::from_str(&line.while_doing(READING)?).while_doing(READING)? {
            SupervisorReply::Progress(progress) => on_progress(&progress),
            last => return Ok(Some(last)),
        }
    }
    Ok(None)
}

fn describe_end(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("firn-store was ended by signal {signal}"),
        None => format!("firn-store ended without a reply ({status})"),
    }
}
