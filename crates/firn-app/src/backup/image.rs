//! Committed state: all areas by name, as a backup stores them.

use super::error::BackupError;
use super::record::{Parts, Payload, RecordKind};

/// The maximum count of areas of a state, and the maximum size of one of them in bytes.
const AREAS_MAX: u32 = 1 << 16;
const LEN_MAX: u64 = 1 << 40;

/// One stored area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

/// The areas, by number, after some transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Image {
    sequence: u64,
    areas: Vec<Stored>,
}

impl Image {
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(crate) fn areas(&self) -> &[Stored] {
        &self.areas
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.areas.iter().map(|area| area.bytes.len() as u64).sum()
    }

    /// The number of the area with a name.
    pub(crate) fn find(&self, name: &str) -> Option<u32> {
        self.areas.iter().position(|area| area.name == name).map(|number| number as u32)
    }

    /// The whole state as the payload of a record.
    pub(crate) fn payload(&self) -> Payload {
        let mut payload = Payload::default();
        for (number, area) in self.areas.iter().enumerate() {
            payload.define(number as u32, area.bytes.len() as u64, &area.name);
            payload.change(number as u32, 0, &area.bytes);
        }
        payload
    }

    /// Applies a record. After an error the state may be applied in part.
    pub(crate) fn apply(
        &mut self,
        kind: RecordKind,
        sequence: u64,
        payload: &[u8],
    ) -> Result<(), BackupError> {
        match kind {
            RecordKind::State => self.areas.clear(),
            RecordKind::Change if sequence != self.sequence + 1 => {
                return Err(BackupError::Malformed("the transaction before it is missing"));
            }
            RecordKind::Change => {}
        }
        let mut parts = Parts(payload);
        for _ in 0..parts.half()? {
            self.define(&mut parts)?;
        }
        let count = parts.half()?;
        let mut changes = Parts(parts.take(u64::from(count) * 20)?);
        for _ in 0..count {
            let (area, offset, len) = (changes.half()?, changes.word()?, changes.word()?);
            let bytes = parts.take(len)?;
            self.place(area, offset, bytes.len())?.copy_from_slice(bytes);
        }
        if !parts.0.is_empty() {
            return Err(BackupError::Malformed("the payload is too long"));
        }
        self.sequence = sequence;
        Ok(())
    }

    fn define(&mut self, parts: &mut Parts<'_>) -> Result<(), BackupError> {
        let (number, len, name_len) = (parts.half()?, parts.word()?, parts.byte()?);
        let name = std::str::from_utf8(parts.take(u64::from(name_len))?)
            .map_err(|_| BackupError::Malformed("the name of an area is not UTF-8"))?;
        if len > LEN_MAX || number >= AREAS_MAX || number as usize > self.areas.len() {
            return Err(BackupError::Malformed("the area has an impossible number or length"));
        }
        let area = Stored { name: name.to_owned(), bytes: vec![0; len as usize] };
        match self.areas.get_mut(number as usize) {
            Some(known) => *known = area,
            None => self.areas.push(area),
        }
        Ok(())
    }

    fn place(&mut self, area: u32, offset: u64, len: usize) -> Result<&mut [u8], BackupError> {
        let area = self.areas.get_mut(area as usize);
        let bytes = area.ok_or(BackupError::Malformed("a change of an unknown area"))?.bytes.as_mut_slice();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        bytes
            .get_mut(start..start.saturating_add(len))
            .ok_or(BackupError::Malformed("a change outside of its area"))
    }
}
