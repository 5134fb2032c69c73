//! The handler of SIGSEGV: handles writes to followed spans, and passes other signals to the
//! previous handler.
//!
//! ```text
//!   write to a protected page --> kernel --> SIGSEGV --> on_fault
//!        no write, or the page has no mapping      --> the handler that was installed before (or the default action)
//!        a second mapping, supported instruction?  --> perform it through that mapping, record the words, skip it
//!        a followed span                           --> record the page, make it writable, run the instruction again
//!        no followed span, but writable by now     --> run the instruction again
//!        otherwise                                 --> the handler that was installed before (or the default action)
//! ```
//!
//! The first and the last page of a span may have data beside the area, which any thread may write
//! at any time, also while the watch ends. So a thread may fault on a page that no longer is
//! followed when its handler runs; the page is writable by then. And a handler may use the log of
//! a span whose watch ends: each slot counts the handlers that use its log, and the end of a watch
//! waits for them.
//!
//! In a child of the process that follows a span nothing is recorded: the span becomes writable
//! there, and private to the child.
//!
//! The handler calls no function that allocates or locks. It writes [`WriteLog`] and the counts of
//! users, on pages of their own, and reads the table below. Once installed it stays installed: other code may have
//! chained to it.

use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{c_int, c_void, siginfo_t, ucontext_t};
use rustix::io::Errno;

use super::mapping::{OwnedMapping, is_writable, protect_span};
use super::perform::{StoreOutcome, perform_store};
use super::write_log::WriteLog;
use crate::span::PageSpan;

/// The maximum count of spans that can be followed by faults at once, in all sessions together.
const SLOTS_MAX: usize = 512;
/// The bit of the page-fault error code for a write.
const WAS_WRITE: i64 = 1 << 1;
/// `si_code`: the mapping does not permit the access.
const SEGV_ACCERR: c_int = 2;

struct WatchSlot {
    start: AtomicUsize,
    end: AtomicUsize,
    log: AtomicPtr<WriteLog>,
}

impl WatchSlot {
    fn contains_address(&self, address: usize) -> bool {
        // In this order: a slot that gets another span has the new start before the new end.
        address < self.end.load(Ordering::SeqCst) && self.start.load(Ordering::Acquire) <= address
    }

    /// Empties the slot, and waits until no handler uses the log, which `users` counts.
    ///
    /// A handler counts itself before it reads `end`, and this function writes `end` before it reads
    /// the count, both sequentially consistent: either the handler finds the slot empty, or this
    /// function waits for it.
    fn remove_log(&self, users: &AtomicU64) {
        self.end.store(0, Ordering::SeqCst);
        while users.load(Ordering::SeqCst) != 0 {
            rustix::thread::sched_yield();
        }
        self.start.store(0, Ordering::Release);
        self.log.store(null_mut(), Ordering::Release);
    }
}

/// The write log of a slot, in use by a handler.
struct WriteLogInUse {
    users: &'static AtomicU64,
    log: &'static WriteLog,
}

impl Drop for WriteLogInUse {
    fn drop(&mut self) {
        self.users.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An empty slot: its range contains no address.
const fn empty_slot() -> WatchSlot {
    WatchSlot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        log: AtomicPtr::new(null_mut()),
    }
}

/// Read by the handler, written under `CHANGING`. An empty slot ends at 0.
static TABLE: [WatchSlot; SLOTS_MAX] = [const { empty_slot() }; SLOTS_MAX];
static CHANGING: Mutex<()> = Mutex::new(());
/// The count of spans that were entered in the table so far.
static ADDED: AtomicUsize = AtomicUsize::new(0);
/// For each slot the count of handlers that use its log. In a mapping of its own, which the
/// handler may write: an area can be a static, on one page with the statics of this module. Null
/// until the handler is installed.
static USERS: AtomicPtr<OwnedMapping> = AtomicPtr::new(null_mut());

fn user_counts() -> &'static [AtomicU64] {
    // SAFETY: null, or a mapping that was leaked.
    let counts = unsafe { USERS.load(Ordering::Acquire).as_ref() };
    counts.map_or(&[], |counts| counts.atomic_words(0, SLOTS_MAX))
}
/// The action of SIGSEGV before this handler; null until the handler is installed.
static PREVIOUS_ACTION: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());

pub(super) fn lock_table() -> MutexGuard<'static, ()> {
    CHANGING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In a child: makes all pages of emulated spans read-only. Pages that were writable in the parent
