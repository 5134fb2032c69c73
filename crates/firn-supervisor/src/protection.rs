//! The protection of a VM: its epochs are sent to a backup, and `firn status` reports on them.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_channel::Receiver;
use firn_cluster::member::OfEpoch;
use firn_cluster::{Epoch, Seq};
use firn_epochs::guest::{Guest, GuestError, LastWords, RunTrouble, Witness};
use firn_epochs::primary::{self, CutNumbers, Ending, Options, PrimaryError, Told, Watch};
use firn_epochs::primary_end::PrimaryEnd;
use firn_epochs::wire::{self, Hello};
use firn_vmm::command_line;
use serde::{Deserialize, Serialize};

use crate::failure::{Context, Failure, FailureKind};
use crate::identity::ProcessHandle;
use crate::inspection;
use crate::journal::{Exit, Journal, JournalFile, Machine, Phase};
use crate::network::Network;
use crate::percentiles::{Newest, Percentiles};
use crate::protection_end::{Known, decide};
use crate::protocol::{Progress, ProtectRequest};
use crate::qemu;
use crate::served::Served;

/// The part of `firn status` about the epochs of a protected VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Protection {
    /// The backup.
    pub to: String,
    /// Milliseconds between cuts.
    pub interval_ms: u64,
    /// Network cards whose output is not buffered, as the VM's command line has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_held: Vec<String>,
    /// The newest epoch that was cut.
    pub epoch: u64,
    /// The newest epoch that the backup has completely.
    pub complete: u64,
    /// The newest epoch that a failover would run.
    pub committed: u64,
    /// The length of the pause for an epoch, in milliseconds.
    pub downtime_ms: Percentiles,
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
    pub trouble: Option<RunTrouble>,
}

#[derive(Debug, Default)]
struct Tally {
    now: Protection,
    downtime_ms: Newest,
    copied: Newest,
    sent: Newest,
}

impl Tally {
    fn hear(&mut self, told: Told) {
        match told {
            Told::Seeding(_)
            | Told::SeedingDisks(..)
            | Told::Stopping
            | Told::Still(_)
            | Told::GoesOn
            | Told::Committed(_) => {}
            Told::Cut(CutNumbers { epoch, downtime_ms, copied, .. }) => {
                self.now.epoch = epoch.0;
                self.downtime_ms.push(downtime_ms);
                self.copied.push(copied as f64);
            }
            Told::Sent(_, pages, bytes) => {
                self.sent.push(pages as f64);
                self.now.sent_bytes += bytes;
            }
            Told::Progress(progress) => {
                self.now.complete = progress.complete.0;
                self.now.committed = progress.committed.0;
            }
            Told::Trouble(trouble) => self.now.trouble = trouble,
            Told::Counts(counts) => {
                (self.now.predicted, self.now.faulted) = (counts.predicted, counts.faulted);
                self.now.unchanged = counts.unchanged;
            }
        }
    }
}

/// The callbacks of a protection, which involve the VM's network cards and its power button.
struct Watching<'a> {
    told: &'a dyn Fn(Told),
    network: &'a Network,
    hypervisor: &'a ProcessHandle,
    ending: &'a Ending,
    powerdown: &'a AtomicBool,
    /// How the protection ended on this side, once that is known.
    end: &'a Mutex<Option<PrimaryEnd>>,
}

impl Watch for Watching<'_> {
    fn told(&self, told: Told) {
        (self.told)(told);
    }

    fn still(&self, epoch: Epoch) -> Option<OfEpoch> {
        self.network.cut(epoch)
    }

    fn globally(&self) -> Epoch {
        self.network.global()
    }

    fn gone(&self) -> Seq {
        self.network.gone()
    }

    fn wants_cut(&self) -> bool {
        self.network.wants_cut()
    }

    fn news(&self) -> Receiver<()> {
        self.network.news()
    }

    fn presses_power_button(&self) -> bool {
        self.powerdown.swap(false, Ordering::AcqRel)
    }

    fn end(&self, error: Option<&GuestError>, words: &LastWords) -> Option<PrimaryEnd> {
        let is_stop = self.ending.is_stop();
        let end = decide(&Known { is_stop, exit: self.exit(error), words, error });
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(end.clone());
        Some(end)
    }
}

