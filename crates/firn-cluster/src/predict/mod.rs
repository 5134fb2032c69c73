//! Dirty-page prediction (VPC III.A): what is written in one epoch is likely written in the next, so it starts that one
//! writable and costs no page fault.
//!
//! ```text
//!                  found written by the scan
//!   Protected -----------------------------------> Candidate <---+
//!       ^                                           |   ^  |     |
//!       |                  compared: as in the copy |   |  +-----+  compared: changed
//!       |                  before                   v   |
//!       +----------------------------------------- Leaving
//!          next cut (copied once more, then           compared after that last copy: changed after all, and so
//!          protected, while the VM is paused)         protected but sent; it is no candidate until it is written again
//! ```
//!
//! A cut copies everything that may have been written: what the scan found, and every page that was left writable. Whether
//! a page left writable was written is found out later, outside the pause, by comparing its copy with the one before; if
//! not, it isn't sent.
//!
//! **A page is protected only while the VM is paused, and copied in that same pause.** If a page were protected as soon as
//! it is found unchanged, while the VM runs, what the guest wrote between the cut and that moment would be lost: nothing
//! would ever report it. This is why a page *leaves* for one more epoch.
//!
//! The scan is asynchronous (write-protect, then `PAGEMAP_SCAN`), so "found written" is known at the cut only, and a page
//! found written is already writable: it stays as it is.

mod set;

pub use set::PageSet;

/// What to do with the pages of a VM while it is paused for a cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CutPlan {
    /// Pages whose contents belong to this epoch, as far as can be known now. Copy them before the VM runs on.
    pub copy: PageSet,
    /// Of these, the ones that must be sent whatever comparing says: they were protected, and are written.
    pub written: PageSet,
    /// Pages to write-protect before the VM runs on; each is in `copy`.
    pub protect: PageSet,
}

/// What prediction was worth, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Writes to candidates: page faults saved.
    pub predicted: u64,
    /// Writes to protected pages: page faults taken.
    pub faulted: u64,
    /// Candidates copied for nothing.
    pub unchanged: u64,
}

/// Which pages of one VM start the next epoch writable.
#[derive(Clone, Debug)]
pub struct Predictor {
    predicts: bool,
    /// Writable since the last cut, and in `copy` of it.
    writable: PageSet,
    /// Of these, the ones to protect at the next cut.
    leaving: PageSet,
    counts: Counts,
}

impl Predictor {
    /// A predictor for a VM whose pages are all write-protected. Without prediction every page written is protected again
    /// at each cut.
    pub fn new(predicts: bool) -> Self {
        let (writable, leaving) = (PageSet::new(), PageSet::new());
        Self { predicts, writable, leaving, counts: Counts::default() }
    }

    /// The VM is paused, and a scan found these pages written, or not protected, which is the same to it.
    pub fn cut(&mut self, scanned: &PageSet) -> CutPlan {
        let mut written = scanned.clone();
        written.subtract(&self.writable);
        let mut copy = scanned.clone();
        copy.extend_from(&self.writable);
        let protect = match self.predicts {
            true => std::mem::take(&mut self.leaving),
            false => copy.clone(),
        };
        self.writable.clone_from(&copy);
        self.writable.subtract(&protect);
        self.counts.faulted += written.len() as u64;
        CutPlan { copy, written, protect }
    }

    /// The plan of this cut is too large to be kept and compared: all of its pages are protected, and nothing is predicted of them.
    pub fn give_up(&mut self, plan: &mut CutPlan) {
        plan.protect.clone_from(&plan.copy);
        (self.writable, self.leaving) = (PageSet::new(), PageSet::new());
    }

    /// Copies of the last cut were compared with those before: these pages are the same. They aren't sent.
    ///
    /// May come at any time until the next cut; a comparison that comes later, or never, costs a page sent for nothing.
    pub fn unchanged(&mut self, plan: &CutPlan, same: &PageSet) {
        let mut leaving = same.clone();
        leaving.subtract(&plan.written);
        leaving.intersect(&self.writable);
        let compared = plan.copy.len() - plan.written.len();
        self.counts.unchanged += same.len() as u64;
        self.counts.predicted += compared.saturating_sub(same.len()) as u64;
        self.leaving.extend_from(&leaving);
    }

    /// Pages that are writable, the candidates of this epoch.
    pub fn candidates(&self) -> &PageSet {
        &self.writable
    }

    /// What it was worth so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

#[cfg(test)]
mod tests;
