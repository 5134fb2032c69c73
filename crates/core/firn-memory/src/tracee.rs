//! System calls that a thread of another process runs for Firn, without noticing it.
//!
//! Two calls must be made inside the hypervisor: `userfaultfd(2)`, which returns the descriptor for
//! the caller's address space, and `madvise(2)`, which drops page-table entries of the caller. Both
//! are *injected*: ptrace stops a thread, and Firn points its registers at a few instructions that
//! make the call and lead the thread back (`inject`, `stub`).
//!
//! ```text
//!   Tracee::seize                        Tracee::syscall                drop
//!   choose a thread -> seize, stop it -> inject, any number of times -> detach
//! ```
//!
//! The thread stays stopped as long as the [`Tracee`] exists: keep it for one purpose and drop it.
//! The other threads continue.
//!
//! If Firn is killed at any moment, the thread returns to its own work.
//!
//! ptrace belongs to one thread of the tracer, so each tracee has a thread in Firn that does
//! nothing else. When that thread ends, for whatever reason, the kernel releases the hypervisor's
//! thread.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use firn_types::ThreadId;
use nix::errno::Errno;
use nix::libc::SYS_userfaultfd;
use thiserror::Error;

use crate::process::{Process, ProcessError};

mod choose;
mod filter;
mod inject;
mod stub;

/// Why a system call could not be injected.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The process cannot be inspected.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The kernel refuses ptrace.
    #[error(
        "may not trace process {pid}: run as root, with CAP_SYS_PTRACE, or as the user the process runs as (then with \
         kernel.yama.ptrace_scope=0); a debugger that is attached already also keeps others out"
    )]
    Forbidden {
        /// The process.
        pid: i32,
        /// The error of the kernel.
        source: Errno,
    },
    /// No thread could be stopped.
    #[error(
        "none of the {threads} threads of process {pid} could be stopped: they all wait in the kernel and cannot be \
         interrupted (for a page that nobody delivers, or for a disk)"
    )]
    Unstoppable {
        /// The process.
        pid: i32,
        /// The number of threads that were tried.
        threads: usize,
    },
    /// The process is not a 64-bit one.
    #[error("process {pid} is not a 64-bit x86 process")]
    NotX86_64 {
        /// The process.
        pid: i32,
    },
    /// The processor checks the thread's returns, and Firn's return matches no call of the thread.
    #[error(
        "the threads of process {pid} have shadow stacks, which keep Firn from borrowing one: start it without \
         (GLIBC_TUNABLES=glibc.cpu.x86_shstk=off)"
    )]
    ShadowStack {
        /// The process.
        pid: i32,
    },
    /// A seccomp filter might kill the process for a call that it does not expect.
    #[error(
        "the threads of process {pid} have a seccomp filter that Firn may not suspend, and that may kill the process for a call \
         of Firn's: run Firn as root (CAP_SYS_ADMIN suspends the filter), or start the hypervisor without the filter"
    )]
    Filtered {
        /// The process.
        pid: i32,
    },
    /// There is no room for the instructions.
    #[error(
        "process {pid} has no room behind its code for the few instructions that lead a borrowed thread back: neither its \
         vDSO nor any library ends with {} unused bytes", stub::stub_code().len()
    )]
    NoRoom {
        /// The process.
        pid: i32,
    },
    /// The injected call itself failed.
    #[error("system call {number} in process {pid} failed{}", failure_hint(*.number, *.source))]
    Call {
        /// The process.
        pid: i32,
        /// The number of the system call (`asm/unistd_64.h`).
        number: i64,
        /// The error of the kernel.
        source: Errno,
    },
    /// A ptrace request failed.
    #[error("ptrace {what} on {tid:?} of process {pid} failed")]
    Ptrace {
        /// The process.
        pid: i32,
        /// The thread.
        tid: ThreadId,
        /// The request.
        what: &'static str,
        /// The error of the kernel.
        source: Errno,
    },
}

/// Advice for the user if a call is refused to the hypervisor.
fn failure_hint(number: i64, errno: Errno) -> &'static str {
    match (number == SYS_userfaultfd, errno) {
        (true, Errno::EPERM) => {
            ": the hypervisor's own user needs the right to it: run Firn as root (it then passes /dev/userfaultfd on), or \
             set sysctl vm.unprivileged_userfaultfd=1"
        }
        (true, Errno::ENOSYS) => {
            ": the kernel lacks userfaultfd (CONFIG_USERFAULTFD), or a seccomp sandbox hides it from the hypervisor"
        }
        (false, Errno::EPERM | Errno::ENOSYS | Errno::EACCES) => {
            ": a seccomp sandbox (QEMU: -sandbox) may forbid it to the hypervisor"
        }
        _ => "",
    }
}

