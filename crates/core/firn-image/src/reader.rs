//! An open image: look-ups, reads, and its sections.
//!
//! Opening reads and checks everything but the locality blocks: header, footer, sections, index.
//! From then on a look-up is two loads, a locality block is one `pread(2)` of its used bytes, and
//! every memory block is checked against its checksum when it is decoded: a mismatch is an error
//! that names the block, never a wrong page.
//!
//! An incremental image is opened with all that it builds on, and read as if it were one file: its
//! locality blocks come first, then its parent's, and so on (see `chain`).

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use firn_types::{Block, GuestPhys, RegionMap};
use twox_hash::XxHash3_64;

use crate::blocks::ReadOrder;
use crate::budget::MemoryBudget;
use crate::chain::{ChainLayer, ImageChain, LayerCounts};
use crate::error::ImageError;
use crate::footer::{Footer, SectionKind, SectionLocation};
use crate::geometry::{BlockOrganization, Geometry};
use crate::index::ImageIndex;
use crate::keys::{ImageKey, ImageSeal};
use crate::locality::{BlockEntry, FilledBy, LocalityBlockId};
use crate::placement::{BlockPlacement, PlacementMap};
use crate::sections::{self, AccessGroup, ImageSections};
use crate::source::ImageFile;
use crate::writer::{ImageSummary, overhead_bytes};

/// An open image. Any number of threads may read it at once.
pub struct Image {
    /// Its own file, then its parent, and so on.
    layers: Vec<ChainLayer>,
    sections: ImageSections,
    /// The index over all files.
    index: ImageIndex,
    organization: BlockOrganization,
}

/// The numbers of one file of a chain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChainFile {
    /// The file.
    pub path: PathBuf,
    /// Its identity, in hexadecimal.
    pub identity: String,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// The number of memory blocks that it stores or lists as zero.
    pub mentioned_blocks: u32,
}

/// A section that is read piece by piece, and its location.
type OpenSection = (Box<dyn Read>, SectionLocation);

