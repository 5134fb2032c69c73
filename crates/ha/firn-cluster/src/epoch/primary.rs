//! Primary epochs: decides when to cut, what to send, and when the VM must wait.
//!
//! ```text
//!            due, room                          copied
//!   Running ------------------> Cutting ------------------> Running (the next epoch)
//!     |  ^                         ^                            |   ^
//!     |  | room                    | finish              finish |   | cancel
//!     |  |                         |                            v   |
//!     +-- due, no room: the epoch stretches,                    Finished (VM stays paused)
//!         and the speed is Free -> Slowed -> Stopped
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use super::{EpochLimits, EpochProgress};
use crate::Epoch;

/// How fast the VM may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GuestSpeed {
    /// Without a limit.
    Free,
    /// Its vCPUs run only for a part of the time.
    Slowed,
    /// Its vCPUs don't run, until there is room.
    Stopped,
}

/// An action for the primary's shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PrimaryAction {
    /// Pause the VM, copy the pages that the predictor names and the device state, resume it, and
    /// call [`PrimaryEpochs::finish_cut`]. If the buffer has no room for the pages, send them from
    /// within the pause.
    Cut(Epoch),
    /// Send an epoch, or send it again, with the frames that left the VM during it. `last`: no
    /// epoch follows.
    Send {
        /// The epoch.
        epoch: Epoch,
        /// The VM stays paused: the backup may commit it at once.
        last: bool,
    },
    /// The backup has the epoch: its buffer can be reused.
    Free(Epoch),
    /// All epochs up to this one are in the non-volatile copy.
    Committed(Epoch),
    /// Run the VM at this speed.
    SetSpeed(GuestSpeed),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum EpochPhase {
    /// `due`: the time of the next cut, if there is room.
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
struct InFlightEpoch {
    epoch: Epoch,
    pages: u64,
    cut_at: Duration,
    sent_at: Duration,
    complete: bool,
}

/// The epochs of one VM at its primary.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PrimaryEpochs {
    limits: EpochLimits,
    interval: Duration,
    phase: EpochPhase,
    finishing: bool,
    /// The running epoch, or the one that is being cut.
    epoch: Epoch,
    /// The estimated number of pages written in it so far.
    written: u64,
    flights: VecDeque<InFlightEpoch>,
    committed: Epoch,
    transfer: Duration,
    speed: GuestSpeed,
}

impl PrimaryEpochs {
    /// A VM that starts from the state at the end of `base`, which its backup has.
    pub fn new(limits: EpochLimits, base: Epoch, now: Duration) -> Self {
        Self {
            limits,
            interval: limits.interval_min,
            phase: EpochPhase::Running { since: now, due: now + limits.interval_min },
            finishing: false,
            epoch: base.next(),
            written: 0,
            flights: VecDeque::new(),
            committed: base,
            transfer: Duration::ZERO,
            speed: GuestSpeed::Free,
        }
    }

    /// The epoch to which frames that leave the VM now belong.
    pub fn running_epoch(&self) -> Epoch {
        self.epoch
    }

    /// The newest epoch that the backup has reported to be in the non-volatile copy.
    pub fn committed_epoch(&self) -> Epoch {
        self.committed
    }

    /// The time between cuts, while there is room.
    pub fn cut_interval(&self) -> Duration {
        self.interval
    }

    /// The time at which the running epoch is to be cut, if there is room.
    pub fn next_cut(&self) -> Option<Duration> {
        match self.phase {
            EpochPhase::Running { due, .. } => Some(due),
            EpochPhase::Cutting { .. } | EpochPhase::Finished => None,
        }
    }

    /// The number of pages that the backup does not have yet.
    pub fn buffered_pages(&self) -> u64 {
        self.flights.iter().filter(|flight| !flight.complete).map(|flight| flight.pages).sum()
    }

    /// Advances the time. `written` is the number of pages written in this epoch so far, as a scan
    /// reports it.
    pub fn advance_time(&mut self, now: Duration, written: u64) -> Vec<PrimaryAction> {
        self.written = written;
        let mut actions = self.resend_late(now);
        if let EpochPhase::Running { since, due } = self.phase {
            if now >= due && self.has_room() {
                actions.extend(self.begin_cut(due));
            } else {
                actions.extend(self.set_speed(self.speed_at(now.saturating_sub(since))));
            }
        }
        actions
    }

    /// Advances the time, while the running epoch must not be cut.
    pub fn advance_without_cut(&mut self, now: Duration) -> Vec<PrimaryAction> {
        self.resend_late(now)
    }

    /// Cuts now, because a frame or request waits for it. An epoch younger than the error latency
    /// is not cut before its interval ends.
    pub fn request_cut(&mut self, now: Duration) -> Vec<PrimaryAction> {
        match self.phase {
            EpochPhase::Running { since, .. }
                if now >= since + self.limits.error_latency_max && self.has_room() =>
            {
                self.begin_cut(now)
            }
            _ => Vec::new(),
        }
    }

