//! Is there an order?
//!
//! ```text
//!   node   | at: events gone through | open: called, and not in the order yet | state |
//!
//!   a question:   its operation is open                           -> the same, one event on
//!   an answer:    its operation is in the order already           -> the same, one event on
//!                 it is open: it comes next, or another does      -> a node each; the nodes are the choices
//!   no event:     there is an order
//! ```
//!
//! An operation may also be optional: within its time it is done as its answer says, or never. When its time is over there is the choice to
//! let it go.
//!
//! Which operations are in the order follows from `at` and `open`, so a node that was seen needs no second look, however it was reached.

use std::collections::HashSet;
use std::rc::Rc;

use crate::history::{Call, Event, events};
use crate::model::{CallOf, Model};

/// What a search found.
#[derive(Debug, PartialEq)]
pub(crate) enum Outcome<A> {
    /// An order.
    Possible,
    /// None: up to before the answer of operation `call` there is one. What it could have been, at that point.
    Impossible { call: usize, possible: Vec<A> },
    /// It would take too long.
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

/// A node, and which of its choices are left.
struct Branch<S> {
    node: Rc<Node<S>>,
    choices: std::vec::IntoIter<Choice>,
}

/// Which are optional: none if nothing is said of them.
fn is_in(optional: &[bool], call: u32) -> bool {
    optional.get(call as usize).copied().unwrap_or_default()
}

/// Looks for an order, trying at most so many times to put an operation into its place.
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
    /// All that wait for an answer's operation.
    seen: HashSet<Rc<Node<M::State>>>,
}

impl<M: Model> Search<'_, M> {
    fn branch(&mut self, node: Node<M::State>) -> Option<Branch<M::State>> {
        let node = self.advance(node)?;
        self.unseen(node)
    }

    /// Goes on to the next answer whose operation is not in the order; none is left if there is no node any more.
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

    /// Whether it must be in the order. Those that change nothing matter only then.
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

    /// First the one whose time is over, then those whose answer comes next, at last those that need not be done.
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

    /// The state with an operation in the order, if its answer can be so. What need not be done and changes nothing isn't.
    fn put(&self, state: &M::State, call: u32) -> Option<M::State> {
        let Call { operation, .. } = &self.history[call as usize];
        let told = self.history[call as usize].told();
        let next = self.model.step(state, operation, told)?;
        (self.is_needed(call) || next != *state).then_some(next)
    }

    /// Those that came furthest say which answer it is.
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
