//! Comparison of an image with a flat copy of guest memory.
//!
//! The reference is a file in the order of the RAM page space: page 0 first, 4096 bytes each, zeros
//! between regions. A test makes one while the VM is paused; a checkpoint taken at that pause must
//! equal it byte for byte.

use std::io::{self, BufReader, Read};
use std::path::Path;

use firn_types::{Block, PAGE_SIZE, Page};
use serde::Serialize;

use crate::error::ImageError;
use crate::reader::Image;

/// A page that differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct PageMismatch {
    /// The page.
    pub page: Page,
    /// The first byte of it that differs.
    pub offset: u16,
    /// That byte in the image.
    pub in_image: u8,
    /// That byte in the reference.
    pub in_reference: u8,
    /// The number of bytes of the page that differ.
    pub bytes: u16,
    /// Whether the image stores the page; otherwise the page is zero or untouched there.
    pub is_stored: bool,
}

/// Compares every page, and returns those that differ, in order.
pub fn compare_with_reference(
    image: &Image,
    reference: &Path,
) -> Result<Vec<PageMismatch>, ImageError> {
    let geometry = image.geometry();
    let failed = |step| move |source| ImageError::Io { step, path: reference.to_owned(), source };
    let file = firn_files::open_input(reference).map_err(failed("open"))?;
    let len = file.metadata().map_err(failed("open"))?.len();
    if len != geometry.flat_bytes() {
        let problem = format!("{len} bytes, guest memory has {}", geometry.flat_bytes());
        return Err(failed("compare with")(io::Error::other(problem)));
    }
    let mut reference = BufReader::with_capacity(1 << 20, file);
    let (mut theirs, mut stored) = (vec![0; PAGE_SIZE], Vec::new());
    let mut ours = vec![0; geometry.block_size.byte_count()];
    let mut mismatches = Vec::new();
    for block in (0..geometry.block_count()).map(Block) {
        let is_stored = image.read_block(block, &mut stored, &mut ours)?;
        let pages = Page::iter_range(geometry.block_size.pages_of(block));
        for (page, ours) in pages.zip(ours.chunks_exact(PAGE_SIZE)) {
            if page.0 >= geometry.total_pages {
                break;
            }
            reference.read_exact(&mut theirs).map_err(failed("read"))?;
            mismatches.extend(compare_page(page, ours, &theirs, is_stored));
        }
    }
    Ok(mismatches)
}

fn compare_page(page: Page, ours: &[u8], theirs: &[u8], is_stored: bool) -> Option<PageMismatch> {
    if ours == theirs {
        return None;
    }
    let pairs = || ours.iter().zip(theirs).enumerate().filter(|(_, (ours, theirs))| ours != theirs);
    let (offset, (&in_image, &in_reference)) = pairs().next()?;
    let bytes = pairs().count() as u16;
    Some(PageMismatch { page, offset: offset as u16, in_image, in_reference, bytes, is_stored })
}
