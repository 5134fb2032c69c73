//! Character devices: `-chardev`, and options with a shorter form of one (`-serial`, `-monitor`,
//! `-qmp`, `-gdb`).

use super::{EndpointPaths, HostEndpoint, MovedValue, host_and_port};
use crate::command_line::properties::{OptionProperties, escape_commas};

/// Properties of a socket with a network address.
const OF_NETWORK: &[&str] = &[
    "host",
    "port",
    "to",
    "ipv4",
    "ipv6",
    "telnet",
    "tn3270",
    "websocket",
    "nodelay",
    "keep-alive",
    "mptcp",
    "tls-creds",
    "tls-authz",
];

/// The short form: `KIND:ADDRESS,PROPERTY,...`, after `mon:` where a monitor shares the device.
pub(super) fn relocate_short(
    value: &str,
    listens: bool,
    paths: &mut EndpointPaths<'_>,
) -> Option<MovedValue> {
    let shared = value.strip_prefix("mon:");
    let (lead, rest) = (if shared.is_some() { "mon:" } else { "" }, shared.unwrap_or(value));
    let (kind, rest) = rest.split_once(':')?;
    let MovedValue { value, held } = match kind {
        "unix" | "tcp" | "telnet" | "tn3270" | "websocket" => {
            relocate_short_socket(kind, rest, listens, paths)?
        }
        "udp" => {
            let (_, local) = rest.split_once('@')?;
            let (host, port) = host_and_port(local)?;
            let held = paths.find_holder(&HostEndpoint::Port { udp: true, host, port })?;
            MovedValue { value: "null".to_owned(), held }
        }
        "file" => {
            let held = paths.find_holder(&HostEndpoint::File(rest.into()))?;
            MovedValue { value: format!("file:{}", paths.file_path(rest)), held }
        }
        "pipe" => MovedValue { value: "null".to_owned(), held: find_pipe_holder(rest, paths)? },
        _ => return None,
    };
    Some(MovedValue { value: format!("{lead}{value}"), held })
}

fn relocate_short_socket(
    kind: &str,
    rest: &str,
    listens: bool,
    paths: &mut EndpointPaths<'_>,
) -> Option<MovedValue> {
    let properties = OptionProperties::parse_value(rest, "address")?;
    let address = properties.get("address")?.into_owned();
    if !listens && !properties.is_on("server") {
        return None;
    }
    let (endpoint, name) = match kind {
        "unix" => (HostEndpoint::Socket(address.clone().into()), address),
        kind => {
            let (host, port) = host_and_port(&address)?;
            (HostEndpoint::tcp_port(&host, port), format!("{kind}-{port}"))
        }
    };
    let held = paths.find_holder(&endpoint)?;
    let path = paths.socket_path(&name);
    Some(MovedValue { value: format!("unix:{},server=on,wait=off", escape_commas(&path)), held })
}

/// The long form, with its log file.
pub(super) fn relocate_chardev(value: &str, paths: &mut EndpointPaths<'_>) -> Option<MovedValue> {
    let mut properties = OptionProperties::parse_value(value, "backend")?;
    let id = properties.get("id").unwrap_or_default().into_owned();
    let backend = properties.get("backend")?.into_owned();
    let held = match &*backend {
        "socket" => relocate_socket(&mut properties, &id, paths),
        "udp" => relocate_udp(&mut properties, paths),
        "file" => relocate_path(&mut properties, "path", paths),
        "pipe" => property_text(&properties, "path").and_then(|path| {
            let held = find_pipe_holder(&path, paths)?;
            properties.remove("path");
            properties.set("backend", "null");
            Some(held)
        }),
        _ => None,
    };
    let log = relocate_path(&mut properties, "logfile", paths);
    let held: Vec<String> = held.into_iter().chain(log).collect();
    let value = properties.to_text("backend");
    (!held.is_empty()).then(|| MovedValue { value, held: held.join(", ") })
}

fn property_text(properties: &OptionProperties, key: &str) -> Option<String> {
    properties.get(key).map(String::from)
}

fn relocate_socket(
    properties: &mut OptionProperties,
    id: &str,
    paths: &mut EndpointPaths<'_>,
) -> Option<String> {
    if !properties.is_on("server") || properties.is_on("abstract") {
        return None;
    }
    let (endpoint, name) =
        match (property_text(properties, "path"), property_text(properties, "port")) {
            (Some(path), _) => (HostEndpoint::Socket(path.clone().into()), path),
            (None, Some(port)) => {
                let host = property_text(properties, "host").unwrap_or_default();
                (HostEndpoint::tcp_port(&host, port.parse().ok()?), id.to_owned())
            }
            (None, None) => return None,
        };
    let held = paths.find_holder(&endpoint)?;
    OF_NETWORK.iter().for_each(|key| properties.remove(key));
    properties.set("path", &paths.socket_path(&name));
    properties.set("server", "on");
    properties.set("wait", "off");
    Some(held)
}

/// Replaces it by the null device: output is lost, and there is no input.
fn relocate_udp(
    properties: &mut OptionProperties,
    paths: &mut EndpointPaths<'_>,
) -> Option<String> {
    let port = property_text(properties, "localport")?.parse().ok()?;
    let host = property_text(properties, "localaddr").unwrap_or_default();
    let held = paths.find_holder(&HostEndpoint::Port { udp: true, host, port })?;
    ["host", "port", "localaddr", "localport", "ipv4", "ipv6"]
        .iter()
        .for_each(|key| properties.remove(key));
    properties.set("backend", "null");
    Some(held)
}

fn relocate_path(
    properties: &mut OptionProperties,
    key: &str,
    paths: &mut EndpointPaths<'_>,
) -> Option<String> {
    let path = property_text(properties, key)?;
    let held = paths.find_holder(&HostEndpoint::File(path.clone().into()))?;
    properties.set(key, &paths.file_path(&path));
    Some(held)
}

/// Checks a pipe: two FIFOs, or one for both directions.
fn find_pipe_holder(path: &str, paths: &EndpointPaths<'_>) -> Option<String> {
    let names = ["", ".in", ".out"].map(|end| format!("{path}{end}"));
    names.iter().find_map(|name| paths.find_holder(&HostEndpoint::File(name.into())))
}
