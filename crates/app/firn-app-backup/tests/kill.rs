//! kill -9 at random instants: the recovered state is a committed one, and never older than the
//! last acknowledged one.
//!
//! An application (this test program, started as a child) commits transaction after transaction,
//! each of which fills its areas with words that all follow from the transaction's number, and
//! prints which it has begun and which were acknowledged. The test kills it, or the backup process,
//! or both. Then the test recovers the state and checks it.

#![cfg(test)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests may fail so")]

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use firn_app::{
    AcknowledgePolicy, Area, BackupTarget, Compression, Error, FsyncPolicy, Session,
    SessionOptions, TlsIdentity, TrackerKind,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// Rounds of each test; `FIRN_APP_KILLS` asks for more.
fn rounds() -> u64 {
    std::env::var("FIRN_APP_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(60)
}

const CHILD: &str = "FIRN_APP_TEST_CHILD";
const LENGTHS: [usize; 2] = [3000, 70_001];
const LAG: u64 = 5;

/// A child's instructions, in its environment: `tracker target acknowledge path-or-address
/// directory-of-keys`.
struct Orders {
    kind: TrackerKind,
    target: BackupTarget,
}

fn orders(text: &str) -> Orders {
    let words: Vec<&str> = text.split(' ').collect();
    let target = match words[1] {
        "file" => BackupTarget::file(words[3]).fsync(FsyncPolicy::Never),
        _ => BackupTarget::remote(words[3], identity(Path::new(words[4]))),
    };
    let acknowledge = match words[2] {
        "sync" => AcknowledgePolicy::Sync,
        _ => AcknowledgePolicy::Async { lag_max: LAG },
    };
    let target = target.acknowledge(acknowledge);
    let compression = if words[0].len() % 2 == 0 { Compression::Lz4 } else { Compression::None };
    Orders { kind: words[0].parse().unwrap(), target: target.compression(compression) }
}

fn identity(dir: &Path) -> TlsIdentity {
    TlsIdentity { certificate: dir.join("cert"), key: dir.join("key"), authority: dir.join("ca") }
}

fn open(kind: TrackerKind, target: BackupTarget) -> Result<(Session, [Area; 2], u64), Error> {
    let patience = Duration::from_secs(60);
    let options = SessionOptions::new("victim").tracker(kind).backup(target);
    let options = options.backup_timeout(patience);
    let mut session = Session::open(options)?;
    let areas = LENGTHS.map(|len| session.allocate(&format!("{len}"), len).unwrap());
    let sequence = session.recover()?;
    Ok((session, areas, sequence))
}

/// The byte of an area after a transaction: every transaction changes some bytes everywhere.
fn byte(transaction: u64, at: usize) -> u8 {
    // Byte `at` was last written by the latest transaction that is `at` modulo 7.
    let last = (0..7).map(|back| transaction.saturating_sub(back)).find(|t| t % 7 == at as u64 % 7);
    let last = last.unwrap_or(0);
    if last == 0 {
        0
    } else {
        (last.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8 ^ at as u8 | 1
    }
}

fn check(session: &Session, areas: &[Area; 2], sequence: u64) {
    for area in areas {
        for (at, &found) in session.bytes(area).iter().enumerate() {
            assert_eq!(found, byte(sequence, at), "byte {at} after transaction {sequence}");
        }
    }
}

/// The child. Without orders it is an empty test.
#[test]
fn child() {
    let Ok(text) = std::env::var(CHILD) else { return };
    let Orders { kind, target } = orders(&text);
    let (mut session, areas, mut sequence) = open(kind, target).unwrap();
    let mut out = std::io::stdout();
    writeln!(out, "\nrecovered {sequence}").unwrap();
    check(&session, &areas, sequence);
    loop {
        sequence += 1;
        writeln!(out, "begun {sequence}").unwrap();
        let mut transaction = session.begin().unwrap();
        for area in &areas {
            let bytes = transaction.bytes(area);
            for at in ((sequence % 7) as usize..bytes.len()).step_by(7) {
                bytes[at] = byte(sequence, at);
            }
        }
        assert_eq!(transaction.commit().unwrap(), sequence);
        writeln!(out, "done {sequence}").unwrap();
        out.flush().unwrap();
    }
}

struct Application {
    child: Child,
    out: BufReader<ChildStdout>,
    begun: u64,
    done: u64,
}

impl Application {
    fn start(orders: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(CHILD, orders)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let mut application = Self { child, out, begun: 0, done: 0 };
        while application.line().is_some_and(|line| !line.starts_with("recovered")) {}
        application
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        (self.out.read_line(&mut line).unwrap() > 0).then(|| {
            let number = line.split_whitespace().nth(1).and_then(|number| number.parse().ok());
            match (line.split(' ').next(), number) {
                (Some("begun"), Some(number)) => self.begun = number,
                (Some("done"), Some(number)) => self.done = number,
                (Some("recovered"), Some(number)) => (self.begun, self.done) = (number, number),
                _ => {}
            }
            line
        })
    }

    /// Lets it work for a while that is counted in lines, then kills it within the next transaction
    /// or so.
    fn kill(mut self, lines: u64, micros: u64) -> (u64, u64) {
        for _ in 0..lines {
            self.line();
        }
        thread::sleep(Duration::from_micros(micros));
        self.child.kill().unwrap();
        while self.line().is_some() {}
        let status = self.child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "the application ended by itself: {status}");
        (self.begun, self.done)
    }
}

/// Random enough, and the same every time.
fn draw(round: u64, most: u64) -> u64 {
    let mut z = round.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678_9abc_def1);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 29)) % most
}

