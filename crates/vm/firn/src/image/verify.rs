//! `firn image verify`

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_image::{Image, VerifyReport};
use firn_supervisor::{Failure, OperationProgress};
use firn_types::make_printable;
use serde_json::json;

use crate::bar::TerminalBar;
use crate::output::FactPrinter;

/// The maximum number of problems that are printed; the others are counted.
const PRINTED_MAX: usize = 20;

/// Check every byte of an image.
///
/// Exits with code 6 if a byte differs from what was written, and names the memory blocks and their
/// offsets. Bytes that can't be read are no damage: exit code 1, or 7 where a store denies access.
///
/// With --restorable the command does not read memory. It checks whether this host could restore
/// the image: its QEMU, machine type, accelerator, CPU, disks, memory, userfaultfd. Exits with code
/// 5 if this host could not.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn image verify web.firn
  firn image verify --restorable web.firn")]
pub struct ImageVerifyArgs {
    /// The image.
    image: PathBuf,
    /// Check whether this host could restore the image.
    #[arg(long)]
    restorable: bool,
}

impl ImageVerifyArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let image = super::open::open_image(&self.image)?;
        if self.restorable {
            return super::restorable::run(&self.image, &image, out);
        }
        let report = verify_with_progress(&image);
        let problems: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
        let facts = json!({
            "image": self.image.to_string_lossy(),
            "clean": report.is_clean(),
            "locality_blocks": report.locality_blocks,
            "good_blocks": report.good_blocks,
            "problem_count": report.problem_count,
            "problems": problems,
        });
        out.print_facts(&facts, || self.describe_report(&report, &problems))?;
        if let Some(error) = report.find_unread() {
            let (count, all) = (report.unread_count, report.locality_blocks);
            let text = format!(
                "{} can't be verified: {count} of {all} locality blocks can't be read",
                self.image.display()
            );
            return Err(super::open::to_failure(error).while_doing(text));
        }
        match report.problem_count {
            0 => Ok(()),
            count => Err(super::open::damage_failure(format!(
                "{} is damaged: {count} problems",
                self.image.display()
            ))),
        }
    }

    fn describe_report(&self, report: &VerifyReport, problems: &[String]) -> String {
        let mut text = String::new();
        for problem in problems.iter().take(PRINTED_MAX) {
            let _ = writeln!(text, "{}", make_printable(problem));
        }
        if report.problem_count > PRINTED_MAX {
            let _ = writeln!(text, "... and {} more", report.problem_count - PRINTED_MAX);
        }
        if problems.is_empty() {
            let blocks = report.good_blocks;
            let _ = writeln!(
                text,
                "{}: {blocks} memory blocks, all good",
                make_printable(&self.image.to_string_lossy())
            );
        }
        text
    }
}

fn verify_with_progress(image: &Image) -> VerifyReport {
    let bytes = u64::from(image.geometry().locality_block_bytes);
    let bar = std::cell::RefCell::new(TerminalBar::new());
    firn_image::verify_image(image, super::open::worker_count(), &|done, total| {
        let bytes = |blocks: u32| u64::from(blocks) * bytes;
        bar.borrow_mut().show_progress(&OperationProgress::new(
            "verifying",
            bytes(done),
            bytes(total),
        ));
    })
}
