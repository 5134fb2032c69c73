//! Private memory of another process, copied by `process_vm_readv(2)` and `process_vm_writev(2)`.
//! For the auxiliary blocks beside guest RAM (ROMs, ACPI tables, video memory), which have no file
//! that Firn could open.

use std::io::{IoSlice, IoSliceMut};

use firn_types::HostVirt;
use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;

use crate::process::{Process, ProcessError};

/// Fills `out` with the bytes at `from`.
///
/// # Errors
/// If any byte of the range is not mapped or not readable (EFAULT), if the process is gone, or if
/// it may not be traced. Then `out` holds what was copied before the first unmapped byte.
pub fn read_memory(process: &Process, from: HostVirt, out: &mut [u8]) -> Result<(), ProcessError> {
    transfer_in_steps(process, "reading memory", from, out.len(), |remote, done| {
        let mut local = [IoSliceMut::new(&mut out[done..])];
        process_vm_readv(pid_of(process), &mut local, &remote)
    })
}

/// Writes `bytes` to the address `to`. Pages that are write-protected in the process's own page
/// tables are not written.
///
/// # Errors
/// As [`read_memory`].
pub fn write_memory(process: &Process, to: HostVirt, bytes: &[u8]) -> Result<(), ProcessError> {
    transfer_in_steps(process, "writing memory", to, bytes.len(), |remote, done| {
        process_vm_writev(pid_of(process), &[IoSlice::new(&bytes[done..])], &remote)
    })
}

/// Fills `out` from the memory of a traced process. Its number cannot be reused while it is traced.
pub(crate) fn read_traced(pid: i32, from: HostVirt, out: &mut [u8]) -> Result<(), ProcessError> {
    let remote = [RemoteIoVec { base: from.0 as usize, len: out.len() }];
    let len = out.len();
    let what = "reading memory";
    match process_vm_readv(Pid::from_raw(pid), &mut [IoSliceMut::new(out)], &remote) {
        Ok(bytes) if bytes == len => Ok(()),
        Ok(_) => Err(ProcessError::new(pid, what, Errno::EFAULT)),
        Err(errno) => Err(ProcessError::new(pid, what, errno)),
    }
}

/// Writes to the memory of a traced process, as [`read_traced`].
pub(crate) fn write_traced(pid: i32, to: HostVirt, bytes: &[u8]) -> Result<(), ProcessError> {
    let remote = [RemoteIoVec { base: to.0 as usize, len: bytes.len() }];
    let what = "writing memory";
    match process_vm_writev(Pid::from_raw(pid), &[IoSlice::new(bytes)], &remote) {
        Ok(written) if written == bytes.len() => Ok(()),
        Ok(_) => Err(ProcessError::new(pid, what, Errno::EFAULT)),
        Err(errno) => Err(ProcessError::new(pid, what, errno)),
    }
}

fn pid_of(process: &Process) -> Pid {
    Pid::from_raw(process.pid())
}

fn transfer_in_steps(
    process: &Process,
    what: &'static str,
    at: HostVirt,
    len: usize,
    mut step: impl FnMut([RemoteIoVec; 1], usize) -> nix::Result<usize>,
) -> Result<(), ProcessError> {
    let mut done = 0;
    while done < len {
        // The process is alive before each step: the number cannot have come to mean another
        // process since it was opened, but for the instant of the call itself.
        if !process.is_alive() {
            return Err(ProcessError::Gone { pid: process.pid() });
        }
        let base = at.offset_by(done as u64).0 as usize;
        match step([RemoteIoVec { base, len: len - done }], done) {
            Ok(0) => return Err(process.operation_error(what, Errno::EFAULT)),
            Ok(bytes) => done += bytes,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(process.operation_error(what, errno)),
        }
    }
    Ok(())
}
