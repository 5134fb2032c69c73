//! The overlays that a VM writes to and no image uses: commands that end or forget a VM show their
//! paths.

use std::path::PathBuf;

use firn_supervisor::{RuntimeDir, SupervisorRequest, VmName, inspect_vm, send_request};
use firn_types::make_printable;
use serde::Deserialize;

use crate::output::printable_path;

/// The overlays of a VM, as far as they are known.
pub fn overlays_of(base: &RuntimeDir, name: &VmName) -> Vec<PathBuf> {
    inspect_vm(base, &base.vm_dir(name)).map(|status| status.overlays).unwrap_or_default()
}

/// The overlays whose files still exist.
pub fn existing_overlays(overlays: Vec<PathBuf>) -> Vec<PathBuf> {
    overlays.into_iter().filter(|path| path.exists()).collect()
}

/// A line for each overlay.
pub fn overlay_lines(overlays: &[PathBuf]) -> String {
    overlays.iter().map(|path| format!("its disk: {}\n", printable_path(path))).collect()
}

/// A command line that starts a VM on its present disks.
#[derive(Debug, Deserialize)]
pub struct RestartCommand {
    /// Its words, the program first.
    #[serde(rename = "command")]
    pub words: Vec<String>,
    /// The words that replace those the VM was started with.
    replaced: Vec<serde_json::Value>,
}

/// Requests the command line from a VM's supervisor. `None` if the supervisor is busy or does not
/// answer.
pub fn request_restart_command(base: &RuntimeDir, name: &VmName) -> Option<RestartCommand> {
    let facts = send_request(base, name, &SupervisorRequest::CommandLine, &mut |_| ()).ok()?;
    serde_json::from_value(facts).ok()
}

impl RestartCommand {
    /// A line with the command line, if it differs from the one that the VM was started with.
    pub fn describe_change(&self, what: &str) -> String {
        let words: Vec<String> = self.words.iter().map(|word| shell_quoted(word)).collect();
        match self.replaced.is_empty() {
            true => String::new(),
            false => format!("{what}: {}\n", make_printable(&words.join(" "))),
        }
    }
}

/// Quotes a word for a shell.
fn shell_quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_=./,:+@%".contains(&byte);
    match !word.is_empty() && word.bytes().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        for (word, expected) in [
            ("-drive", "-drive"),
            ("file=/a,format=raw", "file=/a,format=raw"),
            ("", "''"),
            ("a b", "'a b'"),
            ("it's", r"'it'\''s'"),
        ] {
            assert_eq!(shell_quoted(word), expected);
        }
    }
}
