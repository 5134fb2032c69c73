//! Errors of a restore.

use std::io;
use std::path::PathBuf;

use firn_image::{BlockError, ImageError};
use firn_memory::{MemoryError, PageFaultError, ProcessError};
use firn_types::Block;
use thiserror::Error;

/// Why memory can't be restored.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// The image is of a VM with other RAM.
    #[error("the image has RAM regions {image}, the VM has {vm}")]
    Regions {
        /// The regions of the image, by name and size in KiB.
        image: String,
        /// Those of the VM.
        vm: String,
    },
    /// The image can't be read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A memory block in the image is damaged. Its pages stay missing: the guest waits, and never
    /// sees wrong memory.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The image's index and its plan contradict each other.
    #[error("{path} has no bytes for {block}")]
    NoEntry {
        /// The image.
        path: PathBuf,
        /// The memory block.
        block: Block,
    },
    /// Faults can't be read or answered.
    #[error(transparent)]
    PageFaults(#[from] PageFaultError),
    /// Faults can't be waited for.
    #[error("cannot wait for page faults")]
    Poll {
        /// The error of the system.
        source: io::Error,
    },
    /// The RAM file can't be handled.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The pages that the hypervisor has written can't be determined.
    #[error(transparent)]
    Scan(#[from] firn_memory::ScanError),
    /// The presence file can't be handled.
    #[error("cannot {step} the presence file {path}")]
    Presence {
        /// The step that failed.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The presence file belongs to another restore, or is not a presence file.
    #[error("{path} is no presence file of a VM with {pages} pages")]
    ForeignPresence {
        /// The file.
        path: PathBuf,
        /// Pages of the VM.
        pages: u32,
    },
    /// A thread can't be started.
    #[error("cannot start the thread {name}")]
    Spawn {
        /// The thread.
        name: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// A thread of the page server has died: a bug.
    #[error("the thread {name} has died (this is a bug in Firn)")]
    Died {
        /// The thread.
        name: &'static str,
    },
    /// The restore was stopped before all memory was there.
    #[error("the restore was stopped")]
    Stopped,
}

impl RestoreError {
    /// Whether the cause may disappear: storage may return, a file be repaired, memory be freed.
    /// Every other error ends the restore.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Image(_) | Self::Block(_) | Self::NoEntry { .. } | Self::Presence { .. } => true,
            Self::PageFaults(_) => !self.is_hypervisor_gone(),
            _ => false,
        }
    }

    /// Whether the host has no memory for the guest's pages.
    pub fn is_no_memory(&self) -> bool {
        matches!(self, Self::PageFaults(PageFaultError::NoMemory { .. }))
    }

    /// Whether the error only means that the hypervisor has ended: no memory is left to restore.
    pub fn is_hypervisor_gone(&self) -> bool {
        let process = match self {
            Self::PageFaults(PageFaultError::Process(process))
            | Self::Memory(MemoryError::Process(process)) => process,
            _ => return false,
        };
        matches!(process, ProcessError::Gone { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_hypervisor_is_distinguished_from_other_errors() {
        let gone = PageFaultError::from(ProcessError::Gone { pid: 1 });
        assert!(RestoreError::PageFaults(gone).is_hypervisor_gone());
        let own = PageFaultError::from(ProcessError::Own { pid: 1 });
        assert!(!RestoreError::PageFaults(own).is_hypervisor_gone());
        assert!(!RestoreError::Stopped.is_hypervisor_gone());
    }
}
