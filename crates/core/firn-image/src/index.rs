//! The index of an image: the location of each memory block.
//!
//! ```text
//!   4  number of locality blocks (n)     4  of stored memory blocks (m)     4  of zero runs (z)     4  reserved
//!   n x 2  origin of locality block i: a vCPU, fffd devices, fffe the sweep, ffff not recorded
//!   n x 2  how many memory blocks it has
//!   n x 8  xxh3 of its used bytes
//!   m x 4  memory block, as the zigzag difference to the one before (the first: to 0)
//!   m x 2  stored length in bytes, less one
//!   m x 1  how it is stored: 0 as it is, 1 LZ4, 2 Zstandard, 3 deflate
//!   m x 8  xxh3 of its uncompressed bytes
//!   m x 16 in a sealed image (version 3): authentication code of its stored bytes
//!   z x 4  first memory block of a run of zero blocks
//!   z x 4  its length in memory blocks, less one
//! ```
//!
//! The index consists of columns, because a column compresses better than a row and is parsed by
//! one loop. Memory blocks are listed in the order in which they lie: a block's offset in its
//! locality block is the sum of the stored lengths before it. Zero runs are in ascending order and
//! as long as possible. Blocks that are neither listed nor in a run are untouched.
//!
//! A memory block's checksum is that of the decoded bytes, which a guest gets. The locality block's
//! checksum is that of the stored bytes: codecs can encode the same bytes in several forms, so a
//! flipped bit may leave the memory block unchanged, and only this checksum shows it.
//!
//! In version 1 a memory block is listed at most once. From version 2 on it may be listed again (it
//! was copied while the guest ran, and copied again later): the last listing counts, and a run of
//! zeros takes precedence over any. A reader drops the earlier listings.

use firn_types::Block;

use crate::bytes::ByteReader;
use crate::codec::StoredAs;
use crate::error::ImageFlaw;
use crate::geometry::Geometry;
use crate::header::{VERSION_SEALED, VERSION_WHOLE};
use crate::keys::SealTag;
use crate::locality::{BlockEntry, ENTRIES_MAX, FilledBy, LocalityBlockId};
use crate::placement::{BlockPlacement, PlacementMap};
use crate::steps::decode_steps;

const PLACE: &str = "index";
pub(crate) const HEAD_BYTES: usize = 16;

/// The index of an image, as a reader needs it.
pub(crate) struct ImageIndex {
    /// The first entry of each locality block, and one past the last of all.
    starts: Vec<u32>,
    filled_by: Vec<FilledBy>,
    checksums: Vec<u64>,
    /// Bytes of each locality block that hold a memory block, whether that one still counts or not.
    used: Vec<u32>,
    entries: Vec<BlockEntry>,
    /// The authentication code of each entry, in a sealed image.
    tags: Vec<SealTag>,
    /// Runs of zero blocks: the first block, and the number of blocks.
    zeros: Vec<(u32, u32)>,
    pub(crate) placements: PlacementMap,
    pub(crate) zero_blocks: u32,
}

impl ImageIndex {
    pub(crate) fn entries_of(&self, id: LocalityBlockId) -> Option<&[BlockEntry]> {
        let start = *self.starts.get(id.index())? as usize;
        let end = *self.starts.get(id.index() + 1)? as usize;
        self.entries.get(start..end)
    }

    /// The authentication code of a stored memory block of a sealed image.
    pub(crate) fn tag_of(&self, block: Block) -> Option<&SealTag> {
        match self.placements.get(block) {
            BlockPlacement::Stored { locality_block, slot } => {
                let start = *self.starts.get(locality_block.index())? as usize;
                self.tags.get(start + usize::from(slot))
            }
            BlockPlacement::Zero | BlockPlacement::Untouched => None,
        }
    }

    pub(crate) fn entries(&self) -> &[BlockEntry] {
        &self.entries
    }

    /// The checksum of a locality block's used bytes.
    pub(crate) fn checksum_of(&self, id: LocalityBlockId) -> Option<u64> {
        self.checksums.get(id.index()).copied()
    }

    pub(crate) fn filled_by(&self, id: LocalityBlockId) -> Option<FilledBy> {
        self.filled_by.get(id.index()).copied()
    }

    pub(crate) fn used_bytes(&self, id: LocalityBlockId) -> Option<u32> {
        self.used.get(id.index()).copied()
    }

