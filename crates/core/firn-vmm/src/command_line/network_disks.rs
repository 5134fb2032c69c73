//! Disks on the network in a command line, and their replacement by files.
//!
//! ```text
//!   -drive file=rbd:pool/web,format=raw,id=disk0        -drive id=disk0,file=o.qcow2,format=qcow2
//!   -blockdev driver=nbd,node-name=s,server.type=...    -blockdev node-name=s,driver=file,filename=o.qcow2
//!   -blockdev driver=raw,node-name=d,file=s             -blockdev driver=qcow2,node-name=d,file=s
//!   -blockdev {"driver":"throttle","file":              -blockdev {"driver":"throttle","file":
//!     {"driver":"raw","file":{"driver":"rbd",...}}}       {"driver":"qcow2","file":{"driver":"file",...}}}
//! ```
//!
//! No file name identifies such an option. QEMU knows its disk by the id of the `-drive`, or by the
//! names of its nodes.

use super::arguments::CommandArgument;
use super::drives::{DriveFile, set_format, set_format_over};
use super::properties::OptionProperties;
use crate::network_disks::{is_network_address, is_network_driver};

/// The start of the name that stands for such a disk where another has its file.
const NAME_PREFIX: &str = "network:";

/// The maximum length of a file name that is made from a name, in characters.
const STEM_MAX: usize = 64;

/// Where the options of a network's driver may be: the node itself, or below a format and filters.
const NODES: &[&str] = &["", "file.", "file.file.", "file.file.file."];

/// The properties that do not depend on the driver. Those that begin with a prefix are kept, too.
const KEPT: &[&str] = &[
    "id",
    "node-name",
    "if",
    "index",
    "bus",
    "unit",
    "media",
    "serial",
    "cache",
    "discard",
    "detect-zeroes",
    "werror",
    "rerror",
    "readonly",
    "read-only",
    "auto-read-only",
    "force-share",
    "copy-on-read",
];
const KEPT_PREFIXES: &[&str] = &["cache.", "throttling", "bps", "iops"];

/// A disk on the network, as an option names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkDisk {
    /// The name by which [`DriveFile`] refers to it.
    pub named: String,
    /// QEMU's names for it: the id of a drive, or the names of nodes. Empty if the option has none.
    pub ids: Vec<String>,
}

impl NetworkDisk {
    /// The name of a file that stands for the disk of this name; `None` for a disk with a file.
    pub fn file_stem(named: &str) -> Option<String> {
        let id = named.strip_prefix(NAME_PREFIX)?;
        let plain = |c: char| if c.is_ascii_alphanumeric() || "._".contains(c) { c } else { '-' };
        Some(id.chars().map(plain).take(STEM_MAX).collect())
    }
}

/// The disks on the network of a command line, in its order.
pub(super) fn find_network_disks(arguments: &[CommandArgument]) -> Vec<NetworkDisk> {
    let disk = |argument: &CommandArgument| {
        let found = FoundDisk::of_argument(argument)?;
        let own: Vec<String> = found.id.into_iter().collect();
        let above = own.first().map(|node| nodes_above(arguments, node)).unwrap_or_default();
        Some(NetworkDisk { named: found.named, ids: own.into_iter().chain(above).collect() })
    };
    arguments.iter().filter_map(disk).collect()
}

/// Whether an option has the disk on the network of this name.
pub(super) fn is_network_disk(argument: &CommandArgument, named: &str) -> bool {
    FoundDisk::of_argument(argument).is_some_and(|found| found.named == named)
}

