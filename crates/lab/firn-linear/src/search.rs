//! Search for an order of a history's operations.
//!
//! ```text
//!   node   | at: processed events | open: called, and not in the order yet | state |
//!
//!   a request:    its operation is open                           -> the same node, one event later
//!   an answer:    its operation is in the order already           -> the same node, one event later
//!                 it is open: it comes next, or another does      -> a node each; the nodes are the choices
//!   no event:     there is an order
//! ```
//!
//! An operation may also be optional: it is done between its request and its answer as the answer
//! describes, or never. At its answer there is the additional choice to drop it.
//!
//! `at` and `open` determine which operations are in the order, so a node that was examined once
//! need not be examined again, however it was reached.

use std::collections::HashSet;
use std::rc::Rc;

use crate::history::{ClientCall, HistoryEvent, sorted_events};
use crate::model::{ModelCall, SequentialModel};

/// The result of a search.
#[derive(Debug, PartialEq)]
pub(crate) enum SearchOutcome<A> {
    /// There is an order.
    Possible,
    /// There is none: only for the events before the answer of operation `call`. `possible` are the
    /// answers that would have been possible at that point.
    Impossible { call: usize, possible: Vec<A> },
    /// The search needs too many tries.
    Undecided,
}

impl<A> SearchOutcome<A> {
    pub(crate) fn is_impossible(&self) -> bool {
        matches!(self, Self::Impossible { .. })
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct SearchNode<S> {
    at: usize,
    open: Vec<u32>,
    state: S,
}

#[derive(Clone, Copy, Debug)]
enum SearchChoice {
    Put(u32),
    Skip(u32),
}

/// A node, and its remaining choices.
struct SearchBranch<S> {
    node: Rc<SearchNode<S>>,
    choices: std::vec::IntoIter<SearchChoice>,
}

/// Whether an operation is optional: none is if the list is empty.
fn is_optional(optional: &[bool], call: u32) -> bool {
    optional.get(call as usize).copied().unwrap_or_default()
}

/// Searches for an order, with at most `tries_max` attempts to put an operation into the order.
pub(crate) fn search_order<M: SequentialModel>(
    model: &M,
    start: M::State,
    history: &[ModelCall<M>],
    optional: &[bool],
    tries_max: u64,
) -> SearchOutcome<M::Answer> {
    let events = sorted_events(history, |number| is_optional(optional, number));
    let mut search = OrderSearch { model, history, optional, events, seen: HashSet::new() };
    let start = SearchNode { at: 0, open: Vec::new(), state: start };
    let Some(first) = search.first_branch(start) else { return SearchOutcome::Possible };
    let (mut branches, mut tries) = (vec![first], 0);
    while let Some(branch) = branches.last_mut() {
        let Some(choice) = branch.choices.next() else {
            branches.pop();
            continue;
        };
        tries += 1;
        if tries > tries_max {
            return SearchOutcome::Undecided;
        }
        let Some(node) = search.apply_choice(&branch.node, choice) else { continue };
        match search.advance(node) {
            None => return SearchOutcome::Possible,
            Some(node) => branches.extend(search.branch_if_new(node)),
        }
    }
    search.impossible_outcome()
}

struct OrderSearch<'a, M: SequentialModel> {
    model: &'a M,
    history: &'a [ModelCall<M>],
    optional: &'a [bool],
    events: Vec<HistoryEvent>,
    /// All nodes at which an answer needs its operation.
    seen: HashSet<Rc<SearchNode<M::State>>>,
}

impl<M: SequentialModel> OrderSearch<'_, M> {
    fn first_branch(&mut self, node: SearchNode<M::State>) -> Option<SearchBranch<M::State>> {
        let node = self.advance(node)?;
        self.branch_if_new(node)
    }

    /// Advances to the next answer whose operation is not in the order; `None` if there is none
    /// left.
    fn advance(&self, mut node: SearchNode<M::State>) -> Option<SearchNode<M::State>> {
        loop {
            match *self.events.get(node.at)? {
                HistoryEvent::Call(call) if self.is_relevant(call) => node.open.push(call),
                HistoryEvent::Return(call) | HistoryEvent::Gone(call)
                    if node.open.contains(&call) =>
                {
                    return Some(node);
                }
                HistoryEvent::Call(_) | HistoryEvent::Return(_) | HistoryEvent::Gone(_) => (),
            }
            node.at += 1;
        }
    }

    /// Whether it must be in the order. Operations that change nothing matter only then.
    fn is_needed(&self, call: u32) -> bool {
        self.history[call as usize].answer.is_some() && !is_optional(self.optional, call)
    }

    fn is_relevant(&self, call: u32) -> bool {
        self.is_needed(call) || self.model.can_change_state(&self.history[call as usize].operation)
    }

    fn branch_if_new(&mut self, node: SearchNode<M::State>) -> Option<SearchBranch<M::State>> {
        let node = Rc::new(node);
        let is_new = self.seen.insert(Rc::clone(&node));
        let choices = self.choices(&node).into_iter();
        is_new.then_some(SearchBranch { node, choices })
    }

    /// First the operation whose answer is due, then the others by the time of their answers, at
    /// last those that need not be done.
    fn choices(&self, node: &SearchNode<M::State>) -> Vec<SearchChoice> {
        let answered = |call: u32| self.history[call as usize].answer_time().unwrap_or(u64::MAX);
        let event = self.events[node.at];
        let rank = |call: u32| {
            (event != HistoryEvent::Return(call), !self.is_needed(call), answered(call))
        };
        let mut open = node.open.clone();
        open.sort_by_key(|&call| rank(call));
        let gone = match event {
            HistoryEvent::Gone(call) => Some(SearchChoice::Skip(call)),
            HistoryEvent::Call(_) | HistoryEvent::Return(_) => None,
        };
        gone.into_iter().chain(open.into_iter().map(SearchChoice::Put)).collect()
    }

    fn apply_choice(
        &self,
        node: &SearchNode<M::State>,
        choice: SearchChoice,
    ) -> Option<SearchNode<M::State>> {
        let (call, state) = match choice {
            SearchChoice::Skip(call) => (call, node.state.clone()),
            SearchChoice::Put(call) => (call, self.apply_call(&node.state, call)?),
        };
        let open = node.open.iter().copied().filter(|&it| it != call).collect();
        Some(SearchNode { at: node.at, open, state })
    }

    /// The state after an operation, if its answer is possible. `None` also for an optional
    /// operation that changes nothing.
    fn apply_call(&self, state: &M::State, call: u32) -> Option<M::State> {
        let ClientCall { operation, .. } = &self.history[call as usize];
        let answer = self.history[call as usize].answer_value();
        let next = self.model.apply_operation(state, operation, answer)?;
        (self.is_needed(call) || next != *state).then_some(next)
    }

    /// The result of a failed search: the nodes with the most processed events show which answer is
    /// impossible.
    fn impossible_outcome(&self) -> SearchOutcome<M::Answer> {
        let furthest = self.seen.iter().map(|node| node.at).max().unwrap_or_default();
        let Some(HistoryEvent::Return(call)) = self.events.get(furthest) else {
            return SearchOutcome::Possible;
        };
        let call = *call as usize;
        let mut possible: Vec<M::Answer> = Vec::new();
        for node in self.seen.iter().filter(|node| node.at == furthest) {
            let expected = self.model.expected_answer(&node.state, &self.history[call].operation);
            possible.extend(expected.filter(|answer| !possible.contains(answer)));
        }
        SearchOutcome::Impossible { call, possible }
    }
}
