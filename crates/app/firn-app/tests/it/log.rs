//! Logs: what comes back, whatever happened to the file.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use firn_app::{
    AcknowledgePolicy, BackupError, BackupTarget, Compression, Error, FsyncPolicy, Session,
    SessionOptions, TrackerKind,
};

const LEN: usize = 300;

fn target(path: &Path) -> BackupTarget {
    BackupTarget::file(path).fsync(FsyncPolicy::Never)
}

fn options(path: &Path) -> SessionOptions {
    SessionOptions::new("log").tracker(TrackerKind::Assisted).backup(target(path))
}

fn options_in(path: &Path, compression: Compression) -> SessionOptions {
    let target = target(path).compression(compression);
    SessionOptions::new("log").tracker(TrackerKind::Assisted).backup(target)
}

/// Commits so many transactions, and gives what each left and how long the log was then.
fn write(path: &Path, transactions: u8) -> Vec<(Vec<u8>, u64)> {
    write_by(options(path), path, transactions)
}

fn write_by(options: SessionOptions, path: &Path, transactions: u8) -> Vec<(Vec<u8>, u64)> {
    let mut session = Session::open(options).unwrap();
    let area = session.allocate("area", LEN).unwrap();
    session.recover().unwrap();
    (1..=transactions)
        .map(|number| {
            let mut transaction = session.begin().unwrap();
            transaction.bytes(&area)[usize::from(number) * 7] = number;
            transaction.commit().unwrap();
            (session.bytes(&area).to_vec(), fs::metadata(path).unwrap().len())
        })
        .collect()
}

fn recover(path: &Path) -> Result<(u64, Vec<u8>), Error> {
    recover_by(options(path))
}

fn recover_by(options: SessionOptions) -> Result<(u64, Vec<u8>), Error> {
    let mut session = Session::open(options)?;
    let area = session.allocate("area", LEN)?;
    let sequence = session.recover()?;
    Ok((sequence, session.bytes(&area).to_vec()))
}

fn damage(result: Result<(u64, Vec<u8>), Error>) -> Option<BackupError> {
    match result {
        Err(Error::Backup(error)) => std::sync::Arc::into_inner(error),
        _ => None,
    }
}

#[test]
fn a_log_cut_at_any_byte_gives_the_last_complete_transaction() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let states = write(&path, 5);
    let whole = fs::read(&path).unwrap();
    for len in 0..=whole.len() {
        fs::write(&path, &whole[..len]).unwrap();
        let count = states.iter().filter(|(_, end)| *end <= len as u64).count();
        let (sequence, bytes) = recover(&path).unwrap();
        assert_eq!(sequence, count as u64, "cut at {len}");
        match count {
            0 => assert_eq!(bytes, [0; LEN]),
            count => assert_eq!(bytes, states[count - 1].0, "cut at {len}"),
        }
        // The truncated record is gone, and the log continues from there.
        let after = write(&path, 1);
        assert_eq!(recover(&path).unwrap(), (sequence + 1, after[0].0.clone()));
    }
}

#[test]
fn a_damaged_record_is_an_error_with_its_offset() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let states = write(&path, 4);
    let whole = fs::read(&path).unwrap();
    let first = whole.len() - (states[3].1 as usize - states[0].1 as usize);
    let header = 8 + 4 + 4 + 3 + 8;
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        fs::write(&path, &damaged).unwrap();
        let record = [header, first, states[1].1 as usize, states[2].1 as usize];
        let start = record.iter().rev().find(|start| **start <= at);
        match (start, recover(&path)) {
            (None, result) => {
                let error = damage(result).expect("a damaged start is noticed");
                assert!(matches!(
                    error,
                    BackupError::NoLog { .. } | BackupError::OtherSession { .. }
                ));
            }
            (Some(start), result) => match damage(result) {
                Some(BackupError::Damaged { offset, .. }) => assert_eq!(offset, *start as u64),
                other => panic!("byte {at}: {other:?}"),
            },
        }
    }
}

/// Also of its length: it does not look like a record that was cut short.
#[test]
fn every_bit_of_the_last_record_counts() {
    let dir = tempfile::tempdir().unwrap();
    for (compression, transactions) in [(Compression::None, 3), (Compression::Lz4, 1)] {
        let path = dir.path().join(format!("{compression:?}"));
        let options = || options_in(&path, compression);
        let states = write_by(options(), &path, transactions);
        let whole = fs::read(&path).unwrap();
        let before = states.len().checked_sub(2).map_or(8 + 4 + 4 + 3 + 8, |at| states[at].1);
        for bit in before as usize * 8..whole.len() * 8 {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &damaged).unwrap();
            match damage(recover_by(options())) {
                Some(BackupError::Damaged { offset, .. }) => assert_eq!(offset, before),
                other => panic!("{compression:?}, bit {bit}: {other:?}"),
            }
        }
        for len in before as usize..whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            let (sequence, _) = recover_by(options()).unwrap();
            assert_eq!(sequence, u64::from(transactions) - 1, "{compression:?}, cut at {len}");
        }
    }
}

