//! Plans the next action of a host for a cluster, from the cluster's record and from what the host
//! observes. Pure.
//!
//! A VM that is protected alone is a cluster of one VM: its record has one VM, and the same plan
//! applies. What differs is the [`Coordinator`], which makes the global checkpoints.
//!
//! ```text
//!   the record                           observed here                   planned
//!     a VM runs here, no VM has a backup   its output is buffered          release its output
//!                                          all VMs have ended              end the record
//!                                          they run, the cluster's first   protect them by another
//!                                          VM among them                   host
//!     all run here, a backup is named      no VM is sent to a backup, in   record that there is
//!                                          two plans one after another     none
//!     a VM runs here, the cluster has      it has died, or hangs           yield: request the lease
//!     copies of all VMs                                                    no more: all fail over
//!                                          it was ended by its user,       end the record
//!                                          shut down, or released
//!     a VM runs at an earlier agent        it runs                         adopt it
//!     of this host
//!     a VM runs elsewhere                  it runs and obeys a lease       end it
//!     other hosts have the copies          copies that receive nothing     drop them
//!
//!   the primary is the coordinator (one VM):
//!     the VM runs here                     another host than the backup    record that host as the
//!                                          of the record has a committed   backup
//!                                          epoch of it
//!                                          a panic of its guest ended it   nothing: the user may
//!                                                                          request a failover
//!                                          it is a standby whose primary   end the record
//!                                          was stopped
//!
//!   the backup is the coordinator (one VM or several):
//!     a VM runs here, the cluster has      its epochs are not sent for     yield
//!     copies of all VMs                    a while
//!     a VM runs at an earlier agent        it runs, the host with the      nothing: all are about
//!     of this host                         copies has its lease            to fail over
//!     the cluster has ended                it runs, in the generation      detach it
//!                                          before the end
//!     an earlier agent of this host has    the copies                      record that this agent
//!     the copies, and a VM is lost, or                                     has them
//!     is to run from them
//! ```
//!
//! While the record names a backup that has copies, no VM's output is released without them: the
//! record loses its backup first. Where the backup is the coordinator, no restarted agent adopts a
//! VM alone either: without the copy of that VM the copies of the others are of no use. So whatever
//! happens to one VM happens to the cluster. Where the primary is the coordinator, the VM continues,
//! and gives up its copy.
//!
//! Copies outlive the agent of their host. While the record names an earlier agent as the holder of
//! the copies, no host has released output that a failover to them would undo. But without the
//! agent no more epochs arrive: so where all VMs still run, they continue, and are protected anew.

mod observed;

use std::collections::BTreeSet;

pub use observed::{Coordinator, LocalVm, ObservedCluster, ObservedVm};

use super::FailoverRecord;
use crate::HostId;

/// An action for a cluster. `V` names a VM at its host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReconcileAction<V> {
    /// Nothing.
    #[default]
    Nothing,
    /// Record the backup of all VMs, or that there is none.
    RecordBackup(Option<HostId>),
    /// Release the buffered output of these VMs.
    ReleaseOutput(BTreeSet<V>),
    /// Protect the cluster by a host that runs none of its VMs.
    Protect,
    /// End the record.
    EndRecord,
    /// Stop to request the lease in this generation, and continue to obey the record. VMs that are
    /// still there are ended once they run elsewhere.
    YieldLease,
    /// Record that this agent manages the VMs of that earlier agent.
    Adopt(HostId),
    /// Record that this agent has the copies of that earlier agent.
    AdoptCopies(HostId),
    /// End the VM: it runs elsewhere.
    Fence(V),
    /// The cluster has ended: the VM continues by itself.
    Detach(V),
    /// Drop the copies, which are of no use any more.
    DropCopies,
}

impl<V: PartialEq> ReconcileAction<V> {
    /// Whether the action may be performed now, or only if the plan before was the same. To record
    /// that there is no backup gives up the copies, and the stream of a VM whose hypervisor has
    /// just died ends a moment before this host knows why. Copies may have been replaced between
    /// the read of the record and the read of their status.
    pub fn is_sure(&self, before: &Self) -> bool {
        !matches!(self, Self::RecordBackup(None) | Self::DropCopies) || self == before
    }
}

/// Plans the action of host `me`, whose earlier agents had the numbers `mine`. `leases` are the
/// hosts whose leases have not expired.
pub fn plan_action<V: Ord + Clone>(
    me: HostId,
    mine: &BTreeSet<HostId>,
    record: &FailoverRecord,
    leases: &BTreeSet<HostId>,
    here: &ObservedCluster<V>,
) -> ReconcileAction<V> {
    let plan = ReconcilePlan { me, mine, record, leases, here };
    if record.primaries().contains(&me) && !record.fence.is_empty() {
        return ReconcileAction::Nothing;
    }
    let stray = here.vms.iter().find_map(|(name, vm)| plan.plan_stray_vm(name, *vm));
    stray.or_else(|| plan.plan_copies()).unwrap_or_else(|| plan.plan_primary())
}

