//! Guest control: runs programs in a guest, through the guest's agent.
//!
//! The agent's end of the channel is a virtio port, the lab's end a unix socket of QEMU. A socket
//! accepts one client at a time, and no reply arrives until the guest's agent runs. So connecting
//! means: open, send a ping, and try again until a reply arrives. After a restore the socket is a
//! new one, and the client must connect again. The programs that were started by
//! [`GuestControl::spawn_job`] before the checkpoint still run.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use firn_guest::protocol::{AgentAction, AgentOutcome, AgentRequest, AgentResponse, ProgramEnd};
use thiserror::Error;

/// How long a request other than `run` and `wait` may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a new client waits for the agent's reply to its first ping before it opens the socket
/// anew. Each further ping gets twice the time, up to `PING_TIMEOUT_MAX`: a guest that is starved of
/// its processor may take seconds, and an answer to a client that is gone is lost.
const PING_TIMEOUT: Duration = Duration::from_millis(500);
const PING_TIMEOUT_MAX: Duration = Duration::from_secs(16);

/// A request to a guest's agent failed.
#[derive(Debug, Error)]
pub enum ControlError {
    /// No agent answered at the socket.
    #[error("no agent answers at {} after {:.1} s", path.display(), waited.as_secs_f64())]
    NoAgent {
        /// The socket.
        path: PathBuf,
        /// How long the client tried.
        waited: Duration,
        /// Why the last try failed.
        source: Box<ControlError>,
    },
    /// The connection broke, or no reply came in time.
    #[error("the agent at {} does not answer", .0.display())]
    Broken(PathBuf, #[source] io::Error),
    /// The agent could not execute the request.
    #[error("{what}: {reason}")]
    Refused {
        /// The request.
        what: String,
        /// The agent's reason.
        reason: String,
    },
    /// A program ended with an error.
    #[error("{what}: exit {exit}: {said}")]
    Exit {
        /// The program.
        what: String,
        /// Its exit code.
        exit: i32,
        /// The end of its output.
        said: String,
    },
    /// The kind of the reply does not match the request.
    #[error("{what}: the agent's reply belongs to another request")]
    Confused {
        /// The request.
        what: String,
    },
}

/// The state of a spawned program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// It runs; its standard output and error so far.
    Running {
        /// Standard output.
        stdout: String,
        /// Standard error.
        stderr: String,
    },
    /// It ended.
    Ended(ProgramEnd),
}

/// A connection to a guest's agent.
#[derive(Debug)]
pub struct GuestControl {
    path: PathBuf,
    stream: BufReader<UnixStream>,
    next_id: u64,
}

impl GuestControl {
    /// Connects, waiting up to `limit` for the socket to appear and the agent to answer.
    pub fn connect(path: &Path, limit: Duration) -> Result<Self, ControlError> {
        let start = Instant::now();
        let mut ping_timeout = PING_TIMEOUT;
        loop {
            let error = match Self::try_connect(path, ping_timeout) {
                Ok(control) => return Ok(control),
                Err(error) => Box::new(error),
            };
            if start.elapsed() >= limit {
                let waited = start.elapsed();
                return Err(ControlError::NoAgent { path: path.to_owned(), waited, source: error });
            }
            let is_unanswered = matches!(&*error, ControlError::Broken(_, io) if is_timeout(io));
            if is_unanswered {
                ping_timeout = (ping_timeout * 2).min(PING_TIMEOUT_MAX);
            }
            sleep(Duration::from_millis(10));
        }
    }

    fn try_connect(path: &Path, ping_timeout: Duration) -> Result<Self, ControlError> {
        let broken = |error| ControlError::Broken(path.to_owned(), error);
        let stream = UnixStream::connect(path).map_err(broken)?;
        // Ids that no earlier client of the same guest is likely to have used.
        let next_id = u64::from(std::process::id()) << 32 | u64::from(subsecond_nanos());
        let mut control = Self { path: path.to_owned(), stream: BufReader::new(stream), next_id };
        control.send_action("ping", AgentAction::Ping, ping_timeout)?;
        Ok(control)
    }

