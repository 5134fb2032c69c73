//! Transparent huge pages: ordinary memory of which the kernel maps 2 MiB by one entry of a page
//! table.
//!
//! ```text
//!   before a save        | one entry, 2 MiB              | one entry, 2 MiB            |
//!   protected, written   | 512 entries: the entry is split, so that one page can be    |
//!                        |   released                    | one entry                   |
//!   after it             | 512 entries, until the kernel's khugepaged has found them:  |
//!                        |   16 MiB in 10 s by default   |                             |
//!   collapse_pages       | one entry, 2 MiB              | one entry, 2 MiB            |
//! ```
//!
//! To put 2 MiB together again the kernel copies them. Nothing of that is visible to the guest but
//! the time that a vCPU waits which touches them meanwhile.
//!
//! These are not the huge pages of hugetlbfs ([`GuestMemory::has_huge_pages`]), which are never split.

use std::io;
use std::ops::Range;

use firn_types::{PAGE_SIZE, Page};
use rustix::fs::OFlags;

use crate::guest_memory::{GuestMemory, HUGE_PAGE_BYTES};
use crate::page_scan::{REGIONS, ScanError, pages_between, push_run, span_of_part};
use crate::sys::collapse;
use crate::sys::pagemap::{PageQuery, Pagemap};
use crate::sys::uffd::AddressSpan;

/// The pages that are mapped by huge entries, in runs, in order; of hugetlbfs none.
///
/// # Errors
/// If the hypervisor is gone, or the kernel has no `PAGEMAP_SCAN` (Linux 6.7).
pub fn huge_mapped_runs(memory: &GuestMemory) -> Result<Vec<Range<Page>>, ScanError> {
    let mut runs = scan_runs(memory, PageQuery::HugeMapped)?;
    runs.retain(|run| memory.huge_page_of(run.start).is_none());
    Ok(runs)
}

/// Those aligned 2 MiB of these runs of which each page is in memory, and mapped: to put them together needs
/// no memory that the guest does not use.
///
/// # Errors
/// As [`huge_mapped_runs`].
pub fn collapsible_parts(
    memory: &GuestMemory,
    runs: &[Range<Page>],
) -> Result<Vec<Range<Page>>, ScanError> {
    let mapped = scan_runs(memory, PageQuery::Present)?;
    let both = intersect_runs(runs, &mapped);
    Ok(both.iter().flat_map(|run| aligned_parts(memory, run)).collect())
}

/// Puts the pages of each aligned 2 MiB of a range into one huge page.
///
/// # Errors
/// If that failed for a part of it: the kernel has no such page at the moment (`ENOMEM`), the pages
/// are in use (`EAGAIN`), they can't be in one (`EINVAL`), or this process may not (`EPERM`:
/// `CAP_SYS_NICE` is needed).
pub fn collapse_pages(memory: &GuestMemory, range: Range<Page>) -> io::Result<()> {
    let pidfd = memory.process().pidfd();
    memory
        .locate_parts(range)
        .try_for_each(|(part, hva)| collapse::collapse_span(pidfd, span_of_part(hva, &part)))
}

fn scan_runs(memory: &GuestMemory, sought: PageQuery) -> Result<Vec<Range<Page>>, ScanError> {
    let process = memory.process();
    let opened = process.open_file("pagemap", OFlags::RDONLY);
    let pagemap = opened
        .map(Pagemap::new)
        .map_err(|error| process.operation_error("opening the pagemap", error))?;
    let mut regions = Pagemap::region_buffer(REGIONS);
    let mut runs = Vec::new();
    for (part, hva) in memory.locate_parts(memory.all_pages()) {
        let span = span_of_part(hva, &part);
        let scanned = pagemap.scan_pages(span, sought, &mut regions, |start, end| {
            push_run(&mut runs, pages_between(&part, hva, start, end));
        });
        let (first, pages) = (part.start, Page::count_in(&part));
        scanned.map_err(|errno| ScanError::Failed { first, pages, source: errno.into() })?;
    }
    Ok(runs)
}

/// The pages that are in both lists of runs. Both are in order.
fn intersect_runs(one: &[Range<Page>], other: &[Range<Page>]) -> Vec<Range<Page>> {
    let mut both = Vec::new();
    let (mut one, mut other) = (one.iter().peekable(), other.iter().peekable());
    while let (Some(a), Some(b)) = (one.peek(), other.peek()) {
        let run = a.start.max(b.start)..a.end.min(b.end);
        if run.start < run.end {
            both.push(run);
        }
        if a.end < b.end {
            one.next()
        } else {
            other.next()
        };
    }
    both
}

/// The 2 MiB of a run that begin at multiples of 2 MiB of the hypervisor's address space.
fn aligned_parts(memory: &GuestMemory, run: &Range<Page>) -> Vec<Range<Page>> {
    let parts = memory.locate_parts(run.clone()).flat_map(|(part, hva)| {
        let span = span_of_part(hva, &part);
        let addresses = aligned_starts(span).collect::<Vec<_>>();
        let pages = move |at: u64| pages_between(&part, hva, at, at + HUGE_PAGE_BYTES);
        addresses.into_iter().map(pages)
    });
    parts.collect()
}

fn aligned_starts(span: AddressSpan) -> impl Iterator<Item = u64> {
    let first = span.start.next_multiple_of(HUGE_PAGE_BYTES);
    let end = span.start + span.len;
    (first..end).step_by(HUGE_PAGE_BYTES as usize).filter(move |at| at + HUGE_PAGE_BYTES <= end)
}

const _: () = assert!(HUGE_PAGE_BYTES % PAGE_SIZE as u64 == 0);

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(list: &[(u32, u32)]) -> Vec<Range<Page>> {
        list.iter().map(|(start, end)| Page(*start)..Page(*end)).collect()
    }

    #[test]
    fn runs_are_intersected() {
        let (one, other) =
            (runs(&[(0, 10), (20, 30), (40, 50)]), runs(&[(5, 22), (28, 45), (60, 70)]));
        assert_eq!(intersect_runs(&one, &other), runs(&[(5, 10), (20, 22), (28, 30), (40, 45)]));
        assert_eq!(intersect_runs(&one, &[]), []);
        assert_eq!(intersect_runs(&one, &one), one);
    }

    #[test]
    fn only_whole_parts_count() {
        let starts = |start, len| aligned_starts(AddressSpan { start, len }).collect::<Vec<_>>();
        const HUGE: u64 = HUGE_PAGE_BYTES;
        assert_eq!(starts(HUGE, 2 * HUGE), [HUGE, 2 * HUGE]);
        assert_eq!(starts(HUGE + 4096, 2 * HUGE), [2 * HUGE]);
        assert_eq!(starts(HUGE + 4096, HUGE), []);
    }
}
