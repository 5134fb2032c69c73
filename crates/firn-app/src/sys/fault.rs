//! The handler of SIGSEGV: handles writes to followed spans, and passes other signals to the
//! previous handler.
//!
//! ```text
//!   write to a protected page --> kernel --> SIGSEGV --> on_fault
//!        a followed span, and a write?         no  --> the handler that was installed before (or the default action)
//!        a second mapping, supported instruction?  --> perform it through that mapping, note the words, skip it
//!        otherwise                             --> note the page, make it writable, run the instruction again
//! ```
//!
//! In a child of the process that follows a span nothing is noted: the span becomes writable there,
//! and private to the child.
//!
//! The handler calls no function that allocates or locks. It writes [`SpanNotes`], on pages of
//! their own, and reads the table below. Once installed it stays installed: other code may have
//! chained to it.

use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{c_int, c_void, siginfo_t, ucontext_t};
use rustix::io::Errno;

use super::mapping::protect;
use super::notes::Notes;
use super::perform::{Performed, perform};
use crate::span::Span;

/// The maximum count of spans that can be followed by faults at once, in all sessions together.
const SLOTS: usize = 512;
/// The bit of the page-fault error code for a write.
const WAS_WRITE: i64 = 1 << 1;
/// `si_code`: the mapping does not permit the access.
const SEGV_ACCERR: c_int = 2;

struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    notes: AtomicPtr<Notes>,
}

/// An empty slot: its range contains no address.
const fn empty() -> Slot {
    Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0), notes: AtomicPtr::new(null_mut()) }
}

/// Read by the handler, written under `CHANGING`. An empty slot ends at 0.
static TABLE: [Slot; SLOTS] = [const { empty() }; SLOTS];
static CHANGING: Mutex<()> = Mutex::new(());
/// The action of SIGSEGV before this handler; null until the handler is installed.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());

pub(super) fn lock() -> MutexGuard<'static, ()> {
    CHANGING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In a child: makes all pages of emulated spans read-only. Pages that were writable in the parent
/// are the parent's memory; the child gets memory of its own when it writes them.
pub(super) fn stop_sharing(_changing: &MutexGuard<'_, ()>) {
    for slot in TABLE.iter().filter(|slot| slot.end.load(Ordering::Acquire) != 0) {
        // SAFETY: a slot that is not empty has the notes of a span that is watched. No watch ends
        // meanwhile: the table is locked, and a child has one thread.
        let notes = unsafe { slot.notes.load(Ordering::Acquire).as_ref() };
        if let Some(notes) = notes.filter(|notes| notes.is_shared()) {
            // If it fails the child can write the parent's memory, as before.
            let _ = protect(notes.span(), false);
        }
    }
}

/// A span whose first writes, or all writes, are noted. Dropping it makes the span writable and
/// ends the notes.
#[derive(Debug)]
pub(crate) struct Watched {
    notes: Box<Notes>,
    slot: usize,
}

impl Watched {
    /// Protects a span. `alias` is the address of a second writable mapping of it.
    pub(crate) fn new(span: Span, alias: Option<usize>) -> Result<Self, Errno> {
        let notes = Box::new(Notes::new(span, alias)?);
        let changing = lock();
        install()?;
        let empty = |slot: &Slot| slot.end.load(Ordering::Acquire) == 0;
        let slot = TABLE.iter().position(empty).ok_or(Errno::NOSPC)?;
        TABLE[slot].notes.store(std::ptr::from_ref(&*notes).cast_mut(), Ordering::Release);
        TABLE[slot].start.store(span.start(), Ordering::Release);
        TABLE[slot].end.store(span.end(), Ordering::Release);
        drop(changing);
        let watched = Self { notes, slot };
        protect(span, false).map(|()| watched)
    }

    pub(crate) fn notes(&self) -> &Notes {
        &self.notes
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // If a span cannot be made writable again, the next write faults, and no handler handles
        // it: the process ends.
        let _ = match self.notes.owner().is_here() {
            true => protect(self.notes.span(), true),
            false => self.notes.give_to_child(),
        };
        let _changing = lock();
        let slot = &TABLE[self.slot];
        slot.end.store(0, Ordering::Release);
        slot.start.store(0, Ordering::Release);
        slot.notes.store(null_mut(), Ordering::Release);
    }
}

