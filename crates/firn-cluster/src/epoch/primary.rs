//! The primary's half: when to cut, what to send, when the VM must wait.
//!
//! ```text
//!            due, room                          copied
//!   Running ------------------> Cutting ------------------> Running (the next epoch)
//!     |  ^                         ^                            |
//!     |  | room                    | finish                     | finish
//!     |  |                         |                            v
//!     +-- due, no room: the epoch stretches; Pace: Free -> Slowed -> Stopped       Finished (the VM stays paused)
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use super::{Limits, Progress};
use crate::Epoch;

/// How fast the VM may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pace {
    /// As fast as it can.
    Free,
    /// Its vCPUs are given a part of the time only.
    Slowed,
    /// Not at all, until there is room.
    Stopped,
}

/// What the primary's shell has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Pause the VM, copy what the predictor names and the device state, resume it, and say [`Primary::copied`]. If the
    /// pages are more than fit the buffer, send from within the pause.
    Cut(Epoch),
    /// Send an epoch, or send it again; frames that left during it go with it. `last`: none will follow.
    Send {
        /// Which one.
        epoch: Epoch,
        /// The VM stands still for good: the backup may commit it at once.
        last: bool,
    },
    /// The backup has the epoch: its buffer is free.
    Free(Epoch),
    /// Everything up to this epoch is in the non-volatile copy.
    Committed(Epoch),
    /// The VM is to run at this pace.
    Pace(Pace),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// `due`: when it is to be cut, if there is room.
    Running {
        since: Duration,
        due: Duration,
    },
    Cutting {
        due: Duration,
    },
    Finished,
}

/// An epoch that is cut and not yet committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Flight {
    epoch: Epoch,
    pages: u64,
    cut_at: Duration,
    sent_at: Duration,
    complete: bool,
}

/// The epochs of one VM where it runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Primary {
    limits: Limits,
    interval: Duration,
    phase: Phase,
    finishing: bool,
    /// The epoch that runs, or is being cut.
    epoch: Epoch,
    /// Pages written in it so far, as last estimated.
    written: u64,
    flights: VecDeque<Flight>,
    committed: Epoch,
    transfer: Duration,
    pace: Pace,
}

impl Primary {
    /// A VM that starts to run from the state at the end of `base`, which its backup has.
    pub fn new(limits: Limits, base: Epoch, now: Duration) -> Self {
        Self {
            limits,
            interval: limits.interval_min,
            phase: Phase::Running { since: now, due: now + limits.interval_min },
            finishing: false,
            epoch: base.next(),
            written: 0,
            flights: VecDeque::new(),
            committed: base,
            transfer: Duration::ZERO,
            pace: Pace::Free,
        }
    }

    /// The epoch that frames leaving the VM now belong to.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The newest epoch that is in the non-volatile copy, as far as is known here.
    pub fn committed(&self) -> Epoch {
        self.committed
    }

    /// The time between cuts, while there is room.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// When the epoch that runs is to be cut, if there is room.
    pub fn due(&self) -> Option<Duration> {
        match self.phase {
            Phase::Running { due, .. } => Some(due),
            Phase::Cutting { .. } | Phase::Finished => None,
        }
    }

    /// Pages that wait for the backup to have them.
    pub fn buffered(&self) -> u64 {
        self.flights.iter().filter(|flight| !flight.complete).map(|flight| flight.pages).sum()
    }

    /// Time has passed; `written` pages were written in this epoch so far, as far as a glance can tell.
    pub fn tick(&mut self, now: Duration, written: u64) -> Vec<Action> {
        self.written = written;
        let mut actions = self.resend(now);
        if let Phase::Running { since, due } = self.phase {
            if now >= due && self.has_room() {
                actions.extend(self.begin_cut(due));
            } else {
                actions.extend(self.set_pace(self.pace_at(now.saturating_sub(since))));
            }
        }
        actions
    }

    /// Time has passed, and the epoch that runs must not be cut yet.
    pub fn wait(&mut self, now: Duration) -> Vec<Action> {
        self.resend(now)
    }

