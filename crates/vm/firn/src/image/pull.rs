//! `firn image pull`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_objects::{PulledFile, pull_image};
use firn_supervisor::Failure;
use serde_json::json;

use super::stored::{TransferBar, parse_location, store_failure};
use crate::output::{FactPrinter, check_output, printable_path};
use crate::units;

/// Copy an image from object storage to this host.
///
/// LOCATION is s3://BUCKET/KEY, or https://HOST/PATH for a web server that has the image and sends
/// parts of files. Credentials for s3:// come from the environment, as for `firn image push`.
///
/// Each byte is checked before the image gets its name, and an older image of that name stays until
/// then. The images that it builds on are pulled into the same directory, under the names that the
/// image has for them; those that are there already are not pulled again.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn image pull s3://vms/prod/web.firn web.firn
  firn image pull https://images.example.org/web.firn web.firn")]
pub struct ImagePullArgs {
    /// The image in the store.
    location: String,
    /// The file to write.
    path: PathBuf,
}

impl ImagePullArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let location = parse_location(&self.location)?;
        check_output(&self.path)?;
        let pulled = {
            let bar = TransferBar::new();
            let show = |stage, done, total| bar.show_progress(stage, done, total);
            pull_image(&location, &self.path, super::open::worker_count(), &show).map_err(
                |error| store_failure(&error).while_doing(format!("can't pull {location}")),
            )?
        };
        let files: Vec<_> = pulled.iter().map(file_facts).collect();
        let facts = json!({
            "image": self.path.to_string_lossy(),
            "location": location.to_string(),
            "files": files,
        });
        out.print_facts(&facts, || pulled.iter().map(describe_file).collect())
    }
}

fn file_facts(file: &PulledFile) -> serde_json::Value {
    json!({
        "image": file.path.to_string_lossy(),
        "location": file.location.to_string(),
        "identity": file.identity,
        "file_bytes": file.bytes,
        "was_there": file.was_there,
        "signed": file.is_signed,
    })
}

fn describe_file(file: &PulledFile) -> String {
    let path = printable_path(&file.path);
    match file.was_there {
        true => format!("{path}: is here already\n"),
        false => format!("{path}: {} from {}\n", units::format_bytes(file.bytes), file.location),
    }
}
