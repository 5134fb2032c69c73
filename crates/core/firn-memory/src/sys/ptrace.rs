//! The few requests of `ptrace(2)` that injecting a system call needs.
//!
//! ptrace ties a tracee to the one thread that seized it; when that thread ends, the kernel
//! releases the tracee.

use firn_types::ThreadId;
use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace;
use nix::unistd::Pid;
use rustix::process::{WaitId, WaitIdOptions, WaitIdStatus, waitid};

pub(crate) use libc::user_regs_struct as Registers;

/// The reason why a traced thread stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// `PTRACE_INTERRUPT`, or a stop of the whole process.
    Interrupted,
    /// Entry to or exit from a system call.
    SystemCall,
    /// A signal is about to be delivered.
    Signal(i32),
    /// The thread is gone.
    Gone,
}

const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
const PTRACE_O_SUSPEND_SECCOMP: i32 = 1 << 21;
/// The signal of a system call's stop: `PTRACE_O_TRACESYSGOOD` adds 0x80 to SIGTRAP.
const SYSTEM_CALL_STOP: i32 = libc::SIGTRAP | 0x80;

fn to_pid(tid: ThreadId) -> Pid {
    Pid::from_raw(tid.0)
}

/// Seizes the thread. With `suspend_filter` its seccomp filter is suspended as long as it is
/// traced, which needs CAP_SYS_ADMIN; without, the filter judges injected calls too.
pub(crate) fn seize(tid: ThreadId, suspend_filter: bool) -> Result<(), Errno> {
    let options = ptrace::Options::PTRACE_O_TRACESYSGOOD;
    let suspend = ptrace::Options::from_bits_retain(PTRACE_O_SUSPEND_SECCOMP);
    ptrace::seize(to_pid(tid), if suspend_filter { options | suspend } else { options })
}

pub(crate) fn interrupt(tid: ThreadId) -> Result<(), Errno> {
    ptrace::interrupt(to_pid(tid))
}

pub(crate) fn get_registers(tid: ThreadId) -> Result<Registers, Errno> {
    ptrace::getregs(to_pid(tid))
}

pub(crate) fn set_registers(tid: ThreadId, registers: &Registers) -> Result<(), Errno> {
    ptrace::setregs(to_pid(tid), *registers)
}

/// Resumes until the next entry to or exit from a system call, delivering `signal` unless it is 0.
pub(crate) fn resume_to_system_call(tid: ThreadId, signal: i32) -> Result<(), Errno> {
    resume_with(libc::PTRACE_SYSCALL, tid, signal)
}

/// Resumes, delivering `signal` unless it is 0.
pub(crate) fn resume(tid: ThreadId, signal: i32) -> Result<(), Errno> {
    resume_with(libc::PTRACE_CONT, tid, signal)
}

fn resume_with(request: libc::c_uint, tid: ThreadId, signal: i32) -> Result<(), Errno> {
    let data = std::ptr::without_provenance_mut::<libc::c_void>(signal as usize);
    // SAFETY: PTRACE_CONT and PTRACE_SYSCALL, the only requests passed here, ignore `addr` and read
    // `data` as a number; they touch no memory of this process.
    let result =
        unsafe { libc::ptrace(request, tid.0, std::ptr::null_mut::<libc::c_void>(), data) };
    Errno::result(result).map(drop)
}

/// Ends the tracing; the thread continues.
pub(crate) fn detach(tid: ThreadId) -> Result<(), Errno> {
    ptrace::detach(to_pid(tid), None)
}

/// Writes code, in whole words. The kernel lets a tracer write to pages that the thread itself can
/// only execute, into a copy of the page that is the process's own (`FOLL_FORCE`, as for
/// breakpoints). The last word comes first: half-written code still ends where whole code does.
pub(crate) fn write_code(tid: ThreadId, at: u64, code: &[u8]) -> Result<(), Errno> {
    let words = code.chunks_exact(size_of::<u64>()).zip((at..).step_by(size_of::<u64>()));
    for (word, at) in words.collect::<Vec<_>>().into_iter().rev() {
        let word = i64::from_le_bytes(word.try_into().map_err(|_| Errno::EINVAL)?);
        ptrace::write(to_pid(tid), std::ptr::without_provenance_mut(at as usize), word)?;
    }
    Ok(())
}

/// `struct ptrace_rseq_configuration` (`linux/ptrace.h`).
#[repr(C)]
#[derive(Default)]
struct RseqConfiguration {
    pointer: u64,
    size: u32,
    signature: u32,
    flags: u32,
    padding: u32,
}

const _: () = assert!(size_of::<RseqConfiguration>() == 24);