    /// Cuts a last time and leaves the VM paused: a planned failover, which assumes that no error
    /// is about to be noticed.
    pub fn begin_final_cut(&mut self, now: Duration) -> Vec<PrimaryAction> {
        self.finishing = true;
        match self.phase {
            EpochPhase::Running { .. } => self.begin_cut(now),
            EpochPhase::Cutting { .. } | EpochPhase::Finished => Vec::new(),
        }
    }

    /// Whether the next cut is the final one, or the last one was.
    pub fn is_finishing(&self) -> bool {
        self.finishing
    }

    /// The planned failover is called off: the VM runs again, in the epoch after the final one.
    pub fn cancel_final_cut(&mut self, now: Duration) {
        self.finishing = false;
        if self.phase == EpochPhase::Finished {
            self.phase = EpochPhase::Running { since: now, due: now + self.interval };
        }
    }

    /// Ends the cut: `pages` pages are in the buffer. The next epoch has begun.
    pub fn finish_cut(&mut self, now: Duration, pages: u64) -> Vec<PrimaryAction> {
        let EpochPhase::Cutting { due } = self.phase else { return Vec::new() };
        let (epoch, last) = (self.epoch, self.finishing);
        self.flights.push_back(InFlightEpoch {
            epoch,
            pages,
            cut_at: due,
            sent_at: now,
            complete: false,
        });
        self.interval = self.limits.next_interval(self.interval, pages, self.transfer);
        self.epoch = epoch.next();
        self.written = 0;
        self.phase = match last {
            true => EpochPhase::Finished,
            false => EpochPhase::Running { since: now, due: self.next_due(due, now) },
        };
        vec![PrimaryAction::Send { epoch, last }]
    }

    /// Records the progress that the backup reports.
    pub fn record_progress(
        &mut self,
        now: Duration,
        progress: EpochProgress,
    ) -> Vec<PrimaryAction> {
        let mut actions = Vec::new();
        for flight in self.flights.iter_mut().filter(|flight| flight.epoch <= progress.complete) {
            if !std::mem::replace(&mut flight.complete, true) {
                self.transfer = now.saturating_sub(flight.cut_at);
                actions.push(PrimaryAction::Free(flight.epoch));
            }
        }
        if progress.committed > self.committed {
            self.committed = progress.committed;
            self.flights.retain(|flight| flight.epoch > progress.committed);
            actions.push(PrimaryAction::Committed(progress.committed));
        }
        actions
    }

    /// The next cut is due an interval after the last one was due, so that the duration of cuts
    /// does not add to it. But the VM runs for at least half an interval, and for at least the
    /// error latency.
    fn next_due(&self, due: Duration, now: Duration) -> Duration {
        let least = (self.interval / 2).max(self.limits.error_latency_max);
        (due + self.interval).max(now + least)
    }

    fn begin_cut(&mut self, due: Duration) -> Vec<PrimaryAction> {
        self.phase = EpochPhase::Cutting { due };
        let speed = self.set_speed(GuestSpeed::Free);
        speed.into_iter().chain([PrimaryAction::Cut(self.epoch)]).collect()
    }

    /// Whether the pages that this epoch wrote fit into the buffer beside the pages that wait. An
    /// empty buffer takes any epoch.
    fn has_room(&self) -> bool {
        let buffered = self.buffered_pages();
        buffered == 0 || buffered.saturating_add(self.written) <= self.limits.buffer_pages
    }

    fn speed_at(&self, age: Duration) -> GuestSpeed {
        if self.has_room() || age < self.interval {
            return GuestSpeed::Free;
        }
        match (self.written >= self.limits.buffer_pages, age >= self.limits.interval_max) {
            (true, _) => GuestSpeed::Stopped,
            (false, true) => GuestSpeed::Slowed,
            (false, false) => GuestSpeed::Free,
        }
    }

    fn set_speed(&mut self, speed: GuestSpeed) -> Option<PrimaryAction> {
        let changed = std::mem::replace(&mut self.speed, speed) != speed;
        changed.then_some(PrimaryAction::SetSpeed(speed))
    }

    fn resend_late(&mut self, now: Duration) -> Vec<PrimaryAction> {
        let (after, newest) = (self.limits.resend_after, self.epoch.previous());
        let last = |epoch| self.phase == EpochPhase::Finished && epoch == newest;
        let late = self.flights.iter_mut().filter(|flight| {
            // The last epoch is sent until it is committed. For others the acknowledgement of the
            // next one suffices.
            (!flight.complete || last(flight.epoch)) && now.saturating_sub(flight.sent_at) >= after
        });
        late.map(|flight| {
            flight.sent_at = now;
            PrimaryAction::Send { epoch: flight.epoch, last: last(flight.epoch) }
        })
        .collect()
    }
}
