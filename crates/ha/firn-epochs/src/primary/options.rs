//! Protection options, the request to end a protection, and the events that it reports.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_channel::Receiver;
use firn_cluster::epoch::{EpochLimits, EpochProgress, LimitsError};
use firn_cluster::member::NicEpoch;
use firn_cluster::predict::PredictionCounts;
use firn_cluster::{Epoch, FrameNumber};
use serde::{Deserialize, Serialize};

use super::final_cut::FinalCutControl;
use crate::guest::{ExitReport, GuestError, GuestRunTrouble};
use crate::protection_end::ProtectionEnd;

/// The guest time that a page fault takes which only records a write. Copying the page takes a
/// fifth of that.
const FAULT_TIME: Duration = Duration::from_micros(2);
/// Faults are avoided if they would take more than one part in this many of an interval.
const FAULT_SHARE: u32 = 50;
/// The maximum number of pages copied in a pause to avoid faults: some three milliseconds.
const BUSY_PAGES_MAX: usize = 8192;

/// The options of a protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpochOptions {
    /// The time from one cut to the next.
    pub interval: Duration,
    /// Pages that are not expected to be written before the cut are copied ahead of it; others stay
    /// writable in the next epoch. If the guest writes much, no pages are copied ahead.
    pub predicts: bool,
    /// The maximum number of pages that wait for the backup.
    pub buffer_pages: u64,
}

impl Default for EpochOptions {
    fn default() -> Self {
        Self { interval: Duration::from_millis(100), predicts: true, buffer_pages: 32 << 10 }
    }
}

impl EpochOptions {
    /// The range of counts of dirty pages per interval in which the guest is faster without their
    /// page faults. From the start on, the faults would take more of the guest's time than copying
    /// the pages in the pause. From the end on, that pause would be too long.
    pub(super) fn busy_page_counts(&self) -> Range<usize> {
        let minimum = self.interval.as_nanos() / u128::from(FAULT_SHARE) / FAULT_TIME.as_nanos();
        usize::try_from(minimum).unwrap_or(usize::MAX)..BUSY_PAGES_MAX
    }

    /// The limits of the epochs, checked.
    ///
    /// The interval is fixed, so its minimum and its maximum are equal. An epoch is cut earlier only
    /// on request, and not before it is as old as the error latency. Of a VM that is protected alone
    /// no early cut is requested. A member of a cluster is cut early if frames of other members wait
    /// for it; so its error latency is half an interval at most.
    pub(super) fn epoch_limits(&self, is_member: bool) -> Result<EpochLimits, LimitsError> {
        let early_cut_after = if is_member { self.interval / 2 } else { self.interval };
        let limits = EpochLimits {
            interval_min: self.interval,
            interval_max: self.interval,
            pages_per_epoch: self.buffer_pages.min(4096),
            output_delay_max: Duration::MAX,
            error_latency_max: early_cut_after.min(EpochLimits::default().error_latency_max),
            buffer_pages: self.buffer_pages,
            // The stream loses no message unless the connection is lost.
            resend_after: Duration::MAX,
        };
        limits.check_limits().map(|()| limits)
    }
}

/// The request to end a protection.
#[derive(Debug, Default)]
pub struct EndRequest {
    is_requested: AtomicBool,
    is_release: AtomicBool,
    is_stop: AtomicBool,
}

impl EndRequest {
    /// Ends the protection, for example because the user cancels it. The VM continues to run here,
    /// without protection. The backup keeps its newest committed epoch and may run it, so the output
    /// of this VM stays buffered.
    pub fn request_end(&self) {
        self.is_requested.store(true, Ordering::Release);
    }

    /// Ends the protection because the user ends the VM (`firn stop`). The backup is informed, so
    /// that it does not take the end for a failure.
    pub fn request_stop(&self) {
        self.is_stop.store(true, Ordering::Release);
        self.request_end();
    }

    /// Whether the user ends the VM.
    pub fn is_stop_requested(&self) -> bool {
        self.is_stop.load(Ordering::Acquire)
    }

    /// Ends the protection after the backup has confirmed that it never runs the VM. The VM
    /// continues to run here, without protection.
    pub fn request_release(&self) {
        self.is_release.store(true, Ordering::Release);
        self.request_end();
    }

