//! Explanation of a wrong history: few operations that contradict each other.
//!
//! An *order* of a history puts each operation at one moment between its request and its answer, so
//! that the sequential program gives the same answers; a history that is not linearizable has none.
//!
//! A reader cannot understand a wrong history of thousands of operations. So four steps shorten it.
//! Each step leaves out only operations and knowledge whose loss makes more orders possible. If the
//! remaining history has no order either, neither has the whole.
//!
//! 1. If a *view* of the history is wrong, only that view remains. A view is a simpler history that
//!    the model makes of the whole ([`SequentialModel::simpler_views`]): of a bank, one account.
//! 2. The end is left out: all operations that were requested after the impossible answer.
//! 3. The beginning is left out. After that, the state at the new beginning may be any, and
//!    operations in progress at that moment may have been done before it.
//! 4. Of the remaining operations as many as possible become optional.

use std::fmt;
use std::ops::Range;

use crate::history::ClientCall;
use crate::model::{ModelCall, SequentialModel};
use crate::search::{SearchOutcome, search_order};

/// The maximum count of tries for a shorter explanation: a step that is not decided by then is not
/// taken.
const ATTEMPTS_MAX: u64 = 50_000;

/// The maximum count of possible answers to print.
const POSSIBLE_PRINTED_MAX: usize = 6;

/// Answers that can't all be true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation<O, A> {
    /// The last of these answers.
    pub answer: ClientCall<O, A>,
    /// The answers that would have been possible instead.
    pub possible: Vec<A>,
    /// The answers that contradict it, by the time of their requests.
    pub contradicted: Vec<ClientCall<O, A>>,
    /// Operations that make no difference: they may have been done within their time, or not.
    pub irrelevant: Vec<ClientCall<O, A>>,
    /// Whether nothing needs to be known of the state before these operations.
    pub from_any_state: bool,
}

impl<O: fmt::Debug, A: fmt::Debug> fmt::Display for Explanation<O, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", CallLine(&self.answer))?;
        let (few, more) = self.possible.split_at(self.possible.len().min(POSSIBLE_PRINTED_MAX));
        write!(f, ", but it could have been {few:?}")?;
        match more.len() {
            0 => writeln!(f, " only")?,
            more => writeln!(f, " or {more} others only")?,
        }
        let before = if self.from_any_state { "any state" } else { "the beginning" };
        writeln!(f, "from {before}, given")?;
        self.contradicted.iter().try_for_each(|call| writeln!(f, "  {}", CallLine(call)))?;
        match self.irrelevant.len() {
            0 => Ok(()),
            others => writeln!(f, "  regardless of {others} other calls"),
        }
    }
}

/// A call on one line.
struct CallLine<'a, O, A>(&'a ClientCall<O, A>);

impl<O: fmt::Debug, A: fmt::Debug> fmt::Display for CallLine<'_, O, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ClientCall { client, called, operation, answer } = self.0;
        write!(f, "client {client}, {called}: {operation:?}")?;
        match answer {
            Some((at, answer)) => write!(f, " -> {at}: {answer:?}"),
            None => write!(f, ", no answer"),
        }
    }
}

/// A part of a history that has no order (see the module), and that the steps shorten.
struct WrongHistory<M: SequentialModel> {
    history: Vec<ModelCall<M>>,
    /// Which of the calls are optional.
    optional: Vec<bool>,
    /// The impossible answer's call, and the answers that would have been possible.
    call: usize,
    possible: Vec<M::Answer>,
    from_any_state: bool,
}

/// Explains a history that has no order because of the answer of this operation.
pub(crate) fn explain_history<M: SequentialModel>(
    model: &M,
    history: &[ModelCall<M>],
    call: usize,
    possible: Vec<M::Answer>,
) -> Explanation<M::Operation, M::Answer> {
    let mut wrong = earliest_wrong_view(model, history)
        .unwrap_or_else(|| WrongHistory::new(history.to_vec(), call, possible));
    wrong.drop_later_calls();
    wrong.drop_earlier_calls(model);
    wrong.make_optional(model);
    wrong.into_explanation(model)
}

/// The view that is wrong at the earliest answer.
fn earliest_wrong_view<M: SequentialModel>(
    model: &M,
    history: &[ModelCall<M>],
) -> Option<WrongHistory<M>> {
    let views = model.simpler_views(history).into_iter().filter_map(|history| {
        match search_order(model, model.initial_state(), &history, &[], ATTEMPTS_MAX) {
            SearchOutcome::Impossible { call, possible } => {
                Some(WrongHistory::new(history, call, possible))
            }
            SearchOutcome::Possible | SearchOutcome::Undecided => None,
        }
    });
    views.min_by_key(WrongHistory::answer_time)
}

