//! `firn disk commit`

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, SupervisorRequest, VmName};
use firn_types::make_printable;

use crate::output::FactPrinter;

/// Merge all layers of a running VM's disks into the disks' original files.
///
/// After a checkpoint a VM may write to a layer on top of its disk's file, because the file belongs
/// to the image. When no image needs the file and the layers any more (`firn image rm`), this
/// command merges the layers into the file, and the VM writes to the file again. From then on the
/// VM's own command line starts the VM on its newest state. The VM is paused for some milliseconds
/// at the end.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn disk commit web")]
pub struct DiskCommitArgs {
    /// The VM.
    name: VmName,
}

impl DiskCommitArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let facts = super::request_merge(&self.name, &SupervisorRequest::CommitDisks).map_err(
            |failure| failure.while_doing(format!("can't commit the disks of {}", self.name)),
        )?;
        out.print_facts(&facts, || describe_committed(&facts))
    }
}

fn describe_committed(facts: &serde_json::Value) -> String {
    let line = |disk: &serde_json::Value| {
        let text = |key: &str| make_printable(disk[key].as_str().unwrap_or("?"));
        let layers = disk["layers"].as_u64().unwrap_or(0);
        format!(
            "disk {}: the VM writes to {} again; {layers} layers are merged\n",
            text("drive"),
            text("file")
        )
    };
    let committed = facts["committed"].as_array();
    match committed.filter(|committed| !committed.is_empty()) {
        Some(committed) => committed.iter().map(line).collect(),
        None => "the VM writes to its disks' own files already\n".to_owned(),
    }
}
