//! A guest as tests know it: all of it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use firn_calls::{
    CallRefusal, GuestAccess, Nonce, PartMapping, PartNumber, PartTranslation, PluginOrder, Proof,
    RecordedStores,
};
use firn_types::{GuestPhys, Page};

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Pages from here on are tables.
const FIRST_TABLE: u32 = 1 << 24;

/// A guest of a few address spaces, and a host that follows writes as the kernel does: it reports
/// each write once.
#[derive(Default)]
pub struct Guest {
    pub proofs: BTreeMap<(GuestPhys, u64), Proof>,
    maps: BTreeMap<(GuestPhys, u64), Result<Page, CallRefusal>>,
    /// The table of each part, and the rights that the tables above it give.
    tables: BTreeMap<(GuestPhys, PartNumber), PartMapping>,
    /// The page of the table that was made last.
    last_table: u32,
    pub written: BTreeSet<Page>,
    pub era: Option<u64>,
    pub numbers: u8,
    pub searches: usize,
    /// The count of parts that were translated.
    pub translated: usize,
    /// The recorded stores of each slot, if this hypervisor records stores.
    pub recorded: Option<BTreeMap<u32, RecordedStores>>,
}

impl Guest {
    pub fn new() -> Self {
        Self { era: Some(1), last_table: FIRST_TABLE, ..Self::default() }
    }

    /// Pages of an address space at `start`, in RAM from `first` on.
    pub fn map(&mut self, space: GuestPhys, start: u64, first: u32, pages: u32) {
        for n in 0..pages {
            self.place(space, start + u64::from(n) * PAGE, Ok(Page(first + n)));
        }
    }

    /// The guest's kernel maps a page elsewhere, or not at all: it writes the table of the part. A
    /// large page is split first.
    pub fn place(&mut self, space: GuestPhys, address: u64, now: Result<Page, CallRefusal>) {
        self.maps.insert((space, address), now);
        let part = PartNumber(address / PAGE / PartNumber::PAGES);
        if self.table(space, part).is_none() {
            self.replace_table(space, part);
        }
        self.written.extend(self.table(space, part));
    }

    /// The page with the table of a part, if there is one.
    pub fn table(&self, space: GuestPhys, part: PartNumber) -> Option<Page> {
        self.tables.get(&(space, part))?.table
    }

    /// The guest's kernel copies the table of a part to another page, and changes the entry above.
    pub fn replace_table(&mut self, space: GuestPhys, part: PartNumber) {
        self.last_table += 1;
        self.set_table(space, part, Page(self.last_table));
    }

    /// As [`Self::replace_table`], with a page that may have been a table before.
    pub fn set_table(&mut self, space: GuestPhys, part: PartNumber, table: Page) {
        self.written.insert(table);
        self.tables.insert((space, part), PartMapping { table: Some(table), entry: 7 });
    }

    /// The guest's kernel maps a part by one large page.
    pub fn remove_table(&mut self, space: GuestPhys, part: PartNumber) {
        self.last_table += 1;
        let mapping = PartMapping { table: None, entry: u64::from(self.last_table) };
        self.tables.insert((space, part), mapping);
    }

    /// The processor sets bits in the table of a page: it is written, and maps what it has mapped.
    pub fn touch_table(&mut self, space: GuestPhys, address: u64) {
        let part = PartNumber(address / PAGE / PartNumber::PAGES);
        let mapping = self.tables.get(&(space, part));
        self.written.extend(mapping.and_then(|mapping| mapping.table));
    }

    /// The physical page of an address, if it is mapped.
    pub fn physical(&self, space: GuestPhys, address: u64) -> Option<Page> {
        self.maps.get(&(space, address)).and_then(|page| page.ok())
    }

    /// A program writes a page.
    pub fn write(&mut self, space: GuestPhys, address: u64) {
        self.written.extend(self.physical(space, address));
    }
}

impl GuestAccess for Guest {
    fn random_number(&mut self) -> Nonce {
        self.numbers += 1;
        [self.numbers; 32]
    }

    fn find_spaces(&mut self, at: u64, proof: &Proof) -> Vec<GuestPhys> {
        self.searches += 1;
        let is_there = |it: &(&(GuestPhys, u64), &Proof)| it.0.1 == at && it.1 == proof;
        self.proofs.iter().filter(is_there).map(|(key, _)| key.0).collect()
    }

    fn has_proof(&mut self, space: GuestPhys, at: u64, proof: &Proof) -> bool {
        self.proofs.get(&(space, at)) == Some(proof)
    }

    fn find_mappings(&mut self, space: GuestPhys, parts: &[PartNumber]) -> Vec<PartMapping> {
        let none = PartMapping { table: None, entry: 0 };
        parts.iter().map(|part| self.tables.get(&(space, *part)).copied().unwrap_or(none)).collect()
    }

    fn translate_part(&mut self, space: GuestPhys, part: PartNumber) -> PartTranslation {
        self.translated += 1;
        let at = |page: u64| {
            let address = (part.first_page() + page) * PAGE;
            self.maps.get(&(space, address)).copied().unwrap_or(Err(CallRefusal::Unmapped(address)))
        };
        let pages = (0..PartNumber::PAGES).map(at).collect();
        PartTranslation { mapping: self.find_mappings(space, &[part])[0], pages }
    }

    fn take_written(&mut self, pages: &[Range<Page>]) -> Option<(u64, Vec<Page>)> {
        assert!(pages.is_sorted_by(|one, next| one.start < one.end && one.end < next.start));
        let era = self.era?;
        // Pages in between are reported too, and not again: a host scans many at once.
        let mut told = Vec::new();
        for near in pages.chunk_by(|one, next| next.start.0 - one.end.0 < 64) {
            let (Some(first), Some(last)) = (near.first(), near.last()) else { continue };
            told.extend(self.written.range(first.start..last.end).copied());
        }
        for page in &told {
            self.written.remove(page);
        }
        Some((era, told))
    }

    fn order_plugin(&mut self, order: &PluginOrder) -> bool {
        let Some(recorded) = &mut self.recorded else { return false };
        match order.clone() {
            PluginOrder::RecordStores(order) => {
                recorded.insert(order.slot, RecordedStores::new(order))
            }
            PluginOrder::End { slot } => recorded.remove(&slot),
        };
        true
    }
}
