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

use crate::journal::Phase;
use crate::name::VmName;

/// Whether a supervisor answers for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Supervision {
    /// Its supervisor answers.
    Answers,
    /// Its supervisor lives but does not answer.
    Mute,
    /// It has no supervisor, and successors die.
    Absent,
}

/// What is left of a VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Remnant<'a> {
    /// The phase in the journal; `None` if the journal can't be read.
    pub phase: Option<&'a Phase>,
    /// Whether a supervisor answers for it.
    pub supervision: Supervision,
    /// Whether the hypervisor process lives.
    pub hypervisor_lives: bool,
}

/// A command that ends a VM or puts it under a supervisor again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// `firn stop`
    Stop,
    /// `firn stop --force`
    StopForce,
    /// `firn rm`
    Rm,
    /// `firn attach`
    Attach,
}

impl Command {
    /// The command for this VM, as a user types it.
    pub fn line(self, name: &VmName) -> String {
        format!("{self} {name}")
    }
}

impl fmt::Display for Command {
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
pub fn way_out(remnant: Remnant<'_>) -> Command {
    let Some(phase) = remnant.phase else { return Command::StopForce };
    match (phase, remnant.supervision) {
        (Phase::Detached, _) if remnant.hypervisor_lives => Command::Attach,
        (phase, _) if phase.is_over() => Command::Rm,
        (_, Supervision::Answers) => Command::Stop,
        (_, Supervision::Mute | Supervision::Absent) => Command::StopForce,
    }
}

/// The command that helps after another one has failed.
pub fn way_out_after(failed: Command) -> Command {
    match failed {
        Command::Stop | Command::Attach | Command::Rm | Command::StopForce => Command::StopForce,
    }
}

/// A step of `firn stop --force`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
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
pub fn forced_end(remnant: Remnant<'_>) -> &'static [Deed] {
    let is_over = remnant.phase.is_some_and(Phase::is_over);
    match remnant.supervision {
        _ if is_over => &[Deed::EndHypervisor, Deed::Forget],
        Supervision::Answers => {
            &[Deed::Ask, Deed::EndHypervisor, Deed::EndSupervisor, Deed::Settle, Deed::Forget]
        }
        Supervision::Mute | Supervision::Absent => {
            &[Deed::EndHypervisor, Deed::EndSupervisor, Deed::Settle, Deed::Forget]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Exit;
    use firn_restore::{Mode, OnError};

    fn phases() -> Vec<Option<Phase>> {
        let mut phases = vec![
            Phase::Starting { launching: None },
            Phase::Starting { launching: Some("/q".into()) },
            Phase::Running,
            Phase::Protecting { paused_by_us: false },
            Phase::Protecting { paused_by_us: true },
            Phase::Standby { started: false },
            Phase::Standby { started: true },
            Phase::Ended { exit: Exit::Signal(9), at: 1 },
            Phase::Detached,
        ];
        for bits in 0..4u8 {
            let (first, second) = (bits & 1 == 1, bits & 2 == 2);
            phases.push(Phase::Saving {
                image: "/i".into(),
                replaces: None,
                paused_by_us: first,
                then_stop: second,
                drives: Vec::new(),
            });
            phases.push(Phase::Restoring {
                image: "/i".into(),
                identity: "1f".into(),
                mode: Mode::Lazy,
                started: first,
                on_error: if second { OnError::Stop } else { OnError::Kill },
                paused_by_us: first && second,
                stays_paused: false,
            });
        }
        phases.into_iter().map(Some).chain([None]).collect()
    }

    /// A VM as the commands find it, in the model.
    #[derive(Clone, Debug)]
    struct World {
        phase: Option<Phase>,
        supervision: Supervision,
        hypervisor_lives: bool,
        /// QEMU's main thread answers its monitor.
        monitor_answers: bool,
        forgotten: bool,
    }

    impl World {
        fn remnant(&self) -> Remnant<'_> {
            let Self { phase, supervision, hypervisor_lives, .. } = self;
            let (supervision, hypervisor_lives) = (*supervision, *hypervisor_lives);
            Remnant { phase: phase.as_ref(), supervision, hypervisor_lives }
        }

        fn is_well(&self) -> bool {
            let is_over = self.phase.as_ref().is_none_or(Phase::is_over);
            self.forgotten || (!is_over && self.supervision == Supervision::Answers)
        }

        /// Whether the command succeeds.
        fn run(&mut self, command: Command) -> bool {
            match command {
                Command::Rm => {
                    self.forgotten = self.phase.as_ref().is_some_and(Phase::is_over);
                    self.forgotten
                }
                Command::Attach if self.monitor_answers && self.hypervisor_lives => {
                    (self.phase, self.supervision) = (Some(Phase::Running), Supervision::Answers);
                    true
                }
                Command::Attach => false,
                Command::Stop => {
                    let asks = self.supervision == Supervision::Answers;
                    self.forgotten = asks && (self.monitor_answers || !self.hypervisor_lives);
                    self.forgotten
                }
                Command::StopForce => self.force(),
            }
        }

        fn force(&mut self) -> bool {
            for deed in forced_end(self.remnant()) {
                match deed {
                    // It kills a QEMU that does not quit; whether it gets to it is not certain.
                    Deed::Ask => {}
                    Deed::EndHypervisor => self.hypervisor_lives = false,
                    Deed::EndSupervisor => self.supervision = Supervision::Absent,
                    Deed::Settle => {
                        assert!(!self.hypervisor_lives, "a successor would go on");
                        assert_ne!(self.supervision, Supervision::Mute, "it would be waited for");
                        self.phase = Some(Phase::Ended { exit: Exit::Unknown, at: 1 });
                    }
                    Deed::Forget => {
                        assert!(!self.hypervisor_lives, "nobody would know it");
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
            for supervision in [Supervision::Answers, Supervision::Mute, Supervision::Absent] {
                for bits in 0..4u8 {
                    let (hypervisor_lives, monitor_answers) = (bits & 1 == 1, bits & 2 == 2);
                    let phase = phase.clone();
                    let forgotten = false;
                    let mut world =
                        World { phase, supervision, hypervisor_lives, monitor_answers, forgotten };
                    let start = world.clone();
                    let first = way_out(world.remnant());
                    if !world.run(first) {
                        let second = way_out_after(first);
                        assert!(world.run(second), "{start:?}: {first}, then {second}");
                    }
                    assert!(world.is_well(), "{start:?}: {first} leaves {world:?}");
                    states += 1;
                }
            }
        }
        assert_eq!(states, 18 * 3 * 4);
    }
}
