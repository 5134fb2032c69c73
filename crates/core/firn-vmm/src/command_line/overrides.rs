//! The changes that a user requests to a command line that an image records.
//!
//! ```text
//!   --set device.net0.mac=52:54:00:00:00:02    a property of the option that has this id
//!   --set machine.usb=on                       a property of an option that occurs once
//!   --set vnc=:5                               the whole value of an option that occurs once
//!   --set pidfile=                             removes that option
//!   --netdev net0=user,hostfwd=tcp::2223-:22   another back end for a network card
//!   --disk web.qcow2=/mnt/web.qcow2            another name for a disk's file
//!   --qemu-arg=-vnc --qemu-arg=:5              more words, at the end
//! ```

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::arguments::{self, CommandArgument};
use super::drives;
use super::error::CommandLineError;
use super::properties::OptionProperties;

/// Changes to a command line, in the order in which they are made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CommandOverrides {
    /// The program.
    pub program: Option<String>,
    /// Back ends of network cards: id and new back end.
    pub netdevs: Vec<(String, String)>,
    /// Files of disks: the names in the command line, and the new names.
    pub disks: Vec<(String, String)>,
    /// Values: `OPTION.ID.PROPERTY`, `OPTION.PROPERTY` or `OPTION`, and the value.
    pub values: Vec<(String, String)>,
    /// Words that are added at the end.
    pub words: Vec<String>,
    /// Whether the VM keeps its generation ID: it is to be the same machine.
    pub same_identity: bool,
}

impl CommandOverrides {
    /// Applies the changes to a command line, the program first. Relative file names start in
    /// `directory`.
    ///
    /// # Errors
    /// If an option that an override changes is missing, or occurs more than once.
    pub fn apply_to(
        &self,
        command: &[String],
        directory: &Path,
    ) -> Result<Vec<String>, CommandLineError> {
        let program = command.first().ok_or(CommandLineError::Empty)?;
        let program = self.program.as_ref().unwrap_or(program);
        let arguments: Vec<_> = self.change_arguments(command, directory)?;
        let arguments: Vec<_> = arguments.into_iter().map(|it| it.argument).collect();
        Ok([vec![program.clone()], arguments::join_arguments(&arguments), self.words.clone()]
            .concat())
    }

    /// The changed arguments of a command line, the program first, and which parts are the user's.
    pub(super) fn apply_with_sources(
        &self,
        command: &[String],
        directory: &Path,
    ) -> Result<Vec<SourcedArgument>, CommandLineError> {
        let mut arguments = self.change_arguments(command, directory)?;
        let words = arguments::split_words(&self.words).into_iter();
        arguments.extend(
            words.map(|argument| SourcedArgument { argument, named: NamedByUser::Everything }),
        );
        Ok(arguments)
    }

    /// The changed arguments, without the words at the end.
    fn change_arguments(
        &self,
        command: &[String],
        directory: &Path,
    ) -> Result<Vec<SourcedArgument>, CommandLineError> {
        let words = command.get(1..).ok_or(CommandLineError::Empty)?;
        let arguments = arguments::split_words(words).into_iter();
        let of_image = |argument| SourcedArgument { argument, named: NamedByUser::default() };
        let mut arguments: Vec<_> = arguments.map(of_image).collect();
        for (id, backend) in &self.netdevs {
            set_netdev(&mut arguments, id, backend)?;
        }
        for (old, new) in &self.disks {
            // A disk that no option names is the caller's concern.
            let is_old = |file: &str| directory.join(file) == directory.join(old);
            arguments.iter_mut().for_each(|it| it.move_disk(is_old, new));
        }
        for (key, value) in &self.values {
            set_value(&mut arguments, key, value)?;
        }
        Ok(arguments)
    }
}

/// The parts of an option that the user of a restore has named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum NamedByUser {
    #[default]
    Nothing,
    /// The values of these properties.
    Properties(Vec<String>),
    Everything,
}

impl NamedByUser {
    fn add_property(&mut self, key: &str) {
        match self {
            Self::Nothing => *self = Self::Properties(vec![key.to_owned()]),
            Self::Properties(keys) => keys.push(key.to_owned()),
            Self::Everything => {}
        }
    }
}

/// An argument, and which parts of it are the user's. The others are the image's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SourcedArgument {
    pub(super) argument: CommandArgument,
    pub(super) named: NamedByUser,
}

