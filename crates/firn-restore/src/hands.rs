//! Block installer: decodes and installs memory blocks. Every thread has one, with its own buffers.
//!
//! After an install was decided, the guest may give the page back before it is done; see
//! [`crate::gate`]. During that time the kernel refuses to install anything until the event is
//! read. The handler, which reads the events, reads it at once then; the other threads wait for the
//! handler.

use std::ops::Range;
use std::time::Duration;

use firn_fault::point;
use firn_image::{Entry, LocalityBlockId};
use firn_memory::{Attempt, PageFaultError};
use firn_types::{PAGE_SIZE, Page};

use crate::bytes::Bytes;
use crate::error::RestoreError;
use crate::inbox::Inbox;
use crate::record::Answered;
use crate::server::{Install, Source, Stir, Work};
use crate::shared::Shared;

/// The buffers and the role of one thread.
pub(crate) struct Hands<'a> {
    shared: &'a Shared,
    stored: Vec<u8>,
    raw: Vec<u8>,
    role: Role<'a>,
    answered: Duration,
    /// The last attempt found no memory.
    is_short: bool,
}

/// The thread that an installer belongs to.
pub(crate) enum Role<'a> {
    /// The thread that reads events.
    Handler(Inbox<'a>),
    /// A thread that does not.
    Helper,
}

/// Pause of a helper before its next attempt.
const PAUSE: Duration = Duration::from_micros(20);

/// Pause before the next attempt to install a page for which the host had no memory.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// The location of the stored bytes of a block in the image.
pub(crate) type Place = (LocalityBlockId, Entry);

impl<'a> Hands<'a> {
    pub(crate) fn new(shared: &'a Shared, role: Role<'a>) -> Self {
        let bytes = shared.storage.image().geometry().block_size.bytes();
        // A block is never stored in more bytes than it has.
        let (stored, raw) = (vec![0; bytes], vec![0; bytes]);
        Self { shared, stored, raw, role, answered: Duration::ZERO, is_short: false }
    }

    /// Installs a block from its unit's bytes.
    pub(crate) fn install_held<B>(
        &mut self,
        install: &Install<B>,
        bytes: &Bytes,
        place: Place,
    ) -> Result<(), RestoreError> {
        let storage = &self.shared.storage;
        storage.image().decode(&place.1, storage.stored_in(bytes, &place.1), &mut self.raw)?;
        self.install_raw(install)
    }

    /// Installs a block from the page cache. `false` if the page cache does not have it.
    pub(crate) fn install_cached<B>(
        &mut self,
        install: &Install<B>,
        place: Place,
    ) -> Result<bool, RestoreError> {
        // The thread that reads the block next reports an error, after more attempts.
        let cached = self.shared.storage.try_block(place, &mut self.stored).unwrap_or(false);
        if cached {
            self.install_stored(install, place)?;
        }
        Ok(cached)
    }

    /// Installs a block from the file, waiting for storage if necessary.
    fn install_from_file<B>(
        &mut self,
        install: &Install<B>,
        place: Place,
    ) -> Result<(), RestoreError> {
        self.shared.storage.block(place, &mut self.stored)?;
        self.install_stored(install, place)
    }

    fn install_stored<B>(
        &mut self,
        install: &Install<B>,
        (_, entry): Place,
    ) -> Result<(), RestoreError> {
        self.shared.storage.image().decode(&entry, &self.stored, &mut self.raw)?;
        self.install_raw(install)
    }

    /// Installs the decoded pages, with one request if none of them is settled. Pages that the
    /// guest gave back since this was decided are left out; if a vCPU waits for the block, they are
    /// installed as zeros.
    ///
    /// The requested page is not installed before the others: on the processor of the handler the
    /// guest would run first, and fault on its neighbour.
    fn install_raw<B>(&mut self, install: &Install<B>) -> Result<(), RestoreError> {
        point("restore.install");
        loop {
            match self.copy(install) {
                Ok(Attempt::Busy) => self.make_way()?,
                Ok(_) => break,
                Err(error) => self.wait_for_memory(error, install.wanted)?,
            }
        }
        self.has_memory();
        self.answered = self.shared.now();
        Ok(())
    }

    /// After the host had no memory for a page: returns when the next attempt is due. In this time
    /// events of a guest that gives pages back are processed, since that frees memory.
    fn wait_for_memory(
        &mut self,
        error: RestoreError,
        requested: Option<Page>,
    ) -> Result<(), RestoreError> {
        if !error.is_no_memory() || !self.shared.retries(&error) {
            return Err(error);
        }
        if self.shared.is_over() {
            return Err(RestoreError::Stopped);
        }
        self.is_short = true;
        self.shared.lock().failures.memory(error, requested);
        std::thread::sleep(MEMORY_PAUSE);
        match &mut self.role {
            Role::Handler(inbox) => inbox.read(),
            Role::Helper => Ok(()),
        }
    }

    fn has_memory(&mut self) {
        if std::mem::take(&mut self.is_short) {
            self.shared.lock().failures.has_memory();
        }
    }

