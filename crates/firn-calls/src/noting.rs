//! Words that an application has written, noted by who sees its stores: a plugin in a hypervisor that emulates.
//!
//! ```text
//!   application                      plugin                                        supervisor
//!     note: where epochs end  ------------------------------------------------>     where are the areas' pages?
//!                                      begins epoch 1       <------------------     order
//!                             <------------------------------------------------     noting
//!     stores                           notes each word once, by its address
//!     commit: stores the epoch's
//!       token to the end word          seals what it noted, begins the next epoch
//!     reads the list: no call
//! ```
//!
//! A store is known by its virtual address; that its page is where the area's was found tells other processes' stores at the
//! same addresses from the application's. Where it is not, the kernel may have moved the page, or it is another process: the
//! epoch is told as [`Told::Unknown`], and the application calls. Noted too much is harmless, for what is told is read from
//! the application's own memory; too little can't be noted, for no store at an area's address is passed over.
//!
//! An epoch ends by a token that only the application and the plugin can compute, so that nobody else ends one between two
//! of its stores. Keys are of one noting: nothing that was told before can be told again.
//!
//! What is not seen: writes that are not stores of a processor (a device that reads into an area directly), and those of the
//! guest's kernel by other addresses than the application's (ptrace(2), `process_vm_writev(2)`, fixed buffers of io_uring).

use serde::{Deserialize, Serialize};

use crate::key::{SealKey, Speaker};
use crate::message::{self, AreaId};
use crate::window::Place;

/// Bytes of a word, the unit in which stores are noted.
pub const WORD: u64 = 8;
const PAGE: u64 = 4096;
/// Words that are noted in one epoch at most.
const NOTED_MAX: usize = 1 << 14;

/// What the supervisor has the plugin do. They talk by a socket: the length of an order (4 bytes), the order; and a byte when it
/// is carried out. Where the connection ends, so does all noting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Note stores; what was noted for this slot before is forgotten.
    Note(NoteOrder),
    /// Note nothing for this slot any more.
    End {
        /// Which.
        slot: u32,
    },
}

impl Order {
    /// As bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        message::bytes(self)
    }

    /// From bytes, all of them.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        message::parse(bytes)
    }
}

/// Whose stores are to be noted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoteOrder {
    /// Where what is noted is told.
    pub slot: u32,
    /// What it is sealed with.
    pub key: NotingKey,
    /// Address of the end word, in the application's address space.
    pub end: u64,
    /// The areas.
    pub areas: Vec<NotedArea>,
}

/// The key of one noting. It does not get into logs.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotingKey([u8; 16]);

impl std::fmt::Debug for NotingKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NotingKey(..)")
    }
}

/// An area, and where its pages are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotedArea {
    /// Its number.
    pub id: AreaId,
    /// Address of its first page.
    pub start: u64,
    /// Where each of its pages is.
    pub pages: Vec<PagePlace>,
}

/// Where a page is. QEMU tells plugins the physical address of a store, before version 8.2 rather the place in RAM, from a start
/// that is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagePlace {
    /// In the guest's RAM, counted in pages from its start.
    pub ram: u32,
    /// In the guest's physical address space, in pages.
    pub physical: u64,
}

/// Words of an area, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WordRun {
    /// Which area.
    pub area: AreaId,
    /// The first word, counted from the start of the area.
    pub first: u32,
    /// How many.
    pub words: u32,
}

/// What an epoch's stores were.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Told {
    /// These words, and no others.
    Words(Vec<WordRun>),
    /// That is not known: a call tells.
    Unknown,
}

/// An epoch that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its number.
    pub epoch: u32,
    /// What is told of it, sealed.
    pub told: Vec<u8>,
}

/// Key and count, as both sides have them.
struct Epochs {
    seal: SealKey,
    /// The one that is going on, from 1.
    number: u64,
}

impl Epochs {
    fn new(key: &NotingKey) -> Self {
        Self { seal: SealKey::new(key.0), number: 1 }
    }

    /// What ends it.
    fn token(&self) -> u64 {
        self.seal.token(self.number)
    }
}

