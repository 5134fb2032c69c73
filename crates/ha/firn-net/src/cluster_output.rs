//! Cluster output: the card of a VM that is a member of a cluster. `firn-cluster` (`member`)
//! decides which frames may leave, and when. Pure.
//!
//! ```text
//!   the VM ---> MemberNic -----> to other members: wrapped, at once ------------> the network
//!                   |            to all others: unchanged, once committed
//!   the VM <--------'<---------- unwrapped, each once and in order <-------------
//! ```
//!
//! While the VM is about to be paused, and while it is paused, it is given no frames: at the cut,
//! the frames that its state has received must be the same as the frames that are counted as
//! received.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use firn_cluster::cut::{FrameStamp, MarkAnswer};
use firn_cluster::member::wire::MemberMessage;
use firn_cluster::member::{
    ClusterMembership, MemberAction, MemberNic, MemberTimes, NicEpoch, StandbyNic,
};
use firn_cluster::output::InputFlow;
use firn_cluster::{Epoch, FrameNumber, Generation, RequestNumber};

use crate::output_buffer::{BufferUsage, OVERSHOOT_BYTES_MAX};
use crate::port::BYTES_MAX;

/// The maximum number of bytes that wait for a process at the uplink.
const WAITING_BYTES_MAX: usize = 1 << 20;

/// The output and input of a member's card.
#[derive(Debug)]
pub struct ClusterOutput {
    of: ClusterMembership,
    member: MemberNic,
    leaving: VecDeque<OutgoingFrame>,
    leaving_bytes: usize,
    is_pausing: bool,
    over: usize,
    left: u64,
    global: Epoch,
    newest_sent: FrameNumber,
}

/// A frame that may leave. It has a sequence number if it goes to the outside and its backup knows
/// of it.
#[derive(Debug)]
struct OutgoingFrame(Option<FrameNumber>, Arc<[u8]>);

impl ClusterOutput {
    /// A member that has no backup: its output is open.
    pub fn without_backup(of: ClusterMembership) -> Self {
        Self::resume_from(of, Epoch(0), StandbyNic::new(Epoch(0), BYTES_MAX))
    }

    /// A member that continues from the end of `base`, and has no backup yet. It sends frames that
    /// were in flight again.
    pub fn resume_from(of: ClusterMembership, base: Epoch, kept: StandbyNic) -> Self {
        let member = MemberNic::new(&of, MemberTimes::default(), base, kept);
        let leaving = VecDeque::new();
        let (leaving_bytes, is_pausing, over, left) = (0, false, 0, 0);
        let (global, gone) = (Epoch(0), FrameNumber(0));
        let mut joined = Self {
            of,
            member,
            leaving,
            leaving_bytes,
            is_pausing,
            over,
            left,
            global,
            newest_sent: gone,
        };
        joined.open_output();
        joined
    }

    /// The membership that it was created with.
    pub fn membership(&self) -> &ClusterMembership {
        &self.of
    }

    /// Whether no epoch was cut yet, so that a protection can begin.
    pub fn is_new(&self) -> bool {
        self.member.running_epoch() == Epoch(1)
    }

    /// Takes a frame that the VM has sent.
    pub fn push_frame(&mut self, frame: &[u8]) {
        self.over = match self.member.input_flow() {
            InputFlow::Go => 0,
            InputFlow::Stop => self.over + frame.len(),
        };
        let actions = self.member.send_frame(frame);
        self.apply_actions(actions);
    }

    /// Transmits a frame unchanged: it was released before the VM became a member.
    pub fn forward_frame(&mut self, frame: Arc<[u8]>) {
        self.queue_frame(OutgoingFrame(None, frame));
    }

    fn queue_frame(&mut self, leaving: OutgoingFrame) {
        self.leaving_bytes += leaving.1.len();
        self.leaving.push_back(leaving);
    }

    /// Receives a frame from the uplink while the VM is not paused, and returns the frames that the
    /// VM is to be given.
    pub fn receive_frame(&mut self, frame: &[u8], now: Duration) -> Vec<Vec<u8>> {
        let actions = match strip_marker(frame) {
            Some(frame) => self.member.receive_frame(&frame, now),
            None => self.member.receive_frame(frame, now),
        };
        self.apply_actions(actions)
    }

