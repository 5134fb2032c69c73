//! Dirty-page prediction: pages that are written again and again stay writable and are copied in
//! the pause; all other written pages are copied ahead of it.
//!
//! ```text
//!                      |<------------- epoch ------------->|
//!      guest           ------w------w-----------w--w-------|.......|---
//!      Firn                          ahead: protect, copy      pause: copy written and hot pages
//!
//!                 found written                   not written until the cut
//!   Protected ----------------> Written --ahead--------------------------------> Protected
//!                                  ^         \
//!               unchanged, or      |          \ written again before the cut
//!               one epoch in four  +--- Hot <--'
//!                                        '--> copied in the pause, and not protected
//! ```
//!
//! VPC (III.A) predicts from one epoch to the next: a page that was written starts writable and
//! costs no page fault. All these pages are then copied in the pause, whether they were written or
//! not. Here the prediction is about the last moments of an epoch, between the copying ahead and
//! the cut: only pages written in those moments have to be copied in the pause, and only pages
//! written in those of the last epoch are left writable. So a pause is shorter by the pages that
//! are copied ahead, and a page that is written all the time costs no fault.
//!
//! Whether a page that was left writable was written is determined later, outside the pause, by
//! comparing its copy with the one before; if not, it isn't sent, and is no longer hot. That it was
//! written at some time in an epoch does not imply that it was written in its last moments. So one
//! epoch in four it is tested: protected and copied ahead like others, for one fault if it is still
//! hot.
//!
//! **A busy guest** writes so many pages that their faults would take more of its time than copying
//! them in the pause does. For such a guest Firn does as VPC: no page is copied ahead, and a page
//! written in one epoch is hot in the next. Programs run in loops that take longer than an
//! interval, so it is hot until its copy was found unchanged four times in a row. `busy` decides
//! when a guest is busy, and for how long.
//!
//! **A page is protected before it is copied**, and the scan of the next pause finds later writes
//! to it. A page that is not protected stays writable, and then it is in each scan. So no write is
//! missed, whenever comparing ends.
//!
//! The scan is asynchronous (write-protect, then `PAGEMAP_SCAN`): a page that is not protected
//! counts as written.

use std::ops::Range;

mod busy;
mod set;

use busy::{BusyDetector, ComparedEpoch};

pub use set::PageSet;

/// How to handle the pages of a VM while it is paused for a cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CutPlan {
    /// Pages to copy before the VM runs again.
    pub copy: PageSet,
    /// Pages whose copies made ahead belong to this epoch: they were not written since. None of
    /// them is in `copy`.
    pub ahead: PageSet,
    /// Of both, the pages that must be sent whatever the comparison finds: they were protected, and
    /// are written.
    pub written: PageSet,
    /// Pages to write-protect before the VM runs again; each is in `copy`.
    pub protect: PageSet,
}

impl CutPlan {
    /// The number of pages of this epoch, as far as it is known at the cut.
    pub fn page_count(&self) -> usize {
        self.copy.len() + self.ahead.len()
    }
}

/// The results of prediction, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PredictionCounts {
    /// Writes to hot pages: page faults saved.
    pub predicted: u64,
    /// Writes to protected pages: page faults taken.
    pub faulted: u64,
    /// Hot pages that were copied without having changed.
    pub unchanged: u64,
}

/// Which pages of one VM are copied ahead, and which stay writable.
#[derive(Clone, Debug)]
pub struct DirtyPagePredictor {
    predicts: bool,
    /// Pages left writable at the last cut, and in its `copy`.
    hot: PageSet,
    /// Pages that were hot since the last cut, so that a scan does not determine whether they were
    /// written since.
    cooled: PageSet,
    /// Pages protected and copied ahead of the next cut.
    ahead: PageSet,
    /// Determines which of the hot pages are tested next.
    trial: u32,
    busy: BusyDetector,
    /// Hot pages of a busy guest that were unchanged in the last epoch, in the last two, and so on.
    idle: [PageSet; IDLE_EPOCHS_MAX - 1],
    counts: PredictionCounts,
}

/// Each hot page is tested once in this number of epochs, unless the guest is busy.
const TRIALS: u32 = 4;
/// The number of epochs for which a busy guest, or a hot page of one, may be idle.
const IDLE_EPOCHS_MAX: usize = 4;

impl DirtyPagePredictor {
    /// A predictor for a VM whose pages are all write-protected. Without prediction no page is
    /// copied ahead, and every written page is protected again at each cut.
    pub fn new(predicts: bool) -> Self {
        let (hot, cooled, ahead) = (PageSet::new(), PageSet::new(), PageSet::new());
        let (trial, busy, counts) =
            (0, BusyDetector::new(usize::MAX..usize::MAX), PredictionCounts::default());
        let idle = Default::default();
        Self { predicts, hot, cooled, ahead, trial, busy, idle, counts }
    }

