//! Connections that were not let in, counted by why.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, PoisonError};

use rustls::{CertificateError, Error};

/// Why somebody was not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// It shows no certificate.
    NoCertificate,
    /// Its certificate is from somebody else than the authority.
    Authority,
    /// Its certificate names no peer, or more than one.
    Name,
    /// Its certificate is not valid any more, or not yet.
    Time,
    /// Its certificate can't be used for something else.
    Certificate,
    /// It does not speak TLS 1.3, or goes away in the middle of its greeting.
    Protocol,
    /// It did not let this host in.
    Mutual,
    /// It took too long.
    Slow,
    /// Too many others came at the same time.
    Crowd,
}

impl Refusal {
    /// A word for it, as in metrics.
    pub fn word(self) -> &'static str {
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

    /// What a greeting that failed says about who greeted.
    pub fn of(error: &io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(Error::NoCertificatesPresented) => Self::NoCertificate,
            Some(Error::InvalidCertificate(error)) => Self::of_certificate(error),
            Some(Error::AlertReceived(_)) => Self::Mutual,
            _ => Self::Protocol,
        }
    }

    fn of_certificate(error: &CertificateError) -> Self {
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

/// How many were refused.
#[derive(Debug, Default)]
pub struct Refused(Mutex<BTreeMap<Refusal, u64>>);

impl Refused {
    /// One more.
    pub fn count(&self, refusal: Refusal) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(refusal).or_default() += 1;
    }

    /// All of them, by word.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.iter().map(|(refusal, count)| (refusal.word().to_owned(), *count)).collect()
    }
}
