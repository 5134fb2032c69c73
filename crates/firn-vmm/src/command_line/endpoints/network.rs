//! Ports and sockets of a network card's back end. They lead to the guest, so the user has to name
//! the replacements.

use super::{Endpoint, Places, host_and_port};
use crate::command_line::arguments::Argument;
use crate::command_line::error::CommandLineError;
use crate::command_line::properties::Properties;

/// Refuses a back end that needs an endpoint that another process has.
pub(super) fn check(argument: &Argument, places: &Places<'_>) -> Result<(), CommandLineError> {
    let Some(properties) = Properties::read(argument.value(), "type") else { return Ok(()) };
    let held = ends(&properties).iter().find_map(|end| places.held(end));
    match held {
        Some(held) => Err(CommandLineError::Held { option: argument.to_string(), held }),
        None => Ok(()),
    }
}

fn ends(properties: &Properties) -> Vec<Endpoint> {
    let text = |key: &str| properties.text(key);
    let found = match properties.get("type").as_deref() {
        Some("user") => {
            return properties.all("hostfwd").iter().filter_map(|rule| forward(rule)).collect();
        }
        Some("socket") => text("listen").and_then(|listen| host_and_port(&listen)),
        Some("stream") if properties.is_on("server") => return address(properties, "addr", false),
        Some("dgram") => return address(properties, "local", true),
        _ => None,
    };
    found.map(|(host, port)| Endpoint::tcp(&host, port)).into_iter().collect()
}

/// `[tcp|udp]:[HOST]:PORT-[GUEST]:PORT`
fn forward(rule: &str) -> Option<Endpoint> {
    let (protocol, rest) = rule.split_once(':')?;
    let (outside, _guest) = rest.rsplit_once('-')?;
    let (host, port) = host_and_port(outside)?;
    match protocol {
        "" | "tcp" => Some(Endpoint::tcp(&host, port)),
        "udp" => Some(Endpoint::Port { udp: true, host, port }),
        _ => None,
    }
}

/// `addr.type=inet,addr.host=...,addr.port=...` or `addr.type=unix,addr.path=...`
fn address(properties: &Properties, of: &str, udp: bool) -> Vec<Endpoint> {
    let text = |key: &str| properties.text(&format!("{of}.{key}"));
    let end = match text("type").as_deref() {
        Some("unix") => text("path").map(|path| Endpoint::Socket(path.into())),
        Some("inet") => text("port").and_then(|port| port.parse().ok()).map(|port| {
            let host = text("host").unwrap_or_default();
            Endpoint::Port { udp, host, port }
        }),
        _ => None,
    };
    end.into_iter().collect()
}
