//! The runtime directory: one subdirectory for each VM, accessible to its owner only.
//!
//! ```text
//!   /run/firn/                 0700   (or $FIRN_RUNTIME_DIR, or $XDG_RUNTIME_DIR/firn)
//!     .storage/                0700   storage latency, from earlier restores (storage_latency.rs)
//!     .agent/                  0700   sockets of this host's agent (firn-agent, place.rs)
//!     .families/               0700   a directory for each template of clones that is being filled (family.rs)
//!     .network/                0700   a socket for each network that the agent has a switch for
//!     web/                     0700   one VM
//!       supervisor.lock               held by the VM's supervisor   (lock.rs)
//!       guard.lock                    held by the guard, which restarts the supervisor
//!       watcher.lock                  held by the watcher, which does so where the guard does not
//!       journal.json                  the operation that runs, for a successor (journal.rs)
//!       control.sock                  requests of `firn` commands (control_protocol.rs)
//!       qmp.sock                      QEMU's monitor, for Firn alone; only of VMs that Firn started
//!       calls                         the memory through which the guest's applications make guest calls
//!       stores.sock                   QEMU's plugin that records their stores (store_plugin.rs)
//!       presence                      the pages that a restore has installed
//!       restore.json                  the run record of the last restore, once all memory is installed
//!       log                           the supervisor's log; nothing of the guest
//!       qemu.log                      QEMU's own standard output and error
//!       user-*                        sockets and files of the command line whose names are used elsewhere
//!       primary.json                  of a standby that an agent has started: its primary's host
//! ```
//!
//! It is lost at reboot, as the VMs are.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_vmm::FilterSide;
use thiserror::Error;

use crate::records::name::{NetworkName, VmName};

/// The environment variable that moves the runtime directory.
pub const VARIABLE: &str = "FIRN_RUNTIME_DIR";

/// Bytes in the longest path a unix socket can have: `sun_path` of unix(7), less its final zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Why the runtime directory can't be used.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// The user is not root, and has no login session with a runtime directory.
    #[error("there is no runtime directory: {VARIABLE} and XDG_RUNTIME_DIR are not set")]
    Nowhere,
    /// Another user could read or replace its contents.
    #[error("{path} is owned by user {owner} with mode {mode:04o}: it must be yours with mode 0700", path = .path.display())]
    Exposed {
        /// The directory.
        path: PathBuf,
        /// Its owner's user id.
        owner: u32,
        /// Its permission bits.
        mode: u32,
    },
    /// It exists and is something else, such as a symbolic link.
    #[error("{path} is not a directory", path = .0.display())]
    NotADirectory(PathBuf),
    /// Sockets in it could not be opened.
    #[error("{path} is too long for a socket: {len} of at most {SOCKET_PATH_BYTES_MAX} bytes", path = .0.display(), len = .0.as_os_str().len())]
    TooLong(PathBuf),
    /// The file system refused.
    #[error("can't use {path}", path = .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
}

/// The directory that holds all VMs of one user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeDir {
    path: PathBuf,
}

impl RuntimeDir {
    /// The directory that the environment names. It need not exist.
    pub fn from_env() -> Result<Self, RuntimeError> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let root = rustix::process::geteuid().is_root();
        let path = match (variable(VARIABLE), variable("XDG_RUNTIME_DIR")) {
            (Some(path), _) => absolute_path(Path::new(&path))?,
            (None, _) if root => PathBuf::from("/run/firn"),
            (None, Some(path)) => Path::new(&path).join("firn"),
            (None, None) => return Err(RuntimeError::Nowhere),
        };
        Ok(Self { path })
    }

    /// A directory of the caller's choice; absolute.
    pub fn from_path(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the directory, if it does not exist.
    ///
    /// # Errors
    /// If it can't be created, or other users can access it.
    pub fn create_private(&self) -> Result<(), RuntimeError> {
        make_private_all(&self.path)
    }

    /// The socket that leads to a network, if this host's agent has a switch for it.
    pub fn network_socket(&self, name: &NetworkName) -> PathBuf {
        self.path.join(".network").join(format!("{name}.sock"))
    }

    /// The directory of the families of clones whose template has a holder.
    pub fn families_dir(&self) -> PathBuf {
        self.path.join(".families")
    }

    /// A VM's subdirectory, which need not exist.
    pub fn vm_dir(&self, name: &VmName) -> VmDir {
        VmDir { path: self.path.join(name.as_str()), name: name.clone() }
    }

    /// Every VM that has a subdirectory, by name. Entries that have no VM's name are skipped.
    pub fn list_vms(&self) -> Result<Vec<VmDir>, RuntimeError> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(RuntimeError::Io { path: self.path.clone(), source }),
        };
        check_private(&self.path)?;
        let mut names: Vec<VmName> = entries
            .filter_map(|entry| VmName::new(entry.ok()?.file_name().into_string().ok()?).ok())
            .collect();
        names.sort();
        Ok(names.iter().map(|name| self.vm_dir(name)).collect())
    }
}

