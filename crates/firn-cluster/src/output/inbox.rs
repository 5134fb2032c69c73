//! Frame inbox: the receiver's half, which records the frames received from each sender, now and at
//! each cut.

use std::collections::BTreeMap;

use crate::{Epoch, Seq, Vm};

/// How to handle a frame that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accept {
    /// Give it to the VM.
    Deliver,
    /// Drop it: the VM has it already.
    Known,
    /// A frame before it is missing: the sender must send again from this one on.
    Missing(Seq),
}

type Received = BTreeMap<Vm, Seq>;

/// The frames that one VM has received from the others.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Inbox {
    received: Received,
    cuts: BTreeMap<Epoch, Received>,
}

impl Inbox {
    /// A VM at the end of `base` that has received nothing.
    pub fn new(base: Epoch) -> Self {
        Self { received: Received::new(), cuts: BTreeMap::from([(base, Received::new())]) }
    }

    /// The newest frame received from a sender; zero if none was.
    pub fn received(&self, from: Vm) -> Seq {
        self.received.get(&from).copied().unwrap_or_default()
    }

    /// Handles a frame. Whether it is too early or too late is checked by the cut (see
    /// [`crate::cut::CutMarker::check_frame`]).
    pub fn accept(&mut self, from: Vm, seq: Seq) -> Accept {
        let next = self.received(from).next();
        if seq > next {
            return Accept::Missing(next);
        }
        if seq < next {
            return Accept::Known;
        }
        self.received.insert(from, seq);
        Accept::Deliver
    }

    /// Records a cut while the VM is paused. It is part of that epoch's checkpoint.
    pub fn cut(&mut self, epoch: Epoch) {
        self.cuts.insert(epoch, self.received.clone());
    }

    /// The same at the backup, which gets the newest received frames from the primary.
    pub fn cut_with(&mut self, epoch: Epoch, received: impl IntoIterator<Item = (Vm, Seq)>) {
        self.cuts.insert(epoch, received.into_iter().collect());
    }

    /// Records a global checkpoint that includes this VM at `epoch`. Returns, for each sender, the
    /// newest frame that the sender need not store any more.
    pub fn globally(&mut self, epoch: Epoch) -> Vec<(Vm, Seq)> {
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
