//! The file of a directory's record: locked, replaced as a whole, synced.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_files::open_input;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::record::{LayerRecord, VERSION};
use super::record_owner::RecordOwner;
use crate::records::failure::{Failure, FailureContext, FailureKind};

const NAME: &str = ".firn-disks.json";
const LOCK: &str = ".firn-disks.lock";

/// The maximum size of a record, in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// How long Firn waits for the lock: another process creates some small files while it holds it.
const LOCK_WAIT: Duration = Duration::from_secs(60);
const LOCK_RETRY: Duration = Duration::from_millis(2);

/// A directory whose record this process has locked and may change.
pub(super) struct RecordFolder {
    dir: PathBuf,
    pub(super) record: LayerRecord,
    before: LayerRecord,
    owner: RecordOwner,
    _lock: File,
}

impl RecordFolder {
    /// Locks the record of a directory. A directory without a record gets an empty one.
    pub(super) fn lock(dir: &Path) -> Result<Self, Failure> {
        let lock = lock_dir(dir).map_err(|failure| failure.while_doing(locking_text(dir)))?;
        let (record, owner) = read_with_owner(dir)?
            .unwrap_or_else(|| (LayerRecord::default(), RecordOwner::current_user()));
        Ok(Self { dir: dir.to_owned(), before: record.clone(), record, owner, _lock: lock })
    }

    /// The same if there is a record already.
    pub(super) fn lock_existing(dir: &Path) -> Result<Option<Self>, Failure> {
        match record_path(dir).try_exists() {
            Ok(false) => Ok(None),
            _ => Self::lock(dir).map(Some),
        }
    }

    /// Writes the record, and removes the files that are not needed.
    pub(super) fn store_record(&mut self) -> Result<(), Failure> {
        self.record.prune_obsolete();
        if self.record != self.before {
            self.write_record()?;
        }
        self.remove_unused()
    }

    /// Removes the unused files, as far as the record's owner may. Their names leave the record at
    /// once: other files may get them later. A file that can't be removed now keeps its entry.
    fn remove_unused(&mut self) -> Result<(), Failure> {
        if self.record.unused.is_empty() {
            return Ok(());
        }
        let owner = self.owner;
        self.record.unused.retain(|file| owner.remove_file(file));
        self.write_record()
    }

    fn write_record(&mut self) -> Result<(), Failure> {
        let path = record_path(&self.dir);
        replace_record(&self.dir, &path, &self.record, self.owner)
            .while_doing(format!("writing {}", path.display()))?;
        self.before = self.record.clone();
        Ok(())
    }
}

/// Reads the current record of a directory, if it has one, without a lock.
pub(super) fn read_record(dir: &Path) -> Result<Option<LayerRecord>, Failure> {
    Ok(read_with_owner(dir)?.map(|(record, _)| record))
}

fn read_with_owner(dir: &Path) -> Result<Option<(LayerRecord, RecordOwner)>, Failure> {
    let path = record_path(dir);
    let reading = || format!("reading {}", path.display());
    let file = match open_input(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.while_doing(reading())?,
    };
    let owner = RecordOwner::check_record(&file, dir)
        .map_err(|failure| failure.while_doing(format!("refusing {}", path.display())))?;
    let mut text = Vec::new();
    file.take(BYTES_MAX).read_to_end(&mut text).while_doing(reading())?;
    let record: LayerRecord = serde_json::from_slice(&text)
        .while_doing_as(FailureKind::Damaged, format!("{} is damaged", path.display()))
        .map_err(|failure| failure.with_hint(DAMAGED))?;
    match record.version {
        VERSION => Ok(Some((record.with_absolute_paths(dir), owner))),
        other => {
            let text = format!("{} is of version {other}, not {VERSION}", path.display());
            Err(Failure::new(FailureKind::Damaged, text).with_hint("use the Firn that wrote it"))
        }
    }
}

const DAMAGED: &str = "it lists which layers of disks are the newest; restore it from a copy, or, if you know that no \
     image or VM needs other layers than you use, move it away";

fn replace_record(
    dir: &Path,
    path: &Path,
    record: &LayerRecord,
    owner: RecordOwner,
) -> io::Result<()> {
    if record.is_empty() {
        return match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => File::open(dir)?.sync_all(),
        };
    }
    let new = dir.join(format!("{NAME}.new"));
    let mut file = create_anew(&new)?;
    file.write_all(&serde_json::to_vec_pretty(&record.clone().with_relative_paths(dir))?)?;
    owner.apply_to(&file)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(dir)?.sync_all()
}

