//! Lists of memory blocks, encoded as steps from each to the next: small numbers where neighbours
//! follow one another.

use firn_types::Block;

fn zigzag(step: u32) -> u32 {
    (step << 1) ^ (((step as i32) >> 31) as u32)
}

fn unzigzag(code: u32) -> u32 {
    (code >> 1) ^ (code & 1).wrapping_neg()
}

/// The steps from each block to the next; the first from block 0.
pub(crate) fn encode_steps(blocks: impl Iterator<Item = Block>) -> impl Iterator<Item = u32> {
    blocks.scan(0u32, |before, block| {
        let step = block.0.wrapping_sub(*before);
        *before = block.0;
        Some(zigzag(step))
    })
}

/// The inverse of [`encode_steps`].
pub(crate) fn decode_steps(steps: impl Iterator<Item = u32>) -> impl Iterator<Item = Block> {
    steps.scan(0u32, |block, code| {
        *block = block.wrapping_add(unzigzag(code));
        Some(Block(*block))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_invertible() {
        let blocks = [5, 6, 3, u32::MAX, 0, 1 << 31].map(Block);
        let back: Vec<_> = decode_steps(encode_steps(blocks.into_iter())).collect();
        assert_eq!(back, blocks);
        assert_eq!(encode_steps([Block(1), Block(0)].into_iter()).collect::<Vec<_>>(), [2, 1]);
    }
}
