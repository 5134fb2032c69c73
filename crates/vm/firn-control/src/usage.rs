//! Command lines that clap refuses, as failures like all others: one line with the reason, and what
//! to try.

use std::ffi::{OsStr, OsString};

use clap::error::ErrorKind;
use firn_supervisor::{Failure, FailureKind};

/// The failure for an error of clap, unless it is a request for help or for the version.
pub fn usage_failure(error: &clap::Error) -> Option<Failure> {
    use ErrorKind::{
        DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand as NoVerb, DisplayVersion,
    };
    if matches!(error.kind(), DisplayHelp | DisplayVersion | NoVerb) {
        return None;
    }
    Some(read_rendered(&error.render().to_string()))
}

/// Whether the command line asks for JSON. clap does not report that if it refuses another word.
pub fn wants_json(words: impl Iterator<Item = OsString>) -> bool {
    words.take_while(|word| word != OsStr::new("--")).any(|word| word == OsStr::new("--json"))
}

/// The beginning of clap's tip to give an unknown option as a value, which is seldom what a user
/// wants.
const ESCAPE: &str = "to pass ";

/// Reads what clap prints: the reason, possibly with a list; then tips; then the usage.
///
/// ```text
///   error: the following required arguments were not provided:
///     --output <IMAGE>
///
///     tip: ...
///
///   Usage: firn checkpoint --output <IMAGE> <NAME>
/// ```
fn read_rendered(text: &str) -> Failure {
    let mut paragraphs = text.split("\n\n").map(str::trim);
    let reason = paragraphs.next().unwrap_or_default();
    let mut lines = reason.trim_start_matches("error: ").lines().map(str::trim);
    let first = lines.next().unwrap_or_default();
    let list = lines.collect::<Vec<_>>().join(", ");
    let failure = Failure::new(FailureKind::Usage, format!("{first} {list}").trim());
    let rest: Vec<&str> = paragraphs.collect();
    let hint = ["tip: ", "Usage: "].iter().find_map(|lead| {
        let is_helpful = |found: &&str| !found.starts_with(ESCAPE);
        let found =
            rest.iter().filter_map(|paragraph| paragraph.strip_prefix(lead)).find(is_helpful)?;
        found.lines().next().map(str::to_owned)
    });
    failure.with_hint(hint.unwrap_or_else(|| "`--help` explains each option".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_one_line() {
        let text = "error: these are missing:\n  --output <IMAGE>\n  <NAME>\n\n\
            Usage: firn checkpoint --output <IMAGE> <NAME>\n\nFor more, try '--help'.\n";
        let failure = read_rendered(text);
        assert_eq!(failure.chain, ["these are missing: --output <IMAGE>, <NAME>"]);
        assert_eq!(failure.hint.as_deref(), Some("firn checkpoint --output <IMAGE> <NAME>"));
        let text =
            "error: unexpected argument '--jsn' found\n\n  tip: '--json' exists\n\nUsage: firn\n";
        assert_eq!(read_rendered(text).hint.as_deref(), Some("'--json' exists"));
        let text = "error: unexpected argument '--x' found\n\n  tip: to pass '--x' as a value, use '-- --x'\n\nUsage: firn ls\n";
        assert_eq!(read_rendered(text).hint.as_deref(), Some("firn ls"));
        let text = "error: invalid value 'x': it is no number\n\nFor more, try '--help'.\n";
        assert_eq!(read_rendered(text).hint.as_deref(), Some("`--help` explains each option"));
    }

    #[test]
    fn words_for_qemu_ask_for_nothing() {
        let wants = |words: &[&str]| wants_json(words.iter().map(OsString::from));
        assert!(wants(&["firn", "ls", "--json"]));
        assert!(!wants(&["firn", "run", "web", "--", "--json"]));
    }
}
