use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn range(first: u64, bytes: u64, kind: RangeKind, region: &str, offset: u64) -> FlatRange {
    FlatRange { first, last: first + bytes - 1, priority: 0, kind, region: region.into(), offset }
}

fn ram(first: u64, bytes: u64, offset: u64) -> FlatRange {
    range(first, bytes, RangeKind::Ram, "ram", offset)
}

fn view(ranges: Vec<FlatRange>) -> FlatView {
    FlatView { spaces: vec!["memory".into()], ranges }
}

fn backend(id: &str, size: u64) -> MemdevInfo {
    MemdevInfo { id: Some(id.into()), size, share: true }
}

fn block(id: &str) -> RamBlock {
    RamBlock { id: id.into(), used_bytes: MIB, hva: Some(HostVirt(0x1000)) }
}

fn map(backends: &[MemdevInfo], view: &FlatView) -> RegionMap {
    region_map(&guest_ram(backends, view, &[])).unwrap()
}

#[test]
fn write_protected_parts_join_their_neighbours_and_windows_do_not() {
    let view = view(vec![
        ram(0, 0xa0000, 0),
        range(0xa0000, 0x20000, RangeKind::Other, "vga-lowmem", 0),
        range(0xc0000, 0xb000, RangeKind::Rom, "ram", 0xc0000),
        ram(0xcb000, 0x35000, 0xcb000),
        ram(0x100000, MIB, 0x100000),
    ]);
    let map = map(&[backend("ram", 2 * MIB)], &view);
    let spans: Vec<_> = map.guest_spans().iter().map(|span| (span.gpa.0, span.pages)).collect();
    assert_eq!(spans, [(0, 0xa0), (0xc0000, 0x140)]);
    assert_eq!(map.page_at(GuestPhys(0xa0000)), None, "behind the window, and yet in the region");
    assert_eq!(map.regions()[0].pages, 0x200);
}

#[test]
fn neighbours_in_the_guest_that_are_not_so_in_the_backend_stay_apart() {
    let view = view(vec![ram(0, MIB, MIB), ram(MIB, MIB, 0)]);
    let map = map(&[backend("ram", 2 * MIB)], &view);
    assert_eq!(map.page_at(GuestPhys(0)), Some(Page(0x100)));
    assert_eq!(map.page_at(GuestPhys(MIB)), Some(Page(0)));
}

#[test]
fn parts_of_pages_are_left_out() {
    let view = view(vec![ram(0x800, 0x3000, 0x800), ram(0x10000, 0x800, 0x10000)]);
    let map = map(&[backend("ram", MIB)], &view);
    let spans: Vec<_> = map.guest_spans().iter().map(|span| (span.gpa.0, span.pages)).collect();
    assert_eq!(spans, [(0x1000, 2)]);
}

#[test]
fn regions_are_ordered_by_address_and_unseen_backends_are_none() {
    let view = view(vec![
        range(0, MIB, RangeKind::Ram, "/objects/b", 0),
        range(MIB, MIB, RangeKind::Ram, "a", 0),
        FlatRange { priority: 1, ..range(4 * MIB, MIB, RangeKind::Ram, "device", 0) },
    ]);
    let backends = ["a", "b", "device", "spare"].map(|id| backend(id, MIB));
    let map = map(&backends, &view);
    let ids: Vec<_> = map.regions().iter().map(|region| region.id.as_str()).collect();
    assert_eq!(ids, ["b", "a"]);
}

#[test]
fn ram_without_a_backend_is_the_block_at_zero() {
    let view = view(vec![range(0, MIB, RangeKind::Ram, "pc.ram", 0)]);
    let found = guest_ram(&[], &view, &[block("pc.ram")]);
    assert_eq!((found[0].bytes, found[0].shared), (MIB, false));
}

#[test]
fn a_block_is_found_under_its_device_and_an_ambiguous_name_under_none() {
    let view = view(vec![
        range(0, MIB, RangeKind::Ram, "vga.vram", 0),
        range(MIB, MIB, RangeKind::Ram, "twice", 0),
        range(2 * MIB, MIB, RangeKind::Other, "io", 0),
    ]);
    let blocks = ["0000:00:01.0/vga.vram", "x/twice", "y/twice", "io"].map(block);
    let mapped = ranges_by_block(&view, &blocks);
    assert_eq!(mapped.keys().copied().collect::<Vec<_>>(), ["0000:00:01.0/vga.vram"]);
}

#[test]
fn what_qemu_rebuilds_at_start() {
    for id in
        ["pc.bios", "pc.rom", "/rom@etc/acpi/tables", "0000:00:02.0/e1000e.rom", "system.flash0"]
    {
        assert!(is_rebuilt(id), "{id}");
    }
    for id in ["0000:00:01.0/vga.vram", "tpm-ppi", "iv", "ram"] {
        assert!(!is_rebuilt(id), "{id}");
    }
}

#[test]
fn only_firmware_is_saved_on_demand() {
    let aux = ["pc.bios", "pc.rom", "0000:00:02.0/e1000e.rom"].map(|id| AuxRam {
        id: id.to_owned(),
        bytes: MIB,
        hva: None,
        rom: true,
    });
    let map = RegionMap::lay_out([("ram", MIB)]).unwrap();
    let layout = MemoryLayout { map, locations: Vec::new(), aux: aux.to_vec() };
    let roms: Vec<_> = layout.with_firmware_saved().aux.iter().map(|aux| aux.rom).collect();
    assert_eq!(roms, [false, true, true]);
}

proptest! {
    /// Every address in a RAM range of the view maps to the page at its offset.
    #[test]
    fn spans_lead_where_the_view_says(
        parts in proptest::collection::vec((0u64..3, 1u64..5, 0u64..60, any::<bool>()), 1..12),
    ) {
        let mut gpa = 0;
        let mut ranges = Vec::new();
        for (gap, pages, offset, rom) in parts {
            gpa += gap * 4096;
            let kind = if rom { RangeKind::Rom } else { RangeKind::Ram };
            ranges.push(range(gpa, pages * 4096, kind, "ram", offset * 4096));
            gpa += pages * 4096;
        }
        let view = view(ranges);
        let map = map(&[backend("ram", 64 * 4096)], &view);
        for range in &view.ranges {
            for at in (range.first..range.last).step_by(4096) {
                let page = (range.offset + at - range.first) / 4096;
                prop_assert_eq!(map.page_at(GuestPhys(at)), Some(Page(page as u32)));
            }
        }
    }
}