/// are the parent's memory; the child gets memory of its own when it writes them.
pub(super) fn stop_sharing(_changing: &MutexGuard<'_, ()>) {
    for slot in TABLE.iter().filter(|slot| slot.end.load(Ordering::Acquire) != 0) {
        // SAFETY: a slot that is not empty has the log of a span that is watched. No watch ends
        // meanwhile: the table is locked, and a child has one thread.
        let log = unsafe { slot.log.load(Ordering::Acquire).as_ref() };
        if let Some(log) = log.filter(|log| log.is_shared()) {
            // If it fails the child can write the parent's memory, as before.
            let _ = protect_span(log.span(), false);
        }
    }
}

/// A span whose first writes, or all writes, are recorded. Dropping it makes the span writable and
/// drops the log.
#[derive(Debug)]
pub(crate) struct WatchedSpan {
    /// Never freed in a child: there a count of handlers may include threads of the parent.
    log: ManuallyDrop<Box<WriteLog>>,
    slot: usize,
}

impl WatchedSpan {
    /// Protects a span. `alias` is the address of a second writable mapping of it.
    pub(crate) fn new(span: PageSpan, alias: Option<usize>) -> Result<Self, Errno> {
        let log = ManuallyDrop::new(Box::new(WriteLog::new(span, alias)?));
        let changing = lock_table();
        install_handler()?;
        let empty = |slot: &WatchSlot| slot.end.load(Ordering::Acquire) == 0;
        let slot = TABLE.iter().position(empty).ok_or(Errno::NOSPC)?;
        TABLE[slot].log.store(std::ptr::from_ref(&**log).cast_mut(), Ordering::Release);
        TABLE[slot].start.store(span.start(), Ordering::Release);
        TABLE[slot].end.store(span.end(), Ordering::SeqCst);
        ADDED.fetch_add(1, Ordering::SeqCst);
        drop(changing);
        let watched = Self { log, slot };
        protect_span(span, false).map(|()| watched)
    }

    pub(crate) fn write_log(&self) -> &WriteLog {
        &self.log
    }
}

impl Drop for WatchedSpan {
    fn drop(&mut self) {
        // If a span cannot be made writable again, the next write faults, and no handler handles
        // it: the process ends.
        let changing = lock_table();
        let slot = &TABLE[self.slot];
        if !self.log.owner().is_this_process() {
            let _ = self.log.make_private_to_child();
            slot.end.store(0, Ordering::SeqCst);
            return;
        }
        let _ = protect_span(self.log.span(), true);
        if let Some(users) = user_counts().get(self.slot) {
            slot.remove_log(users);
        }
        drop(changing);
        // SAFETY: dropped once, here. No handler has the log any more.
        unsafe { ManuallyDrop::drop(&mut self.log) };
    }
}

/// What a write to a read-only page met.
enum WriteFault {
    Followed(WriteLogInUse),
    /// The page is writable by now.
    Over,
    Foreign,
}

/// Finds the reason for a fault. Called by the handler.
///
/// A watch may end, and another one of the same page begin, while this function runs. A span is
/// entered in the table, then counted, then protected: if the count did not change, no watch that
/// the search has missed made the page read-only.
fn classify_fault(address: usize) -> WriteFault {
    loop {
        let added = ADDED.load(Ordering::SeqCst);
        if let Some(found) = find_write_log(address) {
            return WriteFault::Followed(found);
        }
        if is_writable(address) {
            return WriteFault::Over;
        }
        if ADDED.load(Ordering::SeqCst) == added {
            return WriteFault::Foreign;
        }
    }
}

/// The write log of the span with an address in it.
fn find_write_log(address: usize) -> Option<WriteLogInUse> {
    TABLE.iter().zip(user_counts()).find_map(|(slot, users)| {
        if !slot.contains_address(address) {
            return None;
        }
        users.fetch_add(1, Ordering::SeqCst);
        let log = match slot.contains_address(address) {
            true => slot.log.load(Ordering::Acquire),
            false => null_mut(),
        };
        // SAFETY: null, or taken from a box that exists until the slot is empty and has no users.
        // The slot was not empty after this handler had counted itself. In a child the box is never
        // freed.
        let found = unsafe { log.as_ref() };
        if found.is_none() {
            users.fetch_sub(1, Ordering::SeqCst);
        }
        found.map(|log| WriteLogInUse { users, log })
    })
}

