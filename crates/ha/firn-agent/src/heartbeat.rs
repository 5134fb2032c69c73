//! Heartbeats: the shell around `detect`.
//!
//! Each peer has a connection of its own for heartbeats, and a task that asks on it. Streams
//! between hosts use other connections, so that they delay no answer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use firn_control::HostName;
use firn_control::api::{HEARTBEAT, HeartbeatAnswer};
use firn_supervisor::{Failure, FailureKind};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::agent::Agent;
use crate::detect::DetectorEvent;
use crate::peer_connection::{AgentProbe, PeerConnection, probe_agent};
use crate::peer_monitor::read_boot_clock;

/// Time between two ticks of the detector.
const TICK_INTERVAL: Duration = Duration::from_millis(100);

/// How often the host of an agent that has closed its connection is probed, and how long after one
/// another.
const PROBES: u32 = 10;
const PROBE_INTERVAL: Duration = Duration::from_millis(10);

/// Maximum number of events that wait. Each peer has at most one open question.
const EVENTS_MAX: usize = 64;

/// Asks all peers. Never returns.
pub(crate) async fn run_heartbeats(agent: Arc<Agent>) {
    let (event_sender, mut events) = mpsc::channel(EVENTS_MAX);
    let mut askers = BTreeMap::new();
    for name in agent.config.peers.keys() {
        let (ask, questions) = mpsc::channel(1);
        tokio::spawn(ask_repeatedly(
            Arc::clone(&agent),
            name.clone(),
            questions,
            event_sender.clone(),
        ));
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
    loop {
        tokio::select! {
            question = questions.recv() => if question.is_none() { return },
            () = wait_closed(&mut link) => {
                link = None;
                check_agent(&agent, &name).await;
                continue;
            }
        }
        let asked = read_boot_clock();
        let patience = agent.peers.times.suspect_after;
        let answer = timeout(patience, ask_once(&agent, &name, &mut link)).await;
        let answer = answer.unwrap_or_else(|_| Err(late_failure(patience)));
        agent.peers.record_answer(&name, &answer);
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

/// Waits until a connection is closed; for ever if there is none.
async fn wait_closed(link: &mut Option<PeerConnection>) {
    match link {
        Some(link) => link.wait_closed().await,
        None => std::future::pending().await,
    }
}

/// Finds out whether the agent of a peer that has closed its connection has ended. If it has, the
/// servers of membership elect another leader, should it have been the leader, and its VMs fail over
/// when its lease is over, unless an agent answers there again.
async fn check_agent(agent: &Arc<Agent>, name: &HostName) {
    let Ok(address) = agent.peer_address(name) else { return };
    if !is_refused(address).await {
        return;
    }
    agent.peers.record_agent_end(name);
    let (agent, name, address) = (Arc::clone(agent), name.clone(), address.to_owned());
    let (other, host) = (Arc::clone(&agent), name.clone());
    tokio::spawn(async move { other.membership.replace_leader(&host).await });
    tokio::spawn(async move {
        while probe_agent(&address).await != AgentProbe::Accepts {
            sleep(TICK_INTERVAL).await;
        }
        agent.peers.clear_agent_end(&name);
    });
}

/// Whether the host at this address refuses connections. A process that ends may close its connections
/// before the socket at which it listens.
async fn is_refused(address: &str) -> bool {
    for _ in 0..PROBES {
        match probe_agent(address).await {
            AgentProbe::Refuses => return true,
            AgentProbe::Accepts => sleep(PROBE_INTERVAL).await,
            AgentProbe::Unreachable => return false,
        }
    }
    false
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
