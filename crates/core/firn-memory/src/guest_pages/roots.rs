//! Search for the address spaces of a Linux guest that no vCPU runs at the moment.
//!
//! Linux copies the kernel half of the top-level table into every new address space, and keeps the
//! copies equal. So a page whose upper 256 entries are those of a known root is most likely a root
//! too. A wrong guess costs a walk of garbage, which is bounded, and nothing else: the walk only
//! decides the order in which pages are copied.
//!
//! ```text
//!   root of a vCPU      [ 0 .. 255: programs | 256 .. 511: kernel ]
//!                                              ||||||||  ||||||||     alike but for a few entries
//!   page somewhere      [ 0 .. 255: others   | 256 .. 511: kernel ]
//! ```

use std::ops::Range;

use firn_types::{GuestPhys, PAGE_SIZE, Page};

use super::GuestPhysRead;
use super::entry::{ENTRIES, PageTableEntry};

/// Kernel-half entries that may differ: Linux maps a process's own LDT there.
const DIFFERENT_MAX: usize = 2;
/// Kernel-half entries that must be in use; with fewer, the root does not identify a kernel.
const USED_MIN: usize = 3;
/// Pages that are read at once: as many as stay in a processor's cache.
const CHUNK_PAGES: usize = 64;

/// The kernel half of a root, without the bits that the processor changes.
struct KernelHalfPattern([u64; ENTRIES / 2]);

/// The roots of other Linux address spaces in which programs run, in the order of RAM pages. Reads
/// all backed RAM: some 0.3 s per GiB, or less with an open window
/// ([`GuestMemory::open_window`](crate::GuestMemory::open_window)).
///
/// Empty if `root` is not the top-level table of a running Linux kernel.
pub fn kernel_half_roots(memory: &impl GuestPhysRead, root: GuestPhys) -> Vec<GuestPhys> {
    let Some((own, pattern)) = read_pattern(memory, root) else { return Vec::new() };
    let mut chunk = vec![0; CHUNK_PAGES * PAGE_SIZE];
    let mut roots = Vec::new();
    for part in memory.backed_pages().into_iter().flat_map(split_into_chunks) {
        let bytes = &mut chunk[..Page::count_in(&part) * PAGE_SIZE];
        if !memory.read_pages(part.start, bytes) {
            continue;
        }
        let tables = Page::iter_range(part).zip(bytes.chunks_exact(PAGE_SIZE));
        let alike = tables.filter(|(page, table)| *page != own && pattern.matches_table(table));
        roots.extend(alike.filter_map(|(page, _)| memory.region_map().gpa_of(page)));
    }
    roots
}

/// Reads the pattern of a root. With page-table isolation CR3 may name the second table of a pair,
/// which maps little of the kernel: then the first one is used.
fn read_pattern(memory: &impl GuestPhysRead, root: GuestPhys) -> Option<(Page, KernelHalfPattern)> {
    const PAIR: u64 = PAGE_SIZE as u64;
    let own = PageTableEntry(root.0).table_address();
    let read = |gpa: GuestPhys| {
        let page = memory.region_map().page_at(gpa)?;
        let mut table = vec![0; PAGE_SIZE];
        let pattern =
            memory.read_pages(page, &mut table).then(|| KernelHalfPattern::from_table(&table))?;
        Some((page, pattern))
    };
    let pair = [Some(own), (own.0 & PAIR != 0).then_some(GuestPhys(own.0 & !PAIR))];
    let best = pair.into_iter().flatten().filter_map(read).max_by_key(|(_, p)| p.count_used())?;
    (best.1.count_used() >= USED_MIN).then_some(best)
}

/// An entry, without the bits that the processor sets while it runs.
fn stable_entry(table: &[u8], index: usize) -> PageTableEntry {
    let bytes = table[index * 8..][..8].try_into().unwrap_or_default();
    PageTableEntry(PageTableEntry(u64::from_le_bytes(bytes)).stable_bits())
}

impl KernelHalfPattern {
    fn from_table(table: &[u8]) -> Self {
        Self(std::array::from_fn(|index| stable_entry(table, ENTRIES / 2 + index).0))
    }

    fn count_used(&self) -> usize {
        self.0.iter().filter(|&&entry| entry != 0).count()
    }

    /// Whether a table has this kernel half, and programs. The last entry, which maps the kernel's
    /// own code, is equal in all roots and rules most pages out at once.
    fn matches_table(&self, table: &[u8]) -> bool {
        let last = ENTRIES - 1;
        if stable_entry(table, last).0 != self.0[last - ENTRIES / 2] {
            return false;
        }
        let pairs = (ENTRIES / 2..ENTRIES).zip(&self.0);
        let different =
            pairs.filter(|(index, mine)| stable_entry(table, *index).0 != **mine).count();
        different <= DIFFERENT_MAX && has_programs(table)
    }
}

/// Whether the lower half of a table is that of a program. Linux also has tables that map all of
/// RAM there, one to one and only for the kernel itself (to start processors, for its firmware):
/// they would make everything appear as one address space in physical order.
fn has_programs(table: &[u8]) -> bool {
    let mut present = (0..ENTRIES / 2)
        .map(|index| stable_entry(table, index))
        .filter(|e| e.is_present())
        .peekable();
    present.peek().is_some() && present.all(|entry| entry.flags().user)
}

fn split_into_chunks(range: Range<Page>) -> impl Iterator<Item = Range<Page>> {
    let starts = (range.start.0..range.end.0).step_by(CHUNK_PAGES);
    starts.map(move |start| Page(start)..Page(start + CHUNK_PAGES as u32).min(range.end))
}
