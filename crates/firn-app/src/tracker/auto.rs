//! Choice of a tracker: times several trackers on small transactions, and opens the fastest.

use std::time::{Duration, Instant};

use super::{Found, Kind, Tracker, open};
use crate::error::Error;
use crate::options::Source;
use crate::span::PAGE;
use crate::sys::region::Region;

/// The count of pages of the area used for trials.
const PAGES: usize = 64;
/// The count of transactions in each trial; the median time counts.
const TRANSACTIONS: usize = 41;
/// The counts of pages and of words per page written in each transaction.
const WRITTEN: (usize, usize) = (2, 4);

/// Opens the fastest tracker for small transactions on memory from this source.
pub(crate) fn choose(source: Source) -> Result<Box<dyn Tracker>, Error> {
    let candidates = match source {
        Source::Any => &[Kind::Assisted, Kind::Pages][..],
        Source::Allocated => &[Kind::Assisted, Kind::Scan, Kind::Emulate, Kind::Pages],
    };
    let timed = candidates.iter().filter_map(|&kind| Some((trial(kind).ok()?, kind)));
    // PT works on every kernel.
    let kind = timed.min_by_key(|(time, _)| *time).map_or(Kind::Pages, |(_, kind)| kind);
    open(kind)
}

fn trial(kind: Kind) -> Result<Duration, Error> {
    let mut tracker = open(kind)?;
    let memory = tracker.allocate(PAGES * PAGE)?;
    // SAFETY: memory of that size, mapped for this trial, alive as long as `memory`, known to this
    // thread alone.
    let mut region = unsafe { Region::new(memory.start(), PAGES * PAGE) };
    let mut found = Found::default();
    let mut times = Vec::with_capacity(TRANSACTIONS);
    for transaction in 0..TRANSACTIONS {
        let start = Instant::now();
        write(region.words_mut(), transaction);
        found.clear();
        tracker.collect(&mut found)?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[TRANSACTIONS / 2])
}

fn write(words: &mut [u64], transaction: usize) {
    let page = PAGE / size_of::<u64>();
    for number in 0..WRITTEN.0 {
        let start = (transaction * 7 + number * 31) % PAGES * page;
        for word in &mut words[start..start + WRITTEN.1] {
            *word = std::hint::black_box(*word + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn something_is_always_chosen() {
        for source in [Source::Any, Source::Allocated] {
            choose(source).unwrap();
        }
    }
}
