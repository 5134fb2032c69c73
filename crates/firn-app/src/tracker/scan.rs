//! Scan: page-table entries, read at commit, say which pages were written. Nothing is noted in between.
//!
//! Linux shows no program the dirty bit that the processor sets. There are two next best things:
//!
//! - *Soft-dirty bits* (`CONFIG_MEM_SOFT_DIRTY`): kept by the kernel for every page of the process, forgotten by writing to
//!   `clear_refs`, for the whole process at once: so there can be one such session per process. Any memory.
//! - *Private copies*, where the kernel lacks those bits: the area is a private mapping of a memory file that holds the
//!   committed state. The first write of a page makes a copy of it; copies are what a scan (`PAGEMAP_SCAN`, Linux 6.7) finds.
//!   At commit they are written to the file and given up. Memory must be allocated by the library.
//!
//! Both cost the first write of a page a fault inside the kernel, and a commit the time to look at every page of the areas.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Found, Kind, Tracker};
use crate::error::Error;
use crate::memory::Memory;
use crate::span::Span;
use crate::sys::fork::Owner;
use crate::sys::pagemap::{Pagemap, Sought, forget_writes};
use crate::sys::{mapping, region};

/// The mark of the process of which a session reads the soft-dirty bits; 0 if none does. A child has bits of its own.
static SOFT_DIRTY_OF: AtomicU64 = AtomicU64::new(0);

/// The way that this kernel has.
pub(super) fn open() -> Result<Box<dyn Tracker>, Error> {
    match soft_dirty_works()? {
        true => Ok(Box::new(SoftDirty::open()?)),
        false => Ok(Box::new(Copies::open()?)),
    }
}

fn pagemap() -> Result<Pagemap, Error> {
    Pagemap::open().map_err(Error::io("opening /proc/self/pagemap"))
}

/// A kernel without the bits shows them as 0, also for a page that has just been mapped and written.
fn soft_dirty_works() -> Result<bool, Error> {
    let memory = Memory::anonymous(1)?;
    // SAFETY: one byte of memory that nobody else knows.
    unsafe { memory.start().write_volatile(1) };
    let mut found = Found::default();
    pagemap()?
        .soft_dirty(memory.span(), &mut found)
        .map_err(Error::io("reading /proc/self/pagemap"))?;
    Ok(!found.runs().is_empty())
}

/// Soft-dirty bits.
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
        // If it is another's now, this is a child, and the session its parent's.
        let _ = SOFT_DIRTY_OF.compare_exchange(of, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

impl Tracker for SoftDirty {
    fn kind(&self) -> Kind {
        Kind::Scan
    }

    fn watch(&mut self, span: Span) -> Result<(), Error> {
        // What other areas have had written stays written: theirs is told once too often rather than never.
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

/// Private copies.
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

/// Writes copies to the file and gives them up.
fn settle(memory: &Memory, span: Span) -> Result<(), Error> {
    region::copy_to_second(memory, span);
    mapping::forget_copies(span).map_err(Error::system("giving up private copies"))
}
