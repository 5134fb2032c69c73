//! One object of the cache: which units are there, and the fetches of others.
//!
//! ```text
//!   missing --> being fetched --> there --> there, and its bit in the map is set (after a sync)
//!      ^            |  |
//!      '-- failed --'  '-- no room on the disk: those who wait get the bytes, and it is missing again
//! ```
//!
//! All who need a unit wait for the same fetch.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use firn_cache::{ObjectName, UNIT_BYTES, units_of, write_map_byte};
use tokio::sync::watch;

use super::client::ObjectClient;
use super::room::CacheRoom;
use crate::error::StoreError;

/// The maximum number of units in one request for bytes that a guest waits for: 1 MiB.
const DEMAND_UNITS_MAX: u64 = 16;

/// The units that are fetched together if a guest waits for one of them: 256 KiB take hardly longer than
/// one unit where a round trip takes milliseconds, and what is stored side by side is used together.
const DEMAND_UNITS: u64 = 4;

/// The maximum number of units in other requests: 4 MiB.
pub(crate) const RUN_UNITS_MAX: u64 = 64;

/// The minimum time between two fetches of a unit whose bytes are wrong.
const REFETCH_PAUSE: Duration = Duration::from_secs(5);

/// How a range is needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReadKind {
    /// A guest waits for it.
    Demand,
    /// What follows is needed as well.
    InOrder,
    /// It is needed later.
    Prefetch,
}

/// What a fetch has led to.
#[derive(Clone, Debug)]
pub(crate) enum FetchOutcome {
    /// The bytes are here. The file may not have them yet.
    Arrived {
        /// Where the bytes begin in the object.
        start: u64,
        bytes: Bytes,
    },
    /// The file has the units.
    InFile,
    /// There is no room on the disk.
    InMemory {
        /// Where the bytes begin in the object.
        start: u64,
        bytes: Bytes,
    },
    Failed(Arc<StoreError>),
}

impl FetchOutcome {
    /// Whether this is all that a read of this kind waits for: a prefetch is for the file.
    fn is_enough(&self, kind: ReadKind) -> bool {
        kind != ReadKind::Prefetch || !matches!(self, Self::Arrived { .. })
    }
}

type FetchTicket = watch::Receiver<Option<FetchOutcome>>;

/// Bytes that were requested.
#[derive(Debug)]
pub(crate) enum ProvidedBytes {
    /// The file has them.
    InFile {
        /// Whether they had to be fetched.
        has_waited: bool,
    },
    /// Only this value has them.
    InMemory(Vec<u8>),
}

/// An object of the cache.
pub(crate) struct CachedObject {
    pub(crate) name: ObjectName,
    pub(crate) client: ObjectClient,
    data: File,
    map: File,
    room: Arc<CacheRoom>,
    units: Mutex<UnitStates>,
}

#[derive(Default)]
struct UnitStates {
    /// Units that are there, a bit for each.
    present: Vec<u8>,
    /// Units that were written since the last sync.
    unsynced: BTreeSet<u64>,
    flying: HashMap<u64, FetchTicket>,
    /// Units that had wrong bytes, and when they were forgotten.
    wrong: HashMap<u64, Instant>,
}

impl UnitStates {
    fn has(&self, unit: u64) -> bool {
        self.present.get((unit / 8) as usize).is_some_and(|bits| bits & (1 << (unit % 8)) != 0)
    }

    fn set(&mut self, unit: u64, is_present: bool) {
        if let Some(bits) = self.present.get_mut((unit / 8) as usize) {
            match is_present {
                true => *bits |= 1 << (unit % 8),
                false => *bits &= !(1 << (unit % 8)),
            }
        }
    }
}

/// Splits units that are in order into runs of neighbours.
fn group_runs(units: impl IntoIterator<Item = u64>, longest: u64) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for unit in units {
        match runs.last_mut() {
            Some(run) if run.end == unit && run.end - run.start < longest => run.end += 1,
            _ => runs.push(unit..unit + 1),
        }
    }
    runs
}

/// The units of aligned groups of this many that hold a range.
fn align_units(units: &Range<u64>, group: u64) -> Range<u64> {
    match units.is_empty() {
        true => units.clone(),
        false => units.start / group * group..units.end.next_multiple_of(group),
    }
}

impl CachedObject {
    pub(crate) fn new(
        name: ObjectName,
        client: ObjectClient,
        (data, map): (File, File),
        room: Arc<CacheRoom>,
    ) -> io::Result<Self> {
        let present = name.read_bits(&map)?;
        let units = Mutex::new(UnitStates { present, ..UnitStates::default() });
        Ok(Self { name, client, data, map, room, units })
    }

