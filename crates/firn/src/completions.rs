//! `firn completions`

use clap::{Args as ClapArgs, CommandFactory};
use clap_complete::Shell;
use firn_supervisor::Failure;

use crate::output::{self, Output};

/// Print a shell's completion script.
///
/// Examples:
///   firn completions bash > /etc/bash_completion.d/firn
///   firn completions zsh > ~/.zfunc/_firn
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The shell.
    shell: Shell,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, _out: Output) -> Result<(), Failure> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut crate::Cli::command(), "firn", &mut script);
        output::print(&String::from_utf8_lossy(&script))
    }
}
