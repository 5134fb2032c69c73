//! One injected system call, stop by stop.
//!
//! ```text
//!   seize, interrupt ....... stop "interrupted"
//!   block all signals, registers := call
//!   resume ................. stop "system call"    entry: the kernel has taken the arguments
//!   resume ................. stop "system call"    exit: rax is the result
//!   interrupt, resume ...... stop "interrupted"
//!   registers := saved, signal mask := saved ...... ready for the next call
//!   detach
//! ```
//!
//! A thread that slept in a system call is stopped *after* that call has returned a code such as `-ERESTARTSYS`, which
//! the kernel turns into a restart when the thread leaves the stop. So `orig_rax` is -1 while our own call runs (nothing
//! to restart), and the registers are put back in a stop of the same kind as the first, from which the kernel
//! restarts the thread's own call as if nothing had been. Signals are blocked meanwhile, so that no handler runs on
//! borrowed registers.
//!
//! If Firn is killed between the two lines with `:=`, the thread runs on with our registers, and the hypervisor is lost.
//! For the short calls that is some 50 microseconds; a long call takes the way of [`super::stub`], which has no such
//! moment while it lasts.

use std::ops::Range;
use std::time::{Duration, Instant};

use firn_types::{HostVirt, Tid};
use nix::errno::Errno;

use super::stub::Stub;
use super::{Call, TraceError};
use crate::process::ProcessError;
use crate::sys::ptrace::{self, Registers, Stop};

/// How long a thread may take to stop before another is tried.
const STOP_TIMEOUT: Duration = Duration::from_millis(300);
/// How often a thread that is found at a bad moment is let run on for a moment.
const MOMENTS: u32 = 10;
/// The `syscall` instruction.
pub(super) const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// The code segment of 64-bit user programs.
const USER_CODE_64: u64 = 0x33;
/// `orig_rax` of a thread that is in no system call.
pub(super) const NO_CALL: u64 = u64::MAX;
const ALL_SIGNALS: u64 = u64::MAX;
/// Results from here to -1 are negated error numbers.
const ERRNO_LAST: i64 = -4095;

/// A thread to stop.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) pid: i32,
    pub(super) tid: Tid,
    /// Whether a seccomp filter says which calls it may make.
    pub(super) sandboxed: bool,
}

/// A thread that is stopped and ready for calls.
#[derive(Debug)]
pub(super) struct Stopped<'t> {
    pub(super) target: &'t Target,
    /// The thread's own registers.
    pub(super) saved: Registers,
    instruction: u64,
    /// A stop signal that came meanwhile and is still to be delivered; 0 if none.
    signal: i32,
    /// The code for long calls, once there has been one.
    pub(super) stub: Option<Stub>,
}

/// Why a call could not be run.
#[derive(Debug)]
pub(super) enum Failure {
    Gone,
    Ptrace(&'static str, Errno),
}

impl Failure {
    pub(super) fn at(what: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| if errno == Errno::ESRCH { Self::Gone } else { Self::Ptrace(what, errno) }
    }
}

impl<'t> Stopped<'t> {
    /// Stops the thread. `None` if it does not stop in time or has ended: the caller's thread must end then, which
    /// undoes the seizure.
    pub(super) fn new(target: &'t Target) -> Result<Option<Self>, TraceError> {
        match ptrace::seize(target.tid, target.sandboxed) {
            Err(Errno::ESRCH) => return Ok(None),
            Err(source @ (Errno::EPERM | Errno::EACCES)) => {
                return Err(TraceError::Forbidden { pid: target.pid, source });
            }
            other => other.map_err(|errno| target.error("seize", errno))?,
        }
        let stopped = target.stop_at_a_good_moment();
        let Some(saved) = stopped.map_err(|errno| target.error("interrupt", errno))? else {
            return Ok(None);
        };
        if saved.cs != USER_CODE_64 {
            return Err(TraceError::NotX86_64 { pid: target.pid });
        }
        let instruction = target.instruction(&saved)?;
        Ok(Some(Self { target, saved, instruction, signal: 0, stub: None }))
    }

