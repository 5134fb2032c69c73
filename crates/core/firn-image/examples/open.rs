//! Measures the time to open an image, by the size of the guest, and the time of a look-up.
//!
//! ```text
//!   cargo run --release -p firn-image --example open -- [GIB...]        (1 and 8 unless given)
//! ```
//!
//! The index is the worst possible: every memory block is stored, in an order without neighbours.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use firn_image::{
    BlockEntry, BlockOrganization, BlockPlacement, Codec, CompressedBlock, ENTRIES_MAX, Geometry,
    Image, ImageDraft, ImageSections, ImageWriter, LocalityBlock, block_checksum, compress_block,
};
use firn_types::{Block, RegionMap};

fn main() -> Result<()> {
    let sizes: Vec<u32> =
        std::env::args().skip(1).map(|arg| arg.parse()).collect::<Result<_, _>>()?;
    let sizes = if sizes.is_empty() { vec![1, 8] } else { sizes };
    for gib in sizes {
        let dir = tempfile::tempdir_in("/dev/shm")?;
        let path = dir.path().join("open.firn");
        let overhead =
            write(&path, Geometry { locality_block_bytes: 1 << 20, ..Geometry::new(gib << 18) })?;
        let mut times = (0..15).map(|_| time_to_open(&path)).collect::<Result<Vec<_>>>()?;
        times.sort_unstable();
        let look_up = time_to_look_up(&Image::open(&path)?);
        println!(
            "{gib} GiB: index and frame {} KiB, open median {:?} (fastest {:?}), look-up {look_up:?}",
            overhead >> 10,
            times[times.len() / 2],
            times[0],
        );
    }
    Ok(())
}

fn write(path: &Path, geometry: Geometry) -> Result<u64> {
    let mut writer =
        ImageWriter::create(path, &ImageDraft::whole_image(geometry, BlockOrganization::Access))?;
    let CompressedBlock::Packed(packed) = compress_block(Codec::Lz4, Block(0), &[1; 8192]) else {
        bail!("not zero")
    };
    let (len, blocks) = (packed.stored.len() as u32, geometry.block_count());
    for first in (0..blocks).step_by(ENTRIES_MAX) {
        let entry = |slot: u32| BlockEntry {
            block: Block(scatter(first + slot, blocks)),
            offset: slot * len,
            stored_len: len,
            stored_as: packed.stored_as,
            checksum: block_checksum(&(first + slot).to_le_bytes()),
        };
        let entries = (0..ENTRIES_MAX as u32).map(entry).collect();
        let bytes = packed.stored.repeat(ENTRIES_MAX);
        writer.append(LocalityBlock { entries, bytes, ..LocalityBlock::default() })?;
    }
    let regions = RegionMap::lay_out([("ram", geometry.flat_bytes())])?;
    Ok(writer.finish(ImageSections { regions, ..ImageSections::default() })?.overhead_bytes)
}

/// A permutation of the numbers below a power of two: each step can be undone.
fn scatter(number: u32, below: u32) -> u32 {
    let half = below.trailing_zeros() / 2;
    let mixed = (number ^ (number >> half)).wrapping_mul(0x9e37_79b1) % below;
    (mixed ^ (mixed >> half)).wrapping_mul(0x85eb_ca6b) % below
}

fn time_to_open(path: &Path) -> Result<Duration> {
    let start = Instant::now();
    let image = Image::open(path)?;
    let opened = start.elapsed();
    drop(image);
    Ok(opened)
}

/// The mean over a million scattered look-ups.
fn time_to_look_up(image: &Image) -> Duration {
    let blocks = image.geometry().block_count();
    let start = Instant::now();
    let mut stored = 0u32;
    for number in 0..1_000_000u32 {
        let block = Block(number.wrapping_mul(0x85eb_ca6b) % blocks);
        stored += u32::from(matches!(image.placement_of(block), BlockPlacement::Stored { .. }));
    }
    assert_eq!(stored, 1_000_000);
    start.elapsed() / 1_000_000
}
