//! QEMU's guest agent: a program in the guest that answers on a virtio serial port, whose other end
//! QEMU serves at a socket. One client at a time can be connected.
//!
//! ```text
//!   Firn                                        guest
//!     --- 0xff, guest-sync, a number --------->   answers to earlier clients may come first
//!     <-- the same number ---------------------
//!     --- guest-set-time, nanoseconds -------->
//!     <-- {} ----------------------------------
//!     --- guest-get-time --------------------->
//!     <-- nanoseconds -------------------------
//! ```
//!
//! It also freezes the guest's file systems (`guest-fsfreeze-freeze`, `-status`, `-thaw`), and runs a
//! program in the guest (`guest-exec`, then `guest-exec-status` until it has ended).
//!
//! What the guest answers is untrusted: lines have a maximum length, and each wait has a deadline.
//!
//! Source: QEMU `docs/interop/qemu-ga.rst`, `qga/qapi-schema.json`.

use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::{Value, json};
use thiserror::Error;

use crate::qmp::line::{LineError, LineReader};

/// The reason why the guest agent did not do what it was asked.
#[derive(Debug, Error)]
pub enum GuestAgentError {
    /// Its socket could not be used.
    #[error("the guest agent's socket can't be used")]
    Socket(#[from] io::Error),
    /// It did not answer: it does not run in the guest, or the guest is busy.
    #[error("the guest agent did not answer {command}")]
    NoAnswer {
        /// The command.
        command: String,
    },
    /// It refused the command.
    #[error("the guest agent refused {command}: {reason}")]
    Refused {
        /// The command.
        command: String,
        /// Its message.
        reason: String,
    },
    /// A program that it started has not ended before the deadline.
    #[error("the program in the guest has not ended yet; it is process {pid} there")]
    StillRuns {
        /// Its number in the guest.
        pid: i64,
    },
    /// Its answer has another form than its schema says.
    #[error("the guest agent's answer to {command} can't be read")]
    Answer {
        /// The command.
        command: String,
    },
}

/// How often the agent is asked whether a program has ended.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How a program in the guest ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GuestProgramEnd {
    /// Its exit code, if it exited.
    pub exit_code: Option<i64>,
    /// The signal that ended it, if one did.
    pub signal: Option<i64>,
    /// What it wrote to its standard output.
    pub out: String,
    /// What it wrote to its standard error.
    pub err: String,
    /// The agent has cut the output off.
    pub is_cut: bool,
}

impl GuestProgramEnd {
    fn parse_status(status: &Value) -> Self {
        let text = |key: &str| {
            let bytes = status[key].as_str().and_then(|text| STANDARD.decode(text).ok());
            String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
        };
        Self {
            exit_code: status["exitcode"].as_i64(),
            signal: status["signal"].as_i64(),
            out: text("out-data"),
            err: text("err-data"),
            is_cut: status["out-truncated"] == true || status["err-truncated"] == true,
        }
    }
}

/// A connection to the agent of a guest.
#[derive(Debug)]
pub struct GuestAgent {
    stream: UnixStream,
    reader: LineReader,
    deadline: Instant,
}

impl GuestAgent {
    /// Connects, and waits until the agent answers. All commands together may take until the
    /// deadline. `number` distinguishes this client's answers from those to earlier clients.
    ///
    /// # Errors
    /// If the socket is not served, or no agent answers before the deadline.
    pub fn connect(socket: &Path, number: u32, deadline: Instant) -> Result<Self, GuestAgentError> {
        let stream = UnixStream::connect(socket)?;
        stream.set_write_timeout(Some(Duration::from_secs(1)))?;
        let mut agent = Self { stream, reader: LineReader::default(), deadline };
        // Ends a request that an earlier client sent by half. JSON has no such byte.
        agent.stream.write_all(&[0xff])?;
        agent.send("guest-sync", &json!({ "id": number }))?;
        while agent.read_answer("guest-sync")? != Some(json!(number)) {}
        Ok(agent)
    }

    /// Sets the guest's clock to that of this host, and returns how far it is off afterwards, as
    /// this host sees it, in nanoseconds.
    ///
    /// # Errors
    /// If the agent can't set the clock: in Linux it needs `/sbin/hwclock`.
    pub fn set_time(&mut self) -> Result<i128, GuestAgentError> {
        let now = unix_nanoseconds();
        let set = self.execute("guest-set-time", &json!({ "time": now as i64 }));
        // The clock may be set although that of the hardware could not be.
        let offset = self.clock_offset()?;
        let is_set = offset.unsigned_abs() < Duration::from_secs(1).as_nanos();
        match set {
            Err(error @ GuestAgentError::Refused { .. }) if !is_set => Err(error),
            Err(error) if !matches!(error, GuestAgentError::Refused { .. }) => Err(error),
            _ => Ok(offset),
        }
    }

