//! The certificate that a peer has presented: what identifies it.

use std::fmt;
use std::net::IpAddr;

use rustls::pki_types::CertificateDer;
use sha2::{Digest as _, Sha256};
use x509_parser::extensions::GeneralName;
use x509_parser::parse_x509_certificate;
use x509_parser::prelude::X509Certificate;

use crate::backup::error::BackupError;

/// The names and the fingerprints of a certificate that TLS has verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::backup) struct PeerCertificate {
    /// The common name, and the alternative names.
    names: Vec<String>,
    /// SHA-256 of the certificate, in hexadecimal digits.
    fingerprint: String,
    /// SHA-256 of the public key, in hexadecimal digits.
    key: String,
}

impl PeerCertificate {
    pub(in crate::backup) fn from_der(der: &CertificateDer<'_>) -> Result<Self, BackupError> {
        let malformed = |_| BackupError::Refused("the certificate cannot be read".into());
        let (_, certificate) = parse_x509_certificate(der).map_err(malformed)?;
        Ok(Self {
            names: read_names(&certificate),
            fingerprint: hash_to_hex(der),
            key: hash_to_hex(certificate.public_key().raw),
        })
    }

    /// The fingerprint of the public key.
    pub(in crate::backup) fn key(&self) -> &str {
        &self.key
    }

    /// Whether text of a table means this certificate: a name, `sha256:` and its fingerprint, or
    /// `key:` and the fingerprint of its public key. Fingerprints may have colons between bytes.
    pub(super) fn is_named(&self, text: &str) -> bool {
        match text.split_once(':') {
            Some(("sha256", digits)) => self.fingerprint == normalize_hex(digits),
            Some(("key", digits)) => self.key == normalize_hex(digits),
            _ => self.names.iter().any(|name| name == text),
        }
    }
}

impl fmt::Display for PeerCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.names.first().map_or("without a name", String::as_str);
        write!(f, "{names:?}, key:{}", self.key)
    }
}

fn read_names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let common = certificate.subject().iter_common_name();
    let mut names: Vec<_> =
        common.filter_map(|name| name.as_str().ok()).map(str::to_owned).collect();
    let alternative = certificate.subject_alternative_name().ok().flatten();
    let entries = alternative.map_or(&[][..], |extension| &extension.value.general_names);
    names.extend(entries.iter().filter_map(read_name));
    names
}

fn read_name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(text) | GeneralName::RFC822Name(text) | GeneralName::URI(text) => {
            Some((*text).to_owned())
        }
        GeneralName::IPAddress(bytes) => <[u8; 4]>::try_from(*bytes)
            .map(IpAddr::from)
            .or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from))
            .ok()
            .map(|address| address.to_string()),
        _ => None,
    }
}

fn hash_to_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn normalize_hex(digits: &str) -> String {
    digits.chars().filter(|char| *char != ':').map(|char| char.to_ascii_lowercase()).collect()
}
