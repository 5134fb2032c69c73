//! Failover units: what fails over as one, and has one record.

use std::fmt;

use firn_cluster::failover::reconcile::Coordinator;
use firn_control::AgentPaths;
use firn_supervisor::VmName;

/// What fails over as one: a VM that is protected alone, or a cluster of `firn cluster`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FailoverUnit {
    /// A VM that is protected alone: a cluster of one. Its record is named after the VM.
    Vm(VmName),
    /// A cluster. Its record has the cluster's name.
    Cluster(VmName),
}

impl FailoverUnit {
    /// The name of its record.
    pub(crate) fn name(&self) -> &VmName {
        match self {
            Self::Vm(name) | Self::Cluster(name) => name,
        }
    }

    /// The host that makes its global checkpoints.
    pub(super) fn coordinator(&self) -> Coordinator {
        match self {
            Self::Vm(_) => Coordinator::Primary,
            Self::Cluster(_) => Coordinator::Backup,
        }
    }

    /// Its VMs on this host. A cluster's VMs are known from their runtime directories, so that an
    /// agent that starts again knows them.
    pub(super) fn local_vms(&self, paths: &AgentPaths) -> Vec<VmName> {
        match self {
            Self::Vm(vm) => vec![vm.clone()],
            Self::Cluster(name) => paths.members_of(name),
        }
    }
}

impl fmt::Display for FailoverUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vm(vm) => write!(f, "{vm}"),
            Self::Cluster(name) => write!(f, "cluster {name}"),
        }
    }
}
