//! An image and the images it builds on: a chain, opened as one image.
//!
//! ```text
//!   d3.firn --parent--> d2.firn --parent--> d1.firn --parent--> base.firn
//!   lb 0..a             lb a..b             lb b..c             lb c..d        one numbering for all of them
//! ```
//!
//! An incremental image has the memory blocks that changed since its parent was made. A block that
//! it does not mention is as in the parent. The files of a chain are opened together and read as
//! one image: every memory block is looked up once, in an index over all of them, so a look-up
//! costs the same at any depth.
//!
//! A parent is found by the path that the image records, relative to the image's own directory, and
//! recognized by its identity: a file of that name with other content is never accepted as the
//! parent.
//!
//! Opening a parent is one read, of its end: on a disk that has to seek, a chain of a hundred files
//! would otherwise take seconds to open. Its header contains nothing new: the identity is in the
//! footer too, and the sizes are those of every image of the chain. [`ChainLayer::check_header`] is
//! for a caller that wants the header checked as well.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::budget::{self, MemoryBudget};
use crate::bytes::ByteReader;
use crate::error::{ImageError, ImageFlaw};
use crate::footer::{Footer, SectionKind};
use crate::geometry::{BlockOrganization, Geometry};
use crate::header::{Header, ImageIdentity};
use crate::index::{self, ImageIndex};
use crate::source::ImageFile;

/// The maximum number of images in one chain: each is an open file.
pub const CHAIN_MAX: usize = 256;

pub(crate) const PATH_BYTES_MAX: usize = 4096;

/// One file of a chain.
pub(crate) struct ChainLayer {
    pub(crate) source: ImageFile,
    /// The sizes of all images of the chain.
    pub(crate) geometry: Geometry,
    pub(crate) footer: Footer,
    /// The number of its first locality block.
    pub(crate) first: u32,
    /// Total length of the newer files of the chain, in bytes.
    pub(crate) start: u64,
    /// The contents of this file, whether or not newer files replace them.
    pub(crate) own_counts: LayerCounts,
}

/// The reference of an image to its parent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ParentLink {
    pub(crate) identity: ImageIdentity,
    /// In a sealed image: what only a process with the parent's key could have written there.
    pub(crate) key: Option<[u8; 32]>,
    /// Relative to the directory of the image that names it, if it is not absolute.
    pub(crate) path: PathBuf,
}

impl ParentLink {
    /// The link of the image at `child` to its parent: relative if the parent is below its
    /// directory, which can then be moved.
    pub(crate) fn from_paths(
        child: &Path,
        parent: &Path,
        identity: ImageIdentity,
    ) -> Result<Self, ImageError> {
        let whole = |path: &Path| {
            std::path::absolute(path).map_err(|source| ImageError::Io {
                step: "find",
                path: path.to_owned(),
                source,
            })
        };
        let (child, parent) = (whole(child)?, whole(parent)?);
        let here = child.parent().and_then(|dir| parent.strip_prefix(dir).ok());
        Ok(Self { identity, key: None, path: here.unwrap_or(&parent).to_owned() })
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let key = self.key.as_ref().map_or(&[][..], |key| key);
        [&self.identity.0, key, self.path.as_os_str().as_bytes()].concat()
    }

    pub(crate) fn parse(bytes: &[u8], is_sealed: bool) -> Result<Self, ImageFlaw> {
        let mut fields = ByteReader::new(SectionKind::Parent.section_name(), bytes);
        let identity = ImageIdentity(fields.read_array()?);
        let key = if is_sealed { Some(fields.read_array()?) } else { None };
        let len = bytes.len() - identity.0.len() - if is_sealed { 32 } else { 0 };
        if len == 0 || len > PATH_BYTES_MAX {
            return Err(fields.flaw_here(format!("a path of {len} bytes")));
        }
        Ok(Self { identity, key, path: OsStr::from_bytes(fields.take_bytes(len)?).into() })
    }

    pub(crate) fn resolve_from(&self, child: &Path) -> PathBuf {
        // In the directory of the file itself, not of a link to it.
        let child = std::fs::canonicalize(child).unwrap_or_else(|_| child.to_owned());
        child.parent().unwrap_or(Path::new("")).join(&self.path)
    }
}

