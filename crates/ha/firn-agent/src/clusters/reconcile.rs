//! Plans the next action of a host for a cluster of several VMs, from the cluster's record and from
//! what the host observes. Pure.
//!
//! ```text
//!   the record                           observed here                   planned
//!     a VM runs here, the cluster has      it died, or is not              yield: all fail over
//!     copies of all VMs                    protected any more
//!                                          it was ended by its user,       end the record
//!                                          shut down, or released
//!     a VM runs here, no VM has a backup   its output is buffered          release its output
//!                                          all VMs are gone                end the record
//!                                          they run, the cluster's first   protect them by another
//!                                          VM among them                   host
//!     all run here, a backup is named      it has no copies yet            record that there is
//!                                                                          none
//!     a VM runs at an earlier agent        it runs                         adopt it, if no host
//!     of this host                                                         has copies
//!     a VM runs elsewhere                  it runs and obeys a lease       end it
//!     the cluster has ended                it runs, in the generation      detach it
//!                                          before the end
//!     other hosts have the copies          copies of an earlier            drop them
//!                                          generation
//!     an earlier agent of this host has    the copies                      record that this agent
//!     the copies, and a VM is lost, or                                     has them
//!     is to run from them
//! ```
//!
//! While the record names backups for all VMs, no VM's output is released alone, and no restarted
//! agent adopts a VM alone: without the copy of that VM the copies of the others are of no use. So
//! whatever happens to one VM happens to the cluster.
//!
//! Copies outlive the agent of their host, and the stored cluster has the checkpoint. While the
//! record names an earlier agent as the holder of the copies, no host has released output that a
//! failover to them would undo. But without the agent no more epochs arrive: so where all VMs still
//! run, they continue, and are protected anew.

use std::collections::{BTreeMap, BTreeSet};

use firn_cluster::HostId;
use firn_membership::ClusterRecord;
use firn_supervisor::{ProcessExit, VmName, VmStatus};

/// The state of one VM of the cluster, as this host observes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservedMember {
    /// The host has no such VM: its user has ended it.
    Nothing,
    /// It has ended. `shut_down`: by itself as intended, or by its user.
    Ended { shut_down: bool },
    /// It is a standby.
    Standby,
    /// It runs. `lease`: the generation of the lease that its output obeys. `is_protected`: its
    /// epochs are sent. `is_held`: its output is buffered, whatever the lease allows.
    Runs { lease: Option<u32>, is_protected: bool, is_held: bool },
}

impl ObservedMember {
    /// From the status that its supervisor reports.
    pub fn from_status(status: &VmStatus) -> Self {
        match (status.state.as_str(), &status.standby) {
            ("ended", _) => {
                let shut_down =
                    matches!(status.exit, Some(ProcessExit::Code(0) | ProcessExit::Stopped));
                Self::Ended { shut_down }
            }
            (_, Some(_)) => Self::Standby,
            _ => Self::Runs {
                lease: status.lease,
                is_protected: status.protection.is_some(),
                is_held: status.network.iter().any(|card| !card.open),
            },
        }
    }
}

/// The state of a cluster, as this host observes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedCluster {
    /// VMs that belong to the cluster.
    pub vms: BTreeMap<VmName, ObservedMember>,
    /// Whether this host has copies from which the whole cluster could run.
    pub is_kept: bool,
    /// Whether the hosts with the copies are alive, though for a while they have not received the
    /// epochs of a VM that runs here. At first the loss of those hosts would look the same.
    pub is_cut_off: bool,
}

impl ObservedCluster {
    /// Whether a VM runs here whose epochs are not sent.
    pub fn is_unprotected(&self) -> bool {
        let is = |vm: &ObservedMember| {
            matches!(vm, ObservedMember::Runs { lease: Some(_), is_protected: false, .. })
        };
        self.vms.values().any(is)
    }
}

/// An action for a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ClusterAction {
    /// Nothing.
    #[default]
    Nothing,
    /// Record that there is no backup.
    ClearBackup,
    /// Release the buffered output of these VMs.
    ReleaseOutput(BTreeSet<VmName>),
    /// Protect the cluster by a host that runs none of its VMs.
    Protect,
    /// End the record.
    EndRecord,
    /// Stop to request the lease, until the record has another generation.
    YieldLease,
    /// Record that this agent manages the VMs of that earlier agent.
    Adopt(HostId),
    /// Record that this agent has the copies of that earlier agent.
    AdoptCopies(HostId),
    /// End the VM: it runs elsewhere.
    Fence(VmName),
    /// The cluster has ended: the VM continues by itself.
    Detach(VmName),
    /// Drop the copies, which are of no use any more.
    DropCopies,
}

