//! A random walk: commits, kills of the application and of backup processes, and cuts of links, in
//! any order. After each kill the recovered state is a committed one that contains everything
//! acknowledged; in the end all targets are equal.
//!
//! The application (this program, started as a child) executes one command per line. The contents of
//! its area are the commit's identity, its parent's identity, and bytes that follow from both. In
//! one walk of four the area is so large that a transaction is several records.
//!
//! `FIRN_RUNS` sets the count of walks, `FIRN_SEED` the first one, `FIRN_SESSIONS` how many walks run
//! at once. With `FIRN_FSYNC` all logs are forced to disk at every commit. `FIRN_OUTAGE_MS` is the
//! longest outage in which the application continues. If it is a range, each kill and each cut is
//! an outage of such a length. Outages are waiting, so a thousand of 1 to 60 s fit into half an
//! hour:
//!
//! ```text
//! FIRN_OUTAGE_MS=1000-60000 FIRN_RUNS=60 FIRN_SESSIONS=60 cargo test --profile tests -p firn-app-backup --test walk -- --nocapture
//! ```

#![cfg(test)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests may fail so")]

mod support;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_app::{
    Area, BackupTarget, Compression, Error, FsyncPolicy, RequiredTargets, Session, SessionOptions,
    TrackerKind,
};
use support::{Backup, Link, LinkState, identity, make_keys};

const CHILD: &str = "FIRN_APP_WALK_CHILD";
const LENS: [usize; 2] = [9000, 3 << 20];
const STEPS: usize = 30;
/// How long a commit waits, with a small and with a large area.
const TIMEOUTS: [Duration; 2] = [Duration::from_millis(60), Duration::from_millis(500)];
/// A walk must be able to reach its end on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn number_from(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|number| number.parse().ok()).unwrap_or(default)
}

/// The length of outages in ms, and whether each kill and each cut is an outage.
fn outage_range() -> (std::ops::Range<u64>, bool) {
    let text = std::env::var("FIRN_OUTAGE_MS").unwrap_or_else(|_| "50".into());
    match text.split_once('-') {
        None => (0..text.parse().unwrap(), false),
        Some((min, max)) => (min.parse().unwrap()..max.parse().unwrap(), true),
    }
}

fn byte(identity: u64, at: usize) -> u8 {
    (identity.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(at as u32 % 64) >> 56) as u8
}

/// Opens a session as words describe it: the required targets, the directory of the keys, the
/// length of the area, and targets: `file=PATH` or `remote=ADDRESS`.
fn open(text: &str, timeout: Option<Duration>) -> Result<(Session, Area), Error> {
    let mut words = text.split(' ');
    let require: RequiredTargets = words.next().unwrap().parse().unwrap();
    let keys = identity(Path::new(words.next().unwrap()));
    let len: usize = words.next().unwrap().parse().unwrap();
    let timeout = timeout.unwrap_or(TIMEOUTS[usize::from(len == LENS[1])]);
    let fsync = match std::env::var_os("FIRN_FSYNC") {
        Some(_) => FsyncPolicy::EveryCommit,
        None => FsyncPolicy::Never,
    };
    let mut options = SessionOptions::new("walk")
        .tracker(TrackerKind::Assisted)
        .require(require)
        .backup_timeout(timeout);
    for word in words {
        options = options.backup(match word.split_once('=').unwrap() {
            ("file", path) => BackupTarget::file(path).fsync(fsync),
            (_, address) => {
                BackupTarget::remote(address, keys.clone()).compression(Compression::Lz4)
            }
        });
    }
    let mut session = Session::open(options)?;
    let area = session.allocate("area", len)?;
    session.recover()?;
    Ok((session, area))
}

/// The identity that the area has, and its parent's; each byte must follow from them.
fn read(session: &Session, area: &Area) -> (u64, u64) {
    let bytes = session.bytes(area);
    let word = |at: usize| u64::from_le_bytes(bytes[at * 8..at * 8 + 8].try_into().unwrap());
    let (identity, parent) = (word(0), word(1));
    if identity > 0 {
        for (at, found) in bytes.iter().enumerate().skip(16) {
            // Each commit writes one byte of three.
            if at as u64 % 3 == identity % 3 {
                assert_eq!(*found, byte(identity, at), "byte {at} of commit {identity}");
            }
        }
    }
    (identity, parent)
}

