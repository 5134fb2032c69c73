//! The backup's part: what goes with each epoch, and what a failover begins with.

use serde::{Deserialize, Serialize};

use super::gate::Frame;
use crate::output::{Inbox, Outbox, Sent, To};
use crate::{Epoch, Seq, Vm};

/// What of a card belongs to an epoch of its VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfEpoch {
    /// With the first epoch that a backup gets: where each way begins. What is before that has arrived for good.
    pub begins: Vec<(To, Seq)>,
    /// What the VM has sent in it.
    pub sent: Vec<Sent<Frame>>,
    /// How far it had come with each sender at its end.
    pub received: Vec<(Vm, Seq)>,
    /// What need not be kept any more.
    pub trimmed: Vec<(To, Seq)>,
}

/// What a backup has of a member's card. It needs no bound of its own: it is what the primary's outbox has, less what that has
/// trimmed since the newest epoch.
#[derive(Clone, Debug)]
pub struct Kept {
    pub(super) outbox: Outbox<Frame>,
    pub(super) inbox: Inbox,
}

impl Kept {
    /// Of a VM that has sent and received nothing at the end of `base`, for `bytes_max` bytes.
    pub fn new(base: Epoch, bytes_max: usize) -> Self {
        Self { outbox: Outbox::new(bytes_max), inbox: Inbox::new(base) }
    }

    /// An epoch is complete. It may yet be dropped, with those after it, by [`Self::roll_back`].
    pub fn complete(&mut self, epoch: Epoch, of: OfEpoch) {
        for (to, seq) in of.begins {
            self.outbox.begin(to, seq);
        }
        // Nothing goes back behind what was trimmed, also if the epoch that says so is rolled back: a global checkpoint has it, or its receiver
        // is cut for the first time after it. That one may have had it before the sender's epoch ended: then it is in none.
        for (to, seq) in of.trimmed {
            self.outbox.trim_to(to, seq);
            self.outbox.begin(to, seq);
        }
        for Sent { to, frame, .. } in of.sent {
            let cost = frame.cost();
            self.outbox.push(epoch, to, frame, cost);
        }
        self.inbox.cut_with(epoch, of.received);
    }

    /// The primary says, without waiting for the end of its epoch, that what it sent outside up to this one has left.
    pub fn gone(&mut self, seq: Seq) {
        self.outbox.trim_to(To::Outside, seq);
    }

    /// A global checkpoint has the VM at that epoch: no failover goes back behind it.
    pub fn globally(&mut self, epoch: Epoch) {
        self.inbox.globally(epoch);
    }

    /// Bytes that are kept, and what it takes to keep them.
    pub fn held(&self) -> usize {
        self.outbox.bytes()
    }

    /// The VM is to run from the end of that epoch.
    pub fn roll_back(&mut self, epoch: Epoch) {
        self.outbox.roll_back(epoch);
        self.inbox.roll_back(epoch);
    }
}
