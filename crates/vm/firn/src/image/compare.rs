//! `firn image compare`

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_image::PageMismatch;
use firn_supervisor::Failure;
use firn_types::BlockSize;
use serde_json::json;

use crate::output::{FactPrinter, check_input};

/// The maximum number of differences that are printed; the others are counted.
const PRINTED_MAX: usize = 20;

/// Compare an image's memory with a flat copy of guest memory: one file, uncompressed.
///
/// The copy is a file with all RAM regions one after another, each beginning at a multiple of 64
/// KiB. Exits with code 6 if a page differs.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn image compare web.firn web.ram")]
pub struct ImageCompareArgs {
    /// The image.
    image: PathBuf,
    /// The flat copy.
    reference: PathBuf,
}

impl ImageCompareArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let image = super::open::open_image(&self.image)?;
        check_input(&self.reference)?;
        let differing = firn_image::compare_with_reference(&image, &self.reference)
            .map_err(|error| super::open::to_failure(&error).while_doing("comparing"))?;
        let pages = image.geometry().total_pages;
        let facts = json!({
            "image": self.image.to_string_lossy(),
            "reference": self.reference.to_string_lossy(),
            "pages": pages,
            "differing_pages": differing.len(),
            "differing_blocks": count_blocks(&differing, image.geometry().block_size),
            "first": differing.iter().take(PRINTED_MAX).map(mismatch_facts).collect::<Vec<_>>(),
        });
        out.print_facts(&facts, || describe_mismatches(&differing, pages))?;
        match differing.len() {
            0 => Ok(()),
            count => Err(super::open::damage_failure(format!("{count} of {pages} pages differ"))),
        }
    }
}

/// The number of memory blocks that hold these pages, which are in order.
fn count_blocks(differing: &[PageMismatch], size: BlockSize) -> usize {
    let mut blocks: Vec<_> = differing.iter().map(|page| size.block_of(page.page)).collect();
    blocks.dedup();
    blocks.len()
}

fn mismatch_facts(page: &PageMismatch) -> serde_json::Value {
    json!({
        "page": page.page,
        "offset": page.offset,
        "in_image": page.in_image,
        "in_reference": page.in_reference,
        "bytes": page.bytes,
        "is_stored": page.is_stored,
    })
}

fn describe_mismatches(differing: &[PageMismatch], pages: u32) -> String {
    let mut text = String::new();
    for page in differing.iter().take(PRINTED_MAX) {
        let _ = writeln!(
            text,
            "{}: {} bytes differ, the first at {:#x}: {:#04x} in the image, {:#04x} in the copy",
            page.page, page.bytes, page.offset, page.in_image, page.in_reference
        );
    }
    if differing.is_empty() {
        let _ = writeln!(text, "{pages} pages, all equal");
    }
    text
}
