//! Lookup of a program's pages, one by one.
//!
//! A walk visits everything; this module looks up a few addresses, and reports why a program may
//! not write to one of them. The rule is the processor's: programs may write to a page if every
//! entry on the path to it allows that (Intel SDM, volume 3, section 4.6).

use firn_types::{GuestPhys, Page};
use thiserror::Error;

use super::entry::{ENTRIES, Entry, Table};
use super::{GuestPhysRead, VirtPage};

/// Why a program may not write to a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum NotOwn {
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
pub struct Lookup<'m, M> {
    memory: &'m M,
    root: GuestPhys,
    levels: u8,
    /// The table that was read last, for each level.
    tables: Vec<Option<(GuestPhys, Box<Table>)>>,
}

impl<'m, M: GuestPhysRead> Lookup<'m, M> {
    /// A lookup in the address space with this root. `levels` as for a walk.
    pub fn new(memory: &'m M, root: GuestPhys, levels: u8) -> Self {
        let levels = if levels == 5 { 5 } else { 4 };
        let tables = (0..=levels).map(|_| None).collect();
        Self { memory, root: Entry(root.0).table(), levels, tables }
    }

    /// The RAM page of a guest-virtual page, if programs may write to it.
    ///
    /// # Errors
    /// The reason why they may not.
    pub fn own(&mut self, page: VirtPage) -> Result<Page, NotOwn> {
        let (found, is_user, is_writable) = self.find(page)?;
        match (is_user, is_writable) {
            (false, _) => Err(NotOwn::Kernel),
            (true, false) => Err(NotOwn::ReadOnly),
            (true, true) => Ok(found),
        }
    }

    fn find(&mut self, page: VirtPage) -> Result<(Page, bool, bool), NotOwn> {
        let (mut table, mut is_user, mut is_writable) = (self.root, true, true);
        for level in (1..=self.levels).rev() {
            let entry = self.entry(level, table, page)?;
            if !entry.is_present() {
                return Err(NotOwn::Unmapped);
            }
            let flags = entry.flags();
            is_user &= flags.user;
            is_writable &= flags.writable;
            if entry.is_page(level) {
                let within = page.address() & ((1 << Entry::shift(level)) - 1);
                let gpa = GuestPhys(entry.page(level).0 + within);
                let found = self.memory.map().page_at(gpa).ok_or(NotOwn::NotRam)?;
                return Ok((found, is_user, is_writable));
            }
            table = entry.table();
        }
        Err(NotOwn::Unmapped)
    }

    fn entry(&mut self, level: u8, table: GuestPhys, page: VirtPage) -> Result<Entry, NotOwn> {
        let index = (page.address() >> Entry::shift(level)) as usize % ENTRIES;
        let kept = &mut self.tables[usize::from(level)];
        if let Some((_, kept)) = kept.as_ref().filter(|(gpa, _)| *gpa == table) {
            return Ok(kept.entry(index));
        }
        let at = self.memory.map().page_at(table).ok_or(NotOwn::NotRam)?;
        let mut read = Box::<Table>::default();
        if !self.memory.read(at, read.as_mut_bytes()) {
            return Err(NotOwn::Unmapped);
        }
        let entry = read.entry(index);
        *kept = Some((table, read));
        Ok(entry)
    }
}
