//! Board of a session's backups: the last commits, and how far each target is.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime};

use super::error::BackupError;
use super::settings::{AcknowledgePolicy, BackupTarget};
use super::status::{BackupEvent, BackupStatus, TargetCondition};
use super::transaction::Commit;

/// The maximum count of the commits that are kept for targets that lack them.
const BACKLOG_COMMITS_MAX: usize = 256;
/// The maximum count of events that the application has not read.
const EVENTS_MAX: usize = 256;

/// What is known of a target.
#[derive(Debug)]
pub(crate) struct TargetRecord {
    pub(crate) name: String,
    pub(crate) policy: AcknowledgePolicy,
    pub(crate) is_local: bool,
    /// A local log that may lack acknowledged transactions: the next session knows that, too.
    pub(crate) is_left_out: bool,
    /// The last transaction that it has stored.
    pub(crate) stored: u64,
    pub(crate) has_ended: bool,
    condition: TargetCondition,
    superseded_by: Option<u64>,
    /// The bytes of all commits of this session up to `stored`.
    stored_bytes: u64,
    error: Option<String>,
    since: SystemTime,
    state_transfers: u64,
}

impl TargetRecord {
    /// A target that has all transactions up to `stored`.
    pub(crate) fn new(target: &BackupTarget, stored: u64) -> Self {
        Self {
            name: target.name(),
            policy: target.acknowledge,
            is_local: target.is_local(),
            is_left_out: false,
            stored,
            has_ended: false,
            condition: TargetCondition::Connected,
            superseded_by: None,
            stored_bytes: 0,
            error: None,
            since: SystemTime::now(),
            state_transfers: 0,
        }
    }

    /// The same in another condition, of which the application gets no event.
    pub(crate) fn in_condition(self, condition: TargetCondition, error: Option<String>) -> Self {
        Self { condition, error, ..self }
    }

    /// Whether a commit of this transaction need not wait for this target.
    fn has_acknowledged_enough(&self, sequence: u64) -> bool {
        let needed = match self.policy {
            AcknowledgePolicy::Sync => sequence,
            AcknowledgePolicy::Async { lag_max } => sequence.saturating_sub(lag_max),
        };
        self.stored >= needed
    }

    fn describe_gap(&self) -> String {
        let is_away = matches!(self.condition, TargetCondition::Lost | TargetCondition::Superseded);
        let error = self.error.as_deref().filter(|_| is_away);
        format!("{} lacks it ({})", self.name, error.unwrap_or("no reply yet"))
    }
}

/// The last commits and the targets.
#[derive(Debug)]
pub(crate) struct BackupBoard {
    /// The last committed transaction.
    pub(crate) latest: u64,
    pub(crate) targets: Vec<TargetRecord>,
    pub(crate) events: VecDeque<BackupEvent>,
    /// Set when the session ends: the time at which threads give up.
    pub(crate) stop: Option<Instant>,
    backlog: VecDeque<(Commit, u64)>,
    /// The maximum size of the commits in the backlog, in bytes.
    backlog_max: u64,
    /// The bytes of all commits of this session.
    bytes: u64,
}

impl BackupBoard {
    pub(crate) fn new(latest: u64, targets: Vec<TargetRecord>) -> Self {
        let (events, backlog) = (VecDeque::new(), VecDeque::new());
        Self { latest, targets, events, stop: None, backlog, backlog_max: 0, bytes: 0 }
    }

    /// Drops the commits that have copies of the state, and those before them. A target that
    /// lacks one of them gets the whole state.
    pub(crate) fn drop_shared_commits(&mut self) {
        if let Some(last) = self.backlog.iter().rposition(|(commit, _)| commit.shares_state()) {
            self.backlog.drain(..=last);
        }
    }

    pub(crate) fn add_commit(&mut self, commit: Commit, backlog_max: u64) {
        self.latest = commit.id.sequence;
        self.backlog_max = backlog_max;
        self.bytes += commit.byte_count();
        self.backlog.push_back((commit, self.bytes));
        self.trim_backlog();
    }

    /// Drops the commits that every target has, and the oldest ones if they are too many. The last
    /// one stays, however large it is, until every target has it.
    fn trim_backlog(&mut self) {
        let stored = self.stored_by_all();
        while let Some((commit, end)) = self.backlog.front() {
            let start = end - commit.byte_count();
            let is_too_much = self.backlog.len() > 1
                && (self.backlog.len() > BACKLOG_COMMITS_MAX
                    || self.bytes - start > self.backlog_max);
            if commit.id.sequence > stored && !is_too_much {
                return;
            }
            self.backlog.pop_front();
        }
    }

