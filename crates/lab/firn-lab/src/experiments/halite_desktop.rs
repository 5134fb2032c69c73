//! `halite-desktop`: several programs of a user at once, restored in the middle of their work.
//!
//! Reproduces Figure 5 of Halite (section 8.2.1), with a mix of programs of the full guest in the
//! place of Worldbench's multi-tasking test. Three users' processes run side by side on two vCPUs,
//! each a fixed number of times:
//!
//! - *edit and compile*: changes a source file of a C library, builds it with make and gcc,
//!   inspects the change with diff and grep;
//! - *browse*: fetches pages of the guest's own web server, extracts their words, counts and sorts
//!   these, and keeps a compressed copy; another page each time;
//! - *play*: mpv decodes the next second of a clip.
//!
//! [`super::application`] documents what varies, what is held equal and what is measured. Programs
//! and files are in the guest's page cache at the checkpoint, because each of the three has run
//! before, on files of which some differ from those that it uses afterwards.

use anyhow::Result;

use super::application::ApplicationRun;
use crate::lab::Lab;
use crate::report::Report;

/// How often each of the three runs before the checkpoint, and after it.
#[derive(Clone, Copy, Debug)]
struct DesktopScale {
    before: u32,
    after: u32,
}

const QUICK: DesktopScale = DesktopScale { before: 2, after: 2 };
const FULL: DesktopScale = DesktopScale { before: 2, after: 6 };

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let application = ApplicationRun {
        name: "halite-desktop",
        memory_mib: 1024,
        services: "nginx",
        script: guest_script(lab.extent.pick(QUICK, FULL)),
        quick_rounds: 2,
        figure: "Restore overhead of a desktop mix (Halite, Figure 5)",
        drawing: "halite-figure-5",
    };
    application.run(lab)
}

fn guest_script(DesktopScale { before, after }: DesktopScale) -> String {
    let rounds = before + after;
    format!("before={before} rounds={rounds}\n{}", include_str!("halite_desktop.sh"))
}
