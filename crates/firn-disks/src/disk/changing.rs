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

use super::{Disk, State, recovered};
use crate::change::Change;
use crate::store::Store;

/// The maximum number of zeros written at a time. After a failure this many bytes are read back.
const ZEROS_BYTES: u64 = 32 << 20;
/// How often a waiting change checks whether its client is still connected.
const LOOK: Duration = Duration::from_millis(50);

/// A disk that is changed for one client.
pub struct Changing<'a> {
    pub(super) disk: &'a Disk,
    pub(super) is_there: &'a dyn Fn() -> bool,
}

impl Changing<'_> {
    /// As [`LoggedDisk::write_at`].
    ///
    /// # Errors
    /// The error of the system; `ESHUTDOWN` if the client is no longer connected or the disk is
    /// closed.
    pub fn write(&self, at: u64, bytes: Vec<u8>) -> io::Result<()> {
        self.make(Change::Write { at, bytes }, |change, store| change.apply(store).map(|()| true))
    }

    /// As [`LoggedDisk::zero_range`].
    ///
    /// # Errors
    /// As [`Self::write_at`].
    pub fn zero(&self, at: u64, length: u64, hole: bool) -> io::Result<()> {
        pieces(at, length).try_for_each(|piece| {
            let change = Change::Zero { at: piece.start, length: piece.end - piece.start, hole };
            self.make(change, |change, store| change.apply(store).map(|()| true))
        })
    }

    /// As [`LoggedDisk::trim_range`].
    ///
    /// # Errors
    /// As [`Self::write_at`].
    pub fn trim(&self, at: u64, length: u64) -> io::Result<()> {
        pieces(at, length).try_for_each(|piece| {
            let length = piece.end - piece.start;
            let change = Change::Zero { at: piece.start, length, hole: true };
            self.make(change, |change, store| store.discard(change.at(), change.length()))
        })
    }

    /// Makes a change and records its result. `act` returns `false` if it did not make the change.
    fn make(
        &self,
        change: Change,
        act: impl FnOnce(&Change, &dyn Store) -> io::Result<bool>,
    ) -> io::Result<()> {
        let mut state = self.wait_for_room()?;
        let made = act(&change, &*self.disk.store);
        firn_fault::point("disk.changed");
        match &made {
            Ok(true) => state.primary.note(change),
            Ok(false) => {}
            Err(error) => match self.found(&change) {
                Some(found) => state.primary.note(found),
                None => {
                    tracing::error!("the result of a failed change can't be read back: {error}");
                    state.primary.release();
                    self.disk.room.notify_all();
                }
            },
        }
        made.map(drop)
    }

    /// The contents of the range after a change that failed.
    fn found(&self, tried: &Change) -> Option<Change> {
        let (at, mut bytes) = (tried.at(), vec![0; tried.length() as usize]);
        self.disk.store.read(at, &mut bytes).ok()?;
        Some(Change::Write { at, bytes })
    }

    fn wait_for_room(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.disk.lock();
        state.waiting += 1;
        while !state.primary.has_room() && !state.is_closed && (self.is_there)() {
            state = match self.disk.room.wait_timeout(state, LOOK) {
                Ok((state, _)) => state,
                Err(poisoned) => recovered(poisoned.into_inner().0, self.disk),
            };
        }
        state.waiting -= 1;
        match state.is_closed || !(self.is_there)() {
            true => Err(rustix::io::Errno::SHUTDOWN.into()),
            false => Ok(state),
        }
    }
}

/// Splits a range into pieces that are small enough to be read back.
fn pieces(at: u64, length: u64) -> impl Iterator<Item = Range<u64>> {
    let end = at + length;
    (at..end).step_by(ZEROS_BYTES as usize).map(move |from| from..end.min(from + ZEROS_BYTES))
}