    /// Whether the backlog has each commit after this one.
    pub(crate) fn has_commits_after(&self, sequence: u64) -> bool {
        let first = self.backlog.front().map(|(commit, _)| commit.id.sequence);
        sequence == self.latest || first.is_some_and(|first| first <= sequence + 1)
    }

    pub(crate) fn commits_after(&self, sequence: u64) -> Option<Vec<Commit>> {
        let later = self.backlog.iter().filter(|(commit, _)| commit.id.sequence > sequence);
        let commits = || later.map(|(commit, _)| commit.clone()).collect();
        self.has_commits_after(sequence).then(commits)
    }

    pub(crate) fn stored_by_all(&self) -> u64 {
        self.targets.iter().map(|target| target.stored).min().unwrap_or(self.latest)
    }

    pub(crate) fn is_stored_by_all(&self, sequence: u64) -> bool {
        self.stored_by_all() >= sequence
    }

    /// Whether enough targets have a transaction: the required count of them, and each local log
    /// that is not left out.
    pub(crate) fn is_acknowledged(&self, sequence: u64, required: usize) -> bool {
        let satisfied =
            self.targets.iter().filter(|target| target.has_acknowledged_enough(sequence)).count();
        let is_waited_for = |target: &&TargetRecord| target.is_local && !target.is_left_out;
        satisfied >= required
            && self
                .targets
                .iter()
                .filter(is_waited_for)
                .all(|target| target.has_acknowledged_enough(sequence))
    }

    /// The error of a session that can't commit any more, because a later one has too many targets.
    pub(crate) fn final_error(&self, required: usize) -> Option<BackupError> {
        let lost = self.targets.iter().filter_map(|target| target.superseded_by);
        let is_final = self.targets.len() - lost.clone().count() < required;
        lost.max().filter(|_| is_final).map(|generation| BackupError::Superseded { generation })
    }

    pub(crate) fn missing_acknowledgement(
        &self,
        sequence: u64,
        required: usize,
        waited: Duration,
    ) -> BackupError {
        let lacks = |target: &&TargetRecord| target.stored < sequence;
        let lacking: Vec<_> =
            self.targets.iter().filter(lacks).map(TargetRecord::describe_gap).collect();
        let targets = self.targets.len();
        let stored = targets - lacking.len();
        let lacking = lacking.join("; ");
        BackupError::NotAcknowledged { sequence, stored, targets, required, waited, lacking }
    }

    /// Records that a target has stored all transactions up to this one, and possibly lost later
    /// ones.
    pub(crate) fn set_stored(&mut self, target: usize, sequence: u64) {
        let known = self.backlog.iter().find(|(commit, _)| commit.id.sequence == sequence);
        let bytes = match known {
            Some((_, end)) => *end,
            None if sequence >= self.latest => self.bytes,
            None => 0,
        };
        let record = &mut self.targets[target];
        (record.stored, record.stored_bytes) = (sequence, bytes);
        self.trim_backlog();
    }

    pub(crate) fn count_state_transfer(&mut self, target: usize) {
        self.targets[target].state_transfers += 1;
    }

    pub(crate) fn set_superseded(&mut self, target: usize, generation: u64) {
        self.targets[target].superseded_by = Some(generation);
    }

    pub(crate) fn set_condition(
        &mut self,
        target: usize,
        condition: TargetCondition,
        error: Option<String>,
    ) {
        let record = &mut self.targets[target];
        record.error = error.clone().or(record.error.take());
        if record.condition == condition {
            return;
        }
        let time = SystemTime::now();
        (record.condition, record.since) = (condition, time);
        let target = record.name.clone();
        self.events.push_back(BackupEvent { target, condition, error, time });
        while self.events.len() > EVENTS_MAX {
            self.events.pop_front();
        }
    }

    pub(crate) fn condition(&self, target: usize) -> TargetCondition {
        self.targets[target].condition
    }

    pub(crate) fn status(&self) -> Vec<BackupStatus> {
        let status = |target: &TargetRecord| BackupStatus {
            target: target.name.clone(),
            condition: target.condition,
            since: target.since,
            acknowledged: target.stored,
            commits_behind: self.latest.saturating_sub(target.stored),
            bytes_behind: self.bytes - target.stored_bytes,
            last_error: target.error.clone(),
            state_transfers: target.state_transfers,
        };
        self.targets.iter().map(status).collect()
    }
}
