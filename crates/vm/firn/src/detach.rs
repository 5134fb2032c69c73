//! `firn detach`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, SupervisorRequest, VmName, send_request};

use crate::output::FactPrinter;
use crate::overlays;

/// Detach from a VM; it continues to run without Firn.
///
/// Nothing of Firn stays in the hypervisor: no descriptor, no registered memory. Firn cannot detach
/// from a VM whose memory is still being restored; `firn status --watch` waits for that. A VM that
/// Firn started itself keeps its name and its monitor socket, so that `firn attach NAME` finds the
/// VM again. Until you attach the VM again, no frame passes through a network card of Firn's (`firn
/// run --help`).
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn detach web")]
pub struct DetachArgs {
    /// The VM.
    name: VmName,
}

impl DetachArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let overlays = overlays::overlays_of(&base, &self.name);
        send_request(&base, &self.name, &SupervisorRequest::Detach, &mut |_| ())
            .map_err(|failure| failure.while_doing(format!("can't detach {}", self.name)))?;
        let facts =
            serde_json::json!({ "name": self.name, "detached": true, "overlays": overlays });
        let lines = overlays::overlay_lines(&overlays);
        out.print_facts(&facts, || format!("{} continues to run without Firn\n{lines}", self.name))
    }
}
