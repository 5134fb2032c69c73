//! Forks: which process a session belongs to, and what a child must not share with its parent.
//!
//! The kernel wipes one page of this process in every child that gets a copy of the memory (`MADV_WIPEONFORK`). A process
//! writes its own mark there. A session keeps the mark of the process that opened it, so one load says whether it belongs to
//! this process: also for a child made by clone(2), which calls no handler of the C library, and in a pid namespace, or
//! after a pid was used again, where a comparison of pids would be wrong.
//!
//! Handlers of fork(2) (`pthread_atfork`) do the rest. The locks of this crate are held across a fork, so that a child never
//! finds one that a thread holds which it does not have. In the child, descriptors of logs become empty memory files: the
//! lock of a log is not held by children. Pages that an area shares with the parent become read-only, so that the child's
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
use super::mapping::Mapping;
use crate::claims;
use crate::span::Span;

/// The page that is wiped; null until the first session is opened. A child has the same pointer.
static PAGE: AtomicPtr<Mapping> = AtomicPtr::new(null_mut());
/// The next mark. A child counts on from its parent's, so no two processes of one line have the same.
static NEXT: AtomicU64 = AtomicU64::new(1);
static HAS_HANDLERS: AtomicBool = AtomicBool::new(false);
/// Descriptors of logs.
static FILES: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

/// The process that something belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    mark: u64,
    pid: u32,
}

impl Owner {
    /// This process.
    pub(crate) fn this_process() -> Result<Self, Errno> {
        install_handlers();
        let word = &wiped_page()?.words(0, 1)[0];
        let new = NEXT.fetch_add(1, Ordering::Relaxed);
        let set = word.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire);
        let mark = set.map_or_else(|mark| mark, |_| new);
        Ok(Self { mark, pid: std::process::id() })
    }

    /// Whether this process is the owner. One load; the signal handler calls it.
    pub(crate) fn is_here(self) -> bool {
        current_mark() == self.mark
    }

    /// The owner's number.
    pub(crate) fn pid(self) -> u32 {
        self.pid
    }

    /// Differs from that of every process that this one descends from. Never 0.
    pub(crate) fn mark(self) -> u64 {
        self.mark
    }
}

fn current_mark() -> u64 {
    // SAFETY: null, or a mapping that was leaked.
    let page = unsafe { PAGE.load(Ordering::Acquire).as_ref() };
    page.map_or(0, |page| page.words(0, 1)[0].load(Ordering::Relaxed))
}

fn wiped_page() -> Result<&'static Mapping, Errno> {
    if PAGE.load(Ordering::Acquire).is_null() {
        let new = Box::into_raw(Box::new(Mapping::wiped_in_children()?));
        let set = PAGE.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire);
        if set.is_err() {
            // SAFETY: made above, and not shared: another thread was first.
            drop(unsafe { Box::from_raw(new) });
        }
    }
    // SAFETY: not null any more, and what is there is never freed.
    Ok(unsafe { &*PAGE.load(Ordering::Acquire) })
}

/// A file whose copy in a child becomes an empty memory file.
#[derive(Debug)]
pub(crate) struct ParentOnly(File);

impl ParentOnly {
    /// Opens a file. No fork happens in between, so that no child keeps it, or a lock on it.
    pub(crate) fn open(path: &Path, how: &OpenOptions) -> io::Result<Self> {
        let mut files = files();
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
        // Before the file is closed, and its number is another's.
        files().retain(|file| *file != self.0.as_raw_fd());
    }
}

fn files() -> MutexGuard<'static, Vec<RawFd>> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks that are held while the process forks.
struct Held {
    files: MutexGuard<'static, Vec<RawFd>>,
    _claims: MutexGuard<'static, Vec<Span>>,
    table: MutexGuard<'static, ()>,
}

thread_local! {
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

unsafe extern "C" {
    /// Of POSIX; the crate libc does not declare it for glibc.
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> libc::c_int;
}

fn install_handlers() {
    if !HAS_HANDLERS.swap(true, Ordering::AcqRel) {
        // SAFETY: the handlers have the type that is asked for, and stay for as long as this library does. Without memory for
        // them the call fails: then forks are noticed all the same, and only locks may be held in a child.
        let _ = unsafe { pthread_atfork(Some(prepare), Some(in_parent), Some(in_child)) };
    }
}

extern "C" fn prepare() {
    // Each of these is held for a moment, and none is taken while another is held.
    let held = Held { files: files(), _claims: claims::lock(), table: fault::lock() };
    // A thread that is ending has no such variable any more; it does not fork.
    let _ = HELD.try_with(|there| there.replace(Some(held)));
}

extern "C" fn in_parent() {
    drop(HELD.try_with(RefCell::take));
}

extern "C" fn in_child() {
    let Ok(Some(mut held)) = HELD.try_with(RefCell::take) else { return };
    close_files(&mut held.files);
    fault::stop_sharing(&held.table);
}

/// The numbers stay taken: what believes to own a file closes it.
fn close_files(files: &mut Vec<RawFd>) {
    if files.is_empty() {
        return;
    }
    // Without another descriptor the child keeps the log's lock, and harms nothing else.
    let Ok(empty) = rustix::fs::memfd_create("firn-app-child", MemfdFlags::CLOEXEC) else { return };
    for file in files.drain(..) {
        // SAFETY: replaces a descriptor of a log, which this process owns and does not use: whatever uses it in the parent is
        // an error in a child.
        unsafe { libc::dup3(empty.as_raw_fd(), file, libc::O_CLOEXEC) };
    }
}