    /// Whether the end was requested.
    pub fn is_end_requested(&self) -> bool {
        self.is_requested.load(Ordering::Acquire)
    }

    pub(super) fn is_release_requested(&self) -> bool {
        self.is_release.load(Ordering::Acquire)
    }
}

/// Measurements of one cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CutMeasurements {
    /// The epoch that it ended.
    pub epoch: Epoch,
    /// The downtime, in milliseconds.
    pub downtime_ms: f64,
    /// Of the downtime: the scan for written pages.
    pub scan_ms: f64,
    /// Of the downtime: protecting pages again.
    pub protect_ms: f64,
    /// Of the downtime: copying.
    pub copy_ms: f64,
    /// The number of pages copied in the pause.
    pub copied: u64,
    /// The number of pages of the epoch that were copied ahead of the pause.
    pub ahead: u64,
    /// Of both: pages found written, each after a fault inside the kernel.
    pub written: u64,
    /// The number of pages protected again.
    pub protected: u64,
    /// The bytes of device state.
    pub device_bytes: u64,
}

/// The functions that a protection calls: to report events, to pass the cut on to the VM's network
/// cards, and to ask for state and requests that it depends on. For a VM outside a cluster, a
/// function that receives events suffices.
pub trait ProtectionCallbacks {
    /// Receives an event.
    fn on_event(&self, event: ProtectionEvent);

    /// The VM is paused at the end of an epoch: frames that it sends from now on are not part of
    /// the epoch. Returns the state of the network card that belongs to the epoch, for a member of
    /// a cluster. The VM remains paused until this returns.
    fn on_paused(&self, epoch: Epoch) -> Option<NicEpoch>;

    /// The newest epoch of a member that belongs to a recorded global checkpoint.
    fn global_epoch(&self) -> Epoch {
        Epoch(0)
    }

    /// The newest frame of a member to the outside that has been sent.
    fn released_up_to(&self) -> FrameNumber {
        FrameNumber(0)
    }

    /// Whether a frame of another member waits for the running epoch to be cut.
    fn is_cut_needed(&self) -> bool {
        false
    }

    /// Whether to press the guest's power button now. Returns `true` once for each press.
    fn take_power_button_press(&self) -> bool {
        false
    }

    /// Describes for the backup how the protection ended: by this error, or without one, and with
    /// the last reports of the hypervisor. `None` if there is nothing to report.
    fn describe_end(
        &self,
        _error: Option<&GuestError>,
        _exit_report: &ExitReport,
    ) -> Option<ProtectionEnd> {
        None
    }

    /// The requests for a final cut, if the VM can be moved.
    fn final_cut(&self) -> Option<&FinalCutControl> {
        None
    }

    /// Wakes the thread that cuts epochs when the state of a member may have changed.
    fn member_events(&self) -> Receiver<()> {
        crossbeam_channel::never()
    }
}

impl<F: Fn(ProtectionEvent)> ProtectionCallbacks for F {
    fn on_event(&self, event: ProtectionEvent) {
        self(event);
    }

    fn on_paused(&self, epoch: Epoch) -> Option<NicEpoch> {
        self(ProtectionEvent::Paused(epoch));
        None
    }
}

/// An event of a protection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ProtectionEvent {
    /// The number of pages of the seed that were sent.
    Seeding(u64),
    /// The number of bytes of the disks' seed that were sent, and of all bytes.
    SeedingDisks(u64, u64),
    /// A pause begins: the VM is about to be paused, for a cut or because the backup is slow. The
    /// protection pauses it when the callback has returned.
    Pausing,
    /// The VM is paused at the end of an epoch (see [`ProtectionCallbacks::on_paused`]).
    Paused(Epoch),
    /// The pause that `Pausing` announced is over: the VM runs again, or pausing it failed.
    PauseOver,
    /// An epoch was cut.
    Cut(CutMeasurements),
    /// An epoch was sent: its pages, and the bytes sent.
    Sent(Epoch, u64, u64),
    /// The progress of the backup.
    Progress(EpochProgress),
    /// An epoch was committed: a failover would not undo it.
    Committed(Epoch),
    /// The counts of right and wrong predictions of dirty pages so far.
    Prediction(PredictionCounts),
    /// Why the VM does not run, as its hypervisor reports it; `None` if it runs, or its user paused
    /// it.
    Trouble(Option<GuestRunTrouble>),
}
