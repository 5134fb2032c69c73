//! A restore that gives its VM to libvirt: what the user requests, and the domain that the restore
//! creates, which the journal records before libvirt creates it.

use firn_libvirt::{DaemonAddress, DomainAddress};
use serde::{Deserialize, Serialize};

/// The libvirt that gets a restored VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LibvirtTarget {
    /// Its daemon.
    pub daemon: DaemonAddress,
    /// The name of the domain; by default that of the domain that was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// The domain of a restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredDomain {
    /// Its libvirt, UUID and name.
    #[serde(flatten)]
    pub address: DomainAddress,
    /// The mark in its XML: a domain without it was not created by this restore, and is not ended.
    pub mark: String,
    /// What libvirt is to start it from when it has ended, if it is persistent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub definition: Option<String>,
}
