//! The files of the cache.
//!
//! ```text
//!   CACHE/serve.sock  serve.lock  serve.log        of the one server, which is the only process that writes below
//!   CACHE/objects/HASH                             the bytes of an object: sparse
//!   CACHE/objects/HASH.map                         which of them are there
//!   CACHE/images/HASH/web.firn  base.firn          a chain under the names of its files: hard links of the above,
//!                     web.firn.map base.firn.map   so a parent is shared by all that build on it
//! ```
//!
//! The hash of an object is made of its location, its store, its length and its ETag; that of a chain is made of
//! those of its objects. So an object that was replaced is another file, and no file ever has bytes of two.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// The environment variable that names the cache directory.
pub const CACHE_DIR_VARIABLE: &str = "FIRN_STORE_CACHE_DIR";

/// The directory of a user's cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheDir {
    root: PathBuf,
}

impl CacheDir {
    /// The cache that the environment names, or that of the user.
    ///
    /// # Errors
    /// If there is none: the user has no home.
    pub fn from_env() -> io::Result<Self> {
        let value = |name: &str| std::env::var_os(name).filter(|it| !it.is_empty());
        let of_user = || {
            if rustix::process::geteuid().is_root() {
                return Some(PathBuf::from("/var/cache/firn"));
            }
            let cache = value("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.or_else(|| value("HOME").map(|it| PathBuf::from(it).join(".cache")));
            cache.map(|it| it.join("firn/store"))
        };
        let root = value(CACHE_DIR_VARIABLE).map(PathBuf::from).or_else(of_user);
        let missing = || {
            let text = format!("there is no home directory, and {CACHE_DIR_VARIABLE} is not set");
            io::Error::new(io::ErrorKind::NotFound, text)
        };
        Ok(Self { root: std::path::absolute(root.ok_or_else(missing)?)? })
    }

    /// A cache at a path.
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The cache that a file of an image would be in.
    pub(crate) fn of_image(path: &Path) -> Option<Self> {
        let images = path.parent()?.parent()?;
        (images.file_name()? == "images")
            .then(|| Self { root: images.parent().map(Path::to_owned).unwrap_or_default() })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// The socket of the server.
    pub fn socket(&self) -> PathBuf {
        self.root.join("serve.sock")
    }

    /// The file that the server locks.
    pub fn lock_file(&self) -> PathBuf {
        self.root.join("serve.lock")
    }

    /// The log of the server.
    pub fn log_file(&self) -> PathBuf {
        self.root.join("serve.log")
    }

    /// The directory of objects.
    pub fn objects(&self) -> PathBuf {
        self.root.join("objects")
    }

    /// The directory of images.
    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// The file of an object.
    pub fn object(&self, hash: &str) -> PathBuf {
        self.objects().join(hash)
    }

    /// Makes the directories, for this user alone.
    ///
    /// # Errors
    /// If they can't be made, or another user could change them.
    pub fn create(&self) -> io::Result<()> {
        for path in [self.root.clone(), self.objects(), self.images()] {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        }
        self.check_owner()
    }

    /// Checks that no other user can change the cache.
    ///
    /// # Errors
    /// If another user can, or it is not there.
    pub fn check_owner(&self) -> io::Result<()> {
        let metadata = std::fs::metadata(&self.root)?;
        let is_own = metadata.uid() == rustix::process::geteuid().as_raw();
        if is_own && metadata.mode() & 0o022 == 0 {
            return Ok(());
        }
        let text = format!("another user can change the cache {}", self.root.display());
        Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
    }
}

/// The map beside a file of the cache.
pub fn map_path(data: &Path) -> PathBuf {
    let mut path = OsString::from(data);
    path.push(".map");
    path.into()
}
