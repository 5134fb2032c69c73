//! Compression of memory blocks.
//!
//! Each thread keeps its compressors, so that none is made for every block.

use std::cell::RefCell;

use firn_types::Block;
use flate2::{Compress, Compression, FlushCompress, Status};
use lz4_flex::block::CompressTable;
use twox_hash::XxHash3_64;

use crate::codec::{Codec, StoredAs};

/// The stored form of one memory block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PackedBlock {
    /// The memory block.
    pub block: Block,
    /// Its stored bytes: at most as many as the memory block has.
    pub stored: Vec<u8>,
    /// The form in which they are stored.
    pub stored_as: StoredAs,
    /// xxh3 (64 bits) of the uncompressed bytes.
    pub checksum: u64,
}

/// The result of compressing a memory block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CompressedBlock {
    /// It is all zeros, and takes no space.
    Zero,
    /// It is to be stored.
    Packed(PackedBlock),
}

/// Compresses a memory block into its stored form.
pub fn compress_block(codec: Codec, block: Block, raw: &[u8]) -> CompressedBlock {
    if is_zero(raw) {
        return CompressedBlock::Zero;
    }
    let checksum = block_checksum(raw);
    let (stored_as, stored) = COMPRESSORS.with_borrow_mut(|compressors| {
        match compressors
            .compress_into_buffer(codec, raw)
            .filter(|(_, stored)| stored.len() < raw.len())
        {
            Some((stored_as, stored)) => (stored_as, stored.to_vec()),
            None => (StoredAs::Raw, raw.to_vec()),
        }
    });
    CompressedBlock::Packed(PackedBlock { block, stored, stored_as, checksum })
}

/// The checksum under which a memory block is stored: xxh3, 64 bits, of its uncompressed bytes.
pub fn block_checksum(raw: &[u8]) -> u64 {
    XxHash3_64::oneshot(raw)
}

/// Whether all bytes are zero. Stops at the first 64 bytes that are not.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let lines = bytes.chunks_exact(64);
    let rest = lines.remainder();
    let all_zero = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all | byte) == 0;
    lines.clone().all(all_zero) && all_zero(rest)
}

thread_local! {
    static COMPRESSORS: RefCell<CompressorSet> = RefCell::new(CompressorSet::default());
}

/// The compressors of one thread. Each is made at its first use, and again when the level changes.
#[derive(Default)]
struct CompressorSet {
    out: Vec<u8>,
    lz4: Option<CompressTable>,
    zstd: Option<(i8, zstd::bulk::Compressor<'static>)>,
    deflate: Option<(u8, Compress)>,
}

impl CompressorSet {
    /// Compresses. `None` if the codec is `none`, or the result would be longer than allowed.
    fn compress_into_buffer(&mut self, codec: Codec, raw: &[u8]) -> Option<(StoredAs, &[u8])> {
        let (stored_as, len) = match codec {
            Codec::None => return None,
            Codec::Lz4 => (StoredAs::Lz4, self.compress_lz4(raw)?),
            Codec::Zstd { level } => (StoredAs::Zstd, self.compress_zstd(level, raw)?),
            Codec::Zlib { level } => (StoredAs::Deflate, self.compress_deflate(level, raw)?),
        };
        Some((stored_as, self.out.get(..len)?))
    }

    fn compress_lz4(&mut self, raw: &[u8]) -> Option<usize> {
        self.out.resize(lz4_flex::block::get_maximum_output_size(raw.len()), 0);
        let table = self.lz4.get_or_insert_default();
        lz4_flex::block::compress_into_with_table(raw, &mut self.out, table).ok()
    }

    fn compress_zstd(&mut self, level: i8, raw: &[u8]) -> Option<usize> {
        if self.zstd.as_ref().is_none_or(|(made_for, _)| *made_for != level) {
            self.zstd = Some((level, zstd::bulk::Compressor::new(level.into()).ok()?));
        }
        self.out.resize(raw.len(), 0);
        let (_, compressor) = self.zstd.as_mut()?;
        compressor.compress_to_buffer(raw, self.out.as_mut_slice()).ok()
    }

    fn compress_deflate(&mut self, level: u8, raw: &[u8]) -> Option<usize> {
        if self.deflate.as_ref().is_none_or(|(made_for, _)| *made_for != level) {
            let compressor = Compress::new(Compression::new(level.into()), false);
            self.deflate = Some((level, compressor));
        }
        self.out.resize(raw.len(), 0);
        let (_, compressor) = self.deflate.as_mut()?;
        compressor.reset();
        let status = compressor.compress(raw, &mut self.out, FlushCompress::Finish).ok()?;
        (status == Status::StreamEnd).then(|| compressor.total_out() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_take_no_space() {
        assert_eq!(compress_block(Codec::Lz4, Block(1), &[0; 8192]), CompressedBlock::Zero);
        assert!(!is_zero(&[[0; 64], [1; 64]].concat()));
        assert!(!is_zero(&[0, 0, 1]));
    }

    #[test]
    fn a_block_that_does_not_shrink_is_stored_uncompressed() {
        let noise: Vec<u8> = (0..2048u64)
            .flat_map(|i| XxHash3_64::oneshot(&i.to_le_bytes()).to_le_bytes())
            .collect();
        for codec in ["none", "lz4", "zstd", "zlib", "zlib:9"] {
            let codec = codec.parse().unwrap();
            let CompressedBlock::Packed(packed) = compress_block(codec, Block(0), &noise[..8192])
            else {
                panic!("noise is not zero")
            };
            assert_eq!((packed.stored_as, packed.stored.len()), (StoredAs::Raw, 8192));
        }
    }
}
