//! The passes of a scan: which walks of the page tables find every written page, depending on what
//! the kernel reports.
//!
//! ```text
//!                         entry without        no entry          no page table
//!                         protection           in its table      at all
//!   PageQuery::Written    reported             newer kernels     -
//!   PageQuery::Unknown    -                    reported          reported
//! ```
//!
//! Each is a walk through all page tables, and the second takes twice as long: the kernel has a
//! fast path only for pages that may be written (`pagemap_scan_pmd_entry` in `fs/proc/task_mmu.c`).
//! Where the first query reports pages without an entry, only pages without a table are left for
//! the second. One page shows whether a table exists. Protecting all of RAM creates all tables, so
//! a caller that knows that none disappears need not query that page: the query takes twice as long
//! as the walk.

use memmap2::MmapMut;
use rustix::io::Errno;

use crate::sys::pagemap::{PageQuery, Pagemap};
use crate::sys::uffd::AddressSpan;

/// The bytes that one page table maps: 512 entries of 4 KiB (x86-64, arm64 with such pages).
const TABLE_BYTES: u64 = 2 << 20;
const PAGE: u64 = firn_types::PAGE_SIZE as u64;

/// A walk through page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanPass {
    /// Through all tables.
    All(PageQuery),
    /// Through the tables whose first page has no entry: the page of a missing table has none.
    Missing(PageQuery),
}

/// How pages without an entry are reported.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnmappedReporting {
    /// The kernel reports them as written, where there is a page table.
    pub(super) is_reported: bool,
    /// No page table disappears.
    pub(super) keeps_tables: bool,
}

/// The passes that find all written pages, and protect them again if `rearms`.
///
/// A page may get or lose its entry between two passes. So a pass is repeated where the guest runs
/// and pages are protected again: then every write before the first pass is certain to be reported.
pub(super) fn plan_passes(unmapped: UnmappedReporting, rearms: bool) -> &'static [ScanPass] {
    use PageQuery::{Unknown, UnknownAndRearm, Written, WrittenAndRearm};
    use ScanPass::{All, Missing};
    match (unmapped.is_reported, unmapped.keeps_tables, rearms) {
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

/// Splits a span into the parts that one page table maps each.
pub(super) fn split_by_table(span: AddressSpan) -> impl Iterator<Item = AddressSpan> {
    let end = span.start + span.len;
    let next =
        move |start: &u64| Some((start / TABLE_BYTES + 1) * TABLE_BYTES).filter(|at| *at < end);
    std::iter::successors(Some(span.start), next)
        .map(move |start| AddressSpan { start, len: next(&start).unwrap_or(end) - start })
        .filter(|table| table.len > 0)
}

/// The first page of a span.
pub(super) fn first_page(span: AddressSpan) -> AddressSpan {
    AddressSpan { start: span.start, len: span.len.min(PAGE) }
}

/// Whether this kernel reports a page without an entry as written. Firn tries it on pages of its
/// own. One table maps the pages in the middle together with a neighbour that has an entry.
pub(super) fn can_kernel_report_unmapped() -> bool {
    test_own_pages().unwrap_or_default()
}

fn test_own_pages() -> Option<bool> {
    let mut own = MmapMut::map_anon(4 * PAGE as usize).ok()?;
    (own[0], own[3 * PAGE as usize]) = (1, 1);
    let pagemap = Pagemap::new(std::fs::File::open("/proc/self/pagemap").ok()?.into());
    let start = own.as_ptr().addr() as u64;
    let query =
        |sought| reported_pages(&pagemap, AddressSpan { start, len: 4 * PAGE }, sought).ok();
    // With large folios the kernel has mapped the neighbours as well.
    let is_tried = query(PageQuery::Unmapped)? == [1, 2];
    Some(is_tried && query(PageQuery::Unprotected)? == [0, 1, 2, 3])
}

fn reported_pages(
    pagemap: &Pagemap,
    span: AddressSpan,
    sought: PageQuery,
) -> Result<Vec<u64>, Errno> {
    let (mut regions, mut found) = (Pagemap::region_buffer(4), Vec::new());
    pagemap.scan_pages(span, sought, &mut regions, |start, end| {
        found.extend((start - span.start) / PAGE..(end - span.start) / PAGE);
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_cut_where_tables_begin() {
        let cut = |start, len| {
            split_by_table(AddressSpan { start, len })
                .map(|table| (table.start, table.len))
                .collect::<Vec<_>>()
        };
        assert_eq!(cut(0, 0), []);
        assert_eq!(cut(0, TABLE_BYTES), [(0, TABLE_BYTES)]);
        let (before, after) = (TABLE_BYTES - PAGE, 2 * TABLE_BYTES);
        let expected = [(before, PAGE), (TABLE_BYTES, TABLE_BYTES), (after, PAGE)];
        assert_eq!(cut(before, TABLE_BYTES + 2 * PAGE), expected);
    }
}
