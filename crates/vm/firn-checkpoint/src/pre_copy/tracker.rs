//! Write tracker: the pages that a guest writes from one checkpoint to the next.
//!
//! The kernel reports each write once. Other callers may poll some pages in between
//! ([`WriteTracker::written_among`]): the pages reported to them are kept here for the next
//! checkpoint.

use std::ops::Range;
use std::sync::Arc;

use firn_image::{ImageSeal, KeyId};
use firn_memory::{GuestMemory, HoleTracker, PageScan, Process, ScanError, Tracee, merge_runs};
use firn_types::{Page, ThreadId};

/// Up to this many runs of pages are kept as they were reported; more are merged first.
const RUNS_MAX: usize = 1 << 14;
/// Pages between two pages that are polled together.
const GAP_PAGES: u32 = 64;

/// An image from whose cut on writes are tracked. Any user can write an image with its identity,
/// but only a process that has its key can write a sealed one with the same key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrackedImage {
    identity: String,
    key: Option<KeyId>,
}

impl TrackedImage {
    /// The image with this identity, which is sealed by this seal, if it is sealed.
    pub(crate) fn new(identity: String, seal: Option<&ImageSeal>) -> Self {
        Self { identity, key: seal.map(|seal| seal.key.id()) }
    }
}

/// Tracks writes to all of a guest's RAM, for as long as it exists.
///
/// Dropping it leaves the registration in the hypervisor, which costs the guest a little and stops
/// nothing; [`WriteTracker::close`] is the clean end.
#[derive(Debug)]
pub struct WriteTracker {
    scan: Arc<PageScan>,
    /// Finds pages that were given back, where the kernel does not report them.
    holes: Option<HoleTracker>,
    process: Arc<Process>,
    vcpus: Vec<ThreadId>,
    /// The image from whose cut on writes are tracked.
    since: Option<TrackedImage>,
    /// Pages written since then that the kernel has reported already.
    reported: Vec<Range<Page>>,
    /// The number of runs in `reported` that were reported before the cut of the running save.
    cut: usize,
    /// The number of runs from which `reported` is merged.
    room: usize,
}

impl WriteTracker {
    /// Starts to track writes. Earlier writes are unknown.
    ///
    /// # Errors
    /// If the hypervisor can't be attached to, its memory is registered with another userfaultfd,
    /// or the kernel can't record writes (before Linux 6.7).
    pub fn start_tracking(
        process: Arc<Process>,
        memory: Arc<GuestMemory>,
        vcpus: Vec<ThreadId>,
    ) -> Result<Self, ScanError> {
        let scan = PageScan::create(&mut seize_hypervisor(&process, &vcpus)?, memory)?;
        Self::from_scan(Arc::new(scan), None, process, vcpus)
    }

    /// As [`Self::start_tracking`], for shared memory of which the guest may give pages back. They
    /// count as written. The guest waits for a thread of this tracker when it touches such a page,
    /// so the caller closes it soon.
    pub(crate) fn start_with_holes(
        process: Arc<Process>,
        memory: Arc<GuestMemory>,
        vcpus: Vec<ThreadId>,
    ) -> Result<Self, ScanError> {
        let mut tracee = seize_hypervisor(&process, &vcpus)?;
        let scan = Arc::new(PageScan::create_with_holes(&mut tracee, memory)?);
        drop(tracee);
        let holes = HoleTracker::start_thread(Arc::clone(&scan));
        let tracker = Self::from_scan(scan, Some(holes), process, vcpus)?;
        match tracker.holes.as_ref().map_or(Ok(()), HoleTracker::record_backed) {
            Ok(()) => Ok(tracker),
            Err(error) => {
                // The first error is the one to report.
                let _ = tracker.close();
                Err(error.into())
            }
        }
    }

    fn from_scan(
        scan: Arc<PageScan>,
        holes: Option<HoleTracker>,
        process: Arc<Process>,
        vcpus: Vec<ThreadId>,
    ) -> Result<Self, ScanError> {
        let (reported, since, cut, room) = (Vec::new(), None, 0, RUNS_MAX);
        let tracker = Self { scan, holes, process, vcpus, since, reported, cut, room };
        match tracker.scan.arm_all() {
            Ok(()) => Ok(tracker),
            Err(error) => {
                // The first error is the one to report.
                let _ = tracker.close();
                Err(error)
            }
        }
    }

    /// Whether it tracks this memory, at its present addresses.
    pub fn tracks_memory(&self, memory: &GuestMemory) -> bool {
        let mine = self.scan.memory();
        let start = |memory: &GuestMemory, page| memory.hva_of(page);
        mine.region_map() == memory.region_map()
            && memory.region_map().regions().iter().all(|region| {
                let first = region.page_range().start;
                start(mine, first) == start(memory, first)
            })
    }

