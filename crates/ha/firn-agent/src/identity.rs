//! The identity of this host: its certificate and key, and the peers that it accepts.
//!
//! Both sides of a connection show a certificate that the authority has issued. A name in it is a
//! host's, not an address. A client is the peer that its certificate names, and a server must be
//! the peer that the client intended. A certificate that names no peer, or more than one, is
//! refused. TLS 1.3 only. A client of the page has a name that is no host's, and gets the page only.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_control::HostName;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    ServerConfig, SignatureScheme,
};
use thiserror::Error;

use crate::config::AgentConfig;

/// Maximum size of a file of certificates, or with a key, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a host has no identity.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// A file holds no certificate or no key.
    #[error("{field}: {path} can't be used: {reason}", path = .path.display())]
    File {
        /// The field that names it.
        field: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The certificate and the key don't belong together.
    #[error("certificate: {path} does not belong to the key", path = .0.display())]
    Key(PathBuf),
    /// Every peer would refuse this host's certificate.
    #[error("certificate: peers would refuse {path}: {reason}; it has to be issued by the authority, for the name {name}, to serve and to connect", path = .path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// This host.
        name: HostName,
        /// Why.
        reason: Error,
    },
    /// The TLS library reports an error.
    #[error("TLS can't be used")]
    Tls(#[source] Error),
}

/// The certificate that a host shows, and the certificates that it accepts.
#[derive(Clone, Debug)]
pub struct HostIdentity {
    /// For connections to peers.
    pub client: Arc<ClientConfig>,
    /// For connections from peers; `None` for a host alone.
    pub server: Option<Arc<ServerConfig>>,
}

impl HostIdentity {
    /// Reads the files of a configuration, and checks that peers would accept them.
    ///
    /// # Errors
    /// If a file can't be used, or peers would refuse the certificate.
    pub fn load(config: &AgentConfig) -> Result<Self, IdentityError> {
        let Some(entrance) = &config.entrance else { return Self::alone() };
        let chain = load_certificates("certificate", &entrance.certificate)?;
        let roots = Arc::new(load_roots(&entrance.authority)?);
        let admission = Arc::new(PeerVerifier::new(&roots, config.client_names())?);
        check_own_certificate(config, &entrance.certificate, &chain, &roots, &admission)?;
        let mut server = ServerConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(IdentityError::Tls)?
            .with_client_cert_verifier(admission)
            .with_single_cert(chain.clone(), load_key(&entrance.key)?)
            .map_err(|error| credential_error(&entrance.certificate, error))?;
        let mut client = ClientConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(IdentityError::Tls)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, load_key(&entrance.key)?)
            .map_err(|error| credential_error(&entrance.certificate, error))?;
        // Each connection is judged by what is valid now, not by an earlier connection.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        client.resumption = Resumption::disabled();
        Ok(Self { client: Arc::new(client), server: Some(Arc::new(server)) })
    }

    /// The identity of a host without peers: it trusts no authority, and accepts no connections.
    fn alone() -> Result<Self, IdentityError> {
        let client = ClientConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(IdentityError::Tls)?
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        Ok(Self { client: Arc::new(client), server: None })
    }
}

fn credential_error(certificate: &Path, error: Error) -> IdentityError {
    match error {
        Error::InconsistentKeys(_) => IdentityError::Key(certificate.to_owned()),
        error => IdentityError::Tls(error),
    }
}

/// Verifies this host's certificate as its peers will.
fn check_own_certificate(
    config: &AgentConfig,
    file: &Path,
    chain: &[CertificateDer<'_>],
    roots: &Arc<RootCertStore>,
    admission: &PeerVerifier,
) -> Result<(), IdentityError> {
    let (path, name) = (file.to_owned(), config.name.clone());
    let refused = |reason| IdentityError::Certificate { path, name, reason };
    let [own, between @ ..] = chain else { return Err(refused(Error::NoCertificatesPresented)) };
    let as_server =
        WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), crypto_provider())
            .build()
            .map_err(|error| IdentityError::Tls(Error::General(error.to_string())))?;
    let (server_name, now) = (config.name.server_name(), UnixTime::now());
    as_server
        .verify_server_cert(own, between, &server_name, &[], now)
        .map(drop)
        .and_then(|()| admission.authority.verify_client_cert(own, between, now).map(drop))
        .map_err(refused)
}

/// The peer that a certificate is for, if it is for exactly one.
///
/// # Errors
/// If it is for none, or for more.
pub fn peer_of(certificate: &CertificateDer<'_>, peers: &[HostName]) -> Result<HostName, Error> {
    let parsed = ParsedCertificate::try_from(certificate)?;
    let is_named = |peer: &&HostName| verify_server_name(&parsed, &peer.server_name()).is_ok();
    let mut named = peers.iter().filter(is_named);
    match (named.next(), named.next()) {
        (Some(peer), None) => Ok(peer.clone()),
        _ => Err(Error::InvalidCertificate(CertificateError::NotValidForName)),
    }
}

/// Accepts clients whose certificates the authority has issued to one of the peers, or to a client
/// of the page.
#[derive(Debug)]
struct PeerVerifier {
    authority: Arc<dyn ClientCertVerifier>,
    peers: Vec<HostName>,
}

impl PeerVerifier {
    fn new(roots: &Arc<RootCertStore>, peers: Vec<HostName>) -> Result<Self, IdentityError> {
        let authority =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), crypto_provider())
                .build()
                .map_err(|error| IdentityError::Tls(Error::General(error.to_string())))?;
        Ok(Self { authority, peers })
    }
}

impl ClientCertVerifier for PeerVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.authority.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.authority.verify_client_cert(end_entity, intermediates, now)?;
        peer_of(end_entity, &self.peers).map(|_| verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authority.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authority.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authority.supported_verify_schemes()
    }
}

fn crypto_provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn load_roots(path: &Path) -> Result<RootCertStore, IdentityError> {
    let mut roots = RootCertStore::empty();
    for certificate in load_certificates("authority", path)? {
        roots.add(certificate).map_err(|error| unusable_file("authority", path, &error))?;
    }
    Ok(roots)
}

fn load_certificates(
    field: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let text = read_file(field, path)?;
    let certificates = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| unusable_file(field, path, &error))?;
    match certificates.is_empty() {
        true => Err(unusable_file(field, path, &"it holds no certificate in PEM format")),
        false => Ok(certificates),
    }
}

fn load_key(path: &Path) -> Result<PrivateKeyDer<'static>, IdentityError> {
    let text = read_file("key", path)?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| unusable_file("key", path, &error))
}

fn read_file(field: &'static str, path: &Path) -> Result<Vec<u8>, IdentityError> {
    firn_files::read_input(path, FILE_BYTES_MAX).map_err(|error| unusable_file(field, path, &error))
}

fn unusable_file(
    field: &'static str,
    path: &Path,
    reason: &dyn std::fmt::Display,
) -> IdentityError {
    IdentityError::File { field, path: path.to_owned(), reason: reason.to_string() }
}
