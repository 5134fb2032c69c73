//! One injected system call, stop by stop.
//!
//! ```text
//!   seize, interrupt ....... stop "interrupted"    its registers go below its stack, the stub behind some code
//!   registers := call ...... from here on the thread returns by itself
//!   resume ................. stop "system call"    entry: the kernel has taken the arguments
//!   resume ................. stop "system call"    exit: rax is the result; ready for the next call
//!   detach ................. the stub leads the thread back ([`super::stub`])
//! ```
//!
//! Whenever Firn is killed, the kernel releases the thread where it is. Before its registers are
//! set, in one request, it has noticed nothing; after that it makes the call if it has not yet, and
//! returns to its work. (Under a seccomp filter that kills for such a call, a Firn that dies
//! between the two takes the process with it: the filter is suspended only while Firn lives.)
//!
//! A thread that slept in a system call is stopped *after* that call has returned a code such as
//! `-ERESTARTSYS`, which the kernel turns into a restart when the thread leaves the stop. So
//! `orig_rax` is -1 while the injected call runs (nothing to restart), and the return path leads to
//! the restart. A signal that arrives meanwhile is handled at once, below the data that the stub
//! needs; stops at system calls of its handler are distinguished from Firn's by their instruction
//! and stack pointers.

use std::time::{Duration, Instant};

use firn_types::{HostVirt, PAGE_SIZE, ThreadId};
use nix::errno::Errno;

use super::filter::SeccompFilter;
use super::stub::{self, DISTANCE, StubLocation, resumption_registers};
use super::{InjectedCall, TraceError};
use crate::process::ProcessError;
use crate::process::maps::MemoryMapping;
use crate::process_memory;
use crate::sys::ptrace::{self, Registers, StopReason};

/// The time that a thread may take to stop before another is tried.
const STOP_TIMEOUT: Duration = Duration::from_millis(300);
/// The number of times that a thread is resumed for a moment because it was stopped at a bad one.
const RESUMES_MAX: u32 = 10;
/// The `syscall` instruction.
pub(super) const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// The code segment of 64-bit user programs.
const USER_CODE_64: u64 = 0x33;
/// `orig_rax` of a thread that is in no system call.
pub(super) const NO_CALL: u64 = u64::MAX;
/// Results from here to -1 are negated error numbers.
const ERRNO_LAST: i64 = -4095;

/// A thread to stop.
#[derive(Debug)]
pub(super) struct TargetThread {
    pub(super) pid: i32,
    pub(super) tid: ThreadId,
    /// Its seccomp filter.
    pub(super) filter: SeccompFilter,
}

/// A thread that is stopped and ready for calls.
#[derive(Debug)]
pub(super) struct StoppedThread<'t> {
    target: &'t TargetThread,
    /// Its registers when it was stopped.
    saved: Registers,
    /// The registers with which it continues by itself.
    own: Registers,
    /// The address of the stub.
    stub: u64,
}

/// Why a call could not be run.
#[derive(Debug)]
pub(super) enum CallFailure {
    Gone,
    Ptrace(&'static str, Errno),
}

impl CallFailure {
    pub(super) fn during(what: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| if errno == Errno::ESRCH { Self::Gone } else { Self::Ptrace(what, errno) }
    }
}

impl<'t> StoppedThread<'t> {
    /// Stops the thread. `None` if it does not stop in time or has ended: the caller's thread must
    /// end then, which undoes the seizure.
    pub(super) fn new(target: &'t TargetThread) -> Result<Option<Self>, TraceError> {
        if !target.seize()? {
            return Ok(None);
        }
        let code = target.last_pages_of_code();
        let stopped = target.stop_at_a_good_moment();
        let Some(saved) = stopped.map_err(|errno| target.ptrace_error("interrupt", errno))? else {
            return Ok(None);
        };
        if saved.cs != USER_CODE_64 {
            return Err(TraceError::NotX86_64 { pid: target.pid });
        }
        let own = resumption_registers(&saved);
        if target.write_return_data(&own).is_err() {
            return Ok(None);
        }
        let stub = target.ensure_stub(&code)?;
        Ok(Some(Self { target, saved, own, stub }))
    }

    /// Runs one system call.
    pub(super) fn run_call(&mut self, call: &InjectedCall) -> Result<u64, TraceError> {
        let value = self.run_until_done(call).map_err(|failure| match failure {
            CallFailure::Gone => ProcessError::Gone { pid: self.target.pid }.into(),
            CallFailure::Ptrace(what, errno) => self.target.ptrace_error(what, errno),
        })?;
        decode_result(value).map_err(|source| {
            let (pid, number) = (self.target.pid, call.number);
            TraceError::Call { pid, number, source }
        })
    }

