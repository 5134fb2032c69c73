//! Device and vCPU state: saved from a running QEMU, loaded into a new one.
//!
//! `xen-save-devices-state` works on any QEMU, Xen or not. It writes every device and vCPU but no
//! RAM, as a pause requires: Firn saves the RAM.
//!
//! ```text
//!   save    memfd <--- /dev/fdset/N <--- QEMU        the file is Firn's and has no name: nothing to clean up,
//!                                                    nothing that another user can open
//!   load    bytes ---> socket pair ---> fd:firn.state ---> QEMU -S -incoming defer
//! ```
//!
//! Firn hands the descriptor over once, before the pause; a save then costs QEMU's own work and one
//! round trip. See [`crate::pause_pipe`] for a running VM of which only devices and memory are
//! saved. Loading over a descriptor needs no shell, unlike `exec:`, so it works under `-sandbox
//! on,spawn=deny`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, Mode, OFlags, SeekFrom};
use rustix::net::{AddressFamily, SendFlags, Shutdown, SocketFlags, SocketType};
use serde::Deserialize;
use serde_json::{Value, json};
use thiserror::Error;

use crate::qmp::{QmpClient, QmpError, SentCommand};
use crate::wait::wait_writable;

/// The maximum size of device state that Firn accepts, in bytes. Common VMs have 30 KB to 1 MB.
pub const STATE_BYTES_MAX: u64 = 1 << 30;

/// The name of Firn's descriptors in QEMU.
pub(crate) const NAME: &str = "firn.state";

/// The reason why device state could not be saved or loaded.
#[derive(Debug, Error)]
pub enum DeviceStateError {
    /// A monitor command failed.
    #[error("cannot move device state")]
    Qmp(#[from] QmpError),
    /// The file or socket between Firn and QEMU failed.
    #[error("cannot {doing} device state")]
    Io {
        /// The operation that failed.
        doing: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// QEMU reported success and wrote no bytes, or too many.
    #[error(
        "QEMU saved {bytes} bytes of device state; between 1 and {STATE_BYTES_MAX} were expected"
    )]
    Size {
        /// The number of bytes that QEMU wrote.
        bytes: u64,
    },
    /// QEMU saved so few bytes that it did not wait for Firn.
    #[error(
        "QEMU saved {bytes} bytes of device state, too few to fill the pipe that keeps the VM paused"
    )]
    NotHeld {
        /// The number of bytes that QEMU wrote.
        bytes: usize,
    },
    /// Another process opened the pipe that only QEMU opens, so the time at which the VM was paused
    /// is unknown.
    #[error(
        "another process opened the pipe to which QEMU saves its devices, by its path in /proc: the VM may have run meanwhile"
    )]
    OpenedTwice,
    /// QEMU died while loading; its log has the reason.
    #[error("QEMU exited while loading {bytes} bytes of device state; its log has the reason")]
    Died {
        /// The number of bytes that QEMU was sent.
        bytes: usize,
    },
    /// QEMU refused the state.
    #[error("QEMU refused {bytes} bytes of device state: {reason}")]
    Refused {
        /// The number of bytes that QEMU was sent.
        bytes: usize,
        /// QEMU's error message.
        reason: String,
    },
    /// QEMU did not finish in time.
    #[error("QEMU did not finish loading {bytes} bytes of device state within {waited_ms} ms")]
    TimedOut {
        /// The number of bytes that QEMU was sent.
        bytes: usize,
        /// How long Firn waited, in milliseconds.
        waited_ms: u128,
    },
}

pub(crate) fn io_error<E: Into<io::Error>>(
    doing: &'static str,
) -> impl FnOnce(E) -> DeviceStateError {
    move |source| DeviceStateError::Io { doing, source: source.into() }
}

/// An unnamed file that QEMU writes its device state to, save after save.
#[derive(Debug)]
pub(crate) struct StateFile {
    /// Firn's descriptor, for reading.
    file: File,
    /// QEMU's descriptor, for writing. Firn and QEMU share its position, so that Firn can rewind
    /// it.
    writer: OwnedFd,
    /// QEMU's number for the set with its copy of the writer.
    fdset: u64,
}

