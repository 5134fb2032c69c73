//! Store recording: the words that an application has written, as recorded by a plugin in a
//! hypervisor that emulates the processor.
//!
//! ```text
//!   application                      plugin                                        supervisor
//!     record: address of end word  ------------------------------------------->     where are the areas' pages?
//!                                      begins epoch 1       <------------------     order
//!                             <------------------------------------------------     recording
//!     stores                           records each word once, by its address
//!     commit: stores the epoch's
//!       token to the end word          seals its report, begins the next epoch
//!     reads the list: no call
//! ```
//!
//! A store is identified by its virtual address. Other processes may store at the same addresses,
//! which records too many words. That is harmless: the application reads the bytes of recorded
//! words from its own memory. No word is missed, wherever the kernel moves pages, because no store
//! at an area's address is ignored.
//!
//! A store is recorded just after it is done, by the processor that did it. Before the application
//! ends an epoch, it makes sure that its other threads have passed that point (membarrier(2)).
//!
//! An epoch ends by a token that only the application and the plugin can compute, so that no other
//! program ends one between two of its stores. Each recording request has its own key, so that no
//! earlier report can be replayed.
//!
//! Not observed are: writes that are not stores of a processor (a device that writes into an area
//! directly), stores at other addresses of the same memory (a second mapping, another process that
//! shares it; the kernel's own for ptrace(2), `process_vm_writev(2)`, fixed buffers of io_uring,
//! `O_DIRECT`), and content that changes without any store (`MADV_DONTNEED`).

use serde::{Deserialize, Serialize};

use crate::key::{MessageSender, SealKey};
use crate::message::{self, FollowedAreaId};
use crate::window::SlotField;

/// The unit in which stores are recorded, in bytes.
pub const WORD: u64 = 8;
const PAGE: u64 = 4096;
/// The maximum count of words recorded in one epoch.
const RECORDED_WORDS_MAX: usize = 1 << 14;

/// An order of the supervisor to the plugin. They use a socket: the supervisor sends the length of
/// an order (4 bytes) and the order; the plugin sends a byte when it has carried it out. When the
/// connection ends, all recording ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PluginOrder {
    /// Record stores; stores recorded for this slot before are discarded.
    RecordStores(RecordedApplication),
    /// Stop recording for this slot.
    End {
        /// The slot.
        slot: u32,
    },
}

impl PluginOrder {
    /// Encodes the order.
    pub fn to_bytes(&self) -> Vec<u8> {
        message::encode_message(self)
    }

    /// Decodes an order. `None` if the bytes are malformed, or bytes are left over.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        message::decode_message(bytes)
    }
}

/// The application whose stores the plugin is to record: the content of
/// [`PluginOrder::RecordStores`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedApplication {
    /// The slot that reports are written to.
    pub slot: u32,
    /// The key of the reports' seals.
    pub key: ReportKey,
    /// Address of the end word, in the application's address space.
    pub end: u64,
    /// The areas.
    pub areas: Vec<RecordedArea>,
}

/// The key with which the plugin seals its reports, and with which the application checks that a
/// report is the plugin's. The application and the supervisor compute it (`key`), and the
/// supervisor sends it to the plugin. Each recording request has a new one. `Debug` does not print
/// it, so it does not get into logs.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportKey([u8; 16]);

impl std::fmt::Debug for ReportKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ReportKey(..)")
    }
}

/// An area whose stores are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedArea {
    /// Its number.
    pub id: FollowedAreaId,
    /// Address of its first page.
    pub start: u64,
    /// The count of pages, [`RecordedArea::PAGES_MAX`] at most.
    pub pages: u32,
}

impl RecordedArea {
    /// The maximum count of pages: the words of an area have numbers of 32 bits.
    pub const PAGES_MAX: u32 = u32::MAX / (PAGE / WORD) as u32;

    fn end_address(self) -> u64 {
        self.start.saturating_add(u64::from(self.pages) * PAGE)
    }
}

/// Consecutive words of an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WordRun {
    /// The area.
    pub area: FollowedAreaId,
    /// The first word, counted from the start of the area.
    pub first: u32,
    /// The count of words.
    pub words: u32,
}

