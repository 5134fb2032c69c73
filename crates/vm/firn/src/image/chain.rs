//! `firn image chain`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_image::ChainFile;
use firn_supervisor::Failure;
use firn_types::make_printable;
use serde_json::json;

use crate::output::FactPrinter;
use crate::units;

/// Show the images that an image builds on.
///
/// Each line is one file, the newest first, and the amount of memory that the file itself holds.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn image chain web-20.firn")]
pub struct ImageChainArgs {
    /// The image.
    image: PathBuf,
}

impl ImageChainArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let image = super::open::open_image(&self.image)?;
        let block_bytes = image.geometry().block_size.byte_count() as u64;
        let changed = |file: &ChainFile| u64::from(file.mentioned_blocks) * block_bytes;
        let facts = |file: ChainFile| {
            json!({
                "image": file.path.to_string_lossy(),
                "identity": file.identity,
                "file_bytes": file.file_bytes,
                "changed_bytes": changed(&file),
            })
        };
        let chain: Vec<_> = image.chain_files().map(facts).collect();
        let path = self.image.to_string_lossy();
        out.print_facts(&json!({ "image": path, "depth": chain.len(), "chain": chain }), || {
            image.chain_files().map(|file| describe_file(&file, changed(&file))).collect()
        })
    }
}

fn describe_file(file: &ChainFile, changed_bytes: u64) -> String {
    let (changed, bytes) =
        (units::format_bytes(changed_bytes), units::format_bytes(file.file_bytes));
    format!("{}  {changed} of memory in {bytes}\n", make_printable(&file.path.to_string_lossy()))
}
