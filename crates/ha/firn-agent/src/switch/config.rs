//! The networks of a configuration.
//!
//! ```toml
//! [networks.lan]                   # VMs of all hosts that have a network of this name
//! uplink = "/run/passt.sock"       # optional: connection to the outside, QEMU's stream framing
//!
//! [networks.dmz]
//! tap = "tap0"                     # or a tap device, which may belong to a bridge
//! ```

use std::fmt;
use std::path::{Path, PathBuf};

use firn_supervisor::NetworkName;
use serde::Deserialize;
use thiserror::Error;

/// Maximum number of networks of one host: each has a connection to each peer.
pub(crate) const NETWORKS_MAX: usize = 16;

/// The longest name of a network device, in bytes: `IFNAMSIZ` of netdevice(7), less its final zero.
const DEVICE_BYTES_MAX: usize = 15;

/// What is wrong with the configuration of a network.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NetworkError {
    /// It has two uplinks.
    #[error("networks.{0}: give uplink or tap, not both")]
    Both(NetworkName),
    /// No device can have this name.
    #[error(
        "networks.{network}: tap: {device:?} is no name of a device: give 1 to {DEVICE_BYTES_MAX} characters without '/' and spaces"
    )]
    Device {
        /// The network.
        network: NetworkName,
        /// Its uplink.
        device: String,
    },
    /// There are too many networks.
    #[error("networks: there are {0}, of at most {NETWORKS_MAX}")]
    Many(usize),
}

/// A network of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkConfig {
    /// Its connection to the outside, if it has one.
    pub uplink: Option<Uplink>,
}

/// The connection of a network to the outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uplink {
    /// A Unix socket to connect to, such as passt's.
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

/// A network in the configuration file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct FileNetwork {
    uplink: Option<PathBuf>,
    tap: Option<String>,
}

impl FileNetwork {
    /// Checks it, and resolves paths against the configuration's directory.
    pub(crate) fn into_config(
        self,
        name: &NetworkName,
        directory: &Path,
    ) -> Result<NetworkConfig, NetworkError> {
        let uplink = match (self.uplink, self.tap) {
            (Some(_), Some(_)) => return Err(NetworkError::Both(name.clone())),
            (Some(path), None) => Some(Uplink::Socket(directory.join(path))),
            (None, Some(device)) => Some(Uplink::Tap(check_device_name(name, device)?)),
            (None, None) => None,
        };
        Ok(NetworkConfig { uplink })
    }
}

fn check_device_name(network: &NetworkName, device: String) -> Result<String, NetworkError> {
    let is_plain = |c: char| !c.is_whitespace() && !c.is_control() && c != '/' && c != '%';
    match (1..=DEVICE_BYTES_MAX).contains(&device.len()) && device.chars().all(is_plain) {
        true => Ok(device),
        false => Err(NetworkError::Device { network: network.clone(), device }),
    }
}
