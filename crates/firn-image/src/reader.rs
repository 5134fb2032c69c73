//! Reading an image.
//!
//! Opening reads and checks everything but the locality blocks: header, footer, sections, index. From then on a
//! look-up is two loads, a locality block is one `pread(2)` of its used bytes, and every memory block is checked
//! against its checksum when it is decoded: what does not match is an error that names it, never a wrong page.

use std::path::Path;

use firn_types::{Block, GuestPhys, RegionMap};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::ImageError;
use crate::footer::{Footer, Kind};
use crate::geometry::{Geometry, Organization};
use crate::header::Header;
use crate::index::{self, Index};
use crate::locality::{Entry, FilledBy, LocalityBlockId};
use crate::placement::Placement;
use crate::sections::{self, AccessGroup, AuxBlock, Sections};
use crate::source::Source;
use crate::writer::{Summary, overhead_bytes};

/// An open image. Any number of threads may read it at once.
pub struct Image {
    pub(crate) source: Source,
    header: Header,
    footer: Footer,
    sections: Sections,
    index: Index,
}

impl Image {
    /// Opens an image and checks all of it but the memory blocks themselves.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let source = Source::open(path)?;
        let (header, footer) = source.read_frame()?;
        let geometry = header.geometry;
        let sections = read_sections(&source, &footer, &geometry)?;
        let index = read_index(&source, &footer, &geometry)?;
        // Decoded when asked for, which is rarely; but opening says whether it is damaged.
        source.check_section(&footer, Kind::AccessOrder)?;
        Ok(Self { source, header, footer, sections, index })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.source.path
    }

    /// A random number that tells it from every other image, in hexadecimal. A copy of the file has the same.
    pub fn identity(&self) -> String {
        self.header.identity.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The sizes it is built on.
    pub fn geometry(&self) -> Geometry {
        self.header.geometry
    }

    /// How its blocks are arranged.
    pub fn organization(&self) -> Organization {
        self.header.organization
    }

    /// Where RAM lies.
    pub fn regions(&self) -> &RegionMap {
        &self.sections.regions
    }

    /// What the writer stored about the VM.
    pub fn meta(&self) -> &serde_json::Value {
        &self.sections.meta
    }

    /// Devices and vCPUs, as the hypervisor saved them.
    pub fn device_state(&self) -> &[u8] {
        &self.sections.device_state
    }

    /// RAM beside guest RAM.
    pub fn aux_blocks(&self) -> &[AuxBlock] {
        &self.sections.aux_blocks
    }

    /// Memory blocks the guest touched after the cut, in order of first access.
    pub fn working_set(&self) -> &[Block] {
        &self.sections.working_set
    }

    /// Page-table roots found in the guest.
    pub fn page_table_roots(&self) -> &[GuestPhys] {
        &self.sections.page_table_roots
    }

    pub(crate) fn sections(&self) -> &Sections {
        &self.sections
    }

    /// The image in numbers.
    pub fn summary(&self) -> Summary {
        let geometry = self.geometry();
        let entries = self.index.entries();
        let (stored_blocks, zero_blocks) = (entries.len() as u32, self.index.zero_blocks);
        Summary {
            path: self.path().to_owned(),
            geometry,
            organization: self.organization(),
            file_bytes: self.footer.file_bytes(&geometry),
            locality_blocks: self.locality_blocks(),
            stored_blocks,
            stored_bytes: entries.iter().map(|entry| u64::from(entry.stored_len)).sum(),
            zero_blocks,
            untouched_blocks: geometry.blocks() - stored_blocks - zero_blocks,
            overhead_bytes: overhead_bytes(&self.footer, &geometry),
        }
    }

    /// Where a memory block is. Untouched if it is past the last. Allocates nothing.
    pub fn lookup(&self, block: Block) -> Placement {
        self.index.placements.get(block)
    }

    /// A stored memory block's locality block and entry; `None` if it is zero or untouched.
    pub fn entry_of(&self, block: Block) -> Option<(LocalityBlockId, &Entry)> {
        match self.lookup(block) {
            Placement::Stored { locality_block, slot } => {
                Some((locality_block, self.entries(locality_block).get(usize::from(slot))?))
            }
            Placement::Zero | Placement::Untouched => None,
        }
    }

    /// How many locality blocks there are.
    pub fn locality_blocks(&self) -> u32 {
        self.footer.locality_blocks
    }

    /// The memory blocks of a locality block, as they lie in it. Empty past the last locality block.
    pub fn entries(&self, id: LocalityBlockId) -> &[Entry] {
        self.index.entries_of(id).unwrap_or_default()
    }

    /// Who filled a locality block.
    pub fn filled_by(&self, id: LocalityBlockId) -> FilledBy {
        self.index.filled_by(id).unwrap_or_default()
    }

    /// Whether these are the used bytes of a locality block, by its checksum. Stricter than [`Image::decode`], which lets
    /// stored bytes pass that make the right memory block in another way.
    pub fn has_checksum(&self, id: LocalityBlockId, used_bytes: &[u8]) -> bool {
        self.index.checksum_of(id) == Some(xxh3_64(used_bytes))
    }

    /// How many bytes of a locality block are used.
    pub fn used_bytes(&self, id: LocalityBlockId) -> usize {
        self.entries(id).last().map_or(0, Entry::end)
    }

    /// The groups in which blocks lay when the image was organized by access, if that is recorded.
    pub(crate) fn access_order(&self) -> Result<Option<Vec<AccessGroup>>, ImageError> {
        let Some(at) = self.footer.section(Kind::AccessOrder) else { return Ok(None) };
        let bytes = self.source.read_section(at, at.kind.bytes_max())?;
        let groups = sections::parse_access_order(&bytes, &self.geometry());
        groups.map(Some).map_err(|flaw| self.source.flaw(flaw.shifted(at.offset)))
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").field("path", &self.path()).finish_non_exhaustive()
    }
}

fn read_sections(
    source: &Source,
    footer: &Footer,
    geometry: &Geometry,
) -> Result<Sections, ImageError> {
    Ok(Sections {
        meta: source.parse(footer, Kind::Meta, sections::parse_meta)?.unwrap_or_default(),
        regions: source
            .parse(footer, Kind::Regions, |bytes| sections::parse_regions(bytes, geometry))?
            .ok_or_else(|| source.missing(Kind::Regions))?,
        device_state: source
            .parse(footer, Kind::DeviceState, |bytes| Ok(bytes.to_vec()))?
            .unwrap_or_default(),
        aux_blocks: source.parse(footer, Kind::AuxBlocks, sections::parse_aux)?.unwrap_or_default(),
        working_set: source
            .parse(footer, Kind::WorkingSet, |bytes| sections::parse_working_set(bytes, geometry))?
            .unwrap_or_default(),
        page_table_roots: source
            .parse(footer, Kind::PageTableRoots, sections::parse_roots)?
            .unwrap_or_default(),
    })
}

fn read_index(source: &Source, footer: &Footer, geometry: &Geometry) -> Result<Index, ImageError> {
    let at = footer.section(Kind::Index).ok_or_else(|| source.missing(Kind::Index))?;
    let limit = index::bytes_max(geometry, footer.locality_blocks);
    let bytes = source.read_section(at, limit)?;
    index::parse(&bytes, geometry, footer.locality_blocks)
        .map_err(|flaw| source.flaw(flaw.shifted(at.offset)))
}
