//! A small QMP client: one connection, one thread, a deadline for every wait.
//!
//! ```text
//!   Firn                                   QEMU
//!        <--- greeting ---------------------
//!        ---- qmp_capabilities, id 1 ------>
//!        <--- return, id 1 -----------------
//!        ---- stop, id 2;  save, id 3 ----->      several commands may be sent at once;
//!        <--- event STOP -------------------      QEMU runs them in order
//!        <--- return, id 2 -----------------
//!        <--- return, id 3 -----------------
//! ```
//!
//! QEMU reads a byte at a time, and by default no command before the previous one is done: so it would
//! read the later commands of a pause in the pause. With the capability `oob`, where it offers that, a
//! thread of QEMU reads up to eight commands ahead. Firn sends no command out of band. A command with a
//! file descriptor is sent alone, because QEMU keeps only the descriptors that it read last.
//!
//! Every command carries an id, so that the late reply to a command that timed out is never taken
//! for the reply to the next one. The client keeps events that arrive in between, up to a limit,
//! for [`QmpClient::wait_event`].

mod error;
pub(crate) mod line;
mod reply;

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

pub use error::QmpError;
pub use line::LINE_BYTES_MAX;
pub use reply::{QmpEvent, QmpReply, ReplyError, parse_reply};

use crate::wait::wait_writable;
use line::{LineError, LineReader};

/// Maximum number of events kept for [`QmpClient::wait_event`]; older ones are dropped.
const EVENTS_MAX: usize = 256;

/// The capability with which QEMU reads commands while it executes an earlier one.
const READ_AHEAD: &str = "oob";

/// Interval between attempts to connect to a monitor socket that does not exist yet.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(2);

/// A connection to QEMU's monitor.
#[derive(Debug)]
pub struct QmpClient {
    stream: UnixStream,
    lines: LineReader,
    next_id: u64,
    events: VecDeque<QmpEvent>,
    timeout: Duration,
    /// The cause of QEMU's shutdown, if QEMU has reported one.
    shutdown: Option<String>,
    has_panicked: bool,
}

/// A command that was sent and whose reply has not been received.
#[derive(Debug)]
#[must_use = "its reply has not been received"]
pub struct SentCommand {
    id: u64,
    command: String,
}

