//! Rewriting of a checkpoint with another block organization: so that a comparison varies one
//! thing, or so that what restores need first is stored together.
//!
//! ```text
//!   by access   -->  access:    with the blocks that are needed first in front, as the working set
//!   by access   -->  random:    shuffled; the access order is kept in a section of its own
//!   random      -->  access:    by that section: the locality blocks are those of the first image again
//!   random      -->  access:    without it, by the working set if there is one; else refused
//!   anything    -->  physical:  by memory block number
//! ```
//!
//! At the same time, memory blocks may be recompressed, both block sizes changed, and the listed
//! working set made worse, to measure a restore with a bad one. Blocks that are not recompressed
//! are copied in their stored form, after they were decoded and checked: damage is never copied.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;

use firn_types::{Block, BlockSize, PAGE_SIZE, Page};

use crate::arrange::{self, blocks_of};
use crate::codec::{Codec, StoredAs};
use crate::compress::{CompressedBlock, PackedBlock, compress_block};
use crate::error::ImageError;
use crate::geometry::{BlockOrganization, Geometry};
use crate::header::ImageIdentity;
use crate::keys::ImageSeal;
use crate::locality::{FilledBy, LocalityBlockId, LocalityBlockPacker};
use crate::reader::Image;
use crate::rebase::difference_from_parent;
use crate::runs::BlockRuns;
use crate::sections::{AccessGroup, ImageSections};
use crate::writer::{ImageDraft, ImageSummary, ImageWriter};
use crate::{ZLIB_LEVEL_DEFAULT, ZSTD_LEVEL_DEFAULT};

/// The number of memory blocks that one thread packs at once.
const BATCH: usize = 256;

/// The options for rewriting an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReorderOptions {
    /// The new block organization.
    pub by: BlockOrganization,
    /// The codec for compressing again. Without it memory blocks stay in their stored form.
    pub codec: Option<Codec>,
    /// A new size of memory blocks.
    pub block_size: Option<BlockSize>,
    /// A new size of locality blocks, in bytes.
    pub locality_block_bytes: Option<u32>,
    /// The change of the working set that the image lists.
    pub working_set: ListedWorkingSet,
    /// The seed for random choices: the same seed gives the same order.
    pub seed: u64,
    /// Threads that compress.
    pub threads: usize,
}

/// The change of a working set. The blocks themselves, and their locations, do not depend on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ListedWorkingSet {
    /// It stays unchanged.
    #[default]
    Kept,
    /// This percentage of its blocks, chosen at random, is no longer listed (Zhang et al., VEE
    /// 2011, Figure 8).
    Dropped(u8),
    /// The list has as many other stored blocks instead: a list that is useless for the guest.
    Wrong,
}

impl ReorderOptions {
    /// Options that change the block organization and nothing else.
    pub fn for_organization(by: BlockOrganization) -> Self {
        let (codec, block_size, locality_block_bytes) = (None, None, None);
        let working_set = ListedWorkingSet::Kept;
        Self { by, codec, block_size, locality_block_bytes, working_set, seed: 0, threads: 1 }
    }

    fn target_geometry(&self, source: Geometry) -> Geometry {
        Geometry {
            block_size: self.block_size.unwrap_or(source.block_size),
            locality_block_bytes: self.locality_block_bytes.unwrap_or(source.locality_block_bytes),
            total_pages: source.total_pages,
        }
    }
}

/// Writes the checkpoint in `image` to `out`, with the given options. `out` may be the image's own
/// path: it is replaced when all is done. `progress` is called with (done, total) in memory blocks.
pub fn reorder_image(
    image: &Image,
    how: &ReorderOptions,
    out: &Path,
    progress: &dyn Fn(u32, u32),
) -> Result<ImageSummary, ImageError> {
    rewrite_image(image, how, &RewriteTarget::copy_of(image, out), progress)
}

/// As [`reorder_image`] by first access, but with these blocks before all others. They become the
/// working set of the new image.
pub fn reorder_by_need(
    image: &Image,
    needed_first: &[Block],
    how: &ReorderOptions,
    out: &Path,
    progress: &dyn Fn(u32, u32),
) -> Result<ImageSummary, ImageError> {
    let how = ReorderOptions { by: BlockOrganization::Access, ..*how };
    let target =
        RewriteTarget { needed_first: Some(needed_first), ..RewriteTarget::copy_of(image, out) };
    rewrite_image(image, &how, &target, progress)
}

