//! How a session is to be.

use crate::backup::Target;
use crate::tracker::Kind;

/// How changes are told and carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Whole pages, cut to the area.
    Pages,
    /// Words of 8 bytes that differ from the last committed copy.
    #[default]
    Words,
}

/// Which memory will become areas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// Also memory that the application has already.
    #[default]
    Any,
    /// Only memory that the library allocates.
    Allocated,
}

/// How to open a session.
///
/// ```
/// use firn_app::{Kind, Options, Precision};
///
/// let options = Options::new("ledger").tracker(Kind::Pages).precision(Precision::Pages);
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) name: String,
    pub(crate) tracker: Option<Kind>,
    pub(crate) precision: Precision,
    pub(crate) source: Source,
    pub(crate) undo: bool,
    pub(crate) backups: Vec<Target>,
    pub(crate) discard: bool,
}

impl Options {
    /// A session with a name. Without more, it chooses its tracker by measurement, can abort, and tells words.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            tracker: None,
            precision: Precision::default(),
            source: Source::default(),
            undo: true,
            backups: Vec::new(),
            discard: false,
        }
    }

    /// This tracker, not the one that measures best.
    pub fn tracker(mut self, kind: Kind) -> Self {
        self.tracker = Some(kind);
        self
    }

    /// How changes are told and carried.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Which memory will become areas: it decides which trackers can be chosen by measurement.
    pub fn source(mut self, source: Source) -> Self {
        self.source = source;
        self
    }

    /// Whether to keep a copy of the last committed state, without which nothing can be aborted, and words are told only
    /// by trackers that note words. On by default.
    pub fn undo(mut self, keep: bool) -> Self {
        self.undo = keep;
        self
    }

    /// Adds a place for committed changes.
    pub fn backup(mut self, target: Target) -> Self {
        self.backups.push(target);
        self
    }

    /// Begins anew: a state that a backup has is not recovered but thrown away.
    pub fn discard(mut self, discard: bool) -> Self {
        self.discard = discard;
        self
    }
}
