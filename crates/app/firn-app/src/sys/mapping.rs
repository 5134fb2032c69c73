//! Memory mappings of the library's own: mapped when made, unmapped when dropped.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::slice;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};

use crate::span::{PAGE, PageSpan};

/// A mapping that no other code unmaps.
#[derive(Debug)]
pub(crate) struct OwnedMapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is an address and a length; the memory behind it belongs to the process, not to
// a thread. Access to it goes through `AreaRegion` and the atomics below, which have their own
// rules.
unsafe impl Send for OwnedMapping {}
// SAFETY: as above; `&OwnedMapping` gives only the address, and slices of atomics.
unsafe impl Sync for OwnedMapping {}

impl OwnedMapping {
    /// Private zeroed memory, in small pages.
    pub(crate) fn map_anonymous(len: usize) -> Result<Self, Errno> {
        let len = len.max(1).next_multiple_of(PAGE);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so that no mapping that exists is replaced.
        let start =
            unsafe { rustix::mm::mmap_anonymous(null_mut(), len, prot, MapFlags::PRIVATE) }?;
        Ok(Self::from_mmap(start, len).without_huge_pages())
    }

    /// Private memory, which the kernel fills with zeros in a forked child.
    pub(crate) fn map_wiped_on_fork() -> Result<Self, Errno> {
        let page = Self::map_anonymous(PAGE)?;
        let start = page.start.as_ptr().cast();
        // SAFETY: the range is this mapping; its content changes in a child only, where nothing has
        // read it yet.
        unsafe { rustix::mm::madvise(start, page.len, Advice::LinuxWipeOnFork) }?;
        Ok(page)
    }

    /// A file's memory, shared with its other mappings.
    pub(crate) fn map_shared(file: BorrowedFd<'_>, len: usize) -> Result<Self, Errno> {
        Self::map_file(file, len, MapFlags::SHARED)
    }

    /// A file's memory; a page is copied when it is written.
    pub(crate) fn map_private(file: BorrowedFd<'_>, len: usize) -> Result<Self, Errno> {
        Self::map_file(file, len, MapFlags::PRIVATE)
    }

    fn map_file(file: BorrowedFd<'_>, len: usize, flags: MapFlags) -> Result<Self, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so that no mapping that exists is replaced. The file is
        // a memfd of this library, or the memory of a device, which no process truncates.
        let start = unsafe { rustix::mm::mmap(null_mut(), len, prot, flags, file, 0) }?;
        Ok(Self::from_mmap(start, len).without_huge_pages())
    }

    fn from_mmap(start: *mut c_void, len: usize) -> Self {
        // mmap never gives address 0 where none was asked for.
        let start = NonNull::new(start.cast()).unwrap_or(NonNull::dangling());
        Self { start, len }
    }

    /// Avoids huge pages, as one would count as written as a whole. A kernel without huge pages is
    /// no error.
    fn without_huge_pages(self) -> Self {
        // SAFETY: the range is this mapping, and the advice changes no content.
        let _ = unsafe {
            rustix::mm::madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxNoHugepage)
        };
        self
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr().addr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn span(&self) -> PageSpan {
        PageSpan::covering_range(self.address()..self.address() + self.len)
    }

    /// Words at an offset, as atomics. For anonymous mappings that are accessed only so.
    pub(crate) fn atomic_words(&self, offset: usize, count: usize) -> &[AtomicU64] {
        assert!(offset % 8 == 0 && offset + count * 8 <= self.len, "words outside of a mapping");
        // SAFETY: the words lie inside the mapping, which is readable, writable, aligned to a page,
        // zeroed when made, and lives as long as `self`; users of this method access it through
        // atomics only.
        unsafe { slice::from_raw_parts(self.start.as_ptr().add(offset).cast(), count) }
    }

