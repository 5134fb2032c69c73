//! What commands print.

use std::fmt::Write as _;
use std::io::{self, Write};

use firn_supervisor::{Context, Failure};
use serde::Serialize;

/// Where facts go, and in which form.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    json: bool,
}

impl Output {
    /// Facts as JSON, or for people.
    pub fn new(json: bool) -> Self {
        Self { json }
    }

    /// Prints facts: as they are, or as `for_people` tells them.
    pub fn facts(
        self,
        facts: &impl Serialize,
        for_people: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        match self.json {
            true => {
                let json = serde_json::to_string_pretty(facts).doing("writing JSON")?;
                print(&format!("{json}\n"))
            }
            false => print(&for_people()),
        }
    }
    /// Prints facts of which there will be more: a line of JSON each, or as `for_people` tells them.
    pub fn line(
        self,
        facts: &impl Serialize,
        for_people: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        match self.json {
            true => print(&format!("{}\n", serde_json::to_string(facts).doing("writing JSON")?)),
            false => print(&for_people()),
        }
    }
}

/// Prints to standard output. A reader that has seen enough is no error.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).doing("writing to standard output")
        }
        _ => Ok(()),
    }
}

/// Prints a failure to standard error: once, as a chain, and what to try.
pub fn print_failure(failure: &Failure) {
    let mut text = String::new();
    for (depth, message) in failure.chain.iter().enumerate() {
        let lead = if depth == 0 { "firn: " } else { "  because: " };
        let _ = writeln!(text, "{lead}{message}");
    }
    if let Some(hint) = &failure.hint {
        let _ = writeln!(text, "  try: {hint}");
    }
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Lines up the cells of rows; the first row is the heading.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
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
    fn cells_line_up() {
        let rows = [["NAME", "STATE"], ["web", "running"], ["longer", "ended"]]
            .map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(&rows), "NAME    STATE\nweb     running\nlonger  ended\n");
        assert_eq!(table(&[]), "");
    }
}