/// Replaces a disk on the network by a file. `false` if no option has this disk.
pub(super) fn replace_network_disk(arguments: &mut [CommandArgument], drive: &DriveFile) -> bool {
    if !drive.named.starts_with(NAME_PREFIX) {
        return false;
    }
    let found = arguments.iter().enumerate().find_map(|(at, argument)| {
        let found = FoundDisk::of_argument(argument)?;
        (found.named == drive.named).then_some((at, found))
    });
    let Some((at, found)) = found else { return false };
    let above = found.id.as_ref().map(|node| nodes_above(arguments, node)).unwrap_or_default();
    let is_below = found.node.is_empty() && !above.is_empty();
    let option = arguments[at].name().to_owned();
    let replaced = match (&*option, found.node) {
        ("drive", _) => found.as_drive(drive),
        (_, "") if is_below => found.as_file_node(drive),
        (_, "") => found.as_image_node(drive),
        (_, node) => found.with_nested_file(node, drive),
    };
    arguments[at] = CommandArgument::new(&option, replaced.to_text(""));
    if is_below {
        let nodes: Vec<String> = found.id.into_iter().collect();
        arguments.iter_mut().for_each(|it| set_format_over(it, &nodes, &drive.format));
    }
    true
}

/// An option with a disk on the network.
struct FoundDisk {
    named: String,
    id: Option<String>,
    properties: OptionProperties,
    /// The node of the network's driver, with a dot; nothing if it is the topmost.
    node: &'static str,
}

impl FoundDisk {
    fn of_argument(argument: &CommandArgument) -> Option<Self> {
        let option = argument.name();
        let id_key = match option {
            "drive" => "id",
            "blockdev" => "node-name",
            _ => return None,
        };
        let properties = OptionProperties::parse_value(argument.value(), "")?;
        let node = find_driver_node(option, &properties)?;
        let id = properties.nested_text(id_key).filter(|id| !id.is_empty());
        let named = format!("{NAME_PREFIX}{}", id.as_deref().unwrap_or(argument.value()));
        Some(Self { named, id, properties, node })
    }

    /// `-drive`, which makes the nodes of the format and of the file itself.
    fn as_drive(&self, drive: &DriveFile) -> OptionProperties {
        let mut properties = self.properties.clone();
        properties.retain_keys(is_kept);
        properties.set("file", &drive.file);
        properties.set("format", &drive.format);
        properties
    }

    /// The node of the file, below the node of the format.
    fn as_file_node(&self, drive: &DriveFile) -> OptionProperties {
        let mut properties = self.properties.clone();
        properties.retain_keys(is_kept);
        properties.set("driver", "file");
        properties.set("filename", &drive.file);
        properties
    }

    /// The node of the format, with the node of the file in it: the guest had the network's node.
    fn as_image_node(&self, drive: &DriveFile) -> OptionProperties {
        let mut properties = self.properties.clone();
        properties.retain_keys(is_kept);
        properties.set("driver", &drive.format);
        properties.set_object("file", &[("driver", "file"), ("filename", &drive.file)]);
        properties
    }

    fn with_nested_file(&self, node: &str, drive: &DriveFile) -> OptionProperties {
        let mut properties = self.properties.clone();
        let above = node.strip_suffix("file.").unwrap_or("");
        let file = format!("{above}file");
        properties.set_object(&file, &[("driver", "file"), ("filename", &drive.file)]);
        set_format("blockdev", &mut properties, above, &drive.format);
        properties
    }
}

/// The node that has the network's driver, if one has.
fn find_driver_node(option: &str, properties: &OptionProperties) -> Option<&'static str> {
    let is_address = |name: String| is_network_address(&name);
    if option == "drive" && properties.nested_text("file").is_some_and(is_address) {
        return Some("file.");
    }
    let driver = |node: &str| properties.nested_text(&format!("{node}driver"));
    NODES.iter().copied().find(|node| driver(node).is_some_and(|it| is_network_driver(&it)))
}

fn is_kept(key: &str) -> bool {
    KEPT.contains(&key) || KEPT_PREFIXES.iter().any(|prefix| key.starts_with(prefix))
}

