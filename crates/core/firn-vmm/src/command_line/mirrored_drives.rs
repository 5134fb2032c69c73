//! Drives of a primary that are mirrored, in the command line of its standby: there each is a disk
//! that Firn serves.
//!
//! ```text
//!   -drive file=web.qcow2,format=qcow2,if=virtio            -drive if=virtio,id=virtio0,file=virtio0.raw,format=raw,firn=on
//!   -hda web.img                                            -drive index=0,media=disk,id=ide0-hd0,file=...,format=raw,firn=on
//!   -blockdev driver=file,node-name=f,filename=web.qcow2
//!   -blockdev driver=qcow2,node-name=d,file=f               -blockdev driver=raw,node-name=d,file=d.raw,firn=on
//! ```
//!
//! The standby has the contents of the drive as raw bytes, whatever format and backing files the
//! primary's drive has. Ids, names of nodes and serial numbers stay, because devices refer to them.
//! The cache mode does not: it is about the primary's file. Nodes that only the replaced one used are
//! left out.

use super::arguments::{self, CommandArgument};
use super::drives;
use super::error::CommandLineError;
use super::network_disks;
use super::properties::OptionProperties;
use crate::drives::is_filter;

/// The properties of `-drive` that stay.
const DRIVE_KEYS: &[&str] = &[
    "if",
    "index",
    "bus",
    "unit",
    "media",
    "serial",
    "discard",
    "detect-zeroes",
    "werror",
    "rerror",
];
const DRIVE_KEY_PREFIXES: &[&str] = &["throttling", "bps", "iops"];
/// The properties of `-blockdev` that stay.
const NODE_KEYS: &[&str] = &["discard", "detect-zeroes"];
/// The properties of `-blockdev` that name another node.
const NODE_REFERENCES: &[&str] = &["file", "backing", "data-file"];

const NOT_KEPT: &str = "its writes are discarded when QEMU ends; leave out snapshot";
const NO_OPTION: &str =
    "no option of the VM's command line makes it, so a standby could not have it";

/// A drive, as the hypervisor and the command line name it.
#[derive(Clone, Copy, Debug)]
pub struct MirroredDrive<'a> {
    /// The hypervisor's name for it: the id of its `-drive`, or the path of its device.
    pub name: &'a str,
    /// The name of the node of its topmost image.
    pub node: &'a str,
    /// The command line's name for its file, if an option has one.
    pub named: Option<&'a str>,
}

/// The command line of a standby, in which Firn serves this drive. Returns the id of the disk as
/// well.
///
/// # Errors
/// If no option makes the drive, or its writes are not kept.
pub fn with_standby_disk(
    command: &[String],
    drive: MirroredDrive<'_>,
) -> Result<(Vec<String>, String), CommandLineError> {
    let (program, words) = command.split_first().ok_or(CommandLineError::Empty)?;
    let mut arguments = arguments::split_words(words);
    if let Some(snapshot) = arguments.iter().find(|argument| argument.name() == "snapshot") {
        return Err(CommandLineError::refuse_option(snapshot, NOT_KEPT));
    }
    let at = find_option(&arguments, drive).ok_or_else(|| {
        CommandLineError::refuse_option(format!("disk {}", drive.name), NO_OPTION)
    })?;
    let (served, id) = served_option(&arguments[at], drive)?;
    let replaced = std::mem::replace(&mut arguments[at], served);
    remove_unused_nodes(&mut arguments, &replaced);
    Ok(([vec![program.clone()], arguments::join_arguments(&arguments)].concat(), id))
}

/// The index of the option that makes the drive: by the name of its node or its id, or else by its
/// file.
fn find_option(arguments: &[CommandArgument], drive: MirroredDrive<'_>) -> Option<usize> {
    let has = |option: &str, key: &str, value: &str| {
        let is_it = |it: &CommandArgument| {
            it.name() == option && text_of(it, key).is_some_and(|it| it == value)
        };
        arguments.iter().position(is_it)
    };
    has("blockdev", "node-name", drive.node)
        .or_else(|| has("drive", "id", drive.name))
        .or_else(|| find_by_file(arguments, drive.named?))
}

