//! Manual failover: decides whether a failover that a user requests is allowed, by the record and
//! by the leases. Pure.
//!
//! The user requests the failover at the host that is to run the VMs. This host takes the first
//! line that applies:
//!
//! ```text
//!   the cluster has ended                                         refuse: Ended
//!   the record names this host as the only primary,
//!     and the fence is empty                                      Runs
//!     and another host is still fenced                            Wait
//!   the user declares a host dead that is no primary              refuse: OtherPrimary
//!   the record does not name this host as the backup of all VMs   refuse: OtherBackup
//!   the backup has no standbys of the newest checkpoint           refuse: NoStandby
//!   a host is still fenced, or this host has no lease yet         Wait
//!   a primary may have a lease, and the user does not declare
//!     it dead                                                     refuse: LeaseHeld
//!   otherwise                                                     Propose: this host becomes the primary
//! ```
//!
//! A proposal always fences the old primary, even one that a user declares dead. The old primary
//! leaves the fence only when its lease is over, and until then no VM runs. So if the user is wrong
//! and the old primary is healthy, the generation of the healthy VM ends; but two hosts never send
//! at the same time. Nothing in this module grants or shortens a lease.

use std::collections::BTreeSet;

use super::FailoverRecord;
use crate::HostId;

/// The decision about a failover that a user requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ManualDecision {
    /// Allowed: propose this record to the other hosts.
    Propose(FailoverRecord),
    /// A step that must come first is not complete: decide again later.
    Wait,
    /// The record names this host as the primary, and it may run the VMs: nothing is left to do.
    Runs,
    /// The failover is refused.
    Refused(ManualRefusal),
}

/// Why a manual failover is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManualRefusal {
    /// The cluster has ended: its VMs were stopped or released.
    Ended,
    /// This host is not the backup of all VMs. The backup is this other host; `None` if a VM has no
    /// backup.
    OtherBackup(Option<HostId>),
    /// This host has no standbys of the record's newest checkpoint.
    NoStandby,
    /// This primary holds a lease, or may believe that it does, and the user has not declared it
    /// dead.
    LeaseHeld(HostId),
    /// The user declared a host dead that is no primary. The primary is this host.
    OtherPrimary(HostId),
}

/// Decides, at host `me`, about a request of the user. `leases` has the hosts that hold a lease or
/// may believe that they do; `dead` has the hosts that the user declares dead.
pub fn decide_manual_failover(
    record: &FailoverRecord,
    leases: &BTreeSet<HostId>,
    me: HostId,
    dead: &BTreeSet<HostId>,
) -> ManualDecision {
    let primaries = record.primaries();
    let Some(primary) = primaries.first().copied() else {
        return ManualDecision::Refused(ManualRefusal::Ended);
    };
    if primaries == BTreeSet::from([me]) {
        return match record.fence.is_empty() {
            true => ManualDecision::Runs,
            false => ManualDecision::Wait,
        };
    }
    if !dead.is_subset(&primaries) {
        return ManualDecision::Refused(ManualRefusal::OtherPrimary(primary));
    }
    if let Some(other) = record.placements.values().find(|placement| placement.backup != Some(me)) {
        return ManualDecision::Refused(ManualRefusal::OtherBackup(other.backup));
    }
    if !record.is_protected() {
        return ManualDecision::Refused(ManualRefusal::NoStandby);
    }
    if !record.fence.is_empty() || !leases.contains(&me) {
        return ManualDecision::Wait;
    }
    let held = primaries.iter().find(|host| leases.contains(host) && !dead.contains(host));
    if let Some(host) = held {
        return ManualDecision::Refused(ManualRefusal::LeaseHeld(*host));
    }
    let others: BTreeSet<HostId> = leases.difference(dead).copied().collect();
    match record.with_failover(&others) {
        Some(next) => ManualDecision::Propose(next),
        None => ManualDecision::Refused(ManualRefusal::NoStandby),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::failover::VmPlacement;
    use crate::{Generation, VmId};

    const A: HostId = HostId(0);
    const B: HostId = HostId(1);

    fn hosts(hosts: &[HostId]) -> BTreeSet<HostId> {
        hosts.iter().copied().collect()
    }

    fn backed() -> FailoverRecord {
        let placement = VmPlacement { primary: A, backup: None };
        FailoverRecord::new(BTreeMap::from([(VmId(0), placement)])).with_backup(Some(B))
    }

    fn refused(
        register: &FailoverRecord,
        leases: &[HostId],
        me: HostId,
        dead: &[HostId],
    ) -> ManualRefusal {
        match decide_manual_failover(register, &hosts(leases), me, &hosts(dead)) {
            ManualDecision::Refused(why) => why,
            other => panic!("{other:?}"),
        }
    }

    fn proposed(leases: &[HostId], dead: &[HostId]) -> FailoverRecord {
        match decide_manual_failover(&backed(), &hosts(leases), B, &hosts(dead)) {
            ManualDecision::Propose(register) => register,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_primary_that_holds_its_lease_keeps_its_vm() {
        assert_eq!(refused(&backed(), &[A, B], B, &[]), ManualRefusal::LeaseHeld(A));
        assert_eq!(refused(&backed(), &[A, B], B, &[HostId(7)]), ManualRefusal::OtherPrimary(A));
    }

    #[test]
    fn a_primary_that_lost_its_lease_or_is_declared_dead_is_fenced_for_good() {
        for (leases, dead) in [(&[B][..], &[][..]), (&[A, B], &[A]), (&[B], &[A])] {
            let next = proposed(leases, dead);
            assert_eq!(next.primaries(), hosts(&[B]));
            assert_eq!(next.fence, hosts(&[A]), "until its lease is over");
            assert_eq!(next.generation, Generation(1));
            assert_eq!(next.placements[&VmId(0)].backup, None, "it is no backup at once");
            assert_eq!(
                decide_manual_failover(&next, &hosts(&[A, B]), B, &hosts(dead)),
                ManualDecision::Wait
            );
            let free = next.without_harmless_changes(|_| true).unwrap();
            assert_eq!(
                decide_manual_failover(&free, &hosts(&[B]), B, &hosts(&[])),
                ManualDecision::Runs
            );
        }
    }

    #[test]
    fn a_host_without_a_valid_standby_runs_no_vm() {
        let alone = backed().with_backup(None);
        assert_eq!(refused(&alone, &[B], B, &[]), ManualRefusal::OtherBackup(None));
        assert_eq!(
            refused(&backed(), &[HostId(2)], HostId(2), &[]),
            ManualRefusal::OtherBackup(Some(B))
        );
        assert_eq!(refused(&backed().with_end(), &[B], B, &[]), ManualRefusal::Ended);
        let waits = decide_manual_failover(&backed(), &hosts(&[]), B, &hosts(&[]));
        assert_eq!(waits, ManualDecision::Wait, "its own lease comes first");
    }
}
