//! Output policy of a card: the output buffer of a single VM, or that of a member of a cluster.
//!
//! Members leave a cluster one after another while their VMs run. Until every member has left, a
//! former member still unwraps frames from the others, and transmits the acknowledgements for them
//! at once.

use std::sync::Arc;
use std::time::Duration;

use firn_cluster::Epoch;
use firn_cluster::member::NicEpoch;
use firn_cluster::member::wire::is_wrapped;
use firn_cluster::output::InputFlow;

use crate::cluster_output::ClusterOutput;
use crate::output_buffer::{BufferUsage, OutputBuffer};

/// The output policy of a card.
#[derive(Debug)]
pub(crate) enum OutputPolicy {
    /// A VM outside a cluster. The second field is its former output as a member, if it was one. It
    /// is retained until a protection begins.
    Single(OutputBuffer, Option<Box<ClusterOutput>>),
    /// A member of a cluster.
    Member(Box<ClusterOutput>),
}

impl OutputPolicy {
    pub(crate) fn cluster_output(&self) -> Option<&ClusterOutput> {
        match self {
            Self::Single(..) => None,
            Self::Member(joined) => Some(joined),
        }
    }

    pub(crate) fn cluster_output_mut(&mut self) -> Option<&mut ClusterOutput> {
        match self {
            Self::Single(..) => None,
            Self::Member(joined) => Some(joined),
        }
    }

    /// Makes the VM a member. Frames that were released before still leave.
    pub(crate) fn become_member(&mut self, mut joined: ClusterOutput) {
        while let Some(frame) = self.next_frame() {
            joined.forward_frame(frame);
            self.confirm_sent(Duration::ZERO);
        }
        *self = Self::Member(Box::new(joined));
    }

    /// Makes the VM a single one. Frames that were released before still leave. Frames that other
    /// members have not received are lost, as in any network.
    pub(crate) fn become_single(&mut self, bytes_max: usize, now: Duration) {
        let mut gate = OutputBuffer::new(bytes_max, true);
        while let Some(frame) = self.next_frame() {
            gate.push_frame(&frame, now);
            self.confirm_sent(now);
        }
        let before = std::mem::replace(self, Self::Single(gate, None));
        if let (Self::Member(joined), Self::Single(_, was)) = (before, self) {
            *was = Some(joined);
        }
    }

    pub(crate) fn push_frame(&mut self, frame: &[u8], now: Duration) {
        match self {
            Self::Single(gate, _) => gate.push_frame(frame, now),
            Self::Member(joined) => joined.push_frame(frame),
        }
    }

    /// Receives a frame from the uplink, and returns the frames that the VM is to be given.
    pub(crate) fn receive_frame(&mut self, frame: Vec<u8>, now: Duration) -> Vec<Vec<u8>> {
        match self {
            Self::Single(gate, Some(was)) if is_wrapped(&frame) => {
                let given = was.receive_frame(&frame, now);
                while let Some(frame) = was.next_frame() {
                    gate.push_frame(&frame, now);
                    was.confirm_sent();
                }
                given
            }
            Self::Single(..) => vec![frame],
            Self::Member(joined) => joined.receive_frame(&frame, now),
        }
    }

    pub(crate) fn begin_protection(&mut self) {
        if let Self::Single(gate, was) = self {
            *was = None;
            gate.begin_protection();
        }
    }

    pub(crate) fn cut_epoch(&mut self, epoch: Epoch) -> Option<NicEpoch> {
        match self {
            Self::Single(gate, _) => {
                // Tests switch output commit off to observe the result.
                if firn_fault::io("net.hold").is_ok() {
                    gate.cut_epoch(epoch);
                }
                None
            }
            Self::Member(joined) => Some(joined.cut_epoch()),
        }
    }

    pub(crate) fn commit_epoch(&mut self, epoch: Epoch) {
        match self {
            Self::Single(gate, _) => gate.commit_epoch(epoch),
            Self::Member(joined) => joined.commit_epoch(epoch),
        }
    }

