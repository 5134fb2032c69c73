//! A pause that the hypervisor begins and ends by itself, and that lasts as long as Firn keeps a
//! pipe full.
//!
//! QEMU reads commands byte by byte, at a few microseconds each. With `stop`,
//! `xen-save-devices-state` and `cont`, QEMU would read the latter two while the VM is paused,
//! which takes longer than executing them. But `xen-save-devices-state` itself stops a VM that
//! runs, and starts it again when its devices are saved. Firn does its own work of the pause while
//! QEMU waits for a pipe:
//!
//! ```text
//!   Firn                               QEMU
//!   the command, a pipe of one page --> reads it                                          the guest runs
//!                                       stops the vCPUs, drains and flushes the disks     it is paused
//!                                       opens the pipe
//!   is notified: PausedVm               saves devices; a page of that fits: waits
//!   ... captures memory
//!   enlarges the pipe ----------------> writes the rest, starts the vCPUs                 the guest runs
//!   reads the rest, and the reply
//! ```
//!
//! QEMU keeps its end from one pause to the next: handing it over takes three commands, and reading
//! those takes QEMU longer than the page faults of an epoch do.
//!
//! With a larger pipe, QEMU continues to save devices while Firn captures memory, and waits later,
//! or not at all: if nothing were left to write, QEMU would start the VM. So Firn uses a larger
//! pipe only where it knows how many bytes the VM's devices take ([`pipe_capacity`]).
//!
//! Where inotify is not available, Firn waits for the first bytes instead: QEMU writes 32 KiB at
//! once, which it has to save first. If another process opens the pipe meanwhile, Firn might
//! mistake it for QEMU while the VM still runs. So a pause in which the pipe was opened twice has
//! failed.
//!
//! If Firn dies, the pipe loses its reader: saving fails, and QEMU starts the VM. (QEMU leaks its
//! descriptor then. Dropping a [`PausedVm`] ends the pause as resuming it does.)
//!
//! Source: QEMU `qmp_xen_save_devices_state` (migration/savevm.c), `monitor_can_read`
//! (monitor/monitor.c); pipe(7), "Pipe capacity"; fcntl(2), `F_SETPIPE_SZ`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size};
use serde_json::{Value, json};

use crate::device_state::{
    DeviceStateError, NAME, STATE_BYTES_MAX, io_error, remove_fdset, remove_left_fdsets,
};
use crate::open_watch::OpenWatch;
use crate::qmp::{QmpClient, QmpError, SentCommand};
use crate::vm::RunState;
use crate::wait::{wait_either_readable, wait_readable};

/// Pipe capacity at which QEMU waits early: a page, the minimum. No VM's devices fit into that.
const HELD_BYTES: usize = 4096;
/// Capacities for a VM whose devices are known to need that and [`SPARE_BYTES`] more: QEMU writes
/// 32 KiB at once.
const LATE_BYTES: [usize; 2] = [64 << 10, 32 << 10];
/// More bytes than one device is likely to take.
const SPARE_BYTES: usize = 8 << 10;
/// Time for which Firn polls for the opening without sleeping. Once the vCPUs are stopped their
/// processors are free, and waking up takes as long as QEMU takes until the opening.
const SPIN_TIME: Duration = Duration::from_micros(1500);
/// Time after that for which Firn waits for the pipe alone: QEMU sends its STOP event faster if
/// that wakes no process.
const PIPE_WAIT: Duration = Duration::from_millis(5);
/// Polling interval for a QEMU that has closed the pipe and not replied yet.
const CLOSED_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Capacities that end QEMU's wait, tried in this order: the maximum that any user may request by
/// default, or less.
const FREE_BYTES: [usize; 3] = [1 << 20, 1 << 18, 1 << 16];
/// Bytes per read.
const READ_BYTES: usize = 256 << 10;

/// How Firn waits until QEMU has stopped the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMode {
    /// Polls without sleeping, for 1.5 ms at most: waking up may take longer than QEMU takes to
    /// stop the VM.
    Spin,
    /// Sleeps. For a thread with real-time priority, which runs at once when it wakes up, and whose
    /// polling would keep QEMU from running.
    Sleep,
}

