//! A session: its areas, its transactions, and the changes of each transaction.
//!
//! ```text
//!             register, allocate                begin
//!   open ---> idle --------------------> idle ---------> in a transaction
//!              ^                                            |   |
//!              |                                    abort   |   |  commit
//!              +--- areas as last committed <---------------+   |
//!              +--- areas as they are, reported, copied <-------+
//! ```

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::backup::{
    self, ApplicationLog, ApplicationState, AreaDefinition, BackupError, BackupMonitor, BackupSet,
    BackupStatus, CommittedState, FsyncPolicy, NewChanges, SharedBytes,
};
use crate::changes::{AreaId, ChangeSet};
use crate::claims::PageClaims;
use crate::committed_bytes::{AreaCopy, CommittedBytes};
use crate::error::Error;
use crate::memory::AreaMemory;
use crate::options::{Precision, SessionOptions};
use crate::span::PageSpan;
use crate::sys::fork::OwnerProcess;
use crate::sys::region::AreaRegion;
use crate::tracker::{self, Tracker, TrackerCounts, TrackerKind, WrittenRuns};

/// Critical data areas, and the transactions on them.
///
/// # Threads
///
/// Any number of threads may write areas between begin and commit. While a method of the session
/// runs, no thread may. For areas from [`Session::allocate`] the compiler enforces that: their
/// bytes are borrowed from the session or from a [`Transaction`]. For memory given by
/// [`Session::register`] the application promises it. A write outside of transactions belongs to
/// the next transaction.
///
/// # Forks
///
/// A process that forks continues as if it had not. In its child every method of the session that
/// can fail returns [`Error::Forked`]. Dropping the session there releases what the child has and
/// nothing of the parent's. The child may read and write the areas: what it writes is private to
/// the child, and belongs to no transaction. With the trackers Emul and Scan a page shows what the
/// parent writes until the child writes the area. A child may open sessions of its own.
pub struct Session {
    // Dropped in this order: protection ends, and pages are released, before memory is unmapped.
    // Otherwise another session could be given memory at an address that is still claimed.
    owner: OwnerProcess,
    tracker: Box<dyn Tracker>,
    claims: PageClaims,
    areas: Vec<AreaState>,
    options: SessionOptions,
    found: WrittenRuns,
    changes: ChangeSet,
    sequence: u64,
    open: bool,
    backups: Option<BackupSet>,
    /// Names of the areas that backups have, by their numbers there.
    stored: Vec<String>,
    /// The numbers of areas that the next commit removes from backups.
    removed: Vec<u32>,
    /// The backups have a state that the areas do not have yet.
    is_recoverable: bool,
}

/// The session's own data of an area.
struct AreaState {
    name: String,
    region: AreaRegion,
    /// The last committed bytes, if a copy is kept here. Of an area that backups have, the committed
    /// state that the session shares with them is the copy.
    copy: Option<AreaCopy>,
    /// No transaction has committed any of it yet.
    fresh: bool,
    /// Its number in backups.
    number: u32,
    /// The memory, if the library allocated it.
    memory: Option<Arc<AreaMemory>>,
    /// The application has forgotten the area. Its place is kept: areas are found by number.
    is_forgotten: bool,
}

/// An area whose memory the library allocated. The memory stays mapped for as long as this value or
/// the session exists.
#[derive(Clone, Debug)]
pub struct Area {
    id: AreaId,
    len: usize,
    memory: Arc<AreaMemory>,
}

impl Area {
    /// The area's number.
    pub fn id(&self) -> AreaId {
        self.id
    }

    /// The area's length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: an area has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, for code that follows the rule of threads by itself. Aligned
    /// to a page.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.start().as_ptr()
    }
}

impl Session {
    /// Opens a session.
    ///
    /// # Errors
    /// If the tracker does not work on this kernel.
    pub fn open(options: SessionOptions) -> Result<Self, Error> {
        let tracker = match options.tracker {
            Some(kind) => tracker::open_tracker(kind)?,
            None => tracker::choose_tracker(options.source)?,
        };
        Self::open_with(options, tracker)
    }

