//! The section of the configuration on membership.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_cluster::failover::LeaseTerms;
use firn_control::HostName;
use firn_membership::{FailoverTiming, etcd};
use serde::Deserialize;

/// Duration of a lease, in milliseconds, and its limits. A failover waits for its end, so it is
/// short; it is extended five times in its duration.
const LEASE_MS: u64 = 800;
const LEASE_MS_MIN: u64 = 500;
const LEASE_MS_MAX: u64 = 60_000;

/// The same for etcd, whose leases are whole seconds, and longer than its elections take.
const ETCD_LEASE_MS: u64 = 5000;
const ETCD_LEASE_MS_MIN: u64 = 3000;

/// Time without a request for a lease after which a host is lost, in milliseconds, and its limits.
/// It is longer than a host stalls now and then.
const SILENCE_MS: u64 = 1500;
const SILENCE_MS_MAX: u64 = 60_000;

/// Maximum error of a clock's rate. Quartz has at most 100, and 500 more while a clock is
/// corrected.
const DRIFT_PPM_MAX: u32 = 1000;

/// The checked section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MembershipOptions {
    /// The kind of store.
    pub kind: BackendKind,
    /// The terms of leases, and when a host is lost.
    pub timing: FailoverTiming,
}

/// The store of records and leases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendKind {
    /// Servers in some of the agents.
    Embedded {
        /// Their hosts.
        servers: Vec<HostName>,
        /// The directory of this host's server, if it is one of them.
        state: Option<PathBuf>,
    },
    /// The user's etcd.
    Etcd(etcd::EtcdOptions),
}

/// The section in the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct MembershipSection {
    servers: Option<Vec<String>>,
    state_dir: Option<PathBuf>,
    etcd: Option<Vec<String>>,
    prefix: Option<String>,
    authority: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    lease_ms: Option<u64>,
    silence_ms: Option<u64>,
}

impl MembershipSection {
    /// Checks the section for the host `me` with these peers. Paths are relative to `directory`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_section(
        self,
        me: &HostName,
        peers: &BTreeMap<HostName, String>,
        directory: &Path,
    ) -> Result<MembershipOptions, String> {
        let timing = self.failover_timing()?;
        let kind = match (&self.servers, &self.etcd) {
            (Some(_), None) => self.embedded_backend(me, peers, directory)?,
            (None, Some(_)) => BackendKind::Etcd(self.etcd_options(directory)?),
            _ => {
                return Err(
                    "give either servers, which are hosts, or etcd, which are addresses".into()
                );
            }
        };
        Ok(MembershipOptions { kind, timing })
    }

    fn failover_timing(&self) -> Result<FailoverTiming, String> {
        let (default, min) = match self.etcd {
            None => (LEASE_MS, LEASE_MS_MIN),
            Some(_) => (ETCD_LEASE_MS, ETCD_LEASE_MS_MIN),
        };
        let ttl = check_ms("lease-ms", self.lease_ms.unwrap_or(default), min..=LEASE_MS_MAX)?;
        let silence = self.silence_ms.unwrap_or(SILENCE_MS);
        let silence = check_ms("silence-ms", silence, LEASE_MS_MIN..=SILENCE_MS_MAX)?;
        Ok(FailoverTiming { lease: LeaseTerms { ttl, drift_ppm_max: DRIFT_PPM_MAX }, silence })
    }

    fn embedded_backend(
        self,
        me: &HostName,
        peers: &BTreeMap<HostName, String>,
        directory: &Path,
    ) -> Result<BackendKind, String> {
        if [&self.authority, &self.certificate, &self.key].iter().any(|it| it.is_some())
            || self.prefix.is_some()
        {
            return Err("authority, certificate, key and prefix are for etcd".into());
        }
        let name = |name: String| {
            let name = HostName::new(name).map_err(|error| format!("servers: {error}"))?;
            match name == *me || peers.contains_key(&name) {
                true => Ok(name),
                false => Err(format!("servers: {name} is neither this host nor one of its peers")),
            }
        };
        let servers: Vec<HostName> =
            self.servers.into_iter().flatten().map(name).collect::<Result<_, _>>()?;
        let state = self.state_dir.map(|path| directory.join(path));
        if servers.contains(me) && state.is_none() {
            return Err(
                "this host is a server: give the directory of its durable state by state-dir"
                    .into(),
            );
        }
        Ok(BackendKind::Embedded { servers, state })
    }

    fn etcd_options(self, directory: &Path) -> Result<etcd::EtcdOptions, String> {
        if self.state_dir.is_some() {
            return Err("state-dir is for servers that are hosts".into());
        }
        let endpoints = self.etcd.unwrap_or_default();
        let is_address = |it: &&String| it.starts_with("http://") || it.starts_with("https://");
        if let Some(other) = endpoints.iter().find(|it| !is_address(it)) {
            return Err(format!(
                "etcd: {other:?} is no address: give one such as https://10.0.0.9:2379"
            ));
        }
        if endpoints.is_empty() {
            return Err("etcd: give at least one address".into());
        }
        let certificate = match (self.certificate, self.key) {
            (Some(certificate), Some(key)) => {
                Some((directory.join(certificate), directory.join(key)))
            }
            (None, None) => None,
            _ => return Err("certificate and key belong together".into()),
        };
        let authority = self.authority.map(|path| directory.join(path));
        let tls = match (authority, certificate) {
            (Some(authority), certificate) => Some(etcd::EtcdTls { authority, certificate }),
            (None, None) if endpoints.iter().all(|it| it.starts_with("http://")) => None,
            _ => {
                return Err(
                    "https needs authority: the authority that has issued the servers' certificates".into()
                );
            }
        };
        Ok(etcd::EtcdOptions {
            endpoints,
            prefix: self.prefix.unwrap_or_else(|| "firn".into()),
            tls,
        })
    }
}

