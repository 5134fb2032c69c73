//! Quiet parts of large areas: the first write of a page waits for a thread of the library, and
//! nothing that is written gets lost, also if the session, the process or a child ends meanwhile.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use firn_app::{
    Area, BackupTarget, FsyncPolicy, Precision, Session, SessionOptions, TrackerKind,
    open_with_small_parts,
};

const CHILD: &str = "FIRN_APP_QUIET_CHILD";
const PAGE: usize = 4096;
const LARGE: usize = 64 << 20;

fn options() -> SessionOptions {
    SessionOptions::new("quiet").tracker(TrackerKind::Assisted)
}

/// Commits without a write, until no part of a large area is busy.
fn rest(session: &mut Session) {
    for _ in 0..200 {
        session.begin().unwrap().commit().unwrap();
    }
}

/// A session with a large area that rests. `None` where writes cannot wait.
fn resting(options: SessionOptions) -> Option<(Session, Area)> {
    let mut session = Session::open(options).unwrap();
    let area = session.allocate("area", LARGE).unwrap();
    if let Some(why) = session.tracker_restriction() {
        firn_skip::skip_test(why);
        return None;
    }
    rest(&mut session);
    Some((session, area))
}

fn changed(session: &Session) -> Vec<(usize, usize)> {
    session.changes().iter().map(|change| (change.bytes.start, change.bytes.end)).collect()
}

struct Draw(u64);

impl Draw {
    fn below(&mut self, max: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % max as u64) as usize
    }
}