    pub(crate) fn locality_blocks(&self) -> u32 {
        self.used.len() as u32
    }

    /// Drops data that is only needed when this index is added to a newer one.
    pub(crate) fn forget_zeros(&mut self) {
        self.zeros = Vec::new();
    }

    /// Adds the contents of an older image for the memory blocks that this one does not mention.
    /// Its locality blocks follow those that are in this index already.
    pub(crate) fn add_older(&mut self, older: &Self) {
        let first = self.locality_blocks();
        for &(start, len) in &older.zeros {
            self.zero_blocks += self.placements.fill_zero(Block(start), len);
        }
        for id in (0..older.locality_blocks()).map(LocalityBlockId) {
            let here = LocalityBlockId(first + id.0);
            let start = self.entries.len();
            let first_tag = older.starts.get(id.index()).map_or(0, |&start| start as usize);
            let tags = older.tags.get(first_tag..).unwrap_or_default();
            for (at, &entry) in older.entries_of(id).unwrap_or_default().iter().enumerate() {
                let slot = (self.entries.len() - start) as u16;
                if self.placements.set_stored(entry.block, here, slot) {
                    self.entries.push(entry);
                    self.tags.extend(tags.get(at));
                }
            }
            self.starts.push(self.entries.len() as u32);
        }
        self.filled_by.extend_from_slice(&older.filled_by);
        self.checksums.extend_from_slice(&older.checksums);
        self.used.extend_from_slice(&older.used);
    }
}

/// The maximum number of times that a memory block is listed in an image of version 2, on average.
pub(crate) const LISTED_MAX: u32 = 4;

/// The maximum length of the index of an image of this version, geometry, and number of locality
/// blocks, in bytes.
pub(crate) fn bytes_max(version: u32, geometry: &Geometry, locality_blocks: u32) -> u64 {
    let (blocks, locality_blocks) = (u64::from(geometry.block_count()), u64::from(locality_blocks));
    let listed = if version == VERSION_WHOLE { blocks } else { blocks * u64::from(LISTED_MAX) };
    let stored = listed.min(locality_blocks * ENTRIES_MAX as u64);
    let per_block = if version == VERSION_SEALED { 15 + 16 } else { 15 };
    HEAD_BYTES as u64 + locality_blocks * 12 + stored * per_block + (blocks / 2 + 1) * 8
}

/// Parses an index and checks all of it. Placement tables take `table_bytes_max` bytes at most.
pub(crate) fn parse_index(
    bytes: &[u8],
    version: u32,
    geometry: &Geometry,
    locality_blocks: u32,
    table_bytes_max: u64,
) -> Result<ImageIndex, ImageFlaw> {
    let mut bytes = ByteReader::new(PLACE, bytes);
    let (n, m) = (bytes.read_u32()?, bytes.read_u32()? as usize);
    let (z, reserved) = (bytes.read_u32()? as usize, bytes.read_u32()?);
    if n != locality_blocks || reserved != 0 {
        return Err(
            bytes.flaw_here(format!("{n} locality blocks, the footer says {locality_blocks}"))
        );
    }
    let n = n as usize;
    let filled_by: Vec<_> = bytes.read_column::<2>(n)?.numbers().map(FilledBy::from_code).collect();
    let starts = parse_counts(bytes.read_column::<2>(n)?.numbers(), m)?;
    let checksums = bytes.read_column::<8>(n)?.numbers().collect();
    let rows = parse_rows(&mut bytes, m)?;
    let tags = match version {
        VERSION_SEALED => bytes.read_column::<16>(m)?.iter_arrays().collect(),
        _ => Vec::new(),
    };
    let (firsts, lens) =
        (bytes.read_column::<4>(z)?.numbers(), bytes.read_column::<4>(z)?.numbers());
    bytes.expect_end()?;
    let mut placements = PlacementMap::new(geometry.block_count(), m, table_bytes_max);
    let zeros: Vec<_> = firsts.zip(lens.map(|less_one| less_one.wrapping_add(1))).collect();
    let zero_blocks = place_zeros(&zeros, &mut placements)?;
    let entries = parse_entries(rows, &starts, geometry)?;
    let used = used_bytes(&entries, &starts);
    let mut index = ImageIndex {
        starts,
        filled_by,
        checksums,
        used,
        entries,
        tags,
        zeros,
        placements,
        zero_blocks,
    };
    match version {
        VERSION_WHOLE => index.place_each_once()?,
        _ => index.place_last_listed(geometry)?,
    }
    Ok(index)
}

