//! Connections that were refused, counted by reason.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, PoisonError};

use rustls::{CertificateError, Error};

/// Why a connection was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RejectionReason {
    /// It shows no certificate.
    NoCertificate,
    /// Its certificate was not issued by the authority.
    Authority,
    /// Its certificate names no peer, or more than one.
    Name,
    /// Its certificate is not valid any more, or not yet.
    Time,
    /// Its certificate can't be used for another reason.
    Certificate,
    /// It does not use TLS 1.3, or ends during the handshake.
    Protocol,
    /// It refused this host.
    Mutual,
    /// It took too long.
    Slow,
    /// Too many other connections came at the same time.
    Crowd,
}

impl RejectionReason {
    /// The reason as a word, as in metrics.
    pub fn as_word(self) -> &'static str {
        match self {
            Self::NoCertificate => "no-certificate",
            Self::Authority => "authority",
            Self::Name => "name",
            Self::Time => "time",
            Self::Certificate => "certificate",
            Self::Protocol => "protocol",
            Self::Mutual => "mutual",
            Self::Slow => "slow",
            Self::Crowd => "crowd",
        }
    }

    /// The reason that follows from a failed handshake.
    pub fn from_handshake_error(error: &io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(Error::NoCertificatesPresented) => Self::NoCertificate,
            Some(Error::InvalidCertificate(error)) => Self::from_certificate_error(error),
            Some(Error::AlertReceived(_)) => Self::Mutual,
            _ => Self::Protocol,
        }
    }

    fn from_certificate_error(error: &CertificateError) -> Self {
        match error {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::Authority,
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                Self::Name
            }
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. } => Self::Time,
            _ => Self::Certificate,
        }
    }
}

/// Counts of refused connections.
#[derive(Debug, Default)]
pub struct RejectionCounts(Mutex<BTreeMap<RejectionReason, u64>>);

impl RejectionCounts {
    /// Counts one more.
    pub fn add_rejection(&self, refusal: RejectionReason) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(refusal).or_default() += 1;
    }

    /// All counts, by word.
    pub fn counts_by_word(&self) -> BTreeMap<String, u64> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.iter().map(|(refusal, count)| (refusal.as_word().to_owned(), *count)).collect()
    }
}
