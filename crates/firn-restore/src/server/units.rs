//! The state of every read unit.

use super::actions::{Source, Why};
use super::plan::Unit;

/// Where a unit is on its way from storage to guest memory; see the drawing in [`super`].
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

/// All units: their states, and how many memory blocks each still misses.
#[derive(Debug)]
pub(super) struct Units<B> {
    states: Vec<State<B>>,
    missing: Vec<u32>,
    left: u32,
    stored: u32,
    held: u32,
}

impl<B> Units<B> {
    /// Units that miss as many memory blocks as `missing` says.
    pub(super) fn new(missing: Vec<u32>) -> Self {
        let state = |&missing: &u32| match missing {
            0 => State::Done,
            _ => State::Stored,
        };
        let states = missing.iter().map(state).collect();
        let left = missing.iter().filter(|&&missing| missing > 0).count() as u32;
        Self { states, missing, left, stored: left, held: 0 }
    }

    /// Units that are not done.
    pub(super) fn left(&self) -> u32 {
        self.left
    }

    /// Units that nobody has begun to read.
    pub(super) fn stored(&self) -> u32 {
        self.stored
    }

    /// Units whose bytes are held in memory, or are about to be.
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

    /// Changes the state. A unit that is done stays done: its pages may all have been given back while it was read.
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

    /// The place up to which workers have gone through a unit in memory.
    pub(super) fn cursor(&mut self, unit: Unit) -> Option<&mut u32> {
        match &mut self.states[unit.index()] {
            State::Memory { next, .. } => Some(next),
            _ => None,
        }
    }

    /// One memory block of the unit is complete. Whether that was the last one.
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

/// Whether a unit in this state takes up memory for its bytes.
fn holds<B>(state: &State<B>) -> bool {
    match state {
        State::Reading => true,
        State::Memory { source, .. } => matches!(source, Source::Held(_)),
        _ => false,
    }
}