impl<M: SequentialModel> WrongHistory<M> {
    fn new(history: Vec<ModelCall<M>>, call: usize, possible: Vec<M::Answer>) -> Self {
        let optional = vec![false; history.len()];
        Self { history, optional, call, possible, from_any_state: false }
    }

    /// The time of the answer.
    fn answer_time(&self) -> u64 {
        self.history[self.call].answer_time().unwrap_or(u64::MAX)
    }

    /// Leaves out all calls that are not wanted. The wanted ones stay as they are.
    fn retain_calls(&mut self, is_wanted: impl Fn(&ModelCall<M>) -> bool) {
        let wanted = |number: &usize| is_wanted(&self.history[*number]);
        let kept: Vec<usize> = (0..self.history.len()).filter(wanted).collect();
        self.call = kept.iter().position(|&number| number == self.call).unwrap_or_default();
        self.optional = kept.iter().map(|&number| self.optional[number]).collect();
        self.history = kept.into_iter().map(|number| self.history[number].clone()).collect();
    }

    /// Drops the calls that were made after the answer: they cannot affect it.
    fn drop_later_calls(&mut self) {
        let until = self.answer_time();
        self.retain_calls(|call| call.called <= until);
    }

    /// Drops the calls that were finished before a new beginning. That is the latest moment from which
    /// on the history is wrong with any state at that moment, and at the latest the request of the
    /// operation with the impossible answer.
    fn drop_earlier_calls(&mut self, model: &M) {
        let called = self.history[self.call].called;
        let times = self.history.iter().map(|call| call.called);
        let mut times: Vec<u64> = times.filter(|&time| time <= called).collect();
        times.sort_unstable();
        times.dedup();
        // An earlier beginning includes more knowledge.
        let later = times.partition_point(|&time| self.since_time(time).is_wrong(model));
        let last = later.checked_sub(1).and_then(|last| times.get(last));
        if let Some(since) = last.map(|&time| self.since_time(time)) {
            *self = since;
        }
    }

    /// The calls that were not finished at this time. Those in progress may have been done before.
    fn since_time(&self, time: u64) -> Self {
        let Self { history, optional, possible, .. } = self;
        let (history, optional) = (history.clone(), optional.clone());
        let mut since =
            Self { history, optional, possible: possible.clone(), from_any_state: true, ..*self };
        since.retain_calls(|call| call.answer_time().is_none_or(|at| at >= time));
        let (history, call) = (&since.history, since.call);
        let is_in_progress = |number: usize| number != call && history[number].called < time;
        since.optional = (0..history.len()).map(is_in_progress).collect();
        since
    }

    fn is_wrong(&self, model: &M) -> bool {
        self.search_order(model, &self.optional).is_impossible()
    }

    fn search_order(&self, model: &M, optional: &[bool]) -> SearchOutcome<M::Answer> {
        let start = if self.from_any_state { model.unknown_state() } else { model.initial_state() };
        search_order(model, start, &self.history, optional, ATTEMPTS_MAX)
    }

    /// Makes operations optional, many at once at first.
    fn make_optional(&mut self, model: &M) {
        let mut many = self.history.len().next_power_of_two();
        while many > 0 {
            for first in (0..self.history.len()).step_by(many) {
                self.try_optional(model, first..(first + many).min(self.history.len()));
            }
            many /= 2;
        }
    }

    fn try_optional(&mut self, model: &M, which: Range<usize>) {
        let mut optional = self.optional.clone();
        which.filter(|&number| number != self.call).for_each(|number| optional[number] = true);
        if optional != self.optional && self.search_order(model, &optional).is_impossible() {
            self.optional = optional;
        }
    }

    fn into_explanation(mut self, model: &M) -> Explanation<M::Operation, M::Answer> {
        // With less knowledge more answers may be possible.
        if let SearchOutcome::Impossible { possible, .. } = self.search_order(model, &self.optional)
        {
            self.possible = possible;
        }
        let Self { call, possible, from_any_state, .. } = self;
        let answer = self.history[call].clone();
        let (mut contradicted, mut irrelevant) = (Vec::new(), Vec::new());
        for (number, (other, optional)) in self.history.into_iter().zip(self.optional).enumerate() {
            if number == call {
                continue;
            } else if other.answer.is_some() && !optional {
                contradicted.push(other);
            } else if model.can_change_state(&other.operation) {
                irrelevant.push(other);
            }
        }
        Explanation { answer, possible, contradicted, irrelevant, from_any_state }
    }
}
