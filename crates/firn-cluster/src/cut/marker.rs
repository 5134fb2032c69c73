//! Cut marker: the part of one VM in a cut.

use serde::{Deserialize, Serialize};

use crate::{Epoch, Generation, RequestNumber, Vm};

/// The stamp of every frame between VMs: its sender's generation and newest mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Stamp {
    /// The generation.
    pub generation: Generation,
    /// The newest mark.
    pub mark: RequestNumber,
}

/// The answer to a request: marks of VMs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Answer {
    /// The generation.
    pub generation: Generation,
    /// The layout for which it is valid: where the backups are.
    pub layout: u64,
    /// The request it answers.
    pub request: RequestNumber,
    /// The epochs marked.
    pub marks: Vec<(Vm, Epoch)>,
}

/// How to handle a frame that has arrived from another VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arriving {
    /// Give it to the inbox.
    Deliver,
    /// Cut the running epoch first.
    AfterCut,
    /// Drop it: it is from a generation that was undone.
    Undone,
    /// Don't take it yet: this VM does not know its generation. It will be sent again.
    Early,
}

/// The marks of one VM.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Marker {
    vm: Vm,
    stamp: Stamp,
    layout: u64,
    /// The highest number that was requested.
    asked: RequestNumber,
    /// The first and the last epoch that was cut, and of which the backup may have a copy.
    cuts: Option<(Epoch, Epoch)>,
    /// The newest epoch of which a frame has left for another VM.
    heard: Epoch,
    /// The epoch that ended with the newest mark, if the backup may have a copy of it.
    marked: Option<Epoch>,
    committed: Option<Epoch>,
}

impl Marker {
    /// The marker of a VM that begins a generation from the end of `base`.
    pub fn new(generation: Generation, layout: u64, vm: Vm, base: Epoch) -> Self {
        let (mark, asked) = Default::default();
        let (stamp, cuts, heard) = (Stamp { generation, mark }, None, base);
        let (marked, committed) = (None, Some(base));
        Self { vm, stamp, layout, asked, cuts, heard, marked, committed }
    }

    /// The stamp that a frame that leaves now must carry.
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// Whether the initiator or a frame waits for a cut.
    pub fn wants_cut(&self) -> bool {
        self.asked > self.stamp.mark
    }

    /// Records a cut while the VM is paused. Frames that it sends from now on carry the mark.
    pub fn cut(&mut self, epoch: Epoch) {
        let (first, _) = self.cuts.unwrap_or((epoch, epoch));
        self.cuts = Some((first, epoch));
        self.mark();
    }

    /// Records that a frame of that epoch leaves for another VM.
    pub fn sent(&mut self, epoch: Epoch) {
        self.heard = self.heard.max(epoch);
    }

    /// Marks an earlier cut, if no frame has left since: it is equivalent to a cut made now. The
    /// newest one that is copied is marked, if there is one. So the cluster does not wait for a VM
    /// that is idle, or stays paused, or can't be cut.
    fn mark(&mut self) {
        let cuts = self.cuts.filter(|(_, last)| *last >= self.heard && self.wants_cut());
        if let Some((first, _)) = cuts {
            let copied = self.committed.unwrap_or(first);
            (self.stamp.mark, self.marked) = (self.asked, Some(first.max(self.heard).max(copied)));
        }
    }

    /// Records that an epoch is in the non-volatile copy.
    pub fn committed(&mut self, epoch: Epoch) {
        self.committed = self.committed.max(Some(epoch));
    }

    /// Records that backups were replaced. If this VM's backup was, its committed epochs are lost,
    /// and so is its mark: the next request has another one.
    pub fn rearranged(&mut self, layout: u64, is_lost: bool) {
        self.layout = layout;
        if is_lost {
            (self.cuts, self.marked, self.committed) = (None, None, None);
        }
    }

    /// Handles a request of the initiator. It gets an answer when the epoch that ends with the mark
    /// is in the non-volatile copy, and repeats the request until then. A repeated request gets the
    /// same answer; an older request gets none any more.
    pub fn requested(&mut self, generation: Generation, request: RequestNumber) -> Option<Answer> {
        if generation != self.stamp.generation || request < self.stamp.mark {
            return None;
        }
        self.asked = self.asked.max(request);
        self.mark();
        let is_copied = |marked: &Epoch| self.committed >= Some(*marked);
        let marked = self.marked.filter(is_copied).filter(|_| self.stamp.mark == request)?;
        Some(Answer { generation, layout: self.layout, request, marks: vec![(self.vm, marked)] })
    }

    /// Handles the stamp of a frame. The caller does this before it gives the frame to the inbox.
    pub fn arriving(&mut self, stamp: Stamp) -> Arriving {
        if stamp.generation < self.stamp.generation {
            return Arriving::Undone;
        }
        if stamp.generation > self.stamp.generation {
            return Arriving::Early;
        }
        self.asked = self.asked.max(stamp.mark);
        self.mark();
        if stamp.mark > self.stamp.mark { Arriving::AfterCut } else { Arriving::Deliver }
    }
}
