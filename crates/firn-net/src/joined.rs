//! Cluster output: the card of a VM that is a member of a cluster. `firn-cluster` (`member`)
//! decides which frames may leave, and when. Pure.
//!
//! ```text
//!   the VM ---> MemberNic -----> to other members: wrapped, at once ------------> the network
//!                   |            to all others: unchanged, once committed
//!   the VM <--------'<---------- unwrapped, each once and in order <-------------
//! ```
//!
//! While the VM is about to be stopped, and while it is paused, it is given no frames: at the cut,
//! the frames that its state has received must be the same as the frames that are counted as
//! received.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use firn_cluster::cut::{Answer, Stamp};
use firn_cluster::member::wire::Message;
use firn_cluster::member::{Action, Kept, Member, Membership, OfEpoch, Times};
use firn_cluster::output::Flow;
use firn_cluster::{Epoch, Generation, RequestNumber, Seq};

use crate::gate::{Held, OVER_MAX};
use crate::port::BYTES_MAX;

/// The maximum number of bytes that wait for a process at the uplink.
const WAITING_MAX: usize = 1 << 20;

/// The output and input of a member's card.
#[derive(Debug)]
pub struct Joined {
    of: Membership,
    member: Member,
    leaving: VecDeque<Leaving>,
    leaving_bytes: usize,
    is_stopping: bool,
    over: usize,
    left: u64,
    global: Epoch,
    gone: Seq,
}

/// A frame that may leave. It has a sequence number if it goes to the outside and its backup knows
/// of it.
#[derive(Debug)]
struct Leaving(Option<Seq>, Arc<[u8]>);

impl Joined {
    /// A member that has no backup: its output is open.
    pub fn open(of: Membership) -> Self {
        Self::going_on(of, Epoch(0), Kept::new(Epoch(0), BYTES_MAX))
    }

    /// A member that continues from the end of `base`, and has no backup yet. It sends frames that
    /// were in flight again.
    pub fn going_on(of: Membership, base: Epoch, kept: Kept) -> Self {
        let member = Member::new(&of, Times::default(), base, kept);
        let leaving = VecDeque::new();
        let (leaving_bytes, is_stopping, over, left) = (0, false, 0, 0);
        let (global, gone) = (Epoch(0), Seq(0));
        let mut joined =
            Self { of, member, leaving, leaving_bytes, is_stopping, over, left, global, gone };
        joined.let_out();
        joined
    }

    /// The membership that it was created with.
    pub fn membership(&self) -> &Membership {
        &self.of
    }

    /// Whether no epoch was cut yet, so that a protection can begin.
    pub fn is_new(&self) -> bool {
        self.member.running() == Epoch(1)
    }

    /// Takes a frame that the VM has sent.
    pub fn sent(&mut self, frame: &[u8]) {
        self.over = match self.member.flow() {
            Flow::Go => 0,
            Flow::Stop => self.over + frame.len(),
        };
        let actions = self.member.sent(frame);
        self.act(actions);
    }

    /// Transmits a frame unchanged: it was released before the VM became a member.
    pub fn passes(&mut self, frame: Arc<[u8]>) {
        self.leave(Leaving(None, frame));
    }

    fn leave(&mut self, leaving: Leaving) {
        self.leaving_bytes += leaving.1.len();
        self.leaving.push_back(leaving);
    }

    /// Receives a frame from the uplink while the VM is not paused, and returns the frames that the
    /// VM is to be given.
    pub fn arrived(&mut self, frame: &[u8], now: Duration) -> Vec<Vec<u8>> {
        let actions = match unmarked(frame) {
            Some(frame) => self.member.arrived(&frame, now),
            None => self.member.arrived(frame, now),
        };
        self.act(actions)
    }

    /// Ends an epoch while the VM is paused. Returns the state of the member that belongs to the
    /// epoch.
    pub fn cut(&mut self) -> OfEpoch {
        let of = self.member.cut();
        // Tests switch output commit off to observe the result.
        if firn_fault::io("net.hold").is_err() {
            self.let_out();
        }
        of
    }

    /// Records that the backup has committed an epoch.
    pub fn committed(&mut self, epoch: Epoch) {
        let actions = self.member.committed(epoch);
        self.act(actions);
    }

    /// Records a global checkpoint, which includes this VM at that epoch.
    pub fn globally(&mut self, epoch: Epoch) {
        self.global = self.global.max(epoch);
        let actions = self.member.globally(epoch);
        self.act(actions);
    }

    /// The newest epoch that belongs to a global checkpoint.
    pub fn global(&self) -> Epoch {
        self.global
    }

    /// The newest frame to the outside that has been sent.
    pub fn gone(&self) -> Seq {
        self.gone
    }

    /// Answers a request for a mark; `None` until there is a mark.
    pub fn requested(&mut self, of: Generation, request: RequestNumber) -> Option<Answer> {
        self.member.requested(of, request)
    }

