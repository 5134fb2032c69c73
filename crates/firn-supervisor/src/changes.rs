//! What the guest writes from one checkpoint to the next, followed while nothing else goes on.
//!
//! It only makes incremental checkpoints quicker: where it can't be had the next one compares all of memory with its
//! parent. So nothing of it is journaled but that the guest's memory is registered, and a successor lets go of that.

use std::sync::{Mutex, PoisonError};

use firn_checkpoint::{Strategy, Tracker};
use firn_memory::{Features, GuestMemory, ScanError};

use crate::failure::{Failure, FailureKind};

/// The tracker of a VM between two checkpoints, if there is one.
#[derive(Default)]
pub(crate) struct Changes {
    tracker: Mutex<Option<Tracker>>,
}

impl Changes {
    /// Ends the tracker unless a save can use it: nothing else can follow the guest's memory as long as it does.
    pub(crate) fn make_way_for(&self, strategy: Strategy, memory: &GuestMemory) {
        let mut tracker = self.tracker.lock().unwrap_or_else(PoisonError::into_inner);
        let is_of_use = |it: &mut Tracker| strategy == Strategy::PreCopy && it.follows(memory);
        tracker.take_if(|tracker| !is_of_use(tracker)).into_iter().for_each(end);
    }

    /// The tracker, for a save, which gives it back by [`Self::keep`].
    pub(crate) fn take(&self) -> Option<Tracker> {
        self.tracker.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Leaves it for the next save.
    pub(crate) fn keep(&self, tracker: Option<Tracker>) {
        *self.tracker.lock().unwrap_or_else(PoisonError::into_inner) = tracker;
    }

    /// Whether the guest's memory is being followed.
    pub(crate) fn are_followed(&self) -> bool {
        self.tracker.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Lets go of the guest's memory.
    pub(crate) fn finish(&self) {
        self.take().into_iter().for_each(end);
    }
}

/// Whether this host can follow writes at all.
pub(crate) fn can_be_followed() -> bool {
    Features::of_kernel().is_ok_and(|it| it.write_protect_async && it.pagemap_scan)
}

fn end(tracker: Tracker) {
    if let Err(error) = tracker.close() {
        explain(&error);
    }
}

fn explain(error: &ScanError) {
    tracing::warn!("{}", Failure::from_error(FailureKind::Other, error));
}
