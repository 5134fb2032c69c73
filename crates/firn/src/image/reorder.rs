//! `firn image reorder`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_image::{Codec, Image, Organization, Reorder, Summary};
use firn_supervisor::{Failure, note_copy};

use super::rewrite::{Rewriting, describe, facts};
use crate::output::{Output, check_output};

/// Rewrite an image with its memory blocks in another order.
///
/// The checkpoint stays the same: only the locations of its memory blocks in the file change. For
/// comparisons that vary one thing.
///
/// Orders:
///   locality  by first access, as a checkpoint is written
///   physical  by address
///   random    shuffled; --seed determines the order
///
/// Example:
///   firn image reorder web.firn --by physical -o web-physical.firn
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The image.
    image: PathBuf,
    /// The order: locality, physical or random.
    #[arg(long)]
    by: Organization,
    /// The image to write.
    #[arg(long, short, value_name = "IMAGE")]
    output: PathBuf,
    /// Compress again: none, lz4, zstd[:LEVEL] or zlib[:LEVEL]. By default memory blocks stay in
    /// their stored form.
    #[arg(long)]
    codec: Option<Codec>,
    /// For --by random: the same seed gives the same order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        check_output(&self.output)?;
        let image = super::open(&self.image)?;
        let summary = self.reorder(&image).map_err(|failure| {
            failure.while_doing(format!("can't reorder {}", self.image.display()))
        })?;
        out.facts(&facts(&summary, None), || describe(&summary))
    }

    fn reorder(&self, image: &Image) -> Result<Summary, Failure> {
        let how = Reorder {
            codec: self.codec,
            seed: self.seed,
            threads: super::threads(),
            ..Reorder::by(self.by)
        };
        note_copy(&self.image, &self.output)?;
        let rewriting = Rewriting::new("reordering", image);
        let show = |done, total| rewriting.show(done, total);
        firn_image::reorder(image, &how, &self.output, &show)
            .map_err(|error| super::failure(&error))
    }
}