/// The report of an epoch's stores: what the application reads after a commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreReport {
    /// The stores wrote these words, and no others.
    Words(Vec<WordRun>),
    /// The words are not known: the application must call the host.
    Unknown,
}

/// The report of an epoch that has ended, as the plugin writes it to the window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedReport {
    /// The epoch's number.
    pub epoch: u32,
    /// The sealed report.
    pub report: Vec<u8>,
}

/// The seal key and the number of the current epoch, as both sides have them.
struct EpochCounter {
    seal: SealKey,
    /// The current epoch, from 1.
    number: u64,
}

impl EpochCounter {
    fn new(key: &ReportKey) -> Self {
        Self { seal: SealKey::new(key.0), number: 1 }
    }

    /// The token that ends the current epoch.
    fn current_token(&self) -> u64 {
        self.seal.compute_epoch_token(self.number)
    }
}

/// The words that one application has stored to in the current epoch, in the plugin's memory.
pub struct RecordedStores {
    epochs: EpochCounter,
    end: u64,
    /// In the order of their addresses.
    areas: Vec<AreaStores>,
    /// Recorded words: index of the area in `areas`, and word.
    recorded: Vec<(u16, u32)>,
    is_unknown: bool,
}

struct AreaStores {
    area: RecordedArea,
    /// The highest end of this area and of those before it, which may overlap it.
    highest_end: u64,
    /// A bit for each word: whether it was recorded in this epoch.
    words: Vec<u64>,
}

impl AreaStores {
    fn new(area: RecordedArea) -> Self {
        let words = vec![0; area.pages as usize * (PAGE / WORD / 64) as usize];
        Self { area, highest_end: area.end_address(), words }
    }

    /// The areas in the order of their addresses.
    fn sort_areas(mut areas: Vec<RecordedArea>) -> Vec<Self> {
        areas.sort_unstable_by_key(|area| area.start);
        let mut sorted: Vec<_> = areas.into_iter().map(Self::new).collect();
        let mut highest = 0;
        for area in &mut sorted {
            highest = area.highest_end.max(highest);
            area.highest_end = highest;
        }
        sorted
    }

    /// The words of the area that a store covers.
    fn covered_words(&self, at: u64, bytes: u64) -> Option<std::ops::RangeInclusive<u64>> {
        let end = at.saturating_add(bytes).min(self.area.end_address());
        let first = at.max(self.area.start);
        (first < end).then(|| (first - self.area.start) / WORD..=(end - 1 - self.area.start) / WORD)
    }

    /// Records a word. True if it was not recorded yet.
    fn record_word(&mut self, word: u64) -> bool {
        let bit = 1 << (word % 64);
        let Some(bits) = self.words.get_mut((word / 64) as usize) else { return false };
        let is_new = *bits & bit == 0;
        *bits |= bit;
        is_new
    }

    fn forget_word(&mut self, word: u32) {
        if let Some(bits) = self.words.get_mut((word / 64) as usize) {
            *bits &= !(1 << (word % 64));
        }
    }
}

impl RecordedStores {
    /// Begins to record.
    pub fn new(order: RecordedApplication) -> Self {
        Self {
            epochs: EpochCounter::new(&order.key),
            end: order.end,
            areas: AreaStores::sort_areas(order.areas),
            recorded: Vec::new(),
            is_unknown: false,
        }
    }

