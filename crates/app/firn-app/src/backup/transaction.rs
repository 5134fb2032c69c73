//! Transactions as targets get them, and their records.
//!
//! A small transaction has its changes as a payload, which all targets share. A large one has a
//! copy of the state after it, which shares its memory with the committed state, and the ranges
//! that changed: no byte is copied until a record needs it.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use super::error::BackupError;
use super::image::{ApplicationState, StateId};
use super::record::{EncodedRecord, PayloadBuilder, RecordKind, encode_record};
use super::settings::Compression;

/// The size at which a record of a large transaction ends, in bytes.
const RECORD_BYTES: usize = 1 << 20;
/// The size up to which a transaction is a payload: a part of the state, but not less or more than
/// these.
const PAYLOAD_PART: u64 = 64;
const PAYLOAD_LIMITS: [u64; 2] = [1 << 20, 64 << 20];

/// An area that a transaction defines: its number in records, its length, its name.
#[derive(Clone, Debug)]
pub(crate) struct AreaDefinition {
    pub(crate) number: u32,
    pub(crate) len: u64,
    pub(crate) name: String,
}

/// The changes of a transaction that is being committed, with their bytes in the areas.
#[derive(Debug, Default)]
pub(crate) struct NewChanges<'a> {
    pub(crate) defined: Vec<AreaDefinition>,
    /// The area, the offset in it, the bytes there.
    pub(crate) changes: Vec<(u32, u64, &'a [u8])>,
}

/// One committed transaction.
#[derive(Clone, Debug)]
pub(crate) struct Commit {
    pub(crate) id: StateId,
    content: CommitContent,
}

#[derive(Clone, Debug)]
enum CommitContent {
    Payload(Arc<Vec<u8>>),
    Shared(Arc<SharedChanges>),
}

#[derive(Debug)]
struct SharedChanges {
    state: ApplicationState,
    defined: Vec<AreaDefinition>,
    changes: Vec<(u32, Range<usize>)>,
    byte_count: u64,
}

impl NewChanges<'_> {
    /// Applies them to the state before them.
    fn apply(&self, state: &mut ApplicationState, id: StateId) -> Result<(), BackupError> {
        state.begin(RecordKind::Change, id)?;
        for area in &self.defined {
            state.define_area(area.number, area.len, &area.name)?;
        }
        self.changes.iter().try_for_each(|(area, offset, bytes)| state.write(*area, *offset, bytes))
    }

    fn byte_count(&self) -> u64 {
        self.changes.iter().map(|(_, _, bytes)| bytes.len() as u64 + 20).sum()
    }
}

impl Commit {
    /// Applies changes to the state, and makes a commit of them.
    pub(crate) fn apply_changes(
        new: NewChanges<'_>,
        state: &mut ApplicationState,
        id: StateId,
    ) -> Result<Self, BackupError> {
        new.apply(state, id)?;
        let byte_count = new.byte_count();
        let NewChanges { defined, changes } = new;
        let content = if byte_count <= payload_max(state.byte_count()) {
            let mut payload = define_areas(&defined);
            changes.iter().for_each(|(area, at, bytes)| payload.add_change(*area, *at, bytes));
            CommitContent::Payload(Arc::new(payload.into_bytes()))
        } else {
            let range = |offset: u64, len| offset as usize..offset as usize + len;
            let changes = changes.iter().map(|(area, at, bytes)| (*area, range(*at, bytes.len())));
            let (changes, state) = (changes.collect(), state.clone());
            CommitContent::Shared(Arc::new(SharedChanges { state, defined, changes, byte_count }))
        };
        Ok(Self { id, content })
    }

    /// The size of its changes in bytes.
    pub(crate) fn byte_count(&self) -> u64 {
        match &self.content {
            CommitContent::Payload(payload) => payload.len() as u64,
            CommitContent::Shared(shared) => shared.byte_count,
        }
    }

    /// Whether it has a copy of the state: while it exists, the chunks that later transactions
    /// write take memory twice.
    pub(crate) fn shares_state(&self) -> bool {
        matches!(self.content, CommitContent::Shared(_))
    }

    /// Passes its records to `put`, in order.
    pub(crate) fn encode<E>(
        &self,
        codec: Compression,
        mut put: impl FnMut(&EncodedRecord<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let kind = RecordKind::Change;
        match &self.content {
            CommitContent::Payload(payload) => {
                put(&encode_record(kind, self.id, Cow::Borrowed(payload), codec, false))
            }
            CommitContent::Shared(shared) => {
                let areas = shared.state.areas();
                let pieces = shared.changes.iter().flat_map(|(area, range)| {
                    let pieces = areas[*area as usize].bytes.pieces(range.clone());
                    pieces.map(|(offset, bytes)| (*area, offset as u64, bytes))
                });
                let writer = RecordWriter { kind, id: self.id, codec };
                writer.write_records(define_areas(&shared.defined), pieces, put)
            }
        }
    }
}

/// Passes the records of a whole state to `put`, in order.
pub(crate) fn encode_state<E>(
    state: &ApplicationState,
    codec: Compression,
    put: impl FnMut(&EncodedRecord<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let numbered = || (0_u32..).zip(state.areas());
    let mut first = PayloadBuilder::default();
    for (number, area) in numbered() {
        first.add_area(number, area.bytes.len() as u64, &area.name);
    }
    let pieces = numbered().flat_map(|(number, area)| {
        area.bytes.written_pieces().map(move |(offset, bytes)| (number, offset as u64, bytes))
    });
    let writer = RecordWriter { kind: RecordKind::State, id: state.id(), codec };
    writer.write_records(first, pieces, put)
}

/// The maximum size of a transaction that is a payload, given the size of the state.
fn payload_max(state_bytes: u64) -> u64 {
    (state_bytes / PAYLOAD_PART).clamp(PAYLOAD_LIMITS[0], PAYLOAD_LIMITS[1])
}

/// The maximum size of all transactions that are kept for targets that lack them.
pub(crate) fn backlog_max(state_bytes: u64) -> u64 {
    PAYLOAD_LIMITS[1].min(4 * payload_max(state_bytes))
}

fn define_areas(defined: &[AreaDefinition]) -> PayloadBuilder<'_> {
    let mut payload = PayloadBuilder::default();
    defined.iter().for_each(|area| payload.add_area(area.number, area.len, &area.name));
    payload
}

struct RecordWriter {
    kind: RecordKind,
    id: StateId,
    codec: Compression,
}

impl RecordWriter {
    /// Writes records of about [`RECORD_BYTES`]: the first one begins with `payload`.
    fn write_records<'a, E>(
        &self,
        mut payload: PayloadBuilder<'a>,
        pieces: impl Iterator<Item = (u32, u64, &'a [u8])>,
        mut put: impl FnMut(&EncodedRecord<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        for (area, offset, bytes) in pieces {
            if payload.byte_count() + bytes.len() > RECORD_BYTES {
                put(&self.encode(std::mem::take(&mut payload), true))?;
            }
            payload.add_change(area, offset, bytes);
        }
        put(&self.encode(payload, false))
    }

    fn encode(&self, payload: PayloadBuilder<'_>, is_continued: bool) -> EncodedRecord<'static> {
        let payload = Cow::Owned(payload.into_bytes());
        encode_record(self.kind, self.id, payload, self.codec, is_continued)
    }
}
