//! `firn stop`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, Request, StopRequest, VmName, ask};

use crate::output::Output;
use crate::overlays;

/// End a VM.
///
/// Without options this is pulling the plug: QEMU flushes its disks and ends, the guest is not asked.
///
/// Examples:
///   firn stop web
///   firn stop web --powerdown        press the guest's power button, and wait a minute
///   firn stop web --powerdown=10     ... ten seconds
///   firn stop web --discard          forget what it wrote to its disks since the last checkpoint
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The VM.
    name: VmName,
    /// Press the guest's power button and wait this many seconds; it runs on if that is not enough.
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "60"
    )]
    powerdown: Option<u64>,
    /// End it even while a checkpoint is being written, which is then lost.
    #[arg(long)]
    force: bool,
    /// Remove the overlays that it writes to: what it wrote since it was last saved or restored is lost.
    #[arg(long, conflicts_with = "keep")]
    discard: bool,
    /// Leave the overlays that it writes to, and say where they are (the default).
    #[arg(long)]
    keep: bool,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        // Nobody can be asked afterwards.
        let overlays = overlays::of(&base, &self.name);
        let (powerdown_s, force, discard) = (self.powerdown, self.force, self.discard);
        let request = StopRequest { powerdown_s, force, discard };
        ask(&base, &self.name, &Request::Stop(request), &mut |_| ())
            .map_err(|failure| failure.while_doing(format!("can't stop {}", self.name)))?;
        let overlays = overlays::left(overlays);
        let facts = serde_json::json!({ "name": self.name, "stopped": true, "overlays": overlays });
        out.facts(&facts, || format!("{} has ended\n{}", self.name, overlays::lines(&overlays)))
    }
}
