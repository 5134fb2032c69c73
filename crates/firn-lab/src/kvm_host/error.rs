//! What can go wrong around the first-level guest.

use std::io;
use std::path::PathBuf;

use firn_vmm::qmp::QmpError;
use thiserror::Error;

use crate::guest::ImageError;

/// The first-level guest could not be used.
#[derive(Debug, Error)]
pub enum KvmHostError {
    /// It could not be built.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Its disk is not there.
    #[error("the first-level guest has no disk at {}", .0.display())]
    NoDisk(PathBuf),
    /// A file for it could not be made.
    #[error("cannot {what}")]
    File {
        /// What was tried.
        what: String,
        /// Why not.
        source: io::Error,
    },
    /// A program needed on the way failed.
    #[error("{program} failed: {said}")]
    Program {
        /// Which.
        program: String,
        /// What it said.
        said: String,
    },
    /// QEMU's monitor did not do it.
    #[error("cannot save the first-level guest")]
    Save(#[from] QmpError),
    /// QEMU could not save the guest's state.
    #[error("QEMU cannot save the first-level guest: {0}")]
    Migration(String),
    /// The guest ended, or was silent for too long.
    #[error("the first-level guest {how}; QEMU says: {said}; its console ends with: {console}")]
    Lost {
        /// How.
        how: String,
        /// What QEMU wrote.
        said: String,
        /// The last lines of the guest's console.
        console: String,
    },
}

impl KvmHostError {
    /// Names what was tried when an I/O error came.
    pub(super) fn file(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::File { what, source }
    }
}
