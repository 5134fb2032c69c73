//! Member NIC: the card of a member that runs.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Membership;
use super::kept::{Kept, OfEpoch};
use super::wire::{CARRIED_BYTES_MAX, Ends, Message, Says, is_wrapped};
use crate::cut::{Answer, Arriving, Marker};
use crate::output::{Accept, Flow, Inbox, Outbox, Sent, To};
use crate::switch::Mac;
use crate::{Epoch, Generation, RequestNumber, Seq, Vm};

/// The memory that is counted for a frame besides its bytes.
const FRAME_COST: usize = 64;
/// The maximum number of epochs since the newest global checkpoint that a backup stores. When it is
/// reached, the running epoch is not cut until there is another global checkpoint.
pub const EPOCHS_KEPT_MAX: u64 = 64;
/// Output to other members is held back in the last of these epochs: so there is a cut since which
/// no frame has left, and it is committed.
const HEARD_MAX: u64 = EPOCHS_KEPT_MAX - 2;
/// The maximum number of bytes that wait for a cut. Frames beyond that are sent again by their
/// senders.
const WAITING_BYTES_MAX: usize = 4 << 20;
/// The maximum number of frames that are sent again at a time. The receiver requests more.
const AGAIN_MAX: usize = 256;

/// A frame that is buffered or stored.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "Vec<u8>", into = "Vec<u8>")]
pub struct Frame(Arc<[u8]>);

impl Frame {
    pub(super) fn cost(&self) -> usize {
        self.0.len() + FRAME_COST
    }
}

impl From<Vec<u8>> for Frame {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl From<Frame> for Vec<u8> {
    fn from(frame: Frame) -> Self {
        frame.0.to_vec()
    }
}

/// An action for the shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Give it to the switch: it is for another member.
    Send(Vec<u8>),
    /// Give it to the switch unchanged, and call [`MemberNic::record_released`] when that is done:
    /// it is for the outside.
    Out(Seq, Vec<u8>),
    /// Give it to the VM.
    Deliver(Vec<u8>),
}

/// The intervals of acknowledgements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// The interval at which a receiver is asked that has not acknowledged all frames.
    pub ask: Duration,
    /// The minimum interval between two reports of the same missing frame.
    pub complain: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self { ask: Duration::from_millis(100), complain: Duration::from_millis(10) }
    }
}

/// The state of another member.
#[derive(Clone, Debug)]
struct Other {
    mac: Mac,
    /// The newest frame that it has acknowledged.
    has: Seq,
    /// The newest frame that was released when the output was opened.
    due: Seq,
    asked: Duration,
    /// The missing frame that was last reported to it, and when.
    complained: Option<(Seq, Duration)>,
}

/// The card of one VM in a cluster.
///
/// Its output is *open* while no failover can undo the VM's state, because the VM has no backup:
/// then frames leave as they are sent, and a sender need not store a frame that has arrived here.
/// The output closes at the first cut, until it is opened again.
#[derive(Clone, Debug)]
pub struct Member {
    cluster: u32,
    own: (Vm, Mac),
    is_open: bool,
    others: BTreeMap<Vm, Other>,
    times: Times,
    outbox: Outbox<Frame>,
    inbox: Inbox,
    marker: Marker,
    running: Epoch,
    global: Epoch,
    trimmed: BTreeMap<To, Seq>,
    /// Frames from behind a cut that this VM has not made yet, with their marks, and the frames
    /// after them.
    waiting: VecDeque<(RequestNumber, Vec<u8>)>,
    waiting_bytes: usize,
}