/// A pipe to which QEMU saves device state, and which blocks QEMU until Firn enlarges it.
#[derive(Debug)]
pub(crate) struct PausePipe {
    reader: OwnedFd,
    openings: Option<OpenWatch>,
    /// The number of QEMU's descriptor.
    fd: u64,
    /// The number of QEMU's descriptor set that contains it.
    fdset: u64,
    /// Bytes that the pipe takes before QEMU waits.
    capacity: usize,
}

impl PausePipe {
    /// Makes the pipe, for a VM whose devices take at least `least` bytes, and hands QEMU its end.
    pub(crate) fn hand_over(qmp: &mut QmpClient, least: usize) -> Result<Self, DeviceStateError> {
        remove_left_fdsets(qmp)?;
        let made = make_pipe(pipe_capacity(least)).map_err(io_error("make a pipe for"))?;
        let (reader, writer, held_bytes) = made;
        let answer = qmp.execute_with_fd("add-fd", json!({ "opaque": NAME }), writer.as_fd())?;
        let number = |key: &str| answer.get(key).and_then(Value::as_u64);
        let (Some(fd), Some(fdset)) = (number("fd"), number("fdset-id")) else {
            return Err(QmpError::unexpected("add-fd", "no descriptor").into());
        };
        let openings = OpenWatch::watch_pipe(&reader);
        Ok(Self { reader, openings, fd, fdset, capacity: held_bytes })
    }

    /// Sets an empty pipe up for the next pause of a VM whose devices take at least `least` bytes.
    /// `false` if that fails.
    pub(crate) fn try_reset(&mut self, least: usize) -> bool {
        match fcntl_setpipe_size(&self.reader, pipe_capacity(least)) {
            Ok(bytes) => {
                self.capacity = bytes;
                true
            }
            Err(_) => false,
        }
    }

    /// Removes QEMU's descriptor.
    pub(crate) fn remove_from_qemu(self, qmp: &mut QmpClient) -> Result<(), QmpError> {
        remove_fdset(qmp, self.fdset)
    }

    /// Sends the command, with the path of the descriptor. QEMU would truncate a file that is named
    /// by its descriptor set, which no pipe allows.
    fn send_save(&self, qmp: &mut QmpClient) -> Result<SentCommand, DeviceStateError> {
        // Discards earlier openings: only those from now on matter.
        self.is_opened()?;
        let filename = format!("/proc/self/fd/{}", self.fd);
        let arguments = json!({ "filename": filename, "live": false });
        Ok(qmp.send("xen-save-devices-state", arguments)?)
    }

    /// Whether a process has opened the pipe since the last call; `None` where that is unknown.
    fn is_opened(&self) -> Result<Option<bool>, DeviceStateError> {
        let opened = self.openings.as_ref().map(OpenWatch::was_opened).transpose();
        opened.map_err(io_error("look for"))
    }

