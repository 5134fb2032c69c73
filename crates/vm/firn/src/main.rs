//! The `firn` command.
//!
//! One file per verb; the doc comment of its arguments is its help. Every verb succeeds or ends
//! with a [`Failure`]. The failure is printed once, as a chain from the request down to the cause,
//! followed by advice, and its kind is the exit code. Facts go to standard output, with `--json` as
//! one JSON value. Progress goes to standard error, and only to a terminal.

#![forbid(unsafe_code)]
#![allow(rustdoc::broken_intra_doc_links, reason = "doc comments of options are the help")]

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use firn_control::usage;
use firn_supervisor::Failure;

mod agent;
mod attach;
mod bar;
mod calls;
mod checkpoint;
mod choices;
mod clones;
mod cluster;
mod completions;
mod console;
mod detach;
mod disk;
mod doctor;
mod every;
mod failover;
mod fork;
mod hidden;
mod hooks;
mod image;
mod keys;
mod libvirt;
mod live;
mod logs;
mod ls;
mod man;
mod move_vm;
mod output;
mod overlays;
mod overrides;
mod protect;
mod release;
mod report;
mod restore;
mod rm;
mod run;
mod series;
mod spool;
mod standby;
mod status;
mod stop;
mod suspend;
mod units;
mod unlock;
mod working_set;

use output::FactPrinter;

/// What follows the options in the help of `firn`. No line has more than 60 columns.
const NOTES: &str = "\
Examples:
  # start a VM
  firn run web -- qemu-system-x86_64 -m 1G ...
  # save it; it continues to run
  firn checkpoint web -o web.firn
  # end it, and start it from the checkpoint
  firn stop web
  firn restore web.firn

Exit codes:
  0  done
  1  failed for a reason not listed here
  2  the command line is wrong
  3  there is no such VM, or it does not run
  4  the VM is busy, or the name is taken
  5  refused: QEMU or a disk is not what the image records,
     or the key of a sealed image is missing
  6  the image is damaged, or the file is not an image
  7  the host or your permissions lack something
  8  ended early: the VM ended, or you cancelled

Environment:
  FIRN_RUNTIME_DIR  the directory of VMs; by default
                    /run/firn or $XDG_RUNTIME_DIR/firn
  FIRN_LOG          log level of supervisors: error, warn,
                    info (the default), debug, trace
  FIRN_IDENTITY     as --identity
  FIRN_KEY_FILE     as --key-file, but does not seal
  FIRN_KEY_COMMAND  as --key-command, but does not seal";

/// Checkpoint and restore running virtual machines.
///
/// A checkpoint is taken while the guest works, with a pause of milliseconds. After a restore the
/// guest works at once, while its memory is loaded. Guests, hypervisor and host kernel are
/// unmodified.
#[derive(Debug, Parser)]
#[command(name = "firn", version, disable_help_subcommand = true, after_long_help = NOTES)]
struct FirnCli {
    /// Print facts as JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    keys: keys::KeyArgs,
    #[command(subcommand)]
    verb: FirnVerb,
}

/// A verb with its arguments. A doc comment of a variant would replace the verb's help.
#[derive(Debug, Subcommand)]
enum FirnVerb {
    // Starts a VM from a QEMU command line.
    Run(run::RunVmArgs),
    // Begins to manage a VM that runs already.
    Attach(attach::AttachArgs),
    // Ends to manage a VM, which continues to run.
    Detach(detach::DetachArgs),
    // Lists the VMs that Firn manages.
    Ls(ls::LsArgs),
    // Shows the state of a VM.
    Status(status::StatusArgs),
    // Prints the log of a VM's supervisor, and the output of its QEMU.
    Logs(logs::LogsArgs),
    // Connects the terminal to a guest's serial console.
    Console(console::ConsoleArgs),
    // Saves a VM, which continues to run.
    Checkpoint(checkpoint::CheckpointArgs),
    // Saves a VM and ends it.
    Suspend(suspend::SuspendArgs),
    // Starts a VM from an image.
    Restore(restore::RestoreArgs),
    // Gives a VM the key of the sealed image that it is being restored from.
    Unlock(unlock::UnlockArgs),
    // Starts clones of a running VM.
    Fork(fork::ForkArgs),
    // Replicates a VM to a standby on another host.
    Protect(protect::ProtectArgs),
    // Ends the protection of a VM, which continues to run.
    Release(release::ReleaseArgs),
    // Receives another host's VM epoch by epoch, and is ready to run it.
    Standby(standby::StandbyArgs),
    // Runs the VM of a standby.
    Failover(failover::FailoverArgs),
    // Moves a VM to its backup, and loses nothing.
    Move(move_vm::MoveArgs),
    // Queries this host's agent: the process that connects it to other hosts.
    Agent(agent::AgentCommandArgs),
    // Protects several VMs as one, and shows what the hosts have recorded.
    Cluster(cluster::ClusterCommandArgs),
    // Ends a VM.
    Stop(stop::StopArgs),
    // Removes the logs of a VM that has ended.
    Rm(rm::RmArgs),
    // Inspects, checks and rewrites images, and copies them to and from object storage.
    Image(image::ImageCommandArgs),
    // Merges the layers (overlays) of a VM's disks.
    Disk(disk::DiskCommandArgs),
    // Draws a page that compares restores, from their run records.
    Report(report::ReportArgs),
    // Shows what this host, or a VM, lacks for Firn.
    Doctor(doctor::DoctorArgs),
    // Prints a shell's completion script.
    Completions(completions::CompletionsArgs),
    // Writes the manual pages, for packages.
    #[command(name = man::VERB, hide = true)]
    Man(man::ManArgs),
    // Is the supervisor of a VM; started by Firn.
    #[command(name = firn_supervisor::SUPERVISE, hide = true)]
    Supervise(hidden::SuperviseVmArgs),
    // Is a guard of a supervisor; started by Firn.
    #[command(name = firn_supervisor::GUARD, hide = true)]
    Guard(hidden::GuardVmArgs),
    // Is the holder of a template of clones; started by Firn.
    #[command(name = firn_supervisor::HOLD_TEMPLATE, hide = true)]
    HoldTemplate(hidden::HoldTemplateArgs),
}

