//! `firn disk merge`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, Request, VmName};

use crate::output::Output;

/// Merge the disk layers of a running VM that no image needs.
///
/// `firn checkpoint --every` does this automatically, and so does a checkpoint of a VM with many
/// layers.
///
/// Example:
///   firn disk merge web
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The VM.
    name: VmName,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        let facts = super::merge(&self.name, &Request::MergeDisks).map_err(|failure| {
            failure.while_doing(format!("can't merge the layers of {}", self.name))
        })?;
        let layers = facts["merged"].as_u64().unwrap_or(0);
        out.facts(&facts, || format!("{layers} layers are merged\n"))
    }
}
