//! The tracker of each kind.

use super::interface::Tracker;
use super::kind::TrackerKind;
use super::parts::PartSettings;
use super::{assisted, compare, emulate, pages, scan};
use crate::error::Error;

/// Opens a tracker.
pub(crate) fn open_tracker(kind: TrackerKind) -> Result<Box<dyn Tracker>, Error> {
    Ok(match kind {
        TrackerKind::Pages => Box::new(pages::PageTracker::default()),
        TrackerKind::Emulate => Box::new(emulate::EmulationTracker::default()),
        TrackerKind::Assisted => {
            Box::new(assisted::AssistedTracker::open(PartSettings::default())?)
        }
        TrackerKind::Scan => scan::open_scan()?,
        TrackerKind::Compare => Box::new(compare::CompareTracker::default()),
        TrackerKind::Host | TrackerKind::Stores | TrackerKind::External => {
            let why = "it is opened by Session::open_with".to_owned();
            return Err(Error::Unavailable { kind, why });
        }
    })
}

/// Opens the tracker [`TrackerKind::Assisted`] for tests: areas of any size have quiet parts, which
/// are small, and become quiet soon.
///
/// # Errors
/// If the tracker does not work on this kernel.
pub fn open_with_small_parts() -> Result<Box<dyn Tracker>, Error> {
    let settings = PartSettings { pages: 4, scanned_max: 0, idle: 2 };
    Ok(Box::new(assisted::AssistedTracker::open(settings)?))
}
