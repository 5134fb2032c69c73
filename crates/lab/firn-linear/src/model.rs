//! Sequential model: the behavior of the system if it performed one operation after another.

use std::hash::Hash;

use crate::history::ClientCall;

/// A [`ClientCall`] with the requests and answers of the model `M`.
pub type ModelCall<M> =
    ClientCall<<M as SequentialModel>::Operation, <M as SequentialModel>::Answer>;

/// A sequential program.
pub trait SequentialModel {
    /// A request to the program.
    type Operation: Clone;
    /// The program's answer.
    type Answer: Clone + PartialEq;
    /// The program's state.
    type State: Clone + Eq + Hash;

    /// The initial state.
    fn initial_state(&self) -> Self::State;

    /// The state of which nothing is known: it permits every answer that some state permits.
    fn unknown_state(&self) -> Self::State;

    /// The state after the operation, if this answer is possible; without an answer, the state if
    /// the operation was done.
    fn apply_operation(
        &self,
        state: &Self::State,
        operation: &Self::Operation,
        answer: Option<&Self::Answer>,
    ) -> Option<Self::State>;

    /// The answer in this state, if the state determines it.
    fn expected_answer(
        &self,
        state: &Self::State,
        operation: &Self::Operation,
    ) -> Option<Self::Answer>;

    /// Whether the operation can change the state.
    fn can_change_state(&self, operation: &Self::Operation) -> bool;

    /// Splits a history into independent parts: they are all right if and only if the whole is.
    fn independent_parts(&self, history: &[ModelCall<Self>]) -> Vec<Vec<ModelCall<Self>>> {
        vec![history.to_vec()]
    }

    /// Simpler histories that are right if the whole is: a wrong one gives a shorter explanation.
    fn simpler_views(&self, history: &[ModelCall<Self>]) -> Vec<Vec<ModelCall<Self>>> {
        let _ = history;
        Vec::new()
    }
}
