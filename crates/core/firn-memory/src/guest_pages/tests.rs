//! Walks over page tables that the tests make.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};

use firn_types::GuestSpan;
use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
/// Present, writable, user, accessed, dirty.
const DATA: u64 = 0x67;
const LARGE: u64 = 1 << 7;

/// A guest with 8 MiB at 0 and 8 MiB at 4 GiB.
struct Guest {
    map: RegionMap,
    pages: HashMap<u32, [u64; 512]>,
    next_table: u32,
    reads: Cell<usize>,
}

impl Guest {
    fn new() -> Self {
        let low = GuestSpan { gpa: GuestPhys(0), page: Page(0), pages: 2048 };
        let high = GuestSpan { gpa: GuestPhys(4 << 30), page: Page(2048), pages: 2048 };
        let map = RegionMap::lay_out([("ram", 16 * MIB)]).unwrap();
        let map = map.with_spans(vec![low, high]).unwrap();
        Self { map, pages: HashMap::new(), next_table: 0, reads: Cell::new(0) }
    }

    fn new_table(&mut self) -> GuestPhys {
        let page = self.next_table;
        self.next_table += 1;
        self.pages.insert(page, [0; 512]);
        GuestPhys(u64::from(page) * 4096)
    }

    fn entry(&mut self, table: GuestPhys, index: usize) -> &mut u64 {
        &mut self.pages.get_mut(&((table.0 / 4096) as u32)).unwrap()[index]
    }

    /// Maps a page of the size of `level` (1, 2, 3) at a canonical address.
    fn map_page(&mut self, root: GuestPhys, levels: u8, address: u64, to: u64, level: u8) {
        let mut table = root;
        for above in (level + 1..=levels).rev() {
            let index = index_at(address, above);
            if *self.entry(table, index) == 0 {
                let new = self.new_table();
                *self.entry(table, index) = new.0 | DATA;
            }
            table = GuestPhys(*self.entry(table, index) & !0xfff);
        }
        let size = if level > 1 { LARGE } else { 0 };
        *self.entry(table, index_at(address, level)) = to | DATA | size;
    }
}

fn index_at(address: u64, level: u8) -> usize {
    (address >> PageTableEntry::address_shift(level)) as usize % 512
}

impl GuestPhysRead for Guest {
    fn region_map(&self) -> &RegionMap {
        &self.map
    }

    fn read_pages(&self, first: Page, out: &mut [u8]) -> bool {
        self.reads.set(self.reads.get() + 1);
        for (page, bytes) in (first.0..).zip(out.chunks_exact_mut(PAGE_SIZE)) {
            let table = self.pages.get(&page).unwrap_or(&[0; 512]);
            for (word, bytes) in table.iter().zip(bytes.chunks_exact_mut(8)) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
        }
        true
    }

    fn backed_pages(&self) -> Vec<Range<Page>> {
        let mut pages: Vec<_> = self.pages.keys().map(|&page| Page(page)..Page(page + 1)).collect();
        pages.sort_by_key(|run| run.start);
        pages
    }
}

/// The visits of a walk: address, first page, pages.
fn visited(guest: &Guest, root: GuestPhys, levels: u8) -> Vec<(u64, u32, u32)> {
    let mut seen = Vec::new();
    let end = walk_address_space(guest, root, levels, &mut |virt, page, pages, _| {
        seen.push((virt.address(), page.0, pages));
    });
    assert_eq!(end, WalkOutcome::Complete);
    seen
}

#[test]
fn pages_of_every_size_are_found_in_order() {
    for levels in [4, 5] {
        let mut guest = Guest::new();
        let root = guest.new_table();
        guest.map_page(root, levels, 0xffff_8880_0000_0000, 0, 3);
        guest.map_page(root, levels, 0x7fff_0020_0000, 2 * MIB, 2);
        guest.map_page(root, levels, 0x40_0000, 0x12_3000, 1);
        guest.map_page(root, levels, 0x40_1000, (4 << 30) + 0x1000, 1);
        let expected = [
            (0x40_0000, 0x123, 1),
            (0x40_1000, 2049, 1),
            (0x7fff_0020_0000, 512, 512),
            // Of the first GiB, 8 MiB are RAM.
            (0xffff_8880_0000_0000, 0, 2048),
        ];
        assert_eq!(visited(&guest, root, levels), expected, "{levels} levels");
    }
}