/// Plans the action of host `me`, whose earlier agents had the numbers `mine`. `leases` are the
/// hosts whose leases have not expired.
pub fn plan_action(
    me: HostId,
    mine: &BTreeSet<HostId>,
    record: &ClusterRecord,
    leases: &BTreeSet<HostId>,
    here: &ObservedCluster,
) -> ClusterAction {
    let look = ReconcileContext { me, mine, record, leases, here };
    if look.runs_at(me) && !record.register.fence.is_empty() {
        return ClusterAction::Nothing;
    }
    let stray = here.vms.iter().find_map(|(name, vm)| look.plan_stray_vm(name, *vm));
    stray.or_else(|| look.plan_copies()).unwrap_or_else(|| look.plan_primary())
}

struct ReconcileContext<'a> {
    me: HostId,
    mine: &'a BTreeSet<HostId>,
    record: &'a ClusterRecord,
    leases: &'a BTreeSet<HostId>,
    here: &'a ObservedCluster,
}

impl ReconcileContext<'_> {
    /// Whether a VM of the cluster runs at that host.
    fn runs_at(&self, host: HostId) -> bool {
        self.record.register.primaries().contains(&host)
    }

    /// The host that runs the VM of that name.
    fn primary_of(&self, name: &VmName) -> Option<HostId> {
        let (vm, _) = self.record.vms.iter().find(|(_, it)| *it == name.as_str())?;
        self.record.register.places.get(vm).map(|place| place.primary)
    }

    /// Whether the cluster could fail over: every VM has a backup.
    fn is_protected(&self) -> bool {
        let register = &self.record.register;
        register.is_protected() && register.places.values().all(|place| place.backup.is_some())
    }

    /// Whether the hosts with the copies hold their leases.
    fn is_backed(&self) -> bool {
        let mut backups = self.record.register.places.values().map(|place| place.backup);
        self.is_protected()
            && backups.all(|backup| backup.is_some_and(|host| self.leases.contains(&host)))
    }

    /// Plans for a VM that obeys a lease of another host.
    fn plan_stray_vm(&self, name: &VmName, vm: ObservedMember) -> Option<ClusterAction> {
        let ObservedMember::Runs { lease: Some(lease), .. } = vm else { return None };
        let register = &self.record.register;
        match self.primary_of(name) {
            Some(primary) if primary == self.me => None,
            // A VM that was fenced before has to end, though the cluster has ended since.
            None if register.is_ended() && register.generation.0 == lease + 1 => {
                Some(ClusterAction::Detach(name.clone()))
            }
            Some(primary) if self.mine.contains(&primary) && register.fence.is_empty() => {
                let may = !self.is_backed();
                may.then_some(ClusterAction::Adopt(primary)).or(Some(ClusterAction::Nothing))
            }
            _ => Some(ClusterAction::Fence(name.clone())),
        }
    }

    fn plan_copies(&self) -> Option<ClusterAction> {
        if let Some(before) = self.earlier_copy_holder().filter(|_| self.here.is_kept) {
            return Some(ClusterAction::AdoptCopies(before));
        }
        let is_ours = |host: HostId| host == self.me || self.mine.contains(&host);
        let places = &self.record.register.places;
        let is_needed = places
            .values()
            .any(|place| is_ours(place.primary) || place.backup.is_some_and(is_ours));
        (self.here.is_kept && !is_needed).then_some(ClusterAction::DropCopies)
    }

    /// Returns an earlier agent of this host that was to run all VMs, or has to.
    fn earlier_copy_holder(&self) -> Option<HostId> {
        let register = &self.record.register;
        let mut places = register.places.values();
        let first = *places.next().filter(|_| register.fence.is_empty())?;
        let is_all = |host: &HostId| self.mine.contains(host);
        let runs = Some(first.primary).filter(is_all);
        if runs.is_some() && register.primaries().len() == 1 {
            return runs;
        }
        let keeps = first.backup.filter(is_all);
        let is_one = places.all(|place| place.backup == keeps);
        let is_lost = !register.primaries().is_subset(self.leases);
        keeps.filter(|_| is_one && is_lost && self.is_protected())
    }

    fn plan_primary(&self) -> ClusterAction {
        let is_mine = |name: &&VmName| self.primary_of(name) == Some(self.me);
        let vms = self.here.vms.iter().filter(|(name, _)| is_mine(name));
        let vms: Vec<(&VmName, ObservedMember)> = vms.map(|(name, vm)| (name, *vm)).collect();
        let register = &self.record.register;
        let is_all = vms.len() == register.places.len();
        match vms.is_empty() {
            true => ClusterAction::Nothing,
            false if self.is_protected() => self.plan_protected(&vms),
            false if is_all && vms.iter().all(|(_, vm)| has_ended(*vm)) => ClusterAction::EndRecord,
            // Where epochs are sent, the host that receives them is about to record itself.
            false
                if is_all
                    && self.names_backup()
                    && !vms.iter().any(|(_, vm)| is_replicated(*vm)) =>
            {
                ClusterAction::ClearBackup
            }
            false => self.plan_unprotected(&vms),
        }
    }

    /// Whether a host is named as the backup of a VM.
    fn names_backup(&self) -> bool {
        self.record.register.places.values().any(|place| place.backup.is_some())
    }

    fn plan_protected(&self, vms: &[(&VmName, ObservedMember)]) -> ClusterAction {
        let is_left = |vm: &ObservedMember| match vm {
            ObservedMember::Nothing | ObservedMember::Ended { shut_down: true } => true,
            ObservedMember::Runs { lease, .. } => lease.is_none(),
            _ => false,
        };
        let is_lost = |vm: &ObservedMember| match vm {
            ObservedMember::Ended { .. } => true,
            ObservedMember::Runs { is_protected, .. } => !is_protected && self.here.is_cut_off,
            _ => false,
        };
        if vms.iter().any(|(_, vm)| is_left(vm)) {
            return ClusterAction::EndRecord;
        }
        // Without the copies a failover has nothing to run from. The record loses its backup first.
        match vms.iter().any(|(_, vm)| is_lost(vm)) && self.is_backed() {
            true => ClusterAction::YieldLease,
            false => ClusterAction::Nothing,
        }
    }

    fn plan_unprotected(&self, vms: &[(&VmName, ObservedMember)]) -> ClusterAction {
        let is_open = self.record.register.places.values().all(|place| place.backup.is_none());
        let is_held = |vm: &ObservedMember| {
            matches!(
                vm,
                ObservedMember::Runs { lease: Some(_), is_protected: false, is_held: true }
            )
        };
        let held = vms.iter().filter(|(_, vm)| is_open && is_held(vm));
        let held: BTreeSet<VmName> = held.map(|(name, _)| (*name).clone()).collect();
        if !held.is_empty() {
            return ClusterAction::ReleaseOutput(held);
        }
        // One host is enough to have the cluster protected again.
        let places = &self.record.register.places;
        let is_first = places.values().next().is_some_and(|place| place.primary == self.me);
        let is_ready = |vm: &ObservedMember| {
            matches!(vm, ObservedMember::Runs { lease: Some(_), is_protected: false, .. })
        };
        match is_open && is_first && vms.iter().all(|(_, vm)| is_ready(vm)) {
            true => ClusterAction::Protect,
            false => ClusterAction::Nothing,
        }
    }
}

