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
//!   suspending to object         as saving: remove the image's file,     record that it ended; the
//!   storage, not there yet       `cont`, note that it was aborted        image's file stays
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

use firn_restore::{FillChoices, ReadFailurePolicy, RestoreMode};

use crate::records::image_ids::ImageIds;
use crate::records::journal::{Journal, VmPhase};

/// What is left of a VM whose supervisor has died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SurvivingParts {
    /// The hypervisor process still runs.
    pub is_hypervisor_alive: bool,
    /// The image that was being written is complete: it was renamed to its final name.
    pub image_whole: bool,
}

/// What a successor does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecoveryAction {
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
        /// The numbers that this image must have.
        ids: ImageIds,
        /// The restore mode.
        mode: RestoreMode,
        /// The guest is to run: it was not paused when it was saved.
        cont: bool,
        /// What happens to the VM when its memory can't be read.
        on_error: ReadFailurePolicy,
        /// When and how fast memory is filled in the background.
        fill: FillChoices,
    },
}

impl RecoveryAction {
    /// The action as a part of a sentence, for the log.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Over => "the VM is over".to_owned(),
            Self::Forget { .. } => "the VM never ran, and is forgotten".to_owned(),
            Self::StayDetached => "the VM stays detached".to_owned(),
            Self::RecordEnd { .. } => "the VM has ended meanwhile".to_owned(),
            Self::GoOn => "no operation was running".to_owned(),
            Self::AbortSave { unfinished, .. } => {
                format!("the checkpoint to {} is aborted", unfinished.display())
            }
            Self::FinishSave { image, stop: false, .. } => {
                format!("the checkpoint {} is whole", image.display())
            }
            Self::FinishSave { image, stop: true, .. } => {
                format!("the VM is suspended to {}, and ends", image.display())
            }
            Self::EndMerge { .. } => "the merge of disk layers is ended".to_owned(),
            Self::EndProtection { cont: true } => {
                "the VM is not protected any more, and is resumed".to_owned()
            }
            Self::EndProtection { cont: false } => "the VM is not protected any more".to_owned(),
            Self::FinishFailover => "the failover is finished".to_owned(),
            Self::ServeOn { image, mode, .. } => {
                format!("memory is loaded from {} ({mode})", image.display())
            }
        }
    }
}

/// Decides what a successor does.
pub fn decide_recovery(journal: &Journal, remains: SurvivingParts) -> RecoveryAction {
    let launched = journal
        .hypervisor_record
        .as_ref()
        .is_none_or(|hypervisor_record| hypervisor_record.launched);
    let lives = remains.is_hypervisor_alive;
    match &journal.phase {
        VmPhase::Ended { .. } | VmPhase::Detached => RecoveryAction::Over,
        VmPhase::Starting { .. } if journal.hypervisor_record.is_some() && lives => {
            RecoveryAction::StayDetached
        }
        VmPhase::Starting { .. } if journal.hypervisor_record.is_some() => {
            RecoveryAction::RecordEnd { unfinished: None }
        }
        VmPhase::Starting { launching } => {
            RecoveryAction::Forget { kill: lives && launching.is_some() && launched }
        }
        VmPhase::Restoring { started: false, .. } | VmPhase::Standby { started: false } => {
            RecoveryAction::Forget { kill: lives && launched }
        }
        VmPhase::Saving { image, upload, .. } if !lives => {
            let is_whole = remains.image_whole || upload.as_ref().is_some_and(|it| it.is_complete);
            RecoveryAction::RecordEnd { unfinished: (!is_whole).then(|| image.clone()) }
        }
        _ if !lives => RecoveryAction::RecordEnd { unfinished: None },
        VmPhase::Running => RecoveryAction::GoOn,
        VmPhase::Merging { paused_by_us: cont } => RecoveryAction::EndMerge { cont: *cont },
        VmPhase::Protecting { paused_by_us: cont } => RecoveryAction::EndProtection { cont: *cont },
        VmPhase::Standby { started: true } => RecoveryAction::FinishFailover,
        VmPhase::Saving { image, paused_by_us, then_stop, upload, .. } => {
            let is_whole = match upload {
                // Only an object is the image of a VM that ends.
                Some(upload) if *then_stop => upload.is_complete,
                _ => remains.image_whole,
            };
            recover_save(image, *paused_by_us, *then_stop, is_whole)
        }
        VmPhase::Restoring {
            image,
            ids,
            mode,
            started: true,
            on_error,
            fill,
            must_stay_paused,
            ..
        } => RecoveryAction::ServeOn {
            image: image.clone(),
            ids: ids.clone(),
            mode: *mode,
            on_error: *on_error,
            fill: *fill,
            cont: !must_stay_paused,
        },
    }
}

