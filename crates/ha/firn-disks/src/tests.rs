//! Random histories of a disk, compared with a model that stores its contents at each cut.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use firn_cluster::Epoch;
use proptest::prelude::*;

use crate::change::DiskChange;
use crate::disk::{DiskError, LoggedDisk};
use crate::primary::PrimaryDiskError;
use crate::standby::StandbyDisk;
use crate::store::DiskStore;
use crate::wire;

const SIZE: u64 = 5 << 10;
/// The step size of the seed.
const PIECE_BYTES: u64 = 1 << 10;
const PLENTY: usize = usize::MAX;

/// A disk in memory, which can fail in the middle of a change. Clones share their contents.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// How many changes succeed before one fails, half of it being made.
    changes_left: Arc<AtomicUsize>,
    fails: Arc<Mutex<bool>>,
    /// Reads fail too, and so does one flush.
    is_bad: Arc<AtomicBool>,
}

impl Memory {
    /// The contents, with zeros for bytes that were never written.
    pub fn bytes(&self, size: usize) -> Vec<u8> {
        let mut bytes = self.bytes.lock().unwrap().clone();
        assert!(bytes.len() <= size);
        bytes.resize(size, 0);
        bytes
    }

    /// Makes every change after `changes` more ones fail half-way.
    pub fn fail_from(&self, changes: usize) {
        self.changes_left.store(changes, Ordering::Relaxed);
        *self.fails.lock().unwrap() = changes < usize::MAX;
    }

    fn put(&self, at: u64, new: &mut dyn Iterator<Item = u8>, length: usize) -> io::Result<()> {
        let is_failing = *self.fails.lock().unwrap()
            && self
                .changes_left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                .is_err();
        let made = if is_failing { length / 2 } else { length };
        let at = at as usize;
        let mut bytes = self.bytes.lock().unwrap();
        let end = bytes.len().max(at + made);
        bytes.resize(end, 0);
        bytes[at..at + made].iter_mut().zip(new).for_each(|(byte, new)| *byte = new);
        match is_failing {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => Ok(()),
        }
    }
}

impl DiskStore for Memory {
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        if self.is_bad.load(Ordering::Relaxed) {
            return Err(io::Error::other("bad"));
        }
        let bytes = self.bytes.lock().unwrap();
        let there = bytes.get(at as usize..).unwrap_or_default();
        let count = there.len().min(into.len());
        into[..count].copy_from_slice(&there[..count]);
        into[count..].fill(0);
        Ok(())
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.put(at, &mut bytes.iter().copied(), bytes.len())
    }

    fn zero_range(&self, at: u64, length: u64, _: bool) -> io::Result<()> {
        self.put(at, &mut std::iter::repeat(0), length as usize)
    }

    fn punch_hole(&self, at: u64, length: u64) -> io::Result<bool> {
        // Like a file system that has holes only of whole blocks, and not everywhere.
        match at % 3 == 0 {
            true => self.zero_range(at, length, true).map(|()| true),
            false => Ok(false),
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        // Like the kernel, which reports a lost write once.
        match self.is_bad.swap(false, Ordering::Relaxed) {
            true => Err(io::Error::other("bad")),
            false => Ok(()),
        }
    }

    fn next_data_range(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let bytes = self.bytes.lock().unwrap();
        let there = bytes.get(from as usize..).unwrap_or_default();
        let first = there.iter().position(|&byte| byte != 0);
        Ok(first.map(|first| from + first as u64..bytes.len() as u64))
    }
}

/// An event in the life of a protected disk.
#[derive(Clone, Debug)]
enum Event {
    Write {
        at: u64,
        length: usize,
        fill: u8,
    },
    Zero {
        at: u64,
        length: u64,
        hole: bool,
    },
    Trim {
        at: u64,
        length: u64,
    },
    /// The next change fails half-way.
    Fault,
    Seed,
    Cut,
    /// The newest epoch but one is committed.
    Commit,
    Fold,
}

