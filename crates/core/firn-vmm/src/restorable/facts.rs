//! The state of a running QEMU that decides whether its command line describes it.

use serde_json::{Value, json};

use crate::hmp;
use crate::qmp::{QmpClient, QmpError};

/// The QOM containers of devices that a command line or a user created.
const CONTAINERS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// The container of devices without an id.
const UNNAMED: &str = "/machine/peripheral-anon";

/// A device of a running QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its QOM path.
    pub path: String,
    /// Its id; `None` if it has none.
    pub id: Option<String>,
    /// Its QOM type, such as `virtio-net-pci`.
    pub driver: String,
    /// Whether it was added after the machine had been built.
    pub is_hotplugged: bool,
}

/// A network back end of a running QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendFacts {
    /// Its name.
    pub name: String,
    /// Its type, such as `tap` or `vhost-user`.
    pub kind: String,
}

/// A read-only medium in a drive whose medium can be changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediumFacts {
    /// The drive.
    pub drive: String,
    /// The medium's file.
    pub file: String,
}

/// The state of a running QEMU, as far as a restore has to reproduce it by the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineFacts {
    /// Devices that the command line or a user created.
    pub devices: Vec<DeviceFacts>,
    /// Network back ends.
    pub backends: Vec<BackendFacts>,
    /// Read-only media.
    pub media: Vec<MediumFacts>,
    /// vCPUs that exist now.
    pub vcpus: u64,
    /// vCPUs that the machine was started with, if QEMU reports it.
    pub initial_vcpus: Option<u64>,
    /// The object that encrypts the guest's memory (SEV, TDX), if there is one.
    pub confidential_guest: Option<String>,
}

/// Queries the facts from a running QEMU. The VM may run meanwhile.
pub(crate) fn collect_facts(qmp: &mut QmpClient) -> Result<MachineFacts, QmpError> {
    let mut devices = Vec::new();
    for container in CONTAINERS {
        let list = qmp.execute("qom-list", json!({ "path": container }))?;
        devices.extend(parse_devices(container, &list));
    }
    for device in &mut devices {
        device.is_hotplugged =
            query_property(qmp, &device.path, "hotplugged")? == Some(json!(true));
    }
    let smp = query_property(qmp, "/machine", "smp")?.unwrap_or_default();
    let confidential =
        query_property(qmp, "/machine", "confidential-guest-support")?.unwrap_or_default();
    let vcpus = qmp.execute("query-cpus-fast", Value::Null)?;
    Ok(MachineFacts {
        devices,
        backends: list_backends(&qmp.execute_hmp("info network")?),
        media: parse_media(&qmp.execute("query-block", Value::Null)?),
        vcpus: vcpus.as_array().map_or(0, |vcpus| vcpus.len() as u64),
        initial_vcpus: smp.get("cpus").and_then(Value::as_u64),
        confidential_guest: confidential.as_str().filter(|path| !path.is_empty()).map(Into::into),
    })
}

/// A property of a QOM object; `None` if this QEMU has no such property, or the object no longer
/// exists.
fn query_property(
    qmp: &mut QmpClient,
    path: &str,
    property: &str,
) -> Result<Option<Value>, QmpError> {
    match qmp.execute("qom-get", json!({ "path": path, "property": property })) {
        Ok(value) => Ok(Some(value)),
        Err(QmpError::Refused { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The devices in the reply to `qom-list`.
pub(super) fn parse_devices(container: &str, list: &Value) -> Vec<DeviceFacts> {
    let text = |item: &Value, key: &str| item.get(key).and_then(Value::as_str).map(String::from);
    let device = |item: &Value| {
        let (name, kind) = (text(item, "name")?, text(item, "type")?);
        let driver = kind.strip_prefix("child<")?.strip_suffix('>')?.to_owned();
        let path = format!("{container}/{name}");
        let id = (container != UNNAMED).then_some(name);
        Some(DeviceFacts { path, id, driver, is_hotplugged: false })
    };
    list.as_array().into_iter().flatten().filter_map(device).collect()
}

fn list_backends(text: &str) -> Vec<BackendFacts> {
    let backends = hmp::parse_backends(text).into_iter();
    backends.map(|(name, kind)| BackendFacts { name, kind }).collect()
}

/// The read-only media in the reply to `query-block`.
pub(super) fn parse_media(blocks: &Value) -> Vec<MediumFacts> {
    let medium = |block: &Value| {
        let inserted = block.get("inserted")?;
        let is_medium = block.get("removable")?.as_bool()? && inserted.get("ro")?.as_bool()?;
        let file = inserted.get("file")?.as_str()?.to_owned();
        let name = |key: &str| block.get(key)?.as_str().filter(|name| !name.is_empty());
        let drive = name("device").or_else(|| name("qdev")).unwrap_or("?").to_owned();
        is_medium.then_some(MediumFacts { drive, file })
    };
    blocks.as_array().into_iter().flatten().filter_map(medium).collect()
}
