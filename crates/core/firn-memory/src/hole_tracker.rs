//! Holes in shared RAM: finds the pages that the hypervisor has given back since they were copied.
//!
//! The kernel reports no such page as written: its mark in the page tables stays, although its
//! contents have become zeros. Two kinds of pages remain to be found:
//!
//! ```text
//!   given back                     a hole that was data: the RAM file shows it
//!   given back, then touched       data again, zeros: nothing shows it
//! ```
//!
//! So accesses to holes fault while this exists, and a thread answers each with a page of zeros.
//! Such a page is not write-protected, and the kernel reports it as written. That leaves the first
//! kind. Searching for it takes time, so Firn searches only after the hypervisor has given pages
//! back. That follows from the bytes that the RAM files occupy:
//!
//! ```text
//!   bytes of the files - bytes filled by the thread     smaller after each page that was given back
//! ```
//!
//! The thread fills a page, counts it, and adds it to the pages with contents, all under one lock.
//! Hence, at each moment at which the lock is free:
//!
//! ```text
//!   pages of the files  is a part of  pages with contents: `held`
//!   the number above    is smaller than at the last search if a page of `held` has become a hole since
//! ```
//!
//! A search holds the lock for 64 MiB of RAM at a time. A page that is given back during a search
//! reduces the number after it was read: the next search finds the page, if this one does not.
//!
//! **What a search reads.** A page that was given back is not in the hypervisor's page tables: the
//! kernel unmaps a page before it removes it from the file, and a later access fills it. A walk
//! through the page tables takes a tenth of the time of a query of the file. So only pages of `held`
//! that are not mapped are looked up in the file. Large pages would break this
//! ([`GuestMemory::may_be_in_large_pages`]).
//!
//! **The order at a cut**: first [`HoleTracker::find_discarded`], then the scan for written pages. A
//! hole that the hypervisor touches between the two is then reported by both, in the other order by
//! neither.
//!
//! A guest that touches a hole waits for this thread. If the thread panics, the process ends, and
//! its successor unregisters the memory, which wakes all that wait.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use firn_types::{PAGE_SIZE, Page};

use crate::guest_memory::{GuestMemory, MemoryError};
use crate::page_bits::AtomicPageSet;
use crate::page_faults::{
    FaultKind, InstallOutcome, MemoryEvent, PageFaultError, abort_on_panic, split_into_pieces,
};
use crate::page_scan::{PageScan, ScanError};
use crate::scheduling;

/// How long the thread sleeps without faults before it checks whether it should end.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Fills holes that the guest touches, and finds pages that became holes.
///
/// Before it is dropped, memory is unregistered, and then [`Self::join_thread`] is called.
#[derive(Debug)]
pub struct HoleTracker {
    filler: Arc<HoleFiller>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct HoleFiller {
    scan: Arc<PageScan>,
    contents: Mutex<PageContents>,
    ended: AtomicBool,
    failed: Mutex<Option<PageFaultError>>,
}

/// Which pages have contents: see the module's documentation.
#[derive(Debug)]
struct PageContents {
    /// Pages that may have contents.
    held: AtomicPageSet,
    /// The number of pages that were filled.
    filled: u64,
    /// The number of the last search.
    searched_at: i128,
}

impl HoleTracker {
    /// Starts to answer accesses to holes, which must fault ([`PageScan::create_with_holes`]).
    pub fn start_thread(scan: Arc<PageScan>) -> Self {
        let held = AtomicPageSet::new(scan.memory().region_map().total_pages());
        let contents = Mutex::new(PageContents { held, filled: 0, searched_at: 0 });
        let (ended, failed) = Default::default();
        let filler = Arc::new(HoleFiller { scan, contents, ended, failed });
        let of_thread = Arc::clone(&filler);
        let thread = thread::spawn(move || abort_on_panic(|| of_thread.fill_holes()));
        Self { filler, thread: Some(thread) }
    }

    /// Records which pages have contents now: a page that loses them later is found.
    ///
    /// # Errors
    /// If the RAM files can't be inspected.
    pub fn record_backed(&self) -> Result<(), MemoryError> {
        let mut contents = lock_state(&self.filler.contents);
        contents.searched_at = self.filler.unfilled_bytes(&contents)?;
        drop(contents);
        // The thread adds the pages that it fills meanwhile.
        let backed = self.memory().backed_runs()?;
        let contents = lock_state(&self.filler.contents);
        backed.into_iter().for_each(|run| contents.held.add_pages(run));
        Ok(())
    }

