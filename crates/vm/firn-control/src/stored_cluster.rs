//! The document of a cluster, as its backup stores it and as the agent sends it to commands.
//!
//! ```text
//!             protect                    failover                        all run
//!   made ----------------> protected ---------------> failing over ----------------> failed over
//!    ^                         |                        (may be requested again)
//!    '------- release ---------'
//! ```

use firn_cluster::cut::GlobalCheckpoint;
use firn_cluster::switch::MacAddress;
use firn_cluster::{Epoch, Generation, VmId};
use firn_supervisor::VmName;
use serde::{Deserialize, Serialize};

use crate::host::HostName;

/// The state of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterState {
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
pub struct ClusterVm {
    /// Its name.
    pub vm: VmName,
    /// The host that runs it.
    pub host: HostName,
    /// The address of its network card.
    pub mac: MacAddress,
}

/// A cluster as its backup stores it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredCluster {
    /// Its name.
    pub name: VmName,
    /// Its number in encapsulated frames.
    pub id: u32,
    /// Its state.
    pub state: ClusterState,
    /// Milliseconds from one global checkpoint to the next.
    pub interval_ms: u64,
    /// Number of the initiators that have made global checkpoints so far, one after another.
    pub term: u32,
    /// The newest generation: each protection and each failover begins one.
    pub generation: Generation,
    /// Its VMs; a VM's number is its index here.
    pub vms: Vec<ClusterVm>,
    /// The newest global checkpoint since the protection began: a failover runs the VMs from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<GlobalCheckpoint>,
    /// Why no new checkpoint is made, if none is. Not stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

impl StoredCluster {
    /// The VMs with their numbers.
    pub fn numbered_vms(&self) -> impl Iterator<Item = (VmId, &ClusterVm)> {
        (0..).map(VmId).zip(&self.vms)
    }

    /// The VMs with their epochs in the newest global checkpoint.
    pub fn marked_vms(&self) -> impl Iterator<Item = (&ClusterVm, Epoch)> {
        self.numbered_vms().filter_map(|(vm, placed)| Some((placed, self.epoch_of(vm)?)))
    }

    /// A VM's epoch in the newest global checkpoint.
    pub fn epoch_of(&self, vm: VmId) -> Option<Epoch> {
        self.checkpoint.as_ref()?.marks.get(&vm).copied()
    }
}

#[cfg(test)]
mod tests {
    use firn_cluster::RequestNumber;

    use super::*;

    fn shop(checkpoint: Option<GlobalCheckpoint>) -> StoredCluster {
        let name = VmName::new("shop").unwrap();
        let (state, generation) = (ClusterState::FailingOver, Generation(2));
        let vms = (0..2).map(|number| ClusterVm {
            vm: VmName::new(format!("vm{number}")).unwrap(),
            host: HostName::new("a").unwrap(),
            mac: MacAddress([2, 0, 0, 0, 0, number]),
        });
        let (interval_ms, term, vms, trouble) = (100, 1, vms.collect(), None);
        StoredCluster {
            name,
            id: 7,
            state,
            interval_ms,
            term,
            generation,
            vms,
            checkpoint,
            trouble,
        }
    }

    fn checkpoint() -> GlobalCheckpoint {
        let marks = [(VmId(1), Epoch(9))].into();
        let (number, generation, layout, request) = (3, Generation(2), 0, RequestNumber::default());
        GlobalCheckpoint { number, generation, layout, request, marks }
    }

    #[test]
    fn a_vm_without_a_mark_has_no_epoch() {
        let marked = shop(Some(checkpoint()));
        assert_eq!((marked.epoch_of(VmId(0)), marked.epoch_of(VmId(1))), (None, Some(Epoch(9))));
        let names = |of: &StoredCluster| -> Vec<String> {
            of.marked_vms().map(|(placed, epoch)| format!("{} {epoch}", placed.vm)).collect()
        };
        assert_eq!(names(&marked), [format!("vm1 {}", Epoch(9))]);
        assert!(names(&shop(None)).is_empty());
    }

    /// Files of earlier agents are read, and commands of other versions read the answer.
    #[test]
    fn the_document_keeps_its_form() {
        let stored = shop(None);
        let text = r#"{"name":"shop","id":7,"state":"failing-over","interval_ms":100,"term":1,"generation":2,"vms":[{"vm":"vm0","host":"a","mac":[2,0,0,0,0,0]},{"vm":"vm1","host":"a","mac":[2,0,0,0,0,1]}]}"#;
        assert_eq!(serde_json::to_string(&stored).unwrap(), text);
        assert_eq!(serde_json::from_str::<StoredCluster>(text).unwrap(), stored);
    }
}
