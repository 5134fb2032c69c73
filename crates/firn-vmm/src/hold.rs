//! A pause that the hypervisor begins and ends by itself.
//!
//! QEMU reads commands byte by byte, a few microseconds each: of `stop`, `xen-save-devices-state` and `cont` the latter two
//! would be read while the VM stands still, which takes longer than carrying them out. But a VM that runs is stopped by
//! `xen-save-devices-state` itself, and started again when its devices are saved. What Firn has to do meanwhile, it does
//! while QEMU waits for a pipe:
//!
//! ```text
//!   Firn                               QEMU
//!   the command, a pipe of one page --> reads it                                          the guest runs
//!                                       stops the vCPUs, drains and flushes the disks     it stands still
//!                                       opens the pipe
//!   sees that: Held                     saves devices; a page of that fits: waits
//!   ... fixes memory
//!   makes the pipe larger ------------> writes the rest, starts the vCPUs                 the guest runs
//!   reads the rest, and the answer
//! ```
//!
//! QEMU keeps its end from one pause to the next: handing it over takes three commands, and reading those takes QEMU longer than the page
//! faults of an epoch do.
//!
//! With a pipe that takes more, QEMU goes on saving devices while memory is fixed, and waits later, or not at all: if it had nothing left
//! to write it would start the VM. So that is for a VM of which it is known how much its devices take ([`held_bytes`]).
//!
//! Where nobody can watch for the opening, it is the first bytes that Firn waits for: QEMU writes 32 KiB at once, which it has to save first.
//! Whoever else opens the pipe meanwhile might be taken for QEMU while the VM still runs. So a pause in which it was opened twice has failed.
//!
//! If Firn dies, the pipe has no reader any more: saving fails, and QEMU starts the VM. (It forgets to close its descriptor then.
//! A hold that is dropped is ended as if it were released.)
//!
//! Source: QEMU `qmp_xen_save_devices_state` (migration/savevm.c), `monitor_can_read` (monitor/monitor.c); pipe(7),
//! "Pipe capacity"; fcntl(2), `F_SETPIPE_SZ`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size};
use serde_json::{Value, json};

use crate::device_state::{
    DeviceStateError, NAME, STATE_BYTES_MAX, io_error, remove_fdset, take_back_left_behind,
};
use crate::openings::Openings;
use crate::qmp::{Qmp, QmpError, Sent};
use crate::vm::RunState;
use crate::wait::{either, readable};

/// What a pipe takes before its writer waits: a page, the least there is. No VM's devices fit into that.
const HELD_BYTES: usize = 4096;
/// What it takes of a VM whose devices are known to need that, and [`SPARE_BYTES`] more: QEMU writes 32 KiB at once.
const LATE_BYTES: [usize; 2] = [64 << 10, 32 << 10];
/// More than one device is likely to take.
const SPARE_BYTES: usize = 8 << 10;
/// For how long the opening is looked for without sleeping. Once the vCPUs stand still their processors are free, and waking up takes as
/// long as what is waited for.
const LOOK: Duration = Duration::from_micros(1500);
/// For how long after that it alone is waited for: what QEMU says when the VM has stopped it says faster if that wakes nobody.
const PIPE_WAIT: Duration = Duration::from_millis(5);
/// How often a QEMU is looked at that has closed the pipe, and says nothing.
const CLOSED_LOOK: Duration = Duration::from_millis(1);
/// What it takes when its writer is to wait no longer: as much as any user may ask for by default, or less.
const FREE_BYTES: [usize; 3] = [1 << 20, 1 << 18, 1 << 16];
/// How much is read at once.
const READ_BYTES: usize = 256 << 10;

/// How QEMU is waited for when it has been told to stop the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Without sleeping, for 1.5 ms at most: waking up may take longer than what is waited for.
    Awake,
    /// By who comes first whenever it wakes up, and would else be in QEMU's way.
    Asleep,
}

