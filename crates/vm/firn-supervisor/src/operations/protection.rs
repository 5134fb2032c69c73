//! The protection of a VM: its epochs are sent to a backup, and `firn status` reports on them.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use firn_cluster::member::NicEpoch;
use firn_cluster::{Epoch, FrameNumber};
use firn_epochs::disks::EpochDisks;
use firn_epochs::guest::{
    ExitReport, GuestError, GuestRunTrouble, MirrorJobs, PauseJournal, ProtectedGuest,
};
use firn_epochs::primary::{
    self, CutMeasurements, EndRequest, EpochOptions, FinalCutControl, ProtectionCallbacks,
    ProtectionError, ProtectionEvent,
};
use firn_epochs::protection_end::ProtectionEnd;
use firn_epochs::wire::{self, PrimaryHello};
use serde::{Deserialize, Serialize};

use crate::devices::mirrored_disks::EpochDiskPlan;
use crate::devices::network::VmNetwork;
use crate::devices::served_disks::ServedDisks;
use crate::hypervisor::inspection;
use crate::hypervisor::qemu;
use crate::operations::commit_lag::CommitLag;
use crate::operations::protection_end::{EndEvidence, decide_end};
use crate::processes::identity::ProcessHandle;
use crate::records::control_protocol::{OperationProgress, ProtectRequest};
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{HypervisorRecord, Journal, JournalFile, VmPhase};
use crate::records::percentiles::{NewestValues, Percentiles};
use crate::records::process_exit::ProcessExit;

/// The part of `firn status` about the epochs of a protected VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProtectionStatus {
    /// The backup.
    pub to: String,
    /// Milliseconds between cuts.
    pub interval_ms: u64,
    /// Network cards whose output is not buffered, as the VM's command line has them, each with the
    /// reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_held: Vec<String>,
    /// Disks that stay the VM's own, and are mirrored by jobs of QEMU, as QEMU names them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mirrored: Vec<String>,
    /// The newest epoch that was cut.
    pub epoch: u64,
    /// The newest epoch that the backup has completely.
    pub complete: u64,
    /// The newest epoch that a failover would run.
    pub committed: u64,
    /// The length of the pause for an epoch, in milliseconds.
    pub downtime_ms: Percentiles,
    /// The length of the newest pause, in milliseconds.
    #[serde(default)]
    pub newest_downtime_ms: f64,
    /// The age of the newest committed epoch, counted from its cut, in milliseconds: so much a
    /// failover would undo. Absent before there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_ms: Option<f64>,
    /// Pages copied in a pause.
    pub copied_pages: Percentiles,
    /// Pages sent for an epoch.
    pub sent_pages: Percentiles,
    /// Bytes sent for all epochs.
    pub sent_bytes: u64,
    /// Writes that cost no page fault, because they were predicted (hot pages).
    pub predicted: u64,
    /// Writes that cost a page fault.
    pub faulted: u64,
    /// Pages that were copied although their contents had not changed.
    pub unchanged: u64,
    /// The reason why the VM does not run, if its hypervisor reports one. That state is replicated:
    /// a failover would not undo it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<GuestRunTrouble>,
}

#[derive(Debug, Default)]
struct ProtectionTally {
    now: ProtectionStatus,
    downtime_ms: NewestValues,
    copied: NewestValues,
    sent: NewestValues,
    lag: CommitLag,
}

impl ProtectionTally {
    fn record_event(&mut self, event: ProtectionEvent) {
        match event {
            ProtectionEvent::Seeding(_)
            | ProtectionEvent::SeedingDisks(..)
            | ProtectionEvent::Pausing
            | ProtectionEvent::Paused(_)
            | ProtectionEvent::PauseOver
            | ProtectionEvent::Committed(_) => {}
            ProtectionEvent::Cut(CutMeasurements { epoch, downtime_ms, copied, .. }) => {
                self.now.epoch = epoch.0;
                self.now.newest_downtime_ms = downtime_ms;
                self.lag.add_cut(epoch.0, Instant::now());
                self.downtime_ms.push_value(downtime_ms);
                self.copied.push_value(copied as f64);
            }
            ProtectionEvent::Sent(_, pages, bytes) => {
                self.sent.push_value(pages as f64);
                self.now.sent_bytes += bytes;
            }
            ProtectionEvent::Progress(progress) => {
                self.now.complete = progress.complete.0;
                self.now.committed = progress.committed.0;
                self.lag.commit_epoch(progress.committed.0);
            }
            ProtectionEvent::Trouble(trouble) => self.now.trouble = trouble,
            ProtectionEvent::Prediction(counts) => {
                (self.now.predicted, self.now.faulted) = (counts.predicted, counts.faulted);
                self.now.unchanged = counts.unchanged;
            }
        }
    }
}