impl FirnVerb {
    fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        match self {
            Self::Run(args) => args.run(out),
            Self::Attach(args) => args.run(out),
            Self::Detach(args) => args.run(out),
            Self::Ls(args) => args.run(out),
            Self::Status(args) => args.run(out),
            Self::Logs(args) => args.run(out),
            Self::Console(args) => args.run(out),
            Self::Checkpoint(args) => args.run(out),
            Self::Suspend(args) => args.run(out),
            Self::Restore(args) => args.run(out),
            Self::Unlock(args) => args.run(out),
            Self::Fork(args) => args.run(out),
            Self::Protect(args) => args.run(out),
            Self::Release(args) => args.run(out),
            Self::Standby(args) => args.run(out),
            Self::Failover(args) => args.run(out),
            Self::Move(args) => args.run(out),
            Self::Agent(args) => args.run(out),
            Self::Cluster(args) => args.run(out),
            Self::Stop(args) => args.run(out),
            Self::Rm(args) => args.run(out),
            Self::Image(args) => args.run(out),
            Self::Disk(args) => args.run(out),
            Self::Report(args) => args.run(out),
            Self::Doctor(args) => args.run(out),
            Self::Completions(args) => args.run(out),
            Self::Man(args) => args.run(),
            Self::Supervise(args) => args.run(),
            Self::Guard(args) => args.run(),
            Self::HoldTemplate(args) => args.run(),
        }
    }
}

fn main() -> ExitCode {
    firn_fault::pass_point("command.started");
    completions::answer_shell();
    let (out, done) = match FirnCli::try_parse() {
        Ok(cli) => {
            let out = FactPrinter::new(cli.json);
            (out, cli.keys.use_sources().and_then(|()| cli.verb.run(out)))
        }
        Err(error) => match usage::usage_failure(&error) {
            Some(failure) => {
                let out = FactPrinter::new(usage::wants_json(std::env::args_os()));
                (out, Err(failure))
            }
            None => error.exit(),
        },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            out.print_failure(&failure);
            ExitCode::from(failure.kind.exit_code())
        }
    }
}

#[cfg(test)]
#[path = "../tests/it/path_table.rs"]
#[expect(dead_code, reason = "shared with end-to-end tests, which run the commands")]
mod path_table;

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use std::any::TypeId;
    use std::path::PathBuf;

    use firn_epochs::endpoint::BackupEndpoint;

    #[test]
    fn the_command_line_contradicts_itself_nowhere() {
        FirnCli::command().debug_assert();
    }

    /// The arguments of a verb, and of its own verbs, that take a path, or a text that may contain
    /// one.
    fn path_arguments(verb: &clap::Command, name: &str) -> Vec<String> {
        let types = [
            TypeId::of::<PathBuf>(),
            TypeId::of::<(String, PathBuf)>(),
            TypeId::of::<String>(),
            TypeId::of::<(String, String)>(),
            TypeId::of::<BackupEndpoint>(),
        ];
        let takes_path = |argument: &&clap::Arg| {
            types.iter().any(|it| argument.get_value_parser().type_id() == *it)
        };
        let own = verb
            .get_arguments()
            .filter(takes_path)
            .map(|it| format!("{name} {}", it.get_id()).trim_start().to_owned());
        let below = verb
            .get_subcommands()
            .flat_map(|it| path_arguments(it, format!("{name} {}", it.get_name()).trim_start()));
        own.chain(below).collect()
    }

    #[test]
    fn every_argument_that_takes_a_path_is_tried_with_hostile_files() {
        let mut found = path_arguments(&FirnCli::command(), "");
        let mut tried: Vec<String> = path_table::ARGUMENTS
            .iter()
            .map(|argument| argument.name)
            .chain(path_table::NOT_OPENED)
            .map(str::to_owned)
            .collect();
        found.sort_unstable();
        tried.sort_unstable();
        assert_eq!(found, tried, "add the argument to crates/vm/firn/tests/it/path_table.rs");
    }

    #[test]
    fn every_verb_and_option_has_help() {
        for verb in FirnCli::command().get_subcommands().filter(|verb| !verb.is_hide_set()) {
            assert!(verb.get_about().is_some(), "{}", verb.get_name());
            for argument in verb.get_arguments() {
                assert!(argument.get_help().is_some(), "{} {argument}", verb.get_name());
            }
        }
    }
}
