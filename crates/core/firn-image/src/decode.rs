//! Decompression of memory blocks.
//!
//! A faulting vCPU waits for this. Each thread keeps the state of its decompressors: after its
//! first block, a thread decodes without allocating.

use std::cell::RefCell;

use flate2::{Decompress, FlushDecompress, Status};
use thiserror::Error;

use crate::codec::StoredAs;
use crate::compress::block_checksum;

thread_local! {
    static DECOMPRESSORS: RefCell<DecompressorSet> = RefCell::new(DecompressorSet::default());
}

/// The decompressors of one thread that have state worth keeping.
#[derive(Default)]
struct DecompressorSet {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
    deflate: Option<Decompress>,
}

/// Why stored bytes could not be decoded to a memory block.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DecodeError {
    /// The stored bytes are not valid data of the codec.
    #[error("its {stored_len} stored bytes are not valid {stored_as:?} data")]
    Codec {
        /// The form in which they should be stored.
        stored_as: StoredAs,
        /// The number of stored bytes.
        stored_len: usize,
    },
    /// The stored bytes are valid, but decode to another length than a memory block's.
    #[error("its stored bytes make {found} bytes instead of {expected}")]
    Length {
        /// Bytes of a memory block.
        expected: usize,
        /// Bytes that were decoded.
        found: usize,
    },
    /// The bytes of a sealed image were changed, or are from another place or another image.
    #[error("its {stored_len} stored bytes are not those that were sealed")]
    Seal {
        /// The number of stored bytes.
        stored_len: usize,
    },
    /// The decoded bytes differ from those that were compressed.
    #[error("its checksum is {found:#018x} instead of {expected:#018x}")]
    Checksum {
        /// As recorded in the index.
        expected: u64,
        /// Of the decoded bytes.
        found: u64,
    },
}

/// Decodes a memory block into `out`, which has its length. After an error the content of `out` is
/// undefined.
pub(crate) fn decode_stored(
    stored_as: StoredAs,
    stored: &[u8],
    expected: u64,
    out: &mut [u8],
) -> Result<(), DecodeError> {
    decompress_stored(stored_as, stored, out)?;
    let found = block_checksum(out);
    if found == expected { Ok(()) } else { Err(DecodeError::Checksum { expected, found }) }
}

fn decompress_stored(
    stored_as: StoredAs,
    stored: &[u8],
    out: &mut [u8],
) -> Result<(), DecodeError> {
    let expected = out.len();
    let len = match stored_as {
        StoredAs::Raw => copy_raw(stored, out),
        StoredAs::Lz4 => lz4_flex::block::decompress_into(stored, out).ok(),
        StoredAs::Zstd => DECOMPRESSORS.with_borrow_mut(|it| it.decompress_zstd(stored, out)),
        StoredAs::Deflate => DECOMPRESSORS.with_borrow_mut(|it| it.decompress_deflate(stored, out)),
    };
    match len {
        None => Err(DecodeError::Codec { stored_as, stored_len: stored.len() }),
        Some(found) if found != expected => Err(DecodeError::Length { expected, found }),
        Some(_) => Ok(()),
    }
}

fn copy_raw(stored: &[u8], out: &mut [u8]) -> Option<usize> {
    if stored.len() == out.len() {
        out.copy_from_slice(stored);
    }
    Some(stored.len())
}

impl DecompressorSet {
    fn decompress_zstd(&mut self, stored: &[u8], out: &mut [u8]) -> Option<usize> {
        if self.zstd.is_none() {
            self.zstd = Some(zstd::bulk::Decompressor::new().ok()?);
        }
        self.zstd.as_mut()?.decompress_to_buffer(stored, out).ok()
    }

    fn decompress_deflate(&mut self, stored: &[u8], out: &mut [u8]) -> Option<usize> {
        let decompressor = self.deflate.get_or_insert_with(|| Decompress::new(false));
        decompressor.reset(false);
        let status = decompressor.decompress(stored, out, FlushDecompress::Finish).ok()?;
        let all_read = decompressor.total_in() == stored.len() as u64;
        (status == Status::StreamEnd && all_read).then(|| decompressor.total_out() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::compress::{CompressedBlock, compress_block, is_zero};
    use firn_types::Block;
    use proptest::prelude::*;

    const ALL: [Codec; 6] = [
        Codec::None,
        Codec::Lz4,
        Codec::Zstd { level: 1 },
        Codec::Zstd { level: -3 },
        Codec::Zlib { level: 1 },
        Codec::Zlib { level: 6 },
    ];

    fn round_trip(codec: Codec, raw: &[u8]) {
        let CompressedBlock::Packed(packed) = compress_block(codec, Block(7), raw) else {
            assert!(is_zero(raw));
            return;
        };
        assert!(packed.stored.len() <= raw.len());
        let mut out = vec![0xa5; raw.len()];
        decode_stored(packed.stored_as, &packed.stored, packed.checksum, &mut out).unwrap();
        assert_eq!(out, raw);
    }

    #[test]
    fn a_wrong_length_is_an_error() {
        let CompressedBlock::Packed(packed) = compress_block(Codec::Lz4, Block(0), &[1; 4096])
        else {
            panic!("not zero")
        };
        let mut out = vec![0; 8192];
        let error = decode_stored(packed.stored_as, &packed.stored, packed.checksum, &mut out);
        assert_eq!(error, Err(DecodeError::Length { expected: 8192, found: 4096 }));
    }

    proptest! {
        #[test]
        fn decoding_returns_the_encoded_value(
            seeds in proptest::collection::vec(any::<u8>(), 1..40),
            repeat in 1usize..200,
        ) {
            let raw: Vec<u8> = seeds.iter().cycle().take(seeds.len() * repeat).copied().collect();
            let mut raw = raw;
            raw.resize(8192, 0);
            ALL.iter().for_each(|&codec| round_trip(codec, &raw));
        }

        #[test]
        fn garbage_is_an_error(stored in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut out = vec![0; 4096];
            for stored_as in [StoredAs::Raw, StoredAs::Lz4, StoredAs::Zstd, StoredAs::Deflate] {
                prop_assert!(decode_stored(stored_as, &stored, 1, &mut out).is_err());
            }
        }
    }
}