impl Watching<'_> {
    /// How the hypervisor ended, if it has. A hypervisor that closes its monitor is about to end.
    fn exit(&self, error: Option<&GuestError>) -> Option<Exit> {
        let wait = match error {
            Some(GuestError::Devices(_) | GuestError::PastPageCache) | None => Duration::ZERO,
            Some(error) if error.is_hang() => Duration::ZERO,
            Some(_) => qemu::SHORT_WAIT,
        };
        let is_gone = self.hypervisor.wait_gone(wait).unwrap_or(false);
        is_gone.then(|| self.hypervisor.peek_exit())
    }
}

/// The reason why a VM is not protected any more, although it should be.
pub(crate) struct Unprotected {
    /// The failure that the user gets.
    pub(crate) failure: Failure,
    /// The standby has reported that it will never run the VM.
    pub(crate) is_declined: bool,
    /// The hypervisor does not answer.
    pub(crate) is_hung: bool,
}

impl From<Failure> for Unprotected {
    fn from(failure: Failure) -> Self {
        Self { failure, is_declined: false, is_hung: false }
    }
}

impl From<&PrimaryError> for Unprotected {
    fn from(error: &PrimaryError) -> Self {
        let is_declined = matches!(error, PrimaryError::Declined(_));
        let is_hung = matches!(error, PrimaryError::Guest(error) if error.is_hang());
        Self { failure: failure(error), is_declined, is_hung }
    }
}

/// The parts of a VM, beside memory, that belong to its epochs.
pub(crate) struct With<'a> {
    pub(crate) hypervisor: &'a ProcessHandle,
    pub(crate) network: &'a Network,
    pub(crate) served: &'a Served,
}

/// The protection of a VM, if it is protected.
#[derive(Debug, Default)]
pub(crate) struct Protecting {
    tally: Mutex<Option<Tally>>,
    /// The guest's power button is to be pressed.
    powerdown: AtomicBool,
}

impl Protecting {
    /// The current status.
    pub(crate) fn now(&self) -> Option<Protection> {
        let tally = self.tally();
        tally.as_ref().map(|tally| Protection {
            downtime_ms: tally.downtime_ms.percentiles(),
            copied_pages: tally.copied.percentiles(),
            sent_pages: tally.sent.percentiles(),
            ..tally.now.clone()
        })
    }

    /// Requests that the thread with the monitor presses the guest's power button. `false` if the
    /// VM is not protected.
    pub(crate) fn press_power_button(&self) -> bool {
        let is_protected = self.tally().is_some();
        self.powerdown.store(is_protected, Ordering::Release);
        is_protected
    }

    /// Protects the VM until `ending` requests an end. Returns how the protection ended on this
    /// side, if the backup was informed of it. `begun` is called once, when the first epoch is
    /// committed.
    pub(crate) fn run(
        &self,
        (machine, journal): (&Machine, &Arc<JournalFile>),
        request: &ProtectRequest,
        with: &With<'_>,
        ending: &Ending,
        begun: &dyn Fn(),
        progress: &dyn Fn(Progress),
    ) -> (Option<PrimaryEnd>, Result<(), Unprotected>) {
        let end = Mutex::default();
        let ended =
            self.run_until((machine, journal), request, with, ending, (begun, progress), &end);
        (end.into_inner().unwrap_or_else(PoisonError::into_inner), ended)
    }

