//! The layout of guest RAM: its addresses in the guest's physical address space, and in the
//! hypervisor's own.
//!
//! ```text
//!   query-memdev      the backends, their sizes, shared or private
//!   info mtree -f     which part of which backend the guest sees at which address          FlatView "memory"
//!   info ramblock     every other memory block: firmware, video, ACPI
//!   gpa2hva           the address of each of them in the hypervisor
//!
//!   FlatView                                   RegionMap
//!   0        - 0xc2fff     ram                 region ram   4.5 GiB
//!   0xc3000  - 0xe7fff     ram (rom)    ==>    span gpa 0      -> page 0         2 GiB
//!   0x100000 - 0x7fffffff  ram                 span gpa 4 GiB  -> page 0x80000   2.5 GiB
//!   0x1'00000000 - ...     ram @0x80000000
//! ```
//!
//! The chipset makes parts of low RAM read-only (PAM) and hides others behind devices (the VGA
//! window, SMRAM). They are RAM of the same backend all the same: the region has all of it, the
//! spans only what the guest sees now.

use std::collections::BTreeMap;

use firn_types::{GuestPhys, GuestSpan, HostVirt, PAGE_SIZE, Page, RegionMap, RegionMapError};
use serde::Deserialize;
use thiserror::Error;

use crate::command_line::{CALLS_ID, CommandPlan, RAM_ID};
use crate::hmp::{self, FlatRange, FlatView, RamBlock, RangeKind};
use crate::qmp::{QmpClient, QmpError};

/// QEMU's name for the block of firmware that is not on a flash device.
const FIRMWARE_ID: &str = "pc.bios";

/// The layout of all memory of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLayout {
    /// Guest RAM: its backends as regions, and the addresses at which the guest sees them.
    pub map: RegionMap,
    /// The address of each region of the map in the hypervisor, in the map's order.
    pub locations: Vec<RegionMapping>,
    /// The auxiliary blocks.
    pub aux: Vec<AuxRam>,
}

/// The mapping of a RAM region in the hypervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionMapping {
    /// The region's id in the map.
    pub id: String,
    /// The address of its first byte.
    pub hva: HostVirt,
    /// Whether it is a shared mapping. QEMU's default RAM is private and anonymous.
    pub shared: bool,
}

/// An auxiliary block: memory that is not guest RAM, such as firmware, option ROMs, ACPI tables,
/// video memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuxRam {
    /// QEMU's name for the block.
    pub id: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its address in the hypervisor. QEMU 7.2 reports it only while the guest has the block
    /// mapped.
    pub hva: Option<HostVirt>,
    /// Whether QEMU fills it at the start and the guest cannot change it, so that no checkpoint
    /// needs it.
    pub rom: bool,
}

impl MemoryLayout {
    /// Uses the names that a restore with this command line gives to RAM. There, RAM without a name
    /// from the user gets Firn's name.
    pub fn named_by(mut self, plan: &CommandPlan) -> Self {
        let is_planned = |id: &str| plan.ram().iter().any(|ram| ram.id == id);
        let ids: Vec<_> = self.locations.iter().map(|location| location.id.clone()).collect();
        let mut unplanned = ids.iter().filter(|id| !is_planned(id));
        let (Some(id), None) = (unplanned.next(), unplanned.next()) else { return self };
        if is_planned(RAM_ID) && !ids.iter().any(|id| id == RAM_ID) {
            self.map = self.map.with_region_renamed(id, RAM_ID);
            let at = self.locations.iter_mut().filter(|location| location.id == *id);
            at.for_each(|location| RAM_ID.clone_into(&mut location.id));
        }
        self
    }

    /// Has checkpoints contain firmware that QEMU reads from a file of its own.
    ///
    /// A QEMU that waits for a migration (`-incoming`) does not fill it, and forgets the file's
    /// contents: `rom_reset()` in QEMU's `hw/core/loader.c`. A guest that is reset there later needs
    /// the firmware of the image.
    pub fn with_firmware_saved(mut self) -> Self {
        let firmware = self.aux.iter_mut().filter(|aux| aux.is_firmware());
        firmware.for_each(|aux| aux.rom = false);
        self
    }
}

impl AuxRam {
    /// Whether this is the block that QEMU fills with the file of `-bios` when the VM is reset.
    pub fn is_firmware(&self) -> bool {
        self.id == FIRMWARE_ID
    }
}

/// The reason why the layout of guest RAM could not be found.
#[derive(Debug, Error)]
pub enum LayoutError {
    /// A monitor command failed.
    #[error("cannot query the layout of guest RAM from QEMU")]
    Qmp(#[from] QmpError),
    /// `info mtree -f` shows no view named `memory`.
    #[error("QEMU shows no address space named \"memory\"")]
    NoView,
    /// No backend is visible to the guest.
    #[error("none of QEMU's {backends} memory backends is mapped as guest RAM")]
    NoRam {
        /// The number of backends.
        backends: usize,
    },
    /// QEMU reports no host address for a backend.
    #[error("QEMU reports no host address for memory backend {id:?} (guest-physical {gpa})")]
    NoHostAddress {
        /// The backend.
        id: String,
        /// The guest-physical address that Firn asked for.
        gpa: GuestPhys,
    },
    /// The backends and the address space contradict each other.
    #[error("QEMU's memory backends and its address space do not fit together")]
    Map(#[from] RegionMapError),
}

/// A backend in the reply to `query-memdev`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct MemdevInfo {
    #[serde(default)]
    id: Option<String>,
    size: u64,
    #[serde(default)]
    share: bool,
}

/// A range of a backend that the guest sees, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct VisibleRange {
    gpa: u64,
    offset: u64,
    bytes: u64,
}