fn seed() -> u64 {
    std::env::var("FIRN_APP_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

#[test]
fn a_write_waits_once_and_is_reported() {
    let Some((mut session, area)) = resting(options().precision(Precision::Pages)) else { return };
    for round in 1..20_usize {
        let waited = session.tracker_counts().waited;
        let at = round * 3_000_000;
        let mut transaction = session.begin().unwrap();
        let bytes = transaction.bytes(&area);
        (bytes[at], bytes[at + 1]) = (1, 2);
        transaction.commit().unwrap();
        let page = at / PAGE * PAGE;
        assert_eq!(changed(&session), [(page, page + PAGE)]);
        assert_eq!(session.tracker_counts().waited, waited + 1);
    }
}

/// What a cache does with a request. The kernel waits inside of the system call.
#[test]
fn system_calls_write_quiet_parts() {
    let Some((mut session, area)) = resting(options()) else { return };
    let waited = session.tracker_counts().waited;
    for round in 0..200_usize {
        let mut transaction = session.begin().unwrap();
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(&[round as u8 + 1; 10]).unwrap();
        // Across the end of a page.
        let at = (round * 77 % 16_000 + 1) * PAGE - 5;
        reader.read_exact(&mut transaction.bytes(&area)[at..at + 10]).unwrap();
        transaction.commit().unwrap();
        let end = (at + 10).next_multiple_of(8);
        assert_eq!(changed(&session), [(at / 8 * 8, end)], "round {round}");
        assert_eq!(session.bytes(&area)[at..at + 10], [round as u8 + 1; 10]);
    }
    assert!(session.tracker_counts().waited > waited + 200);
}

#[test]
fn writes_of_all_threads_are_reported() {
    const THREADS: usize = 8;
    let Some((mut session, area)) = resting(options()) else { return };
    for round in 1..10_u64 {
        let mut transaction = session.begin().unwrap();
        let words = transaction.words(&area);
        thread::scope(|scope| {
            // Neighbors meet at the same pages.
            for (number, part) in words.chunks_mut(words.len() / THREADS - 100).enumerate() {
                scope.spawn(move || {
                    let mut draw = Draw(round << 8 | number as u64);
                    part[0] += 1;
                    *part.last_mut().unwrap() += 1;
                    (0..100).for_each(|_| part[draw.below(part.len())] += 1);
                });
            }
        });
        transaction.commit().unwrap();
        let mut expected = BTreeSet::new();
        let len = LARGE / 8 / THREADS - 100;
        for number in 0..(LARGE / 8).div_ceil(len) {
            let own = (LARGE / 8 - number * len).min(len);
            let mut draw = Draw(round << 8 | number as u64);
            expected.extend([number * len, number * len + own - 1]);
            expected.extend((0..100).map(|_| number * len + draw.below(own)));
        }
        let words = changed(&session).into_iter().flat_map(|(from, to)| from / 8..to / 8);
        let words: BTreeSet<_> = words.collect();
        assert_eq!(words, expected, "round {round}");
    }
}

/// Memory that the application has. Another thread writes data beside the area all the time, also
/// during commits: it never waits.
#[test]
fn data_beside_a_large_area_never_waits() {
    const BESIDE: usize = 64;
    let mut memory = vec![0_u8; LARGE];
    let (start, is_over) = (memory.as_mut_ptr() as usize, AtomicUsize::new(0));
    let mut session = Session::open(options().precision(Precision::Pages)).unwrap();
    let (area, len) = (std::ptr::NonNull::new((start + BESIDE) as *mut u8), LARGE - 2 * BESIDE);
    // SAFETY: the vector lives longer than the session; other threads write only beside the area.
    unsafe { session.register("area", area.unwrap(), len) }.unwrap();
    if let Some(why) = session.tracker_restriction() {
        return firn_skip::skip_test(why);
    }
    thread::scope(|scope| {
        scope.spawn(|| {
            while is_over.load(Ordering::Relaxed) == 0 {
                for at in [0, LARGE - 1] {
                    // SAFETY: a byte of the vector beside the area.
                    unsafe { AtomicU8::from_ptr((start + at) as *mut u8) }
                        .fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        rest(&mut session);
        let missed = (1..200_usize).filter(|round| {
            let (waited, page) = (session.tracker_counts().waited, round * 80 * PAGE);
            let transaction = session.begin().unwrap();
            // SAFETY: a byte of the area.
            unsafe { ((start + page) as *mut u8).write_volatile(1) };
            transaction.commit().unwrap();
            let at = page - BESIDE;
            let is_found = changed(&session).iter().any(|(from, to)| (*from..*to).contains(&at));
            !is_found || session.tracker_counts().waited != waited + 1
        });
        let missed: Vec<_> = missed.collect();
        is_over.store(1, Ordering::Relaxed);
        assert_eq!(missed, [0; 0]);
    });
}

/// One area of a random test, and what it must contain.
struct Followed {
    area: Area,
    committed: Vec<u64>,
}

/// Random transactions on parts that are small: they become busy and quiet all the time, and some
/// transactions write more pages than the log of waiting writes holds. Pages that were not written
/// are not reported, and all others are.
#[test]
fn transactions_report_exactly_what_they_wrote() {
    for (number, precision, undo) in
        [(0, Precision::Words, true), (1, Precision::Pages, true), (2, Precision::Pages, false)]
    {
        let options = SessionOptions::new("random").precision(precision).undo(undo);
        let mut session = Session::open_with(options, open_with_small_parts().unwrap()).unwrap();
        if let Some(why) = session.tracker_restriction() {
            return firn_skip::skip_test(why);
        }
        let mut draw = Draw(seed() << 2 | number);
        let mut areas: Vec<Followed> = Vec::new();
        for round in 0..400 {
            if areas.len() < 3 && draw.below(4) == 0 {
                let len = [3, 700, 4096][draw.below(3)] * PAGE;
                let area = session.allocate(&round.to_string(), len).unwrap();
                areas.push(Followed { area, committed: vec![0; len / 8] });
                session.begin().unwrap().commit().unwrap();
            }
            if areas.len() == 3 && draw.below(20) == 0 {
                let old = areas.remove(draw.below(3));
                session.forget_area(old.area.id()).unwrap();
            }
            check_transaction(&mut session, &mut areas, &mut draw, (precision, undo));
        }
        assert!(session.tracker_counts().waited > 1000);
    }
}

fn check_transaction(
    session: &mut Session,
    areas: &mut [Followed],
    draw: &mut Draw,
    (precision, undo): (Precision, bool),
) {
    let mut written = BTreeSet::new();
    let mut transaction = session.begin().unwrap();
    let writes = [0, 0, 0, 1, 1, 3, 40, 3000][draw.below(8)];
    for (number, followed) in areas.iter_mut().enumerate() {
        let words = transaction.words(&followed.area);
        let in_order = draw.below(3) == 0;
        let first = draw.below(words.len());
        for write in 0..writes {
            let at = if in_order {
                (first + write * 512) % words.len()
            } else {
                draw.below(words.len())
            };
            words[at] = words[at].wrapping_add(1);
            written.insert((number, at));
        }
    }
    if undo && draw.below(5) == 0 {
        transaction.abort().unwrap();
        written.clear();
    } else {
        transaction.commit().unwrap();
        let unit = if precision == Precision::Words { 1 } else { PAGE / 8 };
        let expected: BTreeSet<_> =
            written.iter().map(|(number, at)| (areas[*number].area.id(), at / unit)).collect();
        let reported: BTreeSet<_> = session
            .changes()
            .iter()
            .flat_map(|it| {
                (it.bytes.start / 8 / unit..it.bytes.end / 8 / unit).map(move |at| (it.area, at))
            })
            .collect();
        assert_eq!(reported, expected, "{writes} writes");
        written.iter().for_each(|(number, at)| {
            let word = &mut areas[*number].committed[*at];
            *word = word_at(session.bytes(&areas[*number].area), *at);
        });
    }
    for followed in areas {
        let bytes = session.bytes(&followed.area);
        let equal =
            (0..followed.committed.len()).all(|at| word_at(bytes, at) == followed.committed[at]);
        assert!(equal, "an area has other contents than were committed");
    }
}

fn word_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at * 8..at * 8 + 8].try_into().unwrap())
}

/// A thread writes quiet parts while the session ends: it never waits for ever.
#[test]
fn the_end_of_a_session_wakes_writers() {
    for round in 0..40_usize {
        let Some((session, area)) = resting(options()) else { return };
        let start = area.as_ptr() as usize;
        let written = AtomicUsize::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                for page in 1..2000 {
                    // SAFETY: a byte of the area, which exists until after this scope.
                    unsafe { ((start + page * 7 * PAGE) as *mut u8).write_volatile(1) };
                    written.store(page, Ordering::Relaxed);
                }
            });
            while written.load(Ordering::Relaxed) < round * 10 {
                std::hint::spin_loop();
            }
            drop(session);
        });
        assert_eq!(written.into_inner(), 1999);
    }
}

