//! A file and the log of its changes, changed together.
//!
//! One lock is held while a change is made to the file and noted: so the log has the order in which the file got them, also where the
//! guest writes to one place twice at once. It costs little, for a file system takes writes to one file one after another
//! anyway. Reading and flushing take no lock.
//!
//! A change that fails may be made in part, and the guest is told. What is there then is read back and noted: the standby gets
//! what the guest may have seen.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

use crate::change::Change;
use crate::primary::{Log, Primary, PrimaryError};
use crate::store::{FileStore, Store, StoreError};

/// The most bytes that are copied at a time.
const PIECE_BYTES: u64 = 1 << 20;
/// The most zeros made at a time. If that fails, so much is read back.
const ZEROS_BYTES: u64 = 32 << 20;

/// Why a disk can't be served, or copied.
#[derive(Debug, Error)]
pub enum DiskError {
    /// There is no file for it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The file does not fit.
    #[error(
        "{path} has {length} bytes, which is more than the {size} of its disk: give a larger size"
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// How long it is.
        length: u64,
        /// How large the disk is to be.
        size: u64,
    },
    /// It can't be read.
    #[error("the disk can't be read at {at}")]
    Read {
        /// Where.
        at: u64,
        /// What the system said.
        source: io::Error,
    },
    /// It is not the time for it.
    #[error(transparent)]
    Primary(#[from] PrimaryError),
}

/// A step of the copy for the standby: changes of epoch 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seed {
    /// To be made there in this order.
    pub changes: Vec<Change>,
    /// All has been read. More steps bring what has changed since.
    pub is_whole: bool,
}

/// How full a log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pressure {
    /// Bytes of memory that it takes.
    pub bytes: usize,
    /// How many it may take before changes have to wait; 0 if the disk is not protected.
    pub bound: usize,
    /// How many changes wait for the cut.
    pub waiting: usize,
}

struct State {
    primary: Primary,
    waiting: usize,
    is_closed: bool,
}

/// A disk that is served.
pub struct Disk {
    store: Box<dyn Store>,
    size: u64,
    /// The most bytes that are copied at a time.
    piece_bytes: u64,
    state: Mutex<State>,
    room: Condvar,
}

impl Disk {
    /// A file, raw or what a hypervisor makes of it. `size` is that of the disk in bytes; without one it is the file's length. A qcow2
    /// file grows, so its disk has to be as large as it may ever be.
    ///
    /// # Errors
    /// If the file can't be had for ourselves, or is larger.
    pub fn open(path: &Path, size: Option<u64>) -> Result<Self, DiskError> {
        let store = FileStore::open(path)?;
        let opened = |source| StoreError::Open { path: path.to_owned(), source };
        let length = store.length().map_err(opened)?;
        match size {
            Some(size) if size < length => {
                Err(DiskError::Size { path: path.to_owned(), length, size })
            }
            _ => Ok(Self::new(Box::new(store), size.unwrap_or(length))),
        }
    }

    /// A disk of `size` bytes in a store. Nobody else may change what is there.
    pub fn new(store: Box<dyn Store>, size: u64) -> Self {
        let state = State { primary: Primary::new(size), waiting: 0, is_closed: false };
        let (state, room) = (Mutex::new(state), Condvar::new());
        Self { store, size, piece_bytes: PIECE_BYTES, state, room }
    }

    /// The same, copied in smaller pieces, so that a test's disk has many of them.
    #[cfg(test)]
    pub(crate) fn in_pieces_of(self, piece_bytes: u64) -> Self {
        Self { piece_bytes, ..self }
    }

