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
//! kind. To search the file takes 10 ms per GiB, so it is searched only after the hypervisor has
//! given pages back. That follows from the bytes that the file occupies:
//!
//! ```text
//!   bytes of the file - bytes filled by the thread      smaller after each page that was given back
//! ```
//!
//! The thread counts a page under the lock under which it fills it, so that the two numbers belong
//! together. A page that is given back during a search reduces the number after it was read: the
//! next search finds it. At the cut the hypervisor gives nothing back, because its main thread, which
//! would do it, has stopped the VM.
//!
//! A guest that touches a hole waits for this thread. So this exists only during a save, and the
//! next save compares all memory with its parent.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use firn_memory::{
    FaultKind, GuestMemory, InstallOutcome, MemoryError, MemoryEvent, PageFaultError, PageScan,
    ScanError, scheduling,
};
use firn_types::{PAGE_SIZE, Page};

use crate::page_bits::AtomicPageSet;
use crate::trace::abort_on_panic;

/// How long the thread sleeps without faults before it checks whether it should end.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Fills holes that the guest touches, and finds pages that became holes.
#[derive(Debug)]
pub(super) struct HoleTracker {
    filler: Arc<HoleFiller>,
    thread: Option<JoinHandle<()>>,
    /// Pages that may have been copied with contents.
    held: AtomicPageSet,
    /// The number of the last search: see the module's documentation.
    searched_at: i128,
}

#[derive(Debug)]
struct HoleFiller {
    scan: Arc<PageScan>,
    /// The number of pages that were filled.
    filled: Mutex<u64>,
    ended: AtomicBool,
    failed: Mutex<Option<PageFaultError>>,
}

impl HoleTracker {
    /// Starts to answer accesses to holes, which must fault.
    pub(super) fn start_thread(scan: Arc<PageScan>) -> Self {
        let held = AtomicPageSet::new(scan.memory().region_map().total_pages());
        let (filled, ended, failed) = Default::default();
        let filler = Arc::new(HoleFiller { scan, filled, ended, failed });
        let of_thread = Arc::clone(&filler);
        let thread = thread::spawn(move || abort_on_panic(|| of_thread.fill_holes()));
        Self { filler, thread: Some(thread), held, searched_at: 0 }
    }

    /// Notes which pages have contents now: a page that loses them later is found.
    pub(super) fn record_backed(&mut self) -> Result<(), MemoryError> {
        self.searched_at = self.filler.unfilled_bytes()?;
        self.memory().backed_runs()?.into_iter().for_each(|run| self.held.add_pages(run));
        Ok(())
    }

    /// The pages that became holes since the last call. `written` are the pages that were written
    /// since then.
    pub(super) fn find_discarded(
        &mut self,
        written: &[Range<Page>],
    ) -> Result<Vec<Range<Page>>, ScanError> {
        if let Some(error) = lock_state(&self.filler.failed).take() {
            return Err(error.into());
        }
        written.iter().for_each(|run| self.held.add_pages(run.clone()));
        let number = self.filler.unfilled_bytes()?;
        if number == self.searched_at {
            return Ok(Vec::new());
        }
        self.searched_at = number;
        let discarded = self.held.runs_outside(&self.memory().backed_runs()?);
        discarded.iter().for_each(|run| self.held.remove_pages(run.clone()));
        Ok(discarded)
    }

    fn memory(&self) -> &GuestMemory {
        self.filler.scan.memory()
    }

    /// Ends the thread. No access to a hole may fault any more.
    pub(super) fn join_thread(&mut self) {
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
        let mut filled = lock_state(&self.filled);
        let outcome = self.scan.page_faults().install_zeros(page..Page(page.0 + 1))?;
        *filled += u64::from(outcome == InstallOutcome::Done);
        Ok(())
    }

    /// The bytes of the RAM files without those that were filled.
    fn unfilled_bytes(&self) -> Result<i128, MemoryError> {
        let filled = lock_state(&self.filled);
        let bytes = self.scan.memory().file_bytes()?;
        Ok(i128::from(bytes) - i128::from(*filled) * PAGE_SIZE as i128)
    }
}

/// Locks a value that each change leaves whole.
fn lock_state<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
