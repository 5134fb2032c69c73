//! The state of every read unit.

use super::actions::{Source, Why};
use super::plan::Unit;

/// The state of a unit between storage and guest memory; see the drawing in [`super`].
#[derive(Clone, Debug)]
pub(super) enum State<B> {
    Stored,
    Trying,
    Asked,
    Reading,
    Memory { source: Source<B>, why: Why, next: u32 },
    Done,
    Failed,
}

/// All units: their states, and the number of memory blocks that each still misses.
#[derive(Debug)]
pub(super) struct Units<B> {
    states: Vec<State<B>>,
    missing: Vec<u32>,
    left: u32,
    stored: u32,
    held: u32,
}

impl<B> Units<B> {
    /// Units of which each misses the number of memory blocks in `missing`.
    pub(super) fn new(missing: Vec<u32>) -> Self {
        let state = |&missing: &u32| match missing {
            0 => State::Done,
            _ => State::Stored,
        };
        let states = missing.iter().map(state).collect();
        let left = missing.iter().filter(|&&missing| missing > 0).count() as u32;
        Self { states, missing, left, stored: left, held: 0 }
    }

    /// The number of units that are not done.
    pub(super) fn left(&self) -> u32 {
        self.left
    }

    /// The number of units that no read has begun for.
    pub(super) fn stored(&self) -> u32 {
        self.stored
    }

    /// The number of units whose bytes are held in memory, or are about to be.
    pub(super) fn held(&self) -> u32 {
        self.held
    }

    pub(super) fn state(&self, unit: Unit) -> &State<B> {
        &self.states[unit.index()]
    }

    pub(super) fn is_stored(&self, unit: Unit) -> bool {
        matches!(self.state(unit), State::Stored)
    }

    pub(super) fn is_done(&self, unit: Unit) -> bool {
        matches!(self.state(unit), State::Done)
    }

    /// Changes the state. A unit that is done stays done: the guest may have given all its pages
    /// back while it was read.
    pub(super) fn set(&mut self, unit: Unit, state: State<B>) {
        if !self.is_done(unit) {
            self.replace(unit, state);
        }
    }

    fn replace(&mut self, unit: Unit, state: State<B>) {
        let old = std::mem::replace(&mut self.states[unit.index()], state);
        self.stored -= u32::from(matches!(old, State::Stored));
        self.held -= u32::from(holds(&old));
        self.held += u32::from(holds(&self.states[unit.index()]));
    }

    /// The index of the next block that workers check in a unit in memory.
    pub(super) fn cursor(&mut self, unit: Unit) -> Option<&mut u32> {
        match &mut self.states[unit.index()] {
            State::Memory { next, .. } => Some(next),
            _ => None,
        }
    }

    /// One memory block of the unit is complete. Returns whether that was the last one.
    pub(super) fn block_complete(&mut self, unit: Unit) -> bool {
        let missing = &mut self.missing[unit.index()];
        *missing = missing.saturating_sub(1);
        if *missing > 0 || self.is_done(unit) {
            return false;
        }
        self.replace(unit, State::Done);
        self.left -= 1;
        true
    }
}

/// Whether a unit in this state occupies memory for its bytes.
fn holds<B>(state: &State<B>) -> bool {
    match state {
        State::Reading => true,
        State::Memory { source, .. } => matches!(source, Source::Held(_)),
        _ => false,
    }
}
