//! Helper thread of one target: connects, sends what the target lacks, and then each commit. It
//! never gives up: when the target is lost, it tries again.
//!
//! ```text
//!              +----------- error, then a delay of 0.1 s to 2 s ------------+
//!              v                                                            |
//!   connect: what does it have? -- an old state --> the backlog has the commits after it: send them
//!              |                                    otherwise: send the whole state
//!              |                                                            |
//!              +-- a later session took over: end                           v
//!                                                      connected: send each commit, report what is stored
//! ```

use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::committed::{CommittedState, TargetWork};
use super::error::BackupError;
use super::image::{ApplicationState, StateId};
use super::remote::SocketHandle;
use super::status::TargetCondition;
use super::transaction::Commit;

/// The minimum and the maximum delay between two attempts to connect.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];

/// A target that a helper thread writes commits to.
pub(crate) trait BackupConnection: Send {
    /// Makes the target writable, and returns the state that it has; `None` if that is unknown.
    ///
    /// # Errors
    /// If the target is away.
    fn connect(&mut self) -> Result<Option<StateId>, BackupError>;

    /// Stores commits safely, in order.
    ///
    /// # Errors
    /// If it cannot. Some of them may be stored: the next `connect` returns how many.
    fn append_commits(&mut self, commits: &[Commit]) -> Result<(), BackupError>;

    /// Replaces the state that the target has, safely.
    ///
    /// # Errors
    /// If it cannot. The next `connect` returns what the target has.
    fn replace_state(&mut self, state: &ApplicationState) -> Result<(), BackupError>;

    /// The time after which to call [`BackupConnection::do_idle_work`] if there is no commit.
    fn idle_timeout(&self) -> Duration;

    /// Does deferred work, and checks that the target is still there.
    ///
    /// # Errors
    /// If the target is lost.
    fn do_idle_work(&mut self) -> Result<(), BackupError>;

    /// Does the work that is due before the session ends.
    ///
    /// # Errors
    /// If the target is lost.
    fn finish(&mut self) -> Result<(), BackupError>;

    /// Whether the log is so large that it should be compacted.
    fn is_oversized(&self, _state_bytes: u64) -> bool {
        false
    }

    /// Compacts the log to this state, if there is space for that.
    ///
    /// # Errors
    /// As for [`BackupConnection::replace_state`].
    fn compact(&mut self, state: &ApplicationState) -> Result<(), BackupError> {
        self.replace_state(state)
    }

    /// Records for later sessions whether this target may lack acknowledged transactions.
    ///
    /// # Errors
    /// If it cannot be recorded: then no transaction may be acknowledged without this target.
    fn mark_left_out(&mut self, _is_left_out: bool) -> Result<(), BackupError> {
        Ok(())
    }
}

/// The helper threads of a session. Dropping this value waits until all targets have everything, or
/// until the time limit is over.
pub(crate) struct BackupSet {
    committed: Arc<CommittedState>,
    threads: Vec<JoinHandle<()>>,
    sockets: Vec<SocketHandle>,
}

/// A target, and a handle of its socket if it has one.
pub(crate) type TargetConnection = (Box<dyn BackupConnection>, Option<SocketHandle>);

impl BackupSet {
    /// Starts a thread for each target.
    pub(crate) fn start(
        committed: CommittedState,
        connections: Vec<TargetConnection>,
    ) -> Result<Self, BackupError> {
        let (threads, sockets) = (Vec::new(), Vec::new());
        let mut set = Self { committed: Arc::new(committed), threads, sockets };
        for (target, (connection, socket)) in connections.into_iter().enumerate() {
            set.sockets.extend(socket);
            let committed = set.committed.clone();
            let helper = TargetHelper { connection, committed, target, delay: RETRY_DELAYS[0] };
            let thread = thread::Builder::new().name("firn-app-backup".into());
            let started = thread.spawn(move || helper.run());
            set.threads.push(started.map_err(BackupError::Thread)?);
        }
        Ok(set)
    }

    /// The state that the threads share with the session.
    pub(crate) fn committed(&self) -> &Arc<CommittedState> {
        &self.committed
    }
}

