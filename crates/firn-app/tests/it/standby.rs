//! A warm standby takes over.

use std::fs;
use std::path::Path;
use std::time::Duration;

use firn_app::{
    Acknowledge, Compression, Error, Fsync, Identity, Kind, Options, ServerOptions, Session,
    Standby, Target,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// Keys of two sides that accept each other.
fn identities(dir: &Path) -> [Identity; 2] {
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
        let identity = Identity {
            certificate: dir.join("cert"),
            key: dir.join("key"),
            authority: dir.join("ca"),
        };
        fs::write(&identity.certificate, certificate.pem()).unwrap();
        fs::write(&identity.key, key.serialize_pem()).unwrap();
        fs::write(&identity.authority, authority.pem()).unwrap();
        identity
    })
}

fn standby(dir: &Path, identity: &Identity) -> Standby {
    let options = ServerOptions {
        listen: "127.0.0.1:0".into(),
        identity: identity.clone(),
        directory: dir.to_owned(),
        fsync: Fsync::Never,
    };
    Standby::start(options).unwrap()
}

#[test]
fn a_standby_goes_on_where_the_primary_was() {
    for acknowledge in [Acknowledge::Sync, Acknowledge::Async { lag_max: 3 }] {
        let dir = tempfile::tempdir().unwrap();
        let [ours, theirs] = identities(dir.path());
        let standby = standby(dir.path(), &ours);
        let target = Target::remote(standby.address().to_string(), theirs)
            .patience(Duration::ZERO)
            .acknowledge(acknowledge)
            .compression(Compression::Lz4);
        let options = Options::new("pair").tracker(Kind::Assisted).backup(target);
        let mut primary = Session::open(options).unwrap();
        let area = primary.allocate("area", 10_000).unwrap();
        for number in 1..=50_u8 {
            let mut transaction = primary.begin().unwrap();
            transaction.bytes(&area)[usize::from(number) * 100] = number;
            transaction.commit().unwrap();
        }
        primary.flush().unwrap();
        let committed = primary.bytes(&area).to_vec();

        let mut second = Session::open(Options::new("pair").tracker(Kind::Pages)).unwrap();
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

        // The second goes on with the log, which a third can recover.
        let mut transaction = second.begin().unwrap();
        transaction.bytes(&copy)[9999] = 99;
        assert_eq!(transaction.commit().unwrap(), 51);
        let committed = second.bytes(&copy).to_vec();
        drop(second);
        let log = Target::file(dir.path().join("pair.log"));
        let mut third = Session::open(Options::new("pair").backup(log)).unwrap();
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
    let remote = || Target::remote(standby.address().to_string(), theirs.clone());
    let file = dir.path().join("file");
    let commit = |targets: &[Target], expected: u64| {
        let options = Options::new("pair").tracker(Kind::Assisted);
        let options = targets.iter().cloned().fold(options, Options::backup);
        let mut session = Session::open(options).unwrap();
        let area = session.allocate("area", 1000).unwrap();
        assert_eq!(session.recover().unwrap(), expected);
        assert_eq!(session.bytes(&area)[..8], expected.to_le_bytes());
        let mut transaction = session.begin().unwrap();
        transaction.words(&area)[0] = expected + 1;
        transaction.commit().unwrap();
    };
    commit(&[Target::file(&file)], 0);
    commit(&[Target::file(&file), remote()], 1);
    commit(&[remote()], 2);
    commit(&[Target::file(&file), remote()], 3);
    commit(&[Target::file(&file)], 4);
}
