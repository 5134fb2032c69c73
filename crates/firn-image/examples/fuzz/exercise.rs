//! The operations of the fuzzer on a file that may be an image: open it, look everything up, read
//! and decode all of it.

use std::path::Path;

use firn_image::{Image, LocalityBlockId, Organization, Placement, Reorder, reorder, verify};
use firn_types::Block;

/// The maximum number of memory blocks to look up: a file of a few kilobytes may claim billions.
const LOOKUPS_MAX: u32 = 20_000;

/// Exercises a file. Returns the memory blocks that were read, or `None` if it is not an image.
pub fn exercise(path: &Path) -> Option<Vec<(Block, Vec<u8>)>> {
    let image = Image::open(path).ok()?;
    let blocks = image.geometry().blocks();
    let near = 0..blocks.min(LOOKUPS_MAX);
    let far = [blocks - 1, blocks, blocks / 2, u32::MAX];
    for block in near.chain(far).map(Block) {
        if let Placement::Stored { locality_block, slot } = image.lookup(block) {
            assert_eq!(image.entries(locality_block)[usize::from(slot)].block, block);
        }
    }
    let _ = (image.summary(), image.regions().ram_bytes(), image.page_table_roots());
    let _ = (image.aux_list(), image.chain_files().len());
    let decoded = decode_all(&image);
    assert!(verify(&image, 1, &|_, _| ()).good_blocks as usize >= decoded.len());
    Some(decoded)
}

fn decode_all(image: &Image) -> Vec<(Block, Vec<u8>)> {
    let (mut stored, mut alone) = (Vec::new(), Vec::new());
    let mut out = vec![0; image.geometry().block_size.bytes()];
    let mut decoded = Vec::new();
    for id in (0..image.locality_blocks()).map(LocalityBlockId) {
        if image.read_locality_block(id, &mut stored).is_err() {
            continue;
        }
        for entry in image.entries(id) {
            let bytes = &stored[entry.range()];
            if image.read_entry(entry, id, &mut alone).is_ok() {
                assert_eq!(alone, bytes);
            }
            if image.decode(entry, bytes, &mut out).is_ok() {
                decoded.push((entry.block, out.clone()));
            }
        }
    }
    decoded
}

/// Rewrites it, unless the guest is too large to do that often.
pub fn rearrange(path: &Path, out: &Path, by: Organization) {
    let Ok(image) = Image::open(path) else { return };
    if image.geometry().blocks() > LOOKUPS_MAX {
        return;
    }
    if let Ok(summary) = reorder(&image, &Reorder::by(by), out, &|_, _| ()) {
        let rewritten = Image::open(out).map(|image| image.summary());
        assert_eq!(rewritten.ok(), Some(summary), "what was written is readable");
    }
}
