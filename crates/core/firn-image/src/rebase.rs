//! Rewriting a checkpoint so that it builds on another image, or on none.
//!
//! ```text
//!   base <- d1 <- d2 <- d3        merge_chain(d3)          d3, whole
//!                                 rebase_image(d3, d1)     base <- d1 <- d3      d3 has what was in d2 as well
//!                                 rebase_image(d3, other)  other <- d3           d3 has what differs from other
//! ```
//!
//! The rewritten image is the same checkpoint, and keeps its identity: images that build on it
//! continue to do so, whether it replaces the old file or has another path.

use std::path::Path;

use firn_types::Block;

use crate::error::ImageError;
use crate::reader::Image;
use crate::reorder::{ReorderOptions, RewriteTarget, rewrite_image};
use crate::runs::BlockRuns;
use crate::writer::ImageSummary;

/// Writes the checkpoint in `image` to `out` so that it needs no other image. `out` may be the
/// image's own path. `progress` is called with (done, total) in memory blocks.
pub fn merge_chain(
    image: &Image,
    out: &Path,
    threads: usize,
    progress: &dyn Fn(u32, u32),
) -> Result<ImageSummary, ImageError> {
    rewrite_onto(None, image, out, threads, progress)
}

/// Writes the checkpoint in `image` to `out` so that it builds on `parent`: it has only what
/// differs from `parent`. `out` may be the image's own path. `progress` is called with (done,
/// total) in memory blocks.
///
/// # Errors
/// If the RAM or the blocks of `parent` have other sizes, or it builds on the image itself.
pub fn rebase_image(
    image: &Image,
    parent: &Image,
    out: &Path,
    threads: usize,
    progress: &dyn Fn(u32, u32),
) -> Result<ImageSummary, ImageError> {
    let own = image.layers()[0].footer.identity;
    if parent.layers().iter().any(|layer| layer.footer.identity == own) {
        return Err(ImageError::WrongParent {
            path: image.path().to_owned(),
            parent: parent.path().to_owned(),
            problem: "it builds on that image itself".to_owned(),
        });
    }
    rewrite_onto(Some(parent), image, out, threads, progress)
}

fn rewrite_onto(
    parent: Option<&Image>,
    image: &Image,
    out: &Path,
    threads: usize,
    progress: &dyn Fn(u32, u32),
) -> Result<ImageSummary, ImageError> {
    let how = ReorderOptions { threads, ..ReorderOptions::for_organization(image.organization()) };
    let identity = Some(image.layers()[0].footer.identity);
    rewrite_image(
        image,
        &how,
        &RewriteTarget { path: out, parent, identity, seal: image.seal(), needed_first: None },
        progress,
    )
}

/// The contents of an image on a parent: the stored blocks that differ from the parent's, and the
/// zero blocks that the parent stores.
pub(crate) fn difference_from_parent(
    parent: &Image,
    image: &Image,
    stored: &BlockRuns,
) -> (BlockRuns, BlockRuns) {
    let mut compare = BlockComparison::new(image);
    let parents = parent.placements().stored_runs();
    let zero = parents.without(stored);
    let differs =
        |block: &Block| !parents.contains(*block) || !compare.is_same(*block, image, parent);
    let differing = stored.blocks().filter(differs);
    (differing.map(|block| block.0..block.0 + 1).collect(), zero)
}

/// Buffers for comparing stored memory blocks.
struct BlockComparison {
    stored: Vec<u8>,
    bytes: Vec<u8>,
}

impl BlockComparison {
    fn new(image: &Image) -> Self {
        let bytes = vec![0; image.geometry().block_size.byte_count()];
        Self { stored: Vec::new(), bytes }
    }

    /// Whether a block that both images store has the same bytes in both. False if it cannot be
    /// read.
    fn is_same(&mut self, block: Block, image: &Image, parent: &Image) -> bool {
        let (Some((id, entry)), Some((parents_id, parents))) =
            (image.entry_of(block), parent.entry_of(block))
        else {
            return false;
        };
        if entry.checksum != parents.checksum {
            return false;
        }
        let (here, there) = (image.file_and_offset(id), parent.file_and_offset(parents_id));
        if here.0.is_same_file(there.0) && here.1 == there.1 && entry.offset == parents.offset {
            return true;
        }
        let read = image.read_block(block, &mut self.stored, &mut self.bytes);
        read.is_ok() && parent.holds_bytes(block, &self.bytes, &mut self.stored)
    }
}