    fn lock_units(&self) -> MutexGuard<'_, UnitStates> {
        self.units.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the units of a range present.
    pub(crate) async fn provide(
        self: &Arc<Self>,
        range: Range<u64>,
        kind: ReadKind,
    ) -> Result<ProvidedBytes, Arc<StoreError>> {
        let mut range = range;
        range.end = range.end.min(self.name.len);
        let tickets = self.begin_fetches(&range, kind);
        let has_waited = !tickets.is_empty();
        let mut in_memory = Vec::new();
        for mut ticket in tickets {
            let is_enough =
                |it: &Option<FetchOutcome>| it.as_ref().is_some_and(|it| it.is_enough(kind));
            let outcome = ticket.wait_for(is_enough).await.map(|outcome| outcome.clone());
            match outcome.ok().flatten() {
                Some(FetchOutcome::InFile) => {}
                Some(
                    FetchOutcome::Arrived { start, bytes }
                    | FetchOutcome::InMemory { start, bytes },
                ) => in_memory.push((start, bytes)),
                Some(FetchOutcome::Failed(error)) => return Err(error),
                None => return Err(Arc::new(self.interrupted())),
            }
        }
        if in_memory.is_empty() {
            return Ok(ProvidedBytes::InFile { has_waited });
        }
        let bytes =
            self.assemble(&range, &in_memory).map_err(|error| Arc::new(self.unreadable(error)))?;
        Ok(ProvidedBytes::InMemory(bytes))
    }

    /// The bytes of a range, of which these are not in the file.
    fn assemble(&self, range: &Range<u64>, in_memory: &[(u64, Bytes)]) -> io::Result<Vec<u8>> {
        let mut all = vec![0; range.end.saturating_sub(range.start) as usize];
        self.data.read_exact_at(&mut all, range.start)?;
        for (start, bytes) in in_memory {
            let from = range.start.max(*start);
            let to = range.end.min(start + bytes.len() as u64);
            if from < to {
                let source = &bytes[(from - start) as usize..(to - start) as usize];
                all[(from - range.start) as usize..(to - range.start) as usize]
                    .copy_from_slice(source);
            }
        }
        Ok(all)
    }

    /// Starts fetches for what is missing; returns those to wait for.
    fn begin_fetches(self: &Arc<Self>, range: &Range<u64>, kind: ReadKind) -> Vec<FetchTicket> {
        let wanted = units_of(range.start, range.end.saturating_sub(range.start));
        let (all, longest) = match kind {
            ReadKind::Demand => (align_units(&wanted, DEMAND_UNITS), DEMAND_UNITS_MAX),
            ReadKind::InOrder => (wanted.start..wanted.end + RUN_UNITS_MAX, RUN_UNITS_MAX),
            ReadKind::Prefetch => (wanted.clone(), RUN_UNITS_MAX),
        };
        let all = all.start..all.end.min(self.name.unit_count());
        let mut units = self.lock_units();
        let missing = all.filter(|unit| !units.has(*unit) && !units.flying.contains_key(unit));
        let mut tickets: Vec<FetchTicket> = Vec::new();
        let runs = group_runs(missing.collect::<Vec<_>>(), longest);
        for unit in wanted.clone() {
            if let Some(ticket) = units.flying.get(&unit)
                && !tickets.iter().any(|it| it.same_channel(ticket))
            {
                tickets.push(ticket.clone());
            }
        }
        for run in runs {
            let (sender, ticket) = watch::channel(None);
            run.clone().for_each(|unit| _ = units.flying.insert(unit, ticket.clone()));
            if run.start < wanted.end && run.end > wanted.start {
                tickets.push(ticket);
            }
            tokio::spawn(Arc::clone(self).fetch(run, kind, sender));
        }
        tickets
    }

    /// Fetches neighbouring units.
    async fn fetch(
        self: Arc<Self>,
        run: Range<u64>,
        kind: ReadKind,
        sender: watch::Sender<Option<FetchOutcome>>,
    ) {
        let range = run.start * UNIT_BYTES..(run.end * UNIT_BYTES).min(self.name.len);
        let flight = self.room.begin_request(kind == ReadKind::Demand);
        let fetched = self.client.read_range(range.clone()).await;
        drop(flight);
        firn_fault::pass_point("cache.fetched");
        let outcome = match fetched {
            Err(error) => FetchOutcome::Failed(Arc::new(error)),
            Ok(bytes) => {
                self.room.count_fetched(bytes.len() as u64);
                let (this, start, copy) = (Arc::clone(&self), range.start, bytes.clone());
                // A guest waits: the disk of the cache may be slower than the store.
                if kind == ReadKind::Demand {
                    let arrived = FetchOutcome::Arrived { start, bytes: bytes.clone() };
                    let _ = sender.send(Some(arrived));
                }
                let stored =
                    tokio::task::spawn_blocking(move || this.store_bytes(&copy, start)).await;
                match stored {
                    Ok(true) => FetchOutcome::InFile,
                    _ => FetchOutcome::InMemory { start, bytes },
                }
            }
        };
        {
            let mut units = self.lock_units();
            for unit in run {
                units.flying.remove(&unit);
                if matches!(outcome, FetchOutcome::InFile) {
                    units.set(unit, true);
                    units.unsynced.insert(unit);
                }
            }
        }
        let _ = sender.send(Some(outcome));
    }

