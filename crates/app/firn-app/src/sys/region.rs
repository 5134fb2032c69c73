//! Area regions: memory that an application declared critical.

use std::ops::Range;
use std::ptr::NonNull;
use std::slice;

use crate::memory::AreaMemory;
use crate::span::PageSpan;

/// Bytes of an application that a session may read at commit, and write at abort and recovery.
#[derive(Debug)]
pub(crate) struct AreaRegion {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; the contract of `new` covers all threads.
unsafe impl Send for AreaRegion {}

impl AreaRegion {
    /// Takes memory into a session.
    ///
    /// # Safety
    ///
    /// For as long as the region exists, `len` bytes at `start` are allocated, readable and
    /// writable. While a method of the region runs, or a slice that it lent is alive, no thread
    /// writes them, and no thread reads them while it writes.
    pub(crate) unsafe fn new(start: NonNull<u8>, len: usize) -> Self {
        Self { start, len }
    }

    /// No bytes.
    pub(crate) fn empty() -> Self {
        Self { start: NonNull::dangling(), len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn addresses(&self) -> Range<usize> {
        let start = self.start.as_ptr().addr();
        start..start + self.len
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: allocated and readable, and no thread writes them meanwhile (contract of `new`).
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated and writable, and no other code accesses them meanwhile (contract of
        // `new`; `&mut self`).
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// The whole words from the start, which must be aligned.
    pub(crate) fn words_mut(&mut self) -> &mut [u64] {
        let words: NonNull<u64> = self.start.cast();
        assert!(words.is_aligned(), "words of an area that is not aligned");
        // SAFETY: as in `bytes_mut`; aligned as asserted, and any bits are a word.
        unsafe { slice::from_raw_parts_mut(words.as_ptr(), self.len / size_of::<u64>()) }
    }
}

/// Copies pages of an area's memory to its second mapping, if it has one.
pub(crate) fn copy_to_second(memory: &AreaMemory, span: PageSpan) {
    let Some(second) = memory.second_mapping() else { return };
    let offset = span.start() - memory.span().start();
    assert!(offset + span.byte_count() <= second.len(), "pages outside of a mapping");
    // SAFETY: both mappings have that many bytes at that offset (asserted; they are of equal
    // length), do not overlap, and no other code accesses either meanwhile (rule of `Session`; the
    // second one is the library's own).
    unsafe {
        let from = memory.start().as_ptr().add(offset);
        from.copy_to_nonoverlapping(second.start().as_ptr().add(offset), span.byte_count());
    }
}
