//! Paths of the agent's sockets and files: reserved names in the runtime directory of the VMs,
//! which only their owner can access.
//!
//! ```text
//!   /run/firn/.agent/       0700
//!     lock                         held by the agent of this directory
//!     agent.sock            0600   requests of `firn` commands (command_server)
//!     clusters/shop.json           a cluster that this host is the backup of (clusters)
//!     b/web.sock            0600   the epochs of web, to or from host b, until a process connects
//!   /run/firn/.network/     0700
//!     lan.sock              0600   VMs' network cards (switch)
//!   /run/firn/web/
//!     primary.json                 of a standby: which host its primary runs on
//!     cluster.json                 which cluster it belongs to, if that has a record
//! ```

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use firn_supervisor::{
    Failure, FailureContext as _, FailureKind, NetworkName, RuntimeDir, VmName, make_private,
};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;

use crate::host::HostName;

/// Maximum length of a unix socket's path: `sun_path` of unix(7), less its final zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The paths of an agent.
#[derive(Clone, Debug)]
pub struct AgentPaths {
    base: RuntimeDir,
}

/// The file that names the host of a standby's primary.
#[derive(Debug, Serialize, Deserialize)]
struct OriginFile {
    host: HostName,
}

/// The file that names the cluster of a VM.
#[derive(Debug, Serialize, Deserialize)]
struct ClusterFile {
    cluster: VmName,
}

/// The lock of the agent of a runtime directory, until it is dropped or the process ends.
#[derive(Debug)]
pub struct AgentLock(#[expect(dead_code, reason = "it is locked while it is open")] File);

/// A socket that listens.
#[derive(Debug)]
pub struct ListeningSocket {
    /// Accepts connections.
    pub listener: UnixListener,
    /// Its file.
    pub file: SocketFile,
}

/// The file of a socket, which is removed with this value.
#[derive(Debug)]
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another process may have removed it.
        let _ = fs::remove_file(&self.0);
    }
}

impl AgentPaths {
    /// The paths in a runtime directory of VMs.
    pub fn new(base: RuntimeDir) -> Self {
        Self { base }
    }

    /// The runtime directory of the VMs.
    pub fn runtime_dir(&self) -> &RuntimeDir {
        &self.base
    }

    /// The socket that `firn` commands connect to.
    pub fn control_socket(&self) -> PathBuf {
        self.agent_dir().join("agent.sock")
    }

    /// The socket of a VM's epochs, to or from a peer.
    pub fn epochs_socket(&self, peer: &HostName, vm: &VmName) -> PathBuf {
        self.agent_dir().join(peer.as_str()).join(format!("{vm}.sock"))
    }

    /// The socket of a network, that VMs connect to. Its directory is created.
    ///
    /// # Errors
    /// If the directory can't be created.
    pub fn network_socket(&self, name: &NetworkName) -> Result<PathBuf, Failure> {
        let path = self.base.network_socket(name);
        path.parent()
            .map_or(Ok(()), make_private)
            .while_doing("making the directory of networks")?;
        Ok(path)
    }

    /// The directory of stored clusters.
    pub fn clusters_dir(&self) -> PathBuf {
        self.agent_dir().join("clusters")
    }

    fn agent_dir(&self) -> PathBuf {
        self.base.path().join(".agent")
    }

