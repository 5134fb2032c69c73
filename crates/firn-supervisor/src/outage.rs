//! Outages of storage under a restore: they are reported, and the VM is paused until storage is
//! back.
//!
//! ```text
//!   vCPU faults on a page that can't be read     it blocks in the kernel, whatever Firn does
//!        | for a second                          QMP `stop`: the other vCPUs pause, the guest's clocks stop
//!        v
//!   storage is back, the page is installed       QMP `cont`
//! ```
//!
//! A vCPU that is blocked in the kernel can't be paused: QEMU answers `stop` only when the page has
//! arrived, and no other command before. So the commands are sent on a thread of its own, and it
//! does not matter whether they are answered: what counts is that the VM runs in the end. The
//! journal records before the `stop` that a `cont` has to follow.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use firn_restore::Outage;
use firn_types::RegionMap;

use crate::failure::{Context, Failure, FailureKind};
use crate::identity::ProcessHandle;
use crate::journal::{Journal, JournalFile, Machine, Phase};
use crate::protocol::Waiting;
use crate::qemu;

/// A guest is paused after it has been blocked for this time: most storage that fails is back
/// earlier.
const PAUSE_AFTER: Duration = Duration::from_secs(1);

/// The interval at which a `cont` is tried, and at which it is checked whether it is allowed.
const RETRY: Duration = Duration::from_millis(20);

/// Describes an outage for the user.
pub(crate) fn report(outage: &Outage, image: &Path, map: &RegionMap) -> Waiting {
    let gpa = outage.page.and_then(|page| map.gpa_of(page));
    Waiting {
        error: Failure::from_error(FailureKind::Other, &*outage.error).to_string(),
        path: image.to_owned(),
        since: seconds(outage.since),
        address: gpa.map(|gpa| format!("{:#x}", gpa.0)),
        guest_waits: outage.page.is_some(),
    }
}

/// Seconds since 1970.
pub(crate) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Pauses a VM whose guest waits for storage, and resumes it.
pub(crate) struct Pauser {
    journal: Arc<JournalFile>,
    hypervisor: Arc<ProcessHandle>,
    waits_since: Option<Instant>,
    pause: Option<Pause>,
}

/// One pause, from the `stop` until the `cont` is answered.
struct Pause {
    may_continue: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Pauser {
    /// The pauser of a VM that runs.
    pub(crate) fn new(journal: Arc<JournalFile>, hypervisor: Arc<ProcessHandle>) -> Self {
        Self { journal, hypervisor, waits_since: None, pause: None }
    }

    /// The pauser of a VM that an earlier supervisor may have paused: it is resumed as soon as it
    /// waits for no page.
    pub(crate) fn of_paused(journal: Arc<JournalFile>, hypervisor: Arc<ProcessHandle>) -> Self {
        let mut pauser = Self::new(journal, hypervisor);
        pauser.begin(true);
        pauser
    }

    /// Reports whether the guest is blocked at this moment. To be called often.
    pub(crate) fn update(&mut self, waits: bool) {
        let now = Instant::now();
        if !waits {
            self.waits_since = None;
            self.let_continue();
            return;
        }
        let waited = now - *self.waits_since.get_or_insert(now);
        let is_free = self.pause.as_ref().is_none_or(|pause| pause.thread.is_finished());
        if waited >= PAUSE_AFTER && is_free {
            self.begin(false);
        }
    }

    /// Resumes the VM; returns when this pauser does not pause it any more.
    pub(crate) fn finish(&mut self) {
        self.let_continue();
        if let Some(pause) = self.pause.take() {
            // A panic is in the log already.
            let _ = pause.thread.join();
        }
    }

    fn let_continue(&self) {
        self.pause.iter().for_each(|pause| pause.may_continue.store(true, Ordering::Release));
    }

    fn begin(&mut self, is_paused: bool) {
        let may_continue = Arc::new(AtomicBool::new(false));
        let (journal, hypervisor) = (Arc::clone(&self.journal), Arc::clone(&self.hypervisor));
        let turn = Turn { journal, hypervisor, may_continue: Arc::clone(&may_continue) };
        let thread = thread::Builder::new().name("pause".into()).spawn(move || turn.run(is_paused));
        match thread {
            Ok(thread) => self.pause = Some(Pause { may_continue, thread }),
            Err(error) => tracing::warn!("the VM is not paused while it waits: {error}"),
        }
    }
}

/// The thread of a pause.
struct Turn {
    journal: Arc<JournalFile>,
    hypervisor: Arc<ProcessHandle>,
    may_continue: Arc<AtomicBool>,
}

impl Turn {
    fn run(&self, is_paused: bool) {
        let Some(machine) = self.journal.read().machine else { return };
        let paused = if is_paused { Ok(true) } else { self.stop(&machine) };
        match paused {
            Ok(true) => self.continue_when_due(&machine),
            Ok(false) => {}
            Err(failure) => tracing::info!("the VM is not paused while it waits: {failure}"),
        }
    }

    /// Pauses the VM. Returns whether it is paused by this, or will be. A VM that its user has
    /// paused is left alone.
    fn stop(&self, machine: &Machine) -> Result<bool, Failure> {
        let mut vm = qemu::connect_within(machine, qemu::SHORT_WAIT)?;
        if !vm.status().doing("querying whether the VM runs")?.running {
            return Ok(false);
        }
        self.note(true)?;
        if let Err(error) = vm.stop() {
            tracing::info!("the VM pauses when the page that it waits for is installed: {error}");
        }
        Ok(true)
    }

    fn continue_when_due(&self, machine: &Machine) {
        while !self.may_continue.load(Ordering::Acquire) || !is_running(machine) {
            if matches!(self.hypervisor.wait_gone(RETRY), Ok(true)) {
                return;
            }
        }
        if let Err(failure) = self.note(false) {
            tracing::warn!("{failure}");
        }
    }

    fn note(&self, paused: bool) -> Result<(), Failure> {
        let change = |journal: &mut Journal| {
            if let Phase::Restoring { paused_by_us, .. } = &mut journal.phase {
                *paused_by_us = paused;
            }
        };
        self.journal.update(change).doing("writing the journal")
    }
}

/// Resumes a VM; returns whether it runs.
fn is_running(machine: &Machine) -> bool {
    let continued = qemu::connect_within(machine, qemu::SHORT_WAIT).and_then(|mut vm| {
        let running = vm.status().doing("querying whether the VM runs")?.running;
        if running { Ok(()) } else { vm.cont().doing("resuming the VM") }
    });
    continued.is_ok()
}
