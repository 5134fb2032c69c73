//! Block installer: decodes and installs memory blocks. Every thread has one, with its own buffers.
//!
//! After an install was decided, the guest may give the page back before it is done; see
//! [`crate::install_lock`]. During that time the kernel refuses to install anything until the event is
//! read. The handler, which reads the events, reads it at once then; the other threads wait for the
//! handler.

use std::ops::Range;
use std::time::Duration;

use firn_fault::pass_point;
use firn_image::{BlockEntry, LocalityBlockId};
use firn_memory::{InstallAttempt, PageFaultError};
use firn_types::{PAGE_SIZE, Page};

use crate::error::RestoreError;
use crate::image_bytes::UnitBytes;
use crate::inbox::EventInbox;
use crate::record::AnswerKind;
use crate::server::{BlockInstall, InstallWork, ThreadWakeups, UnitSource};
use crate::shared::SharedRestore;

/// The buffers and the role of one thread.
pub(crate) struct BlockInstaller<'a> {
    shared: &'a SharedRestore,
    stored: Vec<u8>,
    raw: Vec<u8>,
    role: InstallerRole<'a>,
    answered_at: Duration,
    /// The last attempt found no memory.
    is_short: bool,
}

/// The thread that an installer belongs to.
pub(crate) enum InstallerRole<'a> {
    /// The thread that reads events.
    Handler(EventInbox<'a>),
    /// A thread that does not.
    Helper,
}

/// Pause of a helper before its next attempt.
const PAUSE: Duration = Duration::from_micros(20);

/// Pause before the next attempt to install a page for which the host had no memory.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// The location of the stored bytes of a block in the image.
pub(crate) type StoredBlock = (LocalityBlockId, BlockEntry);

impl<'a> BlockInstaller<'a> {
    pub(crate) fn new(shared: &'a SharedRestore, role: InstallerRole<'a>) -> Self {
        let bytes = shared.storage.image().geometry().block_size.byte_count();
        // A block is never stored in more bytes than it has.
        let (stored, raw) = (vec![0; bytes], vec![0; bytes]);
        Self { shared, stored, raw, role, answered_at: Duration::ZERO, is_short: false }
    }

    /// Installs a block from its unit's bytes.
    pub(crate) fn install_held<B>(
        &mut self,
        install: &BlockInstall<B>,
        bytes: &UnitBytes,
        stored_block: StoredBlock,
    ) -> Result<(), RestoreError> {
        let storage = &self.shared.storage;
        storage.image().decode_block(
            &stored_block.1,
            storage.stored_in(bytes, &stored_block.1),
            &mut self.raw,
        )?;
        self.install_decoded(install)
    }

    /// Installs a block from the page cache. `false` if the page cache does not have it.
    pub(crate) fn install_cached<B>(
        &mut self,
        install: &BlockInstall<B>,
        stored_block: StoredBlock,
    ) -> Result<bool, RestoreError> {
        // The thread that reads the block next reports an error, after more attempts.
        let cached =
            self.shared.storage.try_read_block(stored_block, &mut self.stored).unwrap_or(false);
        if cached {
            self.install_stored(install, stored_block)?;
        }
        Ok(cached)
    }

    /// Installs a block from the file, waiting for storage if necessary.
    fn install_from_file<B>(
        &mut self,
        install: &BlockInstall<B>,
        stored_block: StoredBlock,
    ) -> Result<(), RestoreError> {
        self.shared.storage.read_block(stored_block, &mut self.stored)?;
        self.install_stored(install, stored_block)
    }

    fn install_stored<B>(
        &mut self,
        install: &BlockInstall<B>,
        (_, entry): StoredBlock,
    ) -> Result<(), RestoreError> {
        self.shared.storage.image().decode_block(&entry, &self.stored, &mut self.raw)?;
        self.install_decoded(install)
    }

