//! The changes of a transaction, as ranges of bytes of areas.

use std::ops::Range;

/// The number of an area in its session, in the order in which the areas were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AreaId(pub(crate) u32);

impl AreaId {
    /// The number: 0 for the first area of a session, and so on. A number is not used again after
    /// the area was forgotten.
    pub fn index(self) -> u32 {
        self.0
    }
}

/// A range of bytes of an area that changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AreaChange {
    /// The area.
    pub area: AreaId,
    /// The range within the area.
    pub bytes: Range<usize>,
}

/// The changes of the last committed transaction, by area and offset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChangeSet {
    pub(crate) list: Vec<AreaChange>,
}

impl ChangeSet {
    /// The changes, in order.
    pub fn iter(&self) -> impl Iterator<Item = &AreaChange> {
        self.list.iter()
    }

    /// The count of ranges.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The sum of all ranges in bytes.
    pub fn bytes(&self) -> usize {
        self.list.iter().map(|change| change.bytes.len()).sum()
    }

    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }

    /// Adds a range of bytes; a range that follows directly on the last one extends it.
    pub(crate) fn push(&mut self, area: AreaId, bytes: Range<usize>) {
        match self.list.last_mut() {
            Some(last) if last.area == area && last.bytes.end == bytes.start => {
                last.bytes.end = bytes.end;
            }
            _ => self.list.push(AreaChange { area, bytes }),
        }
    }
}
