//! The parts of a command line that only the process that started QEMU could provide, and the
//! devices it names.
//!
//! A restore starts QEMU again with the same words. A descriptor number, or a secret in a file that
//! no longer exists, has no meaning for that second QEMU.

use super::arguments::{self, CommandArgument};
use super::properties::OptionProperties;

/// A device that the command line names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedDevice {
    /// Its id.
    pub id: String,
    /// Its driver, as the command line gives it (an alias is possible).
    pub driver: String,
}

/// A secret that is read from a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretFile {
    /// The secret's id.
    pub id: String,
    /// The file, as the command line names it.
    pub path: String,
}

/// The external resources that a command line needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandNeeds {
    /// Options that use an open descriptor of the process that started QEMU, as given.
    pub descriptors: Vec<String>,
    /// Devices with an id.
    pub devices: Vec<NamedDevice>,
    /// The number of devices without an id.
    pub unnamed_devices: usize,
    /// Secrets that are read from files.
    pub secret_files: Vec<SecretFile>,
    /// Ids of secrets in the kernel's keyring.
    pub keyring_secrets: Vec<String>,
}

/// Options whose value is a list of properties that may name a descriptor.
const WITH_PROPERTIES: &[&str] = &[
    "blockdev", "chardev", "device", "drive", "fsdev", "net", "netdev", "nic", "object", "virtfs",
];

/// Properties whose values are descriptor numbers.
const DESCRIPTOR_KEYS: &[&str] = &["fd", "fds", "vhostfd", "vhostfds", "sock-fds", "sock_fd"];

/// Prefixes of paths that name a descriptor.
const DESCRIPTOR_PATHS: &[&str] = &["/dev/fdset/", "/dev/fd/", "/proc/self/fd/"];

/// Options whose value is no path: text for the guest, or a value that a restore replaces.
const WITHOUT_PATH: &[&str] = &["append", "incoming", "name"];

/// Finds the external resources that a command line (the program first) needs.
pub fn find_needs(command: &[String]) -> CommandNeeds {
    let mut needs = CommandNeeds::default();
    for argument in arguments::split_words(command.get(1..).unwrap_or_default()) {
        if uses_descriptor(&argument) {
            needs.descriptors.push(argument.to_string());
        }
        match argument.name() {
            "device" => needs.add_device(&argument),
            "object" => needs.add_object(&argument),
            _ => {}
        }
    }
    needs
}

fn uses_descriptor(argument: &CommandArgument) -> bool {
    let name = argument.name();
    let is_ram = argument.value().contains("memory-backend-");
    if name == "add-fd" {
        return true;
    }
    let has_path = || {
        let mut paths = DESCRIPTOR_PATHS.iter();
        let text = argument.to_string();
        !WITHOUT_PATH.contains(&name) && paths.any(|path| text.contains(path))
    };
    // A restore gives memory backends files of its own.
    !is_ram && (has_path() || WITH_PROPERTIES.contains(&name) && has_descriptor_property(argument))
}

fn has_descriptor_property(argument: &CommandArgument) -> bool {
    let properties = OptionProperties::parse_value(argument.value(), "").unwrap_or_default();
    let is_descriptor = |(key, value): &(String, String)| {
        let last = key.rsplit('.').next().unwrap_or(key);
        DESCRIPTOR_KEYS.contains(&last) || (last == "type" && key != last && value == "fd")
    };
    properties.flattened().iter().any(is_descriptor)
}

impl CommandNeeds {
    fn add_device(&mut self, argument: &CommandArgument) {
        let Some(device) = OptionProperties::parse_value(argument.value(), "driver") else {
            return;
        };
        let driver = device.get("driver").map(String::from).unwrap_or_default();
        match device.get("id") {
            // The guest decides when this device appears.
            Some(_) if device.get("failover_pair_id").is_some() => {}
            Some(id) => self.devices.push(NamedDevice { id: id.into(), driver }),
            None => self.unnamed_devices += 1,
        }
    }

    fn add_object(&mut self, argument: &CommandArgument) {
        let Some(object) = OptionProperties::parse_value(argument.value(), "qom-type") else {
            return;
        };
        let id = object.get("id").map(String::from).unwrap_or_default();
        match (object.get("qom-type").as_deref(), object.get("file")) {
            (Some("secret"), Some(path)) => {
                self.secret_files.push(SecretFile { id, path: path.into() });
            }
            (Some("secret_keyring"), _) => self.keyring_secrets.push(id),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs_of(words: &str) -> CommandNeeds {
        let words = format!("qemu {words}");
        find_needs(&words.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn every_form_of_a_descriptor_is_found() {
        for option in [
            "-netdev tap,id=n,fd=5",
            "-netdev tap,id=n,ifname=t,script=no,vhost=on,vhostfd=6",
            "-netdev tap,fds=5:6,id=n",
            "-nic tap,fd=3",
            "-netdev dgram,id=n,local.type=fd,local.str=7",
            r#"-netdev {"type":"stream","id":"n","addr":{"type":"fd","str":"4"}}"#,
            "-chardev socket,id=c,fd=9,server=on",
            "-add-fd fd=3,set=7",
            "-drive file=/dev/fdset/7,format=raw",
            r#"-blockdev {"driver":"file","filename":"/proc/self/fd/8","node-name":"f"}"#,
            "-device vfio-pci,fd=8",
            "-object iommufd,id=i,fd=4",
            "/dev/fd/5",
        ] {
            assert_eq!(needs_of(option).descriptors, [option]);
        }
    }

    #[test]
    fn devices_that_a_restore_provides_are_not_required() {
        for option in [
            "-netdev firn,id=n,uplink=/run/passt.sock",
            "-netdev tap,id=n,ifname=tap0,script=no",
            "-object memory-backend-file,id=r,size=1M,mem-path=/proc/self/fd/5,share=on",
            "-append fd=5",
            "-incoming fd:5",
            "-chardev socket,id=c,path=/tmp/fd,server=on",
            "-device virtio-net-pci,netdev=n",
        ] {
            assert_eq!(needs_of(option).descriptors, Vec::<String>::new(), "{option}");
        }
    }

    #[test]
    fn devices_and_secrets_are_listed() {
        let words = r#"-device virtio-rng-pci -device e1000,id=a -device {"driver":"nvme","id":"b"}
            -object secret,id=s,file=/s -object secret,id=t,data=x -object secret_keyring,id=k,serial=1"#;
        let needs = needs_of(&words.split_whitespace().collect::<Vec<_>>().join(" "));
        let device = |id: &str, driver: &str| NamedDevice { id: id.into(), driver: driver.into() };
        assert_eq!(needs.devices, [device("a", "e1000"), device("b", "nvme")]);
        assert_eq!(needs.unnamed_devices, 1);
        assert_eq!(needs.secret_files, [SecretFile { id: "s".into(), path: "/s".into() }]);
        assert_eq!(needs.keyring_secrets, ["k"]);
    }
}
