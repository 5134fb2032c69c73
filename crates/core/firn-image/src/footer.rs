//! The last 1 KiB of an image. It is written last, and makes the file an image.
//!
//! ```text
//!      0  8  magic: "FIRN-END"
//!      8  4  version, as in the header
//!     12  4  number of sections
//!     16 16  identity, as in the header
//!     32  8  length of the file in bytes, footer included
//!     40  4  number of locality blocks
//!     44  4  reserved
//!     48 40  section 0:  0 4 kind   4 4 encoding (0 as it is, 1 zstd)   8 8 offset in the file
//!           16 8 stored length   24 8 length when decoded   32 8 xxh3 of the stored bytes
//!     88 40  section 1 ...
//!   1000 16  version 3: authentication code of header, parent section, seal section and footer
//!   1016  8  xxh3 of the bytes before
//! ```
//!
//! Sections lie behind the last locality block without gaps, in the order of the table, up to the
//! footer: every byte of the file belongs to a part that is checked.

use crate::bytes::ByteReader;
use crate::chain::PATH_BYTES_MAX;
use crate::error::ImageFlaw;
use crate::geometry::Geometry;
use crate::header::{
    ImageIdentity, VERSION_SEALED, append_checksum, check_checksum, parse_version,
};
use crate::keys::{SECTION_TAG_BYTES, SealTag};
use crate::locality::LocalityBlockId;

/// Bytes of the footer.
pub const FOOTER_BYTES: u64 = 1024;

/// The capacity of the table of sections.
pub(crate) const SECTIONS_MAX: usize = 16;

/// The maximum length of a decoded section in bytes, except for the index.
pub const SECTION_BYTES_MAX: u64 = 1 << 30;

/// The maximum length of the metadata and of the region map in bytes, both JSON.
pub const JSON_BYTES_MAX: u64 = 16 << 20;

/// The maximum number of values in the metadata or the region map: each takes hundreds of bytes of
/// memory.
pub const JSON_VALUES_MAX: usize = 32_768;

/// The maximum length of the parent section in bytes: an identity, in a sealed image the link to
/// the parent's key, and a path.
const PARENT_BYTES_MAX: u64 = 16 + 32 + PATH_BYTES_MAX as u64;

/// The maximum length of the seal section in bytes.
pub(crate) const SEAL_BYTES_MAX: u64 = 16 << 10;

/// The offset of the authentication code in the footer of a sealed image.
const TAG_OFFSET: usize = LEN - 8 - SECTION_TAG_BYTES;

const MAGIC: [u8; 8] = *b"FIRN-END";
const PLACE: &str = "footer";
const LEN: usize = FOOTER_BYTES as usize;

/// The content of a section.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
#[repr(u32)]
pub(crate) enum SectionKind {
    Meta = 1,
    Regions = 2,
    DeviceState = 3,
    AuxBlocks = 4,
    WorkingSet = 5,
    PageTableRoots = 6,
    AccessOrder = 7,
    Index = 8,
    Parent = 9,
    Seal = 10,
}

impl SectionKind {
    pub(crate) const ALL: [Self; 10] = [
        Self::Meta,
        Self::Regions,
        Self::DeviceState,
        Self::AuxBlocks,
        Self::WorkingSet,
        Self::PageTableRoots,
        Self::AccessOrder,
        Self::Index,
        Self::Parent,
        Self::Seal,
    ];

