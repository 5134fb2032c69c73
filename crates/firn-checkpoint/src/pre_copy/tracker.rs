//! What a guest writes from one checkpoint to the next.

use std::ops::Range;
use std::sync::Arc;

use firn_memory::{GuestMemory, PageScan, Process, ScanError, Tracee, union};
use firn_types::{Page, Tid};

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
        let tracker = Self { scan, process, vcpus, since: None, told: Vec::new(), cut: 0 };
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

fn seize<'p>(process: &'p Process, vcpus: &[Tid]) -> Result<Tracee<'p>, ScanError> {
    Tracee::seize(process, vcpus).map_err(|error| ScanError::Drop(error.into()))
}
