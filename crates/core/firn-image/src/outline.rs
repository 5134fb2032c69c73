//! What the end of an image shows: enough to list an image that is in object storage.
//!
//! ```text
//!   header | locality blocks | metadata | region map | device state | ... | parent | index | footer |
//!                                 ^                                       |<-- first read: 64 KiB -->|
//!                                 second read, where the first does not have it
//! ```
//!
//! Opening an image reads its header and its index. An image in object storage is listed by its
//! footer, its parent section and its metadata alone: one or two reads. Each of these parts is
//! checked by its checksum; nothing here shows whether memory blocks are intact.

use std::error::Error;
use std::ops::Range;
use std::path::PathBuf;

use thiserror::Error;
use twox_hash::XxHash3_64;

use crate::budget::MemoryBudget;
use crate::chain::ParentLink;
use crate::error::ImageFlaw;
use crate::footer::{FOOTER_BYTES, Footer, SectionKind, SectionLocation};
use crate::geometry::HEADER_BYTES;
use crate::sections;
use crate::source::inflate_section;

/// What the end of an image shows.
#[derive(Clone, PartialEq, Debug)]
pub struct ImageOutline {
    /// Its identity, in hexadecimal.
    pub identity: String,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// The image that it builds on, if it builds on one.
    pub parent: Option<ParentName>,
    /// The metadata that the writer stored about the VM; null if the image is sealed.
    pub meta: serde_json::Value,
    /// Whether the image is sealed: then only its key shows more.
    pub is_sealed: bool,
    footer: Vec<u8>,
}

/// The image that an incremental image builds on, as the incremental image names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParentName {
    /// Its identity, in hexadecimal.
    pub identity: String,
    /// Relative to the directory of the image that names it, if it is not absolute.
    pub path: PathBuf,
}

/// Why the end of an image shows nothing.
#[derive(Debug, Error)]
pub enum OutlineError<E: Error + 'static> {
    /// The bytes are not those of an image.
    #[error(transparent)]
    Flaw(ImageFlaw),
    /// They can't be read.
    #[error(transparent)]
    Read(E),
}

impl ImageOutline {
    /// The bytes at the end of a file that are read at once.
    pub const TAIL_BYTES: u64 = 64 << 10;

    /// Reads the outline of an image of `file_bytes` bytes by `read`, which returns the bytes of a
    /// range of the image.
    ///
    /// # Errors
    /// If a part that is needed is damaged, or can't be read.
    pub fn read<E: Error + 'static>(
        file_bytes: u64,
        read: &mut dyn FnMut(Range<u64>) -> Result<Vec<u8>, E>,
    ) -> Result<Self, OutlineError<E>> {
        if file_bytes < HEADER_BYTES + FOOTER_BYTES {
            let problem = format!("{file_bytes} bytes are too few for an image");
            return Err(OutlineError::Flaw(ImageFlaw::new("file", file_bytes, problem)));
        }
        let start = file_bytes.saturating_sub(Self::TAIL_BYTES);
        let tail = read(start..file_bytes).map_err(OutlineError::Read)?;
        let mut parts = PartReader { start, tail, read };
        let footer_at = file_bytes - FOOTER_BYTES;
        let footer_bytes = parts.read_part("footer", footer_at, FOOTER_BYTES)?;
        let footer = Footer::parse_alone(&footer_bytes, file_bytes)
            .map_err(|flaw| OutlineError::Flaw(flaw.shift_by(footer_at)))?;
        let mut budget = MemoryBudget::of_file(file_bytes);
        let parent = parts.read_section(&footer, SectionKind::Parent, &mut budget)?;
        let parent = parent.map(|(at, bytes)| {
            ParentLink::parse(&bytes, footer.is_sealed())
                .map_err(|flaw| OutlineError::Flaw(flaw.shift_by(at)))
        });
        let meta = match footer.is_sealed() {
            true => None,
            false => parts.read_section(&footer, SectionKind::Meta, &mut budget)?,
        };
        let meta = meta.map(|(at, bytes)| {
            sections::parse_meta(&bytes, &mut budget)
                .map_err(|flaw| OutlineError::Flaw(flaw.shift_by(at)))
        });
        Ok(Self {
            identity: footer.identity.to_string(),
            file_bytes,
            parent: parent
                .transpose()?
                .map(|link| ParentName { identity: link.identity.to_string(), path: link.path }),
            meta: meta.transpose()?.unwrap_or_default(),
            is_sealed: footer.is_sealed(),
            footer: footer_bytes,
        })
    }

    /// Whether another image has the same bytes, by the checksums of all parts but the memory
    /// blocks, whose checksums are in the index. Images of the same identity may differ: one was
    /// rewritten.
    pub fn has_same_bytes(&self, other: &Self) -> bool {
        self.footer == other.footer
    }
}

/// Parts of a file of which the end was read.
struct PartReader<'a, E> {
    start: u64,
    tail: Vec<u8>,
    read: &'a mut dyn FnMut(Range<u64>) -> Result<Vec<u8>, E>,
}

impl<E: Error + 'static> PartReader<'_, E> {
    fn read_part(
        &mut self,
        part: &'static str,
        offset: u64,
        len: u64,
    ) -> Result<Vec<u8>, OutlineError<E>> {
        let bytes = match offset.checked_sub(self.start) {
            Some(at) => self.tail.get(at as usize..(at + len) as usize).map(<[u8]>::to_vec),
            None => Some((self.read)(offset..offset + len).map_err(OutlineError::Read)?),
        };
        let bytes = bytes.filter(|bytes| bytes.len() as u64 == len);
        bytes.ok_or_else(|| {
            let problem = "fewer bytes were read than the image has".to_owned();
            OutlineError::Flaw(ImageFlaw::new(part, offset, problem))
        })
    }

    /// A section's offset and its decoded bytes, if the image has one.
    fn read_section(
        &mut self,
        footer: &Footer,
        kind: SectionKind,
        budget: &mut MemoryBudget,
    ) -> Result<Option<(u64, Vec<u8>)>, OutlineError<E>> {
        let Some(at) = footer.find_section(kind) else { return Ok(None) };
        let flaw =
            |problem| OutlineError::Flaw(ImageFlaw::new(kind.section_name(), at.offset, problem));
        let (len, max) = (at.decoded_len.max(at.stored_len), kind.bytes_max());
        if len > max {
            return Err(flaw(format!("{len} bytes, at most {max} fit")));
        }
        let stored = self.read_part(kind.section_name(), at.offset, at.stored_len)?;
        Ok(Some((at.offset, decode_section(at, stored, budget).map_err(flaw)?)))
    }
}

fn decode_section(
    at: &SectionLocation,
    stored: Vec<u8>,
    budget: &mut MemoryBudget,
) -> Result<Vec<u8>, String> {
    let (found, expected) = (XxHash3_64::oneshot(&stored), at.checksum);
    if found != expected {
        return Err(format!("checksum is {found:#018x} instead of {expected:#018x}"));
    }
    let len = at.decoded_len;
    budget.charge_section(at.kind, len)?;
    match at.is_zstd {
        false => Ok(stored),
        true => {
            inflate_section(&stored, len).ok_or_else(|| format!("it does not make {len} bytes"))
        }
    }
}