    /// The descriptor that becomes readable when QEMU has opened the pipe, or written to it.
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.openings.as_ref().map_or(self.reader.as_fd(), OpenWatch::as_fd)
    }

    /// Whether QEMU has stopped the VM and saves its devices.
    fn has_stopped_vm(&self) -> Result<bool, DeviceStateError> {
        match self.is_opened()? {
            Some(is_opened) => Ok(is_opened),
            None => self.is_written_to(),
        }
    }

    fn is_written_to(&self) -> Result<bool, DeviceStateError> {
        let bytes = rustix::io::ioctl_fionread(&self.reader).map_err(io_error("look for"))?;
        Ok(bytes > 0)
    }

    /// The same, after waiting for a short time.
    fn wait_for_stop(&self, wait_mode: WaitMode) -> Result<bool, DeviceStateError> {
        let since = Instant::now();
        while wait_mode == WaitMode::Spin && since.elapsed() < SPIN_TIME {
            if self.has_stopped_vm()? {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        wait_readable(self.wake_fd(), Instant::now() + PIPE_WAIT).map_err(io_error("wait for"))?;
        // On a kernel that reports no openings, the first bytes count as well.
        Ok(self.has_stopped_vm()? || self.is_written_to()?)
    }

    /// Unblocks QEMU by enlarging the pipe. For a user whose limit on pipe memory is used up, QEMU
    /// writes page by page, which is only slower.
    ///
    /// Sets the size twice: kernels before 6.1.76, 6.6.15 and 6.7.3 wake the writer before the pipe
    /// is larger (CVE-2023-52672).
    fn unblock_writer(&self) {
        let is_larger = |bytes: &usize| fcntl_setpipe_size(&self.reader, *bytes).is_ok();
        if let Some(bytes) = FREE_BYTES.iter().find(|bytes| is_larger(bytes)) {
            is_larger(bytes);
        }
    }

    /// Reads all bytes that are in the pipe.
    fn read_available(&self, state: &mut Vec<u8>) -> Result<(), DeviceStateError> {
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

/// Makes a pipe of at least `bytes` bytes. Its reader does not block. A QEMU that runs as another
/// user can open its writer.
fn make_pipe(bytes: usize) -> io::Result<(OwnedFd, OwnedFd, usize)> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK)?;
    rustix::fs::fchmod(&writer, Mode::from_raw_mode(0o622))?;
    let bytes = fcntl_setpipe_size(&reader, bytes)?;
    Ok((reader, writer, bytes))
}

/// The capacity of the pipe for a VM whose devices take at least `least` bytes.
fn pipe_capacity(least: usize) -> usize {
    LATE_BYTES.into_iter().find(|bytes| bytes + SPARE_BYTES <= least).unwrap_or(HELD_BYTES)
}

/// A VM that is paused, its disks drained, until this is resumed or dropped.
#[derive(Debug)]
#[must_use = "the VM resumes when this is dropped, and nothing is saved"]
pub struct PausedVm<'a> {
    qmp: &'a mut QmpClient,
    /// Where the pipe is kept for the next pause when QEMU has closed its end.
    home: &'a mut Option<PausePipe>,
    /// `None` once the VM was resumed.
    under_way: Option<(PausePipe, SentCommand)>,
    since: Duration,
}

/// The result of a pause: the saved device state, and the times.
#[derive(Clone, Debug)]
pub struct PauseOutcome {
    /// The state of every device and vCPU, without RAM.
    pub device_state: Vec<u8>,
    /// The time from when the vCPUs had stopped until saving began; without inotify, until the
    /// first part was saved. `None` if the vCPUs had been stopped before.
    pub took: Option<Duration>,
    /// The length of the pause by QEMU's own clock: from when its vCPUs had stopped until just
    /// before they started.
    pub paused_for: Option<Duration>,
    /// When the VM resumed, since 1970: nothing of it ran between the stop and this time.
    pub resumed_at: Duration,
}

