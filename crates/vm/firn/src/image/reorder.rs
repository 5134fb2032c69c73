//! `firn image reorder`

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args as ClapArgs;
use firn_image::{
    BlockOrganization, Codec, Image, ImageSummary, OrganizationError, ReorderOptions,
};
use firn_supervisor::{Failure, blocks_needed_first, record_copy};

use super::rewrite::{RewriteProgress, describe_rewrite, rewrite_facts};
use crate::choices::{Choice, parse_choice};
use crate::output::{FactPrinter, check_output};
use crate::units;

const ORDERS: &[Choice] = &[
    (
        "learned",
        "what restores of the image have needed first, and its working set, before the rest",
    ),
    ("locality", "by first access, as a checkpoint is written"),
    ("physical", "by address"),
    ("random", "shuffled; --seed determines the order"),
];

/// The order of memory blocks.
#[derive(Clone, Copy, Debug)]
enum BlockOrder {
    Learned,
    By(BlockOrganization),
}

impl FromStr for BlockOrder {
    type Err = OrganizationError;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word {
            "learned" => Ok(Self::Learned),
            _ => word.parse().map(Self::By),
        }
    }
}

/// Rewrite an image with its memory blocks in another order.
///
/// The checkpoint stays the same: only the locations of its memory blocks in the file change. With
/// --by learned, what restores of the image have needed is at one place in the file, and each
/// restore of it loads that first. Use it for an image that is restored often, from a disk or from
/// object storage: restore it once with its load and --fill after-learning, then reorder it. The
/// other orders are for comparisons.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = r"Example:
  firn image reorder web.firn --by learned \
    -o golden.firn")]
pub struct ImageReorderArgs {
    /// The image.
    image: PathBuf,
    /// The order.
    #[arg(long, value_name = "ORDER", value_parser = parse_choice::<BlockOrder>(ORDERS))]
    by: BlockOrder,
    /// The image to write.
    #[arg(long, short, value_name = "IMAGE")]
    output: PathBuf,
    /// Compress again: none, lz4, zstd[:LEVEL] or zlib[:LEVEL]. By default memory blocks stay in
    /// their stored form.
    #[arg(long)]
    codec: Option<Codec>,
    /// For --by random: the same seed gives the same order.
    #[arg(long, default_value_t = 1, value_parser = units::parse_number::<u64>(0..=u64::MAX))]
    seed: u64,
}

impl ImageReorderArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        check_output(&self.output)?;
        let image = super::open::open_image(&self.image)?;
        let summary = self.write_reordered(&image).map_err(|failure| {
            failure.while_doing(format!("can't reorder {}", self.image.display()))
        })?;
        out.print_facts(&rewrite_facts(&summary, None), || describe_rewrite(&summary))
    }

    fn write_reordered(&self, image: &Image) -> Result<ImageSummary, Failure> {
        let (by, needed_first) = match self.by {
            BlockOrder::Learned => (BlockOrganization::Access, Some(blocks_needed_first(image)?)),
            BlockOrder::By(organization) => (organization, None),
        };
        let how = ReorderOptions {
            codec: self.codec,
            seed: self.seed,
            threads: super::open::worker_count(),
            ..ReorderOptions::for_organization(by)
        };
        record_copy(&self.image, &self.output)?;
        let rewriting = RewriteProgress::new("reordering", image);
        let show = |done, total| rewriting.show_progress(done, total);
        let summary = match &needed_first {
            Some(blocks) => firn_image::reorder_by_need(image, blocks, &how, &self.output, &show),
            None => firn_image::reorder_image(image, &how, &self.output, &show),
        };
        summary.map_err(|error| super::open::to_failure(&error))
    }
}