/// A backend, with the ranges of it that the guest sees.
#[derive(Debug, PartialEq, Eq)]
struct GuestRam {
    id: String,
    bytes: u64,
    shared: bool,
    stretches: Vec<VisibleRange>,
}

/// Finds the layout of a VM's memory.
pub(crate) fn find_layout(qmp: &mut QmpClient) -> Result<MemoryLayout, LayoutError> {
    let backends = query_backends(qmp)?;
    let view = memory_view(&qmp.execute_hmp("info mtree -f")?)?;
    let blocks = hmp::parse_ramblock(&qmp.execute_hmp("info ramblock")?);
    let ram = guest_ram(&backends, &view, &blocks);
    if ram.is_empty() {
        return Err(LayoutError::NoRam { backends: backends.len() });
    }
    let locations = ram.iter().map(|ram| locate_region(qmp, ram)).collect::<Result<_, _>>()?;
    let aux = aux_ram(qmp, &ram, &view, &blocks)?;
    Ok(MemoryLayout { map: region_map(&ram)?, locations, aux })
}

fn query_backends(qmp: &mut QmpClient) -> Result<Vec<MemdevInfo>, QmpError> {
    qmp.query("query-memdev")
}

fn memory_view(printed: &str) -> Result<FlatView, LayoutError> {
    let views = hmp::parse_mtree(printed);
    views.into_iter().find(|view| view.is_of("memory")).ok_or(LayoutError::NoView)
}

/// The backends that are guest RAM, ordered by the lowest address at which the guest sees them.
fn guest_ram(backends: &[MemdevInfo], view: &FlatView, blocks: &[RamBlock]) -> Vec<GuestRam> {
    let mut ram: Vec<GuestRam> = backends
        .iter()
        .filter_map(|backend| Some((backend.id.clone()?, backend.size, backend.share)))
        .filter_map(|(id, bytes, shared)| GuestRam::from_view(id, bytes, shared, view))
        .collect();
    if ram.is_empty() {
        ram.extend(unnamed_ram(view, blocks));
    }
    ram.sort_by_key(|ram| ram.stretches.first().map(|stretch| stretch.gpa));
    ram
}

/// RAM without a backend: the block at guest-physical 0.
fn unnamed_ram(view: &FlatView, blocks: &[RamBlock]) -> Option<GuestRam> {
    let lowest = view.ranges.iter().find(|range| range.first == 0 && is_ram(range))?;
    let block = blocks.iter().find(|block| block.id == lowest.region)?;
    GuestRam::from_view(block.id.clone(), block.used_bytes, false, view)
}

impl GuestRam {
    fn from_view(id: String, bytes: u64, shared: bool, view: &FlatView) -> Option<Self> {
        let ranges = view.ranges.iter().filter(|range| is_ram(range) && is_named(range, &id));
        let stretches = merge_ranges(ranges);
        (!stretches.is_empty()).then_some(Self { id, bytes, shared, stretches })
    }
}

/// Whether a range is guest RAM: that has priority 0, memory of a PCI device (`ivshmem`) has
/// priority 1.
fn is_ram(range: &FlatRange) -> bool {
    range.priority == 0 && matches!(range.kind, RangeKind::Ram | RangeKind::Rom)
}

/// Whether a range belongs to a backend. Machine types before 4.0 name a backend's memory by its
/// full object path.
fn is_named(range: &FlatRange, id: &str) -> bool {
    range.region.strip_prefix("/objects/").unwrap_or(&range.region) == id
}

/// Joins neighbouring ranges, then clips them to whole pages.
fn merge_ranges<'a>(ranges: impl Iterator<Item = &'a FlatRange>) -> Vec<VisibleRange> {
    let mut stretches: Vec<VisibleRange> = Vec::new();
    for range in ranges {
        let bytes = (range.last - range.first).saturating_add(1);
        let next = VisibleRange { gpa: range.first, offset: range.offset, bytes };
        match stretches.last_mut().filter(|last| last.is_continued_by(&next)) {
            Some(last) => last.bytes = last.bytes.saturating_add(bytes),
            None => stretches.push(next),
        }
    }
    stretches.into_iter().filter_map(VisibleRange::whole_pages).collect()
}

impl VisibleRange {
    fn is_continued_by(&self, next: &Self) -> bool {
        let gpa = self.gpa.checked_add(self.bytes);
        let offset = self.offset.checked_add(self.bytes);
        gpa == Some(next.gpa) && offset == Some(next.offset)
    }

