//! Names of hosts: as in configurations, and as in the hosts' certificates.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use rustls_pki_types::{DnsName, ServerName};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Maximum length of a name, in bytes: a label of RFC 1035, 2.3.4. Paths of sockets contain it.
const NAME_BYTES_MAX: usize = 63;

/// A host's name: lower-case letters, digits, `-` and `.`, as in a DNS name of a certificate.
///
/// A host has one spelling only, so that two names are the same host exactly if they are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostName(DnsName<'static>);

/// The error for a text that is no name of a host.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{0:?} is no name of a host: give lower-case letters, digits, '-' and '.', at most {NAME_BYTES_MAX}"
)]
pub struct HostNameError(String);

impl HostName {
    /// Checks a name.
    ///
    /// # Errors
    /// If a certificate can't contain it, or another spelling could mean the same host.
    pub fn new(name: impl Into<String>) -> Result<Self, HostNameError> {
        let name = name.into();
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        let is_short = name.len() <= NAME_BYTES_MAX && !name.ends_with('.');
        match ServerName::try_from(name.clone()) {
            Ok(ServerName::DnsName(dns)) if is_short && name.chars().all(is_plain) => Ok(Self(dns)),
            _ => Err(HostNameError(name)),
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        self.0.as_ref()
    }

    /// The name in the form that certificates use.
    pub fn server_name(&self) -> ServerName<'static> {
        ServerName::DnsName(self.0.clone())
    }
}

impl Ord for HostName {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl PartialOrd for HostName {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl FromStr for HostName {
    type Err = HostNameError;

    fn from_str(name: &str) -> Result<Self, HostNameError> {
        Self::new(name)
    }
}

impl TryFrom<String> for HostName {
    type Error = HostNameError;

    fn try_from(name: String) -> Result<Self, HostNameError> {
        Self::new(name)
    }
}

impl From<HostName> for String {
    fn from(name: HostName) -> Self {
        name.as_str().to_owned()
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_names_pass() {
        for name in ["a", "host-1", "host1.example.org", "7a"] {
            assert_eq!(HostName::new(name).unwrap().as_str(), name);
        }
    }

    #[test]
    fn ambiguous_names_and_paths_are_refused() {
        let long = "a".repeat(64);
        for name in ["", "A", "a.", "a b", "../a", "10.0.0.1", "::1", "*.org", "a_b", &long] {
            assert!(HostName::new(name).is_err(), "{name:?}");
        }
    }
}
