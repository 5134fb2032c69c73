//! The index of an image while it is written. It refuses everything that a reader would refuse.

use firn_types::Block;
use twox_hash::XxHash3_64;

use crate::bitmap::Bitmap;
use crate::geometry::Geometry;
use crate::index::{HEAD_BYTES, LISTED_MAX, check_entry};
use crate::keys::SealTag;
use crate::locality::{BlockEntry, ENTRIES_MAX, FilledBy, LocalityBlock, LocalityBlockId};
use crate::runs::BlockRuns;
use crate::steps::encode_steps;

/// The rule for listing a memory block again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ListingRule {
    /// It may not be listed again: version 1.
    Once,
    /// It may, and the last listing counts: version 2.
    Last,
}

/// The index of an image that is being written.
pub(crate) struct IndexBuilder {
    geometry: Geometry,
    listing: ListingRule,
    filled_by: Vec<FilledBy>,
    counts: Vec<u16>,
    checksums: Vec<u64>,
    entries: Vec<BlockEntry>,
    /// The authentication code of each entry, in a sealed image.
    tags: Vec<SealTag>,
    stored: Bitmap,
    zeros: Bitmap,
    /// More zero blocks, none of which is in either set.
    zero_runs: BlockRuns,
}

/// Why a locality block or a zero block cannot be added.
pub(crate) enum AppendRefusal {
    Entry(String),
    Range(Block),
    Twice(Block),
    TooOften,
}

impl IndexBuilder {
    pub(crate) fn new(geometry: Geometry, listing: ListingRule) -> Self {
        Self {
            geometry,
            listing,
            filled_by: Vec::new(),
            counts: Vec::new(),
            checksums: Vec::new(),
            entries: Vec::new(),
            tags: Vec::new(),
            stored: Bitmap::new(geometry.block_count()),
            zeros: Bitmap::new(geometry.block_count()),
            zero_runs: BlockRuns::default(),
        }
    }

    /// The number of locality blocks that were added.
    pub(crate) fn locality_blocks(&self) -> u32 {
        self.counts.len() as u32
    }

    pub(crate) fn stored_blocks(&self) -> u32 {
        self.stored.len()
    }

    /// Stored bytes of the memory blocks, each by its last listing.
    pub(crate) fn stored_bytes(&self) -> u64 {
        let mut left = self.stored.clone();
        let last = self.entries.iter().rev().filter(|entry| left.remove_block(entry.block));
        last.map(|entry| u64::from(entry.stored_len)).sum()
    }

    pub(crate) fn zero_blocks(&self) -> u32 {
        self.zeros.len() + self.zero_runs.len()
    }

    /// Records zero blocks. Call this before any other block is added.
    pub(crate) fn set_zeros(&mut self, zeros: BlockRuns) {
        self.zero_runs = zeros;
    }

    /// Records the authentication codes of the memory blocks of the locality block that was added
    /// last.
    pub(crate) fn add_tags(&mut self, tags: Vec<SealTag>) {
        self.tags.extend(tags);
    }

    /// Adds the next locality block.
    pub(crate) fn add_locality_block(
        &mut self,
        filled: &LocalityBlock,
    ) -> Result<LocalityBlockId, AppendRefusal> {
        let id = LocalityBlockId(self.locality_blocks());
        self.check_locality_block(filled)?;
        for entry in &filled.entries {
            self.claim_block(entry.block)?;
            self.stored.insert(entry.block);
        }
        self.filled_by.push(filled.filled_by);
        self.counts.push(filled.entries.len() as u16);
        self.checksums.push(XxHash3_64::oneshot(&filled.bytes));
        self.entries.extend_from_slice(&filled.entries);
        Ok(id)
    }

    fn check_locality_block(&self, filled: &LocalityBlock) -> Result<(), AppendRefusal> {
        let count = filled.entries.len();
        if count == 0 || count > ENTRIES_MAX {
            return Err(AppendRefusal::Entry(format!(
                "{count} memory blocks, 1 to {ENTRIES_MAX} fit"
            )));
        }
        let mut end = 0;
        for (slot, entry) in filled.entries.iter().enumerate() {
            check_entry(entry, &self.geometry)
                .map_err(|problem| AppendRefusal::Entry(format!("slot {slot}: {problem}")))?;
            if entry.offset as usize != end {
                return Err(AppendRefusal::Entry(format!(
                    "slot {slot} does not start at byte {end}"
                )));
            }
            end = entry.end_offset();
        }
        if filled.bytes.len() != end {
            let len = filled.bytes.len();
            return Err(AppendRefusal::Entry(format!("{len} bytes, its memory blocks have {end}")));
        }
        Ok(())
    }

    /// Records a zero block.
    pub(crate) fn add_zero(&mut self, block: Block) -> Result<(), AppendRefusal> {
        self.claim_block(block)?;
        self.zeros.insert(block);
        Ok(())
    }

    /// Forgets the earlier record of a block, if any: the caller is about to record it anew.
    fn claim_block(&mut self, block: Block) -> Result<(), AppendRefusal> {
        if block.0 >= self.geometry.block_count() {
            return Err(AppendRefusal::Range(block));
        }
        let was_recorded = self.stored.remove_block(block) | self.zeros.remove_block(block);
        if !self.zero_runs.is_empty() && self.zero_runs.contains(block) {
            return Err(AppendRefusal::Twice(block));
        }
        match self.listing {
            ListingRule::Once if was_recorded => Err(AppendRefusal::Twice(block)),
            ListingRule::Last if self.is_full() => Err(AppendRefusal::TooOften),
            _ => Ok(()),
        }
    }

    fn is_full(&self) -> bool {
        self.entries.len() as u64 >= u64::from(self.geometry.block_count()) * u64::from(LISTED_MAX)
    }

    /// The index in its stored form.
    pub(crate) fn encode(self) -> Vec<u8> {
        let runs = self.zero_runs();
        let entries = &self.entries;
        let mut out = Vec::with_capacity(
            HEAD_BYTES
                + self.counts.len() * 12
                + entries.len() * 15
                + self.tags.len() * 16
                + runs.len() * 8,
        );
        let head = [self.counts.len(), entries.len(), runs.len(), 0];
        out.extend(head.iter().flat_map(|&number| (number as u32).to_le_bytes()));
        out.extend(self.filled_by.iter().flat_map(|by| by.code().to_le_bytes()));
        out.extend(self.counts.iter().flat_map(|count| count.to_le_bytes()));
        out.extend(self.checksums.iter().flat_map(|checksum| checksum.to_le_bytes()));
        out.extend(
            encode_steps(entries.iter().map(|entry| entry.block)).flat_map(u32::to_le_bytes),
        );
        out.extend(
            entries
                .iter()
                .flat_map(|entry| (entry.stored_len as u16).wrapping_sub(1).to_le_bytes()),
        );
        out.extend(entries.iter().map(|entry| entry.stored_as as u8));
        out.extend(entries.iter().flat_map(|entry| entry.checksum.to_le_bytes()));
        out.extend(self.tags.iter().flatten());
        out.extend(runs.iter().flat_map(|(first, _)| first.to_le_bytes()));
        out.extend(runs.iter().flat_map(|(_, len)| (len - 1).to_le_bytes()));
        out
    }

    /// Zero blocks as runs, each as long as possible: (first, length in blocks).
    fn zero_runs(&self) -> Vec<(u32, u32)> {
        let added: BlockRuns = self.zeros.iter().map(|block| block.0..block.0 + 1).collect();
        let all = added.union(&self.zero_runs);
        all.iter_runs().map(|run| (run.start, run.end - run.start)).collect()
    }
}
