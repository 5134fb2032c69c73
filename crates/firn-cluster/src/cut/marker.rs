//! A VM's part in a cut.

use serde::{Deserialize, Serialize};

use crate::{Epoch, Generation, RequestNumber, Vm};

/// What every frame between VMs carries: its sender's timeline and newest mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Stamp {
    /// The timeline.
    pub generation: Generation,
    /// The newest mark.
    pub mark: RequestNumber,
}

/// The answer to a request: marks of VMs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Answer {
    /// The timeline.
    pub generation: Generation,
    /// The places of backups that it is about.
    pub layout: u64,
    /// The request it answers.
    pub request: RequestNumber,
    /// The epochs marked.
    pub marks: Vec<(Vm, Epoch)>,
}

/// What to do with a frame that has arrived from another VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arriving {
    /// Hand it to the inbox.
    Deliver,
    /// The epoch that runs has to be cut first.
    AfterCut,
    /// Drop it: it is from a timeline that was undone.
    Undone,
    /// Don't take it yet: this VM hasn't heard of its timeline. It will be sent again.
    Early,
}

/// The marks of one VM.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Marker {
    vm: Vm,
    stamp: Stamp,
    layout: u64,
    /// The newest number that somebody has asked for.
    asked: RequestNumber,
    /// The first and the last epoch that was cut, and whose copy may be had.
    cuts: Option<(Epoch, Epoch)>,
    /// The newest epoch of which a frame has left for another VM.
    heard: Epoch,
    /// The epoch that ended with the newest mark, if its copy may be had.
    marked: Option<Epoch>,
    committed: Option<Epoch>,
}

impl Marker {
    /// Of a VM that begins a generation from the end of `base`.
    pub fn new(generation: Generation, layout: u64, vm: Vm, base: Epoch) -> Self {
        let (mark, asked) = Default::default();
        let (stamp, cuts, heard) = (Stamp { generation, mark }, None, base);
        let (marked, committed) = (None, Some(base));
        Self { vm, stamp, layout, asked, cuts, heard, marked, committed }
    }

    /// What a frame that leaves now must carry.
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// Whether somebody waits for a cut: the initiator, or a frame.
    pub fn wants_cut(&self) -> bool {
        self.asked > self.stamp.mark
    }

    /// The VM is paused at the end of an epoch. What it sends from now on carries the mark.
    pub fn cut(&mut self, epoch: Epoch) {
        let (first, _) = self.cuts.unwrap_or((epoch, epoch));
        self.cuts = Some((first, epoch));
        self.mark();
    }

    /// A frame of that epoch leaves for another VM.
    pub fn sent(&mut self, epoch: Epoch) {
        self.heard = self.heard.max(epoch);
    }

    /// A cut since which nothing has left is as good as one made now: the newest that is copied, if there is one. So a VM that is idle, or
    /// stands still for good, or can't be cut, is not waited for.
    fn mark(&mut self) {
        let cuts = self.cuts.filter(|(_, last)| *last >= self.heard && self.wants_cut());
        if let Some((first, _)) = cuts {
            let copied = self.committed.unwrap_or(first);
            (self.stamp.mark, self.marked) = (self.asked, Some(first.max(self.heard).max(copied)));
        }
    }

    /// An epoch is in the non-volatile copy.
    pub fn committed(&mut self, epoch: Epoch) {
        self.committed = self.committed.max(Some(epoch));
    }

    /// Backups were replaced. If this VM's was, what it had committed is gone with it, and so is its mark: the next request has
    /// another one.
    pub fn rearranged(&mut self, layout: u64, is_lost: bool) {
        self.layout = layout;
        if is_lost {
            (self.cuts, self.marked, self.committed) = (None, None, None);
        }
    }

    /// The initiator asks. It gets its answer when the epoch that ends with the mark is in the non-volatile copy, and asks until then. Asked
    /// again, the answer is the same; an older request is not answered any more.
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

    /// A frame has arrived. To be asked before the inbox is.
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