/// The callbacks of a protection, which involve the VM's network cards and its power button.
struct VmProtectionCallbacks<'a> {
    on_event: &'a dyn Fn(ProtectionEvent),
    network: &'a VmNetwork,
    hypervisor: &'a ProcessHandle,
    ending: &'a EndRequest,
    powerdown: &'a AtomicBool,
    final_cut: &'a FinalCutControl,
    /// How the protection ended on this side, once that is known.
    end: &'a Mutex<Option<ProtectionEnd>>,
}

impl ProtectionCallbacks for VmProtectionCallbacks<'_> {
    fn on_event(&self, event: ProtectionEvent) {
        (self.on_event)(event);
    }

    fn on_paused(&self, epoch: Epoch) -> Option<NicEpoch> {
        self.network.cut_epoch(epoch)
    }

    fn global_epoch(&self) -> Epoch {
        self.network.global_epoch()
    }

    fn released_up_to(&self) -> FrameNumber {
        self.network.last_released_frame()
    }

    fn is_cut_needed(&self) -> bool {
        self.network.is_cut_needed()
    }

    fn member_events(&self) -> Receiver<()> {
        self.network.wakeups()
    }

    fn take_power_button_press(&self) -> bool {
        self.powerdown.swap(false, Ordering::AcqRel)
    }

    fn final_cut(&self) -> Option<&FinalCutControl> {
        Some(self.final_cut)
    }

    fn describe_end(
        &self,
        error: Option<&GuestError>,
        exit_report: &ExitReport,
    ) -> Option<ProtectionEnd> {
        let is_stop = self.ending.is_stop_requested();
        let end = decide_end(&EndEvidence {
            is_stop,
            exit: self.hypervisor_exit(error),
            exit_report,
            error,
        });
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(end.clone());
        Some(end)
    }
}

impl VmProtectionCallbacks<'_> {
    /// How the hypervisor ended, if it has. A hypervisor that closes its monitor is about to end.
    fn hypervisor_exit(&self, error: Option<&GuestError>) -> Option<ProcessExit> {
        let wait = match error {
            Some(
                GuestError::Devices(_)
                | GuestError::PastPageCache
                | GuestError::LargePages
                | GuestError::Mirror { .. },
            )
            | None => Duration::ZERO,
            Some(error) if error.is_hang() => Duration::ZERO,
            Some(_) => qemu::SHORT_WAIT,
        };
        let is_gone = self.hypervisor.wait_gone(wait).unwrap_or(false);
        is_gone.then(|| self.hypervisor.peek_exit())
    }
}

/// The reason why a VM is not protected any more, although it should be.
pub(crate) struct ProtectionFailure {
    /// The failure that the user gets.
    pub(crate) failure: Failure,
    /// The standby has reported that it will never run the VM.
    pub(crate) is_declined: bool,
    /// The hypervisor does not answer.
    pub(crate) is_hung: bool,
}

impl ProtectionFailure {
    /// Names the backup in a failure of the connection.
    fn with_backup(mut self, to: &str) -> Self {
        if self.failure.kind == FailureKind::Lost {
            self.failure =
                self.failure.while_doing(format!("sending epochs to the backup at {to}"));
        }
        self
    }
}

impl From<Failure> for ProtectionFailure {
    fn from(failure: Failure) -> Self {
        Self { failure, is_declined: false, is_hung: false }
    }
}

impl From<&ProtectionError> for ProtectionFailure {
    fn from(error: &ProtectionError) -> Self {
        let is_declined = matches!(error, ProtectionError::Declined(_));
        let is_hung = matches!(error, ProtectionError::Guest(error) if error.is_hang());
        Self { failure: primary_failure(error), is_declined, is_hung }
    }
}

/// The parts of a VM, beside memory, that belong to its epochs.
pub(crate) struct ProtectedParts<'a> {
    pub(crate) hypervisor: &'a ProcessHandle,
    pub(crate) network: &'a VmNetwork,
    pub(crate) served: &'a ServedDisks,
    pub(crate) prepared: PreparedDevices,
}