    fn whole_pages(self) -> Option<Self> {
        let page = PAGE_SIZE as u64;
        let gpa = self.gpa.checked_next_multiple_of(page)?;
        let skipped = gpa - self.gpa;
        let bytes = self.bytes.checked_sub(skipped)? / page * page;
        let offset = self.offset.checked_add(skipped)?;
        (bytes > 0 && offset % page == 0).then_some(Self { gpa, offset, bytes })
    }
}

fn region_map(ram: &[GuestRam]) -> Result<RegionMap, RegionMapError> {
    let map = RegionMap::lay_out(ram.iter().map(|ram| (ram.id.as_str(), ram.bytes)))?;
    let spans = ram.iter().zip(map.regions()).flat_map(|(ram, region)| {
        ram.stretches.iter().map(|stretch| guest_span(stretch, region.first))
    });
    let spans = spans.collect::<Result<_, _>>()?;
    map.with_spans(spans)
}

fn guest_span(stretch: &VisibleRange, region_first: Page) -> Result<GuestSpan, RegionMapError> {
    let pages = |bytes: u64| u32::try_from(bytes / PAGE_SIZE as u64).ok();
    let page = pages(stretch.offset).and_then(|offset| region_first.0.checked_add(offset));
    let gpa = GuestPhys(stretch.gpa);
    match (page, pages(stretch.bytes)) {
        (Some(page), Some(pages)) => Ok(GuestSpan { gpa, page: Page(page), pages }),
        _ => Err(RegionMapError::Span { gpa, pages: u32::MAX }),
    }
}

fn locate_region(qmp: &mut QmpClient, ram: &GuestRam) -> Result<RegionMapping, LayoutError> {
    let gpa = GuestPhys(ram.stretches[0].gpa);
    let hva = host_address(qmp, gpa)?
        .and_then(|hva| hva.0.checked_sub(ram.stretches[0].offset))
        .ok_or_else(|| LayoutError::NoHostAddress { id: ram.id.clone(), gpa })?;
    Ok(RegionMapping { id: ram.id.clone(), hva: HostVirt(hva), shared: ram.shared })
}

fn host_address(qmp: &mut QmpClient, gpa: GuestPhys) -> Result<Option<HostVirt>, QmpError> {
    Ok(hmp::parse_hva(&qmp.execute_hmp(&format!("gpa2hva {:#x}", gpa.0))?))
}

fn aux_ram(
    qmp: &mut QmpClient,
    ram: &[GuestRam],
    view: &FlatView,
    blocks: &[RamBlock],
) -> Result<Vec<AuxRam>, QmpError> {
    let is_guest_ram = |block: &RamBlock| {
        let id = block.id.strip_prefix("/objects/").unwrap_or(&block.id);
        ram.iter().any(|ram| ram.id == id)
    };
    // The memory for guest calls belongs to this VM's applications and the supervisor that serves
    // it.
    let is_for_calls = |block: &RamBlock| block.id.ends_with(CALLS_ID);
    let aux = blocks.iter().filter(|block| !is_guest_ram(block) && !is_for_calls(block));
    let mapped = ranges_by_block(view, blocks);
    aux.map(|block| {
        let ranges = mapped.get(block.id.as_str()).map_or(&[][..], Vec::as_slice);
        let hva = match (block.hva, ranges.first()) {
            (None, Some(range)) => host_address(qmp, GuestPhys(range.first))?
                .and_then(|hva| hva.0.checked_sub(range.offset))
                .map(HostVirt),
            (hva, _) => hva,
        };
        let rom = is_rebuilt(&block.id) && !ranges.iter().any(|range| range.kind == RangeKind::Ram);
        Ok(AuxRam { id: block.id.clone(), bytes: block.used_bytes, hva, rom })
    })
    .collect()
}

/// The ranges at which the guest sees each block. A range is named `DEVICE/REGION`, or `REGION`
/// where no device owns it; a region name that matches several blocks belongs to none.
fn ranges_by_block<'a>(
    view: &'a FlatView,
    blocks: &'a [RamBlock],
) -> BTreeMap<&'a str, Vec<&'a FlatRange>> {
    let mut mapped: BTreeMap<&str, Vec<&FlatRange>> = BTreeMap::new();
    for range in view.ranges.iter().filter(|range| range.kind != RangeKind::Other) {
        let mut owners = blocks.iter().filter(|block| is_block_of_region(block, &range.region));
        if let (Some(owner), None) = (owners.next(), owners.next()) {
            mapped.entry(&owner.id).or_default().push(range);
        }
    }
    mapped
}

fn is_block_of_region(block: &RamBlock, region: &str) -> bool {
    block.id == region || block.id.strip_suffix(region).is_some_and(|device| device.ends_with('/'))
}

/// Whether QEMU fills a block of this name from its own files or tables at the start: firmware,
/// option ROMs, tables from `fw_cfg`, and flash, which is stored on a drive.
fn is_rebuilt(id: &str) -> bool {
    let name = id.rsplit('/').next().unwrap_or(id);
    id.starts_with("/rom@")
        || matches!(name, FIRMWARE_ID | "pc.rom" | "isa-bios")
        || name.ends_with(".rom")
        || name.starts_with("system.flash")
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