struct ReconcilePlan<'a, V> {
    me: HostId,
    mine: &'a BTreeSet<HostId>,
    record: &'a FailoverRecord,
    leases: &'a BTreeSet<HostId>,
    here: &'a ObservedCluster<V>,
}

impl<V: Ord + Clone> ReconcilePlan<'_, V> {
    fn is_primary_coordinator(&self) -> bool {
        self.here.coordinator == Coordinator::Primary
    }

    /// The host that runs the VM.
    fn primary_of(&self, vm: LocalVm) -> Option<HostId> {
        self.record.placements.get(&vm.number?).map(|placement| placement.primary)
    }

    /// Whether the cluster could fail over: every VM has a backup, which has a copy of it.
    fn is_protected(&self) -> bool {
        let mut placements = self.record.placements.values();
        self.record.is_protected() && placements.all(|placement| placement.backup.is_some())
    }

    /// Whether the hosts with the copies hold their leases.
    fn is_backed(&self) -> bool {
        let mut backups = self.record.placements.values().map(|placement| placement.backup);
        self.is_protected()
            && backups.all(|backup| backup.is_some_and(|host| self.leases.contains(&host)))
    }

    /// Plans for a VM that obeys a lease of another host.
    fn plan_stray_vm(&self, name: &V, vm: LocalVm) -> Option<ReconcileAction<V>> {
        let ObservedVm::Runs { lease: Some(lease), .. } = vm.state else { return None };
        let (record, is_alone) = (self.record, self.is_primary_coordinator());
        match self.primary_of(vm) {
            Some(primary) if primary == self.me => None,
            // It runs here already, and its primary is about to propose that.
            Some(_) if is_alone && self.is_moving_here(vm, lease) => Some(ReconcileAction::Nothing),
            // The end of the generation ends it.
            None if record.is_ended() && is_alone => None,
            // A VM that was fenced before has to end, though the cluster has ended since.
            None if record.is_ended() && record.generation.0 == lease + 1 => {
                Some(ReconcileAction::Detach(name.clone()))
            }
            Some(primary) if self.mine.contains(&primary) && record.fence.is_empty() => {
                let may = is_alone || !self.is_backed();
                may.then_some(ReconcileAction::Adopt(primary)).or(Some(ReconcileAction::Nothing))
            }
            _ => Some(ReconcileAction::Fence(name.clone())),
        }
    }

    /// Whether a VM runs here as part of a planned move, in the generation that the move begins. As
    /// long as the record names this host as its backup, it has lost no output.
    fn is_moving_here(&self, vm: LocalVm, lease: u32) -> bool {
        let placement = vm.number.and_then(|number| self.record.placements.get(&number));
        let is_backup = placement.is_some_and(|placement| placement.backup == Some(self.me));
        is_backup && self.record.is_protected() && lease == self.record.generation.next().0
    }

    fn plan_copies(&self) -> Option<ReconcileAction<V>> {
        if !self.here.has_copies() {
            return None;
        }
        if let Some(before) = self.earlier_copy_holder() {
            return Some(ReconcileAction::AdoptCopies(before));
        }
        let is_ours = |host: HostId| host == self.me || self.mine.contains(&host);
        let mut placements = self.record.placements.values();
        let is_needed = placements
            .any(|placement| is_ours(placement.primary) || placement.backup.is_some_and(is_ours));
        (!is_needed).then_some(ReconcileAction::DropCopies)
    }

    /// Returns an earlier agent of this host that was to run all VMs, or has to.
    fn earlier_copy_holder(&self) -> Option<HostId> {
        let record = self.record;
        let mut placements = record.placements.values();
        let is_allowed = record.fence.is_empty() && !self.is_primary_coordinator();
        let first = *placements.next().filter(|_| is_allowed)?;
        let is_earlier = |host: &HostId| self.mine.contains(host);
        let runs = Some(first.primary).filter(is_earlier);
        if runs.is_some() && record.primaries().len() == 1 {
            return runs;
        }
        let keeps = first.backup.filter(is_earlier);
        let is_one = placements.all(|placement| placement.backup == keeps);
        let is_lost = !record.primaries().is_subset(self.leases);
        keeps.filter(|_| is_one && is_lost && self.is_protected())
    }

    fn plan_primary(&self) -> ReconcileAction<V> {
        let is_mine = |vm: &LocalVm| self.primary_of(*vm) == Some(self.me);
        let vms: Vec<(&V, ObservedVm)> = self
            .here
            .vms
            .iter()
            .filter(|(_, vm)| is_mine(vm))
            .map(|(v, vm)| (v, vm.state))
            .collect();
        if vms.is_empty() {
            return ReconcileAction::Nothing;
        }
        self.plan_panic(&vms)
            .or_else(|| self.plan_end(&vms))
            .or_else(|| self.plan_loss(&vms))
            .or_else(|| self.plan_backup(&vms))
            .unwrap_or_else(|| self.plan_unprotected(&vms))
    }

    /// The guest of a single VM would panic again.
    fn plan_panic(&self, vms: &[(&V, ObservedVm)]) -> Option<ReconcileAction<V>> {
        let has_panicked = |vm| matches!(vm, ObservedVm::Ended { has_panicked: true, .. });
        let is_kept = self.is_primary_coordinator() && self.is_protected();
        (is_kept && vms.iter().any(|(_, vm)| has_panicked(*vm))).then_some(ReconcileAction::Nothing)
    }

    /// Plans for VMs that the user or the guest has ended.
    fn plan_end(&self, vms: &[(&V, ObservedVm)]) -> Option<ReconcileAction<V>> {
        let (is_alone, is_protected) = (self.is_primary_coordinator(), self.is_protected());
        let is_left = |vm: ObservedVm| vm.has_left() || (is_alone && vm.is_over());
        let is_end = match is_alone || is_protected {
            true => vms.iter().any(|(_, vm)| is_left(*vm)),
            false => false,
        };
        let is_all = vms.len() == self.record.placements.len();
        let has_all_ended = is_all && !is_protected && vms.iter().all(|(_, vm)| vm.has_ended());
        (is_end || has_all_ended).then_some(ReconcileAction::EndRecord)
    }

    /// Plans for VMs that are lost here.
    fn plan_loss(&self, vms: &[(&V, ObservedVm)]) -> Option<ReconcileAction<V>> {
        let (is_alone, is_protected) = (self.is_primary_coordinator(), self.is_protected());
        let is_any = |is: &dyn Fn(ObservedVm) -> bool| vms.iter().any(|(_, vm)| is(*vm));
        let is_hung = |vm| matches!(vm, ObservedVm::Runs { is_hung: true, .. });
        let is_cut_off = |vm: ObservedVm| vm.runs() && !vm.is_replicated() && self.here.is_cut_off;
        let is_lost = is_protected
            && is_any(&|vm| vm.has_ended() || is_hung(vm) || (!is_alone && is_cut_off(vm)));
        match is_lost {
            // The copy of a single VM may be all that is left, even if its host is cut off.
            true if is_alone || self.is_backed() => Some(ReconcileAction::YieldLease),
            // Without the copies a failover has nothing to run from. The record loses its backup
            // first.
            true => Some(ReconcileAction::Nothing),
            false => is_any(&is_hung).then_some(ReconcileAction::Nothing),
        }
    }

    /// Keeps the backup in the record correct.
    fn plan_backup(&self, vms: &[(&V, ObservedVm)]) -> Option<ReconcileAction<V>> {
        let placements = &self.record.placements;
        if self.is_primary_coordinator() {
            let commits = vms.iter().find_map(|(_, vm)| vm.committed_backup());
            if let Some(host) = commits {
                let is_recorded =
                    placements.values().all(|placement| placement.backup == Some(host));
                let is_recorded = is_recorded && self.record.is_protected();
                let record = ReconcileAction::RecordBackup(Some(host));
                return Some(if is_recorded { ReconcileAction::Nothing } else { record });
            }
        } else if self.is_protected() {
            return Some(ReconcileAction::Nothing);
        }
        // Where epochs are sent, the host that receives them is about to be recorded. A standby is
        // about to run.
        let is_all = vms.len() == placements.len();
        let is_open = placements.values().all(|placement| placement.backup.is_none());
        let is_busy = |vm: ObservedVm| vm.is_replicated() || vm.is_standby();
        let is_clear = is_all && !is_open && !vms.iter().any(|(_, vm)| is_busy(*vm));
        is_clear.then_some(ReconcileAction::RecordBackup(None))
    }

    fn plan_unprotected(&self, vms: &[(&V, ObservedVm)]) -> ReconcileAction<V> {
        let placements = &self.record.placements;
        if placements.values().any(|placement| placement.backup.is_some()) {
            return ReconcileAction::Nothing;
        }
        let held = vms.iter().filter(|(_, vm)| vm.is_ready() && vm.is_held());
        let held: BTreeSet<V> = held.map(|(name, _)| (*name).clone()).collect();
        if !held.is_empty() {
            return ReconcileAction::ReleaseOutput(held);
        }
        // One host is enough to have the cluster protected again.
        let is_first =
            placements.values().next().is_some_and(|placement| placement.primary == self.me);
        match is_first && vms.iter().all(|(_, vm)| vm.is_ready()) {
            true => ReconcileAction::Protect,
            false => ReconcileAction::Nothing,
        }
    }
}

#[cfg(test)]
mod single_tests;
#[cfg(test)]
mod tests;
