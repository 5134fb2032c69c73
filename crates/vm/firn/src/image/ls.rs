//! `firn image ls`

use clap::Args as ClapArgs;
use firn_supervisor::Failure;
use serde::Deserialize;

use super::stored::{read_facts, run_store};
use crate::ls::seconds_since;
use crate::output::{FactPrinter, format_table};
use crate::units;

/// List the images in object storage.
///
/// LOCATION is a bucket or a prefix of one: s3://BUCKET/PREFIX. The command reads the end of each
/// object directly below it. It does not check memory; `firn image pull` does.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn image ls s3://vms/prod
  firn image ls s3://vms/prod --json | jq -r '.[].location'")]
pub struct ImageLsArgs {
    /// The bucket, and the prefix.
    location: String,
}

impl ImageLsArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let facts = run_store(["ls", "--", &self.location])?;
        out.print_facts(&facts, || describe_images(&read_facts::<Vec<_>>(&facts)))
    }
}

/// An image in the store.
#[derive(Debug, Deserialize)]
struct ListedImage {
    location: String,
    identity: Option<String>,
    file_bytes: u64,
    vm: Option<String>,
    created: Option<u64>,
    parent: Option<String>,
    problem: Option<String>,
}

fn describe_images(images: &[ListedImage]) -> String {
    if images.is_empty() {
        return "no images\n".to_owned();
    }
    let heading = ["IMAGE", "SIZE", "VM", "SAVED", "PARENT", "ID"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(images.iter().map(image_row));
    format_table(&rows)
}

fn image_row(image: &ListedImage) -> Vec<String> {
    let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
    let age = |created| format!("{} ago", units::format_seconds(seconds_since(created)));
    let damage = image.problem.as_ref().map(|problem| format!("damaged: {problem}"));
    let name = image.location.rsplit_once('/').map_or(&*image.location, |(_, name)| name);
    vec![
        name.to_owned(),
        units::format_bytes(image.file_bytes),
        text(&image.vm),
        text(&image.created.map(age)),
        text(&image.parent),
        text(&damage.or_else(|| image.identity.clone())),
    ]
}
