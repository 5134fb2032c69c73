//! The storage latency of images, as earlier restores measured it.
//!
//! To measure it takes a restore a few tenths of a second, in which it reads in an unsuitable way.
//! So where a restore measured a high latency, it is recorded for later restores, in one small file
//! for each device in the runtime directory:
//!
//! ```text
//!   /run/firn/.storage/254-1     {"way_us": 12500, "restores": 16}
//! ```
//!
//! A record is used for a limited number of restores; then one measures anew, because a restore
//! that uses a record can't see that it is wrong. Like device numbers, a record lasts until the
//! next boot at most. It only makes restores faster, so no error here is an error of a restore.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::records::journal::write_private;

/// The directory, in the runtime directory. No VM can have this name.
const DIRECTORY: &str = ".storage";

/// The number of restores that use a record of high latency.
const RECORD_USES: u8 = 16;

/// A latency that no storage exceeds.
const LATENCY_MAX: Duration = Duration::from_secs(1);

/// The record of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct LatencyRecord {
    /// The storage latency, in microseconds.
    way_us: u64,
    /// The number of restores that may still use it.
    restores: u8,
}

/// The storage that holds an image.
#[derive(Debug)]
pub(crate) struct ImageStorage {
    path: PathBuf,
    known: Option<LatencyRecord>,
}

impl ImageStorage {
    /// The storage of these files, with the record in a runtime directory. `None` if they are not
    /// all on the same device, because a measured latency could not be assigned to one.
    pub(crate) fn from_files<'a>(
        files: impl IntoIterator<Item = &'a Path>,
        runtime: &Path,
    ) -> Option<Self> {
        let devices = files.into_iter().map(|file| fs::metadata(file).map(|it| it.dev()));
        let mut devices: Vec<u64> = devices.collect::<Result<_, _>>().ok()?;
        devices.dedup();
        let &[device] = devices.as_slice() else { return None };
        let name = format!("{}-{}", rustix::fs::major(device), rustix::fs::minor(device));
        let path = runtime.join(DIRECTORY).join(name);
        let known = fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        Some(Self { path, known })
    }

    /// The recorded latency, if there is a record of high latency.
    pub(crate) fn recorded_latency(&self) -> Option<Duration> {
        self.known.map(|known| Duration::from_micros(known.way_us).min(LATENCY_MAX))
    }

    /// Updates the record, when a restore is over or has run for long enough. It may have measured
    /// the latency (`found`), and may have used the record. A few reads measure badly, so the new
    /// record is the mean of the measured and the recorded latency.
    pub(crate) fn update_record(self, found: Option<Duration>, used_record: bool) {
        let next = match (found, self.known.filter(|_| used_record)) {
            (Some(found), _) => {
                let mean = (self.recorded_latency().unwrap_or(found) + found) / 2;
                LatencyRecord { way_us: mean.as_micros() as u64, restores: RECORD_USES }
            }
            (None, Some(known)) => {
                LatencyRecord { restores: known.restores.saturating_sub(1), ..known }
            }
            (None, None) => return,
        };
        if let Err(error) = self.write_record(next) {
            tracing::debug!("{} can't be written: {error}", self.path.display());
        }
    }

    fn write_record(&self, known: LatencyRecord) -> io::Result<()> {
        if known.restores == 0 {
            return fs::remove_file(&self.path);
        }
        if let Some(directory) = self.path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        let new = self.path.with_extension("new");
        write_private(&new, &serde_json::to_vec(&known)?)?;
        fs::rename(&new, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAY: Duration = Duration::from_micros(12_500);

    fn storage(dir: &Path) -> ImageStorage {
        ImageStorage::from_files([dir], dir).unwrap()
    }

    #[test]
    fn a_measured_latency_is_used_for_some_restores() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(storage(dir.path()).recorded_latency(), None);
        storage(dir.path()).update_record(Some(WAY), true);
        for _ in 0..RECORD_USES {
            assert_eq!(storage(dir.path()).recorded_latency(), Some(WAY));
            storage(dir.path()).update_record(None, false);
            storage(dir.path()).update_record(None, true);
        }
        assert_eq!(storage(dir.path()).recorded_latency(), None);
        assert_eq!(fs::read_dir(dir.path().join(DIRECTORY)).unwrap().count(), 0);
    }

    #[test]
    fn an_uncertain_latency_is_refined() {
        let dir = tempfile::tempdir().unwrap();
        storage(dir.path()).update_record(Some(WAY * 4), false);
        (0..4).for_each(|_| storage(dir.path()).update_record(Some(WAY), true));
        let found = storage(dir.path()).recorded_latency().unwrap();
        assert!(found > WAY && found < WAY.mul_f64(1.2), "{found:?}");
    }

    #[test]
    fn of_files_on_several_devices_nothing_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        assert!(ImageStorage::from_files([dir.path(), dir.path()], dir.path()).is_some());
        assert!(ImageStorage::from_files([dir.path(), Path::new("/proc")], dir.path()).is_none());
    }

    #[test]
    fn near_storage_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        storage(dir.path()).update_record(None, true);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn nonsense_counts_as_nothing() {
        let dir = tempfile::tempdir().unwrap();
        storage(dir.path()).update_record(Some(WAY), true);
        let path = storage(dir.path()).path;
        for text in ["", "{}", "{\"way_us\": -1, \"restores\": 3}", "[]"] {
            fs::write(&path, text).unwrap();
            assert_eq!(storage(dir.path()).recorded_latency(), None);
        }
        fs::write(&path, "{\"way_us\": 18446744073709551615, \"restores\": 255}").unwrap();
        assert_eq!(storage(dir.path()).recorded_latency(), Some(LATENCY_MAX));
    }

    #[test]
    fn a_missing_cache_directory_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(DIRECTORY), "in the way").unwrap();
        storage(dir.path()).update_record(Some(WAY), true);
        assert_eq!(storage(dir.path()).recorded_latency(), None);
        assert!(
            ImageStorage::from_files([dir.path().join("none").as_path()], dir.path()).is_none()
        );
    }
}
