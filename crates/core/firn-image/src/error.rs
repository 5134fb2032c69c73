//! Errors of image files.

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
    /// The system refused an operation on the file.
    #[error("cannot {step} {path}")]
    Io {
        /// The operation.
        step: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Bytes could not be written.
    #[error("cannot write {len} bytes at byte {offset} of {path}")]
    Write {
        /// The unfinished file.
        path: PathBuf,
        /// The offset in the file.
        offset: u64,
        /// The number of bytes.
        len: usize,
        /// The error of the system.
        source: io::Error,
    },
    /// Bytes could not be read.
    #[error("cannot read {len} bytes at byte {offset} of {path}")]
    Read {
        /// The image.
        path: PathBuf,
        /// The offset in the file.
        offset: u64,
        /// The number of bytes.
        len: usize,
        /// The error of the system.
        source: io::Error,
    },
    /// Another process or thread is writing an image of that name at this moment.
    #[error("another checkpoint is being written to {path}")]
    Busy {
        /// The image.
        path: PathBuf,
    },
    /// The file is not an image: not even a regular file.
    #[error("{path} is no image")]
    NotRegular {
        /// The path that was given.
        path: PathBuf,
        /// The kind of file.
        source: NotRegular,
    },
    /// No image can be written there.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The path names no file in a directory.
    #[error("{path} is not a file name")]
    Path {
        /// The path that was given.
        path: PathBuf,
    },
    /// The requested sizes are impossible.
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
    #[error("the {part} can't be stored: {problem}")]
    Section {
        /// The section.
        part: &'static str,
        /// The reason.
        problem: String,
    },
    /// A memory block past the end of RAM was given.
    #[error("{block} is past the last of {blocks} memory blocks")]
    BlockRange {
        /// The memory block.
        block: Block,
        /// The number of memory blocks in the image.
        blocks: u32,
    },
    /// A memory block was given twice.
    #[error("{0} was given twice")]
    BlockTwice(Block),
    /// A locality block's entries do not fit its bytes, or the geometry.
    #[error("{id}: {problem}")]
    LocalityBlock {
        /// The number that it would have had.
        id: LocalityBlockId,
        /// The reason.
        problem: String,
    },
    /// The image has fewer locality blocks.
    #[error("there is no {id} in {path}, which has {count}")]
    NoLocalityBlock {
        /// The image.
        path: PathBuf,
        /// The requested locality block.
        id: LocalityBlockId,
        /// The number of locality blocks.
        count: u32,
    },
    /// The file is not an image, is incomplete, or was damaged.
    #[error("{path}: {flaw}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The flaw and its offset.
        flaw: ImageFlaw,
    },
    /// The parent of the image is missing, or damaged.
    #[error(
        "{path} has only what changed since {parent}, which can't be used (if the parent was moved, give its new path to \
         `firn image rebase`)"
    )]
    Parent {
        /// The image.
        path: PathBuf,
        /// The expected path of its parent.
        parent: PathBuf,
        /// The error of the parent.
        source: Box<ImageError>,
    },
    /// The file at the path of the parent is another image.
    #[error("{parent} is not the parent of {path}: {problem}")]
    WrongParent {
        /// The image.
        path: PathBuf,
        /// The file that should be the parent.
        parent: PathBuf,
        /// The difference that shows it.
        problem: String,
    },
    /// The chain of this image has more images than can be opened together.
    #[error("{path} builds on a chain of more than {max} images: merge some of them", max = crate::CHAIN_MAX)]
    ChainTooLong {
        /// The image.
        path: PathBuf,
    },
    /// A parent has a different RAM layout or block size than the image that is to build on it.
    #[error("the image can't build on {parent}: its RAM layout or its block sizes differ")]
    OtherRam {
        /// The intended parent.
        parent: PathBuf,
    },
    /// The image is sealed, and can't be opened without its key.
    #[error("{path} can't be opened: {problem}")]
    Locked {
        /// The image.
        path: PathBuf,
        /// The reason.
        problem: String,
    },
    /// Of an image and its parent one is sealed and the other is not.
    #[error("the image can't build on {parent}: {problem}")]
    MixedSeals {
        /// The intended parent.
        parent: PathBuf,
        /// Which of them is not sealed.
        problem: &'static str,
    },
    /// Memory blocks were added too often.
    #[error("memory blocks were copied too often before the cut")]
    TooOften,
    /// A memory block could not be copied from another image.
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
        organization: crate::BlockOrganization,
    },
}

/// A flaw in the bytes of an image, and its offset.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{part} at byte {offset}: {problem}")]
pub struct ImageFlaw {
    /// The part of the file.
    pub part: &'static str,
    /// The offset of the part, or of the flaw in it, counted from the start of the file.
    pub offset: u64,
    /// The description of the flaw.
    pub problem: String,
}

impl ImageFlaw {
    pub(crate) fn new(part: &'static str, offset: u64, problem: impl Into<String>) -> Self {
        Self { part, offset, problem: problem.into() }
    }

    /// The same flaw, with its offset counted from the start of the file, in which the part starts
    /// at `base`.
    pub(crate) fn shift_by(self, base: u64) -> Self {
        Self { offset: self.offset + base, ..self }
    }

    pub(crate) fn into_error(self, path: &Path) -> ImageError {
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
    /// The offset of its stored bytes in the file.
    pub offset: u64,
    /// The number of stored bytes.
    pub stored_len: u32,
    /// The error of decoding.
    pub source: DecodeError,
}
