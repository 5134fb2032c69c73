//! Disk writer: waits for room in the log, makes a change, and records it.
//!
//! A client may disconnect before its change is made. It has then repeated the request on another
//! connection, and may have sent further ones there: a change that is made late would overwrite
//! newer data. So the writer checks under the lock, just before the change, that the client is
//! still connected. A client that closes one connection before it opens the next is safe from this.

use std::io;
use std::ops::Range;
use std::sync::MutexGuard;
use std::time::Duration;

use super::{DiskState, LoggedDisk, recover_poisoned};
use crate::change::DiskChange;
use crate::store::DiskStore;

/// The maximum number of zeros written at a time. After a failure this many bytes are read back.
const ZERO_PIECE_BYTES: u64 = 32 << 20;
/// How often a waiting change checks whether its client is still connected.
const CLIENT_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A disk that is changed for one client.
pub struct DiskWriter<'a> {
    pub(super) disk: &'a LoggedDisk,
    pub(super) is_connected: &'a dyn Fn() -> bool,
}

impl DiskWriter<'_> {
    /// As [`LoggedDisk::write_at`].
    ///
    /// # Errors
    /// The error of the system; `ESHUTDOWN` if the client is no longer connected or the disk is
    /// closed.
    pub fn write_at(&self, at: u64, bytes: Vec<u8>) -> io::Result<()> {
        self.make_change(DiskChange::Write { at, bytes }, |change, store| {
            change.apply_to(store).map(|()| true)
        })
    }

    /// As [`LoggedDisk::zero_range`].
    ///
    /// # Errors
    /// As [`Self::write_at`].
    pub fn zero_range(&self, at: u64, length: u64, hole: bool) -> io::Result<()> {
        split_pieces(at, length).try_for_each(|piece| {
            let change =
                DiskChange::Zero { at: piece.start, length: piece.end - piece.start, hole };
            self.make_change(change, |change, store| change.apply_to(store).map(|()| true))
        })
    }

    /// As [`LoggedDisk::trim_range`].
    ///
    /// # Errors
    /// As [`Self::write_at`].
    pub fn trim_range(&self, at: u64, length: u64) -> io::Result<()> {
        split_pieces(at, length).try_for_each(|piece| {
            let length = piece.end - piece.start;
            let change = DiskChange::Zero { at: piece.start, length, hole: true };
            self.make_change(change, |change, store| {
                store.punch_hole(change.start_offset(), change.length())
            })
        })
    }

    /// Makes a change and records its result. `act` returns `false` if it did not make the change.
    fn make_change(
        &self,
        change: DiskChange,
        act: impl FnOnce(&DiskChange, &dyn DiskStore) -> io::Result<bool>,
    ) -> io::Result<()> {
        let mut state = self.wait_for_room()?;
        let made = act(&change, &*self.disk.store);
        firn_fault::pass_point("disk.changed");
        match &made {
            Ok(true) => state.primary.record_change(change),
            Ok(false) => {}
            Err(error) => match self.read_back(&change) {
                Some(found) => state.primary.record_change(found),
                None => {
                    tracing::error!("the result of a failed change can't be read back: {error}");
                    state.primary.end_protection();
                    self.disk.room.notify_all();
                }
            },
        }
        made.map(drop)
    }

    /// The contents of the range after a change that failed.
    fn read_back(&self, tried: &DiskChange) -> Option<DiskChange> {
        let (at, mut bytes) = (tried.start_offset(), vec![0; tried.length() as usize]);
        self.disk.store.read_at(at, &mut bytes).ok()?;
        Some(DiskChange::Write { at, bytes })
    }

    fn wait_for_room(&self) -> io::Result<MutexGuard<'_, DiskState>> {
        let mut state = self.disk.lock_state();
        state.waiting += 1;
        while !state.primary.has_room() && !state.is_closed && (self.is_connected)() {
            state = match self.disk.room.wait_timeout(state, CLIENT_CHECK_INTERVAL) {
                Ok((state, _)) => state,
                Err(poisoned) => recover_poisoned(poisoned.into_inner().0, self.disk),
            };
        }
        state.waiting -= 1;
        match state.is_closed || !(self.is_connected)() {
            true => Err(rustix::io::Errno::SHUTDOWN.into()),
            false => Ok(state),
        }
    }
}

/// Splits a range into pieces that are small enough to be read back.
fn split_pieces(at: u64, length: u64) -> impl Iterator<Item = Range<u64>> {
    let end = at + length;
    (at..end)
        .step_by(ZERO_PIECE_BYTES as usize)
        .map(move |from| from..end.min(from + ZERO_PIECE_BYTES))
}