/// Where the records of a log begin, by their headers.
fn record_offsets(log: &[u8]) -> Vec<usize> {
    let (mut at, mut offsets) = (8 + 4 + 4 + 3 + 8, Vec::new());
    while at < log.len() {
        offsets.push(at);
        at += 48 + u64::from_le_bytes(log[at + 24..at + 32].try_into().unwrap()) as usize;
    }
    offsets
}

/// A transaction of several records: it counts when its last record is there.
#[test]
fn a_large_transaction_is_recovered_as_a_whole() {
    const LARGE: usize = 5 << 19;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let open = || {
        let mut session = Session::open(options(&path)).unwrap();
        let area = session.allocate("area", LARGE).unwrap();
        let sequence = session.recover();
        (session, area, sequence)
    };
    let (mut session, area, _) = open();
    for number in 1..=2 {
        let mut transaction = session.begin().unwrap();
        transaction.bytes(&area).fill(number);
        transaction.commit().unwrap();
    }
    drop(session);
    let whole = fs::read(&path).unwrap();
    let offsets = record_offsets(&whole);
    assert_eq!(offsets.len(), 6, "three records for each transaction");
    for (number, &offset) in offsets.iter().enumerate().skip(3) {
        for len in [offset, offset + 1, offset + 47, offset + 48, offset + 1000, whole.len() - 1] {
            fs::write(&path, &whole[..len.min(whole.len() - 1)]).unwrap();
            let (mut session, area, sequence) = open();
            assert_eq!(sequence.unwrap(), 1, "cut at {len}");
            assert!(session.bytes(&area).iter().all(|byte| *byte == 1), "cut at {len}");
            let mut transaction = session.begin().unwrap();
            transaction.bytes(&area)[7] = 9;
            transaction.commit().unwrap();
            drop(session);
            let (session, area, sequence) = open();
            assert_eq!((sequence.unwrap(), session.bytes(&area)[7]), (2, 9));
        }
        // The flag of a record that is continued, its length, its kind, a byte of its payload.
        for at in [6, 24, 4, 100] {
            let mut damaged = whole.clone();
            damaged[offset + at] ^= 1;
            fs::write(&path, &damaged).unwrap();
            let result = Session::open(options(&path)).map(|_| (0, Vec::new()));
            match damage(result) {
                Some(BackupError::Damaged { offset: found, .. }) => {
                    assert_eq!(found, offset as u64, "byte {at} of record {number}");
                }
                other => panic!("byte {at} of record {number}: {other:?}"),
            }
        }
    }
}

/// A power cut may leave a file longer than what was written to it.
#[test]
fn zeros_at_the_end_were_cut_short() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let states = write(&path, 2);
    for zeros in [1, 39, 40, 5000] {
        let mut bytes = fs::read(&path).unwrap();
        bytes.resize(states[1].1 as usize + zeros, 0);
        fs::write(&path, bytes).unwrap();
        assert_eq!(recover(&path).unwrap(), (2, states[1].0.clone()), "{zeros} zeros");
    }
}

#[test]
fn a_log_does_not_grow_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    for compression in [Compression::None, Compression::Lz4] {
        let path = dir.path().join(format!("{compression:?}"));
        let target = target(&path).compression(compression);
        let options = SessionOptions::new("log").tracker(TrackerKind::Assisted).backup(target);
        let mut session = Session::open(options.clone()).unwrap();
        let area = session.allocate("area", 200_000).unwrap();
        let mut largest = 0;
        for number in 0..100_u64 {
            let mut transaction = session.begin().unwrap();
            for (n, word) in transaction.words(&area).iter_mut().enumerate() {
                *word = (number << 32 | n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            }
            transaction.commit().unwrap();
            largest = largest.max(fs::metadata(&path).unwrap().len());
        }
        assert!(largest < 5 << 20, "{largest} bytes for 100 times 200,000");
        let bytes = session.bytes(&area).to_vec();
        drop(session);
        let mut session = Session::open(options).unwrap();
        let area = session.allocate("area", 200_000).unwrap();
        assert_eq!(session.recover().unwrap(), 100);
        assert_eq!(session.bytes(&area), bytes);
    }
}

#[test]
fn an_existing_log_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let states = write(&path, 3);
    let mut session = Session::open(options(&path)).unwrap();
    assert!(matches!(damage(recover(&path)), Some(BackupError::InUse { .. })));
    session.allocate("area", LEN).unwrap();
    assert!(matches!(session.begin(), Err(Error::State { what: "begin", .. })));
    drop(session);
    let mut session = Session::open(options(&path)).unwrap();
    session.allocate("area", LEN + 1).unwrap();
    assert!(matches!(session.recover(), Err(Error::OtherSize { stored: LEN, .. })));
    drop(session);
    let other = Session::open(SessionOptions::new("other").backup(target(&path)));
    assert!(matches!(other, Err(Error::Backup(_))));
    assert_eq!(recover(&path).unwrap(), (3, states[2].0.clone()));
    let mut session = Session::open(options(&path).discard(true)).unwrap();
    session.allocate("area", LEN).unwrap();
    session.begin().unwrap().commit().unwrap();
    drop(session);
    assert_eq!(recover(&path).unwrap(), (1, vec![0; LEN]));
}

