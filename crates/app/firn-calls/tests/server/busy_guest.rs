//! A guest whose kernel, and other programs, run while the host looks.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use firn_calls::{
    CallRefusal, GuestAccess, Nonce, PartMapping, PartNumber, PartTranslation, PluginOrder, Proof,
};
use firn_types::{GuestPhys, Page};

use super::OWN;
use super::guest::{Guest, PAGE};

pub const PART_BYTES: u64 = PartNumber::PAGES * PAGE;

/// First page, and count of pages, of the areas: two in one part, and one in two.
pub const AREAS: [(u64, u32); 3] = [(0x400, 4), (0x5f0, 3), (0x7fd, 6)];

/// A generator of numbers from a seed.
pub struct Dice(u64);

impl Dice {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % end
    }
}

/// A guest whose kernel, and other programs, run while the host looks. Physical pages have
/// contents, so that what an application sees is known.
pub struct BusyGuest {
    pub guest: Guest,
    pub dice: Dice,
    /// The contents of physical pages: the number of the last write.
    contents: BTreeMap<Page, u64>,
    /// The contents of pages that are not mapped now.
    swapped: BTreeMap<u64, u64>,
    /// Physical pages without a use.
    free: Vec<Page>,
    writes: u64,
    /// Addresses of pages of the areas.
    pub pages: Vec<u64>,
    /// Addresses whose page moved, or was not mapped, since the last reply but one.
    pub moved: [BTreeSet<u64>; 2],
    /// Addresses whose physical page was written since the last reply but one.
    pub written: [BTreeSet<u64>; 2],
    /// Pages that were tables.
    free_tables: Vec<Page>,
    /// Steps before and after each access of the host.
    pub steps: u64,
    /// One of so many steps does something.
    pub one_in: u64,
    /// Saves take written pages meanwhile.
    pub with_saves: bool,
    /// The number of saves that have begun or ended.
    pub saves: u64,
}

impl BusyGuest {
    /// A guest with pages in three parts.
    pub fn new(seed: u64) -> Self {
        let mut this = Self {
            guest: Guest::new(),
            dice: Dice(seed),
            contents: BTreeMap::new(),
            swapped: BTreeMap::new(),
            free: (100..140).map(Page).collect(),
            writes: 0,
            pages: Vec::new(),
            moved: Default::default(),
            written: Default::default(),
            free_tables: Vec::new(),
            steps: 0,
            one_in: 1 + seed % 20,
            with_saves: false,
            saves: 0,
        };
        for (first, pages) in AREAS {
            for page in first..first + u64::from(pages) {
                let physical = Page(10 + this.pages.len() as u32);
                this.guest.place(OWN, page * PAGE, Ok(physical));
                this.pages.push(page * PAGE);
            }
        }
        this
    }

    /// The contents of a page, as the application sees them.
    fn contents_at(&self, address: u64) -> u64 {
        match self.guest.physical(OWN, address) {
            Some(physical) => self.contents.get(&physical).copied().unwrap_or_default(),
            None => self.swapped.get(&address).copied().unwrap_or_default(),
        }
    }

    pub fn all_contents(&self) -> Vec<u64> {
        self.pages.iter().map(|&address| self.contents_at(address)).collect()
    }

    fn write_physical(&mut self, page: Page, contents: u64) {
        self.guest.written.insert(page);
        self.contents.insert(page, contents);
    }

    fn draw_free(&mut self) -> Page {
        let at = self.dice.below(self.free.len() as u64) as usize;
        self.free.swap_remove(at)
    }

    fn draw_page(&mut self) -> u64 {
        let at = self.dice.below(self.pages.len() as u64) as usize;
        self.pages[at]
    }

    /// The application writes.
    pub fn write_page(&mut self) {
        let address = self.draw_page();
        self.swap_in(address);
        if let Some(physical) = self.guest.physical(OWN, address) {
            self.writes += 1;
            self.write_physical(physical, self.writes);
            self.written[1].insert(address);
        }
        if self.dice.below(2) == 0 {
            self.guest.touch_table(OWN, address);
        }
    }

    pub fn swap_in(&mut self, address: u64) {
        let Some(contents) = self.swapped.remove(&address) else { return };
        let now = self.draw_free();
        // A page that still has the contents is used again as it is.
        if self.contents.get(&now) != Some(&contents) {
            self.write_physical(now, contents);
        }
        self.guest.place(OWN, address, Ok(now));
        self.moved[1].insert(address);
    }

