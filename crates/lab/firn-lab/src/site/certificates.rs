//! Certificates: an authority for one site, and a certificate for each host.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};

/// The authority that signs the certificates of a site.
pub(super) struct SiteAuthority(CertifiedIssuer<'static, KeyPair>);

impl SiteAuthority {
    pub(super) fn new() -> Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Ok(Self(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?))
    }

    /// Writes a host's certificate, its key and the authority's own certificate.
    pub(super) fn write_certificate(&self, dir: &Path, host: &str) -> Result<()> {
        let mut params = CertificateParams::new(vec![host.to_owned()])?;
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        fs::write(dir.join("cert.pem"), params.signed_by(&key, &self.0)?.pem())?;
        fs::write(dir.join("key.pem"), key.serialize_pem())?;
        fs::set_permissions(dir.join("key.pem"), fs::Permissions::from_mode(0o600))?;
        Ok(fs::write(dir.join("ca.pem"), self.0.pem())?)
    }
}
