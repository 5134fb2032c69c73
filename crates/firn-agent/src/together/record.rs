//! The stored state of a cluster: a file in the agent's directory. It is written whole and renamed,
//! so a reader gets the old version or the new one.
//!
//! ```text
//!             protect                    failover                        all run
//!   made ----------------> protected ---------------> failing over ----------------> failed over
//!    ^                         |                        (may be requested again)
//!    '------- release ---------'
//! ```

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use firn_cluster::cut::GlobalCheckpoint;
use firn_cluster::member::Membership;
use firn_cluster::switch::Mac;
use firn_cluster::{Epoch, Generation, Vm};
use firn_supervisor::{Context as _, Failure, FailureKind, VmName, make_private};
use serde::{Deserialize, Serialize};

use crate::host::HostName;
use crate::place::Place;

/// The state of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Its VMs run, each by itself.
    Made,
    /// Its VMs are protected, and global checkpoints of them are made.
    Protected,
    /// Its VMs are being started on this host.
    FailingOver,
    /// They run on this host, each by itself.
    FailedOver,
}

/// A VM of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// Its name.
    pub vm: VmName,
    /// The host that runs it.
    pub host: HostName,
    /// The address of its network card.
    pub mac: Mac,
}

/// A cluster as its backup stores it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Its name.
    pub name: VmName,
    /// Its number in encapsulated frames.
    pub id: u32,
    /// Its state.
    pub state: State,
    /// Milliseconds from one global checkpoint to the next.
    pub interval_ms: u64,
    /// Number of the initiators that have made global checkpoints so far, one after another.
    pub term: u32,
    /// The newest generation: each protection and each failover begins one.
    pub generation: Generation,
    /// Its VMs; a VM's number is its index here.
    pub vms: Vec<Placed>,
    /// The newest global checkpoint since the protection began: a failover runs the VMs from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<GlobalCheckpoint>,
    /// Why no new checkpoint is made, if none is. Not stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

impl Record {
    /// The VMs with their numbers.
    pub(super) fn numbered(&self) -> impl Iterator<Item = (Vm, &Placed)> {
        (0..).map(Vm).zip(&self.vms)
    }

    /// The membership that one of its VMs needs.
    pub(super) fn membership(&self, own: Vm) -> Membership {
        let (cluster, generation, layout) = (self.id, self.generation, 0);
        let members = self.numbered().map(|(vm, placed)| (vm, placed.mac)).collect();
        Membership { cluster, own, members, generation, layout }
    }

    /// The VMs with their epochs in the newest global checkpoint.
    pub fn marks(&self) -> impl Iterator<Item = (&Placed, Epoch)> {
        self.numbered().filter_map(|(vm, placed)| Some((placed, self.epoch(vm)?)))
    }

    /// A VM's epoch in the newest global checkpoint.
    pub(super) fn epoch(&self, vm: Vm) -> Option<Epoch> {
        self.checkpoint.as_ref()?.marks.get(&vm).copied()
    }
}

/// The directory of stored clusters.
#[derive(Clone, Debug)]
pub(super) struct Records(PathBuf);

impl Records {
    pub(super) fn of(place: &Place) -> Self {
        Self(place.clusters())
    }

    pub(super) fn load(&self, name: &VmName) -> Result<Option<Record>, Failure> {
        let path = self.path(name);
        let doing = || format!("reading {}", path.display());
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).doing(doing()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).doing(doing()),
        }
    }

    /// Loads a cluster that must exist.
    pub(super) fn known(&self, name: &VmName) -> Result<Record, Failure> {
        self.load(name)?.ok_or_else(|| {
            let text = format!("this host has created no cluster {name}");
            let hint = "run `firn cluster` on the host that is the backup, where `firn cluster create` was run";
            Failure::new(FailureKind::Usage, text).hint(hint)
        })
    }

    pub(super) fn list(&self) -> Result<Vec<Record>, Failure> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.doing(format!("reading {}", self.0.display()))?,
        };
        let name = |file: std::ffi::OsString| {
            VmName::new(file.to_str()?.strip_suffix(".json")?.to_owned()).ok()
        };
        let names = entries.flatten().filter_map(|entry| name(entry.file_name()));
        let mut records: Vec<Record> =
            names.filter_map(|name| self.load(&name).transpose()).collect::<Result<_, _>>()?;
        records.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(records)
    }

    pub(super) fn store(&self, record: &Record) -> Result<(), Failure> {
        let path = self.path(&record.name);
        let doing = || format!("writing {}", path.display());
        firn_fault::io("cluster.record").doing(doing())?;
        make_private(&self.0).doing(doing())?;
        let record = Record { trouble: None, ..record.clone() };
        let text = serde_json::to_vec(&record).doing(doing())?;
        let new = path.with_extension("new");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        options.open(&new).and_then(|mut file| file.write_all(&text)).doing(doing())?;
        fs::rename(&new, &path).doing(doing())
    }

    fn path(&self, name: &VmName) -> PathBuf {
        self.0.join(format!("{name}.json"))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use firn_cluster::RequestNumber;
    use firn_supervisor::RuntimeDir;

    use super::*;

    pub(crate) fn record() -> Record {
        let placed = |number: u8| Placed {
            vm: VmName::new(format!("vm{number}")).unwrap(),
            host: HostName::new("a").unwrap(),
            mac: Mac([2, 0, 0, 0, 0, number]),
        };
        let marks = [(Vm(0), Epoch(4)), (Vm(1), Epoch(9))].into();
        let (number, generation, layout, request) = (3, Generation(2), 0, RequestNumber::default());
        Record {
            name: VmName::new("shop").unwrap(),
            id: 7,
            state: State::Protected,
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
        let records = Records::of(&Place::new(RuntimeDir::at(dir.path())));
        let shop = record();
        assert!(records.list().unwrap().is_empty());
        assert!(records.known(&shop.name).unwrap_err().to_string().contains("shop"));
        records.store(&Record { trouble: Some("x".to_owned()), ..shop.clone() }).unwrap();
        assert_eq!(records.list().unwrap(), std::slice::from_ref(&shop));
        assert_eq!((shop.epoch(Vm(1)), shop.epoch(Vm(2))), (Some(Epoch(9)), None));
        fs::write(dir.path().join(".agent/clusters/shop.json"), "{").unwrap();
        assert!(records.known(&shop.name).unwrap_err().to_string().contains("shop.json"));
    }
}
