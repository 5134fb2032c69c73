//! The check of a history.

use crate::explain::{Explanation, explain_history};
use crate::model::{ModelCall, SequentialModel};
use crate::search::{SearchOutcome, search_order};

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinearizabilityVerdict<O, A> {
    /// There is an order of the operations.
    Linearizable,
    /// There is none.
    Wrong(Box<Explanation<O, A>>),
    /// The search needs too many tries.
    Undecided,
}

/// Searches for an order of the whole history, with at most `tries_max` attempts to put an
/// operation into the order. If there are few clients, a thousand times the count of operations is
/// plenty.
pub fn check_history<M: SequentialModel>(
    model: &M,
    history: &[ModelCall<M>],
    tries_max: u64,
) -> LinearizabilityVerdict<M::Operation, M::Answer> {
    let mut verdict = LinearizabilityVerdict::Linearizable;
    for part in model.independent_parts(history) {
        match search_order(model, model.initial_state(), &part, &[], tries_max) {
            SearchOutcome::Possible => (),
            SearchOutcome::Undecided => verdict = LinearizabilityVerdict::Undecided,
            SearchOutcome::Impossible { call, possible } => {
                return LinearizabilityVerdict::Wrong(Box::new(explain_history(
                    model, &part, call, possible,
                )));
            }
        }
    }
    verdict
}