    /// Opens a session with a tracker that the caller provides.
    ///
    /// # Errors
    /// If the options ask for something that this tracker cannot do.
    pub fn open_with(
        mut options: SessionOptions,
        mut tracker: Box<dyn Tracker>,
    ) -> Result<Self, Error> {
        let words = options.precision == Precision::Words && !tracker.reports_words();
        if tracker.kind() == TrackerKind::Compare {
            options.precision = Precision::Words;
        }
        if !options.undo && (words || tracker.kind() == TrackerKind::Compare) {
            let why = "it finds words by comparing with the committed copy (SessionOptions::undo)"
                .to_owned();
            return Err(Error::Unavailable { kind: tracker.kind(), why });
        }
        tracker.set_comparing(options.undo && options.precision == Precision::Words);
        let owner =
            OwnerProcess::this_process().map_err(Error::system("marking a page for forks"))?;
        let backups = backup::open_targets(&options, owner).map_err(Error::backup)?;
        let mut session = Self {
            owner,
            tracker,
            areas: Vec::new(),
            claims: PageClaims::default(),
            options,
            found: WrittenRuns::default(),
            changes: ChangeSet::default(),
            sequence: 0,
            open: false,
            backups,
            stored: Vec::new(),
            removed: Vec::new(),
            is_recoverable: false,
        };
        session.record_stored_areas();
        Ok(session)
    }

    /// The committed state that the session shares with its backups.
    fn committed(&self) -> Option<Arc<CommittedState>> {
        self.backups.as_ref().map(|backups| backups.committed().clone())
    }

    /// Reads what the backups have: the session can recover it until its first transaction.
    fn record_stored_areas(&mut self) {
        let Some(committed) = self.committed() else { return };
        let image = committed.lock_image();
        self.sequence = image.sequence();
        self.stored = image.areas().iter().map(|area| area.name.clone()).collect();
        self.is_recoverable = image.sequence() > 0;
    }

    /// The session's name.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// The kind of the tracker in use.
    pub fn tracker_kind(&self) -> TrackerKind {
        self.tracker.kind()
    }

    /// The tracker's own counts of events.
    pub fn tracker_counts(&self) -> TrackerCounts {
        self.tracker.counts()
    }

    /// What the tracker cannot do on this machine: why, and what would permit it.
    pub fn tracker_restriction(&self) -> Option<&str> {
        self.tracker.restriction()
    }

    /// The number of the last committed transaction; 0 before the first.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Allocates a new area of zeros.
    ///
    /// # Errors
    /// If there is not enough memory, the name is in use, or a transaction is open.
    pub fn allocate(&mut self, name: &str, len: usize) -> Result<Area, Error> {
        self.check_new(name, len, None)?;
        let memory = self.tracker.allocate_memory(len)?;
        self.claims.claim_span(memory.span()).ok_or_else(|| taken_error(name, memory.span()))?;
        // SAFETY: the memory was mapped for this area, `len` fits it, and it lives as long as the
        // state beside it. Its bytes are lent by methods that borrow the session or its
        // transaction, or used by callers that keep the rule.
        let region = unsafe { AreaRegion::new(memory.start(), len) };
        let id = self.add_area(name, region, Some(memory.clone()));
        Ok(Area { id, len, memory })
    }