    /// Its name in errors.
    pub(crate) fn section_name(self) -> &'static str {
        match self {
            Self::Meta => "metadata section",
            Self::Regions => "region map section",
            Self::DeviceState => "device state section",
            Self::AuxBlocks => "auxiliary RAM section",
            Self::WorkingSet => "working set section",
            Self::PageTableRoots => "page-table root section",
            Self::AccessOrder => "access order section",
            Self::Index => "index",
            Self::Parent => "parent section",
            Self::Seal => "seal section",
        }
    }

    /// Its maximum decoded length in bytes, however long the file is: see `budget` for the memory
    /// that the length of a file justifies. The index has a limit of its own, which follows from
    /// the geometry.
    pub(crate) fn bytes_max(self) -> u64 {
        match self {
            Self::Meta | Self::Regions => JSON_BYTES_MAX,
            Self::Parent => PARENT_BYTES_MAX,
            Self::Seal => SEAL_BYTES_MAX,
            _ => SECTION_BYTES_MAX,
        }
    }

    /// Whether it is not encrypted in a sealed image: what is needed to find its key and its parent.
    pub(crate) fn is_clear(self) -> bool {
        matches!(self, Self::Parent | Self::Seal)
    }

    fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == code)
    }
}

/// The location of a section in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SectionLocation {
    pub(crate) kind: SectionKind,
    pub(crate) is_zstd: bool,
    pub(crate) offset: u64,
    pub(crate) stored_len: u64,
    pub(crate) decoded_len: u64,
    pub(crate) checksum: u64,
}

/// The contents of the footer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Footer {
    pub(crate) version: u32,
    pub(crate) identity: ImageIdentity,
    pub(crate) locality_blocks: u32,
    pub(crate) sections: Vec<SectionLocation>,
    /// The authentication code of the parts that are not encrypted, in a sealed image.
    pub(crate) tag: Option<SealTag>,
}

impl Footer {
    /// Whether the image is encrypted.
    pub(crate) fn is_sealed(&self) -> bool {
        self.version == VERSION_SEALED
    }

    /// The bytes that its authentication code covers.
    pub(crate) fn encode_without_tag(&self, geometry: &Geometry) -> Vec<u8> {
        Self { tag: None, ..self.clone() }.encode(geometry)
    }

    /// The end of the sections so far: after the last of them, the offset of the footer.
    pub(crate) fn end_offset(&self, geometry: &Geometry) -> u64 {
        let sections: u64 = self.sections.iter().map(|section| section.stored_len).sum();
        geometry.offset_of(LocalityBlockId(self.locality_blocks)) + sections
    }

    /// Length of the whole file in bytes.
    pub(crate) fn file_bytes(&self, geometry: &Geometry) -> u64 {
        self.end_offset(geometry) + FOOTER_BYTES
    }

    pub(crate) fn find_section(&self, kind: SectionKind) -> Option<&SectionLocation> {
        self.sections.iter().find(|section| section.kind == kind)
    }

