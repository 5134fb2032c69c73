//! Backups of committed changes: files and other hosts, each written by a helper thread of its own.
//!
//! ```text
//!   commit ---> committed state ---> helper: compress, append to the log, fsync ------> stored
//!     |         and backlog     \--> helper: compress, send by TLS, wait for it ------> stored
//!     +--- waits until enough targets have it (RequiredTargets), for a time limit
//! ```
//!
//! docs/design/021-backups-that-return.md explains the rules.

mod access;
mod board;
mod committed;
mod copy;
pub(crate) mod error;
mod file;
mod helper;
mod image;
mod log;
mod record;
mod remote;
mod server;
pub(crate) mod settings;
mod shared_bytes;
mod standby;
mod status;
mod targets;
mod tls;
mod transaction;
mod wire;

pub use copy::copy_session;
pub use error::BackupError;
pub use server::{BackupServer, BackupServerOptions};
pub use settings::{
    AcknowledgePolicy, BackupTarget, Compression, FsyncPolicy, RequiredTargets, UnknownRequirement,
};
pub use standby::WarmStandby;
pub use status::{BackupEvent, BackupMonitor, BackupStatus, TargetCondition};
pub use tls::TlsIdentity;

pub(crate) use committed::CommittedState;
pub(crate) use helper::BackupSet;
pub(crate) use image::ApplicationState;
pub(crate) use log::ApplicationLog;
pub(crate) use shared_bytes::SharedBytes;
pub(crate) use targets::{continue_log, open_targets};
pub(crate) use transaction::{AreaDefinition, NewChanges};