    /// Runs one system call.
    pub(super) fn call(&mut self, call: &Call) -> Result<u64, TraceError> {
        let value = match call.long {
            false => self.run(call.number, call.arguments),
            true => self.run_long(call.number, call.arguments),
        };
        let value = value.map_err(|failure| match failure {
            Failure::Gone => ProcessError::Gone { pid: self.target.pid }.into(),
            Failure::Ptrace(what, errno) => self.target.error(what, errno),
        })?;
        result(value).map_err(|source| {
            let (pid, number) = (self.target.pid, call.number);
            TraceError::Call { pid, number, source }
        })
    }

    /// Runs one system call, and puts registers and signal mask back. Gives rax.
    pub(super) fn run(&mut self, number: i64, arguments: [u64; 6]) -> Result<u64, Failure> {
        let tid = self.target.tid;
        let mask = ptrace::signal_mask(tid).map_err(Failure::at("get signal mask"))?;
        ptrace::set_signal_mask(tid, ALL_SIGNALS).map_err(Failure::at("set signal mask"))?;
        let registers = self.registers_for(self.instruction, number, arguments);
        ptrace::set_registers(tid, &registers).map_err(Failure::at("set registers"))?;
        self.resume_to(Stop::SystemCall, ptrace::resume_to_system_call)?;
        self.resume_to(Stop::SystemCall, ptrace::resume_to_system_call)?;
        let value = ptrace::registers(tid).map_err(Failure::at("get registers"))?.rax;
        ptrace::interrupt(tid).map_err(Failure::at("interrupt"))?;
        self.resume_to(Stop::Interrupted, |tid| ptrace::resume(tid, 0))?;
        ptrace::set_registers(tid, &self.saved).map_err(Failure::at("restore registers"))?;
        ptrace::set_signal_mask(tid, mask).map_err(Failure::at("restore signal mask"))?;
        Ok(value)
    }

    /// The thread's registers, changed to make a call with the `syscall` instruction at `rip`.
    pub(super) fn registers_for(&self, rip: u64, number: i64, arguments: [u64; 6]) -> Registers {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let (rax, orig_rax) = (number as u64, NO_CALL);
        Registers { rax, orig_rax, rip, rdi, rsi, rdx, r10, r8, r9, ..self.saved }
    }

    /// Resumes until the stop that is wanted. With all signals blocked, only SIGSTOP can come in between: it is kept for
    /// later.
    fn resume_to(
        &mut self,
        wanted: Stop,
        resume: impl Fn(Tid) -> Result<(), Errno>,
    ) -> Result<(), Failure> {
        let tid = self.target.tid;
        loop {
            resume(tid).map_err(Failure::at("resume"))?;
            match ptrace::wait(tid).map_err(Failure::at("wait"))? {
                stop if stop == wanted => return Ok(()),
                Stop::Gone => return Err(Failure::Gone),
                Stop::Signal(signal) => self.signal = signal,
                Stop::Interrupted | Stop::SystemCall => {}
            }
        }
    }

    /// Lets the thread go on where it was.
    pub(super) fn release(mut self) {
        // If the thread is gone there is nothing to put back, and if a request fails, nothing else to try.
        let _ = self.remove_stub();
        let _ = ptrace::detach(self.target.tid, self.signal);
    }
}

/// The value of a system call, from rax.
pub(super) fn result(rax: u64) -> Result<u64, Errno> {
    match rax as i64 {
        error @ ERRNO_LAST..=-1 => Err(Errno::from_raw(-error as i32)),
        _ => Ok(rax),
    }
}

impl Target {
    fn error(&self, what: &'static str, source: Errno) -> TraceError {
        match source {
            Errno::ESRCH => ProcessError::Gone { pid: self.pid }.into(),
            _ => TraceError::Ptrace { pid: self.pid, tid: self.tid, what, source },
        }
    }