/// The notes of the span with an address in it. Called by the handler.
fn notes_of(address: usize) -> Option<&'static Notes> {
    let has = |slot: &&Slot| {
        slot.start.load(Ordering::Acquire) <= address && address < slot.end.load(Ordering::Acquire)
    };
    let notes = TABLE.iter().find(has)?.notes.load(Ordering::Acquire);
    // SAFETY: the slot has the address, so its span is watched. It stays watched while the handler
    // runs: a thread that ends a watch has the session, and no thread may write its memory
    // meanwhile (rule of `Session`), but this one is writing it. So the box that the pointer was
    // taken from exists.
    unsafe { notes.as_ref() }
}

fn install() -> Result<(), Errno> {
    if !BEFORE.load(Ordering::Acquire).is_null() {
        return Ok(());
    }
    crate::instruction::prepare();
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: requests the action of SIGSEGV; the pointer is valid for one.
    check(unsafe { libc::sigaction(libc::SIGSEGV, null(), before.as_mut_ptr()) })?;
    // SAFETY: the call above has filled it in; and zeros are a valid action as well.
    let before = Box::new(unsafe { before.assume_init() });
    // Leaked: the handler may need it until the process ends.
    BEFORE.store(Box::into_raw(before), Ordering::Release);
    // SAFETY: zeros are a valid action: the default one, with an empty mask.
    let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_fault;
    ours.sa_sigaction = handler as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the action is complete, and its handler has the signature that SA_SIGINFO requires.
    check(unsafe { libc::sigaction(libc::SIGSEGV, &raw const ours, null_mut()) })
}

fn check(result: c_int) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
    }
}

extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a handler installed with SA_SIGINFO valid pointers to both, which no
    // other code uses while it runs.
    let (fault, registers) = unsafe { (&*info, &mut *context.cast::<ucontext_t>()) };
    if !answer(fault, registers) {
        hand_on(signal, info, context);
    }
}

fn answer(fault: &siginfo_t, context: &mut ucontext_t) -> bool {
    let was_write = context.uc_mcontext.gregs[libc::REG_ERR as usize] & WAS_WRITE != 0;
    if fault.si_code != SEGV_ACCERR || !was_write {
        return false;
    }
    // SAFETY: `si_code` shows that the kernel reported a fault, so the address is set.
    let address = unsafe { fault.si_addr() }.addr();
    let Some(notes) = notes_of(address) else { return false };
    if !notes.owner().is_here() {
        return notes.give_to_child().is_ok();
    }
    if notes.alias().is_some() {
        match perform(notes, context) {
            Performed::Yes => return true,
            Performed::Unsupported => notes.note_unsupported(),
            Performed::Full => {}
        }
    }
    notes.open_page(address).is_ok()
}

/// Does what would have happened without this handler.
fn hand_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: set before the handler was installed, and never freed.
    let Some(before) = (unsafe { BEFORE.load(Ordering::Acquire).as_ref() }) else { return };
    if before.sa_sigaction == libc::SIG_DFL || before.sa_sigaction == libc::SIG_IGN {
        return default_action(signal, info);
    }
    set_mask(signal, before);
    // SAFETY: an action that is neither default nor ignored has a handler of the kind that its
    // flags name, installed by code that expects to be called for this signal with these arguments.
    unsafe {
        if before.sa_flags & libc::SA_SIGINFO != 0 {
            type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
            std::mem::transmute::<usize, Handler>(before.sa_sigaction)(signal, info, context);
        } else {
            std::mem::transmute::<usize, extern "C" fn(c_int)>(before.sa_sigaction)(signal);
        }
    }
}

/// Blocks the signals that the earlier handler wants blocked. The kernel restores the mask when a
/// handler returns.
fn set_mask(signal: c_int, before: &libc::sigaction) {
    // SAFETY: both sets are valid, and changing the calling thread's mask touches no memory of
    // Rust's.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const before.sa_mask, null_mut());
        if before.sa_flags & libc::SA_NODEFER != 0 {
            let mut this: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut this);
            libc::sigaddset(&raw mut this, signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const this, null_mut());
        }
    }
}

/// Ends the process by the signal: the instruction faults again when the handler returns. If a
/// process sent the signal, it is sent again.
fn default_action(signal: c_int, info: *mut siginfo_t) {
    // SAFETY: zeros are the default action; `info` is the kernel's; raise is async-signal-safe.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const default, null_mut());
        if (*info).si_code <= 0 {
            libc::raise(signal);
        }
    }
}
