//! The plan for a cluster of several VMs.

use std::collections::BTreeMap;

use super::*;
use crate::VmId;
use crate::failover::VmPlacement;

type Action = ReconcileAction<&'static str>;

const ME: HostId = HostId(4);
const OTHER: HostId = HostId(5);
const BACKUP: HostId = HostId(6);
const RUNS: ObservedVm = runs(Some(0), true, true);
const HELD: ObservedVm = runs(Some(0), false, true);
const OPEN: ObservedVm = runs(Some(0), false, false);
const RELEASED: ObservedVm = runs(None, false, false);
const DIED: ObservedVm = ObservedVm::Ended { shut_down: false, has_panicked: false };

const STANDBY: ObservedVm = ObservedVm::Standby { has_ended: true, is_over: false };

const fn runs(lease: Option<u32>, is_protected: bool, is_held: bool) -> ObservedVm {
    ObservedVm::Runs { lease, is_protected, backup: None, is_held, is_hung: false }
}

/// `web` at one host, `db` at another.
fn record(web: HostId, db: HostId, backup: Option<HostId>) -> FailoverRecord {
    let placement = |primary| VmPlacement { primary, backup: None };
    let placements = [(VmId(0), placement(web)), (VmId(1), placement(db))];
    FailoverRecord::new(placements.into()).with_backup(backup)
}

