//! Bytes in chunks that copies share: a copy costs no memory until one of both is written.
//!
//! ```text
//!   committed state   [ 0 | 1 | 2 | 3 ]             the session writes chunk 2:   [ 0 | 1 | 2'| 3 ]
//!                       |   |   |   |                                               |   |       |
//!   copy of a target  [ 0 | 1 | 2 | 3 ]             the copy keeps the old one:   [ 0 | 1 | 2 | 3 ]
//! ```
//!
//! So a target is sent a state while the session commits the next one. A chunk of zeros that was
//! never written takes no memory.

use std::ops::Range;
use std::sync::Arc;

/// Bytes per chunk. The last chunk may be shorter.
pub(crate) const CHUNK: usize = 64 << 10;

static ZEROS: [u8; CHUNK] = [0; CHUNK];

/// See the module documentation.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedBytes {
    len: usize,
    /// `None`: zeros.
    chunks: Vec<Option<Arc<[u8]>>>,
}

impl SharedBytes {
    pub(crate) fn zeros(len: usize) -> Self {
        Self { len, chunks: vec![None; len.div_ceil(CHUNK)] }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Overwrites bytes. `None` if they are not all within these.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) -> Option<()> {
        let end = offset.checked_add(bytes.len()).filter(|end| *end <= self.len)?;
        let mut left = bytes;
        for part in split_by_chunk(offset..end) {
            let (now, later) = left.split_at(part.len());
            self.write_chunk(part, now);
            left = later;
        }
        Some(())
    }

    fn write_chunk(&mut self, part: Range<usize>, bytes: &[u8]) {
        let (number, start) = (part.start / CHUNK, part.start % CHUNK);
        let len = self.chunk_len(number);
        let chunk = &mut self.chunks[number];
        if chunk.is_none() && bytes == &ZEROS[..bytes.len()] {
            return;
        }
        let chunk = match chunk {
            // All of it is overwritten: what it has need not be copied.
            Some(shared) if bytes.len() == len && Arc::strong_count(shared) > 1 => {
                *shared = Arc::from(bytes);
                return;
            }
            Some(shared) => shared,
            empty => empty.insert(Arc::from(&ZEROS[..len])),
        };
        Arc::make_mut(chunk)[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn chunk_len(&self, number: usize) -> usize {
        CHUNK.min(self.len - number * CHUNK)
    }

    /// The bytes of a range, in pieces: the offset of each piece, and its bytes.
    pub(crate) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = (usize, &[u8])> {
        split_by_chunk(range).map(|part| {
            let chunk = self.chunks[part.start / CHUNK].as_deref().unwrap_or(&ZEROS);
            (part.start, &chunk[part.start % CHUNK..][..part.len()])
        })
    }

    /// The pieces that were written. All other bytes are zeros.
    pub(crate) fn written_pieces(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let chunks = self.chunks.iter().enumerate();
        chunks.filter_map(|(number, chunk)| Some((number * CHUNK, chunk.as_deref()?)))
    }
}

/// Splits a range where a chunk ends.
fn split_by_chunk(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let end = ((start / CHUNK + 1) * CHUNK).min(range.end);
        let part = (start < end).then_some(start..end);
        start = end.max(start);
        part
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(shared: &SharedBytes) -> Vec<u8> {
        shared.pieces(0..shared.len()).flat_map(|(_, bytes)| bytes.to_vec()).collect()
    }

    #[test]
    fn zeros_take_no_memory() {
        let mut shared = SharedBytes::zeros(3 * CHUNK + 5);
        assert_eq!(shared.write(1, &vec![0; 3 * CHUNK]), Some(()));
        assert_eq!(shared.written_pieces().count(), 0);
        assert_eq!(shared.write(3 * CHUNK + 4, &[7]), Some(()));
        let written: Vec<_> = shared.written_pieces().collect();
        assert_eq!(written, [(3 * CHUNK, &[0, 0, 0, 0, 7][..])]);
        assert_eq!(shared.write(3 * CHUNK + 4, &[7, 7]), None);
        assert_eq!(shared.write(usize::MAX, &[7, 7]), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50))]
        #[test]
        fn a_copy_keeps_its_bytes(
            writes in prop::collection::vec((0..3 * CHUNK, 0..2 * CHUNK, any::<u8>()), 1..8),
            copied_after in 0..8_usize,
        ) {
            let len = 2 * CHUNK + 100;
            let (mut model, mut shared) = (vec![0; len], SharedBytes::zeros(len));
            let mut copy = None;
            for (number, (start, count, value)) in writes.into_iter().enumerate() {
                if number == copied_after {
                    copy = Some((model.clone(), shared.clone()));
                }
                let bytes = vec![value; count];
                let is_inside = start + count <= len;
                prop_assert_eq!(shared.write(start, &bytes).is_some(), is_inside);
                if is_inside {
                    model[start..start + count].copy_from_slice(&bytes);
                }
            }
            prop_assert_eq!(all(&shared), model);
            if let Some((model, copy)) = copy {
                prop_assert_eq!(all(&copy), model);
            }
        }
    }
}
