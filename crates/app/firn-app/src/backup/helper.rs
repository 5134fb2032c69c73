//! Helper thread of one backup target: takes transactions from a bounded queue, and reports which
//! are stored safely.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::error::BackupError;
use super::settings::AcknowledgePolicy;
use crate::sys::fork::OwnerProcess;

/// The maximum count of transactions in the queue.
const QUEUE: usize = 256;

/// One transaction for a helper to store.
#[derive(Clone, Debug)]
pub(crate) struct BackupJob {
    pub(crate) sequence: u64,
    /// Shared by all targets.
    pub(crate) payload: Arc<Vec<u8>>,
}

/// A target that a helper writes transactions to.
pub(crate) trait BackupSink: Send {
    /// Stores transactions safely, in order. Returns the last one that is safe, which may be an
    /// earlier one.
    ///
    /// # Errors
    /// If it cannot: then no later transaction will be stored either.
    fn store_transactions(&mut self, jobs: &[BackupJob]) -> Result<u64, BackupError>;

    /// The time after which to call [`BackupSink::finish_pending_work`] if no transaction arrives.
    fn idle_timeout(&self) -> Option<Duration> {
        None
    }

    /// Does deferred work.
    ///
    /// # Errors
    /// As for [`BackupSink::store_transactions`].
    fn finish_pending_work(&mut self) -> Result<(), BackupError> {
        Ok(())
    }
}

/// The state of a helper: the last transaction that is safe, and the error that ended the helper.
#[derive(Debug, Default)]
struct HelperProgress {
    state: Mutex<(u64, Option<Arc<BackupError>>)>,
    changed: Condvar,
}

impl HelperProgress {
    fn lock_state(&self) -> MutexGuard<'_, (u64, Option<Arc<BackupError>>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update_state(&self, change: impl FnOnce(&mut (u64, Option<Arc<BackupError>>))) {
        change(&mut self.lock_state());
        self.changed.notify_all();
    }

    fn wait_until_safe(&self, sequence: u64) -> Result<(), Arc<BackupError>> {
        let mut state = self.lock_state();
        loop {
            if state.0 >= sequence {
                return Ok(());
            }
            if let Some(error) = &state.1 {
                return Err(error.clone());
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A helper thread. Dropping this value waits until all its transactions are safe, or the helper
/// has failed.
pub(crate) struct BackupHelper {
    queue: Option<Sender<BackupJob>>,
    progress: Arc<HelperProgress>,
    thread: Option<JoinHandle<()>>,
    acknowledge: AcknowledgePolicy,
    owner: OwnerProcess,
}

impl BackupHelper {
    pub(crate) fn start(
        sink: impl BackupSink + 'static,
        sequence: u64,
        acknowledge: AcknowledgePolicy,
    ) -> std::io::Result<Self> {
        let owner = OwnerProcess::this_process()?;
        let (queue, jobs) = bounded(QUEUE);
        let progress = Arc::new(HelperProgress::default());
        progress.update_state(|state| state.0 = sequence);
        let ending = HelperEndGuard(progress.clone());
        let work = move || {
            let Err(error) = serve_queue(sink, &jobs, &ending.0) else { return };
            ending.0.update_state(|state| state.1 = Some(Arc::new(error)));
        };
        let thread = thread::Builder::new().name("firn-app-backup".into()).spawn(work)?;
        Ok(Self { queue: Some(queue), progress, thread: Some(thread), acknowledge, owner })
    }

    /// Queues a transaction for the helper.
    pub(crate) fn queue_transaction(&self, job: BackupJob) -> Result<(), Arc<BackupError>> {
        let sent = self.queue.as_ref().is_some_and(|queue| queue.send(job).is_ok());
        // A helper that has ended has left its error.
        if sent { Ok(()) } else { self.progress.wait_until_safe(u64::MAX) }
    }

    /// Waits until a transaction counts as committed.
    pub(crate) fn wait_for_commit(&self, sequence: u64) -> Result<(), Arc<BackupError>> {
        let needed = match self.acknowledge {
            AcknowledgePolicy::Sync => sequence,
            AcknowledgePolicy::Async { lag_max } => sequence.saturating_sub(lag_max),
        };
        self.progress.wait_until_safe(needed)
    }

    /// Waits until a transaction is safe.
    pub(crate) fn wait_until_stored(&self, sequence: u64) -> Result<(), Arc<BackupError>> {
        self.progress.wait_until_safe(sequence)
    }

    /// The last transaction that is safe.
    pub(crate) fn acknowledged_sequence(&self) -> u64 {
        self.progress.lock_state().0
    }
}

impl Drop for BackupHelper {
    fn drop(&mut self) {
        if !self.owner.is_this_process() {
            // The child has no such thread. The thread may have held the queue's lock at the fork.
            std::mem::forget((self.queue.take(), self.thread.take()));
            return;
        }
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic has already been reported to the threads that wait.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for BackupHelper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackupHelper")
            .field("acknowledged", &self.acknowledged_sequence())
            .finish_non_exhaustive()
    }
}

/// Reports the end of the helper to the threads that wait for it, however the thread ends.
struct HelperEndGuard(Arc<HelperProgress>);

impl Drop for HelperEndGuard {
    fn drop(&mut self) {
        self.0.update_state(|state| {
            state.1 = state.1.take().or_else(|| Some(Arc::new(BackupError::Gone)))
        });
    }
}

fn serve_queue(
    mut sink: impl BackupSink,
    queue: &Receiver<BackupJob>,
    progress: &HelperProgress,
) -> Result<(), BackupError> {
    let mut jobs = Vec::new();
    loop {
        let first = match sink.idle_timeout() {
            Some(time) => queue.recv_timeout(time),
            None => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match first {
            Ok(job) => {
                jobs.clear();
                jobs.push(job);
                jobs.extend(queue.try_iter());
                let safe = sink.store_transactions(&jobs)?;
                progress.update_state(|state| state.0 = state.0.max(safe));
            }
            Err(RecvTimeoutError::Timeout) => sink.finish_pending_work()?,
            Err(RecvTimeoutError::Disconnected) => return sink.finish_pending_work(),
        }
    }
}
