//! The fault handler: one thread that reads page faults and answers them.
//!
//! It never waits for storage. It decodes and installs blocks in memory or in the page cache
//! itself, because handing them to another thread costs more than the work. For all others it
//! starts a read in the kernel and lets a reader thread wait.
//!
//! ```text
//!   read events -> page server -> in memory:      decode, install
//!                              -> not read yet:   check the page cache: there? decode, install : ask a reader
//!                              -> being read:     nothing; the reader installs it first of all
//!                              -> zero:           zeros
//! ```
//!
//! To check the page cache, the handler requests the bytes without waiting. As long as the image
//! turns out to be cached, it requests only the bytes of the faulting memory block, which is
//! fastest; otherwise those of its whole locality block, so that the kernel starts one read of the
//! right size at once.

use std::ops::Range;
use std::time::Duration;

use firn_fault::pass_point;
use firn_memory::FaultKind;
use firn_types::Page;

use crate::error::RestoreError;
use crate::image_bytes::UnitBytes;
use crate::inbox::{EventInbox, PendingFault};
use crate::installer::{BlockInstaller, InstallerRole};
use crate::record::{AnswerKind, FaultRecord};
use crate::server::{
    BlockInstall, FAULT_PAUSE_MIN, FaultAnswer, PageServer, ThreadWakeups, UnitSource,
};
use crate::shared::{SharedRestore, WakeWorker};

/// The longest sleep without a check whether the restore is over.
const SLEEP_MAX: Duration = Duration::from_millis(50);

/// The number of consecutive units in the page cache after which the handler expects the next one
/// there.
const CACHED_UNITS_MIN: u32 = 4;

/// The state of the fault handler.
pub(crate) struct FaultHandler<'a> {
    shared: &'a SharedRestore,
    installer: BlockInstaller<'a>,
    /// Units found in the page cache since the last that was not.
    warm: u32,
    /// Whether a worker is to be woken. That costs about as much as decoding a block, so it is done
    /// when no fault waits.
    wake_worker: WakeWorker,
}

impl<'a> FaultHandler<'a> {
    pub(crate) fn new(shared: &'a SharedRestore) -> Self {
        let installer =
            BlockInstaller::new(shared, InstallerRole::Handler(EventInbox::new(shared)));
        Self { shared, installer, warm: 0, wake_worker: WakeWorker::No }
    }

    /// Answers faults until the restore is over.
    pub(crate) fn run_until_over(&mut self) -> Result<(), RestoreError> {
        while !self.shared.is_over() {
            self.read_events()?;
            while let Some(fault) = self.installer.event_inbox().and_then(EventInbox::next_fault) {
                self.handle_fault(fault)?;
            }
        }
        self.drain_events()
    }

    /// Reads events; if there are none, sleeps first. Sleeping at once is best: polling for the
    /// next fault for some microseconds made faults 20 to 30 % slower on two processors, because
    /// the guest that was just woken had to run on the other one.
    fn read_events(&mut self) -> Result<(), RestoreError> {
        let Some(inbox) = self.installer.event_inbox() else { return Ok(()) };
        inbox.read_events()?;
        if inbox.is_empty() && self.wake_worker == WakeWorker::AfterPause {
            inbox.wait_until_readable(FAULT_PAUSE_MIN)?;
            inbox.read_events()?;
        }
        if !inbox.is_empty() {
            return Ok(());
        }
        if std::mem::take(&mut self.wake_worker) != WakeWorker::No {
            self.shared.wake_worker();
        }
        inbox.wait_until_readable(SLEEP_MAX)?;
        inbox.read_events()
    }

    fn handle_fault(&mut self, fault: PendingFault) -> Result<(), RestoreError> {
        pass_point("restore.fault");
        let is_clone = self.shared.is_clone();
        match fault.kind {
            FaultKind::Missing => {}
            // The template has a page there, which is filled or not.
            FaultKind::Minor if is_clone => {}
            FaultKind::Minor | FaultKind::WriteProtect => return self.resume_thread(fault),
        }
        if is_clone {
            self.shared.settle_filled(fault.page);
        }
        let mut inner = self.shared.lock_state();
        let answer = inner.server.answer_fault(fault.since, fault.page);
        if matches!(answer, FaultAnswer::Wait) {
            inner.recorder.record_waiting(fault);
        }
        drop(inner);
        match answer {
            FaultAnswer::Zero(range) => self.install_zeros(fault, range)?,
            FaultAnswer::AlreadySettled(page) => {
                self.installer.answer_present(page)?;
                self.record_zeros(fault, AnswerKind::Late);
            }
            FaultAnswer::Install(install) => self.install_from_memory(fault, &install),
            FaultAnswer::TryPageCache(install) => self.install_from_cache(fault, &install),
            FaultAnswer::RequestRead(install) => {
                self.leave_to_reader(fault, |server| server.record_cache_miss(&install))
            }
            FaultAnswer::Wait => self.await_read(),
        }
        Ok(())
    }

