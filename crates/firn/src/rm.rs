//! `firn rm`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, VmName, forget};

use crate::output::Output;

/// Forget a VM that has ended, with its logs.
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
        forget(&base, &self.name)?;
        let facts = serde_json::json!({ "name": self.name, "forgotten": true });
        out.facts(&facts, || format!("{} is forgotten\n", self.name))
    }
}
