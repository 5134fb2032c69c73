//! What the commands say about themselves, at every width of a terminal.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::session::{Session, program};

/// Columns of a terminal.
const WIDTHS: [usize; 5] = [60, 80, 100, 120, 200];

/// The help of a program's verb.
fn help_of(program: &OsStr, words: &[String], columns: usize) -> String {
    let mut command = Command::new(program);
    command.args(words).arg("--help").env("COLUMNS", columns.to_string()).stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{words:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The verbs that a help lists.
fn listed_verbs(help: &str) -> Vec<String> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let list = list.take_while(|line| !line.is_empty());
    let verbs = list.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    verbs.filter(|verb| !verb.is_empty()).map(str::to_owned).collect()
}

/// The program itself, its verbs, and their verbs.
fn all_verbs(program: &OsStr) -> Vec<Vec<String>> {
    let mut all = vec![Vec::new()];
    let mut next = 0;
    while let Some(words) = all.get(next).cloned() {
        let below = listed_verbs(&help_of(program, &words, 100)).into_iter();
        all.extend(below.map(|verb| [&words[..], &[verb]].concat()));
        next += 1;
    }
    all
}

/// Number of spaces in front.
fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Whether two lines are of one paragraph: examples and lists of verbs have 2 or 4 spaces in front, and each option of a
/// short list, and each value of an option, begins with a dash.
fn is_one_paragraph(line: &str, next: &str) -> bool {
    let is_prose = !line.trim().is_empty() && (indent(line) == 0 || indent(line) > 4);
    let text = next.trim_start();
    is_prose
        && indent(line) == indent(next)
        && !text.is_empty()
        && !text.starts_with('-')
        && !text.starts_with('[')
        && !line.ends_with(':')
}

/// No line is wider than the terminal, and each line of a paragraph is full.
#[track_caller]
fn assert_wrapped(help: &str, columns: usize, what: &str) {
    let lines: Vec<&str> = help.lines().collect();
    let width = |text: &str| text.chars().count();
    for line in lines.iter().filter(|line| !line.starts_with("Usage: ")) {
        assert!(width(line) <= columns, "{what} at {columns} columns is too wide:\n{line}");
    }
    for pair in lines.windows(2).filter(|pair| is_one_paragraph(pair[0], pair[1])) {
        let word = pair[1].split_whitespace().next().unwrap_or_default();
        let is_full = width(pair[0]) + 1 + width(word) > columns;
        assert!(is_full, "{what} at {columns} columns is ragged:\n{}\n{}", pair[0], pair[1]);
    }
}

/// What follows the options, which may be in groups with headings: examples, and tables of exit codes
/// and of variables.
fn notes(help: &str) -> String {
    let lines: Vec<&str> = help.lines().skip_while(|line| *line != "Options:").collect();
    let is_heading = |line: &str| !line.is_empty() && !line.starts_with(' ');
    let has_options =
        |at: usize| lines.get(at + 1).is_some_and(|line| line.trim_start().starts_with('-'));
    let is_note = |at: &usize| is_heading(lines[*at]) && !has_options(*at);
    let begin = (0..lines.len()).find(is_note).unwrap_or(lines.len());
    lines[begin..].join("\n")
}

fn assert_all_wrapped(program: &Path, verbs_min: usize) {
    let verbs = all_verbs(program.as_os_str());
    assert!(verbs.len() >= verbs_min, "{verbs:?}");
    for words in &verbs {
        let what = format!("{} {}", program.display(), words.join(" "));
        let widest = notes(&help_of(program.as_os_str(), words, 200));
        for columns in WIDTHS {
            let help = help_of(program.as_os_str(), words, columns);
            assert_wrapped(&help, columns, &what);
            // Notes are examples and tables: they are made for 80 columns.
            if columns >= 80 {
                assert_eq!(notes(&help), widest, "{what}: a note is wider than {columns} columns");
            }
        }
    }
}

#[test]
fn help_fits_every_width() {
    assert_all_wrapped(Path::new(&program()), 40);
}

#[test]
fn help_of_the_agent_fits_every_width() {
    assert_all_wrapped(&Session::program_beside("firn-agent"), 5);
}

#[test]
fn ragged_and_wide_lines_are_found() {
    let found = |help: &str| std::panic::catch_unwind(|| assert_wrapped(help, 20, "it")).is_err();
    assert!(found("a line that ends\nso early"));
    assert!(found("a line that has more columns"));
    assert!(!found("a line that is full,\nand its rest\n\n  example 1\n  example 2\n"));
}

#[test]
fn every_verb_explains_itself() {
    let program = program();
    let verbs = all_verbs(&program);
    for known in ["run", "logs", "cluster forget", "image compare", "disk commit"] {
        assert!(verbs.iter().any(|words| words.join(" ") == known), "{known}: {verbs:?}");
    }
    for words in verbs.iter().filter(|words| !words.is_empty()) {
        let (verb, help) = (words.join(" "), help_of(&program, words, 100));
        assert!(help.contains(&format!("firn {verb}")), "{help}");
        let has_verbs = !listed_verbs(&help).is_empty();
        assert!(has_verbs || help.contains("Example"), "{verb} has no example:\n{help}");
    }
}

#[test]
fn exit_codes_are_documented() {
    let help = Session::new().firn(&["--help"]).succeeds().out;
    for code in 0..=8 {
        assert!(help.contains(&format!("\n  {code}  ")), "{code} is not in:\n{help}");
    }
}

#[test]
fn internal_commands_are_hidden() {
    let help = Session::new().firn(&["--help"]).succeeds().out;
    assert!(!help.contains("__"), "{help}");
}
