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

use super::{GlobalCheckpoint, MarkAnswer};
use crate::{Epoch, Generation, RequestNumber, VmId};

/// The intervals of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestTiming {
    /// The time from one cut to the next.
    pub cut_interval: Duration,
    /// The time after which VMs without an answer are asked again.
    pub retry_after: Duration,
    /// The time after which a request is given up for a new one: hosts that marked long ago delay
    /// the output of all VMs.
    pub give_up_after: Duration,
}

/// An action for the initiator's shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitiatorAction {
    /// Ask the hosts of these VMs for marks.
    Ask {
        /// The generation.
        generation: Generation,
        /// The request.
        request: RequestNumber,
        /// VMs without an answer.
        vms: BTreeSet<VmId>,
    },
    /// Put the checkpoint into the record, if that is still in its generation; then call
    /// [`CheckpointInitiator::confirm_recorded`] (also if it was there already) or
    /// [`CheckpointInitiator::retire_refused`]. The action is repeated until one of them is called.
    Record(GlobalCheckpoint),
    /// The checkpoint is recorded: inform all hosts.
    Announce(GlobalCheckpoint),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum InitiatorPhase {
    Idle,
    Asking { since: Duration, asked: Duration, marks: BTreeMap<VmId, Epoch> },
    Recording { asked: Option<Duration>, checkpoint: GlobalCheckpoint },
    Retired,
}

/// Makes the global checkpoints of one generation and layout.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CheckpointInitiator {
    generation: Generation,
    layout: u64,
    vms: BTreeSet<VmId>,
    timing: RequestTiming,
    request: RequestNumber,
    number: u64,
    phase: InitiatorPhase,
    due: Duration,
}

impl CheckpointInitiator {
    /// An initiator in a term of leadership that no initiator had before; `number` is that of the
    /// newest checkpoint.
    pub fn new(
        (generation, layout): (Generation, u64),
        term: u32,
        number: u64,
        vms: impl IntoIterator<Item = VmId>,
        timing: RequestTiming,
    ) -> Self {
        Self {
            generation,
            layout,
            vms: vms.into_iter().collect(),
            timing,
            request: RequestNumber { term, count: 0 },
            number,
            phase: InitiatorPhase::Idle,
            due: Duration::ZERO,
        }
    }

    /// Advances the time.
    pub fn advance_time(&mut self, now: Duration) -> Vec<InitiatorAction> {
        match &mut self.phase {
            InitiatorPhase::Idle if now >= self.due => self.begin_request(now),
            InitiatorPhase::Asking { since, .. } if now >= *since + self.timing.give_up_after => {
                self.begin_request(now)
            }
            InitiatorPhase::Asking { asked, .. } if now >= *asked + self.timing.retry_after => {
                *asked = now;
                vec![self.build_request()]
            }
            InitiatorPhase::Recording { asked, checkpoint } => {
                let late = asked.is_some_and(|asked| now >= asked + self.timing.retry_after);
                asked.get_or_insert(now);
                if !late {
                    return Vec::new();
                }
                *asked = Some(now);
                vec![InitiatorAction::Record(checkpoint.clone())]
            }
            _ => Vec::new(),
        }
    }

    /// Begins a request with a new number. An unfinished request is given up.
    pub fn begin_request(&mut self, now: Duration) -> Vec<InitiatorAction> {
        if !matches!(self.phase, InitiatorPhase::Idle | InitiatorPhase::Asking { .. }) {
            return Vec::new();
        }
        self.request = self.request.next();
        self.due = now + self.timing.cut_interval;
        self.phase = InitiatorPhase::Asking { since: now, asked: now, marks: BTreeMap::new() };
        vec![self.build_request()]
    }

    /// Records a host's answer, which may be a repetition, or may belong to another request.
    pub fn record_answer(&mut self, answer: &MarkAnswer) -> Option<InitiatorAction> {
        let of = (answer.generation, answer.layout, answer.request);
        let current = of == (self.generation, self.layout, self.request);
        let InitiatorPhase::Asking { marks, .. } = &mut self.phase else { return None };
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
        self.phase = InitiatorPhase::Recording { asked: None, checkpoint: checkpoint.clone() };
        Some(InitiatorAction::Record(checkpoint))
    }

    /// Confirms that the checkpoint is in the record.
    pub fn confirm_recorded(&mut self) -> Option<InitiatorAction> {
        match std::mem::replace(&mut self.phase, InitiatorPhase::Idle) {
            InitiatorPhase::Recording { checkpoint, .. } => {
                self.number = checkpoint.number;
                Some(InitiatorAction::Announce(checkpoint))
            }
            other => {
                self.phase = other;
                None
            }
        }
    }

    /// Retires this initiator, because the record is in another generation, or another initiator
    /// was faster.
    pub fn retire_refused(&mut self) {
        self.phase = InitiatorPhase::Retired;
    }

    /// Whether it has no further actions.
    pub fn is_retired(&self) -> bool {
        self.phase == InitiatorPhase::Retired
    }

    fn build_request(&self) -> InitiatorAction {
        let mut vms = self.vms.clone();
        if let InitiatorPhase::Asking { marks, .. } = &self.phase {
            vms.retain(|vm| !marks.contains_key(vm));
        }
        InitiatorAction::Ask { generation: self.generation, request: self.request, vms }
    }
}
