//! What a transaction changed.

use std::ops::Range;

/// An area of a session, by the order in which they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AreaId(pub(crate) u32);

/// Bytes of an area that changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Which area.
    pub area: AreaId,
    /// Which of its bytes.
    pub bytes: Range<usize>,
}

/// The changes of the last committed transaction, by area and offset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    pub(crate) list: Vec<Change>,
}

impl Changes {
    /// One after the other.
    pub fn iter(&self) -> impl Iterator<Item = &Change> {
        self.list.iter()
    }

    /// How many runs of bytes.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.list.iter().map(|change| change.bytes.len()).sum()
    }

    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }

    /// Adds bytes; what follows directly on the last ones joins them.
    pub(crate) fn push(&mut self, area: AreaId, bytes: Range<usize>) {
        match self.list.last_mut() {
            Some(last) if last.area == area && last.bytes.end == bytes.start => {
                last.bytes.end = bytes.end;
            }
            _ => self.list.push(Change { area, bytes }),
        }
    }
}
