//! Forks at random instants: the parent recovers exactly, and no child panics, hangs, or harms what
//! is the parent's.
//!
//! A program (this test program, started anew) commits and aborts transactions. Its main thread
//! forks between two of them and inside of them, another thread forks at any instant. Children end
//! at once, use what they have of the session, drop it, write the areas, or open a session of their
//! own. `FIRN_RUNS` says how many forks (60 for each tracker).

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::NonNull;
use std::thread;
use std::time::Duration;

use firn_app::{
    AcknowledgePolicy, Area, BackupTarget, Error, FsyncPolicy, Session, SessionOptions,
    TrackerKind, WarmStandby,
};

use crate::standby::{identities, standby};

const PROGRAM: &str = "FIRN_APP_TEST_FORKS";
const LENGTHS: [usize; 2] = [3000, 70_001];
/// Bytes of the memory that is registered, where the tracker can follow such.
const REGISTERED: usize = 50_000;
/// Seconds that a child may take on a busy machine before it counts as one that hangs.
const CHILD_SECONDS: u32 = 60;

fn forks_with(kind: TrackerKind) {
    forks_of(kind, "file");
}

fn forks_of(kind: TrackerKind, target: &str) {
    let forks = std::env::var("FIRN_RUNS").unwrap_or_else(|_| "60".to_owned());
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "fork::program", "--nocapture", "--test-threads=1"])
        .env(PROGRAM, format!("{kind} {forks} {} {target}", dir.path().display()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}{errors}", output.status);
    let last = said.lines().find(|line| line.contains("recovered exactly"));
    println!("{}", last.expect("the program says what it did"));
    assert!(!errors.contains("panicked"), "{errors}");
}

#[test]
fn pages() {
    forks_with(TrackerKind::Pages);
}

#[test]
fn emulate() {
    forks_with(TrackerKind::Emulate);
}

#[test]
fn assisted() {
    forks_with(TrackerKind::Assisted);
}

#[test]
fn scan() {
    forks_with(TrackerKind::Scan);
}

#[test]
fn compare() {
    forks_with(TrackerKind::Compare);
}

/// Children have the sockets of their parent's connections.
#[test]
fn with_a_standby_by_tls() {
    forks_of(TrackerKind::Assisted, "standby");
}

#[test]
fn with_a_standby_by_tls_that_is_asked_later() {
    forks_of(TrackerKind::Pages, "late-standby");
}

