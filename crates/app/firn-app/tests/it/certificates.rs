//! A session of a backup server belongs to its certificate.

use std::error::Error as _;
use std::fs::{self, Permissions};
use std::io::{self, Read as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use firn_app::{
    Area, BackupServer, BackupServerOptions, BackupTarget, Error, FsyncPolicy, Session,
    SessionOptions, TargetCondition, TlsIdentity, TrackerKind, WarmStandby, copy_session,
};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, Issuer, KeyPair,
    date_time_ymd,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, ClientConnection, RootCertStore, SupportedProtocolVersion};

type Authority = CertifiedIssuer<'static, KeyPair>;

fn new_authority(name: &str) -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

fn named(name: &str) -> CertificateParams {
    let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

/// Writes the files of one side.
fn write_identity(dir: &Path, certificate: &str, key: &KeyPair, authority: &str) -> TlsIdentity {
    fs::create_dir(dir).unwrap();
    let identity = TlsIdentity {
        certificate: dir.join("cert"),
        key: dir.join("key"),
        authority: dir.join("ca"),
    };
    fs::write(&identity.certificate, certificate).unwrap();
    fs::write(&identity.key, key.serialize_pem()).unwrap();
    fs::set_permissions(&identity.key, Permissions::from_mode(0o600)).unwrap();
    fs::write(&identity.authority, authority).unwrap();
    identity
}

/// An authority, a server with a certificate of it, and a directory for all files.
struct Site {
    dir: tempfile::TempDir,
    authority: Authority,
    server: Option<BackupServer>,
    address: String,
    table: Option<String>,
}

impl Site {
    fn new(table: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (authority, address) = (new_authority("authority"), String::new());
        let table = table.map(str::to_owned);
        let mut site = Self { dir, authority, server: None, address, table };
        let server = site.identity("server", named("server"));
        fs::create_dir(site.path("logs")).unwrap();
        let server = BackupServer::start(site.options(&server)).unwrap();
        site.address = server.address().to_string();
        site.server = Some(server);
        site
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn options(&self, server: &TlsIdentity) -> BackupServerOptions {
        let options = BackupServerOptions::new("127.0.0.1:0", server.clone(), self.path("logs"))
            .fsync(FsyncPolicy::Never);
        let Some(table) = &self.table else { return options };
        fs::write(self.path("table"), table).unwrap();
        options.sessions(self.path("table"))
    }

    fn identity(&self, side: &str, params: CertificateParams) -> TlsIdentity {
        self.identity_by(&self.authority, side, params)
    }

    /// A certificate of another authority, for a peer that accepts this server.
    fn identity_by(
        &self,
        authority: &Issuer<'_, KeyPair>,
        side: &str,
        params: CertificateParams,
    ) -> TlsIdentity {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, authority).unwrap();
        write_identity(&self.path(side), &certificate.pem(), &key, &self.authority.pem())
    }

    fn target(&self, identity: &TlsIdentity) -> BackupTarget {
        BackupTarget::remote(self.address.clone(), identity.clone())
    }

    fn open(&self, session: &str, identity: &TlsIdentity) -> Result<Open, Error> {
        self.open_with(SessionOptions::new(session), identity)
    }

    fn open_with(&self, options: SessionOptions, identity: &TlsIdentity) -> Result<Open, Error> {
        let options = options
            .tracker(TrackerKind::Assisted)
            .backup(self.target(identity))
            .backup_timeout(Duration::from_millis(300));
        let mut session = Session::open(options)?;
        let area = session.allocate("area", 1000)?;
        session.recover()?;
        Ok(Open { session, area })
    }

    /// Whether the session's state can be fetched, and why not.
    fn fetch(&self, session: &str, identity: &TlsIdentity) -> Result<u64, String> {
        let to = tempfile::tempdir().unwrap();
        copy_session(&self.address, session, identity, &to.path().join("log"))
            .map_err(|error| describe(&error))
    }
}

struct Open {
    session: Session,
    area: Area,
}

impl Open {
    fn commit(&mut self) -> Result<u64, Error> {
        let next = self.session.sequence() + 1;
        let mut transaction = self.session.begin().unwrap();
        transaction.words(&self.area)[0] = next;
        transaction.commit()
    }
}

fn describe(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        words += &format!(": {error}");
        cause = error.source();
    }
    words
}