    fn copy<B>(&mut self, install: &Install<B>) -> Result<Attempt, RestoreError> {
        firn_fault::io("restore.copy").map_err(|source| no_memory(install, &source))?;
        let _inside = match self.role {
            Role::Handler(_) => None,
            Role::Helper => Some(self.shared.gate.enter()),
        };
        let first = self.shared.first_page(install.block).0;
        let missing = self.shared.still_missing(install);
        if install.wanted.is_some() && missing != install.pages {
            for run in install.pages.without(missing).runs() {
                let zeros = Page(first + run.start)..Page(first + run.end);
                if self.check(self.shared.faults.try_zero(zeros))? == Attempt::Busy {
                    return Ok(Attempt::Busy);
                }
            }
        }
        for run in missing.runs() {
            let bytes = run.start as usize * PAGE_SIZE..run.end as usize * PAGE_SIZE;
            let page = Page(first + run.start);
            let attempt = self.shared.faults.try_install(page, &self.raw[bytes]);
            if self.check(attempt)? == Attempt::Busy {
                return Ok(Attempt::Busy);
            }
        }
        Ok(Attempt::Done)
    }

    /// Answers with zeros; pages that are present are not changed.
    pub(crate) fn zero(&mut self, pages: Range<Page>) -> Result<(), RestoreError> {
        loop {
            match self.check(self.shared.faults.try_zero(pages.clone())) {
                Ok(Attempt::Busy) => self.make_way()?,
                Ok(_) => break,
                Err(error) => self.wait_for_memory(error, Some(pages.start))?,
            }
        }
        self.has_memory();
        self.answered = self.shared.now();
        Ok(())
    }

    fn check(&self, attempt: Result<Attempt, PageFaultError>) -> Result<Attempt, RestoreError> {
        match attempt {
            // All memory is present, and no vCPU waits any more.
            Err(PageFaultError::NotRegistered { .. }) if self.shared.is_finishing() => {
                Ok(Attempt::Done)
            }
            attempt => Ok(attempt?),
        }
    }

    /// Lets the hypervisor continue with an operation that blocks installs.
    fn make_way(&mut self) -> Result<(), RestoreError> {
        match &mut self.role {
            Role::Handler(inbox) => inbox.read(),
            Role::Helper if self.shared.is_over() => Err(RestoreError::Stopped),
            Role::Helper => {
                std::thread::sleep(PAUSE);
                Ok(())
            }
        }
    }

    /// When the last page that a vCPU waited for was installed.
    pub(crate) fn answered(&self) -> Duration {
        self.answered
    }

    /// The events, if this is the installer of the handler.
    pub(crate) fn inbox(&mut self) -> Option<&mut Inbox<'a>> {
        match &mut self.role {
            Role::Handler(inbox) => Some(inbox),
            Role::Helper => None,
        }
    }

    /// Does the work that the page server returned. An error is reported, and the guest keeps
    /// waiting.
    pub(crate) fn work(&mut self, work: Work<Bytes>) {
        match work {
            Work::Late(page) => self.late(page),
            Work::Install(install) => self.install(&install),
        }
    }

    fn late(&mut self, page: Page) {
        match self.zero(page..Page(page.0 + 1)) {
            Ok(()) | Err(RestoreError::Stopped) => {}
            Err(error) => self.shared.fail(error),
        }
    }

    fn install(&mut self, install: &Install<Bytes>) {
        let place = self.shared.storage.entry(install.block);
        let installed = place.and_then(|place| match &install.source {
            Source::Held(bytes) => self.install_held(install, bytes, place),
            Source::PageCache => self.install_from_file(install, place),
        });
        match installed {
            Ok(()) => self.shared.installed(install),
            Err(error) => self.give_up(install, error),
        }
    }

    /// A block can't be installed: a vCPU that waits for it keeps waiting.
    pub(crate) fn give_up<B>(&self, install: &Install<B>, error: RestoreError) {
        // A successor continues with the restore then.
        if matches!(error, RestoreError::Stopped) {
            return;
        }
        let mut inner = self.shared.lock();
        let stir = inner.server.set_aside(self.shared.now(), install);
        if !self.shared.retries(&error) {
            self.shared.act(inner, stir);
            return self.shared.fail(error);
        }
        inner.failures.block(install.block, error);
        // A reader must schedule the next attempt.
        self.shared.act(inner, Stir { background: true, ..stir });
        if matches!(self.role, Role::Helper) {
            self.shared.storage.reopen();
        }
    }
}

/// The error of an install in which a fault point fails.
fn no_memory<B>(install: &Install<B>, source: &std::io::Error) -> RestoreError {
    let (first, pages) = (install.wanted.unwrap_or(Page(0)), install.pages.count() as usize);
    let source = rustix::io::Errno::from_io_error(source).unwrap_or(rustix::io::Errno::NOMEM);
    RestoreError::PageFaults(PageFaultError::NoMemory { what: "installing", first, pages, source })
}

impl Answered {
    /// How a fault was answered from this source.
    pub(crate) fn from<B>(source: &Source<B>) -> Self {
        match source {
            Source::Held(_) => Self::Memory,
            Source::PageCache => Self::PageCache,
        }
    }
}
