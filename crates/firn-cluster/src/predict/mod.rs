//! Dirty-page prediction: what is written again and again stays writable and is copied in the pause; all else that was written is
//! copied ahead of it.
//!
//! ```text
//!                      |<------------- epoch ------------->|
//!      guest           ------w------w-----------w--w-------|.......|---
//!      Firn                               ahead: protect, copy      pause: copy what was written since, and what is hot
//!
//!                 found written                   not written until the cut
//!   Protected ----------------> Written --ahead--------------------------------> Protected
//!                                  ^         \
//!               unchanged, or      |          \ written again before the cut
//!               one epoch in four  +--- Hot <--'
//!                                        '--> copied in the pause, and not protected
//! ```
//!
//! VPC (III.A) predicts from one epoch to the next: what was written starts writable and costs no page fault. All of it, written or
//! not, is copied in the pause then. Here the prediction is about the last moments of an epoch, between the copying ahead and the
//! cut: only what is written in those has to be copied in the pause, and only what was written in those of the last epoch is left
//! writable. So a pause is shorter by what is copied ahead, and a page that is written all the time costs no fault.
//!
//! Whether a page left writable was written is found out later, outside the pause, by comparing its copy with the one before; if
//! not, it isn't sent, and is no longer hot. That it was written some time in an epoch does not say that it was in its last moments. So
//! one epoch in four it is tried: protected and copied ahead like others, for one fault if it is still hot.
//!
//! **A busy guest** writes so many pages that their faults would take more of its time than copying them in the pause does. Then it is as VPC has
//! it: nothing is copied ahead, and what was written in one epoch is hot in the next. Programs go round in loops that take longer than an
//! interval, so it is hot until its copy was found unchanged four times in a row. Who is busy, and for how long, is decided in `busy`.
//!
//! **A page is protected before it is copied**, and what is written after that is found by the scan of the next pause. It stays
//! writable where it is not protected, and then it is in each scan. So no write is missed, whenever comparing ends.
//!
//! The scan is asynchronous (write-protect, then `PAGEMAP_SCAN`): a page that is not protected counts as written.

use std::ops::Range;

mod busy;
mod set;

use busy::{Busy, Compared};

pub use set::PageSet;

/// What to do with the pages of a VM while it is paused for a cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CutPlan {
    /// Pages to copy before the VM runs on.
    pub copy: PageSet,
    /// Pages whose copies made ahead are of this epoch: nobody has written to them since. None of them is in `copy`.
    pub ahead: PageSet,
    /// Of both, the ones that must be sent whatever comparing says: they were protected, and are written.
    pub written: PageSet,
    /// Pages to write-protect before the VM runs on; each is in `copy`.
    pub protect: PageSet,
}

impl CutPlan {
    /// Pages of this epoch, as far as can be known at the cut.
    pub fn pages(&self) -> usize {
        self.copy.len() + self.ahead.len()
    }
}

/// What prediction was worth, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Writes to hot pages: page faults saved.
    pub predicted: u64,
    /// Writes to protected pages: page faults taken.
    pub faulted: u64,
    /// Hot pages copied for nothing.
    pub unchanged: u64,
}

/// Which pages of one VM are copied ahead, and which stay writable.
#[derive(Clone, Debug)]
pub struct Predictor {
    predicts: bool,
    /// Left writable at the last cut, and in `copy` of it.
    hot: PageSet,
    /// Were hot since the last cut, so that a scan does not tell whether they were written since.
    cooled: PageSet,
    /// Protected and copied ahead of the next cut.
    ahead: PageSet,
    /// Which of the hot pages are tried next.
    turn: u32,
    busy: Busy,
    /// Hot pages of a busy guest that were unchanged in the last epoch, in the last two, and so on.
    idle: [PageSet; PATIENCE - 1],
    counts: Counts,
}

/// Each hot page is tried once in so many turns, unless the guest is busy.
const TURNS: u32 = 4;
/// How many epochs a busy guest, or a hot page of one, may be at rest.
const PATIENCE: usize = 4;

impl Predictor {
    /// A predictor for a VM whose pages are all write-protected. Without prediction nothing is copied ahead, and every page written
    /// is protected again at each cut.
    pub fn new(predicts: bool) -> Self {
        let (hot, cooled, ahead) = (PageSet::new(), PageSet::new(), PageSet::new());
        let (turn, busy, counts) = (0, Busy::new(usize::MAX..usize::MAX), Counts::default());
        let idle = Default::default();
        Self { predicts, hot, cooled, ahead, turn, busy, idle, counts }
    }

