//! `firn release`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, Request, VmName, ask};

use crate::output::Output;

/// Protect a VM no longer; it runs on.
///
/// Its standby agrees first that it never runs the VM; then what was held of the VM's output leaves. If the standby is out of
/// reach, the VM is protected no longer, and holds on to what it sends; a second release lets that out without asking anybody: make sure
/// that the standby does not run.
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
