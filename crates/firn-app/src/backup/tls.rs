//! TLS keys and certificates: each side presents a certificate and requires one. TLS 1.3 only.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::error::BackupError;

/// The maximum size of a file of certificates or with a key, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Files in PEM format: this side's certificate and key, and the authority that must have signed
/// the peer's certificate.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The certificate, followed by intermediate certificates if there are any.
    pub certificate: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
    /// The authority whose certificates are accepted from the peer.
    pub authority: PathBuf,
}

impl Identity {
    fn parts(
        &self,
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>, RootCertStore), BackupError>
    {
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?).map_err(unusable(&self.key))?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.authority)? {
            roots.add(certificate).map_err(unusable(&self.authority))?;
        }
        Ok((certificates(&self.certificate)?, key, roots))
    }

    pub(super) fn client(&self) -> Result<Arc<ClientConfig>, BackupError> {
        let (certificates, key, roots) = self.parts()?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(wrong)?
            .with_root_certificates(roots)
            .with_client_auth_cert(certificates, key)
            .map_err(wrong)?;
        Ok(Arc::new(config))
    }

    pub(super) fn server(&self) -> Result<Arc<ServerConfig>, BackupError> {
        let (certificates, key, roots) = self.parts()?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
        let config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(wrong)?
            .with_client_cert_verifier(verifier.build().map_err(wrong)?)
            .with_single_cert(certificates, key)
            .map_err(wrong)?;
        Ok(Arc::new(config))
    }
}

/// The host of `HOST:PORT`; the server's certificate must be valid for it.
pub(super) fn server_name(address: &str) -> Result<ServerName<'static>, BackupError> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    ServerName::try_from(host).map_err(wrong)
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, BackupError> {
    CertificateDer::pem_slice_iter(&read(path)?)
        .collect::<Result<Vec<_>, _>>()
        .map_err(unusable(path))
}

fn read(path: &Path) -> Result<Vec<u8>, BackupError> {
    firn_files::read_input(path, FILE_BYTES_MAX).map_err(unusable(path))
}

fn wrong(error: impl std::fmt::Display) -> BackupError {
    BackupError::Tls(error.to_string())
}

fn unusable<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> BackupError {
    move |error| BackupError::Tls(format!("{} cannot be used: {error}", path.display()))
}
