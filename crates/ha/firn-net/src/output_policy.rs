//! Output policy of a network card: which of two components decides when the card's frames leave.
//! Pure.
//!
//! ```text
//!                         Single: OutputBuffer      a frame waits until its epoch is committed
//!   a frame of the VM -->   or
//!                         Member: ClusterOutput     to other members: at once; to others: once a global
//!                                                   checkpoint contains it
//!
//!             become_member                become_single                     begin_protection
//!   Single -----------------> Member ------------------> Single, with its ------------------> Single
//!                                                        former ClusterOutput
//! ```
//!
//! Members leave a cluster one after another while their VMs run. So a VM that has left still
//! receives wrapped frames from the remaining members. Its former [`ClusterOutput`] unwraps these
//! frames, and the acknowledgements for them leave through the output buffer. A new protection
//! ends that.

use std::sync::Arc;
use std::time::Duration;

use firn_cluster::Epoch;
use firn_cluster::member::NicEpoch;
use firn_cluster::member::wire::is_wrapped;
use firn_cluster::output::InputFlow;

use crate::cluster_output::ClusterOutput;
use crate::output_buffer::{BufferUsage, OutputBuffer};

/// The component that decides when the frames of a card leave. All functions call the one that
/// applies to the VM now.
#[derive(Debug)]
pub(crate) enum OutputPolicy {
    /// The VM is in no cluster. The second field is its former output as a member of a cluster, if
    /// it was one: it is retained until a protection begins.
    Single(OutputBuffer, Option<Box<ClusterOutput>>),
    /// The VM is a member of a cluster.
    Member(Box<ClusterOutput>),
}

impl OutputPolicy {
    /// The output as a member of a cluster. `None` if the VM is no member now.
    pub(crate) fn cluster_output(&self) -> Option<&ClusterOutput> {
        match self {
            Self::Single(..) => None,
            Self::Member(joined) => Some(joined),
        }
    }

    /// The same, to change it.
    pub(crate) fn cluster_output_mut(&mut self) -> Option<&mut ClusterOutput> {
        match self {
            Self::Single(..) => None,
            Self::Member(joined) => Some(joined),
        }
    }

    /// Makes the VM a member of a cluster. Frames that were released before still leave. No
    /// frame may be buffered now; the callers make sure of that.
    pub(crate) fn become_member(&mut self, mut joined: ClusterOutput) {
        while let Some(frame) = self.next_frame() {
            joined.forward_frame(frame);
            self.confirm_sent(Duration::ZERO);
        }
        *self = Self::Member(Box::new(joined));
    }

    /// Makes the VM a single VM again, whose output is open. Frames that were released before still
    /// leave. Frames that other members have not received are lost, as in any network.
    pub(crate) fn become_single(&mut self, bytes_max: usize, now: Duration) {
        let mut buffer = OutputBuffer::new(bytes_max, true);
        while let Some(frame) = self.next_frame() {
            buffer.push_frame(&frame, now);
            self.confirm_sent(now);
        }
        let before = std::mem::replace(self, Self::Single(buffer, None));
        if let (Self::Member(joined), Self::Single(_, former)) = (before, self) {
            *former = Some(joined);
        }
    }

    /// Takes a frame that the VM has sent.
    pub(crate) fn push_frame(&mut self, frame: &[u8], now: Duration) {
        match self {
            Self::Single(buffer, _) => buffer.push_frame(frame, now),
            Self::Member(joined) => joined.push_frame(frame),
        }
    }

    /// Receives a frame from the uplink, and returns the frames to deliver to the VM. A wrapped
    /// frame of another member is unwrapped, also by a former member.
    pub(crate) fn receive_frame(&mut self, frame: Vec<u8>, now: Duration) -> Vec<Vec<u8>> {
        match self {
            Self::Single(buffer, Some(former)) if is_wrapped(&frame) => {
                let given = former.receive_frame(&frame, now);
                while let Some(frame) = former.next_frame() {
                    buffer.push_frame(&frame, now);
                    former.confirm_sent();
                }
                given
            }
            Self::Single(..) => vec![frame],
            Self::Member(joined) => joined.receive_frame(&frame, now),
        }
    }

    /// Begins a protection of a single VM. Its output stays open or closed as it is until the first
    /// cut, which closes it. From now on the VM unwraps no more frames of its former cluster. For a
    /// member this does nothing.
    pub(crate) fn begin_protection(&mut self) {
        if let Self::Single(buffer, former) = self {
            *former = None;
            buffer.begin_protection();
        }
    }

