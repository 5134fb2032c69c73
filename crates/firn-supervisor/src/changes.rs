//! What the guest writes from one checkpoint to the next, followed while nothing else goes on.
//!
//! It only makes incremental checkpoints quicker: where it can't be had the next one compares all of memory with its
//! parent. So nothing of it is journaled but that the guest's memory is registered, and a successor lets go of that.

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
    /// Counts the times in which nobody else took what the tracker tells.
    era: u64,
}

impl Changes {
    /// Follows the guest's memory from now on, for others than a save.
    pub(crate) fn follow(&self, machine: &Machine) -> Result<(), Failure> {
        let mut state = self.state();
        if state.tracker.is_none() {
            let (process, memory) = qemu::open_journaled(machine)?;
            refuse_others(&memory)?;
            let started = Tracker::start(process, memory, machine.vcpus.clone());
            state.tracker = Some(started.doing("following what the guest writes")?);
            state.era += 1;
        }
        Ok(())
    }

    /// Of these pages, in ascending order, those that were written since they were told last, and maybe some between them,
    /// within the era whose number is given too: in another one than before some writes were told to a save. `None` while a save follows the guest's memory.
    pub(crate) fn written_among(&self, pages: &[Page]) -> Option<(u64, Vec<Page>)> {
        let mut state = self.state();
        let era = state.era;
        let written = state.tracker.as_mut()?.written_among(pages);
        match written {
            Ok(written) => Some((era, written)),
            Err(error) => {
                // Some pages may be armed again without having been told: the next save must not go by it either.
                state.era += 1;
                explain(&error);
                state.tracker.take().into_iter().for_each(end);
                None
            }
        }
    }

    /// Ends the tracker unless a save can use it: nothing else can follow the guest's memory as long as it does.
    pub(crate) fn make_way_for(&self, strategy: Strategy, memory: &GuestMemory) {
        let mut state = self.state();
        let is_of_use = |it: &mut Tracker| strategy == Strategy::PreCopy && it.follows(memory);
        state.era += 1;
        state.tracker.take_if(|tracker| !is_of_use(tracker)).into_iter().for_each(end);
    }

    /// The tracker, for a save, which gives it back by [`Self::keep`].
    pub(crate) fn take(&self) -> Option<Tracker> {
        let mut state = self.state();
        state.era += 1;
        state.tracker.take()
    }

    /// Leaves it for the next save.
    pub(crate) fn keep(&self, tracker: Option<Tracker>) {
        let mut state = self.state();
        state.era += 1;
        state.tracker = tracker;
    }

    /// Whether the guest's memory is being followed.
    pub(crate) fn are_followed(&self) -> bool {
        self.state().tracker.is_some()
    }

    /// Lets go of the guest's memory.
    pub(crate) fn finish(&self) {
        self.take().into_iter().for_each(end);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether this host can follow writes at all.
pub(crate) fn can_be_followed() -> bool {
    Features::of_kernel().is_ok_and(|it| it.write_protect_async && it.pagemap_scan)
}

/// What another process writes to the guest's memory can't be followed.
fn refuse_others(memory: &GuestMemory) -> Result<(), Failure> {
    let others = memory.other_users().doing("looking for others that map the guest's memory")?;
    let Some(other) = others.first() else { return Ok(()) };
    let text =
        format!("the guest's memory is also mapped by {other}, whose writes can't be followed");
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
