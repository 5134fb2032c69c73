//! What a session meets in a real program: other memory, other processes, signals, many areas.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use firn_app::{AreaId, BackupTarget, Error, FsyncPolicy, Session, SessionOptions, TrackerKind};

const CHILD: &str = "FIRN_APP_USES_CHILD";
const PAGE: usize = 4096;

fn options(kind: Option<TrackerKind>) -> SessionOptions {
    let options = SessionOptions::new("uses");
    kind.map_or(options.clone(), |kind| options.tracker(kind))
}

fn logged(log: &Path) -> SessionOptions {
    let target = BackupTarget::file(log).fsync(FsyncPolicy::Never);
    options(Some(TrackerKind::Assisted)).backup(target)
}

/// A mapping of the application's own.
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

impl Mapping {
    fn new(len: usize, flags: i32, file: i32) -> Option<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: no address is requested, so nothing that exists is replaced.
        let start = unsafe { libc::mmap(null_mut(), len, prot, flags, file, 0) };
        let is_mapped = start != libc::MAP_FAILED;
        is_mapped.then(|| Self { start: NonNull::new(start.cast()).unwrap(), len })
    }

    fn private(len: usize) -> Self {
        Self::new(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1).unwrap()
    }

    fn write(&self, at: usize, value: u8) {
        assert!(at < self.len);
        // SAFETY: within the mapping, which only this thread uses.
        unsafe { self.start.add(at).write_volatile(value) }
    }

    fn register(&self, session: &mut Session, name: &str) -> Result<AreaId, Error> {
        // SAFETY: the mapping outlives the session's use of it, and tests keep the rule.
        unsafe { session.register(name, self.start, self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and not used any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Commits what `write` writes, and returns the ranges that changed, by area.
fn commit(session: &mut Session, write: impl FnOnce()) -> Vec<(AreaId, std::ops::Range<usize>)> {
    let transaction = session.begin().unwrap();
    write();
    transaction.commit().unwrap();
    session.changes().iter().map(|change| (change.area, change.bytes.clone())).collect()
}

fn check_foreign_memory(mapping: &Mapping, kind: Option<TrackerKind>) {
    (0..4).for_each(|round| mapping.write(round * 5000, 0));
    let mut session = Session::open(options(kind)).unwrap();
    let area = mapping.register(&mut session, "area").unwrap();
    commit(&mut session, || ());
    for round in 1..4 {
        let at = usize::from(round) * 5000;
        let changes = commit(&mut session, || mapping.write(at, round));
        assert_eq!(changes, [(area, at..at + 8)], "{kind:?}");
    }
    let transaction = session.begin().unwrap();
    mapping.write(0, 99);
    transaction.abort().unwrap();
    assert_eq!(session.area_bytes(area).unwrap()[0], 0);
}

#[test]
fn a_shared_mapping_of_a_file_can_be_an_area() {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(8 * PAGE as u64).unwrap();
    let mapping = Mapping::new(8 * PAGE, libc::MAP_SHARED, file.as_raw_fd()).unwrap();
    for kind in
        [None, Some(TrackerKind::Assisted), Some(TrackerKind::Pages), Some(TrackerKind::Compare)]
    {
        check_foreign_memory(&mapping, kind);
    }
}

/// Registers memory with a userfaultfd of the application's own, which exists until the process
/// ends.
fn register_elsewhere(mapping: &Mapping) -> bool {
    const API: u64 = 0xc018_aa3f;
    const REGISTER: u64 = 0xc020_aa00;
    const USER_MODE_ONLY: i32 = 1;
    let mut api = [0xaa_u64, 0, 0];
    let mut range = [mapping.start.as_ptr() as u64, mapping.len as u64, 1, 0];
    // SAFETY: a new descriptor, and requests with arguments of the size that the numbers name. The
    // kernel handles no fault differently before pages are missing, and all of them are touched.
    unsafe {
        let file = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY) as i32;
        libc::ioctl(file, API, &raw mut api) == 0
            && libc::ioctl(file, REGISTER, &raw mut range) == 0
    }
}

#[test]
fn auto_follows_what_only_another_tracker_can() {
    let mapping = Mapping::private(8 * PAGE);
    (0..8).for_each(|page| mapping.write(page * PAGE, 0));
    if !register_elsewhere(&mapping) {
        return firn_skip::skip_test("no userfaultfd here");
    }
    let mut session = Session::open(options(Some(TrackerKind::Assisted))).unwrap();
    match mapping.register(&mut session, "area") {
        Err(error @ Error::Unavailable { kind: TrackerKind::Assisted, .. }) => {
            assert!(error.to_string().contains("use the tracker pt, or auto"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    // Nothing of it is left: another session can have it.
    check_foreign_memory(&mapping, None);
    check_foreign_memory(&mapping, Some(TrackerKind::Pages));
}

#[test]
fn huge_pages_can_be_an_area() {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
    let Some(mapping) = Mapping::new(2 << 20, flags, -1) else {
        return firn_skip::skip_test("no huge pages (sysctl vm.nr_hugepages)");
    };
    for kind in [None, Some(TrackerKind::Assisted), Some(TrackerKind::Pages)] {
        check_foreign_memory(&mapping, kind);
    }
}

#[test]
fn a_thousand_areas_with_every_tracker() {
    for kind in TrackerKind::ALL.map(Some).into_iter().chain([None]) {
        let mut session = Session::open(options(kind)).unwrap();
        let areas: Vec<_> =
            (0..1000).map(|n| session.allocate(&n.to_string(), PAGE).unwrap()).collect();
        session.begin().unwrap().commit().unwrap();
        for written in [&[0, 999][..], &[511, 512, 513], &[3]] {
            let mut transaction = session.begin().unwrap();
            written.iter().for_each(|&at| transaction.bytes(&areas[at])[100] += 1);
            transaction.commit().unwrap();
            let changed: Vec<_> =
                session.changes().iter().map(|it| (it.area, it.bytes.clone())).collect();
            let expected: Vec<_> = written.iter().map(|&at| (areas[at].id(), 96..104)).collect();
            assert_eq!(changed, expected, "{kind:?}");
        }
    }
}

/// What a cache does with a request. With PT, the kernel could not write the area.
#[test]
fn auto_lets_system_calls_write_a_large_area() {
    let mut session = Session::open(options(None)).unwrap();
    if session.tracker_kind() != TrackerKind::Assisted {
        return firn_skip::skip_test("no asynchronous write protection here");
    }
    let area = session.allocate("large", 64 << 20).unwrap();
    for round in 0..200_usize {
        let mut transaction = session.begin().unwrap();
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(&[round as u8 + 1]).unwrap();
        let at = round % 50 * PAGE + 8;
        reader.read_exact(&mut transaction.bytes(&area)[at..at + 1]).unwrap();
        transaction.commit().unwrap();
        assert!(round == 0 || session.changes().len() == 1, "round {round}");
    }
    assert_eq!(session.tracker_kind(), TrackerKind::Assisted);
}

/// Areas that are side by side are followed as one, and forgotten one by one.
#[test]
fn a_part_of_what_is_followed_is_forgotten() {
    for kind in [None, Some(TrackerKind::Assisted), Some(TrackerKind::Pages)] {
        let mapping = Mapping::private(64 << 20);
        let third = mapping.len / 3 / PAGE * PAGE;
        let mut session = Session::open(options(kind)).unwrap();
        let areas = [0, 1, 2].map(|n| {
            let start = NonNull::new(mapping.start.as_ptr().wrapping_add(n * third)).unwrap();
            // SAFETY: a part of the mapping, which lives as long as the session.
            unsafe { session.register(&n.to_string(), start, third) }.unwrap()
        });
        (0..mapping.len).step_by(PAGE).for_each(|at| mapping.write(at, 1));
        commit(&mut session, || ());
        for round in 2..150 {
            let changes = commit(&mut session, || mapping.write(2 * third + 8, round));
            assert_eq!(changes, [(areas[2], 8..16)], "{kind:?}, round {round}");
        }
        // Outside of a transaction: the next one has it.
        mapping.write(5 * PAGE, 9);
        mapping.write(2 * third + 9 * PAGE, 9);
        session.forget_area(areas[1]).unwrap();
        mapping.write(third, 9);
        let changes = commit(&mut session, || mapping.write(8, 9));
        let expected = [
            (areas[0], 8..16),
            (areas[0], 5 * PAGE..5 * PAGE + 8),
            (areas[2], 9 * PAGE..9 * PAGE + 8),
        ];
        assert_eq!(changes, expected, "{kind:?}");
        let changes = commit(&mut session, || mapping.write(third - 8, 9));
        assert_eq!(changes, [(areas[0], third - 8..third)], "{kind:?}");
    }
}

#[test]
fn a_forgotten_area_may_be_unmapped() {
    for kind in
        [None, Some(TrackerKind::Pages), Some(TrackerKind::Assisted), Some(TrackerKind::Compare)]
    {
        let mut session = Session::open(options(kind)).unwrap();
        let (kept, gone) = (Mapping::private(4 * PAGE), Mapping::private(4 * PAGE));
        // Two areas that share a page, and one alone.
        let half = kept.len / 2 + 100;
        let rest = NonNull::new(kept.start.as_ptr().wrapping_add(half)).unwrap();
        // SAFETY: both parts of the mapping, which lives as long as the session.
        let (first, second) = unsafe {
            let first = session.register("first", kept.start, half).unwrap();
            (first, session.register("second", rest, kept.len - half).unwrap())
        };
        let third = gone.register(&mut session, "third").unwrap();
        commit(&mut session, || ());
        session.forget_area(third).unwrap();
        session.forget_area(first).unwrap();
        drop(gone);
        assert!(matches!(session.forget_area(first), Err(Error::NoArea)));
        assert!(matches!(session.area_bytes(third), Err(Error::NoArea)));
        for round in 1..80 {
            let changes = commit(&mut session, || {
                kept.write(5, round);
                kept.write(half, round);
            });
            assert_eq!(changes, [(second, 0..8)], "{kind:?}, round {round}");
        }
        // Another session can have what was forgotten, but not the page that is still shared.
        let mut other = Session::open(options(kind)).unwrap();
        // SAFETY: as above; the areas of the two sessions do not overlap.
        unsafe {
            other.register("first", kept.start, PAGE).unwrap();
            let shared = other.register("shared", kept.start, half);
            assert!(matches!(shared, Err(Error::Taken { .. } | Error::Overlap { .. })));
        }
    }
}

#[test]
fn a_forgotten_area_leaves_the_backup_with_the_next_commit() {
    for kind in TrackerKind::ALL {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let options = || {
            let target = BackupTarget::file(&log).fsync(FsyncPolicy::Never);
            options(Some(kind)).backup(target)
        };
        let mut session = Session::open(options()).unwrap();
        let areas = ["one", "two", "three"].map(|name| session.allocate(name, PAGE).unwrap());
        let mut transaction = session.begin().unwrap();
        areas.iter().for_each(|area| transaction.bytes(area).fill(7));
        transaction.commit().unwrap();
        session.forget_area(areas[1].id()).unwrap();
        drop(session);
        // No transaction was committed since.
        let mut session = Session::open(options()).unwrap();
        let areas = ["one", "two", "three"].map(|name| session.allocate(name, PAGE).unwrap());
        assert_eq!(session.recover().unwrap(), 1);
        assert!(areas.iter().all(|area| session.bytes(area) == [7; PAGE]));
        session.forget_area(areas[0].id()).unwrap();
        session.forget_area(areas[1].id()).unwrap();
        let again = session.allocate("two", 2 * PAGE).unwrap();
        let mut transaction = session.begin().unwrap();
        transaction.bytes(&again).fill(9);
        transaction.commit().unwrap();
        drop(session);
        let mut session = Session::open(options()).unwrap();
        let two = session.allocate("two", 2 * PAGE).unwrap();
        let one = session.allocate("one", 3 * PAGE).unwrap();
        assert_eq!(session.recover().unwrap(), 2);
        assert!(session.bytes(&two) == [9; 2 * PAGE] && session.bytes(&one) == [0; 3 * PAGE]);
        session.begin().unwrap().commit().unwrap();
    }
}

static WORD: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_signal(_: i32) {
    let word = WORD.load(Ordering::Relaxed) as *const AtomicU64;
    // SAFETY: the address of a word of an area that exists while signals are sent.
    unsafe { &*word }.fetch_add(1, Ordering::Relaxed);
}

/// Signals interrupt threads that write areas, also in the middle of a fault, and their handler
/// writes an area itself.
#[test]
fn threads_with_signals() {
    const ROUNDS: u64 = 20;
    const WRITES: usize = 2000;
    let handler: extern "C" fn(i32) = count_signal;
    // SAFETY: the handler only adds to an atomic word.
    unsafe { libc::signal(libc::SIGUSR1, handler as usize) };
    for kind in TrackerKind::ALL {
        let mut session = Session::open(options(Some(kind))).unwrap();
        let signals = session.allocate("signals", PAGE).unwrap();
        let written = session.allocate("written", 64 * PAGE).unwrap();
        WORD.store(signals.as_ptr() as u64, Ordering::Relaxed);
        for round in 1..=ROUNDS {
            let mut transaction = session.begin().unwrap();
            let (words, done) = (transaction.words(&written), AtomicBool::new(false));
            thread::scope(|scope| {
                let halves = words.split_at_mut(words.len() / 2);
                for half in [halves.0, halves.1] {
                    let done = &done;
                    // SAFETY: no preconditions.
                    scope.spawn(move || {
                        for at in 0..WRITES {
                            half[at * 7 % half.len()] += 1;
                            if at % 50 == 0 {
                                // SAFETY: a signal to this thread itself, which has a handler.
                                unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR1) };
                            }
                        }
                        done.store(true, Ordering::Relaxed);
                    });
                }
            });
            transaction.commit().unwrap();
            let sum: u64 = words_of(session.bytes(&written)).sum();
            assert_eq!(sum, round * 2 * WRITES as u64, "{kind}");
            let count = words_of(session.bytes(&signals)).next().unwrap();
            assert_eq!(count, round * 2 * (WRITES / 50) as u64, "{kind}");
            let areas: Vec<_> = session.changes().iter().map(|change| change.area).collect();
            assert!(areas.contains(&signals.id()) && areas.contains(&written.id()), "{kind}");
        }
    }
}

fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()))
}

/// A program that runs another one (execve(2)): the new one has the log at once.
fn exec(log: &Path) {
    let mut session = Session::open(logged(log)).unwrap();
    let area = session.allocate("area", PAGE).unwrap();
    let sequence = session.recover().unwrap();
    let mut transaction = session.begin().unwrap();
    transaction.bytes(&area)[0] += 1;
    assert_eq!(transaction.commit().unwrap(), sequence + 1);
    assert_eq!(u64::from(session.bytes(&area)[0]), sequence + 1);
    if sequence == 4 {
        return println!("\nexecuted {sequence} times");
    }
    let error =
        Command::new(std::env::current_exe().unwrap()).args(std::env::args_os().skip(1)).exec();
    panic!("{error}");
}

#[test]
fn a_program_that_executes_another_one() {
    if let Ok(log) = std::env::var(CHILD) {
        return exec(Path::new(&log));
    }
    let dir = tempfile::tempdir().unwrap();
    let text = run_child("uses::a_program_that_executes_another_one", &dir.path().join("log"));
    assert!(text.contains("executed 4 times"), "{text}");
}

fn run_child(test: &str, log: &Path) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CHILD, log)
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
}