fn install_handler() -> Result<(), Errno> {
    if !PREVIOUS_ACTION.load(Ordering::Acquire).is_null() {
        return Ok(());
    }
    crate::instruction::prepare_decoder();
    let users = Box::new(OwnedMapping::map_anonymous(SLOTS_MAX * size_of::<AtomicU64>())?);
    USERS.store(Box::into_raw(users), Ordering::Release);
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: requests the action of SIGSEGV; the pointer is valid for one.
    check_result(unsafe { libc::sigaction(libc::SIGSEGV, null(), before.as_mut_ptr()) })?;
    // SAFETY: the call above has filled it in; and zeros are a valid action as well.
    let before = Box::new(unsafe { before.assume_init() });
    // Leaked: the handler may need it until the process ends.
    PREVIOUS_ACTION.store(Box::into_raw(before), Ordering::Release);
    // SAFETY: zeros are a valid action: the default one, with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_fault;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the action is complete, and its handler has the signature that SA_SIGINFO requires.
    check_result(unsafe { libc::sigaction(libc::SIGSEGV, &raw const action, null_mut()) })
}

/// Whether the action of SIGSEGV is still this handler. True before the first span is followed.
pub(crate) fn is_handler_installed() -> bool {
    if PREVIOUS_ACTION.load(Ordering::Acquire).is_null() {
        return true;
    }
    let mut now = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: requests the action of SIGSEGV; the pointer is valid for one.
    let asked = unsafe { libc::sigaction(libc::SIGSEGV, null(), now.as_mut_ptr()) };
    // SAFETY: zeros are a valid action, and so is what the call above has filled in.
    let now = unsafe { now.assume_init() };
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_fault;
    asked == 0 && now.sa_sigaction == handler as usize
}

fn check_result(result: c_int) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
    }
}

extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a handler installed with SA_SIGINFO valid pointers to both, which no
    // other code uses while it runs.
    let (fault, registers) = unsafe { (&*info, &mut *context.cast::<ucontext_t>()) };
    if !handle_fault(fault, registers) {
        call_previous_handler(signal, info, context);
    }
}

fn handle_fault(fault: &siginfo_t, context: &mut ucontext_t) -> bool {
    let was_write = context.uc_mcontext.gregs[libc::REG_ERR as usize] & WAS_WRITE != 0;
    if fault.si_code != SEGV_ACCERR || !was_write {
        return false;
    }
    // SAFETY: `si_code` shows that the kernel reported a fault, so the address is set.
    let address = unsafe { fault.si_addr() }.addr();
    let found = match classify_fault(address) {
        WriteFault::Followed(found) => found,
        WriteFault::Over => return true,
        WriteFault::Foreign => return false,
    };
    let log = found.log;
    if !log.owner().is_this_process() {
        return log.make_private_to_child().is_ok();
    }
    if log.alias().is_some() {
        match perform_store(log, context) {
            StoreOutcome::Yes => return true,
            StoreOutcome::Unsupported => log.count_unsupported(),
            StoreOutcome::Full => {}
        }
    }
    log.record_page(address).is_ok()
}

/// Does what would have happened without this handler.
fn call_previous_handler(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: set before the handler was installed, and never freed.
    let Some(before) = (unsafe { PREVIOUS_ACTION.load(Ordering::Acquire).as_ref() }) else {
        return;
    };
    if before.sa_sigaction == libc::SIG_DFL || before.sa_sigaction == libc::SIG_IGN {
        return take_default_action(signal, info);
    }
    block_signals(signal, before);
    // SAFETY: an action that is neither default nor ignored has a handler of the kind that its
    // flags name, installed by code that expects to be called for this signal with these arguments.
    unsafe {
        if before.sa_flags & libc::SA_SIGINFO != 0 {
            type SignalHandler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
            std::mem::transmute::<usize, SignalHandler>(before.sa_sigaction)(signal, info, context);
        } else {
            std::mem::transmute::<usize, extern "C" fn(c_int)>(before.sa_sigaction)(signal);
        }
    }
}

/// Blocks the signals that the earlier handler wants blocked. The kernel restores the mask when a
/// handler returns.
fn block_signals(signal: c_int, before: &libc::sigaction) {
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
fn take_default_action(signal: c_int, info: *mut siginfo_t) {
    // SAFETY: zeros are the default action; `info` is the kernel's; raise is async-signal-safe.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const default, null_mut());
        if (*info).si_code <= 0 {
            libc::raise(signal);
        }
    }
}
