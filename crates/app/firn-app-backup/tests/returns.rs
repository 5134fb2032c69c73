//! Backups that go away and return: what is acknowledged stays, and all targets are equal in the
//! end.

#![cfg(test)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests may fail so")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use firn_app::{
    Area, BackupError, BackupMonitor, BackupTarget, Error, FsyncPolicy, RequiredTargets, Session,
    SessionOptions, TargetCondition, TrackerKind,
};
use support::{Backup, Link, LinkState, identity, make_keys};

const LEN: usize = 20_000;
const TIMEOUT: Duration = Duration::from_millis(150);
/// Longer than any delay before a target is tried again, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A directory with keys, a local log, and a backup process behind a link.
struct Site {
    dir: tempfile::TempDir,
    backup: Backup,
    link: Link,
}

impl Site {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let logs = dir.path().join("logs");
        Self::with_logs(dir, &logs)
    }

    fn with_logs(dir: tempfile::TempDir, logs: &Path) -> Self {
        make_keys(dir.path());
        let backup = Backup::start(dir.path(), logs);
        let link = Link::to(&backup.address);
        Self { dir, backup, link }
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("local.log")
    }

    fn local(&self) -> BackupTarget {
        BackupTarget::file(self.log()).fsync(FsyncPolicy::Never)
    }

    fn remote(&self) -> BackupTarget {
        let keys = self.dir.path().join("application");
        BackupTarget::remote(self.link.address.clone(), identity(&keys))
    }

    fn open(&self, targets: Vec<BackupTarget>, require: RequiredTargets) -> Result<Open, Error> {
        let options = SessionOptions::new("site")
            .tracker(TrackerKind::Assisted)
            .require(require)
            .backup_timeout(TIMEOUT);
        let options = targets.into_iter().fold(options, SessionOptions::backup);
        let mut session = Session::open(options)?;
        let area = session.allocate("area", LEN)?;
        session.recover()?;
        Ok(Open { session, area })
    }

    /// The state of both logs, which must be the same.
    fn common_state(&mut self) -> (u64, Vec<u8>) {
        self.backup.kill();
        let read = |path: PathBuf| {
            let open = self.open(vec![BackupTarget::file(path)], RequiredTargets::All).unwrap();
            (open.session.sequence(), open.session.bytes(&open.area).to_vec())
        };
        let states = [read(self.log()), read(self.backup.logs.join("site.log"))];
        assert!(states[0] == states[1], "{} and {}", states[0].0, states[1].0);
        let [state, _] = states;
        state
    }
}

struct Open {
    session: Session,
    area: Area,
}

impl Open {
    /// Changes some bytes, different ones each time.
    fn commit(&mut self) -> Result<u64, Error> {
        let number = self.session.sequence() + 1;
        let mut transaction = self.session.begin().unwrap();
        transaction.bytes(&self.area)[number as usize * 37 % LEN] = number as u8 | 1;
        transaction.commit()
    }

    fn condition(&self, target: usize) -> TargetCondition {
        self.session.backup_status().unwrap()[target].condition
    }

