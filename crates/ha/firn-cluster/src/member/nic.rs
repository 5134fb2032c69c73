//! Member NIC: the card of a member that runs.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ClusterMembership;
use super::standby_nic::{NicEpoch, StandbyNic};
use super::wire::{CARRIED_BYTES_MAX, MemberMessage, MessageContent, MessageEnds, is_wrapped};
use crate::cut::{CutMarker, MarkAnswer, StampDecision};
use crate::output::{
    FrameDestination, FrameOutbox, InputFlow, ReceiveCounters, ReceiveDecision, SentFrame,
};
use crate::switch::MacAddress;
use crate::{Epoch, FrameNumber, Generation, RequestNumber, VmId};

/// The memory that is counted for a frame besides its bytes.
const FRAME_COST: usize = 64;
/// The maximum number of epochs since the newest global checkpoint that a backup stores. When it is
/// reached, the running epoch is not cut until there is another global checkpoint.
pub const EPOCHS_KEPT_MAX: u64 = 64;
/// Output to other members is held back in the last of these epochs: so there is a cut since which
/// no frame has left, and it is committed.
const SENDING_EPOCHS_MAX: u64 = EPOCHS_KEPT_MAX - 2;
/// The maximum number of bytes that wait for a cut. Frames beyond that are sent again by their
/// senders.
const WAITING_BYTES_MAX: usize = 4 << 20;
/// The maximum number of frames that are sent again at a time. The receiver requests more.
const RESEND_FRAMES_MAX: usize = 256;

/// A frame that is buffered or stored.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "Vec<u8>", into = "Vec<u8>")]
pub struct StoredFrame(Arc<[u8]>);

impl StoredFrame {
    pub(super) fn memory_bytes(&self) -> usize {
        self.0.len() + FRAME_COST
    }
}

impl From<Vec<u8>> for StoredFrame {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl From<StoredFrame> for Vec<u8> {
    fn from(frame: StoredFrame) -> Self {
        frame.0.to_vec()
    }
}

/// An action for the shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberAction {
    /// Give it to the switch: it is for another member.
    Send(Vec<u8>),
    /// Give it to the switch unchanged, and call [`MemberNic::record_released`] when that is done:
    /// it is for the outside.
    Out(FrameNumber, Vec<u8>),
    /// Give it to the VM.
    Deliver(Vec<u8>),
}

/// The intervals of acknowledgements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberTimes {
    /// The interval at which a receiver is asked that has not acknowledged all frames.
    pub ask: Duration,
    /// The minimum interval between two reports of the same missing frame.
    pub complain: Duration,
}

impl Default for MemberTimes {
    fn default() -> Self {
        Self { ask: Duration::from_millis(100), complain: Duration::from_millis(10) }
    }
}

/// The state of another member.
#[derive(Clone, Debug)]
struct PeerMember {
    mac: MacAddress,
    /// The newest frame that it has acknowledged.
    has: FrameNumber,
    /// The newest frame that was released when the output was opened.
    due: FrameNumber,
    asked: Duration,
    /// The missing frame that was last reported to it, and when.
    last_report: Option<(FrameNumber, Duration)>,
}

/// The card of one VM in a cluster.
///
/// Its output is *open* while no failover can undo the VM's state, because the VM has no backup:
/// then frames leave as they are sent, and a sender need not store a frame that has arrived here.
/// The output closes at the first cut, until it is opened again.
#[derive(Clone, Debug)]
pub struct MemberNic {
    cluster: u32,
    own: (VmId, MacAddress),
    is_open: bool,
    others: BTreeMap<VmId, PeerMember>,
    times: MemberTimes,
    outbox: FrameOutbox<StoredFrame>,
    counters: ReceiveCounters,
    marker: CutMarker,
    running: Epoch,
    global: Epoch,
    trimmed: BTreeMap<FrameDestination, FrameNumber>,
    /// Frames from behind a cut that this VM has not made yet, with their marks, and the frames
    /// after them.
    waiting: VecDeque<(RequestNumber, Vec<u8>)>,
    waiting_bytes: usize,
}