    pub(crate) fn encode(&self, geometry: &Geometry) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LEN);
        bytes.extend(MAGIC);
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((self.sections.len() as u32).to_le_bytes());
        bytes.extend(self.identity.0);
        bytes.extend(self.file_bytes(geometry).to_le_bytes());
        bytes.extend(self.locality_blocks.to_le_bytes());
        bytes.extend([0; 4]);
        self.sections.iter().for_each(|section| section.encode(&mut bytes));
        if let Some(tag) = self.tag {
            bytes.resize(TAG_OFFSET, 0);
            bytes.extend(tag);
        }
        append_checksum(bytes, LEN)
    }

    /// Parses a footer that was found at the end of a file of `file_bytes` bytes.
    pub(crate) fn parse(
        bytes: &[u8],
        geometry: &Geometry,
        file_bytes: u64,
    ) -> Result<Self, ImageFlaw> {
        let footer = Self::parse_fields(bytes, file_bytes)?;
        let first = geometry.offset_of(LocalityBlockId(footer.locality_blocks));
        footer.check_offsets(first, file_bytes)?;
        Ok(footer)
    }

    /// Parses a footer whose header is not known: its sections may begin anywhere.
    pub(crate) fn parse_alone(bytes: &[u8], file_bytes: u64) -> Result<Self, ImageFlaw> {
        let footer = Self::parse_fields(bytes, file_bytes)?;
        let first = footer.sections.first().map_or(file_bytes - FOOTER_BYTES, |it| it.offset);
        footer.check_offsets(first, file_bytes)?;
        Ok(footer)
    }

    fn parse_fields(bytes: &[u8], file_bytes: u64) -> Result<Self, ImageFlaw> {
        let mut foot = ByteReader::new(PLACE, bytes);
        if foot.read_array()? != MAGIC {
            let problem = "there is none: the image was never finished, or is cut off";
            return Err(ImageFlaw::new(PLACE, 0, problem));
        }
        let version = parse_version(PLACE, &mut foot)?;
        check_checksum(PLACE, bytes, LEN)?;
        let count = foot.read_u32()? as usize;
        if count > SECTIONS_MAX {
            return Err(foot.flaw_here(format!("{count} sections, at most {SECTIONS_MAX}")));
        }
        let identity = ImageIdentity(foot.read_array()?);
        let expected_bytes = foot.read_u64()?;
        if expected_bytes != file_bytes {
            let problem = format!("the file has {file_bytes} bytes instead of {expected_bytes}");
            return Err(foot.flaw_here(problem));
        }
        let locality_blocks = foot.read_u32()?;
        let reserved = foot.read_u32()?;
        let is_sealed = version == VERSION_SEALED;
        let sections: Vec<_> = (0..count)
            .map(|_| SectionLocation::parse(&mut foot, is_sealed))
            .collect::<Result<_, _>>()?;
        if reserved != 0 {
            return Err(ImageFlaw::new(PLACE, 44, "a reserved byte is not zero"));
        }
        let end = if is_sealed { TAG_OFFSET } else { LEN - 8 };
        let reserved = foot.take_bytes(end - (48 + count * 40))?;
        ByteReader::new(PLACE, reserved).expect_zeros()?;
        let tag = if is_sealed { Some(foot.read_array()?) } else { None };
        let footer = Self { version, identity, locality_blocks, sections, tag };
        match footer.find_section(SectionKind::Seal).is_some() == is_sealed {
            true => Ok(footer),
            false => Err(ImageFlaw::new(PLACE, 8, "its version and its seal section do not fit")),
        }
    }

    /// Checks that sections follow one another without gaps from offset `first` on, each kind at
    /// most once.
    fn check_offsets(&self, first: u64, file_bytes: u64) -> Result<(), ImageFlaw> {
        let mut end = first;
        for (number, section) in self.sections.iter().enumerate() {
            let part = section.kind.section_name();
            let flaw = |problem| ImageFlaw::new(PLACE, 48 + number as u64 * 40, problem);
            if section.offset != end {
                let offset = section.offset;
                return Err(flaw(format!("the {part} is at {offset} instead of {end}")));
            }
            end = end
                .checked_add(section.stored_len)
                .filter(|&end| end <= file_bytes)
                .ok_or_else(|| flaw(format!("the {part} reaches past the end of the file")))?;
            if self.sections.iter().take(number).any(|before| before.kind == section.kind) {
                return Err(flaw(format!("there are two of the {part}")));
            }
        }
        if end + FOOTER_BYTES != file_bytes {
            let problem = format!("the last section ends at {end}, not where the footer starts");
            return Err(ImageFlaw::new(PLACE, 0, problem));
        }
        Ok(())
    }
}

