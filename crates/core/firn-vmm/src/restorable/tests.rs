//! Recorded answers of QEMU 7.2, and what follows from them.

use std::path::Path;

use serde_json::json;

use super::facts::{parse_devices, parse_media};
use super::*;

const COMMAND: &str = "qemu -M q35 -m 64,slots=2,maxmem=1G -smp 2,maxcpus=4 -netdev user,id=n0 -device virtio-net-pci,netdev=n0,id=nic0 \
    -device virtio-rng-pci -drive file=a.raw,if=virtio,format=raw -cdrom /b.iso -device qemu-xhci,id=xhci -device pcie-root-port,id=rp1,chassis=1";

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// The VM of [`COMMAND`], as it was started.
fn facts() -> MachineFacts {
    let named = json!([
        { "name": "type", "type": "string" },
        { "name": "rp1", "type": "child<pcie-root-port>" },
        { "name": "xhci", "type": "child<qemu-xhci>" },
        { "name": "nic0", "type": "child<virtio-net-pci>" },
    ]);
    let unnamed = json!([
        { "name": "type", "type": "string" },
        { "name": "device[0]", "type": "child<virtio-rng-pci>" },
        { "name": "device[1]", "type": "child<virtio-blk-pci>" },
    ]);
    let mut devices = parse_devices("/machine/peripheral", &named);
    devices.extend(parse_devices("/machine/peripheral-anon", &unnamed));
    let blocks = json!([
        { "device": "virtio0", "removable": false, "inserted": { "ro": false, "file": "a.raw" } },
        { "device": "ide2-cd0", "removable": true, "inserted": { "ro": true, "file": "/b.iso" } },
        { "device": "sd0", "removable": true },
    ]);
    let media = parse_media(&blocks);
    let backends = vec![BackendFacts { name: "n0".into(), kind: "user".into() }];
    let (vcpus, initial_vcpus) = (2, Some(2));
    MachineFacts { devices, backends, media, vcpus, initial_vcpus, confidential_guest: None }
}

fn obstacles(command: &str, facts: &MachineFacts) -> Vec<String> {
    let words = words(command);
    let lines = CommandLines { user: &words, actual: &words, directory: Path::new("/") };
    find_obstacles(&lines, facts).iter().map(ToString::to_string).collect()
}

#[track_caller]
fn is_refused(command: &str, facts: &MachineFacts, why: &str) {
    let found = obstacles(command, facts);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains(why), "{found:?}");
}

#[test]
fn a_vm_as_it_was_started_has_no_obstacles() {
    assert_eq!(facts().devices.len(), 5);
    assert_eq!(obstacles(COMMAND, &facts()), Vec::<String>::new());
}

#[test]
fn devices_that_were_added_are_named() {
    for (id, driver) in [
        ("nic1", "virtio-net-pci"),
        ("dimm1", "pc-dimm"),
        ("tab", "usb-tablet"),
        ("c", "qemu64-x86_64-cpu"),
    ] {
        let mut facts = facts();
        facts.devices.push(DeviceFacts {
            path: format!("/machine/peripheral/{id}"),
            id: Some(id.into()),
            driver: driver.into(),
            is_hotplugged: true,
        });
        is_refused(COMMAND, &facts, &format!("device {id} ({driver}) was added while the VM ran"));
    }
}

#[test]
fn devices_and_vcpus_that_were_removed_are_named() {
    let mut removed = facts();
    removed.devices.retain(|device| device.id.as_deref() != Some("nic0"));
    is_refused(COMMAND, &removed, "device nic0 (virtio-net-pci)");
    let mut removed = facts();
    removed.devices.retain(|device| device.id.is_some());
    is_refused(COMMAND, &removed, "devices without an id");
    is_refused(COMMAND, &MachineFacts { vcpus: 1, ..facts() }, "1 of the 2 vCPUs");
}

#[test]
fn another_medium_is_named() {
    let medium = MediumFacts { drive: "ide2-cd0".into(), file: "/other.iso".into() };
    is_refused(COMMAND, &MachineFacts { media: vec![medium], ..facts() }, "/other.iso");
}

#[test]
fn devices_that_firn_cannot_inspect_are_refused() {
    for driver in ["vfio-pci", "vhost-vdpa-device-pci", "vhost-user-fs-pci", "vhost-user-blk-pci"] {
        let command = format!("{COMMAND} -device {driver},id=x");
        let mut facts = facts();
        let device =
            DeviceFacts { id: Some("x".into()), driver: driver.into(), ..Default::default() };
        facts.devices.push(device);
        is_refused(&command, &facts, &format!("x ({driver})"));
    }
    for driver in ["virtio-mem-pci", "virtio-pmem-pci", "nvdimm"] {
        let mut facts = facts();
        let device =
            DeviceFacts { id: Some("m".into()), driver: driver.into(), ..Default::default() };
        facts.devices.push(device);
        is_refused(&format!("{COMMAND} -device {driver},id=m"), &facts, &format!("m ({driver})"));
    }
    for kind in ["vhost-user", "vhost-vdpa"] {
        let backends = vec![BackendFacts { name: "n0".into(), kind: kind.into() }];
        is_refused(COMMAND, &MachineFacts { backends, ..facts() }, &format!("n0 ({kind})"));
    }
    let confidential_guest = Some("/objects/sev0".to_owned());
    is_refused(COMMAND, &MachineFacts { confidential_guest, ..facts() }, "encrypted");
}

#[test]
fn devices_missing_in_the_command_line_are_named() {
    for (more, why) in [
        ("-netdev tap,id=n1,fd=5", "-netdev tap,id=n1,fd=5: a restore has no such open descriptor"),
        ("-add-fd fd=3,set=1", "-add-fd fd=3,set=1"),
        ("-object secret,id=s,file=/nowhere/key", "secret s cannot be read again"),
        ("-object secret_keyring,id=k,serial=1", "keyring"),
        ("-overcommit mem-lock=on", "mem-lock"),
    ] {
        is_refused(&format!("{COMMAND} {more}"), &facts(), why);
    }
}
