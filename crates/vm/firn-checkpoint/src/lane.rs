//! Packing lanes: in which locality blocks a memory block is packed. There is one lane per vCPU,
//! one for devices, one for the sweep.
//!
//! Two vCPUs run two programs: if one touched page X just before the other touched page Y, X and Y
//! need not be related (Halite, section 5.1). Each vCPU therefore fills locality blocks of its own.
//! First touches by other threads of the hypervisor are emulated devices doing DMA, or, under KVM,
//! kernel workers that bring a page in for a vCPU which has continued in the meantime (asynchronous
//! page faults). A worker's fault is attributed to the vCPU it works for, where that can be
//! determined (see [`crate::worker`]), else to the vCPU that touched a neighbouring block before
//! it; otherwise it goes to the device lane.

use std::collections::{HashMap, HashSet};

use firn_types::{Block, ThreadId, VcpuId};

/// The lane in which a memory block is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum PackingLane {
    /// First touched by this vCPU.
    Vcpu(VcpuId),
    /// First touched by a thread that is no vCPU.
    Device,
    /// Not touched by the guest before the sweep copied it.
    Sweep,
}

/// How the lane of a fault was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultAttribution {
    /// The faulting thread is that vCPU's.
    Thread,
    /// A kernel worker faulted, on the processor where only that vCPU ran.
    Worker,
    /// By the lane of a neighbouring block.
    Neighbour,
    /// Not attributed to a vCPU.
    None,
}

/// Attributes faults to lanes.
#[derive(Debug)]
pub(crate) struct LaneAttributor {
    vcpus: HashMap<ThreadId, VcpuId>,
    threads: HashSet<ThreadId>,
    owners: HashMap<Block, VcpuId>,
}

impl LaneAttributor {
    /// For a hypervisor with these vCPU threads, and these threads in total.
    pub(crate) fn new(
        vcpus: impl IntoIterator<Item = (ThreadId, VcpuId)>,
        threads: impl IntoIterator<Item = ThreadId>,
    ) -> Self {
        let (vcpus, threads) = (vcpus.into_iter().collect(), threads.into_iter().collect());
        Self { vcpus, threads, owners: HashMap::new() }
    }

    /// The lane of a fault by a thread on a block, and how it was found. `works_for` returns the
    /// vCPU for which a kernel worker works; it is not called for threads of the hypervisor.
    pub(crate) fn attribute_fault(
        &mut self,
        tid: ThreadId,
        block: Block,
        works_for: impl FnOnce(ThreadId) -> Option<VcpuId>,
    ) -> (PackingLane, FaultAttribution) {
        let by_thread = self.vcpus.get(&tid).map(|&vcpu| (vcpu, FaultAttribution::Thread));
        let found = by_thread.or_else(|| self.attribute_worker(tid, block, works_for));
        let Some((vcpu, how)) = found else { return (PackingLane::Device, FaultAttribution::None) };
        self.owners.insert(block, vcpu);
        (PackingLane::Vcpu(vcpu), how)
    }

    fn attribute_worker(
        &self,
        tid: ThreadId,
        block: Block,
        works_for: impl FnOnce(ThreadId) -> Option<VcpuId>,
    ) -> Option<(VcpuId, FaultAttribution)> {
        if self.threads.contains(&tid) {
            return None;
        }
        let by_processor = works_for(tid).map(|vcpu| (vcpu, FaultAttribution::Worker));
        by_processor.or_else(|| Some((self.neighbour_owner(block)?, FaultAttribution::Neighbour)))
    }

    fn neighbour_owner(&self, block: Block) -> Option<VcpuId> {
        let near = [block.0.wrapping_sub(1), block.0.wrapping_add(1)];
        near.iter().find_map(|&near| self.owners.get(&Block(near))).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes() -> LaneAttributor {
        let vcpus = [(ThreadId(10), VcpuId(0)), (ThreadId(11), VcpuId(1))];
        LaneAttributor::new(vcpus, [ThreadId(1), ThreadId(10), ThreadId(11)])
    }

    fn nobody(_: ThreadId) -> Option<VcpuId> {
        None
    }

    #[test]
    fn a_vcpu_thread_is_its_vcpu() {
        assert_eq!(
            lanes().attribute_fault(ThreadId(11), Block(5), |_| Some(VcpuId(0))),
            (PackingLane::Vcpu(VcpuId(1)), FaultAttribution::Thread)
        );
    }

    #[test]
    fn a_device_thread_is_never_taken_for_a_vcpu() {
        let mut lanes = lanes();
        lanes.attribute_fault(ThreadId(10), Block(5), nobody);
        let device = lanes.attribute_fault(ThreadId(1), Block(6), |_| Some(VcpuId(0)));
        assert_eq!(device, (PackingLane::Device, FaultAttribution::None));
    }

    #[test]
    fn a_worker_works_for_a_vcpu() {
        let mut lanes = lanes();
        lanes.attribute_fault(ThreadId(10), Block(5), nobody);
        let worker = lanes.attribute_fault(ThreadId(99), Block(6), |tid| {
            (tid == ThreadId(99)).then_some(VcpuId(1))
        });
        assert_eq!(worker, (PackingLane::Vcpu(VcpuId(1)), FaultAttribution::Worker));
    }

    #[test]
    fn a_worker_follows_its_neighbour() {
        let mut lanes = lanes();
        assert_eq!(
            lanes.attribute_fault(ThreadId(99), Block(6), nobody),
            (PackingLane::Device, FaultAttribution::None)
        );
        lanes.attribute_fault(ThreadId(10), Block(5), nobody);
        for block in [Block(6), Block(7)] {
            let followed = (PackingLane::Vcpu(VcpuId(0)), FaultAttribution::Neighbour);
            assert_eq!(lanes.attribute_fault(ThreadId(99), block, nobody), followed);
        }
    }
}
