//! `firn image rm`

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_cache::is_location;
use firn_supervisor::{Failure, FailureKind, RemovedImage, absolute_path, remove_images};
use serde::Deserialize;

use super::stored::{read_facts, run_store};
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
///
/// An image in object storage is named by its location, s3://BUCKET/KEY. Its signature and unfinished
/// uploads of it are removed with it. The command refuses an image that another one below the same
/// prefix builds on; --force removes it all the same.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn image rm web-1.firn web-2.firn
  firn image rm s3://vms/prod/web.firn")]
pub struct ImageRmArgs {
    /// The images: files, or locations in object storage.
    #[arg(required = true)]
    images: Vec<PathBuf>,
    /// Also remove unneeded disk layers that are the newest state of a disk.
    #[arg(long)]
    disks: bool,
    /// Remove an image in object storage although another one builds on it, or it is damaged.
    #[arg(long)]
    force: bool,
}

impl ImageRmArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let is_stored = |image: &PathBuf| image.to_str().is_some_and(is_location);
        match self.images.iter().filter(|image| is_stored(image)).count() {
            0 if !self.force => self.remove_files(out),
            count if count == self.images.len() && !self.disks => self.remove_objects(out),
            _ => {
                let text = "files and locations can't be removed by one command; --force is for \
                            locations, --disks for files";
                Err(Failure::new(FailureKind::Usage, text).with_hint("give two commands"))
            }
        }
    }

    fn remove_objects(&self, out: FactPrinter) -> Result<(), Failure> {
        let flag = self.force.then_some(OsStr::new("--force"));
        let words = [OsStr::new("rm")].into_iter().chain(flag).chain([OsStr::new("--")]);
        let facts = run_store(words.chain(self.images.iter().map(|it| it.as_os_str())))?;
        out.print_facts(&facts, || {
            read_facts::<Vec<_>>(&facts).iter().map(describe_object).collect()
        })
    }

    fn remove_files(&self, out: FactPrinter) -> Result<(), Failure> {
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

/// What was removed from the store.
#[derive(Debug, Deserialize)]
struct RemovedObject {
    location: String,
    was_there: bool,
    aborted_uploads: usize,
}

fn describe_object(removed: &RemovedObject) -> String {
    let location = &removed.location;
    let mut text = String::new();
    if removed.was_there {
        text += &format!("{location} is removed\n");
    }
    if removed.aborted_uploads > 0 {
        text += &format!("{} unfinished uploads of it are removed\n", removed.aborted_uploads);
    }
    text
}
