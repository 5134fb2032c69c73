//! How the monitor of a VM is reached.

use std::fmt;
use std::path::{Path, PathBuf};

use firn_libvirt::DomainAddress;
use serde::{Deserialize, Serialize};

/// The monitor of a VM: a socket of QEMU's, or a domain of libvirt, which holds the only monitor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MonitorAddress {
    /// QEMU's monitor socket.
    Socket(PathBuf),
    /// A domain, whose commands libvirt executes.
    Domain(DomainAddress),
}

impl MonitorAddress {
    /// The monitor socket, if QEMU has one for Firn.
    pub fn socket(&self) -> Option<&Path> {
        match self {
            Self::Socket(socket) => Some(socket),
            Self::Domain(_) => None,
        }
    }

    /// The domain, if libvirt holds the monitor.
    pub fn domain(&self) -> Option<&DomainAddress> {
        match self {
            Self::Socket(_) => None,
            Self::Domain(domain) => Some(domain),
        }
    }
}

impl From<PathBuf> for MonitorAddress {
    fn from(socket: PathBuf) -> Self {
        Self::Socket(socket)
    }
}

impl fmt::Display for MonitorAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(socket) => write!(f, "{}", socket.display()),
            Self::Domain(it) => {
                write!(f, "libvirt ({}), domain {}", it.daemon.driver, it.domain)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_of_before_names_a_socket() {
        let socket: MonitorAddress = serde_json::from_str("\"/run/web.qmp\"").unwrap();
        assert_eq!(socket.socket(), Some(Path::new("/run/web.qmp")));
        let text =
            r#"{"driver": "qemu:///system", "socket": "/run/s", "uuid": "u", "domain": "web"}"#;
        let domain: MonitorAddress = serde_json::from_str(text).unwrap();
        assert_eq!(domain.to_string(), "libvirt (qemu:///system), domain web");
        let written = serde_json::to_string(&domain).unwrap();
        assert_eq!(serde_json::from_str::<MonitorAddress>(&written).unwrap(), domain);
    }
}
