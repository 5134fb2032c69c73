//! `firn image merge`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, note_copy};

use super::rewrite::{Rewriting, describe, facts};
use crate::output::{Output, check_output};

/// Merge an image with those it builds on, so that it needs none of them.
///
/// The checkpoint stays the same, and so does its identity: images that build on it continue to do
/// so if it stays at its path.
///
/// Examples:
///   firn image merge web-20.firn -o web.firn
///   firn image merge web-20.firn
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The image.
    image: PathBuf,
    /// The image to write; by default the image itself is replaced.
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
