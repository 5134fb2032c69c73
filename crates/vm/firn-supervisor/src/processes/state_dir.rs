//! What Firn keeps for a user beyond the host's next boot: the key that marks this user's images, and
//! the images that the user trusts.
//!
//! ```text
//!   /var/lib/firn/                 or $FIRN_STATE_DIR, $XDG_STATE_HOME/firn, ~/.local/state/firn
//!     origin/                0700
//!       key                  0600   32 random bytes; made at the first save
//!       trusted/             0700
//!         DIGEST             0600   an image that the user has restored with --trust: its path then
//! ```
//!
//! A key is made once: it gets its name by link(2), which replaces nothing. So of two saves that both
//! make the first key, one uses the other's.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::rand::{GetRandomFlags, getrandom};
use serde_json::json;

use crate::processes::runtime::{RuntimeError, make_private};
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::origin::{KEY_BYTES, OriginDigest, OriginKey};

/// The environment variable that moves the directory.
const VARIABLE: &str = "FIRN_STATE_DIR";

const READING: &str = "reading the key that marks this user's images";
const MAKING: &str = "making the key that marks this user's images";
const TRUSTING: &str = "recording that the user trusts the image";

/// The state directory of the user.
#[derive(Clone, Debug)]
pub(crate) struct StateDir {
    /// `origin` in it.
    origin: PathBuf,
}

impl StateDir {
    /// The directory that the environment names. It need not exist.
    pub(crate) fn from_env() -> Result<Self, Failure> {
        let variable = |name| std::env::var_os(name).filter(|it| !it.is_empty()).map(PathBuf::from);
        let home = || Some(std::env::home_dir()?.join(".local/state/firn"));
        let of_user = || variable("XDG_STATE_HOME").map(|it| it.join("firn")).or_else(home);
        let path = match (variable(VARIABLE), rustix::process::geteuid().is_root()) {
            (Some(path), _) => Some(path),
            (None, true) => Some(PathBuf::from("/var/lib/firn")),
            (None, false) => of_user(),
        };
        let absolute = path.filter(|path| path.is_absolute());
        let nowhere = || {
            let text = "there is no directory for Firn's state: HOME is not set";
            let hint = format!("set {VARIABLE} to the absolute path of a directory");
            Failure::new(FailureKind::Host, text).with_hint(hint)
        };
        absolute.map(Self::at_path).ok_or_else(nowhere)
    }

    /// The directory for images that are about to be uploaded.
    fn spool(&self) -> PathBuf {
        self.origin.with_file_name("spool")
    }

    fn at_path(path: impl AsRef<Path>) -> Self {
        Self { origin: path.as_ref().join("origin") }
    }

    fn key_file(&self) -> PathBuf {
        self.origin.join("key")
    }

    /// Reads the key, if there is one.
    pub(crate) fn read_key(&self) -> Result<Option<OriginKey>, Failure> {
        let file = self.key_file();
        if !fs::exists(&file).while_doing_as(FailureKind::Host, READING)? {
            return Ok(None);
        }
        // Another user who owns the directory could replace the key.
        check_private(&self.origin).map_err(|failure| failure.while_doing(READING))?;
        let bytes = firn_files::read_secret(&file, KEY_BYTES as u64)
            .while_doing_as(FailureKind::Host, READING)?;
        let len = bytes.len();
        match <[u8; KEY_BYTES]>::try_from(bytes) {
            Ok(key) => Ok(Some(OriginKey::from_bytes(key))),
            Err(_) => {
                let text = format!("{} has {len} bytes, not {KEY_BYTES}", file.display());
                let hint = "remove the file: the next save makes a new key, and images from before need --trust once";
                let failure = Failure::new(FailureKind::Host, text).with_hint(hint);
                Err(failure.while_doing(READING))
            }
        }
    }

    /// Reads the key, or makes one.
    pub(crate) fn get_key(&self) -> Result<OriginKey, Failure> {
        if let Some(key) = self.read_key()? {
            return Ok(key);
        }
        self.make_directory().map_err(|failure| failure.while_doing(MAKING))?;
        self.make_key().while_doing_as(FailureKind::Host, MAKING)?;
        let lost = || Failure::new(FailureKind::Host, "the key has been removed again");
        self.read_key()?.ok_or_else(lost)
    }

