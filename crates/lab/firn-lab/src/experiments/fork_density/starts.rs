//! Starts of many guests, several at the same time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Result, anyhow, ensure};

use super::memory;

/// Guests that are started at the same time: as many as `firn restore --count` does.
const STARTS_MIN: usize = 4;
/// The memory that is left to the host, in MiB.
pub(super) const RESERVE_MIB: f64 = 2048.0;

/// Calls a function with each number from 1 to `count`, several at the same time. The first error
/// ends the calls, and so does a host that runs out of memory.
pub(super) fn start_each<T: Send>(
    count: usize,
    start: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicUsize::new(1);
    let start_next = || -> Result<Vec<(usize, T)>> {
        let mut started = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number > count {
                return Ok(started);
            }
            let result = check_memory(number).and_then(|()| start(number));
            started
                .push((number, result.inspect_err(|_| next.store(count + 1, Ordering::Relaxed))?));
        }
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let threads = (2 * processors).max(STARTS_MIN).min(count);
    let mut started = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(start_next)).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Result<Vec<(usize, T)>>>| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("a thread has ended")))
        };
        let all: Vec<_> = threads.into_iter().map(join).collect();
        all.into_iter().collect::<Result<Vec<_>>>()
    })?
    .into_iter()
    .flatten()
    .collect::<Vec<_>>();
    started.sort_by_key(|(number, _)| *number);
    Ok(started.into_iter().map(|(_, value)| value).collect())
}

fn check_memory(number: usize) -> Result<()> {
    let available = memory::available_mib()?;
    ensure!(
        available > RESERVE_MIB,
        "the host's memory does not suffice for guest {number}: {available:.0} MiB are left"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_numbers_are_started_once_and_an_error_ends_the_starts() {
        assert_eq!(start_each(9, Ok).unwrap(), (1..=9).collect::<Vec<_>>());
        let begun = AtomicUsize::new(0);
        let failed = start_each(1000, |number| {
            begun.fetch_add(1, Ordering::Relaxed);
            ensure!(number != 3, "no");
            Ok(())
        });
        assert_eq!(failed.unwrap_err().to_string(), "no");
        assert!(begun.load(Ordering::Relaxed) < 1000);
    }
}