    /// Runs one system call. Returns rax.
    fn run_until_done(&mut self, call: &InjectedCall) -> Result<u64, CallFailure> {
        loop {
            let calling =
                stub::registers_for_call(&self.own, self.stub, call.number, call.arguments);
            let set = ptrace::set_registers(self.target.tid, &calling);
            set.map_err(CallFailure::during("set registers"))?;
            firn_fault::pass_point("inject.registers-set");
            self.resume_to_call(&calling)?;
            let value = self.resume_to_call(&calling)?.rax;
            firn_fault::pass_point("inject.called");
            if !stub::is_to_be_repeated(value) {
                return Ok(value);
            }
        }
    }

    /// Resumes until the entry to, or the exit from, the call of `calling`. Returns the registers.
    fn resume_to_call(&mut self, calling: &Registers) -> Result<Registers, CallFailure> {
        let (tid, mut signal) = (self.target.tid, 0);
        loop {
            ptrace::resume_to_system_call(tid, signal).map_err(CallFailure::during("resume"))?;
            signal = match ptrace::wait_for_stop(tid).map_err(CallFailure::during("wait"))? {
                StopReason::Gone => return Err(CallFailure::Gone),
                StopReason::Signal(signal) => {
                    self.interrupt_own_call()?;
                    signal
                }
                StopReason::Interrupted => 0,
                StopReason::SystemCall => {
                    let stopped =
                        ptrace::get_registers(tid).map_err(CallFailure::during("get registers"))?;
                    if stub::is_at_call(calling, &stopped) {
                        return Ok(stopped);
                    }
                    0
                }
            };
        }
    }

    /// Ends the thread's own call after a signal, if the signal would have ended it without Firn.
    fn interrupt_own_call(&mut self) -> Result<(), CallFailure> {
        self.own = stub::resumption_after_signal(&self.saved);
        self.target
            .write_return_data(&self.own)
            .map_err(|_| CallFailure::Ptrace("write", Errno::EFAULT))
    }

    /// Lets the thread continue where it was.
    pub(super) fn release(self) {
        // If the thread is gone there is nothing to release.
        let _ = ptrace::detach(self.target.tid);
    }
}

/// The value of a system call, from rax.
pub(super) fn decode_result(rax: u64) -> Result<u64, Errno> {
    match rax as i64 {
        error @ ERRNO_LAST..=-1 => Err(Errno::from_raw(-error as i32)),
        _ => Ok(rax),
    }
}

impl TargetThread {
    /// Seizes the thread, its filter suspended where that is necessary. `false` if it has ended.
    fn seize(&self) -> Result<bool, TraceError> {
        let is_suspended =
            self.filter != SeccompFilter::None && ptrace::seize(self.tid, true).is_ok();
        if is_suspended {
            return Ok(true);
        }
        match ptrace::seize(self.tid, false) {
            // The end of this tracer thread releases the thread, and nothing was injected.
            Ok(()) if self.filter == SeccompFilter::Unknown => {
                Err(TraceError::Filtered { pid: self.pid })
            }
            Ok(()) => Ok(true),
            Err(Errno::ESRCH) => Ok(false),
            Err(source @ (Errno::EPERM | Errno::EACCES)) => {
                Err(TraceError::Forbidden { pid: self.pid, source })
            }
            Err(errno) => Err(self.ptrace_error("seize", errno)),
        }
    }

    fn ptrace_error(&self, what: &'static str, source: Errno) -> TraceError {
        match source {
            Errno::ESRCH => ProcessError::Gone { pid: self.pid }.into(),
            _ => TraceError::Ptrace { pid: self.pid, tid: self.tid, what, source },
        }
    }

    /// Stops the thread where its instruction pointer may be moved, and returns its registers.
    /// `None` if it ends, or if it reaches no such point in time.
    pub(super) fn stop_at_a_good_moment(&self) -> Result<Option<Registers>, Errno> {
        for _ in 0..RESUMES_MAX {
            ptrace::interrupt(self.tid)?;
            if !self.await_interruption()? {
                return Ok(None);
            }
            let registers = ptrace::get_registers(self.tid)?;
            if !self.is_in_restartable_sequence(&registers) {
                return Ok(Some(registers));
            }
            ptrace::resume(self.tid, 0)?;
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(None)
    }

    /// Waits for the stop after an interruption. Signals that come before it are delivered. `false`
    /// if the thread does not stop in time or ends.
    fn await_interruption(&self) -> Result<bool, Errno> {
        let start = Instant::now();
        let mut pause = Duration::from_micros(10);
        while start.elapsed() < STOP_TIMEOUT {
            match ptrace::poll_stop(self.tid)? {
                Some(StopReason::Interrupted) => return Ok(true),
                Some(StopReason::Gone) => return Ok(false),
                Some(StopReason::Signal(signal)) => ptrace::resume(self.tid, signal)?,
                Some(StopReason::SystemCall) => ptrace::resume(self.tid, 0)?,
                None => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(2));
                }
            }
        }
        Ok(false)
    }

