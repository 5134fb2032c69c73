//! `firn image pull`

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::Failure;

use super::stored::{StoredFileFacts, describe_files, run_store};
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
        check_output(&self.path)?;
        let words = ["pull", "--", &self.location].map(OsStr::new);
        let facts = run_store(words.into_iter().chain([self.path.as_os_str()]))?;
        out.print_facts(&facts, || describe_files(&facts, describe_pulled))
    }
}

fn describe_pulled(file: &StoredFileFacts) -> String {
    let path = printable_path(&file.image);
    match file.was_there {
        true => format!("{path}: is here already\n"),
        false => {
            format!("{path}: {} from {}\n", units::format_bytes(file.file_bytes), file.location)
        }
    }
}