fn event() -> impl Strategy<Value = Event> {
    let place = || (0..SIZE).prop_flat_map(|at| (Just(at), 1..=(SIZE - at).min(PIECE_BYTES)));
    let write = (place(), any::<u8>());
    prop_oneof![
        8 => write.prop_map(|((at, length), fill)| Event::Write { at, length: length as usize, fill }),
        2 => (place(), any::<bool>()).prop_map(|((at, length), hole)| Event::Zero { at, length, hole }),
        2 => place().prop_map(|(at, length)| Event::Trim { at, length }),
        1 => Just(Event::Fault),
        6 => Just(Event::Seed),
        4 => Just(Event::Cut),
        3 => Just(Event::Commit),
        3 => Just(Event::Fold),
    ]
}

/// A primary, its standby, and the disk's contents at each cut.
struct World {
    file: Memory,
    disk: LoggedDisk,
    standby: StandbyDisk<Memory>,
    at_cut: BTreeMap<Epoch, Vec<u8>>,
    is_seeded: bool,
    complete: Epoch,
}

impl World {
    fn new(before: &[Event]) -> Self {
        let file = Memory::default();
        let disk = LoggedDisk::new(Box::new(file.clone()), SIZE).with_piece_bytes(PIECE_BYTES);
        let standby = StandbyDisk::new(SIZE, Memory::default(), 1 << 10);
        let (at_cut, complete) = (BTreeMap::new(), Epoch(0));
        let mut world = Self { file, disk, standby, at_cut, is_seeded: false, complete };
        before.iter().for_each(|event| world.change(event));
        world.disk.begin_protection(PLENTY);
        world
    }

    /// Applies a change of the guest. An error is reported to the guest only.
    fn change(&mut self, event: &Event) {
        let done = match event {
            Event::Write { at, length, fill } => {
                // No two consecutive bytes are equal, so that misplaced ones are found.
                let bytes = (0..*length).map(|index| fill.wrapping_add(index as u8)).collect();
                self.disk.write_at(*at, bytes)
            }
            Event::Zero { at, length, hole } => self.disk.zero_range(*at, *length, *hole),
            Event::Trim { at, length } => self.disk.trim_range(*at, *length),
            Event::Fault => return self.file.fail_from(0),
            _ => return,
        };
        if done.is_err() {
            self.file.fail_from(usize::MAX);
        }
    }

    /// Sends changes through the wire format.
    fn send(&mut self, epoch: Epoch, changes: &[DiskChange]) {
        for message in wire::encode_changes(0, changes) {
            self.standby.receive_changes(epoch, wire::decode_changes(&message).unwrap().1).unwrap();
        }
    }

    fn seed(&mut self) {
        let Ok(seed) = self.disk.seed_step() else { return };
        self.send(Epoch(0), &seed.changes);
        self.is_seeded = seed.is_whole;
    }

    fn cut(&mut self) {
        self.disk.begin_drain();
        let log = match self.disk.cut_log() {
            Ok(log) => log,
            Err(DiskError::Primary(_)) if !self.is_seeded => return,
            Err(error) => panic!("{error}"),
        };
        assert!(self.is_seeded);
        if log.epoch == Epoch(1) {
            self.standby.complete_epoch(Epoch(0)).unwrap();
        }
        self.at_cut.insert(log.epoch, self.file.bytes(SIZE as usize));
        self.send(log.epoch, &log.changes);
        self.standby.complete_epoch(log.epoch).unwrap();
        self.complete = log.epoch;
    }

    fn happen(&mut self, event: &Event) {
        match event {
            Event::Seed => self.seed(),
            Event::Cut => self.cut(),
            Event::Commit => {
                self.standby.commit_epoch(Epoch(self.complete.0.saturating_sub(1))).unwrap()
            }
            Event::Fold => drop(self.standby.fold_epoch().unwrap()),
            change => self.change(change),
        }
    }

