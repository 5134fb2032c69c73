//! Restore of guest memory: brings a saved VM's memory back while its guest runs.
//!
//! ```text
//!     guest touches a page that is missing
//!        |
//!        v
//!   fault handler --- in memory, or in the page cache: decode, install, wake
//!        |                                               \
//!        | on storage                                     \ the other blocks of the locality block
//!        v                                                 v
//!     readers --- read, install what the guest waits for   workers --- decode, install
//!        ^
//!        | while the guest seldom waits: what no vCPU has requested yet
//! ```
//!
//! | module | its task |
//! |---|---|
//! | [`server`] | decides what to read and to install, in which order (no I/O) |
//! | `handler`, `inbox` | page faults |
//! | `helper_threads` | threads that read, and threads that install |
//! | `installer`, `shared` | the steps they have in common |
//! | `install_lock` | pages that the guest gives back while they are being installed |
//! | [`PrefillThreads`] | memory that is filled while the hypervisor is still starting |
//! | `storage`, `image_bytes` | the image, read unit by read unit |
//! | `template_poll`, [`TemplateFill`] | memory that clones of an image share |
//! | [`fill_all`] | an eager restore where there is no userfaultfd |
//! | [`PresenceFile`] | the state that a successor needs if Firn is killed |
//! | `failures` | errors of reads and installs that are tried again |
//! | [`RunRecord`] | the record of a restore |
//! | [`LearnedBlocks`] | memory blocks that earlier restores of the image had to read on demand |
//! | [`RunningRestore`] | all of it together |
//!
//! At any moment a page that is in the RAM file is complete and correct. A page that is not is
//! missing, and a guest that touches it waits. Damage in the image, or storage that fails, never
//! causes a wrong page: the guest waits. What failed is tried again until it succeeds, and
//! [`RunningRestore::outage`] reports it until then. Where that is not wanted
//! ([`ReadFailurePolicy::Kill`]), and before the guest may run, [`OnFatal`] is called after a few
//! attempts.

#![forbid(unsafe_code)]

mod eager;
mod error;
mod failures;
mod handler;
mod helper_threads;
mod image_bytes;
mod inbox;
mod install_lock;
mod installer;
mod learned;
mod options;
mod prefill;
mod presence;
mod record;
mod restore;
pub mod server;
mod shared;
mod storage;
mod storage_reads;
mod template_fill;
mod template_poll;
mod thread_group;

pub use eager::fill_all;
pub use error::RestoreError;
pub use failures::MemoryOutage;
pub use learned::{LEARNED_MAX, LEARNING_WINDOW, LearnedBlocks};
pub use options::{
    BackgroundFill, BackgroundFillError, FillChoices, ModeError, ReadFailurePolicy,
    ReadFailurePolicyError, RestoreMode, RestoreOptions,
};
pub use prefill::{PrefillThreads, PrefilledMemory};
pub use presence::PresenceFile;
pub use record::{
    AnswerKind, FAULTS_MAX, FaultRecord, READS_MAX, RUN_RECORD_VERSION, ReadRecord, RecordedReason,
    RunCounts, RunRecord, VcpuThread,
};
pub use restore::{MemoryProgress, RunningRestore, StoppedRestore};
pub use shared::OnFatal;
pub use template_fill::TemplateFill;
