//! Failover controller: decides the next change of the record.
//!
//! It stores facts, not progress: a host's report holds whatever the host did before, and a
//! controller that takes over receives all reports again.

use std::collections::{BTreeMap, BTreeSet};

use super::Register;
use crate::{Epoch, Generation, Host, Vm};

/// The decision of the controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Change nothing at present.
    Wait,
    /// Propose the changed record, then report the resulting record
    /// ([`FailoverController::learn_record`]).
    Propose(Register),
    /// A VM can't be recovered at present: no consistent standbys are reachable. If their hosts are
    /// only cut off, they may come back, and the failover continues.
    Lost(Vm),
}

/// A controller. There should be one at a time; two only cost time.
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
    /// A controller that takes office with this record.
    pub fn new(register: Register, hosts: BTreeSet<Host>) -> Self {
        let (stopped, failed, drained) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        Self { register, hosts, stopped, failed, planned: false, drained }
    }

    /// Learns the record as it is, or was a moment ago.
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

    /// Sets the hosts that may believe they hold a lease; no others do.
    pub fn leases(&mut self, hosts: BTreeSet<Host>) {
        self.hosts = hosts;
    }

    /// Records a host's report that no VM of an older generation than this one runs there or will.
    pub fn stopped(&mut self, host: Host, generation: Generation) {
        let known = self.stopped.entry(host).or_insert(generation);
        *known = generation.max(*known);
    }

    /// Records a host's report that a VM of this generation has failed: its hypervisor has ended,
    /// or an error was noticed.
    pub fn failed(&mut self, vm: Vm, generation: Generation) {
        if generation == self.register.generation {
            self.failed.insert(vm);
        }
    }

    /// Plans a failover of every VM to its backup, as the user requests. All primaries must now
    /// make their [final cut](crate::epoch::PrimaryEpochs::begin_final_cut).
    pub fn move_over(&mut self) {
        self.planned = true;
    }

    /// Whether all primaries must make their final cut.
    pub fn is_moving(&self) -> bool {
        self.planned
    }

    /// Records the epoch of the final cut of a VM of this generation.
    pub fn drained(&mut self, vm: Vm, epoch: Epoch, generation: Generation) {
        if generation == self.register.generation {
            self.drained.insert(vm, epoch);
        }
    }

    /// The decision that follows from the known facts.
    pub fn next(&self) -> Next {
        let register = &self.register;
        // This comes first: a primary that is fenced itself, because a cluster of its name has
        // ended, has no lease before.
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

    /// Whether the newest checkpoint includes every VM's last epoch: a failover to it loses
    /// nothing.
    fn may_move_over(&self) -> bool {
        self.planned
            && self.register.is_protected()
            && self.drained == self.register.checkpoint.marks
    }

    /// A failed VM that needs a standby which doesn't exist.
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