impl ChainLayer {
    fn open(path: &Path) -> Result<(Self, Header), ImageError> {
        Self::from_source(ImageFile::open(path)?)
    }

    fn from_source(mut source: ImageFile) -> Result<(Self, Header), ImageError> {
        let header = source.read_header()?;
        source.read_tail();
        let geometry = header.geometry;
        let footer = source.read_footer(&geometry)?;
        source.check_pair(&header, &footer)?;
        source.open_seal(&header, &footer)?;
        Ok((
            Self {
                source,
                geometry,
                footer,
                first: 0,
                start: 0,
                own_counts: LayerCounts::default(),
            },
            header,
        ))
    }

    /// Opens the file again by its name, and reads that one from now on. It has to be the same
    /// image.
    pub(crate) fn reopen(&self) -> Result<(), ImageError> {
        let (again, _) = Self::open(self.path())?;
        if again.footer != self.footer {
            let problem = "it is another image than the one that was opened";
            return Err(self.source.flaw_error(ImageFlaw::new("footer", 0, problem)));
        }
        self.source.replace_with(&again.source);
        Ok(())
    }

    /// Opens a file whose blocks are known to have these sizes.
    fn open_with_geometry(path: &Path, geometry: Geometry) -> Result<Self, ImageError> {
        let mut source = ImageFile::open(path)?;
        source.read_tail();
        let footer = source.read_footer(&geometry)?;
        if footer.is_sealed() {
            let header = source.read_header()?;
            source.check_pair(&header, &footer)?;
            source.open_seal(&header, &footer)?;
        }
        Ok(Self {
            source,
            geometry,
            footer,
            first: 0,
            start: 0,
            own_counts: LayerCounts::default(),
        })
    }

    /// Checks the header, which opening the file within a chain does not read.
    pub(crate) fn check_header(&self) -> Result<(), ImageError> {
        let header = self.source.read_header()?;
        self.source.check_pair(&header, &self.footer)?;
        if header.geometry == self.geometry {
            return Ok(());
        }
        let problem =
            "its blocks or its RAM have other sizes than those of the image that builds on it";
        Err(self.source.flaw_error(ImageFlaw::new("header", 0, problem)))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.source.path
    }

    /// The image it builds on, if any.
    pub(crate) fn read_parent(
        &self,
        budget: &mut MemoryBudget,
    ) -> Result<Option<ParentLink>, ImageError> {
        self.source.parse_section(&self.footer, SectionKind::Parent, budget, |bytes, _| {
            ParentLink::parse(&bytes, self.footer.is_sealed())
        })
    }

    /// The maximum size of the placement tables that the length of this file justifies, in bytes.
    fn table_bytes_max(&self, is_first: bool) -> u64 {
        budget::table_bytes_max(self.source.file_bytes(), is_first)
    }

    fn read_index(
        &self,
        budget: &mut MemoryBudget,
        is_first: bool,
    ) -> Result<ImageIndex, ImageError> {
        let (source, footer) = (&self.source, &self.footer);
        let (version, geometry) = (footer.version, &self.geometry);
        let at = footer
            .find_section(SectionKind::Index)
            .ok_or_else(|| source.missing_section(SectionKind::Index))?;
        let limit = index::bytes_max(version, geometry, footer.locality_blocks);
        let bytes = source.read_section(at, limit, budget)?;
        let room = self.table_bytes_max(is_first);
        index::parse_index(&bytes, version, geometry, footer.locality_blocks, room)
            .map_err(|flaw| source.flaw_error(flaw.shift_by(at.offset)))
    }

    /// Opens the parent that this image names.
    fn open_parent(&self, parent: &ParentLink) -> Result<Self, ImageError> {
        let path = parent.resolve_from(self.path());
        let wrong = |problem| ImageError::WrongParent {
            path: self.path().to_owned(),
            parent: path.clone(),
            problem,
        };
        let opened = Self::open_with_geometry(&path, self.geometry).map_err(|source| {
            // Another image is not a damaged one.
            let header = ImageFile::open(&path).and_then(|source| source.read_header());
            let (mismatch, source) = match header {
                Ok(header) => (self.find_mismatch(&header, parent), source),
                // For a file that is not an image, this error is the better one.
                Err(error) => (None, error),
            };
            let (path, parent, source) = (self.path().to_owned(), path.clone(), Box::new(source));
            mismatch.map_or(ImageError::Parent { path, parent, source }, wrong)
        })?;
        match identity_mismatch(opened.footer.identity, parent) {
            None => Ok(opened),
            Some(problem) => Err(wrong(problem)),
        }
    }

