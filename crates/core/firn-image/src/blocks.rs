//! Reads of memory blocks from an image.
//!
//! There are three methods to read the stored bytes: a locality block with one `pread(2)` of its
//! used bytes, several neighbouring ones with one, or a single memory block with one. Each has, or
//! can get, a variant that reads from the page cache only and never waits for storage. All of them
//! reuse the caller's buffer.

use std::cell::RefCell;
use std::ops::Range;

use firn_types::Block;

use crate::compress::{block_checksum, is_zero};
use crate::decode::{DecodeError, decode_stored};
use crate::error::{BlockError, ImageError};
use crate::locality::{BlockEntry, LocalityBlockId};
use crate::placement::BlockPlacement;
use crate::reader::Image;
use crate::source::ImageFile;

thread_local! {
    /// The decrypted bytes of a memory block, for a caller that keeps those that are stored.
    static UNSEALED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The order in which an image is going to be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadOrder {
    /// Scattered reads: the kernel reads the requested bytes and no more.
    Random,
    /// From front to back: the kernel reads ahead.
    Sequential,
}

impl Image {
    /// Reads the used bytes of a locality block: one `pread(2)`. [`BlockEntry::range`] is the range
    /// of a memory block in them.
    pub fn read_locality_block(
        &self,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<(), ImageError> {
        let (source, at) = self.prepare_locality_block(id, bytes)?;
        source.read_exact_at(bytes, at)
    }

    /// As [`Self::read_locality_block`], from the page cache alone: false if it is not there, and
    /// then the kernel begins to read it.
    pub fn try_read_locality_block(
        &self,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<bool, ImageError> {
        let (source, at) = self.prepare_locality_block(id, bytes)?;
        source.try_read_exact_at(bytes, at)
    }

    /// Reads neighbouring locality blocks: one `pread(2)` in each file, up to the last one's used
    /// bytes. The first starts at byte 0, each of the others
    /// [`crate::Geometry::locality_block_bytes`] later.
    ///
    /// With [`ReadOrder::Sequential`], for a caller that also needs the blocks that follow, most
    /// storage is faster: the kernel reads ahead, with longer requests than one such read is split
    /// into.
    pub fn read_locality_blocks(
        &self,
        ids: Range<LocalityBlockId>,
        order: ReadOrder,
        bytes: &mut Vec<u8>,
    ) -> Result<(), ImageError> {
        bytes.clear();
        let Some(last) = ids.end.0.checked_sub(1).filter(|&last| last >= ids.start.0) else {
            return Ok(());
        };
        self.check_id(LocalityBlockId(last))?;
        let start_of = |id: u32| (id - ids.start.0) as usize * self.locality_block_bytes();
        bytes.resize(start_of(last) + self.used_bytes(LocalityBlockId(last)), 0);
        for part in self.split_by_file(ids.start.0..ids.end.0) {
            let end = start_of(part.end).min(bytes.len());
            let (source, at) = self.file_and_offset(LocalityBlockId(part.start));
            let bytes = &mut bytes[start_of(part.start)..end];
            match order {
                ReadOrder::Random => source.read_exact_at(bytes, at)?,
                ReadOrder::Sequential => source.read_exact_in_order(bytes, at)?,
            }
        }
        Ok(())
    }

    /// Reads all bytes of a locality block, padding included.
    pub(crate) fn read_whole_locality_block(
        &self,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<(), ImageError> {
        self.check_id(id)?;
        bytes.resize(self.locality_block_bytes(), 0);
        let (source, at) = self.file_and_offset(id);
        source.read_exact_at(bytes, at)
    }

    /// Reads the stored bytes of one memory block with one `pread(2)`.
    pub fn read_entry(
        &self,
        entry: &BlockEntry,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<(), ImageError> {
        let (source, at) = self.prepare_entry(entry, id, bytes)?;
        source.read_exact_at(bytes, at)
    }

    /// As [`Self::read_entry`], from the page cache alone: false if it is not there, and then the
    /// kernel begins to read it.
    pub fn try_read_entry(
        &self,
        entry: &BlockEntry,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<bool, ImageError> {
        let (source, at) = self.prepare_entry(entry, id, bytes)?;
        source.try_read_exact_at(bytes, at)
    }

    /// Resizes the buffer for a locality block's used bytes, and returns their file and offset.
    fn prepare_locality_block(
        &self,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<(&ImageFile, u64), ImageError> {
        self.check_id(id)?;
        bytes.resize(self.used_bytes(id), 0);
        Ok(self.file_and_offset(id))
    }

    /// Resizes the buffer for a memory block's stored bytes, and returns their file and offset.
    fn prepare_entry(
        &self,
        entry: &BlockEntry,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<(&ImageFile, u64), ImageError> {
        self.check_id(id)?;
        bytes.resize(entry.stored_len as usize, 0);
        let (source, start) = self.file_and_offset(id);
        Ok((source, start + u64::from(entry.offset)))
    }

    fn locality_block_bytes(&self) -> usize {
        self.geometry().locality_block_bytes as usize
    }

    fn check_id(&self, id: LocalityBlockId) -> Result<(), ImageError> {
        let count = self.locality_blocks();
        if id.0 < count {
            return Ok(());
        }
        Err(ImageError::NoLocalityBlock { path: self.path().to_owned(), id, count })
    }

    /// Decodes a memory block from its stored bytes, and checks it. `out` has the length of a
    /// memory block; after an error its content is undefined. After a thread's first block nothing
    /// is allocated.
    pub fn decode_block(
        &self,
        entry: &BlockEntry,
        stored: &[u8],
        out: &mut [u8],
    ) -> Result<(), BlockError> {
        if !self.is_sealed() {
            return self.decode_unsealed(entry, stored, out);
        }
        UNSEALED.with_borrow_mut(|unsealed| {
            unsealed.clear();
            unsealed.extend_from_slice(stored);
            self.decode_in_place(entry, unsealed, out)
        })
    }

    /// As [`Self::decode_block`]. If the image is sealed, the stored bytes are decrypted in place.
    fn decode_in_place(
        &self,
        entry: &BlockEntry,
        stored: &mut [u8],
        out: &mut [u8],
    ) -> Result<(), BlockError> {
        if self.is_sealed() && !self.unseal_entry(entry, stored) {
            let stored_len = stored.len();
            return Err(self.report_block(entry, DecodeError::Seal { stored_len }));
        }
        self.decode_unsealed(entry, stored, out)
    }

    fn decode_unsealed(
        &self,
        entry: &BlockEntry,
        stored: &[u8],
        out: &mut [u8],
    ) -> Result<(), BlockError> {
        let expected = self.geometry().block_size.byte_count();
        if out.len() != expected {
            let found = out.len();
            return Err(self.block_error(entry, DecodeError::Length { expected, found }));
        }
        decode_stored(entry.stored_as, stored, entry.checksum, out)
            .map_err(|source| self.report_block(entry, source))
    }

    /// The error for wrong bytes, of which the file learns, too.
    fn report_block(&self, entry: &BlockEntry, source: DecodeError) -> BlockError {
        if let Some((file, start)) = self.file_of(entry.block) {
            let at = start + u64::from(entry.offset);
            file.report_wrong_bytes(at, u64::from(entry.stored_len));
        }
        self.block_error(entry, source)
    }

    /// The file that has a memory block, and the offset of its locality block there.
    fn file_of(&self, block: Block) -> Option<(&ImageFile, u64)> {
        self.entry_of(block).map(|(id, _)| self.file_and_offset(id))
    }

    fn block_error(&self, entry: &BlockEntry, source: DecodeError) -> BlockError {
        let (path, start) =
            self.file_of(entry.block).map_or((self.path(), 0), |(source, at)| (&source.path, at));
        BlockError {
            block: entry.block,
            path: path.to_owned(),
            offset: start + u64::from(entry.offset),
            stored_len: entry.stored_len,
            source,
        }
    }

    /// Reads one memory block, zeros where nothing is stored; returns whether it is stored. For
    /// work without urgency: one read per memory block. `stored` has its stored form then,
    /// decrypted if the image is sealed.
    pub fn read_block(
        &self,
        block: Block,
        stored: &mut Vec<u8>,
        out: &mut [u8],
    ) -> Result<bool, ImageError> {
        match self.placement_of(block) {
            BlockPlacement::Zero | BlockPlacement::Untouched => {
                out.fill(0);
                Ok(false)
            }
            BlockPlacement::Stored { .. } => {
                let Some((id, entry)) = self.entry_of(block) else { return Ok(false) };
                self.read_entry(entry, id, stored)?;
                self.decode_in_place(entry, stored, out)?;
                Ok(true)
            }
        }
    }

    /// Whether a memory block has these bytes in this image. The old content of `buffer` does not
    /// matter. False if the block cannot be read.
    pub fn holds_bytes(&self, block: Block, bytes: &[u8], buffer: &mut Vec<u8>) -> bool {
        let Some((id, entry)) = self.entry_of(block) else { return is_zero(bytes) };
        if entry.checksum != block_checksum(bytes) || self.read_entry(entry, id, buffer).is_err() {
            return false;
        }
        let mut found = vec![0; bytes.len()];
        self.decode_block(entry, buffer, &mut found).is_ok() && found == bytes
    }

    /// Advises the kernel of the order in which the image is going to be read. The bytes that are
    /// read do not depend on it.
    pub fn advise_order(&self, order: ReadOrder) {
        let advice = match order {
            ReadOrder::Random => rustix::fs::Advice::Random,
            ReadOrder::Sequential => rustix::fs::Advice::Sequential,
        };
        self.layers().iter().for_each(|layer| layer.source.advise_kernel(advice));
    }
}