impl Image {
    /// Opens an image and checks all of it but the memory blocks themselves.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        Self::from_chain(ImageChain::open(path, None)?)
    }

    /// Opens an image whose parent was moved to `parent`, where the very same image must be.
    pub fn open_with_parent(path: &Path, parent: &Path) -> Result<Self, ImageError> {
        Self::from_chain(ImageChain::open(path, Some(parent))?)
    }

    /// Opens an image from descriptors of its file and of those it builds on, the newest first, as
    /// [`Self::try_clone_files`] returns them, whichever files have their names now.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_from(path: &Path, files: &[File]) -> Result<Self, ImageError> {
        Self::from_chain(ImageChain::open_from(path, files)?)
    }

    /// Descriptors of its file and of those it builds on, the newest first.
    ///
    /// # Errors
    /// If the process can have no more descriptors.
    pub fn try_clone_files(&self) -> Result<Vec<File>, ImageError> {
        self.layers.iter().map(|layer| layer.source.try_clone()).collect()
    }

    /// Opens its files again by their names, and reads those from now on, if they are the same
    /// image. A descriptor may be useless after its storage was disconnected, and the file may have
    /// been removed and put back.
    ///
    /// # Errors
    /// The first file that can't be opened again; it is read as before.
    pub fn reopen(&self) -> Result<(), ImageError> {
        let reopened: Vec<_> = self.layers.iter().map(ChainLayer::reopen).collect();
        reopened.into_iter().collect()
    }

    fn from_chain(chain: ImageChain) -> Result<Self, ImageError> {
        let ImageChain { mut layers, index, organization, mut budget } = chain;
        let ChainLayer { source, geometry, footer, .. } = &layers[0];
        let sections = read_sections(source, footer, geometry, &mut budget)?;
        // These sections are decoded when they are needed, but opening reports whether they are
        // damaged.
        source.check_section(footer, SectionKind::AuxBlocks)?;
        source.check_section(footer, SectionKind::AccessOrder)?;
        layers.iter_mut().for_each(|layer| layer.source.forget_tail());
        let image = Self { layers, sections, index, organization };
        image.advise_order(ReadOrder::Sequential);
        Ok(image)
    }

    fn own_layer(&self) -> &ChainLayer {
        &self.layers[0]
    }

    /// The key with which it is sealed, and its wrapped forms; `None` if it is not sealed.
    pub fn seal(&self) -> Option<&ImageSeal> {
        self.own_layer().source.seal().map(|open| &open.seal)
    }

    /// The keys of its own file and of those it builds on, if they are sealed.
    pub fn keys(&self) -> Vec<ImageKey> {
        let seals = self.layers.iter().filter_map(|layer| layer.source.seal());
        seals.map(|open| open.seal.key.clone()).collect()
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.own_layer().path()
    }

    /// Its own file, and those it builds on, the newest first.
    pub fn chain_paths(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.layers.iter().map(ChainLayer::path)
    }

    /// The numbers of the files of its chain, the newest first.
    pub fn chain_files(&self) -> impl ExactSizeIterator<Item = ChainFile> {
        self.layers.iter().map(|layer| ChainFile {
            path: layer.path().to_owned(),
            identity: layer.footer.identity.to_string(),
            file_bytes: layer.footer.file_bytes(&layer.geometry),
            mentioned_blocks: layer
                .own_counts
                .stored_blocks
                .saturating_add(layer.own_counts.zero_blocks),
        })
    }

    /// A random number that distinguishes it from every other image, in hexadecimal. A copy of the
    /// file has the same.
    pub fn identity(&self) -> String {
        self.own_layer().footer.identity.to_string()
    }

    /// Its sizes.
    pub fn geometry(&self) -> Geometry {
        self.own_layer().geometry
    }

    /// Its block organization.
    pub fn organization(&self) -> BlockOrganization {
        self.organization
    }

    /// The layout of RAM.
    pub fn regions(&self) -> &RegionMap {
        &self.sections.regions
    }

    /// The metadata that the writer stored about the VM.
    pub fn meta(&self) -> &serde_json::Value {
        &self.sections.meta
    }

    /// The state of devices and vCPUs, as the hypervisor saved it.
    pub fn device_state(&self) -> &[u8] {
        &self.sections.device_state
    }

    /// Memory blocks the guest touched after the cut, in order of first access.
    pub fn working_set(&self) -> &[Block] {
        &self.sections.working_set
    }

    /// Page-table roots found in the guest.
    pub fn page_table_roots(&self) -> &[GuestPhys] {
        &self.sections.page_table_roots
    }

    /// Its contents beside memory blocks, except for auxiliary blocks.
    pub(crate) fn sections(&self) -> &ImageSections {
        &self.sections
    }

    /// A reader for a section, if it exists, to read it piece by piece; and its location.
    pub(crate) fn section_reader(
        &self,
        kind: SectionKind,
    ) -> Result<Option<OpenSection>, ImageError> {
        let ChainLayer { source, footer, .. } = self.own_layer();
        let Some(at) = footer.find_section(kind) else { return Ok(None) };
        Ok(Some((source.section_reader(at)?, *at)))
    }

    /// A section in its stored form, if it exists. Its checksum was checked.
    pub(crate) fn stored_section(
        &self,
        kind: SectionKind,
    ) -> Result<Option<(SectionLocation, Vec<u8>)>, ImageError> {
        let ChainLayer { source, footer, .. } = self.own_layer();
        let Some(at) = footer.find_section(kind) else { return Ok(None) };
        Ok(Some((*at, source.read_stored(at)?)))
    }

    pub(crate) fn section_flaw(&self, at: &SectionLocation, problem: String) -> ImageError {
        self.own_layer().source.section_flaw(at, problem)
    }

    /// The placements of all memory blocks.
    pub(crate) fn placements(&self) -> &PlacementMap {
        &self.index.placements
    }

    /// The numbers of the image's own file.
    pub fn summary(&self) -> ImageSummary {
        let geometry = self.geometry();
        let LayerCounts { stored_blocks, stored_bytes, zero_blocks } = self.own_layer().own_counts;
        let footer = &self.own_layer().footer;
        let unmentioned_blocks = geometry.block_count() - stored_blocks - zero_blocks;
        let builds_on_another = self.layers.len() > 1;
        ImageSummary {
            path: self.path().to_owned(),
            geometry,
            organization: self.organization(),
            file_bytes: footer.file_bytes(&geometry),
            locality_blocks: footer.locality_blocks,
            stored_blocks,
            stored_bytes,
            zero_blocks,
            untouched_blocks: if builds_on_another { 0 } else { unmentioned_blocks },
            inherited_blocks: if builds_on_another { unmentioned_blocks } else { 0 },
            overhead_bytes: overhead_bytes(footer, &geometry),
        }
    }

    /// The placement of a memory block. Untouched if it is past the last. Allocates nothing.
    pub fn placement_of(&self, block: Block) -> BlockPlacement {
        self.index.placements.get(block)
    }

    /// A stored memory block's locality block and entry; `None` if it is zero or untouched.
    pub fn entry_of(&self, block: Block) -> Option<(LocalityBlockId, &BlockEntry)> {
        match self.placement_of(block) {
            BlockPlacement::Stored { locality_block, slot } => {
                Some((locality_block, self.entries(locality_block).get(usize::from(slot))?))
            }
            BlockPlacement::Zero | BlockPlacement::Untouched => None,
        }
    }

    /// The number of locality blocks, including those of the images it builds on.
    pub fn locality_blocks(&self) -> u32 {
        self.index.locality_blocks()
    }

    /// The file and the offset of a locality block. Past the last one: the offset that it would
    /// have.
    pub(crate) fn file_and_offset(&self, id: LocalityBlockId) -> (&ImageFile, u64) {
        let layer = self.layer_of(id);
        let own = LocalityBlockId(id.0 - layer.first);
        (&layer.source, layer.geometry.offset_of(own))
    }

    fn layer_of(&self, id: LocalityBlockId) -> &ChainLayer {
        let after = self.layers.partition_point(|layer| layer.first <= id.0);
        // An empty layer starts where the next one does; the last that starts there has the block.
        &self.layers[after.saturating_sub(1)]
    }

    /// Decrypts the stored bytes of a memory block in place. False if they are not what was sealed
    /// there. Bytes of an image that is not sealed stay as they are.
    pub(crate) fn unseal_entry(&self, entry: &BlockEntry, bytes: &mut [u8]) -> bool {
        let BlockPlacement::Stored { locality_block, .. } = self.placement_of(entry.block) else {
            return !self.is_sealed();
        };
        let layer = self.layer_of(locality_block);
        let Some(open) = layer.source.seal() else { return true };
        let own = LocalityBlockId(locality_block.0 - layer.first);
        let tag = self.index.tag_of(entry.block);
        tag.is_some_and(|tag| open.cipher.open_block(own, entry, tag, bytes))
    }

    /// Whether it is sealed.
    pub fn is_sealed(&self) -> bool {
        self.own_layer().source.seal().is_some()
    }

    /// The offset of a locality block in bytes, as if the files of the chain lay one behind
    /// another, its own first.
    pub fn offset_of(&self, id: LocalityBlockId) -> u64 {
        let layer = self.layer_of(id);
        let own = LocalityBlockId(id.0 - layer.first);
        layer.start + layer.geometry.offset_of(own)
    }

    /// Splits a range of locality blocks into parts that are in one file each.
    pub(crate) fn split_by_file(&self, ids: Range<u32>) -> impl Iterator<Item = Range<u32>> + '_ {
        let ends = self.layers.iter().skip(1).map(|layer| layer.first).chain([u32::MAX]);
        let starts = self.layers.iter().map(|layer| layer.first);
        let parts =
            starts.zip(ends).map(move |(start, end)| ids.start.max(start)..ids.end.min(end));
        parts.filter(|part| !part.is_empty())
    }

    /// The memory blocks of a locality block, in their order in it. Empty past the last locality
    /// block, and where newer images of the chain replace all of them.
    pub fn entries(&self, id: LocalityBlockId) -> &[BlockEntry] {
        self.index.entries_of(id).unwrap_or_default()
    }

    /// The origin of a locality block's memory blocks.
    pub fn filled_by(&self, id: LocalityBlockId) -> FilledBy {
        self.index.filled_by(id).unwrap_or_default()
    }

    /// Whether these are the used bytes of a locality block, by its checksum. Stricter than
    /// [`Image::decode_block`], which accepts stored bytes that encode the right memory block in
    /// another form.
    pub fn has_checksum(&self, id: LocalityBlockId, used_bytes: &[u8]) -> bool {
        self.index.checksum_of(id) == Some(XxHash3_64::oneshot(used_bytes))
    }

    /// The number of used bytes of a locality block.
    pub fn used_bytes(&self, id: LocalityBlockId) -> usize {
        self.index.used_bytes(id).unwrap_or_default() as usize
    }

    /// The groups of blocks from when the image was organized by access, if they are recorded.
    pub(crate) fn access_order(&self) -> Result<Option<Vec<AccessGroup>>, ImageError> {
        let ChainLayer { source, footer, .. } = self.own_layer();
        let Some(at) = footer.find_section(SectionKind::AccessOrder) else { return Ok(None) };
        let mut budget = MemoryBudget::of_file(source.file_bytes());
        let bytes = source.read_section(at, at.kind.bytes_max(), &mut budget)?;
        let groups = sections::parse_access_order(&bytes, &self.geometry());
        groups.map(Some).map_err(|flaw| source.flaw_error(flaw.shift_by(at.offset)))
    }

    pub(crate) fn layers(&self) -> &[ChainLayer] {
        &self.layers
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").field("path", &self.path()).finish_non_exhaustive()
    }
}

fn read_sections(
    source: &ImageFile,
    footer: &Footer,
    geometry: &Geometry,
    budget: &mut MemoryBudget,
) -> Result<ImageSections, ImageError> {
    Ok(ImageSections {
        meta: source
            .parse_section(footer, SectionKind::Meta, budget, |bytes, budget| {
                sections::parse_meta(&bytes, budget)
            })?
            .unwrap_or_default(),
        regions: source
            .parse_section(footer, SectionKind::Regions, budget, |bytes, budget| {
                sections::parse_regions(&bytes, geometry, budget)
            })?
            .ok_or_else(|| source.missing_section(SectionKind::Regions))?,
        device_state: source
            .parse_section(footer, SectionKind::DeviceState, budget, |bytes, _| Ok(bytes))?
            .unwrap_or_default(),
        aux_blocks: Vec::new(),
        working_set: source
            .parse_section(footer, SectionKind::WorkingSet, budget, |bytes, _| {
                sections::parse_working_set(&bytes, geometry)
            })?
            .unwrap_or_default(),
        page_table_roots: source
            .parse_section(footer, SectionKind::PageTableRoots, budget, |bytes, _| {
                sections::parse_roots(&bytes)
            })?
            .unwrap_or_default(),
    })
}
