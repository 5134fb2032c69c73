//! Receive counters: the receiver's half. They have the number of the newest frame received from
//! each sender, now and at each cut.

use std::collections::BTreeMap;

use crate::{Epoch, FrameNumber, VmId};

/// How to handle a frame that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveDecision {
    /// Give it to the VM.
    Deliver,
    /// Drop it: the VM has it already.
    Known,
    /// A frame before it is missing: the sender must send again from this one on.
    Missing(FrameNumber),
}

/// For each sender, the number of the newest frame that was received from it.
type NewestReceived = BTreeMap<VmId, FrameNumber>;

/// The numbers of the newest frames that one VM has received from the others.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReceiveCounters {
    received: NewestReceived,
    cuts: BTreeMap<Epoch, NewestReceived>,
}

impl ReceiveCounters {
    /// A VM at the end of `base` that has received nothing.
    pub fn new(base: Epoch) -> Self {
        Self {
            received: NewestReceived::new(),
            cuts: BTreeMap::from([(base, NewestReceived::new())]),
        }
    }

    /// The newest frame received from a sender; zero if none was.
    pub fn newest_received(&self, from: VmId) -> FrameNumber {
        self.received.get(&from).copied().unwrap_or_default()
    }

    /// Handles a frame. Whether it is too early or too late is checked by the cut (see
    /// [`crate::cut::CutMarker::check_frame`]).
    pub fn accept_frame(&mut self, from: VmId, seq: FrameNumber) -> ReceiveDecision {
        let next = self.newest_received(from).next();
        if seq > next {
            return ReceiveDecision::Missing(next);
        }
        if seq < next {
            return ReceiveDecision::Known;
        }
        self.received.insert(from, seq);
        ReceiveDecision::Deliver
    }

    /// Records a cut while the VM is paused. It is part of that epoch's checkpoint.
    pub fn record_cut(&mut self, epoch: Epoch) {
        self.cuts.insert(epoch, self.received.clone());
    }

    /// The same at the backup, which gets the newest received frames from the primary.
    pub fn record_cut_with(
        &mut self,
        epoch: Epoch,
        received: impl IntoIterator<Item = (VmId, FrameNumber)>,
    ) {
        self.cuts.insert(epoch, received.into_iter().collect());
    }

    /// Drops the cuts before `epoch`, after a global checkpoint that includes this VM at `epoch`.
    /// Returns, for each sender, the newest frame that the sender need not store any more.
    pub fn drop_cuts_before(&mut self, epoch: Epoch) -> Vec<(VmId, FrameNumber)> {
        self.cuts = self.cuts.split_off(&epoch);
        let received = self.cuts.get(&epoch);
        received.into_iter().flatten().map(|(&from, &seq)| (from, seq)).collect()
    }

    /// Goes back to the end of `epoch`, from which the VM runs again.
    pub fn roll_back(&mut self, epoch: Epoch) {
        self.cuts.split_off(&epoch.next());
        self.received = self.cuts.get(&epoch).cloned().unwrap_or_default();
    }
}
