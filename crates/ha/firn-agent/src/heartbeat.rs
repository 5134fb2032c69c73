//! Heartbeats: the shell around `detect`.
//!
//! Each peer has a connection of its own for heartbeats, and a task that asks on it. Streams
//! between hosts use other connections, so that they delay no answer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firn_control::api::{HEARTBEAT, HeartbeatAnswer, PeerView};
use firn_control::{HostHealth, HostName};
use firn_supervisor::{Failure, FailureKind};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::agent::Agent;
use crate::detect::{BootTime, DetectorAction, DetectorEvent, DetectorTiming, FailureDetector};
use crate::peer_connection::PeerConnection;

/// Time between two ticks of the detector.
const TICK_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of events that wait. Each peer has at most one open question.
const EVENTS_MAX: usize = 64;

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
}

/// The peers of this host, with their health.
#[derive(Debug)]
pub struct PeerMonitor {
    times: DetectorTiming,
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
        };
        let peers = peers.into_iter().map(|(name, address)| (name, peer(address))).collect();
        Self { times, detector: Mutex::new(detector), peers }
    }

    /// The health of a peer, and its changes.
    pub fn health(&self, name: &HostName) -> Option<watch::Receiver<HostHealth>> {
        self.peers.get(name).map(|peer| peer.health.subscribe())
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
    fn handle_event(&self, event: DetectorEvent) -> Vec<HostName> {
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
    fn note_answer(&self, name: &HostName, answer: &Result<(), Failure>) {
        let Some(peer) = self.peers.get(name) else { return };
        let mut trouble = peer.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let now = answer.as_ref().err().map(ToString::to_string);
        if let Some(why) = now.as_ref().filter(|why| trouble.as_ref() != Some(why)) {
            tracing::warn!("host {name} does not answer: {why}");
        }
        *trouble = now;
    }
}

/// Asks all peers. Never returns.
pub(crate) async fn run_heartbeats(agent: Arc<Agent>) {
    let (tell, mut events) = mpsc::channel(EVENTS_MAX);
    let mut askers = BTreeMap::new();
    for name in agent.config.peers.keys() {
        let (ask, questions) = mpsc::channel(1);
        tokio::spawn(ask_repeatedly(Arc::clone(&agent), name.clone(), questions, tell.clone()));
        askers.insert(name.clone(), ask);
    }
    let mut ticks = interval(TICK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let event = tokio::select! {
            _ = ticks.tick() => DetectorEvent::Tick,
            Some(event) = events.recv() => event,
        };
        for name in agent.peers.handle_event(event) {
            // Each peer has at most one open question, so its channel has room.
            if let Some(ask) = askers.get(&name) {
                let _ = ask.try_send(());
            }
        }
    }
}

/// Sends the questions to one peer, and reports its answers.
async fn ask_repeatedly(
    agent: Arc<Agent>,
    name: HostName,
    mut questions: mpsc::Receiver<()>,
    events: mpsc::Sender<DetectorEvent>,
) {
    let mut link = None;
    while questions.recv().await.is_some() {
        let asked = read_boot_clock();
        let patience = agent.peers.times.suspect_after;
        let answer = timeout(patience, ask_once(&agent, &name, &mut link)).await;
        let answer = answer.unwrap_or_else(|_| Err(late_failure(patience)));
        agent.peers.note_answer(&name, &answer);
        let event = match answer {
            Ok(()) => DetectorEvent::Answered(name.clone(), asked),
            Err(_) => {
                link = None;
                DetectorEvent::Failed(name.clone())
            }
        };
        if events.send(event).await.is_err() {
            return;
        }
    }
}

async fn ask_once(
    agent: &Agent,
    name: &HostName,
    link: &mut Option<PeerConnection>,
) -> Result<(), Failure> {
    let open = match link {
        Some(open) => open,
        None => link
            .insert(PeerConnection::open(&agent.identity, name, agent.peer_address(name)?).await?),
    };
    let HeartbeatAnswer { host } = open.get_json(HEARTBEAT).await?;
    match host == *name {
        true => Ok(()),
        false => Err(Failure::new(FailureKind::Other, format!("it calls itself {host}"))),
    }
}

fn late_failure(patience: Duration) -> Failure {
    Failure::new(FailureKind::Other, format!("no answer within {} ms", patience.as_millis()))
}
