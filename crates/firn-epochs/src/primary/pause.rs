//! Pause: the work at the end of an epoch. Some pages are copied ahead, while the VM runs. In the
//! pause its writes are found, and the pages are protected again and copied.

use std::time::{Duration, Instant};

use crossbeam_channel::{SendTimeoutError, Sender};
use firn_cluster::Epoch;
use firn_cluster::member::OfEpoch;
use firn_cluster::predict::{CutPlan, PageSet, Predictor};
use firn_disks::Change;
use firn_types::Page;

use super::{CutNumbers, Ending, LOOK, Options, Told, Watch, ms};
use crate::guest::{Guest, GuestError, Still};
use crate::sender::Job;
use crate::wire::{PAGES_MAX, Pages};

/// The maximum length of a pause in which an epoch is sent.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Announces that the VM is about to be stopped, until this is dropped.
pub(super) struct Stopping<'a>(&'a dyn Watch);

impl<'a> Stopping<'a> {
    pub(super) fn tell(told: &'a dyn Watch) -> Self {
        told.told(Told::Stopping);
        Self(told)
    }
}

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.told(Told::GoesOn);
    }
}

/// Protects the pages that need not wait for the pause, and copies them to the beginning of
/// `bytes`. Returns the pages, in order.
pub(super) fn ahead(
    guest: &mut Guest,
    predictor: &mut Predictor,
    options: &Options,
    bytes: &mut Vec<u8>,
) -> Result<Vec<Page>, GuestError> {
    if !predictor.copies_ahead() {
        return Ok(Vec::new());
    }
    let scanned = guest.glance()?;
    if scanned.len() as u64 > options.buffer_pages {
        return Ok(Vec::new());
    }
    let pages = predictor.ahead(&scanned);
    guest.protect_running(&pages)?;
    firn_fault::point("protect.ahead");
    guest.copy_running(&pages, bytes)?;
    Ok(pages.iter().collect())
}

/// The work in the pause.
pub(super) struct Inside<'a> {
    pub(super) epoch: Epoch,
    pub(super) predictor: &'a mut Predictor,
    pub(super) options: &'a Options,
    pub(super) jobs: &'a Sender<Job>,
    pub(super) ending: &'a Ending,
    pub(super) told: &'a dyn Watch,
    /// The buffer for copies. It begins with the copies of `ahead` pages.
    pub(super) bytes: &'a mut Vec<u8>,
    pub(super) ahead: usize,
    pub(super) numbers: CutNumbers,
}

/// The result of a cut: the changes of the VM in an epoch.
pub(super) struct Found {
    /// The pages that were to be copied.
    pub(super) plan: CutPlan,
    /// The pages that were added to `bytes`.
    pub(super) pages: Vec<Page>,
    /// The changes of each disk.
    pub(super) disks: Vec<Vec<Change>>,
    /// The state of its network card that belongs to the epoch.
    pub(super) card: Option<OfEpoch>,
    pub(super) numbers: CutNumbers,
}

impl Inside<'_> {
    /// Cuts disks and memory.
    pub(super) fn run(&mut self, still: &Still<'_>) -> Result<Found, GuestError> {
        let card = self.told.still(self.epoch);
        let disks = still.cut_disks(self.epoch)?;
        let started = Instant::now();
        let scanned = match self.options.predicts {
            true => still.written()?,
            // All written pages are to be protected, which this call does as well.
            false => still.written_and_protect()?,
        };
        let scan_ms = ms(started.elapsed());
        firn_fault::point("protect.scanned");
        let mut plan = self.predictor.cut(&scanned);
        if self.is_large(&plan) {
            self.predictor.give_up(&mut plan);
        }
        let started = Instant::now();
        if self.options.predicts {
            still.protect(&plan.protect)?;
        }
        let protect_ms = ms(started.elapsed());
        let started = Instant::now();
        let pages = self.copy(still, &plan.copy)?;
        firn_fault::point("protect.copied");
        let numbers = CutNumbers {
            scan_ms,
            protect_ms,
            copy_ms: ms(started.elapsed()),
            copied: plan.copy.len() as u64,
            ahead: plan.ahead.len() as u64,
            written: plan.written.len() as u64,
            protected: plan.protect.len() as u64,
            ..self.numbers
        };
        Ok(Found { plan, pages, disks, card, numbers })
    }

    fn copy(&mut self, still: &Still<'_>, pages: &PageSet) -> Result<Vec<Page>, GuestError> {
        let numbers: Vec<Page> = pages.iter().collect();
        if (self.ahead + numbers.len()) as u64 <= self.options.buffer_pages {
            still.copy(pages, self.ahead, self.bytes)?;
            return Ok(numbers);
        }
        let since = Instant::now();
        for some in numbers.chunks(PAGES_MAX) {
            let mut bytes = Vec::new();
            still.copy(&some.iter().copied().collect(), 0, &mut bytes)?;
            self.hand_over(Pages { numbers: some.to_vec(), bytes }, since)?;
        }
        Ok(Vec::new())
    }

    /// Whether the epoch is too large for the buffer, and is sent in parts from within the pause.
    fn is_large(&self, plan: &CutPlan) -> bool {
        (self.ahead + plan.copy.len()) as u64 > self.options.buffer_pages
    }

    /// Hands a part to the sender. Gives up if the backup takes too long or the end is requested,
    /// so that the VM does not remain paused.
    fn hand_over(&self, pages: Pages, since: Instant) -> Result<(), GuestError> {
        let mut part = Job::Part(self.epoch, pages);
        loop {
            part = match self.jobs.send_timeout(part, LOOK) {
                Ok(()) => return Ok(()),
                Err(SendTimeoutError::Disconnected(_)) => return Err(GuestError::NobodyTakes),
                Err(SendTimeoutError::Timeout(part)) => part,
            };
            if since.elapsed() > PAUSE_MAX || self.ending.is_asked() {
                return Err(GuestError::NobodyTakes);
            }
        }
    }
}