    /// Cut now, for somebody waits for it. An epoch younger than an error's latency is left to its interval.
    pub fn cut_now(&mut self, now: Duration) -> Vec<Action> {
        match self.phase {
            Phase::Running { since, .. }
                if now >= since + self.limits.error_latency_max && self.has_room() =>
            {
                self.begin_cut(now)
            }
            _ => Vec::new(),
        }
    }

    /// Cut a last time and leave the VM paused: a planned failover, which trusts that no error is under way.
    pub fn finish(&mut self, now: Duration) -> Vec<Action> {
        self.finishing = true;
        match self.phase {
            Phase::Running { .. } => self.begin_cut(now),
            Phase::Cutting { .. } | Phase::Finished => Vec::new(),
        }
    }

    /// The cut is made: so many pages are in the buffer. The next epoch has begun.
    pub fn copied(&mut self, now: Duration, pages: u64) -> Vec<Action> {
        let Phase::Cutting { due } = self.phase else { return Vec::new() };
        let (epoch, last) = (self.epoch, self.finishing);
        self.flights.push_back(Flight { epoch, pages, cut_at: due, sent_at: now, complete: false });
        self.interval = self.limits.next_interval(self.interval, pages, self.transfer);
        self.epoch = epoch.next();
        self.written = 0;
        self.phase = match last {
            true => Phase::Finished,
            false => Phase::Running { since: now, due: self.next_due(due, now) },
        };
        vec![Action::Send { epoch, last }]
    }

    /// The backup says how far it is.
    pub fn acknowledged(&mut self, now: Duration, progress: Progress) -> Vec<Action> {
        let mut actions = Vec::new();
        for flight in self.flights.iter_mut().filter(|flight| flight.epoch <= progress.complete) {
            if !std::mem::replace(&mut flight.complete, true) {
                self.transfer = now.saturating_sub(flight.cut_at);
                actions.push(Action::Free(flight.epoch));
            }
        }
        if progress.committed > self.committed {
            self.committed = progress.committed;
            self.flights.retain(|flight| flight.epoch > progress.committed);
            actions.push(Action::Committed(progress.committed));
        }
        actions
    }

    /// An interval after the last cut was due, so that what cuts take does not add to it. But the VM runs for half of one at least, and
    /// never for less than an error may go unnoticed.
    fn next_due(&self, due: Duration, now: Duration) -> Duration {
        let least = (self.interval / 2).max(self.limits.error_latency_max);
        (due + self.interval).max(now + least)
    }

    fn begin_cut(&mut self, due: Duration) -> Vec<Action> {
        self.phase = Phase::Cutting { due };
        let pace = self.set_pace(Pace::Free);
        pace.into_iter().chain([Action::Cut(self.epoch)]).collect()
    }

    /// Whether what this epoch wrote fits beside what waits. An empty buffer takes any epoch.
    fn has_room(&self) -> bool {
        let buffered = self.buffered();
        buffered == 0 || buffered.saturating_add(self.written) <= self.limits.buffer_pages
    }

    fn pace_at(&self, age: Duration) -> Pace {
        if self.has_room() || age < self.interval {
            return Pace::Free;
        }
        match (self.written >= self.limits.buffer_pages, age >= self.limits.interval_max) {
            (true, _) => Pace::Stopped,
            (false, true) => Pace::Slowed,
            (false, false) => Pace::Free,
        }
    }

    fn set_pace(&mut self, pace: Pace) -> Option<Action> {
        let changed = std::mem::replace(&mut self.pace, pace) != pace;
        changed.then_some(Action::Pace(pace))
    }

    fn resend(&mut self, now: Duration) -> Vec<Action> {
        let (after, newest) = (self.limits.resend_after, self.epoch.before());
        let last = |epoch| self.phase == Phase::Finished && epoch == newest;
        let late = self.flights.iter_mut().filter(|flight| {
            // The last epoch is sent until it is committed; for others the next one's acknowledgement will do.
            (!flight.complete || last(flight.epoch)) && now.saturating_sub(flight.sent_at) >= after
        });
        late.map(|flight| {
            flight.sent_at = now;
            Action::Send { epoch: flight.epoch, last: last(flight.epoch) }
        })
        .collect()
    }
}
