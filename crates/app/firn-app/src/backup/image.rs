//! Application state: the content of all critical data areas after a committed transaction, as a
//! backup stores it.
//!
//! ```text
//!   state n  -- change record n + 1 -->  state n + 1  -- change record n + 2 -->  state n + 2
//!   any state  -- state record m -->  state m: replaces all areas
//! ```
//!
//! Records come from files and from other hosts, so each length and number in them is checked
//! before it is used.

use super::error::BackupError;
use super::record::{PayloadBuilder, PayloadReader, RecordKind};

/// The maximum count of areas of a state, and the maximum size of one area in bytes.
const AREAS_MAX: u32 = 1 << 16;
const LEN_MAX: u64 = 1 << 40;

/// The name and the content of one area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredArea {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

/// Which state it is: the number of its last transaction, and the generation of the session that
/// committed it. Each session that opens backups has a new generation, greater than those that it
/// found, so that of two states the one with the greater generation is the later one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StateId {
    pub(crate) generation: u64,
    pub(crate) sequence: u64,
}

/// The state of an application: its areas after the transaction `id`. The index of an area is its
/// number in records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ApplicationState {
    id: StateId,
    areas: Vec<StoredArea>,
}

impl ApplicationState {
    /// The first state of a generation, without areas.
    pub(crate) fn empty(generation: u64) -> Self {
        Self { id: StateId { generation, sequence: 0 }, areas: Vec::new() }
    }

    pub(crate) fn id(&self) -> StateId {
        self.id
    }

    /// The number of the last transaction that the state includes; 0 before the first.
    pub(crate) fn sequence(&self) -> u64 {
        self.id.sequence
    }

    /// The areas, in the order of their numbers.
    pub(crate) fn areas(&self) -> &[StoredArea] {
        &self.areas
    }

    /// The size of all areas together.
    pub(crate) fn byte_count(&self) -> u64 {
        self.areas.iter().map(|area| area.bytes.len() as u64).sum()
    }

    /// The number of the area that has this name.
    pub(crate) fn area_number(&self, name: &str) -> Option<u32> {
        self.areas.iter().position(|area| area.name == name).map(|number| number as u32)
    }

    /// The payload of a state record: defines each area, and changes all of its bytes.
    pub(crate) fn payload(&self) -> PayloadBuilder<'_> {
        let mut payload = PayloadBuilder::default();
        for (number, area) in self.areas.iter().enumerate() {
            payload.add_area(number as u32, area.bytes.len() as u64, &area.name);
            payload.add_change(number as u32, 0, &area.bytes);
        }
        payload
    }

    /// Applies the record that leads to the state `id`. A change record must be the next one; a state
    /// record replaces all areas; a fence record changes nothing. After an error the record may have been applied in part.
    pub(crate) fn apply_record(
        &mut self,
        kind: RecordKind,
        id: StateId,
        payload: &[u8],
    ) -> Result<(), BackupError> {
        match kind {
            RecordKind::State => self.areas.clear(),
            RecordKind::Change if id.sequence != self.id.sequence.wrapping_add(1) => {
                return Err(BackupError::Malformed("the transaction before it is missing"));
            }
            RecordKind::Change if id.generation < self.id.generation => {
                return Err(BackupError::Malformed("a later session has committed before"));
            }
            RecordKind::Change => {}
            RecordKind::Fence if payload.is_empty() => return Ok(()),
            RecordKind::Fence => return Err(BackupError::Malformed("a fence has a payload")),
        }
        let mut parts = PayloadReader(payload);
        for _ in 0..parts.read_u32()? {
            self.define_area(&mut parts)?;
        }
        let count = parts.read_u32()?;
        let mut changes = PayloadReader(parts.read_bytes(u64::from(count) * 20)?);
        for _ in 0..count {
            let (area, offset, len) =
                (changes.read_u32()?, changes.read_u64()?, changes.read_u64()?);
            let bytes = parts.read_bytes(len)?;
            self.changed_bytes(area, offset, bytes.len())?.copy_from_slice(bytes);
        }
        if !parts.0.is_empty() {
            return Err(BackupError::Malformed("the payload is too long"));
        }
        self.id = id;
        Ok(())
    }

    /// Reads the definition of an area from the payload, and makes the area, filled with zeros. It
    /// replaces an area of the same number. Numbers have no gaps.
    fn define_area(&mut self, parts: &mut PayloadReader<'_>) -> Result<(), BackupError> {
        let (number, len, name_len) = (parts.read_u32()?, parts.read_u64()?, parts.read_u8()?);
        let name = std::str::from_utf8(parts.read_bytes(u64::from(name_len))?)
            .map_err(|_| BackupError::Malformed("the name of an area is not UTF-8"))?;
        if len > LEN_MAX || number >= AREAS_MAX || number as usize > self.areas.len() {
            return Err(BackupError::Malformed("the area has an impossible number or length"));
        }
        let area = StoredArea { name: name.to_owned(), bytes: vec![0; len as usize] };
        match self.areas.get_mut(number as usize) {
            Some(known) => *known = area,
            None => self.areas.push(area),
        }
        Ok(())
    }

    /// The bytes of an area that a change overwrites. An error if they are not all within the area.
    fn changed_bytes(
        &mut self,
        area: u32,
        offset: u64,
        len: usize,
    ) -> Result<&mut [u8], BackupError> {
        let area = self.areas.get_mut(area as usize);
        let bytes =
            area.ok_or(BackupError::Malformed("a change of an unknown area"))?.bytes.as_mut_slice();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        bytes
            .get_mut(start..start.saturating_add(len))
            .ok_or(BackupError::Malformed("a change outside of its area"))
    }
}
