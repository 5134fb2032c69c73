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

use firn_control::{HostHealth, HostName};

/// A moment: the time since the host's boot.
pub type BootTime = Duration;

/// Intervals and limits of failure detection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DetectorTiming {
    /// Time from one question to a peer to the next.
    pub ask_interval: Duration,
    /// How long an alive peer may be silent until it is suspected.
    pub suspect_after: Duration,
    /// How long a peer may be silent until it is lost.
    pub lose_after: Duration,
    /// Longest time between two ticks of an agent that was running all the time.
    pub tick_gap_max: Duration,
}

impl Default for DetectorTiming {
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self {
            ask_interval: ms(500),
            suspect_after: ms(2000),
            lose_after: ms(5000),
            tick_gap_max: ms(1000),
        }
    }
}

/// An event that the detector handles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DetectorEvent {
    /// Time has passed.
    Tick,
    /// A peer has answered the question that was asked at that time.
    Answered(HostName, BootTime),
    /// A question to a peer has failed.
    Failed(HostName),
}

/// An action that the detector requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DetectorAction {
    /// Ask a peer. An [`DetectorEvent::Answered`] or [`DetectorEvent::Failed`] has to follow.
    Ask(HostName),
    /// Publish the new health of a peer.
    Changed(HostName, HostHealth),
}

/// The state of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerState {
    /// Its health.
    pub health: HostHealth,
    /// Since when it has that health.
    pub since: BootTime,
    /// When its newest answer arrived.
    pub heard: Option<BootTime>,
    /// How long the newest answer took.
    pub round_trip: Option<Duration>,
}

#[derive(Debug)]
struct WatchedPeer {
    known: PeerState,
    /// Since when it has been silent.
    silent_since: BootTime,
    /// When the newest question was asked, and whether it is still open.
    asked: Option<BootTime>,
    is_open: bool,
}

/// The failure detector: the state of all peers.
#[derive(Debug)]
pub struct FailureDetector {
    times: DetectorTiming,
    peers: BTreeMap<HostName, WatchedPeer>,
    ticked: BootTime,
}

impl FailureDetector {
    /// A detector that begins now, and has no answers yet.
    pub fn new(
        times: DetectorTiming,
        peers: impl IntoIterator<Item = HostName>,
        now: BootTime,
    ) -> Self {
        let known =
            PeerState { health: HostHealth::Suspected, since: now, heard: None, round_trip: None };
        let peer =
            |name| (name, WatchedPeer { known, silent_since: now, asked: None, is_open: false });
        Self { times, peers: peers.into_iter().map(peer).collect(), ticked: now }
    }

    /// Handles an event, and returns the actions that follow.
    pub fn handle_event(&mut self, now: BootTime, event: DetectorEvent) -> Vec<DetectorAction> {
        match event {
            DetectorEvent::Tick => self.handle_tick(now),
            DetectorEvent::Answered(name, asked) => self.handle_answer(now, &name, asked),
            DetectorEvent::Failed(name) => {
                if let Some(peer) = self.peers.get_mut(&name) {
                    peer.is_open = false;
                }
                Vec::new()
            }
        }
    }

    /// The state of each peer.
    pub fn peer_states(&self) -> impl Iterator<Item = (&HostName, PeerState)> {
        self.peers.iter().map(|(name, peer)| (name, peer.known))
    }

    fn handle_tick(&mut self, now: BootTime) -> Vec<DetectorAction> {
        let was_away = now.saturating_sub(self.ticked) > self.times.tick_gap_max;
        self.ticked = now;
        let mut actions = Vec::new();
        for (name, peer) in &mut self.peers {
            if was_away {
                peer.silent_since = now;
            }
            let silence = now.saturating_sub(peer.silent_since);
            let worse = peer.health_after_silence(&self.times, silence);
            let changed = peer.update_health(worse, now);
            actions.extend(changed.map(|health| DetectorAction::Changed(name.clone(), health)));
            if peer.is_due(self.times.ask_interval, now) {
                (peer.asked, peer.is_open) = (Some(now), true);
                actions.push(DetectorAction::Ask(name.clone()));
            }
        }
        actions
    }

    fn handle_answer(
        &mut self,
        now: BootTime,
        name: &HostName,
        asked: BootTime,
    ) -> Vec<DetectorAction> {
        let Some(peer) = self.peers.get_mut(name) else { return Vec::new() };
        let took = now.saturating_sub(asked);
        peer.is_open = false;
        peer.silent_since = peer.silent_since.max(asked);
        (peer.known.heard, peer.known.round_trip) = (Some(now), Some(took));
        let better = peer.health_after_answer(&self.times, took);
        let changed = peer.update_health(better, now);
        changed.map(|health| DetectorAction::Changed(name.clone(), health)).into_iter().collect()
    }
}

impl WatchedPeer {
    fn is_due(&self, every: Duration, now: BootTime) -> bool {
        !self.is_open && self.asked.is_none_or(|asked| now.saturating_sub(asked) >= every)
    }

    /// The health after a silence. A lost peer stays lost.
    fn health_after_silence(&self, times: &DetectorTiming, silence: Duration) -> HostHealth {
        match self.known.health {
            _ if silence >= times.lose_after => HostHealth::Lost,
            HostHealth::Alive if silence >= times.suspect_after => HostHealth::Suspected,
            health => health,
        }
    }

    /// The health after an answer that took so long: the peer may be gone since.
    fn health_after_answer(&self, times: &DetectorTiming, took: Duration) -> HostHealth {
        match self.known.health {
            _ if took < times.suspect_after => HostHealth::Alive,
            HostHealth::Lost if took < times.lose_after => HostHealth::Suspected,
            health => health,
        }
    }

    /// Sets the health; returns it if it has changed.
    fn update_health(&mut self, health: HostHealth, now: BootTime) -> Option<HostHealth> {
        let is_new = health != self.known.health;
        if is_new {
            (self.known.health, self.known.since) = (health, now);
        }
        is_new.then_some(health)
    }
}

#[cfg(test)]
mod tests;