impl SourcedArgument {
    fn move_disk(&mut self, is_old: impl Fn(&str) -> bool, new: &str) {
        let files = drives::disk_files(std::slice::from_ref(&self.argument));
        if !files.iter().any(|file| is_old(file)) {
            return;
        }
        drives::rename_file(std::slice::from_mut(&mut self.argument), is_old, new);
        let parsed = OptionProperties::parse_value(self.argument.value(), "");
        let key = parsed.and_then(|it| drives::file_key(self.argument.name(), &it));
        match (self.argument.name(), key) {
            ("drive" | "blockdev", Some(key)) => self.named.add_property(key),
            ("drive" | "blockdev", None) => {}
            _ => self.named = NamedByUser::Everything,
        }
    }
}

fn set_netdev(
    arguments: &mut [SourcedArgument],
    id: &str,
    backend: &str,
) -> Result<(), CommandLineError> {
    let given = format!("--netdev {id}={backend}");
    let is_it = |it: &&mut SourcedArgument| {
        matches!(it.argument.name(), "netdev" | "nic") && id_of(&it.argument).as_deref() == Some(id)
    };
    let found = arguments.iter_mut().find(is_it);
    let found = found.ok_or_else(|| CommandLineError::override_of_none(&given))?;
    let argument = &found.argument;
    let mut new = OptionProperties::parse_value(backend, "type")
        .ok_or_else(|| CommandLineError::unreadable_option(&given, "its JSON"))?;
    new.set("id", id);
    if argument.name() == "nic" {
        copy_card(argument, &mut new);
    }
    let argument = CommandArgument::new(argument.name(), new.to_text("type"));
    *found = SourcedArgument { argument, named: NamedByUser::Everything };
    Ok(())
}

/// Copies the properties of the card, which the guest knows: `-nic` describes the card as well.
fn copy_card(argument: &CommandArgument, new: &mut OptionProperties) {
    let Some(before) = OptionProperties::parse_value(argument.value(), "type") else { return };
    for key in ["model", "mac", "addr"] {
        before.get(key).iter().for_each(|value| new.set(key, value));
    }
}

/// The implied key of an option's first part.
fn implied_key(option: &str) -> &'static str {
    match option {
        "device" => "driver",
        "object" => "qom-type",
        "chardev" => "backend",
        "netdev" | "nic" | "net" | "numa" | "machine" | "M" => "type",
        "audiodev" => "driver",
        "accel" => "accel",
        "cpu" => "model",
        "m" => "size",
        "smp" => "cpus",
        "vnc" => "vnc",
        _ => "",
    }
}

fn id_of(argument: &CommandArgument) -> Option<String> {
    let properties = OptionProperties::parse_value(argument.value(), implied_key(argument.name()))?;
    ["id", "node-name"].iter().find_map(|key| properties.nested_text(key))
}

fn set_value(
    arguments: &mut Vec<SourcedArgument>,
    key: &str,
    value: &str,
) -> Result<(), CommandLineError> {
    let given = format!("--set {key}={value}");
    let (at, property) = find_option(arguments, key, &given)?;
    if property.is_empty() && value.is_empty() {
        arguments.remove(at);
        return Ok(());
    }
    let changed = &mut arguments[at];
    let new = match property.is_empty() {
        true => {
            changed.named = NamedByUser::Everything;
            value.to_owned()
        }
        false => {
            // In JSON the image may have the same key in a nested object, which stays.
            let is_json = changed.argument.value().starts_with('{');
            if !(is_json && property.contains('.')) {
                changed.named.add_property(&property);
            }
            with_property(&changed.argument, &property, value, &given)?
        }
    };
    changed.argument = CommandArgument::new(changed.argument.name(), new);
    Ok(())
}

/// Finds the option that a key names. Returns its index, and the name of the property, which is
/// empty for the whole value.
fn find_option(
    arguments: &[SourcedArgument],
    key: &str,
    given: &str,
) -> Result<(usize, String), CommandLineError> {
    let (option, rest) = key.split_once('.').unwrap_or((key, ""));
    let all = arguments.iter().map(|it| &it.argument).enumerate();
    let of_option = all.filter(|(_, it)| is_option(it.name(), option));
    let all: Vec<(usize, &CommandArgument)> = of_option.collect();
    let property = |argument: &CommandArgument| {
        Some(rest.strip_prefix(&id_of(argument)?)?.strip_prefix('.')?.to_owned())
    };
    if let Some(found) = all.iter().find_map(|(at, it)| Some((*at, property(it)?))) {
        return Ok(found);
    }
    match all[..] {
        // The part before a dot could be a mistyped id.
        [(at, it)] if !rest.contains('.') || id_of(it).is_none() => Ok((at, rest.to_owned())),
        [] | [_] => Err(CommandLineError::override_of_none(given)),
        _ => Err(CommandLineError::override_of_many(given)),
    }
}

