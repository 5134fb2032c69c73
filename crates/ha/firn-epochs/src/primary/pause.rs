//! Pause: the work at the end of an epoch. Some pages are copied ahead, while the VM runs. In the
//! pause its writes are found, and the pages are protected again and copied.

use std::time::{Duration, Instant};

use crossbeam_channel::{SendTimeoutError, Sender};
use firn_cluster::Epoch;
use firn_cluster::member::NicEpoch;
use firn_cluster::predict::{CutPlan, DirtyPagePredictor, PageSet};
use firn_disks::DiskChange;
use firn_types::Page;

use super::{
    CutMeasurements, EndRequest, EpochOptions, POLL_INTERVAL, ProtectionCallbacks, ProtectionEvent,
    as_millis,
};
use crate::guest::{GuestError, PausedGuest, ProtectedGuest};
use crate::sender::SendJob;
use crate::wire::{PAGES_MAX, PageBatch};

/// The maximum length of a pause in which an epoch is sent.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Announces that the VM is about to be paused; when it is dropped, that the pause is over.
pub(super) struct PauseNotice<'a>(&'a dyn ProtectionCallbacks);

impl<'a> PauseNotice<'a> {
    pub(super) fn announce_pause(callbacks: &'a dyn ProtectionCallbacks) -> Self {
        callbacks.on_event(ProtectionEvent::Pausing);
        Self(callbacks)
    }
}

impl Drop for PauseNotice<'_> {
    fn drop(&mut self) {
        self.0.on_event(ProtectionEvent::PauseOver);
    }
}

/// Protects the pages that need not wait for the pause, and copies them to the beginning of
/// `bytes`. Returns the pages, in order.
pub(super) fn copy_ahead(
    guest: &mut ProtectedGuest,
    predictor: &mut DirtyPagePredictor,
    options: &EpochOptions,
    bytes: &mut Vec<u8>,
) -> Result<Vec<Page>, GuestError> {
    if !predictor.is_copying_ahead() {
        return Ok(Vec::new());
    }
    let scanned = guest.scan_written()?;
    if scanned.len() as u64 > options.buffer_pages {
        return Ok(Vec::new());
    }
    let pages = predictor.plan_ahead(&scanned);
    guest.protect_running(&pages)?;
    firn_fault::pass_point("protect.protected-ahead");
    guest.copy_running(&pages, bytes)?;
    Ok(pages.iter().collect())
}

/// The work in the pause.
pub(super) struct PauseWork<'a> {
    pub(super) epoch: Epoch,
    pub(super) predictor: &'a mut DirtyPagePredictor,
    pub(super) options: &'a EpochOptions,
    pub(super) jobs: &'a Sender<SendJob>,
    pub(super) ending: &'a EndRequest,
    pub(super) callbacks: &'a dyn ProtectionCallbacks,
    /// The buffer for copies. It begins with the copies of `ahead` pages.
    pub(super) bytes: &'a mut Vec<u8>,
    pub(super) ahead: usize,
    pub(super) measurements: CutMeasurements,
}

/// The result of a cut: the changes of the VM in an epoch.
pub(super) struct CutResult {
    /// The pages that were to be copied.
    pub(super) plan: CutPlan,
    /// The pages that were added to `bytes`.
    pub(super) pages: Vec<Page>,
    /// The changes of each disk.
    pub(super) disks: Vec<Vec<DiskChange>>,
    /// The state of its network card that belongs to the epoch.
    pub(super) card: Option<NicEpoch>,
    pub(super) measurements: CutMeasurements,
}

impl PauseWork<'_> {
    /// Cuts disks and memory.
    pub(super) fn cut_guest(&mut self, paused: &PausedGuest<'_>) -> Result<CutResult, GuestError> {
        let card = self.callbacks.on_paused(self.epoch);
        let disks = paused.cut_disks(self.epoch)?;
        let started = Instant::now();
        let scanned = match self.options.predicts {
            true => paused.written_pages()?,
            // All written pages are to be protected, which this call does as well.
            false => paused.reprotect_written()?,
        };
        let scan_ms = as_millis(started.elapsed());
        firn_fault::pass_point("protect.scanned");
        let mut plan = self.predictor.plan_cut(&scanned);
        if self.is_above_buffer(&plan) {
            self.predictor.give_up_plan(&mut plan);
        }
        let started = Instant::now();
        if self.options.predicts {
            paused.protect_pages(&plan.protect)?;
        }
        let protect_ms = as_millis(started.elapsed());
        let started = Instant::now();
        let pages = self.copy_pages(paused, &plan.copy)?;
        firn_fault::pass_point("protect.copied");
        let measurements = CutMeasurements {
            scan_ms,
            protect_ms,
            copy_ms: as_millis(started.elapsed()),
            copied: plan.copy.len() as u64,
            ahead: plan.ahead.len() as u64,
            written: plan.written.len() as u64,
            protected: plan.protect.len() as u64,
            ..self.measurements
        };
        Ok(CutResult { plan, pages, disks, card, measurements })
    }

    fn copy_pages(
        &mut self,
        paused: &PausedGuest<'_>,
        pages: &PageSet,
    ) -> Result<Vec<Page>, GuestError> {
        let pages_in_order: Vec<Page> = pages.iter().collect();
        if (self.ahead + pages_in_order.len()) as u64 <= self.options.buffer_pages {
            paused.copy_pages(pages, self.ahead, self.bytes)?;
            return Ok(pages_in_order);
        }
        let since = Instant::now();
        for some in pages_in_order.chunks(PAGES_MAX) {
            let mut bytes = Vec::new();
            paused.copy_pages(&some.iter().copied().collect(), 0, &mut bytes)?;
            self.send_part(PageBatch { numbers: some.to_vec(), bytes }, since)?;
        }
        Ok(Vec::new())
    }

    /// Whether the epoch is too large for the buffer, and is sent in parts from within the pause.
    fn is_above_buffer(&self, plan: &CutPlan) -> bool {
        (self.ahead + plan.copy.len()) as u64 > self.options.buffer_pages
    }

    /// Hands a part to the sender. Gives up if the backup takes too long or the end is requested,
    /// so that the VM does not remain paused.
    fn send_part(&self, pages: PageBatch, since: Instant) -> Result<(), GuestError> {
        let mut part = SendJob::Part(self.epoch, pages);
        loop {
            part = match self.jobs.send_timeout(part, POLL_INTERVAL) {
                Ok(()) => return Ok(()),
                Err(SendTimeoutError::Disconnected(_)) => return Err(GuestError::SenderStopped),
                Err(SendTimeoutError::Timeout(part)) => part,
            };
            if since.elapsed() > PAUSE_MAX || self.ending.is_end_requested() {
                return Err(GuestError::SenderStopped);
            }
        }
    }
}
