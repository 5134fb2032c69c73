//! Dirty pages of a protected guest: the pages that it wrote, and those that it gave back.
//!
//! A guest with a balloon gives pages back: they are zeros from then on, and the standby must have
//! zeros there, too. All contents of an epoch are copied before its cut or in the pause of the cut,
//! and the hypervisor gives nothing back in a pause: its main thread, which would do it, has stopped
//! the VM. So nothing of an epoch can be lost, and a page that was given back only has to count as
//! written:
//!
//! ```text
//!               removed in an epoch                     touched again in it
//!   private     no entry, no mark: a scan reports it    an entry without a mark: a scan reports it
//!   shared      a hole: `HoleTracker` finds it          filled by the tracker's thread: a scan reports it
//! ```
//!
//! A page that was copied ahead of the pause and then removed is reported like one that was written
//! after its copy, and its copy is obsolete.
//!
//! **Shared memory.** Accesses to holes fault while the VM is protected. If the supervisor dies,
//! a vCPU that touches a hole waits until the successor unregisters the memory, as at a save. Memory
//! is read by `pread(2)`: a mapping of Firn's would fill holes.
//!
//! **Private memory.** A removal may take a whole page table with it, so each scan queries for
//! missing tables ([`PageScan::with_lasting_tables`] does not apply).

use std::ops::Range;
use std::sync::Arc;

use firn_cluster::predict::PageSet;
use firn_memory::{GuestMemory, HoleTracker, PageScan, Process, ScanError, Tracee};
use firn_types::{Page, ThreadId};
use firn_vmm::QemuVm;

use super::GuestError;

/// Tracks the dirty pages of a guest.
#[derive(Debug)]
pub(super) struct DirtyPages {
    scan: Arc<PageScan>,
    /// Finds pages that were given back, where no scan reports them.
    holes: Option<HoleTracker>,
}

/// Whether the guest may give memory back.
///
/// # Errors
/// If it may, and Firn would not notice that.
pub(super) fn may_give_back(vm: &mut QemuVm, memory: &GuestMemory) -> Result<bool, GuestError> {
    if vm.balloon()?.is_none() {
        return Ok(false);
    }
    if memory.is_partly_shared() {
        let why = "it has a balloon, and a part of its RAM is shared memory and a part is not: Firn \
                   tracks what is given back in one kind; start it with share=on for each memory \
                   backend, or for none";
        return Err(GuestError::Refused(why.into()));
    }
    if memory.may_be_in_large_pages() {
        return Err(GuestError::Refused(GuestError::LargePages.to_string()));
    }
    Ok(true)
}

impl DirtyPages {
    /// Registers all of RAM. Nothing is protected yet.
    pub(super) fn register(
        tracee: &mut Tracee<'_>,
        memory: &Arc<GuestMemory>,
        gives_back: bool,
    ) -> Result<Self, ScanError> {
        let memory = Arc::clone(memory);
        Ok(match (gives_back, memory.is_shared()) {
            (true, true) => {
                let scan = PageScan::create_with_holes(tracee, memory)?.with_lasting_tables();
                let scan = Arc::new(scan);
                let holes = HoleTracker::start_thread(Arc::clone(&scan));
                Self { scan, holes: Some(holes) }
            }
            (true, false) => {
                Self { scan: Arc::new(PageScan::create(tracee, memory)?), holes: None }
            }
            (false, _) => {
                let scan = PageScan::create(tracee, memory)?.with_lasting_tables();
                Self { scan: Arc::new(scan), holes: None }
            }
        })
    }

    /// Begins to track: protects all pages.
    pub(super) fn begin(&self) -> Result<(), ScanError> {
        self.scan.arm_all()?;
        Ok(self.holes.as_ref().map_or(Ok(()), HoleTracker::record_backed)?)
    }

    /// Whether reading a hole through a mapping would hide that it is one.
    pub(super) fn tracks_holes(&self) -> bool {
        self.holes.is_some()
    }

    /// Checks that what is given back is still recognized: the host's settings may have changed.
    pub(super) fn check_host(&self) -> Result<(), GuestError> {
        match self.tracks_holes() && self.scan.memory().may_be_in_large_pages() {
            true => Err(GuestError::LargePages),
            false => Ok(()),
        }
    }

    /// The pages that were written since they were protected, as far as they are known while the VM
    /// runs.
    pub(super) fn find_written(&self) -> Result<PageSet, ScanError> {
        self.collect(false, Vec::new())
    }

    /// The pages that were written since they were protected, or given back since the last call of
    /// this function or of [`Self::reprotect_dirty`].
    pub(super) fn find_dirty(&self) -> Result<PageSet, ScanError> {
        let discarded = self.find_discarded()?;
        self.collect(false, discarded)
    }

    /// As [`Self::find_dirty`], and protects them again.
    pub(super) fn reprotect_dirty(&self) -> Result<PageSet, ScanError> {
        let discarded = self.find_discarded()?;
        self.collect(true, discarded)
    }

    /// Called before a scan, so that a hole that is touched in between is reported.
    fn find_discarded(&self) -> Result<Vec<Range<Page>>, ScanError> {
        self.holes.as_ref().map_or(Ok(Vec::new()), HoleTracker::find_discarded)
    }

    fn collect(&self, rearms: bool, discarded: Vec<Range<Page>>) -> Result<PageSet, ScanError> {
        let (all, mut written) = (self.scan.memory().all_pages(), Vec::new());
        match rearms {
            true => self.scan.collect_written_and_rearm(all, &mut written)?,
            false => self.scan.collect_written(all, &mut written)?,
        }
        if let Some(holes) = &self.holes {
            holes.record_written(&written);
        }
        let mut pages = PageSet::new();
        written.into_iter().chain(discarded).for_each(|run| pages.insert_run(run));
        Ok(pages)
    }

    /// Protects pages.
    pub(super) fn protect_pages(&self, pages: &PageSet) -> Result<(), ScanError> {
        pages.page_runs().into_iter().try_for_each(|run| self.scan.arm_range(run))
    }

    /// Protects all pages.
    pub(super) fn protect_all(&self) -> Result<(), ScanError> {
        self.scan.arm_all()
    }

    /// Unregisters all of RAM. No thread of the hypervisor waits for Firn any more.
    pub(super) fn unregister(&mut self) -> Result<(), ScanError> {
        let unregistered = self.scan.unregister_all();
        if let Some(mut holes) = self.holes.take() {
            holes.join_thread();
        }
        unregistered
    }

    /// Removes the descriptor from the hypervisor.
    pub(super) fn close(&self, process: &Process, vcpus: &[ThreadId]) -> Result<(), GuestError> {
        Ok(self.scan.close(&mut Tracee::seize(process, vcpus)?)?)
    }
}
