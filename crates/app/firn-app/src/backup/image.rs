//! Application state: the content of all critical data areas after a committed transaction, as a
//! backup stores it.
//!
//! ```text
//!   state n  -- change n + 1 -->  state n + 1  -- change n + 2 -->  state n + 2
//!   any state  -- state m -->  state m: replaces all areas
//! ```
//!
//! A transaction is one record or several. [`StagedState`] applies those of an unfinished
//! transaction to a copy.
//!
//! Records come from files and from other hosts, so each length and number in them is checked
//! before it is used.

use super::error::BackupError;
use super::record::{PayloadReader, RecordHeader, RecordKind};
use super::shared_bytes::SharedBytes;

/// The maximum count of areas of a state, and the maximum size of one area in bytes.
const AREAS_MAX: u32 = 1 << 16;
const LEN_MAX: u64 = 1 << 40;

/// The name and the content of one area.
#[derive(Clone, Debug)]
pub(crate) struct StoredArea {
    pub(crate) name: String,
    pub(crate) bytes: SharedBytes,
}

impl StoredArea {
    /// Whether the application has forgotten it: an area has at least one byte.
    pub(crate) fn is_removed(&self) -> bool {
        self.bytes.len() == 0
    }
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
/// number in records. A copy shares the bytes of its areas.
#[derive(Clone, Debug, Default)]
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

    /// Begins the transaction that leads to the state `id`. A change must be the next one; a state
    /// replaces all areas.
    pub(crate) fn begin(&mut self, kind: RecordKind, id: StateId) -> Result<(), BackupError> {
        if kind == RecordKind::Change {
            if id.sequence != self.id.sequence.wrapping_add(1) {
                return Err(BackupError::Malformed("the transaction before it is missing"));
            }
            if id.generation < self.id.generation {
                return Err(BackupError::Malformed("a later session has committed before"));
            }
        }
        if kind == RecordKind::State {
            self.areas.clear();
        }
        self.id = id;
        Ok(())
    }

    /// Applies the payload of a record of the transaction that has begun. After an error it may
    /// have been applied in part.
    pub(crate) fn apply_payload(&mut self, payload: &[u8]) -> Result<(), BackupError> {
        let mut parts = PayloadReader(payload);
        for _ in 0..parts.read_u32()? {
            let (number, len, name_len) = (parts.read_u32()?, parts.read_u64()?, parts.read_u8()?);
            let name = std::str::from_utf8(parts.read_bytes(u64::from(name_len))?)
                .map_err(|_| BackupError::Malformed("the name of an area is not UTF-8"))?;
            self.define_area(number, len, name)?;
        }
        let count = parts.read_u32()?;
        let mut changes = PayloadReader(parts.read_bytes(u64::from(count) * 20)?);
        for _ in 0..count {
            let (area, offset, len) =
                (changes.read_u32()?, changes.read_u64()?, changes.read_u64()?);
            self.write(area, offset, parts.read_bytes(len)?)?;
        }
        match parts.0 {
            [] => Ok(()),
            _ => Err(BackupError::Malformed("the payload is too long")),
        }
    }

    /// Makes an area, filled with zeros. It replaces an area of the same number. Numbers have no
    /// gaps.
    pub(crate) fn define_area(
        &mut self,
        number: u32,
        len: u64,
        name: &str,
    ) -> Result<(), BackupError> {
        if len > LEN_MAX || number >= AREAS_MAX || number as usize > self.areas.len() {
            return Err(BackupError::Malformed("the area has an impossible number or length"));
        }
        let area = StoredArea { name: name.to_owned(), bytes: SharedBytes::zeros(len as usize) };
        match self.areas.get_mut(number as usize) {
            Some(known) => *known = area,
            None => self.areas.push(area),
        }
        Ok(())
    }

    /// Overwrites bytes of an area. An error if they are not all within it.
    pub(crate) fn write(
        &mut self,
        area: u32,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), BackupError> {
        let area = self.areas.get_mut(area as usize);
        let area = area.ok_or(BackupError::Malformed("a change of an unknown area"))?;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let written = area.bytes.write(offset, bytes);
        written.ok_or(BackupError::Malformed("a change outside of its area"))
    }
}

/// The state that an unfinished transaction leads to. It shares with the committed state what the
/// transaction does not change.
#[derive(Debug)]
pub(crate) struct StagedState {
    kind: RecordKind,
    state: ApplicationState,
}

impl StagedState {
    /// Begins a transaction on the committed state.
    pub(crate) fn begin(
        committed: &ApplicationState,
        header: &RecordHeader,
    ) -> Result<Self, BackupError> {
        let mut state = match header.kind {
            RecordKind::State => ApplicationState::default(),
            _ => committed.clone(),
        };
        state.begin(header.kind, header.id)?;
        Ok(Self { kind: header.kind, state })
    }

    /// Applies a record, which must be one of this transaction.
    pub(crate) fn apply_record(
        &mut self,
        header: &RecordHeader,
        payload: &[u8],
    ) -> Result<(), BackupError> {
        match header.kind == self.kind && header.id == self.state.id {
            true => self.state.apply_payload(payload),
            false => Err(BackupError::Malformed("a record inside of another transaction")),
        }
    }

    pub(crate) fn into_state(self) -> ApplicationState {
        self.state
    }
}
