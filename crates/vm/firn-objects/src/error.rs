//! What can go wrong with images in object storage.
//!
//! An error names what failed, at which location, and the store's own reason. It never has what the
//! store answered as a whole: stores repeat keys and tokens in their answers (see `reply`).

use std::path::PathBuf;

use firn_image::{ImageError, ImageFlaw, VerifyProblem};
use thiserror::Error;

use firn_cache::StoreLocation;

/// Why an image could not be pushed, pulled, listed or removed.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The store can't be used as it is configured.
    #[error("the store of {location} can't be opened: {problem}")]
    Configuration {
        /// The location.
        location: StoreLocation,
        /// What is missing or wrong.
        problem: String,
    },
    /// The location names a bucket or a prefix, where an object is needed.
    #[error("{0} names no object")]
    NoObjectName(StoreLocation),
    /// The store of this location is only read.
    #[error("{0} can only be read: images are pushed to s3:// locations")]
    ReadOnly(StoreLocation),
    /// There is no such object, or no such bucket.
    #[error("there is no {what} {location}")]
    Missing {
        /// An object, or a bucket.
        what: &'static str,
        /// The location.
        location: StoreLocation,
    },
    /// Another object has that name.
    #[error("{0} exists already, and is another image")]
    Taken(StoreLocation),
    /// The store denied access.
    #[error("{location}: the store denied access: {reason}")]
    Denied {
        /// The location.
        location: StoreLocation,
        /// The store's own reason.
        reason: String,
    },
    /// The store did not answer, or could not do what it was asked for.
    #[error("{location}: cannot {step}: {reason}")]
    Failed {
        /// The location.
        location: StoreLocation,
        /// The request.
        step: &'static str,
        /// The store's own reason, or that of the connection.
        reason: String,
        /// Whether the request was repeated until the time for that was over.
        was_repeated: bool,
    },
    /// The object is shorter than the range that was requested.
    #[error("{0} is shorter than it was")]
    NoSuchRange(StoreLocation),
    /// The object changed while it was read.
    #[error("{0} was replaced while it was read")]
    Replaced(StoreLocation),
    /// The object is not an image, or a damaged one.
    #[error("{location}: {flaw}")]
    Damaged {
        /// The location.
        location: StoreLocation,
        /// The flaw.
        flaw: ImageFlaw,
    },
    /// The bytes that were received are not those of an image.
    #[error("{location} is damaged: {problem_count} problems")]
    Unsound {
        /// The location.
        location: StoreLocation,
        /// The number of problems.
        problem_count: usize,
        /// The first of them.
        #[source]
        first: Option<Box<VerifyProblem>>,
    },
    /// The bytes that were received can't be opened as an image.
    #[error("{location} is damaged")]
    Unopenable {
        /// The location.
        location: StoreLocation,
        /// What opening reported.
        source: Box<ImageError>,
    },
    /// The image to push is damaged.
    #[error("{path} is damaged: {problem_count} problems", path = .path.display())]
    DamagedFile {
        /// The image.
        path: PathBuf,
        /// The number of problems.
        problem_count: usize,
        /// The first of them.
        #[source]
        first: Option<Box<VerifyProblem>>,
    },
    /// The parent is not in the store.
    #[error("{path} builds on {parent}, which is not in the store", path = .path.display())]
    NoParent {
        /// The image.
        path: PathBuf,
        /// Where its parent would be.
        parent: StoreLocation,
    },
    /// A parent lies in another directory.
    #[error("{image} names its parent as {parent:?}, which is not in the directory of the image")]
    ParentElsewhere {
        /// The image: a path, or a location.
        image: String,
        /// How it names its parent.
        parent: PathBuf,
    },
    /// The object that should be the parent is another image.
    #[error("{parent} is not the image that {image} builds on")]
    WrongParent {
        /// The image: a path, or a location.
        image: String,
        /// What should be its parent: a path, or a location.
        parent: String,
    },
    /// The chain is too long, or builds on itself.
    #[error("{0} builds on a chain of more than {max} images", max = firn_image::CHAIN_MAX)]
    ChainTooLong(StoreLocation),
    /// Another image builds on this one.
    #[error("{location} is in use: {child} builds on it")]
    InUse {
        /// The image.
        location: StoreLocation,
        /// The other image.
        child: StoreLocation,
    },
    /// A local image can't be read or written.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A local file can't be read or written.
    #[error("cannot {step} {path}", path = .path.display())]
    Io {
        /// The operation.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
}

impl StoreError {
    /// Whether no other request to the store would help: it is away, or denied access.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self, Self::Denied { .. } | Self::Failed { was_repeated: true, .. })
    }
}
