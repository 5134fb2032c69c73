//! Plans the next action of a host for one VM, from the VM's record and from what the host
//! observes. Pure.
//!
//! ```text
//! the record: the VM ...     observed here: the VM ...                planned
//!   runs here                  is sent to a backup, which is not        record the backup
//!                              in the record
//!                              is not sent, though the record has a     record that there is
//!                              backup, in two runs of the loop          no backup
//!                              is not sent, no backup recorded, its     release its output
//!                              output is buffered
//!                              is not sent, no backup recorded          protect it by another host
//!                              was released, stopped by its user, or    end the record
//!                              shut down
//!                              died                                     yield: request the lease
//!                                                                       no more: it expires
//!                              hangs                                    relinquish: the same; end
//!                                                                       it once it runs elsewhere
//!                              ended by a panic of its guest            nothing: the user may
//!                                                                       request a failover
//!   runs at an earlier agent   runs                                     adopt it
//!   of this host
//!   runs elsewhere             runs and obeys a lease                   end it
//!                              is a standby that receives nothing and   end the standby
//!                              that no record counts as a backup
//!   has no record any more     is a standby that receives nothing       end the standby
//!   runs here, after a         is a standby whose primary was stopped   end the record
//!   failover
//! ```

use std::collections::BTreeSet;

use firn_cluster::HostId;
use firn_membership::ClusterRecord;
use firn_supervisor::{PrimaryEnd, ProcessExit, VmStatus};

/// The state of a VM as this host observes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservedVm {
    /// The host has no such VM: its user has ended it.
    Nothing,
    /// It has ended. `shut_down`: by itself as intended, or by its user. `has_panicked`: by a panic
    /// of its guest.
    Ended { shut_down: bool, has_panicked: bool },
    /// It is a standby, whose epochs may have ended. `is_over`: its primary was stopped, released
    /// or shut down.
    Standby { has_ended: bool, is_over: bool },
    /// It runs. `backup`: the host that has committed epochs of it. `is_leased`: its output obeys a
    /// lease. `is_held`: its output is buffered, whatever the lease allows. `is_hung`: its
    /// hypervisor does not answer.
    Runs { backup: Option<HostId>, is_leased: bool, is_held: bool, is_hung: bool },
}

impl ObservedVm {
    /// From the status that its supervisor reports; `backup` is the host that its epochs go to.
    pub fn from_status(status: &VmStatus, backup: Option<HostId>) -> Self {
        let commits = status.protection.as_ref().is_some_and(|it| it.committed > 0);
        match (status.state.as_str(), &status.standby) {
            ("ended", _) => {
                let has_panicked = status.protection_end == Some(PrimaryEnd::Panicked);
                Self::Ended { shut_down: was_wanted(status), has_panicked }
            }
            (_, Some(standby)) => {
                let has_ended = standby.ended.is_some();
                Self::Standby { has_ended, is_over: standby.is_over() }
            }
            _ => Self::Runs {
                backup: backup.filter(|_| commits),
                is_leased: status.lease.is_some(),
                is_held: status.network.iter().any(|card| !card.open),
                is_hung: status.state == "hung",
            },
        }
    }
}

/// Whether a VM ended as its user or its guest intended. The end that its protection reports counts
/// more than an exit code: a host that shuts down ends its processes as politely as a guest does.
fn was_wanted(status: &VmStatus) -> bool {
    match &status.protection_end {
        Some(PrimaryEnd::Stopped | PrimaryEnd::ShutDown) => true,
        Some(PrimaryEnd::Lost(_) | PrimaryEnd::Panicked) => false,
        _ => status.exit == Some(ProcessExit::Code(0)),
    }
}

/// An action for one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmAction {
    /// Nothing.
    Nothing,
    /// Record its backup, or that it has none.
    RecordBackup(Option<HostId>),
    /// Release the buffered output.
    ReleaseOutput,
    /// Protect it.
    Protect,
    /// End the record.
    EndRecord,
    /// Stop to request its lease.
    YieldLease,
    /// Stop to request its lease in this generation, and continue to obey the record. A VM whose
    /// hypervisor does not answer is ended once it runs elsewhere.
    RelinquishLease,
    /// Record that this agent manages the VM, in place of an earlier agent.
    Adopt(HostId),
    /// End the VM: it runs elsewhere.
    Fence,
    /// End the standby.
    EndStandby,
}

