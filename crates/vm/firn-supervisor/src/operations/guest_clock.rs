//! The clock of a restored guest. It continues from the time of the checkpoint, which is in the
//! guest's memory. If QEMU serves the socket of a guest agent, Firn has the agent set the
//! clock as soon as it answers, while the guest runs already.

use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use firn_vmm::GuestAgentError;

use crate::operations::guest_agent;

/// How long an agent may take. In a guest whose memory is still being loaded, it answers late.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sets the clock of the guest of this QEMU, in a thread of its own. Does nothing if its command line
/// has no guest agent. A guest that is frozen is thawed before, by this thread.
pub(crate) fn set_in_background(pid: i32, thaw: Option<JoinHandle<()>>) {
    let Some(socket) = guest_agent::find_socket(pid) else { return };
    let set = move || match set_thawed_clock(&socket, thaw) {
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

fn set_thawed_clock(socket: &Path, thaw: Option<JoinHandle<()>>) -> Result<i128, GuestAgentError> {
    thaw.into_iter().for_each(|thread| _ = thread.join());
    guest_agent::connect(socket, Instant::now() + PATIENCE)?.set_time()
}
