//! One network at this host: its ports, and where a frame goes.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use firn_cluster::switch::{Port, Rules, Switch};
use firn_supervisor::NetworkName;
use tokio::task::AbortHandle;

use super::awake::Awake;
use super::config::{NetworkConfig, Uplink};
use super::lane::{Lane, To};
use super::queue::Queue;
use crate::api::NetworkView;
use crate::config::Config;
use crate::host::HostName;

/// Maximum number of VMs that are connected at once.
const VMS_MAX: u64 = 256;

/// The switch of one network.
#[derive(Debug)]
pub(crate) struct Network {
    /// Its name, the same on all hosts.
    pub(super) name: NetworkName,
    socket: PathBuf,
    uplink: Option<Uplink>,
    table: Mutex<Table>,
    lanes: BTreeMap<To, Arc<Lane>>,
    /// The newest connection of each peer that has connected to this host.
    links: Mutex<BTreeMap<HostName, AbortHandle>>,
    began: Instant,
    pub(super) awake: Awake,
}

#[derive(Debug)]
struct Table {
    switch: Switch,
    ports: BTreeMap<Port, Member>,
}

#[derive(Clone, Debug)]
struct Member {
    queue: Arc<Queue>,
    lane: Arc<Lane>,
}

impl Network {
    /// A switch without ports.
    pub(super) fn new(
        name: NetworkName,
        socket: PathBuf,
        config: &Config,
        settings: &NetworkConfig,
    ) -> Self {
        let world = settings.uplink.iter().map(|_| To::World);
        let hosts = config.peers.keys().cloned().map(To::Host);
        let all = [To::Vms].into_iter().chain(hosts).chain(world);
        Self {
            name,
            socket,
            uplink: settings.uplink.clone(),
            table: Mutex::new(Table {
                switch: Switch::new(Rules::default()),
                ports: BTreeMap::new(),
            }),
            lanes: all.map(|to| (to, Arc::default())).collect(),
            links: Mutex::default(),
            began: Instant::now(),
            awake: Awake::default(),
        }
    }

    /// Connects a port, until the returned value is dropped. `None` if there are too many ports, or
    /// the network has no such target.
    pub(super) fn join(self: &Arc<Self>, to: &To) -> Option<Joined> {
        let lane = Arc::clone(self.lanes.get(to)?);
        let mut table = self.table();
        if *to == To::Vms && lane.ports() >= VMS_MAX {
            return None;
        }
        let member = Member { queue: Arc::default(), lane };
        let port = (0..).map(Port).find(|port| !table.ports.contains_key(port))?;
        table.ports.insert(port, member.clone());
        table.switch.plug(port, to.side());
        member.lane.joined();
        Some(Joined { network: Arc::clone(self), port, member })
    }

    /// Registers the newest connection of a peer. The connection before it is ended, for it may
    /// have died unnoticed.
    pub(super) fn replace(&self, peer: &HostName, link: AbortHandle) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = links.insert(peer.clone(), link) {
            before.abort();
        }
    }

    /// Forgets addresses that have sent nothing for a long time.
    pub(super) fn age(&self) {
        let now = self.began.elapsed();
        self.table().switch.age(now);
    }

    /// Stores and logs why a target is not connected.
    pub(super) fn trouble(&self, to: &To, why: &str) {
        if self.lanes.get(to).is_some_and(|lane| lane.trouble(why)) {
            tracing::warn!("network {}: {to} is not connected: {why}", self.name);
        }
    }

    /// The network as the agent reports it.
    pub(super) fn view(&self) -> NetworkView {
        NetworkView {
            name: self.name.clone(),
            socket: self.socket.clone(),
            uplink: self.uplink.as_ref().map(ToString::to_string),
            addresses: self.table().switch.len(),
            lanes: self.lanes.iter().map(|(to, lane)| lane.view(to)).collect(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A port of a network, until it is dropped.
#[derive(Debug)]
pub(super) struct Joined {
    network: Arc<Network>,
    port: Port,
    member: Member,
}

impl Joined {
    /// How often this agent was suspended, for [`Self::check_suspends`].
    pub(super) fn sleeps(&self) -> u64 {
        self.network.awake.sleeps()
    }

    /// See [`SuspendDetector::check_since`].
    pub(super) fn check(&self, sleeps: u64) -> io::Result<()> {
        self.network.awake.check(sleeps)
    }

    /// Forwards a frame that this port has received.
    pub(super) fn came(&self, frame: &[u8]) {
        self.member.lane.came();
        let now = self.network.began.elapsed();
        let mut table = self.network.table();
        let out = table.switch.arrived(self.port, frame, now);
        if out.is_empty() {
            return;
        }
        let frame = Bytes::copy_from_slice(frame);
        for member in out.iter().filter_map(|port| table.ports.get(port)) {
            if !member.queue.push(frame.clone()) {
                member.lane.dropped();
            }
        }
    }

    /// Returns the next frames to send to this port; see [`FrameQueue::take_frames`].
    pub(super) async fn next(&self, bytes: usize) -> Vec<Bytes> {
        self.member.queue.take(bytes).await
    }

    /// Counts frames that were sent to this port.
    pub(super) fn left(&self, frames: usize) {
        self.member.lane.left(frames);
    }

    /// Counts a frame that could not be sent.
    pub(super) fn lost(&self) {
        self.member.lane.dropped();
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let mut table = self.network.table();
        table.switch.unplug(self.port);
        table.ports.remove(&self.port);
        self.member.lane.parted(self.member.queue.len());
    }
}
