//! A VM whose guest waits for storage: reported, paused, and continued when storage is back.
//!
//! ```text
//!   vCPU faults on a page that can't be read     it waits in the kernel, whatever is done here
//!        | for a second                          QMP `stop`: the others pause, the guest's clocks stop
//!        v
//!   storage is back, the page is installed       QMP `cont`
//! ```
//!
//! A vCPU that waits in the kernel can't be paused: QEMU answers `stop` only when the page has come, and nothing else before.
//! So the commands are given on a thread of their own, and whether they were answered does not matter: what counts is that
//! the VM runs in the end. The journal says before the `stop` that a `cont` is due.

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

/// A guest that waits no longer than this is not paused: most storage that fails is back by then.
const PAUSE_AFTER: Duration = Duration::from_secs(1);

/// How often it is tried to continue a VM, and looked whether it may be.
const RETRY: Duration = Duration::from_millis(20);

/// What a user gets to see of an outage.
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

/// Pauses a VM whose guest waits for storage, and continues it.
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
    /// Of a VM that runs.
    pub(crate) fn new(journal: Arc<JournalFile>, hypervisor: Arc<ProcessHandle>) -> Self {
        Self { journal, hypervisor, waits_since: None, pause: None }
    }

    /// Of a VM that a supervisor before this one may have paused: it is continued as soon as it waits for nothing.
    pub(crate) fn of_paused(journal: Arc<JournalFile>, hypervisor: Arc<ProcessHandle>) -> Self {
        let mut pauser = Self::new(journal, hypervisor);
        pauser.begin(true);
        pauser
    }

    /// Whether the guest waits at this moment. To be called often.
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

    /// Returns when the VM is not paused any more by this.
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

/// What the thread of a pause needs.
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

    /// Whether the VM is paused by this, or will be. One that its user has paused stays as it is.
    fn stop(&self, machine: &Machine) -> Result<bool, Failure> {
        let mut vm = qemu::connect_within(machine, qemu::SHORT_WAIT)?;
        if !vm.status().doing("asking whether the VM runs")?.running {
            return Ok(false);
        }
        self.note(true)?;
        if let Err(error) = vm.stop() {
            tracing::info!("the VM pauses when the page that it waits for is there: {error}");
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

/// Lets a VM run, and whether it does.
fn is_running(machine: &Machine) -> bool {
    let continued = qemu::connect_within(machine, qemu::SHORT_WAIT).and_then(|mut vm| {
        let running = vm.status().doing("asking whether the VM runs")?.running;
        if running { Ok(()) } else { vm.cont().doing("letting the VM run on") }
    });
    continued.is_ok()
}
