//! The memory that a session needs, as a multiple of its areas: at most 2.2 times, at any instant.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_app::{
    Area, BackupServer, BackupServerOptions, BackupTarget, Compression, FsyncPolicy, Session,
    SessionOptions, TlsIdentity, TrackerKind,
};

use crate::standby::identities;

const CHILD: &str = "FIRN_APP_SIZE_CHILD";
const MAX: f64 = 2.2;
const PAGE_WORDS: usize = 512;

/// The size of all areas in MiB; `FIRN_APP_MIB` sets another one.
fn mib() -> usize {
    std::env::var("FIRN_APP_MIB").ok().and_then(|mib| mib.parse().ok()).unwrap_or(64)
}

/// The maximum of resident memory so far, in MiB.
fn peak_mib() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    let kib: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib / 1024.0
}

fn mix(round: u64, at: usize) -> u64 {
    (round << 32 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

/// A session in a process of its own, and the memory that the process had before.
struct Measured {
    before: f64,
    session: Session,
    areas: Vec<Area>,
    round: u64,
}

impl Measured {
    fn open(target: BackupTarget, count: usize) -> Self {
        let before = peak_mib();
        // Disks that need 10 s to store a state are not what is measured.
        let options = SessionOptions::new("size")
            .tracker(TrackerKind::Assisted)
            .backup(target)
            .backup_timeout(Duration::from_secs(200));
        let mut session = Session::open(options).unwrap();
        // Whole pages: the rest of a page is no part of an area.
        let len = (mib() << 20) / count / 4096 * 4096;
        let areas: Vec<_> =
            (0..count).map(|n| session.allocate(&n.to_string(), len).unwrap()).collect();
        Self { before, session, areas, round: 0 }
    }

    fn report(&self, what: &str) {
        println!("\npeak {:.3} {what}", (peak_mib() - self.before) / mib() as f64);
    }

    /// Writes all words, or one word of each page.
    fn write(&mut self, step: usize) {
        self.round += 1;
        let mut transaction = self.session.begin().unwrap();
        for area in &self.areas {
            for (at, word) in transaction.words(area).iter_mut().enumerate().step_by(step) {
                *word = mix(self.round, at);
            }
        }
        transaction.commit().unwrap();
    }

    fn write_page(&mut self) {
        let mut transaction = self.session.begin().unwrap();
        transaction.words(&self.areas[0])[..PAGE_WORDS].fill(self.round);
        transaction.commit().unwrap();
    }

    fn commit(&mut self) {
        self.write(1);
        self.report("first commit");
        self.write_page();
        self.report("commit of a page");
        self.write(1);
        self.report("commit of everything");
        self.write(PAGE_WORDS);
        self.report("commit of a word of each page");
        // The log becomes four times as large as its state in between.
        (0..3).for_each(|_| self.write(1));
        self.report("compaction");
        self.write_page();
    }

    fn recover(&mut self) {
        assert_eq!(self.session.recover().unwrap(), 8);
        self.report("recovery");
        for (number, area) in self.areas.iter().enumerate() {
            let bytes = self.session.bytes(area).chunks_exact(8);
            let words = bytes.map(|word| u64::from_le_bytes(word.try_into().unwrap()));
            let is_right = |(at, word)| match number == 0 && at < PAGE_WORDS {
                true => word == 6,
                false => word == mix(6, at),
            };
            assert!(words.enumerate().all(is_right), "area {number}");
        }
        self.round = 6;
        self.write(1);
        self.report("commit after a recovery");
    }
}

/// The child: its arguments are the work, the count of areas, and the log or the backup.
fn work(arguments: &str) {
    let words: Vec<_> = arguments.split(' ').collect();
    let [work, count, at] = words[..] else { panic!("{arguments}") };
    let target = match at.split_once('@') {
        None => BackupTarget::file(at).fsync(FsyncPolicy::Never),
        Some((keys, address)) => {
            let file = |name| Path::new(keys).join(name);
            let (certificate, key, authority) = (file("cert"), file("key"), file("ca"));
            let identity = TlsIdentity { certificate, key, authority };
            BackupTarget::remote(address, identity).compression(Compression::Lz4)
        }
    };
    let mut measured = Measured::open(target, count.parse().unwrap());
    match work {
        "commit" => measured.commit(),
        _ => measured.recover(),
    }
}

/// Runs both kinds of work with a log or a backup, and checks each peak.
fn check(test: &str, count: usize, at: &str) {
    for (kind, steps) in [("commit", 5), ("recover", 2)] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(CHILD, format!("{kind} {count} {at}"))
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let peaks: Vec<_> =
            text.lines().filter_map(|line| line.strip_prefix("peak ")?.split_once(' ')).collect();
        assert_eq!(peaks.len(), steps, "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        for (peak, what) in peaks {
            println!("{what}, {count} areas: {peak} times the areas");
            assert!(peak.parse::<f64>().unwrap() <= MAX, "{what}: {peak}, {MAX} at most");
        }
    }
}

fn child() -> bool {
    let arguments = std::env::var(CHILD);
    arguments.as_deref().map(work).is_ok()
}

#[test]
fn memory_with_a_log() {
    if !child() {
        let dir = tempfile::tempdir().unwrap();
        for count in [1, 1000] {
            let log = dir.path().join(count.to_string());
            check("size::memory_with_a_log", count, log.to_str().unwrap());
        }
    }
}

#[test]
fn memory_with_a_remote_backup() {
    if !child() {
        let dir = tempfile::tempdir().unwrap();
        let [server, _] = identities(dir.path());
        let logs: PathBuf = dir.path().join("logs");
        fs::create_dir(&logs).unwrap();
        let options = BackupServerOptions::new("127.0.0.1:0", server, logs);
        let server = BackupServer::start(options.fsync(FsyncPolicy::Never)).unwrap();
        let at = format!("{}@{}", dir.path().join("primary").display(), server.address());
        check("size::memory_with_a_remote_backup", 1, &at);
    }
}