    /// Sets the number of pages per epoch that make a guest busy, and the number of copied pages in
    /// its pause at which it is not busy any more. By default no guest is busy.
    #[must_use]
    pub fn with_busy_counts(self, page_counts: Range<usize>) -> Self {
        Self { busy: BusyDetector::new(page_counts), ..self }
    }

    /// Whether pages are copied ahead of the next cut.
    pub fn is_copying_ahead(&self) -> bool {
        self.predicts && !self.busy.is_busy()
    }

    /// Determines, shortly before a cut, which pages to protect and then to copy while the VM runs.
    /// `scanned` are the pages that a scan found written or not protected. It may be called several
    /// times: the newest copy of a page counts.
    pub fn plan_ahead(&mut self, scanned: &PageSet) -> PageSet {
        if !self.is_copying_ahead() {
            return PageSet::new();
        }
        self.cool_some();
        let mut ahead = scanned.clone();
        ahead.subtract(&self.hot);
        self.ahead.extend_from(&ahead);
        ahead
    }

    /// Removes a part of the hot pages, another part each time.
    fn cool_some(&mut self) {
        let tried: PageSet = self.hot.iter().filter(|page| page.0 % TRIALS == self.trial).collect();
        self.hot.subtract(&tried);
        self.cooled.extend_from(&tried);
        self.trial = (self.trial + 1) % TRIALS;
    }

    /// Plans a cut while the VM is paused. `scanned` are the pages that a scan found written or not
    /// protected.
    pub fn plan_cut(&mut self, scanned: &PageSet) -> CutPlan {
        let mut ahead = std::mem::take(&mut self.ahead);
        let mut again = scanned.clone();
        again.intersect(&ahead);
        ahead.subtract(scanned);
        let written = self.find_surely_written(scanned, &ahead, &again);
        self.hot.extend_from(&self.find_newly_hot(scanned, again, &written));
        self.cooled = PageSet::new();
        self.busy.record_cut();
        let mut protect = scanned.clone();
        protect.subtract(&self.hot);
        CutPlan { copy: scanned.clone(), ahead, written, protect }
    }

    /// The pages that are left writable, besides those that are hot already.
    fn find_newly_hot(&self, scanned: &PageSet, again: PageSet, written: &PageSet) -> PageSet {
        if !self.busy.is_busy() {
            return again;
        }
        let mut staying = scanned.clone();
        staying.intersect(written);
        staying
    }

    /// All pages but those left writable at the last cut, unless they were protected and written
    /// since.
    fn find_surely_written(
        &mut self,
        scanned: &PageSet,
        ahead: &PageSet,
        again: &PageSet,
    ) -> PageSet {
        let mut written = scanned.clone();
        written.extend_from(ahead);
        written.subtract(&self.hot);
        written.subtract(&self.cooled);
        written.extend_from(again);
        self.counts.faulted += written.len() as u64;
        written
    }

    /// Gives up a plan that is too large to be stored and compared: all of its pages are protected,
    /// and nothing is predicted about them.
    pub fn give_up_plan(&mut self, plan: &mut CutPlan) {
        plan.protect.clone_from(&plan.copy);
        self.hot = PageSet::new();
        self.busy.end_busy();
    }

    /// Records the comparison of the last cut's copies with those before: the pages `same` are
    /// unchanged and aren't sent. The number of other pages determines whether the guest is busy.
    ///
    /// It may be called at any time until the next cut. A comparison that comes later, or never,
    /// costs a page sent without need.
    pub fn record_unchanged(&mut self, plan: &CutPlan, same: &PageSet) {
        let mut cooled = same.clone();
        cooled.intersect(&self.hot);
        if self.busy.is_busy() {
            cooled = self.expire_idle(cooled);
        }
        let left_writable = plan.page_count() - plan.written.len();
        let spared = left_writable.saturating_sub(same.len());
        self.counts.unchanged += same.len() as u64;
        self.counts.predicted += spared as u64;
        let (copied, written) = (plan.copy.len(), plan.page_count().saturating_sub(same.len()));
        let epoch = ComparedEpoch { copied, written, spared, same: same.len() };
        if self.predicts && self.busy.record_comparison(epoch) {
            // The next scan finds pages that stay writable, and they are copied once more.
            cooled = self.hot.clone();
        }
        self.hot.subtract(&cooled);
        self.cooled.extend_from(&cooled);
    }

    /// Records unchanged hot pages of a busy guest. Returns those that were unchanged often enough.
    fn expire_idle(&mut self, same: PageSet) -> PageSet {
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
    pub fn hot_pages(&self) -> &PageSet {
        &self.hot
    }

    /// The results of prediction so far.
    pub fn counts(&self) -> PredictionCounts {
        self.counts
    }
}

#[cfg(test)]
mod tests;