/// One VM's subdirectory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmDir {
    path: PathBuf,
    name: VmName,
}

impl VmDir {
    /// The VM's name.
    pub fn name(&self) -> &VmName {
        &self.name
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The runtime directory that contains it.
    pub fn runtime_dir(&self) -> RuntimeDir {
        RuntimeDir::from_path(self.path.parent().unwrap_or(Path::new("/")))
    }

    /// The socket for requests of `firn` commands.
    pub fn control_socket(&self) -> PathBuf {
        self.path.join("control.sock")
    }

    /// QEMU's monitor socket, for Firn alone.
    pub fn qmp_socket(&self) -> PathBuf {
        self.path.join("qmp.sock")
    }

    /// The memory through which applications of the guest make guest calls, if the VM has any.
    pub fn calls_file(&self) -> PathBuf {
        self.path.join("calls")
    }

    /// The socket on which disks are served, if the VM has any.
    pub fn disks_socket(&self) -> PathBuf {
        self.path.join("disks.sock")
    }

    /// The socket of a filter of the network card with this number, if the card has filters.
    pub fn filter_socket(&self, number: u32, side: FilterSide) -> PathBuf {
        self.path.join(format!("card{number}.{}", side.word()))
    }

    /// The socket of the plugin that records stores, if the VM has one.
    pub fn stores_socket(&self) -> PathBuf {
        self.path.join("stores.sock")
    }

    /// The lease file: the time until which the VM's frames may leave, if they need a lease. The
    /// agent writes it.
    pub fn lease_file(&self) -> PathBuf {
        self.path.join("lease")
    }

    /// Writes the lease file: the generation whose frames may leave, and until when
    /// (`CLOCK_BOOTTIME`). With `None`, none may leave.
    ///
    /// # Errors
    /// If there is no such VM, or the file can't be written.
    pub fn write_lease(&self, lease: Option<(u32, Duration)>) -> io::Result<()> {
        let (generation, until) = lease.unwrap_or_default();
        firn_net::lease::write_lease(&self.lease_file(), generation, until)
    }

    /// The journal.
    pub fn journal_file(&self) -> PathBuf {
        self.path.join("journal.json")
    }

    /// The presence file: the pages that a restore has installed.
    pub fn presence_file(&self) -> PathBuf {
        self.path.join("presence")
    }

    /// The run record of the last restore, a [`firn_restore::RunRecord`] as JSON.
    pub fn run_record(&self) -> PathBuf {
        self.path.join("restore.json")
    }

    /// The supervisor's log.
    pub fn log_file(&self) -> PathBuf {
        self.path.join("log")
    }

    /// QEMU's standard output and error.
    pub fn qemu_log(&self) -> PathBuf {
        self.path.join("qemu.log")
    }

    /// Whether the directory exists.
    pub fn exists(&self) -> bool {
        self.path.is_dir()
    }

    /// Creates the directory and the runtime directory, if they don't exist; checks that both are
    /// private.
    pub fn create_private(&self) -> Result<(), RuntimeError> {
        if let Some(base) = self.path.parent() {
            make_private_all(base)?;
        }
        make_private(&self.path)?;
        match self.control_socket().as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            true => Err(RuntimeError::TooLong(self.control_socket())),
            false => Ok(()),
        }
    }

