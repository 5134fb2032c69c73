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

use firn_fault::point;
use firn_memory::FaultKind;
use firn_types::Page;

use crate::bytes::Bytes;
use crate::error::RestoreError;
use crate::hands::{Hands, Role};
use crate::inbox::{Fault, Inbox};
use crate::record::{Answered, FaultRecord};
use crate::server::{Answer, Install, LULL, Server, Source, Stir};
use crate::shared::{Shared, WakeWorker};

/// The longest sleep without a check whether the restore is over.
const SLEEP_MAX: Duration = Duration::from_millis(50);

/// The number of consecutive units in the page cache after which the handler expects the next one
/// there.
const WARM_AFTER: u32 = 4;

/// The state of the fault handler.
pub(crate) struct Handler<'a> {
    shared: &'a Shared,
    hands: Hands<'a>,
    /// Units found in the page cache since the last that was not.
    warm: u32,
    /// Whether a worker is to be woken. That costs about as much as decoding a block, so it is done
    /// when no fault waits.
    wake_worker: WakeWorker,
}

impl<'a> Handler<'a> {
    pub(crate) fn new(shared: &'a Shared) -> Self {
        let hands = Hands::new(shared, Role::Handler(Inbox::new(shared)));
        Self { shared, hands, warm: 0, wake_worker: WakeWorker::No }
    }

    /// Answers faults until the restore is over.
    pub(crate) fn run(&mut self) -> Result<(), RestoreError> {
        while !self.shared.is_over() {
            self.read()?;
            while let Some(fault) = self.hands.inbox().and_then(Inbox::next) {
                self.fault(fault)?;
            }
        }
        self.read_the_last()
    }

    /// Reads events; if there are none, sleeps first. Sleeping at once is best: polling for the
    /// next fault for some microseconds made faults 20 to 30 % slower on two processors, because
    /// the guest that was just woken had to run on the other one.
    fn read(&mut self) -> Result<(), RestoreError> {
        let Some(inbox) = self.hands.inbox() else { return Ok(()) };
        inbox.read()?;
        if inbox.is_empty() && self.wake_worker == WakeWorker::InALull {
            inbox.sleep(LULL)?;
            inbox.read()?;
        }
        if !inbox.is_empty() {
            return Ok(());
        }
        if std::mem::take(&mut self.wake_worker) != WakeWorker::No {
            self.shared.wake_worker();
        }
        inbox.sleep(SLEEP_MAX)?;
        inbox.read()
    }

    fn fault(&mut self, fault: Fault) -> Result<(), RestoreError> {
        point("restore.fault");
        if fault.kind != FaultKind::Missing {
            return self.let_go(fault);
        }
        let mut inner = self.shared.lock();
        let answer = inner.server.fault(fault.since, fault.page);
        if matches!(answer, Answer::Wait) {
            inner.recorder.waits(fault);
        }
        drop(inner);
        match answer {
            Answer::Zero(range) => self.zero(fault, range, Answered::Zero)?,
            Answer::Late(page) => self.zero(fault, page..Page(page.0 + 1), Answered::Late)?,
            Answer::Install(install) => self.install(fault, &install),
            Answer::Fetch(install) => self.fetch(fault, &install),
            Answer::Ask(install) => self.ask(fault, |server| server.missed(&install)),
            Answer::Wait => self.wait(),
        }
        Ok(())
    }

    /// The thread that reads the page also installs it. If its read has failed, it is tried again
    /// sooner now.
    fn wait(&self) {
        let inner = self.shared.lock();
        let demand = inner.server.has_failed();
        self.shared.act(inner, Stir { demand, ..Stir::default() });
    }

    /// Resumes a thread that waits for something else than a missing page. Firn registers nothing
    /// that causes this, so it happens only with a descriptor that was used otherwise before.
    fn let_go(&self, fault: Fault) -> Result<(), RestoreError> {
        let range = fault.page..Page(fault.page.0 + 1);
        match fault.kind {
            FaultKind::WriteProtect => Ok(self.shared.faults.unprotect(range)?),
            FaultKind::Minor | FaultKind::Missing => {
                Ok(self.shared.faults.resume_minor(range, false)?)
            }
        }
    }

    fn zero(
        &mut self,
        fault: Fault,
        range: Range<Page>,
        answered: Answered,
    ) -> Result<(), RestoreError> {
        self.hands.zero(range)?;
        let record = FaultRecord::new(fault, self.hands.answered(), answered);
        self.shared.lock().recorder.fault(record);
        Ok(())
    }

    /// Answers from a unit in memory.
    fn install(&mut self, fault: Fault, install: &Install<Bytes>) {
        let place = self.shared.storage.entry(install.block);
        let installed = place.and_then(|place| match &install.source {
            Source::Held(bytes) => self.hands.install_held(install, bytes, place).map(|()| true),
            Source::PageCache => self.hands.install_cached(install, place),
        });
        match installed {
            Ok(true) => self.answered(fault, install, None, Answered::from(&install.source)),
            Ok(false) => self.ask(fault, |server| server.lost(install)),
            Err(error) => self.hands.give_up(install, error),
        }
    }

    /// Answers from a unit that has not been read yet.
    fn fetch(&mut self, fault: Fault, install: &Install<()>) {
        match self.try_fetch(install) {
            Ok(Some(source)) => {
                self.warm = self.warm.saturating_add(1);
                self.answered(fault, install, Some(source), Answered::PageCache);
            }
            Ok(None) => {
                self.warm = 0;
                self.ask(fault, |server| server.missed(install));
            }
            Err(error) => self.hands.give_up(install, error),
        }
    }

    fn answered<S>(
        &mut self,
        fault: Fault,
        install: &Install<S>,
        fetched: Option<Source<Bytes>>,
        answered: Answered,
    ) {
        let now = self.hands.answered();
        let record = FaultRecord::new(fault, now, answered);
        self.wake_worker = self.shared.answered(install, fetched, record);
    }

    /// Installs the block if the page cache has its unit. Returns the source of the other blocks of
    /// the unit.
    fn try_fetch(&mut self, install: &Install<()>) -> Result<Option<Source<Bytes>>, RestoreError> {
        let storage = &self.shared.storage;
        let place = storage.entry(install.block)?;
        if self.warm >= WARM_AFTER {
            let cached = self.hands.install_cached(install, place)?;
            return Ok(cached.then_some(Source::PageCache));
        }
        // The reader reports an error, after more attempts.
        let Some(bytes) = storage.try_unit(install.unit).unwrap_or(None) else { return Ok(None) };
        self.hands.install_held(install, &bytes, place)?;
        Ok(Some(self.shared.source(bytes)))
    }

    /// Leaves a fault to a reader thread.
    fn ask(&self, fault: Fault, ask: impl FnOnce(&mut Server<Bytes>) -> Stir) {
        let mut inner = self.shared.lock();
        let stir = ask(&mut inner.server);
        inner.recorder.waits(fault);
        self.shared.act(inner, stir);
    }

    /// After the end: a thread that gave pages back waits until the event is read.
    fn read_the_last(&mut self) -> Result<(), RestoreError> {
        let Some(inbox) = self.hands.inbox() else { return Ok(()) };
        while self.shared.is_finishing() {
            inbox.read()?;
            if inbox.next().is_none() {
                break;
            }
            while inbox.next().is_some() {}
        }
        Ok(())
    }
}