    /// Writes bytes to the file. False if there is no room for them.
    fn store_bytes(&self, bytes: &Bytes, start: u64) -> bool {
        let Some(_reserved) = self.room.reserve(bytes.len() as u64) else { return false };
        let write = || {
            firn_fault::pass_io_point("cache.write")?;
            self.data.write_all_at(bytes, start)
        };
        let written = write().or_else(|_| match self.room.remove_oldest() {
            true => write(),
            false => Err(io::ErrorKind::StorageFull.into()),
        });
        firn_fault::pass_point("cache.written");
        if let Err(error) = &written {
            tracing::warn!(%error, "the cache can't be written");
        }
        written.is_ok()
    }

    /// Forgets units that have wrong bytes, unless they were fetched once more just before: then the
    /// store has wrong bytes.
    pub(crate) fn forget_wrong_units(&self, range: Range<u64>) {
        let (mut units, now) = (self.lock_units(), Instant::now());
        let end = range.end.min(self.name.len);
        for unit in units_of(range.start, end.saturating_sub(range.start)) {
            let is_due = units.wrong.get(&unit).is_none_or(|then| now - *then > REFETCH_PAUSE);
            if units.has(unit) && is_due {
                units.wrong.insert(unit, now);
                units.set(unit, false);
                units.unsynced.remove(&unit);
            }
        }
    }

    /// Forgets all units, also in the map.
    pub(crate) fn forget_all(&self) -> io::Result<()> {
        self.forget_wrong_units(0..self.name.len);
        let present = self.lock_units().present.clone();
        for (at, bits) in present.into_iter().enumerate() {
            write_map_byte(&self.map, at, bits)?;
        }
        Ok(())
    }

    /// Bytes of the object.
    pub(crate) async fn read_bytes(
        self: &Arc<Self>,
        range: Range<u64>,
    ) -> Result<Vec<u8>, Arc<StoreError>> {
        match self.provide(range.clone(), ReadKind::Demand).await? {
            ProvidedBytes::InMemory(bytes) => Ok(bytes),
            ProvidedBytes::InFile { .. } => {
                let read = self.assemble(&range, &[]);
                read.map_err(|error| Arc::new(self.unreadable(error)))
            }
        }
    }

    /// Waits until no guest waits for the store, but no longer than this.
    pub(crate) async fn yield_to_demands(&self, longest: Duration) {
        let begun = Instant::now();
        while self.room.has_demands() && begun.elapsed() < longest {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Whether a unit is there, or on its way.
    pub(crate) fn is_requested(&self, unit: u64) -> bool {
        let units = self.lock_units();
        units.has(unit) || units.flying.contains_key(&unit)
    }

    /// Writes what is only in memory to the disk: first the bytes, then their bits.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let written = std::mem::take(&mut self.lock_units().unsynced);
        if written.is_empty() {
            return Ok(());
        }
        self.data.sync_data()?;
        firn_fault::pass_point("cache.synced");
        let bytes: BTreeSet<u64> = written.iter().map(|unit| unit / 8).collect();
        for byte in bytes {
            // What was written after the sync has no bit yet.
            let units = self.lock_units();
            let bit =
                |at: &u64| units.has(byte * 8 + at) && !units.unsynced.contains(&(byte * 8 + at));
            let bits = (0..8).filter(bit).fold(0, |bits, at| bits | (1 << at));
            drop(units);
            write_map_byte(&self.map, byte as usize, bits)?;
        }
        Ok(())
    }

    fn interrupted(&self) -> StoreError {
        StoreError::Failed {
            location: self.client.location().clone(),
            step: "read it",
            reason: "the fetch was interrupted".to_owned(),
            was_repeated: false,
        }
    }

    fn unreadable(&self, source: io::Error) -> StoreError {
        StoreError::Io { step: "read", path: self.name.hash.clone().into(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_request_up_to_a_length() {
        assert_eq!(group_runs([1, 2, 3, 7, 8, 9, 10, 11], 4), [1..4, 7..11, 11..12]);
        assert_eq!(group_runs([], 4), Vec::<Range<u64>>::new());
    }

    #[test]
    fn a_demand_fetches_the_group_of_its_unit() {
        assert_eq!(align_units(&(5..6), 4), 4..8);
        assert_eq!(align_units(&(3..5), 4), 0..8);
        assert_eq!(align_units(&(4..4), 4), 4..4);
    }
}
