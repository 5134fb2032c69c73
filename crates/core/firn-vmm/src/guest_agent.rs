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
//! What the guest answers is untrusted: lines have a maximum length, and each wait has a deadline.
//!
//! Source: QEMU `docs/interop/qemu-ga.rst`, `qga/qapi-schema.json`.

use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

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
    /// Its answer has another form than its schema says.
    #[error("the guest agent's answer to {command} can't be read")]
    Answer {
        /// The command.
        command: String,
    },
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
}
