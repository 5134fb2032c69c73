//! Options that QEMU reads from files (`-readconfig FILE`), as a command line has them.
//!
//! ```text
//!   [device "ehci"]                        -device ich9-usb-ehci1,id=ehci,bus=pcie.0,addr=1d.7
//!     driver = "ich9-usb-ehci1"
//!     bus = "pcie.0"                ==>
//!     addr = "1d.7"
//!   [memory]                               -m 1024
//!     size = "1024"
//! ```
//!
//! Proxmox VE gives `q35` its buses and USB controllers in such a file. A restore must not depend on
//! a file that may change, so an image has its options.
//!
//! Source: QEMU `util/qemu-config.c` (`qemu_config_foreach`) for the format, `system/vl.c` for the
//! groups and the implied key of each option.

use std::io;

use super::CommandLineError;
use super::arguments::{self, CommandArgument};
use super::properties::OptionProperties;

/// The groups of an option file: the name of the option, and its implied key.
const GROUPS: &[(&str, &str, &str)] = &[
    ("accel", "accel", "accel"),
    ("action", "action", ""),
    ("audiodev", "audiodev", "driver"),
    ("boot-opts", "boot", "order"),
    ("chardev", "chardev", "backend"),
    ("device", "device", "driver"),
    ("drive", "drive", ""),
    ("fsdev", "fsdev", "fsdriver"),
    ("fw_cfg", "fw_cfg", "name"),
    ("global", "global", ""),
    ("icount", "icount", "shift"),
    ("machine", "machine", "type"),
    ("memory", "m", "size"),
    ("mon", "mon", "chardev"),
    ("msg", "msg", ""),
    ("name", "name", "guest"),
    ("netdev", "netdev", "type"),
    ("numa", "numa", "type"),
    ("object", "object", "qom-type"),
    ("overcommit", "overcommit", ""),
    ("rtc", "rtc", ""),
    ("sandbox", "sandbox", "enable"),
    ("smp-opts", "smp", "cpus"),
    ("spice", "spice", ""),
    ("tpmdev", "tpmdev", "type"),
    ("trace", "trace", "enable"),
];

/// A line of an option file.
enum FileLine<'a> {
    /// Nothing, or a comment.
    Empty,
    /// `[group]` or `[group "id"]`: the next lines are of this option.
    Group { name: &'a str, id: Option<&'a str> },
    /// `key = "value"`.
    Property { key: &'a str, value: &'a str },
}

/// Replaces each `-readconfig FILE` of a command line, the program first, by the options in the
/// file. `read` returns the contents of a file that the command line names.
///
/// # Errors
/// If a file cannot be read, or has a line or group that this function does not know.
pub fn expand_option_files(
    words: &[String],
    mut read: impl FnMut(&str) -> io::Result<String>,
) -> Result<Vec<String>, CommandLineError> {
    let Some((program, words)) = words.split_first() else { return Ok(Vec::new()) };
    let mut expanded = Vec::new();
    for argument in arguments::split_words(words) {
        match argument.name() {
            "readconfig" => {
                let file = argument.value();
                let text = read(file).map_err(|error| CommandLineError::OptionFile {
                    file: file.to_owned(),
                    problem: error.to_string(),
                })?;
                expanded.extend(parse_option_file(file, &text)?);
            }
            _ => expanded.push(argument),
        }
    }
    Ok([vec![program.clone()], arguments::join_arguments(&expanded)].concat())
}

fn parse_option_file(file: &str, text: &str) -> Result<Vec<CommandArgument>, CommandLineError> {
    let mut groups: Vec<((&str, &str), OptionProperties)> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let wrong = |problem: &str| CommandLineError::OptionFile {
            file: file.to_owned(),
            problem: format!("line {number}: {problem}"),
        };
        match parse_line(line).ok_or_else(|| wrong("neither [GROUP] nor KEY = \"VALUE\""))? {
            FileLine::Empty => {}
            FileLine::Group { name, id } => {
                let known = GROUPS.iter().find(|(group, ..)| *group == name);
                let &(_, option, implied) = known
                    .ok_or_else(|| wrong(&format!("Firn does not know the group {name:?}")))?;
                let mut properties = OptionProperties::default();
                id.into_iter().for_each(|id| properties.set("id", id));
                groups.push(((option, implied), properties));
            }
            FileLine::Property { key, value } => {
                let (_, properties) = groups.last_mut().ok_or_else(|| wrong("no group yet"))?;
                properties.set(key, value);
            }
        }
    }
    Ok(groups.into_iter().map(|(group, properties)| to_argument(group, &properties)).collect())
}