impl Member {
    /// A VM that runs from the end of `base`, in a generation that begins. The caller then calls
    /// [`commit_epoch`](Self::commit_epoch) and
    /// [`record_global_checkpoint`](Self::record_global_checkpoint) for `base`, or
    /// [`open_output`](Self::open_output): that releases the frames that a receiver may still lack.
    pub fn new(of: &Membership, times: Times, base: Epoch, mut kept: Kept) -> Self {
        kept.roll_back(base);
        let &Membership { cluster, own, generation, layout, .. } = of;
        let own_mac = of.members.iter().find(|(vm, _)| *vm == own);
        let (has, due, asked, complained) = (Seq(0), Seq(0), Duration::ZERO, None);
        let other = |mac| Other { mac, has, due, asked, complained };
        let others = of.members.iter().filter(|(vm, _)| *vm != own);
        Self {
            cluster,
            own: (own, own_mac.map_or(Mac::BROADCAST, |(_, mac)| *mac)),
            is_open: false,
            others: others.map(|&(vm, mac)| (vm, other(mac))).collect(),
            times,
            outbox: kept.outbox,
            inbox: kept.inbox,
            marker: Marker::new(generation, layout, own, base),
            running: base.next(),
            global: base,
            trimmed: BTreeMap::new(),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
        }
    }

    /// Handles a frame that the VM has sent: to other members it leaves at once. A frame that can't
    /// be wrapped is dropped.
    pub fn sent(&mut self, frame: &[u8]) -> Vec<Action> {
        let Some((to, _)) = Mac::ends(frame).filter(|_| frame.len() <= CARRIED_BYTES_MAX) else {
            return Vec::new();
        };
        let meant = |other: &Other| to.is_group() || other.mac == to;
        let members =
            self.others.iter().filter(|(_, other)| meant(other)).map(|(&vm, _)| To::Vm(vm));
        let mut ways: Vec<To> = members.collect();
        if ways.is_empty() || to.is_group() {
            ways.push(To::Outside);
        }
        let frame = Frame(frame.into());
        for way in ways {
            let cost = frame.cost();
            self.outbox.push(self.running, way, frame.clone(), cost);
        }
        match (self.is_open, self.is_heard()) {
            (true, _) => self.let_out(self.running),
            (false, true) => self.inside_now(),
            (false, false) => Vec::new(),
        }
    }

    fn is_heard(&self) -> bool {
        self.running.0 - self.global.0 <= HEARD_MAX
    }

    fn inside_now(&mut self) -> Vec<Action> {
        let sent = self.inside(self.running);
        if !sent.is_empty() {
            self.marker.sent(self.running);
        }
        sent
    }

