//! Serial ports and virtual consoles of a guest whose other end is a Unix socket that QEMU listens
//! on.
//!
//! ```text
//!   -serial unix:/run/a.tty,server=on                                       serial0 at /run/a.tty
//!   -chardev socket,id=tty,path=/run/a.tty,server=on -serial chardev:tty    tty at /run/a.tty
//!   -chardev socket,id=tty,... -device isa-serial,chardev=tty               tty at /run/a.tty
//!   -serial stdio                                                           none: no socket
//! ```
//!
//! Source: QEMU `qemu-options.hx` (`-serial`, `-chardev`).

use std::path::PathBuf;

use super::arguments::{self, CommandArgument};
use super::properties::OptionProperties;

/// Drivers of serial ports and of paravirtual consoles.
const CONSOLE_DRIVERS: &[&str] = &["isa-serial", "pci-serial", "usb-serial", "virtconsole"];

/// The port at which the guest agent listens (QEMU `docs/interop/qemu-ga.rst`).
const AGENT_PORT: &str = "org.qemu.guest_agent.0";

/// A console of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestConsole {
    /// The id of its character device; `serialN` for the short form of `-serial`.
    pub id: String,
    /// The socket that QEMU listens on, as the command line names it.
    pub socket: PathBuf,
}

/// Finds the consoles that a command line (the program first) makes, in their order.
pub fn find_consoles(command: &[String]) -> Vec<GuestConsole> {
    let arguments = arguments::split_words(command.get(1..).unwrap_or_default());
    let sockets: Vec<GuestConsole> = arguments.iter().filter_map(chardev_socket).collect();
    let find_chardev = |id: &str| sockets.iter().find(|socket| socket.id == id).cloned();
    let mut port = 0;
    let consoles = arguments.iter().filter_map(|argument| match argument.name() {
        "serial" => {
            let short = short_socket(argument.value(), port);
            port += 1;
            short.or_else(|| find_chardev(argument.value().strip_prefix("chardev:")?))
        }
        "device" => find_chardev(&console_chardev(argument.value())?),
        _ => None,
    });
    consoles.collect()
}

/// The socket of the guest agent, if QEMU serves one: a virtio serial port of that name.
pub fn find_agent_socket(command: &[String]) -> Option<PathBuf> {
    let arguments = arguments::split_words(command.get(1..).unwrap_or_default());
    let ports = arguments.iter().filter(|argument| argument.name() == "device");
    let id = ports.into_iter().find_map(|argument| agent_chardev(argument.value()))?;
    let mut sockets = arguments.iter().filter_map(chardev_socket);
    sockets.find(|socket| socket.id == id).map(|socket| socket.socket)
}

/// The chardev of a `-device` that is the port of the guest agent.
fn agent_chardev(value: &str) -> Option<String> {
    let properties = OptionProperties::parse_value(value, "driver")?;
    let is = |key: &str, value: &str| properties.get(key).as_deref() == Some(value);
    let is_agent = is("driver", "virtserialport") && is("name", AGENT_PORT);
    is_agent.then(|| properties.get("chardev").map(|id| id.into_owned())).flatten()
}

/// The chardev of a `-device` that is a console.
fn console_chardev(value: &str) -> Option<String> {
    let properties = OptionProperties::parse_value(value, "driver")?;
    let driver = properties.get("driver")?;
    CONSOLE_DRIVERS
        .contains(&&*driver)
        .then(|| properties.get("chardev").map(|id| id.into_owned()))
        .flatten()
}

/// A `-chardev` that listens on a Unix socket.
fn chardev_socket(argument: &CommandArgument) -> Option<GuestConsole> {
    let value = (argument.name() == "chardev").then(|| argument.value())?;
    let properties = OptionProperties::parse_value(value, "backend")?;
    let is_socket = properties.get("backend").as_deref() == Some("socket");
    let listens = is_socket && properties.is_on("server");
    let (id, path) = (properties.get("id")?, properties.get("path")?);
    listens.then(|| GuestConsole { id: id.into_owned(), socket: path.as_ref().into() })
}

/// The short form of a serial port: `unix:PATH,server=on`, also with a monitor (`mon:`).
fn short_socket(value: &str, port: usize) -> Option<GuestConsole> {
    let value = value.strip_prefix("mon:").unwrap_or(value).strip_prefix("unix:")?;
    let properties = OptionProperties::parse_value(value, "address")?;
    let path = properties.get("address")?;
    properties
        .is_on("server")
        .then(|| GuestConsole { id: format!("serial{port}"), socket: path.as_ref().into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(command: &str) -> Vec<(String, String)> {
        let words: Vec<String> = command.split(' ').map(str::to_owned).collect();
        let consoles = find_consoles(&words).into_iter();
        consoles.map(|it| (it.id, it.socket.to_str().unwrap().to_owned())).collect()
    }

    #[test]
    fn every_form_of_a_console_with_a_socket_is_found() {
        let is = |id: &str, path: &str| vec![(id.to_owned(), path.to_owned())];
        let socket = "-chardev socket,id=c,path=/c,server=on,wait=off";
        for (command, expected) in [
            ("qemu -serial unix:/a,server=on,wait=off".to_owned(), is("serial0", "/a")),
            ("qemu -serial stdio -serial mon:unix:/a,server".to_owned(), is("serial1", "/a")),
            (format!("qemu -serial chardev:c {socket}"), is("c", "/c")),
            (format!("qemu {socket} -device isa-serial,chardev=c"), is("c", "/c")),
            (format!("qemu {socket} -device virtconsole,chardev=c,bus=b"), is("c", "/c")),
        ] {
            assert_eq!(found(&command), expected, "{command}");
        }
    }

    #[test]
    fn the_socket_of_the_guest_agent_is_found() {
        let socket = "-chardev socket,id=a,path=/a,server=on -device virtio-serial";
        let find = |command: String| {
            let words: Vec<String> = command.split(' ').map(str::to_owned).collect();
            find_agent_socket(&words).map(|path| path.to_str().unwrap().to_owned())
        };
        let port = "-device virtserialport,chardev=a,name=org.qemu.guest_agent.0";
        assert_eq!(find(format!("qemu {socket} {port}")), Some("/a".to_owned()));
        assert_eq!(find(format!("qemu {port}")), None);
        assert_eq!(find(format!("qemu {socket} -device virtserialport,chardev=a,name=x")), None);
    }

    #[test]
    fn a_device_without_a_socket_is_no_console() {
        for command in [
            "qemu",
            "qemu -serial stdio",
            "qemu -serial unix:/a",
            "qemu -serial chardev:x",
            "qemu -chardev socket,id=c,path=/c -serial chardev:c",
            "qemu -chardev socket,id=c,path=/c,server=on -mon chardev=c",
            "qemu -chardev socket,id=c,path=/c,server=on -device virtserialport,chardev=c",
            "qemu -chardev socket,id=c,host=h,port=1,server=on -serial chardev:c",
        ] {
            assert_eq!(found(command), [], "{command}");
        }
    }
}