fn find_by_file(arguments: &[CommandArgument], named: &str) -> Option<usize> {
    let has_file = |argument: &CommandArgument| {
        drives::disk_files(std::slice::from_ref(argument)).iter().any(|file| file == named)
            || network_disks::is_network_disk(argument, named)
    };
    let mut at = arguments.iter().position(has_file)?;
    if arguments[at].name() != "blockdev" {
        return Some(at);
    }
    // A circle is refused by QEMU.
    for _ in arguments {
        let node = text_of(&arguments[at], "node-name")?;
        let is_above = |it: &CommandArgument| {
            it.name() == "blockdev"
                && text_of(it, "file").as_ref() == Some(&node)
                && !is_filter_node(it)
        };
        match arguments.iter().position(is_above) {
            Some(above) => at = above,
            None => break,
        }
    }
    (!is_filter_node(&arguments[at])).then_some(at)
}

fn is_filter_node(argument: &CommandArgument) -> bool {
    text_of(argument, "driver").is_some_and(|driver| is_filter(&driver))
}

fn text_of(argument: &CommandArgument, key: &str) -> Option<String> {
    OptionProperties::parse_value(argument.value(), "")?.get(key).map(String::from)
}

/// The option of the disk that Firn serves, and its id.
fn served_option(
    argument: &CommandArgument,
    drive: MirroredDrive<'_>,
) -> Result<(CommandArgument, String), CommandLineError> {
    let mut old = OptionProperties::parse_value(argument.value(), "").unwrap_or_default();
    if old.is_on("snapshot") {
        return Err(CommandLineError::refuse_option(argument, NOT_KEPT));
    }
    let (option, id, format) = match argument.name() {
        "blockdev" => {
            let node = old.get("node-name").map(String::from);
            old = plain_text(&old, &|key| NODE_KEYS.contains(&key));
            old.set("driver", "raw");
            ("blockdev", node.unwrap_or_else(|| drive.node.to_owned()), None)
        }
        "drive" => {
            let id = old.get("id").map_or_else(|| drive.name.to_owned(), String::from);
            old = plain_text(&old, &is_drive_key);
            ("drive", id, Some("raw"))
        }
        plain => {
            old = OptionProperties::default();
            plain_keys(plain).iter().for_each(|(key, value)| old.set(key, value));
            ("drive", drive.name.to_owned(), Some("raw"))
        }
    };
    old.set(if option == "blockdev" { "node-name" } else { "id" }, &id);
    old.set("file", &format!("{id}.raw"));
    format.iter().for_each(|format| old.set("format", format));
    old.set("firn", "on");
    Ok((CommandArgument::new(option, old.to_text("")), id))
}

fn is_drive_key(key: &str) -> bool {
    DRIVE_KEYS.contains(&key) || DRIVE_KEY_PREFIXES.iter().any(|prefix| key.starts_with(prefix))
}

/// The properties that are kept, as text.
fn plain_text(old: &OptionProperties, is_kept: &dyn Fn(&str) -> bool) -> OptionProperties {
    let mut kept = OptionProperties::default();
    let flat = old.flattened().into_iter().filter(|(key, _)| is_kept(key));
    flat.for_each(|(key, value)| kept.set(&key, &value));
    kept
}

/// The properties of a `-drive` that an option stands for whose value is a file (QEMU `qemu-options.hx`).
/// A bare word is the first disk.
fn plain_keys(option: &str) -> &'static [(&'static str, &'static str)] {
    match option {
        "" | "hda" => &[("index", "0"), ("media", "disk")],
        "hdb" => &[("index", "1"), ("media", "disk")],
        "hdc" => &[("index", "2"), ("media", "disk")],
        "hdd" => &[("index", "3"), ("media", "disk")],
        "mtdblock" => &[("if", "mtd")],
        "pflash" => &[("if", "pflash")],
        "sd" => &[("if", "sd")],
        _ => &[],
    }
}

/// Removes the nodes below a replaced node that no other option uses.
fn remove_unused_nodes(arguments: &mut Vec<CommandArgument>, replaced: &CommandArgument) {
    let mut unused = referenced_nodes(replaced);
    while let Some(node) = unused.pop() {
        let uses = |it: &CommandArgument| {
            referenced_nodes(it).contains(&node)
                || text_of(it, "drive").is_some_and(|drive| drive == node)
        };
        if arguments.iter().any(uses) {
            continue;
        }
        let is_it = |it: &CommandArgument| {
            it.name() == "blockdev" && text_of(it, "node-name").is_some_and(|name| name == node)
        };
        if let Some(at) = arguments.iter().position(is_it) {
            unused.extend(referenced_nodes(&arguments.remove(at)));
        }
    }
}

