//! Status of backups, as an application reads it: from the session, or from another thread.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::committed::CommittedState;
use crate::error::Error;

/// The condition of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetCondition {
    /// It has each transaction, or gets it next.
    Connected,
    /// It has returned, and gets what it lacks.
    CatchingUp,
    /// It cannot be reached or written. Firn tries again.
    Lost,
    /// A later session of this name has it. Final.
    Superseded,
}

/// The status of one target.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BackupStatus {
    /// The path of the log, or the address of the host.
    pub target: String,
    /// Its condition.
    pub condition: TargetCondition,
    /// The time at which this condition began.
    pub since: SystemTime,
    /// The last transaction that it has stored; 0 if that is not known yet.
    pub acknowledged: u64,
    /// The count of committed transactions that it has not acknowledged.
    pub commits_behind: u64,
    /// The size of these transactions in bytes.
    pub bytes_behind: u64,
    /// The last error, also after it was overcome.
    pub last_error: Option<String>,
    /// How often it was sent the whole state.
    pub state_transfers: u64,
}

/// A change of the condition of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackupEvent {
    /// The path of the log, or the address of the host.
    pub target: String,
    /// The new condition.
    pub condition: TargetCondition,
    /// The error that led to it, if one did.
    pub error: Option<String>,
    /// The time of the change.
    pub time: SystemTime,
}

/// Reads the status of a session's backups, from any thread, also while a transaction is open or a
/// commit waits.
#[derive(Clone, Debug)]
pub struct BackupMonitor {
    pub(crate) name: String,
    pub(crate) committed: Option<Arc<CommittedState>>,
}

impl BackupMonitor {
    /// The status of each target, in the order of the options.
    ///
    /// # Errors
    /// In a child of the process that opened the session.
    pub fn status(&self) -> Result<Vec<BackupStatus>, Error> {
        let Some(committed) = self.state()? else { return Ok(Vec::new()) };
        Ok(committed.status())
    }

    /// Whether some target is not [`TargetCondition::Connected`].
    ///
    /// # Errors
    /// In a child of the process that opened the session.
    pub fn is_degraded(&self) -> Result<bool, Error> {
        let is_connected = |target: &BackupStatus| target.condition == TargetCondition::Connected;
        Ok(!self.status()?.iter().all(is_connected))
    }

    /// Waits for the next change of a target's condition, for this time at most. Each event is
    /// returned once. The last 256 are kept.
    ///
    /// # Errors
    /// In a child of the process that opened the session.
    pub fn next_event(&self, timeout: Duration) -> Result<Option<BackupEvent>, Error> {
        let Some(committed) = self.state()? else { return Ok(None) };
        Ok(committed.next_event(timeout))
    }

    fn state(&self) -> Result<Option<&CommittedState>, Error> {
        let Some(committed) = &self.committed else { return Ok(None) };
        match committed.owner().is_this_process() {
            true => Ok(Some(committed)),
            false => Err(Error::Forked { name: self.name.clone(), pid: committed.owner().pid() }),
        }
    }
}
