//! What is due at a host for one VM, by what is agreed on and what is here. Pure.
//!
//! ```text
//!   the record says                      here                                              due
//!     runs here                            sent to a backup that the record has not           record it
//!                                          not sent, the record has a backup, at two looks     record that there is none
//!                                          not sent, none recorded, what it sends is held      let it go on
//!                                          not sent, none recorded                             protect it by another host
//!                                          released, stopped by its user, shut down            end the cluster
//!                                          died                                                yield: ask no more, the lease ends
//!     runs at an earlier agent of here     it runs                                             take it up
//!     runs elsewhere                       it runs, and obeys a lease                          end it
//!                                          a standby that gets nothing and nobody counts on    end it
//! ```

use std::collections::BTreeSet;

use firn_cluster::Host;
use firn_membership::Record;
use firn_supervisor::{Exit, Status};

/// What of a VM is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Here {
    /// Nothing: its user has ended it.
    Nothing,
    /// Its end. `shut_down`: by itself, as it should.
    Ended { shut_down: bool },
    /// It waits for epochs, or gets no more.
    Standby { has_ended: bool },
    /// It runs. `backup` has committed epochs of it; what it sends obeys a lease; is held whatever that says.
    Runs { backup: Option<Host>, is_leased: bool, is_held: bool },
}

impl Here {
    /// As its supervisor tells; `backup` is where its epochs go.
    pub fn of(status: &Status, backup: Option<Host>) -> Self {
        let commits = status.protection.as_ref().is_some_and(|it| it.committed > 0);
        match (status.state.as_str(), &status.standby) {
            ("ended", _) => Self::Ended { shut_down: status.exit == Some(Exit::Code(0)) },
            (_, Some(standby)) => Self::Standby { has_ended: standby.ended.is_some() },
            _ => Self::Runs {
                backup: backup.filter(|_| commits),
                is_leased: status.lease.is_some(),
                is_held: status.network.iter().any(|card| !card.open),
            },
        }
    }
}

/// Something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// Nothing.
    Nothing,
    /// Have the record say who its backup is.
    Record(Option<Host>),
    /// Let out what is held.
    GoOn,
    /// Protect it.
    Protect,
    /// Have the record say that there is no such cluster any more.
    End,
    /// Ask for its lease no more.
    Yield,
    /// Have the record say that this agent looks after it.
    TakeUp(Host),
    /// End the VM: it runs elsewhere.
    Fence,
    /// End the standby.
    Tidy,
}

/// What is due at host `me`, whose earlier agents were `mine`.
pub fn due(me: Host, mine: &BTreeSet<Host>, record: &Record, here: Here) -> Deed {
    let register = &record.register;
    let Some(place) = register.places.values().next() else { return Deed::Nothing };
    let is_ours = |host| host == me || mine.contains(&host);
    match here {
        _ if place.primary == me && !register.fence.is_empty() => Deed::Nothing,
        Here::Nothing if place.primary == me => Deed::End,
        Here::Ended { shut_down } if place.primary == me => {
            let goes_on = place.backup.is_some() && register.is_protected() && !shut_down;
            if goes_on { Deed::Yield } else { Deed::End }
        }
        Here::Runs { backup, is_leased, is_held } if place.primary == me => match backup {
            Some(_) if place.backup == backup && register.is_protected() => Deed::Nothing,
            Some(_) => Deed::Record(backup),
            None if !is_leased => Deed::End,
            None if place.backup.is_some() => Deed::Record(None),
            None if is_held => Deed::GoOn,
            None => Deed::Protect,
        },
        Here::Runs { is_leased: true, .. } => {
            let may = mine.contains(&place.primary) && register.fence.is_empty();
            if may { Deed::TakeUp(place.primary) } else { Deed::Fence }
        }
        Here::Standby { has_ended: true } if !is_ours(place.primary) => {
            let counts = place.backup.is_some_and(is_ours);
            if counts { Deed::Nothing } else { Deed::Tidy }
        }
        _ => Deed::Nothing,
    }
}

