//! Storage reads: how much of a read came from storage, and not from the page cache.
//!
//! The time of a read from the page cache does not show the storage latency. The kernel counts for
//! each thread the bytes that it caused to be fetched from storage (`read_bytes` of
//! `/proc/thread-self/io`, proc_pid_io(5)), and so for each process. If the count has not changed,
//! nothing was fetched; with readahead more may have been fetched than was read.
//! What comes from object storage, another process has fetched; such reads are counted separately.

use std::fs::File;
use std::os::unix::fs::FileExt;

use firn_image::fetch_count;
use firn_memory::Process;

/// The count for the thread that created this value.
#[derive(Debug)]
pub(crate) struct StorageReads {
    file: Option<File>,
    buffer: [u8; 256],
    seen: Option<u64>,
    /// The number of reads that had to wait for object storage.
    fetches: u64,
}

impl StorageReads {
    /// The count for the calling thread, from now on.
    pub(crate) fn of_this_thread() -> Self {
        let file = File::open("/proc/thread-self/io").ok();
        let mut reads = Self { file, buffer: [0; 256], seen: None, fetches: fetch_count() };
        reads.seen = reads.read_count();
        reads
    }

    /// The bytes that the thread has had fetched from storage since the last call; `None` if there
    /// were none. Zero if their number is not known: the kernel does not report the count, or they
    /// came from object storage.
    pub(crate) fn take_fetched(&mut self) -> Option<u64> {
        let now = self.read_count();
        let seen = std::mem::replace(&mut self.seen, now);
        let fetches = std::mem::replace(&mut self.fetches, fetch_count());
        let fetched = now.unwrap_or_default().saturating_sub(seen.unwrap_or_default());
        let has_fetched = now.is_none() || now != seen || fetches != self.fetches;
        has_fetched.then_some(fetched)
    }

    fn read_count(&mut self) -> Option<u64> {
        let len = self.file.as_ref()?.read_at(&mut self.buffer, 0).ok()?;
        parse_count(std::str::from_utf8(&self.buffer[..len]).ok()?)
    }
}

/// The bytes that a process has had fetched from storage up to now; zero if the kernel does not
/// report that.
pub(crate) fn bytes_fetched_by(process: &Process) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/io", process.pid())).unwrap_or_default();
    parse_count(&text).unwrap_or_default()
}

fn parse_count(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes: "))?;
    line.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Advice, fadvise};

    #[test]
    fn the_page_cache_is_no_storage() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().write_all_at(&[7; 65_536], 0).unwrap();
        file.as_file().sync_all().unwrap();
        let (mut reads, mut bytes) = (StorageReads::of_this_thread(), [0; 4096]);
        file.as_file().read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(reads.take_fetched(), None);
        fadvise(file.as_file(), 0, None, Advice::DontNeed).unwrap();
        file.as_file().read_exact_at(&mut bytes, 0).unwrap();
        // Where nothing can be evicted, on tmpfs say, nothing is read.
        let is_disk = rustix::fs::fstatfs(file.as_file()).unwrap().f_type != 0x0102_1994;
        assert_eq!(reads.take_fetched().is_some_and(|bytes| bytes >= 4096), is_disk);
        assert_eq!(reads.take_fetched(), None);
    }
}