    fn wait_for(&self, target: usize, condition: TargetCondition) {
        let since = Instant::now();
        while self.condition(target) != condition {
            assert!(since.elapsed() < PATIENCE, "{:?}", self.session.backup_status());
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// What a commit that lacks acknowledgements reports.
fn missing(result: Result<u64, Error>) -> (u64, usize, usize, String) {
    let error = result.expect_err("too few targets have it");
    let Error::Backup(error) = error else { panic!("{error}") };
    match &*error {
        BackupError::NotAcknowledged { sequence, stored, required, lacking, .. } => {
            (*sequence, *stored, *required, lacking.clone())
        }
        error => panic!("{error}"),
    }
}

fn events(monitor: &BackupMonitor) -> Vec<TargetCondition> {
    let next = || monitor.next_event(Duration::ZERO).unwrap();
    std::iter::from_fn(next).map(|event| event.condition).collect()
}

/// The times for which a backup is away. The default limit of a commit is 10 s.
fn outages() -> Vec<Duration> {
    let runs = std::env::var("FIRN_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(1);
    let all = [50, 1000, 11_000, 30_000].map(Duration::from_millis);
    all[..if runs > 1 { 4 } else { 2 }].to_vec()
}

fn begin_outage(site: &mut Site, kind: usize) {
    match kind {
        0 => site.backup.kill(),
        1 => site.link.set(LinkState::Cut),
        _ => site.link.set(LinkState::Stalled),
    }
}

fn end_outage(site: &mut Site) {
    if !site.backup.is_running() {
        site.backup.restart();
    }
    site.link.set(LinkState::Whole);
}

#[test]
fn with_any_target_commits_continue_and_the_other_catches_up() {
    let outages = outages().into_iter().enumerate();
    for (kind, (round, outage)) in outages.flat_map(|outage| (0..3).map(move |kind| (kind, outage)))
    {
        let mut site = Site::new();
        // Also if the remote target is the first one.
        let mut targets = vec![site.local(), site.remote()];
        let remote = (kind + round) % 2;
        if remote == 0 {
            targets.reverse();
        }
        let mut open = site.open(targets, RequiredTargets::Any).unwrap();
        open.commit().unwrap();
        open.session.flush_backups().unwrap();
        let monitor = open.session.backup_monitor();
        events(&monitor);
        begin_outage(&mut site, kind);
        for _ in 0..10 {
            open.commit().unwrap();
        }
        open.wait_for(remote, TargetCondition::Lost);
        let status = &open.session.backup_status().unwrap()[remote];
        assert_eq!((status.acknowledged, status.commits_behind), (1, 10));
        assert!(status.bytes_behind > 80 && status.last_error.is_some(), "{status:?}");
        assert!(monitor.is_degraded().unwrap());
        thread::sleep(outage);
        open.commit().unwrap();
        end_outage(&mut site);
        open.wait_for(remote, TargetCondition::Connected);
        assert_eq!(open.session.acknowledged_sequence(), 12);
        let status = &open.session.backup_status().unwrap()[remote];
        assert_eq!((status.commits_behind, status.bytes_behind), (0, 0));
        assert_eq!(status.state_transfers, 0, "the backlog has all that it lacks");
        let seen = events(&monitor);
        assert_eq!(seen.first(), Some(&TargetCondition::Lost), "{seen:?}");
        assert_eq!(seen.last(), Some(&TargetCondition::Connected), "{seen:?}");
        open.commit().unwrap();
        let bytes = open.session.bytes(&open.area).to_vec();
        drop(open);
        assert!(site.common_state() == (13, bytes));
    }
}

#[test]
fn with_all_targets_a_commit_fails_in_time_and_later_ones_succeed() {
    for kind in 0..3 {
        let mut site = Site::new();
        let targets = vec![site.remote(), site.local()];
        let mut open = site.open(targets, RequiredTargets::All).unwrap();
        assert_eq!(open.commit().unwrap(), 1);
        begin_outage(&mut site, kind);
        for sequence in 2..4 {
            let since = Instant::now();
            let (number, stored, required, lacking) = missing(open.commit());
            assert!(since.elapsed() >= TIMEOUT && since.elapsed() < PATIENCE);
            assert_eq!((number, stored, required), (sequence, 1, 2));
            assert!(lacking.starts_with(&site.link.address), "{lacking}");
        }
        // The local log has what no other target has.
        assert_eq!(open.session.backup_status().unwrap()[1].acknowledged, 3);
        end_outage(&mut site);
        // A stalled link may not have been noticed: the target has returned when it has everything.
        let since = Instant::now();
        while open.session.flush_backups().is_err() {
            assert!(since.elapsed() < PATIENCE, "{:?}", open.session.backup_status());
        }
        assert_eq!(open.commit().unwrap(), 4);
        let bytes = open.session.bytes(&open.area).to_vec();
        drop(open);
        assert!(site.common_state() == (4, bytes));
    }
}

/// More commits than the backlog holds: the target gets the whole state.
#[test]
fn after_a_long_outage_the_whole_state_is_sent() {
    let mut site = Site::new();
    let mut open = site.open(vec![site.local(), site.remote()], RequiredTargets::Count(1)).unwrap();
    open.commit().unwrap();
    site.backup.kill();
    for _ in 0..600 {
        open.commit().unwrap();
    }
    site.backup.restart();
    open.wait_for(1, TargetCondition::Connected);
    assert_eq!(open.session.backup_status().unwrap()[1].state_transfers, 1);
    let bytes = open.session.bytes(&open.area).to_vec();
    drop(open);
    assert!(site.common_state() == (601, bytes));
}

#[test]
fn a_session_opens_while_a_backup_is_away() {
    let mut site = Site::new();
    let targets = |site: &Site| vec![site.remote(), site.local()];
    assert_eq!(site.open(targets(&site), RequiredTargets::All).unwrap().commit().unwrap(), 1);
    site.backup.kill();
    for require in [RequiredTargets::All, RequiredTargets::Any] {
        let mut open = site.open(targets(&site), require).unwrap();
        assert_eq!(open.condition(0), TargetCondition::Lost);
        let before = open.session.sequence();
        assert_eq!(before, if require == RequiredTargets::All { 1 } else { 2 });
        assert_eq!(open.commit().is_ok(), require == RequiredTargets::Any);
    }
    site.backup.restart();
    let mut open = site.open(targets(&site), RequiredTargets::All).unwrap();
    assert_eq!(open.commit().unwrap(), 4);
    let bytes = open.session.bytes(&open.area).to_vec();
    drop(open);
    assert!(site.common_state() == (4, bytes));
}

/// A log whose disk was replaced is empty. That must not look like a session without a past.
#[test]
fn an_empty_log_does_not_replace_a_backup_that_is_away() {
    for require in [RequiredTargets::All, RequiredTargets::Any] {
        let mut site = Site::new();
        let targets = |site: &Site| vec![site.local(), site.remote()];
        let mut open = site.open(targets(&site), require).unwrap();
        open.commit().unwrap();
        let bytes = open.session.bytes(&open.area).to_vec();
        drop(open);
        fs::remove_file(site.log()).unwrap();
        site.backup.kill();
        let error = site.open(targets(&site), require).err().expect("its past is unknown");
        let Error::Backup(error) = error else { panic!("{error}") };
        assert!(matches!(*error, BackupError::TooFewReadable { readable: 0, .. }), "{error}");
        assert!(error.to_string().contains("local.log (empty)"), "{error}");
        site.backup.restart();
        let open = site.open(targets(&site), require).unwrap();
        assert_eq!(open.session.sequence(), 1);
        open.session.flush_backups().unwrap();
        drop(open);
        assert!(site.common_state() == (1, bytes));
    }
}

/// A session whose application was thought dead can't commit any more, and never gets the backup
/// again.
#[test]
fn a_later_session_shuts_out_an_older_one() {
    let site = Site::new();
    let mut older = site.open(vec![site.remote()], RequiredTargets::All).unwrap();
    older.commit().unwrap();
    site.link.set(LinkState::Cut);
    older.wait_for(0, TargetCondition::Lost);
    site.link.set(LinkState::Whole);
    let mut later = site.open(vec![site.remote()], RequiredTargets::All).unwrap();
    assert_eq!(later.commit().unwrap(), 2);
    older.wait_for(0, TargetCondition::Superseded);
    let Err(Error::Backup(error)) = older.commit() else { panic!("it is shut out") };
    assert!(matches!(*error, BackupError::Superseded { .. }), "{error}");
    thread::sleep(Duration::from_millis(300));
    assert_eq!(later.commit().unwrap(), 3);
}

/// A small disk, until it is dropped.
struct Disk(tempfile::TempDir);

impl Disk {
    fn mount(bytes: usize) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={bytes}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(dir.path());
        if mount.output().is_ok_and(|output| output.status.success()) {
            return Some(Self(dir));
        }
        firn_skip::skip_test("no file system can be mounted here (needs root)");
        None
    }

    fn fill(&self) {
        let mut len = 4 << 20;
        while len > 0 {
            let path = self.0.path().join(format!("filler-{len}"));
            len = if fs::write(path, vec![1; len]).is_ok() { len } else { len / 2 };
            if len <= 4096 {
                len /= 2;
            }
        }
    }

    fn empty(&self) {
        let entries = fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().path());
        let is_filler = |path: &PathBuf| path.to_string_lossy().contains("filler");
        entries.filter(is_filler).for_each(|path| fs::remove_file(path).unwrap());
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

/// Commits until this target lacks one.
fn commit_until_lost(open: &mut Open, target: usize) {
    let since = Instant::now();
    while open.condition(target) != TargetCondition::Lost {
        open.commit().unwrap();
        assert!(since.elapsed() < PATIENCE);
    }
}

#[test]
fn a_backup_whose_disk_was_full_catches_up() {
    let Some(disk) = Disk::mount(1 << 20) else { return };
    let mut site = Site::with_logs(tempfile::tempdir().unwrap(), disk.0.path());
    let mut open = site.open(vec![site.local(), site.remote()], RequiredTargets::Any).unwrap();
    open.commit().unwrap();
    open.session.flush_backups().unwrap();
    disk.fill();
    commit_until_lost(&mut open, 1);
    let status = open.session.backup_status().unwrap();
    let error = status[1].last_error.clone().unwrap();
    assert!(error.contains("No space left"), "{error}");
    disk.empty();
    open.wait_for(1, TargetCondition::Connected);
    let last = open.commit().unwrap();
    let bytes = open.session.bytes(&open.area).to_vec();
    drop(open);
    assert!(site.common_state() == (last, bytes));
}

/// The log on the full disk lacks what the backup has acknowledged, and a later session knows that.
#[test]
fn a_local_log_that_was_left_out_is_not_recovered_alone() {
    let Some(disk) = Disk::mount(1 << 20) else { return };
    let mut site = Site::new();
    let log = disk.0.path().join("local.log");
    let targets = |site: &Site| vec![BackupTarget::file(&log), site.remote()];
    let mut open = site.open(targets(&site), RequiredTargets::Any).unwrap();
    open.commit().unwrap();
    disk.fill();
    commit_until_lost(&mut open, 0);
    let last = open.commit().unwrap();
    let bytes = open.session.bytes(&open.area).to_vec();
    drop(open);
    disk.empty();
    site.backup.kill();
    let error = site.open(targets(&site), RequiredTargets::Any).err().expect("it lacks some");
    assert!(matches!(error, Error::Backup(_)), "{error}");
    site.backup.restart();
    let open = site.open(targets(&site), RequiredTargets::Any).unwrap();
    assert_eq!(open.session.sequence(), last);
    assert!(open.session.bytes(&open.area) == bytes);
    open.wait_for(0, TargetCondition::Connected);
    drop(open);
    // Now it has everything again.
    site.backup.kill();
    assert_eq!(site.open(targets(&site), RequiredTargets::Any).unwrap().session.sequence(), last);
}