/// Plans the action of host `me`, whose earlier agents had the numbers `mine`.
pub fn plan_action(
    me: HostId,
    mine: &BTreeSet<HostId>,
    record: &ClusterRecord,
    here: ObservedVm,
) -> VmAction {
    let register = &record.register;
    let Some(place) = register.places.values().next() else { return plan_after_end(here) };
    let is_ours = |host| host == me || mine.contains(&host);
    let is_backed = place.backup.is_some() && register.is_protected();
    match here {
        _ if place.primary == me && !register.fence.is_empty() => VmAction::Nothing,
        ObservedVm::Nothing if place.primary == me => VmAction::EndRecord,
        ObservedVm::Ended { shut_down, has_panicked } if place.primary == me => match is_backed {
            true if has_panicked => VmAction::Nothing,
            true if !shut_down => VmAction::YieldLease,
            _ => VmAction::EndRecord,
        },
        ObservedVm::Standby { is_over: true, .. } if place.primary == me => VmAction::EndRecord,
        ObservedVm::Runs { is_hung: true, is_leased: true, .. } if place.primary == me => {
            if is_backed {
                VmAction::RelinquishLease
            } else {
                VmAction::Nothing
            }
        }
        ObservedVm::Runs { backup, is_leased, is_held, .. } if place.primary == me => {
            match backup {
                Some(_) if place.backup == backup && register.is_protected() => VmAction::Nothing,
                Some(_) => VmAction::RecordBackup(backup),
                None if !is_leased => VmAction::EndRecord,
                None if place.backup.is_some() => VmAction::RecordBackup(None),
                None if is_held => VmAction::ReleaseOutput,
                None => VmAction::Protect,
            }
        }
        ObservedVm::Runs { is_leased: true, .. } => {
            let may = mine.contains(&place.primary) && register.fence.is_empty();
            if may { VmAction::Adopt(place.primary) } else { VmAction::Fence }
        }
        ObservedVm::Standby { has_ended: true, .. } if !is_ours(place.primary) => {
            let counts = place.backup.is_some_and(is_ours);
            if counts { VmAction::Nothing } else { VmAction::EndStandby }
        }
        _ => VmAction::Nothing,
    }
}

/// A VM whose record has ended: no host runs it under a record. It was stopped, or runs without a
/// lease.
fn plan_after_end(here: ObservedVm) -> VmAction {
    match here {
        ObservedVm::Standby { has_ended: true, .. } => VmAction::EndStandby,
        _ => VmAction::Nothing,
    }
}

