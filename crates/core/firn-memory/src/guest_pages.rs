//! The guest's own page tables, read from outside the guest.
//!
//! Two pages that are neighbours for a program are rarely neighbours in RAM; the page tables of the
//! guest show which are. A walk begins at a root: the roots that the vCPUs hold (register CR3) and,
//! for a Linux guest, pages that look like such a root ([`kernel_half_roots`]).
//!
//! ```text
//!   CR3 -> [level 4, 512 entries] -> [level 3] -> [level 2] -> [level 1] -> page of 4 KiB
//!                                       |             `- entry with bit 7: page of 2 MiB
//!                                       `- entry with bit 7: page of 1 GiB
//!   with five levels there is one more table in front
//! ```
//!
//! The layout is that of the Intel SDM, volume 3, chapter 4. The guest continues to run and may be
//! any program, so the bytes that are read may be half-written or no page table at all. A walk
//! visits each table once per level and reads a bounded number of them: it ends, whatever it reads.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use firn_types::{GuestPhys, PAGE_SIZE, Page, RegionMap};

use crate::guest_memory::GuestMemory;

mod entry;
mod page_lookup;
mod roots;

pub use entry::PageFlags;
use entry::{ENTRIES, PageTable, PageTableEntry};
pub use page_lookup::{PART_PAGES, PageAccessError, PageLookup, PartPath};
pub use roots::kernel_half_roots;

/// RAM of a guest, as far as a page-table walk needs it.
pub trait GuestPhysRead {
    /// The layout of RAM in guest-physical memory.
    fn region_map(&self) -> &RegionMap;
    /// Copies whole pages of RAM. `false` if they cannot be read.
    fn read_pages(&self, first: Page, out: &mut [u8]) -> bool;
    /// The pages that may hold other bytes than zeros, in runs.
    fn backed_pages(&self) -> Vec<Range<Page>>;
}

impl GuestPhysRead for GuestMemory {
    fn region_map(&self) -> &RegionMap {
        GuestMemory::region_map(self)
    }

    fn read_pages(&self, first: Page, out: &mut [u8]) -> bool {
        GuestMemory::read_pages(self, first, out).is_ok()
    }

    /// If the kernel does not report which pages are backed, all are read.
    fn backed_pages(&self) -> Vec<Range<Page>> {
        self.backed_runs().unwrap_or_else(|_| vec![self.all_pages()])
    }
}

/// The number of a page of a guest-virtual address space: its address divided by the page size.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VirtPage(pub u64);

impl VirtPage {
    /// The address of its first byte.
    pub fn address(self) -> u64 {
        self.0.wrapping_mul(PAGE_SIZE as u64)
    }

    /// Whether it lies in the upper half, where an x86-64 kernel lives.
    pub fn is_kernel(self) -> bool {
        self.address() >> 63 != 0
    }
}

impl fmt::Debug for VirtPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gva {:#x}", self.address())
    }
}

/// A part of an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressHalf {
    /// The lower half, where programs live.
    User,
    /// The upper half, where the kernel lives; shared by all address spaces of a Linux guest.
    Kernel,
}

/// The outcome of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkOutcome {
    /// Everything that can be reached was visited.
    Complete,
    /// There were more tables than a guest of this size can need, so this is not a page table.
    Cut,
}

/// Called for each run of mapped RAM pages: with its guest-virtual page, its first RAM page, its
/// length in pages, and its flags.
pub type PageVisitor<'v> = dyn FnMut(VirtPage, Page, u32, PageFlags) + 'v;

/// Walks one address space in the order of guest-virtual addresses. Pages that are not RAM
/// (devices, garbage) are left out. `levels` is 4 or 5.
pub fn walk_address_space(
    memory: &impl GuestPhysRead,
    root: GuestPhys,
    levels: u8,
    visit: &mut PageVisitor<'_>,
) -> WalkOutcome {
    let mut walker = PageTableWalker::new(memory, levels);
    match walker.walk_half(root, AddressHalf::User, visit) {
        WalkOutcome::Complete => walker.walk_half(root, AddressHalf::Kernel, visit),
        WalkOutcome::Cut => WalkOutcome::Cut,
    }
}

/// Walks several address spaces, and enters tables that they share only once.
#[derive(Debug)]
pub struct PageTableWalker<'m, M> {
    memory: &'m M,
    levels: u8,
    /// The tables that were entered, each with its level.
    entered: HashSet<(Page, u8)>,
    tables_left: usize,
}

/// The number of tables that a walk may enter in addition to one for each sixteen pages of RAM.
const TABLES_SPARE: usize = 1024;

