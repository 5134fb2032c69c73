//! Standby NIC: the backup's copy of a member's card, which is updated with each epoch, and with
//! which a failover begins.

use serde::{Deserialize, Serialize};

use super::nic::StoredFrame;
use crate::output::{FrameDestination, FrameOutbox, ReceiveCounters, SentFrame};
use crate::{Epoch, FrameNumber, VmId};

/// The state of a card that belongs to an epoch of its VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicEpoch {
    /// In the first epoch that a backup gets: the start of each lane. Frames before it have arrived
    /// and will not be sent again.
    pub begins: Vec<(FrameDestination, FrameNumber)>,
    /// The frames that the VM has sent in it.
    pub sent: Vec<SentFrame<StoredFrame>>,
    /// The newest frame received from each sender at its end.
    pub received: Vec<(VmId, FrameNumber)>,
    /// Frames that need not be stored any more.
    pub trimmed: Vec<(FrameDestination, FrameNumber)>,
}

/// The backup's copy of a member's card. It needs no bound of its own: it has the frames of the
/// primary's outbox, minus those that the primary has trimmed since the newest epoch.
#[derive(Clone, Debug)]
pub struct StandbyNic {
    pub(super) outbox: FrameOutbox<StoredFrame>,
    pub(super) counters: ReceiveCounters,
}

impl StandbyNic {
    /// The copy of a card that has sent and received no frames at the end of `base`, for
    /// `bytes_max` bytes.
    pub fn new(base: Epoch, bytes_max: usize) -> Self {
        Self { outbox: FrameOutbox::new(bytes_max), counters: ReceiveCounters::new(base) }
    }

    /// Completes an epoch. It may still be dropped, with those after it, by [`Self::roll_back`].
    pub fn complete_epoch(&mut self, epoch: Epoch, of: NicEpoch) {
        for (to, seq) in of.begins {
            self.outbox.start_lane(to, seq);
        }
        // No rollback goes back behind trimmed frames, even if the epoch that reports them is
        // rolled back: a global checkpoint includes them, or their receiver is cut for the first
        // time after it. That receiver may have had them before the sender's epoch ended: then they
        // are in no epoch.
        for (to, seq) in of.trimmed {
            self.outbox.trim_backup(to, seq);
            self.outbox.start_lane(to, seq);
        }
        for SentFrame { to, frame, .. } in of.sent {
            let cost = frame.memory_bytes();
            self.outbox.push_frame(epoch, to, frame, cost);
        }
        self.counters.record_cut_with(epoch, of.received);
    }

    /// Records that frames to the outside were sent, up to this one. The primary reports it without
    /// waiting for the end of its epoch.
    pub fn record_released(&mut self, seq: FrameNumber) {
        self.outbox.trim_backup(FrameDestination::Outside, seq);
    }

    /// Records a global checkpoint that includes the VM at that epoch: no failover goes back behind
    /// it.
    pub fn record_global_checkpoint(&mut self, epoch: Epoch) {
        self.counters.drop_cuts_before(epoch);
    }

    /// The stored bytes, with their overhead.
    pub fn buffered_bytes(&self) -> usize {
        self.outbox.buffered_bytes()
    }

    /// Goes back to the end of that epoch, from which the VM is to run.
    pub fn roll_back(&mut self, epoch: Epoch) {
        self.outbox.roll_back(epoch);
        self.counters.roll_back(epoch);
    }
}