fn index_flaw(problem: impl Into<String>) -> ImageFlaw {
    ImageFlaw::new(PLACE, 0, problem)
}

/// Converts counts per locality block to the number of the first entry of each.
fn parse_counts(counts: impl Iterator<Item = u16>, m: usize) -> Result<Vec<u32>, ImageFlaw> {
    let mut starts = vec![0];
    let mut end = 0u64;
    for (id, count) in counts.enumerate() {
        if count == 0 || usize::from(count) > ENTRIES_MAX {
            return Err(index_flaw(format!("locality block {id} has {count} memory blocks")));
        }
        end += u64::from(count);
        starts.push(end as u32);
    }
    if end != m as u64 {
        return Err(index_flaw(format!("{m} memory blocks in all, {end} by locality block")));
    }
    Ok(starts)
}

fn place_zeros(runs: &[(u32, u32)], placements: &mut PlacementMap) -> Result<u32, ImageFlaw> {
    let (mut end, mut zero_blocks) = (None, 0);
    for &(first, len) in runs {
        let in_order = end.is_none_or(|end| u64::from(first) > end);
        if !in_order || len == 0 || !placements.set_zero(Block(first), len) {
            return Err(index_flaw(format!(
                "the run of {len} zero blocks from {first} on is impossible"
            )));
        }
        end = Some(u64::from(first) + u64::from(len));
        zero_blocks += len;
    }
    Ok(zero_blocks)
}

/// The index's data on a stored memory block. Its offset in its locality block follows from the
/// blocks before it.
struct IndexRow {
    block: Block,
    stored_len: u32,
    stored_as: u8,
    checksum: u64,
}

fn parse_rows<'a>(
    bytes: &mut ByteReader<'a>,
    m: usize,
) -> Result<impl Iterator<Item = IndexRow> + use<'a>, ImageFlaw> {
    let blocks = decode_steps(bytes.read_column::<4>(m)?.numbers());
    let lens = bytes.read_column::<2>(m)?.numbers();
    let kinds = bytes.read_column::<1>(m)?.numbers();
    let checksums = bytes.read_column::<8>(m)?.numbers();
    let rows = blocks.zip(lens).zip(kinds.zip(checksums));
    Ok(rows.map(|((block, len), (stored_as, checksum))| IndexRow {
        block,
        stored_len: u32::from(len) + 1,
        stored_as,
        checksum,
    }))
}

fn parse_entries(
    mut rows: impl Iterator<Item = IndexRow>,
    starts: &[u32],
    geometry: &Geometry,
) -> Result<Vec<BlockEntry>, ImageFlaw> {
    let count = starts.last().map_or(0, |&end| end as usize);
    let mut entries = Vec::with_capacity(count);
    for (id, pair) in starts.windows(2).enumerate() {
        let mut offset = 0;
        for (slot, row) in rows.by_ref().take((pair[1] - pair[0]) as usize).enumerate() {
            let entry = row.into_entry(offset, geometry).map_err(|problem| {
                index_flaw(format!("{}, slot {slot}: {problem}", LocalityBlockId(id as u32)))
            })?;
            offset += entry.stored_len;
            entries.push(entry);
        }
    }
    Ok(entries)
}

fn used_bytes(entries: &[BlockEntry], starts: &[u32]) -> Vec<u32> {
    let last = |end: &u32| entries.get((*end as usize).checked_sub(1)?);
    starts
        .iter()
        .skip(1)
        .map(|end| last(end).map_or(0, |entry| entry.end_offset() as u32))
        .collect()
}

impl ImageIndex {
    /// Version 1: a block that is listed twice, or is a zero block as well, is a flaw.
    fn place_each_once(&mut self) -> Result<(), ImageFlaw> {
        for (id, pair) in self.starts.windows(2).enumerate() {
            let id = LocalityBlockId(id as u32);
            let entries = self.entries.get(pair[0] as usize..pair[1] as usize).unwrap_or_default();
            for (slot, entry) in entries.iter().enumerate() {
                if !self.placements.set_stored(entry.block, id, slot as u16) {
                    let block = entry.block;
                    let problem = "is listed twice, or past the end";
                    return Err(index_flaw(format!("{id}, slot {slot}: {block} {problem}")));
                }
            }
        }
        Ok(())
    }