/// A thread of the hypervisor, stopped to run system calls for Firn. Dropping it lets the thread
/// continue as if nothing had happened.
#[derive(Debug)]
pub struct Tracee<'p> {
    process: &'p Process,
    tid: ThreadId,
    calls: Option<SyncSender<InjectedCall>>,
    results: Receiver<Result<u64, TraceError>>,
    tracer: Option<JoinHandle<()>>,
}

#[derive(Clone, Copy, Debug)]
struct InjectedCall {
    number: i64,
    arguments: [u64; 6],
}

impl<'p> Tracee<'p> {
    /// Stops one thread of `process`. It prefers a sleeping thread, avoids those in `avoid` (the
    /// vCPUs) and the main thread if possible.
    ///
    /// # Errors
    /// If the process is gone or may not be traced, or no thread can be stopped.
    pub fn seize(process: &'p Process, avoid: &[ThreadId]) -> Result<Self, TraceError> {
        let threads = choose::rank_threads(process, avoid)?;
        for &tid in &threads {
            if let Some(tracee) = Self::try_seize(process, tid)? {
                return Ok(tracee);
            }
        }
        Err(match process.is_alive() {
            true => TraceError::Unstoppable { pid: process.pid(), threads: threads.len() },
            false => ProcessError::Gone { pid: process.pid() }.into(),
        })
    }

    /// Stops this thread; `None` if it cannot be stopped or has just ended.
    fn try_seize(process: &'p Process, tid: ThreadId) -> Result<Option<Self>, TraceError> {
        if choose::has_shadow_stack(process, tid) {
            return Err(TraceError::ShadowStack { pid: process.pid() });
        }
        let (ready, readiness) = sync_channel(1);
        let (calls, requests) = sync_channel(1);
        let (answers, results) = sync_channel(1);
        let filter = filter::filter_of_thread(process, tid);
        let target = inject::TargetThread { pid: process.pid(), tid, filter };
        let tracer = std::thread::Builder::new()
            .name("firn-ptrace".into())
            .spawn(move || serve_calls(&target, &ready, &requests, &answers))
            .map_err(|error| process.operation_error("starting a tracer thread", error))?;
        let tracee = Self { process, tid, calls: Some(calls), results, tracer: Some(tracer) };
        // A tracer that ends without a message has given up on the thread.
        match readiness.recv() {
            Ok(Ok(())) => Ok(Some(tracee)),
            Ok(Err(error)) => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// The process.
    pub fn process(&self) -> &'p Process {
        self.process
    }

    /// The thread that is stopped.
    pub fn tid(&self) -> ThreadId {
        self.tid
    }

    /// Makes the thread run system call `number` of `asm/unistd_64.h` with these arguments, within
    /// the hypervisor's own rights, and returns its result. If Firn is killed meanwhile, the thread
    /// finishes the call and returns to its own work.
    ///
    /// # Errors
    /// If the call fails there, or the process ends.
    pub fn syscall(&mut self, number: i64, arguments: [u64; 6]) -> Result<u64, TraceError> {
        let gone = || ProcessError::Gone { pid: self.process.pid() };
        let calls = self.calls.as_ref().ok_or_else(gone)?;
        calls.send(InjectedCall { number, arguments }).map_err(|_| gone())?;
        self.results.recv().map_err(|_| gone())?
    }
}

impl Drop for Tracee<'_> {
    fn drop(&mut self) {
        drop(self.calls.take());
        if let Some(tracer) = self.tracer.take() {
            // A tracer that panicked has released its thread by ending.
            let _ = tracer.join();
        }
    }
}

/// The main function of a tracer thread.
fn serve_calls(
    target: &inject::TargetThread,
    ready: &SyncSender<Result<(), TraceError>>,
    requests: &Receiver<InjectedCall>,
    answers: &SyncSender<Result<u64, TraceError>>,
) {
    let mut stopped = match inject::StoppedThread::new(target) {
        Ok(Some(stopped)) => stopped,
        Ok(None) => return,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    if ready.send(Ok(())).is_err() {
        return stopped.release();
    }
    while let Ok(call) = requests.recv() {
        if answers.send(stopped.run_call(&call)).is_err() {
            break;
        }
    }
    stopped.release();
}