#[test]
fn a_lookup_and_a_walk_find_the_same_page() {
    for levels in [4, 5] {
        let mut guest = Guest::new();
        let root = guest.new_table();
        guest.map_page(root, levels, 0x7fff_0020_0000, 2 * MIB, 2);
        guest.map_page(root, levels, 0x40_0000, 0x12_3000, 1);
        guest.map_page(root, levels, 0x40_1000, (4 << 30) + 0x1000, 1);
        guest.map_page(root, levels, 0x40_2000, 3 << 30, 1);
        let mut lookup = PageLookup::new(&guest, GuestPhys(root.0 | 0x18), levels);
        let mut own = |address: u64| lookup.writable_page(VirtPage(address / 4096));
        assert_eq!(own(0x40_0000), Ok(Page(0x123)));
        assert_eq!(own(0x40_1000), Ok(Page(2049)));
        assert_eq!(own(0x40_2000), Err(PageAccessError::NotRam));
        assert_eq!(own(0x40_3000), Err(PageAccessError::Unmapped));
        assert_eq!(own(0x7fff_0020_3000), Ok(Page(515)));
        assert_eq!(own(0x1_0000_0000_0000), Err(PageAccessError::Unmapped));
    }
}

#[test]
fn a_part_is_looked_up_as_its_pages_are() {
    for levels in [4, 5] {
        let mut guest = Guest::new();
        let root = guest.new_table();
        guest.map_page(root, levels, 0x7fff_0020_0000, 2 * MIB, 2);
        guest.map_page(root, levels, 0x40_0000, 0x12_3000, 1);
        guest.map_page(root, levels, 0x40_1000, (4 << 30) + 0x1000, 1);
        guest.map_page(root, levels, 0x40_2000, 3 << 30, 1);
        guest.map_page(root, levels, 0x40_0000_0000, 4 << 30, 3);
        for part in [2, 0x3fff_8001, 0x20_0000, 0x20_0003, 0x20_0004, 7] {
            let mut lookup = PageLookup::new(&guest, root, levels);
            let first = part * PART_PAGES;
            let each: Vec<_> = (first..first + PART_PAGES)
                .map(|page| lookup.writable_page(VirtPage(page)))
                .collect();
            let path = lookup.part_path(part);
            let all = path.map(|path| lookup.part_pages(part, path));
            assert_eq!(all.unwrap_or_else(|why| vec![Err(why); 512]), each, "part {part:#x}");
            let table = path.ok().and_then(|path| path.table_page(&guest));
            assert_eq!(table.is_some(), part == 2);
        }
    }
}

#[test]
fn a_path_changes_with_the_table_and_the_rights_but_not_with_use() {
    const ACCESSED: u64 = 1 << 5;
    let mut guest = Guest::new();
    let root = guest.new_table();
    guest.map_page(root, 4, 0x40_0000, 0x12_3000, 1);
    let path = |guest: &Guest| PageLookup::new(guest, root, 4).part_path(2).unwrap();
    let before = path(&guest);
    for level in 2..=4u64 {
        let (table, index) = (GuestPhys((4 - level) * 4096), index_at(0x40_0000, level as u8));
        for (bit, is_same) in [(ACCESSED, true), (1 << 6, true), (1 << 1, false), (1 << 2, false)] {
            *guest.entry(table, index) ^= bit;
            let now = path(&guest);
            assert_eq!((now == before, now.number() == before.number()), (is_same, is_same));
            *guest.entry(table, index) ^= bit;
        }
    }
    let other = guest.new_table();
    *guest.entry(GuestPhys(2 * 4096), 2) = other.0 | DATA;
    assert_ne!(path(&guest).number(), before.number());
    assert_eq!(path(&guest).table_page(&guest), Some(Page(4)));
}

