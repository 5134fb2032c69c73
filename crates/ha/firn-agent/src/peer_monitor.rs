//! The peers of this host with their health: the state around the detector.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firn_control::api::PeerView;
use firn_control::{HostHealth, HostName};
use firn_supervisor::Failure;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::watch;

use crate::detect::{BootTime, DetectorAction, DetectorEvent, DetectorTiming, FailureDetector};

/// Reads the clock that advances while the host sleeps.
pub fn read_boot_clock() -> BootTime {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

#[derive(Debug)]
struct MonitoredPeer {
    address: String,
    health: watch::Sender<HostHealth>,
    trouble: Mutex<Option<String>>,
    /// Whether its agent is known to have ended.
    has_ended: AtomicBool,
}

/// The peers of this host, with their health.
#[derive(Debug)]
pub struct PeerMonitor {
    pub(crate) times: DetectorTiming,
    detector: Mutex<FailureDetector>,
    peers: BTreeMap<HostName, MonitoredPeer>,
}

impl PeerMonitor {
    /// A monitor of these peers, given with their addresses. None has answered yet.
    pub fn new(times: DetectorTiming, peers: BTreeMap<HostName, String>) -> Self {
        let detector = FailureDetector::new(times, peers.keys().cloned(), read_boot_clock());
        let peer = |address| MonitoredPeer {
            address,
            health: watch::Sender::new(HostHealth::Suspected),
            trouble: Mutex::default(),
            has_ended: AtomicBool::new(false),
        };
        let peers = peers.into_iter().map(|(name, address)| (name, peer(address))).collect();
        Self { times, detector: Mutex::new(detector), peers }
    }

    /// The health of a peer, and its changes.
    pub fn health(&self, name: &HostName) -> Option<watch::Receiver<HostHealth>> {
        self.peers.get(name).map(|peer| peer.health.subscribe())
    }

    /// Whether the agent of a peer is known to have ended: it has closed its connection, and its
    /// host refused the next one. A host that is only cut off, or has stalled, refuses none.
    pub fn has_agent_ended(&self, name: &HostName) -> bool {
        self.peers.get(name).is_some_and(|peer| peer.has_ended.load(Ordering::SeqCst))
    }

    /// Records that the host of a peer accepts connections again.
    pub(crate) fn clear_agent_end(&self, name: &HostName) {
        if let Some(peer) = self.peers.get(name) {
            peer.has_ended.store(false, Ordering::SeqCst);
        }
    }

    /// Records that the agent of a peer has ended, until it answers again.
    pub(crate) fn record_agent_end(&self, name: &HostName) {
        if let Some(peer) = self.peers.get(name) {
            tracing::warn!("the agent of host {name} has ended");
            peer.has_ended.store(true, Ordering::SeqCst);
        }
    }

    /// The state of each peer.
    pub fn peer_views(&self) -> Vec<PeerView> {
        let (detector, now) = (self.lock_detector(), read_boot_clock());
        let ago = |moment: BootTime| now.saturating_sub(moment).as_secs_f64();
        let view = |(name, peer): (&HostName, &MonitoredPeer)| {
            let (_, known) = detector.peer_states().find(|(it, _)| *it == name)?;
            Some(PeerView {
                name: name.clone(),
                address: peer.address.clone(),
                health: known.health,
                since_s: ago(known.since),
                heard_s: known.heard.map(ago),
                round_trip_ms: known.round_trip.map(|it| it.as_secs_f64() * 1e3),
                trouble: peer.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            })
        };
        self.peers.iter().filter_map(view).collect()
    }

    fn lock_detector(&self) -> MutexGuard<'_, FailureDetector> {
        self.detector.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles an event, and returns the peers that are to be asked.
    pub(crate) fn handle_event(&self, event: DetectorEvent) -> Vec<HostName> {
        let actions = self.lock_detector().handle_event(read_boot_clock(), event);
        let mut asked = Vec::new();
        for action in actions {
            match action {
                DetectorAction::Ask(name) => asked.push(name),
                DetectorAction::Changed(name, health) => self.publish_health(&name, health),
            }
        }
        asked
    }

    fn publish_health(&self, name: &HostName, health: HostHealth) {
        tracing::info!("host {name} is {}", health.as_word());
        if let Some(peer) = self.peers.get(name) {
            peer.health.send_replace(health);
        }
    }

    /// Stores and logs why a peer does not answer, or clears that.
    pub(crate) fn record_answer(&self, name: &HostName, answer: &Result<(), Failure>) {
        let Some(peer) = self.peers.get(name) else { return };
        let mut trouble = peer.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        if answer.is_ok() {
            peer.has_ended.store(false, Ordering::SeqCst);
        }
        let now = answer.as_ref().err().map(ToString::to_string);
        if let Some(why) = now.as_ref().filter(|why| trouble.as_ref() != Some(why)) {
            tracing::warn!("host {name} does not answer: {why}");
        }
        *trouble = now;
    }
}
