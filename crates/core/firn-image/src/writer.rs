//! Writing an image: one file, from front to back, valid only once its footer is written.
//!
//! ```text
//!   create --> header --> append locality blocks ... --> finish: sections, index, footer --> fsync --> rename
//!      |                                                                                                 |
//!      +-------- dropped anywhere before: the partial file is removed                     fsync of the directory
//! ```

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use firn_types::{Block, RegionMap};
use serde::Serialize;
use twox_hash::XxHash3_64;

use crate::budget::is_accepted_by_any_reader;
use crate::chain::{CHAIN_MAX, ParentLink};
use crate::error::ImageError;
use crate::footer::{Footer, JSON_VALUES_MAX, SectionKind, SectionLocation};
use crate::geometry::{BlockOrganization, Geometry, HEADER_BYTES};
use crate::header::{Header, ImageIdentity, VERSION_CHAIN, VERSION_SEALED, VERSION_WHOLE};
use crate::index_builder::{AppendRefusal, IndexBuilder, ListingRule};
use crate::keys::{ImageSeal, random_bytes};
use crate::locality::{LocalityBlock, LocalityBlockId};
use crate::partial::PartialFile;
use crate::reader::Image;
use crate::runs::BlockRuns;
use crate::sealing::FileSealing;
use crate::sections::{
    AccessGroup, ImageSections, count_values, encode_access_order, unstorable_aux,
};

/// The level at which sections and the index are compressed.
const ZSTD_LEVEL: i32 = 1;

/// The properties of an image that are fixed before its first byte is written.
#[derive(Clone, Copy, Debug)]
pub struct ImageDraft<'a> {
    /// Its sizes: those of its parent, if it has one.
    pub geometry: Geometry,
    /// Its block organization.
    pub organization: BlockOrganization,
    /// The image it builds on. Memory blocks that the writer does not get are as in the parent.
    pub parent: Option<&'a Image>,
    /// Whether a memory block may be given again: the last time counts.
    pub allows_again: bool,
    /// The key to seal it with: as soon as its parent is sealed, and never otherwise.
    pub seal: Option<&'a ImageSeal>,
}

impl ImageDraft<'_> {
    /// An image that holds all of memory, and each memory block once.
    pub fn whole_image(geometry: Geometry, organization: BlockOrganization) -> Self {
        Self { geometry, organization, parent: None, allows_again: false, seal: None }
    }

    fn format_version(&self) -> u32 {
        match self.seal {
            Some(_) => VERSION_SEALED,
            None if self.parent.is_some() || self.allows_again => VERSION_CHAIN,
            None => VERSION_WHOLE,
        }
    }

    fn listing_rule(&self) -> ListingRule {
        if self.allows_again { ListingRule::Last } else { ListingRule::Once }
    }

    fn seal_mismatch(&self, parent: &Image) -> Option<&'static str> {
        match (self.seal.is_some(), parent.is_sealed()) {
            (true, false) => Some("it is not sealed, and the image is to be"),
            (false, true) => Some("it is sealed, and the image is not to be"),
            _ => None,
        }
    }

    fn link_to_parent(&self, path: &Path) -> Result<Option<(ParentLink, RegionMap)>, ImageError> {
        let Some(parent) = self.parent else { return Ok(None) };
        if parent.chain_paths().any(|file| is_same_file(file, path)) {
            return Err(ImageError::WrongParent {
                path: path.to_owned(),
                parent: parent.path().to_owned(),
                problem: "the image would take the place of one that it builds on".to_owned(),
            });
        }
        let identity = parent.layers()[0].footer.identity;
        let mut link = ParentLink::from_paths(path, parent.path(), identity)?;
        link.key = parent.seal().map(|seal| seal.key.link());
        if let Some(problem) = self.seal_mismatch(parent) {
            return Err(ImageError::MixedSeals { parent: parent.path().to_owned(), problem });
        }
        match parent.geometry() == self.geometry && parent.chain_paths().len() < CHAIN_MAX {
            true => Ok(Some((link, parent.regions().clone()))),
            false if parent.geometry() == self.geometry => {
                Err(ImageError::ChainTooLong { path: parent.path().to_owned() })
            }
            false => Err(ImageError::OtherRam { parent: parent.path().to_owned() }),
        }
    }
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let file = |path: &Path| std::fs::metadata(path).map(|it| (it.dev(), it.ino())).ok();
    file(one).is_some_and(|one| file(other) == Some(one))
}

