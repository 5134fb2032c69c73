//! `firn release`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, Request, VmName, ask};

use crate::output::Output;

/// End the protection of a VM; it continues to run.
///
/// Its standby first confirms that it never runs the VM; then the VM's buffered output leaves. If
/// the standby cannot be reached, the protection ends, but the output stays buffered; a second
/// release lets it leave without any confirmation: make sure that the standby does not run.
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
        out.facts(&facts, || format!("{} continues to run, and is not protected any more\n", self.name))
    }
}