impl MemberNic {
    /// A VM that runs from the end of `base`, in a generation that begins. The caller then calls
    /// [`commit_epoch`](Self::commit_epoch) and
    /// [`record_global_checkpoint`](Self::record_global_checkpoint) for `base`, or
    /// [`open_output`](Self::open_output): that releases the frames that a receiver may still lack.
    pub fn new(
        of: &ClusterMembership,
        times: MemberTimes,
        base: Epoch,
        mut kept: StandbyNic,
    ) -> Self {
        kept.roll_back(base);
        let &ClusterMembership { cluster, own, generation, layout, .. } = of;
        let own_mac = of.members.iter().find(|(vm, _)| *vm == own);
        let (has, due, asked, complained) = (FrameNumber(0), FrameNumber(0), Duration::ZERO, None);
        let other = |mac| PeerMember { mac, has, due, asked, last_report: complained };
        let others = of.members.iter().filter(|(vm, _)| *vm != own);
        Self {
            cluster,
            own: (own, own_mac.map_or(MacAddress::BROADCAST, |(_, mac)| *mac)),
            is_open: false,
            others: others.map(|&(vm, mac)| (vm, other(mac))).collect(),
            times,
            outbox: kept.outbox,
            counters: kept.counters,
            marker: CutMarker::new(generation, layout, own, base),
            running: base.next(),
            global: base,
            trimmed: BTreeMap::new(),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
        }
    }

    /// Handles a frame that the VM has sent: to other members it leaves at once. A frame that can't
    /// be wrapped is dropped.
    pub fn send_frame(&mut self, frame: &[u8]) -> Vec<MemberAction> {
        let Some((to, _)) =
            MacAddress::frame_addresses(frame).filter(|_| frame.len() <= CARRIED_BYTES_MAX)
        else {
            return Vec::new();
        };
        let meant = |other: &PeerMember| to.is_group() || other.mac == to;
        let members = self
            .others
            .iter()
            .filter(|(_, other)| meant(other))
            .map(|(&vm, _)| FrameDestination::Vm(vm));
        let mut directions: Vec<FrameDestination> = members.collect();
        if directions.is_empty() || to.is_group() {
            directions.push(FrameDestination::Outside);
        }
        let frame = StoredFrame(frame.into());
        for direction in directions {
            let cost = frame.memory_bytes();
            self.outbox.push_frame(self.running, direction, frame.clone(), cost);
        }
        match (self.is_open, self.may_send_inside()) {
            (true, _) => self.release_up_to(self.running),
            (false, true) => self.release_inside_now(),
            (false, false) => Vec::new(),
        }
    }

    fn may_send_inside(&self) -> bool {
        self.running.0 - self.global.0 <= SENDING_EPOCHS_MAX
    }

    fn release_inside_now(&mut self) -> Vec<MemberAction> {
        let sent = self.release_inside(self.running);
        if !sent.is_empty() {
            self.marker.record_sent(self.running);
        }
        sent
    }

    /// Opens the output: buffered frames leave, and later ones as they come. No failover can undo
    /// anything any more.
    pub fn open_output(&mut self) -> Vec<MemberAction> {
        let actions = self.release_up_to(self.running);
        if !std::mem::replace(&mut self.is_open, true) {
            for (&vm, other) in &mut self.others {
                other.due = self.outbox.newest_released(FrameDestination::Vm(vm));
            }
        }
        actions
    }

    /// Whether frames leave as they are sent.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Whether the other members have acknowledged the frames that were released when the output
    /// was opened: those that were buffered, or in flight when this VM went back. Frames sent since
    /// then don't count, because some are always in flight.
    pub fn is_output_received(&self) -> bool {
        self.others.values().all(|other| other.has >= other.due)
    }

    /// The running epoch.
    pub fn running_epoch(&self) -> Epoch {
        self.running
    }

    /// Ends the running epoch. The VM is paused, all frames that it sent have been read, and it has
    /// read all frames that it was given. Returns the state of the card that belongs to that epoch.
    pub fn cut_epoch(&mut self) -> NicEpoch {
        let epoch = self.running;
        let is_first = std::mem::replace(&mut self.is_open, false);
        self.counters.record_cut(epoch);
        self.marker.record_cut(epoch);
        self.running = epoch.next();
        NicEpoch {
            begins: if is_first { self.outbox.lane_starts().collect() } else { Vec::new() },
            sent: self.outbox.frames_of(epoch),
            received: self
                .others
                .keys()
                .map(|&vm| (vm, self.counters.newest_received(vm)))
                .collect(),
            trimmed: std::mem::take(&mut self.trimmed).into_iter().collect(),
        }
    }

    /// Records that an epoch is in the non-volatile copy. Releases its frames to other members that
    /// were in flight when the VM went back.
    pub fn commit_epoch(&mut self, epoch: Epoch) -> Vec<MemberAction> {
        self.marker.record_commit(epoch);
        self.release_inside(epoch)
    }

    fn release_inside(&mut self, epoch: Epoch) -> Vec<MemberAction> {
        let sent = self.outbox.release_inside(epoch);
        sent.iter().filter_map(|sent| self.wrap_frame(sent)).collect()
    }