/// An image that is being written.
pub struct ImageWriter {
    partial: PartialFile,
    header: Header,
    /// The image it builds on, and the layout of its RAM.
    parent: Option<(ParentLink, RegionMap)>,
    index: IndexBuilder,
    access_order: Option<Vec<AccessGroup>>,
    /// What encrypts it, if it is to be sealed.
    sealing: Option<FileSealing>,
    /// Auxiliary blocks in the stored form of another image: encoded, compressed or not.
    stored_aux: Option<(SectionLocation, Vec<u8>)>,
    refused: Option<ImageError>,
}

/// The numbers of an image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ImageSummary {
    /// The image.
    pub path: PathBuf,
    /// Its sizes.
    pub geometry: Geometry,
    /// Its block organization.
    pub organization: BlockOrganization,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// The number of locality blocks.
    pub locality_blocks: u32,
    /// The number of stored memory blocks.
    pub stored_blocks: u32,
    /// Their stored bytes, compressed.
    pub stored_bytes: u64,
    /// The number of zero memory blocks.
    pub zero_blocks: u32,
    /// The number of untouched memory blocks.
    pub untouched_blocks: u32,
    /// The number of memory blocks that are as in the image it builds on.
    pub inherited_blocks: u32,
    /// Bytes of everything that is not a locality block: header, sections, index, footer.
    pub overhead_bytes: u64,
}

impl ImageWriter {
    /// Begins an image that will be at `path`. Until [`Self::finish`], only a hidden file beside it
    /// is written.
    pub fn create(path: &Path, draft: &ImageDraft<'_>) -> Result<Self, ImageError> {
        Self::with_identity(path, draft, random_identity()?)
    }

    /// As [`Self::create`], for another form of an existing checkpoint, on which other images may
    /// build already.
    pub(crate) fn with_identity(
        path: &Path,
        draft: &ImageDraft<'_>,
        identity: ImageIdentity,
    ) -> Result<Self, ImageError> {
        let ImageDraft { geometry, organization, .. } = *draft;
        geometry.check_sizes()?;
        let parent = draft.link_to_parent(path)?;
        let sealing = draft.seal.map(|seal| FileSealing::begin(seal, identity)).transpose()?;
        let partial = PartialFile::create(path)?;
        let header = Header { version: draft.format_version(), geometry, organization, identity };
        partial.write_at("image.write", &header.encode(), 0)?;
        let index = IndexBuilder::new(geometry, draft.listing_rule());
        Ok(Self {
            partial,
            header,
            parent,
            index,
            access_order: None,
            sealing,
            stored_aux: None,
            refused: None,
        })
    }

    /// The random number that will identify the image, in hexadecimal.
    pub fn identity(&self) -> String {
        self.header.identity.to_string()
    }

    /// The sizes of the image.
    pub fn geometry(&self) -> Geometry {
        self.header.geometry
    }

    /// Bytes written so far.
    pub fn bytes_written(&self) -> u64 {
        self.geometry().offset_of(LocalityBlockId(self.index.locality_blocks()))
    }

    /// Writes the next locality block. After an error the image can't be finished any more.
    pub fn append(&mut self, filled: LocalityBlock) -> Result<LocalityBlockId, ImageError> {
        let mut filled = filled;
        let tags = match &self.sealing {
            Some(sealing) => {
                sealing.seal_blocks(LocalityBlockId(self.index.locality_blocks()), &mut filled)?
            }
            None => Vec::new(),
        };
        let id = self
            .index
            .add_locality_block(&filled)
            .map_err(|refusal| self.refusal_error(refusal))?;
        self.index.add_tags(tags);
        let mut bytes = filled.bytes;
        bytes.resize(self.geometry().locality_block_bytes as usize, 0);
        if let Some(sealing) = &mut self.sealing {
            sealing.add_written(&bytes);
        }
        let offset = self.geometry().offset_of(id);
        let written = self.partial.write_at("image.write", &bytes, offset);
        if written.is_err() {
            self.refused = Some(ImageError::LocalityBlock {
                id,
                problem: "it could not be written, so the image can't be finished".into(),
            });
        }
        written.map(|()| id)
    }

    /// Records a memory block of zeros. [`Self::finish`] reports a mistake (a block past the end,
    /// or given twice).
    pub fn set_zero(&mut self, block: Block) {
        if let Err(refusal) = self.index.add_zero(block) {
            self.refused = Some(self.refusal_error(refusal));
        }
    }

    /// Records zero blocks, before any other block is. [`Self::finish`] reports a mistake.
    pub(crate) fn set_zeros(&mut self, zeros: BlockRuns) {
        self.index.set_zeros(zeros);
    }

