//! The options that open nothing of the host, and what their values may be.

use super::finding::{Exempt, Finding};
use super::values::{Words, check_keys, check_listed, has_word, read_properties};
use super::{devices, disks, networks};
use crate::command_line::arguments;
use crate::command_line::properties::OptionProperties;

/// Options without a value.
const FLAGS: Words = "S daemonize enable-kvm mem-prealloc no-acpi no-fd-bootchk no-hpet no-reboot \
    no-shutdown no-user-config nodefaults nographic only-migratable usb win2k-hack";

/// Options whose values are numbers, or texts for the guest.
const TEXTS: Words = "append uuid watchdog-action";

/// Options of which some values are known.
const WORDS: &[(&str, Words)] = &[
    ("display", "none"),
    ("incoming", "defer"),
    ("spice", ""),
    ("usbdevice", "keyboard mouse tablet"),
    ("vga", "cirrus none qxl std virtio vmware"),
    ("vnc", "none"),
    ("watchdog", "i6300esb ib700"),
];

/// Options with properties: the implied key of the first, and the known ones.
const LISTS: &[(&str, &str, Words)] = &[
    ("action", "", "panic reboot shutdown watchdog"),
    ("boot", "order", "menu once order reboot-timeout splash-time strict"),
    ("fw_cfg", "name", "name string"),
    ("icount", "shift", "align shift sleep"),
    ("m", "size", "maxmem size slots"),
    ("mon", "chardev", "chardev id mode pretty"),
    ("msg", "", "guest-name timestamp"),
    ("name", "guest", "debug-threads guest process"),
    ("numa", "type", NUMA),
    ("overcommit", "", "cpu-pm mem-lock"),
    ("rtc", "", "base clock driftfix"),
    ("smbios", "", SMBIOS),
    ("smp", "cpus", SMP),
];

const NUMA: Words = "associativity bandwidth cluster-id core-id cpus data-type die-id dst hierarchy \
    initiator latency level line mem memdev node-id nodeid policy size socket-id src \
    target thread-id type val";

const SMP: Words = "books clusters cores cpus dies drawers maxcpus modules sockets threads";

/// Not `file` and `path`: QEMU reads tables and texts from them.
const SMBIOS: Words = "asset bank current-speed date family loc_pfx location manufacturer max-speed part \
    processor-id product release serial sku sock_pfx speed type uefi uuid value vendor \
    version";

/// Not `kernel`, `initrd`, `dtb`, `dumpdtb` and `firmware`, which are properties of machines too.
const MACHINE: Words = "accel acpi default-bus-bypass-iommu dump-guest-core graphics hmat hpet i8042 \
    kernel-irqchip kernel_irqchip max-fw-size max-ram-below-4g mem-merge memory-backend \
    pcspk-audiodev pflash0 pflash1 pit sata smbios-entry-point-type smbus smm \
    suppress-vmdesc type usb vmport x-south-bridge";

/// Not `device`, the path of KVM.
const ACCEL: Words = "accel dirty-ring-size kernel-irqchip kernel_irqchip kvm-shadow-mem notify-vmexit \
    notify-window one-insn-per-tb split-wx tb-size thread";

/// The accelerators that need nothing but the kernel's device.
const ACCELERATORS: Words = "kvm tcg";

/// What the types of known machines begin with; the others have other properties, and some of them
/// begin with a program of their own.
const MACHINES: Words = "pc q35 microvm virt";

