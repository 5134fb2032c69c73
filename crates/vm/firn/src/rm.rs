//! `firn rm`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, VmName, forget_vm};

use crate::output::FactPrinter;
use crate::overlays;

/// Forget a VM that has ended, and remove its logs.
///
/// `firn ls` shows a VM that ended by itself until it is forgotten or its name is used again.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn rm web")]
pub struct RmArgs {
    /// The VM.
    name: VmName,
}

impl RmArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let overlays = overlays::overlays_of(&base, &self.name);
        forget_vm(&base, &self.name)?;
        let overlays = overlays::existing_overlays(overlays);
        let facts =
            serde_json::json!({ "name": self.name, "forgotten": true, "overlays": overlays });
        out.print_facts(&facts, || {
            format!("{} is forgotten\n{}", self.name, overlays::overlay_lines(&overlays))
        })
    }
}
