//! Explanation of a wrong history: few operations that contradict each other.
//!
//! A reader cannot understand a wrong history of thousands of operations. Each step here leaves out
//! only what makes more orders possible: the remaining history has no order either, so the whole
//! has none.
//!
//! 1. A view, if one is wrong: of a bank, one account.
//! 2. The end: nothing is needed after the answer before which there is an order.
//! 3. The beginning: the state at some moment may have been any, and operations in progress may
//!    have been done before.
//! 4. Of the remaining operations as many as possible become optional.

use std::fmt;
use std::ops::Range;

use crate::history::Call;
use crate::model::{CallOf, Model};
use crate::search::{Outcome, search};

/// The maximum count of tries for a shorter explanation: a step that is not decided by then is not
/// taken.
const TRIES_MAX: u64 = 50_000;

/// The maximum count of possible answers to print.
const POSSIBLE_TOLD: usize = 6;

/// Answers that can't all be true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation<O, A> {
    /// The last of these answers.
    pub answer: Call<O, A>,
    /// The answers that would have been possible instead.
    pub possible: Vec<A>,
    /// The other answers, by the time of their requests.
    pub against: Vec<Call<O, A>>,
    /// Operations that may have been done within their time or not: it makes no difference.
    pub whatever: Vec<Call<O, A>>,
    /// Whether nothing needs to be known of the state before these operations.
    pub from_any_state: bool,
}

impl<O: fmt::Debug, A: fmt::Debug> fmt::Display for Explanation<O, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Line(&self.answer))?;
        let (few, more) = self.possible.split_at(self.possible.len().min(POSSIBLE_TOLD));
        write!(f, ", but it could have been {few:?}")?;
        match more.len() {
            0 => writeln!(f, " only")?,
            more => writeln!(f, " or {more} others only")?,
        }
        let before = if self.from_any_state { "any state" } else { "the beginning" };
        writeln!(f, "from {before}, given")?;
        self.against.iter().try_for_each(|call| writeln!(f, "  {}", Line(call)))?;
        match self.whatever.len() {
            0 => Ok(()),
            others => writeln!(f, "  regardless of {others} other calls"),
        }
    }
}

/// A call on one line.
struct Line<'a, O, A>(&'a Call<O, A>);

impl<O: fmt::Debug, A: fmt::Debug> fmt::Display for Line<'_, O, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call { client, called, operation, answer } = self.0;
        write!(f, "client {client}, {called}: {operation:?}")?;
        match answer {
            Some((at, answer)) => write!(f, " -> {at}: {answer:?}"),
            None => write!(f, ", no answer"),
        }
    }
}

/// A part of a history that has no order.
struct Wrong<M: Model> {
    history: Vec<CallOf<M>>,
    /// Which of the calls are optional.
    optional: Vec<bool>,
    /// The impossible answer's call, and the answers that would have been possible.
    call: usize,
    possible: Vec<M::Answer>,
    from_any_state: bool,
}

/// Explains a history that has no order because of the answer of this operation.
pub(crate) fn explain<M: Model>(
    model: &M,
    history: &[CallOf<M>],
    call: usize,
    possible: Vec<M::Answer>,
) -> Explanation<M::Operation, M::Answer> {
    let mut wrong =
        view(model, history).unwrap_or_else(|| Wrong::new(history.to_vec(), call, possible));
    wrong.end();
    wrong.begin_later(model);
    wrong.weaken(model);
    wrong.told(model)
}

/// The view that is wrong at the earliest answer.
fn view<M: Model>(model: &M, history: &[CallOf<M>]) -> Option<Wrong<M>> {
    let views = model.views(history).into_iter().filter_map(|history| {
        match search(model, model.start(), &history, &[], TRIES_MAX) {
            Outcome::Impossible { call, possible } => Some(Wrong::new(history, call, possible)),
            Outcome::Possible | Outcome::Undecided => None,
        }
    });
    views.min_by_key(Wrong::until)
}

