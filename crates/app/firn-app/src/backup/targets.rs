//! Opens the targets of a session: finds the latest state among enough of them, and shuts out older
//! sessions. The helper threads then update the other targets.
//!
//! Which targets are enough? Each acknowledged transaction is stored by N of K targets, and by each
//! local log that is not marked as left out. So it is found by reading one such log, or any
//! K - N + 1 targets. An empty target counts only if all are read: its disk may have been replaced.

use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::board::TargetRecord;
use super::committed::CommittedState;
use super::error::BackupError;
use super::file::{FileTarget, is_left_out};
use super::helper::{BackupSet, TargetConnection};
use super::image::{ApplicationState, StateId};
use super::log::ApplicationLog;
use super::remote::RemoteTarget;
use super::settings::{BackupTarget, Compression, FsyncPolicy, TargetLocation};
use super::status::TargetCondition;
use crate::options::SessionOptions;
use crate::sys::fork::OwnerProcess;

/// Interval between attempts to open targets that are away.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// A target that is being opened.
struct OpeningTarget<'a> {
    target: &'a BackupTarget,
    kind: OpeningKind,
    /// The state that it has, once it is opened.
    has: Option<StateId>,
    error: Option<BackupError>,
}

enum OpeningKind {
    File { log: Box<ApplicationLog>, fsync: FsyncPolicy, is_complete: bool },
    Remote(Box<RemoteTarget>),
}

/// The targets of a session that is being opened, and the latest state that was read from a file.
struct TargetOpener<'a> {
    options: &'a SessionOptions,
    targets: Vec<OpeningTarget<'a>>,
    latest: ApplicationState,
    generation: u64,
}

/// Opens the targets, and makes the latest state that any of them has the committed one.
pub(crate) fn open_targets(
    options: &SessionOptions,
    owner: OwnerProcess,
) -> Result<Option<BackupSet>, BackupError> {
    if options.backups.is_empty() {
        return Ok(None);
    }
    let mut opener = TargetOpener::new(options)?;
    opener.open_enough()?;
    if options.discard {
        opener.latest = ApplicationState::empty(opener.generation);
    }
    opener.start_helpers(owner).map(Some)
}

/// Starts the helper of a session that continues a log.
pub(crate) fn continue_log(
    log: ApplicationLog,
    image: ApplicationState,
    fsync: FsyncPolicy,
    timeout: Duration,
    owner: OwnerProcess,
) -> Result<BackupSet, BackupError> {
    let target = BackupTarget::file(log.path()).fsync(fsync);
    let record = TargetRecord::new(&target, image.sequence());
    let generation = new_generation(log.fence());
    let file = FileTarget::new(log, image.id(), fsync, Compression::None);
    let required = super::settings::RequiredTargets::All;
    let committed = CommittedState::new(image, generation, vec![record], required, timeout, owner);
    BackupSet::start(committed, vec![(Box::new(file), None)])
}

/// A generation later than all that are known. By the clock, so that sessions that could not read
/// each other's targets have different ones.
fn new_generation(known: u64) -> u64 {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(clock.as_nanos()).unwrap_or_default().max(known.saturating_add(1))
}

impl<'a> TargetOpener<'a> {
    /// Opens the logs in files. Remote targets are not connected yet.
    fn new(options: &'a SessionOptions) -> Result<Self, BackupError> {
        let mut latest = ApplicationState::default();
        let (mut targets, mut fence) = (Vec::new(), 0);
        for target in &options.backups {
            let (kind, has) = match &target.location {
                TargetLocation::File { path, fsync } => {
                    let (log, image) = ApplicationLog::open(path, &options.name)?;
                    let id = image.id();
                    fence = fence.max(log.fence());
                    if id > latest.id() {
                        latest = image;
                    }
                    let is_complete = !is_left_out(path) && id != StateId::default();
                    let log = Box::new(log);
                    (OpeningKind::File { log, fsync: *fsync, is_complete }, Some(id))
                }
                TargetLocation::Remote { address, identity } => {
                    let remote = RemoteTarget::new(
                        address,
                        &options.name,
                        identity,
                        options.backup_timeout,
                        target.compression,
                    )?;
                    (OpeningKind::Remote(Box::new(remote)), None)
                }
            };
            targets.push(OpeningTarget { target, kind, has, error: None });
        }
        Ok(Self { options, targets, latest, generation: new_generation(fence) })
    }

    /// Connects remote targets, until enough of them are open to know the latest state, and fetches
    /// it.
    fn open_enough(&mut self) -> Result<(), BackupError> {
        let start = Instant::now();
        loop {
            self.connect_missing()?;
            let is_known = self.is_enough() && self.fetch_latest()?;
            if is_known {
                return Ok(());
            }
            if start.elapsed() >= self.options.backup_timeout {
                return Err(self.too_few());
            }
            thread::sleep(RETRY_INTERVAL);
        }
    }

