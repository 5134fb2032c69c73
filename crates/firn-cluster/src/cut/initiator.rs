//! Checkpoint initiator: requests marks from all VMs, and records the global checkpoint.
//!
//! ```text
//!            due                all have answered            recorded
//!   Idle ----------> Asking ----------------------> Recording ----------> Idle
//!                     |   ^                             | refused
//!                     +---+ given up: a higher number   v
//!                                                    Retired       (another generation)
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Answer, GlobalCheckpoint};
use crate::{Epoch, Generation, RequestNumber, Vm};

/// The intervals of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pace {
    /// The time from one cut to the next.
    pub every: Duration,
    /// The time after which VMs without an answer are asked again.
    pub again_after: Duration,
    /// The time after which a request is given up for a new one: hosts that marked long ago delay
    /// the output of all VMs.
    pub give_up_after: Duration,
}

/// An action for the initiator's shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the hosts of these VMs for marks.
    Ask {
        /// The generation.
        generation: Generation,
        /// The request.
        request: RequestNumber,
        /// VMs without an answer.
        vms: BTreeSet<Vm>,
    },
    /// Put the checkpoint into the record, if that is still in its generation; then call
    /// [`CheckpointInitiator::confirm_recorded`] (also if it was there already) or
    /// [`CheckpointInitiator::retire_refused`]. The action is repeated until one of them is called.
    Record(GlobalCheckpoint),
    /// The checkpoint is recorded: inform all hosts.
    Announce(GlobalCheckpoint),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    Asking { since: Duration, asked: Duration, marks: BTreeMap<Vm, Epoch> },
    Recording { asked: Option<Duration>, checkpoint: GlobalCheckpoint },
    Retired,
}

/// Makes the global checkpoints of one generation and layout.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Initiator {
    generation: Generation,
    layout: u64,
    vms: BTreeSet<Vm>,
    pace: Pace,
    request: RequestNumber,
    number: u64,
    phase: Phase,
    due: Duration,
}

impl Initiator {
    /// An initiator in a term of leadership that no initiator had before; `number` is that of the
    /// newest checkpoint.
    pub fn new(
        (generation, layout): (Generation, u64),
        term: u32,
        number: u64,
        vms: impl IntoIterator<Item = Vm>,
        pace: Pace,
    ) -> Self {
        Self {
            generation,
            layout,
            vms: vms.into_iter().collect(),
            pace,
            request: RequestNumber { term, count: 0 },
            number,
            phase: Phase::Idle,
            due: Duration::ZERO,
        }
    }

    /// Advances the time.
    pub fn tick(&mut self, now: Duration) -> Vec<Action> {
        match &mut self.phase {
            Phase::Idle if now >= self.due => self.begin(now),
            Phase::Asking { since, .. } if now >= *since + self.pace.give_up_after => {
                self.begin(now)
            }
            Phase::Asking { asked, .. } if now >= *asked + self.pace.again_after => {
                *asked = now;
                vec![self.ask()]
            }
            Phase::Recording { asked, checkpoint } => {
                let late = asked.is_some_and(|asked| now >= asked + self.pace.again_after);
                asked.get_or_insert(now);
                if !late {
                    return Vec::new();
                }
                *asked = Some(now);
                vec![Action::Record(checkpoint.clone())]
            }
            _ => Vec::new(),
        }
    }

    /// Begins a request with a new number. An unfinished request is given up.
    pub fn begin(&mut self, now: Duration) -> Vec<Action> {
        if !matches!(self.phase, Phase::Idle | Phase::Asking { .. }) {
            return Vec::new();
        }
        self.request = self.request.next();
        self.due = now + self.pace.every;
        self.phase = Phase::Asking { since: now, asked: now, marks: BTreeMap::new() };
        vec![self.ask()]
    }

    /// Records a host's answer, which may be a repetition, or may belong to another request.
    pub fn answered(&mut self, answer: &Answer) -> Option<Action> {
        let of = (answer.generation, answer.layout, answer.request);
        let current = of == (self.generation, self.layout, self.request);
        let Phase::Asking { marks, .. } = &mut self.phase else { return None };
        if !current {
            return None;
        }
        marks.extend(answer.marks.iter().copied().filter(|(vm, _)| self.vms.contains(vm)));
        if marks.len() < self.vms.len() {
            return None;
        }
        let checkpoint = GlobalCheckpoint {
            number: self.number + 1,
            generation: self.generation,
            layout: self.layout,
            request: self.request,
            marks: std::mem::take(marks),
        };
        self.phase = Phase::Recording { asked: None, checkpoint: checkpoint.clone() };
        Some(Action::Record(checkpoint))
    }

    /// Confirms that the checkpoint is in the record.
    pub fn recorded(&mut self) -> Option<Action> {
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Recording { checkpoint, .. } => {
                self.number = checkpoint.number;
                Some(Action::Announce(checkpoint))
            }
            other => {
                self.phase = other;
                None
            }
        }
    }

    /// Retires this initiator, because the record is in another generation, or another initiator
    /// was faster.
    pub fn refused(&mut self) {
        self.phase = Phase::Retired;
    }

    /// Whether it has no further actions.
    pub fn is_retired(&self) -> bool {
        self.phase == Phase::Retired
    }

    fn ask(&self) -> Action {
        let mut vms = self.vms.clone();
        if let Phase::Asking { marks, .. } = &self.phase {
            vms.retain(|vm| !marks.contains_key(vm));
        }
        Action::Ask { generation: self.generation, request: self.request, vms }
    }
}