    /// Ends an epoch while the VM is paused. Returns the state of the member that belongs to the
    /// epoch.
    pub fn cut_epoch(&mut self) -> NicEpoch {
        let of = self.member.cut_epoch();
        // Tests switch output commit off to observe the result.
        if firn_fault::pass_io_point("net.hold").is_err() {
            self.open_output();
        }
        of
    }

    /// Records that the backup has committed an epoch.
    pub fn commit_epoch(&mut self, epoch: Epoch) {
        let actions = self.member.commit_epoch(epoch);
        self.apply_actions(actions);
    }

    /// Records a global checkpoint, which includes this VM at that epoch.
    pub fn record_global_checkpoint(&mut self, epoch: Epoch) {
        self.global = self.global.max(epoch);
        let actions = self.member.record_global_checkpoint(epoch);
        self.apply_actions(actions);
    }

    /// The newest epoch that belongs to a global checkpoint.
    pub fn global_epoch(&self) -> Epoch {
        self.global
    }

    /// The newest frame to the outside that has been sent.
    pub fn released_up_to(&self) -> FrameNumber {
        self.newest_sent
    }

    /// Answers a request for a mark; `None` until there is a mark.
    pub fn request_mark(&mut self, of: Generation, request: RequestNumber) -> Option<MarkAnswer> {
        self.member.request_mark(of, request)
    }

    /// Whether a received frame waits for the running epoch to be cut.
    pub fn is_cut_needed(&self) -> bool {
        self.member.is_cut_needed()
    }

    /// Whether a received frame has waited for a cut, and can be delivered now.
    pub fn has_deliverable(&self) -> bool {
        self.member.has_deliverable()
    }

    /// Delivers a frame that has waited for a cut, if it can be delivered now. Returns the frames
    /// that the VM, which is not paused, is to be given.
    pub fn deliver_waiting(&mut self, now: Duration) -> Vec<Vec<u8>> {
        let actions = self.member.deliver_waiting(now);
        self.apply_actions(actions)
    }

    /// Opens the output: no failover can undo anything any more.
    pub fn open_output(&mut self) {
        let actions = self.member.open_output();
        self.apply_actions(actions);
    }

    /// Whether frames are released as they are sent.
    pub fn is_open(&self) -> bool {
        self.member.is_open()
    }

    /// Whether the receivers have the frames that were released when the output was opened.
    pub fn is_output_received(&self) -> bool {
        self.member.is_output_received()
    }

    /// Advances the time. A member that can't send now requests no acknowledgements.
    pub fn advance_time(&mut self, now: Duration) {
        if self.leaving.is_empty() {
            let actions = self.member.advance_time(now);
            self.apply_actions(actions);
        }
    }

    /// The next released frame.
    pub fn next_frame(&self) -> Option<Arc<[u8]>> {
        self.leaving.front().map(|OutgoingFrame(_, frame)| Arc::clone(frame))
    }

    /// Removes the next released frame, which has been sent.
    pub fn confirm_sent(&mut self) {
        self.left += u64::from(self.pop_frame().is_some());
    }

    /// Removes the next released frame, which was sent or is dropped.
    fn pop_frame(&mut self) -> Option<()> {
        let OutgoingFrame(seq, frame) = self.leaving.pop_front()?;
        self.leaving_bytes -= frame.len();
        if let Some(seq) = seq {
            self.newest_sent = seq;
            self.member.record_released(seq);
        }
        Some(())
    }

    /// Drops the oldest released frames while the uplink is not connected, and retains the newest.
    /// A member that was restored elsewhere has frames to send before a process is at its uplink.
    /// Frames for other members are never lost: the member sends them again.
    pub fn drop_excess(&mut self) {
        while self.leaving_bytes > WAITING_BYTES_MAX && self.pop_frame().is_some() {}
    }

    /// Sets whether the VM is about to be paused.
    pub fn set_pausing(&mut self, is_pausing: bool) {
        self.is_pausing = is_pausing;
    }

