//! A host's part in a cut.

use std::collections::BTreeMap;

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

/// A host's answer to a request: the marks of its VMs.
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

/// What to do with a frame that has arrived from another host, or from a VM of this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arriving {
    /// Hand it to the inbox.
    Deliver,
    /// The same; and send this answer to the initiator, whose request hasn't come yet.
    DeliverMarked(Answer),
    /// Drop it: it is from a timeline that was undone.
    Undone,
    /// Don't take it yet: this host hasn't heard of its timeline. It will be sent again.
    Early,
}

/// The marks of one host's VMs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Marker {
    stamp: Stamp,
    layout: u64,
    committed: BTreeMap<Vm, Epoch>,
    marked: Vec<(Vm, Epoch)>,
}

impl Marker {
    /// A host whose VMs begin a generation with these epochs committed.
    pub fn new(
        generation: Generation,
        layout: u64,
        committed: impl IntoIterator<Item = (Vm, Epoch)>,
    ) -> Self {
        let committed: BTreeMap<Vm, Epoch> = committed.into_iter().collect();
        let marked = committed.iter().map(|(&vm, &epoch)| (vm, epoch)).collect();
        let mark = RequestNumber::default();
        Self { stamp: Stamp { generation, mark }, layout, committed, marked }
    }

    /// What a frame that leaves now must carry.
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// A VM's epoch is in the non-volatile copy. Only then may frames of that epoch leave.
    pub fn committed(&mut self, vm: Vm, epoch: Epoch) {
        let newest = self.committed.entry(vm).or_insert(epoch);
        *newest = epoch.max(*newest);
    }

    /// Backups were replaced. What these VMs had committed is gone with theirs, and so are their marks: until the new backup
    /// has a copy ([`Marker::committed`]), an answer doesn't name them.
    pub fn rearranged(&mut self, layout: u64, without: impl IntoIterator<Item = Vm>) {
        self.layout = layout;
        for vm in without {
            self.committed.remove(&vm);
            self.marked.retain(|(marked, _)| *marked != vm);
        }
    }

    /// The initiator asks. Asked again, the answer is the same; an older request is not answered any more.
    pub fn requested(&mut self, generation: Generation, request: RequestNumber) -> Option<Answer> {
        if generation != self.stamp.generation || request < self.stamp.mark {
            return None;
        }
        self.mark(request);
        Some(self.answer())
    }

    /// A frame has arrived. To be asked before the inbox is.
    pub fn arriving(&mut self, stamp: Stamp) -> Arriving {
        if stamp.generation < self.stamp.generation {
            return Arriving::Undone;
        }
        if stamp.generation > self.stamp.generation {
            return Arriving::Early;
        }
        match self.mark(stamp.mark) {
            true => Arriving::DeliverMarked(self.answer()),
            false => Arriving::Deliver,
        }
    }

    fn mark(&mut self, request: RequestNumber) -> bool {
        let newer = request > self.stamp.mark;
        if newer {
            self.stamp.mark = request;
            self.marked = self.committed.iter().map(|(&vm, &epoch)| (vm, epoch)).collect();
        }
        newer
    }

    fn answer(&self) -> Answer {
        let Stamp { generation, mark: request } = self.stamp;
        Answer { generation, layout: self.layout, request, marks: self.marked.clone() }
    }
}
