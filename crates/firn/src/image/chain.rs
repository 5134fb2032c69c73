//! `firn image chain`

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use firn_image::Image;
use firn_supervisor::Failure;
use serde_json::json;

use crate::output::Output;
use crate::units;

/// Show which images an image builds on.
///
/// Each line is one file, the newest first, and how much memory it holds itself.
///
/// Example:
///   firn image chain web-20.firn
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The image.
    image: PathBuf,
}

/// One file of a chain.
struct Link {
    file: PathBuf,
    identity: String,
    file_bytes: u64,
    changed_bytes: u64,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        let image = super::open(&self.image)?;
        let links = image.chain().map(link).collect::<Result<Vec<_>, _>>()?;
        let facts = |link: &Link| {
            json!({
                "image": link.file.to_string_lossy(),
                "identity": link.identity,
                "file_bytes": link.file_bytes,
                "changed_bytes": link.changed_bytes,
            })
        };
        let all: Vec<_> = links.iter().map(facts).collect();
        out.facts(
            &json!({ "image": self.image.to_string_lossy(), "depth": links.len(), "chain": all }),
            || links.iter().map(describe).collect(),
        )
    }
}

fn link(file: &Path) -> Result<Link, Failure> {
    let image: Image = super::open(file)?;
    let summary = image.summary();
    let blocks = u64::from(summary.stored_blocks) + u64::from(summary.zero_blocks);
    Ok(Link {
        file: file.to_owned(),
        identity: image.identity(),
        file_bytes: summary.file_bytes,
        changed_bytes: blocks * summary.geometry.block_size.bytes() as u64,
    })
}

fn describe(link: &Link) -> String {
    let (changed, file) = (units::bytes(link.changed_bytes), units::bytes(link.file_bytes));
    format!("{}  {changed} of memory in {file}\n", link.file.display())
}