    /// Makes an area of memory that the application has already. The area may start and end at any
    /// address. Other data on its first and last page is not affected, and not reported.
    ///
    /// # Safety
    ///
    /// Until the session is dropped, `len` bytes at `start` are allocated, readable and writable.
    /// No other code unmaps, remaps or protects the pages they touch, and these pages are no
    /// thread's stack. While a method of the session runs, no thread writes the area. While
    /// [`Transaction::abort`] or a recovery writes it, no thread reads it.
    ///
    /// With the trackers PT and Emul, a system call that writes the area (read(2), for one) may
    /// fail with EFAULT.
    ///
    /// # Errors
    /// If the tracker cannot follow this memory, it overlaps with another area, or a transaction is
    /// open.
    pub unsafe fn register(
        &mut self,
        name: &str,
        start: NonNull<u8>,
        len: usize,
    ) -> Result<AreaId, Error> {
        // SAFETY: as the caller promises.
        let region = unsafe { AreaRegion::new(start, len) };
        self.check_new(name, len, Some(region.addresses()))?;
        let span = PageSpan::covering_range(region.addresses());
        let new = self.claims.claim_span(span).ok_or_else(|| taken_error(name, span))?;
        for (number, span) in new.iter().enumerate() {
            if let Err(error) = self.tracker.watch_span(*span) {
                // The session would count claimed pages as followed.
                self.claims.release_spans(&new[number..]);
                return Err(error);
            }
        }
        Ok(self.add_area(name, region, None))
    }

    fn check_new(
        &self,
        name: &str,
        len: usize,
        addresses: Option<Range<usize>>,
    ) -> Result<(), Error> {
        self.check_state("register", false)?;
        if len == 0 || name.len() > 255 {
            return Err(Error::Size { name: name.to_owned(), len });
        }
        let meets = |state: &&AreaState| {
            let there = state.region.addresses();
            let overlaps = |new: &Range<usize>| new.start < there.end && there.start < new.end;
            state.name == name || addresses.as_ref().is_some_and(overlaps)
        };
        match self.areas.iter().filter(|state| !state.is_forgotten).find(meets) {
            Some(state) => Err(Error::Overlap { name: name.to_owned(), other: state.name.clone() }),
            None => Ok(()),
        }
    }

    fn add_area(
        &mut self,
        name: &str,
        region: AreaRegion,
        memory: Option<Arc<AreaMemory>>,
    ) -> AreaId {
        let copy = self.options.undo.then(|| match memory {
            // Until the first commit: then it is in the committed state.
            Some(_) if self.backups.is_some() => AreaCopy::Shared(SharedBytes::zeros(region.len())),
            Some(_) => AreaCopy::Own(vec![0; region.len()]),
            None => AreaCopy::Own(region.bytes().to_vec()),
        });
        let number = self.backup_number(name);
        self.areas.push(AreaState {
            name: name.to_owned(),
            region,
            copy,
            fresh: true,
            number,
            memory,
            is_forgotten: false,
        });
        AreaId(self.areas.len() as u32 - 1)
    }

    /// Forgets an area: from now on it is memory like any other, and the application may unmap or
    /// free it. The next committed transaction removes it from backups; a recovery before that
    /// still finds it. The name can be used again. Memory that the library allocated stays mapped
    /// until its [`Area`] is dropped.
    ///
    /// # Errors
    /// If there is no such area, or a transaction is open.
    pub fn forget_area(&mut self, area: AreaId) -> Result<(), Error> {
        self.check_state("forget an area", false)?;
        let own = self.live_area(area)?.region.addresses();
        let is_other =
            |(id, state): &(usize, &AreaState)| *id != area.0 as usize && !state.is_forgotten;
        let others = self.areas.iter().enumerate().filter(is_other);
        let others: Vec<_> =
            others.map(|(_, state)| PageSpan::covering_range(state.region.addresses())).collect();
        // Other areas may need the first and the last page.
        let own = PageSpan::covering_range(own).without_spans(&others);
        own.iter().try_for_each(|span| self.tracker.forget_span(*span))?;
        own.iter().for_each(|span| self.claims.release_pages(*span));
        let state = &mut self.areas[area.0 as usize];
        (state.region, state.copy, state.fresh) = (AreaRegion::empty(), None, false);
        (state.memory, state.is_forgotten) = (None, true);
        self.removed.push(state.number);
        Ok(())
    }

