//! Written pieces: the pieces of a disk into which anything but zeros may have been written. Pure.
//!
//! One bit for each piece of 1 MiB, so 128 KiB for a disk of 1 TiB.

use std::ops::Range;

/// The size of a piece in bytes.
pub const PIECE_BYTES: u64 = 1 << 20;

/// A set of pieces, which grows.
#[derive(Clone, Debug, Default)]
pub struct WrittenPieces(Vec<u64>);

impl WrittenPieces {
    /// Adds all pieces that a range of bytes touches.
    pub fn insert_range(&mut self, bytes: Range<u64>) {
        for piece in touched_pieces(bytes) {
            let (word, bit) = locate_bit(piece);
            if self.0.len() <= word {
                self.0.resize(word + 1, 0);
            }
            self.0[word] |= bit;
        }
    }

    /// Whether any of the pieces that a range of bytes touches is in the set.
    pub fn intersects(&self, bytes: Range<u64>) -> bool {
        touched_pieces(bytes).any(|piece| {
            let (word, bit) = locate_bit(piece);
            self.0.get(word).is_some_and(|bits| bits & bit != 0)
        })
    }
}

fn touched_pieces(bytes: Range<u64>) -> Range<u64> {
    match bytes.is_empty() {
        true => 0..0,
        false => bytes.start / PIECE_BYTES..bytes.end.div_ceil(PIECE_BYTES),
    }
}

fn locate_bit(piece: u64) -> (usize, u64) {
    ((piece / 64) as usize, 1 << (piece % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_written_as_a_whole() {
        let mut written = WrittenPieces::default();
        assert!(!written.intersects(0..1 << 40));
        written.insert_range(70 * PIECE_BYTES - 1..70 * PIECE_BYTES + 1);
        for (range, is_written) in [
            (0..69 * PIECE_BYTES, false),
            (69 * PIECE_BYTES..69 * PIECE_BYTES + 1, true),
            (71 * PIECE_BYTES - 1..71 * PIECE_BYTES, true),
            (71 * PIECE_BYTES..1000 * PIECE_BYTES, false),
            (5..5, false),
        ] {
            assert_eq!(written.intersects(range.clone()), is_written, "{range:?}");
        }
    }
}
