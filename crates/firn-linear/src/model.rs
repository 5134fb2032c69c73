//! What the system would be if it did one thing after another.

use std::hash::Hash;

use crate::history::Call;

/// An operation on a model, as a client saw it.
pub type CallOf<M> = Call<<M as Model>::Operation, <M as Model>::Answer>;

/// A sequential program.
pub trait Model {
    /// What it can be asked for.
    type Operation: Clone;
    /// What it says.
    type Answer: Clone + PartialEq;
    /// What it keeps.
    type State: Clone + Eq + Hash;

    /// In the beginning.
    fn start(&self) -> Self::State;

    /// When nothing is known of it: every answer is possible that can be possible in some state.
    fn unknown(&self) -> Self::State;

    /// What it keeps afterwards, if it can have given this answer; without one, if it has done it.
    fn step(
        &self,
        state: &Self::State,
        operation: &Self::Operation,
        answer: Option<&Self::Answer>,
    ) -> Option<Self::State>;

    /// What it says in a state of which that is known.
    fn expected(&self, state: &Self::State, operation: &Self::Operation) -> Option<Self::Answer>;

    /// Whether the operation can leave anything behind.
    fn changes(&self, operation: &Self::Operation) -> bool;

    /// Histories that are right if and only if the whole is: of things that have nothing to do with each other.
    fn parts(&self, history: &[CallOf<Self>]) -> Vec<Vec<CallOf<Self>>> {
        vec![history.to_vec()]
    }

    /// Histories that are right if the whole is, and that less has to do with: where one is wrong, it says more shortly why.
    fn views(&self, history: &[CallOf<Self>]) -> Vec<Vec<CallOf<Self>>> {
        let _ = history;
        Vec::new()
    }
}