    fn live_area(&self, area: AreaId) -> Result<&AreaState, Error> {
        let state = self.areas.get(area.0 as usize);
        state.filter(|state| !state.is_forgotten).ok_or(Error::NoArea)
    }

    /// The number of an area in backups; a new one for a name that backups do not have.
    fn backup_number(&mut self, name: &str) -> u32 {
        let known = self.stored.iter().position(|stored| stored == name);
        let number = known.unwrap_or_else(|| {
            self.stored.push(name.to_owned());
            self.stored.len() - 1
        });
        number as u32
    }

    /// Fills the areas with their last committed bytes, from the backup that has the latest state.
    /// Areas that the backup does not have stay as they are. Returns the number of that
    /// transaction; 0 if there is none.
    ///
    /// # Errors
    /// If an area has another size, or a transaction is open.
    pub fn recover(&mut self) -> Result<u64, Error> {
        self.check_state("recover", false)?;
        let committed = self.committed().filter(|_| self.is_recoverable);
        let Some(committed) = committed else { return Ok(self.sequence) };
        self.load_state(&committed.lock_image())?;
        Ok(self.sequence)
    }

    fn load_state(&mut self, image: &ApplicationState) -> Result<(), Error> {
        let stored = |state: &AreaState| {
            let number = image.area_number(&state.name)?;
            let is_removed = state.is_forgotten || self.removed.contains(&number);
            let stored = image.areas().get(number as usize).filter(|_| !is_removed);
            stored.filter(|stored| !stored.is_removed())
        };
        for state in &self.areas {
            let Some(stored) = stored(state) else { continue };
            let (len, stored) = (state.region.len(), stored.bytes.len());
            if len != stored {
                return Err(Error::OtherSize { name: state.name.clone(), len, stored });
            }
        }
        for state in &mut self.areas {
            let Some(stored) = stored(state).filter(|_| state.fresh) else { continue };
            let committed = CommittedBytes::Shared(&stored.bytes);
            committed.copy_to(state.region.bytes_mut(), 0..stored.bytes.len());
            (state.fresh, state.copy) = (false, None);
        }
        // Discards what was written here: it is not a change of the application.
        self.collect_writes()
    }

    /// Continues a log that another process wrote until now.
    pub(crate) fn adopt_log(
        &mut self,
        log: ApplicationLog,
        image: ApplicationState,
        fsync: FsyncPolicy,
    ) -> Result<u64, Error> {
        if self.backups.is_some() || self.sequence > 0 {
            let why = "the session has a backup, or has committed";
            return Err(Error::State { what: "take over", why });
        }
        self.check_state("take over", false)?;
        let timeout = self.options.backup_timeout;
        let backups = backup::continue_log(log, image, fsync, timeout, self.owner);
        self.backups = Some(backups.map_err(Error::backup)?);
        // Areas registered before this call get the numbers that the log has for their names.
        self.record_stored_areas();
        for n in 0..self.areas.len() {
            let name = self.areas[n].name.clone();
            self.areas[n].number = self.backup_number(&name);
        }
        let recovered = self.recover();
        if recovered.is_err() {
            (self.backups, self.sequence, self.is_recoverable) = (None, 0, false);
        }
        recovered
    }

    fn check_recovered(&mut self) -> Result<(), Error> {
        let Some(committed) = self.committed().filter(|_| self.is_recoverable) else {
            return Ok(());
        };
        let image = committed.lock_image();
        let is_stored = |state: &AreaState| {
            let number = image.area_number(&state.name);
            number.is_some_and(|number| {
                !self.removed.contains(&number) && !image.areas()[number as usize].is_removed()
            })
        };
        if self.areas.iter().any(|state| state.fresh && is_stored(state)) {
            let why = "the backup has a committed state: recover it, or discard it (SessionOptions::discard)";
            return Err(Error::State { what: "begin", why });
        }
        self.is_recoverable = false;
        Ok(())
    }

