//! Displays that clients connect to: VNC and SPICE.

use super::{EndpointPaths, HostEndpoint, MovedValue};
use crate::command_line::properties::OptionProperties;

/// The port of VNC display 0, and that of its web socket.
const VNC_PORT: u16 = 5900;
const WEB_PORT: u16 = 5700;

/// `-vnc DISPLAY,PROPERTY,...`. With `to=` QEMU finds a free display itself.
pub(super) fn relocate_vnc(value: &str, paths: &mut EndpointPaths<'_>) -> Option<MovedValue> {
    let mut properties = OptionProperties::parse_value(value, "vnc")?;
    if properties.is_on("reverse") || properties.get("to").is_some() {
        return None;
    }
    let display = properties.get("vnc")?.into_owned();
    let held = vnc_endpoints(&display, &properties)?.iter().find_map(|it| paths.find_holder(it))?;
    let path = paths.socket_path(display.strip_prefix("unix:").unwrap_or("vnc"));
    properties.remove("websocket");
    properties.set("vnc", &format!("unix:{path}"));
    Some(MovedValue { value: properties.to_text("vnc"), held })
}

fn vnc_endpoints(display: &str, properties: &OptionProperties) -> Option<Vec<HostEndpoint>> {
    if let Some(path) = display.strip_prefix("unix:") {
        return Some(vec![HostEndpoint::Socket(path.into())]);
    }
    let (host, number) = display.rsplit_once(':')?;
    let number: u16 = number.parse().ok()?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let web = match properties.get("websocket").as_deref() {
        None | Some("off") => None,
        Some("on") => Some(WEB_PORT.checked_add(number)?),
        Some(port) => port.parse().ok(),
    };
    let ports = [Some(VNC_PORT.checked_add(number)?), web];
    Some(ports.into_iter().flatten().map(|port| HostEndpoint::tcp_port(host, port)).collect())
}

/// `-display vnc=DISPLAY,PROPERTY,...`
pub(super) fn relocate_display(value: &str, paths: &mut EndpointPaths<'_>) -> Option<MovedValue> {
    let MovedValue { value, held } = relocate_vnc(value.strip_prefix("vnc=")?, paths)?;
    Some(MovedValue { value: format!("vnc={value}"), held })
}

/// `-spice port=...,tls-port=...,addr=...`, or `unix=on,addr=PATH`.
pub(super) fn relocate_spice(value: &str, paths: &mut EndpointPaths<'_>) -> Option<MovedValue> {
    let mut properties = OptionProperties::parse_value(value, "")?;
    let address = properties.get("addr").unwrap_or_default().into_owned();
    let ends = match properties.is_on("unix") {
        true => vec![HostEndpoint::Socket(address.clone().into())],
        false => {
            let ports = ["port", "tls-port"].map(|key| properties.get(key)?.parse().ok());
            ports.into_iter().flatten().map(|port| HostEndpoint::tcp_port(&address, port)).collect()
        }
    };
    let held = ends.iter().find_map(|end| paths.find_holder(end))?;
    let name = if properties.is_on("unix") { &*address } else { "spice" };
    ["port", "tls-port", "ipv4", "ipv6"].iter().for_each(|key| properties.remove(key));
    properties.turn_on("unix");
    properties.set("addr", &paths.socket_path(name));
    Some(MovedValue { value: properties.to_text(""), held })
}