/// The target of a rewritten image.
pub(crate) struct RewriteTarget<'a> {
    pub(crate) path: &'a Path,
    /// The image it is to build on. Block sizes must be the same.
    pub(crate) parent: Option<&'a Image>,
    /// The identity it keeps, if other images may build on it.
    pub(crate) identity: Option<ImageIdentity>,
    /// The seal it keeps, if it is sealed.
    pub(crate) seal: Option<&'a ImageSeal>,
    /// The blocks that are to be stored before all others, and to be its working set.
    pub(crate) needed_first: Option<&'a [Block]>,
}

impl<'a> RewriteTarget<'a> {
    /// A copy that builds on no other image.
    fn copy_of(image: &'a Image, path: &'a Path) -> Self {
        Self { path, parent: None, identity: None, seal: image.seal(), needed_first: None }
    }

    /// The order of first access, with the blocks in front that are needed first.
    fn arrange_groups(&self, order: Option<Vec<AccessGroup>>) -> Option<Vec<AccessGroup>> {
        let Some(blocks) = self.needed_first else { return order };
        let first = AccessGroup { filled_by: FilledBy::Unknown, blocks: blocks.to_vec() };
        Some(std::iter::once(first).chain(order.into_iter().flatten()).collect())
    }

    fn create_writer(
        &self,
        geometry: Geometry,
        organization: BlockOrganization,
    ) -> Result<ImageWriter, ImageError> {
        let (parent, seal) = (self.parent, self.seal);
        let draft = ImageDraft { parent, seal, ..ImageDraft::whole_image(geometry, organization) };
        match self.identity {
            Some(identity) => ImageWriter::with_identity(self.path, &draft, identity),
            None => ImageWriter::create(self.path, &draft),
        }
    }
}

/// As [`reorder_image`], for any target.
pub(crate) fn rewrite_image(
    image: &Image,
    how: &ReorderOptions,
    target: &RewriteTarget<'_>,
    progress: &dyn Fn(u32, u32),
) -> Result<ImageSummary, ImageError> {
    let (from, to) = (image.geometry(), how.target_geometry(image.geometry()));
    to.check_sizes()?;
    let access_order = target.arrange_groups(access_order(image)?);
    let access_order = access_order.map(|it| resize_to(it, from, to));
    let mut writer = target.create_writer(to, how.by)?;
    let (mut stored, mut zero) = survey_blocks(image, to);
    if let Some(parent) = target.parent {
        (stored, zero) = difference_from_parent(parent, image, &stored);
    }
    let groups = match (how.by, &access_order) {
        (BlockOrganization::Physical, _) => arrange::order_physically(&stored),
        (BlockOrganization::Random, _) => arrange::order_randomly(&stored, how.seed),
        (BlockOrganization::Access, Some(groups)) => arrange::order_by_access(&stored, groups),
        (BlockOrganization::Access, None) => {
            arrange::order_by_access(&stored, &working_set_order(image, to)?)
        }
    };
    writer.set_zeros(zero);
    writer.set_stored_aux(image)?;
    if how.by != BlockOrganization::Access
        && let Some(groups) = access_order
    {
        writer.set_access_order(groups);
    }
    let is_one_file = image.chain_paths().len() == 1 && target.parent.is_none();
    let keeps_groups =
        how.by == BlockOrganization::Access && how.codec.is_none() && from == to && is_one_file;
    let mut packing = RewriteOutput { writer, open: BTreeMap::new(), keeps_groups };
    let recompress_with = how.codec.unwrap_or_else(|| usual_codec(image));
    let source = BlockSource { image, to, codec: how.codec, recompress_with };
    let (mut done, total) = (0, stored.len());
    for group in &groups {
        for batch in group.blocks.chunks(BATCH * how.threads.max(1)) {
            packing.add_blocks(group.filled_by, source.pack_blocks(batch, how.threads)?)?;
            done += batch.len() as u32;
            progress(done, total);
        }
        packing.end_group(group.filled_by)?;
    }
    let mut sections = convert_sections(image, target.needed_first, to);
    let listed = std::mem::take(&mut sections.working_set);
    sections.working_set = arrange::degrade_working_set(how.working_set, listed, &stored, how.seed);
    packing.finish()?.finish(sections)
}