/// The program. Without orders it is an empty test.
#[test]
fn program() {
    let Ok(orders) = std::env::var(PROGRAM) else { return };
    let orders: Vec<&str> = orders.split(' ').collect();
    let (kind, forks) = (orders[0].parse().unwrap(), orders[1].parse::<u32>().unwrap());
    // SAFETY: sets a timer of this process: a program that hangs ends.
    unsafe { libc::alarm(120 + forks) };
    run(kind, u64::from(forks), Path::new(orders[2]), orders[3]);
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

fn options(kind: TrackerKind, log: &Path) -> SessionOptions {
    SessionOptions::new("forks")
        .tracker(kind)
        .backup(BackupTarget::file(log).fsync(FsyncPolicy::Never))
}

/// All bytes of an area, written as an application writes them.
fn bytes<'a>(area: &(usize, usize)) -> &'a mut [u8] {
    // SAFETY: an area that is mapped until the process ends, and that one thread writes.
    unsafe { std::slice::from_raw_parts_mut(area.0 as *mut u8, area.1) }
}

/// Where the program's commits go. The standby is in this process: its children have a copy of it too.
enum Target {
    File(PathBuf),
    Standby { standby: WarmStandby, target: Box<BackupTarget> },
}

impl Target {
    fn new(name: &str, dir: &Path) -> Self {
        if name == "file" {
            return Self::File(dir.join("log"));
        }
        let [ours, theirs] = identities(dir);
        let standby = standby(dir, &ours);
        let acknowledge = match name {
            "standby" => AcknowledgePolicy::Sync,
            _ => AcknowledgePolicy::Async { lag_max: 5 },
        };
        let target = BackupTarget::remote(standby.address().to_string(), theirs);
        Self::Standby { standby, target: Box::new(target.acknowledge(acknowledge)) }
    }

    fn options(&self, kind: TrackerKind) -> SessionOptions {
        match self {
            Self::File(log) => options(kind, log),
            Self::Standby { target, .. } => {
                SessionOptions::new("forks").tracker(kind).backup(BackupTarget::clone(target))
            }
        }
    }
}

fn run(kind: TrackerKind, forks: u64, dir: &Path, target: &str) {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ u64::from(std::process::id()));
    let target = Target::new(target, dir);
    let mut session = Session::open(target.options(kind)).unwrap();
    let own = LENGTHS.map(|len| session.allocate(&format!("{len}"), len).unwrap());
    let mut areas: Vec<(usize, usize)> =
        own.iter().map(|area| (area.as_ptr() as usize, area.len())).collect();
    let mut memory = vec![0_u8; REGISTERED];
    // SAFETY: the vector stays as it is until the session is dropped, and is written by this thread
    // alone.
    let registered = unsafe {
        session.register("registered", NonNull::new(memory.as_mut_ptr()).unwrap(), REGISTERED)
    };
    match registered {
        Ok(_) => areas.push((memory.as_mut_ptr() as usize, REGISTERED)),
        Err(error) => assert!(matches!(error, Error::Foreign { .. }), "{error}"),
    }
    let mut expected: Vec<Vec<u8>> = areas.iter().map(|area| vec![0; area.1]).collect();
    let others = {
        let (areas, session) = (areas.clone(), &raw mut session as usize);
        let dir = dir.to_owned();
        thread::spawn(move || fork_at_any_instant(kind, forks / 2, &areas, session, &dir))
    };
    let (mut done, mut sequence) = (0, 0);
    while done < forks - forks / 2 || !others.is_finished() {
        let mut next = expected.clone();
        let transaction = session.begin().unwrap();
        for _ in 0..=random.below(40) {
            let area = random.below(areas.len() as u64) as usize;
            let at = random.below(areas[area].1 as u64) as usize;
            let byte = random.below(256) as u8;
            (bytes(&areas[area])[at], next[area][at]) = (byte, byte);
        }
        if done < forks - forks / 2 && random.below(3) == 0 {
            done += 1;
            let draw = random.below(4);
            let Some(child) = forked() else {
                let used = catch_unwind(AssertUnwindSafe(|| {
                    match draw {
                        0 => return check_forked(transaction.commit()),
                        1 => return check_forked(transaction.abort()),
                        2 => transaction.detach(),
                        _ => drop(transaction),
                    }
                    Ok(())
                }));
                ends(|| {
                    used.unwrap_or_else(|_| Err("a panic".to_owned()))?;
                    write_all(&areas)?;
                    drop(session);
                    write_all(&areas[..own.len()])
                })
            };
            reap(child);
        }
        match random.below(4) {
            0 => transaction.abort().unwrap(),
            _ => {
                sequence += 1;
                assert_eq!(transaction.commit().unwrap(), sequence);
                expected = next;
            }
        }
        if done < forks - forks / 2 && random.below(4) == 0 {
            done += 1;
            let draw = random.below(5);
            let Some(child) = forked() else {
                ends(|| match draw {
                    0 => Ok(()),
                    1 => use_it(&mut session),
                    2 => write_all(&areas),
                    3 => {
                        drop(session);
                        drop(std::mem::take(&mut memory));
                        write_all(&areas[..own.len()])?;
                        own_session(kind, dir)
                    }
                    _ => own_session(kind, dir),
                })
            };
            reap(child);
        }
    }
    others.join().unwrap();
    finish(kind, session, target, (sequence, &expected), forks);
}

/// A thread that shares nothing with the one that commits but the instants.
fn fork_at_any_instant(
    kind: TrackerKind,
    forks: u64,
    areas: &[(usize, usize)],
    session: usize,
    dir: &Path,
) {
    let mut random = Random(0xd1b5_4a32_d192_ed03);
    for _ in 0..forks {
        thread::sleep(Duration::from_micros(random.below(1500)));
        let draw = random.below(4);
        let Some(child) = forked() else {
            ends(|| match draw {
                0 => Ok(()),
                // SAFETY: the session lives until this thread has ended, and the thread that uses
                // it is not in this process.
                1 => use_it(unsafe { &mut *(session as *mut Session) }),
                2 => write_all(areas),
                _ => own_session(kind, dir),
            })
        };
        reap(child);
    }
}

