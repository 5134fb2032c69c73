//! Host guard: obeys the record, and decides for each frame whether it may leave.
//!
//! ```text
//!             a record with an empty fence           a newer generation
//!             names this host                        is in the record
//!   Idle ----------------------------------> Runs ----------------------> Idle
//!                                             |
//!                                             +-- the lease is not held: runs on, sends nothing
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Lease, Register, Terms};
use crate::{Epoch, Generation, Host, Vm};

/// An action for the host's agent, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// End the VMs of this generation, and drop all their unsent output.
    Stop(Generation),
    /// Report to the controller that no VM of an older generation than this one runs here or will.
    Stopped(Generation),
    /// Run these VMs from the standbys of these epochs, send the in-flight frames, and announce
    /// their addresses.
    Run {
        /// The generation.
        generation: Generation,
        /// The VMs and their epochs.
        vms: BTreeMap<Vm, Epoch>,
    },
}

/// The permissions of one host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Guard {
    host: Host,
    lease: Lease,
    /// The version of the newest record obeyed.
    version: Option<u64>,
    generation: Generation,
    runs: Option<Generation>,
}

impl Guard {
    /// A host that runs no VMs.
    pub fn new(host: Host, terms: Terms) -> Self {
        let (lease, generation) = (Lease::new(terms), Generation::default());
        Self { host, lease, version: None, generation, runs: None }
    }

    /// Records a lease that was granted, to a request made at `asked`, while this was the record.
    pub fn granted(&mut self, asked: Duration, register: &Register) -> Vec<Action> {
        let actions = self.learned(register);
        if register.generation >= self.generation {
            self.lease.granted(asked);
        }
        actions
    }

    /// Learns the record as it is, or was a moment ago.
    pub fn learned(&mut self, register: &Register) -> Vec<Action> {
        if self.version.is_some_and(|known| register.version < known) {
            return Vec::new();
        }
        self.version = Some(register.version);
        self.generation = register.generation;
        let mut actions: Vec<Action> = self.stop().into_iter().collect();
        if register.fence.contains(&self.host) {
            actions.push(Action::Stopped(register.generation));
        }
        actions.extend(self.run(register));
        actions
    }

    /// Stops everything, because there is no record any more: it is unknown which host may run the
    /// VMs.
    pub fn unknown(&mut self) -> Option<Action> {
        self.lease.dropped();
        self.runs.take().map(Action::Stop)
    }

    /// The running generation, and the time until which its frames may leave.
    pub fn may_send_until(&self) -> Option<(Generation, Duration)> {
        self.runs.map(|runs| (runs, self.lease.until()))
    }

    /// Whether a frame may leave now. The caller checks this for every frame, right before it sends
    /// it.
    pub fn may_send(&self, now: Duration) -> bool {
        self.runs.is_some() && self.lease.is_held(now)
    }

    /// Whether the lease is held. VMs continue to run without it, but their output does not leave.
    pub fn holds_lease(&self, now: Duration) -> bool {
        self.lease.is_held(now)
    }

    /// The newest generation that this host knows.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The generation that runs here.
    pub fn runs(&self) -> Option<Generation> {
        self.runs
    }

    fn stop(&mut self) -> Option<Action> {
        let old = self.runs.filter(|runs| *runs < self.generation)?;
        self.runs = None;
        self.lease.dropped();
        Some(Action::Stop(old))
    }

    fn run(&mut self, register: &Register) -> Option<Action> {
        let here = register.places.iter().filter(|(_, place)| place.primary == self.host);
        let marks = &register.checkpoint.marks;
        let vms: BTreeMap<Vm, Epoch> = here.map(|(vm, _)| (*vm, marks[vm])).collect();
        if self.runs.is_some() || !register.fence.is_empty() || vms.is_empty() {
            return None;
        }
        self.runs = Some(register.generation);
        Some(Action::Run { generation: register.generation, vms })
    }
}
