//! `firn image rebase`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_image::Image;
use firn_supervisor::{Failure, record_copy};

use super::rewrite::{RewriteProgress, describe_rewrite, rewrite_facts};
use crate::output::{FactPrinter, check_output};

/// Make an image build on another one.
///
/// The image keeps what differs from its new parent. That may be an image further down its chain,
/// an unrelated image of the same RAM layout, or its old parent at another path. The checkpoint
/// stays the same, and so does its identity.
///
/// An image whose parent was moved cannot be opened. Give the new path of its parent with --moved:
/// the file there must be the same image.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn image rebase web-20.firn --parent web-10.firn
  firn image rebase web-20.firn --moved /a/web-19.firn")]
#[command(group = clap::ArgGroup::new("target").required(true))]
pub struct ImageRebaseArgs {
    /// The image.
    image: PathBuf,
    /// The image to build on from now on.
    #[arg(long, value_name = "IMAGE", group = "target")]
    parent: Option<PathBuf>,
    /// The new path of its present parent.
    #[arg(long, value_name = "IMAGE", group = "target")]
    moved: Option<PathBuf>,
    /// The image to write; by default the image itself is replaced.
    #[arg(long, short, value_name = "IMAGE")]
    output: Option<PathBuf>,
}

impl ImageRebaseArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        self.output.as_deref().map_or(Ok(()), check_output)?;
        let target = self.output.as_ref().unwrap_or(&self.image);
        let image = match &self.moved {
            Some(moved) => Image::open_with_parent(&self.image, moved)
                .map_err(|error| super::open::open_failure(&self.image, &error))?,
            None => super::open::open_image(&self.image)?,
        };
        let parent = super::open::open_image(
            self.moved.as_ref().or(self.parent.as_ref()).unwrap_or(&self.image),
        )?;
        record_copy(&self.image, target)?;
        let rewriting = RewriteProgress::new("rebasing", &image);
        let show = |done, total| rewriting.show_progress(done, total);
        let summary =
            firn_image::rebase_image(&image, &parent, target, super::open::worker_count(), &show)
                .map_err(|error| {
                super::open::to_failure(&error)
                    .while_doing(format!("can't rebase {}", self.image.display()))
            })?;
        out.print_facts(&rewrite_facts(&summary, Some(parent.path())), || {
            describe_rewrite(&summary)
        })
    }
}