/// A child that lives on keeps neither the log nor the connection: the parent's next session has the one, and the standby
/// takes over though the other is open in the child.
fn finish(
    kind: TrackerKind,
    session: Session,
    target: Target,
    right: (u64, &[Vec<u8>]),
    forks: u64,
) {
    let Some(child) = forked() else {
        thread::sleep(Duration::from_secs(u64::from(CHILD_SECONDS)));
        ends(|| Ok(()))
    };
    session.flush_backups().unwrap();
    drop(session);
    let mut session = match &target {
        Target::File(log) => Session::open(options(kind, log)).unwrap(),
        Target::Standby { .. } => {
            Session::open(SessionOptions::new("forks").tracker(kind)).unwrap()
        }
    };
    let names = ["3000", "70001", "registered"];
    let areas: Vec<Area> = names
        .iter()
        .zip(right.1)
        .map(|(name, bytes)| session.allocate(name, bytes.len()).unwrap())
        .collect();
    let sequence = match target {
        Target::File(_) => session.recover().unwrap(),
        Target::Standby { standby, .. } => standby.take_over(&mut session).unwrap(),
    };
    assert_eq!(sequence, right.0);
    for (area, expected) in areas.iter().zip(right.1) {
        assert!(session.bytes(area) == expected, "an area of {} bytes", area.len());
    }
    // SAFETY: ends the child made above.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
    println!("{kind}: {forks} forks, {} transactions recovered exactly", right.0);
}

/// The child's number; none in the child.
fn forked() -> Option<libc::pid_t> {
    // SAFETY: the child uses memory, the C library's allocator, which forks know, and this library;
    // then it ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork failed");
    (child != 0).then_some(child)
}

/// Does the child's work, and ends it.
fn ends(work: impl FnOnce() -> Result<(), String>) -> ! {
    // SAFETY: sets a timer of this process: a child that hangs is ended by a signal.
    unsafe { libc::alarm(CHILD_SECONDS) };
    let code = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => 0,
        Ok(Err(why)) => {
            eprintln!("a child: {why}");
            1
        }
        Err(_) => 101,
    };
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

fn reap(child: libc::pid_t) {
    let mut status = 0;
    // SAFETY: waits for a child of this process; `status` may be written.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        "a child ended with {status:#x}"
    );
}

/// Checks that something is refused in a child, with the pid of the owner.
fn check_forked<T>(result: Result<T, Error>) -> Result<(), String> {
    // SAFETY: asks for a number.
    let parent = unsafe { libc::getppid() } as u32;
    match result {
        Err(Error::Forked { pid, .. }) if pid == parent => Ok(()),
        Err(error) => Err(format!("another error: {error}")),
        Ok(_) => Err("no error".to_owned()),
    }
}

fn use_it(session: &mut Session) -> Result<(), String> {
    check_forked(session.begin().map(drop))?;
    check_forked(session.open_transaction().map(drop))?;
    check_forked(session.allocate("more", 10))?;
    check_forked(session.recover())?;
    check_forked(session.flush_backups())?;
    match session.acknowledged_sequence() {
        0 => Ok(()),
        number => Err(format!("{number} is acknowledged")),
    }
}

/// Writes the areas, whose writes no transaction has, and reads what it wrote.
fn write_all(areas: &[(usize, usize)]) -> Result<(), String> {
    for area in areas {
        bytes(area).fill(0xa5);
        if bytes(area).iter().any(|byte| *byte != 0xa5) {
            return Err("it reads something else than it wrote".to_owned());
        }
    }
    Ok(())
}

fn own_session(kind: TrackerKind, dir: &Path) -> Result<(), String> {
    let log: PathBuf = dir.join(std::process::id().to_string());
    let commits = || -> Result<u64, Error> {
        let mut session = Session::open(options(kind, &log))?;
        let area = session.allocate("area", 5000)?;
        let before = session.recover()?;
        let mut transaction = session.begin()?;
        transaction.bytes(&area)[before as usize * 4000] = 7;
        transaction.commit()?;
        match session.bytes(&area)[0] {
            7 => Ok(before),
            _ => Err(Error::NoArea),
        }
    };
    for number in 0..2 {
        match commits() {
            Ok(before) if before == number => {}
            other => return Err(format!("a session of its own: {other:?}")),
        }
    }
    fs::remove_file(log).map_err(|error| error.to_string())
}