    /// Installs the decoded pages, with one request if none of them is settled. Pages that the
    /// guest gave back since this was decided are left out; if a vCPU waits for the block, they are
    /// installed as zeros.
    ///
    /// The requested page is not installed before the others: on the processor of the handler the
    /// guest would run first, and fault on its neighbour.
    fn install_decoded<B>(&mut self, install: &BlockInstall<B>) -> Result<(), RestoreError> {
        pass_point("restore.install");
        loop {
            match self.copy_pages(install) {
                Ok(InstallAttempt::Busy) => self.await_hypervisor()?,
                Ok(_) => break,
                Err(error) => self.wait_for_memory(error, install.wanted)?,
            }
        }
        self.has_memory();
        self.answered_at = self.shared.now();
        Ok(())
    }

    /// After the host had no memory for a page: returns when the next attempt is due. In this time
    /// events of a guest that gives pages back are processed, since that frees memory.
    fn wait_for_memory(
        &mut self,
        error: RestoreError,
        requested: Option<Page>,
    ) -> Result<(), RestoreError> {
        if !error.is_no_memory() || !self.shared.can_retry(&error) {
            return Err(error);
        }
        if self.shared.is_over() {
            return Err(RestoreError::Stopped);
        }
        self.is_short = true;
        self.shared.lock_state().failures.record_no_memory(error, requested);
        std::thread::sleep(MEMORY_PAUSE);
        match &mut self.role {
            InstallerRole::Handler(inbox) => inbox.read_events(),
            InstallerRole::Helper => Ok(()),
        }
    }

    fn has_memory(&mut self) {
        if std::mem::take(&mut self.is_short) {
            self.shared.lock_state().failures.clear_no_memory();
        }
    }

    fn copy_pages<B>(&mut self, install: &BlockInstall<B>) -> Result<InstallAttempt, RestoreError> {
        firn_fault::pass_io_point("restore.copy").map_err(|source| no_memory(install, &source))?;
        let _hold = match self.role {
            InstallerRole::Handler(_) => None,
            InstallerRole::Helper => Some(self.shared.install_lock.lock_shared()),
        };
        let first = self.shared.first_page(install.block).0;
        let missing = self.shared.still_missing(install);
        let is_clone = self.shared.is_clone();
        if install.wanted.is_some() && missing != install.pages && !is_clone {
            for run in install.pages.without(missing).runs() {
                let zeros = Page(first + run.start)..Page(first + run.end);
                if self.check_attempt(self.shared.faults.try_install_zeros(zeros))?
                    == InstallAttempt::Busy
                {
                    return Ok(InstallAttempt::Busy);
                }
            }
        }
        for run in missing.runs() {
            let bytes = run.start as usize * PAGE_SIZE..run.end as usize * PAGE_SIZE;
            let page = Page(first + run.start);
            let attempt = self.shared.faults.try_install(page, &self.raw[bytes]);
            if self.check_attempt(attempt)? == InstallAttempt::Busy {
                return Ok(InstallAttempt::Busy);
            }
        }
        Ok(InstallAttempt::Done)
    }

    /// Answers with zeros; pages that are present are not changed.
    pub(crate) fn install_zeros(&mut self, pages: Range<Page>) -> Result<(), RestoreError> {
        let faults = &self.shared.faults;
        self.answer_until_done(pages.start, || faults.try_install_zeros(pages.clone()))
    }

    /// Repeats an answer to a fault on a page until it is given.
    fn answer_until_done(
        &mut self,
        page: Page,
        answer: impl Fn() -> Result<InstallAttempt, PageFaultError>,
    ) -> Result<(), RestoreError> {
        loop {
            match self.check_attempt(answer()) {
                Ok(InstallAttempt::Busy) => self.await_hypervisor()?,
                Ok(_) => break,
                Err(error) => self.wait_for_memory(error, Some(page))?,
            }
        }
        self.has_memory();
        self.answered_at = self.shared.now();
        Ok(())
    }

    fn check_attempt(
        &self,
        attempt: Result<InstallAttempt, PageFaultError>,
    ) -> Result<InstallAttempt, RestoreError> {
        match attempt {
            // All memory is present, and no vCPU waits any more.
            Err(PageFaultError::NotRegistered { .. }) if self.shared.is_finishing() => {
                Ok(InstallAttempt::Done)
            }
            attempt => Ok(attempt?),
        }
    }

