//! A thread that is a domain's monitor to Firn's QMP client, and a caller to libvirt.
//!
//! ```text
//!   QMP client               bridge                                          libvirt
//!       <- greeting ----------
//!       -- qmp_capabilities ->  answers itself
//!       -- query-status, 2 -->  MonitorCommand {query-status} ----------------->
//!       -- add-fd, 3, fd ---->  waits: the daemon would execute two calls at once
//!                                <------------ reply {"return": ..., "id": "libvirt-7"}
//!       <- return, 2 ---------  has Firn's id again
//!                               MonitorCommandWithFiles {add-fd}, fd --------->
//!       <- event STOP --------   <-------------------------------- MonitorEvent STOP
//! ```
//!
//! libvirt sends events from another thread than replies, so that the event of a command may arrive
//! after its reply. Where QMP promises the other order, the bridge keeps the reply until a second,
//! trivial call has returned: the daemon sends waiting events before it answers that. `stop` has
//! no such call, because the VM is paused until its reply arrives.
//!
//! A client that leaves has its commands executed nevertheless, as QEMU does. When the domain or
//! the daemon ends, the bridge closes the client's connection, as QEMU does.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use serde_json::{Value, json};

use crate::address::DomainAddress;
use crate::connection::LibvirtConnection;
use crate::domain::Domain;
use crate::error::LibvirtError;
use crate::message::{self, DaemonMessage};
use crate::xdr::{XdrReader, XdrWriter};

/// The maximum number of bytes per read from the client.
const READ_BYTES: usize = 64 << 10;
/// The maximum length of a command, in bytes: that of a string in libvirt's protocol.
const COMMAND_BYTES_MAX: usize = crate::xdr::STRING_BYTES_MAX;
/// The maximum number of descriptors that arrive with one part of a command.
const FDS_MAX: usize = 4;

/// Opens the monitor of a running domain: a socket that speaks QMP, greeting first. `timeout` limits
/// the calls that open it.
///
/// # Errors
/// If the daemon does not answer, or if the domain does not run.
pub fn open_monitor(
    address: &DomainAddress,
    timeout: Duration,
) -> Result<UnixStream, LibvirtError> {
    let mut connection = LibvirtConnection::connect(&address.daemon, timeout)?;
    let domain = connection.domain_at(address)?;
    // A domain, no name of an event (all of them), no flags.
    let XdrWriter(domain_bytes) = domain.encode();
    let mut arguments = XdrWriter::default().number(1);
    arguments.0.extend(domain_bytes);
    let arguments = arguments.optional_string(None).number(0);
    connection.call(message::REGISTER_EVENTS, arguments, |reader| reader.signed())?;
    let (ours, theirs) = UnixStream::pair()?;
    let bridge = MonitorBridge::new(ours, connection, domain);
    std::thread::Builder::new().name("libvirt".to_owned()).spawn(move || match bridge.run() {
        Ok(()) => {}
        Err(error) => tracing::info!("the monitor of a libvirt domain is closed: {error}"),
    })?;
    Ok(theirs)
}

/// A command of the client.
#[derive(Debug)]
struct ClientCommand {
    id: Value,
    name: String,
    text: String,
    fds: Vec<OwnedFd>,
}

/// The command that libvirt executes.
#[derive(Debug)]
struct CalledCommand {
    /// The serial number of the call whose reply is waited for.
    serial: u32,
    id: Value,
    name: String,
    /// The reply, which is kept until events have arrived.
    kept: Option<Value>,
}

/// The thread's state.
#[derive(Debug)]
struct MonitorBridge {
    /// `None` once the client has left.
    client: Option<UnixStream>,
    connection: LibvirtConnection,
    domain: Domain,
    /// What the client has sent of its next command.
    line: Vec<u8>,
    fds: Vec<OwnedFd>,
    queue: VecDeque<ClientCommand>,
    called: Option<CalledCommand>,
    /// The client has stopped the vCPUs: saving devices changes nothing then, and the VM waits for
    /// the reply.
    is_stopped: bool,
}

