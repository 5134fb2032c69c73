//! Scans for pages that were written or touched since the last scan, without a fault handler.
//!
//! ```text
//!   arm_all ........... all pages write-protected; the kernel lets each first write through, and remembers it
//!   collect_written ... the pages without protection                        (scan of the page tables)
//!   collect_written_and_rearm                 ... and protects them again, in the same pass
//!
//!   forget_touches .... all page-table entries dropped (protection stays)   (injected madvise)
//!   collect_touched ... the pages that have an entry again
//! ```
//!
//! The guest never waits for Firn here: a first write costs it a short fault inside the kernel, and
//! a first touch an ordinary fault. Registering for write protection also keeps the kernel from
//! mapping neighbours of a touched page (fault-around), which would count as touched.
//!
//! A written page may lose its page-table entry before it is reported: when the kernel swaps it
//! out, or when [`PageScan::forget_touches`] drops the entry. An armed page keeps a mark in such a
//! case, so a page with neither entry nor mark is reported as written too. In a region that was
//! never armed that is every page without an entry.
//!
//! A page that the hypervisor gives back (balloon) becomes zeros. In private memory it has neither
//! entry nor mark afterwards, so it is reported. In shared memory its mark stays, and it is not
//! reported, not even when the guest reads it and so maps a page of zeros. Where that matters,
//! accesses to holes must fault ([`PageScan::create_with_holes`]): a filled page is reported, and
//! [`crate::HoleTracker`] finds the holes.
//!
//! In huge pages one write makes the whole huge page a written one.

use std::io;
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, Mutex, PoisonError};

use firn_types::{HostVirt, PAGE_SIZE, Page};
use linux_raw_sys::general::page_region;
use rustix::fs::OFlags;
use thiserror::Error;

use crate::guest_memory::{GuestMemory, MemoryError};
use crate::page_faults::{KernelFeatures, PageFaultError, PageFaults, TraceMode};
use crate::page_tables::{DropError, drop_page_tables};
use crate::process::ProcessError;
use crate::sys::pagemap::{PageQuery, Pagemap};
use crate::sys::uffd::AddressSpan;
use crate::tracee::Tracee;

mod passes;

use passes::{ScanPass, UnmappedReporting, plan_passes};

/// The maximum number of page runs that one call of the kernel reports.
pub(crate) const REGIONS: usize = 1024;

/// Why a scan failed or is not possible.
#[derive(Debug, Error)]
pub enum ScanError {
    /// The hypervisor is gone or cannot be accessed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The RAM files cannot be inspected.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The memory cannot be registered or protected.
    #[error(transparent)]
    PageFaults(#[from] PageFaultError),
    /// The page-table entries cannot be dropped.
    #[error(transparent)]
    Drop(#[from] DropError),
    /// The kernel cannot remember writes.
    #[error(
        "the kernel cannot remember writes (UFFD_FEATURE_WP_ASYNC and PAGEMAP_SCAN): Linux 6.7 or newer is needed"
    )]
    Unsupported,
    /// The scan failed.
    #[error("scanning {pages} pages of guest RAM from {first} failed")]
    Failed {
        /// The first page.
        first: Page,
        /// The number of pages.
        pages: usize,
        /// The error of the kernel.
        source: io::Error,
    },
}

/// All RAM of a guest, registered for scans.
///
/// Dropping it leaves the registration, which costs the guest a little and stops nothing;
/// [`PageScan::close`] ends it completely.
#[derive(Debug)]
pub struct PageScan {
    faults: PageFaults,
    pagemap: Pagemap,
    unmapped: UnmappedReporting,
    /// The buffer into which the kernel writes its results.
    regions: Mutex<Vec<page_region>>,
}

impl PageScan {
    /// Registers all of RAM. Nothing is protected yet. On kernels that cannot remember writes, only
    /// touches can be collected.
    ///
    /// # Errors
    /// If the hypervisor's user may not have a userfaultfd, or RAM is registered with another one.
    pub fn create(tracee: &mut Tracee<'_>, memory: Arc<GuestMemory>) -> Result<Self, ScanError> {
        Self::create_by(tracee, memory, false)
    }

