//! The configuration file: this host, where it listens, and its peers.
//!
//! ```toml
//! name = "a"                       # this host; its certificate is for this name
//! listen = "10.0.0.1:7415"         # for the peers; a host alone needs neither this nor certificates
//! certificate = "a.pem"            # paths are relative to this file
//! key = "a.key"                    # for the owner alone
//! authority = "ca.pem"             # the authority that has issued all certificates
//! metrics = "127.0.0.1:9415"       # optional; reachable from this host only
//! runtime-dir = "/run/firn"        # optional: as for firn(1)
//! page-actions = true              # optional: the page can move VMs, fail them over, drain hosts
//! page-clients = ["ops"]           # optional: whose certificates open the page, besides those of hosts
//!
//! [peers]
//! b = "10.0.0.2:7415"              # its certificate must be for "b", whatever its address
//!
//! [networks.lan]                   # optional: a network between VMs, on all hosts that name it
//! uplink = "/run/passt.sock"       # a socket with QEMU's stream framing, or tap = "tap0"
//!
//! [membership]                     # optional; see `membership`
//! servers = ["a", "b", "c"]
//! state-dir = "/var/lib/firn"
//! ```
//!
//! An agent has no other state: at its start it observes the VMs of its host. Which host a
//! standby's primary runs on is stored with the VM ([`firn_control::paths`]).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use firn_control::{HostName, HostNameError};
use firn_supervisor::NetworkName;
use serde::Deserialize;
use thiserror::Error;

use crate::membership::options::{MembershipOptions, MembershipSection};
use crate::switch::config::{FileNetwork, NETWORKS_MAX, NetworkConfig, NetworkError};

/// Maximum number of peers: each is asked twice a second.
const PEERS_MAX: usize = 64;

/// Maximum number of clients of the page.
const PAGE_CLIENTS_MAX: usize = 64;

/// Maximum size of the file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What is wrong with a configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file, or a file that it names, can't be read.
    #[error("can't read {path}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It is no TOML, or has an unknown or a missing field.
    #[error("{path}, line {line}: {reason}", path = .path.display())]
    Toml {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong there.
        reason: String,
    },
    /// A name is not valid.
    #[error("{field}")]
    Name {
        /// The field with the name.
        field: &'static str,
        /// Why the name is not valid.
        source: HostNameError,
    },
    /// An address is not valid.
    #[error("{field}: {address:?} is no address: give {form}")]
    Address {
        /// The field with the address.
        field: String,
        /// The value of the field.
        address: String,
        /// The expected form.
        form: &'static str,
    },
    /// The address for metrics can be reached from other hosts.
    #[error(
        "metrics: {0} can be reached from elsewhere: give an address of this host alone, such as 127.0.0.1:9415"
    )]
    Exposed(SocketAddr),
    /// A host is no peer of itself.
    #[error("peers: {0} is this host")]
    Oneself(HostName),
    /// A network is not valid.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// A part of what connections of other hosts need is missing.
    #[error(
        "listen, certificate, key and authority belong together: a host with peers, page-clients or a [membership] needs all of them, \
         a host alone none"
    )]
    NoEntrance,
    /// There are too many peers.
    #[error("peers: there are {0}, of at most {PEERS_MAX}")]
    Many(usize),
    /// A client of the page has the name of a host, which may do more.
    #[error("page-clients: {0} is a host, which may open the page anyway")]
    ClientIsHost(HostName),
    /// There are too many clients of the page.
    #[error("page-clients: there are {0}, of at most {PAGE_CLIENTS_MAX}")]
    ManyClients(usize),
    /// The section on membership is not valid.
    #[error("membership: {0}")]
    Membership(String),
    /// Other users can read the key, and so impersonate this host.
    #[error("key: others can read {path}, which has mode {mode:04o}: `chmod 600 {path}`", path = .path.display())]
    OpenKey {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
}

/// The configuration of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentConfig {
    /// This host.
    pub name: HostName,
    /// Where peers connect; `None` for a host without peers, which needs no certificate.
    pub entrance: Option<PeerEntrance>,
    /// The address at which metrics are served, besides the agent's own socket.
    pub metrics: Option<SocketAddr>,
    /// The runtime directory of the VMs, if not the one that the environment names.
    pub runtime_dir: Option<PathBuf>,
    /// The other hosts, with their addresses.
    pub peers: BTreeMap<HostName, String>,
    /// The networks that VMs of this host can be connected to.
    pub networks: BTreeMap<NetworkName, NetworkConfig>,
    /// The section on membership, if there is one.
    pub membership: Option<MembershipOptions>,
    /// Whether the page can move and fail over VMs, and drain hosts.
    pub page_actions: bool,
    /// Names in certificates of clients that may open the page, and do nothing else.
    pub page_clients: Vec<HostName>,
}

