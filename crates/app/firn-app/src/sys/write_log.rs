//! Write log: the pages and words that were written in a span. The signal handler appends to it, in
//! memory of its own.
//!
//! The log never shares a page with data that could be write-protected: a fault inside the handler
//! would end the process.
//!
//! ```text
//!   words    0 listed   pages in the list               4 unsupported   instructions not emulated
//!            1 logged   stores in the log               5 everything    1: the whole span is writable
//!            2 emulated stores performed
//!            3 faults   handled
//!            6 own      the span is the child's own: 0 no, 1 being copied, 2 yes
//!            7 lock     the thread that records a page or takes the log; 0 if none does
//!            8 ..       one bit per page: recorded and writable
//!   halves   list of pages, in order of their first write
//!   words    log of stores: offset in the span << 16 | length - 1
//! ```
//!
//! The first and the last page of a span may have other data, which any thread may write at any
//! time, also while a commit takes the log. So a page is recorded and made writable in one step,
//! and the log is taken and pages are protected in one step: a lock keeps them apart. A thread that
//! has the lock may fault itself, because `take_log` writes memory of its caller; then the handler
//! runs without the lock, and adds to the list that is being read.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;

use super::fork::OwnerProcess;
use super::mapping::{OwnedMapping, protect_span, replace_by_copy};
use crate::span::{PAGE, PageSpan};

const COUNTERS: usize = 8;
/// The maximum count of stores in the log of an emulated span; further stores are followed by
/// pages.
const LOG_STORES_MAX: usize = 1 << 15;
/// In a child: which process owns the memory of an emulated span.
const SHARED: u64 = 0;
const COPYING: u64 = 1;
const OWN: u64 = 2;

/// The writes to one span since the log was last taken.
#[derive(Debug)]
pub(crate) struct WriteLog {
    span: PageSpan,
    /// The address of a second, writable mapping of the span; 0 if there is none.
    alias: usize,
    memory: OwnedMapping,
    log: usize,
    owner: OwnerProcess,
}

/// A store that the handler recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordedStore {
    pub(crate) address: usize,
    pub(crate) len: usize,
}

impl WriteLog {
    pub(crate) fn new(span: PageSpan, alias: Option<usize>) -> Result<Self, Errno> {
        let log = if alias.is_some() { LOG_STORES_MAX } else { 0 };
        let bits = span.page_count().div_ceil(64);
        let len = (COUNTERS + bits + span.page_count().div_ceil(2) + log) * 8;
        let owner = OwnerProcess::this_process()?;
        Ok(Self {
            span,
            alias: alias.unwrap_or(0),
            memory: OwnedMapping::map_anonymous(len)?,
            log,
            owner,
        })
    }

    /// The process that follows the span.
    pub(crate) fn owner(&self) -> OwnerProcess {
        self.owner
    }

    /// Whether a write to the span's pages reaches the memory of the process that follows it, in a
    /// child as well.
    pub(crate) fn is_shared(&self) -> bool {
        self.alias != 0 && self.counter_word(6).load(Ordering::Acquire) != OWN
    }

