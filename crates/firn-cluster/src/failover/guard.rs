//! A host: obeys the register, and says of each frame whether it may leave.
//!
//! ```text
//!             a register with an empty fence         a newer generation
//!             names this host                        is in the register
//!   Idle ----------------------------------> Runs ----------------------> Idle
//!                                             |
//!                                             +-- the lease is not held: runs on, sends nothing
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Lease, Register, Terms};
use crate::{Epoch, Generation, Host, Vm};

/// What the host's agent has to do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// End the VMs of this timeline, and drop all they have not sent.
    Stop(Generation),
    /// Tell the controller that nothing older than this generation runs here or will.
    Stopped(Generation),
    /// Run these VMs from the copies of these epochs, send what is in flight, and announce their addresses.
    Run {
        /// The timeline.
        generation: Generation,
        /// The VMs and their epochs.
        vms: BTreeMap<Vm, Epoch>,
    },
}

/// What one host may do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Guard {
    host: Host,
    lease: Lease,
    /// The newest register obeyed.
    version: Option<u64>,
    generation: Generation,
    runs: Option<Generation>,
}

impl Guard {
    /// A host that runs nothing.
    pub fn new(host: Host, terms: Terms) -> Self {
        let (lease, generation) = (Lease::new(terms), Generation::default());
        Self { host, lease, version: None, generation, runs: None }
    }

    /// A lease was granted, to a request made at `asked`, while this was the register.
    pub fn granted(&mut self, asked: Duration, register: &Register) -> Vec<Action> {
        let actions = self.learned(register);
        if register.generation >= self.generation {
            self.lease.granted(asked);
        }
        actions
    }

    /// This is, or was a moment ago, the register.
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

    /// There is no register, though there was one: nobody knows who may run, so nothing does here.
    pub fn unknown(&mut self) -> Option<Action> {
        self.lease.dropped();
        self.runs.take().map(Action::Stop)
    }

    /// Until when frames of which timeline may leave.
    pub fn may_send_until(&self) -> Option<(Generation, Duration)> {
        self.runs.map(|runs| (runs, self.lease.until()))
    }

    /// Whether a frame may leave now. To be asked for every frame, right before it is sent.
    pub fn may_send(&self, now: Duration) -> bool {
        self.runs.is_some() && self.lease.is_held(now)
    }

    /// Whether the lease is held; what runs without it runs on, and isn't heard.
    pub fn holds_lease(&self, now: Duration) -> bool {
        self.lease.is_held(now)
    }

    /// The newest timeline this host has heard of.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The timeline that runs here.
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
