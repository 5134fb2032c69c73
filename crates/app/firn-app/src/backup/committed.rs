//! Committed state of a session with backups. The thread that commits and the threads of the targets
//! share it.
//!
//! ```text
//!   commit n ---> image: the state after n
//!            ---> backlog: | n-3 | n-2 | n-1 | n |
//!                             ^           ^         each target has a position: the last commit that it
//!                          target B    target A     has. It gets the commits after it from the backlog,
//!                                                   or the whole image if the backlog begins later.
//! ```
//!
//! The backlog is bounded: a target that is away for long does not use memory. A target that is
//! sent the whole image has a copy of it, which takes memory for what is committed meanwhile.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::board::{BackupBoard, TargetRecord};
use super::error::BackupError;
use super::image::{ApplicationState, StateId};
use super::settings::RequiredTargets;
use super::status::{BackupEvent, BackupStatus, TargetCondition};
use super::transaction::{Commit, NewChanges, backlog_max};
use crate::sys::fork::OwnerProcess;

/// The next work of a target's thread.
#[derive(Debug)]
pub(crate) enum TargetWork {
    /// These commits.
    Commits(Vec<Commit>),
    /// The whole state: the backlog begins after the commit that the target needs next.
    State,
    /// Nothing yet.
    Idle,
    /// Nothing any more: the session ends.
    Stop,
}

/// The committed state, the last commits, and the positions of the targets.
#[derive(Debug)]
pub(crate) struct CommittedState {
    /// The state that the session recovered, or began with.
    base: StateId,
    generation: u64,
    required: RequiredTargets,
    timeout: Duration,
    owner: OwnerProcess,
    image: Mutex<ApplicationState>,
    board: Mutex<BackupBoard>,
    changed: Condvar,
}

impl CommittedState {
    pub(crate) fn new(
        image: ApplicationState,
        generation: u64,
        targets: Vec<TargetRecord>,
        required: RequiredTargets,
        timeout: Duration,
        owner: OwnerProcess,
    ) -> Self {
        let board = Mutex::new(BackupBoard::new(image.sequence(), targets));
        let (base, image, changed) = (image.id(), Mutex::new(image), Condvar::new());
        Self { base, generation, required, timeout, owner, image, board, changed }
    }

    /// The process of the session. In another one the locks may be locked for ever.
    pub(crate) fn owner(&self) -> OwnerProcess {
        self.owner
    }

    /// Whether a transaction can be acknowledged without some of the targets.
    pub(crate) fn can_leave_out(&self) -> bool {
        let board = self.lock_board();
        self.required.count_of(board.targets.len()) < board.targets.len()
    }

    pub(crate) fn lock_image(&self) -> MutexGuard<'_, ApplicationState> {
        self.image.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_board(&self) -> MutexGuard<'_, BackupBoard> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the board, and wakes all threads that wait for a change.
    pub(crate) fn update_board<T>(&self, change: impl FnOnce(&mut BackupBoard) -> T) -> T {
        let result = change(&mut self.lock_board());
        self.changed.notify_all();
        result
    }

    /// Adds a transaction, which all targets get.
    pub(crate) fn add_commit(&self, sequence: u64, new: NewChanges<'_>) -> Result<(), BackupError> {
        let id = StateId { generation: self.generation, sequence };
        // What it shares with the image would take memory twice.
        self.lock_board().drop_shared_commits();
        let mut image = self.lock_image();
        let commit = Commit::apply_changes(new, &mut image, id)?;
        let backlog_max = backlog_max(image.byte_count());
        drop(image);
        self.update_board(|board| board.add_commit(commit, backlog_max));
        Ok(())
    }

    /// Waits until enough targets have acknowledged a transaction.
    pub(crate) fn wait_for_acknowledgement(&self, sequence: u64) -> Result<(), BackupError> {
        self.wait_for(sequence, |board, required| board.is_acknowledged(sequence, required))
    }

    /// Waits until all targets have stored a transaction.
    pub(crate) fn wait_until_stored(&self, sequence: u64) -> Result<(), BackupError> {
        self.wait_for(sequence, |board, _| board.is_stored_by_all(sequence))
    }

