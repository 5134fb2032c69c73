//! A program that the agent has started.

use std::io::{Read, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::protocol::{AgentOutcome, OUTPUT_BYTES_MAX, ProgramEnd};

/// A program, its output so far, and its exit code once it has ended.
pub(super) struct AgentJob {
    pid: Pid,
    state: Mutex<JobProgress>,
    changed: Condvar,
}

#[derive(Default)]
struct JobProgress {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    exit: Option<i32>,
}

impl AgentJob {
    /// Starts a program in a process group of its own; threads collect its output and its exit
    /// code.
    pub(super) fn start_program(argv: &[String], stdin: String) -> Result<Arc<Self>> {
        let [program, arguments @ ..] = argv else { bail!("argv is empty") };
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(if stdin.is_empty() { Stdio::null() } else { Stdio::piped() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        let pid = Pid::from_child(&child);
        write_stdin(&mut child, stdin);
        let job = Arc::new(Self { pid, state: Mutex::default(), changed: Condvar::new() });
        job.collect_output(child);
        Ok(job)
    }

    fn collect_output(self: &Arc<Self>, mut child: Child) {
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let (first, second, third) = (Arc::clone(self), Arc::clone(self), Arc::clone(self));
        let out = thread::spawn(move || first.read_pipe(out, |state| &mut state.stdout));
        let err = thread::spawn(move || second.read_pipe(err, |state| &mut state.stderr));
        thread::spawn(move || {
            let status = child.wait();
            // A grandchild may hold the pipes open long after the program's end, so the wait is
            // limited.
            let patience = Instant::now() + Duration::from_millis(500);
            while !(out.is_finished() && err.is_finished()) && Instant::now() < patience {
                thread::sleep(Duration::from_millis(1));
            }
            third.lock().exit = Some(status.map_or(127, exit_code));
            third.changed.notify_all();
        });
    }

    fn read_pipe(&self, pipe: Option<impl Read>, which: fn(&mut JobProgress) -> &mut Vec<u8>) {
        let Some(mut pipe) = pipe else { return };
        let mut chunk = [0; 8192];
        while let Ok(bytes @ 1..) = pipe.read(&mut chunk) {
            let mut state = self.lock();
            let kept = which(&mut state);
            kept.extend_from_slice(&chunk[..bytes]);
            let excess = kept.len().saturating_sub(OUTPUT_BYTES_MAX);
            kept.drain(..excess);
        }
    }

    fn lock(&self) -> MutexGuard<'_, JobProgress> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the end. On timeout it kills the program if `kill` is set, and returns an error.
    pub(super) fn wait_end(&self, limit: Option<Duration>, kill: bool) -> Result<ProgramEnd> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut state = self.lock();
        while state.exit.is_none() {
            let left = deadline.map_or(Duration::from_secs(3600), |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                drop(state);
                if kill {
                    self.signal_group(Signal::KILL.as_raw())?;
                }
                bail!("not ended after {} s", limit.unwrap_or_default().as_secs());
            }
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(end_of(&state, state.exit.unwrap_or_default()))
    }

    /// The program's current state.
    pub(super) fn current_state(&self) -> AgentOutcome {
        let state = self.lock();
        match state.exit {
            Some(exit) => AgentOutcome::Ended(end_of(&state, exit)),
            None => AgentOutcome::Running {
                running: true,
                stdout: decode_lossy(&state.stdout),
                stderr: decode_lossy(&state.stderr),
            },
        }
    }

    /// Signals the program and its children.
    pub(super) fn signal_group(&self, number: i32) -> Result<()> {
        let Some(signal) = Signal::from_named_raw(number) else { bail!("{number} is no signal") };
        if self.lock().exit.is_some() {
            bail!("the program has ended");
        }
        kill_process_group(self.pid, signal).context("cannot signal the program")
    }
}

fn write_stdin(child: &mut Child, stdin: String) {
    if let Some(mut pipe) = child.stdin.take() {
        // A program need not read its whole input.
        thread::spawn(move || drop(pipe.write_all(stdin.as_bytes())));
    }
}

fn end_of(state: &JobProgress, exit: i32) -> ProgramEnd {
    ProgramEnd { exit, stdout: decode_lossy(&state.stdout), stderr: decode_lossy(&state.stderr) }
}

fn decode_lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(argv: &[&str], stdin: &str) -> ProgramEnd {
        let argv: Vec<String> = argv.iter().map(|&word| word.to_owned()).collect();
        AgentJob::start_program(&argv, stdin.to_owned()).unwrap().wait_end(None, false).unwrap()
    }

    #[test]
    fn gives_output_and_exit_code() {
        let ended = run(&["sh", "-c", "cat; echo two >&2; exit 3"], "one");
        assert_eq!(ended, ProgramEnd { exit: 3, stdout: "one".into(), stderr: "two\n".into() });
    }

    #[test]
    fn a_killed_program_is_reported_with_its_signal() {
        assert_eq!(run(&["sh", "-c", "kill -9 $$"], "").exit, 137);
    }

    #[test]
    fn keeps_the_end_of_long_output() {
        let ended = run(&["sh", "-c", "head -c 600000 /dev/zero | tr '\\0' x; echo end"], "");
        assert_eq!(ended.stdout.len(), OUTPUT_BYTES_MAX);
        assert!(ended.stdout.ends_with("end\n"));
    }

    #[test]
    fn a_timeout_kills_when_asked_to() {
        let argv = ["sleep".to_owned(), "60".to_owned()];
        let job = AgentJob::start_program(&argv, String::new()).unwrap();
        assert!(matches!(job.current_state(), AgentOutcome::Running { .. }));
        assert!(job.wait_end(Some(Duration::from_millis(20)), true).is_err());
        assert_eq!(job.wait_end(None, false).unwrap().exit, 137);
    }
}
