//! `firn release`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, SupervisorRequest, VmName, send_request};

use crate::output::FactPrinter;

/// End the protection of a VM; it continues to run.
///
/// Its standby first confirms that it never runs the VM; then the VM's buffered output leaves. If
/// the standby cannot be reached, the protection ends, but the output stays buffered; a second
/// release lets it leave without any confirmation: make sure that the standby does not run.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn release web")]
pub struct ReleaseArgs {
    /// The VM.
    name: VmName,
}

impl ReleaseArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let facts = send_request(&base, &self.name, &SupervisorRequest::Release, &mut |_| ())
            .map_err(|failure| failure.while_doing(format!("can't release {}", self.name)))?;
        out.print_facts(&facts, || {
            format!("{} continues to run, and is not protected any more\n", self.name)
        })
    }
}