    /// Ends an epoch while the VM is paused. From now on the frames of a single VM are buffered
    /// until their epochs are committed. For a member, returns the state of its network card at the
    /// end of the epoch, which belongs to the epoch and is sent to the standby.
    pub(crate) fn cut_epoch(&mut self, epoch: Epoch) -> Option<NicEpoch> {
        match self {
            Self::Single(buffer, _) => {
                // Tests switch output commit off to observe the result.
                if firn_fault::pass_io_point("net.hold").is_ok() {
                    buffer.cut_epoch(epoch);
                }
                None
            }
            Self::Member(joined) => Some(joined.cut_epoch()),
        }
    }

    /// Records that the standby has committed an epoch. Of a single VM, this releases the frames of
    /// this and earlier epochs. Of a member, frames to the outside also wait for the global
    /// checkpoint.
    pub(crate) fn commit_epoch(&mut self, epoch: Epoch) {
        match self {
            Self::Single(buffer, _) => buffer.commit_epoch(epoch),
            Self::Member(joined) => joined.commit_epoch(epoch),
        }
    }

    /// Opens the output: releases all buffered frames, and from now on each frame as it comes. The
    /// caller knows that no failover can undo the VM's state any more.
    pub(crate) fn open_output(&mut self) {
        match self {
            Self::Single(buffer, _) => buffer.open_output(),
            Self::Member(joined) => joined.open_output(),
        }
    }

    /// Whether frames leave as they come, without waiting for a commit.
    pub(crate) fn is_open(&self) -> bool {
        match self {
            Self::Single(buffer, _) => buffer.is_open(),
            Self::Member(joined) => joined.is_open(),
        }
    }

    /// The next released frame, to be transmitted. It stays first until [`Self::confirm_sent`].
    pub(crate) fn next_frame(&self) -> Option<Arc<[u8]>> {
        match self {
            Self::Single(buffer, _) => buffer.next_frame(),
            Self::Member(joined) => joined.next_frame(),
        }
    }

    /// Removes the next released frame, because it has been transmitted.
    pub(crate) fn confirm_sent(&mut self, now: Duration) {
        match self {
            Self::Single(buffer, _) => buffer.confirm_sent(now),
            Self::Member(joined) => joined.confirm_sent(),
        }
    }

    /// Drops released frames, because the uplink is not connected. A single VM loses all of them,
    /// as with an unplugged cable. A member retains the newest (1 MiB), because after a failover it
    /// has frames to transmit before its uplink is connected.
    pub(crate) fn drop_released(&mut self) {
        match self {
            Self::Single(buffer, _) => buffer.drop_released(),
            Self::Member(joined) => joined.drop_excess(),
        }
    }

    /// Sets whether Firn is about to pause the VM. While it is, the output accepts some frames
    /// beyond its bound: when QEMU stops a VM, it drops frames that still wait for room.
    pub(crate) fn set_pausing(&mut self, is_pausing: bool) {
        match self {
            Self::Single(buffer, _) => buffer.set_pausing(is_pausing),
            Self::Member(joined) => joined.set_pausing(is_pausing),
        }
    }

    /// Whether to read more frames from the VM's socket. Not reading slows the guest's sending
    /// down.
    pub(crate) fn input_flow(&self) -> InputFlow {
        match self {
            Self::Single(buffer, _) => buffer.input_flow(),
            Self::Member(joined) => joined.input_flow(),
        }
    }

    /// The count of buffered frames, and their bytes. Of a member, this includes frames that were
    /// sent and are retained until their receivers have committed them.
    pub(crate) fn buffer_usage(&self) -> BufferUsage {
        match self {
            Self::Single(buffer, _) => buffer.buffer_usage(),
            Self::Member(joined) => joined.buffer_usage(),
        }
    }

    /// The count of frames that were transmitted.
    pub(crate) fn sent_count(&self) -> u64 {
        match self {
            Self::Single(buffer, _) => buffer.sent_count(),
            Self::Member(joined) => joined.sent_count(),
        }
    }

    /// The delays of a single VM's newest frames, from the VM's socket to the uplink. Empty for a
    /// member, whose delays are not measured.
    pub(crate) fn release_delays(&self) -> Vec<Duration> {
        match self {
            Self::Single(buffer, _) => buffer.release_delays().collect(),
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
    fn a_vm_that_left_its_cluster_still_exchanges_frames_with_a_member() {
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