    /// Checks that the parent was sealed with the key that this image names, or that neither is
    /// sealed.
    fn check_seal_of(&self, link: &ParentLink, parent: &Self) -> Result<(), ImageError> {
        let found = parent.source.seal().map(|seal| seal.seal.key.link());
        let problem = match (link.key, found) {
            (expected, found) if expected == found => return Ok(()),
            (Some(_), None) => "it is not sealed, and the image that builds on it is",
            (None, Some(_)) => "it is sealed, and the image that builds on it is not",
            _ => "it was sealed with another key",
        };
        Err(ImageError::WrongParent {
            path: self.path().to_owned(),
            parent: parent.path().to_owned(),
            problem: problem.to_owned(),
        })
    }

    /// The reason why a header is not that of the image's parent; `None` if it is.
    fn find_mismatch(&self, found: &Header, parent: &ParentLink) -> Option<String> {
        let differs = found.geometry != self.geometry;
        let sizes = || differs.then(|| "its blocks or its RAM have other sizes".to_owned());
        identity_mismatch(found.identity, parent).or_else(sizes)
    }
}

fn identity_mismatch(found: ImageIdentity, parent: &ParentLink) -> Option<String> {
    let expected = parent.identity;
    (found != expected).then(|| format!("its identity is {found} instead of {expected}"))
}

/// An image's own file and those it builds on, each with the number of its first locality block,
/// and the index over all.
pub(crate) struct ImageChain {
    pub(crate) layers: Vec<ChainLayer>,
    pub(crate) index: ImageIndex,
    /// The block organization of the image's own file.
    pub(crate) organization: BlockOrganization,
    /// The memory that the chain may still take.
    pub(crate) budget: MemoryBudget,
}

/// The block counts of one file.
#[derive(Clone, Copy, Default)]
pub(crate) struct LayerCounts {
    pub(crate) stored_blocks: u32,
    pub(crate) stored_bytes: u64,
    pub(crate) zero_blocks: u32,
}

impl LayerCounts {
    fn from_index(index: &ImageIndex) -> Self {
        let entries = index.entries();
        Self {
            stored_blocks: entries.len() as u32,
            stored_bytes: entries.iter().map(|entry| u64::from(entry.stored_len)).sum(),
            zero_blocks: index.zero_blocks,
        }
    }
}

impl ImageChain {
    /// Opens an image and all it builds on from descriptors of their files, whichever files have
    /// their names now.
    pub(crate) fn open_from(path: &Path, files: &[File]) -> Result<Self, ImageError> {
        let by_descriptor =
            |file: &File| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let missing = || ImageError::Io {
            step: "open",
            path: path.to_owned(),
            source: io::ErrorKind::NotFound.into(),
        };
        let mut files = files.iter().map(by_descriptor);
        let first = files.next().ok_or_else(missing)?;
        let (layer, header) = ChainLayer::from_source(ImageFile::open_from(path, &first)?)?;
        let mut chain = Self::from_layer(layer, &header)?;
        while let Some(parent) = chain.next_parent()? {
            let Some(oldest) = chain.layers.last() else { break };
            let (path, from) =
                (parent.resolve_from(oldest.path()), files.next().ok_or_else(missing)?);
            let (layer, _) = ChainLayer::from_source(ImageFile::open_from(&path, &from)?)?;
            if let Some(problem) = identity_mismatch(layer.footer.identity, &parent) {
                return Err(layer.source.flaw_error(ImageFlaw::new("header", 0, problem)));
            }
            chain.add_layer(&parent, layer)?;
        }
        Ok(chain)
    }

    fn from_layer(mut layer: ChainLayer, header: &Header) -> Result<Self, ImageError> {
        let mut budget = MemoryBudget::of_file(layer.source.file_bytes());
        let mut index = layer.read_index(&mut budget, true)?;
        layer.own_counts = LayerCounts::from_index(&index);
        index.forget_zeros();
        let organization = header.organization;
        Ok(Self { layers: vec![layer], index, organization, budget })
    }

