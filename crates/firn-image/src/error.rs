//! What can go wrong with an image file.

use std::io;
use std::path::{Path, PathBuf};

use firn_files::{NotRegular, OutputError};
use firn_types::{Block, RegionMapError};
use thiserror::Error;

use crate::decode::DecodeError;
use crate::geometry::GeometryError;
use crate::locality::LocalityBlockId;

/// Why an image could not be written or read.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The system refused a step around the file.
    #[error("cannot {step} {path}")]
    Io {
        /// What was being done.
        step: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Bytes could not be written.
    #[error("cannot write {len} bytes at byte {offset} of {path}")]
    Write {
        /// The unfinished file.
        path: PathBuf,
        /// Where in the file.
        offset: u64,
        /// How many bytes.
        len: usize,
        /// What the system said.
        source: io::Error,
    },
    /// Bytes could not be read.
    #[error("cannot read {len} bytes at byte {offset} of {path}")]
    Read {
        /// The image.
        path: PathBuf,
        /// Where in the file.
        offset: u64,
        /// How many bytes.
        len: usize,
        /// What the system said.
        source: io::Error,
    },
    /// Somebody else is writing an image of that name at this moment.
    #[error("another checkpoint is being written to {path}")]
    Busy {
        /// The image.
        path: PathBuf,
    },
    /// It is no image: not even a regular file.
    #[error("{path} is no image")]
    NotRegular {
        /// What was given.
        path: PathBuf,
        /// What it is.
        source: NotRegular,
    },
    /// No image can be written there.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The path names no file in a directory.
    #[error("{path} is not a file name")]
    Path {
        /// What was given.
        path: PathBuf,
    },
    /// The sizes asked for are impossible.
    #[error("no image can have this geometry")]
    Geometry(#[from] GeometryError),
    /// The region map given at the end does not fit the geometry given at the start.
    #[error("the region map has {regions} pages, the image was begun for {image}")]
    Pages {
        /// Pages by the region map.
        regions: u32,
        /// Pages by the geometry.
        image: u32,
    },
    /// The region map contradicts itself.
    #[error("the region map is not valid")]
    Regions(#[from] RegionMapError),
    /// A section can't be stored.
    #[error("the {place} can't be stored: {problem}")]
    Section {
        /// Which.
        place: &'static str,
        /// Why.
        problem: String,
    },
    /// A memory block past the end of RAM was given.
    #[error("{block} is past the last of {blocks} memory blocks")]
    BlockRange {
        /// The memory block.
        block: Block,
        /// How many the image has.
        blocks: u32,
    },
    /// A memory block was given twice.
    #[error("{0} was given twice")]
    BlockTwice(Block),
    /// A locality block's entries do not fit its bytes, or the geometry.
    #[error("{id}: {problem}")]
    LocalityBlock {
        /// Its number, had it been written.
        id: LocalityBlockId,
        /// What is wrong with it.
        problem: String,
    },
    /// The image has fewer locality blocks.
    #[error("there is no {id} in {path}, which has {count}")]
    NoLocalityBlock {
        /// The image.
        path: PathBuf,
        /// What was asked for.
        id: LocalityBlockId,
        /// How many it has.
        count: u32,
    },
    /// The file is not an image, or not whole, or not as it was written.
    #[error("{path}: {flaw}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        flaw: Flaw,
    },
    /// The image that it builds on is missing, or damaged.
    #[error(
        "{path} has only what changed since {parent}, which can't be used (if it was moved: \
         firn image rebase tells where it is now)"
    )]
    Parent {
        /// The image.
        path: PathBuf,
        /// The one it builds on, where it should be.
        parent: PathBuf,
        /// What is wrong with that one.
        source: Box<ImageError>,
    },
    /// The file where its parent should be is another image.
    #[error("{parent} is not the parent of {path}: {problem}")]
    WrongParent {
        /// The image.
        path: PathBuf,
        /// What was taken for its parent.
        parent: PathBuf,
        /// How it is known.
        problem: String,
    },
    /// There are more images below this one than can be opened together.
    #[error("{path} builds on a chain of more than {max} images: merge some of them", max = crate::CHAIN_MAX)]
    ChainTooLong {
        /// The image.
        path: PathBuf,
    },
    /// A parent has other RAM than the image that is to build on it, or other blocks.
    #[error(
        "the image can't build on {parent}: its RAM lies otherwise, or its blocks have other sizes"
    )]
    OtherRam {
        /// The one it was to build on.
        parent: PathBuf,
    },
    /// Memory blocks were given again and again.
    #[error("memory blocks were copied too often before the cut")]
    TooOften,
    /// A memory block could not be taken over from another image.
    #[error("a memory block cannot be copied")]
    Block(#[from] BlockError),
    /// The first-access order is not known.
    #[error(
        "{path} does not record in which order memory was first accessed (it is organized by \
         {organization})"
    )]
    NoAccessOrder {
        /// The image.
        path: PathBuf,
        /// Its block organization.
        organization: crate::Organization,
    },
}

/// What is wrong with the bytes of an image, and where.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{place} at byte {offset}: {problem}")]
pub struct Flaw {
    /// The part of the file.
    pub place: &'static str,
    /// Where it starts, or where in it the flaw is, counted from the start of the file.
    pub offset: u64,
    /// What is wrong.
    pub problem: String,
}

impl Flaw {
    pub(crate) fn new(place: &'static str, offset: u64, problem: impl Into<String>) -> Self {
        Self { place, offset, problem: problem.into() }
    }

    /// The same flaw, in a part that starts at `base` of the file.
    pub(crate) fn shifted(self, base: u64) -> Self {
        Self { offset: self.offset + base, ..self }
    }

    pub(crate) fn of(self, path: &Path) -> ImageError {
        ImageError::Damaged { path: path.to_owned(), flaw: self }
    }
}

/// A memory block whose stored bytes are damaged.
#[derive(Debug, Error)]
#[error("{block} is damaged ({stored_len} bytes at byte {offset} of {path})")]
pub struct BlockError {
    /// The memory block.
    pub block: Block,
    /// The image.
    pub path: PathBuf,
    /// Where its stored bytes start in the file.
    pub offset: u64,
    /// How many there are.
    pub stored_len: u32,
    /// What is wrong with them.
    pub source: DecodeError,
}
