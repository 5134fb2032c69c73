//! The bound of the cache, and its counts.
//!
//! When the cache is full, the objects that no process has open are removed, those first that were used
//! the longest time ago. A process that reads an object has a shared lock on its file, so an
//! exclusive lock shows that none does. If nothing can be removed, bytes are fetched for those who
//! wait for them, and not kept.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use firn_cache::{CacheDir, CacheReport, map_path};
use rustix::fs::{FlockOperation, flock};

/// An object that was used within this time is not removed: the process that is going to read it may
/// not have opened it yet.
const UNUSED_MIN: Duration = Duration::from_secs(3);

/// The bound of the cache, and what it has.
pub(crate) struct CacheRoom {
    cache: CacheDir,
    bytes_max: u64,
    used: Mutex<UsedBytes>,
    fetched: AtomicU64,
    requests: AtomicU64,
    demands: AtomicUsize,
    /// One thread at a time removes objects.
    removing: Mutex<()>,
}

/// The bytes that the cache has, or is going to have.
struct UsedBytes {
    /// On the disk, or to be written.
    all: u64,
    /// Of these, those for which there is room, and that may not be on the disk yet.
    being_written: u64,
}

/// Room for bytes, until they are written.
pub(crate) struct ReservedRoom<'a> {
    room: &'a CacheRoom,
    bytes: u64,
}

impl Drop for ReservedRoom<'_> {
    fn drop(&mut self) {
        self.room.lock_used().being_written -= self.bytes;
    }
}

/// A request to the store that has not been answered yet.
pub(crate) struct RequestInFlight<'a> {
    room: &'a CacheRoom,
    is_demand: bool,
}

impl Drop for RequestInFlight<'_> {
    fn drop(&mut self) {
        self.room.demands.fetch_sub(usize::from(self.is_demand), Ordering::Relaxed);
    }
}

impl CacheRoom {
    pub(crate) fn new(cache: CacheDir, bytes_max: u64) -> Self {
        let used = UsedBytes { all: measure_objects(&cache), being_written: 0 };
        let used = Mutex::new(used);
        let (fetched, requests) = (AtomicU64::new(0), AtomicU64::new(0));
        let (demands, removing) = (AtomicUsize::new(0), Mutex::new(()));
        Self { cache, bytes_max, used, fetched, requests, demands, removing }
    }

    /// A request begins; it ends when the value is dropped.
    pub(crate) fn begin_request(&self, is_demand: bool) -> RequestInFlight<'_> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.demands.fetch_add(usize::from(is_demand), Ordering::Relaxed);
        RequestInFlight { room: self, is_demand }
    }

    /// Whether a guest waits for the store.
    pub(crate) fn has_demands(&self) -> bool {
        self.demands.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn count_fetched(&self, bytes: u64) {
        self.fetched.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Makes room for bytes that are going to be written. `None` if there is none.
    pub(crate) fn reserve(&self, bytes: u64) -> Option<ReservedRoom<'_>> {
        loop {
            let mut used = self.lock_used();
            if used.all.saturating_add(bytes) <= self.bytes_max {
                used.all += bytes;
                used.being_written += bytes;
                return Some(ReservedRoom { room: self, bytes });
            }
            drop(used);
            if !self.remove_oldest() {
                return None;
            }
        }
    }

    fn lock_used(&self) -> MutexGuard<'_, UsedBytes> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the object that was not used for the longest time and that no process has open. False if
    /// there is none.
    pub(crate) fn remove_oldest(&self) -> bool {
        let Ok(_alone) = self.removing.lock() else { return false };
        let mut objects = list_objects(&self.cache);
        objects.sort_unstable_by_key(|(used, _)| *used);
        let is_due = |used: &SystemTime| used.elapsed().is_ok_and(|since| since > UNUSED_MIN);
        let mut objects = objects.iter().filter(|(used, _)| is_due(used));
        let is_removed = objects.any(|(_, data)| remove_object(&self.cache, data).is_ok());
        // What is half written counts twice for a moment: the bound holds all the same.
        let mut used = self.lock_used();
        used.all = measure_objects(&self.cache) + used.being_written;
        is_removed
    }

    pub(crate) fn report(&self) -> CacheReport {
        CacheReport {
            fetched_bytes: self.fetched.load(Ordering::Relaxed),
            requests: self.requests.load(Ordering::Relaxed),
            cached_bytes: measure_objects(&self.cache),
            bytes_max: self.bytes_max,
            objects: list_objects(&self.cache).len() as u64,
            pid: std::process::id(),
        }
    }
}

/// The objects, and when each was last used.
fn list_objects(cache: &CacheDir) -> Vec<(SystemTime, PathBuf)> {
    let entries = fs::read_dir(cache.objects()).into_iter().flatten().flatten();
    let data = entries.map(|entry| entry.path()).filter(|path| path.extension().is_none());
    let used = |path: PathBuf| {
        let used = fs::metadata(map_path(&path)).and_then(|it| it.modified());
        (used.unwrap_or(SystemTime::UNIX_EPOCH), path)
    };
    data.map(used).collect()
}

/// The bytes of all objects on the disk.
fn measure_objects(cache: &CacheDir) -> u64 {
    let bytes =
        |(_, path): &(SystemTime, PathBuf)| fs::metadata(path).map_or(0, |it| it.blocks() * 512);
    list_objects(cache).iter().map(bytes).sum()
}

/// Removes an object with the images that have it, unless a process has it open. A kill between two
/// steps leaves a complete object, or one without its map, which `clean_up` removes.
fn remove_object(cache: &CacheDir, data: &Path) -> io::Result<()> {
    let file = File::open(data)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    let inode = file.metadata()?.ino();
    for image in fs::read_dir(cache.images())?.flatten() {
        if has_file(&image.path(), inode) {
            fs::remove_dir_all(image.path())?;
        }
    }
    let _ = fs::remove_file(map_path(data));
    fs::remove_file(data)
}

/// Whether a directory has a file with this inode.
fn has_file(directory: &Path, inode: u64) -> bool {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).any(|it| it.ino() == inode)
}

/// Removes what a server that was killed left half done: objects without a map, and images one of
/// whose objects is gone.
pub(crate) fn clean_up(cache: &CacheDir) -> io::Result<()> {
    let mut inodes = std::collections::HashSet::new();
    for (_, data) in list_objects(cache) {
        match map_path(&data).exists() {
            true => _ = inodes.insert(fs::metadata(&data)?.ino()),
            false => fs::remove_file(&data)?,
        }
    }
    for image in fs::read_dir(cache.images())?.flatten() {
        let entries = fs::read_dir(image.path())?.flatten();
        let files = entries.filter(|entry| map_path(&entry.path()).exists());
        let is_there =
            |entry: fs::DirEntry| entry.metadata().is_ok_and(|it| inodes.contains(&it.ino()));
        if !files.into_iter().all(is_there) || image.path().extension().is_some() {
            fs::remove_dir_all(image.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Objects are removed while other bytes are still to be written.
    #[test]
    fn bytes_that_are_still_to_be_written_count_when_objects_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let cache = CacheDir::at(dir.path());
        fs::create_dir_all(cache.objects()).unwrap();
        fs::create_dir_all(cache.images()).unwrap();
        let room = CacheRoom::new(cache, 1000);
        let reserved = room.reserve(900);
        assert!(reserved.is_some() && room.reserve(200).is_none());
        assert!(!room.remove_oldest(), "there is none");
        assert!(room.reserve(200).is_none(), "900 bytes will be written");
        drop(reserved);
        assert!(!room.remove_oldest());
        assert!(room.reserve(200).is_some(), "they were not");
    }
}
