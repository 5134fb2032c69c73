//! Cut marker: the part of one VM in a cut.

use serde::{Deserialize, Serialize};

use crate::{Epoch, Generation, RequestNumber, VmId};

/// The stamp of every frame between VMs: its sender's generation and newest mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FrameStamp {
    /// The generation.
    pub generation: Generation,
    /// The newest mark.
    pub mark: RequestNumber,
}

/// The answer to a request: marks of VMs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MarkAnswer {
    /// The generation.
    pub generation: Generation,
    /// The layout for which it is valid: where the backups are.
    pub layout: u64,
    /// The request it answers.
    pub request: RequestNumber,
    /// The epochs marked.
    pub marks: Vec<(VmId, Epoch)>,
}

/// How to handle a frame that has arrived from another VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StampDecision {
    /// Give it to the receive counters.
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
pub struct CutMarker {
    vm: VmId,
    stamp: FrameStamp,
    layout: u64,
    /// The highest number that was requested.
    requested: RequestNumber,
    /// The first and the last epoch that was cut, and of which the backup may have a copy.
    cuts: Option<(Epoch, Epoch)>,
    /// The newest epoch of which a frame has left for another VM.
    newest_sent: Epoch,
    /// The epoch that ended with the newest mark, if the backup may have a copy of it.
    marked: Option<Epoch>,
    committed: Option<Epoch>,
}

impl CutMarker {
    /// The marker of a VM that begins a generation from the end of `base`.
    pub fn new(generation: Generation, layout: u64, vm: VmId, base: Epoch) -> Self {
        let (mark, requested) = Default::default();
        let (stamp, cuts, newest_sent) = (FrameStamp { generation, mark }, None, base);
        let (marked, committed) = (None, Some(base));
        Self { vm, stamp, layout, requested, cuts, newest_sent, marked, committed }
    }

    /// The stamp that a frame that leaves now must carry.
    pub fn current_stamp(&self) -> FrameStamp {
        self.stamp
    }

    /// Whether the initiator or a frame waits for a cut.
    pub fn is_cut_needed(&self) -> bool {
        self.requested > self.stamp.mark
    }

    /// Records a cut while the VM is paused. Frames that it sends from now on carry the mark.
    pub fn record_cut(&mut self, epoch: Epoch) {
        let (first, _) = self.cuts.unwrap_or((epoch, epoch));
        self.cuts = Some((first, epoch));
        self.update_mark();
    }

    /// Records that a frame of that epoch leaves for another VM.
    pub fn record_sent(&mut self, epoch: Epoch) {
        self.newest_sent = self.newest_sent.max(epoch);
    }

    /// Marks an earlier cut, if no frame has left since: it is equivalent to a cut made now. The
    /// newest one that is copied is marked, if there is one. So the cluster does not wait for a VM
    /// that is idle, or stays paused, or can't be cut.
    fn update_mark(&mut self) {
        let cuts = self.cuts.filter(|(_, last)| *last >= self.newest_sent && self.is_cut_needed());
        if let Some((first, _)) = cuts {
            let copied = self.committed.unwrap_or(first);
            (self.stamp.mark, self.marked) =
                (self.requested, Some(first.max(self.newest_sent).max(copied)));
        }
    }

    /// Records that an epoch is in the non-volatile copy.
    pub fn record_commit(&mut self, epoch: Epoch) {
        self.committed = self.committed.max(Some(epoch));
    }

    /// Records that backups were replaced. If this VM's backup was, its committed epochs are lost,
    /// and so is its mark: the next request has another one.
    pub fn change_layout(&mut self, layout: u64, is_lost: bool) {
        self.layout = layout;
        if is_lost {
            (self.cuts, self.marked, self.committed) = (None, None, None);
        }
    }

    /// Handles a request of the initiator. It gets an answer when the epoch that ends with the mark
    /// is in the non-volatile copy, and repeats the request until then. A repeated request gets the
    /// same answer; an older request gets none any more.
    pub fn request_mark(
        &mut self,
        generation: Generation,
        request: RequestNumber,
    ) -> Option<MarkAnswer> {
        if generation != self.stamp.generation || request < self.stamp.mark {
            return None;
        }
        self.requested = self.requested.max(request);
        self.update_mark();
        let is_copied = |marked: &Epoch| self.committed >= Some(*marked);
        let marked = self.marked.filter(is_copied).filter(|_| self.stamp.mark == request)?;
        Some(MarkAnswer {
            generation,
            layout: self.layout,
            request,
            marks: vec![(self.vm, marked)],
        })
    }

    /// Handles the stamp of a frame. The caller does this before it gives the frame to the receive
    /// counters.
    pub fn check_frame(&mut self, stamp: FrameStamp) -> StampDecision {
        if stamp.generation < self.stamp.generation {
            return StampDecision::Undone;
        }
        if stamp.generation > self.stamp.generation {
            return StampDecision::Early;
        }
        self.requested = self.requested.max(stamp.mark);
        self.update_mark();
        if stamp.mark > self.stamp.mark { StampDecision::AfterCut } else { StampDecision::Deliver }
    }
}