fn refusal<T>(result: Result<T, Error>) -> String {
    match result {
        Ok(_) => panic!("it was not refused"),
        Err(error) => {
            assert!(matches!(error, Error::Backup(_)), "{error}");
            describe(error.source().unwrap())
        }
    }
}

/// Greets the server with another TLS client, and returns its error.
fn greet(
    site: &Site,
    identity: Option<&TlsIdentity>,
    version: &'static SupportedProtocolVersion,
) -> io::Error {
    let mut roots = RootCertStore::empty();
    roots.add(site.authority.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots);
    let config = match identity {
        None => config.with_no_client_auth(),
        Some(identity) => config
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_file(&identity.certificate).unwrap()],
                PrivateKeyDer::from_pem_file(&identity.key).unwrap(),
            )
            .unwrap(),
    };
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let tls = ClientConnection::new(Arc::new(config), name).unwrap();
    let socket = TcpStream::connect(&site.address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut stream = rustls::StreamOwned::new(tls, socket);
    let mut answer = [0];
    match stream.read(&mut answer) {
        Ok(count) => panic!("{count} bytes of an answer"),
        Err(error) => error,
    }
}

#[test]
fn ten_wrong_certificates_can_neither_read_nor_write_nor_take_over() {
    let site = Site::new(None);
    let owner = site.identity("owner", named("owner"));
    let mut ledger = site.open("ledger", &owner).unwrap();
    assert_eq!(ledger.commit().unwrap(), 1);
    let (other_authority, namesake) = (new_authority("other"), new_authority("authority"));
    let (mut expired, mut early) = (named("owner"), named("owner"));
    (expired.not_before, expired.not_after) =
        (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
    (early.not_before, early.not_after) = (date_time_ymd(2090, 1, 1), date_time_ymd(2091, 1, 1));
    let own_key = KeyPair::generate().unwrap();
    let self_signed = named("owner").self_signed(&own_key).unwrap().pem();
    let ca = site.authority.pem();
    let with_owners_certificate = TlsIdentity {
        certificate: owner.certificate.clone(),
        ..site.identity("thief", named("owner"))
    };
    let wrong = [
        ("another name", site.identity("1", named("mallory")), "belongs to another certificate"),
        (
            "the name, another key",
            site.identity("2", named("owner")),
            "belongs to another certificate",
        ),
        ("the server's", site.identity("3", named("server")), "belongs to another certificate"),
        (
            "no name",
            site.identity("4", CertificateParams::new(vec![]).unwrap()),
            "belongs to another certificate",
        ),
        ("expired", site.identity("5", expired), "CertificateExpired"),
        ("not valid yet", site.identity("6", early), "Certificate"),
        ("another authority", site.identity_by(&other_authority, "7", named("owner")), "UnknownCA"),
        (
            "an authority of the same name",
            site.identity_by(&namesake, "9", named("owner")),
            "DecryptError",
        ),
        ("self-signed", write_identity(&site.path("8"), &self_signed, &own_key, &ca), "UnknownCA"),
        ("a stolen certificate", with_owners_certificate, "key"),
    ];
    for (what, identity, expected) in &wrong {
        let since = Instant::now();
        let refused = refusal(site.open("ledger", identity));
        assert!(refused.contains(expected), "{what}: {refused}");
        let fetched = site.fetch("ledger", identity).expect_err(what);
        assert!(fetched.contains(expected), "{what}: {fetched}");
        assert!(since.elapsed() < Duration::from_secs(5), "{what} waits");
        // The owner was not shut out.
        ledger.commit().unwrap();
    }
    let error = greet(&site, None, &TLS13).to_string();
    assert!(error.contains("CertificateRequired"), "{error}");
    let error = greet(&site, Some(&owner), &TLS12).to_string();
    assert!(error.contains("ProtocolVersion"), "{error}");
    // Others have sessions of their own.
    let mut other = site.open("other", &wrong[0].1).unwrap();
    other.commit().unwrap();
    assert!(refusal(site.open("other", &owner)).contains("belongs to another certificate"));
    assert_eq!(ledger.commit().unwrap(), wrong.len() as u64 + 2);
    let committed = ledger.session.sequence();
    drop(ledger);
    assert_eq!(site.fetch("ledger", &owner), Ok(committed));
    assert_eq!(site.open("ledger", &owner).unwrap().session.sequence(), committed);
}

#[test]
fn a_log_without_an_owner_is_refused() {
    let site = Site::new(None);
    let owner = site.identity("owner", named("owner"));
    site.open("ledger", &owner).unwrap().commit().unwrap();
    let path = site.path("logs/ledger.owner");
    let right = fs::read_to_string(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    fs::remove_file(&path).unwrap();
    let refused = refusal(site.open("ledger", &owner));
    assert!(refused.contains("NAME.owner"), "{refused}");
    // The error has what the file must contain.
    let line = refused.split_once("key:").unwrap().1;
    let line = format!("key:{}\n", &line[..64]);
    assert_eq!(line, right);
    for bad in ["", "key:12", &"0".repeat(64)] {
        fs::write(&path, bad).unwrap();
        let refused = refusal(site.open("ledger", &owner));
        assert!(refused.contains("ledger.owner: it must be"), "{refused}");
    }
    fs::write(&path, line).unwrap();
    assert_eq!(site.open("ledger", &owner).unwrap().session.sequence(), 1);
}

const TABLE: &str = r#"
[[permissions]]
session = "ledger*"
certificate = "reader"
roles = ["read"]

[[permissions]]
session = "ledger"
certificate = "feed"
roles = ["append"]

[[permissions]]
session = "*"
certificate = "chief"
roles = ["read", "append", "take-over"]

[[permissions]]
session = "books-?"
certificate = "feed"
roles = ["read", "append"]
"#;

#[test]
fn a_table_gives_roles() {
    let site = Site::new(Some(TABLE));
    let [reader, feed, chief, other] =
        ["reader", "feed", "chief", "other"].map(|name| site.identity(name, named(name)));
    // Append: it may create and commit, and neither read nor go back.
    let mut ledger = site.open("ledger", &feed).unwrap();
    for expected in 1..4 {
        assert_eq!(ledger.commit().unwrap(), expected);
    }
    drop(ledger);
    assert!(site.fetch("ledger", &feed).unwrap_err().contains("role read"));
    assert!(refusal(site.open("ledger", &feed)).contains("role read"));
    let anew = SessionOptions::new("ledger").discard(true);
    let mut discarding = site.open_with(anew, &feed).unwrap();
    let refused = refusal(discarding.commit());
    assert!(refused.contains("does not permit to replace it by an older state"), "{refused}");
    drop(discarding);
    // Read: nothing but that.
    assert_eq!(site.fetch("ledger", &reader), Ok(3));
    assert!(refusal(site.open("ledger", &reader)).contains("role append"));
    assert!(refusal(site.open("ledger-2", &reader)).contains("role append"));
    // No entry for the session, or for the certificate.
    for (session, identity) in [("ledger-2", &feed), ("books-12", &feed), ("ledger", &other)] {
        assert!(refusal(site.open(session, identity)).contains("role append"), "{session}");
        assert!(site.fetch(session, identity).unwrap_err().contains("role read"), "{session}");
    }
    // Another certificate's session is taken over by that role only.
    let mut books = site.open("books-1", &feed).unwrap();
    books.commit().unwrap();
    let mut taken = site.open("books-1", &chief).unwrap();
    assert_eq!(taken.commit().unwrap(), 2);
    assert!(refusal(books.commit()).contains("taken over"));
    assert_eq!(books.session.backup_status().unwrap()[0].condition, TargetCondition::Superseded);
    drop(books);
    let refused = refusal(site.open("books-1", &feed));
    assert!(refused.contains("lacks the role take-over"), "{refused}");
    assert_eq!(taken.commit().unwrap(), 3);
}

#[test]
fn a_table_names_fingerprints_too_and_can_be_changed() {
    let mut site = Site::new(Some(""));
    let identity = site.identity("app", named("app"));
    // The error has the fingerprint of the key.
    let refused = refusal(site.open("ledger", &identity));
    let key = &refused.split_once("key:").unwrap().1[..64];
    let entry = |certificate: &str| {
        format!(
            "[[permissions]]\nsession = \"*\"\ncertificate = \"{certificate}\"\nroles = [\"read\", \"append\"]\n"
        )
    };
    let der = CertificateDer::from_pem_file(&identity.certificate).unwrap();
    fs::write(site.path("der"), &der).unwrap();
    let hash = Command::new("sha256sum").arg(site.path("der")).output().unwrap().stdout;
    let hash = String::from_utf8(hash).unwrap()[..64].to_uppercase();
    let pairs: Vec<_> =
        hash.as_bytes().chunks(2).map(|pair| str::from_utf8(pair).unwrap()).collect();
    let table = site.path("table");
    for certificate in [format!("key:{key}"), format!("sha256:{}", pairs.join(":"))] {
        fs::write(&table, entry(&certificate)).unwrap();
        site.open("ledger", &identity).unwrap().commit().unwrap();
    }
    // A running session keeps its connection, until the server has the table apply to all.
    let mut ledger = site.open("ledger", &identity).unwrap();
    fs::write(&table, entry("another")).unwrap();
    ledger.commit().unwrap();
    site.server.as_ref().unwrap().reload().unwrap();
    assert!(refusal(ledger.commit()).contains("ledger"));
    // A table that others can write, or that is malformed, permits nothing.
    fs::write(&table, entry(&format!("key:{key}"))).unwrap();
    for (mode, text, expected) in [
        (0o646, entry(&format!("key:{key}")), "chmod go-w"),
        (0o600, "[permissions]".to_owned(), "line 1"),
    ] {
        fs::write(&table, text).unwrap();
        fs::set_permissions(&table, Permissions::from_mode(mode)).unwrap();
        assert!(refusal(site.open("other", &identity)).contains(expected));
        let error = site.server.as_ref().unwrap().reload().unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        let server = site.identity(&format!("server-{mode}"), named("server"));
        let options =
            BackupServerOptions::new("127.0.0.1:0", server, site.path("logs")).sessions(&table);
        assert!(BackupServer::start(options).unwrap_err().to_string().contains(expected));
    }
    // Mended, it is valid again for the session that runs.
    fs::write(&table, entry("app")).unwrap();
    let since = Instant::now();
    while ledger.commit().is_err() {
        assert!(since.elapsed() < Duration::from_secs(30));
        thread::sleep(Duration::from_millis(10));
    }
    drop(ledger);
    site.server = None;
}

#[test]
fn a_standby_takes_commits_of_one_certificate() {
    let site = Site::new(None);
    let dir = tempfile::tempdir().unwrap();
    let standby = site.identity("standby", named("standby"));
    let (primary, wrong) =
        (site.identity("primary", named("primary")), site.identity("wrong", named("primary")));
    let options = BackupServerOptions::new("127.0.0.1:0", standby, dir.path());
    let standby = WarmStandby::start(options.fsync(FsyncPolicy::Never)).unwrap();
    let site = Site { address: standby.address().to_string(), ..site };
    let mut session = site.open("pair", &primary).unwrap();
    session.commit().unwrap();
    let refused = refusal(site.open_with(SessionOptions::new("pair").discard(true), &wrong));
    assert!(refused.contains("belongs to another certificate"), "{refused}");
    session.commit().unwrap();
    let mut second =
        Session::open(SessionOptions::new("pair").tracker(TrackerKind::Pages)).unwrap();
    let area = second.allocate("area", 1000).unwrap();
    assert_eq!(standby.take_over(&mut second).unwrap(), 2);
    assert_eq!(second.bytes(&area)[0], 2);
}

#[test]
fn a_key_that_others_can_read_is_refused() {
    let site = Site::new(None);
    let identity = site.identity("app", named("app"));
    for mode in [0o640, 0o604, 0o666] {
        fs::set_permissions(&identity.key, Permissions::from_mode(mode)).unwrap();
        let refused = refusal(site.open("ledger", &identity));
        assert!(refused.contains(&format!("{mode:04o}: `chmod 600")), "{refused}");
        let options = BackupServerOptions::new("127.0.0.1:0", identity.clone(), site.path("logs"));
        let error = BackupServer::start(options).unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
    }
}
