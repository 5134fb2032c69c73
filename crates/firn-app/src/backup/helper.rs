//! Helper thread of one backup target: takes transactions from a bounded queue, and reports which
//! are stored safely.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::Acknowledge;
use super::error::BackupError;
use crate::sys::fork::Owner;

/// The maximum count of transactions in the queue.
const QUEUE: usize = 256;

/// One transaction for a helper to store.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) sequence: u64,
    /// Shared by all targets.
    pub(crate) payload: Arc<Vec<u8>>,
}

/// A target that a helper writes transactions to.
pub(crate) trait Sink: Send {
    /// Stores transactions safely, in order. Returns the last one that is safe, which may be an
    /// earlier one.
    ///
    /// # Errors
    /// If it cannot: then no later transaction will be stored either.
    fn put(&mut self, jobs: &[Job]) -> Result<u64, BackupError>;

    /// The time after which to call [`BackupSink::finish_pending_work`] if no transaction arrives.
    fn idle_after(&self) -> Option<Duration> {
        None
    }

    /// Does deferred work.
    ///
    /// # Errors
    /// As for [`BackupSink::store_transactions`].
    fn idle(&mut self) -> Result<(), BackupError> {
        Ok(())
    }
}

/// The state of a helper: the last transaction that is safe, and the error that ended the helper.
#[derive(Debug, Default)]
struct Progress {
    state: Mutex<(u64, Option<Arc<BackupError>>)>,
    changed: Condvar,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, (u64, Option<Arc<BackupError>>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, change: impl FnOnce(&mut (u64, Option<Arc<BackupError>>))) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn wait_for(&self, sequence: u64) -> Result<(), Arc<BackupError>> {
        let mut state = self.lock();
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
pub(crate) struct Helper {
    queue: Option<Sender<Job>>,
    progress: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
    acknowledge: Acknowledge,
    owner: Owner,
}

impl Helper {
    pub(crate) fn start(
        sink: impl Sink + 'static,
        sequence: u64,
        acknowledge: Acknowledge,
    ) -> std::io::Result<Self> {
        let owner = Owner::this_process()?;
        let (queue, jobs) = bounded(QUEUE);
        let progress = Arc::new(Progress::default());
        progress.set(|state| state.0 = sequence);
        let ending = Ending(progress.clone());
        let work = move || {
            let Err(error) = serve(sink, &jobs, &ending.0) else { return };
            ending.0.set(|state| state.1 = Some(Arc::new(error)));
        };
        let thread = thread::Builder::new().name("firn-app-backup".into()).spawn(work)?;
        Ok(Self { queue: Some(queue), progress, thread: Some(thread), acknowledge, owner })
    }

    /// Queues a transaction for the helper.
    pub(crate) fn put(&self, job: Job) -> Result<(), Arc<BackupError>> {
        let sent = self.queue.as_ref().is_some_and(|queue| queue.send(job).is_ok());
        // A helper that has ended has left its error.
        if sent { Ok(()) } else { self.progress.wait_for(u64::MAX) }
    }

    /// Waits until a transaction counts as committed.
    pub(crate) fn wait(&self, sequence: u64) -> Result<(), Arc<BackupError>> {
        let needed = match self.acknowledge {
            Acknowledge::Sync => sequence,
            Acknowledge::Async { lag_max } => sequence.saturating_sub(lag_max),
        };
        self.progress.wait_for(needed)
    }

    /// Waits until a transaction is safe.
    pub(crate) fn wait_all(&self, sequence: u64) -> Result<(), Arc<BackupError>> {
        self.progress.wait_for(sequence)
    }

    /// The last transaction that is safe.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.progress.lock().0
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if !self.owner.is_here() {
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

impl fmt::Debug for Helper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackupHelper").field("acknowledged", &self.acknowledged()).finish_non_exhaustive()
    }
}

/// Reports the end of the helper to the threads that wait for it, however the thread ends.
struct Ending(Arc<Progress>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.set(|state| state.1 = state.1.take().or_else(|| Some(Arc::new(BackupError::Gone))));
    }
}

fn serve(
    mut sink: impl Sink,
    queue: &Receiver<Job>,
    progress: &Progress,
) -> Result<(), BackupError> {
    let mut jobs = Vec::new();
    loop {
        let first = match sink.idle_after() {
            Some(time) => queue.recv_timeout(time),
            None => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match first {
            Ok(job) => {
                jobs.clear();
                jobs.push(job);
                jobs.extend(queue.try_iter());
                let safe = sink.put(&jobs)?;
                progress.set(|state| state.0 = state.0.max(safe));
            }
            Err(RecvTimeoutError::Timeout) => sink.idle()?,
            Err(RecvTimeoutError::Disconnected) => return sink.idle(),
        }
    }
}
