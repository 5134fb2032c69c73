//! The devices that a user added to a VM, on the command line or later (`device_add`), as paths in
//! QEMU's object tree.

use std::collections::BTreeSet;
use std::fmt;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::qmp::{QmpClient, QmpError};

/// The containers in QEMU's object tree: for devices with an id, and for those without one.
const CONTAINERS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];
/// The container for objects, of which network filters count as devices: one that is removed, or
/// added by another program, changes what the VM sends.
const OBJECTS: &str = "/objects";
const FILTER_CLASS_PREFIX: &str = "filter-";

/// A device of a VM.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DevicePath {
    /// Its path in the object tree, unique for all time.
    pub path: String,
    /// Its class, such as `virtio-net-pci`.
    pub class: String,
}

impl fmt::Display for DevicePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.path.rsplit('/').next().unwrap_or_default();
        write!(f, "{name} ({})", self.class)
    }
}

/// A property of an object, as `qom-list` returns it.
#[derive(Debug, Deserialize)]
struct ObjectProperty {
    name: String,
    #[serde(rename = "type")]
    class: String,
}

/// Lists all devices that a user added, and network filters.
pub(crate) fn list_devices(qmp: &mut QmpClient) -> Result<BTreeSet<DevicePath>, QmpError> {
    let mut devices = BTreeSet::new();
    for container in CONTAINERS {
        let answer = qmp.execute("qom-list", json!({ "path": container }))?;
        devices.extend(parse_children(container, answer)?);
    }
    let answer = qmp.execute("qom-list", json!({ "path": OBJECTS }))?;
    let objects = parse_children(OBJECTS, answer)?.into_iter();
    devices.extend(objects.filter(|object| object.class.starts_with(FILTER_CLASS_PREFIX)));
    Ok(devices)
}

fn parse_children(container: &str, answer: Value) -> Result<Vec<DevicePath>, QmpError> {
    let properties: Vec<ObjectProperty> = Vec::deserialize(answer)
        .map_err(|error| QmpError::unexpected("qom-list", error.to_string()))?;
    let child = |property: ObjectProperty| {
        let class = property.class.strip_prefix("child<")?.strip_suffix('>')?.to_owned();
        Some(DevicePath { path: format!("{container}/{}", property.name), class })
    };
    Ok(properties.into_iter().filter_map(child).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_devices_and_nothing_else_is() {
        let answer = json!([{ "name": "type", "type": "string" },
            { "name": "net0", "type": "child<virtio-net-pci>" }]);
        let devices = parse_children("/machine/peripheral", answer).unwrap();
        assert_eq!(devices.len(), 1);
        assert_eq!(devices[0].to_string(), "net0 (virtio-net-pci)");
        assert!(parse_children("/machine/peripheral", json!(7)).is_err());
    }
}
