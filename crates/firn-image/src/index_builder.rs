//! The index of an image while it is written. What a reader would refuse is refused here.

use firn_types::Block;
use xxhash_rust::xxh3::xxh3_64;

use crate::geometry::Geometry;
use crate::index::{HEAD_BYTES, check_entry};
use crate::locality::{ENTRIES_MAX, Entry, FilledBy, LocalityBlock, LocalityBlockId};
use crate::placement::Placements;
use crate::steps::steps;

/// The index of an image that is being written.
pub(crate) struct IndexBuilder {
    geometry: Geometry,
    filled_by: Vec<FilledBy>,
    counts: Vec<u16>,
    checksums: Vec<u64>,
    entries: Vec<Entry>,
    placements: Placements,
    zeros: Vec<Block>,
}

/// Why a locality block can't be added.
pub(crate) enum Refusal {
    Entry(String),
    Range(Block),
    Twice(Block),
}

impl IndexBuilder {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            filled_by: Vec::new(),
            counts: Vec::new(),
            checksums: Vec::new(),
            entries: Vec::new(),
            placements: Placements::new(geometry.blocks(), 0),
            zeros: Vec::new(),
        }
    }

    /// How many locality blocks were added.
    pub(crate) fn locality_blocks(&self) -> u32 {
        self.counts.len() as u32
    }

    pub(crate) fn stored_blocks(&self) -> u32 {
        self.entries.len() as u32
    }

    pub(crate) fn stored_bytes(&self) -> u64 {
        self.entries.iter().map(|entry| u64::from(entry.stored_len)).sum()
    }

    pub(crate) fn zero_blocks(&self) -> u32 {
        self.zeros.len() as u32
    }

    /// Adds the next locality block.
    pub(crate) fn add(&mut self, filled: &LocalityBlock) -> Result<LocalityBlockId, Refusal> {
        let id = LocalityBlockId(self.locality_blocks());
        self.check(filled)?;
        for (slot, entry) in filled.entries.iter().enumerate() {
            self.claim(entry.block, |placements| {
                placements.set_stored(entry.block, id, slot as u16)
            })?;
        }
        self.filled_by.push(filled.filled_by);
        self.counts.push(filled.entries.len() as u16);
        self.checksums.push(xxh3_64(&filled.bytes));
        self.entries.extend_from_slice(&filled.entries);
        Ok(id)
    }

    fn check(&self, filled: &LocalityBlock) -> Result<(), Refusal> {
        let count = filled.entries.len();
        if count == 0 || count > ENTRIES_MAX {
            return Err(Refusal::Entry(format!("{count} memory blocks, 1 to {ENTRIES_MAX} fit")));
        }
        let mut end = 0;
        for (slot, entry) in filled.entries.iter().enumerate() {
            check_entry(entry, &self.geometry)
                .map_err(|problem| Refusal::Entry(format!("slot {slot}: {problem}")))?;
            if entry.offset as usize != end {
                return Err(Refusal::Entry(format!("slot {slot} does not start at byte {end}")));
            }
            end = entry.end();
        }
        if filled.bytes.len() != end {
            let len = filled.bytes.len();
            return Err(Refusal::Entry(format!("{len} bytes, its memory blocks have {end}")));
        }
        Ok(())
    }

    /// Records a zero block.
    pub(crate) fn add_zero(&mut self, block: Block) -> Result<(), Refusal> {
        self.claim(block, |placements| placements.set_zero(block, 1))?;
        self.zeros.push(block);
        Ok(())
    }

    fn claim(
        &mut self,
        block: Block,
        set: impl FnOnce(&mut Placements) -> bool,
    ) -> Result<(), Refusal> {
        if block.0 >= self.geometry.blocks() {
            return Err(Refusal::Range(block));
        }
        if set(&mut self.placements) { Ok(()) } else { Err(Refusal::Twice(block)) }
    }

    /// The index as it is stored.
    pub(crate) fn encode(mut self) -> Vec<u8> {
        let runs = self.zero_runs();
        let entries = &self.entries;
        let mut out = Vec::with_capacity(
            HEAD_BYTES + self.counts.len() * 12 + entries.len() * 15 + runs.len() * 8,
        );
        let head = [self.counts.len(), entries.len(), runs.len(), 0];
        out.extend(head.iter().flat_map(|&number| (number as u32).to_le_bytes()));
        out.extend(self.filled_by.iter().flat_map(|by| by.code().to_le_bytes()));
        out.extend(self.counts.iter().flat_map(|count| count.to_le_bytes()));
        out.extend(self.checksums.iter().flat_map(|checksum| checksum.to_le_bytes()));
        out.extend(steps(entries.iter().map(|entry| entry.block)).flat_map(u32::to_le_bytes));
        out.extend(
            entries
                .iter()
                .flat_map(|entry| (entry.stored_len as u16).wrapping_sub(1).to_le_bytes()),
        );
        out.extend(entries.iter().map(|entry| entry.stored_as as u8));
        out.extend(entries.iter().flat_map(|entry| entry.checksum.to_le_bytes()));
        out.extend(runs.iter().flat_map(|(first, _)| first.to_le_bytes()));
        out.extend(runs.iter().flat_map(|(_, len)| (len - 1).to_le_bytes()));
        out
    }

    /// Zero blocks as runs, each as long as can be: (first, length in blocks).
    fn zero_runs(&mut self) -> Vec<(u32, u32)> {
        self.zeros.sort_unstable();
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for &Block(block) in &self.zeros {
            match runs.last_mut() {
                Some((first, len)) if *first + *len == block => *len += 1,
                _ => runs.push((block, 1)),
            }
        }
        runs
    }
}
