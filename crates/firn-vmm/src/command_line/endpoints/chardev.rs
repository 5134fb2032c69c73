//! Character devices: `-chardev`, and options with a shorter form of one (`-serial`, `-monitor`,
//! `-qmp`, `-gdb`).

use super::{Endpoint, Moved, Places, host_and_port};
use crate::command_line::properties::{Properties, escape};

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
pub(super) fn short(value: &str, listens: bool, places: &mut Places<'_>) -> Option<Moved> {
    let shared = value.strip_prefix("mon:");
    let (lead, rest) = (if shared.is_some() { "mon:" } else { "" }, shared.unwrap_or(value));
    let (kind, rest) = rest.split_once(':')?;
    let Moved { value, held } = match kind {
        "unix" | "tcp" | "telnet" | "tn3270" | "websocket" => {
            short_socket(kind, rest, listens, places)?
        }
        "udp" => {
            let (_, local) = rest.split_once('@')?;
            let (host, port) = host_and_port(local)?;
            let held = places.held(&Endpoint::Port { udp: true, host, port })?;
            Moved { value: "null".to_owned(), held }
        }
        "file" => {
            let held = places.held(&Endpoint::File(rest.into()))?;
            Moved { value: format!("file:{}", places.file(rest)), held }
        }
        "pipe" => Moved { value: "null".to_owned(), held: pipe(rest, places)? },
        _ => return None,
    };
    Some(Moved { value: format!("{lead}{value}"), held })
}

fn short_socket(kind: &str, rest: &str, listens: bool, places: &mut Places<'_>) -> Option<Moved> {
    let properties = Properties::read(rest, "address")?;
    let address = properties.get("address")?.into_owned();
    if !listens && !properties.is_on("server") {
        return None;
    }
    let (endpoint, name) = match kind {
        "unix" => (Endpoint::Socket(address.clone().into()), address),
        kind => {
            let (host, port) = host_and_port(&address)?;
            (Endpoint::tcp(&host, port), format!("{kind}-{port}"))
        }
    };
    let held = places.held(&endpoint)?;
    let path = places.socket(&name);
    Some(Moved { value: format!("unix:{},server=on,wait=off", escape(&path)), held })
}

/// The long form, with its log file.
pub(super) fn long(value: &str, places: &mut Places<'_>) -> Option<Moved> {
    let mut properties = Properties::read(value, "backend")?;
    let id = properties.get("id").unwrap_or_default().into_owned();
    let backend = properties.get("backend")?.into_owned();
    let held = match &*backend {
        "socket" => socket(&mut properties, &id, places),
        "udp" => udp(&mut properties, places),
        "file" => path(&mut properties, "path", places),
        "pipe" => text(&properties, "path").and_then(|path| {
            let held = pipe(&path, places)?;
            properties.remove("path");
            properties.set("backend", "null");
            Some(held)
        }),
        _ => None,
    };
    let log = path(&mut properties, "logfile", places);
    let held: Vec<String> = held.into_iter().chain(log).collect();
    let value = properties.to_text("backend");
    (!held.is_empty()).then(|| Moved { value, held: held.join(", ") })
}

fn text(properties: &Properties, key: &str) -> Option<String> {
    properties.get(key).map(String::from)
}

fn socket(properties: &mut Properties, id: &str, places: &mut Places<'_>) -> Option<String> {
    if !properties.is_on("server") || properties.is_on("abstract") {
        return None;
    }
    let (endpoint, name) = match (text(properties, "path"), text(properties, "port")) {
        (Some(path), _) => (Endpoint::Socket(path.clone().into()), path),
        (None, Some(port)) => {
            let host = text(properties, "host").unwrap_or_default();
            (Endpoint::tcp(&host, port.parse().ok()?), id.to_owned())
        }
        (None, None) => return None,
    };
    let held = places.held(&endpoint)?;
    OF_NETWORK.iter().for_each(|key| properties.remove(key));
    properties.set("path", &places.socket(&name));
    properties.set("server", "on");
    properties.set("wait", "off");
    Some(held)
}

/// Replaces it by the null device: output is lost, and there is no input.
fn udp(properties: &mut Properties, places: &mut Places<'_>) -> Option<String> {
    let port = text(properties, "localport")?.parse().ok()?;
    let host = text(properties, "localaddr").unwrap_or_default();
    let held = places.held(&Endpoint::Port { udp: true, host, port })?;
    ["host", "port", "localaddr", "localport", "ipv4", "ipv6"]
        .iter()
        .for_each(|key| properties.remove(key));
    properties.set("backend", "null");
    Some(held)
}

fn path(properties: &mut Properties, key: &str, places: &mut Places<'_>) -> Option<String> {
    let path = text(properties, key)?;
    let held = places.held(&Endpoint::File(path.clone().into()))?;
    properties.set(key, &places.file(&path));
    Some(held)
}

/// Checks a pipe: two FIFOs, or one for both directions.
fn pipe(path: &str, places: &Places<'_>) -> Option<String> {
    let names = ["", ".in", ".out"].map(|end| format!("{path}{end}"));
    names.iter().find_map(|name| places.held(&Endpoint::File(name.into())))
}