    /// Whether it has all writes since the cut of an image.
    pub(crate) fn tracks_since(&self, image: &TrackedImage) -> bool {
        self.since.as_ref() == Some(image)
    }

    /// All pages written since the image in `since`, in order.
    pub(crate) fn written_since_image(&mut self) -> Result<Vec<Range<Page>>, ScanError> {
        self.newly_written()?;
        self.cut = 0;
        self.reported = merge_runs(std::mem::take(&mut self.reported));
        Ok(self.reported.clone())
    }

    /// The pages written since the last call, or given back, in order. They are protected again.
    pub(crate) fn newly_written(&mut self) -> Result<Vec<Range<Page>>, ScanError> {
        // A hole that is touched meanwhile counts as written.
        let discarded = self.holes.as_ref().map(HoleTracker::find_discarded).transpose()?;
        let mut new = Vec::new();
        self.scan.collect_written_and_rearm(self.scan.memory().all_pages(), &mut new)?;
        if let (Some(holes), Some(discarded)) = (&self.holes, discarded) {
            holes.record_written(&new);
            new = merge_runs([new, discarded].concat());
        }
        self.reported.extend_from_slice(&new);
        Ok(new)
    }

    /// Of the pages in these ranges, in ascending order, those that were written since they were
    /// last reported, here or to a save; perhaps also some pages between them, which are not
    /// reported again either.
    ///
    /// # Errors
    /// If the hypervisor is gone.
    pub fn written_among(&mut self, pages: &[Range<Page>]) -> Result<Vec<Page>, ScanError> {
        let mut new = Vec::new();
        for run in runs_over_gaps(pages) {
            self.scan.collect_written_and_rearm(run, &mut new)?;
        }
        self.reported.extend_from_slice(&new);
        if self.reported.len() >= self.room {
            self.reported = merge_runs(std::mem::take(&mut self.reported));
            self.room = RUNS_MAX.max(2 * self.reported.len());
        }
        Ok(new.into_iter().flat_map(Page::iter_range).collect())
    }

    /// With the VM stopped: pages written from now on belong to the next checkpoint.
    pub(crate) fn mark_cut(&mut self) {
        self.cut = self.reported.len();
    }

    /// The image of the last cut is complete.
    pub(crate) fn accept_image(&mut self, image: TrackedImage) {
        self.reported.drain(..self.cut);
        self.cut = 0;
        self.since = Some(image);
    }

    /// Detaches from the hypervisor: nothing is left there.
    ///
    /// # Errors
    /// If the hypervisor is gone.
    pub fn close(mut self) -> Result<(), ScanError> {
        // This is possible even if no thread can be stopped.
        let unregistered = self.scan.unregister_all();
        self.holes.iter_mut().for_each(HoleTracker::join_thread);
        self.scan.close(&mut seize_hypervisor(&self.process, &self.vcpus)?)?;
        unregistered
    }
}

/// Joins ranges in ascending order with small gaps between them: each range costs several system
/// calls, and polling the pages of a gap costs less.
fn runs_over_gaps(pages: &[Range<Page>]) -> Vec<Range<Page>> {
    let mut runs: Vec<Range<Page>> = Vec::new();
    for range in pages {
        match runs.last_mut() {
            Some(run) if range.start.0 <= run.end.0.saturating_add(GAP_PAGES) => {
                run.end = range.end
            }
            _ => runs.push(range.clone()),
        }
    }
    runs
}

fn seize_hypervisor<'p>(process: &'p Process, vcpus: &[ThreadId]) -> Result<Tracee<'p>, ScanError> {
    Tracee::seize(process, vcpus).map_err(|error| ScanError::Drop(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_with_another_key_is_another_image() {
        let seal =
            |key| ImageSeal { key: firn_image::ImageKey::from_bytes([key; 32]), wraps: Vec::new() };
        let image = |seal: Option<&ImageSeal>| TrackedImage::new("1f".into(), seal);
        assert_eq!(image(Some(&seal(1))), image(Some(&seal(1))));
        assert_ne!(image(Some(&seal(1))), image(Some(&seal(2))));
        assert_ne!(image(Some(&seal(1))), image(None));
        assert_ne!(image(None), TrackedImage::new("2e".into(), None));
    }

    #[test]
    fn neighbours_are_asked_for_together() {
        let ranges = |ranges: &[Range<u32>]| -> Vec<_> {
            ranges.iter().map(|range| Page(range.start)..Page(range.end)).collect()
        };
        let (near, far) = (5 + GAP_PAGES, 10 + 2 * GAP_PAGES);
        let asked = ranges(&[3..5, near..near + 1, far..far + 2]);
        assert_eq!(runs_over_gaps(&asked), ranges(&[3..near + 1, far..far + 2]));
        assert_eq!(runs_over_gaps(&[]), []);
    }
}