    fn check_process(&self) -> Result<(), Error> {
        match self.owner.is_this_process() {
            true => Ok(()),
            false => Err(Error::Forked { name: self.options.name.clone(), pid: self.owner.pid() }),
        }
    }

    fn check_state(&self, what: &'static str, open: bool) -> Result<(), Error> {
        self.check_process()?;
        let why = match open {
            true => "no transaction is open",
            false => "a transaction is open",
        };
        if self.open == open { Ok(()) } else { Err(Error::State { what, why }) }
    }

    /// Begins a transaction. This does no work but checks.
    ///
    /// # Errors
    /// If a transaction is open, or other code has taken away what the tracker needs.
    pub fn begin(&mut self) -> Result<Transaction<'_>, Error> {
        self.check_state("begin", false)?;
        self.check_recovered()?;
        if !self.options.later_handler {
            self.tracker.check_working()?;
        }
        self.open = true;
        Ok(Transaction { session: self })
    }

    /// Returns the transaction that [`Transaction::detach`] left open.
    ///
    /// # Errors
    /// If no transaction is open.
    pub fn open_transaction(&mut self) -> Result<Transaction<'_>, Error> {
        self.check_state("transaction", true)?;
        Ok(Transaction { session: self })
    }

    /// The changes of the last committed transaction.
    pub fn changes(&self) -> &ChangeSet {
        &self.changes
    }

    /// The bytes of an area.
    ///
    /// # Panics
    /// If the area belongs to another session, or was forgotten.
    pub fn bytes(&self, area: &Area) -> &[u8] {
        self.area_state(area).region.bytes()
    }

    /// The bytes of any area, also of a registered one. No thread may write them while they are
    /// borrowed.
    ///
    /// # Errors
    /// If there is no such area.
    pub fn area_bytes(&self, area: AreaId) -> Result<&[u8], Error> {
        self.live_area(area).map(|state| state.region.bytes())
    }

    /// The areas' numbers and names.
    pub fn areas(&self) -> impl Iterator<Item = (AreaId, &str)> {
        let live = self.areas.iter().enumerate().filter(|(_, state)| !state.is_forgotten);
        live.map(|(id, state)| (AreaId(id as u32), state.name.as_str()))
    }

    fn area_state(&self, area: &Area) -> &AreaState {
        let state = self.areas.get(area.id.0 as usize).filter(|state| state.is_state_of(area));
        #[expect(
            clippy::expect_used,
            reason = "documented: the area is the caller's to keep apart"
        )]
        state.expect("the area belongs to another session")
    }

    /// Appends the bytes of the last transaction's changes to `to`, in order.
    pub fn copy_changes(&self, to: &mut Vec<u8>) {
        for change in self.changes.iter() {
            to.extend_from_slice(
                &self.areas[change.area.0 as usize].region.bytes()[change.bytes.clone()],
            );
        }
    }

    fn commit_transaction(&mut self) -> Result<u64, Error> {
        self.check_process()?;
        self.collect_writes()?;
        let defined = self.record_changes();
        self.open = false;
        self.sequence += 1;
        match self.committed() {
            None => self.update_copies(),
            Some(committed) => self.back_up(&committed, &defined).map_err(Error::backup)?,
        }
        Ok(self.sequence)
    }

    /// Passes the changes to all backups, then waits until enough of them have stored them.
    fn back_up(
        &mut self,
        committed: &CommittedState,
        defined: &[AreaId],
    ) -> Result<(), BackupError> {
        // The committed state is the copy from now on.
        for area in defined {
            self.areas[area.0 as usize].copy = None;
        }
        committed.add_commit(self.sequence, self.new_changes(defined))?;
        self.removed.clear();
        committed.wait_for_acknowledgement(self.sequence)
    }

    fn new_changes(&self, defined: &[AreaId]) -> NewChanges<'_> {
        let define_area = |area: &AreaId| {
            let state = &self.areas[area.0 as usize];
            let (len, name) = (state.region.len() as u64, state.name.clone());
            AreaDefinition { number: state.number, len, name }
        };
        let areas = self.removed.iter().map(|&number| {
            let name = self.stored[number as usize].clone();
            AreaDefinition { number, len: 0, name }
        });
        let changes = self.changes.iter().map(|change| {
            let state = &self.areas[change.area.0 as usize];
            let bytes = &state.region.bytes()[change.bytes.clone()];
            (state.number, change.bytes.start as u64, bytes)
        });
        let mut defined: Vec<_> = areas.chain(defined.iter().map(define_area)).collect();
        // Numbers have no gaps; a name that is used again is removed, and then defined.
        defined.sort_by_key(|area| area.number);
        NewChanges { defined, changes: changes.collect() }
    }

    /// The last transaction that every backup has; the last committed one if there is no backup. 0
    /// in a child of the process that opened the session.
    pub fn acknowledged_sequence(&self) -> u64 {
        if !self.owner.is_this_process() {
            return 0;
        }
        self.backups.as_ref().map_or(self.sequence, |backups| backups.committed().stored_by_all())
    }

    /// Waits until every backup has all committed transactions, for
    /// [`SessionOptions::backup_timeout`] at most.
    ///
    /// # Errors
    /// If a backup lacks one of them then.
    pub fn flush_backups(&self) -> Result<(), Error> {
        self.check_process()?;
        let Some(backups) = &self.backups else { return Ok(()) };
        backups.committed().wait_until_stored(self.sequence).map_err(Error::backup)
    }

    /// The status of each backup.
    ///
    /// # Errors
    /// In a child of the process that opened the session.
    pub fn backup_status(&self) -> Result<Vec<BackupStatus>, Error> {
        self.backup_monitor().status()
    }

    /// Reads the status of the backups while the session is in use, and waits for changes of it.
    pub fn backup_monitor(&self) -> BackupMonitor {
        BackupMonitor { name: self.options.name.clone(), committed: self.committed() }
    }

    fn collect_writes(&mut self) -> Result<(), Error> {
        self.found.clear();
        self.tracker.collect_writes(&mut self.found)?;
        self.found.join_runs();
        Ok(())
    }

    /// Turns the written runs into changes of areas. Returns the areas that are reported for the
    /// first time.
    fn record_changes(&mut self) -> Vec<AreaId> {
        let mut first = Vec::new();
        let committed = self.committed();
        let image = committed.as_ref().map(|committed| committed.lock_image());
        self.changes.clear();
        for (id, state) in self.areas.iter_mut().enumerate() {
            let id = AreaId(id as u32);
            if std::mem::take(&mut state.fresh) {
                self.changes.push(id, 0..state.region.len());
                first.push(id);
                continue;
            }
            let compares = self.options.undo && self.options.precision == Precision::Words;
            let copy = committed_bytes(&state.copy, state.number, image.as_deref());
            let copy = copy.filter(|_| compares);
            for bytes in state.clip_runs(self.found.runs()) {
                match copy {
                    Some(copy) => {
                        let now = state.region.bytes();
                        copy.find_changed_words(now, bytes, |run| self.changes.push(id, run));
                    }
                    None => self.changes.push(id, bytes),
                }
            }
        }
        first
    }

    /// Copies the changes into the committed copies.
    fn update_copies(&mut self) {
        for change in &self.changes.list {
            let AreaState { region, copy, .. } = &mut self.areas[change.area.0 as usize];
            if let Some(copy) = copy {
                copy.update(region.bytes(), change.bytes.clone());
            }
        }
    }

    fn roll_back(&mut self) -> Result<(), Error> {
        self.check_process()?;
        if !self.options.undo {
            let why = "no copy is kept (SessionOptions::undo)";
            return Err(Error::State { what: "abort", why });
        }
        self.collect_writes()?;
        let committed = self.committed();
        let image = committed.as_ref().map(|committed| committed.lock_image());
        for state in &mut self.areas {
            let runs: Vec<_> = state.clip_runs(self.found.runs()).collect();
            let AreaState { region, copy, number, .. } = state;
            let Some(copy) = committed_bytes(copy, *number, image.as_deref()) else { continue };
            for bytes in runs {
                copy.copy_to(region.bytes_mut(), bytes);
            }
        }
        // Discards what was written back: it is not a change of the application.
        self.collect_writes()?;
        self.open = false;
        Ok(())
    }
}

