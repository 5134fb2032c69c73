//! Lookup of a program's pages, one by one.
//!
//! A walk visits everything; this module looks up a few addresses, and reports why a program may
//! not write to one of them. The rule is the processor's: programs may write to a page if every
//! entry on the path to it allows that (Intel SDM, volume 3, section 4.6).

use firn_types::{GuestPhys, Page};
use thiserror::Error;

use super::entry::{ENTRIES, PageTable, PageTableEntry};
use super::{GuestPhysRead, VirtPage};

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
        let (found, is_user, is_writable) = self.find_page(page)?;
        match (is_user, is_writable) {
            (false, _) => Err(PageAccessError::Kernel),
            (true, false) => Err(PageAccessError::ReadOnly),
            (true, true) => Ok(found),
        }
    }

    fn find_page(&mut self, page: VirtPage) -> Result<(Page, bool, bool), PageAccessError> {
        let (mut table, mut is_user, mut is_writable) = (self.root, true, true);
        for level in (1..=self.levels).rev() {
            let entry = self.read_entry(level, table, page)?;
            if !entry.is_present() {
                return Err(PageAccessError::Unmapped);
            }
            let flags = entry.flags();
            is_user &= flags.user;
            is_writable &= flags.writable;
            if entry.is_page(level) {
                let within = page.address() & ((1 << PageTableEntry::address_shift(level)) - 1);
                let gpa = GuestPhys(entry.page_address(level).0 + within);
                let found = self.memory.region_map().page_at(gpa).ok_or(PageAccessError::NotRam)?;
                return Ok((found, is_user, is_writable));
            }
            table = entry.table_address();
        }
        Err(PageAccessError::Unmapped)
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