fn referenced_nodes(argument: &CommandArgument) -> Vec<String> {
    match argument.name() {
        "blockdev" => NODE_REFERENCES.iter().filter_map(|key| text_of(argument, key)).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::plan_command;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn replaced(
        line: &str,
        name: &str,
        node: &str,
        named: &str,
    ) -> Result<(String, String), CommandLineError> {
        let drive = MirroredDrive { name, node, named: Some(named) };
        let (args, id) = with_standby_disk(&words(&format!("qemu {line}")), drive)?;
        let plans = plan_command(&args).unwrap();
        assert_eq!(plans.disks().len(), 1, "{args:?}");
        assert_eq!((&*plans.disks()[0].id, &*plans.disks()[0].format), (&*id, "raw"));
        Ok((args[1..].join(" "), id))
    }

    #[track_caller]
    fn becomes(line: &str, name: &str, node: &str, expected: &str) {
        assert_eq!(replaced(line, name, node, "/a").unwrap().0, expected);
    }

    #[test]
    fn a_drive_becomes_a_disk_that_firn_serves() {
        becomes(
            "-drive file=/a,format=qcow2,if=none,id=d,cache=none,aio=native,discard=unmap,l2-cache-size=1 -device virtio-blk-pci,drive=d",
            "d",
            "#block1",
            "-drive if=none,discard=unmap,id=d,file=d.raw,format=raw,firn=on -device virtio-blk-pci,drive=d",
        );
        becomes(
            "-drive file=/b,id=e -drive file=/a,if=virtio,serial=x",
            "virtio0",
            "#block1",
            "-drive file=/b,id=e -drive if=virtio,serial=x,id=virtio0,file=virtio0.raw,format=raw,firn=on",
        );
        becomes(
            "-hdb /a",
            "ide0-hd1",
            "#block1",
            "-drive index=1,media=disk,id=ide0-hd1,file=ide0-hd1.raw,format=raw,firn=on",
        );
        becomes(
            "/a",
            "ide0-hd0",
            "#b",
            "-drive index=0,media=disk,id=ide0-hd0,file=ide0-hd0.raw,format=raw,firn=on",
        );
        let remote = "-drive file=nbd:unix:/s:exportname=x,format=raw,if=none,id=r";
        let (line, id) = replaced(remote, "r", "#block1", "network:r").unwrap();
        assert_eq!((&*line, &*id), ("-drive if=none,id=r,file=r.raw,format=raw,firn=on", "r"));
    }

    #[test]
    fn a_node_becomes_a_disk_that_firn_serves_and_those_below_it_go() {
        let graph = "-blockdev driver=file,node-name=b,filename=/base,read-only=on -blockdev driver=qcow2,node-name=bf,file=b \
             -blockdev driver=file,node-name=f,filename=/a -blockdev {\"driver\":\"qcow2\",\"node-name\":\"d\",\"file\":\"f\",\"backing\":\"bf\",\"discard\":\"unmap\",\"cache\":{\"direct\":true}} \
             -blockdev driver=throttle,node-name=t,file=d,throttle-group=g -device virtio-blk-pci,drive=t";
        let served = "-blockdev discard=unmap,driver=raw,node-name=d,file=d.raw,firn=on \
             -blockdev driver=throttle,node-name=t,file=d,throttle-group=g -device virtio-blk-pci,drive=t";
        let graph = graph.split_whitespace().collect::<Vec<_>>().join(" ");
        let served = served.split_whitespace().collect::<Vec<_>>().join(" ");
        becomes(&graph, "/machine/peripheral/x", "d", &served);
        // An overlay is on top since, whose node no option has.
        becomes(&graph, "/machine/peripheral/x", "firn-1", &served);
        let shared = format!("{graph} -blockdev driver=qcow2,node-name=e,file=x,backing=bf");
        assert!(replaced(&shared, "/m", "d", "/a").unwrap().0.contains("filename=/base"));
        let nested = "-blockdev driver=qcow2,node-name=d,file.driver=file,file.filename=/a -device scsi-hd,drive=d";
        becomes(
            nested,
            "/m",
            "d",
            "-blockdev driver=raw,node-name=d,file=d.raw,firn=on -device scsi-hd,drive=d",
        );
    }

    #[test]
    fn a_drive_that_a_standby_could_not_have_is_refused() {
        for line in [
            "-drive file=/a,id=d -snapshot",
            "-drive file=/a,id=d,snapshot=on",
            "-drive file=/b,id=e",
            "-blockdev driver=throttle,node-name=t,file.driver=raw,file.file.driver=file,file.file.filename=/a",
        ] {
            assert!(replaced(line, "d", "#block1", "/a").is_err(), "{line}");
        }
    }
}