impl<'a> PausedVm<'a> {
    /// Stops a VM that runs. Calls `asked` when the command has been sent, then waits for QEMU in
    /// `look` mode. `None` if this QEMU can't open the pipe; then the VM runs, and was paused for a
    /// moment.
    pub(crate) fn pause_vm(
        qmp: &'a mut QmpClient,
        home: &'a mut Option<PausePipe>,
        asked: &mut dyn FnMut(),
        wait_mode: WaitMode,
    ) -> Result<Option<Self>, DeviceStateError> {
        let Some(holder) = home.take() else { return Ok(None) };
        drop(qmp.take_events());
        let deadline = Instant::now() + qmp.timeout();
        let save = holder.send_save(qmp)?;
        asked();
        while !holder.wait_for_stop(wait_mode)? {
            match qmp.try_reply(&save) {
                Ok(None) => {}
                Ok(Some(_)) => return Err(DeviceStateError::Size { bytes: 0 }),
                Err(QmpError::Refused { desc, .. }) => {
                    tracing::debug!("the hypervisor does not write to a pipe: {desc}");
                    holder.remove_from_qemu(qmp)?;
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            }
            wait_for_output(qmp, &holder, deadline)?;
        }
        Ok(Some(Self { qmp, home, under_way: Some((holder, save)), since: unix_time() }))
    }

    /// Resumes the VM, and returns its device state.
    pub fn resume_vm(mut self) -> Result<PauseOutcome, DeviceStateError> {
        let device_state = self.finish_save()?;
        let stopped = self.qmp.last_event_time("STOP");
        let is_later = |at: &Duration| stopped.is_none_or(|stopped| *at >= stopped);
        let resumed = self.qmp.last_event_time("RESUME").filter(is_later);
        let at = resumed.unwrap_or_else(unix_time);
        if resumed.is_none() {
            self.start_if_left_stopped()?;
        }
        Ok(PauseOutcome {
            device_state,
            took: stopped.and_then(|stopped| self.since.checked_sub(stopped)),
            paused_for: stopped.and_then(|stopped| resumed?.checked_sub(stopped)),
            resumed_at: at,
        })
    }

    /// Starts a VM that QEMU leaves stopped. If the guest had suspended itself just before, saving
    /// stops it, and does not start it again. If a user had stopped it, its status is another, and
    /// it stays stopped.
    fn start_if_left_stopped(&mut self) -> Result<(), QmpError> {
        let state: RunState = self.qmp.query("query-status")?;
        match &*state.status {
            "save-vm" => self.qmp.execute("cont", Value::Null).map(drop),
            _ => Ok(()),
        }
    }

    /// Lets QEMU write until it replies that it has saved the devices.
    fn finish_save(&mut self) -> Result<Vec<u8>, DeviceStateError> {
        let mut device_state = Vec::new();
        let Some((mut holder, save)) = self.under_way.take() else { return Ok(device_state) };
        let (deadline, held_bytes) = (Instant::now() + self.qmp.timeout(), holder.capacity);
        holder.unblock_writer();
        match self.drain_pipe(&holder, &save, &mut device_state, deadline) {
            Err(error @ DeviceStateError::Qmp(QmpError::Refused { .. })) => {
                holder.remove_from_qemu(self.qmp)?;
                return Err(error);
            }
            drained => drained?,
        }
        let is_opened_twice = holder.is_opened()? == Some(true);
        match holder.try_reset(0) {
            true => *self.home = Some(holder),
            false => holder.remove_from_qemu(self.qmp)?,
        }
        if is_opened_twice {
            return Err(DeviceStateError::OpenedTwice);
        }
        // With at least one byte more, QEMU has waited for all work that was done before it was
        // unblocked.
        match device_state.len() > held_bytes {
            true => Ok(device_state),
            false => Err(DeviceStateError::NotHeld { bytes: device_state.len() }),
        }
    }

    /// Reads until QEMU replies that it has saved everything.
    fn drain_pipe(
        &mut self,
        holder: &PausePipe,
        save: &SentCommand,
        state: &mut Vec<u8>,
        deadline: Instant,
    ) -> Result<(), DeviceStateError> {
        holder.read_available(state)?;
        while self.qmp.try_reply(save)?.is_none() {
            wait_for_output(self.qmp, holder, deadline)?;
            holder.read_available(state)?;
        }
        holder.read_available(state)
    }
}

impl Drop for PausedVm<'_> {
    fn drop(&mut self) {
        // If this fails, the pipe is closed, and QEMU resumes the VM for that reason.
        if let Err(error) = self.finish_save() {
            tracing::debug!("a paused VM was not resumed: {error}");
        }
    }
}

fn wait_for_output(
    qmp: &QmpClient,
    holder: &PausePipe,
    deadline: Instant,
) -> Result<(), DeviceStateError> {
    wait_either_readable(&holder.reader, qmp.socket(), deadline).map_err(io_error("wait for"))?;
    if !holder.is_written_to()? {
        // A closed pipe is always readable. A QEMU that dies closes the monitor as well, and may
        // need this processor for that.
        let soon = deadline.min(Instant::now() + CLOSED_POLL_INTERVAL);
        wait_readable(qmp.socket(), soon).map_err(io_error("wait for"))?;
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

fn unix_time() -> Duration {
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
            assert_eq!(pipe_capacity(least), expected, "{least}");
            let (_reader, _writer, bytes) = make_pipe(pipe_capacity(least)).unwrap();
            assert_eq!(bytes, expected);
        }
    }
}