impl AreaState {
    fn is_state_of(&self, area: &Area) -> bool {
        self.memory.as_ref().is_some_and(|memory| Arc::ptr_eq(memory, &area.memory))
    }

    /// The parts of sorted runs of addresses that lie in the area, as offsets.
    fn clip_runs(&self, runs: &[(usize, usize)]) -> impl Iterator<Item = Range<usize>> {
        let area = self.region.addresses();
        let first = runs.partition_point(|(start, len)| start + len <= area.start);
        let inside = runs[first..].iter().take_while({
            let end = area.end;
            move |(start, _)| *start < end
        });
        inside.map(move |(start, len)| {
            (*start).max(area.start) - area.start..(start + len).min(area.end) - area.start
        })
    }
}

/// The last committed bytes of an area: its own copy, or those of the state that backups share.
fn committed_bytes<'a>(
    copy: &'a Option<AreaCopy>,
    number: u32,
    image: Option<&'a ApplicationState>,
) -> Option<CommittedBytes<'a>> {
    let shared = || Some(CommittedBytes::Shared(&image?.areas().get(number as usize)?.bytes));
    copy.as_ref().map(AreaCopy::committed).or_else(shared)
}

fn taken_error(name: &str, span: PageSpan) -> Error {
    Error::Taken { name: name.to_owned(), start: span.start(), end: span.end() }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("name", &self.options.name)
            .field("tracker", &self.tracker.kind())
            .field("areas", &self.areas.len())
            .field("sequence", &self.sequence)
            .field("open", &self.open)
            .finish_non_exhaustive()
    }
}