    fn release_outside(&mut self, epoch: Epoch) -> Vec<MemberAction> {
        let sent = self.outbox.release_outside(epoch);
        sent.into_iter().map(|sent| MemberAction::Out(sent.seq, sent.frame.into())).collect()
    }

    /// Records that frames to the outside were sent, up to this one. They need not be stored any
    /// more.
    pub fn record_released(&mut self, seq: FrameNumber) {
        self.trim_sent(FrameDestination::Outside, seq);
    }

    fn release_up_to(&mut self, epoch: Epoch) -> Vec<MemberAction> {
        let mut actions = self.release_inside(epoch);
        actions.extend(self.release_outside(epoch));
        actions
    }

    /// Records a global checkpoint that includes this VM at that epoch: its frames to the outside
    /// are released, and the other members are informed which frames they need not store any more.
    pub fn record_global_checkpoint(&mut self, epoch: Epoch) -> Vec<MemberAction> {
        let mut included = self.counters.drop_cuts_before(epoch);
        included.retain(|(_, seq)| *seq > FrameNumber(0));
        let notices = included
            .into_iter()
            .filter_map(|(vm, seq)| self.build_message(vm, MessageContent::Included(seq)));
        let mut actions: Vec<MemberAction> = notices.collect();
        self.global = epoch.max(self.global);
        if self.may_send_inside() {
            actions.extend(self.release_inside_now());
        }
        actions.extend(self.release_outside(epoch));
        actions
    }

    /// Handles a request for a mark; the initiator repeats it until there is one.
    pub fn request_mark(
        &mut self,
        generation: Generation,
        request: RequestNumber,
    ) -> Option<MarkAnswer> {
        self.marker.request_mark(generation, request)
    }

    /// Whether a received frame waits for the running epoch to be cut.
    pub fn is_cut_needed(&self) -> bool {
        !self.waiting.is_empty() && !self.has_deliverable()
    }

    /// Whether a received frame has waited for a cut, and can be delivered now.
    pub fn has_deliverable(&self) -> bool {
        let mark = self.waiting.front().map(|(mark, _)| *mark);
        mark.is_some_and(|mark| self.is_open || mark <= self.marker.current_stamp().mark)
    }

    /// Handles a frame that has waited for a cut, if it can be delivered now. The VM must not be
    /// paused.
    pub fn deliver_waiting(&mut self, now: Duration) -> Vec<MemberAction> {
        if !self.has_deliverable() {
            return Vec::new();
        }
        let Some((_, frame)) = self.waiting.pop_front() else { return Vec::new() };
        self.waiting_bytes -= frame.len();
        MemberMessage::from_frame(&frame)
            .map(|message| self.handle_message(&message, now))
            .unwrap_or_default()
    }

    /// Makes a frame wait; later frames wait behind it. Frames without room are dropped, and their
    /// senders send them again.
    fn queue_waiting(&mut self, mark: RequestNumber, frame: &[u8]) {
        let bytes = self.waiting_bytes + frame.len();
        if bytes <= WAITING_BYTES_MAX {
            self.waiting_bytes = bytes;
            self.waiting.push_back((mark, frame.to_vec()));
        }
    }

    /// Handles a frame from the switch. The VM must not be paused.
    pub fn receive_frame(&mut self, frame: &[u8], now: Duration) -> Vec<MemberAction> {
        if is_wrapped(frame) {
            return self.receive_wrapped(frame, now).unwrap_or_default();
        }
        let from = MacAddress::frame_addresses(frame).map(|(_, from)| from);
        let is_member = self.others.values().any(|other| Some(other.mac) == from);
        // From a VM that is not yet, or no longer, a member it is meant for this VM.
        let is_meant = MacAddress::frame_addresses(frame).is_some_and(|(to, _)| to == self.own.1)
            && self.is_open;
        match is_member && !is_meant {
            true => Vec::new(),
            false => vec![MemberAction::Deliver(frame.to_vec())],
        }
    }

    /// Advances the time: asks other members whether they have all frames.
    pub fn advance_time(&mut self, now: Duration) -> Vec<MemberAction> {
        let is_due = |(vm, other): &(&VmId, &mut PeerMember)| {
            other.has < self.outbox.newest_released(FrameDestination::Vm(**vm))
                && now.saturating_sub(other.asked) >= self.times.ask
        };
        let due = self.others.iter_mut().filter(is_due);
        let due: Vec<VmId> = due
            .map(|(&vm, other)| {
                other.asked = now;
                vm
            })
            .collect();
        let ask = |vm| {
            self.build_message(
                vm,
                MessageContent::Newest(self.outbox.newest_released(FrameDestination::Vm(vm))),
            )
        };
        due.into_iter().filter_map(ask).collect()
    }

