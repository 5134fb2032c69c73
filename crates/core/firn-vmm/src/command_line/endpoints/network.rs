//! Ports and sockets of a network card's back end. They lead to the guest, so the user has to name
//! the replacements.

use super::{EndpointPaths, HostEndpoint, host_and_port};
use crate::command_line::arguments::{CommandArgument, split_words};
use crate::command_line::error::CommandLineError;
use crate::command_line::properties::OptionProperties;

/// Refuses a back end that needs an endpoint that another process has.
pub(super) fn check_netdev(
    argument: &CommandArgument,
    paths: &EndpointPaths<'_>,
) -> Result<(), CommandLineError> {
    let held = endpoints_of(argument).iter().find_map(|end| paths.find_holder(end));
    match held {
        Some(held) => Err(CommandLineError::Held { option: argument.to_string(), held }),
        None => Ok(()),
    }
}

/// The ports and sockets at which a back end listens.
pub(super) fn endpoints_of(argument: &CommandArgument) -> Vec<HostEndpoint> {
    let properties = OptionProperties::parse_value(argument.value(), "type");
    properties.map(|properties| netdev_endpoints(&properties)).unwrap_or_default()
}

fn netdev_endpoints(properties: &OptionProperties) -> Vec<HostEndpoint> {
    let text = |key: &str| properties.nested_text(key);
    let found = match properties.get("type").as_deref() {
        Some("user") => {
            return properties
                .list_values("hostfwd")
                .iter()
                .filter_map(|rule| forward_endpoint(rule))
                .collect();
        }
        Some("socket") => text("listen").and_then(|listen| host_and_port(&listen)),
        Some("stream") if properties.is_on("server") => {
            return address_endpoint(properties, "addr", false);
        }
        Some("dgram") => return address_endpoint(properties, "local", true),
        _ => None,
    };
    found.map(|(host, port)| HostEndpoint::tcp_port(&host, port)).into_iter().collect()
}

/// The rules by which ports of the host lead to the guest: `hostfwd` of user networking.
pub fn list_forwards(command: &[String]) -> Vec<String> {
    let arguments = split_words(command.get(1..).unwrap_or_default());
    let is_card = |argument: &&CommandArgument| matches!(argument.name(), "netdev" | "nic" | "net");
    let rules = arguments.iter().filter(is_card).filter_map(|argument| {
        let properties = OptionProperties::parse_value(argument.value(), "type")?;
        (properties.get("type").as_deref() == Some("user"))
            .then(|| properties.list_values("hostfwd"))
    });
    rules.flatten().map(|rule| rule.to_string()).collect()
}

/// `[tcp|udp]:[HOST]:PORT-[GUEST]:PORT`
fn forward_endpoint(rule: &str) -> Option<HostEndpoint> {
    let (protocol, rest) = rule.split_once(':')?;
    let (outside, _guest) = rest.rsplit_once('-')?;
    let (host, port) = host_and_port(outside)?;
    match protocol {
        "" | "tcp" => Some(HostEndpoint::tcp_port(&host, port)),
        "udp" => Some(HostEndpoint::Port { udp: true, host, port }),
        _ => None,
    }
}

/// `addr.type=inet,addr.host=...,addr.port=...` or `addr.type=unix,addr.path=...`
fn address_endpoint(properties: &OptionProperties, of: &str, udp: bool) -> Vec<HostEndpoint> {
    let text = |key: &str| properties.nested_text(&format!("{of}.{key}"));
    let end = match text("type").as_deref() {
        Some("unix") => text("path").map(|path| HostEndpoint::Socket(path.into())),
        Some("inet") => text("port").and_then(|port| port.parse().ok()).map(|port| {
            let host = text("host").unwrap_or_default();
            HostEndpoint::Port { udp, host, port }
        }),
        _ => None,
    };
    end.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_ports_are_those_of_user_networking() {
        let line = "qemu -netdev user,id=n,hostfwd=tcp:127.0.1.3:2222-:22,hostfwd=udp::53-:53 -device e1000,netdev=n \
                    -nic user,hostfwd=tcp::80-:80 -netdev tap,id=t -netdev user,id=m";
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let expected = ["tcp:127.0.1.3:2222-:22", "udp::53-:53", "tcp::80-:80"];
        assert_eq!(list_forwards(&words), expected);
        assert_eq!(list_forwards(&[]), Vec::<String>::new());
    }
}