/// A pipe that QEMU can save device state to.
#[derive(Debug)]
pub(crate) struct Holder {
    reader: OwnedFd,
    openings: Option<Openings>,
    /// QEMU's number for its end.
    fd: u64,
    /// QEMU's name for the set it is in.
    fdset: u64,
    /// What it takes before QEMU waits.
    held_bytes: usize,
}

impl Holder {
    /// Makes the pipe, for a VM whose devices take `least` bytes at least, and hands QEMU its end.
    pub(crate) fn hand_over(qmp: &mut Qmp, least: usize) -> Result<Self, DeviceStateError> {
        take_back_left_behind(qmp)?;
        let made = pipe(held_bytes(least)).map_err(io_error("make a pipe for"))?;
        let (reader, writer, held_bytes) = made;
        let answer = qmp.execute_with_fd("add-fd", json!({ "opaque": NAME }), writer.as_fd())?;
        let number = |key: &str| answer.get(key).and_then(Value::as_u64);
        let (Some(fd), Some(fdset)) = (number("fd"), number("fdset-id")) else {
            return Err(QmpError::unexpected("add-fd", "no descriptor").into());
        };
        let openings = Openings::of(&reader);
        Ok(Self { reader, openings, fd, fdset, held_bytes })
    }

    /// Makes an empty pipe ready for the next pause of a VM whose devices take `least` bytes at least. `false` if it can't be.
    pub(crate) fn is_made_ready(&mut self, least: usize) -> bool {
        match fcntl_setpipe_size(&self.reader, held_bytes(least)) {
            Ok(bytes) => {
                self.held_bytes = bytes;
                true
            }
            Err(_) => false,
        }
    }

    /// Takes QEMU's end back.
    pub(crate) fn take_back(self, qmp: &mut Qmp) -> Result<(), QmpError> {
        remove_fdset(qmp, self.fdset)
    }

    /// Not by the name of its set: QEMU would cut such a file to length, which no pipe allows.
    fn ask(&self, qmp: &mut Qmp) -> Result<Sent, DeviceStateError> {
        // By whom does not matter until now.
        self.is_opened()?;
        let filename = format!("/proc/self/fd/{}", self.fd);
        let arguments = json!({ "filename": filename, "live": false });
        Ok(qmp.send("xen-save-devices-state", arguments)?)
    }

    /// Whether it was opened since this was asked last, if that can be known.
    fn is_opened(&self) -> Result<Option<bool>, DeviceStateError> {
        let opened = self.openings.as_ref().map(Openings::any).transpose();
        opened.map_err(io_error("look for"))
    }

    /// What can be read once QEMU has come.
    fn sign(&self) -> BorrowedFd<'_> {
        self.openings.as_ref().map_or(self.reader.as_fd(), Openings::as_fd)
    }

    /// Whether QEMU has stopped the VM, and saves it.
    fn has_come(&self) -> Result<bool, DeviceStateError> {
        match self.is_opened()? {
            Some(is_opened) => Ok(is_opened),
            None => self.is_written_to(),
        }
    }

    fn is_written_to(&self) -> Result<bool, DeviceStateError> {
        let bytes = rustix::io::ioctl_fionread(&self.reader).map_err(io_error("look for"))?;
        Ok(bytes > 0)
    }

    /// The same, when there was some time for it.
    fn has_soon_come(&self, look: Look) -> Result<bool, DeviceStateError> {
        let since = Instant::now();
        while look == Look::Awake && since.elapsed() < LOOK {
            if self.has_come()? {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        readable(self.sign(), Instant::now() + PIPE_WAIT).map_err(io_error("wait for"))?;
        // Of a kernel that tells of no openings that is a sign as well.
        Ok(self.has_come()? || self.is_written_to()?)
    }

    /// Lets the writer go on. A user who has used up what pipes may take has it write page by page: that is only slower.
    ///
    /// Twice: kernels before 6.1.76, 6.6.15 and 6.7.3 wake the writer before the pipe is larger (CVE-2023-52672).
    fn let_go(&self) {
        let is_larger = |bytes: &usize| fcntl_setpipe_size(&self.reader, *bytes).is_ok();
        if let Some(bytes) = FREE_BYTES.iter().find(|bytes| is_larger(bytes)) {
            is_larger(bytes);
        }
    }

    /// Reads what is there.
    fn read(&self, state: &mut Vec<u8>) -> Result<(), DeviceStateError> {
        while state.len() as u64 <= STATE_BYTES_MAX {
            state.reserve(READ_BYTES);
            match rustix::io::read(&self.reader, rustix::buffer::spare_capacity(state)) {
                Ok(0) | Err(Errno::AGAIN) => return Ok(()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(io_error("read")(errno)),
            }
        }
        Err(DeviceStateError::Size { bytes: state.len() as u64 })
    }
}

/// Its reader does not wait. Its writer may be opened by a QEMU that is another user's. It takes so many bytes, or more.
fn pipe(bytes: usize) -> io::Result<(OwnedFd, OwnedFd, usize)> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK)?;
    rustix::fs::fchmod(&writer, Mode::from_raw_mode(0o622))?;
    let bytes = fcntl_setpipe_size(&reader, bytes)?;
    Ok((reader, writer, bytes))
}

