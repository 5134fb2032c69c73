//! Why there is no checkpoint.

use std::path::PathBuf;

use firn_image::ImageError;
use firn_memory::{DropError, MemoryError, PageFaultError, ProcessError, ScanError, TraceError};
use firn_types::Block;
use firn_vmm::{CopyError, CutError, DeviceStateError, DriveError, QmpError};
use thiserror::Error;

/// Why there is no checkpoint. The VM continues to run (or, for a suspend, runs again).
#[derive(Debug, Error)]
pub enum SaveError {
    /// ptrace could not stop the hypervisor's threads, or not release them.
    #[error("the hypervisor could not be attached to")]
    StopThreads(#[from] TraceError),
    /// The hypervisor is gone, or can't be accessed.
    #[error("the hypervisor process cannot be accessed")]
    Process(#[from] ProcessError),
    /// Guest RAM could not be read.
    #[error("guest memory could not be read")]
    Memory(#[from] MemoryError),
    /// A page fault could not be answered, or a page protected.
    #[error("accesses to the guest's memory could not be traced")]
    Fault(#[from] PageFaultError),
    /// Dirty tracking failed.
    #[error("the guest's writes could not be tracked")]
    DirtyTracking(#[from] ScanError),
    /// Page-table entries could not be dropped, so reads cause no faults that would show them.
    #[error("reads of the guest's memory could not be traced")]
    DropEntries(#[from] DropError),
    /// The hypervisor refused a command.
    #[error("the hypervisor refused a command")]
    Qmp(#[from] QmpError),
    /// In a pause without disk snapshots: the hypervisor could not save the device state.
    #[error("the VM's devices could not be saved")]
    DeviceState(#[from] DeviceStateError),
    /// In a pause with disk snapshots: the hypervisor could not save the device state, or not
    /// switch its disks to overlays, at one instant.
    #[error("the VM's state could not be cut at one instant")]
    DevicesAndDisks(#[from] CutError),
    /// A disk could not be cloned, or its storage made no snapshot of it.
    #[error("snapshots of the VM's disks could not be made")]
    SnapshotDisks(#[from] DriveError),
    /// A disk could not be copied.
    #[error("the VM's disks could not be copied")]
    CopyDisks(#[source] CopyError),
    /// The image could not be written.
    #[error("the image could not be written")]
    Image(#[from] ImageError),
    /// The reference copy of a test could not be written.
    #[error("the reference copy {path} could not be written")]
    Reference {
        /// The path of the copy.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A step of the caller failed (its journal, for example).
    #[error("a step of the supervisor before or after the pause failed")]
    Step(#[source] std::io::Error),
    /// The kernel can't protect private memory that was never written.
    #[error(
        "the guest's memory is private to the hypervisor, and this kernel can't protect all of it (before Linux 6.4): save it \
         while it is paused (firn checkpoint --strategy stop), or start it with shared memory (firn run does)"
    )]
    PrivateUnpopulated,
    /// Another process writes to the guest's memory, and its writes can't be tracked.
    #[error(
        "the guest's memory is also mapped by {0}, whose writes to it can't be tracked: save it while it is paused \
         (firn checkpoint --strategy stop), or start it without vhost-user devices"
    )]
    Foreign(String),
    /// Memory that the guest gave back was not saved before. Another save may succeed.
    #[error(
        "the guest gave memory back (balloon, free-page reporting) before it was saved: the contents that {block} had \
         at the instant of the checkpoint are lost"
    )]
    Discarded {
        /// The first block that was lost.
        block: Block,
    },
    /// What the guest gives back can't be recognized.
    #[error(
        "the VM has a balloon, and this host may keep shared memory in large pages: what the guest gives back during the \
         save could not be recognized. Save it while it is paused (firn checkpoint --strategy stop), or turn them off \
         (/sys/kernel/mm/transparent_hugepage/shmem_enabled, the option huge of the mount)"
    )]
    LargePages,
    /// What the guest gives back can't be recognized, because RAM is of two kinds.
    #[error(
        "the VM has a balloon, and a part of its RAM is shared memory and a part is not: what the guest gives back during the \
         save could not be recognized. Save it while it is paused (firn checkpoint --strategy stop), or start it with share=on for \
         each memory backend, or for none"
    )]
    PartlyShared,
    /// What the guest gives back can't be recognized, because its RAM is in huge pages.
    #[error(
        "the VM has a balloon, and its memory is in huge pages (hugetlbfs){condition}: what the guest gives back during the \
         save could not be recognized. Save it while it is paused (firn checkpoint --strategy stop){alternative}"
    )]
    HugePagesGivenBack {
        /// The condition beside that, in words.
        condition: &'static str,
        /// What else is possible.
        alternative: &'static str,
    },
    /// A device wrote to guest memory during the pause: memory and device state are not of one
    /// instant.
    #[error("a device wrote to the guest's memory while the VM was paused; save it again")]
    DeviceWroteInPause,
    /// The caller cancelled the save.
    #[error("the save was cancelled")]
    Cancelled,
    /// The options contradict each other.
    #[error("{0}")]
    Options(&'static str),
}

impl SaveError {
    /// The refusal of `pre-copy` for a VM with a balloon and huge pages.
    pub fn huge_pages_in_pre_copy() -> Self {
        Self::HugePagesGivenBack {
            condition: ", and pre-copy reads it in rounds",
            alternative: ", or with --strategy trace or cow",
        }
    }
}
