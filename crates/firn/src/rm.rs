//! `firn rm`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, VmName, forget};

use crate::output::Output;
use crate::overlays;

/// Forget a VM that has ended, and remove its logs.
///
/// `firn ls` shows a VM that ended by itself until it is forgotten or its name is used again.
///
/// Example:
///   firn rm web
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The VM.
    name: VmName,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let overlays = overlays::of(&base, &self.name);
        forget(&base, &self.name)?;
        let overlays = overlays::left(overlays);
        let facts =
            serde_json::json!({ "name": self.name, "forgotten": true, "overlays": overlays });
        out.facts(&facts, || format!("{} is forgotten\n{}", self.name, overlays::lines(&overlays)))
    }
}
