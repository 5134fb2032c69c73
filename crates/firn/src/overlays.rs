//! The files that a VM's disks are written to and no image stands on: whoever ends or forgets a VM is told where they are.

use std::path::PathBuf;

use firn_supervisor::{Request, RuntimeDir, VmName, ask, inspect};
use serde::Deserialize;

/// Those of a VM, as far as anything is known of it.
pub fn of(base: &RuntimeDir, name: &VmName) -> Vec<PathBuf> {
    inspect(base, &base.vm(name)).map(|status| status.overlays).unwrap_or_default()
}

/// Those that are there still.
pub fn left(overlays: Vec<PathBuf>) -> Vec<PathBuf> {
    overlays.into_iter().filter(|path| path.exists()).collect()
}

/// A line for each.
pub fn lines(overlays: &[PathBuf]) -> String {
    overlays.iter().map(|path| format!("its disk: {}\n", path.display())).collect()
}

/// A command line that starts a VM on the disks it has now.
#[derive(Debug, Deserialize)]
pub struct Command {
    /// Its words, the program first.
    #[serde(rename = "command")]
    pub words: Vec<String>,
    /// What it has in place of what the VM was started with.
    replaced: Vec<serde_json::Value>,
}

/// That of a VM which has nothing else to do.
pub fn command(base: &RuntimeDir, name: &VmName) -> Option<Command> {
    let facts = ask(base, name, &Request::CommandLine, &mut |_| ()).ok()?;
    serde_json::from_value(facts).ok()
}

impl Command {
    /// A line with it, if it is another one than the VM was started with.
    pub fn line(&self, what: &str) -> String {
        let words: Vec<String> = self.words.iter().map(|word| quoted(word)).collect();
        match self.replaced.is_empty() {
            true => String::new(),
            false => format!("{what}: {}\n", words.join(" ")),
        }
    }
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
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
            assert_eq!(quoted(word), expected);
        }
    }
}
