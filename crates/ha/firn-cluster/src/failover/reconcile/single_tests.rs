//! The plan for a VM that is protected alone.

use std::collections::BTreeMap;

use super::*;
use crate::VmId;
use crate::failover::VmPlacement;

type Action = ReconcileAction<&'static str>;

const ME: HostId = HostId(4);
const OTHER: HostId = HostId(5);

fn record(primary: HostId, backup: Option<HostId>) -> FailoverRecord {
    let alone = VmPlacement { primary, backup: None };
    FailoverRecord::new(BTreeMap::from([(VmId(0), alone)])).with_backup(backup)
}

/// No plan depends on the lease of another host, nor on how long epochs were not sent.
fn due_at_me(record: &FailoverRecord, here: ObservedVm) -> Action {
    let (coordinator, number) = (Coordinator::Primary, record.placements.keys().next().copied());
    let vms = BTreeMap::from([("web", LocalVm { number, state: here })]);
    let mut here = ObservedCluster { coordinator, vms, is_kept: false, is_cut_off: false };
    let mine = [HostId(1), HostId(2)].into();
    let action = plan_action(ME, &mine, record, &BTreeSet::new(), &here);
    here.is_cut_off = true;
    assert_eq!(plan_action(ME, &mine, record, &[ME, OTHER].into(), &here), action);
    action
}

fn runs(backup: Option<HostId>, is_leased: bool, is_held: bool) -> ObservedVm {
    let (lease, is_protected) = (is_leased.then_some(0), backup.is_some());
    ObservedVm::Runs { lease, is_protected, backup, is_held, is_hung: false }
}

fn ended(shut_down: bool) -> ObservedVm {
    ObservedVm::Ended { shut_down, has_panicked: false }
}

fn standby(has_ended: bool) -> ObservedVm {
    ObservedVm::Standby { has_ended, is_over: false }
}

#[test]
fn a_primary_updates_the_record_and_keeps_its_vm_protected() {
    let (alone, backed) = (record(ME, None), record(ME, Some(OTHER)));
    assert_eq!(due_at_me(&backed, runs(Some(OTHER), true, true)), Action::Nothing);
    assert_eq!(due_at_me(&alone, runs(Some(OTHER), true, true)), Action::RecordBackup(Some(OTHER)));
    let other = runs(Some(HostId(9)), true, true);
    assert_eq!(due_at_me(&backed, other), Action::RecordBackup(Some(HostId(9))));
    // No output is released while the record names a host that may run the VM.
    assert_eq!(due_at_me(&backed, runs(None, true, true)), Action::RecordBackup(None));
    assert_eq!(due_at_me(&alone, runs(None, true, true)), Action::ReleaseOutput(["web"].into()));
    assert_eq!(due_at_me(&alone, runs(None, true, false)), Action::Protect);
    assert_eq!(due_at_me(&backed, runs(None, false, false)), Action::EndRecord, "it was released");
    assert_eq!(due_at_me(&backed, ObservedVm::Nothing), Action::EndRecord);
    assert_eq!(due_at_me(&backed, ended(true)), Action::EndRecord);
    assert_eq!(due_at_me(&backed, ended(false)), Action::YieldLease);
    assert_eq!(due_at_me(&alone, ended(false)), Action::EndRecord);
    assert_eq!(due_at_me(&backed, standby(true)), Action::Nothing);
}

#[test]
fn a_backup_is_not_given_up_for_a_vm_that_is_dying() {
    let backed = record(ME, Some(OTHER));
    let first = due_at_me(&backed, runs(None, true, true));
    assert!(!first.is_sure(&Action::Nothing) && !first.is_sure(&Action::Protect));
    assert!(first.is_sure(&first), "it still runs");
    let then = due_at_me(&backed, ended(false));
    assert_eq!(then, Action::YieldLease);
    assert!(then.is_sure(&first));
}

/// A hypervisor that does not answer has lost its VM; a guest that panicked has not, for the
/// backup has the panic or will have it.
#[test]
fn a_hung_vm_gives_up_its_lease_and_a_panicked_one_keeps_it() {
    let (alone, backed) = (record(ME, None), record(ME, Some(OTHER)));
    let hung = ObservedVm::Runs {
        lease: Some(0),
        is_protected: false,
        backup: None,
        is_held: true,
        is_hung: true,
    };
    assert_eq!(due_at_me(&backed, hung), Action::YieldLease);
    assert!(Action::YieldLease.is_sure(&Action::Nothing));
    assert_eq!(due_at_me(&alone, hung), Action::Nothing, "nobody else has a copy");
    assert_eq!(due_at_me(&record(OTHER, None), hung), Action::Fence("web"), "it runs there by now");
    let panicked = ObservedVm::Ended { shut_down: false, has_panicked: true };
    assert_eq!(due_at_me(&backed, panicked), Action::Nothing);
    assert_eq!(due_at_me(&alone, panicked), Action::EndRecord);
}

