//! The operations of the fuzzer on a file that may be an image: open it, look everything up, read
//! and decode all of it.

use std::path::Path;

use firn_image::{
    BlockOrganization, BlockPlacement, Image, LocalityBlockId, ReorderOptions, reorder_image,
    verify_image,
};
use firn_types::Block;

/// The maximum number of memory blocks to look up: a file of a few kilobytes may claim billions.
const LOOKUPS_MAX: u32 = 20_000;

/// Exercises a file. Returns the memory blocks that were read, or `None` if it is not an image.
pub fn exercise(path: &Path) -> Option<Vec<(Block, Vec<u8>)>> {
    let image = Image::open(path).ok()?;
    let blocks = image.geometry().block_count();
    let near = 0..blocks.min(LOOKUPS_MAX);
    let far = [blocks - 1, blocks, blocks / 2, u32::MAX];
    for block in near.chain(far).map(Block) {
        if let BlockPlacement::Stored { locality_block, slot } = image.placement_of(block) {
            assert_eq!(image.entries(locality_block)[usize::from(slot)].block, block);
        }
    }
    let _ = (image.summary(), image.regions().ram_bytes(), image.page_table_roots());
    let _ = (image.aux_list(), image.chain_files().len());
    let decoded = decode_all(&image);
    assert!(verify_image(&image, 1, &|_, _| ()).good_blocks as usize >= decoded.len());
    Some(decoded)
}

fn decode_all(image: &Image) -> Vec<(Block, Vec<u8>)> {
    let (mut stored, mut alone) = (Vec::new(), Vec::new());
    let mut out = vec![0; image.geometry().block_size.byte_count()];
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
            if image.decode_block(entry, bytes, &mut out).is_ok() {
                decoded.push((entry.block, out.clone()));
            }
        }
    }
    decoded
}

/// Rewrites it, unless the guest is too large to do that often.
pub fn rearrange(path: &Path, out: &Path, by: BlockOrganization) {
    let Ok(image) = Image::open(path) else { return };
    if image.geometry().block_count() > LOOKUPS_MAX {
        return;
    }
    if let Ok(summary) =
        reorder_image(&image, &ReorderOptions::for_organization(by), out, &|_, _| ())
    {
        let rewritten = Image::open(out).map(|image| image.summary());
        assert_eq!(rewritten.ok(), Some(summary), "what was written is readable");
    }
}
