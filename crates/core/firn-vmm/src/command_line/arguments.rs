//! Splitting of a QEMU command line into options, and joining them again.

use std::fmt;

/// Options of QEMU 7.2 to 10 that take no value. Every other option takes one.
const WITHOUT_VALUE: &[&str] = &[
    "S",
    "alt-grab",
    "async-teardown",
    "audio-help",
    "ctrl-grab",
    "daemonize",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "jitdump",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nographic",
    "only-migratable",
    "perfmap",
    "portrait",
    "preconfig",
    "s",
    "singlestep",
    "snapshot",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-domid-restrict",
];

/// One option with its value, or a bare word (which QEMU uses as a disk).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CommandArgument {
    Option { name: String, value: Option<String> },
    Word(String),
}

impl CommandArgument {
    pub(super) fn new(name: &str, value: impl Into<String>) -> Self {
        Self::Option { name: name.to_owned(), value: Some(value.into()) }
    }

    pub(super) fn flag(name: &str) -> Self {
        Self::Option { name: name.to_owned(), value: None }
    }

    /// The option's name without dashes; empty for a bare word.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Option { name, .. } => name,
            Self::Word(_) => "",
        }
    }

    /// The option's value; empty if it has none.
    pub(super) fn value(&self) -> &str {
        match self {
            Self::Option { value, .. } => value.as_deref().unwrap_or(""),
            Self::Word(_) => "",
        }
    }
}

impl fmt::Display for CommandArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Option { name, value: Some(value) } => write!(f, "-{name} {value}"),
            Self::Option { name, value: None } => write!(f, "-{name}"),
            Self::Word(word) => f.write_str(word),
        }
    }
}

/// Splits words into arguments. An option whose value is missing gets none: QEMU itself will report
/// that.
pub(super) fn split_words(words: &[String]) -> Vec<CommandArgument> {
    let mut words = words.iter();
    let mut arguments = Vec::new();
    while let Some(word) = words.next() {
        arguments.push(match option_name(word) {
            Some(name) if is_flag(name) => CommandArgument::flag(name),
            Some(name) => {
                CommandArgument::Option { name: name.into(), value: words.next().cloned() }
            }
            None => CommandArgument::Word(word.clone()),
        });
    }
    arguments
}

/// Whether an option takes no value.
pub(super) fn is_flag(name: &str) -> bool {
    WITHOUT_VALUE.contains(&name)
}

/// The option's name in a word. QEMU accepts one dash or two; a dash alone is a word.
fn option_name(word: &str) -> Option<&str> {
    let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
    (!name.is_empty()).then_some(name)
}

/// Joins arguments to words.
pub(super) fn join_arguments(arguments: &[CommandArgument]) -> Vec<String> {
    let words = |argument: &CommandArgument| match argument {
        CommandArgument::Word(word) => vec![word.clone()],
        CommandArgument::Option { name, value } => {
            [Some(format!("-{name}")), value.clone()].into_iter().flatten().collect()
        }
    };
    arguments.iter().flat_map(words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn a_value_that_looks_like_an_option_is_a_value() {
        let line = words(&["-append", "-S", "--nodefaults", "-S", "disk.img", "-m"]);
        let arguments = split_words(&line);
        assert_eq!(arguments[0], CommandArgument::new("append", "-S"));
        assert_eq!(arguments[1], CommandArgument::flag("nodefaults"));
        assert_eq!(arguments[2], CommandArgument::flag("S"));
        assert_eq!(arguments[3], CommandArgument::Word("disk.img".into()));
        assert_eq!(arguments[4], CommandArgument::flag("m"));
    }

    #[test]
    fn joining_gives_the_words_back() {
        let line = words(&["-M", "q35", "-nographic", "disk.img", "-append", "a b"]);
        assert_eq!(join_arguments(&split_words(&line)), line);
    }
}