    /// Lets the hypervisor continue with an operation that blocks installs.
    fn await_hypervisor(&mut self) -> Result<(), RestoreError> {
        match &mut self.role {
            InstallerRole::Handler(inbox) => inbox.read_events(),
            InstallerRole::Helper if self.shared.is_over() => Err(RestoreError::Stopped),
            InstallerRole::Helper => {
                std::thread::sleep(PAUSE);
                Ok(())
            }
        }
    }

    /// When the last page that a vCPU waited for was installed.
    pub(crate) fn answered_at(&self) -> Duration {
        self.answered_at
    }

    /// The events, if this is the installer of the handler.
    pub(crate) fn event_inbox(&mut self) -> Option<&mut EventInbox<'a>> {
        match &mut self.role {
            InstallerRole::Handler(inbox) => Some(inbox),
            InstallerRole::Helper => None,
        }
    }

    /// Does the work that the page server returned. An error is reported, and the guest keeps
    /// waiting.
    pub(crate) fn do_work(&mut self, work: InstallWork<UnitBytes>) {
        match work {
            InstallWork::AlreadySettled(page) => self.answer_settled(page),
            InstallWork::Install(install) => self.install_block(&install),
        }
    }

    /// Answers a fault on a page that is settled: it is zeros, unless it is present. A settled page
    /// of a clone may also be in the template.
    pub(crate) fn answer_present(&mut self, page: Page) -> Result<(), RestoreError> {
        let (faults, pages) = (&self.shared.faults, page..Page(page.0 + 1));
        match self.shared.is_clone() {
            false => self.install_zeros(pages),
            true => self.answer_until_done(page, || faults.try_resume(page)),
        }
    }

    fn answer_settled(&mut self, page: Page) {
        match self.answer_present(page) {
            Ok(()) | Err(RestoreError::Stopped) => {}
            Err(error) => self.shared.fail_restore(error),
        }
    }

    fn install_block(&mut self, install: &BlockInstall<UnitBytes>) {
        let stored_block = self.shared.storage.locate_block(install.block);
        let installed = stored_block.and_then(|stored_block| match &install.source {
            UnitSource::Held(bytes) => self.install_held(install, bytes, stored_block),
            UnitSource::PageCache => self.install_from_file(install, stored_block),
        });
        match installed {
            Ok(()) => self.shared.record_install(install),
            Err(error) => self.give_up(install, error),
        }
    }

    /// A block can't be installed: a vCPU that waits for it keeps waiting.
    pub(crate) fn give_up<B>(&self, install: &BlockInstall<B>, error: RestoreError) {
        // A successor continues with the restore then.
        if matches!(error, RestoreError::Stopped) {
            return;
        }
        let mut inner = self.shared.lock_state();
        let stir = inner.server.set_aside(self.shared.now(), install);
        if !self.shared.can_retry(&error) {
            self.shared.wake_threads(inner, stir);
            return self.shared.fail_restore(error);
        }
        inner.failures.record_block(install.block, error);
        // A reader must schedule the next attempt.
        self.shared.wake_threads(inner, ThreadWakeups { background: true, ..stir });
        if matches!(self.role, InstallerRole::Helper) {
            self.shared.storage.reopen_image();
        }
    }
}

/// The error of an install in which a fault point fails.
fn no_memory<B>(install: &BlockInstall<B>, source: &std::io::Error) -> RestoreError {
    let (first, pages) = (install.wanted.unwrap_or(Page(0)), install.pages.count() as usize);
    let source = rustix::io::Errno::from_io_error(source).unwrap_or(rustix::io::Errno::NOMEM);
    RestoreError::PageFaults(PageFaultError::NoMemory { what: "installing", first, pages, source })
}

impl AnswerKind {
    /// How a fault was answered from this source.
    pub(crate) fn from_source<B>(source: &UnitSource<B>) -> Self {
        match source {
            UnitSource::Held(_) => Self::Memory,
            UnitSource::PageCache => Self::PageCache,
        }
    }
}