/// How much a pipe is to take by which a VM is held whose devices take `least` bytes at least.
fn held_bytes(least: usize) -> usize {
    LATE_BYTES.into_iter().find(|bytes| bytes + SPARE_BYTES <= least).unwrap_or(HELD_BYTES)
}

/// A VM that stands still, its disks drained, until this is released or dropped.
#[derive(Debug)]
#[must_use = "the VM goes on when this is dropped, and nothing is saved"]
pub struct Held<'a> {
    qmp: &'a mut Qmp,
    /// Where the pipe goes when QEMU has closed its end, for the next pause.
    home: &'a mut Option<Holder>,
    /// None once it was released.
    under_way: Option<(Holder, Sent)>,
    since: Duration,
}

/// What was saved, and when it was.
#[derive(Clone, Debug)]
pub struct Released {
    /// The state of every device and vCPU, without RAM.
    pub device_state: Vec<u8>,
    /// How long it took until that began, or, where nobody could see it begin, until some of it was saved; from when the vCPUs had stopped.
    /// None if they had been stopped before.
    pub took: Option<Duration>,
    /// How long the VM stood still, by QEMU's own clock: from when its vCPUs had stopped until they were about to be started.
    pub still: Option<Duration>,
    /// When the VM went on, since 1970: before that nothing of it ran.
    pub at: Duration,
}