fn parse_line(line: &str) -> Option<FileLine<'_>> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Some(FileLine::Empty);
    }
    if let Some(group) = line.strip_prefix('[') {
        return parse_group(group.strip_suffix(']')?.trim());
    }
    let (key, value) = line.split_once('=')?;
    Some(FileLine::Property { key: key.trim(), value: unquote(value)? })
}

fn parse_group(group: &str) -> Option<FileLine<'_>> {
    match group.split_once(char::is_whitespace) {
        None => Some(FileLine::Group { name: group, id: None }),
        Some((name, id)) => Some(FileLine::Group { name, id: Some(unquote(id)?) }),
    }
}

/// The text between the quotes. The format has no escapes.
fn unquote(text: &str) -> Option<&str> {
    let text = text.trim().strip_prefix('"')?.strip_suffix('"')?;
    (!text.contains('"')).then_some(text)
}

/// The option with its implied key first, as users write it.
fn to_argument((option, implied): (&str, &str), properties: &OptionProperties) -> CommandArgument {
    let mut ordered = OptionProperties::default();
    let parts = properties.flattened();
    let (first, others): (Vec<_>, Vec<_>) = parts.iter().partition(|(key, _)| key == implied);
    first.into_iter().chain(others).for_each(|(key, value)| ordered.set(key, value));
    CommandArgument::new(option, ordered.to_text(implied))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expand(text: &str) -> Result<String, CommandLineError> {
        let words = ["qemu", "-S", "-readconfig", "f.cfg", "-m", "1G"].map(str::to_owned);
        let words = expand_option_files(&words, |file| {
            assert_eq!(file, "f.cfg");
            Ok(text.to_owned())
        })?;
        Ok(words.join(" "))
    }

    #[test]
    fn groups_become_options_at_their_place() {
        let text = "# a comment\n\n[device \"ehci\"]\n  driver = \"ich9-usb-ehci1\"\n  addr = \"1d.7\"\n\
            [machine]\ngraphics = \"off\"\ntype=\"q35\"\n[global]\n driver=\"a\"\n property=\"b\"\n value=\"\"\n";
        assert_eq!(
            expand(text).unwrap(),
            "qemu -S -device ich9-usb-ehci1,id=ehci,addr=1d.7 -machine q35,graphics=off \
             -global driver=a,property=b,value= -m 1G"
        );
    }

    #[test]
    fn commas_in_values_are_doubled() {
        let text = "[drive \"d\"]\nfile = \"a,b.qcow2\"";
        assert_eq!(expand(text).unwrap(), "qemu -S -drive id=d,file=a,,b.qcow2 -m 1G");
    }

    #[test]
    fn wrong_lines_are_named() {
        for (text, problem) in [
            ("[device \"a\"]\nbus = pcie.0", "line 2: neither"),
            ("[device \"a\"", "line 1: neither"),
            ("\n[nonsense]", "line 2: Firn does not know the group \"nonsense\""),
            ("bus = \"a\"", "line 1: no group"),
        ] {
            let error = expand(text).unwrap_err().to_string();
            assert!(error.starts_with("-readconfig f.cfg: ") && error.contains(problem), "{error}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error() {
        let words = ["qemu", "-readconfig", "f"].map(str::to_owned);
        let error = expand_option_files(&words, |_| Err(io::ErrorKind::NotFound.into()));
        assert_eq!(error.unwrap_err().to_string(), "-readconfig f: entity not found");
    }
}