fn observe(
    record: &FailoverRecord,
    vms: &[(&'static str, ObservedVm)],
    is_kept: bool,
) -> ObservedCluster<&'static str> {
    let number = |vm| Some(VmId(if vm == "web" { 0 } else { 1 })).filter(|_| !record.is_ended());
    let vms = vms.iter().map(|(vm, state)| (*vm, LocalVm { number: number(*vm), state: *state }));
    let (coordinator, vms) = (Coordinator::Backup, vms.collect::<BTreeMap<_, _>>());
    ObservedCluster { coordinator, vms, is_kept, is_cut_off: true }
}

fn due_with(
    record: &FailoverRecord,
    leases: &[HostId],
    vms: &[(&'static str, ObservedVm)],
    is_kept: bool,
) -> Action {
    let leases = leases.iter().copied().collect();
    plan_action(ME, &[HostId(1)].into(), record, &leases, &observe(record, vms, is_kept))
}

fn due_of(record: &FailoverRecord, web: ObservedVm) -> Action {
    due_with(record, &[ME, OTHER, BACKUP], &[("web", web)], false)
}

#[test]
fn all_vms_of_a_cluster_fail_over_together() {
    let backed = record(ME, OTHER, Some(BACKUP));
    assert_eq!(due_of(&backed, RUNS), Action::Nothing);
    for lost in [DIED, HELD, OPEN] {
        assert_eq!(due_of(&backed, lost), Action::YieldLease);
        let alone = due_with(&backed, &[ME, OTHER], &[("web", lost)], false);
        assert_eq!(alone, Action::Nothing, "nobody is there to run them");
    }
    for (lost, deed) in [(HELD, Action::Nothing), (DIED, Action::YieldLease)] {
        let at_once =
            ObservedCluster { is_cut_off: false, ..observe(&backed, &[("web", lost)], false) };
        let leases = [ME, OTHER, BACKUP].into();
        assert_eq!(plan_action(ME, &BTreeSet::new(), &backed, &leases, &at_once), deed);
    }
    for left in
        [ObservedVm::Nothing, ObservedVm::Ended { shut_down: true, has_panicked: false }, RELEASED]
    {
        assert_eq!(due_of(&backed, left), Action::EndRecord);
    }
}

#[test]
fn no_output_is_released_while_a_backup_could_roll_back() {
    assert_eq!(due_of(&record(ME, OTHER, Some(BACKUP)), HELD), Action::YieldLease);
    let alone = record(ME, OTHER, None);
    assert_eq!(due_of(&alone, HELD), Action::ReleaseOutput(["web"].into()));
    assert_eq!(due_of(&alone, RUNS), Action::Nothing, "it is being protected");
    assert_eq!(due_of(&alone, OPEN), Action::Protect);
    assert_eq!(due_of(&alone, RELEASED), Action::Nothing);
    let second = due_with(&record(OTHER, ME, None), &[ME, OTHER], &[("db", OPEN)], false);
    assert_eq!(second, Action::Nothing, "the host of the first sees to that");
    let mut named = alone;
    named.placements.values_mut().for_each(|placement| placement.backup = Some(BACKUP));
    named.layout += 1;
    assert_eq!(due_of(&named, HELD), Action::Nothing);
}

#[test]
fn where_all_run_after_a_failover() {
    let mut all = record(ME, ME, None);
    let both = [("web", OPEN), ("db", OPEN)];
    assert_eq!(due_with(&all, &[ME], &both, true), Action::Protect);
    let one = [("web", ObservedVm::Nothing), ("db", OPEN)];
    assert_eq!(due_with(&all, &[ME], &one, true), Action::Nothing);
    let none = [("web", ObservedVm::Nothing), ("db", DIED)];
    assert_eq!(due_with(&all, &[ME], &none, true), Action::EndRecord);
    // The controller has chosen a backup, which has no copies yet.
    all.placements.values_mut().for_each(|placement| placement.backup = Some(OTHER));
    all.layout += 1;
    assert_eq!(due_with(&all, &[ME, OTHER], &both, true), Action::RecordBackup(None));
    let sent = [("web", RUNS), ("db", RUNS)];
    assert_eq!(due_with(&all, &[ME, OTHER], &sent, true), Action::Nothing, "it has copies");
    all.fence.insert(OTHER);
    assert_eq!(due_with(&all, &[ME, OTHER], &both, true), Action::Nothing);
}

#[test]
fn a_vm_that_runs_elsewhere_is_ended_here() {
    let elsewhere = record(BACKUP, BACKUP, None);
    assert_eq!(due_of(&elsewhere, HELD), Action::Fence("web"));
    assert_eq!(due_of(&elsewhere, RELEASED), Action::Nothing, "it is another one");
    assert_eq!(due_of(&elsewhere, DIED), Action::Nothing);
    let ended = record(ME, OTHER, Some(BACKUP)).with_end();
    assert_eq!(due_of(&ended, HELD), Action::Detach("web"));
    // It slept through a failover, and the cluster that failed over has ended.
    let later = record(ME, OTHER, Some(BACKUP)).with_end().with_end();
    assert_eq!(due_of(&later, HELD), Action::Fence("web"));
}

#[test]
fn an_agent_adopts_a_cluster_that_no_other_host_can_run() {
    let earlier = HostId(1);
    let backed = record(earlier, OTHER, Some(BACKUP));
    assert_eq!(due_of(&backed, HELD), Action::Nothing, "all are about to go back");
    let leases = [ME, OTHER];
    let alone = due_with(&backed, &leases, &[("web", HELD)], false);
    assert_eq!(alone, Action::Adopt(earlier));
    assert_eq!(due_of(&record(earlier, OTHER, None), OPEN), Action::Adopt(earlier));
    let mut fenced = backed;
    fenced.fence.insert(earlier);
    assert_eq!(due_of(&fenced, HELD), Action::Fence("web"));
}

#[test]
fn copies_outlive_the_agent_of_their_host() {
    let earlier = HostId(1);
    let standbys = [("web", STANDBY), ("db", STANDBY)];
    let kept = record(OTHER, BACKUP, Some(earlier));
    let due =
        |record: &FailoverRecord, leases: &[HostId]| due_with(record, leases, &standbys, true);
    assert_eq!(due(&kept, &[OTHER, BACKUP]), Action::Nothing, "they go on where they are");
    assert_eq!(due(&kept, &[OTHER]), Action::AdoptCopies(earlier));
    let mut to_run = record(earlier, earlier, None);
    assert_eq!(due(&to_run, &[]), Action::AdoptCopies(earlier));
    to_run.fence.insert(OTHER);
    assert_eq!(due(&to_run, &[]), Action::Nothing);
    let open = record(OTHER, BACKUP, None);
    assert_eq!(due(&open, &[OTHER]), Action::DropCopies, "what they hold has left");
    let mine = kept.with_inheriting_host(earlier, ME);
    assert!(mine.is_protected() && mine.is_separate());
    assert_eq!(due(&mine, &[ME, OTHER]), Action::Nothing, "the controller sees to that");
}

#[test]
fn standbys_are_kept_while_the_record_names_them() {
    let standbys = [("web", STANDBY), ("db", STANDBY)];
    let due = |record: &FailoverRecord| due_with(record, &[OTHER], &standbys, true);
    for backup in [ME, HostId(1)] {
        assert_eq!(due(&record(OTHER, OTHER, Some(backup))), Action::Nothing);
    }
    assert_eq!(due(&record(ME, ME, None)), Action::Nothing, "they are about to run");
    assert_eq!(due(&record(OTHER, OTHER, Some(BACKUP))), Action::DropCopies);
    assert_eq!(due(&record(OTHER, OTHER, None)), Action::DropCopies);
    assert_eq!(due(&record(OTHER, OTHER, None).with_end()), Action::DropCopies);
    let none = due_with(&record(OTHER, OTHER, None), &[OTHER], &standbys, false);
    assert_eq!(none, Action::Nothing);
}
