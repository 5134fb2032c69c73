//! The tracker of each kind.

use super::interface::Tracker;
use super::kind::TrackerKind;
use super::{assisted, compare, emulate, pages, scan};
use crate::error::Error;

/// Opens a tracker.
pub(crate) fn open_tracker(kind: TrackerKind) -> Result<Box<dyn Tracker>, Error> {
    Ok(match kind {
        TrackerKind::Pages => Box::new(pages::PageTracker::default()),
        TrackerKind::Emulate => Box::new(emulate::EmulationTracker::default()),
        TrackerKind::Assisted => Box::new(assisted::AssistedTracker::open()?),
        TrackerKind::Scan => scan::open_scan()?,
        TrackerKind::Compare => Box::new(compare::CompareTracker::default()),
        TrackerKind::Host | TrackerKind::Stores | TrackerKind::External => {
            let why = "it is opened by Session::open_with".to_owned();
            return Err(Error::Unavailable { kind, why });
        }
    })
}