    /// Whether a received frame waits for the running epoch to be cut.
    pub fn wants_cut(&self) -> bool {
        self.member.wants_cut()
    }

    /// Whether a received frame has waited for a cut, and can be delivered now.
    pub fn may_let_in(&self) -> bool {
        self.member.may_let_in()
    }

    /// Delivers a frame that has waited for a cut, if it can be delivered now. Returns the frames
    /// that the VM, which is not paused, is to be given.
    pub fn let_in(&mut self, now: Duration) -> Vec<Vec<u8>> {
        let actions = self.member.let_in(now);
        self.act(actions)
    }

    /// Opens the output: no failover can undo anything any more.
    pub fn let_out(&mut self) {
        let actions = self.member.open();
        self.act(actions);
    }

    /// Whether frames are released as they are sent.
    pub fn is_open(&self) -> bool {
        self.member.is_open()
    }

    /// Whether the receivers have the frames that were released when the output was opened.
    pub fn is_settled(&self) -> bool {
        self.member.is_settled()
    }

    /// Advances the time. A member that can't send now requests no acknowledgements.
    pub fn tick(&mut self, now: Duration) {
        if self.leaving.is_empty() {
            let actions = self.member.tick(now);
            self.act(actions);
        }
    }

    /// The next released frame.
    pub fn next(&self) -> Option<Arc<[u8]>> {
        self.leaving.front().map(|Leaving(_, frame)| Arc::clone(frame))
    }

    /// Removes the next released frame, which has been sent.
    pub fn has_left(&mut self) {
        self.left += u64::from(self.ends().is_some());
    }

    /// Removes the next released frame, which was sent or is dropped.
    fn ends(&mut self) -> Option<()> {
        let Leaving(seq, frame) = self.leaving.pop_front()?;
        self.leaving_bytes -= frame.len();
        if let Some(seq) = seq {
            self.gone = seq;
            self.member.gone(seq);
        }
        Some(())
    }

    /// Drops the oldest released frames while the uplink is not connected, and retains the newest.
    /// A member that was restored elsewhere has frames to send before a process is at its uplink.
    /// Frames for other members are never lost: the member sends them again.
    pub fn lose(&mut self) {
        while self.leaving_bytes > WAITING_MAX && self.ends().is_some() {}
    }

    /// Sets whether the VM is about to be stopped.
    pub fn stopping(&mut self, is_stopping: bool) {
        self.is_stopping = is_stopping;
    }

    /// Whether to continue to read from the VM's socket.
    pub fn flow(&self) -> Flow {
        match self.leaving_bytes > BYTES_MAX {
            _ if self.is_stopping && self.over < OVER_MAX => Flow::Go,
            true => Flow::Stop,
            false => self.member.flow(),
        }
    }

    /// The frames that are buffered, or retained until their receivers have committed them.
    pub fn held(&self) -> Held {
        Held { frames: self.member.frames(), bytes: self.member.held() }
    }

    /// The number of frames that were sent.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Carries out actions, and returns the frames for the VM.
    fn act(&mut self, actions: Vec<Action>) -> Vec<Vec<u8>> {
        let mut given = Vec::new();
        for action in actions {
            match action {
                Action::Send(frame) => self.passes(frame.into()),
                Action::Out(seq, frame) => self.leave(Leaving(Some(seq), frame.into())),
                Action::Deliver(frame) => given.push(frame),
            }
        }
        given
    }
}

/// Removes the sender's mark from a frame. Tests use it to observe what happens when a receiver is
/// not cut before it delivers.
fn unmarked(frame: &[u8]) -> Option<Vec<u8>> {
    firn_fault::io("net.mark").err()?;
    let Message { ends, stamp, says } = Message::of(frame)?;
    let stamp = Stamp { mark: RequestNumber::default(), ..stamp };
    Some(Message { ends, stamp, says }.to_frame())
}

#[cfg(test)]
mod tests {
    use firn_cluster::Vm;
    use firn_cluster::output::To;
    use firn_cluster::switch::Mac;

    use super::*;

