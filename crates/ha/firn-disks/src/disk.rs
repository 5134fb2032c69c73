//! Logged disk: a file and the log of its changes, which are changed together.
//!
//! One lock is held while a change is made to the file and recorded. So the log has the order in
//! which the file received the changes, even if the guest has two writes to the same bytes in
//! flight. The lock costs little, because a file system serializes writes to one file anyway. Reads
//! and flushes take no lock.
//!
//! A change that fails may have been made in part, and the guest gets the error. The disk then
//! reads the range back and logs its contents, so the standby gets what the guest may have read. If
//! the range can't be read, the right contents for the standby are unknown, and protection ends.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use thiserror::Error;

mod changing;

pub use changing::DiskWriter;

use crate::change::DiskChange;
use crate::primary::{EpochLog, PrimaryDisk, PrimaryDiskError};
use crate::sink::MirrorSink;
use crate::store::{DiskFileId, DiskStore, FileStore, StoreError};

/// The maximum number of bytes that one step of the seed copies.
const PIECE_BYTES: u64 = 1 << 20;

/// Why a disk can't be served or copied.
#[derive(Debug, Error)]
pub enum DiskError {
    /// The file can't be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The file is larger than the disk.
    #[error(
        "{path} has {length} bytes, which is more than the {size} of its disk: give a larger size"
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// The length of the file in bytes.
        length: u64,
        /// The wanted size of the disk in bytes.
        size: u64,
    },
    /// The path names another file than before.
    #[error(
        "{path} is another file than it was: give the VM's disk its name again, or stop the VM"
    )]
    Replaced {
        /// The file.
        path: PathBuf,
    },
    /// The disk can't be read.
    #[error("the disk can't be read at {at}")]
    Read {
        /// The offset.
        at: u64,
        /// The error of the system.
        source: io::Error,
    },
    /// The state of the replication does not allow the operation.
    #[error(transparent)]
    Primary(#[from] PrimaryDiskError),
}

/// The result of one seed step: changes of epoch 0 for the standby.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeedChunk {
    /// The standby must make them in this order.
    pub changes: Vec<DiskChange>,
    /// The whole disk has been read. Further steps return what has changed since.
    pub is_whole: bool,
}

/// The fill level of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogPressure {
    /// The bytes of memory that the log occupies.
    pub bytes: usize,
    /// The size in bytes at which changes have to wait; 0 if the disk is not protected.
    pub bound: usize,
    /// The number of changes that wait for the cut.
    pub waiting: usize,
}

struct DiskState {
    primary: PrimaryDisk,
    waiting: usize,
    is_closed: bool,
}

/// A disk whose changes are logged while its VM is protected.
pub struct LoggedDisk {
    store: Box<dyn DiskStore>,
    size: u64,
    /// The maximum number of bytes that one step of the seed copies.
    piece_bytes: u64,
    state: Mutex<DiskState>,
    room: Condvar,
    /// The storage lost data that it had acknowledged. The kernel reports this only once.
    is_broken: AtomicBool,
}

impl LoggedDisk {
    /// Opens a file as a disk of `size` bytes, or of the file's length. The file is raw, or has a
    /// format that QEMU interprets. A qcow2 file grows, so its disk has to have the maximum size of
    /// the file.
    ///
    /// # Errors
    /// If the file can't be opened and locked, or is larger than `size`.
    pub fn open(path: &Path, size: Option<u64>) -> Result<Self, DiskError> {
        Ok(Self::open_known(path, size, None)?.0)
    }