    /// Removes everything except the lock files, so that the process that holds them can use the
    /// name again.
    pub fn remove_contents(&self) -> Result<(), RuntimeError> {
        let io = |source| RuntimeError::Io { path: self.path.clone(), source };
        for entry in fs::read_dir(&self.path).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.extension().is_some_and(|extension| extension == "lock") {
                continue;
            }
            let removed = match path.is_dir() && !path.is_symlink() {
                true => fs::remove_dir_all(&path),
                false => fs::remove_file(&path),
            };
            removed.map_err(|source| RuntimeError::Io { path, source })?;
        }
        Ok(())
    }

    /// Removes the directory with its contents. It is no error if it does not exist.
    ///
    /// Its name is free at once, so that nothing is removed of another VM that then uses the name.
    pub fn remove_dir(&self) -> Result<(), RuntimeError> {
        let gone = self.path.with_file_name(format!(".{}.{}", self.name, std::process::id()));
        let removed = fs::rename(&self.path, &gone).and_then(|()| fs::remove_dir_all(&gone));
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(RuntimeError::Io { path: self.path.clone(), source: error })
            }
            _ => Ok(()),
        }
    }
}

fn absolute_path(path: &Path) -> Result<PathBuf, RuntimeError> {
    std::path::absolute(path).map_err(|source| RuntimeError::Io { path: path.to_owned(), source })
}

/// Creates a directory that only its owner can access, unless it exists.
///
/// # Errors
/// If it can't be created, or if another user can access it or owns it.
pub fn make_private(path: &Path) -> Result<(), RuntimeError> {
    check_created(path, DirBuilder::new().mode(0o700).create(path))
}

/// Creates a private directory and its parents.
fn make_private_all(path: &Path) -> Result<(), RuntimeError> {
    check_created(path, DirBuilder::new().mode(0o700).recursive(true).create(path))
}

fn check_created(path: &Path, made: io::Result<()>) -> Result<(), RuntimeError> {
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(RuntimeError::Io { path: path.to_owned(), source: error })
        }
        _ => check_private(path),
    }
}

fn check_private(path: &Path) -> Result<(), RuntimeError> {
    let metadata = fs::symlink_metadata(path)
        .map_err(|source| RuntimeError::Io { path: path.to_owned(), source })?;
    let owner = metadata.uid();
    let mode = metadata.permissions().mode() & 0o7777;
    if !metadata.is_dir() {
        return Err(RuntimeError::NotADirectory(path.to_owned()));
    }
    if owner != rustix::process::geteuid().as_raw() || mode & 0o077 != 0 {
        return Err(RuntimeError::Exposed { path: path.to_owned(), owner, mode });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(base: &Path, name: &str) -> VmDir {
        RuntimeDir::from_path(base).vm_dir(&VmName::new(name).unwrap())
    }

    #[test]
    fn files_and_directories_have_modes_for_the_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("firn");
        let web = vm(&base, "web");
        web.create_private().unwrap();
        web.create_private().unwrap();
        for path in [&base, web.path()] {
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        }
        assert_eq!(RuntimeDir::from_path(&base).list_vms().unwrap(), [web]);
    }

    #[test]
    fn a_directory_others_can_enter_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("firn");
        fs::create_dir(&base).unwrap();
        fs::set_permissions(&base, fs::Permissions::from_mode(0o755)).unwrap();
        let refused = vm(&base, "web").create_private();
        assert!(matches!(refused, Err(RuntimeError::Exposed { mode: 0o755, .. })), "{refused:?}");
    }

    #[test]
    fn a_link_in_place_of_a_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("firn");
        vm(&base, "web").create_private().unwrap();
        std::os::unix::fs::symlink("/tmp", base.join("db")).unwrap();
        assert!(matches!(vm(&base, "db").create_private(), Err(RuntimeError::NotADirectory(_))));
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(100));
        assert!(matches!(vm(&deep, "web").create_private(), Err(RuntimeError::TooLong(_))));
    }

    #[test]
    fn clearing_keeps_the_locks() {
        let dir = tempfile::tempdir().unwrap();
        let web = vm(&dir.path().join("firn"), "web");
        web.create_private().unwrap();
        for file in ["journal.json", "supervisor.lock", "log"] {
            fs::write(web.path().join(file), "").unwrap();
        }
        fs::create_dir(web.path().join("device-state")).unwrap();
        web.remove_contents().unwrap();
        let left: Vec<_> =
            fs::read_dir(web.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["supervisor.lock"]);
        web.remove_dir().unwrap();
        web.remove_dir().unwrap();
        assert!(!web.exists());
    }

    #[test]
    fn no_runtime_directory_means_no_vms() {
        assert_eq!(RuntimeDir::from_path("/nonexistent/firn").list_vms().unwrap(), []);
    }
}