#[test]
fn areas_are_known_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let names = ["one", "two", "three"];
    for round in 0..6_u8 {
        let mut session = Session::open(options(&path)).unwrap();
        // In another order each time; one more each time.
        let mut now: Vec<_> = names[..names.len().min(usize::from(round) + 1)].to_vec();
        now.rotate_left(usize::from(round) % 2);
        let areas: Vec<_> =
            now.iter().map(|name| session.allocate(name, name.len() * 100).unwrap()).collect();
        assert_eq!(session.recover().unwrap(), u64::from(round));
        for (name, area) in now.iter().zip(&areas) {
            let last = session.bytes(area)[name.len()];
            assert!(last == round || last == 0, "{name} has {last} in round {round}");
            assert!(round < 3 || last == round);
        }
        let mut transaction = session.begin().unwrap();
        for (name, area) in now.iter().zip(&areas) {
            transaction.bytes(area)[name.len()] = round + 1;
        }
        transaction.commit().unwrap();
    }
}

#[test]
fn every_policy_keeps_everything_when_closed() {
    let dir = tempfile::tempdir().unwrap();
    let policies = [
        FsyncPolicy::EveryCommit,
        FsyncPolicy::Interval(Duration::from_millis(1)),
        FsyncPolicy::Never,
    ];
    for (number, fsync) in policies.into_iter().enumerate() {
        let path = dir.path().join(number.to_string());
        let late = AcknowledgePolicy::Async { lag_max: 50 };
        let target = BackupTarget::file(&path).fsync(fsync).acknowledge(late);
        let options = SessionOptions::new("log").tracker(TrackerKind::Compare).backup(target);
        let mut session = Session::open(options).unwrap();
        let area = session.allocate("area", LEN).unwrap();
        for number in 0..200_u64 {
            let mut transaction = session.begin().unwrap();
            transaction.bytes(&area)[number as usize] = 1;
            transaction.commit().unwrap();
            assert!(session.acknowledged_sequence() + 50 >= session.sequence());
        }
        session.flush_backups().unwrap();
        assert_eq!(session.acknowledged_sequence(), 200);
        let bytes = session.bytes(&area).to_vec();
        drop(session);
        assert_eq!(recover(&path).unwrap(), (200, bytes));
    }
}

#[test]
fn a_path_that_is_no_regular_file_is_refused() {
    for path in ["/dev/full", "/dev/zero", "/proc/self/mem"] {
        let opened = Session::open(options(Path::new(path)));
        assert!(matches!(opened, Err(Error::Backup(_))), "{path}");
    }
}

/// A disk of its own, until it is dropped.
struct Disk(tempfile::TempDir);

impl Disk {
    /// `None`, and a line that says so, where nothing can be mounted.
    fn of(bytes: usize) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])
            .arg(dir.path())
            .output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Self(dir));
        }
        firn_skip::skip_test("no file system can be mounted here (needs root)");
        None
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

/// Fills an area anew in each transaction until the disk is full. Gives the last one that was
/// acknowledged.
fn fill_up(path: &Path, len: usize) -> (u64, Error) {
    let options = SessionOptions::new("full")
        .tracker(TrackerKind::Compare)
        .backup(target(path))
        .backup_timeout(Duration::from_millis(300));
    let mut session = Session::open(options).unwrap();
    let area = session.allocate("area", len).unwrap();
    let mut number = session.recover().unwrap();
    loop {
        let mut transaction = session.begin().unwrap();
        transaction.words(&area).fill(number + 1);
        match transaction.commit() {
            Ok(committed) => number = committed,
            Err(error) => return (number, error),
        }
    }
}

/// A log is written anew when it has 4 MiB and four times its state, which takes room for both.
#[test]
fn a_full_disk_takes_nothing_that_was_acknowledged() {
    for (len, bytes) in [(64 << 10, 1 << 20), (1 << 20, 9 << 19)] {
        let Some(disk) = Disk::of(bytes) else { return };
        let path = disk.0.path().join("log");
        let (acknowledged, error) = fill_up(&path, len);
        assert!(acknowledged > 2, "{acknowledged} of {len} bytes in {bytes}");
        let mut said = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            said += &format!(": {error}");
            cause = error.source();
        }
        assert!(said.contains("log") && said.contains("No space left"), "{said}");
        assert_eq!(disk.files(), ["log"], "nothing half-written stays");
        // As if it had been killed while it wrote the log anew.
        fs::write(path.with_extension("new"), "").unwrap();
        let mut session = Session::open(SessionOptions::new("full").backup(target(&path))).unwrap();
        assert_eq!(disk.files(), ["log"]);
        let area = session.allocate("area", len).unwrap();
        assert_eq!(session.recover().unwrap(), acknowledged);
        let expected = acknowledged.to_le_bytes().repeat(len / 8);
        assert!(session.bytes(&area) == expected, "the state of transaction {acknowledged}");
    }
}
