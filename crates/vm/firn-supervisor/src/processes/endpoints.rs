//! The [`HostEndpoint`]s of a command line that another process of this host uses, and that process.

use std::fs;
use std::io;
use std::net::{TcpListener, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use firn_vmm::command_line::HostEndpoint;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::processes::process_names::{self, ProcessName};
use crate::processes::unix_sockets;

/// The state of a listening socket in `/proc/net/tcp`.
const LISTENING: &str = "0A";

const UNKNOWN_PROCESS: &str = "another process";

/// The process that uses an endpoint, in words. Relative paths start in `directory`.
pub(crate) fn endpoint_holder(endpoint: &HostEndpoint, directory: &Path) -> Option<String> {
    match endpoint {
        HostEndpoint::Socket(path) => socket_holder(&directory.join(path)),
        HostEndpoint::File(path) => file_holder(&directory.join(path)),
        HostEndpoint::Port { udp, host, port } => {
            (!is_port_free(*udp, host, *port)).then(|| port_holder(*udp, *port))
        }
    }
}

fn describe_process(pid: Option<i32>) -> String {
    pid.map_or_else(|| UNKNOWN_PROCESS.to_owned(), |pid| ProcessName::with_id(pid).to_string())
}

/// The process that listens on a socket. A socket file without a listener is left when its QEMU is
/// killed, and is not in use.
fn socket_holder(path: &Path) -> Option<String> {
    path.metadata().ok().filter(|file| file.file_type().is_socket())?;
    let listeners = unix_sockets::find_users(path).unwrap_or_default().listeners;
    match listeners.is_empty() {
        false => Some(describe_process(process_names::find_socket_user(&listeners))),
        // The listener may be in another network namespace.
        true => accepts_connections(path).then(|| UNKNOWN_PROCESS.to_owned()),
    }
}

fn accepts_connections(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connect = || {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
    };
    matches!(connect(), Ok(()) | Err(Errno::AGAIN))
}

/// The hypervisor that has a log or a FIFO open. A terminal and `/dev/null` can be shared.
fn file_holder(path: &Path) -> Option<String> {
    let kind = path.metadata().ok()?.file_type();
    let pid = (kind.is_file() || kind.is_fifo()).then(|| process_names::hypervisor_with_file(path));
    Some(ProcessName::with_id(pid??).to_string())
}

/// Whether a port is free. QEMU reports all errors other than that it is in use.
fn is_port_free(udp: bool, host: &str, port: u16) -> bool {
    let host = if host.is_empty() { "0.0.0.0" } else { host };
    let Ok(mut addresses) = (host, port).to_socket_addrs() else { return true };
    let bind = |address| match udp {
        true => UdpSocket::bind(address).map(drop),
        false => TcpListener::bind(address).map(drop),
    };
    let is_taken =
        |bound: io::Result<()>| bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse);
    !addresses.any(|address| is_taken(bind(address)))
}

/// The process that uses a port, as far as it can be seen.
fn port_holder(udp: bool, port: u16) -> String {
    let tables = if udp { ["udp", "udp6"] } else { ["tcp", "tcp6"] };
    let tables = tables.map(|table| fs::read_to_string(format!("/proc/net/{table}")));
    let inodes = tables.iter().flatten().flat_map(|table| port_inodes(table, udp, port));
    describe_process(process_names::find_socket_user(&inodes.collect::<Vec<_>>()))
}

/// The inodes of the sockets at a port. The second word of a line is the local address, the fourth
/// the state, the tenth the inode.
fn port_inodes(table: &str, udp: bool, port: u16) -> Vec<u32> {
    let end = format!(":{port:04X}");
    let inode = |line: &str| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let is_it = words.get(1)?.ends_with(&end) && (udp || words.get(3) == Some(&LISTENING));
        words.get(9).filter(|_| is_it)?.parse().ok()
    };
    table.lines().filter_map(inode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    fn me() -> String {
        ProcessName::with_id(std::process::id() as i32).to_string()
    }

    #[test]
    fn a_socket_is_held_while_a_process_listens_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let endpoint = HostEndpoint::Socket("s".into());
        assert_eq!(endpoint_holder(&endpoint, dir.path()), None);
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(endpoint_holder(&endpoint, dir.path()), Some(me()));
        assert!(accepts_connections(&path));
        drop(listener);
        assert!(path.exists());
        assert_eq!(endpoint_holder(&endpoint, dir.path()), None);
    }

    #[test]
    fn a_port_is_held_while_a_process_listens_there() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["", "127.0.0.1", "localhost"] {
            let endpoint = HostEndpoint::Port { udp: false, host: host.into(), port };
            assert_eq!(endpoint_holder(&endpoint, Path::new("/")), Some(me()), "{host}");
        }
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let udp = HostEndpoint::Port { udp: true, host: String::new(), port };
        assert_eq!(endpoint_holder(&udp, Path::new("/")), Some(me()));
        drop(socket);
        assert_eq!(endpoint_holder(&udp, Path::new("/")), None);
    }

    #[test]
    fn a_file_that_no_hypervisor_has_is_free() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for path in [file.path(), Path::new("/dev/null"), Path::new("none")] {
            assert_eq!(
                endpoint_holder(&HostEndpoint::File(PathBuf::from(path)), Path::new("/")),
                None
            );
        }
    }
}
