//! Disks in a command line: the files that its options name, and their replacement by other files.
//!
//! ```text
//!   -drive file=a.img,format=raw,if=virtio           -drive file=o.qcow2,format=qcow2,if=virtio
//!   -blockdev driver=file,node-name=f,filename=a     -blockdev driver=file,node-name=f,filename=o.qcow2
//!   -blockdev driver=raw,node-name=d,file=f          -blockdev driver=qcow2,node-name=d,file=f
//!   -hda a.img                                       -hda o.qcow2
//!   -blockdev {"driver":"throttle","file":           -blockdev {"driver":"throttle","file":
//!     {"driver":"raw","file":                          {"driver":"qcow2","file":
//!       {"driver":"file","filename":"a"}}}               {"driver":"file","filename":"o.qcow2"}}}
//! ```
//!
//! A node of a filter, such as a throttle, may be on top of the node of the format.
//!
//! QEMU finds a backing file through the file itself, so an option that names one (`backing=`) is
//! removed.

use super::arguments::CommandArgument;
use super::properties::OptionProperties;

/// Options whose whole value is the file of a disk. A bare word is one too.
const PLAIN: &[&str] = &["hda", "hdb", "hdc", "hdd", "mtdblock", "pflash", "sd"];

/// The keys of a file name among the properties of `-drive` and `-blockdev`. Below one filter there
/// is one more `file`.
const FILE_KEYS: &[&str] =
    &["file", "file.filename", "file.file.filename", "file.file.file.filename", "filename"];

/// Block drivers whose `filename` is a local file.
const PROTOCOLS: &[&str] = &["file", "host_device"];

/// A file that replaces another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveFile {
    /// The file that the command line names, as it names it.
    pub named: String,
    /// The file that replaces it.
    pub file: String,
    /// Its format: `qcow2` or `raw`.
    pub format: String,
}

/// The files that options name.
pub(super) fn disk_files(arguments: &[CommandArgument]) -> Vec<String> {
    arguments.iter().filter_map(named_file).collect()
}

fn named_file(argument: &CommandArgument) -> Option<String> {
    match argument {
        CommandArgument::Word(word) => Some(word.clone()),
        CommandArgument::Option { name, value: Some(value) } if PLAIN.contains(&&**name) => {
            Some(value.clone())
        }
        CommandArgument::Option { name, .. } if matches!(&**name, "drive" | "blockdev") => {
            let properties = OptionProperties::parse_value(argument.value(), "")?;
            let key = file_key(name, &properties)?;
            properties.nested_text(key)
        }
        CommandArgument::Option { .. } => None,
    }
}

/// The key under which the properties of `-drive` or `-blockdev` name a file.
pub(super) fn file_key(option: &str, properties: &OptionProperties) -> Option<&'static str> {
    let is_there = |key: &str| properties.nested_text(key).is_some();
    let protocol = || properties.get("driver").is_some_and(|it| PROTOCOLS.contains(&&*it));
    FILE_KEYS.iter().copied().find(|&key| match (option, key) {
        // In -blockdev it is the name of another node.
        ("blockdev", "file") => false,
        ("drive", "filename") => false,
        ("blockdev", "filename") => is_there(key) && protocol(),
        _ => is_there(key),
    })
}

/// Replaces a file by another. `false` if no option names it.
pub(super) fn replace_file(arguments: &mut [CommandArgument], drive: &DriveFile) -> bool {
    let mut nodes = Vec::new();
    let mut found = false;
    for argument in &mut *arguments {
        if named_file(argument).as_ref() != Some(&drive.named) {
            continue;
        }
        found = true;
        match argument {
            CommandArgument::Word(word) => word.clone_from(&drive.file),
            CommandArgument::Option { name, value } if PLAIN.contains(&&**name) => {
                *value = Some(drive.file.clone());
            }
            CommandArgument::Option { .. } => nodes.extend(replace_in(argument, drive)),
        }
    }
    arguments.iter_mut().for_each(|argument| set_format_over(argument, &nodes, &drive.format));
    found
}

/// Renames a file in the options that name it.
pub(super) fn rename_file(
    arguments: &mut [CommandArgument],
    is_old: impl Fn(&str) -> bool,
    new: &str,
) {
    let names =
        |argument: &&mut CommandArgument| named_file(argument).is_some_and(|file| is_old(&file));
    for argument in arguments.iter_mut().filter(names) {
        *argument = match &*argument {
            CommandArgument::Word(_) => CommandArgument::Word(new.to_owned()),
            CommandArgument::Option { name, .. } if PLAIN.contains(&&**name) => {
                CommandArgument::new(name, new)
            }
            CommandArgument::Option { name, .. } => {
                let Some(mut properties) = OptionProperties::parse_value(argument.value(), "")
                else {
                    continue;
                };
                let Some(key) = file_key(name, &properties) else { continue };
                properties.set_nested(key, new);
                CommandArgument::new(name, properties.to_text(""))
            }
        };
    }
}