impl<M: Model> Wrong<M> {
    fn new(history: Vec<CallOf<M>>, call: usize, possible: Vec<M::Answer>) -> Self {
        let optional = vec![false; history.len()];
        Self { history, optional, call, possible, from_any_state: false }
    }

    /// The time of the answer.
    fn until(&self) -> u64 {
        self.history[self.call].answered().unwrap_or(u64::MAX)
    }

    /// Leaves out all calls that are not wanted. The wanted ones stay as they are.
    fn keep(&mut self, is_wanted: impl Fn(&CallOf<M>) -> bool) {
        let wanted = |number: &usize| is_wanted(&self.history[*number]);
        let kept: Vec<usize> = (0..self.history.len()).filter(wanted).collect();
        self.call = kept.iter().position(|&number| number == self.call).unwrap_or_default();
        self.optional = kept.iter().map(|&number| self.optional[number]).collect();
        self.history = kept.into_iter().map(|number| self.history[number].clone()).collect();
    }

    /// Leaves out calls after the answer: they cannot affect it.
    fn end(&mut self) {
        let until = self.until();
        self.keep(|call| call.called <= until);
    }

    /// Begins at the latest moment from which on the history is wrong, whatever the state was then.
    /// This moment is not after the request of the operation itself.
    fn begin_later(&mut self, model: &M) {
        let called = self.history[self.call].called;
        let times = self.history.iter().map(|call| call.called);
        let mut times: Vec<u64> = times.filter(|&time| time <= called).collect();
        times.sort_unstable();
        times.dedup();
        // An earlier beginning includes more knowledge.
        let later = times.partition_point(|&time| self.since(time).is_wrong(model));
        let last = later.checked_sub(1).and_then(|last| times.get(last));
        if let Some(since) = last.map(|&time| self.since(time)) {
            *self = since;
        }
    }

    /// The calls that were not finished at this time. Those in progress may have been done before.
    fn since(&self, time: u64) -> Self {
        let Self { history, optional, possible, .. } = self;
        let (history, optional) = (history.clone(), optional.clone());
        let mut since =
            Self { history, optional, possible: possible.clone(), from_any_state: true, ..*self };
        since.keep(|call| call.answered().is_none_or(|at| at >= time));
        let (history, call) = (&since.history, since.call);
        let is_under_way = |number: usize| number != call && history[number].called < time;
        since.optional = (0..history.len()).map(is_under_way).collect();
        since
    }

    fn is_wrong(&self, model: &M) -> bool {
        self.search(model, &self.optional).is_impossible()
    }

    fn search(&self, model: &M, optional: &[bool]) -> Outcome<M::Answer> {
        let start = if self.from_any_state { model.unknown() } else { model.start() };
        search(model, start, &self.history, optional, TRIES_MAX)
    }

    /// Makes operations optional, many at once at first.
    fn weaken(&mut self, model: &M) {
        let mut many = self.history.len().next_power_of_two();
        while many > 0 {
            for first in (0..self.history.len()).step_by(many) {
                self.let_be(model, first..(first + many).min(self.history.len()));
            }
            many /= 2;
        }
    }

    fn let_be(&mut self, model: &M, which: Range<usize>) {
        let mut optional = self.optional.clone();
        which.filter(|&number| number != self.call).for_each(|number| optional[number] = true);
        if optional != self.optional && self.search(model, &optional).is_impossible() {
            self.optional = optional;
        }
    }

    fn told(mut self, model: &M) -> Explanation<M::Operation, M::Answer> {
        // With less knowledge more answers may be possible.
        if let Outcome::Impossible { possible, .. } = self.search(model, &self.optional) {
            self.possible = possible;
        }
        let Self { call, possible, from_any_state, .. } = self;
        let answer = self.history[call].clone();
        let (mut against, mut whatever) = (Vec::new(), Vec::new());
        for (number, (other, optional)) in self.history.into_iter().zip(self.optional).enumerate() {
            if number == call {
                continue;
            } else if other.answer.is_some() && !optional {
                against.push(other);
            } else if model.changes(&other.operation) {
                whatever.push(other);
            }
        }
        Explanation { answer, possible, against, whatever, from_any_state }
    }
}
