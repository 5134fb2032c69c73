//! Tests that can't run on a machine, because it lacks something: hardware, rights, a program.
//!
//! Such a test returns early, and would count as passed. So it notes its name and the reason, and
//! `scripts/run-tests` shows all notes in its last lines:
//!
//! ```text
//!   test --- skip_test(why) ---> standard error, which is shown for failed tests only
//!                        \-----> the file that FIRN_SKIPPED names: one line "TEST: WHY"
//! ```

#![forbid(unsafe_code)]

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;

mod huge_pages;

pub use huge_pages::HugePages;

/// Environment variable that names the file of notes.
pub const VARIABLE: &str = "FIRN_SKIPPED";

/// Notes that the test on this thread, or a part of it, is skipped.
pub fn skip_test(why: impl Display) {
    eprintln!("skipped: {why}");
    let Some(file) = std::env::var_os(VARIABLE).map(PathBuf::from) else { return };
    let thread = std::thread::current();
    let note = format!("{}: {why}\n", thread.name().unwrap_or("a test"));
    // One write, so that notes of several programs do not mix.
    let noted = OpenOptions::new().append(true).create(true).open(&file);
    if let Err(error) = noted.and_then(|mut file| file.write_all(note.as_bytes())) {
        eprintln!("the note can't be written to {}: {error}", file.display());
    }
}