    /// The thread that reads the page also installs it. If its read has failed, it is tried again
    /// sooner now.
    fn await_read(&self) {
        let inner = self.shared.lock_state();
        let demand = inner.server.has_failed();
        self.shared.wake_threads(inner, ThreadWakeups { demand, ..ThreadWakeups::default() });
    }

    /// Resumes a thread that waits for something else than a missing page. Firn registers nothing
    /// that causes this, so it happens only with a descriptor that was used otherwise before.
    fn resume_thread(&self, fault: PendingFault) -> Result<(), RestoreError> {
        let range = fault.page..Page(fault.page.0 + 1);
        match fault.kind {
            FaultKind::WriteProtect => Ok(self.shared.faults.unprotect_pages(range)?),
            FaultKind::Minor | FaultKind::Missing => {
                Ok(self.shared.faults.resume_minor(range, false)?)
            }
        }
    }

    fn install_zeros(
        &mut self,
        fault: PendingFault,
        range: Range<Page>,
    ) -> Result<(), RestoreError> {
        self.installer.install_zeros(range)?;
        self.record_zeros(fault, AnswerKind::Zero);
        Ok(())
    }

    /// Records a fault that needed nothing of the image.
    fn record_zeros(&self, fault: PendingFault, answered: AnswerKind) {
        let record = FaultRecord::new(fault, self.installer.answered_at(), answered);
        self.shared.lock_state().recorder.record_fault(record);
    }

    /// Answers from a unit in memory.
    fn install_from_memory(&mut self, fault: PendingFault, install: &BlockInstall<UnitBytes>) {
        let stored_block = self.shared.storage.locate_block(install.block);
        let installed = stored_block.and_then(|stored_block| match &install.source {
            UnitSource::Held(bytes) => {
                self.installer.install_held(install, bytes, stored_block).map(|()| true)
            }
            UnitSource::PageCache => self.installer.install_cached(install, stored_block),
        });
        match installed {
            Ok(true) => {
                self.record_answer(fault, install, None, AnswerKind::from_source(&install.source))
            }
            Ok(false) => self.leave_to_reader(fault, |server| server.record_cache_loss(install)),
            Err(error) => self.installer.give_up(install, error),
        }
    }

    /// Answers from a unit that has not been read yet.
    fn install_from_cache(&mut self, fault: PendingFault, install: &BlockInstall<()>) {
        match self.try_fetch(install) {
            Ok(Some(source)) => {
                self.warm = self.warm.saturating_add(1);
                self.record_answer(fault, install, Some(source), AnswerKind::PageCache);
            }
            Ok(None) => {
                self.warm = 0;
                self.leave_to_reader(fault, |server| server.record_cache_miss(install));
            }
            Err(error) => self.installer.give_up(install, error),
        }
    }

    fn record_answer<S>(
        &mut self,
        fault: PendingFault,
        install: &BlockInstall<S>,
        fetched: Option<UnitSource<UnitBytes>>,
        answered: AnswerKind,
    ) {
        let now = self.installer.answered_at();
        let record = FaultRecord::new(fault, now, answered);
        self.wake_worker = self.shared.record_answer(install, fetched, record);
    }

    /// Installs the block if the page cache has its unit. Returns the source of the other blocks of
    /// the unit.
    fn try_fetch(
        &mut self,
        install: &BlockInstall<()>,
    ) -> Result<Option<UnitSource<UnitBytes>>, RestoreError> {
        let storage = &self.shared.storage;
        let stored_block = storage.locate_block(install.block)?;
        if self.warm >= CACHED_UNITS_MIN {
            let cached = self.installer.install_cached(install, stored_block)?;
            return Ok(cached.then_some(UnitSource::PageCache));
        }
        // The reader reports an error, after more attempts.
        let Some(bytes) = storage.try_read_unit(install.unit).unwrap_or(None) else {
            return Ok(None);
        };
        self.installer.install_held(install, &bytes, stored_block)?;
        Ok(Some(self.shared.unit_source(bytes)))
    }

    /// Leaves a fault to a reader thread.
    fn leave_to_reader(
        &self,
        fault: PendingFault,
        ask: impl FnOnce(&mut PageServer<UnitBytes>) -> ThreadWakeups,
    ) {
        let mut inner = self.shared.lock_state();
        let stir = ask(&mut inner.server);
        inner.recorder.record_waiting(fault);
        self.shared.wake_threads(inner, stir);
    }

    /// After the end: a thread that gave pages back waits until the event is read.
    fn drain_events(&mut self) -> Result<(), RestoreError> {
        let Some(inbox) = self.installer.event_inbox() else { return Ok(()) };
        while self.shared.is_finishing() {
            inbox.read_events()?;
            if inbox.next_fault().is_none() {
                break;
            }
            while inbox.next_fault().is_some() {}
        }
        Ok(())
    }
}