impl SectionLocation {
    fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend((self.kind as u32).to_le_bytes());
        bytes.extend(u32::from(self.is_zstd).to_le_bytes());
        bytes.extend(self.offset.to_le_bytes());
        bytes.extend(self.stored_len.to_le_bytes());
        bytes.extend(self.decoded_len.to_le_bytes());
        bytes.extend(self.checksum.to_le_bytes());
    }

    fn parse(foot: &mut ByteReader<'_>, is_sealed: bool) -> Result<Self, ImageFlaw> {
        let kind = foot.read_u32()?;
        let kind = SectionKind::from_code(kind).ok_or_else(|| {
            foot.flaw_here(format!("section kind {kind} is not known to this Firn"))
        })?;
        let is_zstd = match foot.read_u32()? {
            0 => false,
            1 => true,
            other => {
                return Err(foot.flaw_here(format!("encoding {other} is not known to this Firn")));
            }
        };
        let (offset, stored_len) = (foot.read_u64()?, foot.read_u64()?);
        let (decoded_len, checksum) = (foot.read_u64()?, foot.read_u64()?);
        let is_encrypted = is_sealed && !kind.is_clear();
        let added = if is_encrypted { SECTION_TAG_BYTES as u64 } else { 0 };
        if stored_len < added || (!is_zstd && decoded_len != stored_len - added) {
            let part = kind.section_name();
            let problem = format!("the {part} has {stored_len} bytes instead of {decoded_len}");
            return Err(foot.flaw_here(problem));
        }
        Ok(Self { kind, is_zstd, offset, stored_len, decoded_len, checksum })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(kind: SectionKind, offset: u64, stored_len: u64) -> SectionLocation {
        SectionLocation { kind, is_zstd: true, offset, stored_len, decoded_len: 9999, checksum: 5 }
    }

    fn footer() -> (Footer, Geometry) {
        let geometry = Geometry::new(1234);
        let at = geometry.offset_of(LocalityBlockId(3));
        let sections =
            vec![section(SectionKind::Meta, at, 100), section(SectionKind::Index, at + 100, 7)];
        let identity = ImageIdentity([7; 16]);
        (Footer { version: 2, identity, locality_blocks: 3, sections, tag: None }, geometry)
    }

    #[test]
    fn decoding_returns_the_encoded_value() {
        let (footer, geometry) = footer();
        let bytes = footer.encode(&geometry);
        assert_eq!(bytes.len(), LEN);
        let len = footer.file_bytes(&geometry);
        assert_eq!(Footer::parse(&bytes, &geometry, len), Ok(footer));
    }

    #[test]
    fn every_flipped_bit_is_seen() {
        let (footer, geometry) = footer();
        let (good, len) = (footer.encode(&geometry), footer.file_bytes(&geometry));
        for bit in 0..LEN * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Footer::parse(&bad, &geometry, len).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_sealed_footer_has_a_seal_section_and_a_tag() {
        let (mut footer, geometry) = footer();
        let parse = |footer: &Footer| {
            let len = footer.file_bytes(&geometry);
            Footer::parse(&footer.encode(&geometry), &geometry, len)
        };
        footer.version = VERSION_SEALED;
        assert!(parse(&footer).is_err(), "no seal section");
        footer.sections.push(SectionLocation {
            is_zstd: false,
            decoded_len: 9,
            ..section(SectionKind::Seal, footer.end_offset(&geometry), 9)
        });
        footer.tag = Some([3; 16]);
        assert!(parse(&footer).is_err(), "a section that is shorter than its tag");
        footer.sections[1].stored_len = 70;
        footer.sections[2].offset += 63;
        assert_eq!(parse(&footer), Ok(footer.clone()));
        assert_ne!(footer.encode_without_tag(&geometry), footer.encode(&geometry));
        footer.version = 2;
        assert!(parse(&footer).is_err(), "not sealed");
    }

    #[test]
    fn gaps_and_doubles_are_seen() {
        let (good, geometry) = footer();
        let len = good.file_bytes(&geometry);
        let parse = |footer: &Footer| Footer::parse(&footer.encode(&geometry), &geometry, len);
        let mut gap = good.clone();
        gap.sections[1].offset += 1;
        assert!(parse(&gap).is_err());
        let mut twice = good.clone();
        twice.sections[1].kind = SectionKind::Meta;
        assert!(parse(&twice).is_err());
        let bytes = good.encode(&geometry);
        assert!(Footer::parse(&bytes, &geometry, len + 1).is_err());
    }
}
