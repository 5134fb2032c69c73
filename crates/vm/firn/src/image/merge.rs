//! `firn image merge`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, record_copy};

use super::rewrite::{RewriteProgress, describe_rewrite, rewrite_facts};
use crate::output::{FactPrinter, check_output};

/// Merge an image with the images that it builds on, so that it needs no other image.
///
/// The checkpoint stays the same, and so does its identity. So images that build on the image can
/// still be restored, if the merged image is at the same path.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn image merge web-20.firn -o web.firn
  firn image merge web-20.firn")]
pub struct ImageMergeArgs {
    /// The image.
    image: PathBuf,
    /// The image to write; by default the image itself is replaced.
    #[arg(long, short, value_name = "IMAGE")]
    output: Option<PathBuf>,
}

impl ImageMergeArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        self.output.as_deref().map_or(Ok(()), check_output)?;
        let target = self.output.as_ref().unwrap_or(&self.image);
        let image = super::open::open_image(&self.image)?;
        record_copy(&self.image, target)?;
        let rewriting = RewriteProgress::new("merging", &image);
        let summary =
            firn_image::merge_chain(&image, target, super::open::worker_count(), &|done, total| {
                rewriting.show_progress(done, total);
            })
            .map_err(|error| {
                super::open::to_failure(&error)
                    .while_doing(format!("can't merge {}", self.image.display()))
            })?;
        out.print_facts(&rewrite_facts(&summary, None), || describe_rewrite(&summary))
    }
}