impl<'a> Held<'a> {
    /// Stops a VM that runs, and calls `asked` when it has been told to; then `look`s for it. `None` if its QEMU can't open the pipe; then it runs, and
    /// stood still for a moment.
    pub(crate) fn hold(
        qmp: &'a mut Qmp,
        home: &'a mut Option<Holder>,
        asked: &mut dyn FnMut(),
        look: Look,
    ) -> Result<Option<Self>, DeviceStateError> {
        let Some(holder) = home.take() else { return Ok(None) };
        drop(qmp.take_events());
        let deadline = Instant::now() + qmp.timeout();
        let save = holder.ask(qmp)?;
        asked();
        while !holder.has_soon_come(look)? {
            match qmp.try_answer(&save) {
                Ok(None) => {}
                Ok(Some(_)) => return Err(DeviceStateError::Size { bytes: 0 }),
                Err(QmpError::Refused { desc, .. }) => {
                    tracing::debug!("the hypervisor does not write to a pipe: {desc}");
                    holder.take_back(qmp)?;
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            }
            wait(qmp, &holder, deadline)?;
        }
        Ok(Some(Self { qmp, home, under_way: Some((holder, save)), since: now() }))
    }

    /// Lets the VM go on, and gives its device state.
    pub fn release(mut self) -> Result<Released, DeviceStateError> {
        let device_state = self.finish()?;
        let stopped = self.qmp.last("STOP");
        let is_later = |at: &Duration| stopped.is_none_or(|stopped| *at >= stopped);
        let resumed = self.qmp.last("RESUME").filter(is_later);
        let at = resumed.unwrap_or_else(now);
        if resumed.is_none() {
            self.start_if_left()?;
        }
        Ok(Released {
            device_state,
            took: stopped.and_then(|stopped| self.since.checked_sub(stopped)),
            still: stopped.and_then(|stopped| resumed?.checked_sub(stopped)),
            at,
        })
    }

    /// A VM that its own guest had put to sleep just before is stopped by saving it, and not started again. One that its user
    /// had stopped is called otherwise.
    fn start_if_left(&mut self) -> Result<(), QmpError> {
        let state: RunState = self.qmp.query("query-status")?;
        match &*state.status {
            "save-vm" => self.qmp.execute("cont", Value::Null).map(drop),
            _ => Ok(()),
        }
    }

    /// Lets QEMU write, until it says that it has.
    fn finish(&mut self) -> Result<Vec<u8>, DeviceStateError> {
        let mut device_state = Vec::new();
        let Some((mut holder, save)) = self.under_way.take() else { return Ok(device_state) };
        let (deadline, held_bytes) = (Instant::now() + self.qmp.timeout(), holder.held_bytes);
        holder.let_go();
        match self.drain(&holder, &save, &mut device_state, deadline) {
            Err(error @ DeviceStateError::Qmp(QmpError::Refused { .. })) => {
                holder.take_back(self.qmp)?;
                return Err(error);
            }
            drained => drained?,
        }
        let is_opened_twice = holder.is_opened()? == Some(true);
        match holder.is_made_ready(0) {
            true => *self.home = Some(holder),
            false => holder.take_back(self.qmp)?,
        }
        if is_opened_twice {
            return Err(DeviceStateError::OpenedTwice);
        }
        // One byte more, and QEMU has waited for all that was done before it was let go.
        match device_state.len() > held_bytes {
            true => Ok(device_state),
            false => Err(DeviceStateError::NotHeld { bytes: device_state.len() }),
        }
    }

    /// Reads until QEMU says that it has saved everything.
    fn drain(
        &mut self,
        holder: &Holder,
        save: &Sent,
        state: &mut Vec<u8>,
        deadline: Instant,
    ) -> Result<(), DeviceStateError> {
        holder.read(state)?;
        while self.qmp.try_answer(save)?.is_none() {
            wait(self.qmp, holder, deadline)?;
            holder.read(state)?;
        }
        holder.read(state)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Should this fail, the pipe is closed, and QEMU goes on for that reason.
        if let Err(error) = self.finish() {
            tracing::debug!("a VM that was held was not released: {error}");
        }
    }
}

fn wait(qmp: &Qmp, holder: &Holder, deadline: Instant) -> Result<(), DeviceStateError> {
    either(&holder.reader, qmp.socket(), deadline).map_err(io_error("wait for"))?;
    if !holder.is_written_to()? {
        // A pipe that was closed is always ready. Who closed it is to close the other as well, and may need this processor for that.
        let soon = deadline.min(Instant::now() + CLOSED_LOOK);
        readable(qmp.socket(), soon).map_err(io_error("wait for"))?;
    }
    match Instant::now() < deadline {
        true => Ok(()),
        false => {
            let waited_ms = qmp.timeout().as_millis();
            let command = "xen-save-devices-state".to_owned();
            Err(QmpError::TimedOut { command, waited_ms }.into())
        }
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_takes_less_than_the_devices_need() {
        let cases = [
            (0, 4096),
            (4097, 4096),
            (40 << 10, 32 << 10),
            ((72 << 10) - 1, 32 << 10),
            (72 << 10, 64 << 10),
            (1 << 20, 64 << 10),
        ];
        for (least, expected) in cases {
            assert_eq!(held_bytes(least), expected, "{least}");
            let (_reader, _writer, bytes) = pipe(held_bytes(least)).unwrap();
            assert_eq!(bytes, expected);
        }
    }
}
