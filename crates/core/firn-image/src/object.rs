//! What an image in object storage needs besides reads: bytes that are requested in advance.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use firn_types::Block;

use crate::error::ImageError;
use crate::locality::LocalityBlockId;
use crate::reader::Image;

/// Locality blocks that are requested as one range, if so many of the working set follow each other.
const RANGE_BLOCKS_MAX: u32 = 64;

/// A locality block of a file, and ranges to fetch there.
type FileRanges = (LocalityBlockId, Vec<(u64, u64)>);

impl Image {
    /// Requests the memory of its working set, in that order, if it is in object storage: the bytes come
    /// while the hypervisor starts. Does not wait for them.
    ///
    /// # Errors
    /// If they can't be requested. Reads of them may succeed nevertheless.
    pub fn prefetch_working_set(&self) -> Result<(), ImageError> {
        self.prefetch_blocks(self.working_set())
    }

    /// Has the next read of a locality block fetch its bytes once more: those in the cache are wrong. False
    /// if its file is no object of the cache.
    pub(crate) fn mark_for_refetch(&self, id: LocalityBlockId) -> bool {
        let (file, offset) = self.file_and_offset(id);
        file.report_wrong_bytes(offset, u64::from(self.geometry().locality_block_bytes))
    }

    /// Requests what nothing has requested yet, and does not wait for it: bytes that no memory block
    /// is in any more. With them, the whole object is in the cache.
    ///
    /// # Errors
    /// If the cache can't be asked.
    pub fn prefetch_rest(&self) -> Result<(), ImageError> {
        let mut lacking = self.layers().iter().filter(|layer| layer.source.lacks_bytes());
        lacking.try_for_each(|layer| layer.source.prefetch_all())
    }

    /// Whether bytes of its files are in object storage only. False if they were all fetched before, by
    /// this process or before it opened the image.
    pub fn is_in_store(&self) -> bool {
        self.layers().iter().any(|layer| layer.source.lacks_bytes())
    }

    /// Requests memory blocks that will be read soon, as [`Self::prefetch_working_set`] does.
    ///
    /// # Errors
    /// If the cache can't be asked.
    pub fn prefetch_blocks(&self, blocks: &[Block]) -> Result<(), ImageError> {
        let mut seen = HashSet::new();
        let ids = blocks.iter().filter_map(|&block| Some(self.entry_of(block)?.0));
        let ids: Vec<_> = ids.filter(|&id| seen.insert(id)).collect();
        // The ranges of each file, by its path.
        let mut ranges: BTreeMap<&Path, FileRanges> = BTreeMap::new();
        for id in ids {
            let (file, offset) = self.file_and_offset(id);
            let len = self.used_bytes(id) as u64;
            let (_, list) = ranges.entry(&file.path).or_insert_with(|| (id, Vec::new()));
            let unit = u64::from(self.geometry().locality_block_bytes);
            match list.last_mut() {
                Some((start, sum))
                    if offset.checked_sub(*start) == Some(sum.next_multiple_of(unit))
                        && *sum < unit * u64::from(RANGE_BLOCKS_MAX) =>
                {
                    *sum = offset - *start + len;
                }
                _ => list.push((offset, len)),
            }
        }
        ranges.into_values().try_for_each(|(id, list)| self.file_and_offset(id).0.prefetch(list))
    }

    /// Fetches what is missing of its own file, if it is in object storage: for a check of all its
    /// bytes.
    ///
    /// # Errors
    /// If it can't be fetched.
    pub fn fetch_own_file(&self) -> Result<(), ImageError> {
        self.layers().first().map_or(Ok(()), |layer| layer.source.fetch_all())
    }
}
