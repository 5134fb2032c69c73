//! `firn completions`

use clap::{Args as ClapArgs, CommandFactory};
use clap_complete::Shell;
use firn_supervisor::Failure;

use crate::output::{self, FactPrinter};

/// Print a shell's completion script.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn completions bash > /etc/bash_completion.d/firn
  firn completions zsh > ~/.zfunc/_firn")]
pub struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

impl CompletionsArgs {
    /// Runs the verb.
    pub fn run(&self, _out: FactPrinter) -> Result<(), Failure> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut crate::FirnCli::command(), "firn", &mut script);
        output::print_text(&String::from_utf8_lossy(&script))
    }
}