    /// Whether to continue to read from the VM's socket.
    pub fn input_flow(&self) -> InputFlow {
        match self.leaving_bytes > BYTES_MAX {
            _ if self.is_pausing && self.over < OVERSHOOT_BYTES_MAX => InputFlow::Go,
            true => InputFlow::Stop,
            false => self.member.input_flow(),
        }
    }

    /// The frames that are buffered, or retained until their receivers have committed them.
    pub fn buffer_usage(&self) -> BufferUsage {
        BufferUsage { frames: self.member.frame_count(), bytes: self.member.buffered_bytes() }
    }

    /// The number of frames that were sent.
    pub fn sent_count(&self) -> u64 {
        self.left
    }

    /// Carries out actions, and returns the frames for the VM.
    fn apply_actions(&mut self, actions: Vec<MemberAction>) -> Vec<Vec<u8>> {
        let mut given = Vec::new();
        for action in actions {
            match action {
                MemberAction::Send(frame) => self.forward_frame(frame.into()),
                MemberAction::Out(seq, frame) => {
                    self.queue_frame(OutgoingFrame(Some(seq), frame.into()))
                }
                MemberAction::Deliver(frame) => given.push(frame),
            }
        }
        given
    }
}

/// Removes the sender's marker from a frame. Tests use it to observe what happens when a receiver
/// is not cut before it delivers.
fn strip_marker(frame: &[u8]) -> Option<Vec<u8>> {
    firn_fault::pass_io_point("net.marker").err()?;
    let MemberMessage { ends, stamp, content } = MemberMessage::from_frame(frame)?;
    let stamp = FrameStamp { mark: RequestNumber::default(), ..stamp };
    Some(MemberMessage { ends, stamp, content }.to_frame())
}

#[cfg(test)]
mod tests {
    use firn_cluster::VmId;
    use firn_cluster::output::FrameDestination;
    use firn_cluster::switch::MacAddress;

    use super::*;

    const NOW: Duration = Duration::from_secs(1);
    const MACS: [MacAddress; 3] = [
        MacAddress([2, 0, 0, 0, 0, 0]),
        MacAddress([2, 0, 0, 0, 0, 1]),
        MacAddress([2, 0, 0, 0, 0, 9]),
    ];

    fn joined(own: u16) -> ClusterOutput {
        let members = (0..2).map(|vm| (VmId(vm), MACS[usize::from(vm)])).collect();
        let (cluster, own, generation) = (3, VmId(own), Generation(1));
        ClusterOutput::without_backup(ClusterMembership {
            cluster,
            own,
            members,
            generation,
            layout: 0,
        })
    }

    fn frame(from: usize, to: usize, byte: u8) -> Vec<u8> {
        [&MACS[to].0[..], &MACS[from].0, &[8, 0, byte]].concat()
    }

    fn leaves(joined: &mut ClusterOutput) -> Vec<Arc<[u8]>> {
        let mut left = Vec::new();
        while let Some(frame) = joined.next_frame() {
            left.push(frame);
            joined.confirm_sent();
        }
        left
    }

    fn request(count: u32) -> RequestNumber {
        RequestNumber { term: 1, count }
    }

    #[test]
    fn without_a_backup_nothing_is_held_and_nothing_is_marked() {
        let (mut a, mut b) = (joined(0), joined(1));
        a.push_frame(&frame(0, 1, 7));
        a.push_frame(&frame(0, 2, 8));
        let left = leaves(&mut a);
        assert_eq!(left.len(), 2);
        assert_eq!(b.receive_frame(&left[0], NOW), [frame(0, 1, 7)]);
        assert_eq!(&left[1][..], frame(0, 2, 8));
        assert_eq!(a.request_mark(Generation(1), request(1)), None);
        assert_ne!(a.buffer_usage(), BufferUsage::default());
        a.advance_time(NOW);
        for question in leaves(&mut a) {
            assert!(b.receive_frame(&question, NOW).is_empty());
        }
        for answer in leaves(&mut b) {
            assert!(a.receive_frame(&answer, NOW).is_empty());
        }
        assert_eq!(a.buffer_usage(), BufferUsage::default());
    }