/// The child's writes are its own, and none of them waits.
#[test]
fn a_child_writes_quiet_parts() {
    let Some((mut session, area)) = resting(options()) else { return };
    // SAFETY: the child writes memory, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        for page in 0..LARGE / PAGE {
            // SAFETY: a byte of the area, which the child has a copy of.
            unsafe { area.as_ptr().add(page * PAGE).write_volatile(9) };
        }
        drop(session);
        // SAFETY: ends the child without handlers of the test program.
        unsafe { libc::_exit(0) };
    }
    let mut status = 1;
    // SAFETY: waits for the child, which is not reaped elsewhere.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    let mut transaction = session.begin().unwrap();
    transaction.bytes(&area)[5_000_000] = 1;
    transaction.commit().unwrap();
    assert_eq!(changed(&session), [(5_000_000, 5_000_008)]);
    assert_eq!(session.bytes(&area)[PAGE], 0);
}

/// The next page for a handler, and how many have been written.
static NEXT_PAGE: AtomicU64 = AtomicU64::new(0);
static WRITTEN: AtomicUsize = AtomicUsize::new(0);

extern "C" fn write_area(_: i32) {
    let page = NEXT_PAGE.fetch_add(PAGE as u64, Ordering::Relaxed) as *mut u8;
    // SAFETY: a byte of an area that exists while signals are sent.
    unsafe { page.write_volatile(1) };
    WRITTEN.fetch_add(1, Ordering::Release);
}