/// The names of the nodes on top of a node, each on top of the one before.
fn nodes_above(arguments: &[CommandArgument], node: &str) -> Vec<String> {
    let above = |below: &str| {
        let blockdevs = arguments.iter().filter(|argument| argument.name() == "blockdev");
        let mut parsed = blockdevs.filter_map(|it| OptionProperties::parse_value(it.value(), ""));
        let properties = parsed.find(|it| it.get("file").is_some_and(|file| *file == *below))?;
        properties.nested_text("node-name")
    };
    let nodes = std::iter::successors(above(node), |below| above(below));
    // A command line with a circle is refused by QEMU.
    nodes.take(arguments.len()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::arguments::{join_arguments, split_words};

    fn arguments(line: &str) -> Vec<CommandArgument> {
        split_words(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[track_caller]
    fn replaced(line: &str, named: &str, expected: &str) {
        let mut all = arguments(line);
        let (file, format) = ("/o,1".to_owned(), "qcow2".to_owned());
        let drive = DriveFile { named: named.to_owned(), file, format };
        assert!(replace_network_disk(&mut all, &drive), "{line}");
        assert_eq!(join_arguments(&all).join(" "), expected);
    }

    const RBD: &str =
        r#"{"driver":"rbd","image":"web","pool":"vms","server":[{"host":"a","port":"3300"}]}"#;

    #[test]
    fn each_form_is_found() {
        let line = format!(
            "-drive file=nbd:unix:/s:exportname=x,format=raw,id=disk0 -drive file=/a,format=raw \
             -blockdev driver=nbd,node-name=s,server.type=unix,server.path=/s -blockdev raw,node-name=d,file=s \
             -blockdev driver=throttle,node-name=t,file=d,throttle-group=g \
             -blockdev {{\"driver\":\"raw\",\"file\":{RBD},\"node-name\":\"n\"}} -drive file.driver=ssh,file.path=/p,if=virtio"
        );
        let found = find_network_disks(&arguments(&line));
        let ids: Vec<Vec<&str>> =
            found.iter().map(|disk| disk.ids.iter().map(String::as_str).collect()).collect();
        assert_eq!(ids, [vec!["disk0"], vec!["s", "d", "t"], vec!["n"], vec![]]);
        let names: Vec<&str> = found.iter().map(|disk| &*disk.named).collect();
        let nameless = "network:file.driver=ssh,file.path=/p,if=virtio";
        assert_eq!(names, ["network:disk0", "network:s", "network:n", nameless]);
    }

    #[test]
    fn a_file_takes_the_place_of_each_form() {
        replaced(
            "-drive file=nbd:unix:/s:exportname=x,format=raw,if=none,id=disk0,cache=none",
            "network:disk0",
            "-drive if=none,id=disk0,cache=none,file=/o,,1,format=qcow2",
        );
        replaced(
            "-drive file.driver=ssh,file.path=/p,if=virtio",
            "network:file.driver=ssh,file.path=/p,if=virtio",
            "-drive if=virtio,file=/o,,1,format=qcow2",
        );
        replaced(
            "-blockdev driver=nbd,node-name=s,server.type=unix,server.path=/s,discard=unmap -blockdev driver=raw,node-name=d,file=s",
            "network:s",
            "-blockdev node-name=s,discard=unmap,driver=file,filename=/o,,1 -blockdev driver=qcow2,node-name=d,file=s",
        );
        replaced(
            r#"-blockdev {"driver":"nbd","node-name":"s","server":{"path":"/s","type":"unix"}}"#,
            "network:s",
            r#"-blockdev {"driver":"qcow2","file":{"driver":"file","filename":"/o,1"},"node-name":"s"}"#,
        );
        replaced(
            "-blockdev driver=raw,node-name=n,file.driver=nbd,file.host=h,file.port=1",
            "network:n",
            "-blockdev driver=qcow2,node-name=n,file.driver=file,file.filename=/o,,1",
        );
        replaced(
            &format!(
                r#"-blockdev {{"driver":"throttle","file":{{"driver":"raw","file":{RBD}}},"node-name":"n"}}"#
            ),
            "network:n",
            r#"-blockdev {"driver":"throttle","file":{"driver":"qcow2","file":{"driver":"file","filename":"/o,1"}},"node-name":"n"}"#,
        );
    }

    #[test]
    fn other_disks_are_left_alone() {
        let mut all = arguments("-drive file=/a,format=raw,id=disk0");
        let named = "network:disk0".to_owned();
        let drive = DriveFile { named, file: "/o".into(), format: "qcow2".into() };
        assert!(!replace_network_disk(&mut all, &drive));
    }
}
