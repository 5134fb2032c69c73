//! One network at this host: its ports, and where a frame goes.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use firn_cluster::switch::{Switch, SwitchPort, SwitchRules};
use firn_control::HostName;
use firn_control::api::NetworkView;
use firn_supervisor::NetworkName;
use tokio::task::AbortHandle;

use super::config::{NetworkConfig, Uplink};
use super::counters::{LinkTarget, TrafficCounters};
use super::queue::FrameQueue;
use super::suspend_detector::SuspendDetector;
use crate::config::AgentConfig;

/// Maximum number of VMs that are connected at once.
const VMS_MAX: u64 = 256;

/// The switch of one network.
#[derive(Debug)]
pub(crate) struct NetworkSwitch {
    /// Its name, the same on all hosts.
    pub(super) name: NetworkName,
    socket: PathBuf,
    uplink: Option<Uplink>,
    table: Mutex<PortTable>,
    counters: BTreeMap<LinkTarget, Arc<TrafficCounters>>,
    /// The newest connection of each peer that has connected to this host.
    links: Mutex<BTreeMap<HostName, AbortHandle>>,
    began: Instant,
    pub(super) suspend_detector: SuspendDetector,
}

#[derive(Debug)]
struct PortTable {
    switch: Switch,
    ports: BTreeMap<SwitchPort, PortMember>,
}

#[derive(Clone, Debug)]
struct PortMember {
    queue: Arc<FrameQueue>,
    lane: Arc<TrafficCounters>,
}

impl NetworkSwitch {
    /// A switch without ports.
    pub(super) fn new(
        name: NetworkName,
        socket: PathBuf,
        config: &AgentConfig,
        settings: &NetworkConfig,
    ) -> Self {
        let world = settings.uplink.iter().map(|_| LinkTarget::Uplink);
        let hosts = config.peers.keys().cloned().map(LinkTarget::Host);
        let all = [LinkTarget::Vms].into_iter().chain(hosts).chain(world);
        Self {
            name,
            socket,
            uplink: settings.uplink.clone(),
            table: Mutex::new(PortTable {
                switch: Switch::new(SwitchRules::default()),
                ports: BTreeMap::new(),
            }),
            counters: all.map(|to| (to, Arc::default())).collect(),
            links: Mutex::default(),
            began: Instant::now(),
            suspend_detector: SuspendDetector::default(),
        }
    }

    /// Connects a port, until the returned value is dropped. `None` if there are too many ports, or
    /// the network has no such target.
    pub(super) fn connect_port(self: &Arc<Self>, to: &LinkTarget) -> Option<ConnectedPort> {
        let lane = Arc::clone(self.counters.get(to)?);
        let mut table = self.lock_table();
        if *to == LinkTarget::Vms && lane.port_count() >= VMS_MAX {
            return None;
        }
        let member = PortMember { queue: Arc::default(), lane };
        let port = (0..).map(SwitchPort).find(|port| !table.ports.contains_key(port))?;
        table.ports.insert(port, member.clone());
        table.switch.connect_port(port, to.switch_side());
        member.lane.add_port();
        Some(ConnectedPort { network: Arc::clone(self), port, member })
    }

    /// Registers the newest connection of a peer. The connection before it is ended, for it may
    /// have died unnoticed.
    pub(super) fn replace_link(&self, peer: &HostName, link: AbortHandle) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = links.insert(peer.clone(), link) {
            before.abort();
        }
    }

    /// Forgets addresses that have sent nothing for a long time.
    pub(super) fn forget_old_addresses(&self) {
        let now = self.began.elapsed();
        self.lock_table().switch.expire_old(now);
    }

    /// Stores and logs why a target is not connected.
    pub(super) fn record_trouble(&self, to: &LinkTarget, why: &str) {
        if self.counters.get(to).is_some_and(|lane| lane.set_trouble(why)) {
            tracing::warn!("network {}: {to} is not connected: {why}", self.name);
        }
    }

    /// The network as the agent reports it.
    pub(super) fn network_view(&self) -> NetworkView {
        NetworkView {
            name: self.name.clone(),
            socket: self.socket.clone(),
            uplink: self.uplink.as_ref().map(ToString::to_string),
            addresses: self.lock_table().switch.len(),
            lanes: self.counters.iter().map(|(to, lane)| lane.traffic_view(to)).collect(),
        }
    }

    fn lock_table(&self) -> MutexGuard<'_, PortTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A port of a network, until it is dropped.
#[derive(Debug)]
pub(super) struct ConnectedPort {
    network: Arc<NetworkSwitch>,
    port: SwitchPort,
    member: PortMember,
}

impl ConnectedPort {
    /// How often this agent was suspended, for [`Self::check_suspends`].
    pub(super) fn count_suspends(&self) -> u64 {
        self.network.suspend_detector.count_suspends()
    }

    /// See [`SuspendDetector::check_since`].
    pub(super) fn check_suspends(&self, sleeps: u64) -> io::Result<()> {
        self.network.suspend_detector.check_since(sleeps)
    }

    /// Forwards a frame that this port has received.
    pub(super) fn forward_frame(&self, frame: &[u8]) {
        self.member.lane.count_received();
        let now = self.network.began.elapsed();
        let mut table = self.network.lock_table();
        let out = table.switch.route_frame(self.port, frame, now);
        if out.is_empty() {
            return;
        }
        let frame = Bytes::copy_from_slice(frame);
        for member in out.iter().filter_map(|port| table.ports.get(port)) {
            if !member.queue.push_frame(frame.clone()) {
                member.lane.count_dropped();
            }
        }
    }

    /// Returns the next frames to send to this port; see [`FrameQueue::take_frames`].
    pub(super) async fn next_frames(&self, bytes: usize) -> Vec<Bytes> {
        self.member.queue.take_frames(bytes).await
    }

    /// Counts frames that were sent to this port.
    pub(super) fn count_sent(&self, frames: usize) {
        self.member.lane.count_sent(frames);
    }

    /// Counts a frame that could not be sent.
    pub(super) fn count_dropped(&self) {
        self.member.lane.count_dropped();
    }
}

impl Drop for ConnectedPort {
    fn drop(&mut self) {
        let mut table = self.network.lock_table();
        table.switch.disconnect_port(self.port);
        table.ports.remove(&self.port);
        self.member.lane.remove_port(self.member.queue.len());
    }
}
