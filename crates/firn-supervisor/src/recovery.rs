//! The plan of recovery: a successor's action, decided from the journal and from what is left of
//! the VM before anything is changed.
//!
//! ```text
//!   phase in the journal         QEMU lives                              QEMU has ended
//!   starting                     kill it, forget the VM                  forget the VM
//!   being attached again         leave it detached                       record that it ended
//!   running                      continue to manage it                   record that it ended
//!   saving                       release its memory, `cont` if it was    remove the unfinished image,
//!                                paused by us, remove the unfinished     record that it ended
//!                                image, note that it was aborted
//!   saving, image complete       release its memory; `cont`, or for a    record that it ended
//!                                suspend: end it, as requested
//!   merging                      end that, `cont` if it was paused by us  record that it ended
//!   restoring, not started       kill it, forget the VM                  forget the VM
//!   restoring, started           adopt its memory, continue to serve     record that it ended
//!   protecting                   release its memory, `cont` if it was    record that it ended
//!                                stopped by us, note that it is
//!                                not protected any more
//!   standby, not started         kill it, forget the VM                  forget the VM
//!   standby, started             `cont`, continue to manage it           record that it ended
//! ```
//!
//! "Forget" and "kill" apply to processes that Firn started itself. Nothing is done to a process
//! that Firn attached to.

use std::path::{Path, PathBuf};

use firn_restore::{Mode, OnError};

use crate::journal::{Journal, Phase};

/// What is left of a VM whose supervisor has died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remains {
    /// The hypervisor process still runs.
    pub hypervisor_lives: bool,
    /// The image that was being written is complete: it was renamed to its final name.
    pub image_whole: bool,
}

/// What a successor does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Do nothing: according to the journal, the VM is over.
    Over,
    /// Remove everything of the VM, which never ran.
    Forget {
        /// End the hypervisor process that was to run it.
        kill: bool,
    },
    /// Leave the VM detached: Firn was about to attach to it again.
    StayDetached,
    /// Record that the hypervisor ended while no supervisor ran.
    RecordEnd {
        /// An image that was being written, and is to be removed.
        unfinished: Option<PathBuf>,
    },
    /// Continue to manage the VM. No operation was running.
    GoOn,
    /// End a checkpoint that can't be finished.
    AbortSave {
        /// Firn has paused the guest, which has to be resumed.
        cont: bool,
        /// The image that was being written.
        unfinished: PathBuf,
    },
    /// Do what was to follow a complete image.
    FinishSave {
        /// Firn has paused the guest, which has to be resumed.
        cont: bool,
        /// End the VM, for a suspend.
        stop: bool,
        /// The image.
        image: PathBuf,
    },
    /// End a merge of layers.
    EndMerge {
        /// Firn has paused the guest, which has to be resumed.
        cont: bool,
    },
    /// Record that the VM is not protected any more. It continues to run.
    EndProtection {
        /// Firn has paused the guest, which has to be resumed.
        cont: bool,
    },
    /// Let the VM run: the failover has put its whole state in place.
    FinishFailover,
    /// Adopt the guest's memory and continue to serve its page faults.
    ServeOn {
        /// The image that its pages come from.
        image: PathBuf,
        /// The identity that this file must have.
        identity: String,
        /// The restore mode.
        mode: Mode,
        /// The guest is to run: it was not paused when it was saved.
        cont: bool,
        /// What happens to the VM when its memory can't be read.
        on_error: OnError,
    },
}