    /// Opens a file only if it is the file `known`. Also returns the identity of the file.
    ///
    /// # Errors
    /// As [`Self::open`], and if it is another file.
    pub fn open_known(
        path: &Path,
        size: Option<u64>,
        known: Option<DiskFileId>,
    ) -> Result<(Self, DiskFileId), DiskError> {
        let store = FileStore::open(path)?;
        let opened = |source| StoreError::Open { path: path.to_owned(), source };
        let (length, id) = (store.length().map_err(opened)?, store.file_id().map_err(opened)?);
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

    /// A disk of `size` bytes in a store. No other user of the store may change it.
    pub fn new(store: Box<dyn DiskStore>, size: u64) -> Self {
        Self::with_primary(store, size, PrimaryDisk::new(size))
    }

    /// The log of a disk of `size` bytes that a job of the hypervisor mirrors.
    pub fn new_mirrored(size: u64) -> Self {
        Self::with_primary(Box::new(MirrorSink), size, PrimaryDisk::new_mirrored(size))
    }

    fn with_primary(store: Box<dyn DiskStore>, size: u64, primary: PrimaryDisk) -> Self {
        let state = DiskState { primary, waiting: 0, is_closed: false };
        let (state, room) = (Mutex::new(state), Condvar::new());
        let is_broken = AtomicBool::new(false);
        Self { store, size, piece_bytes: PIECE_BYTES, state, room, is_broken }
    }

    /// The same disk, seeded in smaller steps, so that the disk of a test has many of them.
    #[cfg(test)]
    pub(crate) fn with_piece_bytes(self, piece_bytes: u64) -> Self {
        Self { piece_bytes, ..self }
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads bytes at an offset.
    ///
    /// # Errors
    /// The error of the system.
    pub fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.store.read_at(at, into)
    }

    /// Writes bytes at an offset, after waiting for room in the log.
    ///
    /// # Errors
    /// The error of the system.
    pub fn write_at(&self, at: u64, bytes: Vec<u8>) -> io::Result<()> {
        self.for_client(&|| true).write_at(at, bytes)
    }

    /// Writes zeros, after waiting for room in the log. If they may be a `hole`, they take no
    /// space.
    ///
    /// # Errors
    /// The error of the system.
    pub fn zero_range(&self, at: u64, length: u64, hole: bool) -> io::Result<()> {
        self.for_client(&|| true).zero_range(at, length, hole)
    }

    /// Discards bytes that the guest does not need: they become a hole, or stay as they are if the
    /// file can't have holes.
    ///
    /// # Errors
    /// The error of the system.
    pub fn trim_range(&self, at: u64, length: u64) -> io::Result<()> {
        self.for_client(&|| true).trim_range(at, length)
    }

    /// Changes made for a client. `is_there` returns whether the client still waits for the reply.
    pub fn for_client<'a>(&'a self, is_there: &'a dyn Fn() -> bool) -> DiskWriter<'a> {
        DiskWriter { disk: self, is_connected: is_there }
    }

    /// Makes all acknowledged changes durable: they survive a loss of power.
    ///
    /// # Errors
    /// The error of the system. After one error each further flush fails, because it is unknown
    /// which data was lost.
    pub fn flush(&self) -> io::Result<()> {
        if self.is_broken.load(Ordering::Acquire) {
            return Err(rustix::io::Errno::IO.into());
        }
        let synced = self.store.sync_data();
        self.is_broken.fetch_or(synced.is_err(), Ordering::AcqRel);
        synced
    }

    /// Begins a protection, with logs of about `bound` bytes of memory each.
    /// [`LoggedDisk::seed_step`] follows.
    pub fn begin_protection(&self, bound: usize) {
        self.update_primary(|primary| primary.begin_protection(bound));
    }

    /// Takes one step of the copy for a standby, whose disk is all zeros. The caller repeats it
    /// until the copy is whole, and from then on until the first cut. It sends the results in this
    /// order.
    ///
    /// # Errors
    /// If the disk can't be read, or is not being seeded. A copy that lacks a piece is useless: a
    /// read error ends the protection.
    pub fn seed_step(&self) -> Result<SeedChunk, DiskError> {
        let seed = self.try_seed_step();
        if let Err(DiskError::Read { .. }) = &seed {
            self.end_protection();
        }
        seed
    }

    fn try_seed_step(&self) -> Result<SeedChunk, DiskError> {
        let step = {
            let mut state = self.lock_state();
            let at = state.primary.seeded_bytes()?;
            let data = if at < self.size { self.store.next_data_range(at) } else { Ok(None) };
            let data = data.map_err(|source| DiskError::Read { at, source })?;
            state.primary.advance_seed(data, self.piece_bytes)?
        };
        self.room.notify_all();
        let mut changes = step.changes;
        if let Some(piece) = step.piece {
            let (at, mut bytes) = (piece.start, vec![0; (piece.end - piece.start) as usize]);
            self.store.read_at(at, &mut bytes).map_err(|source| DiskError::Read { at, source })?;
            if bytes.iter().any(|&byte| byte != 0) {
                changes.push(DiskChange::Write { at, bytes });
            }
        }
        Ok(SeedChunk { changes, is_whole: step.is_whole })
    }

    /// Lifts the bound of the log until the cut, because QEMU is about to stop the VM.
    pub fn begin_drain(&self) {
        self.update_primary(|primary| primary.set_draining(true));
    }

    /// Restores the bound, because there is no cut.
    pub fn cancel_drain(&self) {
        self.update_primary(|primary| primary.set_draining(false));
    }

    /// Ends the running epoch and returns its log. The VM is paused, and no request is in flight.
    ///
    /// # Errors
    /// If the disk is not protected, or its seed is not whole.
    pub fn cut_log(&self) -> Result<EpochLog, DiskError> {
        Ok(self.update_primary(PrimaryDisk::cut_log)?)
    }

    /// Ends the protection.
    pub fn end_protection(&self) {
        self.update_primary(PrimaryDisk::end_protection);
    }

    /// Records how far the job has come that mirrors this disk.
    pub fn record_fill(&self, copied: u64, is_whole: bool) {
        self.update_primary(|primary| primary.record_fill(copied, is_whole));
    }

    /// The number of bytes that the seed has copied; `None` if no seed is in progress.
    pub fn seeded_bytes(&self) -> Option<u64> {
        self.lock_state().primary.seed_progress().ok()
    }

    /// The fill level of the log. If changes wait, the cut should come early.
    pub fn log_pressure(&self) -> LogPressure {
        let state = self.lock_state();
        let (bytes, bound) = state.primary.log_usage();
        LogPressure { bytes, bound, waiting: state.waiting }
    }

    /// Refuses further changes. A change that waits for room fails.
    pub(crate) fn close(&self) {
        self.lock_state().is_closed = true;
        self.room.notify_all();
    }

    fn update_primary<T>(&self, change: impl FnOnce(&mut PrimaryDisk) -> T) -> T {
        let result = change(&mut self.lock_state().primary);
        self.room.notify_all();
        result
    }

    fn lock_state(&self) -> MutexGuard<'_, DiskState> {
        self.state.lock().unwrap_or_else(|it| recover_poisoned(it.into_inner(), self))
    }
}

/// Gives up the log after a thread panicked in the middle of a change, which the log may lack. The
/// next cut reports that the disk is not protected, and the guest continues.
fn recover_poisoned<'a>(
    mut state: MutexGuard<'a, DiskState>,
    disk: &LoggedDisk,
) -> MutexGuard<'a, DiskState> {
    disk.state.clear_poison();
    state.primary.end_protection();
    state
}