/// What is ready for a protection.
pub(crate) struct PreparedDevices {
    /// Network cards whose output is not buffered.
    pub(crate) not_held: Vec<String>,
    /// All disks.
    pub(crate) disks: EpochDiskPlan,
    /// The jobs that mirror some of them.
    pub(crate) mirrors: Box<dyn MirrorJobs>,
}

/// The protection of a VM, if it is protected.
#[derive(Debug, Default)]
pub(crate) struct VmProtection {
    tally: Mutex<Option<ProtectionTally>>,
    /// The guest's power button is to be pressed.
    powerdown: AtomicBool,
    final_cut: FinalCutControl,
}

impl VmProtection {
    /// The current status.
    pub(crate) fn current_status(&self) -> Option<ProtectionStatus> {
        let tally = self.lock_tally();
        tally.as_ref().map(|tally| ProtectionStatus {
            downtime_ms: tally.downtime_ms.percentiles(),
            lag_ms: tally.lag.age_at(Instant::now()).map(to_ms),
            copied_pages: tally.copied.percentiles(),
            sent_pages: tally.sent.percentiles(),
            ..tally.now.clone()
        })
    }

    /// The requests for a final cut.
    pub(crate) fn final_cut(&self) -> &FinalCutControl {
        &self.final_cut
    }

    /// Requests that the thread with the monitor presses the guest's power button. `false` if the
    /// VM is not protected.
    pub(crate) fn press_power_button(&self) -> bool {
        let is_protected = self.lock_tally().is_some();
        self.powerdown.store(is_protected, Ordering::Release);
        is_protected
    }

    /// Protects the VM until `ending` requests an end. Returns how the protection ended on this
    /// side, if the backup was informed of it. `begun` is called once, when the first epoch is
    /// committed.
    pub(crate) fn run_protection(
        &self,
        (hypervisor_record, journal): (&HypervisorRecord, &Arc<JournalFile>),
        request: &ProtectRequest,
        with: ProtectedParts<'_>,
        ending: &EndRequest,
        begun: &dyn Fn(),
        progress: &dyn Fn(OperationProgress),
    ) -> (Option<ProtectionEnd>, Result<(), ProtectionFailure>) {
        let end = Mutex::default();
        let ended = self.run_until(
            (hypervisor_record, journal),
            request,
            with,
            ending,
            (begun, progress),
            &end,
        );
        (end.into_inner().unwrap_or_else(PoisonError::into_inner), ended)
    }

    fn run_until(
        &self,
        (hypervisor_record, journal): (&HypervisorRecord, &Arc<JournalFile>),
        request: &ProtectRequest,
        with: ProtectedParts<'_>,
        ending: &EndRequest,
        (begun, progress): (&dyn Fn(), &dyn Fn(OperationProgress)),
        end: &Mutex<Option<ProtectionEnd>>,
    ) -> Result<(), ProtectionFailure> {
        let ProtectedParts { hypervisor, network, served, prepared } = with;
        let PreparedDevices { not_held, disks: plan, mirrors } = prepared;
        let to = request.to.to_string();
        let meta = plan.standby_meta(&hypervisor_record.meta);
        let meta = serde_json::to_value(&meta).while_doing("describing the VM")?;
        // The VM is checked first: a VM that is refused leaves the backup waiting for another.
        let disks = plan.epoch_disks(served);
        let guest = attach_guest(hypervisor_record, disks, PauseRecorder(Arc::clone(journal)))?;
        let guest = guest.with_mirrors(mirrors);
        let connected =
            request.to.connect().while_doing(format!("connecting to the backup at {to}"));
        let (guest, stream) = match connected {
            Ok(stream) => (guest, stream),
            Err(failure) => {
                guest.detach().map_err(|error| self::primary_failure(&error.into()))?;
                return Err(failure.with_hint("start `firn standby` there first").into());
            }
        };
        let regions = guest.memory().region_map().clone();
        let disks = plan.disk_hellos(served)?;
        let member = network.membership();
        let (version, leased) = (wire::VERSION, request.lease.is_some());
        let hello = PrimaryHello { version, regions, disks, leased, member, meta };
        let interval_ms = request.interval_ms;
        let now = ProtectionStatus {
            to: to.clone(),
            interval_ms,
            not_held,
            mirrored: plan.mirrored_names(),
            ..ProtectionStatus::default()
        };
        *self.lock_tally() = Some(ProtectionTally { now, ..ProtectionTally::default() });
        let total = hypervisor_record.meta.memory_bytes;
        let on_event = |event: ProtectionEvent| {
            match event {
                ProtectionEvent::Seeding(pages) => {
                    let bytes = pages * firn_types::PAGE_SIZE as u64;
                    progress(OperationProgress::new("copying all memory", bytes, total));
                }
                ProtectionEvent::SeedingDisks(done, all) => {
                    progress(OperationProgress::new("copying its disks", done, all));
                }
                ProtectionEvent::Pausing => network.prepare_pause(),
                ProtectionEvent::PauseOver => network.end_pause(),
                ProtectionEvent::Committed(epoch) => network.commit_epoch(epoch),
                _ => {}
            }
            if self.record_event(event) {
                begun();
            }
        };
        let interval = Duration::from_millis(interval_ms);
        let options =
            EpochOptions { interval, predicts: request.predicts, ..EpochOptions::default() };
        network.begin_protection();
        let (powerdown, final_cut) = (&self.powerdown, &self.final_cut);
        let on_event = &on_event;
        let callbacks = VmProtectionCallbacks {
            on_event,
            network,
            hypervisor,
            ending,
            powerdown,
            final_cut,
            end,
        };
        let ended = primary::protect_vm(guest, &stream, &hello, options, ending, &callbacks);
        *self.lock_tally() = None;
        ended.map_err(|error| ProtectionFailure::from(&error).with_backup(&to))
    }