/// Decides what a successor does.
pub fn decide(journal: &Journal, remains: Remains) -> Recovery {
    let launched = journal.machine.as_ref().is_none_or(|machine| machine.launched);
    let lives = remains.hypervisor_lives;
    match &journal.phase {
        Phase::Ended { .. } | Phase::Detached => Recovery::Over,
        Phase::Starting { .. } if journal.machine.is_some() && lives => Recovery::StayDetached,
        Phase::Starting { .. } if journal.machine.is_some() => {
            Recovery::RecordEnd { unfinished: None }
        }
        Phase::Starting { launching } => {
            Recovery::Forget { kill: lives && launching.is_some() && launched }
        }
        Phase::Restoring { started: false, .. } | Phase::Standby { started: false } => {
            Recovery::Forget { kill: lives && launched }
        }
        Phase::Saving { image, .. } if !lives => {
            Recovery::RecordEnd { unfinished: (!remains.image_whole).then(|| image.clone()) }
        }
        _ if !lives => Recovery::RecordEnd { unfinished: None },
        Phase::Running => Recovery::GoOn,
        Phase::Merging { paused_by_us: cont } => Recovery::EndMerge { cont: *cont },
        Phase::Protecting { paused_by_us: cont } => Recovery::EndProtection { cont: *cont },
        Phase::Standby { started: true } => Recovery::FinishFailover,
        Phase::Saving { image, paused_by_us, then_stop, .. } => {
            recover_save(image, *paused_by_us, *then_stop, remains.image_whole)
        }
        Phase::Restoring {
            image, identity, mode, started: true, on_error, stays_paused, ..
        } => Recovery::ServeOn {
            image: image.clone(),
            identity: identity.clone(),
            mode: *mode,
            on_error: *on_error,
            cont: !stays_paused,
        },
    }
}

