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
//! a span whose watch ends: handlers are counted, and the end of a watch waits for those that may
//! have found it in the table.
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

/// The bit of the page-fault error code for a write.
const WAS_WRITE: i64 = 1 << 1;
/// `si_code`: the mapping does not permit the access.
const SEGV_ACCERR: c_int = 2;

/// A span in the table.
#[derive(Clone, Copy)]
struct WatchEntry {
    start: usize,
    end: usize,
    log: *const WriteLog,
}

/// The followed spans, sorted by address; null before the first. Read by the handler, replaced as
/// a whole under `CHANGING`.
static TABLE: AtomicPtr<Vec<WatchEntry>> = AtomicPtr::new(null_mut());
static CHANGING: Mutex<()> = Mutex::new(());
/// The count of spans that were entered in the table so far.
static ADDED: AtomicUsize = AtomicUsize::new(0);
/// The count of tables that were replaced so far.
static REPLACED: AtomicUsize = AtomicUsize::new(0);
/// Two counts of handlers that use a table: those that began when `REPLACED` was even, and odd. In
/// a mapping of its own, which the handler may write: an area can be a static, on one page with the
/// statics of this module. Null until the handler is installed.
static USERS: AtomicPtr<OwnedMapping> = AtomicPtr::new(null_mut());

fn user_counts() -> &'static [AtomicU64] {
    // SAFETY: null, or a mapping that was leaked.
    let counts = unsafe { USERS.load(Ordering::Acquire).as_ref() };
    counts.map_or(&[], |counts| counts.atomic_words(0, 2))
}

/// A handler that uses the table, and what it found there.
struct TableInUse(&'static AtomicU64);

impl TableInUse {
    /// Counts this handler. `None` if the handler is not installed.
    ///
    /// The thread that replaces a table publishes the new one, counts it, and waits until the
    /// handlers that were counted before have ended. All of this is sequentially consistent: a
    /// handler that reads the same count twice, before and after it is counted itself, is waited
    /// for, or finds the new table.
    fn begin() -> Option<Self> {
        loop {
            let replaced = REPLACED.load(Ordering::SeqCst);
            let users = user_counts().get(replaced % 2)?;
            users.fetch_add(1, Ordering::SeqCst);
            let in_use = Self(users);
            if REPLACED.load(Ordering::SeqCst) == replaced {
                return Some(in_use);
            }
        }
    }
}

impl Drop for TableInUse {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A write log that a handler uses.
struct WriteLogInUse {
    _table: TableInUse,
    log: &'static WriteLog,
}

/// The entries of the table. The table must not be replaced meanwhile: the caller has it locked, or
/// is counted as a user.
fn table_entries<'a>() -> &'a [WatchEntry] {
    // SAFETY: null, or a table that is freed only after it was replaced and has no users, which the
    // caller prevents.
    unsafe { TABLE.load(Ordering::SeqCst).as_ref() }.map_or(&[], |table| &table[..])
}

/// Replaces the table. Returns when no handler uses the old one, or anything that only the old one
/// has.
fn replace_table(_changing: &MutexGuard<'_, ()>, new: Vec<WatchEntry>) {
    let old = TABLE.swap(Box::into_raw(Box::new(new)), Ordering::SeqCst);
    let replaced = REPLACED.fetch_add(1, Ordering::SeqCst);
    let users = user_counts().get(replaced % 2);
    while users.is_some_and(|users| users.load(Ordering::SeqCst) != 0) {
        rustix::thread::sched_yield();
    }
    if !old.is_null() {
        // SAFETY: made by `Box::into_raw`, replaced above, and without users.
        drop(unsafe { Box::from_raw(old) });
    }
}
/// The action of SIGSEGV before this handler; null until the handler is installed.
static PREVIOUS_ACTION: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());

pub(super) fn lock_table() -> MutexGuard<'static, ()> {
    CHANGING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In a child: makes all pages of emulated spans read-only. Pages that were writable in the parent
/// are the parent's memory; the child gets memory of its own when it writes them.
pub(super) fn stop_sharing(_changing: &MutexGuard<'_, ()>) {
    // Threads of the parent, which do not exist here.
    user_counts().iter().for_each(|users| users.store(0, Ordering::SeqCst));
    for entry in table_entries() {
        // SAFETY: an entry has the log of a span that is watched. No watch ends meanwhile: the
        // table is locked, and a child has one thread.
        let log = unsafe { &*entry.log };
        if log.is_shared() {
            // If it fails the child can write the parent's memory, as before.
            let _ = protect_span(log.span(), false);
        }
    }
}

/// A span whose first writes, or all writes, are recorded. Dropping it makes the span writable and
/// drops the log.
#[derive(Debug)]
pub(crate) struct WatchedSpan {
    /// Never freed in a child: there a thread of the parent may have been using it.
    log: ManuallyDrop<Box<WriteLog>>,
}

impl WatchedSpan {
    /// Protects a span. `alias` is the address of a second writable mapping of it.
    pub(crate) fn new(span: PageSpan, alias: Option<usize>) -> Result<Self, Errno> {
        let watched = Self { log: ManuallyDrop::new(Box::new(WriteLog::new(span, alias)?)) };
        let changing = lock_table();
        install_handler()?;
        let entry = WatchEntry { start: span.start(), end: span.end(), log: watched.log_address() };
        let mut table = table_entries().to_vec();
        table.insert(table.partition_point(|other| other.start < entry.start), entry);
        replace_table(&changing, table);
        ADDED.fetch_add(1, Ordering::SeqCst);
        drop(changing);
        protect_span(span, false).map(|()| watched)
    }

    fn log_address(&self) -> *const WriteLog {
        std::ptr::from_ref(&**self.log)
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
        let is_owner = self.log.owner().is_this_process();
        let _ = match is_owner {
            true => protect_span(self.log.span(), true),
            false => self.log.make_private_to_child(),
        };
        let own = self.log_address();
        let others = table_entries().iter().filter(|entry| !std::ptr::eq(entry.log, own));
        replace_table(&changing, others.copied().collect());
        drop(changing);
        if is_owner {
            // SAFETY: dropped once, here. No handler has the log any more.
            unsafe { ManuallyDrop::drop(&mut self.log) };
        }
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
    let table = TableInUse::begin()?;
    let entries = table_entries();
    let entry = entries.get(entries.partition_point(|entry| entry.end <= address))?;
    // SAFETY: taken from a box that exists until a table without it is published and no handler
    // uses an older one. This handler is counted. In a child the box is never freed.
    let log = (entry.start <= address).then(|| unsafe { &*entry.log })?;
    Some(WriteLogInUse { _table: table, log })
}

fn install_handler() -> Result<(), Errno> {
    if !PREVIOUS_ACTION.load(Ordering::Acquire).is_null() {
        return Ok(());
    }
    crate::instruction::prepare_decoder();
    let users = Box::new(OwnedMapping::map_anonymous(2 * size_of::<AtomicU64>())?);
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
