//! Printing of facts and failures.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::Path;

use firn_supervisor::{Failure, FailureContext, FailureKind};
use firn_types::{is_shown, make_printable, make_printable_lines};
use serde::Serialize;
use serde_json::json;

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

    /// Whether facts are printed as JSON.
    pub fn is_json(self) -> bool {
        self.json
    }

    /// Prints facts: as JSON, or as the text of `for_people`.
    pub fn print_facts(
        self,
        facts: &impl Serialize,
        for_people: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        match self.json {
            true => print_json(&facts_json(facts, serde_json::to_string_pretty)?),
            false => print_text(&make_printable_lines(&for_people())),
        }
    }

    /// Prints a failure to standard error: as one line of JSON, or as a chain with its advice.
    pub fn print_failure(self, failure: &Failure) {
        let text = match self.json {
            true => failure_json(failure),
            false => failure.describe("firn"),
        };
        // There is no other output for this error.
        let _ = io::stderr().lock().write_all(text.as_bytes());
    }

    /// Prints facts in a sequence: as one line of JSON, or as the text of `for_people`.
    pub fn print_line(
        self,
        facts: &impl Serialize,
        for_people: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        match self.json {
            true => print_json(&facts_json(facts, serde_json::to_string)?),
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

/// The version of what `--json` prints, in each object at the top level.
const SCHEMA: u32 = 1;

/// Facts as JSON: an object gets the version, a list stays as it is.
fn facts_json(
    facts: &impl Serialize,
    write: impl Fn(&serde_json::Value) -> serde_json::Result<String>,
) -> Result<String, Failure> {
    let mut facts = serde_json::to_value(facts).while_doing("writing JSON")?;
    if let Some(fields) = facts.as_object_mut() {
        fields.insert("schema".to_owned(), SCHEMA.into());
    }
    write(&facts).while_doing("writing JSON")
}

fn print_json(json: &str) -> Result<(), Failure> {
    print_text(&format!("{}\n", printable_json(json)))
}

/// A failure as JSON, on one line.
fn failure_json(failure: &Failure) -> String {
    let mut messages = failure.distinct_messages();
    let causes = messages.split_off(messages.len().min(1));
    let facts = json!({ "schema": SCHEMA, "error": {
        "kind": failure.kind,
        "exit_code": failure.kind.exit_code(),
        "message": messages.first(),
        "causes": causes,
        "hint": failure.hint,
    } });
    format!("{}\n", printable_json(&facts.to_string()))
}

/// A path in a text for people. A line break in it begins no line.
pub fn printable_path(path: &Path) -> String {
    make_printable(&path.to_string_lossy()).into_owned()
}

/// Checks in advance that an image or a page can be written at a path.
pub fn check_output(path: &Path) -> Result<(), Failure> {
    crate::image::stored::refuse_location(path, "push")?;
    check_output_kind(path)?;
    let directory = path.parent().filter(|it| !it.as_os_str().is_empty());
    match directory.filter(|it| !it.is_dir()) {
        None => Ok(()),
        Some(missing) => {
            let text = format!("there is no directory {}", missing.display());
            Err(Failure::new(FailureKind::Usage, text).with_hint("make it, or name another one"))
        }
    }
}

/// Checks in advance that a path names nothing, or a file that may be replaced.
pub fn check_output_kind(path: &Path) -> Result<(), Failure> {
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
    fn json_has_the_same_text_without_control_characters() {
        let facts =
            serde_json::json!({ "a": "\u{1b}[2K\u{9b}\u{7f}\u{202e}\u{e0041}\n", "b": "größer" });
        let json = serde_json::to_string_pretty(&facts).unwrap();
        let text = printable_json(&json);
        assert!(text.chars().all(|it| is_shown(it) || it == '\n'), "{text:?}");
        assert!(text.contains("größer"));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), facts);
    }

    #[test]
    fn objects_have_a_version_and_lists_have_none() {
        let json = |facts| facts_json(&facts, serde_json::to_string).unwrap();
        assert_eq!(json(json!({ "name": "web" })), r#"{"name":"web","schema":1}"#);
        assert_eq!(json(json!(["web"])), r#"["web"]"#);
    }

    #[test]
    fn a_failure_is_one_line_of_json() {
        let failure = Failure::new(FailureKind::NoSuchVm, "b\u{1b}").while_doing("a");
        let json = failure_json(&failure.with_hint("c"));
        let facts: serde_json::Value = serde_json::from_str(&json).unwrap();
        let error = json!({
            "kind": "no-such-vm", "exit_code": 3, "message": "a", "causes": ["b\u{1b}"], "hint": "c",
        });
        assert_eq!(facts, json!({ "schema": 1, "error": error }));
        assert!(json.trim_end().chars().all(is_shown), "{json}");
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
