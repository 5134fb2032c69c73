//! A warm standby takes over.

use std::fs;
use std::io;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use firn_app::{
    AcknowledgePolicy, BackupServerOptions, BackupTarget, Compression, Error, FsyncPolicy, Session,
    SessionOptions, TlsIdentity, TrackerKind, WarmStandby,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, ClientConnection, RootCertStore, SupportedProtocolVersion};

/// Keys of two sides that accept each other.
pub fn identities(dir: &Path) -> [TlsIdentity; 2] {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    ["standby", "primary"].map(|side| {
        let dir = dir.join(side);
        fs::create_dir(&dir).unwrap();
        let key = KeyPair::generate().unwrap();
        let names = vec!["127.0.0.1".to_owned()];
        let certificate =
            CertificateParams::new(names).unwrap().signed_by(&key, &authority).unwrap();
        let identity = TlsIdentity {
            certificate: dir.join("cert"),
            key: dir.join("key"),
            authority: dir.join("ca"),
        };
        fs::write(&identity.certificate, certificate.pem()).unwrap();
        fs::write(&identity.key, key.serialize_pem()).unwrap();
        fs::set_permissions(&identity.key, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&identity.authority, authority.pem()).unwrap();
        identity
    })
}

pub fn standby(dir: &Path, identity: &TlsIdentity) -> WarmStandby {
    let options = BackupServerOptions::new("127.0.0.1:0", identity.clone(), dir);
    let options = options.fsync(FsyncPolicy::Never);
    WarmStandby::start(options).unwrap()
}

/// What a client of this version of TLS, with the primary's certificate, gets in place of a
/// connection.
fn greeting(
    standby: &WarmStandby,
    identity: &TlsIdentity,
    version: &'static SupportedProtocolVersion,
) -> io::Result<()> {
    let certificate = |path| CertificateDer::from_pem_file(path).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate(&identity.authority)).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(
            vec![certificate(&identity.certificate)],
            PrivateKeyDer::from_pem_file(&identity.key).unwrap(),
        )
        .unwrap();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let mut tls = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut socket = TcpStream::connect(standby.address()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    tls.complete_io(&mut socket).map(drop)
}

#[test]
fn a_client_that_speaks_tls_1_2_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [ours, theirs] = identities(dir.path());
    let standby = standby(dir.path(), &ours);
    let error = greeting(&standby, &theirs, &TLS12).unwrap_err().to_string();
    assert!(error.contains("ProtocolVersion"), "{error}");
    greeting(&standby, &theirs, &TLS13).unwrap();
}

#[test]
fn a_standby_continues_from_the_primarys_last_commit() {
    for acknowledge in [AcknowledgePolicy::Sync, AcknowledgePolicy::Async { lag_max: 3 }] {
        let dir = tempfile::tempdir().unwrap();
        let [ours, theirs] = identities(dir.path());
        let standby = standby(dir.path(), &ours);
        let target = BackupTarget::remote(standby.address().to_string(), theirs)
            .acknowledge(acknowledge)
            .compression(Compression::Lz4);
        let options = SessionOptions::new("pair")
            .tracker(TrackerKind::Assisted)
            .backup(target)
            .backup_timeout(Duration::from_millis(50));
        let mut primary = Session::open(options).unwrap();
        let area = primary.allocate("area", 10_000).unwrap();
        for number in 1..=50_u8 {
            let mut transaction = primary.begin().unwrap();
            transaction.bytes(&area)[usize::from(number) * 100] = number;
            transaction.commit().unwrap();
        }
        primary.flush_backups().unwrap();
        let committed = primary.bytes(&area).to_vec();

        let mut second =
            Session::open(SessionOptions::new("pair").tracker(TrackerKind::Pages)).unwrap();
        second.allocate("other", 10).unwrap();
        let copy = second.allocate("area", 10_000).unwrap();
        assert_eq!(standby.take_over(&mut second).unwrap(), 50);
        assert_eq!(second.bytes(&copy), committed);

        // The primary is shut out, however often it tries.
        let mut refused = 0;
        for _ in 0..10 {
            let mut transaction = primary.begin().unwrap();
            transaction.bytes(&area)[0] ^= 1;
            refused += usize::from(matches!(transaction.commit(), Err(Error::Backup(_))));
        }
        assert!(refused >= 6, "{refused} of 10");

        // The second continues the log, which a third can recover.
        let mut transaction = second.begin().unwrap();
        transaction.bytes(&copy)[9999] = 99;
        assert_eq!(transaction.commit().unwrap(), 51);
        let committed = second.bytes(&copy).to_vec();
        drop(second);
        let log = BackupTarget::file(dir.path().join("pair.log"));
        let mut third = Session::open(SessionOptions::new("pair").backup(log)).unwrap();
        let area = third.allocate("area", 10_000).unwrap();
        assert_eq!(third.recover().unwrap(), 51);
        assert_eq!(third.bytes(&area), committed);
    }
}

#[test]
fn the_latest_of_several_backups_is_recovered_and_the_others_catch_up() {
    let dir = tempfile::tempdir().unwrap();
    let [ours, theirs] = identities(dir.path());
    let standby = standby(dir.path(), &ours);
    let remote = || BackupTarget::remote(standby.address().to_string(), theirs.clone());
    let file = dir.path().join("file");
    let commit = |targets: &[BackupTarget], expected: u64| {
        let options = SessionOptions::new("pair").tracker(TrackerKind::Assisted);
        let options = targets.iter().cloned().fold(options, SessionOptions::backup);
        let mut session = Session::open(options).unwrap();
        let area = session.allocate("area", 1000).unwrap();
        assert_eq!(session.recover().unwrap(), expected);
        assert_eq!(session.bytes(&area)[..8], expected.to_le_bytes());
        let mut transaction = session.begin().unwrap();
        transaction.words(&area)[0] = expected + 1;
        transaction.commit().unwrap();
    };
    commit(&[BackupTarget::file(&file)], 0);
    commit(&[BackupTarget::file(&file), remote()], 1);
    commit(&[remote()], 2);
    commit(&[BackupTarget::file(&file), remote()], 3);
    commit(&[BackupTarget::file(&file)], 4);
}
