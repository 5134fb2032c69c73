//! Manual failover: decides by the record whether a failover that a user requests is allowed. Pure.
//!
//! ```text
//!   the record                            its primary's lease  request         decision
//!     names this host as the backup,        is over              any             propose: backup
//!     which has a standby                                                        becomes primary
//!                                           is not over          a failover      refused: held
//!                                           is not over          "HOST is dead"  propose the same
//!     names this host as the primary        (fence not empty)    any             wait; then runs
//!     has ended, names others, no standby                        any             refused
//! ```
//!
//! A proposal always fences the old primary, even one that a user declares dead. The fence is left
//! only when the lease is over. So a user who is wrong costs a healthy VM its generation, and never
//! makes two hosts send. Nothing in this module grants or shortens a lease.

use std::collections::BTreeSet;

use super::Register;
use crate::Host;

/// The decision that follows from the current record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandDecision {
    /// Propose this record.
    Propose(Register),
    /// A step that has to come first is in progress: check again.
    Wait,
    /// The record names this host to run the VMs.
    Runs,
    /// The failover is refused.
    Refused(HandRefusal),
}

/// Why a manual failover is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandRefusal {
    /// The cluster has ended: its VMs were stopped or released.
    Ended,
    /// This host is not the backup; that one is, if there is any.
    OtherBackup(Option<Host>),
    /// This host has no standby that counts.
    NoCopy,
    /// This primary holds a lease, or may believe so.
    Held(Host),
    /// A host was declared dead that is no primary; this one is.
    OtherPrimary(Host),
}

/// Decides at host `me`. The hosts of `leases` may believe that they hold one, and the user
/// declares those of `dead` dead.
pub fn by_hand(
    register: &Register,
    leases: &BTreeSet<Host>,
    me: Host,
    dead: &BTreeSet<Host>,
) -> HandDecision {
    let primaries = register.primaries();
    let Some(primary) = primaries.first().copied() else {
        return HandDecision::Refused(HandRefusal::Ended);
    };
    if primaries == BTreeSet::from([me]) {
        return match register.fence.is_empty() {
            true => HandDecision::Runs,
            false => HandDecision::Wait,
        };
    }
    if !dead.is_subset(&primaries) {
        return HandDecision::Refused(HandRefusal::OtherPrimary(primary));
    }
    if let Some(other) = register.places.values().find(|place| place.backup != Some(me)) {
        return HandDecision::Refused(HandRefusal::OtherBackup(other.backup));
    }
    if !register.is_protected() {
        return HandDecision::Refused(HandRefusal::NoCopy);
    }
    if !register.fence.is_empty() || !leases.contains(&me) {
        return HandDecision::Wait;
    }
    let held = primaries.iter().find(|host| leases.contains(host) && !dead.contains(host));
    if let Some(host) = held {
        return HandDecision::Refused(HandRefusal::Held(*host));
    }
    let others: BTreeSet<Host> = leases.difference(dead).copied().collect();
    match register.failed_over(&others) {
        Some(next) => HandDecision::Propose(next),
        None => HandDecision::Refused(HandRefusal::NoCopy),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::failover::Place;
    use crate::{Generation, Vm};

    const A: Host = Host(0);
    const B: Host = Host(1);

    fn hosts(hosts: &[Host]) -> BTreeSet<Host> {
        hosts.iter().copied().collect()
    }

    fn backed() -> Register {
        let place = Place { primary: A, backup: None };
        Register::new(BTreeMap::from([(Vm(0), place)])).backed_by(Some(B))
    }

    fn refused(register: &Register, leases: &[Host], me: Host, dead: &[Host]) -> HandRefusal {
        match by_hand(register, &hosts(leases), me, &hosts(dead)) {
            HandDecision::Refused(why) => why,
            other => panic!("{other:?}"),
        }
    }

    fn proposed(leases: &[Host], dead: &[Host]) -> Register {
        match by_hand(&backed(), &hosts(leases), B, &hosts(dead)) {
            HandDecision::Propose(register) => register,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_primary_that_holds_its_lease_keeps_its_vm() {
        assert_eq!(refused(&backed(), &[A, B], B, &[]), HandRefusal::Held(A));
        assert_eq!(refused(&backed(), &[A, B], B, &[Host(7)]), HandRefusal::OtherPrimary(A));
    }

    #[test]
    fn a_primary_that_lost_its_lease_or_is_declared_dead_is_fenced_for_good() {
        for (leases, dead) in [(&[B][..], &[][..]), (&[A, B], &[A]), (&[B], &[A])] {
            let next = proposed(leases, dead);
            assert_eq!(next.primaries(), hosts(&[B]));
            assert_eq!(next.fence, hosts(&[A]), "until its lease is over");
            assert_eq!(next.generation, Generation(1));
            assert_eq!(next.places[&Vm(0)].backup, None, "it is no backup at once");
            assert_eq!(by_hand(&next, &hosts(&[A, B]), B, &hosts(dead)), HandDecision::Wait);
            let free = next.fenced(|_| true).unwrap();
            assert_eq!(by_hand(&free, &hosts(&[B]), B, &hosts(&[])), HandDecision::Runs);
        }
    }

    #[test]
    fn who_has_no_copy_that_counts_runs_nothing() {
        let alone = backed().backed_by(None);
        assert_eq!(refused(&alone, &[B], B, &[]), HandRefusal::OtherBackup(None));
        assert_eq!(refused(&backed(), &[Host(2)], Host(2), &[]), HandRefusal::OtherBackup(Some(B)));
        assert_eq!(refused(&backed().ended(), &[B], B, &[]), HandRefusal::Ended);
        let waits = by_hand(&backed(), &hosts(&[]), B, &hosts(&[]));
        assert_eq!(waits, HandDecision::Wait, "its own lease comes first");
    }
}
