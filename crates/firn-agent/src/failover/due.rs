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
//!                                          hung                                                relinquish: the same, and end it once it runs elsewhere
//!                                          its guest panicked                                  nothing: a person may ask for a failover
//!     runs at an earlier agent of here     it runs                                             take it up
//!     runs elsewhere                       it runs, and obeys a lease                          end it
//!                                          a standby that gets nothing and nobody counts on    end it
//!     has ended                            a standby that gets nothing                         end it
//!     runs here, after a failover          a standby whose primary was stopped                 end the cluster
//! ```

use std::collections::BTreeSet;

use firn_cluster::Host;
use firn_membership::Record;
use firn_supervisor::{Exit, PrimaryEnd, Status};

/// What of a VM is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Here {
    /// Nothing: its user has ended it.
    Nothing,
    /// Its end. `shut_down`: by itself, as it should, or by its user. `has_panicked`: its guest did.
    Ended { shut_down: bool, has_panicked: bool },
    /// It waits for epochs, or gets no more. `is_over`: its primary was stopped or released, or shut down.
    Standby { has_ended: bool, is_over: bool },
    /// It runs. `backup` has committed epochs of it; what it sends obeys a lease; is held whatever that says; its hypervisor does
    /// not answer.
    Runs { backup: Option<Host>, is_leased: bool, is_held: bool, is_hung: bool },
}

impl Here {
    /// As its supervisor tells; `backup` is where its epochs go.
    pub fn of(status: &Status, backup: Option<Host>) -> Self {
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

/// Whether a VM ended as its user or its guest wanted. What its protection knows counts more than an exit code: a host that goes down ends
/// its processes as politely as a guest does.
fn was_wanted(status: &Status) -> bool {
    match &status.protection_end {
        Some(PrimaryEnd::Stopped | PrimaryEnd::ShutDown) => true,
        Some(PrimaryEnd::Lost(_) | PrimaryEnd::Panicked) => false,
        _ => status.exit == Some(Exit::Code(0)),
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
    /// The same in this timeline, and continue to obey: what does not answer is ended once it runs elsewhere.
    Relinquish,
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
    let Some(place) = register.places.values().next() else { return after_end(here) };
    let is_ours = |host| host == me || mine.contains(&host);
    let is_backed = place.backup.is_some() && register.is_protected();
    match here {
        _ if place.primary == me && !register.fence.is_empty() => Deed::Nothing,
        Here::Nothing if place.primary == me => Deed::End,
        Here::Ended { shut_down, has_panicked } if place.primary == me => match is_backed {
            true if has_panicked => Deed::Nothing,
            true if !shut_down => Deed::Yield,
            _ => Deed::End,
        },
        Here::Standby { is_over: true, .. } if place.primary == me => Deed::End,
        Here::Runs { is_hung: true, is_leased: true, .. } if place.primary == me => {
            if is_backed {
                Deed::Relinquish
            } else {
                Deed::Nothing
            }
        }
        Here::Runs { backup, is_leased, is_held, .. } if place.primary == me => match backup {
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
        Here::Standby { has_ended: true, .. } if !is_ours(place.primary) => {
            let counts = place.backup.is_some_and(is_ours);
            if counts { Deed::Nothing } else { Deed::Tidy }
        }
        _ => Deed::Nothing,
    }
}

/// A VM whose cluster has ended is run by no host: it was stopped, or runs without a lease.
fn after_end(here: Here) -> Deed {
    match here {
        Here::Standby { has_ended: true, .. } => Deed::Tidy,
        _ => Deed::Nothing,
    }
}

/// Whether it may be done now, or only if it is still due at the next look. That a VM has no backup any more gives up what the backup has; and the
/// stream of a VM whose hypervisor has just died ends a moment before anybody here knows why. A standby may have been replaced by another
/// between the look at the record and the look at it.
pub fn is_sure(deed: Deed, before: Option<Deed>) -> bool {
    !matches!(deed, Deed::Record(None) | Deed::Tidy) || before == Some(deed)
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
        Here::Runs { backup, is_leased, is_held, is_hung: false }
    }

    fn ended(shut_down: bool) -> Here {
        Here::Ended { shut_down, has_panicked: false }
    }

    fn standby(has_ended: bool) -> Here {
        Here::Standby { has_ended, is_over: false }
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
        assert_eq!(due_at_me(&backed, ended(true)), Deed::End);
        assert_eq!(due_at_me(&backed, ended(false)), Deed::Yield);
        assert_eq!(due_at_me(&alone, ended(false)), Deed::End);
        assert_eq!(due_at_me(&backed, standby(true)), Deed::Nothing);
    }

    #[test]
    fn a_backup_is_not_given_up_for_a_vm_that_is_dying() {
        let backed = record(ME, Some(OTHER));
        let first = due_at_me(&backed, runs(None, true, true));
        assert!(!is_sure(first, None) && !is_sure(first, Some(Deed::Nothing)));
        assert!(is_sure(first, Some(first)), "it still runs");
        let then = due_at_me(&backed, ended(false));
        assert_eq!(then, Deed::Yield);
        assert!(is_sure(then, Some(first)));
    }

    /// A hypervisor that does not answer has lost its VM; a guest that panicked has not, for the backup has the panic or will have it.
    #[test]
    fn a_hung_vm_gives_up_its_lease_and_a_panicked_one_keeps_it() {
        let (alone, backed) = (record(ME, None), record(ME, Some(OTHER)));
        let hung = Here::Runs { backup: None, is_leased: true, is_held: true, is_hung: true };
        assert_eq!(due_at_me(&backed, hung), Deed::Relinquish);
        assert!(is_sure(Deed::Relinquish, None));
        assert_eq!(due_at_me(&alone, hung), Deed::Nothing, "nobody else has a copy");
        assert_eq!(due_at_me(&record(OTHER, None), hung), Deed::Fence, "it runs there by now");
        let panicked = Here::Ended { shut_down: false, has_panicked: true };
        assert_eq!(due_at_me(&backed, panicked), Deed::Nothing);
        assert_eq!(due_at_me(&alone, panicked), Deed::End);
    }

    /// A VM that was stopped is run by no host, and its name is free.
    #[test]
    fn what_was_stopped_leaves_nothing_behind() {
        let over = Here::Standby { has_ended: true, is_over: true };
        assert_eq!(due_at_me(&record(ME, None), over), Deed::End, "its host died as well");
        let ended = record(OTHER, Some(ME)).ended();
        assert_eq!(due_at_me(&ended, over), Deed::Tidy);
        assert!(!is_sure(Deed::Tidy, None) && is_sure(Deed::Tidy, Some(Deed::Tidy)));
        assert_eq!(due_at_me(&record(OTHER, Some(ME)), over), Deed::Nothing, "its host ends it");
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
        let has_ended = standby(true);
        for backup in [ME, Host(1)] {
            assert_eq!(due_at_me(&record(OTHER, Some(backup)), has_ended), Deed::Nothing);
        }
        assert_eq!(due_at_me(&record(OTHER, Some(Host(9))), has_ended), Deed::Tidy);
        assert_eq!(due_at_me(&record(OTHER, None), standby(false)), Deed::Nothing);
        assert_eq!(due_at_me(&record(OTHER, None).ended(), standby(false)), Deed::Nothing);
        assert_eq!(due_at_me(&record(OTHER, None).ended(), has_ended), Deed::Tidy);
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