/// Where peers connect, and by what hosts prove who they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerEntrance {
    /// The address at which the agent listens for its peers.
    pub listen: SocketAddr,
    /// This host's certificate, with the intermediate ones up to the authority's, in PEM format.
    pub certificate: PathBuf,
    /// Its private key, in PEM format.
    pub key: PathBuf,
    /// The authority that has issued the certificates of all hosts, in PEM format.
    pub authority: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ConfigFile {
    name: String,
    listen: Option<String>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    authority: Option<PathBuf>,
    metrics: Option<String>,
    runtime_dir: Option<PathBuf>,
    #[serde(default)]
    peers: BTreeMap<String, String>,
    #[serde(default)]
    networks: BTreeMap<NetworkName, FileNetwork>,
    membership: Option<MembershipSection>,
    #[serde(default)]
    page_actions: bool,
    #[serde(default)]
    page_clients: Vec<String>,
}

impl AgentConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let read = |source| ConfigError::Read { path: path.to_owned(), source };
        let text = firn_files::read_text(path, FILE_BYTES_MAX).map_err(read)?;
        let file = toml::from_str(&text).map_err(|error| toml_error(path, &text, &error))?;
        let directory = std::path::absolute(path).map_err(read)?;
        let config = Self::from_file(file, directory.parent().unwrap_or(Path::new("/")))?;
        config.entrance.as_ref().map_or(Ok(()), |entrance| check_key(&entrance.key))?;
        Ok(config)
    }

    /// The names that certificates of clients may have: of peers, and of clients of the page.
    pub fn client_names(&self) -> Vec<HostName> {
        self.peers.keys().chain(&self.page_clients).cloned().collect()
    }

    fn from_file(file: ConfigFile, directory: &Path) -> Result<Self, ConfigError> {
        let name = parse_host_name("name", file.name)?;
        let peers: BTreeMap<_, _> =
            file.peers.into_iter().map(parse_peer).collect::<Result<_, _>>()?;
        if peers.contains_key(&name) {
            return Err(ConfigError::Oneself(name));
        }
        if peers.len() > PEERS_MAX {
            return Err(ConfigError::Many(peers.len()));
        }
        if file.networks.len() > NETWORKS_MAX {
            return Err(NetworkError::Many(file.networks.len()).into());
        }
        let client = |name| parse_host_name("page-clients", name);
        let page_clients: Vec<HostName> =
            file.page_clients.into_iter().map(client).collect::<Result<_, _>>()?;
        if page_clients.len() > PAGE_CLIENTS_MAX {
            return Err(ConfigError::ManyClients(page_clients.len()));
        }
        if let Some(host) = page_clients.iter().find(|it| **it == name || peers.contains_key(*it)) {
            return Err(ConfigError::ClientIsHost(host.clone()));
        }
        let network = |(name, network): (NetworkName, FileNetwork)| {
            network.into_config(&name, directory).map(|network| (name, network))
        };
        let entrance = match (file.listen, file.certificate, file.key, file.authority) {
            (Some(listen), Some(certificate), Some(key), Some(authority)) => Some(PeerEntrance {
                listen: parse_socket_address("listen", &listen)?,
                certificate: directory.join(certificate),
                key: directory.join(key),
                authority: directory.join(authority),
            }),
            (None, None, None, None)
                if peers.is_empty() && page_clients.is_empty() && file.membership.is_none() =>
            {
                None
            }
            _ => return Err(ConfigError::NoEntrance),
        };
        let membership = file.membership.map(|it| it.check_section(&name, &peers, directory));
        Ok(Self {
            membership: membership.transpose().map_err(ConfigError::Membership)?,
            name,
            entrance,
            metrics: file.metrics.as_deref().map(parse_loopback).transpose()?,
            runtime_dir: file.runtime_dir.map(|path| directory.join(path)),
            peers,
            networks: file.networks.into_iter().map(network).collect::<Result<_, _>>()?,
            page_actions: file.page_actions,
            page_clients,
        })
    }
}

