//! The clock of a restored guest. It continues from the time of the checkpoint, which is in the
//! guest's memory. If QEMU serves the socket of a guest agent, Firn has the agent set the
//! clock as soon as it answers, while the guest runs already.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use firn_vmm::command_line::find_agent_socket;
use firn_vmm::{GuestAgent, GuestAgentError};

use crate::hypervisor::qemu::command_line;

/// How long an agent may take. In a guest whose memory is still being loaded, it answers late.
const PATIENCE: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_millis(100);

/// Sets the clock of the guest of this QEMU, in a thread of its own. Does nothing if its command line
/// has no guest agent.
pub(crate) fn set_in_background(pid: i32) {
    let Ok((words, directory)) = command_line(pid) else { return };
    let Some(socket) = find_agent_socket(&words) else { return };
    let socket = directory.join(socket);
    let set = move || match set_clock(&socket) {
        Ok(offset) => tracing::info!(
            "the guest agent has set the guest's clock, which differs by {:.1} ms now",
            offset as f64 / 1e6
        ),
        Err(error) => tracing::warn!("the guest's clock is still that of the checkpoint: {error}"),
    };
    if let Err(error) = thread::Builder::new().name("guest clock".into()).spawn(set) {
        tracing::warn!("the guest's clock is still that of the checkpoint: {error}");
    }
}

fn set_clock(socket: &Path) -> Result<i128, GuestAgentError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let number = RandomState::new().build_hasher().finish() as u32;
        match GuestAgent::connect(socket, number, deadline) {
            Ok(mut agent) => return agent.set_time(),
            Err(GuestAgentError::Socket(_)) if Instant::now() < deadline => thread::sleep(RETRY),
            Err(error) => return Err(error),
        }
    }
}