/// The blocks of the new size that have stored bytes, and those that are zero.
fn survey_blocks(image: &Image, to: Geometry) -> (BlockRuns, BlockRuns) {
    let from = image.geometry();
    let resize = |run: std::ops::Range<u32>| {
        let (first, last) = (Block(run.start), Block(run.end - 1));
        let start = blocks_of(first, from.block_size, to.block_size).start;
        start..blocks_of(last, from.block_size, to.block_size).end.min(to.block_count())
    };
    let placements = image.placements();
    let stored: BlockRuns = placements.stored_runs().iter_runs().map(resize).collect();
    let zero: BlockRuns = placements.zero_runs().iter_runs().map(resize).collect();
    let zero = zero.without(&stored);
    (stored, zero)
}

/// The order of first access, if the image has it or records it.
fn access_order(image: &Image) -> Result<Option<Vec<AccessGroup>>, ImageError> {
    if image.organization() != BlockOrganization::Access {
        return image.access_order();
    }
    let group = |id| AccessGroup {
        filled_by: image.filled_by(id),
        blocks: image.entries(id).iter().map(|entry| entry.block).collect(),
    };
    Ok(Some((0..image.locality_blocks()).map(LocalityBlockId).map(group).collect()))
}

fn resize_to(groups: Vec<AccessGroup>, from: Geometry, to: Geometry) -> Vec<AccessGroup> {
    if from.block_size == to.block_size {
        return groups;
    }
    arrange::resize_groups(&groups, from.block_size, to.block_size)
}

/// The working set as a single group, the only one whose order is known.
fn working_set_order(image: &Image, to: Geometry) -> Result<Vec<AccessGroup>, ImageError> {
    if image.working_set().is_empty() {
        let (path, organization) = (image.path().to_owned(), image.organization());
        return Err(ImageError::NoAccessOrder { path, organization });
    }
    let blocks = image.working_set().to_vec();
    let group = AccessGroup { filled_by: FilledBy::Unknown, blocks };
    Ok(resize_to(vec![group], image.geometry(), to))
}

/// The sections of the image, converted to the new block size, perhaps with another working set.
fn convert_sections(image: &Image, working_set: Option<&[Block]>, to: Geometry) -> ImageSections {
    let mut sections = image.sections().clone();
    if let Some(blocks) = working_set {
        sections.working_set = blocks.to_vec();
    }
    if image.geometry().block_size != to.block_size {
        let blocks = std::mem::take(&mut sections.working_set);
        let group = AccessGroup { filled_by: FilledBy::Unknown, blocks };
        let groups = resize_to(vec![group], image.geometry(), to);
        let inside = |block: &Block| block.0 < to.block_count();
        sections.working_set = groups.into_iter().flat_map(|it| it.blocks).filter(inside).collect();
    }
    sections
}

/// The output of a rewrite: one packer for each origin of blocks, as in a save.
struct RewriteOutput {
    writer: ImageWriter,
    open: BTreeMap<FilledBy, LocalityBlockPacker>,
    keeps_groups: bool,
}