    /// Stops the thread where its instruction pointer may be moved, and gives its registers. `None` if it ends, or if
    /// that cannot be had in a while.
    pub(super) fn stop_at_a_good_moment(&self) -> Result<Option<Registers>, Errno> {
        for _ in 0..MOMENTS {
            ptrace::interrupt(self.tid)?;
            if !self.await_interruption()? {
                return Ok(None);
            }
            let registers = ptrace::registers(self.tid)?;
            if !self.is_in_restartable_sequence(&registers) {
                return Ok(Some(registers));
            }
            ptrace::resume(self.tid, 0)?;
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(None)
    }

    /// Waits for the stop after an interruption. Signals that come before it are delivered. `false` if the thread does
    /// not stop in time or ends.
    fn await_interruption(&self) -> Result<bool, Errno> {
        let start = Instant::now();
        let mut pause = Duration::from_micros(10);
        while start.elapsed() < STOP_TIMEOUT {
            match ptrace::poll(self.tid)? {
                Some(Stop::Interrupted) => return Ok(true),
                Some(Stop::Gone) => return Ok(false),
                Some(Stop::Signal(signal)) => ptrace::resume(self.tid, signal)?,
                Some(Stop::SystemCall) => ptrace::resume(self.tid, 0)?,
                None => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(2));
                }
            }
        }
        Ok(false)
    }

    /// Whether the thread was stopped inside a restartable sequence (rseq(2)). Moving it away would end the sequence
    /// behind its back. What the thread registered is `struct rseq` (`linux/rseq.h`), whose second word leads to the
    /// sequence: version and flags, start, length, where to go if it fails.
    fn is_in_restartable_sequence(&self, registers: &Registers) -> bool {
        let inside = || -> Option<bool> {
            let registered = ptrace::restartable_sequences(self.tid)?;
            let [sequence] = self.words(registered + 8)?;
            let [_, start, length] = self.words(sequence)?;
            Some(registers.rip.wrapping_sub(start) < length)
        };
        inside().unwrap_or(false)
    }

    /// The address of a `syscall` instruction: the one the thread sleeps in, or one of the vDSO.
    fn instruction(&self, registers: &Registers) -> Result<u64, TraceError> {
        let before = registers.rip.wrapping_sub(SYSCALL.len() as u64);
        if is_in_call(registers) && self.bytes(before, SYSCALL.len())? == SYSCALL {
            return Ok(before);
        }
        let code = self.vdso().ok_or(TraceError::NoInstruction { pid: self.pid })?;
        let bytes = self.bytes(code.start, (code.end - code.start) as usize)?;
        let offset = bytes.windows(SYSCALL.len()).position(|bytes| bytes == SYSCALL);
        let offset = offset.ok_or(TraceError::NoInstruction { pid: self.pid })?;
        Ok(code.start + offset as u64)
    }

    /// Where the vDSO lies. The process is traced, so its number is still its own.
    fn vdso(&self) -> Option<Range<u64>> {
        let text = std::fs::read_to_string(format!("/proc/{}/maps", self.pid)).ok()?;
        let mappings = crate::process::maps::parse(&text);
        let vdso =
            mappings.iter().find(|mapping| mapping.path == "[vdso]" && mapping.executable)?;
        Some(vdso.start..vdso.end)
    }

    pub(super) fn bytes(&self, start: u64, len: usize) -> Result<Vec<u8>, ProcessError> {
        let mut bytes = vec![0; len];
        crate::process_memory::read_traced(self.pid, HostVirt(start), &mut bytes)?;
        Ok(bytes)
    }

    /// Some words at an address; `None` for a null or an unmapped one.
    pub(super) fn words<const N: usize>(&self, start: u64) -> Option<[u64; N]> {
        let bytes = self.bytes(start, N * 8).ok().filter(|_| start != 0)?;
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
        assert_eq!(result(7), Ok(7));
        assert_eq!(result(0x7fff_ffff_f000), Ok(0x7fff_ffff_f000));
        assert_eq!(result(-9i64 as u64), Err(Errno::EBADF));
        assert_eq!(result(-4096i64 as u64), Ok(-4096i64 as u64));
    }
}
