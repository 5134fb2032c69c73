//! The VM generation ID: a GUID by which a guest notices that it is a copy.
//!
//! ```text
//!   firn run       -device vmgenid,guid=A       the guest finds A in its memory
//!   firn restore   -device vmgenid,guid=B       QEMU writes B there when it loads device state, and
//!                                               notifies the guest
//! ```
//!
//! Two VMs that were restored from one image would otherwise draw the same random numbers, so that
//! their keys would be equal. Linux (5.18 or newer, with `CONFIG_VMGENID`) and Windows mix a new GUID into
//! their random numbers.
//!
//! Source: QEMU `docs/specs/vmgenid.rst`, `hw/acpi/vmgenid.c`; Linux `drivers/virt/vmgenid.c`.

use super::arguments::{self, CommandArgument};
use super::error::CommandLineError;
use super::plan::merge_options;
use super::properties::OptionProperties;

/// QEMU's name for the device.
const DRIVER: &str = "vmgenid";

/// The first major version of machine types that surely support the device.
const MACHINE_VERSION_MIN: u32 = 3;

/// Adds a generation ID to a command line whose machine supports one and has none. Returns `None` if
/// nothing was added.
///
/// # Errors
/// If the options of the machine can't be read.
pub fn with_generation_id(
    command: &[String],
    guid: &str,
) -> Result<Option<Vec<String>>, CommandLineError> {
    let Some((program, words)) = command.split_first() else { return Ok(None) };
    let arguments = arguments::split_words(words);
    if !is_pc_program(program)
        || !is_supported(&arguments)?
        || arguments.iter().any(is_generation_id)
    {
        return Ok(None);
    }
    let added = ["-device".to_owned(), format!("{DRIVER},guid={guid}")];
    Ok(Some(command.iter().cloned().chain(added).collect()))
}

/// Replaces the generation ID of a command line that has one.
pub fn replace_generation_id(command: &[String], guid: &str) -> Vec<String> {
    let Some((program, words)) = command.split_first() else { return Vec::new() };
    let mut arguments = arguments::split_words(words);
    for argument in arguments.iter_mut().filter(|it| is_generation_id(it)) {
        if let Some(mut device) = OptionProperties::parse_value(argument.value(), "driver") {
            device.set("guid", guid);
            *argument = CommandArgument::new("device", device.to_text("driver"));
        }
    }
    [vec![program.clone()], arguments::join_arguments(&arguments)].concat()
}

fn is_generation_id(argument: &CommandArgument) -> bool {
    let device = || OptionProperties::parse_value(argument.value(), "driver");
    argument.name() == "device"
        && device().is_some_and(|device| device.get("driver").as_deref() == Some(DRIVER))
}

/// Whether a QEMU emulates PCs, by its name.
fn is_pc_program(program: &str) -> bool {
    let name = program.rsplit('/').next().unwrap_or(program);
    matches!(name, "qemu-system-x86_64" | "qemu-system-i386" | "qemu-kvm" | "kvm")
}

/// Whether the machine is a PC with ACPI tables, in which the guest finds the device.
fn is_supported(arguments: &[CommandArgument]) -> Result<bool, CommandLineError> {
    let machine = merge_options(arguments, &["machine", "M"], "type")?;
    let is_off = machine.get("acpi").is_some_and(|value| matches!(&*value, "off" | "no" | "false"));
    let has_acpi = !is_off && !arguments.iter().any(|argument| argument.name() == "no-acpi");
    Ok(has_acpi && is_pc(machine.get("type").as_deref().unwrap_or("pc")))
}

fn is_pc(machine: &str) -> bool {
    let version = ["pc-i440fx-", "pc-q35-"].iter().find_map(|name| machine.strip_prefix(name));
    let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    matches!(machine, "pc" | "q35") || major.is_some_and(|major| major >= MACHINE_VERSION_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn added(line: &str) -> Option<String> {
        with_generation_id(&words(line), "A").unwrap().map(|command| command.join(" "))
    }

    #[test]
    fn a_pc_with_acpi_gets_a_generation_id() {
        for line in [
            "qemu-system-x86_64 -m 1G",
            "/usr/bin/qemu-system-x86_64 -M q35",
            "qemu-system-i386 -machine type=pc-i440fx-7.2,accel=tcg",
            "kvm -machine pc-q35-10.0 -M acpi=on",
        ] {
            assert_eq!(added(line), Some(format!("{line} -device vmgenid,guid=A")));
        }
    }

    #[test]
    fn other_machines_get_none() {
        for line in [
            "qemu-system-x86_64 -M microvm",
            "qemu-system-x86_64 -M none",
            "qemu-system-x86_64 -M pc-i440fx-2.3",
            "qemu-system-x86_64 -M q35,acpi=off",
            "qemu-system-x86_64 -no-acpi",
            "qemu-system-aarch64 -M virt",
            "qemu-system-x86_64 -device vmgenid,guid=auto",
        ] {
            assert_eq!(added(line), None, "{line}");
        }
    }

    #[test]
    fn a_generation_id_is_replaced_in_both_forms() {
        let replaced = |device: &str| {
            let command = ["qemu", "-device", device, "-S"].map(str::to_owned);
            replace_generation_id(&command, "B")[2].clone()
        };
        assert_eq!(replaced("vmgenid,guid=A,id=g"), "vmgenid,guid=B,id=g");
        assert_eq!(replaced("vmgenid"), "vmgenid,guid=B");
        let json = replaced(r#"{"driver":"vmgenid","guid":"A","id":"g"}"#);
        assert_eq!(json, r#"{"driver":"vmgenid","guid":"B","id":"g"}"#);
        assert_eq!(replaced("virtio-rng-pci,id=vmgenid"), "virtio-rng-pci,id=vmgenid");
    }
}