    /// As [`Self::create`]; and accesses to holes fault ([`PageFaults::report_holes`]). A thread of
    /// the hypervisor that touches one waits until the caller fills it, so another thread has to
    /// wait for the events of [`Self::page_faults`]. Shared memory only.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn create_with_holes(
        tracee: &mut Tracee<'_>,
        memory: Arc<GuestMemory>,
    ) -> Result<Self, ScanError> {
        Self::create_by(tracee, memory, true)
    }

    fn create_by(
        tracee: &mut Tracee<'_>,
        memory: Arc<GuestMemory>,
        with_holes: bool,
    ) -> Result<Self, ScanError> {
        let trace = match KernelFeatures::of_kernel()?.write_protect_async {
            true => TraceMode::Scan,
            false => TraceMode::Writes,
        };
        let mut faults = PageFaults::create(tracee, memory, trace)?;
        if with_holes {
            faults.report_holes();
        }
        let scan =
            faults.register_all().map_err(ScanError::from).and_then(|()| pagemap_of(&faults));
        match scan {
            Ok(pagemap) => Ok(Self::from_faults(faults, pagemap)),
            Err(error) => {
                // The first error is the one to report.
                let _ = faults.close(tracee);
                Err(error)
            }
        }
    }

    /// Adopts what a dead Firn registered for scanning. The writes and touches since then are
    /// known. `None` if nothing was left, or it was registered for another purpose.
    ///
    /// # Errors
    /// If the hypervisor is gone or cannot be accessed.
    pub fn adopt(memory: Arc<GuestMemory>) -> Result<Option<Self>, ScanError> {
        let process = memory.process().clone();
        let found = PageFaults::adopt(&process, memory)?;
        let Some(faults) = found.filter(|faults| faults.trace_mode() == TraceMode::Scan) else {
            return Ok(None);
        };
        let pagemap = pagemap_of(&faults)?;
        Ok(Some(Self::from_faults(faults, pagemap)))
    }

    fn from_faults(faults: PageFaults, pagemap: Pagemap) -> Self {
        // Of huge pages the kernel reports only entries as written.
        let is_reported = !faults.memory().has_huge_pages() && passes::can_kernel_report_unmapped();
        let unmapped = UnmappedReporting { is_reported, keeps_tables: false };
        Self { faults, pagemap, unmapped, regions: Mutex::new(Pagemap::region_buffer(REGIONS)) }
    }

    /// Assumes that no page table disappears once all of RAM is armed, which makes scans faster.
    /// The caller does not use [`Self::forget_touches`], and the hypervisor gives no memory back
    /// (no balloon), or a [`crate::HoleTracker`] finds what it gives back. If another page table did
    /// disappear, earlier writes to its pages would not be reported.
    #[must_use]
    pub fn with_lasting_tables(self) -> Self {
        let unmapped = UnmappedReporting { keeps_tables: true, ..self.unmapped };
        Self { unmapped, ..self }
    }

    /// The memory that is scanned.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        self.faults.memory()
    }

    /// The page faults of the memory: there are some only if accesses to holes fault.
    pub fn page_faults(&self) -> &PageFaults {
        &self.faults
    }

    /// Forgets all writes: from now on the kernel remembers those that follow. Costs 3-8 ms per
    /// GiB.
    ///
    /// # Errors
    /// If the kernel cannot remember writes, or the hypervisor is gone.
    pub fn arm_all(&self) -> Result<(), ScanError> {
        self.arm_range(self.memory().all_pages())
    }

    /// Forgets the writes to these pages only.
    ///
    /// # Errors
    /// As [`Self::arm_all`].
    pub fn arm_range(&self, range: Range<Page>) -> Result<(), ScanError> {
        self.check_async()?;
        Ok(self.faults.protect_pages(range)?)
    }

    /// Appends the pages that were written since they were armed to `out`, in runs, in order.
    ///
    /// # Errors
    /// If the kernel cannot remember writes, or the hypervisor is gone.
    pub fn collect_written(
        &self,
        range: Range<Page>,
        out: &mut Vec<Range<Page>>,
    ) -> Result<(), ScanError> {
        self.check_async()?;
        self.run_passes(range, plan_passes(self.unmapped, false), out)
    }

    /// As [`Self::collect_written`], and arms these pages again: each write is reported once, and
    /// none is lost. About 1 ms per GiB.
    ///
    /// # Errors
    /// As [`Self::collect_written`].
    pub fn collect_written_and_rearm(
        &self,
        range: Range<Page>,
        out: &mut Vec<Range<Page>>,
    ) -> Result<(), ScanError> {
        self.check_async()?;
        self.run_passes(range, plan_passes(self.unmapped, true), out)
    }

    /// Forgets all touches: from now on those that follow are reported. The writes so far remain
    /// known.
    ///
    /// # Errors
    /// As [`drop_page_tables`].
    pub fn forget_touches(
        &self,
        tracee: &mut Tracee<'_>,
        range: Range<Page>,
    ) -> Result<(), ScanError> {
        Ok(drop_page_tables(tracee, self.memory(), range)?)
    }

    /// Appends the pages that were touched (read or written) since [`Self::forget_touches`] to
    /// `out`, in runs, in order.
    ///
    /// # Errors
    /// If the hypervisor is gone.
    pub fn collect_touched(
        &self,
        range: Range<Page>,
        out: &mut Vec<Range<Page>>,
    ) -> Result<(), ScanError> {
        if self.faults.features().write_protect_async {
            return self.scan_range(range, PageQuery::Present, out);
        }
        for (part, hva) in self.memory().locate_parts(range) {
            let present =
                self.pagemap.scan_present(span_of_part(hva, &part), false, |start, end| {
                    push_run(out, pages_between(&part, hva, start, end));
                    ControlFlow::Continue(())
                });
            present.map_err(|error| self.scan_error(&part, error))?;
        }
        Ok(())
    }

    /// Appends the pages that the hypervisor's page tables do not map to `out`, in runs, in order:
    /// never touched, given back, or swapped out. About 1 ms per GiB.
    ///
    /// # Errors
    /// As [`Self::collect_written`].
    pub fn collect_absent(
        &self,
        range: Range<Page>,
        out: &mut Vec<Range<Page>>,
    ) -> Result<(), ScanError> {
        self.check_async()?;
        self.scan_range(range, PageQuery::Absent, out)
    }

    /// Unregisters all of RAM. A descriptor remains, which does nothing.
    ///
    /// # Errors
    /// If the hypervisor is gone.
    pub fn unregister_all(&self) -> Result<(), ScanError> {
        Ok(self.faults.unregister_all()?)
    }

    /// Unregisters, and closes the hypervisor's descriptor: nothing remains. Call it once only.
    ///
    /// # Errors
    /// If the hypervisor is gone.
    pub fn close(&self, tracee: &mut Tracee<'_>) -> Result<(), ScanError> {
        Ok(self.faults.close(tracee)?)
    }

    fn check_async(&self) -> Result<(), ScanError> {
        match self.faults.trace_mode() {
            TraceMode::Scan => Ok(()),
            _ => Err(ScanError::Unsupported),
        }
    }

    fn run_passes(
        &self,
        range: Range<Page>,
        passes: &[ScanPass],
        out: &mut Vec<Range<Page>>,
    ) -> Result<(), ScanError> {
        // A part of a huge page can't be protected. The other parts are reported as well, so no write
        // to them is missed.
        let range = self.memory().with_whole_huge_pages(range);
        let mut found = Vec::new();
        for &pass in passes {
            match pass {
                ScanPass::All(sought) => self.scan_range(range.clone(), sought, &mut found)?,
                ScanPass::Missing(sought) => {
                    self.scan_missing(range.clone(), sought, &mut found)?
                }
            }
        }
        out.extend(merge_runs(found));
        Ok(())
    }

    /// Scans the pages of those page tables whose first page has no entry.
    fn scan_missing(
        &self,
        range: Range<Page>,
        sought: PageQuery,
        out: &mut Vec<Range<Page>>,
    ) -> Result<(), ScanError> {
        for (part, hva) in self.memory().locate_parts(range) {
            for table in passes::split_by_table(span_of_part(hva, &part)) {
                let mut has_no_entry = false;
                self.scan_span(&part, hva, passes::first_page(table), PageQuery::Unknown, |_| {
                    has_no_entry = true;
                })?;
                if has_no_entry {
                    self.scan_span(&part, hva, table, sought, |run| push_run(out, run))?;
                }
            }
        }
        Ok(())
    }

    fn scan_range(
        &self,
        range: Range<Page>,
        sought: PageQuery,
        out: &mut Vec<Range<Page>>,
    ) -> Result<(), ScanError> {
        for (part, hva) in self.memory().locate_parts(range) {
            self.scan_span(&part, hva, span_of_part(hva, &part), sought, |run| push_run(out, run))?;
        }
        Ok(())
    }

    /// Scans a span of a part that starts at `hva`.
    fn scan_span(
        &self,
        part: &Range<Page>,
        hva: HostVirt,
        span: AddressSpan,
        sought: PageQuery,
        mut found: impl FnMut(Range<Page>),
    ) -> Result<(), ScanError> {
        // Each scan overwrites the regions, so it does not matter how the last one ended.
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        // The kernel allocates memory for as many regions as it may report.
        let most = REGIONS.min((span.len / PAGE_SIZE as u64) as usize);
        let found = |start, end| found(pages_between(part, hva, start, end));
        let scanned = self.pagemap.scan_pages(span, sought, &mut regions[..most], found);
        scanned.map_err(|errno| self.scan_error(part, errno))
    }

    fn scan_error(&self, part: &Range<Page>, source: impl Into<io::Error>) -> ScanError {
        let process = self.memory().process();
        if !process.is_alive() {
            return ProcessError::Gone { pid: process.pid() }.into();
        }
        let (first, pages) = (part.start, Page::count_in(part));
        ScanError::Failed { first, pages, source: source.into() }
    }
}