/// Handlers of signals to the process write quiet parts. None runs in the thread that they wait for.
#[test]
fn handlers_of_signals_write_quiet_parts() {
    const SIGNALS: usize = 500;
    let Some((mut session, area)) = resting(options().precision(Precision::Pages)) else { return };
    NEXT_PAGE.store(area.as_ptr() as u64 + PAGE as u64, Ordering::Relaxed);
    let handler: extern "C" fn(i32) = write_area;
    // SAFETY: the handler writes memory only.
    unsafe { libc::signal(libc::SIGUSR2, handler as usize) };
    session.begin().unwrap().detach();
    for signal in 0..SIGNALS {
        // SAFETY: a signal to this process, which has a handler.
        unsafe { libc::kill(libc::getpid(), libc::SIGUSR2) };
        while WRITTEN.load(Ordering::Acquire) <= signal {
            thread::yield_now();
        }
    }
    session.open_transaction().unwrap().commit().unwrap();
    assert_eq!(changed(&session), [(PAGE, PAGE + SIGNALS * PAGE)]);
}

fn start_child(test: &str, what: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CHILD, what)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn logged(log: &Path) -> SessionOptions {
    options().backup(BackupTarget::file(log).fsync(FsyncPolicy::Never))
}

/// Killed at any moment of a transaction on quiet parts, it recovers a committed one.
#[test]
fn killed_while_writers_wait() {
    if let Ok(log) = std::env::var(CHILD) {
        return commit_until_killed(Path::new(&log));
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let log = dir.path().join("log");
    for round in 0..5_u64 {
        let mut child = start_child("quiet::killed_while_writers_wait", log.to_str().unwrap());
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let last = |lines: &mut dyn Iterator<Item = std::io::Result<String>>, count| {
            let numbers = lines.filter_map(|line| line.ok()?.strip_prefix("has ")?.parse().ok());
            numbers.take(count).last()
        };
        let seen: Option<u64> = last(&mut lines, 20);
        thread::sleep(Duration::from_micros(round * 700));
        child.kill().unwrap();
        let seen = last(&mut lines, usize::MAX).or(seen);
        child.wait().unwrap();
        let mut session = Session::open(logged(&log)).unwrap();
        let area = session.allocate("area", LARGE).unwrap();
        let recovered = session.recover().unwrap();
        assert!(recovered >= seen.unwrap(), "{recovered}, {seen:?}");
        check_pages(session.bytes(&area));
    }
}

/// Each transaction adds one to a word of 50 pages, and prints its number.
fn commit_until_killed(log: &Path) {
    let mut session = Session::open(logged(log)).unwrap();
    let area = session.allocate("area", LARGE).unwrap();
    session.recover().unwrap();
    rest(&mut session);
    loop {
        let mut transaction = session.begin().unwrap();
        let words = transaction.words(&area);
        (1..51).for_each(|page| words[page * 300 * 512] += 1);
        let number = transaction.commit().unwrap();
        println!("\nhas {number}");
        // The parts become quiet again.
        for _ in 0..40 {
            session.begin().unwrap().commit().unwrap();
        }
    }
}

fn check_pages(bytes: &[u8]) {
    let counts: BTreeSet<_> = (1..51).map(|page| word_at(bytes, page * 300 * 512)).collect();
    assert_eq!(counts.len(), 1, "parts of a transaction: {counts:?}");
}

/// Without the right to let system calls wait there is one level, and the session says so.
#[test]
fn without_rights_all_parts_are_scanned() {
    if std::env::var(CHILD).is_err() {
        let child = start_child("quiet::without_rights_all_parts_are_scanned", "run");
        let output = child.wait_with_output().unwrap();
        return assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    // SAFETY: no other thread depends on the rights of this process, which has one test. It may
    // read its page map, as a process that never had rights.
    unsafe {
        libc::setresuid(65534, 65534, 65534);
        libc::prctl(libc::PR_SET_DUMPABLE, 1);
    }
    let mut session = Session::open(options()).unwrap();
    let area = session.allocate("area", LARGE).unwrap();
    let setting = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap();
    match session.tracker_restriction() {
        Some(why) => assert!(why.contains("vm.unprivileged_userfaultfd=1"), "{why}"),
        None => assert_eq!(setting.trim(), "1"),
    }
    rest(&mut session);
    let mut transaction = session.begin().unwrap();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    (&file).read_exact(&mut transaction.bytes(&area)[9_000_000..9_000_004]).unwrap();
    transaction.commit().unwrap();
    assert_eq!(changed(&session), [(9_000_000, 9_000_008)]);
}