    /// Adds an event to the tally; returns whether the first epoch has been committed by it.
    fn record_event(&self, event: ProtectionEvent) -> bool {
        let mut tally = self.lock_tally();
        let Some(tally) = tally.as_mut() else { return false };
        let before = tally.now.committed;
        tally.record_event(event);
        Epoch(before) == Epoch(0) && tally.now.committed > 0
    }

    fn lock_tally(&self) -> MutexGuard<'_, Option<ProtectionTally>> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records in the journal that Firn has paused the VM, for a successor.
#[derive(Debug)]
struct PauseRecorder(Arc<JournalFile>);

impl PauseJournal for PauseRecorder {
    fn record_stop(&mut self, is_stopped: bool) -> io::Result<()> {
        let change = |journal: &mut Journal| {
            if let VmPhase::Protecting { paused_by_us } = &mut journal.phase {
                *paused_by_us = is_stopped;
            }
        };
        self.0.update(change).map_err(io::Error::other)
    }
}

fn attach_guest(
    hypervisor_record: &HypervisorRecord,
    disks: EpochDisks,
    witness: PauseRecorder,
) -> Result<ProtectedGuest, Failure> {
    let mut vm = qemu::connect_monitor(hypervisor_record)?;
    inspection::check_protectable(&mut vm, hypervisor_record)?;
    let is_running = vm.status().while_doing("querying whether the VM runs")?.running;
    let layout =
        inspection::mapped_layout(&mut vm, hypervisor_record, is_running, &AtomicBool::new(false))?;
    let memory = qemu::open_memory(hypervisor_record.process.pid, &layout)?;
    ProtectedGuest::attach(vm, memory.process, memory.guest, layout.aux, disks, Box::new(witness))
        .map_err(|error| primary_failure(&error.into()))
}

/// Milliseconds, to a microsecond.
fn to_ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

fn primary_failure(error: &ProtectionError) -> Failure {
    let kind = match error {
        ProtectionError::Guest(
            GuestError::Refused(_)
            | GuestError::PastPageCache
            | GuestError::LargePages
            | GuestError::Devices(_)
            | GuestError::Mirror { .. },
        )
        | ProtectionError::Refused(_)
        | ProtectionError::Declined(_) => FailureKind::Refused,
        ProtectionError::Guest(GuestError::Attach(_)) => FailureKind::Host,
        ProtectionError::Limits(_) => FailureKind::Usage,
        ProtectionError::Wire(_)
        | ProtectionError::Silent
        | ProtectionError::Guest(GuestError::SenderStopped) => FailureKind::Lost,
        _ => FailureKind::Other,
    };
    Failure::from_error(kind, error)
}