    /// A guest that writes so many pages in an epoch is busy, unless more than that are copied in its pause. By default none is.
    #[must_use]
    pub fn with_busy(self, pages: Range<usize>) -> Self {
        Self { busy: Busy::new(pages), ..self }
    }

    /// Whether anything is copied ahead of the next cut.
    pub fn copies_ahead(&self) -> bool {
        self.predicts && !self.busy.is()
    }

    /// The next cut is near, and a scan found these pages written or not protected: what to protect and then to copy while the VM
    /// runs. May be asked more than once: the newest copy of a page counts.
    pub fn ahead(&mut self, scanned: &PageSet) -> PageSet {
        if !self.copies_ahead() {
            return PageSet::new();
        }
        self.cool_some();
        let mut ahead = scanned.clone();
        ahead.subtract(&self.hot);
        self.ahead.extend_from(&ahead);
        ahead
    }

    /// Some of the hot pages are no longer taken to be, in turn.
    fn cool_some(&mut self) {
        let tried: PageSet = self.hot.iter().filter(|page| page.0 % TURNS == self.turn).collect();
        self.hot.subtract(&tried);
        self.cooled.extend_from(&tried);
        self.turn = (self.turn + 1) % TURNS;
    }

    /// The VM is paused, and a scan found these pages written or not protected.
    pub fn cut(&mut self, scanned: &PageSet) -> CutPlan {
        let mut ahead = std::mem::take(&mut self.ahead);
        let mut again = scanned.clone();
        again.intersect(&ahead);
        ahead.subtract(scanned);
        let written = self.surely_written(scanned, &ahead, &again);
        self.hot.extend_from(&self.staying(scanned, again, &written));
        self.cooled = PageSet::new();
        self.busy.cut();
        let mut protect = scanned.clone();
        protect.subtract(&self.hot);
        CutPlan { copy: scanned.clone(), ahead, written, protect }
    }

    /// What is left writable, beside what is hot already.
    fn staying(&self, scanned: &PageSet, again: PageSet, written: &PageSet) -> PageSet {
        if !self.busy.is() {
            return again;
        }
        let mut staying = scanned.clone();
        staying.intersect(written);
        staying
    }

    /// All but what was left writable at the last cut, unless it was protected and written since.
    fn surely_written(&mut self, scanned: &PageSet, ahead: &PageSet, again: &PageSet) -> PageSet {
        let mut written = scanned.clone();
        written.extend_from(ahead);
        written.subtract(&self.hot);
        written.subtract(&self.cooled);
        written.extend_from(again);
        self.counts.faulted += written.len() as u64;
        written
    }

    /// The plan of this cut is too large to be kept and compared: all of its pages are protected, and nothing is predicted of them.
    pub fn give_up(&mut self, plan: &mut CutPlan) {
        plan.protect.clone_from(&plan.copy);
        self.hot = PageSet::new();
        self.busy.stop();
    }

    /// Copies of the last cut were compared with those before: these pages are the same. They aren't sent. How many are not says whether the
    /// guest is busy.
    ///
    /// May come at any time until the next cut; a comparison that comes later, or never, costs a page sent for nothing.
    pub fn unchanged(&mut self, plan: &CutPlan, same: &PageSet) {
        let mut cooled = same.clone();
        cooled.intersect(&self.hot);
        if self.busy.is() {
            cooled = self.out_of_patience(cooled);
        }
        let left_writable = plan.pages() - plan.written.len();
        let spared = left_writable.saturating_sub(same.len());
        self.counts.unchanged += same.len() as u64;
        self.counts.predicted += spared as u64;
        let (copied, written) = (plan.copy.len(), plan.pages().saturating_sub(same.len()));
        let epoch = Compared { copied, written, spared, same: same.len() };
        if self.predicts && self.busy.compared(epoch) {
            // What stays writable is found by the next scan, and copied once more.
            cooled = self.hot.clone();
        }
        self.hot.subtract(&cooled);
        self.cooled.extend_from(&cooled);
    }

    /// Hot pages of a busy guest are unchanged; those that were often enough.
    fn out_of_patience(&mut self, same: PageSet) -> PageSet {
        self.idle.rotate_right(1);
        let mut oldest = std::mem::take(&mut self.idle[0]);
        oldest.intersect(&same);
        let mut newest = same.clone();
        newest.subtract(&oldest);
        for idle in &mut self.idle[1..] {
            idle.intersect(&same);
            newest.subtract(idle);
        }
        self.idle[0] = newest;
        oldest
    }

    /// Pages that are left writable.
    pub fn hot(&self) -> &PageSet {
        &self.hot
    }

    /// What it was worth so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

#[cfg(test)]
mod tests;