#[test]
fn a_write_needs_permission_at_every_level() {
    const WRITABLE: u64 = 1 << 1;
    const USER: u64 = 1 << 2;
    for (taken_away, expected) in
        [(WRITABLE, PageAccessError::ReadOnly), (USER, PageAccessError::Kernel)]
    {
        for level in 1..=4u8 {
            let mut guest = Guest::new();
            let root = guest.new_table();
            guest.map_page(root, 4, 0x40_0000, 0x12_3000, 1);
            // Tables follow one another from the root on.
            let table = GuestPhys(u64::from(4 - level) * 4096);
            *guest.entry(table, index_at(0x40_0000, level)) &= !taken_away;
            let mut lookup = PageLookup::new(&guest, root, 4);
            assert_eq!(lookup.writable_page(VirtPage(0x400)), Err(expected), "level {level}");
        }
    }
}

#[test]
fn five_levels_reach_further() {
    let mut guest = Guest::new();
    let root = guest.new_table();
    guest.map_page(root, 5, 0x00ab_cdef_1234_5000, 0x5000, 1);
    guest.map_page(root, 5, 0xff11_0000_0000_0000, 0x6000, 1);
    let expected = [(0x00ab_cdef_1234_5000, 5, 1), (0xff11_0000_0000_0000, 6, 1)];
    assert_eq!(visited(&guest, root, 5), expected);
}

#[test]
fn a_large_page_may_end_in_a_hole() {
    let mut guest = Guest::new();
    let root = guest.new_table();
    guest.map_page(root, 4, 0, 3 << 30, 3);
    guest.map_page(root, 4, 1 << 30, 4 << 30, 3);
    assert_eq!(visited(&guest, root, 4), [(1 << 30, 2048, 2048)]);
}

#[test]
fn the_flags_are_those_of_the_last_entry() {
    let mut guest = Guest::new();
    let root = guest.new_table();
    guest.map_page(root, 4, 0x1000, 0x1000 | 1 << 63, 1);
    let mut flags = None;
    walk_address_space(&guest, root, 4, &mut |_, _, _, f| flags = Some(f));
    let all =
        PageFlags { writable: true, user: true, executable: false, accessed: true, dirty: true };
    assert_eq!(flags, Some(all));
}

#[test]
fn cr3_may_carry_other_bits() {
    let mut guest = Guest::new();
    let root = guest.new_table();
    guest.map_page(root, 4, 0x1000, 0x1000, 1);
    assert_eq!(visited(&guest, GuestPhys(root.0 | 1 << 63 | 0xfff), 4), [(0x1000, 1, 1)]);
}

#[test]
fn tables_that_name_themselves_do_not_loop() {
    let mut guest = Guest::new();
    let root = guest.new_table();
    for index in 0..512 {
        *guest.entry(root, index) = root.0 | DATA;
    }
    let seen = visited(&guest, root, 4);
    // Entered once as the root, and once at each level below.
    assert_eq!(seen.len(), 512);
    assert!(guest.reads.get() <= 2 * 4);
}

#[test]
fn address_spaces_that_share_tables_are_walked_once() {
    let mut guest = Guest::new();
    let roots = [guest.new_table(), guest.new_table()];
    guest.map_page(roots[0], 4, 0xffff_8880_0000_0000, 0x9000, 1);
    let kernel = *guest.entry(roots[0], 273);
    *guest.entry(roots[1], 273) = kernel;
    guest.map_page(roots[1], 4, 0x1000, 0xa000, 1);
    let mut walker = PageTableWalker::new(&guest, 4);
    let mut seen = Vec::new();
    for root in roots {
        for half in [AddressHalf::Kernel, AddressHalf::User] {
            walker.walk_half(root, half, &mut |virt, page, _, _| {
                seen.push((virt.is_kernel(), page.0))
            });
        }
    }
    assert_eq!(seen, [(true, 9), (false, 10)]);
}

#[test]
fn a_root_that_is_not_ram_has_nothing() {
    let guest = Guest::new();
    for root in [GuestPhys(1 << 30), GuestPhys(u64::MAX), GuestPhys(0)] {
        assert_eq!(visited(&guest, root, 4), []);
    }
}