    /// Tries each remote target that is not connected, all at once. A retry does not help against
    /// other errors than that it is away.
    fn connect_missing(&mut self) -> Result<(), BackupError> {
        let generation = self.generation;
        let attempts: Vec<_> = thread::scope(|scope| {
            let missing = self.targets.iter_mut().filter(|opening| opening.has.is_none());
            let threads: Vec<_> =
                missing.map(|opening| scope.spawn(move || opening.connect(generation))).collect();
            threads.into_iter().map(|thread| thread.join()).collect()
        });
        for attempt in attempts {
            let panicked = |_| BackupError::Failed("a thread ended early".into());
            let later = attempt.map_err(panicked)??;
            self.generation = self.generation.max(later);
        }
        if self.generation > generation {
            // All targets get the same generation.
            let remotes = self.targets.iter_mut().filter(|opening| !opening.target.is_local());
            remotes.for_each(|opening| opening.has = None);
            return self.connect_missing();
        }
        Ok(())
    }

    fn readable(&self) -> usize {
        let is_readable = |has: &StateId| self.options.discard || *has != StateId::default();
        self.targets.iter().filter_map(|opening| opening.has).filter(is_readable).count()
    }

    fn needed(&self) -> usize {
        let count = self.targets.len();
        count + 1 - self.options.require.count_of(count)
    }

    fn is_enough(&self) -> bool {
        let has_complete_log = self.targets.iter().any(
            |opening| matches!(&opening.kind, OpeningKind::File { is_complete, .. } if *is_complete),
        );
        let are_all_open = self.targets.iter().all(|opening| opening.has.is_some());
        are_all_open || has_complete_log || self.readable() >= self.needed()
    }

    /// Fetches the latest state from its target. False if the target went away.
    fn fetch_latest(&mut self) -> Result<bool, BackupError> {
        if self.options.discard {
            return Ok(true);
        }
        let latest = self.latest.id();
        let later = self.targets.iter_mut().filter(|opening| opening.has > Some(latest));
        let Some(opening) = later.max_by_key(|opening| opening.has) else { return Ok(true) };
        let OpeningKind::Remote(remote) = &mut opening.kind else { return Ok(true) };
        match remote.fetch_state() {
            Ok(image) => {
                self.latest = image;
                Ok(true)
            }
            Err(error) if error.is_transient() => {
                (opening.has, opening.error) = (None, Some(error));
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn too_few(&self) -> BackupError {
        let describe = |opening: &OpeningTarget<'_>| {
            let error = opening.error.as_ref().map_or("empty".to_owned(), BackupError::describe);
            format!("{} ({error})", opening.target.name())
        };
        let is_missing =
            |opening: &&OpeningTarget<'_>| opening.has.is_none_or(|has| has == StateId::default());
        let missing: Vec<_> = self.targets.iter().filter(is_missing).map(describe).collect();
        BackupError::TooFewReadable {
            readable: self.readable(),
            targets: self.targets.len(),
            needed: self.needed(),
            missing: missing.join("; "),
        }
    }

    fn start_helpers(self, owner: OwnerProcess) -> Result<BackupSet, BackupError> {
        let base = self.latest.id();
        let (mut records, mut connections) = (Vec::new(), Vec::new());
        for opening in self.targets {
            records.push(opening.record(base));
            connections.push(opening.into_connection());
        }
        let committed = CommittedState::new(
            self.latest,
            self.generation,
            records,
            self.options.require,
            self.options.backup_timeout,
            owner,
        );
        BackupSet::start(committed, connections)
    }
}

impl OpeningTarget<'_> {
    /// Connects to a remote target. Returns the generation that it requires at least.
    fn connect(&mut self, generation: u64) -> Result<u64, BackupError> {
        let OpeningKind::Remote(remote) = &mut self.kind else { return Ok(generation) };
        match remote.open(generation) {
            Ok(id) => (self.has, self.error) = (Some(id), None),
            Err(BackupError::Superseded { generation }) => return Ok(generation.saturating_add(1)),
            Err(error) if error.is_transient() => self.error = Some(error),
            Err(error) => return Err(error),
        }
        Ok(generation)
    }

    fn record(&self, base: StateId) -> TargetRecord {
        let is_marked =
            matches!(&self.target.location, TargetLocation::File { path, .. } if is_left_out(path));
        let stored = if self.has == Some(base) { base.sequence } else { 0 };
        let mut record = TargetRecord::new(self.target, stored);
        record.is_left_out = is_marked;
        match (self.has, &self.error) {
            (Some(has), _) if has == base => record,
            (Some(_), _) => record.in_condition(TargetCondition::CatchingUp, None),
            (None, error) => record
                .in_condition(TargetCondition::Lost, error.as_ref().map(BackupError::describe)),
        }
    }

    fn into_connection(self) -> TargetConnection {
        match self.kind {
            OpeningKind::File { log, fsync, .. } => {
                let id = self.has.unwrap_or_default();
                (Box::new(FileTarget::new(*log, id, fsync, self.target.compression)), None)
            }
            OpeningKind::Remote(remote) => {
                let socket = remote.socket();
                (remote, Some(socket))
            }
        }
    }
}
