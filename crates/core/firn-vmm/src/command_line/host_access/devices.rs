//! Devices, objects, and character devices.
//!
//! A device refers to its back end by id: the option of the back end is checked by itself.

use super::finding::{Exempt, Finding};
use super::values::{
    Words, check_keys, has_word, known_type, only_value, read_properties, unknown_type,
};

/// Devices that use nothing of the host but the back ends that they name. Not those that pass a
/// device of the host through, that read files (`loader`, `ipmi-bmc-sim`), or that have another
/// process do their work (`vhost-user-*`).
const DRIVERS: Words = "VGA ahci amd-iommu bochs-display cirrus-vga e1000 e1000e edu floppy \
    i6300esb i82801b11-bridge ib700 ich9-ahci \
    ich9-intel-hda ich9-usb-ehci1 ich9-usb-ehci2 ich9-usb-uhci1 ich9-usb-uhci2 \
    ich9-usb-uhci3 ich9-usb-uhci4 ich9-usb-uhci5 ich9-usb-uhci6 ide-cd ide-hd igb \
    intel-hda intel-iommu ioh3420 isa-debug-exit isa-debugcon isa-fdc isa-parallel \
    isa-serial ivshmem-plain lsi lsi53c895a megasas mptsas1068 ne2k_pci nec-usb-xhci nvme \
    nvme-ns pc-dimm pci-bridge pci-serial pcie-pci-bridge pcie-root-port pcnet piix3-ide \
    piix3-usb-uhci piix4-usb-uhci pvpanic pvpanic-pci pvscsi pxb pxb-pcie qemu-xhci qxl \
    qxl-vga ramfb rtl8139 scsi-cd scsi-hd usb-ehci usb-hub usb-kbd \
    usb-mouse usb-serial usb-storage usb-tablet virtconsole virtio-balloon virtio-blk \
    virtio-gpu virtio-iommu virtio-keyboard virtio-mem virtio-mouse virtio-net virtio-rng \
    virtio-scsi virtio-serial virtio-tablet virtio-vga virtserialport vmcoreinfo vmgenid \
    vmware-svga vmxnet3 x3130-upstream xio3130-downstream";

/// Devices that use the host's sound, its microphone as well, unless they name a back end.
const AUDIO: Words = "AC97 ES1370 hda-duplex hda-micro hda-output sb16 usb-audio";

/// What may follow the name of a virtio device.
const VIRTIO_BUSES: Words = "-pci -pci-non-transitional -pci-transitional -device";

/// Properties of devices. Not `romfile`, which is read into the guest.
const DEVICE: Words = "acpi acpi-index addr aer alias ats audiodev block-size bootindex bus bus-reserve \
    bus_nr ccid channel chardev chassis chassis_nr csum ctrl_guest_offloads ctrl_mac_addr \
    ctrl_rx ctrl_vlan ctrl_vq cyls deflate-on-oom device_id disable-legacy disable-modern \
    discard_granularity display dpofua drive driver edid event_idx failover firstport \
    free-page-hint free-page-reporting gso guest_announce guest_csum guest_ecn guest_tso4 \
    guest_tso6 guest_ufo guid head heads host_mtu host_tso4 host_tso6 host_ufo hotplug id \
    index indirect_desc intremap io-reserve iobase ioeventfd iommu_platform iothread irq \
    logical_block_size lun mac masterbus master max-bytes max_hostmem max_outputs \
    max_ports max_sectors mem-reserve memdev min_io_size model mq mrg_rxbuf msi msix mtu \
    multifunction name netdev node notify_on_empty nr ns num-queues num_queues opt_io_size \
    p2 p3 packed page-per-vq period physical_block_size port power_controller_present \
    pref32-reserve pref64-reserve primary product queue-size queues ram_size ram_size_mb \
    removable request-merging requested-size reserved rerror revision rng rombar \
    rotation_rate rx_queue_size scsi-id scsi_id secs serial share-rw slot speed status tx \
    tx_queue_size type unit use_acpi_vga_stdvga vectors vendor ver version vgamem_mb \
    vram64_size_mb vram_size vram_size_mb werror write-cache wwn wwpn xres yres";

/// Properties that command lines set for all devices of a driver.
const GLOBAL: Words = "acpi-pci-hotplug-with-bridge-support acpi-root-pci-hotplug disable_s3 disable_s4 \
    extended-tseg-mbytes fallback lost_tick_policy noreboot s4_val send-configuration \
    short_root_bus";

/// Objects and their properties. Those of memory are for guest RAM, which Firn puts into a file of
/// its own.
const OBJECTS: &[(&str, Words)] = &[
    ("can-bus", ""),
    ("iothread", "aio-max-batch poll-grow poll-max-ns poll-shrink thread-pool-max thread-pool-min"),
    ("memory-backend-file", MEMORY),
    ("memory-backend-memfd", MEMORY),
    ("memory-backend-ram", MEMORY),
    ("memory-backend-shm", MEMORY),
    ("rng-builtin", ""),
    ("rng-random", ""),
    ("secret", "data format iv keyid"),
    ("throttle-group", THROTTLE),
];

const MEMORY: Words = "align dump host-nodes merge policy prealloc prealloc-context prealloc-threads reserve \
    seal share size x-use-canonical-path-for-ramblock-id";

const THROTTLE: Words =
    "x-bps-read x-bps-total x-bps-write x-iops-read x-iops-size x-iops-total x-iops-write";

const OBJECT: Words = "id qom-type";

/// Sources of random numbers.
const RANDOM: Words = "/dev/random /dev/urandom";