/// The findings of an option.
pub(super) fn check_option(name: &str, value: Option<&str>, exempt: &Exempt<'_>) -> Vec<Finding> {
    if !is_complete(name, value) {
        return vec![Finding::of_option("has no value, so the next option would be its value")];
    }
    let value = value.unwrap_or_default();
    if has_word(FLAGS, name) || has_word(TEXTS, name) {
        return Vec::new();
    }
    if let Some((_, words)) = WORDS.iter().find(|(option, _)| *option == name) {
        return match has_word(words, value) {
            true => Vec::new(),
            false => vec![Finding::of_option(effect_of(name))],
        };
    }
    if let Some((_, implied, keys)) = LISTS.iter().find(|(option, ..)| *option == name) {
        return check_listed(value, implied, keys, exempt);
    }
    match name {
        "accel" => check_machine(value, "accel", ACCEL, exempt),
        "machine" | "M" => check_machine(value, "type", MACHINE, exempt),
        "cpu" if !value.starts_with('{') => Vec::new(),
        "sandbox" => check_sandbox(value),
        "global" => devices::check_global(value),
        "device" => devices::check_device(value, exempt),
        "object" => devices::check_object(value, exempt),
        "chardev" => devices::check_chardev(value, exempt),
        "audiodev" | "audio" => devices::check_audio(value, exempt),
        "serial" | "parallel" | "monitor" | "qmp" | "qmp-pretty" | "debugcon" => {
            devices::check_short_chardev(value, effect_of(name))
        }
        "netdev" | "nic" | "net" => networks::check_network(name, value, exempt),
        "drive" | "blockdev" => disks::check_disk(name, value, exempt),
        _ if disks::is_plain_disk(name) => vec![Finding::of_disk(None, value)],
        _ => vec![Finding::of_option(effect_of(name))],
    }
}

/// The check of `-machine` and `-accel`.
fn check_machine(value: &str, implied: &str, keys: Words, exempt: &Exempt<'_>) -> Vec<Finding> {
    let properties = match read_properties(value, implied, false) {
        Ok(properties) => properties,
        Err(finding) => return vec![finding],
    };
    let mut found = check_keys(&properties, &[keys], exempt);
    found.extend(check_values(&properties, "accel", exempt, |it| {
        it.split(':').all(|name| has_word(ACCELERATORS, name))
    }));
    if implied == "type" {
        found.extend(check_values(&properties, "type", exempt, is_known_machine));
    }
    found
}

fn is_known_machine(kind: &str) -> bool {
    MACHINES.split_whitespace().any(|known| {
        let rest = kind.strip_prefix(known);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    })
}

/// All values of a property that may occur more than once.
fn check_values(
    properties: &OptionProperties,
    wanted: &str,
    exempt: &Exempt<'_>,
    is_known: impl Fn(&str) -> bool,
) -> Vec<Finding> {
    let all = properties.flattened().into_iter();
    let wrong =
        all.filter(|(key, value)| key == wanted && !is_known(value) && !exempt.covers_key(key));
    wrong.map(|(key, value)| Finding::of_property(&key, &value)).collect()
}

/// A sandbox may only take rights from QEMU.
fn check_sandbox(value: &str) -> Vec<Finding> {
    let is_strict = |(at, part): (usize, &str)| match at {
        0 => part == "on" || part == "enable=on",
        _ => part.split_once('=').is_some_and(|(_, value)| value == "deny"),
    };
    match value.split(',').enumerate().all(is_strict) {
        true => Vec::new(),
        false => vec![Finding::of_option("lets QEMU do more than with -sandbox on")],
    }
}

/// What an option does that is not in the lists above.
fn effect_of(name: &str) -> &'static str {
    match name {
        "kernel" | "initrd" | "dtb" | "bios" | "option-rom" | "acpitable" | "L" => {
            "lets the guest read that file"
        }
        "serial" | "parallel" | "monitor" | "qmp" | "qmp-pretty" | "debugcon" | "chardev" => {
            "opens a file, socket, port or terminal"
        }
        "display" | "vnc" | "spice" => "opens a display: a window, socket or port",
        "gdb" | "s" | "qtest" => "lets other programs control the VM",
        "readconfig" | "set" => "gives QEMU more options",
        "incoming" => "receives a state from elsewhere, and may run a program for that",
        "plugin" => "loads that program into QEMU",
        "pidfile" | "D" | "trace" | "writeconfig" | "perfmap" | "jitdump" => "writes files",
        "cdrom" | "fda" | "fdb" => "gives the guest that file as a disk",
        "virtfs" | "fsdev" => "lets the guest access that directory",
        "add-fd" | "chroot" | "runas" | "run-with" | "user" => "changes what QEMU may access",
        "tpmdev" => "uses a device or socket",
        "semihosting" | "semihosting-config" => "lets the guest open files",
        "snapshot" => "writes temporary files",
        _ => "is no option that Firn knows to be harmless",
    }
}

/// Whether an option is complete: one that needs a value has one.
fn is_complete(name: &str, value: Option<&str>) -> bool {
    value.is_some() != arguments::is_flag(name)
}