    /// The numbers of the virtual pages whose stores must be checked.
    pub fn watched_pages(&self) -> impl Iterator<Item = u64> + '_ {
        let pages = |area: &AreaStores| area.area.start / PAGE..area.area.end_address() / PAGE;
        self.areas.iter().flat_map(pages).chain([self.end / PAGE])
    }

    /// Whether a store is to the end word.
    pub fn is_end_word(&self, at: u64) -> bool {
        at.wrapping_sub(self.end) < 8
    }

    /// Records a store of `bytes` bytes. Areas may be adjacent, and the store may extend into
    /// several.
    pub fn record_store(&mut self, at: u64, bytes: u64) {
        let end = at.saturating_add(bytes);
        let mut number = self.areas.partition_point(|area| area.area.start < end);
        while number > 0 && self.areas[number - 1].highest_end > at {
            number -= 1;
            if let Some(words) = self.areas[number].covered_words(at, bytes) {
                words.for_each(|word| self.record_area_word(number, word));
            }
        }
    }

    fn record_area_word(&mut self, area: usize, word: u64) {
        if !self.areas[area].record_word(word) {
            return;
        }
        match self.recorded.len() < RECORDED_WORDS_MAX {
            true => self.recorded.push((area as u16, word as u32)),
            false => {
                self.areas[area].forget_word(word as u32);
                self.is_unknown = true;
            }
        }
    }

    /// Reads the value of the end word: if it is the epoch's token, the epoch has ended.
    pub fn end_epoch(&mut self, token: u64) -> Option<SealedReport> {
        if token != self.epochs.current_token() {
            return None;
        }
        let report = self.take_report();
        let report =
            self.epochs.seal.seal_message(MessageSender::Plugin, self.epochs.number, &report);
        let epoch = self.epochs.number as u32;
        self.epochs.number += 1;
        Some(SealedReport { epoch, report })
    }

    /// Encodes the report of the epoch, and clears the recorded stores.
    fn take_report(&mut self) -> Vec<u8> {
        self.recorded.sort_unstable();
        let mut runs: Vec<WordRun> = Vec::new();
        for &(area, word) in &self.recorded {
            let area = &mut self.areas[usize::from(area)];
            area.forget_word(word);
            let id = area.area.id;
            match runs.last_mut() {
                Some(run) if run.area == id && run.first + run.words == word => run.words += 1,
                _ => runs.push(WordRun { area: id, first: word, words: 1 }),
            }
        }
        self.recorded.clear();
        let report = message::encode_message(&StoreReport::Words(runs));
        let fits = report.len() + crate::key::SEAL_BYTES <= SlotField::ANSWER_BYTES;
        match std::mem::take(&mut self.is_unknown) || !fits {
            true => message::encode_message(&StoreReport::Unknown),
            false => report,
        }
    }
}

/// The application's side: opens the sealed reports about its own stores, one for each epoch.
pub struct ReportReader {
    epochs: EpochCounter,
}

impl std::fmt::Debug for ReportReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReportReader").field("epoch", &self.epochs.number).finish_non_exhaustive()
    }
}

impl ReportReader {
    pub(crate) fn new(key: &ReportKey) -> Self {
        Self { epochs: EpochCounter::new(key) }
    }

    /// The current epoch: its number as stored in the window, and the token that ends it.
    pub fn current_epoch(&self) -> (u32, u64) {
        (self.epochs.number as u32, self.epochs.current_token())
    }

    /// Opens the report of the current epoch, and moves to the next. `None` if the report is not
    /// the plugin's.
    pub fn open_report(&mut self, sealed: &[u8]) -> Option<StoreReport> {
        let EpochCounter { seal, number } = &mut self.epochs;
        let report = seal
            .open_message(MessageSender::Plugin, *number, sealed)
            .and_then(message::decode_message)?;
        *number += 1;
        Some(report)
    }
}

