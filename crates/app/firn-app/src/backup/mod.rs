//! Backups of committed changes: files and other hosts, each written by a helper thread of its own.
//!
//! ```text
//!   commit --- record ---> bounded queue ---> helper: compress, write to the log, fsync ----> acknowledge
//!     |                                  \--> helper: compress, send by TLS, wait for it ---> acknowledge
//!     +--- waits for all acknowledgements (sync), or until at most LAG are missing (async)
//! ```

pub(crate) mod error;
mod file;
mod helper;
mod image;
mod log;
mod record;
mod remote;
mod server;
pub(crate) mod settings;
mod standby;
mod targets;
mod tls;
mod wire;

pub use error::BackupError;
pub use server::{BackupServer, BackupServerOptions};
pub use settings::{AcknowledgePolicy, BackupTarget, Compression, FsyncPolicy};
pub use standby::WarmStandby;
pub use tls::TlsIdentity;

pub(crate) use helper::{BackupHelper, BackupJob};
pub(crate) use image::ApplicationState;
pub(crate) use log::ApplicationLog;
pub(crate) use record::PayloadBuilder;
pub(crate) use standby::start_log_helper as log_helper;
pub(crate) use targets::open_targets;
