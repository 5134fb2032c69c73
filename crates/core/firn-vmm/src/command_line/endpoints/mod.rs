//! Relocation of endpoints, which only one QEMU can have: sockets and ports that QEMU listens on,
//! files that QEMU writes.
//!
//! A second VM with the same command line would take them from the first: QEMU removes an existing
//! socket file, and empties a log. So a restored VM gets, in place of each endpoint that another
//! process has, one in a directory of its own:
//!
//! ```text
//!   -qmp unix:/run/a.qmp,server=on          -qmp unix:DIR/user-a.qmp,server=on,wait=off
//!   -chardev socket,id=c,port=4444,server=on,telnet=on    -chardev socket,id=c,path=DIR/user-c,server=on,wait=off
//!   -chardev file,id=l,path=/var/log/a      -chardev file,id=l,path=DIR/user-a
//!   -vnc :1                                 -vnc unix:DIR/user-vnc
//!   -pidfile /run/a.pid                     -pidfile DIR/user-a.pid
//! ```
//!
//! No option is removed: the machine would be another without its serial port. An endpoint that no
//! other process has stays, so that a VM that is restored after its end has its sockets at their
//! paths. A port that leads to the guest (`hostfwd`) has no such replacement, and is an error.
//!
//! Source: QEMU `qemu-options.hx`, `chardev/char.c` (`qemu_chr_parse_compat`), `ui/vnc.c`,
//! `ui/spice-core.c`, `net/slirp.c`.

mod chardev;
mod displays;
mod network;

pub use network::list_forwards;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use super::arguments::CommandArgument;
use super::error::CommandLineError;
use super::properties::OptionProperties;

/// The maximum length of a unix socket's path in bytes: `sun_path` of unix(7), less its final zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The prefix of the name of a file that replaces one of the user's.
const NAME_PREFIX: &str = "user-";

/// A resource of a host that only one QEMU can have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostEndpoint {
    /// A socket file that QEMU listens on, as the command line names it.
    Socket(PathBuf),
    /// A port that QEMU listens on.
    Port {
        /// UDP, or else TCP.
        udp: bool,
        /// The address, as the command line names it; empty for all.
        host: String,
        /// The port.
        port: u16,
    },
    /// A file that QEMU writes, or a FIFO, as the command line names it.
    File(PathBuf),
}

impl fmt::Display for HostEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) | Self::File(path) => path.display().fmt(f),
            Self::Port { udp, host, port } => {
                let protocol = if *udp { "UDP" } else { "TCP" };
                let at = if host.is_empty() { String::new() } else { format!(" of {host}") };
                write!(f, "{protocol} port {port}{at}")
            }
        }
    }
}

impl HostEndpoint {
    fn tcp_port(host: &str, port: u16) -> Self {
        Self::Port { udp: false, host: host.to_owned(), port }
    }
}

/// The replacements for a VM whose endpoints may be in use.
pub struct EndpointRelocation<'a> {
    /// A directory of its own.
    pub directory: &'a Path,
    /// Names the process that has an endpoint, if one has.
    pub holder: &'a dyn Fn(&HostEndpoint) -> Option<String>,
}

/// Replaces endpoints of arguments that are in use; returns a note for each.
pub(super) fn relocate_endpoints(
    arguments: &mut [CommandArgument],
    beside: &EndpointRelocation<'_>,
) -> Result<Vec<String>, CommandLineError> {
    let mut paths = EndpointPaths { beside, used: BTreeSet::new() };
    let mut notes = Vec::new();
    for argument in arguments {
        let Some((new, held)) = relocate_argument(argument, &mut paths)? else { continue };
        notes.push(format!("{argument} is now {new}: {held}"));
        *argument = new;
    }
    Ok(notes)
}

/// The ports and sockets at which the back ends of network cards listen.
pub(super) fn network_endpoints(arguments: &[CommandArgument]) -> Vec<HostEndpoint> {
    let is_card = |argument: &&CommandArgument| is_network_option(argument.name());
    arguments.iter().filter(is_card).flat_map(network::endpoints_of).collect()
}

fn is_network_option(name: &str) -> bool {
    matches!(name, "netdev" | "nic" | "net")
}