fn has_ended(vm: ObservedMember) -> bool {
    matches!(vm, ObservedMember::Nothing | ObservedMember::Ended { .. })
}

fn is_replicated(vm: ObservedMember) -> bool {
    matches!(vm, ObservedMember::Runs { is_protected: true, .. })
}

#[cfg(test)]
mod tests {
    use firn_cluster::failover::{FailoverRecord, VmPlacement};

    use super::*;

    const ME: HostId = HostId(4);
    const OTHER: HostId = HostId(5);
    const BACKUP: HostId = HostId(6);
    const RUNS: ObservedMember =
        ObservedMember::Runs { lease: Some(0), is_protected: true, is_held: true };
    const HELD: ObservedMember =
        ObservedMember::Runs { lease: Some(0), is_protected: false, is_held: true };
    const OPEN: ObservedMember =
        ObservedMember::Runs { lease: Some(0), is_protected: false, is_held: false };
    const RELEASED: ObservedMember =
        ObservedMember::Runs { lease: None, is_protected: false, is_held: false };
    const DIED: ObservedMember = ObservedMember::Ended { shut_down: false };

    fn name(name: &str) -> VmName {
        VmName::new(name).unwrap()
    }

    /// `web` at one host, `db` at another.
    fn record(web: HostId, db: HostId, backup: Option<HostId>) -> ClusterRecord {
        let place = |primary| VmPlacement { primary, backup: None };
        let numbers = [0, 1].map(firn_cluster::VmId);
        let register = FailoverRecord::new(numbers.into_iter().zip([web, db].map(place)).collect());
        let vms = numbers.into_iter().zip(["web", "db"].map(str::to_owned)).collect();
        ClusterRecord { register: register.with_backup(backup), vms }
    }