impl SealKey {
    /// The key of the reports on stores that are recorded from this request on.
    pub(crate) fn derive_report_key(&self, sequence: u64) -> ReportKey {
        ReportKey(self.derive_key_bytes(sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const END: u64 = 0x9_0000_0018;

    fn order(starts: &[(u64, u32)]) -> RecordedApplication {
        let area = |(id, &(start, pages)): (u16, &(u64, u32))| RecordedArea {
            id: FollowedAreaId(id),
            start,
            pages,
        };
        let areas = (0..).zip(starts).map(area).collect();
        RecordedApplication { slot: 0, key: ReportKey([7; 16]), end: END, areas }
    }

    fn both(starts: &[(u64, u32)]) -> (RecordedStores, ReportReader) {
        let order = order(starts);
        (RecordedStores::new(order.clone()), ReportReader::new(&order.key))
    }

    fn commit(stores: &mut RecordedStores, reader: &mut ReportReader) -> StoreReport {
        let (epoch, token) = reader.current_epoch();
        let ended = stores.end_epoch(token).unwrap();
        assert_eq!(ended.epoch, epoch);
        reader.open_report(&ended.report).unwrap()
    }

    fn run(area: u16, first: u32, words: u32) -> WordRun {
        WordRun { area: FollowedAreaId(area), first, words }
    }

    #[test]
    fn words_are_reported_once_and_in_order() {
        let (mut stores, mut reader) = both(&[(0x10000, 2), (0x40000, 1)]);
        for (at, bytes) in [(0x40008, 4), (0x1100c, 8), (0x10000, 1), (0x10001, 1)] {
            stores.record_store(at, bytes);
        }
        stores.record_store(0xfff8, 8);
        stores.record_store(0x12000, 8);
        let report = commit(&mut stores, &mut reader);
        assert_eq!(report, StoreReport::Words(vec![run(0, 0, 1), run(0, 513, 2), run(1, 1, 1)]));
        stores.record_store(0x10000, 1);
        assert_eq!(commit(&mut stores, &mut reader), StoreReport::Words(vec![run(0, 0, 1)]));
        assert_eq!(commit(&mut stores, &mut reader), StoreReport::Words(vec![]));
    }

    #[test]
    fn stores_reach_into_areas_and_out_of_them() {
        let (mut stores, mut reader) = both(&[(0x10000, 1), (0x11000, 1)]);
        stores.record_store(0xfff0, 32);
        stores.record_store(0x10ffc, 8);
        let report = commit(&mut stores, &mut reader);
        assert_eq!(report, StoreReport::Words(vec![run(0, 0, 2), run(0, 511, 1), run(1, 0, 1)]));
        let pages: Vec<u64> = stores.watched_pages().collect();
        assert_eq!(pages, [0x10, 0x11, END / PAGE]);
    }

    #[test]
    fn an_epoch_ends_by_its_token_and_is_reported_once() {
        let (mut stores, mut reader) = both(&[(0x10000, 1)]);
        assert!(
            stores.is_end_word(END) && stores.is_end_word(END + 4) && !stores.is_end_word(END + 8)
        );
        assert!(!stores.is_end_word(END - 1));
        let (_, token) = reader.current_epoch();
        assert_eq!((stores.end_epoch(token ^ 1), stores.end_epoch(0)), (None, None));
        let first = stores.end_epoch(token).unwrap();
        assert_eq!(stores.end_epoch(token), None, "it has ended");
        assert!(reader.open_report(&first.report[1..]).is_none());
        assert!(reader.open_report(&first.report).is_some());
        assert!(reader.open_report(&first.report).is_none(), "an old one is no answer");
    }

    #[test]
    fn too_many_stores_are_reported_as_unknown_and_the_next_epoch_exactly() {
        let (mut stores, mut reader) = both(&[(0x10000, 200)]);
        let mut stores = |bytes: u64, step: usize| {
            (0..bytes).step_by(step).for_each(|at| stores.record_store(0x10000 + at, 8));
            commit(&mut stores, &mut reader)
        };
        assert_eq!(stores(200 * PAGE, 8), StoreReport::Unknown);
        assert_eq!(stores(150 * PAGE, 64), StoreReport::Unknown, "as it does not fit");
        assert_eq!(stores(16 * PAGE, 8), StoreReport::Words(vec![run(0, 0, 16 * 512)]));
    }

    proptest! {
        #[test]
        fn every_written_byte_is_reported(
            writes in prop::collection::vec((0xf000_u64..0x17000, 1_u64..=64), 0..200),
            every in 1_usize..20,
        ) {
            // Two are neighbours, and two overlap.
            let areas = [(0x14000_u64, 1), (0x10000, 2), (0x12000, 1), (0x11000, 5)];
            let (mut stores, mut reader) = both(&areas);
            let is_inside = |byte: &u64| areas.iter().any(|&(start, pages)| {
                (start..start + u64::from(pages) * PAGE).contains(byte)
            });
            for epoch in writes.chunks(every) {
                let mut written = BTreeSet::new();
                for &(at, bytes) in epoch {
                    stores.record_store(at, bytes);
                    written.extend((at..at + bytes).filter(is_inside).map(|byte| byte / WORD));
                }
                let StoreReport::Words(runs) = commit(&mut stores, &mut reader) else {
                    return Err(TestCaseError::fail("unknown"));
                };
                let words = |run: &WordRun| {
                    let start = areas[usize::from(run.area.0)].0 / WORD + u64::from(run.first);
                    start..start + u64::from(run.words)
                };
                let report: BTreeSet<u64> = runs.iter().flat_map(words).collect();
                prop_assert_eq!(report, written);
            }
        }
    }
}
