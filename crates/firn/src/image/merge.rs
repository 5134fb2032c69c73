//! `firn image merge`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, note_copy};

use super::rewrite::{Rewriting, describe, facts};
use crate::output::{Output, check_output};

/// Make an image whole, so that it needs none of those it builds on.
///
/// The checkpoint stays the same, and so does its identity: images that build on it go on doing so if it keeps its place.
///
/// Examples:
///   firn image merge web-20.firn -o web.firn
///   firn image merge web-20.firn
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The image.
    image: PathBuf,
    /// The image to write; by default it takes the image's own place.
    #[arg(long, short, value_name = "IMAGE")]
    output: Option<PathBuf>,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        self.output.as_deref().map_or(Ok(()), check_output)?;
        let target = self.output.as_ref().unwrap_or(&self.image);
        let image = super::open(&self.image)?;
        note_copy(&self.image, target)?;
        let rewriting = Rewriting::new("merging", &image);
        let summary = firn_image::merge(&image, target, super::threads(), &|done, total| {
            rewriting.show(done, total);
        })
        .map_err(|error| {
            super::failure(&error).while_doing(format!("can't merge {}", self.image.display()))
        })?;
        out.facts(&facts(&summary, None), || describe(&summary))
    }
}