/// Replaces the file in `-drive` or `-blockdev`. Returns the name of the node, if that is only the
/// node of the file.
fn replace_in(argument: &mut CommandArgument, drive: &DriveFile) -> Option<String> {
    let mut properties = OptionProperties::parse_value(argument.value(), "")?;
    let key = file_key(argument.name(), &properties)?;
    properties.set_nested(key, &drive.file);
    // The new file is a regular one, whatever the old one was.
    let protocol = format!("{}driver", key.strip_suffix("filename").unwrap_or(key));
    if properties.nested_text(&protocol).is_some_and(|driver| driver == "host_device") {
        properties.set_nested(&protocol, "file");
    }
    let node = match (argument.name(), key) {
        ("blockdev", "filename") => properties.nested_text("node-name"),
        (option, _) => {
            set_format(option, &mut properties, format_node(key), &drive.format);
            None
        }
    };
    *argument = CommandArgument::new(argument.name(), properties.to_text(""));
    node
}

/// The key of the node that has the format of a file, with a dot; nothing if it is the topmost. The
/// node of the file is below it.
fn format_node(file_key: &str) -> &str {
    file_key.strip_suffix("file.filename").unwrap_or("")
}

pub(super) fn set_format(
    option: &str,
    properties: &mut OptionProperties,
    node: &str,
    format: &str,
) {
    let has_driver = option == "blockdev" || !node.is_empty() || properties.get("driver").is_some();
    let key = if has_driver { "driver" } else { "format" };
    properties.set_nested(&format!("{node}{key}"), format);
    properties.remove_nested(&format!("{node}backing"));
}

/// Sets the format of a node on top of a replaced file.
pub(super) fn set_format_over(argument: &mut CommandArgument, nodes: &[String], format: &str) {
    if argument.name() != "blockdev" {
        return;
    }
    let Some(mut properties) = OptionProperties::parse_value(argument.value(), "") else { return };
    if properties.get("file").is_some_and(|file| nodes.iter().any(|node| **node == *file)) {
        set_format("blockdev", &mut properties, "", format);
        *argument = CommandArgument::new("blockdev", properties.to_text(""));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::arguments::{join_arguments, split_words};

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn replaced(line: &str, named: &str) -> Option<String> {
        let mut arguments = split_words(&words(line));
        let drive = DriveFile { named: named.into(), file: "/o,1".into(), format: "qcow2".into() };
        replace_file(&mut arguments, &drive).then(|| join_arguments(&arguments).join(" "))
    }

    #[test]
    fn files_are_found_in_every_form() {
        let line = concat!(
            "-drive file=a,,b,format=raw -hda c -cdrom no -blockdev driver=file,node-name=f,filename=d ",
            "-blockdev driver=raw,file=f -blockdev {\"driver\":\"raw\",\"file\":{\"driver\":\"file\",\"filename\":\"e\"}} ",
            "-blockdev driver=raw,file.driver=file,file.filename=g -drive if=none,id=x h -blockdev driver=nbd,filename=z"
        );
        assert_eq!(disk_files(&split_words(&words(line))), ["a,b", "c", "d", "e", "g", "h"]);
    }

    #[test]
    fn another_file_takes_the_place_of_one() {
        let same = |line: &str, named: &str, expected: &str| {
            assert_eq!(replaced(line, named).as_deref(), Some(expected), "{line}");
        };
        same(
            "-drive file=a,format=raw,if=virtio -drive file=b",
            "a",
            "-drive file=/o,,1,format=qcow2,if=virtio -drive file=b",
        );
        same("-drive file=a", "a", "-drive file=/o,,1,format=qcow2");
        same("-drive file=a,driver=raw", "a", "-drive file=/o,,1,driver=qcow2");
        same("-hda a -hdb b", "a", "-hda /o,1 -hdb b");
        same("a", "a", "/o,1");
        same(
            "-blockdev driver=host_device,node-name=f,filename=a -blockdev driver=raw,node-name=d,file=f,backing=x,backing.driver=raw",
            "a",
            "-blockdev driver=file,node-name=f,filename=/o,,1 -blockdev driver=qcow2,node-name=d,file=f",
        );
        same(
            "-blockdev {\"driver\":\"raw\",\"file\":{\"driver\":\"file\",\"filename\":\"a\"},\"node-name\":\"d\"}",
            "a",
            "-blockdev {\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"/o,1\"},\"node-name\":\"d\"}",
        );
        same(
            "-blockdev driver=raw,file.driver=file,file.filename=a",
            "a",
            "-blockdev driver=qcow2,file.driver=file,file.filename=/o,,1",
        );
        same(
            "-blockdev {\"driver\":\"throttle\",\"file\":{\"backing\":\"x\",\"driver\":\"raw\",\"file\":{\"driver\":\"host_device\",\"filename\":\"a\"}},\"node-name\":\"d\"}",
            "a",
            "-blockdev {\"driver\":\"throttle\",\"file\":{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"/o,1\"}},\"node-name\":\"d\"}",
        );
        same(
            "-blockdev driver=throttle,file.driver=raw,file.backing.driver=raw,file.file.driver=file,file.file.filename=a",
            "a",
            "-blockdev driver=throttle,file.driver=qcow2,file.file.driver=file,file.file.filename=/o,,1",
        );
        assert_eq!(replaced("-drive file=a -cdrom b", "b"), None);
    }
}
