//! TLS keys and certificates: each side presents a certificate and requires one. TLS 1.3 only.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::error::BackupError;

/// The maximum size of a file of certificates or with a key, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Files in PEM format: this side's certificate and key, and the authority that must have signed
/// the peer's certificate.
#[derive(Clone, Debug)]
pub struct TlsIdentity {
    /// The certificate, followed by intermediate certificates if there are any.
    pub certificate: PathBuf,
    /// The certificate's private key. A file that others can read is refused.
    pub key: PathBuf,
    /// The authority whose certificates are accepted from the peer.
    pub authority: PathBuf,
}

impl TlsIdentity {
    fn load_files(
        &self,
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>, RootCertStore), BackupError>
    {
        let pem =
            firn_files::read_secret(&self.key, FILE_BYTES_MAX).map_err(unusable_file(&self.key))?;
        let key = PrivateKeyDer::from_pem_slice(&pem).map_err(unusable_file(&self.key))?;
        let mut roots = RootCertStore::empty();
        for certificate in read_certificates(&self.authority)? {
            roots.add(certificate).map_err(unusable_file(&self.authority))?;
        }
        Ok((read_certificates(&self.certificate)?, key, roots))
    }

    pub(super) fn client_config(&self) -> Result<Arc<ClientConfig>, BackupError> {
        let (certificates, key, roots) = self.load_files()?;
        let config = ClientConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(tls_error)?
            .with_root_certificates(roots)
            .with_client_auth_cert(certificates, key)
            .map_err(tls_error)?;
        Ok(Arc::new(config))
    }

    pub(super) fn server_config(&self) -> Result<Arc<ServerConfig>, BackupError> {
        let (certificates, key, roots) = self.load_files()?;
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), crypto_provider());
        let mut config = ServerConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(tls_error)?
            .with_client_cert_verifier(verifier.build().map_err(tls_error)?)
            .with_single_cert(certificates, key)
            .map_err(tls_error)?;
        // A resumed connection would not verify the certificate again, which may have expired.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}

/// The host of `HOST:PORT`; the server's certificate must be valid for it.
pub(super) fn server_name(address: &str) -> Result<ServerName<'static>, BackupError> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    ServerName::try_from(host).map_err(tls_error)
}

fn crypto_provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, BackupError> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&read_file(path)?)
        .collect::<Result<_, _>>()
        .map_err(unusable_file(path))?;
    match certificates.is_empty() {
        true => Err(unusable_file(path)("it has no certificate in PEM format")),
        false => Ok(certificates),
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, BackupError> {
    firn_files::read_input(path, FILE_BYTES_MAX).map_err(unusable_file(path))
}

fn tls_error(error: impl std::fmt::Display) -> BackupError {
    BackupError::Tls(error.to_string())
}

fn unusable_file<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> BackupError {
    move |error| BackupError::Tls(format!("{} cannot be used: {error}", path.display()))
}
