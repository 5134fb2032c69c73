//! Options of a session.

use std::time::Duration;

use crate::backup::settings::{BackupTarget, RequiredTargets};
use crate::tracker::kind::TrackerKind;

/// How long calls wait for backups unless the options set another time.
const BACKUP_TIMEOUT: Duration = Duration::from_secs(10);

/// The unit in which changes are reported and transferred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Whole pages, cut to the area.
    Pages,
    /// Words of 8 bytes that differ from the last committed copy.
    #[default]
    Words,
}

/// Which memory areas may consist of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemorySource {
    /// Also memory that the application has already.
    #[default]
    Any,
    /// Only memory that the library allocates.
    Allocated,
}

/// The options to open a session with.
///
/// ```
/// use firn_app::{Precision, SessionOptions, TrackerKind};
///
/// let options = SessionOptions::new("ledger")
///     .tracker(TrackerKind::Pages)
///     .precision(Precision::Pages);
/// ```
#[derive(Clone, Debug)]
pub struct SessionOptions {
    pub(crate) name: String,
    pub(crate) tracker: Option<TrackerKind>,
    pub(crate) precision: Precision,
    pub(crate) source: MemorySource,
    pub(crate) undo: bool,
    pub(crate) backups: Vec<BackupTarget>,
    pub(crate) discard: bool,
    pub(crate) require: RequiredTargets,
    pub(crate) later_handler: bool,
    pub(crate) backup_timeout: Duration,
}

impl SessionOptions {
    /// Options of a session with this name. By default it chooses its tracker by measurement, can
    /// abort, and reports words.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            tracker: None,
            precision: Precision::default(),
            source: MemorySource::default(),
            undo: true,
            backups: Vec::new(),
            discard: false,
            require: RequiredTargets::default(),
            later_handler: false,
            backup_timeout: BACKUP_TIMEOUT,
        }
    }

    /// Uses this tracker, not the one that is fastest in a measurement.
    pub fn tracker(mut self, kind: TrackerKind) -> Self {
        self.tracker = Some(kind);
        self
    }

    /// Sets the unit in which changes are reported and transferred.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Sets which memory areas may consist of: it decides which trackers can be chosen by
    /// measurement.
    pub fn source(mut self, source: MemorySource) -> Self {
        self.source = source;
        self
    }

    /// Whether to keep a copy of the last committed state. Without it no transaction can be
    /// aborted, and only trackers that record words report words. On by default.
    pub fn undo(mut self, keep: bool) -> Self {
        self.undo = keep;
        self
    }

    /// Adds a target that committed changes are written to.
    pub fn backup(mut self, target: BackupTarget) -> Self {
        self.backups.push(target);
        self
    }

    /// Starts with an empty state: a state that a backup has is discarded instead of recovered.
    pub fn discard(mut self, discard: bool) -> Self {
        self.discard = discard;
        self
    }

    /// Sets how many backups must have stored a transaction before its commit returns. All by
    /// default.
    pub fn require(mut self, targets: RequiredTargets) -> Self {
        self.require = targets;
        self
    }

    /// Sets how long a call waits for backups that are away: opening a session for enough of them
    /// to know the last acknowledged transaction, a commit for the required acknowledgements, a
    /// flush for all of them, and the end of a session for those that lack transactions. 10 s by
    /// default.
    pub fn backup_timeout(mut self, time: Duration) -> Self {
        self.backup_timeout = time;
        self
    }

    /// Permits a handler of SIGSEGV that is installed after the first session. The application
    /// promises that it calls the handler that it replaced; otherwise the trackers PT and Emul miss
    /// writes. Without this, [`crate::Session::begin`] is an error after such a change.
    pub fn later_handler(mut self, permit: bool) -> Self {
        self.later_handler = permit;
        self
    }
}
