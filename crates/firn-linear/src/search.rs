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

use crate::history::{Call, Event, events};
use crate::model::{CallOf, Model};

/// The result of a search.
#[derive(Debug, PartialEq)]
pub(crate) enum Outcome<A> {
    /// There is an order.
    Possible,
    /// There is none: only for the events before the answer of operation `call`. `possible` are the
    /// answers that would have been possible at that point.
    Impossible { call: usize, possible: Vec<A> },
    /// The search needs too many tries.
    Undecided,
}

impl<A> Outcome<A> {
    pub(crate) fn is_impossible(&self) -> bool {
        matches!(self, Self::Impossible { .. })
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Node<S> {
    at: usize,
    open: Vec<u32>,
    state: S,
}

#[derive(Clone, Copy, Debug)]
enum Choice {
    Put(u32),
    LetGo(u32),
}

/// A node, and its remaining choices.
struct Branch<S> {
    node: Rc<Node<S>>,
    choices: std::vec::IntoIter<Choice>,
}

/// Whether an operation is optional: none is if the list is empty.
fn is_in(optional: &[bool], call: u32) -> bool {
    optional.get(call as usize).copied().unwrap_or_default()
}

/// Searches for an order, with at most `tries_max` attempts to put an operation into the order.
pub(crate) fn search<M: Model>(
    model: &M,
    start: M::State,
    history: &[CallOf<M>],
    optional: &[bool],
    tries_max: u64,
) -> Outcome<M::Answer> {
    let events = events(history, |number| is_in(optional, number));
    let mut search = Search { model, history, optional, events, seen: HashSet::new() };
    let start = Node { at: 0, open: Vec::new(), state: start };
    let Some(first) = search.branch(start) else { return Outcome::Possible };
    let (mut branches, mut tries) = (vec![first], 0);
    while let Some(branch) = branches.last_mut() {
        let Some(choice) = branch.choices.next() else {
            branches.pop();
            continue;
        };
        tries += 1;
        if tries > tries_max {
            return Outcome::Undecided;
        }
        let Some(node) = search.chosen(&branch.node, choice) else { continue };
        match search.advance(node) {
            None => return Outcome::Possible,
            Some(node) => branches.extend(search.unseen(node)),
        }
    }
    search.impossible()
}

struct Search<'a, M: Model> {
    model: &'a M,
    history: &'a [CallOf<M>],
    optional: &'a [bool],
    events: Vec<Event>,
    /// All nodes at which an answer needs its operation.
    seen: HashSet<Rc<Node<M::State>>>,
}

impl<M: Model> Search<'_, M> {
    fn branch(&mut self, node: Node<M::State>) -> Option<Branch<M::State>> {
        let node = self.advance(node)?;
        self.unseen(node)
    }

    /// Advances to the next answer whose operation is not in the order; `None` if there is none
    /// left.
    fn advance(&self, mut node: Node<M::State>) -> Option<Node<M::State>> {
        loop {
            match *self.events.get(node.at)? {
                Event::Call(call) if self.matters(call) => node.open.push(call),
                Event::Return(call) | Event::Gone(call) if node.open.contains(&call) => {
                    return Some(node);
                }
                Event::Call(_) | Event::Return(_) | Event::Gone(_) => (),
            }
            node.at += 1;
        }
    }

    /// Whether it must be in the order. Operations that change nothing matter only then.
    fn is_needed(&self, call: u32) -> bool {
        self.history[call as usize].answer.is_some() && !is_in(self.optional, call)
    }

    fn matters(&self, call: u32) -> bool {
        self.is_needed(call) || self.model.changes(&self.history[call as usize].operation)
    }

    fn unseen(&mut self, node: Node<M::State>) -> Option<Branch<M::State>> {
        let node = Rc::new(node);
        let is_new = self.seen.insert(Rc::clone(&node));
        let choices = self.choices(&node).into_iter();
        is_new.then_some(Branch { node, choices })
    }

    /// First the operation whose answer is due, then the others by the time of their answers, at
    /// last those that need not be done.
    fn choices(&self, node: &Node<M::State>) -> Vec<Choice> {
        let answered = |call: u32| self.history[call as usize].answered().unwrap_or(u64::MAX);
        let event = self.events[node.at];
        let rank =
            |call: u32| (event != Event::Return(call), !self.is_needed(call), answered(call));
        let mut open = node.open.clone();
        open.sort_by_key(|&call| rank(call));
        let gone = match event {
            Event::Gone(call) => Some(Choice::LetGo(call)),
            Event::Call(_) | Event::Return(_) => None,
        };
        gone.into_iter().chain(open.into_iter().map(Choice::Put)).collect()
    }

    fn chosen(&self, node: &Node<M::State>, choice: Choice) -> Option<Node<M::State>> {
        let (call, state) = match choice {
            Choice::LetGo(call) => (call, node.state.clone()),
            Choice::Put(call) => (call, self.put(&node.state, call)?),
        };
        let open = node.open.iter().copied().filter(|&it| it != call).collect();
        Some(Node { at: node.at, open, state })
    }

    /// The state after an operation, if its answer is possible. `None` also for an optional
    /// operation that changes nothing.
    fn put(&self, state: &M::State, call: u32) -> Option<M::State> {
        let Call { operation, .. } = &self.history[call as usize];
        let told = self.history[call as usize].told();
        let next = self.model.step(state, operation, told)?;
        (self.is_needed(call) || next != *state).then_some(next)
    }

    /// The result of a failed search: the nodes with the most processed events show which answer is
    /// impossible.
    fn impossible(&self) -> Outcome<M::Answer> {
        let furthest = self.seen.iter().map(|node| node.at).max().unwrap_or_default();
        let Some(Event::Return(call)) = self.events.get(furthest) else { return Outcome::Possible };
        let call = *call as usize;
        let mut possible: Vec<M::Answer> = Vec::new();
        for node in self.seen.iter().filter(|node| node.at == furthest) {
            let expected = self.model.expected(&node.state, &self.history[call].operation);
            possible.extend(expected.filter(|answer| !possible.contains(answer)));
        }
        Outcome::Impossible { call, possible }
    }
}
