//! Choice of a tracker: times several trackers on small transactions, and opens the fastest.

use std::time::{Duration, Instant};

use super::assisted::AssistedTracker;
use super::fallback::FallbackTracker;
use super::interface::{Tracker, WrittenRuns};
use super::kind::TrackerKind;
use super::open::open_tracker;
use super::parts::PartSettings;
use crate::error::Error;
use crate::options::MemorySource;
use crate::span::PAGE;
use crate::sys::region::AreaRegion;

/// The count of pages of the area used for trials.
const TRIAL_PAGES: usize = 64;
/// The count of transactions in each trial; the median time counts.
const TRIAL_TRANSACTIONS: usize = 41;
/// The counts of pages and of words per page written in each transaction.
const WRITTEN_COUNTS: (usize, usize) = (2, 4);

/// Opens the fastest tracker for small transactions on memory from this source.
pub(crate) fn choose_tracker(source: MemorySource) -> Result<Box<dyn Tracker>, Error> {
    let candidates = match source {
        MemorySource::Any => &[TrackerKind::Assisted, TrackerKind::Pages][..],
        MemorySource::Allocated => {
            &[TrackerKind::Assisted, TrackerKind::Scan, TrackerKind::Emulate, TrackerKind::Pages]
        }
    };
    let timed = candidates.iter().filter_map(|&kind| Some((time_tracker(kind).ok()?, kind)));
    // PT works on every kernel.
    let kind = timed.min_by_key(|(time, _)| *time).map_or(TrackerKind::Pages, |(_, kind)| kind);
    match kind {
        TrackerKind::Assisted => {
            Ok(Box::new(FallbackTracker::new(AssistedTracker::open(PartSettings::default())?)))
        }
        kind => open_tracker(kind),
    }
}

fn time_tracker(kind: TrackerKind) -> Result<Duration, Error> {
    let mut tracker = open_tracker(kind)?;
    let memory = tracker.allocate_memory(TRIAL_PAGES * PAGE)?;
    // SAFETY: memory of that size, mapped for this trial, alive as long as `memory`, known to this
    // thread alone.
    let mut region = unsafe { AreaRegion::new(memory.start(), TRIAL_PAGES * PAGE) };
    let mut found = WrittenRuns::default();
    let mut times = Vec::with_capacity(TRIAL_TRANSACTIONS);
    for transaction in 0..TRIAL_TRANSACTIONS {
        let start = Instant::now();
        write_pages(region.words_mut(), transaction);
        found.clear();
        tracker.collect_writes(&mut found)?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[TRIAL_TRANSACTIONS / 2])
}

fn write_pages(words: &mut [u64], transaction: usize) {
    let page = PAGE / size_of::<u64>();
    for number in 0..WRITTEN_COUNTS.0 {
        let start = (transaction * 7 + number * 31) % TRIAL_PAGES * page;
        for word in &mut words[start..start + WRITTEN_COUNTS.1] {
            *word = std::hint::black_box(*word + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn something_is_always_chosen() {
        for source in [MemorySource::Any, MemorySource::Allocated] {
            choose_tracker(source).unwrap();
        }
    }
}