impl MonitorBridge {
    fn new(client: UnixStream, connection: LibvirtConnection, domain: Domain) -> Self {
        let (line, fds, queue, called, is_stopped) = Default::default();
        Self { client: Some(client), connection, domain, line, fds, queue, called, is_stopped }
    }

    fn run(mut self) -> Result<(), LibvirtError> {
        self.send_client(&json!({ "QMP": { "version": {}, "capabilities": [] } }));
        loop {
            while let Some(message) = self.connection.take_message(BridgeInput::read)? {
                self.handle_input(message?)?;
            }
            if self.client.is_none() && self.called.is_none() {
                return Ok(());
            }
            let (from_client, from_daemon) = self.wait_input()?;
            if from_client {
                self.read_client()?;
            }
            if from_daemon {
                self.connection.receive()?;
            }
        }
    }

    /// Waits until the client or the daemon has sent something, and returns which.
    fn wait_input(&self) -> Result<(bool, bool), LibvirtError> {
        let mut polled = vec![PollFd::from_borrowed_fd(self.connection.socket(), PollFlags::IN)];
        polled.extend(self.client.as_ref().map(|it| PollFd::new(it, PollFlags::IN)));
        match poll(&mut polled, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
        let is_ready = |at: usize| polled.get(at).is_some_and(|it| !it.revents().is_empty());
        Ok((is_ready(1), is_ready(0)))
    }

    fn read_client(&mut self) -> Result<(), LibvirtError> {
        let Some(client) = &self.client else { return Ok(()) };
        match receive_part(client, &mut self.line, &mut self.fds)? {
            0 => self.client = None,
            _ => self.take_lines()?,
        }
        Ok(())
    }

    fn take_lines(&mut self) -> Result<(), LibvirtError> {
        while let Some(end) = self.line.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.line.drain(..=end).collect();
            let command = parse_command(&line, std::mem::take(&mut self.fds))?;
            match &*command.name {
                "qmp_capabilities" => self.send_client(&json!({ "return": {}, "id": command.id })),
                _ => self.queue.push_back(command),
            }
        }
        match self.line.len() > COMMAND_BYTES_MAX {
            true => Err(LibvirtError::Message { what: "Firn's command is too long" }),
            false => self.call_next(),
        }
    }

    /// Calls libvirt with the next command, unless it executes one already.
    fn call_next(&mut self) -> Result<(), LibvirtError> {
        if self.called.is_some() {
            return Ok(());
        }
        let Some(ClientCommand { id, name, text, fds }) = self.queue.pop_front() else {
            return Ok(());
        };
        let procedure = match fds.is_empty() {
            true => message::MONITOR_COMMAND,
            false => message::MONITOR_COMMAND_WITH_FILES,
        };
        let arguments = self.domain.encode().string(&text).number(0);
        let serial = self.connection.send_call(procedure, &arguments.0, &fds)?;
        self.called = Some(CalledCommand { serial, id, name, kept: None });
        Ok(())
    }

    fn handle_input(&mut self, input: BridgeInput) -> Result<(), LibvirtError> {
        match input {
            BridgeInput::Event(event) => self.send_client(&event),
            BridgeInput::Reply(serial, result) => {
                match self.called.take_if(|called| called.serial == serial) {
                    Some(called) => self.handle_reply(called, result)?,
                    None => tracing::debug!("libvirt replied to no call of the bridge"),
                }
            }
            BridgeInput::Other => {}
        }
        Ok(())
    }

    fn handle_reply(
        &mut self,
        called: CalledCommand,
        result: Result<Vec<u8>, LibvirtError>,
    ) -> Result<(), LibvirtError> {
        let reply = match called.kept {
            Some(reply) => reply,
            None => {
                let reply = reply_of(&called.id, result)?;
                if self.has_events(&called.name) {
                    let serial = self.connection.send_call(message::GET_TYPE, &[], &[])?;
                    self.called = Some(CalledCommand { serial, kept: Some(reply), ..called });
                    return Ok(());
                }
                reply
            }
        };
        self.send_client(&reply);
        self.call_next()
    }