/// The pages that the hypervisor's page tables map, in runs, in order: all that it may have written
/// to since its memory was mapped, unless the kernel has reclaimed some for want of memory. Nothing
/// needs to be registered.
///
/// # Errors
/// If the hypervisor is gone or cannot be accessed.
pub fn mapped_pages(memory: &GuestMemory) -> Result<Vec<Range<Page>>, ScanError> {
    let process = memory.process();
    let opened = process.open_file("pagemap", OFlags::RDONLY);
    let pagemap = opened
        .map(Pagemap::new)
        .map_err(|error| process.operation_error("opening the pagemap", error))?;
    let mut out = Vec::new();
    for (part, hva) in memory.locate_parts(memory.all_pages()) {
        let present = pagemap.scan_present(span_of_part(hva, &part), true, |start, end| {
            push_run(&mut out, pages_between(&part, hva, start, end));
            ControlFlow::Continue(())
        });
        let (first, pages) = (part.start, Page::count_in(&part));
        present.map_err(|source| ScanError::Failed { first, pages, source })?;
    }
    Ok(out)
}

fn pagemap_of(faults: &PageFaults) -> Result<Pagemap, ScanError> {
    let process = faults.memory().process();
    let pagemap = process.open_file("pagemap", OFlags::RDONLY);
    Ok(pagemap
        .map(Pagemap::new)
        .map_err(|error| process.operation_error("opening the pagemap", error))?)
}