/// Creates a file for this user alone. Another one of that name, or a link, is removed first: a
/// writer that died left it.
fn create_anew(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

fn record_path(dir: &Path) -> PathBuf {
    dir.join(NAME)
}

fn locking_text(dir: &Path) -> String {
    format!("locking the record of disk layers in {}", dir.display())
}

/// Locks the directory itself, or a file in it where directories can't be locked (NFS).
fn lock_dir(dir: &Path) -> Result<File, Failure> {
    let file = File::open(dir).while_doing("opening the directory")?;
    match wait_for_lock(&file) {
        Err(Errno::BADF | Errno::INVAL | Errno::OPNOTSUPP) => {}
        locked => return check_lock(locked).map(|()| file),
    }
    let mut options = File::options();
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.write(true).create(true).truncate(false).custom_flags(flags.bits() as i32);
    let file = options.open(dir.join(LOCK));
    let file = file.while_doing("opening the lock file")?;
    check_lock(wait_for_lock(&file)).map(|()| file)
}

fn check_lock(locked: Result<(), Errno>) -> Result<(), Failure> {
    match locked {
        Err(Errno::AGAIN) => {
            Err(Failure::new(FailureKind::Busy, "another process has held the lock for a minute"))
        }
        locked => locked.map_err(io::Error::from).while_doing("waiting for it"),
    }
}

fn wait_for_lock(file: &File) -> Result<(), Errno> {
    let deadline = Instant::now() + LOCK_WAIT;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(LOCK_RETRY),
            Err(Errno::INTR) => {}
            locked => return locked,
        }
    }
}

/// Whether this process can't create files in a directory.
pub(super) fn is_read_only(dir: &Path) -> bool {
    rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::disk_layers::record::{DiskLayer, LayerKind};

    fn layer(dir: &Path, name: &str) -> DiskLayer {
        let (vm, made, kind) = ("web".to_owned(), 1, LayerKind::Overlay);
        std::fs::write(dir.join(name), "").unwrap();
        let below = Some(dir.join("d"));
        let (abandoned, restored) = (false, false);
        DiskLayer { file: dir.join(name), below, vm, made, kind, abandoned, restored }
    }

    #[test]
    fn a_record_moves_with_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let old = dir.path().join("old");
        fs::create_dir(&old).unwrap();
        let mut folder = RecordFolder::lock(&old).unwrap();
        folder.record.layers.push(layer(&old, "d.web-1"));
        folder.store_record().unwrap();
        let new = dir.path().join("new");
        fs::rename(&old, &new).unwrap();
        assert_eq!(read_record(&new).unwrap().unwrap().layers, [layer(&new, "d.web-1")]);
        fs::remove_file(new.join("d.web-1")).unwrap();
        drop(folder);
        RecordFolder::lock(&new).unwrap().store_record().unwrap();
        assert_eq!(fs::read_dir(&new).unwrap().count(), 0, "nothing to say");
    }

    #[test]
    fn a_damaged_record_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read_record(dir.path()).unwrap(), None);
        for (text, why) in [("{", "is damaged"), (r#"{"version":9}"#, "version 9")] {
            fs::write(record_path(dir.path()), text).unwrap();
            let failure = read_record(dir.path()).unwrap_err();
            assert_eq!(failure.kind, FailureKind::Damaged);
            assert!(failure.to_string().contains(why), "{failure}");
            assert!(RecordFolder::lock(dir.path()).is_err());
        }
    }

    #[test]
    fn a_record_that_is_no_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, record_path(dir.path()), mode).unwrap();
        let failure = read_record(dir.path()).unwrap_err();
        assert!(failure.to_string().contains("a FIFO"), "{failure}");
    }

    #[test]
    fn a_link_in_place_of_the_new_record_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "kept").unwrap();
        std::os::unix::fs::symlink(&victim, dir.path().join(format!("{NAME}.new"))).unwrap();
        let mut folder = RecordFolder::lock(dir.path()).unwrap();
        folder.record.layers.push(layer(dir.path(), "d.web-1"));
        folder.store_record().unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "kept");
        assert_eq!(read_record(dir.path()).unwrap().unwrap().layers.len(), 1);
    }

    #[test]
    fn a_record_keeps_its_owner() {
        if !rustix::process::geteuid().is_root() {
            firn_skip::skip_test("files of other users need root");
            return;
        }
        use std::os::unix::fs::{MetadataExt, chown};
        let dir = tempfile::tempdir().unwrap();
        chown(dir.path(), Some(1234), Some(1234)).unwrap();
        fs::write(record_path(dir.path()), r#"{"version":1}"#).unwrap();
        chown(record_path(dir.path()), Some(1234), Some(1234)).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let victim = elsewhere.path().join("victim");
        fs::write(&victim, "").unwrap();
        let mut folder = RecordFolder::lock(dir.path()).unwrap();
        folder.record.layers.push(layer(dir.path(), "d.web-1"));
        folder.record.unused.push(victim.clone());
        folder.store_record().unwrap();
        let found = fs::metadata(record_path(dir.path())).unwrap();
        assert_eq!((found.uid(), found.gid()), (1234, 1234));
        assert!(victim.exists(), "it is none of that user's");
        assert!(folder.record.unused.is_empty());
    }
}
