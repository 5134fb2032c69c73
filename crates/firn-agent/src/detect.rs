//! Failure detection: the health of each peer. A pure core: events with their times are its input,
//! actions its output.
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
//! Every peer is asked twice a second, one question at a time. A peer is silent since the moment at
//! which the newest question that it answered was *asked*: an answer proves only that the peer was
//! alive after that. A peer that has never answered is silent since the agent began, and suspected
//! from then on.
//!
//! Times are those of `CLOCK_BOOTTIME` (clock_gettime(2)), which advances while the host sleeps. So
//! an agent that was suspended, stopped, or starved for long detects that: it asked no peer
//! meanwhile, so the silence of peers means nothing, and is counted anew from then on.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::host::HostName;

/// A moment: the time since the host's boot.
pub type Moment = Duration;

/// The health of a host, as this agent judges it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// It answers.
    Alive,
    /// It has not answered for a while.
    Suspected,
    /// It has not answered for so long that the agent acts as if it were gone. It may answer again.
    Lost,
}

impl Health {
    /// The state as one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Suspected => "suspected",
            Self::Lost => "lost",
        }
    }
}

/// Intervals and limits of failure detection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Time from one question to a peer to the next.
    pub every: Duration,
    /// How long an alive peer may be silent until it is suspected.
    pub suspect: Duration,
    /// How long a peer may be silent until it is lost.
    pub lose: Duration,
    /// Longest time between two ticks of an agent that was running all the time.
    pub awake: Duration,
}

impl Default for Times {
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self { every: ms(500), suspect: ms(2000), lose: ms(5000), awake: ms(1000) }
    }
}

/// An event that the detector handles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Time has passed.
    Tick,
    /// A peer has answered the question that was asked at that time.
    Answered(HostName, Moment),
    /// A question to a peer has failed.
    Failed(HostName),
}

/// An action that the detector requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask a peer. An [`DetectorEvent::Answered`] or [`DetectorEvent::Failed`] has to follow.
    Ask(HostName),
    /// Publish the new health of a peer.
    Changed(HostName, Health),
}

/// The state of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Its health.
    pub health: Health,
    /// Since when it has that health.
    pub since: Moment,
    /// When its newest answer arrived.
    pub heard: Option<Moment>,
    /// How long the newest answer took.
    pub round_trip: Option<Duration>,
}

#[derive(Debug)]
struct Peer {
    known: Known,
    /// Since when it has been silent.
    silent_since: Moment,
    /// When the newest question was asked, and whether it is still open.
    asked: Option<Moment>,
    is_open: bool,
}

/// The failure detector: the state of all peers.
#[derive(Debug)]
pub struct Detector {
    times: Times,
    peers: BTreeMap<HostName, Peer>,
    ticked: Moment,
}

impl Detector {
    /// A detector that begins now, and has no answers yet.
    pub fn new(times: Times, peers: impl IntoIterator<Item = HostName>, now: Moment) -> Self {
        let known = Known { health: Health::Suspected, since: now, heard: None, round_trip: None };
        let peer = |name| (name, Peer { known, silent_since: now, asked: None, is_open: false });
        Self { times, peers: peers.into_iter().map(peer).collect(), ticked: now }
    }

    /// Handles an event, and returns the actions that follow.
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

    /// The state of each peer.
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

    /// The health after a silence. A lost peer stays lost.
    fn fear(&self, times: &Times, silence: Duration) -> Health {
        match self.known.health {
            _ if silence >= times.lose => Health::Lost,
            Health::Alive if silence >= times.suspect => Health::Suspected,
            health => health,
        }
    }

    /// The health after an answer that took so long: the peer may be gone since.
    fn trust(&self, times: &Times, took: Duration) -> Health {
        match self.known.health {
            _ if took < times.suspect => Health::Alive,
            Health::Lost if took < times.lose => Health::Suspected,
            health => health,
        }
    }

    /// Sets the health; returns it if it has changed.
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
