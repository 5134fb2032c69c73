//! Scan: page-table entries, read at commit, show which pages were written. Nothing is noted in
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

use super::{Found, Kind, Tracker};
use crate::error::Error;
use crate::memory::Memory;
use crate::span::Span;
use crate::sys::fork::Owner;
use crate::sys::pagemap::{Pagemap, Sought, forget_writes};
use crate::sys::{mapping, region};

/// The mark of the process whose soft-dirty bits a session reads; 0 if no session does. A child has
/// bits of its own.
static SOFT_DIRTY_OF: AtomicU64 = AtomicU64::new(0);

/// Opens the tracker that this kernel supports.
pub(super) fn open() -> Result<Box<dyn Tracker>, Error> {
    match soft_dirty_works()? {
        true => Ok(Box::new(SoftDirty::open()?)),
        false => Ok(Box::new(Copies::open()?)),
    }
}

fn pagemap() -> Result<Pagemap, Error> {
    Pagemap::open().map_err(Error::io("opening /proc/self/pagemap"))
}

/// A kernel without the bits shows them as 0, also for a page that has just been mapped and
/// written.
fn soft_dirty_works() -> Result<bool, Error> {
    let memory = Memory::anonymous(1)?;
    // SAFETY: one byte of memory that no other code knows.
    unsafe { memory.start().write_volatile(1) };
    let mut found = Found::default();
    pagemap()?
        .soft_dirty(memory.span(), &mut found)
        .map_err(Error::io("reading /proc/self/pagemap"))?;
    Ok(!found.runs().is_empty())
}

/// A tracker by soft-dirty bits.
#[derive(Debug)]
struct SoftDirty {
    pagemap: Pagemap,
    spans: Vec<Span>,
    owner: Owner,
}

impl SoftDirty {
    fn open() -> Result<Self, Error> {
        let owner = Owner::this_process().map_err(Error::system("marking a page for forks"))?;
        if SOFT_DIRTY_OF.swap(owner.mark(), Ordering::AcqRel) == owner.mark() {
            let why = "another session of this process reads the soft-dirty bits".to_owned();
            return Err(Error::Unavailable { kind: Kind::Scan, why });
        }
        Ok(Self { pagemap: pagemap()?, spans: Vec::new(), owner })
    }
}

impl Drop for SoftDirty {
    fn drop(&mut self) {
        let of = self.owner.mark();
        // If the mark is another one, this process is a child, and the session is its parent's.
        let _ = SOFT_DIRTY_OF.compare_exchange(of, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

impl Tracker for SoftDirty {
    fn kind(&self) -> Kind {
        Kind::Scan
    }

    fn watch(&mut self, span: Span) -> Result<(), Error> {
        // Pages of other areas that were written stay marked: they are reported once too often
        // rather than never.
        self.spans.push(span);
        Ok(())
    }

    fn collect(&mut self, found: &mut Found) -> Result<(), Error> {
        for span in &self.spans {
            let read = self.pagemap.soft_dirty(*span, found);
            read.map_err(Error::io("reading /proc/self/pagemap"))?;
        }
        forget_writes().map_err(Error::io("clearing the soft-dirty bits"))
    }
}

/// A tracker by private copies.
#[derive(Debug)]
struct Copies {
    pagemap: Pagemap,
    memories: Vec<Arc<Memory>>,
}

impl Copies {
    fn open() -> Result<Self, Error> {
        let mut pagemap = pagemap()?;
        let memory = Memory::copying(1)?;
        let scanned = pagemap.scan(memory.span(), Sought::Copied, &mut Found::default());
        scanned.map_err(|errno| Error::Unavailable {
            kind: Kind::Scan,
            why: format!("soft-dirty bits or PAGEMAP_SCAN (Linux 6.7) are needed: {errno}"),
        })?;
        Ok(Self { pagemap, memories: Vec::new() })
    }
}

impl Tracker for Copies {
    fn kind(&self) -> Kind {
        Kind::Scan
    }

    fn watch(&mut self, _: Span) -> Result<(), Error> {
        Err(Error::Foreign { kind: Kind::Scan })
    }

    fn allocate(&mut self, bytes: usize) -> Result<Arc<Memory>, Error> {
        let memory = Arc::new(Memory::copying(bytes)?);
        self.memories.push(memory.clone());
        Ok(memory)
    }

    fn collect(&mut self, found: &mut Found) -> Result<(), Error> {
        let mut copies = Found::default();
        for memory in &self.memories {
            copies.clear();
            let scanned = self.pagemap.scan(memory.span(), Sought::Copied, &mut copies);
            scanned.map_err(Error::system("scanning for copied pages"))?;
            for &(start, len) in copies.runs() {
                settle(memory, Span::covering(start..start + len))?;
                found.push(start, len);
            }
        }
        Ok(())
    }
}

/// Writes copies to the file and discards them.
fn settle(memory: &Memory, span: Span) -> Result<(), Error> {
    region::copy_to_second(memory, span);
    mapping::forget_copies(span).map_err(Error::system("giving up private copies"))
}
