//! `firn completions`, and what a shell then asks for while its user types.
//!
//! ```text
//!   firn completions bash ---> a script          the user types `firn stop w`, and a tab
//!                                                  |  the script runs firn with FIRN_COMPLETE=bash
//!                                                  v
//!                              options, values and paths of the command line; names of this host's VMs
//! ```

use clap::{Args as ClapArgs, Command, CommandFactory};
use clap_complete::Shell;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::{CompleteEnv, EnvCompleter, Shells};
use firn_supervisor::{Failure, FailureContext as _, VmName};

use crate::output::{self, FactPrinter};

/// The environment variable by which a script asks for candidates.
const VARIABLE: &str = "FIRN_COMPLETE";

/// Verbs whose names are not those of VMs that this host has.
const OTHER_NAMES: [&str; 4] = ["cluster", "restore", "run", "standby"];

/// Print a shell's completion script.
///
/// It completes verbs, options, their values, and the names of VMs. It asks `firn` for them, so
/// `firn` has to be in PATH.
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
        if let Some(shell) = Shells::builtins().completer(&self.shell.to_string()) {
            write_script(shell, &mut script).while_doing("writing the script")?;
        }
        output::print_text(&String::from_utf8_lossy(&script))
    }
}

fn write_script(shell: &dyn EnvCompleter, to: &mut Vec<u8>) -> std::io::Result<()> {
    shell.write_registration(VARIABLE, "firn", "firn", "firn", to)
}

/// Answers a shell that completes a command line, and ends the process; does nothing otherwise.
pub fn answer_shell() {
    CompleteEnv::with_factory(|| complete_names(crate::FirnCli::command()))
        .var(VARIABLE)
        .complete();
}

/// Adds the names of VMs to each argument that takes one.
fn complete_names(command: Command) -> Command {
    let name = |arg: clap::Arg| match arg.get_value_parser().type_id()
        == std::any::TypeId::of::<VmName>()
    {
        true => arg.add(ArgValueCandidates::new(list_names)),
        false => arg,
    };
    command.mut_subcommands(move |verb| match OTHER_NAMES.contains(&verb.get_name()) {
        true => verb,
        false => complete_names(verb.mut_args(name)),
    })
}

/// The VMs of this user's runtime directory; none if it can't be read.
fn list_names() -> Vec<CompletionCandidate> {
    let vms = crate::hidden::runtime_dir().ok().and_then(|base| base.list_vms().ok());
    let names = vms.unwrap_or_default();
    names.iter().map(|vm| CompletionCandidate::new(vm.name().as_str())).collect()
}
