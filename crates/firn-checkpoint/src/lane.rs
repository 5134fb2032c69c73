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

use firn_types::{Block, Tid, VcpuId};

/// The lane in which a memory block is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Lane {
    /// First touched by this vCPU.
    Vcpu(VcpuId),
    /// First touched by a thread that is no vCPU.
    Device,
    /// Not touched by the guest before the sweep copied it.
    Sweep,
}

/// How the lane of a fault was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attribution {
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
pub(crate) struct Lanes {
    vcpus: HashMap<Tid, VcpuId>,
    threads: HashSet<Tid>,
    owners: HashMap<Block, VcpuId>,
}

impl Lanes {
    /// For a hypervisor with these vCPU threads, and these threads in total.
    pub(crate) fn new(
        vcpus: impl IntoIterator<Item = (Tid, VcpuId)>,
        threads: impl IntoIterator<Item = Tid>,
    ) -> Self {
        let (vcpus, threads) = (vcpus.into_iter().collect(), threads.into_iter().collect());
        Self { vcpus, threads, owners: HashMap::new() }
    }

    /// The lane of a fault by a thread on a block, and how it was found. `works_for` returns the
    /// vCPU for which a kernel worker works; it is not called for threads of the hypervisor.
    pub(crate) fn attribute(
        &mut self,
        tid: Tid,
        block: Block,
        works_for: impl FnOnce(Tid) -> Option<VcpuId>,
    ) -> (Lane, Attribution) {
        let by_thread = self.vcpus.get(&tid).map(|&vcpu| (vcpu, Attribution::Thread));
        let found = by_thread.or_else(|| self.worker(tid, block, works_for));
        let Some((vcpu, how)) = found else { return (Lane::Device, Attribution::None) };
        self.owners.insert(block, vcpu);
        (Lane::Vcpu(vcpu), how)
    }

    fn worker(
        &self,
        tid: Tid,
        block: Block,
        works_for: impl FnOnce(Tid) -> Option<VcpuId>,
    ) -> Option<(VcpuId, Attribution)> {
        if self.threads.contains(&tid) {
            return None;
        }
        let by_processor = works_for(tid).map(|vcpu| (vcpu, Attribution::Worker));
        by_processor.or_else(|| Some((self.neighbour(block)?, Attribution::Neighbour)))
    }

    fn neighbour(&self, block: Block) -> Option<VcpuId> {
        let near = [block.0.wrapping_sub(1), block.0.wrapping_add(1)];
        near.iter().find_map(|&near| self.owners.get(&Block(near))).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes() -> Lanes {
        let vcpus = [(Tid(10), VcpuId(0)), (Tid(11), VcpuId(1))];
        Lanes::new(vcpus, [Tid(1), Tid(10), Tid(11)])
    }

    fn nobody(_: Tid) -> Option<VcpuId> {
        None
    }

    #[test]
    fn a_vcpu_thread_is_its_vcpu() {
        assert_eq!(
            lanes().attribute(Tid(11), Block(5), |_| Some(VcpuId(0))),
            (Lane::Vcpu(VcpuId(1)), Attribution::Thread)
        );
    }

    #[test]
    fn a_device_thread_is_no_vcpu_whatever_lies_beside() {
        let mut lanes = lanes();
        lanes.attribute(Tid(10), Block(5), nobody);
        let device = lanes.attribute(Tid(1), Block(6), |_| Some(VcpuId(0)));
        assert_eq!(device, (Lane::Device, Attribution::None));
    }

    #[test]
    fn a_worker_works_for_a_vcpu() {
        let mut lanes = lanes();
        lanes.attribute(Tid(10), Block(5), nobody);
        let worker =
            lanes.attribute(Tid(99), Block(6), |tid| (tid == Tid(99)).then_some(VcpuId(1)));
        assert_eq!(worker, (Lane::Vcpu(VcpuId(1)), Attribution::Worker));
    }

    #[test]
    fn a_worker_follows_its_neighbour() {
        let mut lanes = lanes();
        assert_eq!(lanes.attribute(Tid(99), Block(6), nobody), (Lane::Device, Attribution::None));
        lanes.attribute(Tid(10), Block(5), nobody);
        for block in [Block(6), Block(7)] {
            let followed = (Lane::Vcpu(VcpuId(0)), Attribution::Neighbour);
            assert_eq!(lanes.attribute(Tid(99), block, nobody), followed);
        }
    }
}