    /// Its bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads.
    ///
    /// # Errors
    /// What the system says.
    pub fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.store.read(at, into)
    }

    /// Writes, when there is room for it in the log.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self, at: u64, bytes: Vec<u8>) -> io::Result<()> {
        self.make(Change::Write { at, bytes }, |change, store| change.apply(store).map(|()| true))
    }

    /// Makes zeros, which take no room if they may be a `hole`, when there is room in the log.
    ///
    /// # Errors
    /// What the system says.
    pub fn zero(&self, at: u64, length: u64, hole: bool) -> io::Result<()> {
        pieces(at, length).try_for_each(|piece| {
            let change = Change::Zero { at: piece.start, length: piece.end - piece.start, hole };
            self.make(change, |change, store| change.apply(store).map(|()| true))
        })
    }

    /// The guest does not need what is there: zeros that take no room, or nothing happens if the file can't have holes.
    ///
    /// # Errors
    /// What the system says.
    pub fn trim(&self, at: u64, length: u64) -> io::Result<()> {
        pieces(at, length).try_for_each(|piece| {
            let length = piece.end - piece.start;
            let change = Change::Zero { at: piece.start, length, hole: true };
            self.make(change, |change, store| store.discard(change.at(), change.length()))
        })
    }

    /// What was answered before survives a loss of power.
    ///
    /// # Errors
    /// What the system says.
    pub fn flush(&self) -> io::Result<()> {
        self.store.sync()
    }

    /// The VM is protected from here on, with logs of about `bound` bytes of memory each. [`Disk::seed`] is next.
    pub fn protect(&self, bound: usize) {
        self.with(|primary| primary.protect(bound));
    }

    /// A step of the copy for a standby whose disk is all zeros; to be called until it is whole, and from then on until the first cut.
    /// What it gives is to be sent in this order.
    ///
    /// # Errors
    /// If the disk can't be read, or isn't being copied.
    pub fn seed(&self) -> Result<Seed, DiskError> {
        let step = {
            let mut state = self.lock();
            let at = state.primary.copied()?;
            let data = if at < self.size { self.store.data(at) } else { Ok(None) };
            let data = data.map_err(|source| DiskError::Read { at, source })?;
            state.primary.step(data, self.piece_bytes)?
        };
        self.room.notify_all();
        let mut changes = step.changes;
        if let Some(piece) = step.piece {
            let (at, mut bytes) = (piece.start, vec![0; (piece.end - piece.start) as usize]);
            self.store.read(at, &mut bytes).map_err(|source| DiskError::Read { at, source })?;
            if bytes.iter().any(|&byte| byte != 0) {
                changes.push(Change::Write { at, bytes });
            }
        }
        Ok(Seed { changes, is_whole: step.is_whole })
    }

    /// The VM is about to be stopped: nothing waits for room until the cut.
    pub fn drain(&self) {
        self.with(|primary| primary.set_draining(true));
    }

    /// There is no cut after all.
    pub fn go_on(&self) {
        self.with(|primary| primary.set_draining(false));
    }

    /// The running epoch ends: its log. The VM stands still, and no request is on its way.
    ///
    /// # Errors
    /// If the disk is not protected, or not copied yet.
    pub fn cut(&self) -> Result<Log, DiskError> {
        Ok(self.with(Primary::cut)?)
    }

    /// The VM is not protected any more.
    pub fn release(&self) {
        self.with(Primary::release);
    }

    /// How full the log is. Where changes wait, the cut should come early.
    pub fn pressure(&self) -> Pressure {
        let state = self.lock();
        let (bytes, bound) = state.primary.bytes();
        Pressure { bytes, bound, waiting: state.waiting }
    }

    /// Nothing is changed any more: who waits for room gets an error.
    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
        self.room.notify_all();
    }

    /// Makes a change, or finds that it need not be made (`false`), and notes what came of it.
    fn make(
        &self,
        change: Change,
        act: impl FnOnce(&Change, &dyn Store) -> io::Result<bool>,
    ) -> io::Result<()> {
        let mut state = self.wait_for_room()?;
        let made = act(&change, &*self.store);
        firn_fault::point("disk.changed");
        match made {
            Ok(true) => state.primary.note(change),
            Ok(false) => {}
            Err(_) => state.primary.note(self.found(change)),
        }
        made.map(drop)
    }

    /// What is there after a change that failed. If that can't be read, the guest can't either, and any part of it will do.
    fn found(&self, tried: Change) -> Change {
        let (at, mut bytes) = (tried.at(), vec![0; tried.length() as usize]);
        match self.store.read(at, &mut bytes) {
            Ok(()) => Change::Write { at, bytes },
            Err(_) => tried,
        }
    }

    fn wait_for_room(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        state.waiting += 1;
        while !state.primary.has_room() && !state.is_closed {
            state = self.room.wait(state).unwrap_or_else(|poisoned| recovered(poisoned, self));
        }
        state.waiting -= 1;
        match state.is_closed {
            true => Err(rustix::io::Errno::SHUTDOWN.into()),
            false => Ok(state),
        }
    }

    fn with<T>(&self, change: impl FnOnce(&mut Primary) -> T) -> T {
        let result = change(&mut self.lock().primary);
        self.room.notify_all();
        result
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| recovered(poisoned, self))
    }
}

/// A thread has died in the middle of a change, which may be missing in the log. So the log is given up: the next cut says that the
/// disk isn't protected, and the guest goes on.
fn recovered<'a>(
    poisoned: PoisonError<MutexGuard<'a, State>>,
    disk: &Disk,
) -> MutexGuard<'a, State> {
    disk.state.clear_poison();
    let mut state = poisoned.into_inner();
    state.primary.release();
    state
}

/// A range of bytes in pieces that can be read back.
fn pieces(at: u64, length: u64) -> impl Iterator<Item = Range<u64>> {
    let end = at + length;
    (at..end).step_by(ZEROS_BYTES as usize).map(move |from| from..end.min(from + ZEROS_BYTES))
}
