//! The sections of an image: its contents beside memory blocks.
//!
//! ```text
//!   metadata         JSON, opaque here
//!   region map       JSON: firn_types::RegionMap
//!   device state     bytes of the hypervisor, opaque here
//!   auxiliary RAM    4 count, then for each: 2 length of id, id, 8 length, bytes
//!   working set      n x 4: memory blocks in order of first access, as zigzag differences
//!   page-table roots n x 8: guest-physical addresses
//!   access order     4 groups (g), 4 memory blocks (n), g x 2 filled by, g x 4 how many, n x 4 memory blocks
//! ```
//!
//! The access order is only in an image that is not organized by it: it allows a return to that
//! order.

use firn_types::{Block, GuestPhys, RegionMap};

use crate::auxiliary::{AUX_BLOCKS_MAX, AUX_ID_BYTES_MAX};
use crate::budget::MemoryBudget;
use crate::bytes::ByteReader;
use crate::error::ImageFlaw;
use crate::footer::{JSON_VALUES_MAX, SectionKind};
use crate::geometry::Geometry;
use crate::locality::FilledBy;
use crate::steps::{decode_steps, encode_steps};

/// The contents of an image beside memory blocks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ImageSections {
    /// Facts about the VM that this crate does not interpret: hypervisor version, arguments, disks.
    pub meta: serde_json::Value,
    /// The layout of RAM.
    pub regions: RegionMap,
    /// The state of devices and vCPUs, as the hypervisor saved it.
    pub device_state: Vec<u8>,
    /// Auxiliary blocks: RAM beside guest RAM that the device state does not carry.
    pub aux_blocks: Vec<AuxBlock>,
    /// Memory blocks the guest touched after the cut, in order of first access.
    pub working_set: Vec<Block>,
    /// Page-table roots found in the guest.
    pub page_table_roots: Vec<GuestPhys>,
}

/// A small RAM block beside guest RAM, such as video memory or a ROM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AuxBlock {
    /// The hypervisor's name for it: at most 1024 bytes.
    pub id: String,
    /// Its contents.
    pub bytes: Vec<u8>,
}

/// Memory blocks that lay in one locality block when the image was organized by access.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct AccessGroup {
    pub(crate) filled_by: FilledBy,
    pub(crate) blocks: Vec<Block>,
}

impl ImageSections {
    /// The bytes of each section. Sections without content are left out.
    pub(crate) fn encode(&self) -> serde_json::Result<Vec<(SectionKind, Vec<u8>)>> {
        let all = [
            (SectionKind::Meta, serde_json::to_vec(&self.meta)?),
            (SectionKind::Regions, serde_json::to_vec(&self.regions)?),
            (SectionKind::DeviceState, self.device_state.clone()),
            (SectionKind::AuxBlocks, encode_aux(&self.aux_blocks)),
            (SectionKind::WorkingSet, encode_working_set(&self.working_set)),
            (SectionKind::PageTableRoots, encode_roots(&self.page_table_roots)),
        ];
        Ok(all.into_iter().filter(|(_, bytes)| !bytes.is_empty()).collect())
    }
}

pub(crate) fn parse_meta(
    bytes: &[u8],
    budget: &mut MemoryBudget,
) -> Result<serde_json::Value, ImageFlaw> {
    charge_values(SectionKind::Meta, bytes, budget)?;
    serde_json::from_slice(bytes).map_err(|error| not_json(SectionKind::Meta, &error))
}

pub(crate) fn parse_regions(
    bytes: &[u8],
    geometry: &Geometry,
    budget: &mut MemoryBudget,
) -> Result<RegionMap, ImageFlaw> {
    charge_values(SectionKind::Regions, bytes, budget)?;
    let flaw = |problem: String| ImageFlaw::new(SectionKind::Regions.section_name(), 0, problem);
    let map: RegionMap =
        serde_json::from_slice(bytes).map_err(|error| not_json(SectionKind::Regions, &error))?;
    map.check_layout().map_err(|error| flaw(error.to_string()))?;
    if map.guest_spans().windows(2).any(|pair| pair[0].gpa >= pair[1].gpa) {
        return Err(flaw("guest-physical spans are not in order of address".into()));
    }
    if map.total_pages() != geometry.total_pages {
        let (found, expected) = (map.total_pages(), geometry.total_pages);
        return Err(flaw(format!("it has {found} pages, the header says {expected}")));
    }
    Ok(map)
}