    #[test]
    fn frames_to_members_leave_at_once_and_to_the_outside_after_all_commits() {
        let mut a = joined(0);
        a.cut_epoch();
        a.push_frame(&frame(0, 1, 7));
        a.push_frame(&frame(0, 2, 8));
        assert_eq!(leaves(&mut a).len(), 1);
        assert_eq!(a.request_mark(Generation(1), request(1)), None, "nothing is cut");
        a.cut_epoch();
        assert_eq!(a.request_mark(Generation(1), request(1)), None, "nothing is copied");
        a.commit_epoch(Epoch(2));
        let answer = a.request_mark(Generation(1), request(1)).unwrap();
        assert_eq!(answer.marks, [(VmId(0), Epoch(2))]);
        assert_eq!(a.request_mark(Generation(2), request(2)), None);
        a.record_global_checkpoint(Epoch(1));
        assert!(leaves(&mut a).is_empty());
        a.record_global_checkpoint(Epoch(2));
        assert_eq!(leaves(&mut a), [frame(0, 2, 8).into()]);
        a.push_frame(&frame(0, 2, 9));
        assert!(leaves(&mut a).is_empty());
        a.open_output();
        assert_eq!(leaves(&mut a), [frame(0, 2, 9).into()]);
    }

    #[test]
    fn a_frame_from_behind_a_cut_waits_for_the_next() {
        let (mut a, mut b) = (joined(0), joined(1));
        a.cut_epoch();
        b.cut_epoch();
        b.push_frame(&frame(1, 0, 5));
        a.request_mark(Generation(1), request(1));
        a.cut_epoch();
        (7..9).for_each(|byte| a.push_frame(&frame(0, 1, byte)));
        let left = leaves(&mut a);
        assert!(left.iter().all(|frame| b.receive_frame(frame, NOW).is_empty()));
        assert!(b.is_cut_needed() && !b.has_deliverable() && b.deliver_waiting(NOW).is_empty());
        b.cut_epoch();
        assert!(!b.is_cut_needed());
        assert_eq!(
            [b.deliver_waiting(NOW), b.deliver_waiting(NOW)],
            [7, 8].map(|byte| vec![frame(0, 1, byte)])
        );
        assert!(!b.has_deliverable());
    }

    #[test]
    fn a_frame_has_gone_when_it_is_written() {
        let mut a = joined(0);
        a.cut_epoch();
        (7..9).for_each(|byte| a.push_frame(&frame(0, 2, byte)));
        a.cut_epoch();
        a.record_global_checkpoint(Epoch(2));
        assert_eq!(
            (a.released_up_to(), a.cut_epoch().trimmed),
            (FrameNumber(0), Vec::new()),
            "it waits, for a lease perhaps"
        );
        a.confirm_sent();
        assert_eq!(
            (a.released_up_to(), a.cut_epoch().trimmed),
            (FrameNumber(1), vec![(FrameDestination::Outside, FrameNumber(1))])
        );
        assert_eq!(
            (leaves(&mut a).len(), a.released_up_to(), a.buffer_usage()),
            (1, FrameNumber(2), BufferUsage::default())
        );
    }

    #[test]
    fn the_newest_waits_for_an_uplink() {
        let mut a = joined(0);
        (0..3000).for_each(|_| a.push_frame(&[&frame(0, 2, 7)[..], &[0; 1000]].concat()));
        a.push_frame(&frame(0, 2, 9));
        a.drop_excess();
        let left = leaves(&mut a);
        assert_eq!(left.last().map(|last| last[14]), Some(9));
        let bytes: usize = left.iter().map(|frame| frame.len()).sum();
        assert!((WAITING_BYTES_MAX - 2000..=WAITING_BYTES_MAX).contains(&bytes), "{bytes}");
    }

    #[test]
    fn at_the_bound_the_vm_waits_until_others_have_it_for_good() {
        let mut a = joined(0);
        a.cut_epoch();
        let large = [&frame(0, 1, 7)[..], &[0; 60_000]].concat();
        while a.input_flow() == InputFlow::Go {
            a.push_frame(&large);
        }
        assert!((BYTES_MAX..BYTES_MAX + 100_000).contains(&a.buffer_usage().bytes));
        a.set_pausing(true);
        assert_eq!(a.input_flow(), InputFlow::Go);
    }
}
