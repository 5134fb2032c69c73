//! Connections to the agent in a VM's guest, by the socket that its QEMU serves.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use firn_vmm::command_line::find_agent_socket;
use firn_vmm::{GuestAgent, GuestAgentError};

use crate::hypervisor::qemu::command_line;

/// The time between two attempts to connect to a socket that can't be used.
const RETRY: Duration = Duration::from_millis(100);

/// The socket of the guest agent of this QEMU. `None` if its command line has no guest agent.
pub(crate) fn find_socket(pid: i32) -> Option<PathBuf> {
    let (words, directory) = command_line(pid).ok()?;
    Some(directory.join(find_agent_socket(&words)?))
}

/// Connects, and waits until the agent answers. In a guest whose memory is still being loaded, it answers
/// late.
pub(crate) fn connect(socket: &Path, deadline: Instant) -> Result<GuestAgent, GuestAgentError> {
    loop {
        let number = RandomState::new().build_hasher().finish() as u32;
        match GuestAgent::connect(socket, number, deadline) {
            Err(GuestAgentError::Socket(_)) if Instant::now() < deadline => thread::sleep(RETRY),
            connected => return connected,
        }
    }
}