fn toml_error(path: &Path, text: &str, error: &toml::de::Error) -> ConfigError {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    ConfigError::Toml { path: path.to_owned(), line, reason: error.message().to_owned() }
}

fn parse_host_name(field: &'static str, name: String) -> Result<HostName, ConfigError> {
    HostName::new(name).map_err(|source| ConfigError::Name { field, source })
}

fn parse_peer((name, address): (String, String)) -> Result<(HostName, String), ConfigError> {
    let name = parse_host_name("peers", name)?;
    let parts = address.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    let is_address = parts.is_some_and(|(_, port)| port.parse::<u16>().is_ok_and(|port| port > 0));
    match is_address {
        true => Ok((name, address)),
        false => {
            let field = format!("peers: {name}");
            Err(ConfigError::Address { field, address, form: "HOST:PORT, such as 10.0.0.2:7415" })
        }
    }
}

fn parse_socket_address(field: &str, address: &str) -> Result<SocketAddr, ConfigError> {
    address.parse().map_err(|_| ConfigError::Address {
        field: field.to_owned(),
        address: address.to_owned(),
        form: "IP:PORT, such as 10.0.0.1:7415",
    })
}

fn parse_loopback(address: &str) -> Result<SocketAddr, ConfigError> {
    let address = parse_socket_address("metrics", address)?;
    match address.ip().is_loopback() {
        true => Ok(address),
        false => Err(ConfigError::Exposed(address)),
    }
}

