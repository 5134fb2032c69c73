//! The directory of stored clusters: a file for each, with a [`StoredCluster`] as JSON. It is
//! written whole and renamed, so a reader gets the old version or the new one.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use firn_control::{AgentPaths, StoredCluster};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, VmName, make_private};

/// The directory of stored clusters.
#[derive(Clone, Debug)]
pub(super) struct ClusterStore(PathBuf);

impl ClusterStore {
    pub(super) fn from_paths(paths: &AgentPaths) -> Self {
        Self(paths.clusters_dir())
    }

    pub(super) fn load_cluster(&self, name: &VmName) -> Result<Option<StoredCluster>, Failure> {
        let path = self.path(name);
        let doing = || format!("reading {}", path.display());
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).while_doing(doing()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).while_doing(doing()),
        }
    }

    /// Loads a cluster that must exist.
    pub(super) fn require_cluster(&self, name: &VmName) -> Result<StoredCluster, Failure> {
        self.load_cluster(name)?.ok_or_else(|| {
            let text = format!("this host has created no cluster {name}");
            let hint = "run `firn cluster` on the host that is the backup, where `firn cluster create` was run";
            Failure::new(FailureKind::Usage, text).with_hint(hint)
        })
    }

    pub(super) fn list_clusters(&self) -> Result<Vec<StoredCluster>, Failure> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.while_doing(format!("reading {}", self.0.display()))?,
        };
        let name = |file: std::ffi::OsString| {
            VmName::new(file.to_str()?.strip_suffix(".json")?.to_owned()).ok()
        };
        let names = entries.flatten().filter_map(|entry| name(entry.file_name()));
        let mut records: Vec<StoredCluster> = names
            .filter_map(|name| self.load_cluster(&name).transpose())
            .collect::<Result<_, _>>()?;
        records.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(records)
    }

    pub(super) fn store_cluster(&self, record: &StoredCluster) -> Result<(), Failure> {
        let path = self.path(&record.name);
        let doing = || format!("writing {}", path.display());
        firn_fault::pass_io_point("cluster.record").while_doing(doing())?;
        make_private(&self.0).while_doing(doing())?;
        let record = StoredCluster { trouble: None, ..record.clone() };
        let text = serde_json::to_vec(&record).while_doing(doing())?;
        let new = path.with_extension("new");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        options.open(&new).and_then(|mut file| file.write_all(&text)).while_doing(doing())?;
        fs::rename(&new, &path).while_doing(doing())
    }

    fn path(&self, name: &VmName) -> PathBuf {
        self.0.join(format!("{name}.json"))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use firn_cluster::cut::GlobalCheckpoint;
    use firn_cluster::switch::MacAddress;
    use firn_cluster::{Epoch, Generation, RequestNumber, VmId};
    use firn_control::{ClusterState, ClusterVm, HostName};
    use firn_supervisor::RuntimeDir;

    use super::*;

    pub(crate) fn record() -> StoredCluster {
        let placed = |number: u8| ClusterVm {
            vm: VmName::new(format!("vm{number}")).unwrap(),
            host: HostName::new("a").unwrap(),
            mac: MacAddress([2, 0, 0, 0, 0, number]),
        };
        let marks = [(VmId(0), Epoch(4)), (VmId(1), Epoch(9))].into();
        let (number, generation, layout, request) = (3, Generation(2), 0, RequestNumber::default());
        StoredCluster {
            name: VmName::new("shop").unwrap(),
            id: 7,
            state: ClusterState::Protected,
            interval_ms: 100,
            term: 1,
            generation: Generation(2),
            vms: vec![placed(0), placed(1)],
            checkpoint: Some(GlobalCheckpoint { number, generation, layout, request, marks }),
            trouble: None,
        }
    }

    #[test]
    fn a_record_is_there_again() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(".agent")).unwrap();
        let records = ClusterStore::from_paths(&AgentPaths::new(RuntimeDir::from_path(dir.path())));
        let shop = record();
        assert!(records.list_clusters().unwrap().is_empty());
        assert!(records.require_cluster(&shop.name).unwrap_err().to_string().contains("shop"));
        records
            .store_cluster(&StoredCluster { trouble: Some("x".to_owned()), ..shop.clone() })
            .unwrap();
        assert_eq!(records.list_clusters().unwrap(), std::slice::from_ref(&shop));
        fs::write(dir.path().join(".agent/clusters/shop.json"), "{").unwrap();
        assert!(records.require_cluster(&shop.name).unwrap_err().to_string().contains("shop.json"));
    }
}