    const NOW: Duration = Duration::from_secs(1);
    const MACS: [Mac; 3] =
        [Mac([2, 0, 0, 0, 0, 0]), Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 9])];

    fn joined(own: u16) -> Joined {
        let members = (0..2).map(|vm| (Vm(vm), MACS[usize::from(vm)])).collect();
        let (cluster, own, generation) = (3, Vm(own), Generation(1));
        Joined::open(Membership { cluster, own, members, generation, layout: 0 })
    }

    fn frame(from: usize, to: usize, byte: u8) -> Vec<u8> {
        [&MACS[to].0[..], &MACS[from].0, &[8, 0, byte]].concat()
    }

    fn leaves(joined: &mut Joined) -> Vec<Arc<[u8]>> {
        let mut left = Vec::new();
        while let Some(frame) = joined.next() {
            left.push(frame);
            joined.has_left();
        }
        left
    }

    fn request(count: u32) -> RequestNumber {
        RequestNumber { term: 1, count }
    }

    #[test]
    fn without_a_backup_nothing_is_held_and_nothing_is_marked() {
        let (mut a, mut b) = (joined(0), joined(1));
        a.sent(&frame(0, 1, 7));
        a.sent(&frame(0, 2, 8));
        let left = leaves(&mut a);
        assert_eq!(left.len(), 2);
        assert_eq!(b.arrived(&left[0], NOW), [frame(0, 1, 7)]);
        assert_eq!(&left[1][..], frame(0, 2, 8));
        assert_eq!(a.requested(Generation(1), request(1)), None);
        assert_ne!(a.held(), Held::default());
        a.tick(NOW);
        for question in leaves(&mut a) {
            assert!(b.arrived(&question, NOW).is_empty());
        }
        for answer in leaves(&mut b) {
            assert!(a.arrived(&answer, NOW).is_empty());
        }
        assert_eq!(a.held(), Held::default());
    }

    #[test]
    fn inside_waits_for_nobody_and_outside_for_everybodys_copy() {
        let mut a = joined(0);
        a.cut();
        a.sent(&frame(0, 1, 7));
        a.sent(&frame(0, 2, 8));
        assert_eq!(leaves(&mut a).len(), 1);
        assert_eq!(a.requested(Generation(1), request(1)), None, "nothing is cut");
        a.cut();
        assert_eq!(a.requested(Generation(1), request(1)), None, "nothing is copied");
        a.committed(Epoch(2));
        let answer = a.requested(Generation(1), request(1)).unwrap();
        assert_eq!(answer.marks, [(Vm(0), Epoch(2))]);
        assert_eq!(a.requested(Generation(2), request(2)), None);
        a.globally(Epoch(1));
        assert!(leaves(&mut a).is_empty());
        a.globally(Epoch(2));
        assert_eq!(leaves(&mut a), [frame(0, 2, 8).into()]);
        a.sent(&frame(0, 2, 9));
        assert!(leaves(&mut a).is_empty());
        a.let_out();
        assert_eq!(leaves(&mut a), [frame(0, 2, 9).into()]);
    }

    #[test]
    fn a_frame_from_behind_a_cut_waits_for_the_next() {
        let (mut a, mut b) = (joined(0), joined(1));
        a.cut();
        b.cut();
        b.sent(&frame(1, 0, 5));
        a.requested(Generation(1), request(1));
        a.cut();
        (7..9).for_each(|byte| a.sent(&frame(0, 1, byte)));
        let left = leaves(&mut a);
        assert!(left.iter().all(|frame| b.arrived(frame, NOW).is_empty()));
        assert!(b.wants_cut() && !b.may_let_in() && b.let_in(NOW).is_empty());
        b.cut();
        assert!(!b.wants_cut());
        assert_eq!([b.let_in(NOW), b.let_in(NOW)], [7, 8].map(|byte| vec![frame(0, 1, byte)]));
        assert!(!b.may_let_in());
    }

    #[test]
    fn a_frame_has_gone_when_it_is_written() {
        let mut a = joined(0);
        a.cut();
        (7..9).for_each(|byte| a.sent(&frame(0, 2, byte)));
        a.cut();
        a.globally(Epoch(2));
        assert_eq!(
            (a.gone(), a.cut().trimmed),
            (Seq(0), Vec::new()),
            "it waits, for a lease perhaps"
        );
        a.has_left();
        assert_eq!((a.gone(), a.cut().trimmed), (Seq(1), vec![(To::Outside, Seq(1))]));
        assert_eq!((leaves(&mut a).len(), a.gone(), a.held()), (1, Seq(2), Held::default()));
    }

    #[test]
    fn the_newest_waits_for_an_uplink() {
        let mut a = joined(0);
        (0..3000).for_each(|_| a.sent(&[&frame(0, 2, 7)[..], &[0; 1000]].concat()));
        a.sent(&frame(0, 2, 9));
        a.lose();
        let left = leaves(&mut a);
        assert_eq!(left.last().map(|last| last[14]), Some(9));
        let bytes: usize = left.iter().map(|frame| frame.len()).sum();
        assert!((WAITING_MAX - 2000..=WAITING_MAX).contains(&bytes), "{bytes}");
    }

    #[test]
    fn at_the_bound_the_vm_waits_until_others_have_it_for_good() {
        let mut a = joined(0);
        a.cut();
        let large = [&frame(0, 1, 7)[..], &[0; 60_000]].concat();
        while a.flow() == Flow::Go {
            a.sent(&large);
        }
        assert!((BYTES_MAX..BYTES_MAX + 100_000).contains(&a.held().bytes));
        a.stopping(true);
        assert_eq!(a.flow(), Flow::Go);
    }
}
