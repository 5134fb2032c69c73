//! The first 4 KiB of an image.
//!
//! ```text
//!      0  8  magic: 89 46 49 52 4e 0d 0a 1a ("\x89FIRN\r\n\x1a")
//!      8  4  version: 1, 2 or 3
//!     12  1  block organization: 0 access, 1 physical, 2 random
//!     13  1  pages in a memory block
//!     14  2  reserved
//!     16  4  bytes in a locality block
//!     20  4  pages in the RAM page space
//!     24 16  identity: random, the same in the footer
//!     40 ..  reserved
//!   4088  8  xxh3 of the bytes before
//! ```
//!
//! Numbers are little-endian, reserved bytes are zero. As in PNG, the magic number shows the damage
//! of a transfer in text mode: to the eighth bit, to line endings, and to the bytes after an
//! end-of-file character.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use firn_types::BlockSize;
use twox_hash::XxHash3_64;

use crate::bytes::ByteReader;
use crate::error::ImageFlaw;
use crate::geometry::{BlockOrganization, Geometry, HEADER_BYTES};

/// The newest version that this Firn reads, and writes where an image needs it.
pub const VERSION: u32 = 3;

/// The version of an image that holds all of memory, and each memory block once.
pub(crate) const VERSION_WHOLE: u32 = 1;

/// The version of an image that has a parent, or lists memory blocks again.
pub(crate) const VERSION_CHAIN: u32 = 2;

/// The version of an image that is encrypted.
pub(crate) const VERSION_SEALED: u32 = 3;

const MAGIC: [u8; 8] = *b"\x89FIRN\r\n\x1a";
const PLACE: &str = "header";
const LEN: usize = HEADER_BYTES as usize;
const CHECKED: usize = LEN - 8;

/// A random number that shows which header and which footer belong together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ImageIdentity(pub(crate) [u8; 16]);

impl fmt::Display for ImageIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The contents of the header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) geometry: Geometry,
    pub(crate) organization: BlockOrganization,
    pub(crate) identity: ImageIdentity,
}

impl Header {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LEN);
        bytes.extend(MAGIC);
        bytes.extend(self.version.to_le_bytes());
        bytes.extend([self.organization.code(), self.geometry.block_size.into(), 0, 0]);
        bytes.extend(self.geometry.locality_block_bytes.to_le_bytes());
        bytes.extend(self.geometry.total_pages.to_le_bytes());
        bytes.extend(self.identity.0);
        append_checksum(bytes, LEN)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ImageFlaw> {
        let mut head = ByteReader::new(PLACE, bytes);
        if head.read_array()? != MAGIC {
            return Err(ImageFlaw::new(PLACE, 0, "not Firn's magic number: this is no image"));
        }
        let version = parse_version(PLACE, &mut head)?;
        check_checksum(PLACE, bytes, LEN)?;
        let organization = head.read_u8()?;
        let organization = BlockOrganization::from_code(organization)
            .ok_or_else(|| head.flaw_here(format!("no block organization {organization}")))?;
        let block_size =
            BlockSize::new(head.read_u8()?).map_err(|error| head.flaw_here(error.to_string()))?;
        let reserved = head.read_u16()?;
        let (locality_block_bytes, total_pages) = (head.read_u32()?, head.read_u32()?);
        let geometry = Geometry { block_size, locality_block_bytes, total_pages };
        geometry.check_sizes().map_err(|error| head.flaw_here(error.to_string()))?;
        let identity = ImageIdentity(head.read_array()?);
        let rest = ByteReader::new(PLACE, bytes.get(..CHECKED).unwrap_or_default());
        check_reserved(reserved, rest)?;
        Ok(Self { version, geometry, organization, identity })
    }
}

/// Whether a file begins as an image that is not sealed. Reads twelve bytes, and checks nothing else.
pub fn is_unsealed_image(path: &Path) -> bool {
    let mut head = [0; 12];
    let is_read =
        path.is_file() && File::open(path).and_then(|mut file| file.read_exact(&mut head)).is_ok();
    let version = head.last_chunk::<4>().copied().map_or(0, u32::from_le_bytes);
    is_read && head.starts_with(&MAGIC) && (VERSION_WHOLE..VERSION_SEALED).contains(&version)
}

fn check_reserved(reserved: u16, mut rest: ByteReader<'_>) -> Result<(), ImageFlaw> {
    if reserved != 0 {
        return Err(ImageFlaw::new(PLACE, 14, "a reserved byte is not zero"));
    }
    rest.take_bytes(40)?;
    rest.expect_zeros()
}

/// Appends zeros up to `len` bytes, of which the last 8 are the checksum of the others.
pub(crate) fn append_checksum(mut bytes: Vec<u8>, len: usize) -> Vec<u8> {
    bytes.resize(len - 8, 0);
    let checksum = XxHash3_64::oneshot(&bytes);
    bytes.extend(checksum.to_le_bytes());
    bytes
}

/// Checks the checksum that [`append_checksum`] wrote.
pub(crate) fn check_checksum(
    part: &'static str,
    bytes: &[u8],
    len: usize,
) -> Result<(), ImageFlaw> {
    let mut all = ByteReader::new(part, bytes);
    let found = XxHash3_64::oneshot(all.take_bytes(len - 8)?);
    let expected = all.read_u64()?;
    all.expect_end()?;
    if found == expected {
        return Ok(());
    }
    let problem = format!("checksum is {found:#018x} instead of {expected:#018x}");
    Err(ImageFlaw::new(part, 0, problem))
}

/// Reads the next number, which must be a version that this Firn reads.
pub(crate) fn parse_version(
    part: &'static str,
    bytes: &mut ByteReader<'_>,
) -> Result<u32, ImageFlaw> {
    match bytes.read_u32()? {
        version @ VERSION_WHOLE..=VERSION => Ok(version),
        other => {
            let problem =
                format!("format version {other}, and this Firn reads versions 1 to {VERSION}");
            Err(ImageFlaw::new(part, 8, problem))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            version: VERSION,
            geometry: Geometry::new(1234),
            organization: BlockOrganization::Physical,
            identity: ImageIdentity([7; 16]),
        }
    }

    #[test]
    fn decoding_returns_the_encoded_value() {
        assert_eq!(header().encode().len() as u64, HEADER_BYTES);
        assert_eq!(Header::parse(&header().encode()), Ok(header()));
    }

    #[test]
    fn every_flipped_bit_is_seen() {
        let good = header().encode();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::parse(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn resealed_nonsense_is_seen() {
        for (at, value) in [(12, 3), (13, 5), (14, 1), (15, 1), (17, 3), (40, 1), (4087, 1)] {
            let mut bytes = header().encode();
            bytes[at] = value;
            bytes.truncate(CHECKED);
            assert!(Header::parse(&append_checksum(bytes, LEN)).is_err(), "byte {at}");
        }
    }
}