impl RewriteOutput {
    fn add_blocks(
        &mut self,
        filled_by: FilledBy,
        blocks: Vec<(Block, CompressedBlock)>,
    ) -> Result<(), ImageError> {
        let geometry = self.writer.geometry();
        let packer = self
            .open
            .entry(filled_by)
            .or_insert_with(|| LocalityBlockPacker::filled_by(geometry, filled_by));
        for (block, compressed) in blocks {
            match compressed {
                CompressedBlock::Zero => self.writer.set_zero(block),
                CompressedBlock::Packed(packed) => {
                    if let Some(full) = packer.push_block(packed) {
                        self.writer.append(full)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Ends a group. Where nothing but the order changes, a group becomes the locality block that
    /// it was.
    fn end_group(&mut self, filled_by: FilledBy) -> Result<(), ImageError> {
        let packer = self.open.get_mut(&filled_by).filter(|_| self.keeps_groups);
        match packer.and_then(LocalityBlockPacker::take_filled) {
            Some(rest) => self.writer.append(rest).map(drop),
            None => Ok(()),
        }
    }

    fn finish(mut self) -> Result<ImageWriter, ImageError> {
        for rest in self.open.values_mut().filter_map(LocalityBlockPacker::take_filled) {
            self.writer.append(rest)?;
        }
        Ok(self.writer)
    }
}

/// The source of memory blocks of the new size.
struct BlockSource<'a> {
    image: &'a Image,
    to: Geometry,
    codec: Option<Codec>,
    recompress_with: Codec,
}

impl BlockSource<'_> {
    /// The stored form of some blocks, in their order.
    fn pack_blocks(
        &self,
        blocks: &[Block],
        threads: usize,
    ) -> Result<Vec<(Block, CompressedBlock)>, ImageError> {
        if threads <= 1 {
            return self.pack_on_this_thread(blocks);
        }
        let share = blocks.len().div_ceil(threads).max(1);
        let parts = thread::scope(|scope| {
            let spawn = |part| scope.spawn(move || self.pack_on_this_thread(part));
            let workers: Vec<_> = blocks.chunks(share).map(spawn).collect();
            workers.into_iter().map(|worker| worker.join()).collect::<Vec<_>>()
        });
        let mut packed = Vec::with_capacity(blocks.len());
        for part in parts {
            packed.extend(part.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(packed)
    }

    fn pack_on_this_thread(
        &self,
        blocks: &[Block],
    ) -> Result<Vec<(Block, CompressedBlock)>, ImageError> {
        let mut buffers = BlockBuffers {
            stored: Vec::new(),
            old: vec![0; self.image.geometry().block_size.byte_count()],
            new: vec![0; self.to.block_size.byte_count()],
        };
        blocks.iter().map(|&block| Ok((block, self.pack_block(block, &mut buffers)?))).collect()
    }

    fn pack_block(
        &self,
        block: Block,
        buffers: &mut BlockBuffers,
    ) -> Result<CompressedBlock, ImageError> {
        if self.to.block_size != self.image.geometry().block_size {
            self.assemble_block(block, buffers)?;
            return Ok(compress_block(self.recompress_with, block, &buffers.new));
        }
        self.image.read_block(block, &mut buffers.stored, &mut buffers.old)?;
        match (self.codec, self.image.entry_of(block)) {
            (None, Some((_, entry))) => Ok(CompressedBlock::Packed(PackedBlock {
                block,
                stored: buffers.stored.clone(),
                stored_as: entry.stored_as,
                checksum: entry.checksum,
            })),
            _ => Ok(compress_block(self.recompress_with, block, &buffers.old)),
        }
    }

    /// Assembles a block of the new size from the old blocks that share pages with it.
    fn assemble_block(&self, block: Block, buffers: &mut BlockBuffers) -> Result<(), ImageError> {
        let (from, to) = (self.image.geometry().block_size, self.to.block_size);
        let pages = to.pages_of(block);
        for old in blocks_of(block, to, from).map(Block) {
            self.image.read_block(old, &mut buffers.stored, &mut buffers.old)?;
            let old_pages = from.pages_of(old);
            let shared = pages.start.max(old_pages.start)..pages.end.min(old_pages.end);
            let bytes_of = |base: Page| {
                let start = (shared.start.0 - base.0) as usize * PAGE_SIZE;
                start..start + Page::count_in(&shared) * PAGE_SIZE
            };
            let part = &buffers.old[bytes_of(old_pages.start)];
            buffers.new[bytes_of(pages.start)].copy_from_slice(part);
        }
        Ok(())
    }
}

/// The codec of the first memory block that was compressed.
fn usual_codec(image: &Image) -> Codec {
    let mut ids = (0..image.locality_blocks()).map(LocalityBlockId);
    let compressed = ids.find_map(|id| {
        let mut kinds = image.entries(id).iter().map(|entry| entry.stored_as);
        kinds.find(|&stored_as| stored_as != StoredAs::Raw)
    });
    match compressed {
        None | Some(StoredAs::Raw) => Codec::None,
        Some(StoredAs::Lz4) => Codec::Lz4,
        Some(StoredAs::Zstd) => Codec::Zstd { level: ZSTD_LEVEL_DEFAULT },
        Some(StoredAs::Deflate) => Codec::Zlib { level: ZLIB_LEVEL_DEFAULT },
    }
}

/// The buffers of one thread: stored bytes, a block of the old size, one of the new.
struct BlockBuffers {
    stored: Vec<u8>,
    old: Vec<u8>,
    new: Vec<u8>,
}