/// The child. Without orders it is an empty test.
#[test]
fn child() {
    let Ok(text) = std::env::var(CHILD) else { return };
    let mut out = std::io::stdout();
    let (mut session, area) = match open(&text, None) {
        Ok(opened) => opened,
        Err(error) => {
            writeln!(out, "\nrefused {error} {:?}", std::error::Error::source(&error)).unwrap();
            return;
        }
    };
    let (identity, parent) = read(&session, &area);
    writeln!(out, "\nrecovered {identity} {parent}").unwrap();
    for line in std::io::stdin().lines() {
        let identity: u64 = line.unwrap().parse().unwrap();
        let (parent, _) = read(&session, &area);
        let mut transaction = session.begin().unwrap();
        let bytes = transaction.bytes(&area);
        bytes[..8].copy_from_slice(&identity.to_le_bytes());
        bytes[8..16].copy_from_slice(&parent.to_le_bytes());
        for at in (16..bytes.len()).filter(|at| *at as u64 % 3 == identity % 3) {
            bytes[at] = byte(identity, at);
        }
        match transaction.commit() {
            Ok(_) => writeln!(out, "acknowledged {identity}").unwrap(),
            Err(error @ Error::Backup(_)) => writeln!(out, "failed {error}").unwrap(),
            Err(error) => panic!("{error}"),
        }
    }
}

