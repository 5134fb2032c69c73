//! Disks that Firn serves, so that they belong to a VM's epochs.
//!
//! ```text
//!   -drive file=web.qcow2,format=qcow2,if=none,id=disk0,firn=on                                                  as given
//!   -drive format=qcow2,if=none,id=disk0,file.driver=nbd,file.server.type=unix,file.server.path=...,file.export=disk0,...
//!
//!   -blockdev driver=raw,node-name=disk0,file=web.raw,firn=on                                                    the same as a node
//!   -blockdev driver=raw,node-name=disk0,file.driver=nbd,file.server.type=unix,...
//! ```
//!
//! The VM's record keeps the user's option, so that a standby has the same disks. A qcow2 file
//! grows, and a served file can't: so Firn serves it at its maximum size. `size=BYTES` sets that;
//! the default is a little more than twice the disk.
//!
//! Source: QEMU `qapi/block-core.json`, `BlockdevOptionsNbd`.

use std::path::{Path, PathBuf};

use super::arguments::{self, CommandArgument};
use super::error::CommandLineError;
use super::properties::OptionProperties;
use super::size;

/// How long QEMU waits for a server that has died, in seconds: a week. A new supervisor serves
/// sooner, or an operator has to intervene.
const RECONNECT_SECONDS: &str = "604800";
const SYNTAX_HINT: &str = "give it as -drive file=PATH,format=raw|qcow2,if=none,id=ID,firn=on, or as -blockdev \
     driver=raw|qcow2,node-name=ID,file=PATH,firn=on";
const WRITABLE: &str =
    "firn=on is for disks whose writes are kept; leave out readonly and snapshot";

/// A disk that Firn has to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskPlan {
    /// Its id.
    pub id: String,
    /// Its file, as the command line names it.
    pub file: PathBuf,
    /// `raw` or `qcow2`.
    pub format: String,
    /// The maximum size of the file, in bytes, if the command line has one.
    pub size: Option<u64>,
}

/// Finds the disks of a command line, in its order.
pub(super) fn find_disks(arguments: &[CommandArgument]) -> Result<Vec<DiskPlan>, CommandLineError> {
    let found = arguments.iter().filter_map(|argument| read_disk(argument).transpose());
    let disks: Vec<DiskPlan> = found.collect::<Result<_, _>>()?;
    let is_again = |at: usize| disks[..at].iter().any(|before| before.id == disks[at].id);
    match (0..disks.len()).find(|&at| is_again(at)) {
        Some(at) => Err(CommandLineError::refuse_option(
            format!("disk {}", disks[at].id),
            "its id is used twice",
        )),
        None => Ok(disks),
    }
}

fn read_disk(argument: &CommandArgument) -> Result<Option<DiskPlan>, CommandLineError> {
    let Some(properties) = disk_properties(argument)? else { return Ok(None) };
    let text = |key: &str| properties.get(key).map(String::from).filter(|it| !it.is_empty());
    if ["readonly", "read-only", "snapshot"].iter().any(|key| properties.is_on(key)) {
        return Err(CommandLineError::refuse_option(argument, WRITABLE));
    }
    let bytes = |words: String| {
        size::parse_size(&words, 1)
            .ok_or_else(|| CommandLineError::unreadable_option(argument, "its size"))
    };
    let size = text("size").map(bytes).transpose()?;
    let (id, format) = disk_keys(argument.name());
    match (text(id), text("file"), text(format)) {
        (Some(id), Some(file), Some(format)) if matches!(&*format, "raw" | "qcow2") => {
            Ok(Some(DiskPlan { id, file: file.into(), format, size }))
        }
        _ => Err(CommandLineError::refuse_option(argument, SYNTAX_HINT)),
    }
}

/// The keys of the id and of the format in `-drive` or `-blockdev`.
fn disk_keys(option: &str) -> (&'static str, &'static str) {
    match option {
        "blockdev" => ("node-name", "driver"),
        _ => ("id", "format"),
    }
}

/// The properties of an option, if it is such a disk.
fn disk_properties(
    argument: &CommandArgument,
) -> Result<Option<OptionProperties>, CommandLineError> {
    let properties = OptionProperties::parse_value(argument.value(), "").unwrap_or_default();
    match (argument.name(), properties.is_on("firn")) {
        (_, false) => Ok(None),
        // Nested objects would be needed for its file.
        ("blockdev", true) if argument.value().starts_with('{') => {
            Err(CommandLineError::refuse_option(argument, SYNTAX_HINT))
        }
        ("drive" | "blockdev", true) => Ok(Some(properties)),
        (_, true) => Ok(None),
    }
}