    /// Makes each page of a span private to this process and writable, as a write would, without a
    /// change of content.
    pub(crate) fn touch_pages(span: PageSpan) {
        for address in (span.start()..span.end()).step_by(PAGE) {
            // SAFETY: a span is memory that a session was given, readable and writable. Replacing a
            // byte by itself, atomically, loses no write of another thread.
            let byte =
                unsafe { AtomicU8::from_ptr(std::ptr::with_exposed_provenance_mut(address)) };
            // Adding zero would do the same, but compilers remove it.
            let now = byte.load(Ordering::Relaxed);
            let _ = byte.compare_exchange(now, now, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// As [`Self::atomic_words`], for words of half the width.
    pub(crate) fn half_words(&self, offset: usize, count: usize) -> &[AtomicU32] {
        assert!(offset % 4 == 0 && offset + count * 4 <= self.len, "words outside of a mapping");
        // SAFETY: as in `atomic_words`.
        unsafe { slice::from_raw_parts(self.start.as_ptr().add(offset).cast(), count) }
    }
}

impl Drop for OwnedMapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this type; code that has the address keeps the mapping
        // alive (`Arc<OwnedMapping>`). A failure would leave it mapped, which harms nothing.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Makes pages writable or read-only.
pub(crate) fn protect_span(span: PageSpan, writable: bool) -> Result<(), Errno> {
    let flags = match writable {
        true => MprotectFlags::READ | MprotectFlags::WRITE,
        false => MprotectFlags::READ,
    };
    let start = std::ptr::without_provenance_mut(span.start());
    // SAFETY: a span is memory that a session was given, readable and writable before, and that no
    // other code protects (contract of `Session::register`; own mappings by construction). Reads
    // stay possible; a thread that writes gets a fault that `fault` handles.
    unsafe { rustix::mm::mprotect(start, span.byte_count(), flags) }
}

/// Whether the page with an address can be written now. False if the kernel is older than Linux
/// 5.14 (madvise(2), `MADV_POPULATE_WRITE`). Called by the signal handler: no allocation, no lock.
pub(crate) fn is_writable(address: usize) -> bool {
    let page = std::ptr::without_provenance_mut(address / PAGE * PAGE);
    // SAFETY: the kernel prepares the page for a write, if it may be written, and changes no content.
    unsafe { rustix::mm::madvise(page, PAGE, Advice::LinuxPopulateWrite) }.is_ok()
}

/// Replaces the shared memory of a span by private memory of this process, with the same content.
/// Called by the signal handler: no allocation, no lock.
pub(crate) fn replace_by_copy(span: PageSpan) -> Result<(), Errno> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let start = std::ptr::with_exposed_provenance_mut::<c_void>(span.start());
    // SAFETY: no address is asked for, so that no mapping that exists is replaced.
    let copy = unsafe {
        rustix::mm::mmap_anonymous(null_mut(), span.byte_count(), prot, MapFlags::PRIVATE)
    }?;
    // SAFETY: both ranges have this count of bytes, are readable and writable respectively, and do
    // not overlap. The span belongs to a session of the parent process, which may write it now:
    // then the copy has some of that, as a read a moment later would. The move replaces the span by
    // memory with that content; threads of this process that write the span wait in the signal
    // handler.
    unsafe {
        start.cast::<u8>().copy_to_nonoverlapping(copy.cast(), span.byte_count());
        let flags = MremapFlags::MAYMOVE;
        rustix::mm::mremap_fixed(copy, span.byte_count(), span.byte_count(), flags, start)?;
    }
    Ok(())
}

/// Discards private copies of pages of a mapping made by [`OwnedMapping::map_private`]; they read
/// as the file again.
pub(crate) fn discard_copies(span: PageSpan) -> Result<(), Errno> {
    let start = std::ptr::without_provenance_mut(span.start());
    // SAFETY: the span is part of a private file mapping of this library. Its content changes to
    // the file's, which the caller has made equal, at a moment when no other code accesses it (rule
    // of `Session`).
    unsafe { rustix::mm::madvise(start, span.byte_count(), Advice::LinuxDontNeed) }
}
