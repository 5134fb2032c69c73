//! Memory blocks out of an image.
//!
//! Three ways to the stored bytes: a locality block with one `pread(2)` of its used bytes, several that lie side by side
//! with one, or a single memory block with one. Each has, or can be given, a form that takes what the page cache has and
//! never waits for storage. All of them reuse the caller's buffer.

use std::ops::Range;

use firn_types::Block;

use crate::compress::{checksum, is_zero};
use crate::decode::{DecodeError, decode};
use crate::error::{BlockError, ImageError};
use crate::locality::{Entry, LocalityBlockId};
use crate::placement::Placement;
use crate::reader::Image;
use crate::source::Source;

/// The order in which an image is going to be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadOrder {
    /// Here and there: the kernel reads what is asked for and no more.
    Random,
    /// From front to back: the kernel reads ahead.
    Sequential,
}

impl Image {
    /// Reads the used bytes of a locality block: one `pread(2)`. [`Entry::range`] is a memory block's place in them.
    pub fn read_locality_block(
        &self,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<(), ImageError> {
        let (source, at) = self.place_locality_block(id, bytes)?;
        source.read_exact_at(bytes, at)
    }

    /// The same, from the page cache alone: false if it is not there, and then the kernel goes on to read it.
    pub fn try_read_locality_block(
        &self,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<bool, ImageError> {
        let (source, at) = self.place_locality_block(id, bytes)?;
        source.try_read_exact_at(bytes, at)
    }

    /// Reads neighbouring locality blocks: one `pread(2)` in each file, up to the last one's used bytes. The first starts
    /// at byte 0, each of the others [`crate::Geometry::locality_block_bytes`] further on.
    ///
    /// Who reads in order, and wants what follows too, gets more of most storage: the kernel reads ahead of it, with
    /// longer requests than one such read is cut into.
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
        for part in self.by_file(ids.start.0..ids.end.0) {
            let end = start_of(part.end).min(bytes.len());
            let (source, at) = self.place(LocalityBlockId(part.start));
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
        let (source, at) = self.place(id);
        source.read_exact_at(bytes, at)
    }

    /// Reads the stored bytes of one memory block: one `pread(2)`, no more.
    pub fn read_entry(
        &self,
        entry: &Entry,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<(), ImageError> {
        let (source, at) = self.place_entry(entry, id, bytes)?;
        source.read_exact_at(bytes, at)
    }

    /// The same, from the page cache alone: false if it is not there, and then the kernel goes on to read it.
    pub fn try_read_entry(
        &self,
        entry: &Entry,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<bool, ImageError> {
        let (source, at) = self.place_entry(entry, id, bytes)?;
        source.try_read_exact_at(bytes, at)
    }

    /// Makes room for a locality block's used bytes, and says where in the file they are.
    fn place_locality_block(
        &self,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<(&Source, u64), ImageError> {
        self.check_id(id)?;
        bytes.resize(self.used_bytes(id), 0);
        Ok(self.place(id))
    }

    /// Makes room for a memory block's stored bytes, and says where in the file they are.
    fn place_entry(
        &self,
        entry: &Entry,
        id: LocalityBlockId,
        bytes: &mut Vec<u8>,
    ) -> Result<(&Source, u64), ImageError> {
        self.check_id(id)?;
        bytes.resize(entry.stored_len as usize, 0);
        let (source, start) = self.place(id);
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

    /// Makes a memory block whole again from its stored bytes, and checks it. `out` has the length of a memory block;
    /// after an error its content is undefined. After a thread's first block nothing is allocated.
    pub fn decode(&self, entry: &Entry, stored: &[u8], out: &mut [u8]) -> Result<(), BlockError> {
        let expected = self.geometry().block_size.bytes();
        if out.len() != expected {
            let found = out.len();
            return Err(self.block_error(entry, DecodeError::Length { expected, found }));
        }
        decode(entry.stored_as, stored, entry.checksum, out)
            .map_err(|source| self.block_error(entry, source))
    }

    fn block_error(&self, entry: &Entry, source: DecodeError) -> BlockError {
        let found = self.entry_of(entry.block).map(|(id, _)| self.place(id));
        let (path, start) = found.map_or((self.path(), 0), |(source, at)| (&source.path, at));
        BlockError {
            block: entry.block,
            path: path.to_owned(),
            offset: start + u64::from(entry.offset),
            stored_len: entry.stored_len,
            source,
        }
    }

    /// Reads one memory block whole, zeros where nothing is stored; says whether it is stored. For work that is not in
    /// a hurry: one read per memory block.
    pub fn read_block(
        &self,
        block: Block,
        stored: &mut Vec<u8>,
        out: &mut [u8],
    ) -> Result<bool, ImageError> {
        match self.lookup(block) {
            Placement::Zero | Placement::Untouched => {
                out.fill(0);
                Ok(false)
            }
            Placement::Stored { .. } => {
                let Some((id, entry)) = self.entry_of(block) else { return Ok(false) };
                self.read_entry(entry, id, stored)?;
                self.decode(entry, stored, out)?;
                Ok(true)
            }
        }
    }

    /// Whether a memory block has these bytes here. `buffer` may hold anything. No, if that can't be read.
    pub fn holds(&self, block: Block, bytes: &[u8], buffer: &mut Vec<u8>) -> bool {
        let Some((id, entry)) = self.entry_of(block) else { return is_zero(bytes) };
        if entry.checksum != checksum(bytes) || self.read_entry(entry, id, buffer).is_err() {
            return false;
        }
        let mut found = vec![0; bytes.len()];
        self.decode(entry, buffer, &mut found).is_ok() && found == bytes
    }

    /// Tells the kernel how the image is going to be read. Without effect on what is read.
    pub fn advise(&self, order: ReadOrder) {
        let advice = match order {
            ReadOrder::Random => rustix::fs::Advice::Random,
            ReadOrder::Sequential => rustix::fs::Advice::Sequential,
        };
        self.layers().iter().for_each(|layer| layer.source.advise(advice));
    }
}
