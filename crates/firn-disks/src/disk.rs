//! A file and the log of its changes, changed together.
//!
//! One lock is held while a change is made to the file and noted: so the log has the order in which the file got them, also where the
//! guest writes to one place twice at once. It costs little, for a file system takes writes to one file one after another
//! anyway. Reading and flushing take no lock.
//!
//! A change that fails may be made in part, and the guest is told. What is there then is read back and noted: the standby gets
//! what the guest may have seen. If that can't be read, nobody knows what the standby should get: protection ends.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use thiserror::Error;

mod changing;

pub use changing::Changing;

use crate::change::Change;
use crate::primary::{Log, Primary, PrimaryError};
use crate::store::{FileId, FileStore, Store, StoreError};

/// The most bytes that are copied at a time.
const PIECE_BYTES: u64 = 1 << 20;

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
    /// Its name is now that of another one.
    #[error(
        "{path} is another file than it was: give the VM's disk its name again, or stop the VM"
    )]
    Replaced {
        /// The file.
        path: PathBuf,
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
    /// Storage has lost something that it was to keep. The kernel says so once.
    is_broken: AtomicBool,
}

impl Disk {
    /// A file, raw or what a hypervisor makes of it. `size` is that of the disk in bytes; without one it is the file's length. A qcow2
    /// file grows, so its disk has to be as large as it may ever be.
    ///
    /// # Errors
    /// If the file can't be had for ourselves, or is larger.
    pub fn open(path: &Path, size: Option<u64>) -> Result<Self, DiskError> {
        Ok(Self::open_if(path, size, None)?.0)
    }

    /// The same, only if it is `known`; and which it is.
    ///
    /// # Errors
    /// If it is another file, too.
    pub fn open_if(
        path: &Path,
        size: Option<u64>,
        known: Option<FileId>,
    ) -> Result<(Self, FileId), DiskError> {
        let store = FileStore::open(path)?;
        let opened = |source| StoreError::Open { path: path.to_owned(), source };
        let (length, id) = (store.length().map_err(opened)?, store.id().map_err(opened)?);
        if known.is_some_and(|known| known != id) {
            return Err(DiskError::Replaced { path: path.to_owned() });
        }
        match size {
            Some(size) if size < length => {
                Err(DiskError::Size { path: path.to_owned(), length, size })
            }
            _ => Ok((Self::new(Box::new(store), size.unwrap_or(length)), id)),
        }
    }

    /// A disk of `size` bytes in a store. Nobody else may change what is there.
    pub fn new(store: Box<dyn Store>, size: u64) -> Self {
        let state = State { primary: Primary::new(size), waiting: 0, is_closed: false };
        let (state, room) = (Mutex::new(state), Condvar::new());
        let is_broken = AtomicBool::new(false);
        Self { store, size, piece_bytes: PIECE_BYTES, state, room, is_broken }
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
        self.by(&|| true).write(at, bytes)
    }

    /// Makes zeros, which take no room if they may be a `hole`, when there is room in the log.
    ///
    /// # Errors
    /// What the system says.
    pub fn zero(&self, at: u64, length: u64, hole: bool) -> io::Result<()> {
        self.by(&|| true).zero(at, length, hole)
    }

    /// The guest does not need what is there: zeros that take no room, or nothing happens if the file can't have holes.
    ///
    /// # Errors
    /// What the system says.
    pub fn trim(&self, at: u64, length: u64) -> io::Result<()> {
        self.by(&|| true).trim(at, length)
    }

    /// Changes by a client of whom `is_there` says whether he still waits for the answer.
    pub fn by<'a>(&'a self, is_there: &'a dyn Fn() -> bool) -> Changing<'a> {
        Changing { disk: self, is_there }
    }

    /// What was answered before survives a loss of power.
    ///
    /// # Errors
    /// What the system says. From then on it is an error each time: nobody knows what was lost.
    pub fn flush(&self) -> io::Result<()> {
        if self.is_broken.load(Ordering::Acquire) {
            return Err(rustix::io::Errno::IO.into());
        }
        let synced = self.store.sync();
        self.is_broken.fetch_or(synced.is_err(), Ordering::AcqRel);
        synced
    }

    /// The VM is protected from here on, with logs of about `bound` bytes of memory each. [`Disk::seed`] is next.
    pub fn protect(&self, bound: usize) {
        self.with(|primary| primary.protect(bound));
    }

    /// A step of the copy for a standby whose disk is all zeros; to be called until it is whole, and from then on until the first cut.
    /// What it gives is to be sent in this order.
    ///
    /// # Errors
    /// If the disk can't be read, or isn't being copied. A copy that lacks a piece is none: the disk is not protected any more.
    pub fn seed(&self) -> Result<Seed, DiskError> {
        let seed = self.try_seed();
        if let Err(DiskError::Read { .. }) = &seed {
            self.release();
        }
        seed
    }

    fn try_seed(&self) -> Result<Seed, DiskError> {
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

    /// How far the copy for the standby has come; `None` if there is none under way.
    pub fn copied(&self) -> Option<u64> {
        self.lock().primary.copied().ok()
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

    fn with<T>(&self, change: impl FnOnce(&mut Primary) -> T) -> T {
        let result = change(&mut self.lock().primary);
        self.room.notify_all();
        result
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|it| recovered(it.into_inner(), self))
    }
}

/// A thread has died in the middle of a change, which may be missing in the log. So the log is given up: the next cut says that the
/// disk isn't protected, and the guest goes on.
fn recovered<'a>(mut state: MutexGuard<'a, State>, disk: &Disk) -> MutexGuard<'a, State> {
    disk.state.clear_poison();
    state.primary.release();
    state
}