    /// In a child: gives the span private memory of the child with its present content, and makes
    /// it writable.
    ///
    /// Called by the signal handler: no allocation, no lock.
    pub(crate) fn make_private_to_child(&self) -> Result<(), Errno> {
        if self.alias == 0 {
            return protect_span(self.span, true);
        }
        let state = self.counter_word(6);
        loop {
            match state.compare_exchange(SHARED, COPYING, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    let copied = replace_by_copy(self.span);
                    let next = if copied.is_ok() { OWN } else { SHARED };
                    state.store(next, Ordering::Release);
                    return copied;
                }
                Err(OWN) => return Ok(()),
                // Another thread of the child is copying it.
                Err(_) => rustix::thread::sched_yield(),
            }
        }
    }

    pub(crate) fn span(&self) -> PageSpan {
        self.span
    }

    pub(crate) fn alias(&self) -> Option<usize> {
        (self.alias != 0).then_some(self.alias)
    }

    fn counter_word(&self, number: usize) -> &AtomicU64 {
        &self.memory.atomic_words(0, COUNTERS)[number]
    }

    fn page_bits(&self) -> &[AtomicU64] {
        self.memory.atomic_words(COUNTERS * 8, self.span.page_count().div_ceil(64))
    }

    fn page_list(&self) -> &[AtomicU32] {
        let offset = (COUNTERS + self.page_bits().len()) * 8;
        self.memory.half_words(offset, self.span.page_count())
    }

    fn listed_pages(&self) -> &[AtomicU32] {
        &self.page_list()[..self.counter_word(0).load(Ordering::Acquire) as usize]
    }

    fn store_log(&self) -> &[AtomicU64] {
        let offset = (COUNTERS + self.page_bits().len() + self.span.page_count().div_ceil(2)) * 8;
        self.memory.atomic_words(offset, self.log)
    }

    /// Does a step that no other thread may interrupt.
    ///
    /// Called by the signal handler, too: no allocation, and a lock that its own thread may have.
    fn run_locked<T>(&self, step: impl FnOnce() -> T) -> T {
        let (lock, own) = (self.counter_word(7), rustix::thread::gettid().as_raw_nonzero());
        let own = own.get().unsigned_abs().into();
        if lock.load(Ordering::Acquire) == own {
            return step();
        }
        while lock.compare_exchange_weak(0, own, Ordering::AcqRel, Ordering::Acquire).is_err() {
            rustix::thread::sched_yield();
        }
        let result = step();
        lock.store(0, Ordering::Release);
        result
    }

    /// Records a page and makes it writable. If the kernel has no mapping left to split off, makes
    /// the whole span writable.
    ///
    /// Called by the signal handler: no allocation.
    pub(crate) fn record_page(&self, address: usize) -> Result<(), Errno> {
        self.run_locked(|| self.record_locked_page(address))
    }

    fn record_locked_page(&self, address: usize) -> Result<(), Errno> {
        self.counter_word(3).fetch_add(1, Ordering::Relaxed);
        let page = (address - self.span.start()) / PAGE;
        let bit = 1 << (page % 64);
        if self.page_bits()[page / 64].fetch_or(bit, Ordering::AcqRel) & bit == 0 {
            let at = self.counter_word(0).fetch_add(1, Ordering::AcqRel) as usize;
            self.page_list()[at].store(page as u32, Ordering::Release);
        }
        protect_span(self.span.sub_span(page..page + 1), true).or_else(|_| {
            self.counter_word(5).store(1, Ordering::Release);
            protect_span(self.span, true)
        })
    }

    /// Records a store. False if the log is full: then the store must not be performed without a
    /// record.
    pub(crate) fn record_store(&self, stored: RecordedStore) -> bool {
        let at = self.counter_word(1).fetch_add(1, Ordering::AcqRel) as usize;
        let Some(entry) = self.store_log().get(at) else { return false };
        let offset = (stored.address - self.span.start()) as u64;
        entry.store(offset << 16 | (stored.len as u64 - 1) & 0xffff, Ordering::Release);
        self.counter_word(2).fetch_add(1, Ordering::Relaxed);
        true
    }

    pub(crate) fn count_unsupported(&self) {
        self.counter_word(4).fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn emulated_stores(&self) -> u64 {
        self.counter_word(2).load(Ordering::Relaxed)
    }

    pub(crate) fn unsupported_instructions(&self) -> u64 {
        self.counter_word(4).load(Ordering::Relaxed)
    }

    /// Returns the recorded pages and stores, clears the log, and protects the pages again. No
    /// thread may write the area in the span meanwhile.
    pub(crate) fn take_log(
        &self,
        pages: &mut Vec<u32>,
        stores: &mut Vec<RecordedStore>,
    ) -> Result<(), Errno> {
        self.run_locked(|| self.take_locked_log(pages, stores))
    }

    fn take_locked_log(
        &self,
        pages: &mut Vec<u32>,
        stores: &mut Vec<RecordedStore>,
    ) -> Result<(), Errno> {
        pages.clear();
        stores.clear();
        self.take_stores(stores);
        if self.counter_word(5).swap(0, Ordering::AcqRel) != 0 {
            return self.take_everything(pages);
        }
        // A write to the list that is returned may fault, and add a page.
        while let Some(entry) = self.listed_pages().get(pages.len()) {
            pages.push(entry.load(Ordering::Acquire));
        }
        for page in pages.iter() {
            self.page_bits()[*page as usize / 64].fetch_and(!(1 << (page % 64)), Ordering::AcqRel);
        }
        self.counter_word(0).store(0, Ordering::Release);
        pages.sort_unstable();
        match (pages.first(), pages.last()) {
            (Some(&first), Some(&last)) => self.protect_pages(first as usize..last as usize + 1),
            _ => Ok(()),
        }
    }

    /// Protects all of these pages in one call: the mappings that were split become one again.
    fn protect_pages(&self, pages: Range<usize>) -> Result<(), Errno> {
        protect_span(self.span.sub_span(pages), false)
    }

    fn take_everything(&self, pages: &mut Vec<u32>) -> Result<(), Errno> {
        self.counter_word(0).store(0, Ordering::Release);
        for bits in self.page_bits() {
            bits.store(0, Ordering::Release);
        }
        pages.extend(0..self.span.page_count() as u32);
        protect_span(self.span, false)
    }

    fn take_stores(&self, stores: &mut Vec<RecordedStore>) {
        let count = self.counter_word(1).swap(0, Ordering::AcqRel) as usize;
        let recorded = self.store_log().iter().take(count).map(|entry| {
            let entry = entry.load(Ordering::Acquire);
            let address = self.span.start() + (entry >> 16) as usize;
            RecordedStore { address, len: (entry & 0xffff) as usize + 1 }
        });
        stores.extend(recorded);
    }
}
