//! The state of every read unit.

use super::actions::{ReadReason, UnitSource};
use super::plan::ReadUnit;

/// The state of a unit between storage and guest memory; see the drawing in [`super`].
#[derive(Clone, Debug)]
pub(super) enum UnitState<B> {
    Stored,
    Trying,
    Asked,
    Reading,
    Memory { source: UnitSource<B>, why: ReadReason, next: u32 },
    Done,
    Failed,
}

/// All units: their states, and the number of memory blocks that each still misses.
#[derive(Debug)]
pub(super) struct UnitTable<B> {
    states: Vec<UnitState<B>>,
    missing: Vec<u32>,
    left: u32,
    stored: u32,
    held: u32,
}

impl<B> UnitTable<B> {
    /// Units of which each misses the number of memory blocks in `missing`.
    pub(super) fn new(missing: Vec<u32>) -> Self {
        let state = |&missing: &u32| match missing {
            0 => UnitState::Done,
            _ => UnitState::Stored,
        };
        let states = missing.iter().map(state).collect();
        let left = missing.iter().filter(|&&missing| missing > 0).count() as u32;
        Self { states, missing, left, stored: left, held: 0 }
    }

    /// The number of units that are not done.
    pub(super) fn unfinished_count(&self) -> u32 {
        self.left
    }

    /// The number of units that no read has begun for.
    pub(super) fn stored_count(&self) -> u32 {
        self.stored
    }

    /// The number of units whose bytes are held in memory, or are about to be.
    pub(super) fn held_count(&self) -> u32 {
        self.held
    }

    pub(super) fn state_of(&self, unit: ReadUnit) -> &UnitState<B> {
        &self.states[unit.index()]
    }

    pub(super) fn is_stored(&self, unit: ReadUnit) -> bool {
        matches!(self.state_of(unit), UnitState::Stored)
    }

    pub(super) fn is_done(&self, unit: ReadUnit) -> bool {
        matches!(self.state_of(unit), UnitState::Done)
    }

    /// Changes the state. A unit that is done stays done: the guest may have given all its pages
    /// back while it was read.
    pub(super) fn set_state(&mut self, unit: ReadUnit, state: UnitState<B>) {
        if !self.is_done(unit) {
            self.replace_state(unit, state);
        }
    }

    fn replace_state(&mut self, unit: ReadUnit, state: UnitState<B>) {
        let old = std::mem::replace(&mut self.states[unit.index()], state);
        self.stored -= u32::from(matches!(old, UnitState::Stored));
        self.held -= u32::from(holds_bytes(&old));
        self.held += u32::from(holds_bytes(&self.states[unit.index()]));
    }

    /// The index of the next block that workers check in a unit in memory.
    pub(super) fn install_cursor(&mut self, unit: ReadUnit) -> Option<&mut u32> {
        match &mut self.states[unit.index()] {
            UnitState::Memory { next, .. } => Some(next),
            _ => None,
        }
    }

    /// One memory block of the unit is complete. Returns whether that was the last one.
    pub(super) fn complete_block(&mut self, unit: ReadUnit) -> bool {
        let missing = &mut self.missing[unit.index()];
        *missing = missing.saturating_sub(1);
        if *missing > 0 || self.is_done(unit) {
            return false;
        }
        self.replace_state(unit, UnitState::Done);
        self.left -= 1;
        true
    }
}

/// Whether a unit in this state occupies memory for its bytes.
fn holds_bytes<B>(state: &UnitState<B>) -> bool {
    match state {
        UnitState::Reading => true,
        UnitState::Memory { source, .. } => matches!(source, UnitSource::Held(_)),
        _ => false,
    }
}
