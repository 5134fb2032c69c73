//! `firn release`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, Request, VmName, ask};

use crate::output::Output;

/// Protect a VM no longer; it runs on.
///
/// Its standby keeps what it has until it is stopped. What was held of the VM's output leaves, also if its standby was lost before:
/// make sure that the standby does not run.
///
/// Example:
///   firn release web
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
        let facts = ask(&base, &self.name, &Request::Release, &mut |_| ())
            .map_err(|failure| failure.while_doing(format!("can't release {}", self.name)))?;
        out.facts(&facts, || format!("{} runs on, and is not protected any more\n", self.name))
    }
}
