//! Parser of `info mtree -f`: the contents of each address space of the machine.
//!
//! ```text
//!   FlatView #0
//!    AS "memory", root: system                                    the names that share this view
//!    AS "cpu-memory-0", root: system
//!    Root memory region: system
//!     0000000000000000-00000000000c2fff (prio 0, ram): ram
//!     00000000000c3000-00000000000e7fff (prio 0, rom): ram @00000000000c3000
//!     0000000000100000-000000007fffffff (prio 0, ram): ram @0000000000100000 KVM
//!     |first           |last (inclusive)    |kind      |region |offset in it  |accelerator, if it maps it
//! ```

use super::parse_hex;

/// One address space of the machine: its ranges, by address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlatView {
    /// The address spaces that share the view, such as `memory` and `cpu-memory-0`.
    pub spaces: Vec<String>,
    /// The mapped ranges, in QEMU's order.
    pub ranges: Vec<FlatRange>,
}

/// A range of an address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatRange {
    /// Its first address.
    pub first: u64,
    /// Its last address, inclusive.
    pub last: u64,
    /// The memory region's priority: above 0 for the memory of a PCI device.
    pub priority: i32,
    /// The effect of an access.
    pub kind: RangeKind,
    /// The memory region's name.
    pub region: String,
    /// The offset in the memory region at which the range starts, in bytes.
    pub offset: u64,
}

/// The effect of an access to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeKind {
    /// Reads and writes memory.
    Ram,
    /// Reads memory; writes are discarded. Also RAM that the chipset write-protects (x86 PAM).
    Rom,
    /// Reads memory; writes go to a device, as with flash.
    Romd,
    /// A device, or a kind that this version of Firn does not know.
    Other,
}

impl FlatView {
    /// Whether the address space of this name has this view.
    pub fn is_of(&self, space: &str) -> bool {
        self.spaces.iter().any(|name| name == space)
    }
}

/// Parses every view. Skips lines of an unknown form.
pub fn parse_mtree(printed: &str) -> Vec<FlatView> {
    let mut views: Vec<FlatView> = Vec::new();
    for line in printed.lines().map(str::trim) {
        if line.starts_with("FlatView #") {
            views.push(FlatView::default());
        } else if let Some(view) = views.last_mut() {
            view.spaces.extend(parse_space(line));
            view.ranges.extend(parse_range(line));
        }
    }
    views
}

fn parse_space(line: &str) -> Option<String> {
    let (name, _) = line.strip_prefix("AS \"")?.split_once("\", root: ")?;
    Some(name.to_owned())
}

fn parse_range(line: &str) -> Option<FlatRange> {
    let (bounds, rest) = line.split_once(" (prio ")?;
    let (first, last) = bounds.split_once('-')?;
    let (priority, rest) = rest.split_once(", ")?;
    let (kind, location) = rest.split_once("): ")?;
    let (region, offset) = region_and_offset(location);
    let (first, last) = (parse_hex(first)?, parse_hex(last)?);
    (first <= last).then_some(FlatRange {
        first,
        last,
        priority: priority.parse().ok()?,
        kind: kind_of(kind),
        region: region.to_owned(),
        offset,
    })
}

/// Splits `name` or `name @offset`, either followed by the accelerator's name if it maps the range.
/// A name may contain blanks.
fn region_and_offset(location: &str) -> (&str, u64) {
    let location = location.strip_suffix(" KVM").unwrap_or(location);
    match location.rsplit_once(" @") {
        Some((region, offset)) if offset.len() == 16 => match parse_hex(offset) {
            Some(offset) => (region, offset),
            None => (location, 0),
        },
        _ => (location, 0),
    }
}

fn kind_of(text: &str) -> RangeKind {
    match text {
        "ram" | "nv-ram" => RangeKind::Ram,
        "rom" | "nv-rom" => RangeKind::Rom,
        "romd" => RangeKind::Romd,
        _ => RangeKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PRINTED: &str = "\
FlatView #0
 AS \"I/O\", root: io
 Root memory region: io
  0000000000000000-0000000000000007 (prio 0, i/o): dma-chan

FlatView #1
 AS \"memory\", root: system
 AS \"cpu-memory-0\", root: system
 Root memory region: system
  0000000000000000-00000000000c2fff (prio 0, ram): ram KVM
  00000000000c3000-00000000000e7fff (prio 0, rom): ram @00000000000c3000 KVM
  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram
  00000000febd4400-00000000febd441f (prio 0, i/o): vga ioports remapped @0000000000000012
  00000000ffc00000-00000000ffffffff (prio 0, romd): system.flash0

FlatView #2
 AS \"VGA\", root: bus master container
 Root memory region: (none)
  No rendered FlatView
";

    #[test]
    fn reads_views_with_their_names_and_ranges() {
        let views = parse_mtree(PRINTED);
        assert_eq!(views.len(), 3);
        assert!(views[1].is_of("memory") && views[1].is_of("cpu-memory-0"));
        let rom = &views[1].ranges[1];
        assert_eq!((rom.first, rom.last, rom.offset), (0xc3000, 0xe7fff, 0xc3000));
        assert_eq!((rom.kind, rom.region.as_str()), (RangeKind::Rom, "ram"));
        assert_eq!(views[1].ranges[0].region, "ram");
        assert_eq!(views[1].ranges[2].priority, 1);
        assert_eq!(views[1].ranges[3].region, "vga ioports remapped");
        assert_eq!(views[1].ranges[4].kind, RangeKind::Romd);
        assert_eq!(views[2], FlatView { spaces: vec!["VGA".into()], ranges: vec![] });
    }

    #[test]
    fn ranges_that_end_before_they_start_are_left_out() {
        let views =
            parse_mtree("FlatView #0\n  0000000000000010-0000000000000007 (prio 0, ram): x");
        assert!(views[0].ranges.is_empty());
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in "(FlatView #0\n)?.*") {
            for view in parse_mtree(&text) {
                prop_assert!(view.ranges.iter().all(|range| range.first <= range.last));
            }
        }

        #[test]
        fn a_printed_range_is_parsed_to_the_same_range(first in 0u64..1 << 50, bytes in 1u64..1 << 40, offset in 1u64..1 << 40) {
            let last = first + bytes - 1;
            let text = format!("FlatView #0\n  {first:016x}-{last:016x} (prio 0, ram): m 1 @{offset:016x}\n");
            let range = FlatRange { first, last, priority: 0, kind: RangeKind::Ram, region: "m 1".into(), offset };
            prop_assert_eq!(&parse_mtree(&text)[0].ranges, &vec![range]);
        }
    }
}