    fn wait_for(
        &self,
        sequence: u64,
        is_done: impl Fn(&BackupBoard, usize) -> bool,
    ) -> Result<(), BackupError> {
        let until = Instant::now() + self.timeout;
        let mut board = self.lock_board();
        let required = self.required.count_of(board.targets.len());
        loop {
            if is_done(&board, required) {
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            if let Some(error) = board.final_error(required) {
                return Err(error);
            }
            if left.is_zero() {
                return Err(board.missing_acknowledgement(sequence, required, self.timeout));
            }
            board = self.wait_for_change(board, left);
        }
    }

    fn wait_for_change<'a>(
        &self,
        board: MutexGuard<'a, BackupBoard>,
        timeout: Duration,
    ) -> MutexGuard<'a, BackupBoard> {
        self.changed.wait_timeout(board, timeout).unwrap_or_else(PoisonError::into_inner).0
    }

    /// The last transaction that every target has.
    pub(crate) fn stored_by_all(&self) -> u64 {
        self.lock_board().stored_by_all()
    }

    pub(crate) fn status(&self) -> Vec<BackupStatus> {
        self.lock_board().status()
    }

    pub(crate) fn next_event(&self, timeout: Duration) -> Option<BackupEvent> {
        let until = Instant::now() + timeout;
        let mut board = self.lock_board();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match board.events.pop_front() {
                None if !left.is_zero() => board = self.wait_for_change(board, left),
                event => return event,
            }
        }
    }

    /// The position of a target that has this state; `None` if it must get the whole state.
    pub(crate) fn position_of(&self, has: StateId) -> Option<u64> {
        let is_ancestor = has == self.base
            || has.generation == self.generation && has.sequence > self.base.sequence;
        let board = self.lock_board();
        let is_known = is_ancestor && has.sequence <= board.latest;
        (is_known && board.has_commits_after(has.sequence)).then_some(has.sequence)
    }

    /// Waits for work of a target that has all transactions up to `position`.
    pub(crate) fn wait_for_work(&self, position: u64, idle: Duration) -> TargetWork {
        let until = Instant::now() + idle;
        let mut board = self.lock_board();
        loop {
            if board.latest > position {
                return board
                    .commits_after(position)
                    .map_or(TargetWork::State, TargetWork::Commits);
            }
            let left = until.saturating_duration_since(Instant::now());
            match (board.stop, left.is_zero()) {
                (Some(_), _) => return TargetWork::Stop,
                (None, true) => return TargetWork::Idle,
                (None, false) => board = self.wait_for_change(board, left),
            }
        }
    }

    /// Waits before a lost target is tried again. False if the session ends first.
    pub(crate) fn wait_before_retry(&self, target: usize, delay: Duration) -> bool {
        let until = Instant::now() + delay;
        let mut board = self.lock_board();
        loop {
            let now = Instant::now();
            let is_complete = board.targets[target].stored >= board.latest;
            if board.stop.is_some_and(|stop| is_complete || now >= stop) {
                return false;
            }
            if now >= until {
                return true;
            }
            let wake = board.stop.map_or(until, |stop| stop.min(until));
            board = self.wait_for_change(board, wake.saturating_duration_since(now));
        }
    }

    /// Has the targets' threads end: when their targets have everything, or when the time limit is
    /// over.
    pub(crate) fn stop(&self) {
        self.update_board(|board| board.stop = Some(Instant::now() + self.timeout));
    }

    /// Waits until so many threads have ended. False if the time limit is over first.
    pub(crate) fn wait_for_end(&self, threads: usize) -> bool {
        let mut board = self.lock_board();
        while board.targets.iter().filter(|target| target.has_ended).count() < threads {
            let now = Instant::now();
            let left =
                board.stop.map_or(Duration::ZERO, |stop| stop.saturating_duration_since(now));
            if left.is_zero() {
                return false;
            }
            board = self.wait_for_change(board, left);
        }
        true
    }

    /// Records the condition of a target.
    pub(crate) fn report_condition(
        &self,
        target: usize,
        condition: TargetCondition,
        error: Option<&BackupError>,
    ) {
        let error = error.map(BackupError::describe);
        self.update_board(|board| board.set_condition(target, condition, error));
    }

    /// A copy of the state that the session committed last.
    pub(crate) fn copy_image(&self) -> ApplicationState {
        self.lock_image().clone()
    }
}
