//! `firn image push`

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::Failure;

use super::stored::{StoredFileFacts, describe_files, run_store};
use crate::output::{FactPrinter, printable_path};
use crate::units;

/// Copy an image to object storage.
///
/// The store has S3 or its interface: LOCATION is s3://BUCKET/KEY. Credentials come from the
/// environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, and
/// AWS_ENDPOINT_URL for another store than that of AWS.
///
/// The image appears under its name when it is complete. If the command is interrupted, there is no
/// image; the next push to the same name removes what was uploaded. An image that is there already
/// with the same bytes is not pushed again, and another image of that name is an error.
///
/// The images that an image builds on must be in the store, below the same prefix and with the
/// names of their files: --chain pushes those that are missing. A signature (IMAGE.sig) is pushed
/// with the image.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn image push web.firn s3://vms/prod/web.firn
  firn image push web-20.firn s3://vms/web-20.firn --chain")]
pub struct ImagePushArgs {
    /// The image.
    image: PathBuf,
    /// Where to put it: s3://BUCKET/KEY.
    location: String,
    /// Also push the images that it builds on.
    #[arg(long)]
    chain: bool,
    /// Replace another image of that name. Images that build on the other image can't be restored
    /// then.
    #[arg(long)]
    force: bool,
}

impl ImagePushArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let flags = [("--chain", self.chain), ("--force", self.force)];
        let flags = flags.iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| OsStr::new(flag));
        let paths = [self.image.as_os_str(), OsStr::new(&self.location)];
        let words = [OsStr::new("push")].into_iter().chain(flags).chain([OsStr::new("--")]);
        let facts = run_store(words.chain(paths))?;
        out.print_facts(&facts, || describe_files(&facts, describe_pushed))
    }
}

fn describe_pushed(file: &StoredFileFacts) -> String {
    let (path, location) = (printable_path(&file.image), &file.location);
    match file.was_there {
        true => format!("{path}: is at {location} already\n"),
        false => format!("{path}: {} to {location}\n", units::format_bytes(file.file_bytes)),
    }
}