    /// Freezes the guest's file systems: what was written is on the disks, and no program can write
    /// until they are thawed. Returns the number of file systems.
    ///
    /// # Errors
    /// If the agent refuses, or does not answer before the deadline. The guest may be frozen then.
    pub fn freeze(&mut self) -> Result<u64, GuestAgentError> {
        const COMMAND: &str = "guest-fsfreeze-freeze";
        let answer = self.execute(COMMAND, &Value::Null)?;
        answer.as_u64().ok_or_else(|| answer_error(COMMAND))
    }

    /// Whether the guest's file systems are frozen.
    ///
    /// # Errors
    /// If the agent refuses, or does not answer before the deadline.
    pub fn is_frozen(&mut self) -> Result<bool, GuestAgentError> {
        const COMMAND: &str = "guest-fsfreeze-status";
        let answer = self.execute(COMMAND, &Value::Null)?;
        answer.as_str().map(|state| state == "frozen").ok_or_else(|| answer_error(COMMAND))
    }

    /// Thaws the guest's file systems. It is no error if they are not frozen.
    ///
    /// # Errors
    /// If the agent does not answer before the deadline, or they are frozen still.
    pub fn thaw(&mut self) -> Result<(), GuestAgentError> {
        const COMMAND: &str = "guest-fsfreeze-thaw";
        let thawed = self.execute(COMMAND, &Value::Null);
        match self.is_frozen()? {
            false => Ok(()),
            true => Err(thawed.err().unwrap_or_else(|| GuestAgentError::Refused {
                command: COMMAND.to_owned(),
                reason: "the file systems are frozen still".to_owned(),
            })),
        }
    }

    /// Runs a program in the guest, and waits until it has ended.
    ///
    /// # Errors
    /// If the agent can't start it, or it has not ended before the deadline. It continues to run then.
    pub fn run_program(
        &mut self,
        path: &str,
        arguments: &[String],
    ) -> Result<GuestProgramEnd, GuestAgentError> {
        const COMMAND: &str = "guest-exec-status";
        let start = json!({ "path": path, "arg": arguments, "capture-output": true });
        let started = self.execute("guest-exec", &start)?;
        let pid = started["pid"].as_i64().ok_or_else(|| answer_error("guest-exec"))?;
        loop {
            let status = self.execute(COMMAND, &json!({ "pid": pid }))?;
            if status["exited"] == true {
                return Ok(GuestProgramEnd::parse_status(&status));
            }
            if Instant::now() + EXIT_POLL_INTERVAL >= self.deadline {
                return Err(GuestAgentError::StillRuns { pid });
            }
            std::thread::sleep(EXIT_POLL_INTERVAL);
        }
    }

    /// The difference between the guest's clock and that of this host.
    fn clock_offset(&mut self) -> Result<i128, GuestAgentError> {
        const COMMAND: &str = "guest-get-time";
        let before = unix_nanoseconds();
        let answer = self.execute(COMMAND, &Value::Null)?;
        let after = unix_nanoseconds();
        let guest = answer.as_i64().ok_or_else(|| answer_error(COMMAND))?;
        Ok(i128::from(guest) - (before + after) / 2)
    }

    fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, GuestAgentError> {
        self.send(command, arguments)?;
        self.read_answer(command)?.ok_or_else(|| answer_error(command))
    }

    fn send(&mut self, command: &str, arguments: &Value) -> Result<(), GuestAgentError> {
        let mut request = json!({ "execute": command });
        if !arguments.is_null() {
            request["arguments"] = arguments.clone();
        }
        Ok(writeln!(self.stream, "{request}")?)
    }

    /// The next line; `None` if it is no answer: a part of one to an earlier client.
    fn read_answer(&mut self, command: &str) -> Result<Option<Value>, GuestAgentError> {
        let line = match self.reader.next_line(&self.stream, self.deadline) {
            Ok(line) => line,
            Err(LineError::Io(error)) => return Err(error.into()),
            Err(LineError::TooLong) => return Err(answer_error(command)),
            Err(LineError::Closed | LineError::TimedOut { .. }) => {
                return Err(GuestAgentError::NoAnswer { command: command.to_owned() });
            }
        };
        parse_answer(command, line)
    }
}

fn parse_answer(command: &str, line: &[u8]) -> Result<Option<Value>, GuestAgentError> {
    let Ok(answer) = serde_json::from_slice::<Value>(line) else { return Ok(None) };
    match (answer.get("return"), answer.get("error")) {
        (Some(value), _) => Ok(Some(value.clone())),
        // An error while connecting belongs to what an earlier client sent.
        (None, Some(_)) if command == "guest-sync" => Ok(None),
        (None, Some(error)) => {
            let reason = error["desc"].as_str().unwrap_or("it does not say why").to_owned();
            Err(GuestAgentError::Refused { command: command.to_owned(), reason })
        }
        (None, None) => Ok(None),
    }
}

fn answer_error(command: &str) -> GuestAgentError {
    GuestAgentError::Answer { command: command.to_owned() }
}

