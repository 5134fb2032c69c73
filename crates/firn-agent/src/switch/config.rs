//! What the configuration says of networks.
//!
//! ```toml
//! [networks.lan]                   # VMs of all hosts that have a network of this name
//! uplink = "/run/passt.sock"       # may be left out: a way out of it, by a socket with QEMU's stream framing
//!
//! [networks.dmz]
//! tap = "tap0"                     # or by a tap device, which may be one of a bridge
//! ```

use std::fmt;
use std::path::{Path, PathBuf};

use firn_supervisor::NetworkName;
use serde::Deserialize;
use thiserror::Error;

/// Most networks of one host: each has a connection to each peer.
pub(crate) const NETWORKS_MAX: usize = 16;

/// The longest name of a network device, in bytes: `IFNAMSIZ` of netdevice(7), less its final zero.
const DEVICE_BYTES_MAX: usize = 15;

/// What is wrong with a network.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NetworkError {
    /// It has two uplinks.
    #[error("networks.{0}: give uplink or tap, not both")]
    Both(NetworkName),
    /// A device can't be called that.
    #[error(
        "networks.{network}: tap: {device:?} is no name of a device: give 1 to {DEVICE_BYTES_MAX} characters without '/' and spaces"
    )]
    Device {
        /// The network.
        network: NetworkName,
        /// Its uplink.
        device: String,
    },
    /// Too many.
    #[error("networks: there are {0}, of at most {NETWORKS_MAX}")]
    Many(usize),
}

/// A network of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkConfig {
    /// The way out of it, if there is one.
    pub uplink: Option<Uplink>,
}

/// The way out of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uplink {
    /// A Unix socket that is connected to, such as passt's.
    Socket(PathBuf),
    /// A tap device of this host.
    Tap(String),
}

impl fmt::Display for Uplink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(f),
            Self::Tap(device) => write!(f, "tap {device}"),
        }
    }
}

/// A network as the file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct FileNetwork {
    uplink: Option<PathBuf>,
    tap: Option<String>,
}

impl FileNetwork {
    /// What it means in a configuration of that directory.
    pub(crate) fn read(
        self,
        name: &NetworkName,
        directory: &Path,
    ) -> Result<NetworkConfig, NetworkError> {
        let uplink = match (self.uplink, self.tap) {
            (Some(_), Some(_)) => return Err(NetworkError::Both(name.clone())),
            (Some(path), None) => Some(Uplink::Socket(directory.join(path))),
            (None, Some(device)) => Some(Uplink::Tap(checked(name, device)?)),
            (None, None) => None,
        };
        Ok(NetworkConfig { uplink })
    }
}

fn checked(network: &NetworkName, device: String) -> Result<String, NetworkError> {
    let is_plain = |c: char| !c.is_whitespace() && !c.is_control() && c != '/' && c != '%';
    match (1..=DEVICE_BYTES_MAX).contains(&device.len()) && device.chars().all(is_plain) {
        true => Ok(device),
        false => Err(NetworkError::Device { network: network.clone(), device }),
    }
}
