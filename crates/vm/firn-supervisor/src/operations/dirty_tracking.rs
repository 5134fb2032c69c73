//! Dirty tracking from one checkpoint to the next, while no operation runs.
//!
//! It only makes incremental checkpoints faster: without it, the next one compares all memory with
//! its parent. So the journal records only that the guest's memory is registered, and a successor
//! releases it.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use firn_checkpoint::{SaveStrategy, WriteTracker};
use firn_memory::{GuestMemory, KernelFeatures, ScanError};
use firn_types::Page;

use crate::hypervisor::qemu;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::HypervisorRecord;

/// The tracker of a VM between two checkpoints, if there is one.
#[derive(Default)]
pub(crate) struct DirtyTracking(Mutex<TrackingState>);

#[derive(Default)]
struct TrackingState {
    tracker: Option<WriteTracker>,
    /// Changes whenever a save, or another caller, may have taken dirty pages from the tracker.
    era: u64,
}

impl DirtyTracking {
    /// Starts to track the guest's memory, for purposes other than a save.
    pub(crate) fn start_tracking(
        &self,
        hypervisor_record: &HypervisorRecord,
    ) -> Result<(), Failure> {
        let mut state = self.lock_state();
        if state.tracker.is_none() {
            let (process, memory) = qemu::open_journaled(hypervisor_record)?;
            refuse_other_writers(&memory)?;
            let started =
                WriteTracker::start_tracking(process, memory, hypervisor_record.vcpus.clone());
            state.tracker = Some(started.while_doing("starting to track the guest's writes")?);
            state.era += 1;
        }
        Ok(())
    }

    /// Of the pages in these ranges, in ascending order, those that were written since they were
    /// last returned, and possibly some between them; and the number of the current era. If the era
    /// differs from that of an earlier call, some writes were reported to a save. `None` while a
    /// save tracks the guest's memory.
    pub(crate) fn written_among(&self, pages: &[Range<Page>]) -> Option<(u64, Vec<Page>)> {
        let mut state = self.lock_state();
        let era = state.era;
        let written = state.tracker.as_mut()?.written_among(pages);
        match written {
            Ok(written) => Some((era, written)),
            Err(error) => {
                // Some pages may be protected again without having been returned, so the next save
                // must not rely on the tracker either.
                state.era += 1;
                log_error(&error);
                state.tracker.take().into_iter().for_each(close_tracker);
                None
            }
        }
    }

    /// Ends the tracker unless the save can use it, because nothing else can track the guest's
    /// memory while it exists.
    pub(crate) fn release_for_save(&self, strategy: SaveStrategy, memory: &GuestMemory) {
        let mut state = self.lock_state();
        let is_usable =
            |it: &mut WriteTracker| strategy == SaveStrategy::PreCopy && it.tracks_memory(memory);
        state.era += 1;
        state.tracker.take_if(|tracker| !is_usable(tracker)).into_iter().for_each(close_tracker);
    }

    /// Hands the tracker to a save, which gives it back by [`Self::return_tracker`].
    pub(crate) fn take_tracker(&self) -> Option<WriteTracker> {
        let mut state = self.lock_state();
        state.era += 1;
        state.tracker.take()
    }

    /// Takes the tracker back, for the next save.
    pub(crate) fn return_tracker(&self, tracker: Option<WriteTracker>) {
        let mut state = self.lock_state();
        state.era += 1;
        state.tracker = tracker;
    }

    /// Whether the guest's memory is being tracked.
    pub(crate) fn is_tracking(&self) -> bool {
        self.lock_state().tracker.is_some()
    }

    /// Ends the tracker and releases the guest's memory.
    pub(crate) fn stop_tracking(&self) {
        self.take_tracker().into_iter().for_each(close_tracker);
    }

    fn lock_state(&self) -> MutexGuard<'_, TrackingState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether this host can track writes at all.
pub(crate) fn can_track_writes() -> bool {
    KernelFeatures::of_kernel().is_ok_and(|it| it.write_protect_async && it.pagemap_scan)
}

/// Refuses memory that another process maps, because its writes can't be tracked.
pub(crate) fn refuse_other_writers(memory: &GuestMemory) -> Result<(), Failure> {
    let others =
        memory.other_users().while_doing("finding processes that map the guest's memory")?;
    let Some(other) = others.first() else { return Ok(()) };
    let text =
        format!("the guest's memory is also mapped by {other}, whose writes can't be tracked");
    Err(Failure::new(FailureKind::Refused, text)
        .with_hint("start the VM without vhost-user devices"))
}

fn close_tracker(tracker: WriteTracker) {
    if let Err(error) = tracker.close() {
        log_error(&error);
    }
}

fn log_error(error: &ScanError) {
    tracing::warn!("{}", Failure::from_error(FailureKind::Other, error));
}
