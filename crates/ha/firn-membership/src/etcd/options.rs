//! How to connect to etcd.

use std::path::{Path, PathBuf};
use std::time::Duration;

use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};

use crate::MembershipError;

/// Maximum time to connect to a server, and maximum silence of a connection.
const CONNECT_WAIT: Duration = Duration::from_secs(1);
const SILENCE: Duration = Duration::from_secs(1);

/// The servers, and how to connect to them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdOptions {
    /// Addresses, as `https://10.0.0.1:2379`.
    pub endpoints: Vec<String>,
    /// The prefix of all keys.
    pub prefix: String,
    /// Certificates, where the endpoints are `https`.
    pub tls: Option<EtcdTls>,
}

/// Certificates and keys: files in PEM format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTls {
    /// The authority that has issued the servers' certificates.
    pub authority: PathBuf,
    /// The certificate of this host, with its key, if the servers require one.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

impl EtcdOptions {
    /// # Errors
    /// If a file can't be read.
    pub(super) fn connect_options(&self) -> Result<ConnectOptions, MembershipError> {
        let options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_WAIT)
            .with_keep_alive(SILENCE, SILENCE)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        match &self.tls {
            None => Ok(options),
            Some(tls) => Ok(options.with_tls(tls.load_files()?)),
        }
    }
}

impl EtcdTls {
    fn load_files(&self) -> Result<TlsOptions, MembershipError> {
        let options =
            TlsOptions::new().ca_certificate(Certificate::from_pem(read_file(&self.authority)?));
        match &self.certificate {
            None => Ok(options),
            Some((certificate, key)) => {
                Ok(options.identity(Identity::from_pem(read_file(certificate)?, read_file(key)?)))
            }
        }
    }
}

/// Maximum size of a file of certificates, or with a key, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

fn read_file(path: &Path) -> Result<Vec<u8>, MembershipError> {
    firn_files::read_input(path, FILE_BYTES_MAX).map_err(|error| {
        MembershipError::Refused(format!("can't read {}: {error}", path.display()))
    })
}
