//! Changing a disk: wait for room in the log, make the change, note it.
//!
//! A client may be gone before its change is made. It has then asked again on another connection, and may have asked for more there: a
//! change that comes late would lie over newer ones. So whether the client is still there is found out under the lock, just before
//! the change. A client that leaves one connection before it makes the next can't be overtaken then.

use std::io;
use std::ops::Range;
use std::sync::MutexGuard;
use std::time::Duration;

use super::{Disk, State, recovered};
use crate::change::Change;
use crate::store::Store;

/// The most zeros made at a time. If that fails, so much is read back.
const ZEROS_BYTES: u64 = 32 << 20;
/// How often a change that waits looks whether its client does.
const LOOK: Duration = Duration::from_millis(50);

/// A disk that somebody changes.
pub struct Changing<'a> {
    pub(super) disk: &'a Disk,
    pub(super) is_there: &'a dyn Fn() -> bool,
}

impl Changing<'_> {
    /// As [`Disk::write`].
    ///
    /// # Errors
    /// What the system says, or that nobody waits for it any more.
    pub fn write(&self, at: u64, bytes: Vec<u8>) -> io::Result<()> {
        self.make(Change::Write { at, bytes }, |change, store| change.apply(store).map(|()| true))
    }

    /// As [`Disk::zero`].
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn zero(&self, at: u64, length: u64, hole: bool) -> io::Result<()> {
        pieces(at, length).try_for_each(|piece| {
            let change = Change::Zero { at: piece.start, length: piece.end - piece.start, hole };
            self.make(change, |change, store| change.apply(store).map(|()| true))
        })
    }

    /// As [`Disk::trim`].
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn trim(&self, at: u64, length: u64) -> io::Result<()> {
        pieces(at, length).try_for_each(|piece| {
            let length = piece.end - piece.start;
            let change = Change::Zero { at: piece.start, length, hole: true };
            self.make(change, |change, store| store.discard(change.at(), change.length()))
        })
    }

    /// Makes a change, or finds that it need not be made (`false`), and notes what came of it.
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
                    tracing::error!("what a change that failed has left can't be read: {error}");
                    state.primary.release();
                    self.disk.room.notify_all();
                }
            },
        }
        made.map(drop)
    }

    /// What is there after a change that failed.
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

/// A range of bytes in pieces that can be read back.
fn pieces(at: u64, length: u64) -> impl Iterator<Item = Range<u64>> {
    let end = at + length;
    (at..end).step_by(ZEROS_BYTES as usize).map(move |from| from..end.min(from + ZEROS_BYTES))
}
