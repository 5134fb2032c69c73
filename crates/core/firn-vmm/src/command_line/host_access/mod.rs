//! What a command line opens on the host: files, sockets, ports, programs, more options.
//!
//! An image names a command line, and an image may come from any source. So a restore of an image of
//! unknown origin runs only options that are known to open nothing of the host. The lists here are
//! of what is harmless. An option, a type or a property that they do not have counts as an access:
//! QEMU has hundreds of options, and gets new ones with each version.
//!
//! ```text
//!   -device e1000,netdev=n,romfile=/x   --> driver known, netdev known, romfile not --> an access
//!   -netdev user,id=n                   --> the network of the host ---------------> an access
//!   -chardev null,id=c                  --> known
//!   -frobnicate on                      --> unknown -------------------------------> an access
//!   (no -display)                       --> QEMU opens one by itself --------------> an access
//! ```
//!
//! What a user names anew on the command line of Firn ([`CommandOverrides`]) is the user's: a whole
//! option, or one property of it. The rest of the option is still the image's.
//!
//! Two files that options name are not opened, because Firn replaces them: those of guest RAM, and
//! that of the device for guest calls.
//!
//! Source: QEMU `qemu-options.hx`, `system/vl.c` (`qemu_init`, for what QEMU adds by itself).

mod devices;
mod disks;
mod finding;
mod networks;
mod options;
mod values;

use std::fmt;
use std::path::Path;

use serde::Serialize;

use self::finding::{Exempt, Finding, shorten};
use super::arguments::CommandArgument;
use super::calls::CALLS_ID;
use super::error::CommandLineError;
use super::overrides::{CommandOverrides, NamedByUser, SourcedArgument};
use super::properties::OptionProperties;

/// The maximum number of accesses that are listed.
const ACCESSES_MAX: usize = 200;

/// Longer words are not examined: each of them is an access.
const WORD_BYTES_MAX: usize = 64 << 10;

/// An option of a command line that opens something of the host, or may do so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostAccess {
    /// The option as the command line has it, shortened if it is long.
    pub option: String,
    /// What QEMU does with it.
    pub effect: String,
    /// The file, if it is the file of a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// How a user names something else for it; empty if there is no such argument.
    pub remedy: String,
}

impl fmt::Display for HostAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.option, self.effect)
    }
}

/// Finds what the command line of an image, the program first, opens on the host, without what the
/// user names by `overrides`. Relative file names start in `directory`.
///
/// # Errors
/// If the changes can't be made to this command line.
pub fn find_host_accesses(
    command: &[String],
    overrides: &CommandOverrides,
    directory: &Path,
) -> Result<Vec<HostAccess>, CommandLineError> {
    let arguments = overrides.apply_with_sources(command, directory)?;
    let ram = find_ram_objects(&arguments);
    let mut found = implied_accesses(&arguments);
    for (at, argument) in arguments.iter().enumerate() {
        if found.len() >= ACCESSES_MAX {
            break;
        }
        found.extend(check_argument(argument, ram.contains(&at)));
    }
    found.truncate(ACCESSES_MAX);
    Ok(found)
}

fn check_argument(sourced: &SourcedArgument, is_ram: bool) -> Vec<HostAccess> {
    let SourcedArgument { argument, named } = sourced;
    if *named == NamedByUser::Everything {
        return Vec::new();
    }
    let findings = match argument {
        CommandArgument::Word(word) => vec![Finding::of_disk(None, word)],
        CommandArgument::Option { name, value } => {
            let is_long = value.as_ref().is_some_and(|value| value.len() > WORD_BYTES_MAX);
            match is_long || name.len() > WORD_BYTES_MAX {
                true => vec![Finding::of_option("is too long to be examined")],
                false => options::check_option(name, value.as_deref(), &Exempt { named, is_ram }),
            }
        }
    };
    findings.into_iter().take(ACCESSES_MAX).map(|it| describe_finding(argument, it)).collect()
}