fn recover_save(image: &Path, paused: bool, then_stop: bool, whole: bool) -> Recovery {
    let image = image.to_owned();
    match whole {
        true => Recovery::FinishSave { cont: paused && !then_stop, stop: then_stop, image },
        false => Recovery::AbortSave { cont: paused, unfinished: image },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Exit;
    use crate::name::VmName;
    use crate::testing::machine;

    const IMAGE: &str = "1f";
    const LIVES: Remains = Remains { hypervisor_lives: true, image_whole: false };
    const LIVES_WHOLE: Remains = Remains { hypervisor_lives: true, image_whole: true };
    const GONE: Remains = Remains { hypervisor_lives: false, image_whole: false };

    fn journal(phase: Phase) -> Journal {
        let journal = Journal::new(VmName::new("web").unwrap(), None);
        Journal { phase, machine: Some(machine(true)), ..journal }
    }

    fn saving(paused_by_us: bool, then_stop: bool) -> Journal {
        let drives = Vec::new();
        journal(Phase::Saving {
            image: "/i".into(),
            replaces: None,
            paused_by_us,
            then_stop,
            drives,
        })
    }

    fn restoring(started: bool) -> Journal {
        journal(Phase::Restoring {
            image: "/i".into(),
            identity: IMAGE.into(),
            mode: Mode::Locality,
            started,
            stays_paused: false,
            on_error: OnError::Kill,
            paused_by_us: false,
        })
    }

    #[test]
    fn what_is_over_stays_over() {
        let ended = journal(Phase::Ended { exit: Exit::Code(0), at: 1 });
        for remains in [LIVES, GONE] {
            assert_eq!(decide(&ended, remains), Recovery::Over);
            assert_eq!(decide(&journal(Phase::Detached), remains), Recovery::Over);
        }
    }

    #[test]
    fn a_vm_that_never_ran_leaves_nothing() {
        let starting = |launching: Option<PathBuf>| Journal {
            machine: None,
            ..journal(Phase::Starting { launching })
        };
        let ours = starting(Some("/q".into()));
        assert_eq!(decide(&ours, LIVES), Recovery::Forget { kill: true });
        assert_eq!(decide(&ours, GONE), Recovery::Forget { kill: false });
        assert_eq!(decide(&restoring(false), LIVES), Recovery::Forget { kill: true });
        assert_eq!(decide(&restoring(false), GONE), Recovery::Forget { kill: false });
    }

    #[test]
    fn a_vm_that_firn_only_attached_to_is_never_killed() {
        let attaching = journal(Phase::Starting { launching: None });
        let attaching = Journal { machine: None, ..attaching };
        assert_eq!(decide(&attaching, LIVES), Recovery::Forget { kill: false });
        let attached = Journal { machine: Some(machine(false)), ..restoring(false) };
        assert_eq!(decide(&attached, LIVES), Recovery::Forget { kill: false });
    }

    #[test]
    fn a_vm_that_is_being_taken_up_again_keeps_its_monitor() {
        let again = journal(Phase::Starting { launching: None });
        assert_eq!(decide(&again, LIVES), Recovery::StayDetached);
        assert_eq!(decide(&again, GONE), Recovery::RecordEnd { unfinished: None });
    }

    #[test]
    fn a_running_vm_goes_on() {
        assert_eq!(decide(&journal(Phase::Running), LIVES), Recovery::GoOn);
        assert_eq!(
            decide(&journal(Phase::Running), GONE),
            Recovery::RecordEnd { unfinished: None }
        );
    }

    #[test]
    fn a_protected_vm_runs_on_and_a_standby_goes() {
        for cont in [false, true] {
            let protecting = journal(Phase::Protecting { paused_by_us: cont });
            assert_eq!(decide(&protecting, LIVES), Recovery::EndProtection { cont });
        }
        let ended = Recovery::RecordEnd { unfinished: None };
        let protecting = journal(Phase::Protecting { paused_by_us: true });
        assert_eq!(decide(&protecting, GONE), ended.clone());
        let standby = |started| journal(Phase::Standby { started });
        assert_eq!(decide(&standby(false), LIVES), Recovery::Forget { kill: true });
        assert_eq!(decide(&standby(true), LIVES), Recovery::FinishFailover);
        assert_eq!(decide(&standby(true), GONE), ended);
    }

    #[test]
    fn a_merge_ends_and_the_guest_runs_if_it_ran() {
        for cont in [false, true] {
            let merging = journal(Phase::Merging { paused_by_us: cont });
            assert_eq!(decide(&merging, LIVES), Recovery::EndMerge { cont });
            assert_eq!(decide(&merging, GONE), Recovery::RecordEnd { unfinished: None });
        }
    }

    #[test]
    fn an_unfinished_checkpoint_is_aborted_and_the_guest_runs_if_it_ran() {
        let abort = |cont| Recovery::AbortSave { cont, unfinished: "/i".into() };
        assert_eq!(decide(&saving(true, false), LIVES), abort(true));
        assert_eq!(decide(&saving(false, false), LIVES), abort(false));
        assert_eq!(decide(&saving(true, true), LIVES), abort(true));
    }

    #[test]
    fn a_whole_image_is_kept_and_a_suspend_carried_through() {
        let finish = |cont, stop| Recovery::FinishSave { cont, stop, image: "/i".into() };
        assert_eq!(decide(&saving(false, false), LIVES_WHOLE), finish(false, false));
        assert_eq!(decide(&saving(true, true), LIVES_WHOLE), finish(false, true));
    }

    #[test]
    fn qemu_gone_during_a_save_leaves_no_half_image() {
        let unfinished = Some("/i".into());
        assert_eq!(decide(&saving(true, false), GONE), Recovery::RecordEnd { unfinished });
        let whole = Remains { image_whole: true, ..GONE };
        assert_eq!(decide(&saving(true, true), whole), Recovery::RecordEnd { unfinished: None });
    }

    #[test]
    fn a_started_restore_is_served_on() {
        let mode = Mode::Locality;
        let (image, identity, on_error) = ("/i".into(), IMAGE.into(), OnError::Kill);
        let serve = Recovery::ServeOn { image, identity, mode, on_error, cont: true };
        assert_eq!(decide(&restoring(true), LIVES), serve);
        assert_eq!(decide(&restoring(true), GONE), Recovery::RecordEnd { unfinished: None });
    }
}
