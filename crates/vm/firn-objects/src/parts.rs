//! A file in parts, several of which are transferred at a time.
//!
//! ```text
//!   |-- part 0 --|-- part 1 --|-- part 2 --|- 3 -|        8 MiB each, more if there would be too many
//!     thread a     thread b     thread c ...              the next part goes to the thread that is free
//! ```

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use crate::error::StoreError;

/// Shows a stage, and its progress: done and total, in bytes.
pub type TransferProgress<'a> = dyn Fn(&'static str, u64, u64) + 'a;

/// The minimum length of a part. S3 demands 5 MiB, except of the last.
const PART_BYTES_MIN: u64 = 8 << 20;

/// The maximum number of parts of an object (S3).
const PARTS_MAX: u64 = 10_000;

/// The number of parts that are transferred at a time.
const WORKERS: usize = 4;

/// The parts of a file of `len` bytes, in order. An empty file has one empty part.
pub(crate) fn split_into_parts(len: u64) -> Vec<Range<u64>> {
    let needed = len.div_ceil(PARTS_MAX).next_multiple_of(1 << 20);
    let part = needed.max(PART_BYTES_MIN);
    let count = len.div_ceil(part).max(1);
    (0..count).map(|number| number * part..len.min((number + 1) * part)).collect()
}

/// Transfers parts by `transfer`, which gets the number and the range of a part. Returns what it
/// returned, in the order of the parts, or the first error. `progress` is called with the bytes
/// that are done, on this thread.
pub(crate) fn transfer_parts<T: Send>(
    parts: &[Range<u64>],
    transfer: &(dyn Fn(usize, Range<u64>) -> Result<T, StoreError> + Sync),
    progress: &dyn Fn(u64),
) -> Result<Vec<T>, StoreError> {
    let done = Cell::new(0);
    run_jobs(
        parts.len(),
        &|number| transfer(number, parts.get(number).cloned().unwrap_or_default()),
        &|number| {
            done.set(done.get() + parts.get(number).map_or(0, |part| part.end - part.start));
            progress(done.get());
        },
    )
}

/// Runs numbered jobs, several at a time. Returns what they returned, in their order, or the first
/// error; after an error no other job begins. `finished` is called with the number of a job that
/// succeeded, on this thread.
pub(crate) fn run_jobs<T: Send>(
    count: usize,
    job: &(dyn Fn(usize) -> Result<T, StoreError> + Sync),
    finished: &dyn Fn(usize),
) -> Result<Vec<T>, StoreError> {
    let (next, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = |results: Sender<(usize, Result<T, StoreError>)>| {
        while !has_failed.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return;
            }
            let result = job(number);
            has_failed.fetch_or(result.is_err(), Ordering::Relaxed);
            if results.send((number, result)).is_err() {
                return;
            }
        }
    };
    let (mut values, mut failure) = (Vec::new(), None);
    thread::scope(|scope| {
        let (sender, results) = channel();
        for _ in 0..WORKERS.min(count) {
            let (work, sender) = (&work, sender.clone());
            scope.spawn(move || work(sender));
        }
        drop(sender);
        for (number, result) in results {
            match result {
                Ok(value) => {
                    finished(number);
                    values.push((number, value));
                }
                Err(error) => _ = failure.get_or_insert(error),
            }
        }
    });
    values.sort_unstable_by_key(|(number, _)| *number);
    failure.map_or(Ok(values.into_iter().map(|(_, value)| value).collect()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_cache::StoreLocation;

    #[test]
    fn parts_cover_a_file_without_gaps() {
        for len in [0, 1, 8 << 20, (8 << 20) + 1, 100 << 20, 1 << 40, 5_000_000_000_000] {
            let parts = split_into_parts(len);
            assert!(parts.len() as u64 <= PARTS_MAX, "{len}");
            assert_eq!((parts[0].start, parts[parts.len() - 1].end), (0, len));
            assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
            let (last, others) = parts.split_last().unwrap();
            assert!(others.iter().all(|part| part.end - part.start >= PART_BYTES_MIN));
            assert!(last.end - last.start <= parts[0].end);
        }
    }

    #[test]
    fn results_are_in_the_order_of_the_parts() {
        let (parts, done) = (split_into_parts(100 << 20), Cell::new(0));
        let numbers = transfer_parts(&parts, &|number, _| Ok(number), &|it| done.set(it)).unwrap();
        assert_eq!(numbers, (0..parts.len()).collect::<Vec<_>>());
        assert_eq!(done.get(), 100 << 20);
    }

    #[test]
    fn after_an_error_no_other_part_begins() {
        let (parts, begun) = (split_into_parts(8000 << 20), AtomicUsize::new(0));
        let location: StoreLocation = "s3://a/b".parse().unwrap();
        let result = transfer_parts(
            &parts,
            &|number, _| {
                begun.fetch_add(1, Ordering::Relaxed);
                if number == 3 { Err(StoreError::Taken(location.clone())) } else { Ok(()) }
            },
            &|_| (),
        );
        assert!(matches!(result, Err(StoreError::Taken(_))));
        assert!(begun.into_inner() < parts.len());
    }
}
