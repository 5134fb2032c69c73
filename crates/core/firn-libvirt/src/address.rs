//! Where a domain is: the socket of its daemon, and its UUID.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::LibvirtError;

/// The sockets of the two daemons that can run QEMU: virtqemud, which runs only QEMU, and libvirtd,
/// which runs every hypervisor.
const SOCKET_NAMES: [&str; 2] = ["virtqemud-sock", "libvirt-sock"];

/// The directory of the system's sockets.
const SYSTEM_DIRECTORY: &str = "/run/libvirt";

/// A daemon of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonAddress {
    /// The driver that it is asked to open: `qemu:///system` or `qemu:///session`.
    pub driver: String,
    /// Its socket.
    pub socket: PathBuf,
}

/// A domain of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainAddress {
    /// Its daemon.
    #[serde(flatten)]
    pub daemon: DaemonAddress,
    /// Its UUID.
    pub uuid: String,
    /// Its name when Firn found it. A domain can be renamed.
    pub domain: String,
}

impl DaemonAddress {
    /// The daemon that a libvirt URI names. `session_directory` is the directory of this user's
    /// sockets, if there is one.
    ///
    /// # Errors
    /// If the URI names another host or another hypervisor.
    pub fn from_uri(uri: &str, session_directory: Option<&Path>) -> Result<Self, LibvirtError> {
        let bad = || LibvirtError::Uri { uri: uri.to_owned() };
        let (plain, query) = uri.split_once('?').unwrap_or((uri, ""));
        let path = ["qemu://", "qemu+unix://"].iter().find_map(|it| plain.strip_prefix(it));
        let is_system = match path {
            Some("/system") => true,
            Some("/session") => false,
            _ => return Err(bad()),
        };
        let named = query.split('&').find_map(|pair| pair.strip_prefix("socket="));
        let system = || Some(PathBuf::from(SYSTEM_DIRECTORY));
        let session = || session_directory.map(Path::to_owned);
        let socket = match named {
            Some(socket) => PathBuf::from(socket),
            None => choose_socket(&if is_system { system() } else { session() }.ok_or_else(bad)?),
        };
        let driver = if is_system { "qemu:///system" } else { "qemu:///session" };
        Ok(Self { driver: driver.to_owned(), socket })
    }

    /// The daemon of this URI. Without a URI, the daemon that `virsh` would use: that of
    /// `LIBVIRT_DEFAULT_URI`, or the system's for root, or that of this user's session.
    ///
    /// # Errors
    /// As with [`Self::from_uri`].
    pub fn from_uri_or_environment(uri: Option<&str>) -> Result<Self, LibvirtError> {
        let set = std::env::var("LIBVIRT_DEFAULT_URI").ok().filter(|uri| !uri.is_empty());
        let is_root = rustix::process::geteuid().is_root();
        let usual = if is_root { "qemu:///system" } else { "qemu:///session" };
        let uri = uri.or(set.as_deref()).unwrap_or(usual);
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let session = runtime.filter(|it| it.is_absolute()).map(|it| it.join("libvirt"));
        Self::from_uri(uri, session.as_deref())
    }
}

/// The first socket that exists, or libvirtd's if none does: connecting to it then fails with an
/// error that names it.
fn choose_socket(directory: &Path) -> PathBuf {
    let mut sockets = SOCKET_NAMES.iter().map(|name| directory.join(name));
    let last = directory.join(SOCKET_NAMES[SOCKET_NAMES.len() - 1]);
    sockets.find(|socket| socket.exists()).unwrap_or(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_names_a_socket() {
        let session = Path::new("/nowhere/libvirt");
        let of = |uri| DaemonAddress::from_uri(uri, Some(session)).unwrap();
        let named = of("qemu+unix:///system?mode=direct&socket=/run/own.sock");
        assert_eq!(named.driver, "qemu:///system");
        assert_eq!(named.socket, Path::new("/run/own.sock"));
        assert_eq!(of("qemu:///session").socket, session.join("libvirt-sock"));
        let is_refused = |uri| DaemonAddress::from_uri(uri, None).is_err();
        for uri in
            ["qemu+ssh://host/system", "qemu://host/system", "xen:///", "", "qemu:///session"]
        {
            assert!(is_refused(uri), "{uri}");
        }
    }

    #[test]
    fn a_modular_daemon_comes_first() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["libvirt-sock", "virtqemud-sock"] {
            std::fs::write(directory.path().join(name), "").unwrap();
            assert_eq!(choose_socket(directory.path()), directory.path().join(name));
        }
    }
}