impl StateFile {
    /// Makes the file and hands QEMU its end.
    pub(crate) fn hand_over(qmp: &mut QmpClient) -> Result<Self, DeviceStateError> {
        remove_left_fdsets(qmp)?;
        let (file, writer) = memfd_with_writer().map_err(io_error("make a file for"))?;
        let answer = qmp.execute_with_fd("add-fd", json!({ "opaque": NAME }), writer.as_fd())?;
        let fdset = answer.get("fdset-id").and_then(Value::as_u64);
        let fdset = fdset.ok_or_else(|| QmpError::unexpected("add-fd", "no fdset-id"))?;
        Ok(Self { file, writer, fdset })
    }

    /// Empties the file and asks QEMU to write to it.
    pub(crate) fn send_save(&self, qmp: &mut QmpClient) -> Result<SentCommand, DeviceStateError> {
        self.file.set_len(0).map_err(io_error("make room for"))?;
        rustix::fs::seek(&self.writer, SeekFrom::Start(0)).map_err(io_error("make room for"))?;
        let filename = format!("/dev/fdset/{}", self.fdset);
        let arguments = json!({ "filename": filename, "live": false });
        Ok(qmp.send("xen-save-devices-state", arguments)?)
    }

    /// Reads what QEMU has written.
    pub(crate) fn read_state(&self) -> Result<Vec<u8>, DeviceStateError> {
        let bytes = self.file.metadata().map_err(io_error("read"))?.len();
        if bytes == 0 || bytes > STATE_BYTES_MAX {
            return Err(DeviceStateError::Size { bytes });
        }
        let mut state = vec![0; bytes as usize];
        self.file.read_exact_at(&mut state, 0).map_err(io_error("read"))?;
        Ok(state)
    }

    /// Removes QEMU's copy of the descriptor. QEMU closes it at once while the VM runs, otherwise
    /// with the connection.
    pub(crate) fn remove_from_qemu(self, qmp: &mut QmpClient) -> Result<(), DeviceStateError> {
        Ok(remove_fdset(qmp, self.fdset)?)
    }
}

/// Removes descriptors that an earlier Firn process left when it died: QEMU closes a set by itself
/// only while no monitor is connected.
pub(crate) fn remove_left_fdsets(qmp: &mut QmpClient) -> Result<(), QmpError> {
    let sets: Vec<FdsetInfo> = qmp.query("query-fdsets")?;
    let ours = sets.iter().filter(|set| set.fds.iter().any(|fd| fd.opaque == NAME));
    ours.map(|set| set.id).try_for_each(|id| remove_fdset(qmp, id))
}

#[derive(Debug, Deserialize)]
struct FdsetInfo {
    #[serde(rename = "fdset-id")]
    id: u64,
    fds: Vec<FdsetFdInfo>,
}

#[derive(Debug, Deserialize)]
struct FdsetFdInfo {
    #[serde(default)]
    opaque: String,
}

pub(crate) fn remove_fdset(qmp: &mut QmpClient, id: u64) -> Result<(), QmpError> {
    qmp.execute("remove-fd", json!({ "fdset-id": id })).map(drop)
}

/// Makes a memfd and a write-only descriptor of it: QEMU accepts a descriptor in a set only if its
/// access mode is the requested one.
fn memfd_with_writer() -> io::Result<(File, OwnedFd)> {
    use std::os::fd::AsRawFd;
    let file = rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC)?;
    let again = format!("/proc/self/fd/{}", file.as_raw_fd());
    let writer = rustix::fs::open(again, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    Ok((File::from(file), writer))
}

/// The length of the magic number and version at the start of device state.
const HEADER_BYTES: usize = 8;

/// The type of the section with the machine type (QEMU `migration/savevm.h`).
const CONFIGURATION: u8 = 7;