/// A program that becomes a daemon: its session stays with the process that ends. The daemon opens
/// one of its own, which continues the log.
fn become_daemon(log: &Path) {
    let mut session = Session::open(logged(log)).unwrap();
    let area = session.allocate("area", PAGE).unwrap();
    let mut transaction = session.begin().unwrap();
    transaction.bytes(&area)[0] = 1;
    transaction.commit().unwrap();
    // SAFETY: the child uses no lock of another thread: the session is another process's there.
    assert_eq!(unsafe { libc::daemon(1, 1) }, 0);
    assert!(matches!(session.begin(), Err(Error::Forked { .. })));
    drop(session);
    let mut session = Session::open(logged(log)).unwrap();
    let area = session.allocate("area", PAGE).unwrap();
    assert_eq!(session.recover().unwrap(), 1);
    let mut transaction = session.begin().unwrap();
    transaction.bytes(&area)[1] = 2;
    transaction.commit().unwrap();
    drop(session);
    File::create(log.with_extension("done")).unwrap();
    std::process::exit(0);
}

#[test]
fn a_program_that_becomes_a_daemon() {
    if let Ok(log) = std::env::var(CHILD) {
        return become_daemon(Path::new(&log));
    }
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let text = run_child("uses::a_program_that_becomes_a_daemon", &log);
    let since = Instant::now();
    while !log.with_extension("done").exists() {
        assert!(since.elapsed() < Duration::from_secs(20), "{text}");
        thread::sleep(Duration::from_millis(5));
    }
    let mut session = Session::open(logged(&log)).unwrap();
    let area = session.allocate("area", PAGE).unwrap();
    assert_eq!(session.recover().unwrap(), 2);
    assert_eq!(session.bytes(&area)[..2], [1, 2]);
}