fn check_ms(field: &str, ms: u64, limits: RangeInclusive<u64>) -> Result<Duration, String> {
    match limits.contains(&ms) {
        true => Ok(Duration::from_millis(ms)),
        false => Err(format!("{field}: give {} to {}, not {ms}", limits.start(), limits.end())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(text: &str) -> Result<MembershipOptions, String> {
        let name = |name| HostName::new(name).unwrap();
        let peers = ["b", "c"].map(|it| (name(it), "h:1".to_owned())).into();
        let section: MembershipSection =
            toml::from_str(text).map_err(|error| error.message().to_owned())?;
        section.check_section(&name("a"), &peers, Path::new("/etc/firn"))
    }

    #[test]
    fn hosts_agree_by_servers_or_by_etcd() {
        let options =
            checked("servers = [\"a\", \"b\", \"c\"]\nstate-dir = \"s\"\nlease-ms = 4000").unwrap();
        assert_eq!(options.timing.lease.ttl, Duration::from_secs(4));
        assert_eq!(options.timing.silence, Duration::from_millis(1500));
        let BackendKind::Embedded { servers, state } = options.kind else { panic!() };
        assert_eq!((servers.len(), state.unwrap().as_path()), (3, Path::new("/etc/firn/s")));
        let etcd =
            "etcd = [\"https://h:1\"]\nauthority = \"ca.pem\"\ncertificate = \"c\"\nkey = \"k\"";
        let BackendKind::Etcd(options) = checked(etcd).unwrap().kind else { panic!() };
        assert_eq!(options.prefix, "firn");
        assert_eq!(options.tls.unwrap().authority, Path::new("/etc/firn/ca.pem"));
        assert!(checked("etcd = [\"http://h:1\"]").is_ok());
    }

    #[test]
    fn each_mistake_is_named() {
        let mistakes = [
            ("", "give either servers"),
            ("servers = [\"a\"]\netcd = [\"http://h:1\"]", "give either servers"),
            (
                "servers = [\"a\", \"d\"]\nstate-dir = \"s\"",
                "d is neither this host nor one of its peers",
            ),
            ("servers = [\"A\"]\nstate-dir = \"s\"", "no name of a host"),
            ("servers = [\"a\", \"b\", \"c\"]", "state-dir"),
            ("servers = [\"b\"]\nkey = \"k\"", "are for etcd"),
            ("etcd = []", "at least one"),
            ("etcd = [\"h:1\"]", "\"h:1\" is no address"),
            ("etcd = [\"https://h:1\"]", "https needs authority"),
            ("etcd = [\"http://h:1\"]\nkey = \"k\"", "belong together"),
            ("etcd = [\"http://h:1\"]\nstate-dir = \"s\"", "state-dir is for"),
            ("etcd = [\"http://h:1\"]\nlease-ms = 10", "3000 to 60000, not 10"),
            ("servers = [\"a\"]\nstate-dir = \"s\"\nlease-ms = 499", "lease-ms: give 500 to 60000"),
            ("servers = [\"a\"]\nstate-dir = \"s\"\nsilence-ms = 1", "silence-ms: give 500"),
            ("etdc = []", "unknown field"),
        ];
        for (text, said) in mistakes {
            let error = checked(text).unwrap_err();
            assert!(error.contains(said), "{error:?} does not say {said:?}");
        }
    }
}