fn check_key(path: &Path) -> Result<(), ConfigError> {
    let read = |source| ConfigError::Read { path: path.to_owned(), source };
    let metadata = fs::metadata(path).map_err(read)?;
    // A link to a device would otherwise get the advice to change the mode of the device.
    firn_files::NotRegular::require_regular(metadata.file_type())
        .map_err(|error| read(error.into()))?;
    let mode = metadata.permissions().mode() & 0o7777;
    match mode & 0o077 {
        0 => Ok(()),
        _ => Err(ConfigError::OpenKey { path: path.to_owned(), mode }),
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;
    use crate::switch::config::Uplink;

    const GOOD: &str = "name = \"a\"\nlisten = \"10.0.0.1:7415\"\ncertificate = \"a.pem\"\n\
        key = \"a.key\"\nauthority = \"/etc/ca.pem\"\n[peers]\nb = \"10.0.0.2:7415\"\n";

    fn load(text: &str, key_mode: u32) -> Result<AgentConfig, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.toml"), text).unwrap();
        fs::write(dir.path().join("a.key"), "").unwrap();
        fs::set_permissions(dir.path().join("a.key"), fs::Permissions::from_mode(key_mode))
            .unwrap();
        let mut config = AgentConfig::load(&dir.path().join("a.toml"))?;
        if let Some(entrance) = &mut config.entrance {
            assert_eq!(entrance.key, dir.path().join("a.key"));
            entrance.key = "a.key".into();
        }
        Ok(config)
    }

    #[test]
    fn the_configuration_names_hosts_and_addresses() {
        let config = load(GOOD, 0o600).unwrap();
        let entrance = config.entrance.unwrap();
        assert_eq!((config.name.as_str(), entrance.listen.port()), ("a", 7415));
        assert_eq!(entrance.authority, Path::new("/etc/ca.pem"));
        assert!(entrance.certificate.is_absolute() && config.metrics.is_none());
        let b = HostName::new("b").unwrap();
        assert_eq!(config.peers, BTreeMap::from([(b, "10.0.0.2:7415".to_owned())]));
        assert!(config.networks.is_empty());
        let networks =
            "[networks.lan]\n[networks.dmz]\ntap = \"tap0\"\n[networks.x]\nuplink = \"/u\"\n";
        let more = format!("metrics = \"[::1]:9\"\nruntime-dir = \"run\"\n{GOOD}{networks}");
        let config = load(&more, 0o400).unwrap();
        let uplinks: Vec<_> = config.networks.values().map(|it| it.uplink.clone()).collect();
        let tap = Uplink::Tap("tap0".into());
        assert_eq!(uplinks, [Some(tap), None, Some(Uplink::Socket("/u".into()))]);
        assert!(config.metrics.is_some() && config.runtime_dir.unwrap().is_absolute());
    }

    #[test]
    fn each_mistake_is_named() {
        let with = |from: &str, to: &str| GOOD.replacen(from, to, 1);
        let mistakes = [
            (String::new(), "line 1: missing field"),
            (with("a.pem\"", "a.pem"), "line 3: "),
            (with("listen", "lissten"), "line 2: unknown field `lissten`"),
            (with("\"a\"", "7"), "line 1: invalid type"),
            (with("\"a\"", "\"A b\""), "\"A b\" is no name of a host"),
            (with("10.0.0.1:7415", "here"), "listen: \"here\" is no address: give IP:PORT"),
            (with("10.0.0.2:7415", "10.0.0.2"), "peers: b: \"10.0.0.2\" is no address"),
            (with("10.0.0.2:7415", ":7415"), "peers: b: \":7415\" is no address"),
            (with("10.0.0.2:7415", "h:0"), "peers: b: \"h:0\" is no address"),
            (with("10.0.0.2:7415", "h:70000"), "peers: b: \"h:70000\" is no address"),
            (with("\nb = ", "\na = "), "peers: a is this host"),
            (with("key", "page-clients = [\"b\"]\nkey"), "page-clients: b is a host"),
            (with("key", "page-clients = [\"B\"]\nkey"), "\"B\" is no name of a host"),
            (with("key", "page-actions = 1\nkey"), "line 4: invalid type"),
            (with("\nb = ", "\n\"B\" = "), "\"B\" is no name of a host"),
            (with("key", "metrics = \"10.0.0.1:9\"\nkey"), "can be reached from elsewhere"),
            (with("\"a.key\"", "\"none\""), "can't read"),
            (format!("{GOOD}[networks.\"../x\"]\n"), "line 8: \"../x\" is no name of a network"),
            (format!("{GOOD}[networks.x]\nup = 1\n"), "line 9: unknown field `up`"),
            (
                format!("{GOOD}[networks.x]\nuplink = \"/u\"\ntap = \"t\"\n"),
                "uplink or tap, not both",
            ),
            (format!("{GOOD}[networks.x]\ntap = \"a/b\"\n"), "networks.x: tap: \"a/b\" is no name"),
        ];
        for (text, said) in mistakes {
            let error = load(&text, 0o600).unwrap_err();
            let source = error.source().map(ToString::to_string).unwrap_or_default();
            let message = format!("{error}: {source}");
            assert!(message.contains(said), "{message:?} does not say {said:?}");
            assert!(!message.contains('\n'), "{message:?}");
        }
        let many: String = (0..65).map(|n| format!("c{n} = \"h:1\"\n")).collect();
        assert!(matches!(load(&format!("{GOOD}{many}"), 0o600), Err(ConfigError::Many(66))));
        let many: String = (0..65).map(|n| format!("\"c{n}\",")).collect();
        let many = load(&format!("page-clients = [{many}]\n{GOOD}"), 0o600).unwrap_err();
        assert!(many.to_string().contains("there are 65, of at most 64"), "{many}");
        let many: String = (0..17).map(|n| format!("[networks.n{n}]\n")).collect();
        let many = load(&format!("{GOOD}{many}"), 0o600).unwrap_err();
        assert!(many.to_string().contains("there are 17, of at most 16"), "{many}");
    }

    #[test]
    fn a_host_alone_needs_no_certificate() {
        let alone = "name = \"a\"\nmetrics = \"127.0.0.1:9415\"\n";
        let config = load(&format!("{alone}[networks.lan]\n"), 0o600).unwrap();
        assert!(config.entrance.is_none() && config.peers.is_empty());
        for more in [
            "listen = \"10.0.0.1:7415\"\n",
            "key = \"a.key\"\n",
            "page-clients = [\"ops\"]\n",
            "[peers]\nb = \"10.0.0.2:7415\"\n",
            "[membership]\netcd = [\"http://10.0.0.9:2379\"]\n",
        ] {
            let error = load(&format!("{alone}{more}"), 0o600).unwrap_err();
            assert!(error.to_string().contains("a host alone none"), "{more}: {error}");
        }
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let error = load(GOOD, 0o640).unwrap_err();
        assert!(matches!(error, ConfigError::OpenKey { mode: 0o640, .. }), "{error}");
    }

    #[test]
    fn a_missing_file_is_an_error() {
        assert!(matches!(AgentConfig::load(Path::new("/none")), Err(ConfigError::Read { .. })));
    }
}
