//! Printing of facts and failures.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::Path;

use firn_supervisor::{Failure, FailureContext, FailureKind};
use firn_types::{is_shown, make_printable, make_printable_lines};
use serde::Serialize;

/// Prints facts to standard output, as JSON or as text.
#[derive(Clone, Copy, Debug)]
pub struct FactPrinter {
    json: bool,
}

impl FactPrinter {
    /// Prints JSON if `json`, otherwise text for people.
    pub fn new(json: bool) -> Self {
        Self { json }
    }

    /// Prints facts: as JSON, or as the text of `for_people`.
    pub fn print_facts(
        self,
        facts: &impl Serialize,
        for_people: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        match self.json {
            true => {
                let json = serde_json::to_string_pretty(facts).while_doing("writing JSON")?;
                print_text(&format!("{}\n", printable_json(&json)))
            }
            false => print_text(&make_printable_lines(&for_people())),
        }
    }

    /// Prints facts in a sequence: as one line of JSON, or as the text of `for_people`.
    pub fn print_line(
        self,
        facts: &impl Serialize,
        for_people: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        match self.json {
            true => {
                let json = serde_json::to_string(facts).while_doing("writing JSON")?;
                print_text(&format!("{}\n", printable_json(&json)))
            }
            false => print_text(&make_printable_lines(&for_people())),
        }
    }
}

/// Escapes characters in JSON that a terminal might interpret, without a change of meaning: only
/// strings can have such characters.
fn printable_json(json: &str) -> Cow<'_, str> {
    let is_kept = |it: char| is_shown(it) || it == '\n';
    if json.chars().all(is_kept) {
        return Cow::Borrowed(json);
    }
    let mut text = String::with_capacity(json.len() + 64);
    let mut units = [0; 2];
    for it in json.chars() {
        match is_kept(it) {
            true => text.push(it),
            false => it.encode_utf16(&mut units).iter().for_each(|unit| {
                let _ = write!(text, "\\u{unit:04x}");
            }),
        }
    }
    Cow::Owned(text)
}

/// Prints to standard output. It is no error if the reader closes the pipe early.
pub fn print_text(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).while_doing("writing to standard output")
        }
        _ => Ok(()),
    }
}

/// Prints a failure to standard error: once, as a chain, with its advice.
pub fn print_failure(failure: &Failure) {
    let mut text = String::new();
    for (depth, message) in failure.chain.iter().enumerate() {
        let lead = if depth == 0 { "firn: " } else { "  because: " };
        let _ = writeln!(text, "{lead}{}", make_printable(message));
    }
    if let Some(hint) = &failure.hint {
        let _ = writeln!(text, "  try: {}", make_printable(hint));
    }
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Checks in advance that an image or a page can be written at a path.
pub fn check_output(path: &Path) -> Result<(), Failure> {
    if path.as_os_str() == "-" {
        let failure = Failure::new(FailureKind::Usage, "it cannot be written to standard output");
        return Err(failure.with_hint("name a file; `./-` is one, too"));
    }
    firn_files::check_output(path).while_doing_as(FailureKind::Usage, "nothing is written there")
}

/// Checks in advance that a path names a regular file that can be read.
pub fn check_input(path: &Path) -> Result<(), Failure> {
    let opened = firn_files::open_input(path).map(drop);
    opened.while_doing_as(FailureKind::Usage, format!("cannot read {}", path.display()))
}

/// Checks in advance that a path names a directory.
pub fn check_directory(path: &Path) -> Result<(), Failure> {
    let found = std::fs::metadata(path);
    let found =
        found.while_doing_as(FailureKind::Usage, format!("cannot use {}", path.display()))?;
    match found.is_dir() {
        true => Ok(()),
        false => {
            let text = format!("{} is not a directory", path.display());
            Err(Failure::new(FailureKind::Usage, text).with_hint("give a directory that exists"))
        }
    }
}

/// Aligns the cells of rows; the first row is the heading. Each row becomes one line.
pub fn format_table(rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<_>> =
        rows.iter().map(|row| row.iter().map(|cell| make_printable(cell)).collect()).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        let _ = writeln!(text, "{}", cells.join("  ").trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_says_the_same_without_control_characters() {
        let facts =
            serde_json::json!({ "a": "\u{1b}[2K\u{9b}\u{7f}\u{202e}\u{e0041}\n", "b": "größer" });
        let json = serde_json::to_string_pretty(&facts).unwrap();
        let text = printable_json(&json);
        assert!(text.chars().all(|it| is_shown(it) || it == '\n'), "{text:?}");
        assert!(text.contains("größer"));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), facts);
    }

    #[test]
    fn a_cell_is_no_line_of_its_own() {
        assert_eq!(format_table(&[vec!["a\nb\u{1b}".to_owned()]]), "a\\u{a}b\\u{1b}\n");
    }

    #[test]
    fn cells_line_up() {
        let rows = [["NAME", "STATE"], ["web", "running"], ["longer", "ended"]]
            .map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(format_table(&rows), "NAME    STATE\nweb     running\nlonger  ended\n");
        assert_eq!(format_table(&[]), "");
    }
}
