//! What a guest writes from one checkpoint to the next.
//!
//! The kernel tells each write once. Others may ask for some pages in between ([`Tracker::written_among`]): what they are told
//! is kept here for the next checkpoint.

use std::ops::Range;
use std::sync::Arc;

use firn_memory::{GuestMemory, PageScan, Process, ScanError, Tracee, union};
use firn_types::{Page, Tid};

/// So many runs of pages are kept as they come; more are put together first.
const RUNS: usize = 1 << 14;
/// Pages between two that are asked for together.
const GAP: u32 = 64;

/// Follows writes to all of a guest's RAM, for as long as it lives.
///
/// Dropping it leaves the registration in the hypervisor, which costs the guest a little and stops nothing;
/// [`Tracker::close`] is the clean end.
#[derive(Debug)]
pub struct Tracker {
    scan: PageScan,
    process: Arc<Process>,
    vcpus: Vec<Tid>,
    /// The image from whose cut on writes are counted.
    since: Option<String>,
    /// Pages written since then that the kernel has told already.
    told: Vec<Range<Page>>,
    /// How many of `told` were told before the cut of the save that goes on.
    cut: usize,
    /// From so many on `told` is put together.
    room: usize,
}

impl Tracker {
    /// Begins. Everything written so far counts as unknown.
    ///
    /// # Errors
    /// If the hypervisor can't be attached to, its memory is registered with another userfaultfd, or the kernel can't
    /// remember writes (before Linux 6.7).
    pub fn start(
        process: Arc<Process>,
        memory: Arc<GuestMemory>,
        vcpus: Vec<Tid>,
    ) -> Result<Self, ScanError> {
        let scan = PageScan::create(&mut seize(&process, &vcpus)?, memory)?;
        let (told, since, cut, room) = (Vec::new(), None, 0, RUNS);
        let tracker = Self { scan, process, vcpus, since, told, cut, room };
        match tracker.scan.arm() {
            Ok(()) => Ok(tracker),
            Err(error) => {
                // The first error is the one to report.
                let _ = tracker.close();
                Err(error)
            }
        }
    }

    /// Whether it follows this memory, where it is now.
    pub fn follows(&self, memory: &GuestMemory) -> bool {
        let mine = self.scan.memory();
        let start = |memory: &GuestMemory, page| memory.hva_of(page);
        mine.map() == memory.map()
            && memory.map().regions().iter().all(|region| {
                let first = region.range().start;
                start(mine, first) == start(memory, first)
            })
    }

    /// Whether it knows what was written since the cut of an image, by the image's identity.
    pub fn knows(&self, identity: &str) -> bool {
        self.since.as_deref() == Some(identity)
    }

    /// All pages written since then, in order.
    pub(crate) fn written(&mut self) -> Result<Vec<Range<Page>>, ScanError> {
        self.newly_written()?;
        self.cut = 0;
        self.told = union(std::mem::take(&mut self.told));
        Ok(self.told.clone())
    }

    /// The pages written since this was asked last, in order. They are protected again.
    pub(crate) fn newly_written(&mut self) -> Result<Vec<Range<Page>>, ScanError> {
        let mut new = Vec::new();
        self.scan.written_and_rearm(self.scan.memory().all(), &mut new)?;
        self.told.extend_from_slice(&new);
        Ok(new)
    }

    /// Of these pages, in ascending order, those that were written since they were told last, by this or to a save; and maybe
    /// some between them, which are not told again either.
    ///
    /// # Errors
    /// If the hypervisor is gone.
    pub fn written_among(&mut self, pages: &[Page]) -> Result<Vec<Page>, ScanError> {
        let mut new = Vec::new();
        for run in runs(pages) {
            self.scan.written_and_rearm(run, &mut new)?;
        }
        self.told.extend_from_slice(&new);
        if self.told.len() >= self.room {
            self.told = union(std::mem::take(&mut self.told));
            self.room = RUNS.max(2 * self.told.len());
        }
        Ok(new.into_iter().flat_map(Page::each).collect())
    }

    /// With the VM stopped: what is written from now on belongs to the next checkpoint.
    pub(crate) fn cut(&mut self) {
        self.cut = self.told.len();
    }

    /// The image of the last cut is whole.
    pub(crate) fn accept(&mut self, identity: String) {
        self.told.drain(..self.cut);
        self.cut = 0;
        self.since = Some(identity);
    }

    /// Lets go of the hypervisor: nothing is left.
    ///
    /// # Errors
    /// If the hypervisor is gone.
    pub fn close(self) -> Result<(), ScanError> {
        // That much is possible even if no thread can be stopped.
        let unregistered = self.scan.unregister();
        self.scan.close(&mut seize(&self.process, &self.vcpus)?)?;
        unregistered
    }
}

/// Pages in ascending order, as runs. Small gaps are part of them: each run is several calls of the kernel, and pages that nobody
/// asked for cost less to look at.
fn runs(pages: &[Page]) -> Vec<Range<Page>> {
    let mut runs: Vec<Range<Page>> = Vec::new();
    for &page in pages {
        match runs.last_mut() {
            Some(run) if page.0 <= run.end.0.saturating_add(GAP) => run.end = Page(page.0 + 1),
            _ => runs.push(page..Page(page.0 + 1)),
        }
    }
    runs
}

fn seize<'p>(process: &'p Process, vcpus: &[Tid]) -> Result<Tracee<'p>, ScanError> {
    Tracee::seize(process, vcpus).map_err(|error| ScanError::Drop(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_asked_for_together() {
        let pages = [3, 4, 5 + GAP, 9 + 2 * GAP, 10 + 2 * GAP].map(Page);
        let expected = [3..6 + GAP, 9 + 2 * GAP..11 + 2 * GAP];
        assert_eq!(runs(&pages), expected.map(|run| Page(run.start)..Page(run.end)));
        assert_eq!(runs(&[]), []);
    }
}
