//! `firn image push`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_objects::{PushOptions, PushedFile, push_image};
use firn_supervisor::Failure;
use serde_json::json;

use super::stored::{TransferBar, parse_location, store_failure};
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
        let location = parse_location(&self.location)?;
        let threads = super::open::worker_count();
        let options = PushOptions { chain: self.chain, force: self.force, threads };
        let explain =
            |failure: Failure| failure.while_doing(format!("can't push {}", self.image.display()));
        let pushed = {
            let bar = TransferBar::new();
            let show = |stage, done, total| bar.show_progress(stage, done, total);
            push_image(&self.image, &location, options, &show)
                .map_err(|error| explain(store_failure(&error)))?
        };
        let files: Vec<_> = pushed.iter().map(file_facts).collect();
        let facts = json!({
            "image": self.image.to_string_lossy(),
            "location": location.to_string(),
            "files": files,
        });
        out.print_facts(&facts, || pushed.iter().map(describe_file).collect())
    }
}

fn file_facts(file: &PushedFile) -> serde_json::Value {
    json!({
        "image": file.path.to_string_lossy(),
        "location": file.location.to_string(),
        "identity": file.identity,
        "file_bytes": file.bytes,
        "was_there": file.was_there,
        "signed": file.is_signed,
    })
}

fn describe_file(file: &PushedFile) -> String {
    let (path, location) = (printable_path(&file.path), &file.location);
    match file.was_there {
        true => format!("{path}: is at {location} already\n"),
        false => format!("{path}: {} to {location}\n", units::format_bytes(file.bytes)),
    }
}
