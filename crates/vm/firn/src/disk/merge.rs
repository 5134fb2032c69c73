//! `firn disk merge`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, SupervisorRequest, VmName};

use crate::output::FactPrinter;

/// Merge the disk layers of a running VM that no image needs.
///
/// `firn checkpoint --every` does this automatically, and so does a checkpoint of a VM with many
/// layers.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn disk merge web")]
pub struct DiskMergeArgs {
    /// The VM.
    name: VmName,
}

impl DiskMergeArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let facts = super::request_merge(&self.name, &SupervisorRequest::MergeDisks).map_err(
            |failure| failure.while_doing(format!("can't merge the layers of {}", self.name)),
        )?;
        let layers = facts["merged"].as_u64().unwrap_or(0);
        out.print_facts(&facts, || format!("{layers} layers are merged\n"))
    }
}
