//! The owner of a directory's record. A record names files that Firn removes, so it has no more
//! rights than its owner.
//!
//! | owner of the record | used | files that Firn removes for it |
//! |---|---|---|
//! | this user, or root | yes | all that it names |
//! | the owner of the directory | yes | those in directories of that user |
//! | another user | no | none |
//!
//! A record that root replaces keeps its owner: what a user has written to it stays that user's.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, Uid, fchown, fstat, openat, unlinkat};
use rustix::process::geteuid;

use crate::records::failure::{Failure, FailureContext, FailureKind};

/// The bits of a file's mode that let other users write to it.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// The user and the group that own a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordOwner {
    uid: u32,
    /// `None` for the group that new files get.
    gid: Option<u32>,
}

impl RecordOwner {
    /// The owner of a new record.
    pub(super) fn current_user() -> Self {
        Self { uid: geteuid().as_raw(), gid: None }
    }

    /// The owner of the open record of `dir`. An error if the record may be that of a stranger.
    pub(super) fn check_record(record: &File, dir: &Path) -> Result<Self, Failure> {
        let found = record.metadata().while_doing("finding its owner")?;
        if found.mode() & WRITABLE_BY_OTHERS != 0 {
            return Err(refuse("other users may write to it", "`chmod 600` that file"));
        }
        let directory = std::fs::metadata(dir).while_doing("finding the directory's owner")?;
        let uid = found.uid();
        match [geteuid().as_raw(), 0, directory.uid()].contains(&uid) {
            true => Ok(Self { uid, gid: Some(found.gid()) }),
            false => {
                let text = format!("it belongs to user {uid}, who does not own the directory");
                Err(refuse(&text, "`chown` that file if you know what it names, or move it away"))
            }
        }
    }

    /// Gives a new record to this owner.
    pub(super) fn apply_to(self, record: &File) -> io::Result<()> {
        if self.uid == geteuid().as_raw() {
            return Ok(());
        }
        Ok(fchown(record, Some(Uid::from_raw(self.uid)), self.gid.map(Gid::from_raw))?)
    }

    /// Removes a file, unless this owner may not. Returns whether to try again later.
    pub(super) fn remove_file(self, file: &Path) -> bool {
        let Err(error) = self.try_remove(file) else { return false };
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => false,
            kind => {
                tracing::warn!("can't remove {}: {error}", file.display());
                kind != io::ErrorKind::InvalidInput
            }
        }
    }

    fn try_remove(self, file: &Path) -> io::Result<()> {
        let (Some(parent), Some(name)) = (file.parent(), file.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        // The directory stays open, so that it is not another one when the file is removed.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = openat(CWD, parent, flags, Mode::empty())?;
        let is_trusted = [geteuid().as_raw(), 0].contains(&self.uid);
        if !is_trusted && fstat(&dir)?.st_uid != self.uid {
            let text = format!("its directory does not belong to user {}", self.uid);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(unlinkat(&dir, name, AtFlags::empty())?)
    }
}

fn refuse(text: &str, hint: &str) -> Failure {
    Failure::new(FailureKind::Refused, text).with_hint(hint)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    fn is_root() -> bool {
        let is_root = geteuid().is_root();
        if !is_root {
            firn_skip::skip_test("files of other users need root");
        }
        is_root
    }

    fn check(path: &Path) -> Result<RecordOwner, Failure> {
        RecordOwner::check_record(&File::open(path).unwrap(), path.parent().unwrap())
    }

    #[test]
    fn a_record_that_others_may_write_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        fs::write(&path, "").unwrap();
        for (mode, is_refused) in [(0o600, false), (0o644, false), (0o620, true), (0o602, true)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(check(&path).is_err(), is_refused, "{mode:o}");
        }
    }

    #[test]
    fn the_record_of_a_stranger_is_refused() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        fs::write(&path, "").unwrap();
        chown(&path, Some(1234), None).unwrap();
        assert!(check(&path).unwrap_err().to_string().contains("user 1234"));
        // The owner of the directory may remove its files without Firn.
        chown(dir.path(), Some(1234), None).unwrap();
        assert_eq!(check(&path).unwrap().uid, 1234);
    }

    #[test]
    fn only_files_in_directories_of_the_owner_are_removed() {
        if !is_root() {
            return;
        }
        let (own, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        chown(own.path(), Some(1234), None).unwrap();
        let owner = RecordOwner { uid: 1234, gid: None };
        let link = own.path().join("link");
        std::os::unix::fs::symlink(other.path(), &link).unwrap();
        let victim = other.path().join("victim");
        let layer = own.path().join("layer");
        for file in [&victim, &layer] {
            fs::write(file, "").unwrap();
        }
        let through_parent =
            own.path().join("..").join(other.path().file_name().unwrap()).join("victim");
        for file in [&layer, &victim, &link.join("victim"), &through_parent] {
            owner.remove_file(file);
        }
        assert!(!layer.exists());
        assert!(victim.exists());
        RecordOwner::current_user().remove_file(&victim);
        assert!(!victim.exists());
    }
}
