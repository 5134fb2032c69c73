//! Standby NIC: the backup's copy of a member's card, which is updated with each epoch, and with
//! which a failover begins.

use serde::{Deserialize, Serialize};

use super::gate::Frame;
use crate::output::{Inbox, Outbox, Sent, To};
use crate::{Epoch, Seq, Vm};

/// The state of a card that belongs to an epoch of its VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfEpoch {
    /// In the first epoch that a backup gets: the start of each lane. Frames before it have arrived
    /// and will not be sent again.
    pub begins: Vec<(To, Seq)>,
    /// The frames that the VM has sent in it.
    pub sent: Vec<Sent<Frame>>,
    /// The newest frame received from each sender at its end.
    pub received: Vec<(Vm, Seq)>,
    /// Frames that need not be stored any more.
    pub trimmed: Vec<(To, Seq)>,
}

/// The backup's copy of a member's card. It needs no bound of its own: it has the frames of the
/// primary's outbox, minus those that the primary has trimmed since the newest epoch.
#[derive(Clone, Debug)]
pub struct Kept {
    pub(super) outbox: Outbox<Frame>,
    pub(super) inbox: Inbox,
}

impl Kept {
    /// The copy of a card that has sent and received no frames at the end of `base`, for
    /// `bytes_max` bytes.
    pub fn new(base: Epoch, bytes_max: usize) -> Self {
        Self { outbox: Outbox::new(bytes_max), inbox: Inbox::new(base) }
    }

    /// Completes an epoch. It may still be dropped, with those after it, by [`Self::roll_back`].
    pub fn complete(&mut self, epoch: Epoch, of: OfEpoch) {
        for (to, seq) in of.begins {
            self.outbox.begin(to, seq);
        }
        // No rollback goes back behind trimmed frames, even if the epoch that reports them is
        // rolled back: a global checkpoint includes them, or their receiver is cut for the first
        // time after it. That receiver may have had them before the sender's epoch ended: then they
        // are in no epoch.
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

    /// Records that frames to the outside were sent, up to this one. The primary reports it without
    /// waiting for the end of its epoch.
    pub fn gone(&mut self, seq: Seq) {
        self.outbox.trim_to(To::Outside, seq);
    }

    /// Records a global checkpoint that includes the VM at that epoch: no failover goes back behind
    /// it.
    pub fn globally(&mut self, epoch: Epoch) {
        self.inbox.globally(epoch);
    }

    /// The stored bytes, with their overhead.
    pub fn held(&self) -> usize {
        self.outbox.bytes()
    }

    /// Goes back to the end of that epoch, from which the VM is to run.
    pub fn roll_back(&mut self, epoch: Epoch) {
        self.outbox.roll_back(epoch);
        self.inbox.roll_back(epoch);
    }
}
