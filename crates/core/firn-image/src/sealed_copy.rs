//! Images without their keys: the files of a chain can be found, copied, and checked for damage.
//!
//! What is not encrypted (header, parent, seal, footer) is enough to find the files of a chain, and
//! has a checksum of each other part as it is stored. That finds damage. Only a reader with the key
//! finds what was changed on purpose.

use std::fs::File;
use std::hash::Hasher as _;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_64;

use crate::budget::MemoryBudget;
use crate::chain::{CHAIN_MAX, ParentLink};
use crate::error::{ImageError, ImageFlaw};
use crate::footer::{Footer, SectionKind};
use crate::header::Header;
use crate::keys::ImageKey;
use crate::source::ImageFile;

/// A file of a chain, as far as it can be known without a key.
#[derive(Debug)]
pub struct ChainPart {
    /// The file.
    pub path: PathBuf,
    /// The open file.
    pub file: File,
    /// The identity of the image, in hexadecimal.
    pub identity: String,
    /// Whether it is sealed.
    pub is_sealed: bool,
}

/// The parts of a file that can be read without its key.
struct ClearParts {
    source: ImageFile,
    header: Header,
    footer: Footer,
}

impl ClearParts {
    fn read(source: ImageFile) -> Result<Self, ImageError> {
        let header = source.read_header()?;
        let footer = source.read_footer(&header.geometry)?;
        source.check_pair(&header, &footer)?;
        Ok(Self { source, header, footer })
    }

    fn parent_path(&self) -> Result<Option<PathBuf>, ImageError> {
        let mut budget = MemoryBudget::of_file(self.source.file_bytes());
        let is_sealed = self.footer.is_sealed();
        let parent = self.source.parse_section(
            &self.footer,
            SectionKind::Parent,
            &mut budget,
            |bytes, _| ParentLink::parse(&bytes, is_sealed),
        )?;
        Ok(parent.map(|link| link.resolve_from(&self.source.path)))
    }

    /// Checks the checksums of all parts as they are stored.
    fn check(&self, progress: &dyn Fn(u32, u32)) -> Result<(), ImageError> {
        let Some(at) = self.footer.find_section(SectionKind::Seal) else {
            return Err(self.source.missing_section(SectionKind::Seal));
        };
        let (_, seal) = self.source.read_seal(at)?;
        for section in &self.footer.sections {
            self.source.read_checked(section)?;
        }
        let geometry = &self.header.geometry;
        let mut hasher = XxHash3_64::new();
        let mut bytes = vec![0; geometry.locality_block_bytes as usize];
        for id in 0..self.footer.locality_blocks {
            let offset = geometry.offset_of(crate::LocalityBlockId(id));
            self.source.read_exact_in_order(&mut bytes, offset)?;
            hasher.write(&bytes);
            progress(id + 1, self.footer.locality_blocks);
        }
        if hasher.finish() == seal.blocks_checksum {
            return Ok(());
        }
        let problem = "the locality blocks are not as they were written";
        let offset = crate::HEADER_BYTES;
        Err(self.source.flaw_error(ImageFlaw::new("locality blocks", offset, problem)))
    }
}

/// Checks an open file of a sealed image, as it is stored: what was damaged is found, what was
/// changed on purpose is not. `progress` is called with (done, total) in locality blocks.
///
/// # Errors
/// The first flaw.
pub fn check_sealed_file(
    path: &Path,
    file: &File,
    progress: &dyn Fn(u32, u32),
) -> Result<(), ImageError> {
    let from = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    ClearParts::read(ImageFile::open_from(path, &from)?)?.check(progress)
}

/// The files of an image and of those it builds on, the newest first. No key is needed.
///
/// # Errors
/// If a file can't be opened, or is no image.
pub fn list_chain(path: &Path) -> Result<Vec<ChainPart>, ImageError> {
    let part = |parts: ClearParts| {
        Ok(ChainPart {
            path: parts.source.path.clone(),
            file: parts.source.try_clone()?,
            identity: parts.footer.identity.to_string(),
            is_sealed: parts.footer.is_sealed(),
        })
    };
    walk_chain(path)?.into_iter().map(part).collect()
}

/// Gets the keys of an image and of those it builds on, by the key ring of this process: none if
/// they are not sealed. The index and the other sections are not read.
///
/// # Errors
/// If a file can't be opened, or its key is not here.
pub fn unlock_chain(path: &Path) -> Result<Vec<ImageKey>, ImageError> {
    let mut keys = Vec::new();
    for mut parts in walk_chain(path)? {
        parts.source.open_seal(&parts.header, &parts.footer)?;
        keys.extend(parts.source.seal().map(|open| open.seal.key.clone()));
    }
    Ok(keys)
}

fn walk_chain(path: &Path) -> Result<Vec<ClearParts>, ImageError> {
    let mut files: Vec<ClearParts> = Vec::new();
    let mut next = Some(path.to_owned());
    while let Some(path) = next {
        if files.len() >= CHAIN_MAX {
            return Err(ImageError::ChainTooLong { path });
        }
        let parts = ClearParts::read(ImageFile::open(&path)?)?;
        next = parts.parent_path()?;
        files.push(parts);
    }
    Ok(files)
}