    /// Creates the directories, and locks them for this process.
    ///
    /// # Errors
    /// If they can't be created, or another agent has locked them.
    pub fn lock_directory<'a>(
        &self,
        peers: impl Iterator<Item = &'a HostName>,
    ) -> Result<AgentLock, Failure> {
        self.base
            .create_private()
            .while_doing_as(FailureKind::Host, "making the runtime directory")?;
        let directory = self.agent_dir();
        let of_peers = peers.map(|peer| directory.join(peer.as_str()));
        for path in [directory.clone()].into_iter().chain(of_peers) {
            make_private(&path)
                .while_doing_as(FailureKind::Host, "making the agent's directory")?;
        }
        lock_file(&directory.join("lock"))
    }

    /// Listens at one of its sockets, for their owner alone. A socket that a dead agent has left is
    /// removed.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn listen_at(&self, path: PathBuf) -> Result<ListeningSocket, Failure> {
        let doing = || format!("listening at {}", path.display());
        check_length(&path)?;
        remove_if_present(&path).while_doing(doing())?;
        let listener = UnixListener::bind(&path).while_doing(doing())?;
        fs::set_permissions(&path, Permissions::from_mode(0o600)).while_doing(doing())?;
        Ok(ListeningSocket { listener, file: SocketFile(path) })
    }

    /// The host that a standby's primary runs on, if an agent has started the standby.
    pub fn primary_host(&self, vm: &VmName) -> Option<HostName> {
        let text = fs::read(self.origin_file(vm)).ok()?;
        serde_json::from_slice::<OriginFile>(&text).ok().map(|origin| origin.host)
    }

    /// Stores that host with the standby, so that it is known after the death of the agent, and
    /// removed with the standby.
    ///
    /// # Errors
    /// If the VM does not exist any more, or the disk is full.
    pub fn set_primary_host(&self, vm: &VmName, host: &HostName) -> io::Result<()> {
        write_file(&self.origin_file(vm), &OriginFile { host: host.clone() })
    }

    fn origin_file(&self, vm: &VmName) -> PathBuf {
        self.base.vm_dir(vm).path().join("primary.json")
    }

    /// The cluster that a VM of this host belongs to, if that has a record.
    pub fn cluster_of(&self, vm: &VmName) -> Option<VmName> {
        let text = fs::read(self.cluster_file(vm)).ok()?;
        serde_json::from_slice::<ClusterFile>(&text).ok().map(|belongs| belongs.cluster)
    }

    /// The VMs of this host that belong to a cluster.
    pub fn members_of(&self, cluster: &VmName) -> Vec<VmName> {
        let vms = self.base.list_vms().unwrap_or_default();
        let names = vms.iter().map(|vm| vm.name().clone());
        names.filter(|vm| self.cluster_of(vm).as_ref() == Some(cluster)).collect()
    }

    /// Stores that with the VM, as [`Self::set_primary_host`] does.
    ///
    /// # Errors
    /// If the VM does not exist any more, or the disk is full.
    pub fn set_cluster(&self, vm: &VmName, cluster: &VmName) -> io::Result<()> {
        write_file(&self.cluster_file(vm), &ClusterFile { cluster: cluster.clone() })
    }

    /// Removes the cluster of a VM.
    pub fn forget_cluster(&self, vm: &VmName) {
        if let Err(error) = remove_if_present(&self.cluster_file(vm)) {
            tracing::warn!("{vm} is still taken for a part of a cluster: {error}");
        }
    }

    fn cluster_file(&self, vm: &VmName) -> PathBuf {
        self.base.vm_dir(vm).path().join("cluster.json")
    }
}

/// Writes a whole file, and renames it.
fn write_file(file: &Path, what: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(what)?;
    let new = file.with_extension("new");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(&new)?.write_all(&text)?;
    fs::rename(new, file)
}

