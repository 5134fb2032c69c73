//! A program in the guest of a VM that was restored, which the guest agent runs: it gives the guest an
//! identity of its own, for example.

use std::thread;
use std::time::{Duration, Instant};

use firn_vmm::{GuestAgentError, GuestProgramEnd};

use crate::operations::guest_agent;
use crate::processes::runtime::VmDir;
use crate::records::failure::{Failure, FailureContext as _, FailureKind};
use crate::records::journal::Journal;

/// How often the journal is read while the guest's file systems are frozen.
const THAW_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Runs a program in the guest of a VM, and waits until it has ended.
///
/// # Errors
/// If the VM has no guest agent, the agent does not answer or can't start the program, or the program has
/// not ended within this time.
pub fn run_in_guest(
    vm: &VmDir,
    program: &str,
    arguments: &[String],
    time_limit: Duration,
) -> Result<GuestProgramEnd, Failure> {
    let deadline = Instant::now() + time_limit;
    let journal = wait_until_thawed(vm, deadline)?;
    let socket = journal
        .hypervisor_record
        .and_then(|record| guest_agent::find_socket(record.process.pid))
        .ok_or_else(no_agent_failure)?;
    let mut agent = guest_agent::connect(&socket, deadline).map_err(agent_failure)?;
    agent.run_program(program, arguments).map_err(agent_failure)
}

/// A guest that was saved while its file systems were frozen is thawed first.
fn wait_until_thawed(vm: &VmDir, deadline: Instant) -> Result<Journal, Failure> {
    loop {
        let journal = Journal::load(&vm.journal_file()).while_doing("reading the journal")?;
        match journal {
            Some(journal) if journal.frozen && Instant::now() < deadline => {
                thread::sleep(THAW_POLL_INTERVAL);
            }
            Some(journal) => return Ok(journal),
            None => return Err(Failure::new(FailureKind::NoSuchVm, "the VM has ended")),
        }
    }
}

/// The failure of a VM whose command line has no guest agent.
pub(crate) fn no_agent_failure() -> Failure {
    let text = "the VM has no guest agent that Firn could ask";
    Failure::new(FailureKind::Refused, text).with_hint(
        "start it with a virtserialport that is named org.qemu.guest_agent.0, on a `-chardev socket`, and run \
         qemu-ga in the guest",
    )
}

/// The failure of a request to a guest agent.
pub(crate) fn agent_failure(error: GuestAgentError) -> Failure {
    let failure = Failure::from_error(FailureKind::Other, &error);
    match error {
        GuestAgentError::NoAnswer { .. } | GuestAgentError::Socket(_) => failure.with_hint(
            "check that qemu-ga runs in the guest and no other program is connected to its socket",
        ),
        GuestAgentError::StillRuns { .. } => {
            failure.with_hint("give it more time: --hook-timeout 5m")
        }
        _ => failure,
    }
}
