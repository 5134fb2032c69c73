//! One page-table entry.
//!
//! ```text
//!   bit  0 present   1 writable   2 user   5 accessed   6 dirty   7 page (levels 2, 3)   8 global   63 no-execute
//!   bits 12..52      address of a table or of a 4 KiB page
//!   bits 21..52      address of a 2 MiB page (level 2); bits 30..52 of a 1 GiB page (level 3)
//! ```

use firn_types::{GuestPhys, PAGE_SIZE};
use zerocopy::IntoBytes;

/// Entries in a table.
pub(super) const ENTRIES: usize = 512;

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const PAGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// How a guest maps a page, from its last page-table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFlags {
    /// It may be written.
    pub writable: bool,
    /// Programs may use it.
    pub user: bool,
    /// It may be executed.
    pub executable: bool,
    /// It was used since the guest last cleared this bit.
    pub accessed: bool,
    /// It was written since the guest last cleared this bit.
    pub dirty: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageTableEntry(pub(super) u64);

impl PageTableEntry {
    pub(super) fn is_present(self) -> bool {
        self.0 & PRESENT != 0
    }

    /// Whether it maps a page at this level, and not a table.
    pub(super) fn is_page(self, level: u8) -> bool {
        level == 1 || (level <= 3 && self.0 & PAGE != 0)
    }

    pub(super) fn table_address(self) -> GuestPhys {
        GuestPhys(self.0 & ADDRESS)
    }

    /// The page it maps at this level. In entries of large pages the low address bits have other
    /// meanings.
    pub(super) fn page_address(self, level: u8) -> GuestPhys {
        GuestPhys(self.0 & ADDRESS & !((1 << Self::address_shift(level)) - 1))
    }

    /// The lowest address bit that an entry of this level determines.
    pub(super) fn address_shift(level: u8) -> u32 {
        12 + 9 * (u32::from(level) - 1)
    }

    /// The entry without the bits that the processor sets while it runs.
    pub(super) fn stable_bits(self) -> u64 {
        self.0 & !(ACCESSED | DIRTY)
    }

    pub(super) fn flags(self) -> PageFlags {
        let has = |bit: u64| self.0 & bit != 0;
        PageFlags {
            writable: has(WRITABLE),
            user: has(USER),
            executable: !has(NO_EXECUTE),
            accessed: has(ACCESSED),
            dirty: has(DIRTY),
        }
    }
}

/// The bytes of one table.
pub(super) struct PageTable([u64; ENTRIES]);

const _: () = assert!(size_of::<PageTable>() == PAGE_SIZE);

impl Default for PageTable {
    fn default() -> Self {
        Self([0; ENTRIES])
    }
}

impl PageTable {
    pub(super) fn as_mut_bytes(&mut self) -> &mut [u8] {
        self.0.as_mut_bytes()
    }

    pub(super) fn entry(&self, index: usize) -> PageTableEntry {
        PageTableEntry(self.0[index])
    }
}
