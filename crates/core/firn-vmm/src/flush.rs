//! Flushing of disk files before a pause, so that the pause does not wait for it.
//!
//! A hypervisor that stops a VM flushes its disks. The guest may have written gigabytes since the
//! last flush, and the pause lasts until they are on storage. So Firn flushes the files from
//! outside, while the guest runs:
//!
//! ```text
//!   round 1   all dirty data                                    may take seconds
//!   round 2   the data written during round 1
//!   ...       until a round is short, or no shorter than the one before
//!   pause     the data written since
//! ```

use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum number of rounds.
const ROUNDS_MAX: u32 = 4;
/// A round of at most this duration is the last.
const SHORT: Duration = Duration::from_millis(3);

/// Flushes files. The hypervisor flushes those for which this fails.
pub fn flush_files(files: &[PathBuf]) {
    let mut last = Duration::MAX;
    for _ in 0..ROUNDS_MAX {
        let since = Instant::now();
        flush_all(files);
        let took = since.elapsed();
        if !is_worth_another(took, last) {
            break;
        }
        last = took;
    }
}

fn is_worth_another(took: Duration, last: Duration) -> bool {
    took > SHORT && took < last
}

/// Flushes all files at once: while one is flushed, the guest writes to the others.
fn flush_all(files: &[PathBuf]) {
    thread::scope(|scope| {
        let Some((first, rest)) = files.split_first() else { return };
        for file in rest {
            scope.spawn(|| flush_file(file));
        }
        flush_file(first);
    });
}

fn flush_file(file: &Path) {
    if let Err(error) = File::open(file).and_then(|file| file.sync_data()) {
        tracing::debug!("{} is not flushed before the pause: {error}", file.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_end_when_one_is_short_or_none_the_shorter() {
        let ms = Duration::from_millis;
        assert!(is_worth_another(ms(900), Duration::MAX));
        assert!(is_worth_another(ms(50), ms(900)));
        assert!(!is_worth_another(ms(60), ms(50)));
        assert!(!is_worth_another(ms(2), ms(50)));
    }

    #[test]
    fn a_file_that_is_not_there_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let there = dir.path().join("a");
        std::fs::write(&there, "contents").unwrap();
        flush_files(&[there.clone(), dir.path().join("b")]);
        assert_eq!(std::fs::read(&there).unwrap(), b"contents");
    }
}
