//! Failover controller: decides the next change of the record.
//!
//! It stores facts, not progress: a host's report holds whatever the host did before, and a
//! controller that takes over receives all reports again.

use std::collections::{BTreeMap, BTreeSet};

use super::FailoverRecord;
use crate::{Epoch, Generation, HostId, VmId};

/// The decision of the controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControllerDecision {
    /// Change nothing at present.
    Wait,
    /// Propose the changed record, then report the resulting record
    /// ([`FailoverController::learn_record`]).
    Propose(FailoverRecord),
    /// A VM can't be recovered at present: no consistent standbys are reachable. If their hosts are
    /// only cut off, they may come back, and the failover continues.
    Lost(VmId),
}

/// A controller. There should be one at a time; two only cost time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FailoverController {
    record: FailoverRecord,
    /// Hosts whose lease isn't over.
    hosts: BTreeSet<HostId>,
    stopped: BTreeMap<HostId, Generation>,
    failed: BTreeSet<VmId>,
    planned: bool,
    drained: BTreeMap<VmId, Epoch>,
}

impl FailoverController {
    /// A controller that takes office with this record.
    pub fn new(record: FailoverRecord, hosts: BTreeSet<HostId>) -> Self {
        let (stopped, failed, drained) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        Self { record, hosts, stopped, failed, planned: false, drained }
    }

    /// Learns the record as it is, or was a moment ago.
    pub fn learn_record(&mut self, register: &FailoverRecord) {
        if register.version < self.record.version {
            return;
        }
        if register.generation != self.record.generation {
            self.failed.clear();
            self.drained.clear();
            self.planned = false;
        }
        self.record = register.clone();
    }

    /// Sets the hosts that may believe they hold a lease; no others do.
    pub fn set_lease_holders(&mut self, hosts: BTreeSet<HostId>) {
        self.hosts = hosts;
    }

    /// Records a host's report that no VM of an older generation than this one runs there or will.
    pub fn record_stopped(&mut self, host: HostId, generation: Generation) {
        let known = self.stopped.entry(host).or_insert(generation);
        *known = generation.max(*known);
    }

    /// Records a host's report that a VM of this generation has failed: its hypervisor has ended,
    /// or an error was noticed.
    pub fn record_failed(&mut self, vm: VmId, generation: Generation) {
        if generation == self.record.generation {
            self.failed.insert(vm);
        }
    }

    /// Plans a failover of every VM to its backup, as the user requests. All primaries must now
    /// make their [final cut](crate::epoch::PrimaryEpochs::begin_final_cut).
    pub fn plan_failover(&mut self) {
        self.planned = true;
    }

    /// Whether all primaries must make their final cut.
    pub fn is_failover_planned(&self) -> bool {
        self.planned
    }

    /// Records the epoch of the final cut of a VM of this generation.
    pub fn record_drained(&mut self, vm: VmId, epoch: Epoch, generation: Generation) {
        if generation == self.record.generation {
            self.drained.insert(vm, epoch);
        }
    }

    /// The decision that follows from the known facts.
    pub fn next_decision(&self) -> ControllerDecision {
        let register = &self.record;
        // This comes first: a primary that is fenced itself, because a cluster of its name has
        // ended, has no lease before.
        if let Some(next) = register.without_harmless_changes(|host| self.is_harmless(host)) {
            return ControllerDecision::Propose(next);
        }
        if let Some(vm) = self.unrecoverable_vm() {
            return ControllerDecision::Lost(vm);
        }
        if !register.fence.is_empty() {
            return ControllerDecision::Wait;
        }
        if self.must_fail_over() || self.is_planned_failover_ready() {
            return Self::propose_or_wait(register.with_failover(&self.hosts));
        }
        Self::propose_or_wait(register.with_missing_backups(&self.hosts))
    }

    fn propose_or_wait(register: Option<FailoverRecord>) -> ControllerDecision {
        register.map_or(ControllerDecision::Wait, ControllerDecision::Propose)
    }

    fn is_harmless(&self, host: HostId) -> bool {
        let stopped = self.stopped.get(&host).is_some_and(|at| *at >= self.record.generation);
        stopped || !self.hosts.contains(&host)
    }

    fn must_fail_over(&self) -> bool {
        !self.failed.is_empty() || !self.record.primaries().is_subset(&self.hosts)
    }

    /// Whether the newest checkpoint includes every VM's last epoch: a failover to it loses
    /// nothing.
    fn is_planned_failover_ready(&self) -> bool {
        self.planned && self.record.is_protected() && self.drained == self.record.checkpoint.marks
    }

    /// A failed VM that needs a standby which doesn't exist.
    fn unrecoverable_vm(&self) -> Option<VmId> {
        let register = &self.record;
        if !self.must_fail_over() || register.with_failover(&self.hosts).is_some() {
            return None;
        }
        let gone = |vm: &VmId| {
            self.failed.contains(vm) || !self.hosts.contains(&register.placements[vm].primary)
        };
        register.placements.keys().copied().find(gone)
    }
}