    /// Records pages that a scan reported as written: they may have contents. A page that this
    /// thread has filled is known already. So this matters only for a page that a hypervisor has
    /// allocated without any access (fallocate(2)), which is a hole that does not fault.
    pub fn record_written(&self, written: &[Range<Page>]) {
        let contents = lock_state(&self.filler.contents);
        written.iter().for_each(|run| contents.held.add_pages(run.clone()));
    }

    /// The pages that became holes since the last call, in order.
    ///
    /// # Errors
    /// If the hypervisor is gone, or a hole could not be filled.
    pub fn find_discarded(&self) -> Result<Vec<Range<Page>>, ScanError> {
        if let Some(error) = lock_state(&self.filler.failed).take() {
            return Err(error.into());
        }
        let contents = lock_state(&self.filler.contents);
        let number = self.filler.unfilled_bytes(&contents)?;
        if number == contents.searched_at || firn_fault::pass_io_point("holes.search").is_err() {
            // A test that compares memories shows that it would find a page that was given back.
            return Ok(Vec::new());
        }
        drop(contents);
        let mut discarded = Vec::new();
        for piece in split_into_pieces(self.memory().all_pages()) {
            self.search_piece(piece, &mut discarded)?;
        }
        lock_state(&self.filler.contents).searched_at = number;
        Ok(discarded)
    }

    /// Moves the pages of a piece that became holes from the pages with contents to `discarded`.
    fn search_piece(
        &self,
        piece: Range<Page>,
        discarded: &mut Vec<Range<Page>>,
    ) -> Result<(), ScanError> {
        let contents = lock_state(&self.filler.contents);
        let mut absent = Vec::new();
        self.filler.scan.collect_absent(piece, &mut absent)?;
        for run in absent.into_iter().flat_map(|run| contents.held.runs_in(run)) {
            let backed = self.memory().backed_runs_in(run.clone())?;
            for hole in contents.held.runs_outside(run, &backed) {
                contents.held.remove_pages(hole.clone());
                discarded.push(hole);
            }
        }
        Ok(())
    }

    fn memory(&self) -> &GuestMemory {
        self.filler.scan.memory()
    }

    /// Ends the thread. No access to a hole may fault any more.
    pub fn join_thread(&mut self) {
        self.filler.ended.store(true, Ordering::Release);
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

impl HoleFiller {
    fn fill_holes(&self) {
        // Where the process may not use real-time priority, vCPUs wait a little longer.
        let _ = scheduling::set_realtime();
        let mut events = Vec::new();
        while !self.ended.load(Ordering::Acquire) {
            events.clear();
            let answered = self.scan.page_faults().wait_for_events(&mut events, POLL_INTERVAL);
            let answered = answered.and_then(|()| events.iter().try_for_each(|it| self.fill(it)));
            if let Err(error) = answered {
                // While the memory is being unregistered no answer is needed.
                if !self.ended.load(Ordering::Acquire) {
                    *lock_state(&self.failed) = Some(error);
                    thread::sleep(POLL_INTERVAL);
                }
            }
        }
    }

    fn fill(&self, event: &MemoryEvent) -> Result<(), PageFaultError> {
        let &MemoryEvent::Fault { page, kind: FaultKind::Missing, .. } = event else {
            return Ok(());
        };
        let filled = page..Page(page.0 + 1);
        let mut contents = lock_state(&self.contents);
        let outcome = self.scan.page_faults().install_zeros(filled.clone())?;
        contents.filled += u64::from(outcome == InstallOutcome::Done);
        contents.held.add_pages(filled);
        Ok(())
    }

    /// The bytes of the RAM files without those that were filled.
    fn unfilled_bytes(&self, contents: &PageContents) -> Result<i128, MemoryError> {
        let bytes = self.scan.memory().file_bytes()?;
        Ok(i128::from(bytes) - i128::from(contents.filled) * PAGE_SIZE as i128)
    }
}

/// Locks a value that each change leaves whole.
fn lock_state<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