    /// Fails over, as if the primary were lost here.
    fn fail_over(self) {
        let committed = self.standby.epoch_progress().1;
        match self.standby.promote_disk() {
            Ok((epoch, copy)) => {
                assert_eq!(epoch, committed);
                let differs = self.at_cut[&epoch]
                    .iter()
                    .zip(copy.bytes(SIZE as usize))
                    .position(|(a, b)| *a != b);
                assert_eq!(differs, None, "the copy of {epoch} differs there");
            }
            Err(_) => assert_eq!(committed, Epoch(0)),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_copy_is_the_disk_at_the_cut_of_the_committed_epoch(
        before in prop::collection::vec(event(), 0..6),
        events in prop::collection::vec(event(), 0..80),
    ) {
        let mut world = World::new(&before);
        events.iter().for_each(|event| world.happen(event));
        world.fail_over();
    }

    #[test]
    fn the_copy_is_the_disk_also_where_epochs_are_short(
        before in prop::collection::vec(event(), 0..6),
        events in prop::collection::vec(event(), 0..40),
    ) {
        let mut world = World::new(&before);
        while !world.is_seeded {
            world.seed();
        }
        for event in &events {
            world.happen(event);
            world.happen(&Event::Cut);
            world.happen(&Event::Commit);
        }
        prop_assert!(events.len() < 2 || world.standby.epoch_progress().1 > Epoch(0));
        world.fail_over();
    }
}

#[test]
fn a_change_that_failed_by_half_is_on_both_sides_by_half() {
    let mut world = World::new(&[]);
    world.seed();
    world.file.fail_from(0);
    world.disk.write_at(0, vec![1; 100]).unwrap_err();
    world.file.fail_from(usize::MAX);
    world.cut();
    world.cut();
    world.standby.commit_epoch(Epoch(1)).unwrap();
    let (_, copy) = world.standby.promote_disk().unwrap();
    let bytes = copy.bytes(SIZE as usize);
    assert!(bytes[..50] == [1; 50] && bytes[50..100] == [0; 50]);
}

/// After such a failure, any contents sent to the standby might be wrong.
#[test]
fn a_change_that_failed_and_cannot_be_read_back_ends_protection() {
    let mut world = World::new(&[]);
    world.seed();
    world.file.fail_from(0);
    world.file.is_bad.store(true, Ordering::Relaxed);
    world.disk.write_at(0, vec![1; 100]).unwrap_err();
    assert!(matches!(world.disk.cut_log(), Err(DiskError::Primary(PrimaryDiskError::Unprotected))));
}

#[test]
fn a_piece_that_cannot_be_read_ends_protection() {
    let world = World::new(&[Event::Write { at: 0, length: 2000, fill: 1 }]);
    world.file.is_bad.store(true, Ordering::Relaxed);
    assert!(matches!(world.disk.seed_step(), Err(DiskError::Read { at: 0, .. })));
    world.file.is_bad.store(false, Ordering::Relaxed);
    for _ in 0..9 {
        assert!(matches!(
            world.disk.seed_step(),
            Err(DiskError::Primary(PrimaryDiskError::Unprotected))
        ));
    }
    assert!(matches!(world.disk.cut_log(), Err(DiskError::Primary(PrimaryDiskError::Unprotected))));
}

#[test]
fn after_a_flush_that_failed_none_succeeds() {
    let memory = Memory::default();
    let disk = LoggedDisk::new(Box::new(memory.clone()), SIZE);
    disk.flush().unwrap();
    memory.is_bad.store(true, Ordering::Relaxed);
    disk.flush().unwrap_err();
    memory.sync_data().unwrap();
    disk.flush().unwrap_err();
}

/// Many threads write to the same few ranges while the disk is seeded and cut. At a cut they are
/// blocked, as in a paused VM.
#[test]
fn concurrent_writes_to_one_block_leave_primary_and_standby_equal() {
    let mut world = World::new(&[]);
    world.disk.begin_protection(1 << 10);
    let disk = Arc::new(std::mem::replace(
        &mut world.disk,
        LoggedDisk::new(Box::new(Memory::default()), 0),
    ));
    let (running, is_over) = (RwLock::new(()), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let (disk, running, is_over) = (&disk, &running, &is_over);
            scope.spawn(move || {
                for round in 0_u64.. {
                    if is_over.load(Ordering::Relaxed) > 0 {
                        return;
                    }
                    let _running = running.read().unwrap();
                    // Each range overlaps all others.
                    let at = round % 3 * 100;
                    disk.write_at(at, vec![thread * 60 + (round % 60) as u8; 500]).unwrap();
                }
            });
        }
        // While the threads run, one of them always waits for room or writes.
        for _ in 0..30 {
            let seed = disk.seed_step().unwrap();
            world.send(Epoch(0), &seed.changes);
        }
        world.standby.complete_epoch(Epoch(0)).unwrap();
        for _ in 0..200 {
            while disk.log_pressure().waiting == 0 {
                std::thread::yield_now();
            }
            disk.begin_drain();
            let stopped = running.write().unwrap();
            let log = disk.cut_log().unwrap();
            world.at_cut.insert(log.epoch, world.file.bytes(SIZE as usize));
            drop(stopped);
            world.send(log.epoch, &log.changes);
            world.standby.complete_epoch(log.epoch).unwrap();
            world.standby.commit_epoch(log.epoch).unwrap();
        }
        is_over.store(1, Ordering::Relaxed);
        disk.end_protection();
    });
    world.fail_over();
}