    /// Version 2: the last listing counts, and the others are removed.
    fn place_last_listed(&mut self, geometry: &Geometry) -> Result<(), ImageFlaw> {
        if let Some(entry) = self.entries.iter().find(|it| it.block.0 >= geometry.block_count()) {
            return Err(index_flaw(format!("{} is past the end", entry.block)));
        }
        let mut counts = vec![false; self.entries.len()];
        for (counts, entry) in counts.iter_mut().zip(&self.entries).rev() {
            *counts = self.placements.set_stored(entry.block, LocalityBlockId(0), 0);
        }
        let listed = counts.iter().filter(|&&counts| counts).count();
        let entries = std::mem::replace(&mut self.entries, Vec::with_capacity(listed));
        let tags = std::mem::take(&mut self.tags);
        let starts = self.starts.clone();
        for (id, pair) in starts.windows(2).enumerate() {
            let range = pair[0] as usize..pair[1] as usize;
            let start = self.entries.len();
            for at in range.filter(|&at| counts[at]) {
                let (entry, slot) = (entries[at], (self.entries.len() - start) as u16);
                self.placements.move_to(entry.block, LocalityBlockId(id as u32), slot);
                self.entries.push(entry);
                self.tags.extend(tags.get(at));
            }
            self.starts[id + 1] = self.entries.len() as u32;
        }
        Ok(())
    }
}

impl IndexRow {
    fn into_entry(self, offset: u32, geometry: &Geometry) -> Result<BlockEntry, String> {
        let Self { block, stored_len, stored_as, checksum } = self;
        let stored_as =
            StoredAs::from_code(stored_as).ok_or_else(|| format!("no codec {stored_as}"))?;
        let entry = BlockEntry { block, offset, stored_len, stored_as, checksum };
        check_entry(&entry, geometry).map(|()| entry)
    }
}