/// Whether the action may be performed now, or only if the next run plans it again. To record that
/// a VM has no backup gives up what the backup has, and the stream of a VM whose hypervisor has
/// just died ends a moment before this host knows why. A standby may have been replaced by another
/// one between the read of the record and the read of its status.
pub fn is_sure(action: VmAction, before: Option<VmAction>) -> bool {
    !matches!(action, VmAction::RecordBackup(None) | VmAction::EndStandby) || before == Some(action)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use firn_cluster::VmId;
    use firn_cluster::failover::{FailoverRecord, VmPlacement};

    use super::*;

    const ME: HostId = HostId(4);
    const OTHER: HostId = HostId(5);

    fn record(primary: HostId, backup: Option<HostId>) -> ClusterRecord {
        let alone = VmPlacement { primary, backup: None };
        let register = FailoverRecord::new(BTreeMap::from([(VmId(0), alone)])).with_backup(backup);
        ClusterRecord { register, vms: BTreeMap::from([(VmId(0), "web".to_owned())]) }
    }

    fn due_at_me(record: &ClusterRecord, here: ObservedVm) -> VmAction {
        plan_action(ME, &[HostId(1), HostId(2)].into(), record, here)
    }

    fn runs(backup: Option<HostId>, is_leased: bool, is_held: bool) -> ObservedVm {
        ObservedVm::Runs { backup, is_leased, is_held, is_hung: false }
    }

    fn ended(shut_down: bool) -> ObservedVm {
        ObservedVm::Ended { shut_down, has_panicked: false }
    }

    fn standby(has_ended: bool) -> ObservedVm {
        ObservedVm::Standby { has_ended, is_over: false }
    }

    #[test]
    fn a_primary_keeps_the_record_true_and_its_vm_protected() {
        let (alone, backed) = (record(ME, None), record(ME, Some(OTHER)));
        assert_eq!(due_at_me(&backed, runs(Some(OTHER), true, true)), VmAction::Nothing);
        assert_eq!(
            due_at_me(&alone, runs(Some(OTHER), true, true)),
            VmAction::RecordBackup(Some(OTHER))
        );
        let other = runs(Some(HostId(9)), true, true);
        assert_eq!(due_at_me(&backed, other), VmAction::RecordBackup(Some(HostId(9))));
        // No output is released while the record names a host that may run the VM.
        assert_eq!(due_at_me(&backed, runs(None, true, true)), VmAction::RecordBackup(None));
        assert_eq!(due_at_me(&alone, runs(None, true, true)), VmAction::ReleaseOutput);
        assert_eq!(due_at_me(&alone, runs(None, true, false)), VmAction::Protect);
        assert_eq!(
            due_at_me(&backed, runs(None, false, false)),
            VmAction::EndRecord,
            "it was released"
        );
        assert_eq!(due_at_me(&backed, ObservedVm::Nothing), VmAction::EndRecord);
        assert_eq!(due_at_me(&backed, ended(true)), VmAction::EndRecord);
        assert_eq!(due_at_me(&backed, ended(false)), VmAction::YieldLease);
        assert_eq!(due_at_me(&alone, ended(false)), VmAction::EndRecord);
        assert_eq!(due_at_me(&backed, standby(true)), VmAction::Nothing);
    }

    #[test]
    fn a_backup_is_not_given_up_for_a_vm_that_is_dying() {
        let backed = record(ME, Some(OTHER));
        let first = due_at_me(&backed, runs(None, true, true));
        assert!(!is_sure(first, None) && !is_sure(first, Some(VmAction::Nothing)));
        assert!(is_sure(first, Some(first)), "it still runs");
        let then = due_at_me(&backed, ended(false));
        assert_eq!(then, VmAction::YieldLease);
        assert!(is_sure(then, Some(first)));
    }

    /// A hypervisor that does not answer has lost its VM; a guest that panicked has not, for the
    /// backup has the panic or will have it.
    #[test]
    fn a_hung_vm_gives_up_its_lease_and_a_panicked_one_keeps_it() {
        let (alone, backed) = (record(ME, None), record(ME, Some(OTHER)));
        let hung = ObservedVm::Runs { backup: None, is_leased: true, is_held: true, is_hung: true };
        assert_eq!(due_at_me(&backed, hung), VmAction::RelinquishLease);
        assert!(is_sure(VmAction::RelinquishLease, None));
        assert_eq!(due_at_me(&alone, hung), VmAction::Nothing, "nobody else has a copy");
        assert_eq!(due_at_me(&record(OTHER, None), hung), VmAction::Fence, "it runs there by now");
        let panicked = ObservedVm::Ended { shut_down: false, has_panicked: true };
        assert_eq!(due_at_me(&backed, panicked), VmAction::Nothing);
        assert_eq!(due_at_me(&alone, panicked), VmAction::EndRecord);
    }

    /// A VM that was stopped is run by no host, and its name is free.
    #[test]
    fn what_was_stopped_leaves_nothing_behind() {
        let over = ObservedVm::Standby { has_ended: true, is_over: true };
        assert_eq!(
            due_at_me(&record(ME, None), over),
            VmAction::EndRecord,
            "its host died as well"
        );
        let ended = record(OTHER, Some(ME)).to_ended();
        assert_eq!(due_at_me(&ended, over), VmAction::EndStandby);
        assert!(
            !is_sure(VmAction::EndStandby, None)
                && is_sure(VmAction::EndStandby, Some(VmAction::EndStandby))
        );
        assert_eq!(
            due_at_me(&record(OTHER, Some(ME)), over),
            VmAction::Nothing,
            "its host ends it"
        );
    }

    #[test]
    fn what_runs_elsewhere_does_not_run_here() {
        for elsewhere in
            [record(OTHER, None), record(OTHER, Some(ME)), record(OTHER, Some(HostId(9)))]
        {
            assert_eq!(due_at_me(&elsewhere, runs(None, true, true)), VmAction::Fence);
            assert_eq!(due_at_me(&elsewhere, runs(Some(OTHER), true, true)), VmAction::Fence);
            assert_eq!(
                due_at_me(&elsewhere, runs(None, false, true)),
                VmAction::Nothing,
                "it is another one"
            );
        }
        assert_eq!(
            due_at_me(&record(OTHER, None).to_ended(), runs(None, true, true)),
            VmAction::Nothing
        );
    }

    #[test]
    fn a_standby_is_kept_while_somebody_counts_on_it() {
        let has_ended = standby(true);
        for backup in [ME, HostId(1)] {
            assert_eq!(due_at_me(&record(OTHER, Some(backup)), has_ended), VmAction::Nothing);
        }
        assert_eq!(due_at_me(&record(OTHER, Some(HostId(9))), has_ended), VmAction::EndStandby);
        assert_eq!(due_at_me(&record(OTHER, None), standby(false)), VmAction::Nothing);
        assert_eq!(due_at_me(&record(OTHER, None).to_ended(), standby(false)), VmAction::Nothing);
        assert_eq!(due_at_me(&record(OTHER, None).to_ended(), has_ended), VmAction::EndStandby);
    }

    #[test]
    fn an_agent_takes_up_what_its_predecessor_ran_unless_it_was_fenced() {
        let mut before = record(HostId(2), Some(OTHER));
        assert_eq!(due_at_me(&before, runs(None, true, true)), VmAction::Adopt(HostId(2)));
        before.register.fence.insert(HostId(2));
        assert_eq!(due_at_me(&before, runs(None, true, true)), VmAction::Fence);
        let mut fenced = record(ME, None);
        fenced.register.fence.insert(OTHER);
        assert_eq!(due_at_me(&fenced, runs(None, true, true)), VmAction::Nothing);
    }
}