    /// Runs a program to its end, whatever its exit code; for at most `limit`.
    pub fn run_within(
        &mut self,
        argv: &[&str],
        stdin: &str,
        limit: Duration,
    ) -> Result<ProgramEnd, ControlError> {
        let what = argv.join(" ");
        let timeout_s = limit.as_secs().max(1);
        let action =
            AgentAction::Run { argv: to_strings(argv), stdin: stdin.to_owned(), timeout_s };
        let outcome = self.send_action(&what, action, limit + REQUEST_TIMEOUT)?;
        expect_ended(&what, outcome)
    }

    /// Runs a program that must succeed within ten minutes; returns its standard output.
    pub fn run_program(&mut self, argv: &[&str]) -> Result<String, ControlError> {
        let ended = self.run_within(argv, "", Duration::from_secs(600))?;
        expect_success(&argv.join(" "), ended)
    }

    /// Starts a program that runs in the background, also across a checkpoint.
    pub fn spawn_job(&mut self, job: &str, argv: &[&str]) -> Result<(), ControlError> {
        let what = argv.join(" ");
        let action = AgentAction::Spawn { job: job.to_owned(), argv: to_strings(argv) };
        self.send_action(&what, action, REQUEST_TIMEOUT).map(drop)
    }

    /// Returns the state of a spawned program.
    pub fn poll_job(&mut self, job: &str) -> Result<JobState, ControlError> {
        match self.send_action(job, AgentAction::Poll { job: job.to_owned() }, REQUEST_TIMEOUT)? {
            AgentOutcome::Running { stdout, stderr, .. } => {
                Ok(JobState::Running { stdout, stderr })
            }
            outcome => Ok(JobState::Ended(expect_ended(job, outcome)?)),
        }
    }