/// Checks that a memory block can lie in a locality block in this form.
pub(crate) fn check_entry(entry: &BlockEntry, geometry: &Geometry) -> Result<(), String> {
    let (len, whole) = (entry.stored_len as usize, geometry.block_size.byte_count());
    let len_is_possible = match entry.stored_as {
        StoredAs::Raw => len == whole,
        _ => len > 0 && len < whole,
    };
    if !len_is_possible {
        return Err(format!("{len} bytes stored as {:?}", entry.stored_as));
    }
    if entry.end_offset() > geometry.locality_block_bytes as usize {
        return Err(format!("ends at byte {} of the locality block", entry.end_offset()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index_builder::{IndexBuilder, ListingRule};
    use crate::locality::LocalityBlock;
    use crate::placement::BlockPlacement;

    fn entry(block: u32, offset: u32, stored_len: u32) -> BlockEntry {
        let stored_as = if stored_len == 8192 { StoredAs::Raw } else { StoredAs::Lz4 };
        BlockEntry {
            block: Block(block),
            offset,
            stored_len,
            stored_as,
            checksum: u64::from(block),
        }
    }

    fn filled(entries: Vec<BlockEntry>) -> LocalityBlock {
        let bytes = vec![1; entries.last().map_or(0, BlockEntry::end_offset)];
        LocalityBlock { filled_by: FilledBy::Sweep, entries, bytes }
    }

    fn builder() -> IndexBuilder {
        let mut builder = IndexBuilder::new(Geometry::new(200), ListingRule::Once);
        assert!(
            builder
                .add_locality_block(&filled(vec![entry(9, 0, 100), entry(3, 100, 8192)]))
                .is_ok()
        );
        assert!(builder.add_locality_block(&filled(vec![entry(99, 0, 1)])).is_ok());
        for block in [5, 4, 7] {
            assert!(builder.add_zero(Block(block)).is_ok());
        }
        builder
    }

    #[test]
    fn decoding_returns_the_encoded_value() {
        let geometry = Geometry::new(200);
        let index = parse_index(&builder().encode(), 1, &geometry, 2, u64::MAX).unwrap();
        assert_eq!(index.entries_of(LocalityBlockId(0)).unwrap()[1], entry(3, 100, 8192));
        assert_eq!(index.entries_of(LocalityBlockId(1)).unwrap(), [entry(99, 0, 1)]);
        assert_eq!(index.entries_of(LocalityBlockId(2)), None);
        assert_eq!(index.filled_by(LocalityBlockId(1)), Some(FilledBy::Sweep));
        let stored = BlockPlacement::Stored { locality_block: LocalityBlockId(0), slot: 1 };
        assert_eq!(index.placements.get(Block(3)), stored);
        assert_eq!(index.placements.get(Block(5)), BlockPlacement::Zero);
        assert_eq!(index.placements.get(Block(6)), BlockPlacement::Untouched);
        assert_eq!(index.zero_blocks, 3);
    }

    #[test]
    fn the_limit_is_not_too_low() {
        let bytes = builder().encode();
        assert!(bytes.len() as u64 <= bytes_max(1, &Geometry::new(200), 2));
    }

    #[test]
    fn impossible_locality_blocks_are_refused() {
        let refused = |entries| builder().add_locality_block(&filled(entries)).is_err();
        assert!(refused(vec![]));
        assert!(refused(vec![entry(3, 0, 10)]), "twice");
        assert!(refused(vec![entry(5, 0, 10)]), "is zero");
        assert!(refused(vec![entry(100, 0, 10)]), "past the end");
        assert!(refused(vec![entry(50, 1, 10)]), "does not start at 0");
        assert!(refused(vec![entry(50, 0, 8193)]), "longer than a block");
        let nine = (0..9).map(|i| entry(50 + i, i * 8192, 8192)).collect();
        assert!(refused(nine), "does not fit");
        assert!(builder().add_zero(Block(9)).is_err());
        assert!(builder().add_zero(Block(100)).is_err());
    }

    #[test]
    fn nonsense_is_an_error() {
        let (good, geometry) = (builder().encode(), Geometry::new(200));
        for (at, value) in [(0, 3), (4, 9), (8, 1), (12, 1), (20, 0), (21, 99), (40, 200)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(parse_index(&bad, 1, &geometry, 2, u64::MAX).is_err(), "byte {at}");
        }
        for len in 0..good.len() {
            assert!(parse_index(&good[..len], 1, &geometry, 2, u64::MAX).is_err(), "length {len}");
        }
    }

    fn again() -> ImageIndex {
        let geometry = Geometry::new(200);
        let mut builder = IndexBuilder::new(geometry, ListingRule::Last);
        assert!(builder.add_zero(Block(3)).is_ok());
        assert!(
            builder.add_locality_block(&filled(vec![entry(9, 0, 100), entry(3, 100, 50)])).is_ok()
        );
        assert!(
            builder.add_locality_block(&filled(vec![entry(7, 0, 10), entry(9, 10, 20)])).is_ok()
        );
        assert!(builder.add_zero(Block(7)).is_ok());
        assert_eq!((builder.stored_blocks(), builder.zero_blocks()), (2, 1));
        assert_eq!(builder.stored_bytes(), 70);
        parse_index(&builder.encode(), 2, &geometry, 2, u64::MAX).unwrap()
    }

    #[test]
    fn a_block_that_is_listed_twice_counts_once() {
        let index = again();
        assert_eq!(index.entries_of(LocalityBlockId(0)).unwrap(), [entry(3, 100, 50)]);
        assert_eq!(index.entries_of(LocalityBlockId(1)).unwrap(), [entry(9, 10, 20)]);
        assert_eq!(index.placements.get(Block(7)), BlockPlacement::Zero);
        let stored = BlockPlacement::Stored { locality_block: LocalityBlockId(1), slot: 0 };
        assert_eq!(index.placements.get(Block(9)), stored);
        assert_eq!((index.used_bytes(LocalityBlockId(0)), index.zero_blocks), (Some(150), 1));
    }

    #[test]
    fn blocks_that_an_image_lacks_are_read_from_its_parent() {
        let mut index = again();
        let geometry = Geometry::new(200);
        index.add_older(&parse_index(&builder().encode(), 1, &geometry, 2, u64::MAX).unwrap());
        assert_eq!(index.locality_blocks(), 4);
        assert_eq!(index.entries_of(LocalityBlockId(2)).unwrap(), [], "both are newer above");
        assert_eq!(index.entries_of(LocalityBlockId(3)).unwrap(), [entry(99, 0, 1)]);
        assert_eq!(index.used_bytes(LocalityBlockId(2)), Some(8292));
        let zeros = (0..100).filter(|&it| index.placements.get(Block(it)) == BlockPlacement::Zero);
        assert_eq!(zeros.collect::<Vec<_>>(), [4, 5, 7]);
        assert_eq!(index.zero_blocks, 3);
    }
}