pub(crate) fn span_of_part(hva: HostVirt, part: &Range<Page>) -> AddressSpan {
    AddressSpan { start: hva.0, len: (Page::count_in(part) * PAGE_SIZE) as u64 }
}

/// The pages between two addresses of a part that starts at `hva`.
pub(crate) fn pages_between(
    part: &Range<Page>,
    hva: HostVirt,
    start: u64,
    end: u64,
) -> Range<Page> {
    let page = |address: u64| Page(part.start.0 + ((address - hva.0) / PAGE_SIZE as u64) as u32);
    page(start)..page(end)
}

/// Merges runs: the pages of all of them, in order, each once.
pub fn merge_runs(mut runs: Vec<Range<Page>>) -> Vec<Range<Page>> {
    runs.sort_unstable_by_key(|run| run.start);
    let mut out: Vec<Range<Page>> = Vec::with_capacity(runs.len());
    for run in runs {
        match out.last_mut() {
            Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
            _ => out.push(run),
        }
    }
    out
}

/// Appends a run, or extends the last one.
pub(crate) fn push_run(out: &mut Vec<Range<Page>>, run: Range<Page>) {
    match out.last_mut() {
        Some(last) if last.end == run.start => last.end = run.end,
        _ => out.push(run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_put_in_order_and_joined() {
        let page = |range: Range<u32>| Page(range.start)..Page(range.end);
        let runs = [5..6, 0..2, 1..3, 3..4, 9..10, 9..12].map(page).to_vec();
        assert_eq!(merge_runs(runs), [0..4, 5..6, 9..12].map(page));
    }
}