/// Whether it may be done now, or only if it is still due at the next look. That a VM has no backup any more gives up what the backup has; and the
/// stream of a VM whose hypervisor has just died ends a moment before anybody here knows why.
pub fn is_sure(deed: Deed, before: Option<Deed>) -> bool {
    deed != Deed::Record(None) || before == Some(deed)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use firn_cluster::Vm;
    use firn_cluster::failover::{Place, Register};

    use super::*;

    const ME: Host = Host(4);
    const OTHER: Host = Host(5);

    fn record(primary: Host, backup: Option<Host>) -> Record {
        let alone = Place { primary, backup: None };
        let register = Register::new(BTreeMap::from([(Vm(0), alone)])).backed_by(backup);
        Record { register, vms: BTreeMap::from([(Vm(0), "web".to_owned())]) }
    }

    fn due_at_me(record: &Record, here: Here) -> Deed {
        due(ME, &[Host(1), Host(2)].into(), record, here)
    }

    fn runs(backup: Option<Host>, is_leased: bool, is_held: bool) -> Here {
        Here::Runs { backup, is_leased, is_held }
    }

    #[test]
    fn a_primary_keeps_the_record_true_and_its_vm_protected() {
        let (alone, backed) = (record(ME, None), record(ME, Some(OTHER)));
        assert_eq!(due_at_me(&backed, runs(Some(OTHER), true, true)), Deed::Nothing);
        assert_eq!(due_at_me(&alone, runs(Some(OTHER), true, true)), Deed::Record(Some(OTHER)));
        let other = runs(Some(Host(9)), true, true);
        assert_eq!(due_at_me(&backed, other), Deed::Record(Some(Host(9))));
        // Nothing is let out as long as the record has somebody who may run it.
        assert_eq!(due_at_me(&backed, runs(None, true, true)), Deed::Record(None));
        assert_eq!(due_at_me(&alone, runs(None, true, true)), Deed::GoOn);
        assert_eq!(due_at_me(&alone, runs(None, true, false)), Deed::Protect);
        assert_eq!(due_at_me(&backed, runs(None, false, false)), Deed::End, "it was released");
        assert_eq!(due_at_me(&backed, Here::Nothing), Deed::End);
        assert_eq!(due_at_me(&backed, Here::Ended { shut_down: true }), Deed::End);
        assert_eq!(due_at_me(&backed, Here::Ended { shut_down: false }), Deed::Yield);
        assert_eq!(due_at_me(&alone, Here::Ended { shut_down: false }), Deed::End);
        assert_eq!(due_at_me(&backed, Here::Standby { has_ended: true }), Deed::Nothing);
    }

    #[test]
    fn a_backup_is_not_given_up_for_a_vm_that_is_dying() {
        let backed = record(ME, Some(OTHER));
        let first = due_at_me(&backed, runs(None, true, true));
        assert!(!is_sure(first, None) && !is_sure(first, Some(Deed::Nothing)));
        assert!(is_sure(first, Some(first)), "it still runs");
        let then = due_at_me(&backed, Here::Ended { shut_down: false });
        assert_eq!(then, Deed::Yield);
        assert!(is_sure(then, Some(first)));
    }

    #[test]
    fn what_runs_elsewhere_does_not_run_here() {
        for elsewhere in
            [record(OTHER, None), record(OTHER, Some(ME)), record(OTHER, Some(Host(9)))]
        {
            assert_eq!(due_at_me(&elsewhere, runs(None, true, true)), Deed::Fence);
            assert_eq!(due_at_me(&elsewhere, runs(Some(OTHER), true, true)), Deed::Fence);
            assert_eq!(
                due_at_me(&elsewhere, runs(None, false, true)),
                Deed::Nothing,
                "it is another one"
            );
        }
        assert_eq!(due_at_me(&record(OTHER, None).ended(), runs(None, true, true)), Deed::Nothing);
    }

    #[test]
    fn a_standby_is_kept_while_somebody_counts_on_it() {
        let has_ended = Here::Standby { has_ended: true };
        for backup in [ME, Host(1)] {
            assert_eq!(due_at_me(&record(OTHER, Some(backup)), has_ended), Deed::Nothing);
        }
        assert_eq!(due_at_me(&record(OTHER, Some(Host(9))), has_ended), Deed::Tidy);
        assert_eq!(
            due_at_me(&record(OTHER, None), Here::Standby { has_ended: false }),
            Deed::Nothing
        );
        assert_eq!(due_at_me(&record(OTHER, None).ended(), has_ended), Deed::Nothing);
    }

    #[test]
    fn an_agent_takes_up_what_its_predecessor_ran_unless_it_was_fenced() {
        let mut before = record(Host(2), Some(OTHER));
        assert_eq!(due_at_me(&before, runs(None, true, true)), Deed::TakeUp(Host(2)));
        before.register.fence.insert(Host(2));
        assert_eq!(due_at_me(&before, runs(None, true, true)), Deed::Fence);
        let mut fenced = record(ME, None);
        fenced.register.fence.insert(OTHER);
        assert_eq!(due_at_me(&fenced, runs(None, true, true)), Deed::Nothing);
    }
}