/// The option that connects QEMU to the served disk, if this option is such a disk.
pub(super) fn disk_over_socket(
    argument: &CommandArgument,
    socket: &Path,
) -> Option<CommandArgument> {
    let mut properties = disk_properties(argument).ok()??;
    let id = properties.get(disk_keys(argument.name()).0)?.into_owned();
    ["firn", "file", "size"].iter().for_each(|key| properties.remove(key));
    let socket = socket.to_string_lossy();
    for (key, value) in [
        ("driver", "nbd"),
        ("server.type", "unix"),
        ("server.path", &*socket),
        ("export", &*id),
        ("reconnect-delay", RECONNECT_SECONDS),
    ] {
        properties.set(&format!("file.{key}"), value);
    }
    Some(CommandArgument::new(argument.name(), properties.to_text("")))
}

/// Replaces the file of a disk in a command line.
pub fn with_disk(
    command: &[String],
    id: &str,
    file: &str,
) -> Result<Vec<String>, CommandLineError> {
    let (program, words) = command.split_first().ok_or(CommandLineError::Empty)?;
    let mut arguments = arguments::split_words(words);
    let disk = arguments.iter_mut().find_map(|argument| {
        let properties = disk_properties(argument).ok()??;
        let key = disk_keys(argument.name()).0;
        (properties.get(key).as_deref() == Some(id)).then_some((argument, properties))
    });
    let Some((argument, mut properties)) = disk else {
        return Err(CommandLineError::NoDisk { id: id.to_owned() });
    };
    properties.set("file", file);
    *argument = CommandArgument::new(argument.name(), properties.to_text(""));
    Ok([vec![program.clone()], arguments::join_arguments(&arguments)].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn found(line: &str) -> Result<Vec<DiskPlan>, CommandLineError> {
        find_disks(&arguments::split_words(&words(line)))
    }

    const DISK: &str = "-drive file=/a,,b,format=raw,if=none,id=d,cache=none,firn=on";

    #[test]
    fn a_disk_is_read_and_put_over_a_socket() {
        let plan =
            DiskPlan { id: "d".into(), file: "/a,b".into(), format: "raw".into(), size: None };
        assert_eq!(found(&format!("-drive file=x,id=y {DISK}")), Ok(vec![plan.clone()]));
        let sized = found(&format!("{DISK},size=1G")).unwrap();
        assert_eq!(sized, [DiskPlan { size: Some(1 << 30), ..plan }]);
        let over =
            disk_over_socket(&arguments::split_words(&words(DISK))[0], Path::new("/s,1")).unwrap();
        let expected = "-drive format=raw,if=none,id=d,cache=none,file.driver=nbd,file.server.type=unix,file.server.path=/s,,1,file.export=d,file.reconnect-delay=604800";
        assert_eq!(over.to_string(), expected);
    }

    #[test]
    fn a_node_is_read_and_put_over_a_socket() {
        let node = "-blockdev driver=raw,node-name=n,file=/a,discard=unmap,firn=on";
        let plan = DiskPlan { id: "n".into(), file: "/a".into(), format: "raw".into(), size: None };
        assert_eq!(found(node), Ok(vec![plan]));
        let over =
            disk_over_socket(&arguments::split_words(&words(node))[0], Path::new("/s")).unwrap();
        let expected = "-blockdev driver=raw,node-name=n,discard=unmap,file.driver=nbd,file.server.type=unix,file.server.path=/s,file.export=n,file.reconnect-delay=604800";
        assert_eq!(over.to_string(), expected);
        let command = words(&format!("qemu {node}"));
        assert!(with_disk(&command, "n", "/b").unwrap()[2].contains("file=/b,"));
    }

    #[test]
    fn an_unsuitable_disk_is_refused() {
        for line in [
            "-drive file=a,firn=on,id=d",
            "-drive file=a,format=vmdk,firn=on,id=d",
            "-drive file=a,format=raw,firn=on",
            "-drive format=raw,firn=on,id=d",
            "-drive file=a,format=raw,firn=on,id=d,readonly=on",
            "-drive file=a,format=raw,firn=on,id=d,size=many",
            "-blockdev driver=raw,node-name=d,firn=on",
            "-blockdev driver=vmdk,node-name=d,file=a,firn=on",
            "-blockdev {\"driver\":\"raw\",\"node-name\":\"d\",\"file\":\"a\",\"firn\":true}",
        ] {
            assert!(found(line).is_err(), "{line}");
        }
        assert!(found(&format!("{DISK} {DISK}")).is_err(), "twice");
        assert_eq!(found("-drive file=a,firn=off -append firn=on"), Ok(vec![]));
    }

    #[test]
    fn another_file_takes_the_place_of_one() {
        let command = words(&format!("qemu -m 1 {DISK}"));
        let other = with_disk(&command, "d", "/o,1").unwrap();
        assert_eq!(other[4], "file=/o,,1,format=raw,if=none,id=d,cache=none,firn=on");
        assert!(matches!(with_disk(&command, "e", "/o"), Err(CommandLineError::NoDisk { .. })));
    }
}
