//! The partial file in which an image grows until it is complete.
//!
//! `dir/web.firn` grows as `dir/.web.firn.partial`: for its owner alone (0600), and locked
//! (`flock(2)`) while a process writes it. It is renamed only when everything is on disk, so that a
//! name always stands for a whole image: the old one or the new one. If it is dropped before, it is
//! removed. A partial file that a killed writer left behind is not locked, and the next writer of
//! the same image removes it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use firn_files::{NotRegular, check_output};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use crate::error::ImageError;

/// An unfinished image file. Dropped before it is published, it is removed.
pub struct PartialFile {
    file: File,
    path: PathBuf,
    target: PathBuf,
    is_renamed: bool,
}

impl PartialFile {
    /// Creates the partial file of an image that is to have this path.
    ///
    /// # Errors
    /// If another process writes that image, or the file can't be created.
    pub fn create(target: &Path) -> Result<Self, ImageError> {
        check_output(target)?;
        let path = partial_path(target)?;
        remove_stale(&path, target)?;
        let file = with_fault("image.create", || create_locked(&path)).map_err(|error| {
            let is_taken = [Some(Errno::EXIST), Some(Errno::WOULDBLOCK)]
                .contains(&Errno::from_io_error(&error));
            if is_taken { busy_error(target) } else { io_error("create", &path)(error) }
        })?;
        Ok(Self { file, path, target: target.to_owned(), is_renamed: false })
    }

    /// Its path until it is complete.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its path once it is complete.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Writes bytes at an offset. Any number of threads may write at once.
    ///
    /// # Errors
    /// If not all of them can be written.
    pub fn write_received(&self, bytes: &[u8], offset: u64) -> Result<(), ImageError> {
        self.write_at("image.write", bytes, offset)
    }

    pub(crate) fn write_at(
        &self,
        point: &'static str,
        bytes: &[u8],
        offset: u64,
    ) -> Result<(), ImageError> {
        with_fault(point, || self.file.write_all_at(bytes, offset)).map_err(|source| {
            ImageError::Write { path: self.path.clone(), offset, len: bytes.len(), source }
        })
    }

    /// Syncs everything to disk and gives the file its name.
    ///
    /// # Errors
    /// If something can't be written; then there is nothing new at its path.
    pub fn publish(mut self) -> Result<(), ImageError> {
        let dir = directory_of(&self.target);
        let names = File::open(dir).map_err(io_error("open", dir))?;
        // Check again: the writing took time.
        check_output(&self.target)?;
        with_fault("image.sync", || self.file.sync_all()).map_err(io_error("sync", &self.path))?;
        with_fault("image.rename", || std::fs::rename(&self.path, &self.target))
            .map_err(io_error("rename", &self.path))?;
        self.is_renamed = true;
        names.sync_all().map_err(io_error("sync", dir))
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.is_renamed {
            // There is no remedy for a file that can't be removed; the next writer tries again.
            drop(std::fs::remove_file(&self.path));
        }
    }
}

/// Removes the partial file that a killed writer left, unless a writer holds its lock. Returns
/// whether there was one.
pub fn remove_partial(target: &Path) -> Result<bool, ImageError> {
    remove_stale(&partial_path(target)?, target)
}

/// Removes the partial file that this very process has written, although one of its threads may be
/// blocked in a write to it: for a process that is about to end. An image that has its name already
/// stays.
pub fn abandon_partial(target: &Path) -> Result<(), ImageError> {
    let path = partial_path(target)?;
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(io_error("remove what is left of", &path)(error))
        }
        _ => Ok(()),
    }
}

fn remove_stale(path: &Path, target: &Path) -> Result<bool, ImageError> {
    let failed = io_error("remove what is left of", path);
    let file = match open_stale(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(failed(error)),
    };
    match try_lock(&file) {
        Ok(()) if file.metadata().is_ok_and(|it| it.nlink() == 0) => Ok(false),
        Ok(()) => std::fs::remove_file(path).map(|()| true).map_err(failed),
        Err(_) => Err(busy_error(target)),
    }
}

/// Opens a file without waiting, and without following a link.
fn open_stale(path: &Path) -> io::Result<File> {
    NotRegular::require_regular(std::fs::symlink_metadata(path)?.file_type())?;
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    OpenOptions::new().write(true).custom_flags(flags.bits() as i32).open(path)
}

fn create_locked(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    try_lock(&file)?;
    Ok(file)
}

fn try_lock(file: &File) -> io::Result<()> {
    Ok(flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

fn partial_path(target: &Path) -> Result<PathBuf, ImageError> {
    let Some(name) = target.file_name() else {
        return Err(ImageError::Path { path: target.to_owned() });
    };
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(".partial");
    Ok(target.with_file_name(hidden))
}

fn directory_of(target: &Path) -> &Path {
    match target.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

fn busy_error(target: &Path) -> ImageError {
    ImageError::Busy { path: target.to_owned() }
}

fn with_fault<T>(point: &'static str, step: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    firn_fault::pass_io_point(point).and_then(|()| step())
}

fn io_error<'a>(step: &'static str, path: &'a Path) -> impl Fn(io::Error) -> ImageError + use<'a> {
    move |source| ImageError::Io { step, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_writer_that_is_stuck_is_abandoned() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a.firn");
        abandon_partial(&target).unwrap();
        let _stuck = PartialFile::create(&target).unwrap();
        assert!(remove_partial(&target).is_err());
        abandon_partial(&target).unwrap();
        assert!(names(dir.path()).is_empty());
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn it_is_for_its_owner_and_goes_when_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let partial = PartialFile::create(&dir.path().join("a.firn")).unwrap();
        assert_eq!(names(dir.path()), [".a.firn.partial"]);
        let mode = partial.file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(partial);
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn the_target_is_replaced_by_the_rename_only() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a.firn");
        std::fs::write(&target, "old").unwrap();
        let partial = PartialFile::create(&target).unwrap();
        partial.write_at("image.write", b"new", 0).unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"old");
        partial.publish().unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["a.firn"]);
    }

    #[test]
    fn two_writers_of_one_image_are_one_too_many() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a.firn");
        let first = PartialFile::create(&target).unwrap();
        assert!(matches!(PartialFile::create(&target), Err(ImageError::Busy { .. })));
        assert!(matches!(remove_partial(&target), Err(ImageError::Busy { .. })));
        first.write_at("image.write", b"x", 0).unwrap();
        first.publish().unwrap();
        assert!(target.exists());
    }

    #[test]
    fn leftovers_are_cleared_away() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a.firn");
        std::fs::write(dir.path().join(".a.firn.partial"), "left by a killed writer").unwrap();
        assert!(remove_partial(&target).unwrap());
        assert!(!remove_partial(&target).unwrap());
        std::fs::write(dir.path().join(".a.firn.partial"), "left by a killed writer").unwrap();
        drop(PartialFile::create(&target).unwrap());
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn a_directory_is_no_file_name() {
        assert!(matches!(PartialFile::create(Path::new("/")), Err(ImageError::Output(_))));
        assert_eq!(directory_of(Path::new("a.firn")), Path::new("."));
    }
}
