//! A connection to libvirt's daemon: calls, one at a time, and events that arrive in between.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::address::DaemonAddress;
use crate::error::LibvirtError;
use crate::message::{self, DaemonMessage, HEADER_BYTES, MESSAGE_BYTES_MAX, Procedure};
use crate::xdr::{XdrReader, XdrWriter};

/// The maximum number of bytes per read from the socket.
const READ_BYTES: usize = 64 << 10;
/// The length of the field that has the length of a message.
const LENGTH_BYTES: usize = 4;
/// The maximum time for closing the driver.
const CLOSE_WAIT: Duration = Duration::from_millis(200);
/// libvirt's number for "no authentication".
const AUTH_NONE: u32 = 0;
/// libvirt's number for polkit.
const AUTH_POLKIT: u32 = 2;
/// The maximum number of ways to authenticate.
const AUTH_METHODS_MAX: u32 = 20;

/// A connection to a daemon, with its driver open.
#[derive(Debug)]
pub struct LibvirtConnection {
    socket: UnixStream,
    received: Vec<u8>,
    serial: u32,
    timeout: Duration,
}

impl LibvirtConnection {
    /// Connects, authenticates, and opens the driver. `timeout` is the limit for each call.
    ///
    /// # Errors
    /// If there is no daemon, or if it asks for a password.
    pub fn connect(address: &DaemonAddress, timeout: Duration) -> Result<Self, LibvirtError> {
        let connect_error =
            |source| LibvirtError::Connect { socket: address.socket.clone(), source };
        let socket = UnixStream::connect(&address.socket).map_err(connect_error)?;
        Self::open_driver(socket, &address.driver, timeout)
    }

    pub(crate) fn open_driver(
        socket: UnixStream,
        driver: &str,
        timeout: Duration,
    ) -> Result<Self, LibvirtError> {
        let mut connection = Self { socket, received: Vec::new(), serial: 0, timeout };
        connection.authenticate()?;
        let arguments = XdrWriter::default().optional_string(Some(driver)).number(0);
        connection.call(message::OPEN, arguments, |_| Ok(()))?;
        Ok(connection)
    }

    fn authenticate(&mut self) -> Result<(), LibvirtError> {
        let ways = self.call(message::LIST_AUTH, XdrWriter::default(), |reader| {
            let count = reader.number()?.min(AUTH_METHODS_MAX);
            (0..count).map(|_| reader.number()).collect::<Result<Vec<_>, _>>()
        })?;
        match ways {
            ways if ways.contains(&AUTH_NONE) || ways.is_empty() => Ok(()),
            ways if ways.contains(&AUTH_POLKIT) => {
                self.call(message::AUTH_POLKIT, XdrWriter::default(), |_| Ok(()))
            }
            _ => Err(LibvirtError::Password),
        }
    }

    /// Calls a procedure and decodes its reply. Events that arrive before are dropped.
    pub(crate) fn call<T>(
        &mut self,
        procedure: Procedure,
        arguments: XdrWriter,
        decode: impl FnOnce(&mut XdrReader<'_>) -> Result<T, LibvirtError>,
    ) -> Result<T, LibvirtError> {
        let sent = self.send_call(procedure, &arguments.0, &[])?;
        let deadline = Instant::now() + self.timeout;
        loop {
            let taken = self.take_message(|message| {
                match message {
                    DaemonMessage::Reply { serial, result } if serial == sent => Some(result),
                    _ => None,
                }
                .map(|result| result.map(|reader| reader.0.to_vec()))
            })?;
            match taken {
                Some(Some(result)) => return decode(&mut XdrReader(&result?)),
                Some(None) => {}
                None => self.wait_and_receive(procedure, deadline)?,
            }
        }
    }

    fn wait_and_receive(
        &mut self,
        procedure: Procedure,
        deadline: Instant,
    ) -> Result<(), LibvirtError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left)) {
            Ok(0) => Err(LibvirtError::TimedOut {
                call: procedure.name,
                waited_ms: self.timeout.as_millis(),
            }),
            Ok(_) => self.receive(),
            Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }

    /// Sends a call, and returns its serial number. The descriptors follow, each with one byte.
    pub(crate) fn send_call(
        &mut self,
        procedure: Procedure,
        payload: &[u8],
        fds: &[OwnedFd],
    ) -> Result<u32, LibvirtError> {
        self.serial = self.serial.wrapping_add(1);
        let call = message::encode_call(procedure, self.serial, payload, fds.len() as u32);
        send_bytes(&self.socket, &call)?;
        fds.iter().try_for_each(|fd| send_fd(&self.socket, fd.as_fd()))?;
        Ok(self.serial)
    }

    /// Receives what has arrived. Blocks if nothing has.
    pub(crate) fn receive(&mut self) -> Result<(), LibvirtError> {
        self.received.reserve(READ_BYTES);
        let space = rustix::buffer::spare_capacity(&mut self.received);
        match rustix::net::recv(&self.socket, space, RecvFlags::empty()) {
            Ok((_, 0)) | Err(Errno::CONNRESET) => Err(LibvirtError::Closed),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }

    /// Takes the next message that has been received completely; `None` if there is none.
    pub(crate) fn take_message<T>(
        &mut self,
        use_it: impl FnOnce(DaemonMessage<'_>) -> T,
    ) -> Result<Option<T>, LibvirtError> {
        let Some(bytes) = self.received.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let bytes = u32::from_be_bytes(*bytes) as usize;
        if !(HEADER_BYTES..=MESSAGE_BYTES_MAX).contains(&bytes) {
            return Err(LibvirtError::Message { what: "its length is wrong" });
        }
        let Some(message) = self.received.get(LENGTH_BYTES..bytes) else { return Ok(None) };
        let taken = use_it(message::decode_message(message)?);
        self.received.drain(..bytes);
        Ok(Some(taken))
    }

    /// The socket, to wait for messages.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for LibvirtConnection {
    /// Closes the driver: the daemon logs an error when a client leaves without that.
    fn drop(&mut self) {
        self.timeout = CLOSE_WAIT;
        let closed = self.call(message::CLOSE, XdrWriter::default(), |_| Ok(()));
        if let Err(error) = closed {
            tracing::debug!("closing the connection to libvirt: {error}");
        }
    }
}

/// Sends all bytes. A daemon that has died causes an error, never a signal.
fn send_bytes(socket: &UnixStream, mut bytes: &[u8]) -> Result<(), LibvirtError> {
    while !bytes.is_empty() {
        match rustix::net::send(socket, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(LibvirtError::Closed),
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
    }
    Ok(())
}

fn send_fd(socket: &UnixStream, fd: BorrowedFd<'_>) -> Result<(), LibvirtError> {
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let data = [io::IoSlice::new(&[0])];
    let sent = rustix::net::sendmsg(socket, &data, &mut control, SendFlags::NOSIGNAL);
    sent.map_err(io::Error::from)?;
    Ok(())
}