    pub(crate) fn open_output(&mut self) {
        match self {
            Self::Single(gate, _) => gate.open_output(),
            Self::Member(joined) => joined.open_output(),
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        match self {
            Self::Single(gate, _) => gate.is_open(),
            Self::Member(joined) => joined.is_open(),
        }
    }

    pub(crate) fn next_frame(&self) -> Option<Arc<[u8]>> {
        match self {
            Self::Single(gate, _) => gate.next_frame(),
            Self::Member(joined) => joined.next_frame(),
        }
    }

    pub(crate) fn confirm_sent(&mut self, now: Duration) {
        match self {
            Self::Single(gate, _) => gate.confirm_sent(now),
            Self::Member(joined) => joined.confirm_sent(),
        }
    }

    pub(crate) fn drop_released(&mut self) {
        match self {
            Self::Single(gate, _) => gate.drop_released(),
            Self::Member(joined) => joined.drop_excess(),
        }
    }

    pub(crate) fn set_stopping(&mut self, is_stopping: bool) {
        match self {
            Self::Single(gate, _) => gate.set_stopping(is_stopping),
            Self::Member(joined) => joined.set_stopping(is_stopping),
        }
    }

    pub(crate) fn input_flow(&self) -> InputFlow {
        match self {
            Self::Single(gate, _) => gate.input_flow(),
            Self::Member(joined) => joined.input_flow(),
        }
    }

    pub(crate) fn buffer_usage(&self) -> BufferUsage {
        match self {
            Self::Single(gate, _) => gate.buffer_usage(),
            Self::Member(joined) => joined.buffer_usage(),
        }
    }

    pub(crate) fn sent_count(&self) -> u64 {
        match self {
            Self::Single(gate, _) => gate.sent_count(),
            Self::Member(joined) => joined.sent_count(),
        }
    }

    /// Delays are not measured for a member's frames.
    pub(crate) fn release_delays(&self) -> Vec<Duration> {
        match self {
            Self::Single(gate, _) => gate.release_delays().collect(),
            Self::Member(_) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use firn_cluster::member::ClusterMembership;
    use firn_cluster::switch::MacAddress;
    use firn_cluster::{Generation, VmId};

    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    fn mac(vm: u16) -> MacAddress {
        MacAddress([2, 0, 0, 0, 0, vm as u8])
    }

    fn way(own: u16) -> OutputPolicy {
        let members = (0..2).map(|vm| (VmId(vm), mac(vm))).collect();
        let (cluster, own, generation) = (3, VmId(own), Generation(1));
        let of = ClusterMembership { cluster, own, members, generation, layout: 0 };
        OutputPolicy::Member(Box::new(ClusterOutput::without_backup(of)))
    }

    fn frame(byte: u8) -> Vec<u8> {
        [&mac(1).0[..], &mac(0).0, &[8, 0, byte]].concat()
    }

    fn leaves(way: &mut OutputPolicy) -> Vec<Vec<u8>> {
        let mut left = Vec::new();
        while let Some(frame) = way.next_frame() {
            left.push(frame.to_vec());
            way.confirm_sent(NOW);
        }
        left
    }

    /// Frames that were in flight or lost while only one of the two had left arrive once.
    #[test]
    fn who_has_left_hears_who_is_about_to() {
        let (mut a, mut b) = (way(0), way(1));
        (1..3).for_each(|byte| a.push_frame(&frame(byte), NOW));
        let under_way = leaves(&mut a);
        b.become_single(1 << 20, NOW);
        assert_eq!(
            b.receive_frame(under_way[1].clone(), NOW),
            [] as [Vec<u8>; 0],
            "the first is missing"
        );
        let complaint = leaves(&mut b).remove(0);
        assert!(a.receive_frame(complaint, NOW).is_empty());
        let again = leaves(&mut a);
        let given: Vec<_> = again.into_iter().flat_map(|it| b.receive_frame(it, NOW)).collect();
        assert_eq!(given, [frame(1), frame(2)]);
        assert!(b.receive_frame(under_way[0].clone(), NOW).is_empty());
        a.become_single(1 << 20, NOW);
        a.push_frame(&frame(3), NOW);
        let plain = leaves(&mut a);
        assert_eq!(plain, [frame(3)]);
        assert_eq!(b.receive_frame(frame(3), NOW), [frame(3)]);
    }
}
