//! `firn release`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, SupervisorRequest, VmName, send_request};

use crate::output::FactPrinter;

/// End the protection of a VM; it continues to run.
///
/// The standby first confirms that it will never run the VM. Then Firn releases the VM's buffered
/// output. If the standby cannot be reached, the protection ends, but the output stays buffered. A
/// second `firn release` releases the output without a confirmation: make sure first that the
/// standby does not run.
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