fn kind(round: u64) -> TrackerKind {
    [TrackerKind::Assisted, TrackerKind::Pages, TrackerKind::Compare, TrackerKind::Scan]
        [round as usize % 4]
}

/// What must come back after a kill: at least what was acknowledged, less the lag, and nothing that
/// was not begun.
fn verify(sequence: u64, (begun, done): (u64, u64), lag: u64) {
    assert!(sequence + lag >= done, "transaction {done} was acknowledged, {sequence} came back");
    assert!(sequence <= begun, "transaction {begun} was the last, {sequence} came back");
}

#[test]
fn an_application_with_a_log() {
    let dir = tempfile::tempdir().unwrap();
    for (acknowledge, lag) in [("sync", 0), ("async", LAG)] {
        let log = dir.path().join(format!("{acknowledge}.log"));
        let mut last = 0;
        for round in 0..rounds() {
            let orders = format!("{} file {acknowledge} {} -", kind(round), log.display());
            let ended = Application::start(&orders).kill(draw(round, 40), draw(round + 1000, 3000));
            let target = BackupTarget::file(&log).fsync(FsyncPolicy::Never);
            let (session, areas, sequence) = open(kind(round + 1), target).unwrap();
            check(&session, &areas, sequence);
            verify(sequence, ended, lag);
            assert!(sequence >= last);
            last = sequence;
        }
    }
}

/// A backup process and the keys of both sides.
struct Backup {
    child: Child,
    address: String,
    dir: PathBuf,
}

impl Backup {
    fn start(dir: &Path, listen: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_firn-app-backup"))
            .args(["--listen", listen, "--fsync", "never"])
            .arg("--directory")
            .arg(dir.join("logs"))
            .arg("--certificate")
            .arg(dir.join("backup/cert"))
            .arg("--key")
            .arg(dir.join("backup/key"))
            .arg("--authority")
            .arg(dir.join("backup/ca"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").expect("it says where it listens");
        Self { child, address: address.to_owned(), dir: dir.to_owned() }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn restart(&mut self) {
        *self = Self::start(&self.dir.clone(), &self.address.clone());
    }

    /// Directory of the application's keys.
    fn keys(&self) -> PathBuf {
        self.dir.join("application")
    }
}

impl Drop for Backup {
    fn drop(&mut self) {
        self.kill();
    }
}

fn make_keys(dir: &Path) {
    fs::create_dir(dir.join("logs")).unwrap();
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    for (side, name) in [("backup", "127.0.0.1"), ("application", "application")] {
        let dir = dir.join(side);
        fs::create_dir(&dir).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = certificate.signed_by(&key, &authority).unwrap();
        fs::write(dir.join("cert"), certificate.pem()).unwrap();
        fs::write(dir.join("key"), key.serialize_pem()).unwrap();
        fs::set_permissions(dir.join("key"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(dir.join("ca"), authority.pem()).unwrap();
    }
}

fn remote(backup: &Backup) -> BackupTarget {
    BackupTarget::remote(backup.address.clone(), identity(&backup.keys()))
}

#[test]
fn an_application_with_a_backup_process() {
    let dir = tempfile::tempdir().unwrap();
    make_keys(dir.path());
    let mut backup = Backup::start(dir.path(), "127.0.0.1:0");
    let mut last = 0;
    for round in 0..rounds() {
        let acknowledge = if round % 2 == 0 { "sync" } else { "async" };
        let keys = backup.keys();
        let kind_now = kind(round);
        let orders =
            format!("{kind_now} remote {acknowledge} {} {}", backup.address, keys.display());
        let mut application = Application::start(&orders);
        // In every other round the backup dies and restarts while the application continues.
        if round % 3 > 0 {
            for _ in 0..draw(round, 20) {
                application.line();
            }
            thread::sleep(Duration::from_micros(draw(round + 500, 2000)));
            backup.kill();
            if round % 3 == 1 {
                backup.restart();
            }
        }
        let lines = if round % 3 == 2 { 0 } else { draw(round + 7, 30) };
        let ended = application.kill(lines, draw(round + 1000, 3000));
        if round % 3 == 2 {
            backup.restart();
        }
        let (session, areas, sequence) = open(kind(round + 1), remote(&backup)).unwrap();
        check(&session, &areas, sequence);
        verify(sequence, ended, if round % 2 == 0 { 0 } else { LAG });
        assert!(sequence >= last);
        last = sequence;
    }
    // The log that the backup keeps is one like any other.
    backup.kill();
    let (session, areas, sequence) =
        open(TrackerKind::Assisted, BackupTarget::file(dir.path().join("logs/victim.log")))
            .unwrap();
    check(&session, &areas, sequence);
    assert_eq!(sequence, last);
}

#[test]
fn strangers_are_refused() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    make_keys(dir.path());
    make_keys(other.path());
    let backup = Backup::start(dir.path(), "127.0.0.1:0");
    let stranger = identity(&other.path().join("application"));
    let target = BackupTarget::remote(backup.address.clone(), stranger);
    assert!(matches!(
        Session::open(SessionOptions::new("victim").backup(target)),
        Err(Error::Backup(_))
    ));
    // A client that does not speak TLS at all.
    let mut stream = std::net::TcpStream::connect(&backup.address).unwrap();
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    // Those who are known are served as before.
    open(TrackerKind::Assisted, remote(&backup)).unwrap();
    let options = SessionOptions::new("../victim").backup(remote(&backup));
    assert!(matches!(Session::open(options), Err(Error::Backup(_))));
}