/// An open transaction. Dropping it aborts it, if the session can.
#[derive(Debug)]
pub struct Transaction<'a> {
    session: &'a mut Session,
}

impl Transaction<'_> {
    /// The bytes of an area, to be changed by the caller.
    ///
    /// # Panics
    /// If the area belongs to another session.
    pub fn bytes(&mut self, area: &Area) -> &mut [u8] {
        assert!(
            self.session.area_state(area).is_state_of(area),
            "the area belongs to another session"
        );
        self.session.areas[area.id.0 as usize].region.bytes_mut()
    }

    /// The area as words. Bytes after the last whole word are not included.
    ///
    /// # Panics
    /// If the area belongs to another session.
    pub fn words(&mut self, area: &Area) -> &mut [u64] {
        assert!(
            self.session.area_state(area).is_state_of(area),
            "the area belongs to another session"
        );
        self.session.areas[area.id.0 as usize].region.words_mut()
    }

    /// Commits the changes, and returns the transaction's number.
    ///
    /// # Errors
    /// If the kernel cannot report what was written: the transaction stays open, and its changes
    /// are unknown. [`Error::Backup`] if too few backups have acknowledged it in time: then it is
    /// committed in the areas, and later transactions can be acknowledged when backups return.
    pub fn commit(self) -> Result<u64, Error> {
        let mut this = std::mem::ManuallyDrop::new(self);
        this.session.commit_transaction()
    }

    /// Restores the last committed state of the areas.
    ///
    /// # Errors
    /// If no copy is kept, or the kernel cannot report what was written.
    pub fn abort(self) -> Result<(), Error> {
        let mut this = std::mem::ManuallyDrop::new(self);
        this.session.roll_back()
    }

    /// Leaves the transaction open. [`Session::open_transaction`] returns it later.
    pub fn detach(self) {
        std::mem::forget(self);
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        // If the session cannot abort, the transaction stays open, and the next call on the session
        // reports that.
        let _ = self.session.roll_back();
    }
}
