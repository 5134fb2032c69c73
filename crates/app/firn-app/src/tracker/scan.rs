//! Scan: page-table entries, read at commit, show which pages were written. Nothing is recorded in
//! between.
//!
//! Linux shows programs no dirty bit of the processor. There are two substitutes:
//!
//! - *Soft-dirty bits* (`CONFIG_MEM_SOFT_DIRTY`): the kernel maintains them for every page of the
//!   process. A write to `clear_refs` clears them, for the whole process at once, so only one
//!   session per process can use them. Any memory.
//! - *Private copies*, where the kernel lacks those bits: the area is a private mapping of a memory
//!   file that holds the committed state. The first write of a page makes a copy of it, and a scan
//!   (`PAGEMAP_SCAN`, Linux 6.7) finds copies. At commit they are written to the file and
//!   discarded. The library must allocate the memory.
//!
//! Both cost the first write of a page a fault inside the kernel, and a commit the time to check
//! every page of the areas.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::interface::{Tracker, WrittenRuns};
use super::kind::TrackerKind;
use crate::error::Error;
use crate::memory::AreaMemory;
use crate::span::PageSpan;
use crate::sys::fork::OwnerProcess;
use crate::sys::pagemap::{ScanCriterion, SelfPagemap, clear_soft_dirty};
use crate::sys::{mapping, region};

/// The mark of the process whose soft-dirty bits a session reads; 0 if no session does. A child has
/// bits of its own.
static SOFT_DIRTY_OF: AtomicU64 = AtomicU64::new(0);

/// Opens the tracker that this kernel supports.
pub(super) fn open_scan() -> Result<Box<dyn Tracker>, Error> {
    match probe_soft_dirty()? {
        true => Ok(Box::new(SoftDirtyTracker::open()?)),
        false => Ok(Box::new(PrivateCopyTracker::open()?)),
    }
}

fn open_pagemap() -> Result<SelfPagemap, Error> {
    SelfPagemap::open().map_err(Error::io("opening /proc/self/pagemap"))
}

/// A kernel without the bits shows them as 0, also for a page that has just been mapped and
/// written.
fn probe_soft_dirty() -> Result<bool, Error> {
    let memory = AreaMemory::anonymous(1)?;
    // SAFETY: one byte of memory that no other code knows.
    unsafe { memory.start().write_volatile(1) };
    let mut found = WrittenRuns::default();
    open_pagemap()?
        .scan_soft_dirty(memory.span(), &mut found)
        .map_err(Error::io("reading /proc/self/pagemap"))?;
    Ok(!found.runs().is_empty())
}

/// A tracker by soft-dirty bits.
#[derive(Debug)]
struct SoftDirtyTracker {
    pagemap: SelfPagemap,
    spans: Vec<PageSpan>,
    owner: OwnerProcess,
}

impl SoftDirtyTracker {
    fn open() -> Result<Self, Error> {
        let owner =
            OwnerProcess::this_process().map_err(Error::system("marking a page for forks"))?;
        if SOFT_DIRTY_OF.swap(owner.mark(), Ordering::AcqRel) == owner.mark() {
            let why = "another session of this process reads the soft-dirty bits".to_owned();
            return Err(Error::Unavailable { kind: TrackerKind::Scan, why });
        }
        Ok(Self { pagemap: open_pagemap()?, spans: Vec::new(), owner })
    }
}

impl Drop for SoftDirtyTracker {
    fn drop(&mut self) {
        let of = self.owner.mark();
        // If the mark is another one, this process is a child, and the session is its parent's.
        let _ = SOFT_DIRTY_OF.compare_exchange(of, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

impl Tracker for SoftDirtyTracker {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Scan
    }

    fn watch_span(&mut self, span: PageSpan) -> Result<(), Error> {
        // Pages of other areas that were written stay marked: they are reported once too often
        // rather than never.
        self.spans.push(span);
        Ok(())
    }

    fn forget_span(&mut self, span: PageSpan) -> Result<(), Error> {
        span.remove_from(&mut self.spans);
        Ok(())
    }

    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        for span in &self.spans {
            let read = self.pagemap.scan_soft_dirty(*span, found);
            read.map_err(Error::io("reading /proc/self/pagemap"))?;
        }
        clear_soft_dirty().map_err(Error::io("clearing the soft-dirty bits"))
    }
}

/// A tracker by private copies.
#[derive(Debug)]
struct PrivateCopyTracker {
    pagemap: SelfPagemap,
    memories: Vec<Arc<AreaMemory>>,
}

impl PrivateCopyTracker {
    fn open() -> Result<Self, Error> {
        let mut pagemap = open_pagemap()?;
        let memory = AreaMemory::map_copying(1)?;
        let scanned =
            pagemap.scan_span(memory.span(), ScanCriterion::Copied, &mut WrittenRuns::default());
        scanned.map_err(|errno| Error::Unavailable {
            kind: TrackerKind::Scan,
            why: format!("soft-dirty bits or PAGEMAP_SCAN (Linux 6.7) are needed: {errno}"),
        })?;
        Ok(Self { pagemap, memories: Vec::new() })
    }
}

impl Tracker for PrivateCopyTracker {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Scan
    }

    fn watch_span(&mut self, _: PageSpan) -> Result<(), Error> {
        Err(Error::Foreign { kind: TrackerKind::Scan })
    }

    fn allocate_memory(&mut self, bytes: usize) -> Result<Arc<AreaMemory>, Error> {
        let memory = Arc::new(AreaMemory::map_copying(bytes)?);
        self.memories.push(memory.clone());
        Ok(memory)
    }

    fn forget_span(&mut self, span: PageSpan) -> Result<(), Error> {
        // Areas have memory of their own here: a span is all pages of one.
        self.memories.retain(|memory| memory.span() != span);
        Ok(())
    }

    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        let mut copies = WrittenRuns::default();
        for memory in &self.memories {
            copies.clear();
            let scanned = self.pagemap.scan_span(memory.span(), ScanCriterion::Copied, &mut copies);
            scanned.map_err(Error::system("scanning for copied pages"))?;
            for &(start, len) in copies.runs() {
                commit_copies(memory, PageSpan::covering_range(start..start + len))?;
                found.push_run(start, len);
            }
        }
        Ok(())
    }
}

/// Writes copies to the file and discards them.
fn commit_copies(memory: &AreaMemory, span: PageSpan) -> Result<(), Error> {
    region::copy_to_second(memory, span);
    mapping::discard_copies(span).map_err(Error::system("giving up private copies"))
}