impl Drop for BackupSet {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        if !self.committed.owner().is_this_process() {
            // The child has no such threads. One may have held a lock at the fork.
            return std::mem::forget(threads);
        }
        self.committed.stop();
        if !self.committed.wait_for_end(threads.len()) {
            // These threads wait for replies, and would do so for longer.
            self.sockets.iter().for_each(super::remote::cut_connection);
        }
        for thread in threads {
            // A panic has already been reported to the threads that wait.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for BackupSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackupSet").field("targets", &self.threads.len()).finish_non_exhaustive()
    }
}

struct TargetHelper {
    connection: Box<dyn BackupConnection>,
    committed: Arc<CommittedState>,
    target: usize,
    delay: Duration,
}

impl Drop for TargetHelper {
    fn drop(&mut self) {
        self.committed.update_board(|board| board.targets[self.target].has_ended = true);
    }
}

impl TargetHelper {
    fn run(mut self) {
        loop {
            let Err(error) = self.serve() else { return };
            if let BackupError::Superseded { generation } = error {
                self.report(TargetCondition::Superseded, Some(&error));
                let target = self.target;
                return self.committed.update_board(|it| it.set_superseded(target, generation));
            }
            self.leave_out();
            self.report(TargetCondition::Lost, Some(&error));
            if !self.committed.wait_before_retry(self.target, self.delay) {
                return;
            }
            self.delay = (self.delay * 2).min(RETRY_DELAYS[1]);
        }
    }

    fn report(&self, condition: TargetCondition, error: Option<&BackupError>) {
        self.committed.report_condition(self.target, condition, error);
    }

    /// Connects, and works until the session ends or the target is lost.
    fn serve(&mut self) -> Result<(), BackupError> {
        let has = self.connection.connect()?;
        let known = has.and_then(|has| self.committed.position_of(has));
        let mut position = match known {
            Some(position) => self.report_stored(position)?,
            None => self.send_state()?,
        };
        self.delay = RETRY_DELAYS[0];
        loop {
            match self.committed.wait_for_work(position, self.connection.idle_timeout()) {
                TargetWork::Commits(commits) => position = self.send_commits(position, commits)?,
                TargetWork::State => position = self.send_state()?,
                TargetWork::Idle => self.connection.do_idle_work()?,
                TargetWork::Stop => return self.connection.finish(),
            }
        }
    }

    fn send_commits(&mut self, position: u64, commits: Vec<Commit>) -> Result<u64, BackupError> {
        self.connection.append_commits(&commits)?;
        let last = commits.last().map_or(position, |commit| commit.id.sequence);
        // While a log is compacted, a commit takes memory for what it changes. So the application
        // waits for that after a large one.
        let is_large = commits.iter().any(Commit::shares_state);
        drop(commits);
        if is_large {
            self.compact_if_oversized()?;
        }
        let position = self.report_stored(last)?;
        if !is_large {
            self.compact_if_oversized()?;
        }
        // The image may be later than the commits, or the log may not have been compacted.
        Ok(position)
    }

    fn compact_if_oversized(&mut self) -> Result<(), BackupError> {
        let state_bytes = self.committed.lock_image().byte_count();
        match self.connection.is_oversized(state_bytes) {
            true => self.connection.compact(&self.committed.copy_image()),
            false => Ok(()),
        }
    }

    fn send_state(&mut self) -> Result<u64, BackupError> {
        self.report(TargetCondition::CatchingUp, None);
        let state = self.committed.copy_image();
        self.connection.replace_state(&state)?;
        let sequence = state.sequence();
        drop(state);
        self.committed.update_board(|board| board.count_state_transfer(self.target));
        self.report_stored(sequence)
    }

    /// Reports that the target has stored everything up to this transaction.
    fn report_stored(&mut self, position: u64) -> Result<u64, BackupError> {
        let (target, mut is_back) = (self.target, false);
        self.committed.update_board(|board| {
            board.set_stored(target, position);
            if position >= board.latest {
                board.set_condition(target, TargetCondition::Connected, None);
                is_back = std::mem::take(&mut board.targets[target].is_left_out);
            } else if board.condition(target) != TargetCondition::Connected {
                board.set_condition(target, TargetCondition::CatchingUp, None);
            }
        });
        if is_back {
            // Each later commit waits for this target again.
            self.connection.mark_left_out(false)?;
        }
        Ok(position)
    }

    /// Lets transactions be acknowledged without this target, if a later session will know that.
    fn leave_out(&mut self) {
        if self.committed.can_leave_out() && self.connection.mark_left_out(true).is_ok() {
            self.committed.update_board(|board| board.targets[self.target].is_left_out = true);
        }
    }
}