impl<'m, M: GuestPhysRead> PageTableWalker<'m, M> {
    /// A walker for address spaces with this many levels: 5, or 4 for every other number.
    pub fn new(memory: &'m M, levels: u8) -> Self {
        let tables_left = memory.region_map().total_pages() as usize / 16 + TABLES_SPARE;
        let levels = if levels == 5 { 5 } else { 4 };
        Self { memory, levels, entered: HashSet::new(), tables_left }
    }

    /// Walks one half of an address space in the order of guest-virtual addresses. The low bits of
    /// `root`, which CR3 uses for other purposes, are ignored.
    pub fn walk_half(
        &mut self,
        root: GuestPhys,
        half: AddressHalf,
        visit: &mut PageVisitor<'_>,
    ) -> WalkOutcome {
        let entries = match half {
            AddressHalf::User => 0..ENTRIES / 2,
            AddressHalf::Kernel => ENTRIES / 2..ENTRIES,
        };
        let base = match (half, self.levels) {
            (AddressHalf::User, _) => 0,
            (AddressHalf::Kernel, 5) => 0xfe00_0000_0000_0000,
            (AddressHalf::Kernel, _) => 0xffff_0000_0000_0000,
        };
        let Some(table) = self.memory.region_map().page_at(PageTableEntry(root.0).table_address())
        else {
            return WalkOutcome::Complete;
        };
        match self.visit_table(table, self.levels, base, entries, visit) {
            Some(()) => WalkOutcome::Complete,
            None => WalkOutcome::Cut,
        }
    }

    /// Visits the pages and tables that some entries of a table name. `None` when too many tables
    /// have been entered.
    fn visit_table(
        &mut self,
        table: Page,
        level: u8,
        base: u64,
        entries: Range<usize>,
        visit: &mut PageVisitor<'_>,
    ) -> Option<()> {
        self.tables_left = self.tables_left.checked_sub(1)?;
        let mut bytes = PageTable::default();
        if !self.memory.read_pages(table, bytes.as_mut_bytes()) {
            return Some(());
        }
        for index in entries {
            let entry = bytes.entry(index);
            let address = base | (index as u64) << PageTableEntry::address_shift(level);
            match entry.is_present() {
                false => {}
                true if entry.is_page(level) => self.visit_page(entry, level, address, visit),
                true => self.enter_table(entry, level - 1, address, visit)?,
            }
        }
        Some(())
    }

    /// Enters the table that an entry names, unless it is not RAM or was entered at this level
    /// before.
    fn enter_table(
        &mut self,
        entry: PageTableEntry,
        level: u8,
        address: u64,
        visit: &mut PageVisitor<'_>,
    ) -> Option<()> {
        let Some(table) = self.memory.region_map().page_at(entry.table_address()) else {
            return Some(());
        };
        match self.entered.insert((table, level)) {
            true => self.visit_table(table, level, address, 0..ENTRIES, visit),
            false => Some(()),
        }
    }

    /// Visits the RAM of one mapped page of any size.
    fn visit_page(
        &self,
        entry: PageTableEntry,
        level: u8,
        address: u64,
        visit: &mut PageVisitor<'_>,
    ) {
        let pages =
            1u64 << (PageTableEntry::address_shift(level) - PageTableEntry::address_shift(1));
        let first = VirtPage(address / PAGE_SIZE as u64);
        for (offset, page, count) in
            ram_runs_in(self.memory.region_map(), entry.page_address(level), pages)
        {
            visit(VirtPage(first.0 + offset), page, count, entry.flags());
        }
    }
}

/// The RAM in the `pages` guest-physical pages from `from`: offset in pages, first RAM page,
/// length.
fn ram_runs_in(
    map: &RegionMap,
    from: GuestPhys,
    pages: u64,
) -> impl Iterator<Item = (u64, Page, u32)> + '_ {
    const PAGE: u64 = PAGE_SIZE as u64;
    let wanted = from.0 / PAGE..from.0 / PAGE + pages;
    let spans = map.guest_spans();
    let first =
        spans.partition_point(|span| span.gpa.0 / PAGE + u64::from(span.pages) <= wanted.start);
    spans[first..].iter().map_while(move |span| {
        let span_start = span.gpa.0 / PAGE;
        let start = wanted.start.max(span_start);
        let end = wanted.end.min(span_start + u64::from(span.pages));
        let page = Page(span.page.0 + start.checked_sub(span_start)? as u32);
        (start < end).then(|| (start - wanted.start, page, (end - start) as u32))
    })
}

#[cfg(test)]
mod tests;
