//! `firn image ls`

use clap::Args as ClapArgs;
use firn_image::{ImageFlaw, ImageOutline};
use firn_objects::{StoredImage, list_images};
use firn_supervisor::{Failure, ImageMeta};
use serde_json::json;

use super::stored::{parse_location, store_failure};
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
        let location = parse_location(&self.location)?;
        let images = list_images(&location)
            .map_err(|error| store_failure(&error).while_doing(format!("can't list {location}")))?;
        let facts: Vec<_> = images.iter().map(image_facts).collect();
        out.print_facts(&facts, || describe_images(&images))
    }
}

fn read_meta(outline: &Result<ImageOutline, ImageFlaw>) -> Option<ImageMeta> {
    serde_json::from_value(outline.as_ref().ok()?.meta.clone()).ok()
}

fn image_facts(image: &StoredImage) -> serde_json::Value {
    let (outline, meta) = (image.outline.as_ref().ok(), read_meta(&image.outline));
    let parent = outline.and_then(|outline| outline.parent.as_ref());
    json!({
        "location": image.location.to_string(),
        "identity": outline.map(|outline| &outline.identity),
        "file_bytes": image.bytes,
        "vm": meta.as_ref().map(|meta| &meta.name),
        "created": meta.as_ref().map(|meta| meta.created),
        "pushed": image.modified,
        "parent": parent.map(|parent| parent.path.to_string_lossy()),
        "parent_identity": parent.map(|parent| &parent.identity),
        "problem": image.outline.as_ref().err().map(ToString::to_string),
    })
}

fn describe_images(images: &[StoredImage]) -> String {
    if images.is_empty() {
        return "no images\n".to_owned();
    }
    let heading = ["IMAGE", "SIZE", "VM", "SAVED", "PARENT", "ID"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(images.iter().map(image_row));
    format_table(&rows)
}

fn image_row(image: &StoredImage) -> Vec<String> {
    let none = || "-".to_owned();
    let meta = read_meta(&image.outline);
    let age =
        |meta: &ImageMeta| format!("{} ago", units::format_seconds(seconds_since(meta.created)));
    let (parent, id) = match &image.outline {
        Ok(outline) => {
            let parent = outline.parent.as_ref().map(|it| it.path.display().to_string());
            (parent.unwrap_or_else(none), outline.identity.clone())
        }
        Err(flaw) => (none(), format!("damaged: {flaw}")),
    };
    vec![
        image.location.name().to_owned(),
        units::format_bytes(image.bytes),
        meta.as_ref().map_or_else(none, |meta| meta.name.clone()),
        meta.as_ref().map_or_else(none, age),
        parent,
        id,
    ]
}
