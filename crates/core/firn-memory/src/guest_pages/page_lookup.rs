//! Lookup of a program's pages, one by one.
//!
//! A walk visits everything; this module looks up a few addresses, and reports why a program may
//! not write to one of them. The rule is the processor's: programs may write to a page if every
//! entry on the path to it allows that (Intel SDM, volume 3, section 4.6).
//!
//! A *part* is 2 MiB of an address space: what one table of level 1 maps. The pages of a part
//! change only if its path changes, or the page of RAM that holds its table is written. So a caller
//! that remembers the translation of a part need not repeat it ([`PageLookup::part_path`]).
//!
//! ```text
//!   root, level 3, level 2 (and 5)    the path of a part: the last entry, and the rights of all
//!   level 1                           the pages of the part, unless the path ends at a large page
//! ```

use firn_types::{GuestPhys, Page};
use thiserror::Error;

use super::entry::{ENTRIES, PageTable, PageTableEntry};
use super::{GuestPhysRead, VirtPage};

/// The pages of a part.
pub const PART_PAGES: u64 = ENTRIES as u64;

/// Why a program may not write to a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum PageAccessError {
    /// Nothing is mapped there.
    #[error("nothing is mapped there")]
    Unmapped,
    /// It belongs to the kernel.
    #[error("it belongs to the kernel")]
    Kernel,
    /// It may only be read. If the guest's kernel copies the page on a write, that is so only until
    /// then.
    #[error("it may only be read")]
    ReadOnly,
    /// It is not RAM.
    #[error("it is no RAM")]
    NotRam,
}

/// The path to the pages of a part, without the bits that the processor sets while it runs. Two
/// equal paths lead to the same table, with the same rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartPath {
    entry: PageTableEntry,
    /// The level of the entry: 2, or 3 if it maps a page of 1 GiB.
    level: u8,
    is_user: bool,
    is_writable: bool,
}

impl PartPath {
    /// Whether the entry maps one large page, and no table.
    fn is_large(self) -> bool {
        self.entry.is_page(self.level)
    }

    fn check_rights(self, found: Page) -> Result<Page, PageAccessError> {
        match (self.is_user, self.is_writable) {
            (false, _) => Err(PageAccessError::Kernel),
            (true, false) => Err(PageAccessError::ReadOnly),
            (true, true) => Ok(found),
        }
    }

    /// The path continued by an entry of its table.
    fn extend_with(self, entry: PageTableEntry) -> Self {
        let flags = entry.flags();
        let (is_user, is_writable) =
            (self.is_user && flags.user, self.is_writable && flags.writable);
        Self { entry, level: 1, is_user, is_writable }
    }

    /// The RAM page of a page to which the path leads.
    fn find_ram<M: GuestPhysRead>(
        self,
        memory: &M,
        page: VirtPage,
    ) -> Result<Page, PageAccessError> {
        let within = page.address() & ((1 << PageTableEntry::address_shift(self.level)) - 1);
        let gpa = GuestPhys(self.entry.page_address(self.level).0 + within);
        let found = memory.region_map().page_at(gpa).ok_or(PageAccessError::NotRam)?;
        self.check_rights(found)
    }

    /// The page of RAM with the table of level 1, if there is one.
    pub fn table_page<M: GuestPhysRead>(self, memory: &M) -> Option<Page> {
        (!self.is_large()).then(|| memory.region_map().page_at(self.entry.table_address()))?
    }

    /// A number that is equal for equal paths of one part only.
    pub fn number(self) -> u64 {
        // Three bits that the processor ignores.
        let rights = u64::from(self.is_user) << 9 | u64::from(self.is_writable) << 10;
        self.entry.stable_bits() & !(7 << 9) | rights | u64::from(self.level == 3) << 11
    }
}

/// Looks up pages of one address space. Each table is read once and cached, so changes that the
/// guest makes in between may be missed: make a new lookup for each use.
pub struct PageLookup<'m, M> {
    memory: &'m M,
    root: GuestPhys,
    levels: u8,
    /// The table that was read last, for each level.
    tables: Vec<Option<(GuestPhys, Box<PageTable>)>>,
}

impl<'m, M: GuestPhysRead> PageLookup<'m, M> {
    /// A lookup in the address space with this root. `levels` as for a walk.
    pub fn new(memory: &'m M, root: GuestPhys, levels: u8) -> Self {
        let levels = if levels == 5 { 5 } else { 4 };
        let tables = (0..=levels).map(|_| None).collect();
        Self { memory, root: PageTableEntry(root.0).table_address(), levels, tables }
    }

    /// The RAM page of a guest-virtual page, if programs may write to it.
    ///
    /// # Errors
    /// The reason why they may not.
    pub fn writable_page(&mut self, page: VirtPage) -> Result<Page, PageAccessError> {
        let path = self.part_path(page.0 / PART_PAGES)?;
        self.page_on_path(path, page)
    }

    /// The path to the pages of a part. A part has the number of its first page, divided by
    /// [`PART_PAGES`].
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn part_path(&mut self, part: u64) -> Result<PartPath, PageAccessError> {
        let page = VirtPage(part.wrapping_mul(PART_PAGES));
        let (mut table, mut is_user, mut is_writable) = (self.root, true, true);
        for level in (2..=self.levels).rev() {
            let entry = self.read_entry(level, table, page)?;
            if !entry.is_present() {
                return Err(PageAccessError::Unmapped);
            }
            let flags = entry.flags();
            is_user &= flags.user;
            is_writable &= flags.writable;
            if level == 2 || entry.is_page(level) {
                let entry = PageTableEntry(entry.stable_bits());
                return Ok(PartPath { entry, level, is_user, is_writable });
            }
            table = entry.table_address();
        }
        Err(PageAccessError::Unmapped)
    }

    /// The RAM pages of a part to which a path leads, if programs may write to them: one result for
    /// each page.
    pub fn part_pages(&mut self, part: u64, path: PartPath) -> Vec<Result<Page, PageAccessError>> {
        let first = part.wrapping_mul(PART_PAGES);
        (first..first.wrapping_add(PART_PAGES))
            .map(|page| self.page_on_path(path, VirtPage(page)))
            .collect()
    }

    fn page_on_path(&mut self, path: PartPath, page: VirtPage) -> Result<Page, PageAccessError> {
        if path.is_large() {
            return path.find_ram(self.memory, page);
        }
        let entry = self.read_entry(1, path.entry.table_address(), page)?;
        match entry.is_present() {
            true => path.extend_with(entry).find_ram(self.memory, page),
            false => Err(PageAccessError::Unmapped),
        }
    }

    fn read_entry(
        &mut self,
        level: u8,
        table: GuestPhys,
        page: VirtPage,
    ) -> Result<PageTableEntry, PageAccessError> {
        let index = (page.address() >> PageTableEntry::address_shift(level)) as usize % ENTRIES;
        let kept = &mut self.tables[usize::from(level)];
        if let Some((_, kept)) = kept.as_ref().filter(|(gpa, _)| *gpa == table) {
            return Ok(kept.entry(index));
        }
        let at = self.memory.region_map().page_at(table).ok_or(PageAccessError::NotRam)?;
        let mut read = Box::<PageTable>::default();
        if !self.memory.read_pages(at, read.as_mut_bytes()) {
            return Err(PageAccessError::Unmapped);
        }
        let entry = read.entry(index);
        *kept = Some((table, read));
        Ok(entry)
    }
}
