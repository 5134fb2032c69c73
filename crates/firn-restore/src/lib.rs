//! Bringing a saved VM's memory back while its guest runs.
//!
//! ```text
//!     guest touches a page that is missing
//!        |
//!        v
//!   fault handler --- in memory, or in the page cache: decode, install, wake
//!        |                                               \
//!        | on storage                                     \ the rest of the locality block
//!        v                                                 v
//!     readers --- read, install what the guest waits for   workers --- decode, install
//!        ^
//!        | when faults are quiet: what nobody has asked for yet
//! ```
//!
//! | module | what it decides or does |
//! |---|---|
//! | [`server`] | what to read and to install, in which order (no I/O) |
//! | `handler`, `inbox` | page faults |
//! | `pool` | threads that read, and threads that install |
//! | `hands`, `shared` | the steps they have in common |
//! | `gate` | pages that the guest gives back while they are being installed |
//! | [`Prefill`] | what comes back while the hypervisor is still starting |
//! | `storage`, `bytes` | the image, read unit by read unit |
//! | [`fill_all`] | an eager restore where there is no userfaultfd |
//! | [`Presence`] | what a successor must know if Firn is killed |
//! | `failures` | why memory is late: errors of what is tried again |
//! | [`RunRecord`] | what happened |
//! | [`Learned`] | what earlier restores of the image had to ask for |
//! | [`Restore`] | all of it together |
//!
//! What holds at any moment: a page that is in the RAM file is whole and right; a page that is not is missing, and a
//! guest that touches it waits. Damage in the image, or storage that fails, is never a wrong page: it leaves the guest waiting.
//! What failed is tried again until it succeeds, and [`Restore::outage`] reports it meanwhile; where that is not wanted
//! ([`OnError::Kill`]), and before the guest may run, [`OnFatal`] is called after a few attempts.

#![forbid(unsafe_code)]

mod bytes;
mod crew;
mod eager;
mod error;
mod failures;
mod gate;
mod handler;
mod hands;
mod inbox;
mod learned;
mod options;
mod pool;
mod prefill;
mod presence;
mod record;
mod restore;
pub mod server;
mod shared;
mod storage;
mod storage_reads;

pub use eager::fill_all;
pub use error::RestoreError;
pub use failures::Outage;
pub use learned::{LEARNED_MAX, Learned};
pub use options::{Fill, Mode, ModeError, OnError, OnErrorError, RestoreOptions};
pub use prefill::{Prefill, Prefilled};
pub use presence::Presence;
pub use record::{
    Answered, FAULTS_MAX, FaultRecord, READS_MAX, RUN_RECORD_VERSION, ReadFor, ReadRecord,
    RunCounts, RunRecord, VcpuThread,
};
pub use restore::{Progress, Restore, Stopped};
pub use shared::OnFatal;
