//! Counters of frames: for all VMs of this host, for each other host, for the uplink.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use firn_cluster::switch::PortSide;
use firn_control::HostName;
use firn_control::api::TrafficView;

/// What the ports of a switch connect to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkTarget {
    /// VMs of this host.
    Vms,
    /// Another host.
    Host(HostName),
    /// The uplink.
    Uplink,
}

impl LinkTarget {
    /// The side of the switch that such a port is on.
    pub(super) fn switch_side(&self) -> PortSide {
        match self {
            Self::Vms => PortSide::LocalVm,
            Self::Host(_) => PortSide::Peer,
            Self::Uplink => PortSide::Outside,
        }
    }
}

impl fmt::Display for LinkTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vms => f.write_str("VMs"),
            Self::Host(name) => write!(f, "host {name}"),
            Self::Uplink => f.write_str("uplink"),
        }
    }
}

/// Counters since the agent began, and the current failure.
#[derive(Debug, Default)]
pub(super) struct TrafficCounters {
    ports: AtomicU64,
    received: AtomicU64,
    sent: AtomicU64,
    dropped: AtomicU64,
    trouble: Mutex<Option<String>>,
}

impl TrafficCounters {
    /// Number of ports that are connected now.
    pub(super) fn port_count(&self) -> u64 {
        self.ports.load(Ordering::Relaxed)
    }

    /// Counts a port that was connected, and clears the failure.
    pub(super) fn add_port(&self) {
        self.ports.fetch_add(1, Ordering::Relaxed);
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Counts a port that was disconnected, and the frames that still waited for it as dropped.
    pub(super) fn remove_port(&self, waiting: usize) {
        self.ports.fetch_sub(1, Ordering::Relaxed);
        self.dropped.fetch_add(waiting as u64, Ordering::Relaxed);
    }

    /// Counts a frame that has arrived.
    pub(super) fn count_received(&self) {
        self.received.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts frames that were sent.
    pub(super) fn count_sent(&self, frames: usize) {
        self.sent.fetch_add(frames as u64, Ordering::Relaxed);
    }

    /// Counts a frame that had no room.
    pub(super) fn count_dropped(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Stores why no port is connected. Returns whether the reason is new.
    pub(super) fn set_trouble(&self, why: &str) -> bool {
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = trouble.as_deref() != Some(why);
        *trouble = Some(why.to_owned());
        is_new
    }

    /// The counters as the agent reports them.
    pub(super) fn traffic_view(&self, to: &LinkTarget) -> TrafficView {
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
        TrafficView {
            to: to.to_string(),
            connected: count(&self.ports),
            frames_in: count(&self.received),
            frames_out: count(&self.sent),
            dropped: count(&self.dropped),
            trouble: self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}