    /// Opens the output: buffered frames leave, and later ones as they come. No failover can undo
    /// anything any more.
    pub fn open(&mut self) -> Vec<Action> {
        let actions = self.let_out(self.running);
        if !std::mem::replace(&mut self.is_open, true) {
            for (&vm, other) in &mut self.others {
                other.due = self.outbox.released(To::Vm(vm));
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
    pub fn is_settled(&self) -> bool {
        self.others.values().all(|other| other.has >= other.due)
    }

    /// The running epoch.
    pub fn running(&self) -> Epoch {
        self.running
    }

    /// Ends the running epoch. The VM is paused, all frames that it sent have been read, and it has
    /// read all frames that it was given. Returns the state of the card that belongs to that epoch.
    pub fn cut(&mut self) -> OfEpoch {
        let epoch = self.running;
        let is_first = std::mem::replace(&mut self.is_open, false);
        self.inbox.cut(epoch);
        self.marker.cut(epoch);
        self.running = epoch.next();
        OfEpoch {
            begins: if is_first { self.outbox.begins().collect() } else { Vec::new() },
            sent: self.outbox.frames_of(epoch),
            received: self.others.keys().map(|&vm| (vm, self.inbox.received(vm))).collect(),
            trimmed: std::mem::take(&mut self.trimmed).into_iter().collect(),
        }
    }

    /// Records that an epoch is in the non-volatile copy. Releases its frames to other members that
    /// were in flight when the VM went back.
    pub fn committed(&mut self, epoch: Epoch) -> Vec<Action> {
        self.marker.committed(epoch);
        self.inside(epoch)
    }

    fn inside(&mut self, epoch: Epoch) -> Vec<Action> {
        let sent = self.outbox.committed(epoch);
        sent.iter().filter_map(|sent| self.wrapped(sent)).collect()
    }

    fn outside(&mut self, epoch: Epoch) -> Vec<Action> {
        let sent = self.outbox.globally(epoch);
        sent.into_iter().map(|sent| Action::Out(sent.seq, sent.frame.into())).collect()
    }

    /// Records that frames to the outside were sent, up to this one. They need not be stored any
    /// more.
    pub fn gone(&mut self, seq: Seq) {
        self.trim(To::Outside, seq);
    }

    fn let_out(&mut self, epoch: Epoch) -> Vec<Action> {
        let mut actions = self.inside(epoch);
        actions.extend(self.outside(epoch));
        actions
    }

    /// Records a global checkpoint that includes this VM at that epoch: its frames to the outside
    /// are released, and the other members are informed which frames they need not store any more.
    pub fn globally(&mut self, epoch: Epoch) -> Vec<Action> {
        let mut included = self.inbox.globally(epoch);
        included.retain(|(_, seq)| *seq > Seq(0));
        let told = included.into_iter().filter_map(|(vm, seq)| self.say(vm, Says::Included(seq)));
        let mut actions: Vec<Action> = told.collect();
        self.global = epoch.max(self.global);
        if self.is_heard() {
            actions.extend(self.inside_now());
        }
        actions.extend(self.outside(epoch));
        actions
    }

    /// Handles a request for a mark; the initiator repeats it until there is one.
    pub fn requested(&mut self, generation: Generation, request: RequestNumber) -> Option<Answer> {
        self.marker.requested(generation, request)
    }

    /// Whether a received frame waits for the running epoch to be cut.
    pub fn wants_cut(&self) -> bool {
        !self.waiting.is_empty() && !self.may_let_in()
    }

    /// Whether a received frame has waited for a cut, and can be delivered now.
    pub fn may_let_in(&self) -> bool {
        let mark = self.waiting.front().map(|(mark, _)| *mark);
        mark.is_some_and(|mark| self.is_open || mark <= self.marker.stamp().mark)
    }

    /// Handles a frame that has waited for a cut, if it can be delivered now. The VM must not be
    /// paused.
    pub fn let_in(&mut self, now: Duration) -> Vec<Action> {
        if !self.may_let_in() {
            return Vec::new();
        }
        let Some((_, frame)) = self.waiting.pop_front() else { return Vec::new() };
        self.waiting_bytes -= frame.len();
        Message::of(&frame).map(|message| self.heard(&message, now)).unwrap_or_default()
    }

    /// Makes a frame wait; later frames wait behind it. Frames without room are dropped, and their
    /// senders send them again.
    fn wait(&mut self, mark: RequestNumber, frame: &[u8]) {
        let bytes = self.waiting_bytes + frame.len();
        if bytes <= WAITING_BYTES_MAX {
            self.waiting_bytes = bytes;
            self.waiting.push_back((mark, frame.to_vec()));
        }
    }

    /// Handles a frame from the switch. The VM must not be paused.
    pub fn arrived(&mut self, frame: &[u8], now: Duration) -> Vec<Action> {
        if is_wrapped(frame) {
            return self.unwrapped(frame, now).unwrap_or_default();
        }
        let from = Mac::ends(frame).map(|(_, from)| from);
        let is_member = self.others.values().any(|other| Some(other.mac) == from);
        // From a VM that is not yet, or no longer, a member it is meant for this VM.
        let is_meant = Mac::ends(frame).is_some_and(|(to, _)| to == self.own.1) && self.is_open;
        match is_member && !is_meant {
            true => Vec::new(),
            false => vec![Action::Deliver(frame.to_vec())],
        }
    }

    /// Advances the time: asks other members whether they have all frames.
    pub fn tick(&mut self, now: Duration) -> Vec<Action> {
        let is_due = |(vm, other): &(&Vm, &mut Other)| {
            other.has < self.outbox.released(To::Vm(**vm))
                && now.saturating_sub(other.asked) >= self.times.ask
        };
        let due = self.others.iter_mut().filter(is_due);
        let due: Vec<Vm> = due
            .map(|(&vm, other)| {
                other.asked = now;
                vm
            })
            .collect();
        let ask = |vm| self.say(vm, Says::Newest(self.outbox.released(To::Vm(vm))));
        due.into_iter().filter_map(ask).collect()
    }

    /// Whether to continue to read from the VM's socket.
    pub fn flow(&self) -> Flow {
        self.outbox.flow()
    }

    /// The number of frames that are buffered or stored.
    pub fn frames(&self) -> usize {
        self.outbox.frames()
    }

    /// The bytes that are buffered or stored, with their overhead.
    pub fn held(&self) -> usize {
        self.outbox.bytes()
    }

    /// Builds a message to a member, stamped by this one.
    fn say(&self, to: Vm, says: Says<'_>) -> Option<Action> {
        let mac = self.others.get(&to)?.mac;
        let ends = Ends { cluster: self.cluster, from: self.own, to: (to, mac) };
        let message = Message { ends, stamp: self.marker.stamp(), says };
        Some(Action::Send(message.to_frame()))
    }

    fn wrapped(&self, sent: &Sent<Frame>) -> Option<Action> {
        match sent.to {
            To::Vm(vm) => self.say(vm, Says::Frame(sent.seq, &sent.frame.0)),
            To::Outside => None,
        }
    }

    fn unwrapped(&mut self, frame: &[u8], now: Duration) -> Option<Vec<Action>> {
        let message = Message::of(frame)?;
        let Message { ends, stamp, .. } = message;
        let is_known = self.others.get(&ends.from.0)?.mac == ends.from.1;
        if !is_known || ends.cluster != self.cluster || ends.to != self.own {
            return None;
        }
        // The cut comes first, whatever the message contains: then the marked epoch is without it.
        match self.marker.arriving(stamp) {
            Arriving::Undone | Arriving::Early => return None,
            Arriving::AfterCut if !self.is_open => self.wait(stamp.mark, frame),
            _ if !self.waiting.is_empty() => self.wait(stamp.mark, frame),
            Arriving::AfterCut | Arriving::Deliver => return Some(self.heard(&message, now)),
        }
        None
    }

    fn heard(&mut self, message: &Message<'_>, now: Duration) -> Vec<Action> {
        let (from, _) = message.ends.from;
        let mut actions = Vec::new();
        match message.says {
            Says::Frame(seq, frame) => match self.inbox.accept(from, seq) {
                Accept::Deliver => actions.push(Action::Deliver(frame.to_vec())),
                Accept::Known => {}
                Accept::Missing(next) => actions.extend(self.complain(from, next, now)),
            },
            Says::Newest(_) => {
                let newest = self.inbox.received(from);
                actions.extend(self.say(from, Says::Expects(newest.next())));
                let included = self.is_open.then_some(Says::Included(newest));
                actions.extend(included.and_then(|says| self.say(from, says)));
            }
            Says::Expects(next) => actions.extend(self.again(from, next)),
            Says::Included(seq) => self.trim(To::Vm(from), seq),
        }
        actions
    }

    fn complain(&mut self, from: Vm, next: Seq, now: Duration) -> Option<Action> {
        let other = self.others.get_mut(&from)?;
        let is_told = other
            .complained
            .is_some_and(|(seq, at)| seq == next && now.saturating_sub(at) < self.times.complain);
        if is_told {
            return None;
        }
        other.complained = Some((next, now));
        self.say(from, Says::Expects(next))
    }

    /// Sends the frames again that a receiver lacks which expects this one.
    fn again(&mut self, to: Vm, next: Seq) -> Vec<Action> {
        let before = Seq(next.0.saturating_sub(1));
        if let Some(other) = self.others.get_mut(&to) {
            other.has = before;
        }
        let again = self.outbox.again(To::Vm(to), before, AGAIN_MAX);
        again.iter().filter_map(|sent| self.wrapped(sent)).collect()
    }

    fn trim(&mut self, to: To, seq: Seq) {
        self.outbox.trim(to, seq);
        let trimmed = self.trimmed.entry(to).or_default();
        *trimmed = seq.max(*trimmed);
    }
}