fn recover_save(image: &Path, paused: bool, then_stop: bool, whole: bool) -> RecoveryAction {
    let image = image.to_owned();
    match whole {
        true => RecoveryAction::FinishSave { cont: paused && !then_stop, stop: then_stop, image },
        false => RecoveryAction::AbortSave { cont: paused, unfinished: image },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::journal::ImageUpload;
    use crate::records::name::VmName;
    use crate::records::process_exit::ProcessExit;
    use crate::testing::hypervisor_record;

    const LIVES: SurvivingParts = SurvivingParts { is_hypervisor_alive: true, image_whole: false };
    const LIVES_WHOLE: SurvivingParts =
        SurvivingParts { is_hypervisor_alive: true, image_whole: true };
    const GONE: SurvivingParts = SurvivingParts { is_hypervisor_alive: false, image_whole: false };

    fn ids() -> ImageIds {
        ImageIds { identity: "1f".into(), key_id: Some("2e".into()) }
    }

    fn journal(phase: VmPhase) -> Journal {
        let journal = Journal::new(VmName::new("web").unwrap(), None);
        Journal { phase, hypervisor_record: Some(hypervisor_record(true)), ..journal }
    }

    fn saving(paused_by_us: bool, then_stop: bool) -> Journal {
        let drives = Vec::new();
        journal(VmPhase::Saving {
            image: "/i".into(),
            replaces: None,
            paused_by_us,
            then_stop,
            upload: None,
            drives,
        })
    }

    fn storing(then_stop: bool, is_complete: bool) -> Journal {
        let mut journal = saving(true, then_stop);
        if let VmPhase::Saving { upload, .. } = &mut journal.phase {
            *upload = Some(ImageUpload { location: "s3://vms/i".into(), is_complete });
        }
        journal
    }

    fn restoring(started: bool) -> Journal {
        journal(VmPhase::Restoring {
            image: "/i".into(),
            ids: ids(),
            mode: RestoreMode::Locality,
            started,
            must_stay_paused: false,
            on_error: ReadFailurePolicy::Kill,
            fill: FillChoices::default(),
            paused_by_us: false,
        })
    }

    #[test]
    fn an_ended_vm_is_not_recovered() {
        let ended = journal(VmPhase::Ended { exit: ProcessExit::Code(0), at: 1 });
        for remains in [LIVES, GONE] {
            assert_eq!(decide_recovery(&ended, remains), RecoveryAction::Over);
            assert_eq!(decide_recovery(&journal(VmPhase::Detached), remains), RecoveryAction::Over);
        }
    }

    #[test]
    fn a_vm_that_never_ran_leaves_nothing() {
        let starting = |launching: Option<PathBuf>| Journal {
            hypervisor_record: None,
            ..journal(VmPhase::Starting { launching })
        };
        let ours = starting(Some("/q".into()));
        assert_eq!(decide_recovery(&ours, LIVES), RecoveryAction::Forget { kill: true });
        assert_eq!(decide_recovery(&ours, GONE), RecoveryAction::Forget { kill: false });
        assert_eq!(
            decide_recovery(&restoring(false), LIVES),
            RecoveryAction::Forget { kill: true }
        );
        assert_eq!(
            decide_recovery(&restoring(false), GONE),
            RecoveryAction::Forget { kill: false }
        );
    }

    #[test]
    fn a_vm_that_firn_only_attached_to_is_never_killed() {
        let attaching = journal(VmPhase::Starting { launching: None });
        let attaching = Journal { hypervisor_record: None, ..attaching };
        assert_eq!(decide_recovery(&attaching, LIVES), RecoveryAction::Forget { kill: false });
        let attached =
            Journal { hypervisor_record: Some(hypervisor_record(false)), ..restoring(false) };
        assert_eq!(decide_recovery(&attached, LIVES), RecoveryAction::Forget { kill: false });
    }

    #[test]
    fn a_vm_that_is_being_taken_up_again_keeps_its_monitor() {
        let again = journal(VmPhase::Starting { launching: None });
        assert_eq!(decide_recovery(&again, LIVES), RecoveryAction::StayDetached);
        assert_eq!(decide_recovery(&again, GONE), RecoveryAction::RecordEnd { unfinished: None });
    }

    #[test]
    fn a_running_vm_continues() {
        assert_eq!(decide_recovery(&journal(VmPhase::Running), LIVES), RecoveryAction::GoOn);
        assert_eq!(
            decide_recovery(&journal(VmPhase::Running), GONE),
            RecoveryAction::RecordEnd { unfinished: None }
        );
    }

    #[test]
    fn a_protected_vm_runs_on_and_a_standby_goes() {
        for cont in [false, true] {
            let protecting = journal(VmPhase::Protecting { paused_by_us: cont });
            assert_eq!(decide_recovery(&protecting, LIVES), RecoveryAction::EndProtection { cont });
        }
        let ended = RecoveryAction::RecordEnd { unfinished: None };
        let protecting = journal(VmPhase::Protecting { paused_by_us: true });
        assert_eq!(decide_recovery(&protecting, GONE), ended.clone());
        let standby = |started| journal(VmPhase::Standby { started });
        assert_eq!(decide_recovery(&standby(false), LIVES), RecoveryAction::Forget { kill: true });
        assert_eq!(decide_recovery(&standby(true), LIVES), RecoveryAction::FinishFailover);
        assert_eq!(decide_recovery(&standby(true), GONE), ended);
    }

    #[test]
    fn a_merge_ends_and_the_guest_runs_if_it_ran() {
        for cont in [false, true] {
            let merging = journal(VmPhase::Merging { paused_by_us: cont });
            assert_eq!(decide_recovery(&merging, LIVES), RecoveryAction::EndMerge { cont });
            assert_eq!(
                decide_recovery(&merging, GONE),
                RecoveryAction::RecordEnd { unfinished: None }
            );
        }
    }

    #[test]
    fn an_unfinished_checkpoint_is_aborted_and_the_guest_runs_if_it_ran() {
        let abort = |cont| RecoveryAction::AbortSave { cont, unfinished: "/i".into() };
        assert_eq!(decide_recovery(&saving(true, false), LIVES), abort(true));
        assert_eq!(decide_recovery(&saving(false, false), LIVES), abort(false));
        assert_eq!(decide_recovery(&saving(true, true), LIVES), abort(true));
    }

    #[test]
    fn a_whole_image_is_kept_and_a_suspend_carried_through() {
        let finish = |cont, stop| RecoveryAction::FinishSave { cont, stop, image: "/i".into() };
        assert_eq!(decide_recovery(&saving(false, false), LIVES_WHOLE), finish(false, false));
        assert_eq!(decide_recovery(&saving(true, true), LIVES_WHOLE), finish(false, true));
    }

    #[test]
    fn a_vm_ends_only_when_its_image_is_in_the_store() {
        let abort = RecoveryAction::AbortSave { cont: true, unfinished: "/i".into() };
        assert_eq!(decide_recovery(&storing(true, false), LIVES), abort);
        assert_eq!(decide_recovery(&storing(true, false), LIVES_WHOLE), abort);
        let end = RecoveryAction::FinishSave { cont: false, stop: true, image: "/i".into() };
        // The file may be removed by then.
        assert_eq!(decide_recovery(&storing(true, true), LIVES), end);
        assert_eq!(decide_recovery(&storing(true, true), LIVES_WHOLE), end);
        let kept = RecoveryAction::RecordEnd { unfinished: None };
        let whole = SurvivingParts { image_whole: true, ..GONE };
        assert_eq!(decide_recovery(&storing(true, false), whole), kept);
        assert_eq!(decide_recovery(&storing(true, true), GONE), kept);
        // A checkpoint keeps its file until a journal without this phase has it.
        let keep = RecoveryAction::FinishSave { cont: true, stop: false, image: "/i".into() };
        assert_eq!(decide_recovery(&storing(false, false), LIVES_WHOLE), keep);
    }

    #[test]
    fn qemu_gone_during_a_save_leaves_no_half_image() {
        let unfinished = Some("/i".into());
        assert_eq!(
            decide_recovery(&saving(true, false), GONE),
            RecoveryAction::RecordEnd { unfinished }
        );
        let whole = SurvivingParts { image_whole: true, ..GONE };
        assert_eq!(
            decide_recovery(&saving(true, true), whole),
            RecoveryAction::RecordEnd { unfinished: None }
        );
    }

    #[test]
    fn a_started_restore_is_served_on() {
        let mode = RestoreMode::Locality;
        let (image, ids, on_error) = ("/i".into(), ids(), ReadFailurePolicy::Kill);
        let fill = FillChoices::default();
        let serve = RecoveryAction::ServeOn { image, ids, mode, on_error, fill, cont: true };
        assert_eq!(decide_recovery(&restoring(true), LIVES), serve);
        assert_eq!(
            decide_recovery(&restoring(true), GONE),
            RecoveryAction::RecordEnd { unfinished: None }
        );
    }
}
