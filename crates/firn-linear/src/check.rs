//! The check of a history.

use crate::explain::{Explanation, explain};
use crate::model::{CallOf, Model};
use crate::search::{Outcome, search};

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict<O, A> {
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
pub fn check<M: Model>(
    model: &M,
    history: &[CallOf<M>],
    tries_max: u64,
) -> Verdict<M::Operation, M::Answer> {
    let mut verdict = Verdict::Linearizable;
    for part in model.parts(history) {
        match search(model, model.start(), &part, &[], tries_max) {
            Outcome::Possible => (),
            Outcome::Undecided => verdict = Verdict::Undecided,
            Outcome::Impossible { call, possible } => {
                return Verdict::Wrong(Box::new(explain(model, &part, call, possible)));
            }
        }
    }
    verdict
}
