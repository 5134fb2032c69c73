//! The command that ends a VM or puts it under a supervisor again, determined from what is left of
//! it. A pure core, so that a test can go through all states.
//!
//! ```text
//!   phase in journal     supervisor       hypervisor   `firn ls` names
//!   ended, detached      none is needed   gone         firn rm
//!   detached             none is needed   lives        firn attach
//!   anything else        answers          any          firn stop       (if QEMU does not quit: firn stop --force)
//!   anything else        does not answer  any          firn stop --force
//!   anything else        dies repeatedly  any          firn stop --force
//!   can't be read        any              any          firn stop --force
//! ```
//!
//! `firn stop --force` needs no other process: it finds the VM's processes by the journal (pid and
//! start time), or, without a readable journal, by the monitor socket on QEMU's command line.

use std::fmt;

use crate::records::journal::VmPhase;
use crate::records::name::VmName;

/// Whether a supervisor answers for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SupervisorState {
    /// Its supervisor answers.
    Answers,
    /// Its supervisor lives but does not answer.
    Mute,
    /// It has no supervisor, and successors die.
    Absent,
}

/// What is left of a VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VmState<'a> {
    /// The phase in the journal; `None` if the journal can't be read.
    pub phase: Option<&'a VmPhase>,
    /// Whether a supervisor answers for it.
    pub supervision: SupervisorState,
    /// Whether the hypervisor process lives.
    pub is_hypervisor_alive: bool,
}

/// A command that ends a VM or puts it under a supervisor again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuggestedCommand {
    /// `firn stop`
    Stop,
    /// `firn stop --force`
    StopForce,
    /// `firn rm`
    Rm,
    /// `firn attach`
    Attach,
}

impl SuggestedCommand {
    /// The command for this VM, as a user types it.
    pub fn command_line(self, name: &VmName) -> String {
        format!("{self} {name}")
    }
}

impl fmt::Display for SuggestedCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop => "firn stop",
            Self::StopForce => "firn stop --force",
            Self::Rm => "firn rm",
            Self::Attach => "firn attach",
        })
    }
}

/// The command that helps in this state.
pub fn suggest_command(remnant: VmState<'_>) -> SuggestedCommand {
    let Some(phase) = remnant.phase else { return SuggestedCommand::StopForce };
    match (phase, remnant.supervision) {
        (VmPhase::Detached, _) if remnant.is_hypervisor_alive => SuggestedCommand::Attach,
        (phase, _) if phase.is_over() => SuggestedCommand::Rm,
        (_, SupervisorState::Answers) => SuggestedCommand::Stop,
        (_, SupervisorState::Mute | SupervisorState::Absent) => SuggestedCommand::StopForce,
    }
}

/// The command that helps after another one has failed.
pub fn suggest_command_after(failed: SuggestedCommand) -> SuggestedCommand {
    match failed {
        SuggestedCommand::Stop
        | SuggestedCommand::Attach
        | SuggestedCommand::Rm
        | SuggestedCommand::StopForce => SuggestedCommand::StopForce,
    }
}

/// A step of `firn stop --force`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForcedStopStep {
    /// Send a stop request to the supervisor.
    Ask,
    /// Make QEMU quit, or kill it.
    EndHypervisor,
    /// Kill a supervisor that does not answer.
    EndSupervisor,
    /// Wait until a successor has recorded that the VM ended, or record it.
    Settle,
    /// Remove what is left of the VM.
    Forget,
}