/// Device state with the section that a QEMU with `send-configuration` expects after the header. It
/// refuses the state of another machine type.
///
/// ```text
///   magic, version | 7 | length of the name | name | sections of devices
///         8 B      | 1 |       4 B          |
/// ```
pub(crate) fn with_configuration(state: &[u8], machine: &str) -> Vec<u8> {
    let (header, sections) = state.split_at(HEADER_BYTES.min(state.len()));
    let length = (machine.len() as u32).to_be_bytes();
    [header, &[CONFIGURATION], &length, machine.as_bytes(), sections].concat()
}

/// Loads device state into a QEMU that was started with `-S -incoming defer`, and waits until it is
/// loaded.
pub(crate) fn load_state(
    qmp: &mut QmpClient,
    state: &[u8],
    says_why: bool,
) -> Result<(), DeviceStateError> {
    let deadline = Instant::now() + qmp.timeout();
    let events = json!({ "capabilities": [{ "capability": "events", "state": true }] });
    qmp.execute("migrate-set-capabilities", events)?;
    let (ours, theirs) = socket_pair().map_err(io_error("make a socket for"))?;
    qmp.send_fd(NAME, theirs.as_fd())?;
    drop(theirs);
    let sent = send_load(qmp, says_why)?;
    qmp.wait_reply(sent)?;
    send_state(&ours, state, deadline)?;
    wait_until_loaded(qmp, state.len(), says_why)
}

/// Sends `migrate-incoming`. From version 9.1 on, QEMU can stay alive when it cannot load, and
/// report the reason.
fn send_load(qmp: &mut QmpClient, says_why: bool) -> Result<SentCommand, QmpError> {
    let mut arguments = json!({ "uri": format!("fd:{NAME}") });
    if says_why {
        arguments["exit-on-error"] = Value::Bool(false);
    }
    qmp.send("migrate-incoming", arguments)
}

fn socket_pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

/// Writes the state. A QEMU that fails closes its end; the caller then reads its error.
fn send_state(to: &OwnedFd, state: &[u8], deadline: Instant) -> Result<(), DeviceStateError> {
    let begun = Instant::now();
    let mut rest = state;
    while !rest.is_empty() {
        match rustix::net::send(to, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => rest = &rest[sent..],
            Err(rustix::io::Errno::AGAIN) => match wait_writable(to, deadline) {
                Ok(true) => {}
                Ok(false) => return Err(timed_out(state.len(), begun.elapsed())),
                Err(source) => return Err(io_error("send")(source)),
            },
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return Ok(()),
            Err(errno) => return Err(io_error("send")(errno)),
        }
    }
    rustix::net::shutdown(to, Shutdown::Write).map_err(io_error("send"))
}

fn wait_until_loaded(
    qmp: &mut QmpClient,
    bytes: usize,
    says_why: bool,
) -> Result<(), DeviceStateError> {
    let timeout = qmp.timeout();
    let is_end = |data: &Value| matches!(migration_status(data), "completed" | "failed");
    match qmp.wait_event("MIGRATION", timeout, is_end) {
        Ok(Some(event)) if migration_status(&event.data) == "completed" => Ok(()),
        Ok(Some(_)) => Err(why_refused(qmp, bytes, says_why)),
        Ok(None) => Err(timed_out(bytes, timeout)),
        Err(QmpError::Closed { .. }) => Err(DeviceStateError::Died { bytes }),
        Err(error) => Err(error.into()),
    }
}

fn timed_out(bytes: usize, waited: Duration) -> DeviceStateError {
    DeviceStateError::TimedOut { bytes, waited_ms: waited.as_millis() }
}

fn migration_status(data: &Value) -> &str {
    data.get("status").and_then(Value::as_str).unwrap_or("")
}

/// The error of a QEMU that refused the state. One that cannot stay alive exits about now, and
/// leaves its reason in its log.
fn why_refused(qmp: &mut QmpClient, bytes: usize, says_why: bool) -> DeviceStateError {
    if !says_why {
        return DeviceStateError::Died { bytes };
    }
    let answer = qmp.execute("query-migrate", Value::Null).unwrap_or_default();
    let reason = answer.get("error-desc").and_then(Value::as_str).unwrap_or("it gave no reason");
    DeviceStateError::Refused { bytes, reason: reason.to_owned() }
}