fn lock_file(path: &Path) -> Result<AgentLock, Failure> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(path).while_doing(format!("opening {}", path.display()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(AgentLock(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let text = format!("another agent runs here: it has locked {}", path.display());
            Err(Failure::new(FailureKind::Busy, text))
        }
        Err(error) => Err(error).while_doing(format!("locking {}", path.display())),
    }
}

/// Checks the length of a socket's path.
pub fn check_length(path: &Path) -> Result<(), Failure> {
    let len = path.as_os_str().len();
    if len <= SOCKET_PATH_BYTES_MAX {
        return Ok(());
    }
    let path = path.display();
    let text = format!("{path} is too long for a socket: {len} of {SOCKET_PATH_BYTES_MAX} bytes");
    Err(Failure::new(FailureKind::Usage, text).with_hint("give the VM or the host a shorter name"))
}

/// Removes a file that may not exist.
///
/// # Errors
/// If it exists and can't be removed.
pub fn remove_if_present(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::DirBuilder;
    use std::os::unix::fs::DirBuilderExt;

    use super::*;

    fn host(name: &str) -> HostName {
        HostName::new(name).unwrap()
    }

    #[test]
    fn there_is_one_agent() {
        let dir = tempfile::tempdir().unwrap();
        let place = AgentPaths::new(RuntimeDir::from_path(dir.path().join("run")));
        let sole = place.lock_directory([host("b")].iter()).unwrap();
        let second = place.lock_directory([].iter()).unwrap_err();
        assert_eq!(second.kind, FailureKind::Busy);
        drop(sole);
        place.lock_directory([].iter()).unwrap();
        let mode = fs::metadata(dir.path().join("run/.agent/b")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_directory_that_others_can_enter_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        fs::create_dir(&run).unwrap();
        fs::set_permissions(&run, Permissions::from_mode(0o755)).unwrap();
        let refused =
            AgentPaths::new(RuntimeDir::from_path(&run)).lock_directory([].iter()).unwrap_err();
        assert!(refused.to_string().contains("mode 0755: it must be yours"), "{refused}");
    }

    /// The user who made the directory could replace each socket in it.
    #[test]
    fn a_directory_of_somebody_elses_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let [run, own] = ["run", "own"].map(|name| dir.path().join(name));
        for path in [&run, &own, &own.join(".agent")] {
            DirBuilder::new().mode(0o700).create(path).unwrap();
        }
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root can give a directory away");
        }
        for path in [&run, &own.join(".agent")] {
            std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
        }
        for run in [run, own] {
            let refused =
                AgentPaths::new(RuntimeDir::from_path(&run)).lock_directory([].iter()).unwrap_err();
            assert!(refused.to_string().contains("is owned by user 65534"), "{refused}");
        }
    }

    #[test]
    fn a_standby_knows_its_primary_as_long_as_it_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let place = AgentPaths::new(RuntimeDir::from_path(dir.path()));
        let web = VmName::new("web").unwrap();
        assert_eq!(place.primary_host(&web), None);
        assert!(place.set_primary_host(&web, &host("a")).is_err());
        fs::create_dir(dir.path().join("web")).unwrap();
        place.set_primary_host(&web, &host("a")).unwrap();
        assert_eq!(place.primary_host(&web), Some(host("a")));
        fs::write(dir.path().join("web/primary.json"), "{").unwrap();
        assert_eq!(place.primary_host(&web), None);
    }

    #[test]
    fn vms_know_their_cluster_as_long_as_they_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("run");
        let place = AgentPaths::new(RuntimeDir::from_path(&base));
        let name = |name: &str| VmName::new(name).unwrap();
        let (web, db, shop) = (name("web"), name("db"), name("shop"));
        assert!(place.set_cluster(&web, &shop).is_err());
        for path in [&base, &base.join("web"), &base.join("db")] {
            DirBuilder::new().mode(0o700).create(path).unwrap();
        }
        place.set_cluster(&web, &shop).unwrap();
        assert_eq!((place.cluster_of(&web), place.cluster_of(&db)), (Some(shop.clone()), None));
        place.set_cluster(&db, &shop).unwrap();
        assert_eq!(place.members_of(&shop), [db, web.clone()]);
        place.forget_cluster(&web);
        place.forget_cluster(&web);
        assert_eq!(place.members_of(&shop), [name("db")]);
    }

    #[tokio::test]
    async fn a_socket_replaces_what_was_left_and_goes_with_its_listener() {
        let dir = tempfile::tempdir().unwrap();
        let place = AgentPaths::new(RuntimeDir::from_path(dir.path()));
        let path = dir.path().join("x.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = place.listen_at(path.clone()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
        let long = place.listen_at(dir.path().join("x".repeat(100))).unwrap_err();
        assert_eq!(long.kind, FailureKind::Usage);
    }
}