    /// The parent of the oldest image so far.
    fn next_parent(&mut self) -> Result<Option<ParentLink>, ImageError> {
        let Some(oldest) = self.layers.last() else { return Ok(None) };
        oldest.read_parent(&mut self.budget)
    }

    /// Opens an image and all it builds on. Its parent is at `moved`, if that is given, or else at
    /// the path that the image records.
    pub(crate) fn open(path: &Path, moved: Option<&Path>) -> Result<Self, ImageError> {
        let (layer, header) = ChainLayer::open(path)?;
        let mut chain = Self::from_layer(layer, &header)?;
        let mut at = moved;
        while chain.add_parent(at.take())? {}
        Ok(chain)
    }

    /// Opens the parent of the oldest image so far. False if it has none.
    fn add_parent(&mut self, moved: Option<&Path>) -> Result<bool, ImageError> {
        let Some(oldest) = self.layers.last() else { return Ok(false) };
        let Some(mut parent) = oldest.read_parent(&mut self.budget)? else { return Ok(false) };
        if let Some(moved) = moved {
            let key = parent.key;
            parent = ParentLink::from_paths(oldest.path(), moved, parent.identity)?;
            parent.key = key;
        }
        if self.layers.len() >= CHAIN_MAX {
            return Err(ImageError::ChainTooLong { path: self.layers[0].path().to_owned() });
        }
        let layer = oldest.open_parent(&parent)?;
        self.add_layer(&parent, layer)?;
        Ok(true)
    }

    /// Adds the parent of the oldest image so far.
    fn add_layer(&mut self, link: &ParentLink, mut layer: ChainLayer) -> Result<(), ImageError> {
        let Some(oldest) = self.layers.last() else { return Ok(()) };
        oldest.check_seal_of(link, &layer)?;
        if self.layers.iter().any(|it| it.footer.identity == layer.footer.identity) {
            return Err(ImageError::WrongParent {
                path: oldest.path().to_owned(),
                parent: layer.path().to_owned(),
                problem: "it builds on itself".to_owned(),
            });
        }
        layer.first = self.index.locality_blocks();
        layer.start = oldest.start + oldest.footer.file_bytes(&oldest.geometry);
        let blocks = u64::from(layer.first) + u64::from(layer.footer.locality_blocks);
        if blocks > u64::from(u32::MAX) {
            return Err(ImageError::ChainTooLong { path: self.layers[0].path().to_owned() });
        }
        self.budget.add_file(layer.source.file_bytes());
        let older = layer.read_index(&mut self.budget, false)?;
        layer.own_counts = LayerCounts::from_index(&older);
        self.index.placements.add_room(layer.table_bytes_max(false));
        self.index.add_older(&older);
        // The path of the next parent is in it.
        if let Some(newer) = self.layers.iter_mut().skip(1).last() {
            newer.source.forget_tail();
        }
        self.layers.push(layer);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_named_as_near_as_can_be() {
        let of = |child: &str, parent: &str| {
            ParentLink::from_paths(Path::new(child), Path::new(parent), ImageIdentity([3; 16]))
                .unwrap()
                .path
        };
        assert_eq!(of("/a/d.firn", "/a/base.firn"), Path::new("base.firn"));
        assert_eq!(of("/a/d.firn", "/a/old/base.firn"), Path::new("old/base.firn"));
        assert_eq!(of("/a/d.firn", "/b/base.firn"), Path::new("/b/base.firn"));
        assert_eq!(of("d.firn", "base.firn"), Path::new("base.firn"));
    }

    #[test]
    fn decoding_returns_the_encoded_value() {
        let (identity, path) = (ImageIdentity([3; 16]), PathBuf::from("base.firn"));
        let parent = ParentLink { identity, key: None, path };
        assert_eq!(ParentLink::parse(&parent.encode(), false), Ok(parent.clone()));
        assert_eq!(parent.resolve_from(Path::new("/a/d.firn")), Path::new("/a/base.firn"));
        assert!(ParentLink::parse(&parent.encode()[..16], false).is_err());
        assert!(ParentLink::parse(&parent.encode()[..9], false).is_err());
        let sealed = ParentLink { key: Some([5; 32]), ..parent };
        assert_eq!(ParentLink::parse(&sealed.encode(), true), Ok(sealed.clone()));
        assert!(ParentLink::parse(&sealed.encode()[..48], true).is_err());
    }
}
