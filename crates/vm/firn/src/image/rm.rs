//! `firn image rm`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, RemovedImage, absolute_path, remove_images};

use crate::output::{FactPrinter, printable_path};

/// Remove images, with the files that only they need.
///
/// Copies of disks that were made for an image are removed with the image, and so are the learned
/// blocks of the image. A layer that is part of a VM's disk stays: the running VM merges it (`firn
/// checkpoint --every`, `firn disk merge`). The newest state of a disk stays until it is removed on
/// purpose (--disks).
///
/// The command refuses an image that is in use: another image builds on it, a restore still reads
/// it, or a VM has a disk on top of one of its disks. You can also name an image whose file is gone
/// already: then Firn counts the files of its disks as unneeded.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn image rm web-1.firn web-2.firn")]
pub struct ImageRmArgs {
    /// The images.
    #[arg(required = true)]
    images: Vec<PathBuf>,
    /// Also remove unneeded disk layers that are the newest state of a disk.
    #[arg(long)]
    disks: bool,
}

impl ImageRmArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let images = self.images.iter().map(|image| absolute_path(image));
        let images = images.collect::<Result<Vec<_>, _>>()?;
        let removed = remove_images(&base, &images, self.disks)?;
        out.print_facts(&removed, || removed.iter().map(describe_removed).collect())
    }
}

fn describe_removed(removed: &RemovedImage) -> String {
    let mut text = format!("{} is removed\n", printable_path(&removed.image));
    for file in &removed.removed {
        text += &format!("its disk {} is removed\n", printable_path(file));
    }
    for file in &removed.kept {
        text += &format!(
            "{} stays: it is the newest state of a disk (--disks removes it)\n",
            printable_path(file)
        );
    }
    text
}
