//! Whether a history is right.

use crate::explain::{Explanation, explain};
use crate::model::{CallOf, Model};
use crate::search::{Outcome, search};

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict<O, A> {
    /// There is an order.
    Linearizable,
    /// There is none.
    Wrong(Box<Explanation<O, A>>),
    /// It would take too long to know.
    Undecided,
}

/// Looks for an order of the whole history, trying at most so many times to put an operation into its place: a thousand times as many as
/// there are operations is plenty for clients that are few.
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