/// Character devices that are in QEMU alone. Firn gives QEMU no terminal.
const CHARDEVS: &[(&str, Words)] = &[
    ("memory", "size"),
    ("null", ""),
    ("ringbuf", "size"),
    ("stdio", "signal"),
    ("vc", "cols height rows width"),
];

/// Properties of all of them. The last ones say how a path or an address is used, which is checked by
/// itself.
const CHARDEV: Words = "append backend id logappend mux nodelay server telnet wait";

/// The findings of `-device`.
pub(super) fn check_device(value: &str, exempt: &Exempt<'_>) -> Vec<Finding> {
    let properties = match read_properties(value, "driver", true) {
        Ok(properties) => properties,
        Err(finding) => return vec![finding],
    };
    let driver = only_value(&properties, "driver").unwrap_or_default();
    let is_mute = has_word(AUDIO, &driver) && only_value(&properties, "audiodev").is_some();
    if !is_mute && !is_known_driver(&driver) && !exempt.covers_key("driver") {
        return vec![unknown_type("driver", &driver)];
    }
    let has_no_rom = only_value(&properties, "romfile").is_some_and(|file| file.is_empty());
    let mut found = check_keys(&properties, &[DEVICE], exempt);
    found.retain(|it| !(has_no_rom && it.key.as_deref() == Some("romfile")));
    found
}

fn is_known_driver(driver: &str) -> bool {
    let of_bus = |bus: &str| driver.strip_suffix(bus).filter(|it| it.starts_with("virtio-"));
    let plain = VIRTIO_BUSES.split_whitespace().find_map(of_bus).unwrap_or(driver);
    has_word(DRIVERS, plain)
}

/// The findings of `-global`, which gives all devices of a driver a property.
pub(super) fn check_global(value: &str) -> Vec<Finding> {
    // `driver.property=value`, to its end, where QEMU reads it so; else a list.
    let short = value.split_once('=').and_then(|(left, right)| {
        let (driver, property) = left.split_once('.')?;
        (driver.len() < 64 && property.len() < 64)
            .then_some((property.to_owned(), right.to_owned()))
    });
    let property = match (short, read_properties(value, "", false)) {
        (Some(short), _) => Some(short),
        (None, Ok(list)) => {
            let keys = list.flattened();
            let is_known = |key: &str| ["driver", "property", "value"].contains(&key);
            let text = |key: &str| list.get(key).map(String::from);
            let is_list = keys.len() == 3 && keys.iter().all(|(key, _)| is_known(key));
            text("property").zip(text("value")).filter(|_| is_list)
        }
        (None, Err(_)) => None,
    };
    match property {
        Some((name, _)) if has_word(DEVICE, &name) || has_word(GLOBAL, &name) => Vec::new(),
        Some((name, value)) if name == "romfile" && value.is_empty() => Vec::new(),
        _ => vec![Finding::of_option("sets a property that Firn does not know to be harmless")],
    }
}

/// The findings of `-object`.
pub(super) fn check_object(value: &str, exempt: &Exempt<'_>) -> Vec<Finding> {
    let properties = match read_properties(value, "qom-type", true) {
        Ok(properties) => properties,
        Err(finding) => return vec![finding],
    };
    let keys = match known_type(&properties, "qom-type", OBJECTS, exempt) {
        Ok(keys) => keys.copied().unwrap_or_default(),
        Err(finding) => return vec![finding],
    };
    let of_type = only_value(&properties, "qom-type").unwrap_or_default();
    let file = only_value(&properties, "filename");
    let is_random = of_type == "rng-random" && file.is_some_and(|it| has_word(RANDOM, &it));
    let is_own_file = exempt.is_ram && of_type.starts_with("memory-backend-");
    let mut found = check_keys(&properties, &[OBJECT, keys], exempt);
    found.retain(|it| match it.key.as_deref() {
        Some("filename") => !is_random,
        Some("mem-path") => !is_own_file,
        _ => true,
    });
    found
}

/// The findings of `-chardev`.
pub(super) fn check_chardev(value: &str, exempt: &Exempt<'_>) -> Vec<Finding> {
    let properties = match read_properties(value, "backend", false) {
        Ok(properties) => properties,
        Err(finding) => return vec![finding],
    };
    match known_type(&properties, "backend", CHARDEVS, exempt) {
        Ok(keys) => {
            let keys = keys.copied().unwrap_or_default();
            check_keys(&properties, &[CHARDEV, keys], exempt)
        }
        Err(finding) => {
            let effect = "opens a file, socket, port or terminal".to_owned();
            vec![Finding { effect, ..finding }]
        }
    }
}

/// The findings of `-audiodev` and `-audio`.
pub(super) fn check_audio(value: &str, exempt: &Exempt<'_>) -> Vec<Finding> {
    const TYPES: &[(&str, ())] = &[("none", ())];
    let properties = match read_properties(value, "driver", true) {
        Ok(properties) => properties,
        Err(finding) => return vec![finding],
    };
    match known_type(&properties, "driver", TYPES, exempt) {
        Ok(_) => check_keys(&properties, &["driver id model"], exempt),
        Err(_) => vec![Finding::of_option("uses the host's sound, or writes a file")],
    }
}

/// The findings of `-serial` and the like, whose value is a character device.
pub(super) fn check_short_chardev(value: &str, effect: &str) -> Vec<Finding> {
    let device = value.strip_prefix("mon:").unwrap_or(value);
    let is_known = matches!(device, "none" | "null" | "stdio" | "vc")
        || device.strip_prefix("vc:").is_some_and(|size| !size.contains('/'))
        || device.starts_with("chardev:");
    match is_known {
        true => Vec::new(),
        false => vec![Finding::of_option(effect)],
    }
}
