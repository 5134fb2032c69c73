//! Paths of the agent's sockets and files: reserved names in the runtime directory of the VMs,
//! which only their owner can access. Modules in parentheses are those of `firn-agent`.
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

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use firn_supervisor::{
    Failure, FailureContext as _, NetworkName, RuntimeDir, VmName, make_private,
};
use serde::{Deserialize, Serialize};

use crate::host::HostName;

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

    /// Whether this host is drained, and accepts no standbys.
    pub fn is_drained(&self) -> bool {
        self.drained_file().exists()
    }

    /// Stores whether this host is drained. That stays so when the agent is started again.
    ///
    /// # Errors
    /// If the file can't be made or removed.
    pub fn set_drained(&self, is_drained: bool) -> io::Result<()> {
        match is_drained {
            true => write_file(&self.drained_file(), &()),
            false => remove_if_present(&self.drained_file()),
        }
    }

    fn drained_file(&self) -> PathBuf {
        self.agent_dir().join("drained")
    }

    /// The agent's own directory, with its lock, its sockets and one directory for each peer.
    pub fn agent_dir(&self) -> PathBuf {
        self.base.path().join(".agent")
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
    use std::os::unix::fs::DirBuilderExt as _;

    use super::*;

    fn host(name: &str) -> HostName {
        HostName::new(name).unwrap()
    }

    #[test]
    fn a_standby_knows_its_primary_as_long_as_it_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let paths = AgentPaths::new(RuntimeDir::from_path(dir.path()));
        let web = VmName::new("web").unwrap();
        assert_eq!(paths.primary_host(&web), None);
        assert!(paths.set_primary_host(&web, &host("a")).is_err());
        fs::create_dir(dir.path().join("web")).unwrap();
        paths.set_primary_host(&web, &host("a")).unwrap();
        assert_eq!(paths.primary_host(&web), Some(host("a")));
        fs::write(dir.path().join("web/primary.json"), "{").unwrap();
        assert_eq!(paths.primary_host(&web), None);
    }

    #[test]
    fn vms_know_their_cluster_as_long_as_they_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("run");
        let paths = AgentPaths::new(RuntimeDir::from_path(&base));
        let name = |name: &str| VmName::new(name).unwrap();
        let (web, db, shop) = (name("web"), name("db"), name("shop"));
        assert!(paths.set_cluster(&web, &shop).is_err());
        for path in [&base, &base.join("web"), &base.join("db")] {
            DirBuilder::new().mode(0o700).create(path).unwrap();
        }
        paths.set_cluster(&web, &shop).unwrap();
        assert_eq!((paths.cluster_of(&web), paths.cluster_of(&db)), (Some(shop.clone()), None));
        paths.set_cluster(&db, &shop).unwrap();
        assert_eq!(paths.members_of(&shop), [db, web.clone()]);
        paths.forget_cluster(&web);
        paths.forget_cluster(&web);
        assert_eq!(paths.members_of(&shop), [name("db")]);
    }
}
