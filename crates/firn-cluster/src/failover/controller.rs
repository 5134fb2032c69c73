//! Decides what the register should say next.
//!
//! It keeps facts, not progress: what it heard of a host holds whatever it did before, and a controller that takes over
//! hears it all again.

use std::collections::{BTreeMap, BTreeSet};

use super::Register;
use crate::{Epoch, Generation, Host, Vm};

/// What the controller wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing, as things are.
    Wait,
    /// The register, changed. Propose it, then say what the register is ([`Controller::learned`]).
    Propose(Register),
    /// A VM can't be had back, as things are: no copies that agree are within reach. If their hosts are only cut off, they
    /// may come back, and it goes on.
    Lost(Vm),
}

/// One controller. There should be one at a time; if there are two, only time is lost.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Controller {
    register: Register,
    /// Hosts whose lease isn't over.
    hosts: BTreeSet<Host>,
    stopped: BTreeMap<Host, Generation>,
    failed: BTreeSet<Vm>,
    planned: bool,
    drained: BTreeMap<Vm, Epoch>,
}

impl Controller {
    /// A controller that takes office with this register.
    pub fn new(register: Register, hosts: BTreeSet<Host>) -> Self {
        let (stopped, failed, drained) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        Self { register, hosts, stopped, failed, planned: false, drained }
    }

    /// This is, or was a moment ago, the register.
    pub fn learned(&mut self, register: &Register) {
        if register.version < self.register.version {
            return;
        }
        if register.generation != self.register.generation {
            self.failed.clear();
            self.drained.clear();
            self.planned = false;
        }
        self.register = register.clone();
    }

    /// These hosts may believe they hold a lease; no others do.
    pub fn leases(&mut self, hosts: BTreeSet<Host>) {
        self.hosts = hosts;
    }

    /// A host says that nothing older than this generation runs there or will.
    pub fn stopped(&mut self, host: Host, generation: Generation) {
        let known = self.stopped.entry(host).or_insert(generation);
        *known = generation.max(*known);
    }

    /// A host says that a VM of this generation has failed: its hypervisor is gone, or an error was noticed.
    pub fn failed(&mut self, vm: Vm, generation: Generation) {
        if generation == self.register.generation {
            self.failed.insert(vm);
        }
    }

    /// The user wants every VM at its backup. All primaries must now [finish](crate::epoch::Primary::finish).
    pub fn move_over(&mut self) {
        self.planned = true;
    }

    /// Whether all primaries must finish.
    pub fn is_moving(&self) -> bool {
        self.planned
    }

    /// A finished VM of this generation was cut last at this epoch.
    pub fn drained(&mut self, vm: Vm, epoch: Epoch, generation: Generation) {
        if generation == self.register.generation {
            self.drained.insert(vm, epoch);
        }
    }

    /// What should be done, as far as is known.
    pub fn next(&self) -> Next {
        let register = &self.register;
        // First: a primary that is fenced itself, because a cluster of its name has ended, has no lease before.
        if let Some(next) = register.fenced(|host| self.is_harmless(host)) {
            return Next::Propose(next);
        }
        if let Some(vm) = self.lost() {
            return Next::Lost(vm);
        }
        if !register.fence.is_empty() {
            return Next::Wait;
        }
        if self.must_go_back() || self.may_move_over() {
            return Self::propose(register.failed_over(&self.hosts));
        }
        Self::propose(register.backed_up(&self.hosts))
    }

    fn propose(register: Option<Register>) -> Next {
        register.map_or(Next::Wait, Next::Propose)
    }

    fn is_harmless(&self, host: Host) -> bool {
        let stopped = self.stopped.get(&host).is_some_and(|at| *at >= self.register.generation);
        stopped || !self.hosts.contains(&host)
    }

    fn must_go_back(&self) -> bool {
        !self.failed.is_empty() || !self.register.primaries().is_subset(&self.hosts)
    }

    /// The newest checkpoint has every VM's last epoch: going over to it loses nothing.
    fn may_move_over(&self) -> bool {
        self.planned
            && self.register.is_protected()
            && self.drained == self.register.checkpoint.marks
    }

    /// A VM that needs a copy which doesn't exist.
    fn lost(&self) -> Option<Vm> {
        let register = &self.register;
        if !self.must_go_back() || register.failed_over(&self.hosts).is_some() {
            return None;
        }
        let gone = |vm: &Vm| {
            self.failed.contains(vm) || !self.hosts.contains(&register.places[vm].primary)
        };
        register.places.keys().copied().find(gone)
    }
}
