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

use firn_restore::MemoryOutage;
use firn_types::RegionMap;

use crate::hypervisor::qemu;
use crate::processes::identity::ProcessHandle;
use crate::records::control_protocol::RestoreOutage;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{HypervisorRecord, Journal, JournalFile, VmPhase};

/// A guest is paused after it has been blocked for this time: most storage that fails is back
/// earlier.
const PAUSE_AFTER: Duration = Duration::from_secs(1);

/// The interval at which a `cont` is tried, and at which it is checked whether it is allowed.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Describes an outage for the user.
pub(crate) fn describe_outage(
    outage: &MemoryOutage,
    image: &Path,
    map: &RegionMap,
) -> RestoreOutage {
    let gpa = outage.page.and_then(|page| map.gpa_of(page));
    RestoreOutage {
        error: Failure::from_error(FailureKind::Other, &*outage.error).to_string(),
        path: image.to_owned(),
        since: seconds_since_1970(outage.since),
        address: gpa.map(|gpa| format!("{:#x}", gpa.0)),
        guest_waits: outage.page.is_some(),
    }
}

/// Seconds since 1970.
pub(crate) fn seconds_since_1970(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Pauses a VM whose guest waits for storage, and resumes it.
pub(crate) struct OutagePauser {
    journal: Arc<JournalFile>,
    hypervisor: Arc<ProcessHandle>,
    waits_since: Option<Instant>,
    pause: Option<OutagePause>,
}

/// One pause, from the `stop` until the `cont` is answered.
struct OutagePause {
    may_continue: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl OutagePauser {
    /// The pauser of a VM that runs.
    pub(crate) fn new(journal: Arc<JournalFile>, hypervisor: Arc<ProcessHandle>) -> Self {
        Self { journal, hypervisor, waits_since: None, pause: None }
    }

    /// The pauser of a VM that an earlier supervisor may have paused: it is resumed as soon as it
    /// waits for no page.
    pub(crate) fn for_paused_vm(journal: Arc<JournalFile>, hypervisor: Arc<ProcessHandle>) -> Self {
        let mut pauser = Self::new(journal, hypervisor);
        pauser.begin_pause(true);
        pauser
    }

    /// Reports whether the guest is blocked at this moment. To be called often.
    pub(crate) fn update_wait(&mut self, waits: bool) {
        let now = Instant::now();
        if !waits {
            self.waits_since = None;
            self.allow_resume();
            return;
        }
        let waited = now - *self.waits_since.get_or_insert(now);
        let is_free = self.pause.as_ref().is_none_or(|pause| pause.thread.is_finished());
        if waited >= PAUSE_AFTER && is_free {
            self.begin_pause(false);
        }
    }

    /// Resumes the VM; returns when this pauser does not pause it any more.
    pub(crate) fn end_pause(&mut self) {
        self.allow_resume();
        if let Some(pause) = self.pause.take() {
            // A panic is in the log already.
            let _ = pause.thread.join();
        }
    }

    fn allow_resume(&self) {
        self.pause.iter().for_each(|pause| pause.may_continue.store(true, Ordering::Release));
    }

    fn begin_pause(&mut self, is_paused: bool) {
        let may_continue = Arc::new(AtomicBool::new(false));
        let (journal, hypervisor) = (Arc::clone(&self.journal), Arc::clone(&self.hypervisor));
        let turn = PauseThread { journal, hypervisor, may_continue: Arc::clone(&may_continue) };
        let thread =
            thread::Builder::new().name("pause".into()).spawn(move || turn.run_pause(is_paused));
        match thread {
            Ok(thread) => self.pause = Some(OutagePause { may_continue, thread }),
            Err(error) => tracing::warn!("the VM is not paused while it waits: {error}"),
        }
    }
}

/// The thread of a pause.
struct PauseThread {
    journal: Arc<JournalFile>,
    hypervisor: Arc<ProcessHandle>,
    may_continue: Arc<AtomicBool>,
}

impl PauseThread {
    fn run_pause(&self, is_paused: bool) {
        let Some(hypervisor_record) = self.journal.current_journal().hypervisor_record else {
            return;
        };
        let paused = if is_paused { Ok(true) } else { self.pause_vm(&hypervisor_record) };
        match paused {
            Ok(true) => self.resume_when_allowed(&hypervisor_record),
            Ok(false) => {}
            Err(failure) => tracing::info!("the VM is not paused while it waits: {failure}"),
        }
    }

    /// Pauses the VM. Returns whether it is paused by this, or will be. A VM that its user has
    /// paused is left alone.
    fn pause_vm(&self, hypervisor_record: &HypervisorRecord) -> Result<bool, Failure> {
        let mut vm = qemu::connect_within(hypervisor_record, qemu::SHORT_WAIT)?;
        if !vm.status().while_doing("querying whether the VM runs")?.running {
            return Ok(false);
        }
        self.record_pause(true)?;
        if let Err(error) = vm.stop() {
            tracing::info!("the VM pauses when the page that it waits for is installed: {error}");
        }
        Ok(true)
    }

    fn resume_when_allowed(&self, hypervisor_record: &HypervisorRecord) {
        while !self.may_continue.load(Ordering::Acquire) || !try_resume(hypervisor_record) {
            if matches!(self.hypervisor.wait_gone(RETRY_INTERVAL), Ok(true)) {
                return;
            }
        }
        if let Err(failure) = self.record_pause(false) {
            tracing::warn!("{failure}");
        }
    }

    fn record_pause(&self, paused: bool) -> Result<(), Failure> {
        let change = |journal: &mut Journal| {
            if let VmPhase::Restoring { paused_by_us, .. } = &mut journal.phase {
                *paused_by_us = paused;
            }
        };
        self.journal.update(change).while_doing("writing the journal")
    }
}

/// Resumes a VM; returns whether it runs.
fn try_resume(hypervisor_record: &HypervisorRecord) -> bool {
    let continued = qemu::connect_within(hypervisor_record, qemu::SHORT_WAIT).and_then(|mut vm| {
        let running = vm.status().while_doing("querying whether the VM runs")?.running;
        if running { Ok(()) } else { vm.cont().while_doing("resuming the VM") }
    });
    continued.is_ok()
}