/// The address at which the thread has registered restartable sequences (rseq(2)); `None` if it has
/// not, or the kernel does not report it.
pub(crate) fn restartable_sequences(tid: ThreadId) -> Option<u64> {
    let mut configuration = RseqConfiguration::default();
    let (size, data) = (size_of::<RseqConfiguration>(), std::ptr::from_mut(&mut configuration));
    // SAFETY: PTRACE_GET_RSEQ_CONFIGURATION writes at most `addr` bytes at `data`: the size of
    // `configuration`, which outlives the call and may hold any bytes.
    let result = unsafe { libc::ptrace(PTRACE_GET_RSEQ_CONFIGURATION, tid.0, size, data) };
    (result > 0 && configuration.pointer != 0).then_some(configuration.pointer)
}

/// Waits for a stop of the thread.
pub(crate) fn wait_for_stop(tid: ThreadId) -> Result<StopReason, Errno> {
    loop {
        let _ = peek_status(tid, WaitIdOptions::EXITED | WaitIdOptions::STOPPED);
        match poll_stop(tid) {
            Ok(Some(stop)) => return Ok(stop),
            Ok(None) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Takes a stop of the thread, if there is one.
pub(crate) fn poll_stop(tid: ThreadId) -> Result<Option<StopReason>, Errno> {
    if is_dead_process(tid) {
        return Ok(Some(StopReason::Gone));
    }
    let mut status = 0;
    // SAFETY: waitpid writes one int at `status`, which outlives the call.
    let waited = unsafe { libc::waitpid(tid.0, &raw mut status, libc::__WALL | libc::WNOHANG) };
    match Errno::result(waited) {
        Ok(0) => Ok(None),
        Ok(_) => Ok(Some(decode_stop(status))),
        Err(Errno::ECHILD) => Ok(Some(StopReason::Gone)),
        Err(error) => Err(error),
    }
}

/// Whether the thread is the main one of a process that has ended. Its exit status belongs to its
/// parent, which may be another thread of Firn: if a tracer takes it too, nothing is left for the
/// parent.
fn is_dead_process(tid: ThreadId) -> bool {
    // A tracer gets stops too, even if it did not ask for them.
    let seen = peek_status(tid, WaitIdOptions::EXITED | WaitIdOptions::NOHANG).ok().flatten();
    seen.is_some_and(|seen| seen.exited() || seen.killed() || seen.dumped()) && is_main_thread(tid)
}

/// Reads the state that there is to wait for, and leaves it there.
fn peek_status(tid: ThreadId, options: WaitIdOptions) -> rustix::io::Result<Option<WaitIdStatus>> {
    let Some(tid) = rustix::process::Pid::from_raw(tid.0) else { return Ok(None) };
    waitid(WaitId::Pid(tid), options | WaitIdOptions::NOWAIT)
}

fn is_main_thread(tid: ThreadId) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", tid.0)).unwrap_or_default();
    status.lines().any(|line| line == format!("Tgid:\t{}", tid.0))
}

fn decode_stop(status: i32) -> StopReason {
    if !libc::WIFSTOPPED(status) {
        return StopReason::Gone;
    }
    match (status >> 16, libc::WSTOPSIG(status)) {
        (libc::PTRACE_EVENT_STOP, _) => StopReason::Interrupted,
        (_, SYSTEM_CALL_STOP) => StopReason::SystemCall,
        (_, signal) => StopReason::Signal(signal),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_a_process_ended_is_left_to_its_parent() {
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let tid = ThreadId(child.id() as i32);
        seize(tid, false).unwrap();
        interrupt(tid).unwrap();
        assert_eq!(wait_for_stop(tid).unwrap(), StopReason::Interrupted);
        child.kill().unwrap();
        assert_eq!(wait_for_stop(tid).unwrap(), StopReason::Gone);
        assert_eq!(poll_stop(tid).unwrap(), Some(StopReason::Gone));
        let status = child.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL));
    }

    #[test]
    fn the_main_thread_is_distinguished_from_others() {
        let own = || ThreadId(rustix::thread::gettid().as_raw_nonzero().get());
        assert!(is_main_thread(ThreadId(std::process::id() as i32)));
        assert!(!is_main_thread(std::thread::spawn(own).join().unwrap()));
    }

    #[test]
    fn kinds_of_stops_are_distinguished() {
        let stopped = |signal: i32, event: i32| (event << 16) | (signal << 8) | 0x7f;
        assert_eq!(
            decode_stop(stopped(libc::SIGTRAP, libc::PTRACE_EVENT_STOP)),
            StopReason::Interrupted
        );
        assert_eq!(
            decode_stop(stopped(libc::SIGSTOP, libc::PTRACE_EVENT_STOP)),
            StopReason::Interrupted
        );
        assert_eq!(decode_stop(stopped(libc::SIGTRAP | 0x80, 0)), StopReason::SystemCall);
        assert_eq!(decode_stop(stopped(libc::SIGUSR1, 0)), StopReason::Signal(libc::SIGUSR1));
        assert_eq!(decode_stop(libc::SIGKILL), StopReason::Gone);
    }
}
