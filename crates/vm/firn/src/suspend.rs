//! `firn suspend`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, SupervisorRequest, VmName};
use firn_types::make_printable;

use crate::checkpoint::{ImageArgs, recovery_notice, request_save};
use crate::output::FactPrinter;
use crate::overlays;
use crate::units;

/// Save a VM to an image and end it.
///
/// Firn first scans for a second which memory the guest uses, because a restore reads that memory
/// first. (With `firn run --working-set access-bits` Firn knows this already.) Then Firn pauses the
/// guest, so that the disks stay in the state that belongs to the image. `firn restore` continues
/// the guest from that state. If the image cannot be written the VM continues to run.
///
/// With --output s3://BUCKET/KEY the image is uploaded while the guest is paused. The VM ends when the
/// object is there. If the upload fails, the VM continues, and no image is left.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn suspend web -o web.firn
  firn suspend web -o s3://vms/prod/web.firn")]
pub struct SuspendArgs {
    /// The VM.
    name: VmName,
    #[command(flatten)]
    image: ImageArgs,
}

impl SuspendArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let request = SupervisorRequest::for_suspend(self.image.save_request()?);
        let command = overlays::request_restart_command(&base, &self.name);
        let mut facts = request_save(&base, &self.name, &request)
            .map_err(|failure| failure.while_doing(format!("can't suspend {}", self.name)))?;
        if let (Some(command), Some(facts)) = (&command, facts.as_object_mut()) {
            facts.insert("command".to_owned(), serde_json::json!(command.words));
        }
        let spoils = "its disks alone, without its memory (the image can't be restored afterwards)";
        let alone = command.map_or(String::new(), |it| it.describe_change(spoils));
        out.print_facts(&facts, || format!("{}{alone}", describe_suspend(&facts)))
    }
}

fn describe_suspend(facts: &serde_json::Value) -> String {
    if let Some(notice) = recovery_notice(facts) {
        return notice;
    }
    format!(
        "{}: {}; the VM has ended\n",
        make_printable(facts["image"].as_str().unwrap_or("?")),
        units::format_bytes(facts["report"]["image_bytes"].as_u64().unwrap_or(0)),
    )
}