fn describe_finding(argument: &CommandArgument, finding: Finding) -> HostAccess {
    let Finding { key, effect, disk } = finding;
    let remedy = match (&disk, argument) {
        (Some(file), _) => format!("--disk {}=NEW", shorten(file)),
        (None, CommandArgument::Option { name, .. }) => describe_remedy(name, argument, key),
        (None, CommandArgument::Word(_)) => String::new(),
    };
    HostAccess { option: shorten(&argument.to_string()), effect, disk, remedy }
}

fn describe_remedy(name: &str, argument: &CommandArgument, key: Option<String>) -> String {
    let is_short = argument.value().len() <= WORD_BYTES_MAX;
    let parsed = is_short.then(|| OptionProperties::parse_value(argument.value(), "")).flatten();
    let id = parsed.and_then(|it| it.get("id").or_else(|| it.get("node-name")).map(String::from));
    let id = id.map(|id| shorten(&id));
    match (name, id, key) {
        ("netdev" | "nic", Some(id), _) => format!("--netdev {id}=BACKEND"),
        (_, Some(id), Some(key)) => format!("--set {name}.{id}.{}=VALUE", shorten(&key)),
        (_, None, Some(key)) => format!("--set {name}.{}=VALUE", shorten(&key)),
        (_, _, None) => format!("--set {}=VALUE", shorten(name)),
    }
}

/// What QEMU opens because an option is missing.
fn implied_accesses(arguments: &[SourcedArgument]) -> Vec<HostAccess> {
    let has = |names: &[&str]| arguments.iter().any(|it| names.contains(&it.argument.name()));
    let mut found = Vec::new();
    if !has(&["netdev", "nic", "net", "nodefaults"]) {
        found.push(HostAccess {
            option: "no -nic or -nodefaults:".to_owned(),
            effect: format!("QEMU adds a network card that {}", networks::USER_EFFECT),
            disk: None,
            remedy: "--qemu-arg=-nic --qemu-arg=user".to_owned(),
        });
    }
    if !has(&["display", "nographic", "vnc", "spice"]) {
        found.push(HostAccess {
            option: "no -display:".to_owned(),
            effect: "QEMU opens a window, or serves VNC at a TCP port of localhost".to_owned(),
            disk: None,
            remedy: "--qemu-arg=-display --qemu-arg=none".to_owned(),
        });
    }
    found
}

/// The indexes of the objects whose files Firn replaces: guest RAM, as `plan_command` finds it, and
/// the memory for guest calls.
fn find_ram_objects(arguments: &[SourcedArgument]) -> Vec<usize> {
    let read = |it: &SourcedArgument, implied| match it.argument.value().len() > WORD_BYTES_MAX {
        true => None,
        false => OptionProperties::parse_value(it.argument.value(), implied),
    };
    let text = |it: &SourcedArgument, implied, key: &str| Some(read(it, implied)?.get(key)?.into());
    let mut of_machine: Option<String> = None;
    let mut ids: Vec<String> = Vec::new();
    for it in arguments {
        match it.argument.name() {
            // The last one counts.
            "machine" | "M" => of_machine = text(it, "type", "memory-backend").or(of_machine),
            "numa" => ids.extend(text(it, "type", "memdev")),
            "device" if is_memory_device(read(it, "driver")) => {
                ids.extend(text(it, "driver", "memdev"));
            }
            _ => {}
        }
    }
    ids.extend(of_machine);
    let objects = arguments.iter().enumerate().filter(|(_, it)| it.argument.name() == "object");
    let objects = objects.filter_map(|(at, it)| Some((at, text(it, "qom-type", "id")?)));
    let objects: Vec<(usize, String)> = objects.collect();
    let first_of = |id: &String| objects.iter().find(|(_, it)| it == id).map(|(at, _)| *at);
    let calls = objects.iter().filter(|(_, id)| id == CALLS_ID).map(|(at, _)| *at);
    ids.iter().filter_map(first_of).chain(calls).collect()
}

fn is_memory_device(device: Option<OptionProperties>) -> bool {
    let driver = device.and_then(|device| device.get("driver").map(String::from));
    driver.is_some_and(|it| matches!(&*it, "pc-dimm" | "virtio-mem-pci" | "virtio-mem"))
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