    /// Whether to continue to read from the VM's socket.
    pub fn input_flow(&self) -> InputFlow {
        self.outbox.input_flow()
    }

    /// The number of frames that are buffered or stored.
    pub fn frame_count(&self) -> usize {
        self.outbox.frame_count()
    }

    /// The bytes that are buffered or stored, with their overhead.
    pub fn buffered_bytes(&self) -> usize {
        self.outbox.buffered_bytes()
    }

    /// Builds a message to a member, stamped by this one.
    fn build_message(&self, to: VmId, content: MessageContent<'_>) -> Option<MemberAction> {
        let mac = self.others.get(&to)?.mac;
        let ends = MessageEnds { cluster: self.cluster, from: self.own, to: (to, mac) };
        let message = MemberMessage { ends, stamp: self.marker.current_stamp(), content };
        Some(MemberAction::Send(message.to_frame()))
    }

    fn wrap_frame(&self, sent: &SentFrame<StoredFrame>) -> Option<MemberAction> {
        match sent.to {
            FrameDestination::Vm(vm) => {
                self.build_message(vm, MessageContent::Frame(sent.seq, &sent.frame.0))
            }
            FrameDestination::Outside => None,
        }
    }

    fn receive_wrapped(&mut self, frame: &[u8], now: Duration) -> Option<Vec<MemberAction>> {
        let message = MemberMessage::from_frame(frame)?;
        let MemberMessage { ends, stamp, .. } = message;
        let is_known = self.others.get(&ends.from.0)?.mac == ends.from.1;
        if !is_known || ends.cluster != self.cluster || ends.to != self.own {
            return None;
        }
        // The cut comes first, whatever the message contains: then the marked epoch is without it.
        match self.marker.check_frame(stamp) {
            StampDecision::Undone | StampDecision::Early => return None,
            StampDecision::AfterCut if !self.is_open => self.queue_waiting(stamp.mark, frame),
            _ if !self.waiting.is_empty() => self.queue_waiting(stamp.mark, frame),
            StampDecision::AfterCut | StampDecision::Deliver => {
                return Some(self.handle_message(&message, now));
            }
        }
        None
    }

    fn handle_message(&mut self, message: &MemberMessage<'_>, now: Duration) -> Vec<MemberAction> {
        let (from, _) = message.ends.from;
        let mut actions = Vec::new();
        match message.content {
            MessageContent::Frame(seq, frame) => match self.counters.accept_frame(from, seq) {
                ReceiveDecision::Deliver => actions.push(MemberAction::Deliver(frame.to_vec())),
                ReceiveDecision::Known => {}
                ReceiveDecision::Missing(next) => {
                    actions.extend(self.report_missing(from, next, now))
                }
            },
            MessageContent::Newest(_) => {
                let newest = self.counters.newest_received(from);
                actions.extend(self.build_message(from, MessageContent::Expects(newest.next())));
                let included = self.is_open.then_some(MessageContent::Included(newest));
                actions.extend(included.and_then(|content| self.build_message(from, content)));
            }
            MessageContent::Expects(next) => actions.extend(self.resend_from(from, next)),
            MessageContent::Included(seq) => self.trim_sent(FrameDestination::Vm(from), seq),
        }
        actions
    }

    fn report_missing(
        &mut self,
        from: VmId,
        next: FrameNumber,
        now: Duration,
    ) -> Option<MemberAction> {
        let other = self.others.get_mut(&from)?;
        let is_told = other
            .last_report
            .is_some_and(|(seq, at)| seq == next && now.saturating_sub(at) < self.times.complain);
        if is_told {
            return None;
        }
        other.last_report = Some((next, now));
        self.build_message(from, MessageContent::Expects(next))
    }

    /// Sends the frames again that a receiver lacks which expects this one.
    fn resend_from(&mut self, to: VmId, next: FrameNumber) -> Vec<MemberAction> {
        let before = FrameNumber(next.0.saturating_sub(1));
        if let Some(other) = self.others.get_mut(&to) {
            other.has = before;
        }
        let again = self.outbox.released_after(FrameDestination::Vm(to), before, RESEND_FRAMES_MAX);
        again.iter().filter_map(|sent| self.wrap_frame(sent)).collect()
    }

    fn trim_sent(&mut self, to: FrameDestination, seq: FrameNumber) {
        self.outbox.trim_up_to(to, seq);
        let trimmed = self.trimmed.entry(to).or_default();
        *trimmed = seq.max(*trimmed);
    }
}