/// What is noted of one application.
pub struct Notes {
    epochs: Epochs,
    end: u64,
    /// Where RAM starts, if the hypervisor counts from there: what the first store showed.
    base: Option<u64>,
    areas: Vec<Area>,
    /// Area by place in `areas`, and word.
    noted: Vec<(u16, u32)>,
    is_unknown: bool,
}

struct Area {
    noted: NotedArea,
    /// A bit for each word: whether it was noted in this epoch.
    words: Vec<u64>,
}

impl Area {
    fn new(noted: NotedArea) -> Self {
        let words = vec![0; noted.pages.len() * (PAGE / WORD / 64) as usize];
        Self { noted, words }
    }

    fn bytes(&self) -> u64 {
        self.noted.pages.len() as u64 * PAGE
    }

    /// The part of a store that lies in the area, as words.
    fn hit(&self, at: u64, bytes: u64) -> Option<std::ops::RangeInclusive<u64>> {
        let end = at.saturating_add(bytes).min(self.noted.start.saturating_add(self.bytes()));
        let first = at.max(self.noted.start);
        (first < end)
            .then(|| (first - self.noted.start) / WORD..=(end - 1 - self.noted.start) / WORD)
    }

    /// True if it was not noted yet.
    fn note(&mut self, word: u64) -> bool {
        let bit = 1 << (word % 64);
        let Some(bits) = self.words.get_mut((word / 64) as usize) else { return false };
        let is_new = *bits & bit == 0;
        *bits |= bit;
        is_new
    }

    fn forget(&mut self, word: u32) {
        if let Some(bits) = self.words.get_mut((word / 64) as usize) {
            *bits &= !(1 << (word % 64));
        }
    }
}

impl Notes {
    /// Begins to note.
    pub fn new(order: NoteOrder) -> Self {
        Self {
            epochs: Epochs::new(&order.key),
            end: order.end,
            base: None,
            areas: order.areas.into_iter().map(Area::new).collect(),
            noted: Vec::new(),
            is_unknown: false,
        }
    }

    /// The virtual pages, by number, that stores are looked at on.
    pub fn pages(&self) -> impl Iterator<Item = u64> + '_ {
        let pages = |area: &Area| {
            let first = area.noted.start / PAGE;
            first..first + area.noted.pages.len() as u64
        };
        self.areas.iter().flat_map(pages).chain([self.end / PAGE])
    }

    /// Whether a store is to the end word.
    pub fn is_end(&self, at: u64) -> bool {
        at.wrapping_sub(self.end) < 8
    }

    /// A store of so many bytes. `page` is the page it went to as the hypervisor counts, `None` if that is no RAM.
    pub fn store(&mut self, at: u64, bytes: u64, page: impl FnOnce() -> Option<u64>) {
        let hit = |(number, area): (usize, &Area)| Some((number, area.hit(at, bytes)?));
        let Some((number, words)) = self.areas.iter().enumerate().find_map(hit) else {
            return;
        };
        let inside = words.start() / (PAGE / WORD);
        if !self.is_there(number, inside, page()) {
            self.is_unknown = true;
        }
        words.for_each(|word| self.note(number, word));
    }

    fn is_there(&mut self, area: usize, page: u64, seen: Option<u64>) -> bool {
        let place = self.areas[area].noted.pages.get(page as usize);
        let (Some(place), Some(seen)) = (place, seen) else { return false };
        let base = seen.wrapping_sub(u64::from(place.ram));
        seen == place.physical || *self.base.get_or_insert(base) == base
    }

    fn note(&mut self, area: usize, word: u64) {
        if !self.areas[area].note(word) {
            return;
        }
        match self.noted.len() < NOTED_MAX {
            true => self.noted.push((area as u16, word as u32)),
            false => {
                self.areas[area].forget(word as u32);
                self.is_unknown = true;
            }
        }
    }

    /// The end word has this value: if it is the epoch's token, the epoch has ended.
    pub fn end(&mut self, token: u64) -> Option<Ended> {
        if token != self.epochs.token() {
            return None;
        }
        let told = self.told();
        let told = self.epochs.seal.seal(Speaker::Plugin, self.epochs.number, &told);
        let epoch = self.epochs.number as u32;
        self.epochs.number += 1;
        Some(Ended { epoch, told })
    }

    /// What was noted, and starts anew.
    fn told(&mut self) -> Vec<u8> {
        self.noted.sort_unstable();
        let mut runs: Vec<WordRun> = Vec::new();
        for &(area, word) in &self.noted {
            let area = &mut self.areas[usize::from(area)];
            area.forget(word);
            let id = area.noted.id;
            match runs.last_mut() {
                Some(run) if run.area == id && run.first + run.words == word => run.words += 1,
                _ => runs.push(WordRun { area: id, first: word, words: 1 }),
            }
        }
        self.noted.clear();
        let told = message::bytes(&Told::Words(runs));
        let fits = told.len() + crate::key::SEAL_BYTES <= Place::ANSWER_BYTES;
        match std::mem::take(&mut self.is_unknown) || !fits {
            true => message::bytes(&Told::Unknown),
            false => told,
        }
    }
}