impl QmpClient {
    /// Connects to the monitor at `path` and negotiates capabilities. `timeout` is the limit for
    /// this and, later, for each command.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, QmpError> {
        Self::connect_started(path, timeout, || false)
    }

    /// [`Self::connect`] to a QEMU that has just been started: while there is no socket yet and
    /// `alive` returns true, it retries until `timeout` has passed.
    pub fn connect_started(
        path: &Path,
        timeout: Duration,
        alive: impl FnMut() -> bool,
    ) -> Result<Self, QmpError> {
        let stream = connect_until(path, timeout, alive)?;
        Self::negotiate(stream, timeout)
    }

    /// Connects to the monitor at `path` and sends nothing: for a caller that checks its peer
    /// first, and then calls [`Self::negotiate`].
    pub fn open_stream(path: &Path, timeout: Duration) -> Result<UnixStream, QmpError> {
        connect_until(path, timeout, || false)
    }

    /// Negotiates capabilities on a socket that is connected to a monitor already.
    pub fn negotiate(stream: UnixStream, timeout: Duration) -> Result<Self, QmpError> {
        let lines = LineReader::default();
        let (shutdown, has_panicked, events) = (None, false, VecDeque::new());
        let mut qmp = Self { stream, lines, next_id: 1, events, timeout, shutdown, has_panicked };
        let wanted = match qmp.read_greeting()?.iter().any(|name| name == READ_AHEAD) {
            true => json!({ "enable": [READ_AHEAD] }),
            false => Value::Null,
        };
        qmp.execute("qmp_capabilities", wanted)?;
        Ok(qmp)
    }

    /// Reads the greeting, and returns the capabilities that QEMU offers.
    fn read_greeting(&mut self) -> Result<Vec<String>, QmpError> {
        match self.read_reply("connect", Instant::now() + self.timeout)? {
            QmpReply::Greeting { capabilities } => Ok(capabilities),
            _ => Err(QmpError::unexpected("connect", "no QMP greeting")),
        }
    }

    /// The time limit for each command.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Changes the time limit for each command.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The socket, for its peer's credentials.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Executes a command and returns its reply. `arguments` is an object, or `Null` for none.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let sent = self.send(command, arguments)?;
        self.wait_reply(sent)
    }

    /// Executes a command without arguments and deserializes its reply as `T`.
    pub fn query<T: DeserializeOwned>(&mut self, command: &str) -> Result<T, QmpError> {
        let answer = self.execute(command, Value::Null)?;
        T::deserialize(answer).map_err(|error| QmpError::unexpected(command, error.to_string()))
    }

    /// Executes a command with a file descriptor attached (`getfd`, `add-fd`).
    pub fn execute_with_fd(
        &mut self,
        command: &str,
        arguments: Value,
        fd: BorrowedFd<'_>,
    ) -> Result<Value, QmpError> {
        let sent = self.send_with(command, arguments, &[fd])?;
        self.wait_reply(sent)
    }

    /// Gives QEMU a copy of `fd` with a name, for one later command with `fd:NAME`.
    pub fn send_fd(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
        self.execute_with_fd("getfd", json!({ "fdname": name }), fd).map(drop)
    }

    /// Executes a line of the human monitor and returns the printed text.
    pub fn execute_hmp(&mut self, line: &str) -> Result<String, QmpError> {
        match self.execute("human-monitor-command", json!({ "command-line": line })) {
            Ok(Value::String(printed)) => Ok(printed),
            Ok(_) => Err(QmpError::unexpected(line, "no text")),
            Err(error) => Err(error),
        }
    }

    /// Sends a command without waiting: in a pause, Firn writes all commands first, then reads the
    /// replies.
    pub fn send(&mut self, command: &str, arguments: Value) -> Result<SentCommand, QmpError> {
        self.send_with(command, arguments, &[])
    }

    fn send_with(
        &mut self,
        command: &str,
        arguments: Value,
        fds: &[BorrowedFd<'_>],
    ) -> Result<SentCommand, QmpError> {
        let id = self.next_id;
        self.next_id += 1;
        let mut line = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            line["arguments"] = arguments;
        }
        let line = format!("{line}\n");
        let deadline = Instant::now() + self.timeout;
        match write_all(&self.stream, line.as_bytes(), fds, deadline) {
            Ok(true) => Ok(SentCommand { id, command: command.to_owned() }),
            Ok(false) => {
                Err(LineError::TimedOut { waited_ms: self.timeout.as_millis() }
                    .during_command(command))
            }
            Err(rustix::io::Errno::PIPE) => Err(LineError::Closed.during_command(command)),
            Err(errno) => Err(LineError::Io(errno.into()).during_command(command)),
        }
    }

    /// Waits for the reply to a command that was sent.
    pub fn wait_reply(&mut self, sent: SentCommand) -> Result<Value, QmpError> {
        self.wait_reply_until(&sent, Instant::now() + self.timeout)
    }

    /// The reply to a command that was sent, if it has arrived.
    pub fn try_reply(&mut self, sent: &SentCommand) -> Result<Option<Value>, QmpError> {
        match self.wait_reply_until(sent, Instant::now()) {
            Ok(value) => Ok(Some(value)),
            Err(QmpError::TimedOut { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn wait_reply_until(
        &mut self,
        sent: &SentCommand,
        deadline: Instant,
    ) -> Result<Value, QmpError> {
        let command = || sent.command.clone();
        loop {
            match self.read_reply(&sent.command, deadline)? {
                QmpReply::Event(event) => self.record_event(event),
                QmpReply::Return { id: Some(id), value } if id == sent.id => return Ok(value),
                QmpReply::Error { id: Some(id), class, desc } if id == sent.id => {
                    return Err(QmpError::Refused { command: command(), class, desc });
                }
                QmpReply::Error { id: None, class, desc } => {
                    return Err(QmpError::Refused { command: command(), class, desc });
                }
                late => tracing::debug!(?late, "a reply that no command waits for"),
            }
        }
    }

    /// Waits until an event of this name arrives for which `wanted` is true, and returns it. Events
    /// that arrived earlier count, once each. `None` when `timeout` has passed.
    pub fn wait_event(
        &mut self,
        name: &str,
        timeout: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Option<QmpEvent>, QmpError> {
        let fits = |event: &QmpEvent| event.name == name && wanted(&event.data);
        if let Some(at) = self.events.iter().position(fits) {
            return Ok(self.events.remove(at));
        }
        let deadline = Instant::now() + timeout;
        loop {
            match self.read_reply(name, deadline) {
                Ok(QmpReply::Event(event)) if fits(&event) => return Ok(Some(event)),
                Ok(QmpReply::Event(event)) => self.record_event(event),
                Ok(late) => tracing::debug!(?late, "a reply that no command waits for"),
                Err(QmpError::TimedOut { .. }) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Removes and returns the events that have arrived.
    pub fn take_events(&mut self) -> Vec<QmpEvent> {
        self.events.drain(..).collect()
    }

    /// The time of the last event of this name among those kept.
    pub fn last_event_time(&self, name: &str) -> Option<Duration> {
        self.events.iter().rev().find(|event| event.name == name)?.at
    }

    /// The cause of QEMU's shutdown, as its `ShutdownCause`; `None` if it has not reported one.
    pub fn shutdown_cause(&self) -> Option<&str> {
        self.shutdown.as_deref()
    }

    /// Whether QEMU has reported that the guest panicked.
    pub fn has_panicked(&self) -> bool {
        self.has_panicked
    }

    /// Receives the events that have arrived, without waiting. A closed connection has no more.
    pub fn drain_events(&mut self) {
        while let Ok(reply) = self.read_reply("events", Instant::now()) {
            if let QmpReply::Event(event) = reply {
                self.record_event(event);
            }
        }
    }

    fn record_event(&mut self, event: QmpEvent) {
        match event.name.as_str() {
            "SHUTDOWN" => {
                let cause = event.data.get("reason").and_then(Value::as_str);
                self.shutdown = Some(cause.unwrap_or_default().to_owned());
            }
            "GUEST_PANICKED" => self.has_panicked = true,
            _ => {}
        }
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn read_reply(&mut self, command: &str, deadline: Instant) -> Result<QmpReply, QmpError> {
        let line = self
            .lines
            .next_line(&self.stream, deadline)
            .map_err(|end| end.during_command(command))?;
        parse_reply(line).map_err(|source| QmpError::Reply { command: command.to_owned(), source })
    }
}

fn connect_until(
    path: &Path,
    timeout: Duration,
    alive: impl FnMut() -> bool,
) -> Result<UnixStream, QmpError> {
    connect_stream(path, Instant::now() + timeout, alive)
        .map_err(|errno| QmpError::Connect { path: path.to_owned(), source: errno.into() })
}

/// Connects without blocking. A monitor whose backlog is full, because QEMU is stuck or has another
/// client, returns `EAGAIN` to this, and would block a plain `connect`.
fn connect_stream(
    path: &Path,
    deadline: Instant,
    mut alive: impl FnMut() -> bool,
) -> rustix::io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    loop {
        let wait = match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(socket.into()),
            Err(errno @ Errno::AGAIN) => (errno, true),
            Err(errno @ (Errno::NOENT | Errno::CONNREFUSED)) => (errno, alive()),
            Err(errno) => return Err(errno),
        };
        match wait {
            (_, true) if Instant::now() < deadline => std::thread::sleep(CONNECT_RETRY_INTERVAL),
            (errno, _) => return Err(errno),
        }
    }
}

/// Writes all of `bytes`; `fds` are sent with the first of them. `false` when the deadline has
/// passed. A dead peer causes `EPIPE`, never a signal.
fn write_all(
    stream: &UnixStream,
    mut bytes: &[u8],
    mut fds: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<bool, Errno> {
    while !bytes.is_empty() {
        match send_some(stream, bytes, fds) {
            Ok(sent) => (bytes, fds) = (&bytes[sent..], &[]),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => match wait_writable(stream, deadline) {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(error) => return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            },
            Err(errno) => return Err(errno),
        }
    }
    Ok(true)
}

fn send_some(
    stream: &UnixStream,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> rustix::io::Result<usize> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    if fds.is_empty() {
        return rustix::net::send(stream, bytes, flags);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    rustix::net::sendmsg(stream, &[io::IoSlice::new(bytes)], &mut control, flags)
}
