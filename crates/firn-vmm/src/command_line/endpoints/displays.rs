//! Displays that clients connect to: VNC and SPICE.

use super::{Endpoint, Moved, Places};
use crate::command_line::properties::Properties;

/// The port of VNC display 0, and that of its web socket.
const VNC_PORT: u16 = 5900;
const WEB_PORT: u16 = 5700;

/// `-vnc DISPLAY,PROPERTY,...`. With `to=` QEMU finds a free display itself.
pub(super) fn vnc(value: &str, places: &mut Places<'_>) -> Option<Moved> {
    let mut properties = Properties::read(value, "vnc")?;
    if properties.is_on("reverse") || properties.get("to").is_some() {
        return None;
    }
    let display = properties.get("vnc")?.into_owned();
    let held = ends_of_vnc(&display, &properties)?.iter().find_map(|it| places.held(it))?;
    let path = places.socket(display.strip_prefix("unix:").unwrap_or("vnc"));
    properties.remove("websocket");
    properties.set("vnc", &format!("unix:{path}"));
    Some(Moved { value: properties.to_text("vnc"), held })
}

fn ends_of_vnc(display: &str, properties: &Properties) -> Option<Vec<Endpoint>> {
    if let Some(path) = display.strip_prefix("unix:") {
        return Some(vec![Endpoint::Socket(path.into())]);
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
    Some(ports.into_iter().flatten().map(|port| Endpoint::tcp(host, port)).collect())
}

/// `-display vnc=DISPLAY,PROPERTY,...`
pub(super) fn display(value: &str, places: &mut Places<'_>) -> Option<Moved> {
    let Moved { value, held } = vnc(value.strip_prefix("vnc=")?, places)?;
    Some(Moved { value: format!("vnc={value}"), held })
}

/// `-spice port=...,tls-port=...,addr=...`, or `unix=on,addr=PATH`.
pub(super) fn spice(value: &str, places: &mut Places<'_>) -> Option<Moved> {
    let mut properties = Properties::read(value, "")?;
    let address = properties.get("addr").unwrap_or_default().into_owned();
    let ends = match properties.is_on("unix") {
        true => vec![Endpoint::Socket(address.clone().into())],
        false => {
            let ports = ["port", "tls-port"].map(|key| properties.get(key)?.parse().ok());
            ports.into_iter().flatten().map(|port| Endpoint::tcp(&address, port)).collect()
        }
    };
    let held = ends.iter().find_map(|end| places.held(end))?;
    let name = if properties.is_on("unix") { &*address } else { "spice" };
    ["port", "tls-port", "ipv4", "ipv6"].iter().for_each(|key| properties.remove(key));
    properties.turn_on("unix");
    properties.set("addr", &places.socket(name));
    Some(Moved { value: properties.to_text(""), held })
}