/// The time since 1970, as the host's clock has it.
fn unix_nanoseconds() -> i128 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as i128
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::os::unix::net::UnixListener;
    use std::thread::JoinHandle;

    use super::*;

    /// Serves one client with an agent that replies like this, and returns the commands that it got.
    fn serve(
        listener: UnixListener,
        reply: impl Fn(&str) -> Option<String> + Send + 'static,
    ) -> JoinHandle<Vec<String>> {
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut writer = stream.try_clone().unwrap();
            writer.write_all(b"half of an answer\"}\n{\"error\": {\"desc\": \"old\"}}\n").unwrap();
            let mut commands = Vec::new();
            for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                let line = line.strip_prefix(&[0xff]).unwrap_or(&line);
                let request: Value = serde_json::from_slice(line).unwrap();
                let command = request["execute"].as_str().unwrap().to_owned();
                if let Some(answer) = reply(&command) {
                    let id = request["arguments"]["id"].to_string();
                    writeln!(writer, "{}", answer.replace("ID", &id)).unwrap();
                }
                commands.push(command);
            }
            commands
        })
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(200)
    }

    fn now_answer(offset_ns: i128) -> String {
        json!({ "return": (unix_nanoseconds() + offset_ns) as i64 }).to_string()
    }

    #[test]
    fn the_clock_is_set_and_compared() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent");
        let served = serve(UnixListener::bind(&socket).unwrap(), |command| {
            Some(match command {
                "guest-sync" => "{\"return\": 5}\n{\"return\": ID}".to_owned(),
                "guest-set-time" => "{\"return\": {}}".to_owned(),
                _ => now_answer(3_000_000),
            })
        });
        let mut agent = GuestAgent::connect(&socket, 77, soon()).unwrap();
        let offset = agent.set_time().unwrap();
        assert!((1_000_000..900_000_000).contains(&offset), "{offset}");
        drop(agent);
        assert_eq!(served.join().unwrap(), ["guest-sync", "guest-set-time", "guest-get-time"]);
    }

    #[test]
    fn an_agent_that_cannot_set_the_clock_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent");
        let served = serve(UnixListener::bind(&socket).unwrap(), |command| {
            Some(match command {
                "guest-sync" => "{\"return\": ID}".to_owned(),
                "guest-set-time" => "{\"error\": {\"desc\": \"not supported\"}}".to_owned(),
                _ => now_answer(-7_000_000_000),
            })
        });
        let error = GuestAgent::connect(&socket, 77, soon()).unwrap().set_time().unwrap_err();
        assert_eq!(error.to_string(), "the guest agent refused guest-set-time: not supported");
        drop(served.join().unwrap());
    }

    #[test]
    fn a_guest_without_an_agent_is_waited_for_until_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent");
        let served = serve(UnixListener::bind(&socket).unwrap(), |_| None);
        let error = GuestAgent::connect(&socket, 77, soon()).unwrap_err();
        assert!(matches!(error, GuestAgentError::NoAnswer { .. }), "{error}");
        drop(served.join().unwrap());
    }

    #[test]
    fn a_guest_is_thawed_only_if_the_agent_reports_that() {
        let dir = tempfile::tempdir().unwrap();
        for (state, is_thawed) in [("thawed", true), ("frozen", false)] {
            let socket = dir.path().join(state);
            let served = serve(UnixListener::bind(&socket).unwrap(), move |command| {
                Some(match command {
                    "guest-sync" => "{\"return\": ID}".to_owned(),
                    "guest-fsfreeze-status" => json!({ "return": state }).to_string(),
                    _ => "{\"return\": 2}".to_owned(),
                })
            });
            let mut agent = GuestAgent::connect(&socket, 77, soon()).unwrap();
            assert_eq!(agent.freeze().unwrap(), 2);
            assert_eq!(agent.thaw().is_ok(), is_thawed);
            drop(agent);
            let frozen = ["guest-fsfreeze-freeze", "guest-fsfreeze-thaw", "guest-fsfreeze-status"];
            assert_eq!(served.join().unwrap()[1..], frozen);
        }
    }

    #[test]
    fn a_program_is_waited_for_and_its_output_decoded() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent");
        let count = std::sync::atomic::AtomicU32::new(0);
        let served = serve(UnixListener::bind(&socket).unwrap(), move |command| {
            Some(match command {
                "guest-sync" => "{\"return\": ID}".to_owned(),
                "guest-exec" => json!({ "return": { "pid": 9 } }).to_string(),
                _ if count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0 => {
                    json!({ "return": { "exited": false } }).to_string()
                }
                _ => json!({ "return": { "exited": true, "exitcode": 3, "out-data": "b2sK" } })
                    .to_string(),
            })
        });
        let mut agent = GuestAgent::connect(&socket, 77, soon()).unwrap();
        let end = agent.run_program("/bin/true", &["-x".to_owned()]).unwrap();
        assert_eq!((end.exit_code, end.out.as_str(), end.err.as_str()), (Some(3), "ok\n", ""));
        drop(agent);
        drop(served.join().unwrap());
    }
}