/// The maximum number of bytes of memory for a value of JSON, or a key.
const VALUE_BYTES: u64 = 256;

fn charge_values(
    kind: SectionKind,
    json: &[u8],
    budget: &mut MemoryBudget,
) -> Result<(), ImageFlaw> {
    let flaw = |problem| ImageFlaw::new(kind.section_name(), 0, problem);
    match count_values(json) {
        count if count <= JSON_VALUES_MAX => {
            budget.charge_bytes(count as u64 * VALUE_BYTES).map_err(flaw)
        }
        count => Err(flaw(format!("{count} values, at most {JSON_VALUES_MAX} fit"))),
    }
}

/// The maximum number of values in this JSON: keys count, too.
pub(crate) fn count_values(json: &[u8]) -> usize {
    let (mut count, mut in_string, mut is_escaped) = (1, false, false);
    for &byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            b'[' | b'{' | b',' | b':' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

fn not_json(kind: SectionKind, error: &serde_json::Error) -> ImageFlaw {
    ImageFlaw::new(kind.section_name(), 0, format!("not the JSON it should be: {error}"))
}

/// The maximum length of an id that is written, in bytes, so that all of them fit.
const AUX_ID_BYTES: usize = AUX_ID_BYTES_MAX / AUX_BLOCKS_MAX as usize;

/// The reason why auxiliary blocks cannot be stored, if there is one.
pub(crate) fn unstorable_aux(blocks: &[AuxBlock]) -> Option<String> {
    if blocks.len() > AUX_BLOCKS_MAX as usize {
        return Some(format!("{} blocks, at most {AUX_BLOCKS_MAX} fit", blocks.len()));
    }
    let too_long = blocks.iter().find(|aux| aux.id.len() > AUX_ID_BYTES)?;
    Some(format!("an id has {} bytes, at most {AUX_ID_BYTES} fit", too_long.id.len()))
}

fn encode_aux(blocks: &[AuxBlock]) -> Vec<u8> {
    if blocks.is_empty() {
        return Vec::new();
    }
    let mut out = Vec::new();
    out.extend((blocks.len() as u32).to_le_bytes());
    for AuxBlock { id, bytes } in blocks {
        out.extend((id.len() as u16).to_le_bytes());
        out.extend(id.as_bytes());
        out.extend((bytes.len() as u64).to_le_bytes());
        out.extend(bytes);
    }
    out
}

fn encode_working_set(blocks: &[Block]) -> Vec<u8> {
    encode_steps(blocks.iter().copied()).flat_map(u32::to_le_bytes).collect()
}

pub(crate) fn parse_working_set(
    bytes: &[u8],
    geometry: &Geometry,
) -> Result<Vec<Block>, ImageFlaw> {
    let kind = SectionKind::WorkingSet;
    let mut all = ByteReader::new(kind.section_name(), bytes);
    let steps = all.read_column::<4>(bytes.len() / 4)?;
    all.expect_end()?;
    let blocks: Vec<_> = decode_steps(steps.numbers()).collect();
    check_blocks(kind, &blocks, geometry)?;
    Ok(blocks)
}

fn check_blocks(kind: SectionKind, blocks: &[Block], geometry: &Geometry) -> Result<(), ImageFlaw> {
    match blocks.iter().find(|block| block.0 >= geometry.block_count()) {
        None => Ok(()),
        Some(block) => {
            let problem = format!("{block} is past the last of {}", geometry.block_count());
            Err(ImageFlaw::new(kind.section_name(), 0, problem))
        }
    }
}

fn encode_roots(roots: &[GuestPhys]) -> Vec<u8> {
    roots.iter().flat_map(|root| root.0.to_le_bytes()).collect()
}

pub(crate) fn parse_roots(bytes: &[u8]) -> Result<Vec<GuestPhys>, ImageFlaw> {
    let mut all = ByteReader::new(SectionKind::PageTableRoots.section_name(), bytes);
    let roots = all.read_column::<8>(bytes.len() / 8)?;
    all.expect_end()?;
    Ok(roots.numbers().map(GuestPhys).collect())
}

pub(crate) fn encode_access_order(groups: &[AccessGroup]) -> Vec<u8> {
    let blocks = || groups.iter().flat_map(|group| group.blocks.iter().copied());
    let mut out = Vec::new();
    out.extend((groups.len() as u32).to_le_bytes());
    out.extend((blocks().count() as u32).to_le_bytes());
    out.extend(groups.iter().flat_map(|group| group.filled_by.code().to_le_bytes()));
    out.extend(groups.iter().flat_map(|group| (group.blocks.len() as u32).to_le_bytes()));
    out.extend(encode_steps(blocks()).flat_map(u32::to_le_bytes));
    out
}

pub(crate) fn parse_access_order(
    bytes: &[u8],
    geometry: &Geometry,
) -> Result<Vec<AccessGroup>, ImageFlaw> {
    let kind = SectionKind::AccessOrder;
    let mut bytes = ByteReader::new(kind.section_name(), bytes);
    let (g, n) = (bytes.read_u32()? as usize, bytes.read_u32()? as usize);
    let filled_by = bytes.read_column::<2>(g)?.numbers().map(FilledBy::from_code);
    let counts = bytes.read_column::<4>(g)?.numbers();
    let mut blocks = decode_steps(bytes.read_column::<4>(n)?.numbers());
    bytes.clone().expect_end()?;
    let groups: Vec<_> = filled_by
        .zip(counts)
        .map(|(filled_by, count)| {
            let blocks = blocks.by_ref().take(count as usize).collect();
            AccessGroup { filled_by, blocks }
        })
        // Empty groups carry no information, and there may be any number of them.
        .filter(|group| !group.blocks.is_empty())
        .collect();
    if groups.iter().map(|group| group.blocks.len()).sum::<usize>() != n {
        return Err(bytes.flaw_here(format!("groups do not add up to {n} memory blocks")));
    }
    groups.iter().try_for_each(|group| check_blocks(kind, &group.blocks, geometry))?;
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_types::VcpuId;

    #[test]
    fn values_are_counted_outside_of_strings() {
        for (json, count) in [("7", 1), (r#"{"a":[1,2],"b":{}}"#, 8), (r#"["[,:\\\",", "\\"]"#, 3)]
        {
            assert_eq!(count_values(json.as_bytes()), count, "{json}");
        }
        let many = format!("[{}0]", "0,".repeat(JSON_VALUES_MAX));
        let flaw = parse_meta(many.as_bytes(), &mut MemoryBudget::of_file(1 << 30)).unwrap_err();
        assert_eq!(flaw.problem, "32770 values, at most 32768 fit");
    }

    #[test]
    fn the_working_set_is_read_as_written() {
        let (blocks, geometry) = ([9, 10, 2].map(Block), Geometry::new(22));
        let bytes = encode_working_set(&blocks);
        assert_eq!(parse_working_set(&bytes, &geometry), Ok(blocks.to_vec()));
        assert!(parse_working_set(&bytes, &Geometry::new(20)).is_err());
        assert!(parse_working_set(&bytes[..5], &geometry).is_err());
    }

    #[test]
    fn the_access_order_is_read_as_written() {
        let groups = vec![
            AccessGroup { filled_by: FilledBy::Vcpu(VcpuId(1)), blocks: vec![Block(9), Block(2)] },
            AccessGroup { filled_by: FilledBy::Sweep, blocks: vec![Block(3)] },
        ];
        let (bytes, geometry) = (encode_access_order(&groups), Geometry::new(22));
        assert_eq!(parse_access_order(&bytes, &geometry), Ok(groups));
        for len in 0..bytes.len() {
            assert!(parse_access_order(&bytes[..len], &geometry).is_err());
        }
    }

    #[test]
    fn regions_must_fit_the_header() {
        let map = RegionMap::lay_out([("ram", 8 * 4096)]).unwrap();
        let bytes = serde_json::to_vec(&map).unwrap();
        assert_eq!(
            parse_regions(&bytes, &Geometry::new(8), &mut MemoryBudget::of_file(0)),
            Ok(map)
        );
        assert!(parse_regions(&bytes, &Geometry::new(9), &mut MemoryBudget::of_file(0)).is_err());
        assert!(parse_regions(b"{}", &Geometry::new(8), &mut MemoryBudget::of_file(0)).is_err());
    }
}
