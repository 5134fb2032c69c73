//! The messages between hosts and the control, and the failures of the network.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::rc::Rc;

use firn_cluster::cut::{FrameStamp, MarkAnswer};
use firn_cluster::epoch::{EpochPieceHeader, EpochProgress};
use firn_cluster::failover::FailoverRecord;
use firn_cluster::{Epoch, FrameNumber, Generation, HostId, RequestNumber, VmId};

use super::dice::Dice;
use super::host::{Copy, Frame};

/// True time, in milliseconds.
pub type Ms = u64;

/// Either end of a message; `None` is the control.
pub type End = Option<HostId>;

#[derive(Clone, Debug)]
pub enum Message {
    // To the control.
    Renew {
        host: HostId,
        asked_ns: u64,
    },
    Stopped {
        host: HostId,
        generation: Generation,
    },
    Answer(MarkAnswer),
    Drained {
        vm: VmId,
        epoch: Epoch,
        generation: Generation,
    },
    // From the control.
    Granted {
        asked_ns: u64,
        register: Rc<FailoverRecord>,
    },
    Register(Rc<FailoverRecord>),
    Request {
        generation: Generation,
        request: RequestNumber,
    },
    Finish(Generation),
    // Between hosts.
    Epoch {
        vm: VmId,
        generation: Generation,
        from: HostId,
        piece: EpochPieceHeader,
        copy: Rc<Copy>,
    },
    Full {
        vm: VmId,
        generation: Generation,
        from: HostId,
        epoch: Epoch,
        copy: Rc<Copy>,
    },
    Progress {
        vm: VmId,
        generation: Generation,
        from: HostId,
        full: Option<Epoch>,
        progress: EpochProgress,
    },
    Frame {
        from: VmId,
        to: VmId,
        seq: FrameNumber,
        frame: Frame,
        stamp: FrameStamp,
        back: HostId,
    },
    Received {
        from: VmId,
        to: VmId,
        seq: FrameNumber,
        generation: Generation,
    },
    Trim {
        from: VmId,
        to: VmId,
        seq: FrameNumber,
        generation: Generation,
    },
}

#[derive(Clone, Debug)]
pub enum Event {
    Tick(End),
    Arrives { to: End, message: Message },
    Trouble,
    Wake(HostId),
    Heal,
    Calm,
}

#[derive(Debug)]
struct Due(Ms, u64, Event);

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

/// Events in the order of true time, and links that can be cut.
#[derive(Debug)]
pub struct Network {
    pub now: Ms,
    pub dice: Dice,
    pub calm: bool,
    due: BinaryHeap<Reverse<Due>>,
    count: u64,
    cut: BTreeSet<(End, End)>,
}

impl Network {
    pub fn new(dice: Dice) -> Self {
        let (due, cut) = (BinaryHeap::new(), BTreeSet::new());
        Self { now: 0, dice, calm: false, due, count: 0, cut }
    }

    pub fn after(&mut self, ms: Ms, event: Event) {
        self.count += 1;
        self.due.push(Reverse(Due(self.now + ms, self.count, event)));
    }

    pub fn next(&mut self) -> Option<Event> {
        let Reverse(Due(at, _, event)) = self.due.pop()?;
        self.now = at;
        Some(event)
    }

    /// Sends a message, which may come late, twice or never.
    pub fn send(&mut self, from: End, to: End, message: Message) {
        if self.cut.contains(&(from, to)) || (!self.calm && self.dice.chance(4)) {
            return;
        }
        if !self.calm && self.dice.chance(4) {
            let late = 1 + self.dice.roll(600);
            self.after(late, Event::Arrives { to, message: message.clone() });
        }
        let slow = !self.calm && self.dice.chance(6);
        let delay = 1 + self.dice.roll(if slow { 400 } else { 12 });
        self.after(delay, Event::Arrives { to, message });
    }

    pub fn cut(&mut self, one: End, other: End) {
        self.cut.insert((one, other));
        self.cut.insert((other, one));
    }

    pub fn heal(&mut self) {
        self.cut.clear();
    }
}
