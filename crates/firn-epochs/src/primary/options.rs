//! How a VM is protected, and what is told of it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_channel::Receiver;
use firn_cluster::epoch::{Limits, LimitsError, Progress};
use firn_cluster::member::OfEpoch;
use firn_cluster::predict::Counts;
use firn_cluster::{Epoch, Seq};
use serde::{Deserialize, Serialize};

use crate::guest::{GuestError, LastWords, RunTrouble};
use crate::primary_end::PrimaryEnd;

/// What a page fault that only tells of a write takes of the guest's time. Copying the page takes a fifth of that.
const FAULT: Duration = Duration::from_micros(2);
/// Faults that take more of an interval than one part in so many are spared.
const SPARED: u32 = 50;
/// Pages that may be copied in a pause for that: some three milliseconds.
const SPARED_MAX: usize = 8192;

/// How a VM is protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// The time from one cut to the next.
    pub interval: Duration,
    /// Pages that are not expected to be written until the cut are copied ahead of it; others stay writable in the next epoch. Of a guest
    /// that writes much none are copied ahead.
    pub predicts: bool,
    /// Pages that may wait for the backup.
    pub buffer_pages: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { interval: Duration::from_millis(100), predicts: true, buffer_pages: 32 << 10 }
    }
}

impl Options {
    /// How many pages a guest writes in an interval that is better spared their faults.
    pub(super) fn busy_pages(&self) -> Range<usize> {
        let least = self.interval.as_nanos() / u128::from(SPARED) / FAULT.as_nanos();
        usize::try_from(least).unwrap_or(usize::MAX)..SPARED_MAX
    }

    /// A member may be cut as soon as half an interval has passed: others may have been just before.
    pub(super) fn limits(&self, is_member: bool) -> Result<Limits, LimitsError> {
        let least = if is_member { self.interval / 2 } else { self.interval };
        let limits = Limits {
            interval_min: self.interval,
            interval_max: self.interval,
            pages_per_epoch: self.buffer_pages.min(4096),
            output_delay_max: Duration::MAX,
            error_latency_max: least.min(Limits::default().error_latency_max),
            buffer_pages: self.buffer_pages,
            // A stream loses nothing but itself.
            resend_after: Duration::MAX,
        };
        limits.check().map(|()| limits)
    }
}

/// Where it is said that a protection is to end.
#[derive(Debug, Default)]
pub struct Ending {
    is_asked: AtomicBool,
    is_release: AtomicBool,
    is_stop: AtomicBool,
}

impl Ending {
    /// The backup keeps what it has, and may run the VM.
    pub fn leave(&self) {
        self.is_asked.store(true, Ordering::Release);
    }

    /// The user stops the VM: the backup is informed of that.
    pub fn stop(&self) {
        self.is_stop.store(true, Ordering::Release);
        self.leave();
    }

    /// Whether the user stops the VM.
    pub fn is_stop(&self) -> bool {
        self.is_stop.load(Ordering::Acquire)
    }

    /// The VM goes on alone. The backup has to say first that it never runs it.
    pub fn release(&self) {
        self.is_release.store(true, Ordering::Release);
        self.leave();
    }

    /// Whether it is to end.
    pub fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::Acquire)
    }

    pub(super) fn is_release(&self) -> bool {
        self.is_release.load(Ordering::Acquire)
    }
}

/// One cut, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CutNumbers {
    /// The epoch that it ended.
    pub epoch: Epoch,
    /// How long the VM stood still, in milliseconds.
    pub downtime_ms: f64,
    /// Of that: finding what was written.
    pub scan_ms: f64,
    /// Of that: protecting pages again.
    pub protect_ms: f64,
    /// Of that: copying.
    pub copy_ms: f64,
    /// Pages copied in that time.
    pub copied: u64,
    /// Pages whose copies made ahead of it are part of the epoch.
    pub ahead: u64,
    /// Of both: found written, each after a fault inside the kernel.
    pub written: u64,
    /// Pages protected again.
    pub protected: u64,
    /// Bytes of device state.
    pub device_bytes: u64,
}

/// Who goes along with a protection. A function that hears what there is to tell will do for a VM by itself.
pub trait Watch {
    /// There is something to tell.
    fn told(&self, told: Told);

    /// The VM stands still at the end of an epoch: nothing that it sends from now on is part of it. What of the network card of a member
    /// of a cluster is. Whoever hears this is waited for, and so is the VM.
    fn still(&self, epoch: Epoch) -> Option<OfEpoch>;

    /// The newest epoch of a member that a global checkpoint on record has.
    fn globally(&self) -> Epoch {
        Epoch(0)
    }

    /// The newest frame of a member to the outside that has left.
    fn gone(&self) -> Seq {
        Seq(0)
    }

    /// Whether what another member has sent waits for the epoch that runs to be cut.
    fn wants_cut(&self) -> bool {
        false
    }

    /// Whether the guest's power button is to be pressed now; asked once for each time that it is.
    fn presses_power_button(&self) -> bool {
        false
    }

    /// How this side ended, for the backup: by this error, or without one; with what the hypervisor reported last. `None` if there is
    /// nothing to report.
    fn end(&self, _error: Option<&GuestError>, _words: &LastWords) -> Option<PrimaryEnd> {
        None
    }

    /// Wakes who cuts epochs: there may be something new in what of a member is asked here.
    fn news(&self) -> Receiver<()> {
        crossbeam_channel::never()
    }
}

impl<F: Fn(Told)> Watch for F {
    fn told(&self, told: Told) {
        self(told);
    }

    fn still(&self, epoch: Epoch) -> Option<OfEpoch> {
        self(Told::Still(epoch));
        None
    }
}

/// What there is to tell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Told {
    /// So many pages of the seed are sent.
    Seeding(u64),
    /// So many bytes of the disks' seed are sent, of so many.
    SeedingDisks(u64, u64),
    /// The VM is about to be stopped. Whoever hears this is waited for.
    Stopping,
    /// The VM stands still at the end of an epoch (see [`Watch::still`]).
    Still(Epoch),
    /// The VM goes on, or was not stopped after all.
    GoesOn,
    /// An epoch was cut.
    Cut(CutNumbers),
    /// An epoch was sent: so many pages, in so many bytes.
    Sent(Epoch, u64, u64),
    /// The backup is so far.
    Progress(Progress),
    /// A failover would not undo this epoch any more.
    Committed(Epoch),
    /// What prediction was worth so far.
    Counts(Counts),
    /// Why the VM does not run, as its hypervisor reports it; nothing if it runs, or its user paused it.
    Trouble(Option<RunTrouble>),
}
