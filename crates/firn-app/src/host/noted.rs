//! What is noted of the application's stores, as it reads it.
//!
//! ```text
//!   not noted ---begin---> noted ---collect: told---> noted
//!      ^                     |
//!      `--- nothing is told, or not what the stores were (too many for an answer, pages that moved)
//! ```
//!
//! An application whose transactions are never told would ask for notes in each of them in vain: after a few it asks rarely.

use std::time::{Duration, Instant};

use firn_calls::{Reader, Slot, Told, WordRun};

/// After so many attempts in a row of which nothing came.
const LOST_MAX: u32 = 3;
/// It waits for so long.
const REST: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct Noted {
    reader: Option<Reader>,
    /// Attempts since an epoch was told.
    lost: u32,
    tried: Option<Instant>,
}

impl Noted {
    /// An attempt is made.
    pub(super) fn tried(&mut self) {
        self.reader = None;
        self.lost += 1;
        self.tried = Some(Instant::now());
    }

    /// Stores are noted from now on.
    pub(super) fn begin(&mut self, reader: Reader) {
        self.reader = Some(reader);
    }

    /// They are not noted any more.
    pub(super) fn lost(&mut self) {
        self.reader = None;
    }

    /// Whether to ask for notes, if there are none.
    pub(super) fn is_due(&self) -> bool {
        let is_rested = || self.tried.is_none_or(|tried| tried.elapsed() >= REST);
        self.reader.is_none() && (self.lost < LOST_MAX || is_rested())
    }

    /// Ends an epoch. `None` if what was written is not told.
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