#[test]
fn other_address_spaces_are_found_by_their_kernel_half() {
    let mut guest = Guest::new();
    let tables: Vec<_> = (0..9).map(|_| guest.new_table()).collect();
    for (number, &table) in tables.iter().enumerate().take(4) {
        for index in [256, 273, 402, 508, 511] {
            *guest.entry(table, index) = (index as u64) << 12 | DATA;
        }
        *guest.entry(table, number) = 0x77_7000 | DATA;
    }
    // One has an entry of its own and an accessed bit less; one is too different; one ends alike
    // only by chance.
    *guest.entry(tables[1], 300) = 0x1234_5000 | DATA;
    *guest.entry(tables[1], 273) &= !(1 << 5);
    for index in 300..310 {
        *guest.entry(tables[3], index) = 0x1234_5000 | DATA;
    }
    *guest.entry(tables[4], 511) = 511 << 12 | DATA;
    // One is the kernel's own map of all RAM, one has no programs.
    for (table, low) in [(5, 0x3000 | (DATA & !4)), (6, 0)] {
        let kernel = guest.pages[&0];
        guest.pages.get_mut(&table).unwrap()[256..].copy_from_slice(&kernel[256..]);
        *guest.entry(tables[table as usize], 0) = low;
    }
    assert_eq!(kernel_half_roots(&guest, tables[0]), [tables[1], tables[2]]);
    assert_eq!(kernel_half_roots(&guest, tables[8]), []);
}

#[test]
fn both_page_tables_of_an_isolated_kernel_are_one_space() {
    let mut guest = Guest::new();
    let tables: Vec<_> = (0..4).map(|_| guest.new_table()).collect();
    for table in [tables[0], tables[2]] {
        for index in [256, 273, 402, 508, 511] {
            *guest.entry(table, index) = (index as u64) << 12 | DATA;
        }
        *guest.entry(table.offset_by(4096), 508) = 508 << 12 | DATA;
        *guest.entry(table, 1) = 0x77_7000 | DATA;
    }
    assert_eq!(kernel_half_roots(&guest, tables[1]), [tables[2]]);
}

/// Entries that are likely to lead to another table or page.
fn wild_entry() -> impl Strategy<Value = u64> {
    let address = prop_oneof![0u64..4096, (1u64 << 20)..(1 << 20) + 4096, any::<u64>()];
    (address, any::<u16>()).prop_map(|(page, flags)| page << 12 | u64::from(flags & 0xfff) | 1)
}

proptest! {
    #[test]
    fn the_mapped_pages_are_found_and_no_others(
        pages in prop::collection::btree_map(0u64..1 << 36, 1000u64..2048, 0..64),
        five in any::<bool>(),
    ) {
        let levels = if five { 5 } else { 4 };
        let mut guest = Guest::new();
        let root = guest.new_table();
        let canonical = |virt: u64| (((virt << 12) as i64) << 16 >> 16) as u64;
        let mapped: BTreeMap<_, _> = pages.iter().map(|(v, p)| (canonical(*v), *p as u32)).collect();
        for (&address, &page) in &mapped {
            guest.map_page(root, levels, address, u64::from(page) << 12, 1);
        }
        prop_assume!(guest.next_table < 1000);
        let expected: Vec<_> = mapped.into_iter().map(|(address, page)| (address, page, 1)).collect();
        prop_assert_eq!(visited(&guest, root, levels), expected);
    }

    #[test]
    fn garbage_ends(
        tables in prop::collection::vec(prop::collection::vec((0usize..512, wild_entry()), 0..40), 1..40),
        root in 0u64..50,
        levels in any::<u8>(),
    ) {
        let mut guest = Guest::new();
        for entries in tables {
            let table = guest.new_table();
            for (index, entry) in entries {
                *guest.entry(table, index) = entry;
            }
        }
        let mut inside = true;
        let pages = guest.map.total_pages();
        walk_address_space(&guest, GuestPhys(root << 12), levels, &mut |_, page, count, _| {
            inside &= u64::from(page.0) + u64::from(count) <= u64::from(pages);
        });
        prop_assert!(inside);
        prop_assert!(guest.reads.get() <= pages as usize / 16 + TABLES_SPARE);
        kernel_half_roots(&guest, GuestPhys(root << 12));
    }
}