    fn run_until(
        &self,
        (machine, journal): (&Machine, &Arc<JournalFile>),
        request: &ProtectRequest,
        with: &With<'_>,
        ending: &Ending,
        (begun, progress): (&dyn Fn(), &dyn Fn(Progress)),
        end: &Mutex<Option<PrimaryEnd>>,
    ) -> Result<(), Unprotected> {
        let With { hypervisor, network, served } = *with;
        let to = request.to.to_string();
        let meta = serde_json::to_value(&machine.meta).doing("describing the VM")?;
        // The VM is checked first: a VM that is refused leaves the backup waiting for another.
        let guest = attach(machine, served, Stopped(Arc::clone(journal)))?;
        let connected = request.to.connect().doing(format!("connecting to the backup at {to}"));
        let (guest, stream) = match connected {
            Ok(stream) => (guest, stream),
            Err(failure) => {
                guest.detach().map_err(|error| self::failure(&error.into()))?;
                return Err(failure.hint("start `firn standby` there first").into());
            }
        };
        let regions = guest.memory().map().clone();
        let disks = served.hello()?;
        let member = network.membership();
        let (version, leased) = (wire::VERSION, request.lease.is_some());
        let hello = Hello { version, regions, disks, leased, member, meta };
        let interval_ms = request.interval_ms;
        let not_held = command_line::plan(&machine.meta.qemu.user_args)
            .map(|plan| plan.other_cards())
            .unwrap_or_default();
        let now = Protection { to, interval_ms, not_held, ..Protection::default() };
        *self.tally() = Some(Tally { now, ..Tally::default() });
        let total = machine.meta.memory_bytes;
        let told = |told: Told| {
            match told {
                Told::Seeding(pages) => {
                    let bytes = pages * firn_types::PAGE_SIZE as u64;
                    progress(Progress::new("copying all memory", bytes, total));
                }
                Told::SeedingDisks(done, all) => {
                    progress(Progress::new("copying its disks", done, all));
                }
                Told::Stopping => network.stopping(),
                Told::GoesOn => network.goes_on(),
                Told::Committed(epoch) => network.committed(epoch),
                _ => {}
            }
            if self.hear(told) {
                begun();
            }
        };
        let interval = Duration::from_millis(interval_ms);
        let options = Options { interval, predicts: request.predicts, ..Options::default() };
        network.begin();
        let powerdown = &self.powerdown;
        let watch = Watching { told: &told, network, hypervisor, ending, powerdown, end };
        let ended = primary::protect(guest, &stream, &hello, options, ending, &watch);
        *self.tally() = None;
        ended.map_err(|error| Unprotected::from(&error))
    }

    /// Adds a report to the tally; returns whether the first epoch has been committed by it.
    fn hear(&self, told: Told) -> bool {
        let mut tally = self.tally();
        let Some(tally) = tally.as_mut() else { return false };
        let before = tally.now.committed;
        tally.hear(told);
        Epoch(before) == Epoch(0) && tally.now.committed > 0
    }

    fn tally(&self) -> MutexGuard<'_, Option<Tally>> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records in the journal that Firn has paused the VM, for a successor.
#[derive(Debug)]
struct Stopped(Arc<JournalFile>);

impl Witness for Stopped {
    fn note(&mut self, is_stopped: bool) -> io::Result<()> {
        let change = |journal: &mut Journal| {
            if let Phase::Protecting { paused_by_us } = &mut journal.phase {
                *paused_by_us = is_stopped;
            }
        };
        self.0.update(change).map_err(io::Error::other)
    }
}

fn attach(machine: &Machine, served: &Served, witness: Stopped) -> Result<Guest, Failure> {
    let mut vm = qemu::connect(machine)?;
    inspection::check_protectable(&mut vm, machine)?;
    let is_running = vm.status().doing("querying whether the VM runs")?.running;
    let layout = inspection::mapped_layout(&mut vm, machine, is_running, &AtomicBool::new(false))?;
    let memory = qemu::open_memory(machine.process.pid, &layout)?;
    Guest::attach(vm, memory.process, memory.guest, layout.aux, served.disks(), Box::new(witness))
        .map_err(|error| failure(&error.into()))
}

fn failure(error: &PrimaryError) -> Failure {
    let kind = match error {
        PrimaryError::Guest(
            GuestError::Refused(_) | GuestError::PastPageCache | GuestError::Devices(_),
        )
        | PrimaryError::Refused(_)
        | PrimaryError::Declined(_) => FailureKind::Refused,
        PrimaryError::Guest(GuestError::Attach(_)) => FailureKind::Host,
        PrimaryError::Limits(_) => FailureKind::Usage,
        PrimaryError::Wire(_)
        | PrimaryError::Silent
        | PrimaryError::Guest(GuestError::NobodyTakes) => FailureKind::Lost,
        _ => FailureKind::Other,
    };
    Failure::from_error(kind, error)
}
