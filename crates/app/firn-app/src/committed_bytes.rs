//! The last committed bytes of an area: a copy that the session keeps, or the state that it shares
//! with its backups.

use std::ops::Range;

use crate::backup::SharedBytes;
use crate::difference::{self, WORD};

/// See the module documentation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CommittedBytes<'a> {
    Own(&'a [u8]),
    Shared(&'a SharedBytes),
}

/// A copy that a session keeps of an area.
#[derive(Debug)]
pub(crate) enum AreaCopy {
    Own(Vec<u8>),
    /// Zeros take no memory.
    Shared(SharedBytes),
}

impl AreaCopy {
    pub(crate) fn committed(&self) -> CommittedBytes<'_> {
        match self {
            Self::Own(bytes) => CommittedBytes::Own(bytes),
            Self::Shared(shared) => CommittedBytes::Shared(shared),
        }
    }

    /// Overwrites a range by the same range of `now`.
    pub(crate) fn update(&mut self, now: &[u8], range: Range<usize>) {
        match self {
            Self::Own(bytes) => bytes[range.clone()].copy_from_slice(&now[range]),
            // The range is within the area, so it is within the copy.
            Self::Shared(shared) => shared.write(range.start, &now[range]).unwrap_or_default(),
        }
    }
}

impl CommittedBytes<'_> {
    fn for_each_piece(self, range: Range<usize>, mut each: impl FnMut(usize, &[u8])) {
        match self {
            Self::Own(bytes) => each(range.start, &bytes[range]),
            Self::Shared(shared) => shared.pieces(range).for_each(|(at, bytes)| each(at, bytes)),
        }
    }

    /// Calls `each` with every run of words of a range in which `now` differs. Ranges are widened
    /// to whole words.
    pub(crate) fn find_changed_words(
        self,
        now: &[u8],
        range: Range<usize>,
        mut each: impl FnMut(Range<usize>),
    ) {
        let end = range.end.next_multiple_of(WORD).min(now.len());
        // Pieces start at whole words, too: a chunk is a multiple of a word.
        self.for_each_piece(range.start / WORD * WORD..end, |at, before| {
            let now = &now[at..at + before.len()];
            let shift = |run: Range<usize>| at + run.start..at + run.end;
            difference::find_changed_words(now, before, 0..now.len(), |run| each(shift(run)));
        });
    }

    /// Copies a range to the same range of other bytes.
    pub(crate) fn copy_to(self, to: &mut [u8], range: Range<usize>) {
        self.for_each_piece(range, |at, bytes| to[at..at + bytes.len()].copy_from_slice(bytes));
    }
}