    fn here(vms: &[(&str, ObservedMember)], is_kept: bool) -> ObservedCluster {
        let vms = vms.iter().map(|(vm, it)| (name(vm), *it)).collect();
        ObservedCluster { vms, is_kept, is_cut_off: true }
    }

    fn due_with(
        record: &ClusterRecord,
        leases: &[HostId],
        vms: &[(&str, ObservedMember)],
        is_kept: bool,
    ) -> ClusterAction {
        let leases = leases.iter().copied().collect();
        plan_action(ME, &[HostId(1)].into(), record, &leases, &here(vms, is_kept))
    }

    fn due_of(record: &ClusterRecord, web: ObservedMember) -> ClusterAction {
        due_with(record, &[ME, OTHER, BACKUP], &[("web", web)], false)
    }

    #[test]
    fn what_happens_to_one_happens_to_all() {
        let backed = record(ME, OTHER, Some(BACKUP));
        assert_eq!(due_of(&backed, RUNS), ClusterAction::Nothing);
        for lost in [DIED, HELD, OPEN] {
            assert_eq!(due_of(&backed, lost), ClusterAction::YieldLease);
            let alone = due_with(&backed, &[ME, OTHER], &[("web", lost)], false);
            assert_eq!(alone, ClusterAction::Nothing, "nobody is there to run them");
        }
        for (lost, deed) in [(HELD, ClusterAction::Nothing), (DIED, ClusterAction::YieldLease)] {
            let at_once = ObservedCluster { is_cut_off: false, ..here(&[("web", lost)], false) };
            let leases = [ME, OTHER, BACKUP].into();
            assert_eq!(plan_action(ME, &BTreeSet::new(), &backed, &leases, &at_once), deed);
        }
        for left in [ObservedMember::Nothing, ObservedMember::Ended { shut_down: true }, RELEASED] {
            assert_eq!(due_of(&backed, left), ClusterAction::EndRecord);
        }
    }

    #[test]
    fn nothing_is_let_out_while_somebody_could_go_back() {
        assert_eq!(due_of(&record(ME, OTHER, Some(BACKUP)), HELD), ClusterAction::YieldLease);
        let alone = record(ME, OTHER, None);
        assert_eq!(due_of(&alone, HELD), ClusterAction::ReleaseOutput([name("web")].into()));
        assert_eq!(due_of(&alone, RUNS), ClusterAction::Nothing, "it is being protected");
        assert_eq!(due_of(&alone, OPEN), ClusterAction::Protect);
        assert_eq!(due_of(&alone, RELEASED), ClusterAction::Nothing);
        let second = due_with(&record(OTHER, ME, None), &[ME, OTHER], &[("db", OPEN)], false);
        assert_eq!(second, ClusterAction::Nothing, "the host of the first sees to that");
        let mut named = alone;
        named.register.places.values_mut().for_each(|place| place.backup = Some(BACKUP));
        named.register.layout += 1;
        assert_eq!(due_of(&named, HELD), ClusterAction::Nothing);
    }

    #[test]
    fn where_all_run_after_a_failover() {
        let mut all = record(ME, ME, None);
        let both = [("web", OPEN), ("db", OPEN)];
        assert_eq!(due_with(&all, &[ME], &both, true), ClusterAction::Protect);
        let one = [("web", ObservedMember::Nothing), ("db", OPEN)];
        assert_eq!(due_with(&all, &[ME], &one, true), ClusterAction::Nothing);
        let none = [("web", ObservedMember::Nothing), ("db", DIED)];
        assert_eq!(due_with(&all, &[ME], &none, true), ClusterAction::EndRecord);
        // The controller has chosen a backup, which has no copies yet.
        all.register.places.values_mut().for_each(|place| place.backup = Some(OTHER));
        all.register.layout += 1;
        assert_eq!(due_with(&all, &[ME, OTHER], &both, true), ClusterAction::ClearBackup);
        let sent = [("web", RUNS), ("db", RUNS)];
        assert_eq!(
            due_with(&all, &[ME, OTHER], &sent, true),
            ClusterAction::Nothing,
            "it has copies"
        );
        all.register.fence.insert(OTHER);
        assert_eq!(due_with(&all, &[ME, OTHER], &both, true), ClusterAction::Nothing);
    }

