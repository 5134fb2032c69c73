//! Application checkpointing: an application declares its critical memory and marks its
//! transactions. After a crash it recovers the state of its last committed transaction.
//!
//! ```
//! use firn_app::{Session, SessionOptions};
//!
//! # fn main() -> Result<(), firn_app::Error> {
//! let mut session = Session::open(SessionOptions::new("ledger"))?;
//! let accounts = session.allocate("accounts", 1 << 20)?;
//!
//! let mut transfer = session.begin()?;
//! transfer.words(&accounts)[7] += 100;
//! transfer.words(&accounts)[9] += 50;
//! transfer.commit()?;
//! assert_eq!(session.changes().bytes(), 1 << 20); // the first commit of an area reports all of it
//!
//! let mut transfer = session.begin()?;
//! transfer.words(&accounts)[7] -= 30;
//! transfer.commit()?;
//! assert_eq!(session.changes().bytes(), 8);
//!
//! let mut mistake = session.begin()?;
//! mistake.words(&accounts)[9] = 0;
//! mistake.abort()?;
//! assert_eq!(session.bytes(&accounts)[72], 50);
//! # Ok(())
//! # }
//! ```
//!
//! A *critical data area* is any run of bytes: allocated here, or memory that the application has
//! already (a vector, a static). Page tables know pages, so a session follows the pages that an
//! area touches, and clips what it finds to the area. *Trackers* ([`TrackerKind`]) are methods to
//! find what was written. A session chooses one by measurement unless the options name one.
//!
//! # Unsafe code
//!
//! Unsafe code is in the module `sys` (mappings, page protection, the signal handler), and where
//! the session receives memory from outside. Memory enters as an `AreaRegion`, by a promise of the
//! application ([`Session::register`]) or from a mapping of the library's own. Pages enter as a
//! [`PageSpan`], which only a session makes.

mod backup;
mod changes;
mod claims;
mod committed_bytes;
mod difference;
mod error;
mod host;
mod instruction;
mod memory;
mod options;
mod session;
mod span;
mod sys;
mod tracker;

pub use backup::{
    AcknowledgePolicy, BackupError, BackupEvent, BackupMonitor, BackupServer, BackupServerOptions,
    BackupStatus, BackupTarget, Compression, FsyncPolicy, RequiredTargets, TargetCondition,
    TlsIdentity, UnknownRequirement, WarmStandby, copy_session,
};
pub use changes::{AreaChange, AreaId, ChangeSet};
pub use error::Error;
pub use host::{HostError, HostTracker};
pub use memory::AreaMemory;
pub use options::{MemorySource, Precision, SessionOptions};
pub use session::{Area, Session, Transaction};
pub use span::{PAGE, PageSpan};
#[doc(hidden)]
pub use tracker::open_with_small_parts;
pub use tracker::{Tracker, TrackerCounts, TrackerKind, UnknownTracker, WrittenRuns};