/// Whether a name is that of an option; `-M` is `-machine`.
fn is_option(name: &str, wanted: &str) -> bool {
    let is_machine = |name: &str| matches!(name, "machine" | "M");
    name == wanted || (is_machine(name) && is_machine(wanted))
}

fn with_property(
    argument: &CommandArgument,
    property: &str,
    value: &str,
    given: &str,
) -> Result<String, CommandLineError> {
    let implied = implied_key(argument.name());
    let mut properties = OptionProperties::parse_value(argument.value(), implied)
        .ok_or_else(|| CommandLineError::unreadable_option(given, "the option's JSON"))?;
    properties.set_typed(property, value);
    Ok(properties.to_text(implied))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    const LINE: &str = "qemu -machine pc,usb=off -device e1000,netdev=n,id=e.0 -netdev user,id=n,hostfwd=tcp::1-:2 \
        -drive file=a.img,id=d -device {\"driver\":\"x\",\"id\":\"j\",\"on\":true} -vnc :1 -S";

    fn applied(overrides: &CommandOverrides) -> Result<String, String> {
        overrides
            .apply_to(&words(LINE), Path::new("/vms"))
            .map(|line| line.join(" "))
            .map_err(|error| error.to_string())
    }

    fn set(key: &str, value: &str) -> Result<String, String> {
        applied(&CommandOverrides {
            values: vec![(key.into(), value.into())],
            ..CommandOverrides::default()
        })
    }

    #[test]
    fn a_value_is_set_where_it_is_named() {
        let same = |key: &str, value: &str, old: &str, new: &str| {
            assert_eq!(set(key, value).unwrap(), LINE.replace(old, new), "{key}");
        };
        same("device.e.0.mac", "1,2", "id=e.0", "id=e.0,mac=1,,2");
        same("machine.usb", "on", "usb=off", "usb=on");
        same("M.smm", "off", "usb=off", "usb=off,smm=off");
        same("vnc", ":5", "-vnc :1", "-vnc :5");
        same("vnc", "", "-vnc :1 ", "");
        same("S", "", " -S", "");
        same("drive.d.cache", "none", "id=d", "id=d,cache=none");
        same("device.j.on", "false", "true", "false");
        assert!(set("device.f.mac", "1").unwrap_err().contains("--set device.f.mac=1"));
        assert!(set("netdev.m.hostname", "x").unwrap_err().contains("no such option"));
        assert!(set("device.mac", "1").unwrap_err().contains("more than one"));
        assert!(set("spice.port", "1").unwrap_err().contains("--qemu-arg"));
    }

    #[test]
    fn back_ends_disks_and_words_are_changed() {
        let pair = |a: &str, b: &str| vec![(a.to_owned(), b.to_owned())];
        let overrides = CommandOverrides {
            program: Some("/q".into()),
            netdevs: pair("n", "user,hostfwd=tcp::3-:2"),
            disks: pair("/vms/a.img", "/b,c.img"),
            words: words("-vnc :2"),
            ..CommandOverrides::default()
        };
        let expected = LINE
            .replace("qemu ", "/q ")
            .replace("user,id=n,hostfwd=tcp::1-:2", "user,hostfwd=tcp::3-:2,id=n")
            .replace("a.img", "/b,,c.img");
        assert_eq!(applied(&overrides).unwrap(), format!("{expected} -vnc :2"));
        let none = CommandOverrides { netdevs: pair("o", "user"), ..CommandOverrides::default() };
        assert!(applied(&none).unwrap_err().contains("--netdev o=user"));
        assert_eq!(applied(&CommandOverrides::default()).unwrap(), LINE);
    }

    #[test]
    fn a_card_that_is_given_with_its_back_end_stays() {
        let line = words("qemu -nic user,id=n,model=virtio,hostfwd=tcp::1-:2");
        let netdevs = vec![("n".to_owned(), "tap,ifname=t".to_owned())];
        let changed = CommandOverrides { netdevs, ..CommandOverrides::default() }
            .apply_to(&line, Path::new("/"))
            .unwrap();
        assert_eq!(changed[2], "tap,ifname=t,id=n,model=virtio");
    }
}