/// The argument with other endpoints, and the reason; `None` if it can stay.
fn relocate_argument(
    argument: &CommandArgument,
    paths: &mut EndpointPaths<'_>,
) -> Result<Option<(CommandArgument, String)>, CommandLineError> {
    let (name, value) = (argument.name(), argument.value());
    let new = match name {
        "qmp" | "qmp-pretty" | "monitor" | "serial" | "parallel" | "debugcon" | "qtest" => {
            chardev::relocate_short(value, false, paths)
        }
        "gdb" => chardev::relocate_short(value, true, paths),
        "s" => return Ok(relocate_gdb(paths)),
        "chardev" => chardev::relocate_chardev(value, paths),
        "vnc" => displays::relocate_vnc(value, paths),
        "display" => displays::relocate_display(value, paths),
        "spice" => displays::relocate_spice(value, paths),
        "pidfile" | "D" => relocate_file(value, paths),
        "trace" => file_property(value, "enable", "file", paths),
        "audiodev" => file_property(value, "driver", "path", paths),
        "object" => file_property(value, "qom-type", "file", paths),
        name if is_network_option(name) => {
            network::check_netdev(argument, paths)?;
            None
        }
        _ => None,
    };
    Ok(new.map(|MovedValue { value, held }| (CommandArgument::new(name, value), held)))
}

/// A new value of an option, and the reason.
struct MovedValue {
    value: String,
    held: String,
}

/// `-s` is `-gdb tcp::1234`.
fn relocate_gdb(paths: &mut EndpointPaths<'_>) -> Option<(CommandArgument, String)> {
    let MovedValue { value, held } = chardev::relocate_short("tcp::1234", true, paths)?;
    Some((CommandArgument::new("gdb", value), held))
}

/// An option whose value is a file.
fn relocate_file(value: &str, paths: &mut EndpointPaths<'_>) -> Option<MovedValue> {
    let held = paths.find_holder(&HostEndpoint::File(value.into()))?;
    Some(MovedValue { value: paths.file_path(value), held })
}

/// An option that has a file among its properties. Of `-object`, only a `filter-dump` writes to its
/// file.
fn file_property(
    value: &str,
    implied: &str,
    key: &str,
    paths: &mut EndpointPaths<'_>,
) -> Option<MovedValue> {
    let mut properties = OptionProperties::parse_value(value, implied)?;
    let kind = properties.get("qom-type").map(String::from);
    if kind.is_some_and(|kind| kind != "filter-dump") {
        return None;
    }
    let path = properties.get(key)?.into_owned();
    let held = paths.find_holder(&HostEndpoint::File(path.clone().into()))?;
    properties.set(key, &paths.file_path(&path));
    Some(MovedValue { value: properties.to_text(implied), held })
}

/// Assigns unique paths in the VM's directory.
struct EndpointPaths<'a> {
    beside: &'a EndpointRelocation<'a>,
    used: BTreeSet<String>,
}

impl EndpointPaths<'_> {
    /// The reason why an endpoint is unavailable; `None` if it is available.
    fn find_holder(&self, endpoint: &HostEndpoint) -> Option<String> {
        let holder = (self.beside.holder)(endpoint)?;
        Some(format!("{endpoint} is in use by {holder}"))
    }

    /// A path for a socket.
    fn socket_path(&mut self, name: &str) -> String {
        let path = self.file_path(name);
        match path.len() > SOCKET_PATH_BYTES_MAX {
            true => self.file_path(&self.used.len().to_string()),
            false => path,
        }
    }

    /// A path for a file, with the name of the file it replaces, or a given word.
    fn file_path(&mut self, path: &str) -> String {
        let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let numbered = (2..).map(|number| format!("{name}-{number}"));
        let mut names = std::iter::once(name.clone()).chain(numbered);
        let free = names.find(|name| !self.used.contains(name)).unwrap_or_default();
        let path = self.beside.directory.join(format!("{NAME_PREFIX}{free}"));
        self.used.insert(free);
        path.to_string_lossy().into_owned()
    }
}

/// `HOST:PORT`; the host may be empty, or an IPv6 address in brackets.
fn host_and_port(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    Some((host.to_owned(), port.parse().ok()?))
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
