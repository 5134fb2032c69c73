//! How what was written is found, by what the kernel tells.
//!
//! ```text
//!                      entry without        no entry          no page table
//!                      protection           in its table      at all
//!   Sought::Written    told                 newer kernels     -
//!   Sought::Unknown    -                    told              told
//! ```
//!
//! Each is a walk through all page tables, and the second takes twice as long: only for what may be written the kernel has a short way
//! (`pagemap_scan_pmd_entry` in `fs/proc/task_mmu.c`). Where the first tells of pages without an entry, only those without a table are left.
//! One page says whether a table is there. Protecting all of RAM makes all tables, and who knows that none goes need not ask: asking takes
//! twice as long as the walk.

use memmap2::MmapMut;
use rustix::io::Errno;

use crate::sys::pagemap::{Pagemap, Sought};
use crate::sys::uffd::Span;

/// What one page table maps: 512 entries of 4 KiB (x86-64, arm64 with such pages).
const TABLE_BYTES: u64 = 2 << 20;
const PAGE: u64 = firn_types::PAGE_SIZE as u64;

/// A walk through page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Through all.
    All(Sought),
    /// Through those whose first page has no entry: one that is not there has none.
    Missing(Sought),
}

/// What is known of pages without an entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unmapped {
    /// The kernel tells of them as written, where there is a page table.
    pub(super) is_told: bool,
    /// No page table goes.
    pub(super) has_table: bool,
}

/// What finds all that was written, and protects it again if asked to.
///
/// A page may get or lose its entry between two looks. So one is taken twice where a guest that runs is asked: what was written
/// before the first is told for certain.
pub(super) fn looks(unmapped: Unmapped, rearms: bool) -> &'static [Look] {
    use Look::{All, Missing};
    use Sought::{Unknown, UnknownAndRearm, Written, WrittenAndRearm};
    match (unmapped.is_told, unmapped.has_table, rearms) {
        (true, true, false) => &[All(Written)],
        (true, true, true) => &[All(WrittenAndRearm)],
        (true, false, false) => &[Missing(Unknown), All(Written)],
        (true, false, true) => {
            &[Missing(UnknownAndRearm), All(WrittenAndRearm), Missing(UnknownAndRearm)]
        }
        (false, _, false) => &[All(Written), All(Unknown)],
        (false, _, true) => &[All(WrittenAndRearm), All(UnknownAndRearm), All(WrittenAndRearm)],
    }
}

/// The parts of a span that one page table maps each.
pub(super) fn tables(span: Span) -> impl Iterator<Item = Span> {
    let end = span.start + span.len;
    let next =
        move |start: &u64| Some((start / TABLE_BYTES + 1) * TABLE_BYTES).filter(|at| *at < end);
    std::iter::successors(Some(span.start), next)
        .map(move |start| Span { start, len: next(&start).unwrap_or(end) - start })
        .filter(|table| table.len > 0)
}

/// The first page of a span.
pub(super) fn first_page(span: Span) -> Span {
    Span { start: span.start, len: span.len.min(PAGE) }
}

/// Whether this kernel tells of a page without an entry as written. It is tried on pages of our own, of which one table maps those
/// in the middle together with a neighbour that has an entry.
pub(super) fn counts_unmapped() -> bool {
    try_unmapped().unwrap_or_default()
}

fn try_unmapped() -> Option<bool> {
    let mut own = MmapMut::map_anon(4 * PAGE as usize).ok()?;
    (own[0], own[3 * PAGE as usize]) = (1, 1);
    let pagemap = Pagemap::new(std::fs::File::open("/proc/self/pagemap").ok()?.into());
    let start = own.as_ptr().addr() as u64;
    let told = |sought| told_pages(&pagemap, Span { start, len: 4 * PAGE }, sought).ok();
    // With large folios the neighbours have come along.
    let is_tried = told(Sought::Unmapped)? == [1, 2];
    Some(is_tried && told(Sought::Unprotected)? == [0, 1, 2, 3])
}

fn told_pages(pagemap: &Pagemap, span: Span, sought: Sought) -> Result<Vec<u64>, Errno> {
    let (mut regions, mut told) = (Pagemap::regions(4), Vec::new());
    pagemap.scan(span, sought, &mut regions, |start, end| {
        told.extend((start - span.start) / PAGE..(end - span.start) / PAGE);
    })?;
    Ok(told)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_cut_where_tables_begin() {
        let cut = |start, len| {
            tables(Span { start, len }).map(|table| (table.start, table.len)).collect::<Vec<_>>()
        };
        assert_eq!(cut(0, 0), []);
        assert_eq!(cut(0, TABLE_BYTES), [(0, TABLE_BYTES)]);
        let (before, after) = (TABLE_BYTES - PAGE, 2 * TABLE_BYTES);
        let expected = [(before, PAGE), (TABLE_BYTES, TABLE_BYTES), (after, PAGE)];
        assert_eq!(cut(before, TABLE_BYTES + 2 * PAGE), expected);
    }
}