    /// Waits until a spawned program has written a line that contains `words`; returns its output
    /// so far.
    pub fn wait_output(
        &mut self,
        job: &str,
        words: &str,
        limit: Duration,
    ) -> Result<String, ControlError> {
        let start = Instant::now();
        loop {
            match self.poll_job(job)? {
                JobState::Running { stdout, .. } | JobState::Ended(ProgramEnd { stdout, .. })
                    if stdout.contains(words) =>
                {
                    return Ok(stdout);
                }
                JobState::Ended(ended) => return Err(exit_error(job, &ended)),
                JobState::Running { .. } if start.elapsed() > limit => {
                    let reason = format!("no {words:?} after {} s", limit.as_secs());
                    return Err(ControlError::Refused { what: job.to_owned(), reason });
                }
                JobState::Running { .. } => sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Waits for a spawned program to end, whatever its exit code.
    pub fn wait_job(&mut self, job: &str, limit: Duration) -> Result<ProgramEnd, ControlError> {
        let action = AgentAction::Wait { job: job.to_owned(), timeout_s: limit.as_secs().max(1) };
        let outcome = self.send_action(job, action, limit + REQUEST_TIMEOUT)?;
        expect_ended(job, outcome)
    }

    /// Signals a spawned program and its children.
    pub fn signal_job(&mut self, job: &str, signal: i32) -> Result<(), ControlError> {
        self.send_action(job, AgentAction::Signal { job: job.to_owned(), signal }, REQUEST_TIMEOUT)
            .map(drop)
    }

    fn send_action(
        &mut self,
        what: &str,
        action: AgentAction,
        limit: Duration,
    ) -> Result<AgentOutcome, ControlError> {
        self.next_id += 1;
        let id = self.next_id;
        let broken = |path: &Path, error| ControlError::Broken(path.to_owned(), error);
        self.send_request(&AgentRequest { id, action })
            .map_err(|error| broken(&self.path, error))?;
        let response = self.read_response(id, limit).map_err(|error| broken(&self.path, error))?;
        match response.outcome {
            AgentOutcome::Failed { error } => {
                Err(ControlError::Refused { what: what.to_owned(), reason: error })
            }
            outcome => Ok(outcome),
        }
    }

    /// Sends a request. The leading line end terminates a line that an earlier client may have left
    /// incomplete.
    fn send_request(&mut self, request: &AgentRequest) -> io::Result<()> {
        let line = format!("\n{}\n", serde_json::to_string(request)?);
        let stream = self.stream.get_mut();
        stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
        stream.write_all(line.as_bytes())
    }

    /// Reads the response to a request. Skips responses to earlier clients.
    fn read_response(&mut self, id: u64, limit: Duration) -> io::Result<AgentResponse> {
        let deadline = Instant::now() + limit;
        let mut line = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.get_ref().set_read_timeout(Some(left))?;
            if self.stream.read_until(b'\n', &mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            match serde_json::from_slice::<AgentResponse>(&line) {
                Ok(response) if response.id == id => return Ok(response),
                _ => line.clear(),
            }
        }
    }
}

/// A socket's timeouts are reported as EAGAIN (socket(7), SO_RCVTIMEO).
fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

fn expect_ended(what: &str, outcome: AgentOutcome) -> Result<ProgramEnd, ControlError> {
    match outcome {
        AgentOutcome::Ended(ended) => Ok(ended),
        _ => Err(ControlError::Confused { what: what.to_owned() }),
    }
}

fn expect_success(what: &str, ended: ProgramEnd) -> Result<String, ControlError> {
    if ended.exit == 0 { Ok(ended.stdout) } else { Err(exit_error(what, &ended)) }
}

fn exit_error(what: &str, ended: &ProgramEnd) -> ControlError {
    let output = format!("{}{}", ended.stdout, ended.stderr);
    let lines: Vec<&str> = output.lines().collect();
    let output = lines[lines.len().saturating_sub(5)..].join(" | ");
    ControlError::Exit { what: what.to_owned(), exit: ended.exit, said: output }
}

fn to_strings(argv: &[&str]) -> Vec<String> {
    argv.iter().map(|&word| word.to_owned()).collect()
}

fn subsecond_nanos() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.subsec_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread::{self, JoinHandle};

    /// Answers one client; `replies` are sent in turn, with `ID` replaced by the id of the request.
    fn agent(path: &Path, replies: Vec<&'static str>) -> JoinHandle<()> {
        let listener = UnixListener::bind(path).unwrap();
        thread::spawn(move || {
            let mut reader = BufReader::new(listener.accept().unwrap().0);
            for reply in replies {
                let mut line = String::new();
                while line.trim().is_empty() {
                    line.clear();
                    reader.read_line(&mut line).unwrap();
                }
                let request: AgentRequest = serde_json::from_str(&line).unwrap();
                let reply = reply.replace("ID", &request.id.to_string());
                reader.get_mut().write_all(reply.as_bytes()).unwrap();
            }
        })
    }

    #[test]
    fn replies_to_earlier_clients_are_skipped() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent");
        let stale = "tail of a line\n{\"id\":1,\"exit\":9,\"stdout\":\"\",\"stderr\":\"\"}\n";
        let pong = [stale, "{\"id\":ID,\"uptime_ms\":5}\n"].concat();
        let done = "{\"id\":ID,\"exit\":0,\"stdout\":\"yes\",\"stderr\":\"\"}\n";
        let bad = "{\"id\":ID,\"exit\":3,\"stdout\":\"\",\"stderr\":\"no such thing\"}\n";
        let agent = agent(&path, vec![pong.leak(), done, bad]);
        let mut control = GuestControl::connect(&path, Duration::from_secs(5)).unwrap();
        assert_eq!(control.run_program(&["true"]).unwrap(), "yes");
        let error = control.run_program(&["false"]).unwrap_err();
        assert_eq!(error.to_string(), "false: exit 3: no such thing");
        agent.join().unwrap();
    }

    #[test]
    fn a_missing_guest_agent_is_an_error() {
        let error = GuestControl::connect(Path::new("/nonexistent"), Duration::ZERO).unwrap_err();
        assert!(matches!(error, ControlError::NoAgent { .. }));
    }
}
