//! The receiver's half: how far it has come with each sender, now and at each of its cuts.

use std::collections::BTreeMap;

use crate::{Epoch, Seq, Vm};

/// What to do with a frame that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accept {
    /// Give it to the VM.
    Deliver,
    /// The VM has it already.
    Known,
    /// One before it is missing: the sender must go back to this one.
    Missing(Seq),
}

type Received = BTreeMap<Vm, Seq>;

/// What one VM has received from the others.
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

    /// A frame has arrived. Only the cut may say that it is too early or too late (see [`crate::cut::Marker::arriving`]).
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

    /// The VM is paused at the end of an epoch. Part of that epoch's checkpoint.
    pub fn cut(&mut self, epoch: Epoch) {
        self.cuts.insert(epoch, self.received.clone());
    }

    /// The same at the backup, which hears how far the VM had come.
    pub fn cut_with(&mut self, epoch: Epoch, received: impl IntoIterator<Item = (Vm, Seq)>) {
        self.cuts.insert(epoch, received.into_iter().collect());
    }

    /// A global checkpoint has this VM at `epoch`: tell each sender that it need not keep what is included.
    pub fn globally(&mut self, epoch: Epoch) -> Vec<(Vm, Seq)> {
        self.cuts = self.cuts.split_off(&epoch);
        let received = self.cuts.get(&epoch);
        received.into_iter().flatten().map(|(&from, &seq)| (from, seq)).collect()
    }

    /// The VM runs again from the end of `epoch`.
    pub fn roll_back(&mut self, epoch: Epoch) {
        self.cuts.split_off(&epoch.next());
        self.received = self.cuts.get(&epoch).cloned().unwrap_or_default();
    }
}