    /// Whether the thread was stopped inside a restartable sequence (rseq(2)). Moving it away would
    /// end the sequence without its knowledge. The thread has registered a `struct rseq`
    /// (`linux/rseq.h`), whose second word points to the sequence: version and flags, start,
    /// length, and the address to continue at if it fails.
    fn is_in_restartable_sequence(&self, registers: &Registers) -> bool {
        let inside = || -> Option<bool> {
            let registered = ptrace::restartable_sequences(self.tid)?;
            let [sequence] = self.read_words(registered + 8)?;
            let [_, start, length] = self.read_words(sequence)?;
            Some(registers.rip.wrapping_sub(start) < length)
        };
        inside().unwrap_or(false)
    }

    /// Writes the data of the stub, which leads back to these registers, below the stack.
    fn write_return_data(&self, own: &Registers) -> Result<(), ProcessError> {
        let below = HostVirt(own.rsp.saturating_sub(DISTANCE));
        process_memory::write_traced(self.pid, below, &stub::return_data(own))
    }

    /// The address of the stub, which is written if it is not there yet.
    fn ensure_stub(&self, code: &[HostVirt]) -> Result<u64, TraceError> {
        for last in code {
            let Ok(bytes) = self.read_bytes(last.0, PAGE_SIZE) else { continue };
            match stub::find_location(&bytes) {
                Some(StubLocation::There(offset)) => return Ok(last.0 + offset as u64),
                Some(StubLocation::Free(offset))
                    if self.write_stub(last.0 + offset as u64).is_ok() =>
                {
                    return Ok(last.0 + offset as u64);
                }
                _ => {}
            }
        }
        Err(TraceError::NoRoom { pid: self.pid })
    }

    fn write_stub(&self, at: u64) -> Result<(), Errno> {
        ptrace::write_code(self.tid, at, &stub::stub_code())
    }

    /// The last page of each mapping of code, the vDSO first: its end is the same in every process
    /// of a host. Excludes the code that the process itself generates: the zeros there will become
    /// code. The process is traced, so its number cannot be reused.
    fn last_pages_of_code(&self) -> Vec<HostVirt> {
        let text = std::fs::read(format!("/proc/{}/maps", self.pid)).unwrap_or_default();
        let mut code = crate::process::maps::parse_maps(&String::from_utf8_lossy(&text));
        let is_library =
            |it: &MemoryMapping| it.path.starts_with('/') && !it.path.starts_with("/memfd:");
        code.retain(|it| {
            it.executable && !it.writable && !it.shared && (it.path == "[vdso]" || is_library(it))
        });
        code.sort_by_key(|it| it.path != "[vdso]");
        code.iter().map(|it| HostVirt(it.end - PAGE_SIZE as u64)).collect()
    }

    pub(super) fn read_bytes(&self, start: u64, len: usize) -> Result<Vec<u8>, ProcessError> {
        let mut bytes = vec![0; len];
        crate::process_memory::read_traced(self.pid, HostVirt(start), &mut bytes)?;
        Ok(bytes)
    }

    /// Reads some words at an address; `None` for a null or an unmapped one.
    pub(super) fn read_words<const N: usize>(&self, start: u64) -> Option<[u64; N]> {
        let bytes = self.read_bytes(start, N * 8).ok().filter(|_| start != 0)?;
        let word =
            |index: usize| Some(u64::from_le_bytes(bytes[index * 8..][..8].try_into().ok()?));
        let words: Option<Vec<u64>> = (0..N).map(word).collect();
        words?.try_into().ok()
    }
}

/// Whether the thread was stopped in a system call.
pub(super) fn is_in_call(registers: &Registers) -> bool {
    registers.orig_rax != NO_CALL
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_values_or_error_numbers() {
        assert_eq!(decode_result(7), Ok(7));
        assert_eq!(decode_result(0x7fff_ffff_f000), Ok(0x7fff_ffff_f000));
        assert_eq!(decode_result(-9i64 as u64), Err(Errno::EBADF));
        assert_eq!(decode_result(-4096i64 as u64), Ok(-4096i64 as u64));
    }
}
