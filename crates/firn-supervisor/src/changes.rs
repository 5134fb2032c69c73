//! Dirty tracking from one checkpoint to the next, while no operation runs.
//!
//! It only makes incremental checkpoints faster: without it, the next one compares all memory with
//! its parent. So the journal records only that the guest's memory is registered, and a successor
//! releases it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use firn_checkpoint::{Strategy, Tracker};
use firn_memory::{Features, GuestMemory, ScanError};
use firn_types::Page;

use crate::failure::{Context, Failure, FailureKind};
use crate::journal::Machine;
use crate::qemu;

/// The tracker of a VM between two checkpoints, if there is one.
#[derive(Default)]
pub(crate) struct Changes(Mutex<State>);

#[derive(Default)]
struct State {
    tracker: Option<Tracker>,
    /// Changes whenever a save, or another caller, may have taken dirty pages from the tracker.
    era: u64,
}

impl Changes {
    /// Starts to track the guest's memory, for purposes other than a save.
    pub(crate) fn follow(&self, machine: &Machine) -> Result<(), Failure> {
        let mut state = self.state();
        if state.tracker.is_none() {
            let (process, memory) = qemu::open_journaled(machine)?;
            refuse_others(&memory)?;
            let started = Tracker::start(process, memory, machine.vcpus.clone());
            state.tracker = Some(started.doing("starting to track the guest's writes")?);
            state.era += 1;
        }
        Ok(())
    }

    /// Of these pages, in ascending order, those that were written since they were last returned,
    /// and possibly some between them; and the number of the current era. If the era differs from
    /// that of an earlier call, some writes were reported to a save. `None` while a save tracks the
    /// guest's memory.
    pub(crate) fn written_among(&self, pages: &[Page]) -> Option<(u64, Vec<Page>)> {
        let mut state = self.state();
        let era = state.era;
        let written = state.tracker.as_mut()?.written_among(pages);
        match written {
            Ok(written) => Some((era, written)),
            Err(error) => {
                // Some pages may be protected again without having been returned, so the next save
                // must not rely on the tracker either.
                state.era += 1;
                explain(&error);
                state.tracker.take().into_iter().for_each(end);
                None
            }
        }
    }

    /// Ends the tracker unless the save can use it, because nothing else can track the guest's
    /// memory while it exists.
    pub(crate) fn make_way_for(&self, strategy: Strategy, memory: &GuestMemory) {
        let mut state = self.state();
        let is_of_use = |it: &mut Tracker| strategy == Strategy::PreCopy && it.follows(memory);
        state.era += 1;
        state.tracker.take_if(|tracker| !is_of_use(tracker)).into_iter().for_each(end);
    }

    /// Hands the tracker to a save, which gives it back by [`Self::return_tracker`].
    pub(crate) fn take(&self) -> Option<Tracker> {
        let mut state = self.state();
        state.era += 1;
        state.tracker.take()
    }

    /// Takes the tracker back, for the next save.
    pub(crate) fn keep(&self, tracker: Option<Tracker>) {
        let mut state = self.state();
        state.era += 1;
        state.tracker = tracker;
    }

    /// Whether the guest's memory is being tracked.
    pub(crate) fn are_followed(&self) -> bool {
        self.state().tracker.is_some()
    }

    /// Ends the tracker and releases the guest's memory.
    pub(crate) fn finish(&self) {
        self.take().into_iter().for_each(end);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether this host can track writes at all.
pub(crate) fn can_be_followed() -> bool {
    Features::of_kernel().is_ok_and(|it| it.write_protect_async && it.pagemap_scan)
}

/// Refuses memory that another process maps, because its writes can't be tracked.
fn refuse_others(memory: &GuestMemory) -> Result<(), Failure> {
    let others = memory.other_users().doing("finding processes that map the guest's memory")?;
    let Some(other) = others.first() else { return Ok(()) };
    let text =
        format!("the guest's memory is also mapped by {other}, whose writes can't be tracked");
    Err(Failure::new(FailureKind::Refused, text).hint("start the VM without vhost-user devices"))
}

fn end(tracker: Tracker) {
    if let Err(error) = tracker.close() {
        explain(&error);
    }
}

fn explain(error: &ScanError) {
    tracing::warn!("{}", Failure::from_error(FailureKind::Other, error));
}
