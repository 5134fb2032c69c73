//! Which hosts are there: a pure core. What happens comes in, with its time; what is to be done comes out.
//!
//! ```text
//!                     an answer
//!         .------------------------------.
//!         v                              |
//!       alive --- silent for 2 s ---> suspected --- silent for 5 s ---> lost
//!         ^                                                               |
//!         '------------------------------ an answer ---------------------'
//! ```
//!
//! Every peer is asked twice a second, one question at a time. A peer is silent since the moment at which the newest question
//! that it answered was *asked*: an answer proves no more than that the peer was there after that. Who has never answered is
//! silent since the agent began, and suspected from then on.
//!
//! Times are those of `CLOCK_BOOTTIME` (clock_gettime(2)), which goes on while the host sleeps. So an agent that was suspended,
//! stopped, or starved for long finds that out by itself: nobody was asked meanwhile, so nobody's silence means anything, and it
//! is counted anew from then on.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::host::HostName;

/// A moment: how long after the host's boot.
pub type Moment = Duration;

/// What is believed of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// It answers.
    Alive,
    /// It has not answered for a while.
    Suspected,
    /// It has not answered for so long that it is taken for gone. It may come back.
    Lost,
}

impl Health {
    /// One word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Suspected => "suspected",
            Self::Lost => "lost",
        }
    }
}

/// How long things take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// From one question to a peer to the next.
    pub every: Duration,
    /// How long an alive peer may be silent.
    pub suspect: Duration,
    /// How long a suspected one may be.
    pub lose: Duration,
    /// This agent is awake if it looks at the clock at least so often.
    pub awake: Duration,
}

impl Default for Times {
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self { every: ms(500), suspect: ms(2000), lose: ms(5000), awake: ms(1000) }
    }
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Time has passed.
    Tick,
    /// A peer has answered what it was asked then.
    Answered(HostName, Moment),
    /// A question will not be answered.
    Failed(HostName),
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask a peer. An [`Event::Answered`] or [`Event::Failed`] has to follow.
    Ask(HostName),
    /// Something else is believed of it from now on.
    Changed(HostName, Health),
}

/// What is known of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// What is believed.
    pub health: Health,
    /// Since when.
    pub since: Moment,
    /// When the newest answer came.
    pub heard: Option<Moment>,
    /// How long the newest answer took.
    pub round_trip: Option<Duration>,
}

#[derive(Debug)]
struct Peer {
    known: Known,
    /// Since when it is silent.
    silent_since: Moment,
    /// The newest question, and whether it is still open.
    asked: Option<Moment>,
    is_open: bool,
}

/// What is known of all peers.
#[derive(Debug)]
pub struct Detector {
    times: Times,
    peers: BTreeMap<HostName, Peer>,
    ticked: Moment,
}

impl Detector {
    /// Begins now, with nothing known.
    pub fn new(times: Times, peers: impl IntoIterator<Item = HostName>, now: Moment) -> Self {
        let known = Known { health: Health::Suspected, since: now, heard: None, round_trip: None };
        let peer = |name| (name, Peer { known, silent_since: now, asked: None, is_open: false });
        Self { times, peers: peers.into_iter().map(peer).collect(), ticked: now }
    }

    /// What is to be done about what has happened.
    pub fn on(&mut self, now: Moment, event: Event) -> Vec<Action> {
        match event {
            Event::Tick => self.tick(now),
            Event::Answered(name, asked) => self.answered(now, &name, asked),
            Event::Failed(name) => {
                if let Some(peer) = self.peers.get_mut(&name) {
                    peer.is_open = false;
                }
                Vec::new()
            }
        }
    }

    /// What is known of each.
    pub fn known(&self) -> impl Iterator<Item = (&HostName, Known)> {
        self.peers.iter().map(|(name, peer)| (name, peer.known))
    }

    fn tick(&mut self, now: Moment) -> Vec<Action> {
        let was_away = now.saturating_sub(self.ticked) > self.times.awake;
        self.ticked = now;
        let mut actions = Vec::new();
        for (name, peer) in &mut self.peers {
            if was_away {
                peer.silent_since = now;
            }
            let silence = now.saturating_sub(peer.silent_since);
            let worse = peer.fear(&self.times, silence);
            let changed = peer.believe(worse, now);
            actions.extend(changed.map(|health| Action::Changed(name.clone(), health)));
            if peer.is_due(self.times.every, now) {
                (peer.asked, peer.is_open) = (Some(now), true);
                actions.push(Action::Ask(name.clone()));
            }
        }
        actions
    }

    fn answered(&mut self, now: Moment, name: &HostName, asked: Moment) -> Vec<Action> {
        let Some(peer) = self.peers.get_mut(name) else { return Vec::new() };
        let took = now.saturating_sub(asked);
        peer.is_open = false;
        peer.silent_since = peer.silent_since.max(asked);
        (peer.known.heard, peer.known.round_trip) = (Some(now), Some(took));
        let better = peer.trust(&self.times, took);
        let changed = peer.believe(better, now);
        changed.map(|health| Action::Changed(name.clone(), health)).into_iter().collect()
    }
}

impl Peer {
    fn is_due(&self, every: Duration, now: Moment) -> bool {
        !self.is_open && self.asked.is_none_or(|asked| now.saturating_sub(asked) >= every)
    }

    /// What its silence makes of it. A lost peer stays so.
    fn fear(&self, times: &Times, silence: Duration) -> Health {
        match self.known.health {
            _ if silence >= times.lose => Health::Lost,
            Health::Alive if silence >= times.suspect => Health::Suspected,
            health => health,
        }
    }

    /// What an answer makes of it that took so long: it may be gone since.
    fn trust(&self, times: &Times, took: Duration) -> Health {
        match self.known.health {
            _ if took < times.suspect => Health::Alive,
            Health::Lost if took < times.lose => Health::Suspected,
            health => health,
        }
    }

    /// Gives it back if that is something else than before.
    fn believe(&mut self, health: Health, now: Moment) -> Option<Health> {
        let is_new = health != self.known.health;
        if is_new {
            (self.known.health, self.known.since) = (health, now);
        }
        is_new.then_some(health)
    }
}

#[cfg(test)]
mod tests;