/// A VM that was stopped is run by no host, and its name is free.
#[test]
fn a_stopped_vm_leaves_no_record() {
    let over = ObservedVm::Standby { has_ended: true, is_over: true };
    assert_eq!(due_at_me(&record(ME, None), over), Action::EndRecord, "its host died as well");
    let ended = record(OTHER, Some(ME)).with_end();
    assert_eq!(due_at_me(&ended, over), Action::DropCopies);
    assert!(
        !Action::DropCopies.is_sure(&Action::Nothing)
            && Action::DropCopies.is_sure(&Action::DropCopies)
    );
    assert_eq!(due_at_me(&record(OTHER, Some(ME)), over), Action::Nothing, "its host ends it");
}

#[test]
fn a_vm_that_runs_elsewhere_is_ended_here() {
    for elsewhere in [record(OTHER, None), record(OTHER, Some(ME)), record(OTHER, Some(HostId(9)))]
    {
        assert_eq!(due_at_me(&elsewhere, runs(None, true, true)), Action::Fence("web"));
        assert_eq!(due_at_me(&elsewhere, runs(Some(OTHER), true, true)), Action::Fence("web"));
        assert_eq!(
            due_at_me(&elsewhere, runs(None, false, true)),
            Action::Nothing,
            "it is another one"
        );
    }
    assert_eq!(due_at_me(&record(OTHER, None).with_end(), runs(None, true, true)), Action::Nothing);
}

#[test]
fn a_standby_is_kept_while_the_record_names_it() {
    let has_ended = standby(true);
    for backup in [ME, HostId(1)] {
        assert_eq!(due_at_me(&record(OTHER, Some(backup)), has_ended), Action::Nothing);
    }
    assert_eq!(due_at_me(&record(OTHER, Some(HostId(9))), has_ended), Action::DropCopies);
    assert_eq!(due_at_me(&record(OTHER, None), standby(false)), Action::Nothing);
    assert_eq!(due_at_me(&record(OTHER, None).with_end(), standby(false)), Action::Nothing);
    assert_eq!(due_at_me(&record(OTHER, None).with_end(), has_ended), Action::DropCopies);
}

#[test]
fn an_agent_adopts_the_vms_of_its_predecessor_unless_fenced() {
    let mut before = record(HostId(2), Some(OTHER));
    assert_eq!(due_at_me(&before, runs(None, true, true)), Action::Adopt(HostId(2)));
    before.fence.insert(HostId(2));
    assert_eq!(due_at_me(&before, runs(None, true, true)), Action::Fence("web"));
    let mut fenced = record(ME, None);
    fenced.fence.insert(OTHER);
    assert_eq!(due_at_me(&fenced, runs(None, true, true)), Action::Nothing);
}

/// The backup runs the VM a moment before the record names it, in the next generation.
#[test]
fn a_vm_that_moves_here_runs_until_the_move_is_called_off() {
    let moving = |lease| ObservedVm::Runs {
        lease: Some(lease),
        is_protected: false,
        backup: None,
        is_held: false,
        is_hung: false,
    };
    let backed = record(OTHER, Some(ME));
    assert_eq!(due_at_me(&backed, moving(1)), Action::Nothing);
    assert_eq!(due_at_me(&backed, moving(0)), Action::Fence("web"), "of a generation that is over");
    assert_eq!(due_at_me(&backed, moving(2)), Action::Fence("web"));
    assert_eq!(due_at_me(&record(OTHER, None), moving(1)), Action::Fence("web"), "called off");
    let before = record(OTHER, Some(HostId(2)));
    assert_eq!(due_at_me(&before, moving(1)), Action::Fence("web"), "its agent was another one");
    let moved = backed.with_move(OTHER, ME).unwrap();
    assert_eq!(due_at_me(&moved, moving(1)), Action::Protect);
    assert_eq!(due_at_me(&moved.with_backup(None), moving(1)), Action::Protect);
}
