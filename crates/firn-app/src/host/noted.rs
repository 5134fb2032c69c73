//! State of store noting: whether the host's plugin notes the application's stores, and the reader
//! of its notes.
//!
//! ```text
//!   not noted ---begin---> noted ---collect: an epoch is reported---> noted
//!      ^                     |
//!      `--- nothing is reported, or not the stores themselves (too many for a reply, pages that moved)
//! ```
//!
//! If the epochs of an application are never reported, a request for notes in each transaction
//! would be in vain. After a few failed attempts the application requests notes only rarely.

use std::time::{Duration, Instant};

use firn_calls::{Reader, Slot, Told, WordRun};

/// The count of failed attempts in a row after which the application waits.
const LOST_MAX: u32 = 3;
/// The time it waits then.
const REST: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct Noted {
    reader: Option<Reader>,
    /// Attempts since an epoch was last reported.
    lost: u32,
    tried: Option<Instant>,
}

impl Noted {
    /// Records that an attempt is made.
    pub(super) fn tried(&mut self) {
        self.reader = None;
        self.lost += 1;
        self.tried = Some(Instant::now());
    }

    /// Records that stores are noted from now on.
    pub(super) fn begin(&mut self, reader: Reader) {
        self.reader = Some(reader);
    }

    /// Records that stores are no longer noted.
    pub(super) fn lost(&mut self) {
        self.reader = None;
    }

    /// Whether to request notes, if there are none.
    pub(super) fn is_due(&self) -> bool {
        let is_rested = || self.tried.is_none_or(|tried| tried.elapsed() >= REST);
        self.reader.is_none() && (self.lost < LOST_MAX || is_rested())
    }

    /// Ends an epoch, and returns its stores. `None` if they are not reported.
    pub(super) fn collect(&mut self, slot: Slot<'_>) -> Option<Vec<WordRun>> {
        let mut reader = self.reader.take()?;
        let (epoch, token) = reader.end();
        slot.end(token);
        match slot.told(epoch).and_then(|told| reader.told(&told)) {
            Some(Told::Words(runs)) => {
                self.lost = 0;
                self.reader = Some(reader);
                Some(runs)
            }
            _ => None,
        }
    }
}
