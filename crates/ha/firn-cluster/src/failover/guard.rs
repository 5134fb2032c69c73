//! Host guard: obeys the record, and decides for each frame whether it may leave.
//!
//! ```text
//!             a record with an empty fence           a newer generation
//!             names this host                        is in the record
//!   Idle ----------------------------------> Runs ----------------------> Idle
//!                                             |
//!                                             +-- the lease is not held, or is given up for a
//!                                                 planned move: runs on, sends nothing
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use super::{FailoverRecord, HeldLease, LeaseTerms};
use crate::{Epoch, Generation, HostId, VmId};

/// An action for the host's agent, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuardAction {
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
        vms: BTreeMap<VmId, Epoch>,
    },
}

/// The permissions of one host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostGuard {
    host: HostId,
    lease: HeldLease,
    /// The version of the newest record obeyed.
    version: Option<u64>,
    generation: Generation,
    runs: Option<Generation>,
    /// The version of the record in which the lease was given up.
    given_up: Option<u64>,
}

impl HostGuard {
    /// A host that runs no VMs.
    pub fn new(host: HostId, terms: LeaseTerms) -> Self {
        let (lease, generation) = (HeldLease::new(terms), Generation::default());
        Self { host, lease, version: None, generation, runs: None, given_up: None }
    }

    /// Records a lease that was granted, to a request made at `asked`, while this was the record.
    pub fn record_grant(&mut self, asked: Duration, register: &FailoverRecord) -> Vec<GuardAction> {
        let actions = self.learn_record(register);
        if register.generation >= self.generation && !self.has_given_up(register.version) {
            self.lease.record_grant(asked);
        }
        actions
    }

    /// Gives up the lease, so that another host may run the VM without a fence
    /// ([`FailoverRecord::with_move`]). No grant counts until the record has another version than
    /// this one: a proposal that is still on its way changes this version only.
    pub fn give_up_lease(&mut self, register: &FailoverRecord) {
        self.given_up = self.given_up.max(Some(register.version));
        self.lease.drop_lease();
    }

    /// Whether the lease is given up in this version of the record.
    pub fn has_given_up(&self, version: u64) -> bool {
        self.given_up.is_some_and(|given_up| version <= given_up)
    }

    /// Learns the record as it is, or was a moment ago.
    pub fn learn_record(&mut self, register: &FailoverRecord) -> Vec<GuardAction> {
        if self.version.is_some_and(|known| register.version < known) {
            return Vec::new();
        }
        self.version = Some(register.version);
        self.generation = register.generation;
        let mut actions: Vec<GuardAction> = self.stop_outdated().into_iter().collect();
        if register.fence.contains(&self.host) {
            actions.push(GuardAction::Stopped(register.generation));
        }
        actions.extend(self.run_assigned(register));
        actions
    }

    /// Stops everything, because there is no record any more: it is unknown which host may run the
    /// VMs.
    pub fn lose_record(&mut self) -> Option<GuardAction> {
        self.lease.drop_lease();
        self.runs.take().map(GuardAction::Stop)
    }

    /// The running generation, and the time until which its frames may leave.
    pub fn may_send_until(&self) -> Option<(Generation, Duration)> {
        self.runs.map(|runs| (runs, self.lease.valid_until()))
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
    pub fn running_generation(&self) -> Option<Generation> {
        self.runs
    }

    fn stop_outdated(&mut self) -> Option<GuardAction> {
        let old = self.runs.filter(|runs| *runs < self.generation)?;
        self.runs = None;
        self.lease.drop_lease();
        Some(GuardAction::Stop(old))
    }

    fn run_assigned(&mut self, register: &FailoverRecord) -> Option<GuardAction> {
        let here =
            register.placements.iter().filter(|(_, placement)| placement.primary == self.host);
        let marks = &register.checkpoint.marks;
        let vms: BTreeMap<VmId, Epoch> = here.map(|(vm, _)| (*vm, marks[vm])).collect();
        if self.runs.is_some() || !register.fence.is_empty() || vms.is_empty() {
            return None;
        }
        self.runs = Some(register.generation);
        Some(GuardAction::Run { generation: register.generation, vms })
    }
}
