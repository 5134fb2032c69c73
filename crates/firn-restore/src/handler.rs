//! The fault handler: one thread that reads page faults and answers them.
//!
//! It never waits for storage. What is in memory or in the page cache it decodes and installs itself, because a hand-over
//! to another thread costs more than the work; for the rest it leaves the kernel reading and a reader thread waiting.
//!
//! ```text
//!   read events -> page server -> in memory:      decode, install
//!                              -> not read yet:   look in the page cache: there? decode, install : ask a reader
//!                              -> being read:     nothing; the reader installs it first of all
//!                              -> zero:           zeros
//! ```
//!
//! Looking in the page cache is asking for the bytes without waiting. As long as the image turns out to be cached, only
//! the bytes of the faulting memory block are asked for, which is fastest; else those of its whole locality block, so
//! that the kernel starts one read of the right size at once.

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

/// Longest sleep without looking whether it is over.
const SLEEP_MAX: Duration = Duration::from_millis(50);

/// Units found in the page cache one after another that make the handler expect the next one there.
const WARM_AFTER: u32 = 4;

/// The state of the fault handler.
pub(crate) struct Handler<'a> {
    shared: &'a Shared,
    hands: Hands<'a>,
    /// Units found in the page cache since the last that was not.
    warm: u32,
    /// Whether a worker is to be woken. That costs about as much as decoding a block, so it waits until nobody waits.
    wake_worker: WakeWorker,
}

impl<'a> Handler<'a> {
    pub(crate) fn new(shared: &'a Shared) -> Self {
        let hands = Hands::new(shared, Role::Handler(Inbox::new(shared)));
        Self { shared, hands, warm: 0, wake_worker: WakeWorker::No }
    }

    /// Answers faults until it is over.
    pub(crate) fn run(&mut self) -> Result<(), RestoreError> {
        while !self.shared.is_over() {
            self.read()?;
            while let Some(fault) = self.hands.inbox().and_then(Inbox::next) {
                self.fault(fault)?;
            }
        }
        self.read_the_last()
    }

    /// Reads events; if there are none, sleeps first. Sleeping at once is best: looking for the next fault for some
    /// microseconds made faults 20 to 30 % slower on two processors, because the guest that was just woken had to run
    /// elsewhere.
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

    /// Whoever brings the page in does so by itself; if that has failed, it is tried again sooner now.
    fn wait(&self) {
        let inner = self.shared.lock();
        let demand = inner.server.has_failed();
        self.shared.act(inner, Stir { demand, ..Stir::default() });
    }

    /// Lets a thread go on that waits for something else than a missing page. Nothing is registered for that, so this
    /// is only for a descriptor that was used otherwise before.
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

    /// Answers from a unit that nobody has read yet.
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

    /// Installs the block if the page cache has its unit. Gives where the rest of the unit is to be taken from.
    fn try_fetch(&mut self, install: &Install<()>) -> Result<Option<Source<Bytes>>, RestoreError> {
        let storage = &self.shared.storage;
        let place = storage.entry(install.block)?;
        if self.warm >= WARM_AFTER {
            let cached = self.hands.install_cached(install, place)?;
            return Ok(cached.then_some(Source::PageCache));
        }
        // An error here is told by the reader, which has more patience.
        let Some(bytes) = storage.try_unit(install.unit).unwrap_or(None) else { return Ok(None) };
        self.hands.install_held(install, &bytes, place)?;
        Ok(Some(self.shared.source(bytes)))
    }

    /// Leaves a fault to a reader.
    fn ask(&self, fault: Fault, ask: impl FnOnce(&mut Server<Bytes>) -> Stir) {
        let mut inner = self.shared.lock();
        let stir = ask(&mut inner.server);
        inner.recorder.waits(fault);
        self.shared.act(inner, stir);
    }

    /// After the end: who gave pages back waits until that is read.
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