    /// Whether events of a command that was executed have to arrive before its reply.
    fn has_events(&mut self, command: &str) -> bool {
        let was_stopped = self.is_stopped;
        match command {
            "stop" => self.is_stopped = true,
            "cont" => self.is_stopped = false,
            _ => {}
        }
        command == "cont" || command == "xen-save-devices-state" && !was_stopped
    }

    /// Sends a line to the client. If that fails, the client has left.
    fn send_client(&mut self, line: &Value) {
        let Some(client) = &mut self.client else { return };
        if client.write_all(format!("{line}\n").as_bytes()).is_err() {
            self.client = None;
        }
    }
}

/// The reply to a command, as QMP has it. An error of libvirt is an error of the command, unless the
/// monitor is closed.
fn reply_of(id: &Value, result: Result<Vec<u8>, LibvirtError>) -> Result<Value, LibvirtError> {
    let mut reply = match result {
        Ok(payload) => {
            let text = XdrReader(&payload).string()?;
            serde_json::from_str::<Value>(&text).ok().filter(Value::is_object)
        }
        Err(error) if error.is_end_of_monitor() => return Err(error),
        Err(error) => {
            Some(json!({ "error": { "class": "GenericError", "desc": error.to_string() } }))
        }
    }
    .ok_or(LibvirtError::Message { what: "the reply of the monitor is not a JSON object" })?;
    reply["id"] = id.clone();
    Ok(reply)
}

/// What the daemon has sent, decoded.
#[derive(Debug)]
enum BridgeInput {
    Event(Value),
    Reply(u32, Result<Vec<u8>, LibvirtError>),
    Other,
}

impl BridgeInput {
    fn read(message: DaemonMessage<'_>) -> Result<Self, LibvirtError> {
        Ok(match message {
            DaemonMessage::Reply { serial, result } => {
                Self::Reply(serial, result.map(|reader| reader.0.to_vec()))
            }
            DaemonMessage::MonitorEvent(mut reader) => Self::Event(read_event(&mut reader)?),
            DaemonMessage::Other => Self::Other,
        })
    }
}

fn read_event(reader: &mut XdrReader<'_>) -> Result<Value, LibvirtError> {
    let _callback = reader.signed()?;
    let _domain = Domain::decode(reader)?;
    let name = reader.string()?;
    let (seconds, microseconds) = (reader.long()?, reader.number()?);
    let details = reader.optional_string()?;
    let data = details.and_then(|text| serde_json::from_str::<Value>(&text).ok());
    let timestamp = json!({ "seconds": seconds, "microseconds": microseconds });
    let mut event = json!({ "event": name, "timestamp": timestamp });
    if let Some(data) = data {
        event["data"] = data;
    }
    Ok(event)
}

fn parse_command(line: &[u8], fds: Vec<OwnedFd>) -> Result<ClientCommand, LibvirtError> {
    let bad = LibvirtError::Message { what: "Firn's command is not QMP" };
    let Ok(Value::Object(mut command)) = serde_json::from_slice(line) else { return Err(bad) };
    let id = command.remove("id").unwrap_or_default();
    let name = command.get("execute").and_then(Value::as_str).unwrap_or_default().to_owned();
    Ok(ClientCommand { id, name, text: Value::Object(command).to_string(), fds })
}

/// Receives a part of a command, with its descriptors. 0 when the client has left.
fn receive_part(
    client: &UnixStream,
    line: &mut Vec<u8>,
    fds: &mut Vec<OwnedFd>,
) -> Result<usize, LibvirtError> {
    let mut part = vec![0; READ_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [io::IoSliceMut::new(&mut part)];
    let received =
        rustix::net::recvmsg(client.as_fd(), &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC);
    let bytes = match received {
        Ok(received) => received.bytes,
        Err(Errno::CONNRESET) => 0,
        Err(errno) => return Err(io::Error::from(errno).into()),
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    line.extend(&part[..bytes]);
    Ok(bytes)
}

#[cfg(test)]
#[path = "bridge_tests.rs"]
mod tests;