/// What an application reads of its own stores.
pub struct Reader {
    epochs: Epochs,
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("epoch", &self.epochs.number).finish_non_exhaustive()
    }
}

impl Reader {
    pub(crate) fn new(key: &NotingKey) -> Self {
        Self { epochs: Epochs::new(key) }
    }

    /// The epoch that is going on: its number as the window has it, and the token that ends it.
    pub fn end(&self) -> (u32, u64) {
        (self.epochs.number as u32, self.epochs.token())
    }

    /// Opens what was told of that epoch, and expects the next. `None` if it is not the plugin's.
    pub fn told(&mut self, sealed: &[u8]) -> Option<Told> {
        let Epochs { seal, number } = &mut self.epochs;
        let told = seal.open(Speaker::Plugin, *number, sealed).and_then(message::parse)?;
        *number += 1;
        Some(told)
    }
}

impl SealKey {
    /// The key of the noting that this request began.
    pub(crate) fn noting(&self, sequence: u64) -> NotingKey {
        NotingKey(self.derive(sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const END: u64 = 0x9_0000_0018;

    fn order(starts: &[(u64, u32)]) -> NoteOrder {
        let area = |(id, &(start, pages)): (u16, &(u64, u32))| NotedArea {
            id: AreaId(id),
            start,
            pages: (0..pages)
                .map(|page| PagePlace { ram: 100 + page, physical: 500 + u64::from(page) })
                .collect(),
        };
        let areas = (0..).zip(starts).map(area).collect();
        NoteOrder { slot: 0, key: NotingKey([7; 16]), end: END, areas }
    }

    fn both(starts: &[(u64, u32)]) -> (Notes, Reader) {
        let order = order(starts);
        (Notes::new(order.clone()), Reader::new(&order.key))
    }

    fn commit(notes: &mut Notes, reader: &mut Reader) -> Told {
        let (epoch, token) = reader.end();
        let ended = notes.end(token).unwrap();
        assert_eq!(ended.epoch, epoch);
        reader.told(&ended.told).unwrap()
    }

    fn run(area: u16, first: u32, words: u32) -> WordRun {
        WordRun { area: AreaId(area), first, words }
    }

    #[test]
    fn words_are_told_once_and_in_order() {
        let (mut notes, mut reader) = both(&[(0x10000, 2), (0x40000, 1)]);
        let at = |page: u64| move || Some(1000 + 100 + page);
        notes.store(0x40008, 4, at(0));
        notes.store(0x1100c, 8, at(1));
        notes.store(0x10000, 1, at(0));
        notes.store(0x10001, 1, at(0));
        notes.store(0xfff8, 8, || unreachable!("beside the area"));
        notes.store(0x12000, 8, || unreachable!("behind it"));
        let told = commit(&mut notes, &mut reader);
        assert_eq!(told, Told::Words(vec![run(0, 0, 1), run(0, 513, 2), run(1, 1, 1)]));
        notes.store(0x10000, 1, at(0));
        assert_eq!(commit(&mut notes, &mut reader), Told::Words(vec![run(0, 0, 1)]));
        assert_eq!(commit(&mut notes, &mut reader), Told::Words(vec![]));
    }

    #[test]
    fn stores_reach_into_an_area_and_out_of_it() {
        let (mut notes, mut reader) = both(&[(0x10000, 1)]);
        notes.store(0xfff0, 32, || Some(500));
        notes.store(0x10ff8, 16, || Some(500));
        let told = commit(&mut notes, &mut reader);
        assert_eq!(told, Told::Words(vec![run(0, 0, 2), run(0, 511, 1)]));
    }

    #[test]
    fn a_page_that_is_elsewhere_makes_the_epoch_unknown() {
        for start in [500, 33] {
            let (mut notes, mut reader) = both(&[(0x10000, 2)]);
            let others = if start == 500 { &[900, 902][..] } else { &[35] };
            notes.store(0x10000, 8, || Some(start));
            assert_eq!(commit(&mut notes, &mut reader), Told::Words(vec![run(0, 0, 1)]));
            others.iter().for_each(|&other| notes.store(0x11000, 8, || Some(other)));
            assert_eq!(commit(&mut notes, &mut reader), Told::Unknown);
            notes.store(0x10000, 8, || None);
            assert_eq!(commit(&mut notes, &mut reader), Told::Unknown, "no RAM");
            notes.store(0x11000, 8, || Some(start + 1));
            assert_eq!(commit(&mut notes, &mut reader), Told::Words(vec![run(0, 512, 1)]));
        }
    }

    #[test]
    fn an_epoch_ends_by_its_token_and_is_told_once() {
        let (mut notes, mut reader) = both(&[(0x10000, 1)]);
        assert!(notes.is_end(END) && notes.is_end(END + 4) && !notes.is_end(END + 8));
        assert!(!notes.is_end(END - 1));
        let (_, token) = reader.end();
        assert_eq!((notes.end(token ^ 1), notes.end(0)), (None, None));
        let first = notes.end(token).unwrap();
        assert_eq!(notes.end(token), None, "it has ended");
        assert!(reader.told(&first.told[1..]).is_none());
        assert!(reader.told(&first.told).is_some());
        assert!(reader.told(&first.told).is_none(), "an old one is no answer");
    }

    #[test]
    fn too_much_is_unknown_and_the_next_epoch_is_told() {
        let (mut notes, mut reader) = both(&[(0x10000, 200)]);
        let store = |notes: &mut Notes, at: u64| {
            notes.store(0x10000 + at, 8, || Some(500 + at / PAGE));
        };
        (0..200 * PAGE).step_by(8).for_each(|at| store(&mut notes, at));
        assert_eq!(commit(&mut notes, &mut reader), Told::Unknown);
        (0..150 * PAGE).step_by(64).for_each(|at| store(&mut notes, at));
        assert_eq!(commit(&mut notes, &mut reader), Told::Unknown, "as it does not fit");
        (0..16 * PAGE).step_by(8).for_each(|at| store(&mut notes, at));
        assert_eq!(commit(&mut notes, &mut reader), Told::Words(vec![run(0, 0, 16 * 512)]));
    }

    proptest! {
        #[test]
        fn every_byte_that_is_written_is_told(
            stores in prop::collection::vec((0xf000_u64..0x15000, 1_u64..=64), 0..200),
            every in 1_usize..20,
        ) {
            let areas = [(0x10000_u64, 2), (0x13000, 1)];
            let (mut notes, mut reader) = both(&areas);
            let page = |at: u64, bytes: u64| areas.iter().find_map(|&(start, pages)| {
                let (first, end) = (at.max(start), start + u64::from(pages) * PAGE);
                (first < end.min(at + bytes)).then(|| 100 + (first - start) / PAGE)
            });
            for epoch in stores.chunks(every) {
                let mut written = BTreeSet::new();
                for &(at, bytes) in epoch {
                    notes.store(at, bytes, || page(at, bytes));
                    let inside = (at..at + bytes).filter(|&byte| page(byte, 1).is_some());
                    written.extend(inside.map(|byte| byte / WORD));
                }
                let Told::Words(runs) = commit(&mut notes, &mut reader) else {
                    return Err(TestCaseError::fail("unknown"));
                };
                let words = |run: &WordRun| {
                    let start = areas[usize::from(run.area.0)].0 / WORD + u64::from(run.first);
                    start..start + u64::from(run.words)
                };
                let told: BTreeSet<u64> = runs.iter().flat_map(words).collect();
                prop_assert_eq!(told, written);
            }
        }
    }
}
