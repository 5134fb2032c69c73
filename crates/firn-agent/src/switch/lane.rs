//! What is counted: for the VMs of this host together, for each other host, for the world.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use firn_cluster::switch::Side;

use crate::api::LaneView;
use crate::host::HostName;

/// Where frames come from and go to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum To {
    /// VMs of this host.
    Vms,
    /// Another host.
    Host(HostName),
    /// The uplink.
    World,
}

impl To {
    /// The same as the switch has it.
    pub(super) fn side(&self) -> Side {
        match self {
            Self::Vms => Side::Near,
            Self::Host(_) => Side::Peer,
            Self::World => Side::World,
        }
    }
}

impl fmt::Display for To {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vms => f.write_str("VMs"),
            Self::Host(name) => write!(f, "host {name}"),
            Self::World => f.write_str("uplink"),
        }
    }
}

/// Counts since the agent began, and what is wrong now.
#[derive(Debug, Default)]
pub(super) struct Lane {
    ports: AtomicU64,
    came: AtomicU64,
    left: AtomicU64,
    dropped: AtomicU64,
    trouble: Mutex<Option<String>>,
}

impl Lane {
    /// How many are connected.
    pub(super) fn ports(&self) -> u64 {
        self.ports.load(Ordering::Relaxed)
    }

    /// Somebody is connected: nothing is wrong any more.
    pub(super) fn joined(&self) {
        self.ports.fetch_add(1, Ordering::Relaxed);
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Somebody is not, and so many frames were still to go there.
    pub(super) fn parted(&self, waiting: usize) {
        self.ports.fetch_sub(1, Ordering::Relaxed);
        self.dropped.fetch_add(waiting as u64, Ordering::Relaxed);
    }

    /// A frame has come from there.
    pub(super) fn came(&self) {
        self.came.fetch_add(1, Ordering::Relaxed);
    }

    /// Frames have gone there.
    pub(super) fn left(&self, frames: usize) {
        self.left.fetch_add(frames as u64, Ordering::Relaxed);
    }

    /// A frame had no room.
    pub(super) fn dropped(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Why nobody is connected. True if that is news.
    pub(super) fn trouble(&self, why: &str) -> bool {
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = trouble.as_deref() != Some(why);
        *trouble = Some(why.to_owned());
        is_new
    }

    /// What there is to say about it.
    pub(super) fn view(&self, to: &To) -> LaneView {
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
        LaneView {
            to: to.to_string(),
            connected: count(&self.ports),
            frames_in: count(&self.came),
            frames_out: count(&self.left),
            dropped: count(&self.dropped),
            trouble: self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}