/// A store that writes to its disk just after the seed has read a piece of it.
#[derive(Debug)]
struct Meddling {
    memory: Memory,
    disk: std::sync::OnceLock<std::sync::Weak<LoggedDisk>>,
}

impl DiskStore for Meddling {
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.memory.read_at(at, into)?;
        let disk = self.disk.get().and_then(std::sync::Weak::upgrade);
        disk.map_or(Ok(()), |disk| disk.write_at(at + 10, vec![2; 10]))
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.memory.write_at(at, bytes)
    }

    fn zero_range(&self, at: u64, length: u64, hole: bool) -> io::Result<()> {
        self.memory.zero_range(at, length, hole)
    }

    fn punch_hole(&self, at: u64, length: u64) -> io::Result<bool> {
        self.memory.punch_hole(at, length)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn next_data_range(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        self.memory.next_data_range(from)
    }
}

#[test]
fn a_write_during_a_read_of_the_seed_is_not_missed() {
    let memory = Memory::default();
    memory.write_at(0, &[1; SIZE as usize]).unwrap();
    let store = Arc::new(Meddling { memory: memory.clone(), disk: Default::default() });
    let disk = LoggedDisk::new(Box::new(Arc::clone(&store)), SIZE).with_piece_bytes(PIECE_BYTES);
    let disk = Arc::new(disk);
    store.disk.set(Arc::downgrade(&disk)).unwrap();
    disk.begin_protection(PLENTY);
    let mut standby = StandbyDisk::new(SIZE, Memory::default(), PLENTY);
    let mut is_whole = false;
    while !is_whole {
        let seed = disk.seed_step().unwrap();
        standby.receive_changes(Epoch(0), seed.changes).unwrap();
        is_whole = seed.is_whole;
    }
    standby.complete_epoch(Epoch(0)).unwrap();
    standby.receive_changes(Epoch(1), disk.cut_log().unwrap().changes).unwrap();
    standby.complete_epoch(Epoch(1)).unwrap();
    standby.commit_epoch(Epoch(1)).unwrap();
    let copy = standby.promote_disk().unwrap().1.bytes(SIZE as usize);
    assert_eq!(copy.iter().filter(|&&byte| byte == 2).count(), 50, "ten bytes of each piece");
    assert!(copy == memory.bytes(SIZE as usize));
}
