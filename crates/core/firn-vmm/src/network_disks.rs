//! Disks that QEMU reaches over the network itself, by NBD, librbd, libiscsi and others.
//!
//! No file of the host stands for such a disk: QEMU names it by an address, such as
//! `nbd+unix:///export?socket=/run/nbd`, or by its options as JSON (`json:{...}`).
//!
//! Source: QEMU `qapi/block-core.json`, `BlockdevDriver`; the schemes are those of the drivers'
//! `bdrv_parse_filename`.

use serde_json::Value;

/// The drivers of disks on the network that a guest can write to.
const DRIVERS: &[&str] = &["nbd", "rbd", "iscsi", "nfs", "ssh", "gluster"];

/// Whether this is the driver of a disk on the network.
pub(crate) fn is_network_driver(driver: &str) -> bool {
    DRIVERS.contains(&driver)
}

/// Whether QEMU's name for a disk is the address of one on the network.
pub(crate) fn is_network_address(name: &str) -> bool {
    match name.strip_prefix("json:") {
        Some(json) => serde_json::from_str(json).is_ok_and(|options| has_network_driver(&options)),
        None => name.split_once(':').is_some_and(|(scheme, _)| is_network_scheme(scheme)),
    }
}

/// `nbd`, `nbd+unix`, `gluster+tcp`, ...
fn is_network_scheme(scheme: &str) -> bool {
    let driver = scheme.split('+').next().unwrap_or(scheme);
    is_network_driver(driver) || driver == "iser"
}

/// Whether the lowest node of a chain without backing files is one of the network.
fn has_network_driver(options: &Value) -> bool {
    match options.get("file") {
        Some(below) if below.is_object() => has_network_driver(below),
        _ => options.get("driver").and_then(Value::as_str).is_some_and(is_network_driver),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_from_files() {
        for address in [
            "nbd+unix:///one?socket=/run/s",
            "nbd://host:10809/x",
            "rbd:pool/image:id=admin",
            "iscsi://host/iqn/0",
            "gluster+tcp://host/volume/image",
            r#"json:{"driver": "raw", "file": {"driver": "rbd", "pool": "p", "image": "i"}}"#,
            r#"json:{"driver": "nbd", "server": {"type": "unix", "path": "/s"}}"#,
        ] {
            assert!(is_network_address(address), "{address}");
        }
        for file in [
            "/srv/web.qcow2",
            "web:1.img",
            "host_device:/dev/vg/web",
            r#"json:{"driver": "raw", "file": {"driver": "file", "filename": "/a"}}"#,
            "json:{",
            "",
        ] {
            assert!(!is_network_address(file), "{file}");
        }
    }
}