    /// Takes the auxiliary blocks of another image in their stored form, after checking them.
    pub(crate) fn set_stored_aux(&mut self, image: &Image) -> Result<(), ImageError> {
        image.aux_list()?;
        self.stored_aux = image.stored_section(SectionKind::AuxBlocks)?;
        Ok(())
    }

    /// Records the access order, in an image that is not organized by it.
    pub(crate) fn set_access_order(&mut self, groups: Vec<AccessGroup>) {
        self.access_order = Some(groups);
    }

    fn refusal_error(&self, refusal: AppendRefusal) -> ImageError {
        let (id, blocks) =
            (LocalityBlockId(self.index.locality_blocks()), self.geometry().block_count());
        match refusal {
            AppendRefusal::Entry(problem) => ImageError::LocalityBlock { id, problem },
            AppendRefusal::Range(block) => ImageError::BlockRange { block, blocks },
            AppendRefusal::Twice(block) => ImageError::BlockTwice(block),
            AppendRefusal::TooOften => ImageError::TooOften,
        }
    }

    /// Writes the sections, the index and the footer, syncs everything to disk, and gives the file
    /// its name. Memory blocks that were never mentioned are untouched, or as in the image it
    /// builds on.
    pub fn finish(mut self, sections: ImageSections) -> Result<ImageSummary, ImageError> {
        if let Some(refused) = self.refused.take() {
            return Err(refused);
        }
        self.check_sections(&sections)?;
        let mut summary = self.summary();
        let geometry = self.geometry();
        let mut encoded = self.encode_sections(&sections)?;
        let stored_aux = self.stored_aux.take();
        encoded.push((SectionKind::Index, self.index.encode()));
        let mut end = ImageEnd {
            partial: &self.partial,
            geometry,
            sealing: self.sealing.as_ref(),
            clear: Vec::new(),
            footer: Footer {
                version: self.header.version,
                identity: self.header.identity,
                locality_blocks: summary.locality_blocks,
                sections: Vec::new(),
                tag: None,
            },
        };
        if let Some((at, bytes)) = stored_aux {
            end.write_encoded(at.kind, at.is_zstd, at.decoded_len, bytes)?;
        }
        for (kind, bytes) in encoded {
            end.write_section(kind, bytes)?;
        }
        let footer = end.write_footer(&self.header)?;
        self.partial.publish()?;
        summary.file_bytes = footer.file_bytes(&geometry);
        summary.overhead_bytes = overhead_bytes(&footer, &geometry);
        Ok(summary)
    }

    fn check_sections(&self, sections: &ImageSections) -> Result<(), ImageError> {
        sections.regions.check_layout()?;
        let (regions, image) = (sections.regions.total_pages(), self.geometry().total_pages);
        if regions != image {
            return Err(ImageError::Pages { regions, image });
        }
        // The guest-physical address of a region does not matter: the guest changes it while it
        // boots.
        let is_other = |ram: &RegionMap| ram.regions() != sections.regions.regions();
        if let Some((parent, _)) = self.parent.as_ref().filter(|(_, ram)| is_other(ram)) {
            return Err(ImageError::OtherRam { parent: parent.path.clone() });
        }
        if let Some(problem) = unstorable_aux(&sections.aux_blocks) {
            return Err(ImageError::Section {
                part: SectionKind::AuxBlocks.section_name(),
                problem,
            });
        }
        let blocks = self.geometry().block_count();
        match sections.working_set.iter().find(|block| block.0 >= blocks) {
            Some(&block) => Err(ImageError::BlockRange { block, blocks }),
            None => Ok(()),
        }
    }

    fn encode_sections(
        &self,
        sections: &ImageSections,
    ) -> Result<Vec<(SectionKind, Vec<u8>)>, ImageError> {
        let path = self.partial.target();
        let mut encoded = sections.encode().map_err(|error| ImageError::Io {
            step: "put into JSON what belongs to",
            path: path.to_owned(),
            source: error.into(),
        })?;
        if let Some((parent, _)) = &self.parent {
            encoded.push((SectionKind::Parent, parent.encode()));
        }
        if let Some(groups) = &self.access_order {
            encoded.push((SectionKind::AccessOrder, encode_access_order(groups)));
        }
        encoded.iter().try_for_each(|(kind, bytes)| check_length(*kind, bytes))?;
        Ok(encoded)
    }

