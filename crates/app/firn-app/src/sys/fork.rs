//! Forks: the process that a session belongs to, and what a child must not share with its parent.
//!
//! The kernel wipes one page of this process in every child that gets a copy of the memory
//! (`MADV_WIPEONFORK`). A process writes its own mark there. A session stores the mark of the
//! process that opened it, so one load tests whether it belongs to this process. That also works
//! for a child made by clone(2), which calls no handler of the C library, and in a pid namespace,
//! or after a pid was reused, where a comparison of pids would be wrong.
//!
//! Handlers of fork(2) (`pthread_atfork`) do everything else. The locks of this crate are locked
//! across a fork, so that a child never finds a lock of a thread that does not exist in the child.
//! In the child, descriptors of logs become empty memory files, so that children do not keep the
//! lock of a log. Pages that an area shares with the parent become read-only, so that the child's
//! first write gives it memory of its own (`fault`).

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd as _, RawFd};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::fault;
use super::mapping::OwnedMapping;
use crate::claims;
use crate::span::PageSpan;

/// The page that the kernel wipes; null until the first session is opened. A child has the same
/// pointer.
static WIPED_PAGE: AtomicPtr<OwnedMapping> = AtomicPtr::new(null_mut());
/// The next mark. A child continues its parent's numbers, so no two processes of one line of
/// descent have the same mark.
static NEXT_MARK: AtomicU64 = AtomicU64::new(1);
static HAS_HANDLERS: AtomicBool = AtomicBool::new(false);
/// Descriptors of open logs.
static LOG_FILES: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

/// The process that a session or a thread belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnerProcess {
    mark: u64,
    pid: u32,
}

impl OwnerProcess {
    /// This process.
    pub(crate) fn this_process() -> Result<Self, Errno> {
        install_handlers();
        let word = &wiped_page()?.atomic_words(0, 1)[0];
        let new = NEXT_MARK.fetch_add(1, Ordering::Relaxed);
        let set = word.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire);
        let mark = set.map_or_else(|mark| mark, |_| new);
        Ok(Self { mark, pid: std::process::id() })
    }

    /// Whether this process is the owner. One load; the signal handler calls it.
    pub(crate) fn is_this_process(self) -> bool {
        current_mark() == self.mark
    }

    /// The owner's process id.
    pub(crate) fn pid(self) -> u32 {
        self.pid
    }

    /// The owner's mark. It differs from that of every process that the owner descends from. Never
    /// 0.
    pub(crate) fn mark(self) -> u64 {
        self.mark
    }
}

fn current_mark() -> u64 {
    // SAFETY: null, or a mapping that was leaked.
    let page = unsafe { WIPED_PAGE.load(Ordering::Acquire).as_ref() };
    page.map_or(0, |page| page.atomic_words(0, 1)[0].load(Ordering::Relaxed))
}

fn wiped_page() -> Result<&'static OwnedMapping, Errno> {
    if WIPED_PAGE.load(Ordering::Acquire).is_null() {
        let new = Box::into_raw(Box::new(OwnedMapping::map_wiped_on_fork()?));
        let set = WIPED_PAGE.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire);
        if set.is_err() {
            // SAFETY: made above, and not shared: another thread has set the pointer first.
            drop(unsafe { Box::from_raw(new) });
        }
    }
    // SAFETY: not null any more, and the page is never freed.
    Ok(unsafe { &*WIPED_PAGE.load(Ordering::Acquire) })
}

/// A file whose copy in a child becomes an empty memory file.
#[derive(Debug)]
pub(crate) struct ParentOnly(File);

impl ParentOnly {
    /// Opens a file. No fork happens in between, so that no child keeps the file, or a lock on it.
    pub(crate) fn open(path: &Path, how: &OpenOptions) -> io::Result<Self> {
        let mut files = lock_log_files();
        let file = how.open(path)?;
        files.push(file.as_raw_fd());
        Ok(Self(file))
    }
}

impl Deref for ParentOnly {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl DerefMut for ParentOnly {
    fn deref_mut(&mut self) -> &mut File {
        &mut self.0
    }
}

impl Drop for ParentOnly {
    fn drop(&mut self) {
        // Before the file is closed, and its number can be reused for another file.
        lock_log_files().retain(|file| *file != self.0.as_raw_fd());
    }
}

fn lock_log_files() -> MutexGuard<'static, Vec<RawFd>> {
    LOG_FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks that this process keeps locked while it forks.
struct ForkLocks {
    files: MutexGuard<'static, Vec<RawFd>>,
    _claims: MutexGuard<'static, Vec<PageSpan>>,
    table: MutexGuard<'static, ()>,
}

thread_local! {
    static FORK_LOCKS: RefCell<Option<ForkLocks>> = const { RefCell::new(None) };
}

unsafe extern "C" {
    /// A function of POSIX; the crate libc does not declare it for glibc.
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> libc::c_int;
}

fn install_handlers() {
    if !HAS_HANDLERS.swap(true, Ordering::AcqRel) {
        // SAFETY: the handlers have the required type, and exist for as long as this library does.
        // Without memory for them the call fails: then forks are still noticed, and only locks may
        // be locked in a child.
        let _ = unsafe {
            pthread_atfork(
                Some(prepare_fork),
                Some(finish_fork_in_parent),
                Some(finish_fork_in_child),
            )
        };
    }
}

extern "C" fn prepare_fork() {
    // Each of these is locked only for a moment, and none is locked while another is.
    let held = ForkLocks {
        files: lock_log_files(),
        _claims: claims::lock_claims(),
        table: fault::lock_table(),
    };
    // A thread that is ending no longer has this variable; it does not fork.
    let _ = FORK_LOCKS.try_with(|there| there.replace(Some(held)));
}

extern "C" fn finish_fork_in_parent() {
    drop(FORK_LOCKS.try_with(RefCell::take));
}

extern "C" fn finish_fork_in_child() {
    let Ok(Some(mut held)) = FORK_LOCKS.try_with(RefCell::take) else { return };
    close_files(&mut held.files);
    fault::stop_sharing(&held.table);
}

/// Replaces the files of logs by an empty one. Their descriptors stay open: the values that own a
/// file close it.
fn close_files(files: &mut Vec<RawFd>) {
    if files.is_empty() {
        return;
    }
    // If no descriptor is free the child keeps the log's lock, and harms nothing else.
    let Ok(empty) = rustix::fs::memfd_create("firn-app-child", MemfdFlags::CLOEXEC) else { return };
    for file in files.drain(..) {
        // SAFETY: replaces a descriptor of a log, which this process owns and does not use: the
        // functions that use it in the parent return errors in a child.
        unsafe { libc::dup3(empty.as_raw_fd(), file, libc::O_CLOEXEC) };
    }
}