    fn make_key(&self) -> io::Result<()> {
        let mut key = [0; KEY_BYTES];
        getrandom(&mut key, GetRandomFlags::empty())?;
        let draft =
            self.origin.join(format!(".key.{}.{:?}", std::process::id(), thread::current().id()));
        firn_files::replace_private(&draft, &key)?;
        let linked = fs::hard_link(&draft, self.key_file());
        fs::remove_file(&draft)?;
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => fs::File::open(&self.origin)?.sync_all(),
        }
    }

    fn make_directory(&self) -> Result<(), Failure> {
        const CREATING: &str = "creating the directory for Firn's state";
        let parent = self.origin.parent().unwrap_or(Path::new("/"));
        let made = DirBuilder::new().mode(0o700).recursive(true).create(parent);
        made.while_doing_as(FailureKind::Host, format!("{CREATING}, {}", parent.display()))?;
        make_private(&self.origin).while_doing_as(FailureKind::Host, CREATING)
    }

    /// Whether the user trusts the image with this digest.
    pub(crate) fn is_trusted(&self, digest: &OriginDigest) -> Result<bool, Failure> {
        let file = self.trust_file(digest);
        let found =
            fs::exists(&file).while_doing_as(FailureKind::Host, "finding trusted images")?;
        if found {
            check_private(&self.origin)?;
        }
        Ok(found)
    }

    /// Records that the user trusts an image.
    pub(crate) fn record_trust(&self, digest: &OriginDigest, image: &Path) -> Result<(), Failure> {
        self.make_directory().map_err(|failure| failure.while_doing(TRUSTING))?;
        let file = self.trust_file(digest);
        let directory = file.parent().unwrap_or(Path::new("/"));
        make_private(directory).while_doing_as(FailureKind::Host, TRUSTING)?;
        let record = json!({ "image": image.to_string_lossy() }).to_string() + "\n";
        firn_files::replace_private(&file, record.as_bytes())
            .while_doing_as(FailureKind::Host, TRUSTING)
    }

    fn trust_file(&self, digest: &OriginDigest) -> PathBuf {
        self.origin.join("trusted").join(digest.to_string())
    }
}

/// The directory in which the images of this user are that are about to be uploaded. It need not exist.
///
/// # Errors
/// If the environment names no state directory.
pub fn spool_dir() -> Result<PathBuf, Failure> {
    StateDir::from_env().map(|state| state.spool())
}

/// Checks that a directory is this user's, and that no other user can write to it.
fn check_private(directory: &Path) -> Result<(), Failure> {
    let checking = || format!("checking {}", directory.display());
    let found = fs::symlink_metadata(directory).while_doing_as(FailureKind::Host, checking())?;
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    if found.is_dir() && owner == rustix::process::geteuid().as_raw() && mode & 0o077 == 0 {
        return Ok(());
    }
    let path = directory.to_owned();
    let error = RuntimeError::Exposed { path, owner, mode };
    let hint = format!("`chmod 700 {}`, after a check of its contents", directory.display());
    Err(Failure::from_error(FailureKind::Host, &error).with_hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::origin::OriginMark;
    use firn_types::RegionMap;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    fn digest(name: &str) -> OriginDigest {
        let regions = RegionMap::lay_out([("ram", 1 << 20)]).unwrap();
        OriginDigest::of_parts(&json!({ "name": name }), &regions, b"")
    }

    fn mark(key: &OriginKey) -> OriginMark {
        key.mark(&digest("web"))
    }

    #[test]
    fn a_key_is_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::at_path(dir.path().join("a/b"));
        assert!(state.read_key().unwrap().is_none());
        let all: Vec<OriginMark> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..8).map(|_| scope.spawn(|| mark(&state.get_key().unwrap()))).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        });
        assert!(all.iter().all(|it| *it == all[0]));
        assert_eq!(mark(&state.read_key().unwrap().unwrap()), all[0]);
        let mode = fs::metadata(state.key_file()).unwrap().mode() & 0o7777;
        assert_eq!(mode, 0o600);
        let other = StateDir::at_path(dir.path().join("c"));
        assert_ne!(mark(&other.get_key().unwrap()), all[0]);
        assert_eq!(fs::read_dir(&state.origin).unwrap().count(), 1, "drafts are removed");
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::at_path(dir.path());
        state.get_key().unwrap();
        let set = |path: &Path, mode| {
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        set(&state.key_file(), 0o640);
        let failure = state.get_key().unwrap_err();
        assert!(failure.kind == FailureKind::Host && failure.to_string().contains("chmod 600"));
        set(&state.key_file(), 0o600);
        set(&state.origin, 0o770);
        assert_eq!(state.read_key().unwrap_err().kind, FailureKind::Host);
        set(&state.origin, 0o700);
        fs::write(state.key_file(), "short").unwrap();
        assert!(state.read_key().unwrap_err().to_string().contains("has 5 bytes"));
    }

    #[test]
    fn trust_is_of_one_digest() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::at_path(dir.path());
        assert!(!state.is_trusted(&digest("a")).unwrap());
        state.record_trust(&digest("a"), Path::new("/a.firn")).unwrap();
        state.record_trust(&digest("a"), Path::new("/b.firn")).unwrap();
        assert!(state.is_trusted(&digest("a")).unwrap());
        assert!(!state.is_trusted(&digest("b")).unwrap());
        fs::set_permissions(&state.origin, Permissions::from_mode(0o777)).unwrap();
        assert!(state.is_trusted(&digest("a")).is_err());
    }
}