    fn summary(&self) -> ImageSummary {
        let (stored_blocks, zero_blocks) = (self.index.stored_blocks(), self.index.zero_blocks());
        let unmentioned_blocks = self.geometry().block_count() - stored_blocks - zero_blocks;
        let is_whole = self.parent.is_none();
        ImageSummary {
            path: self.partial.target().to_owned(),
            geometry: self.geometry(),
            organization: self.header.organization,
            file_bytes: 0,
            locality_blocks: self.index.locality_blocks(),
            stored_blocks,
            stored_bytes: self.index.stored_bytes(),
            zero_blocks,
            untouched_blocks: if is_whole { unmentioned_blocks } else { 0 },
            inherited_blocks: if is_whole { 0 } else { unmentioned_blocks },
            overhead_bytes: 0,
        }
    }
}

/// Bytes of an image that are not locality blocks.
pub(crate) fn overhead_bytes(footer: &Footer, geometry: &Geometry) -> u64 {
    let blocks_end = geometry.offset_of(LocalityBlockId(footer.locality_blocks));
    footer.file_bytes(geometry) - blocks_end + HEADER_BYTES
}

/// Refuses a section that a reader would refuse.
fn check_length(kind: SectionKind, bytes: &[u8]) -> Result<(), ImageError> {
    let refused = |problem| Err(ImageError::Section { part: kind.section_name(), problem });
    if bytes.len() as u64 > kind.bytes_max() {
        return refused(format!("{} bytes, at most {} fit", bytes.len(), kind.bytes_max()));
    }
    let is_json = matches!(kind, SectionKind::Meta | SectionKind::Regions);
    match is_json.then(|| count_values(bytes)) {
        Some(count) if count > JSON_VALUES_MAX => {
            refused(format!("{count} values, at most {JSON_VALUES_MAX} fit"))
        }
        _ => Ok(()),
    }
}

/// The end of an image: sections, one after the other, then the footer.
struct ImageEnd<'a> {
    partial: &'a PartialFile,
    geometry: Geometry,
    sealing: Option<&'a FileSealing>,
    /// The sections that are not encrypted.
    clear: Vec<u8>,
    footer: Footer,
}

impl ImageEnd<'_> {
    /// Compresses a section, if that is allowed and makes it shorter, and writes it.
    fn write_section(&mut self, kind: SectionKind, decoded: Vec<u8>) -> Result<(), ImageError> {
        let len = decoded.len();
        let is_fit = |compressed: &Vec<u8>| {
            compressed.len() < len && is_accepted_by_any_reader(kind, compressed.len(), len)
        };
        let compressed = zstd::bulk::compress(&decoded, ZSTD_LEVEL).ok().filter(is_fit);
        let is_zstd = compressed.is_some();
        self.write_encoded(kind, is_zstd, len as u64, compressed.unwrap_or(decoded))
    }

    /// Encrypts an encoded section, if the image is sealed, and writes it.
    fn write_encoded(
        &mut self,
        kind: SectionKind,
        is_zstd: bool,
        decoded_len: u64,
        mut stored: Vec<u8>,
    ) -> Result<(), ImageError> {
        match self.sealing {
            Some(_) if kind.is_clear() => self.clear.extend_from_slice(&stored),
            Some(sealing) => sealing.seal_section(kind, &mut stored)?,
            None => {}
        }
        let offset = self.footer.end_offset(&self.geometry);
        self.partial.write_at("image.index", &stored, offset)?;
        self.footer.sections.push(SectionLocation {
            kind,
            is_zstd,
            offset,
            stored_len: stored.len() as u64,
            decoded_len,
            checksum: XxHash3_64::oneshot(&stored),
        });
        Ok(())
    }

    /// Writes the seal section, if the image is sealed, and the footer.
    fn write_footer(mut self, header: &Header) -> Result<Footer, ImageError> {
        if let Some(sealing) = self.sealing {
            let section = sealing.section().encode();
            self.write_encoded(SectionKind::Seal, false, section.len() as u64, section)?;
            let footer = self.footer.encode_without_tag(&self.geometry);
            self.footer.tag = Some(sealing.clear_tag(&[&header.encode(), &self.clear, &footer])?);
        }
        let at = self.footer.end_offset(&self.geometry);
        self.partial.write_at("image.footer", &self.footer.encode(&self.geometry), at)?;
        Ok(self.footer)
    }
}

fn random_identity() -> Result<ImageIdentity, ImageError> {
    let path = Path::new("/dev/urandom");
    let identity = random_bytes();
    identity.map(ImageIdentity).map_err(|source| ImageError::Io {
        step: "read",
        path: path.to_owned(),
        source,
    })
}
