//! Memory layouts of real VMs: sizes, the PCI hole, several backends, private RAM.

use std::os::fd::OwnedFd;

use firn_types::{GuestPhys, Page};
use firn_vmm::{MemoryLayout, QemuVm};

use crate::need_qemu;
use crate::qemu::{Qemu, backend, inherited_memfd, words};

const MIB: u64 = 1 << 20;

/// A VM with one backend, its layout and its RAM file.
fn machine(machine: &str, bytes: u64) -> (Qemu, MemoryLayout, OwnedFd) {
    let file = inherited_memfd(bytes);
    let mut args = backend("ram", bytes, &file);
    args.extend(words(&format!("-M {machine},memory-backend=ram -m {}k", bytes / 1024)));
    let qemu = Qemu::start(&args);
    let layout = qemu.vm().layout().unwrap();
    (qemu, layout, file)
}

/// Checks that every region's address is the start of a mapping in the process that is as long as
/// the region.
fn check_locations(qemu: &Qemu, layout: &MemoryLayout) {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", qemu.pid())).unwrap();
    for (region, location) in layout.map.regions().iter().zip(&layout.locations) {
        assert_eq!(region.id, location.id);
        let mapping = format!("{:x}-{:x} ", location.hva.0, location.hva.0 + region.byte_len());
        assert!(maps.contains(&mapping), "no mapping {mapping} for {region:?} in\n{maps}");
    }
}

/// RAM below the hole starts at 0 and RAM above it at 4 GiB; together they are all of it but the
/// VGA window.
fn check_spans(layout: &MemoryLayout, ram_bytes: u64) {
    assert_eq!(layout.map.ram_bytes(), ram_bytes);
    assert_eq!(layout.map.page_at(GuestPhys(0)), Some(Page(0)));
    let seen: u64 = layout.map.guest_spans().iter().map(|span| u64::from(span.pages) * 4096).sum();
    assert!(ram_bytes - seen <= MIB, "{seen} of {ram_bytes} bytes are seen");
}

#[test]
fn ram_below_the_hole_is_one_region() {
    need_qemu!();
    for (kind, bytes) in [("q35", 256 * MIB), ("pc", 1024 * MIB), ("microvm", 256 * MIB)] {
        let (qemu, layout, _file) = machine(kind, bytes);
        check_locations(&qemu, &layout);
        check_spans(&layout, bytes);
        assert_eq!(layout.map.regions().len(), 1);
        assert!(layout.locations[0].shared);
        let last = GuestPhys(bytes - 4096);
        assert_eq!(layout.map.page_at(last), Some(Page((bytes / 4096) as u32 - 1)));
    }
}

#[test]
fn ram_is_split_around_the_hole() {
    need_qemu!();
    let bytes = 4608 * MIB;
    for kind in ["q35", "pc", "microvm"] {
        let (qemu, layout, _file) = machine(kind, bytes);
        check_locations(&qemu, &layout);
        check_spans(&layout, bytes);
        let low = layout.map.guest_spans().iter().filter(|span| span.gpa < GuestPhys(4 << 30));
        let low_end = low.map(|span| span.page.0 + span.pages).max().unwrap();
        assert_eq!(layout.map.page_at(GuestPhys(4 << 30)), Some(Page(low_end)));
        assert_eq!(
            layout.map.page_at(GuestPhys((4 << 30) - 4096)),
            None,
            "the firmware is not RAM"
        );
    }
}

#[test]
fn odd_sizes_keep_every_page() {
    need_qemu!();
    for kib in [262_144 + 8, 300_000, 131_072 + 16] {
        let (qemu, layout, _file) = machine("q35", kib * 1024);
        check_locations(&qemu, &layout);
        check_spans(&layout, kib * 1024);
    }
}

#[test]
fn two_numa_nodes_are_two_regions() {
    need_qemu!();
    let sizes = [512 * MIB, 4096 * MIB];
    let files = sizes.map(inherited_memfd);
    let mut args = words("-M q35 -m 4608M -smp 2 -numa node,memdev=n0 -numa node,memdev=n1");
    args.extend(backend("n0", sizes[0], &files[0]));
    args.extend(backend("n1", sizes[1], &files[1]));
    let qemu = Qemu::start(&args);
    let layout = qemu.vm().layout().unwrap();
    check_locations(&qemu, &layout);
    let ids: Vec<&str> = layout.map.regions().iter().map(|region| region.id.as_str()).collect();
    assert_eq!(ids, ["n0", "n1"]);
    let second = layout.map.regions()[1].first;
    assert_eq!(layout.map.page_at(GuestPhys(sizes[0])), Some(second));
}

#[test]
fn private_ram_is_found_and_marked_as_private() {
    need_qemu!();
    let qemu = Qemu::start(&words("-M q35 -m 256M"));
    let layout = qemu.vm().layout().unwrap();
    check_spans(&layout, 256 * MIB);
    assert!(!layout.locations[0].shared);
}

#[test]
fn memory_beside_ram_is_listed() {
    need_qemu!();
    let qemu = Qemu::start(&words("-M q35 -m 256M -vga std"));
    std::thread::sleep(std::time::Duration::from_secs(1)); // the firmware maps the video memory
    let layout = QemuVm::connect(&qemu.monitor()).unwrap().layout().unwrap();
    let named = |part: &str| layout.aux.iter().find(|aux| aux.id.contains(part)).unwrap();
    assert!(named("pc.bios").rom && named("pc.bios").hva.is_some());
    assert!(named("acpi/tables").rom);
    let video = named("vga.vram");
    assert!(!video.rom && video.hva.is_some(), "{video:?}");
    assert_eq!(video.bytes, 16 * MIB);
}

/// The guest can write to the firmware of `microvm` at its addresses below 1 MiB, so it is not
/// read-only memory.
#[test]
fn firmware_that_the_guest_can_write_is_not_rebuilt() {
    need_qemu!();
    let (_qemu, layout, _file) = machine("microvm", 256 * MIB);
    let firmware = layout.aux.iter().find(|aux| aux.id == "pc.bios").unwrap();
    assert!(!firmware.rom && firmware.hva.is_some(), "{firmware:?}");
    assert_eq!(layout.map.page_at(GuestPhys(0xf_0000)), None);
}
