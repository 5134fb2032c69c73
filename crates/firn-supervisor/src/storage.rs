//! How far storage is, by earlier restores from it.
//!
//! To find out takes a restore a few tenths of a second, in which it reads in the wrong way. So where storage was found to
//! be far, that is kept for the restores to come, one small file per device in the runtime directory:
//!
//! ```text
//!   /run/firn/.storage/254-1     {"way_us": 12500, "restores": 16}
//! ```
//!
//! It is believed for so many restores; then one finds out anew, since nothing shows it to a restore that believes. As
//! device numbers do, it lasts until the next boot at most. It only makes restores quicker, so nothing about it is an error.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::journal::write_private;

/// The directory, in the runtime directory. No VM can have that name.
const DIRECTORY: &str = ".storage";

/// For how many restores it is believed that storage is far.
const BELIEVED: u8 = 16;

/// A longer way than any storage has.
const WAY_MAX: Duration = Duration::from_secs(1);

/// What is kept about a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    /// What getting there costs, in microseconds.
    way_us: u64,
    /// How many restores may go by it.
    restores: u8,
}

/// The storage of an image.
#[derive(Debug)]
pub(crate) struct Storage {
    path: PathBuf,
    known: Option<Known>,
}

impl Storage {
    /// Of these files, by what is kept in a runtime directory. `None` if they are not all on the same device: nobody could
    /// tell which of them was read.
    pub(crate) fn of<'a>(
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

    /// What getting there costs, if it is known to be far.
    pub(crate) fn way(&self) -> Option<Duration> {
        self.known.map(|known| Duration::from_micros(known.way_us).min(WAY_MAX))
    }

    /// A restore is over, or has gone on for long enough; it may have found out what getting there costs, and may have gone by
    /// what is kept. A few reads tell it badly, so what is kept is the mean of what is found and what was.
    pub(crate) fn keep(self, found: Option<Duration>, went_by_it: bool) {
        let next = match (found, self.known.filter(|_| went_by_it)) {
            (Some(way), _) => {
                let mean = (self.way().unwrap_or(way) + way) / 2;
                Known { way_us: mean.as_micros() as u64, restores: BELIEVED }
            }
            (None, Some(known)) => Known { restores: known.restores.saturating_sub(1), ..known },
            (None, None) => return,
        };
        if let Err(error) = self.write(next) {
            tracing::debug!("{} can't be written: {error}", self.path.display());
        }
    }

    fn write(&self, known: Known) -> io::Result<()> {
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

    fn storage(dir: &Path) -> Storage {
        Storage::of([dir], dir).unwrap()
    }

    #[test]
    fn what_was_found_is_believed_for_some_restores() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(storage(dir.path()).way(), None);
        storage(dir.path()).keep(Some(WAY), true);
        for _ in 0..BELIEVED {
            assert_eq!(storage(dir.path()).way(), Some(WAY));
            storage(dir.path()).keep(None, false);
            storage(dir.path()).keep(None, true);
        }
        assert_eq!(storage(dir.path()).way(), None);
        assert_eq!(fs::read_dir(dir.path().join(DIRECTORY)).unwrap().count(), 0);
    }

    #[test]
    fn what_was_found_badly_gets_better() {
        let dir = tempfile::tempdir().unwrap();
        storage(dir.path()).keep(Some(WAY * 4), false);
        (0..4).for_each(|_| storage(dir.path()).keep(Some(WAY), true));
        let way = storage(dir.path()).way().unwrap();
        assert!(way > WAY && way < WAY.mul_f64(1.2), "{way:?}");
    }

    #[test]
    fn of_files_on_several_devices_nothing_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Storage::of([dir.path(), dir.path()], dir.path()).is_some());
        assert!(Storage::of([dir.path(), Path::new("/proc")], dir.path()).is_none());
    }

    #[test]
    fn near_storage_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        storage(dir.path()).keep(None, true);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn nonsense_counts_as_nothing() {
        let dir = tempfile::tempdir().unwrap();
        storage(dir.path()).keep(Some(WAY), true);
        let path = storage(dir.path()).path;
        for text in ["", "{}", "{\"way_us\": -1, \"restores\": 3}", "[]"] {
            fs::write(&path, text).unwrap();
            assert_eq!(storage(dir.path()).way(), None);
        }
        fs::write(&path, "{\"way_us\": 18446744073709551615, \"restores\": 255}").unwrap();
        assert_eq!(storage(dir.path()).way(), Some(WAY_MAX));
    }

    #[test]
    fn where_nothing_can_be_kept_nothing_is_said() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(DIRECTORY), "in the way").unwrap();
        storage(dir.path()).keep(Some(WAY), true);
        assert_eq!(storage(dir.path()).way(), None);
        assert!(Storage::of([dir.path().join("none").as_path()], dir.path()).is_none());
    }
}