    #[test]
    fn what_runs_elsewhere_does_not_run_here() {
        let elsewhere = record(BACKUP, BACKUP, None);
        assert_eq!(due_of(&elsewhere, HELD), ClusterAction::Fence(name("web")));
        assert_eq!(due_of(&elsewhere, RELEASED), ClusterAction::Nothing, "it is another one");
        assert_eq!(due_of(&elsewhere, DIED), ClusterAction::Nothing);
        let ended = record(ME, OTHER, Some(BACKUP)).to_ended();
        assert_eq!(due_of(&ended, HELD), ClusterAction::Detach(name("web")));
        // It slept through a failover, and the cluster that failed over has ended.
        let later = record(ME, OTHER, Some(BACKUP)).to_ended().to_ended();
        assert_eq!(due_of(&later, HELD), ClusterAction::Fence(name("web")));
    }

    #[test]
    fn an_agent_takes_up_what_nobody_else_can_run() {
        let earlier = HostId(1);
        let backed = record(earlier, OTHER, Some(BACKUP));
        assert_eq!(due_of(&backed, HELD), ClusterAction::Nothing, "all are about to go back");
        let leases = [ME, OTHER];
        let alone = due_with(&backed, &leases, &[("web", HELD)], false);
        assert_eq!(alone, ClusterAction::Adopt(earlier));
        assert_eq!(due_of(&record(earlier, OTHER, None), OPEN), ClusterAction::Adopt(earlier));
        let mut fenced = backed;
        fenced.register.fence.insert(earlier);
        assert_eq!(due_of(&fenced, HELD), ClusterAction::Fence(name("web")));
    }

    #[test]
    fn copies_outlive_the_agent_of_their_host() {
        let earlier = HostId(1);
        let standbys = [("web", ObservedMember::Standby), ("db", ObservedMember::Standby)];
        let kept = record(OTHER, BACKUP, Some(earlier));
        let due =
            |record: &ClusterRecord, leases: &[HostId]| due_with(record, leases, &standbys, true);
        assert_eq!(
            due(&kept, &[OTHER, BACKUP]),
            ClusterAction::Nothing,
            "they go on where they are"
        );
        assert_eq!(due(&kept, &[OTHER]), ClusterAction::AdoptCopies(earlier));
        let mut to_run = record(earlier, earlier, None);
        assert_eq!(due(&to_run, &[]), ClusterAction::AdoptCopies(earlier));
        to_run.register.fence.insert(OTHER);
        assert_eq!(due(&to_run, &[]), ClusterAction::Nothing);
        let open = record(OTHER, BACKUP, None);
        assert_eq!(due(&open, &[OTHER]), ClusterAction::DropCopies, "what they hold has left");
        let inherited = kept.register.with_inheriting_host(earlier, ME);
        let mine = ClusterRecord { register: inherited, ..kept };
        assert!(mine.register.is_protected() && mine.check_rules().is_ok());
        assert_eq!(due(&mine, &[ME, OTHER]), ClusterAction::Nothing, "the controller sees to that");
    }

    #[test]
    fn copies_are_kept_while_somebody_counts_on_them() {
        let standbys = [("web", ObservedMember::Standby), ("db", ObservedMember::Standby)];
        let due = |record: &ClusterRecord| due_with(record, &[OTHER], &standbys, true);
        for backup in [ME, HostId(1)] {
            assert_eq!(due(&record(OTHER, OTHER, Some(backup))), ClusterAction::Nothing);
        }
        assert_eq!(due(&record(ME, ME, None)), ClusterAction::Nothing, "they are about to run");
        assert_eq!(due(&record(OTHER, OTHER, Some(BACKUP))), ClusterAction::DropCopies);
        assert_eq!(due(&record(OTHER, OTHER, None)), ClusterAction::DropCopies);
        assert_eq!(due(&record(OTHER, OTHER, None).to_ended()), ClusterAction::DropCopies);
        let none = due_with(&record(OTHER, OTHER, None), &[OTHER], &standbys, false);
        assert_eq!(none, ClusterAction::Nothing);
    }
}