/// The steps of `firn stop --force`, in order. The request may fail; then the other steps follow.
pub fn forced_stop_steps(remnant: VmState<'_>) -> &'static [ForcedStopStep] {
    let is_over = remnant.phase.is_some_and(VmPhase::is_over);
    match remnant.supervision {
        _ if is_over => &[ForcedStopStep::EndHypervisor, ForcedStopStep::Forget],
        SupervisorState::Answers => &[
            ForcedStopStep::Ask,
            ForcedStopStep::EndHypervisor,
            ForcedStopStep::EndSupervisor,
            ForcedStopStep::Settle,
            ForcedStopStep::Forget,
        ],
        SupervisorState::Mute | SupervisorState::Absent => &[
            ForcedStopStep::EndHypervisor,
            ForcedStopStep::EndSupervisor,
            ForcedStopStep::Settle,
            ForcedStopStep::Forget,
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::image_ids::ImageIds;
    use crate::records::process_exit::ProcessExit;
    use firn_restore::{FillChoices, ReadFailurePolicy, RestoreMode};
    use std::collections::BTreeSet;

    fn phases() -> Vec<Option<VmPhase>> {
        let mut phases = vec![
            VmPhase::Starting { launching: None },
            VmPhase::Starting { launching: Some("/q".into()) },
            VmPhase::Running,
            VmPhase::Merging { paused_by_us: false },
            VmPhase::Merging { paused_by_us: true },
            VmPhase::Protecting { paused_by_us: false },
            VmPhase::Protecting { paused_by_us: true },
            VmPhase::Standby { started: false },
            VmPhase::Standby { started: true },
            VmPhase::Ended { exit: ProcessExit::Signal(9), at: 1 },
            VmPhase::Detached,
        ];
        for bits in 0..4u8 {
            let (first, second) = (bits & 1 == 1, bits & 2 == 2);
            phases.push(VmPhase::Saving {
                image: "/i".into(),
                replaces: None,
                paused_by_us: first,
                then_stop: second,
                upload: None,
                drives: Vec::new(),
            });
            phases.push(VmPhase::Restoring {
                image: "/i".into(),
                ids: ImageIds { identity: "1f".into(), key_id: None },
                mode: RestoreMode::Lazy,
                started: first,
                fill: FillChoices::default(),
                on_error: if second { ReadFailurePolicy::Stop } else { ReadFailurePolicy::Kill },
                paused_by_us: first && second,
                must_stay_paused: false,
            });
        }
        phases.into_iter().map(Some).chain([None]).collect()
    }

    /// The names of all phases, from the error of a journal with an unknown one: no list here can
    /// miss a phase that the journal has.
    fn phase_names() -> BTreeSet<String> {
        let unknown = serde_json::from_str::<VmPhase>(r#"{"phase":"?"}"#).unwrap_err().to_string();
        let (_, known) = unknown.split_once("expected one of ").unwrap();
        known.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn each_phase_of_the_journal_is_among_the_states() {
        let name = |phase: &VmPhase| {
            serde_json::to_value(phase).unwrap()["phase"].as_str().unwrap().to_owned()
        };
        let tried: BTreeSet<String> = phases().iter().flatten().map(name).collect();
        assert!(tried.len() > 1);
        assert_eq!(tried, phase_names());
    }

    /// A VM as the commands find it, in the model.
    #[derive(Clone, Debug)]
    struct World {
        phase: Option<VmPhase>,
        supervision: SupervisorState,
        is_hypervisor_alive: bool,
        /// QEMU's main thread answers its monitor.
        monitor_answers: bool,
        forgotten: bool,
    }

    impl World {
        fn remnant(&self) -> VmState<'_> {
            let Self { phase, supervision, is_hypervisor_alive, .. } = self;
            let (supervision, is_hypervisor_alive) = (*supervision, *is_hypervisor_alive);
            VmState { phase: phase.as_ref(), supervision, is_hypervisor_alive }
        }

        fn is_well(&self) -> bool {
            let is_over = self.phase.as_ref().is_none_or(VmPhase::is_over);
            self.forgotten || (!is_over && self.supervision == SupervisorState::Answers)
        }

        /// Whether the command succeeds.
        fn run(&mut self, command: SuggestedCommand) -> bool {
            match command {
                SuggestedCommand::Rm => {
                    self.forgotten = self.phase.as_ref().is_some_and(VmPhase::is_over);
                    self.forgotten
                }
                SuggestedCommand::Attach if self.monitor_answers && self.is_hypervisor_alive => {
                    (self.phase, self.supervision) =
                        (Some(VmPhase::Running), SupervisorState::Answers);
                    true
                }
                SuggestedCommand::Attach => false,
                SuggestedCommand::Stop => {
                    let asks = self.supervision == SupervisorState::Answers;
                    self.forgotten = asks && (self.monitor_answers || !self.is_hypervisor_alive);
                    self.forgotten
                }
                SuggestedCommand::StopForce => self.force(),
            }
        }

        fn force(&mut self) -> bool {
            for deed in forced_stop_steps(self.remnant()) {
                match deed {
                    // It kills a QEMU that does not quit; whether it gets to it is not certain.
                    ForcedStopStep::Ask => {}
                    ForcedStopStep::EndHypervisor => self.is_hypervisor_alive = false,
                    ForcedStopStep::EndSupervisor => self.supervision = SupervisorState::Absent,
                    ForcedStopStep::Settle => {
                        assert!(!self.is_hypervisor_alive, "a successor would go on");
                        assert_ne!(
                            self.supervision,
                            SupervisorState::Mute,
                            "it would be waited for"
                        );
                        self.phase = Some(VmPhase::Ended { exit: ProcessExit::Unknown, at: 1 });
                    }
                    ForcedStopStep::Forget => {
                        assert!(!self.is_hypervisor_alive, "nobody would know it");
                        self.forgotten = true;
                    }
                }
            }
            self.forgotten
        }
    }

    #[test]
    fn from_every_state_two_commands_end_a_vm_or_bring_it_back() {
        let mut states = 0;
        for phase in phases() {
            for supervision in
                [SupervisorState::Answers, SupervisorState::Mute, SupervisorState::Absent]
            {
                for bits in 0..4u8 {
                    let (is_hypervisor_alive, monitor_answers) = (bits & 1 == 1, bits & 2 == 2);
                    let phase = phase.clone();
                    let forgotten = false;
                    let mut world = World {
                        phase,
                        supervision,
                        is_hypervisor_alive,
                        monitor_answers,
                        forgotten,
                    };
                    let start = world.clone();
                    let first = suggest_command(world.remnant());
                    if !world.run(first) {
                        let second = suggest_command_after(first);
                        assert!(world.run(second), "{start:?}: {first}, then {second}");
                    }
                    assert!(world.is_well(), "{start:?}: {first} leaves {world:?}");
                    states += 1;
                }
            }
        }
        assert_eq!(states, phases().len() * 3 * 4);
    }
}
