//! Memory of the library's own: mapped when made, unmapped when dropped.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::slice;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};

use crate::span::{PAGE, Span};

/// A mapping that nobody else unmaps.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is an address and a length; the memory behind it belongs to the process, not to a thread. What is
// done to it goes through `Region` and the atomics below, which have their own rules.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives nothing but the address, and slices of atomics.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Private zeroed memory, in small pages.
    pub(crate) fn anonymous(len: usize) -> Result<Self, Errno> {
        let len = len.max(1).next_multiple_of(PAGE);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so that no mapping that exists is replaced.
        let start =
            unsafe { rustix::mm::mmap_anonymous(null_mut(), len, prot, MapFlags::PRIVATE) }?;
        Ok(Self::of(start, len).in_small_pages())
    }

    /// Private memory, of which a child that is forked gets zeros.
    pub(crate) fn wiped_in_children() -> Result<Self, Errno> {
        let page = Self::anonymous(PAGE)?;
        let start = page.start.as_ptr().cast();
        // SAFETY: the range is this mapping; its content changes in a child only, where nothing has read it yet.
        unsafe { rustix::mm::madvise(start, page.len, Advice::LinuxWipeOnFork) }?;
        Ok(page)
    }

    /// A file's memory, shared with its other mappings.
    pub(crate) fn shared(file: BorrowedFd<'_>, len: usize) -> Result<Self, Errno> {
        Self::file(file, len, MapFlags::SHARED)
    }

    /// A file's memory until it is written, then a copy of the page.
    pub(crate) fn private(file: BorrowedFd<'_>, len: usize) -> Result<Self, Errno> {
        Self::file(file, len, MapFlags::PRIVATE)
    }

    fn file(file: BorrowedFd<'_>, len: usize, flags: MapFlags) -> Result<Self, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so that no mapping that exists is replaced. The file is a memfd of this
        // library, or the memory of a device, which nobody truncates.
        let start = unsafe { rustix::mm::mmap(null_mut(), len, prot, flags, file, 0) }?;
        Ok(Self::of(start, len).in_small_pages())
    }

    fn of(start: *mut c_void, len: usize) -> Self {
        // mmap never gives address 0 where none was asked for.
        let start = NonNull::new(start.cast()).unwrap_or(NonNull::dangling());
        Self { start, len }
    }

    /// A huge page would count as written as a whole. That a kernel has none is no error.
    fn in_small_pages(self) -> Self {
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

    pub(crate) fn span(&self) -> Span {
        Span::covering(self.address()..self.address() + self.len)
    }

    /// Words at an offset, as atomics. For anonymous mappings that are used in no other way.
    pub(crate) fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
        assert!(offset % 8 == 0 && offset + count * 8 <= self.len, "words outside of a mapping");
        // SAFETY: the words lie inside the mapping, which is readable, writable, aligned to a page, zeroed when made, and
        // lives as long as `self`; users of this method access it through atomics only.
        unsafe { slice::from_raw_parts(self.start.as_ptr().add(offset).cast(), count) }
    }

    /// Makes each page of some memory this process's own and writable, as a write does, and changes nothing.
    pub(crate) fn touch(span: Span) {
        for address in (span.start()..span.end()).step_by(PAGE) {
            // SAFETY: a span is memory that a session was given, readable and writable. Replacing a byte by itself, atomically,
            // loses no write of another thread.
            let byte =
                unsafe { AtomicU8::from_ptr(std::ptr::with_exposed_provenance_mut(address)) };
            // Adding nothing would be as good, and compilers leave it out.
            let now = byte.load(Ordering::Relaxed);
            let _ = byte.compare_exchange(now, now, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// As [`Self::words`], with half the width.
    pub(crate) fn half_words(&self, offset: usize, count: usize) -> &[AtomicU32] {
        assert!(offset % 4 == 0 && offset + count * 4 <= self.len, "words outside of a mapping");
        // SAFETY: as in `words`.
        unsafe { slice::from_raw_parts(self.start.as_ptr().add(offset).cast(), count) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this type; who has the address keeps the mapping alive (`Arc<Mapping>`). A
        // failure would leave it mapped, which harms nothing.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Lets pages be written, or read only.
pub(crate) fn protect(span: Span, writable: bool) -> Result<(), Errno> {
    let flags = match writable {
        true => MprotectFlags::READ | MprotectFlags::WRITE,
        false => MprotectFlags::READ,
    };
    let start = std::ptr::without_provenance_mut(span.start());
    // SAFETY: a span is memory that a session was given, readable and writable before, and that nobody else protects
    // (contract of `Session::register`; own mappings by construction). Reading it stays possible; who writes it gets a
    // fault that `fault` answers.
    unsafe { rustix::mm::mprotect(start, span.bytes(), flags) }
}

/// Gives a span memory of this process's own in place of what it shares, with the same content. Called by the signal handler:
/// no allocation, no lock.
pub(crate) fn replace_by_copy(span: Span) -> Result<(), Errno> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let start = std::ptr::with_exposed_provenance_mut::<c_void>(span.start());
    // SAFETY: no address is asked for, so that no mapping that exists is replaced.
    let copy =
        unsafe { rustix::mm::mmap_anonymous(null_mut(), span.bytes(), prot, MapFlags::PRIVATE) }?;
    // SAFETY: both are so many bytes, readable and writable respectively, and apart. The span belongs to a session of the parent
    // process, which may write it now: then the copy has some of that, as a read a moment later would. The move replaces
    // the span by memory with that content; threads of this process that write the span wait in the signal handler.
    unsafe {
        start.cast::<u8>().copy_to_nonoverlapping(copy.cast(), span.bytes());
        let flags = MremapFlags::MAYMOVE;
        rustix::mm::mremap_fixed(copy, span.bytes(), span.bytes(), flags, start)?;
    }
    Ok(())
}

/// Gives up private copies of pages of a mapping made by [`Mapping::private`]; they read as the file again.
pub(crate) fn forget_copies(span: Span) -> Result<(), Errno> {
    let start = std::ptr::without_provenance_mut(span.start());
    // SAFETY: the span is part of a private file mapping of this library. Its content changes to the file's, which the
    // caller has made equal, at a moment when nobody else accesses it (rule of `Session`).
    unsafe { rustix::mm::madvise(start, span.bytes(), Advice::LinuxDontNeed) }
}