    fn move_page(&mut self, address: u64) {
        let Some(before) = self.guest.physical(OWN, address) else { return };
        let (now, contents) = (self.draw_free(), self.contents_at(address));
        if self.contents.get(&now).copied().unwrap_or_default() != contents {
            self.write_physical(now, contents);
        }
        self.guest.place(OWN, address, Ok(now));
        self.free.push(before);
        self.moved[1].insert(address);
    }

    /// The kernel gives a part another table: a new page, or one that was a table before.
    fn change_table(&mut self, part: PartNumber) {
        let before = self.guest.table(OWN, part);
        match self.dice.below(1 + self.free_tables.len() as u64) {
            0 => self.guest.replace_table(OWN, part),
            at => {
                let table = self.free_tables.swap_remove(at as usize - 1);
                self.guest.set_table(OWN, part, table);
            }
        }
        self.free_tables.extend(before);
    }

    /// The kernel moves all pages of a part into a large page.
    fn collapse_part(&mut self, part: PartNumber) {
        let in_part = |page: &u64| PartNumber(page / PART_BYTES) == part;
        for address in self.pages.clone().into_iter().filter(in_part) {
            self.swap_in(address);
            self.move_page(address);
        }
        self.free_tables.extend(self.guest.table(OWN, part));
        self.guest.remove_table(OWN, part);
    }

    /// A save takes the written pages, and ends, or begins.
    fn save(&mut self) {
        self.saves += 1;
        self.guest.written.clear();
        self.guest.era = (self.dice.below(3) > 0).then_some(1 + self.saves);
    }

    /// The kernel, or another program, does something. What the application sees stays the same.
    pub fn disturb(&mut self) {
        let address = self.draw_page();
        let part = PartNumber(address / PART_BYTES);
        match self.dice.below(12) {
            0 | 1 => self.move_page(address),
            2 => {
                if let Some(before) = self.guest.physical(OWN, address) {
                    self.swapped.insert(address, self.contents_at(address));
                    self.guest.place(OWN, address, Err(CallRefusal::Unmapped(address)));
                    self.free.push(before);
                    self.moved[1].insert(address);
                }
            }
            3 => self.swap_in(address),
            4 => self.guest.touch_table(OWN, address),
            5 | 6 => self.change_table(part),
            7 => self.collapse_part(part),
            // Another program uses a page that was a table.
            8 => self.guest.written.extend(self.free_tables.first()),
            9 if self.with_saves && self.dice.below(8) == 0 => self.save(),
            // Another program writes to a page that it was given.
            _ => {
                let other = self.draw_free();
                self.writes += 1;
                self.write_physical(other, self.writes);
                self.free.push(other);
            }
        }
    }

    pub fn disturb_some(&mut self) {
        for _ in 0..self.steps {
            if self.dice.below(self.one_in) == 0 {
                self.disturb();
            }
        }
    }
}

impl GuestAccess for BusyGuest {
    fn random_number(&mut self) -> Nonce {
        self.guest.random_number()
    }

    fn find_spaces(&mut self, at: u64, proof: &Proof) -> Vec<GuestPhys> {
        self.guest.find_spaces(at, proof)
    }

    fn has_proof(&mut self, space: GuestPhys, at: u64, proof: &Proof) -> bool {
        self.guest.has_proof(space, at, proof)
    }

    fn find_mappings(&mut self, space: GuestPhys, parts: &[PartNumber]) -> Vec<PartMapping> {
        self.disturb_some();
        let mappings = parts.iter().map(|part| {
            let mapping = self.guest.find_mappings(space, &[*part]);
            self.disturb_some();
            mapping[0]
        });
        mappings.collect()
    }

    fn translate_part(&mut self, space: GuestPhys, part: PartNumber) -> PartTranslation {
        let translation = self.guest.translate_part(space, part);
        self.disturb_some();
        translation
    }

    fn take_written(&mut self, pages: &[Range<Page>]) -> Option<(u64, Vec<Page>)> {
        // The host scans one range after the other: tables first, or last. No save begins meanwhile.
        let with_saves = std::mem::take(&mut self.with_saves);
        let mut all = Vec::new();
        let mut order: Vec<_> = pages.iter().collect();
        if self.dice.below(2) == 0 {
            order.reverse();
        }
        for range in order {
            let taken = self.guest.take_written(std::slice::from_ref(range));
            all.extend(taken.into_iter().flat_map(|(_, pages)| pages));
            self.disturb_some();
        }
        self.with_saves = with_saves;
        all.sort_unstable();
        Some((self.guest.era?, all))
    }

    fn order_plugin(&mut self, order: &PluginOrder) -> bool {
        self.guest.order_plugin(order)
    }
}