struct Application {
    child: Child,
    orders: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Application {
    /// Starts the application. `None` if it cannot know what was acknowledged.
    fn start(targets: &str) -> Option<(Self, u64, u64)> {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(CHILD, targets)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let orders = child.stdin.take().unwrap();
        let replies = BufReader::new(child.stdout.take().unwrap());
        let mut this = Self { child, orders, replies };
        loop {
            let line = this.reply().expect("it opens a session, or reports why not");
            let words: Vec<_> = line.split(' ').collect();
            match words[0] {
                "recovered" => {
                    let number = |at: usize| words[at].parse().unwrap();
                    return Some((this, number(1), number(2)));
                }
                "refused" => {
                    assert!(line.contains("TooFewReadable"), "{line}");
                    this.child.wait().unwrap();
                    return None;
                }
                _ => {}
            }
        }
    }

    fn reply(&mut self) -> Option<String> {
        let mut line = String::new();
        (self.replies.read_line(&mut line).unwrap() > 0).then(|| line.trim().to_owned())
    }

    fn order(&mut self, identity: u64) {
        writeln!(self.orders, "{identity}").unwrap();
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// What the test knows: all commits that were begun, and the last acknowledged one.
#[derive(Default)]
struct Model {
    parents: HashMap<u64, u64>,
    next: u64,
    current: u64,
    acknowledged: u64,
    acknowledged_count: u64,
    failed_count: u64,
}

impl Model {
    fn begin_commit(&mut self) -> u64 {
        self.next += 1;
        self.parents.insert(self.next, self.current);
        self.current = self.next;
        self.next
    }

    fn acknowledge(&mut self, identity: u64) {
        self.acknowledged = identity;
        self.acknowledged_count += 1;
    }

    /// The recovered state must be a commit of before whose ancestors include the acknowledged one.
    fn recover(&mut self, identity: u64, parent: u64, trace: &str) {
        if identity > 0 {
            assert_eq!(self.parents.get(&identity), Some(&parent), "no such commit; {trace}");
        }
        let ancestors = std::iter::successors(Some(identity), |at| self.parents.get(at).copied());
        let has = self.acknowledged == 0 || ancestors.into_iter().any(|at| at == self.acknowledged);
        assert!(has, "{} was acknowledged, {identity} recovered; {trace}", self.acknowledged);
        self.current = identity;
    }
}

struct Draw(u64);

impl Draw {
    fn below(&mut self, max: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % max
    }
}

struct Walk {
    backups: Vec<Backup>,
    links: Vec<Link>,
    log: PathBuf,
    orders: String,
    model: Model,
    application: Option<Application>,
    trace: String,
    draw: Draw,
    kills: u64,
}

impl Walk {
    fn new(dir: &Path, seed: u64) -> Self {
        let mut draw = Draw(seed);
        make_keys(dir);
        let backups: Vec<_> =
            (0..2).map(|n| Backup::start(dir, &dir.join(format!("logs-{n}")))).collect();
        let links: Vec<_> = backups.iter().map(|backup| Link::to(&backup.address)).collect();
        let log = dir.join("local.log");
        let mut targets = vec![format!("file={}", log.display())];
        targets.extend(links.iter().map(|link| format!("remote={}", link.address)));
        let turn = draw.below(3) as usize;
        targets.rotate_left(turn);
        let require = ["all", "any", "2"][draw.below(3) as usize];
        let (keys, len) = (dir.join("application"), LENS[usize::from(seed % 4 == 0)]);
        let orders = format!("{require} {} {len} {}", keys.display(), targets.join(" "));
        let (model, trace) = (Model::default(), format!("seed {seed} require {require}:"));
        Self { backups, links, log, orders, model, application: None, trace, draw, kills: 0 }
    }

    fn heal(&mut self) {
        for which in 0..self.backups.len() {
            if !self.backups[which].is_running() {
                self.restart_backup(which);
            }
        }
        self.links.iter().for_each(|link| link.set(LinkState::Whole));
    }

    /// Starts a backup at a new address: another process may have the former one by now.
    fn restart_backup(&mut self, which: usize) {
        let backup = &mut self.backups[which];
        backup.address = "127.0.0.1:0".into();
        backup.restart();
        self.links[which].lead_to(&backup.address);
    }

    fn start_application(&mut self) {
        let since = Instant::now();
        while self.application.is_none() {
            if let Some((application, identity, parent)) = Application::start(&self.orders) {
                self.model.recover(identity, parent, &self.trace);
                self.application = Some(application);
                return;
            }
            write!(self.trace, " refused").unwrap();
            assert!(since.elapsed() < PATIENCE, "{}", self.trace);
            self.heal();
        }
    }

    fn commit(&mut self) -> bool {
        let application = self.application.as_mut().unwrap();
        let identity = self.model.begin_commit();
        application.order(identity);
        self.await_reply(identity)
    }

    fn await_reply(&mut self, identity: u64) -> bool {
        let application = self.application.as_mut().unwrap();
        let reply = application.reply().expect("the application ended by itself");
        let is_acknowledged = reply == format!("acknowledged {identity}");
        match is_acknowledged {
            true => self.model.acknowledge(identity),
            false => {
                assert!(reply.starts_with("failed"), "{reply}; {}", self.trace);
                self.model.failed_count += 1;
            }
        }
        is_acknowledged
    }

    fn step(&mut self) {
        self.start_application();
        let action = self.draw.below(16);
        let which = self.draw.below(2) as usize;
        write!(self.trace, " {action}/{which}").unwrap();
        let is_kill = matches!(action, 0..=4 | 7..=8 | 13..=15);
        self.kills += u64::from(is_kill);
        let (_, is_outage) = outage_range();
        match action {
            0..=4 | 15 if is_outage => self.commit_in_outage(which),
            0 => self.backups[which].kill(),
            1 | 2 => self.restart_backup(which),
            3 => self.links[which].set(LinkState::Cut),
            4 => self.links[which].set(LinkState::Stalled),
            5 | 6 => self.links[which].set(LinkState::Whole),
            7 => self.application.take().unwrap().kill(),
            8 => {
                // Killed within a commit.
                let identity = self.model.begin_commit();
                let mut application = self.application.take().unwrap();
                application.order(identity);
                std::thread::sleep(Duration::from_micros(self.draw.below(3000)));
                application.kill();
            }
            13 => self.interrupt_commit(|walk| walk.backups[which].kill()),
            14 => self.interrupt_commit(|walk| walk.links[which].set(LinkState::Cut)),
            15 => self.commit_in_outage(which),
            _ => {
                for _ in 0..=self.draw.below(4) {
                    self.commit();
                }
            }
        }
        match action {
            7 | 8 if is_outage => std::thread::sleep(self.draw_outage()),
            13 | 14 if is_outage => self.commit_until_mended(which),
            _ => {}
        }
    }

    /// Something breaks within a commit.
    fn interrupt_commit(&mut self, interrupt: impl FnOnce(&mut Self)) {
        let identity = self.model.begin_commit();
        self.application.as_mut().unwrap().order(identity);
        std::thread::sleep(Duration::from_micros(self.draw.below(3000)));
        interrupt(self);
        self.await_reply(identity);
    }

    fn draw_outage(&mut self) -> Duration {
        let (range, _) = outage_range();
        Duration::from_millis(range.start + self.draw.below(range.end - range.start))
    }

    /// Commits for a while without a backup or its link, which then returns.
    fn commit_in_outage(&mut self, which: usize) {
        match self.draw.below(3) {
            0 => self.backups[which].kill(),
            1 => self.links[which].set(LinkState::Cut),
            _ => self.links[which].set(LinkState::Stalled),
        }
        self.commit_until_mended(which);
    }

    fn commit_until_mended(&mut self, which: usize) {
        let outage = self.draw_outage();
        let since = Instant::now();
        while since.elapsed() < outage {
            self.commit();
            std::thread::sleep((outage / 50).max(Duration::from_millis(10)));
        }
        match self.backups[which].is_running() {
            true => self.links[which].set(LinkState::Whole),
            false => self.restart_backup(which),
        }
    }

    /// All is mended, and one more commit is acknowledged by all: then all logs are equal.
    fn finish(mut self) -> [u64; 3] {
        self.heal();
        self.start_application();
        let since = Instant::now();
        while !self.commit() {
            assert!(since.elapsed() < PATIENCE, "{}", self.trace);
        }
        // An end of its own waits for all targets that can be reached.
        let Application { mut child, orders, replies } = self.application.take().unwrap();
        drop(orders);
        assert!(replies.lines().all(|line| line.is_ok()));
        assert!(child.wait().unwrap().success(), "{}", self.trace);
        // A target that is being tried again when the application ends is updated by the next one.
        let all = self.orders.replacen(self.orders.split(' ').next().unwrap(), "all", 1);
        let (session, _) = open(&all, Some(PATIENCE)).unwrap();
        session.flush_backups().unwrap();
        drop(session);
        self.backups.iter_mut().for_each(Backup::kill);
        let mut states = Vec::new();
        let len = self.orders.split(' ').nth(2).unwrap();
        for path in self.backups.iter().map(|it| it.logs.join("walk.log")).chain([self.log]) {
            let targets = format!("all - {len} file={}", path.display());
            let (session, area) = open(&targets, None).unwrap();
            let (identity, parent) = read(&session, &area);
            self.model.recover(identity, parent, &self.trace);
            states.push((session.sequence(), session.bytes(&area).to_vec()));
        }
        let heads: Vec<_> = states.iter().map(|(number, bytes)| (number, &bytes[..16])).collect();
        let are_equal = states.iter().all(|state| *state == states[0]);
        assert!(are_equal, "{heads:?}; {}", self.trace);
        [self.model.acknowledged_count, self.model.failed_count, self.kills]
    }
}

#[test]
fn nothing_acknowledged_is_lost() {
    let first = number_from("FIRN_SEED", 3);
    let end = first + number_from("FIRN_RUNS", 2);
    let (next, sums) = (AtomicU64::new(first), Mutex::new([0; 3]));
    let run_walks = || {
        while let Some(seed) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|it| *it < end) {
            let counts = run_walk(seed);
            let mut sums = sums.lock().unwrap();
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
            println!("seed {seed}: {sums:?}");
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..number_from("FIRN_SESSIONS", 1) {
            scope.spawn(run_walks);
        }
    });
    let [acknowledged, failed, kills] = sums.into_inner().unwrap();
    println!("{kills} kills and outages: {acknowledged} commits acknowledged, {failed} not");
    assert!(acknowledged > 10, "{acknowledged}");
}

fn run_walk(seed: u64) -> [u64; 3] {
    let dir = tempfile::tempdir().unwrap();
    let mut walk = Walk::new(dir.path(), seed);
    for _ in 0..STEPS {
        walk.step();
    }
    walk.finish()
}
