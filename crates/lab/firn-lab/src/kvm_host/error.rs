//! Errors of the first-level guest.

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
    /// Its disk does not exist.
    #[error("the first-level guest has no disk at {}", .0.display())]
    NoDisk(PathBuf),
    /// A file for it could not be created.
    #[error("cannot {what}")]
    File {
        /// The failed operation.
        what: String,
        /// The cause.
        source: io::Error,
    },
    /// A helper program failed.
    #[error("{program} failed: {said}")]
    Program {
        /// The program.
        program: String,
        /// Its output.
        said: String,
    },
    /// QEMU's monitor failed.
    #[error("cannot save the first-level guest")]
    Save(#[from] QmpError),
    /// QEMU could not save the guest's state.
    #[error("QEMU cannot save the first-level guest: {0}")]
    Migration(String),
    /// The guest ended, or did not answer in time.
    #[error("the first-level guest {how}; QEMU's log: {said}; its console ends with: {console}")]
    Lost {
        /// What happened to it.
        how: String,
        /// The end of QEMU's log.
        said: String,
        /// The last lines of the guest's console.
        console: String,
    },
}

impl KvmHostError {
    /// Adds the failed operation to an I/O error.
    pub(super) fn file_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::File { what, source }
    }
}
