//! The helper thread of one target: takes records from a bounded queue, and says which are safe.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::Acknowledge;
use super::error::BackupError;
use crate::sys::fork::Owner;

/// Transactions in the queue at most.
const QUEUE: usize = 256;

/// One transaction on its way.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) sequence: u64,
    /// Shared by all targets.
    pub(crate) payload: Arc<Vec<u8>>,
}

/// Where a helper puts transactions.
pub(crate) trait Sink: Send {
    /// Makes transactions safe, in order. Gives the last one that is, which may be an earlier one.
    ///
    /// # Errors
    /// If it cannot: no later one will be either.
    fn put(&mut self, jobs: &[Job]) -> Result<u64, BackupError>;

    /// When to call [`Sink::idle`] if nothing comes.
    fn idle_after(&self) -> Option<Duration> {
        None
    }

    /// Does what was put off.
    ///
    /// # Errors
    /// As for [`Sink::put`].
    fn idle(&mut self) -> Result<(), BackupError> {
        Ok(())
    }
}

/// How far a helper is.
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

/// A helper thread. Dropping it waits until all that was given to it is safe, or cannot be.
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

    /// Hands a transaction over.
    pub(crate) fn put(&self, job: Job) -> Result<(), Arc<BackupError>> {
        let sent = self.queue.as_ref().is_some_and(|queue| queue.send(job).is_ok());
        // A helper that has ended says why.
        if sent { Ok(()) } else { self.progress.wait_for(u64::MAX) }
    }

    /// Waits until a transaction may be called committed.
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
            // A child has no such thread, which may have held the queue's lock at the fork.
            std::mem::forget((self.queue.take(), self.thread.take()));
            return;
        }
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic has been reported to those who wait.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Helper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Helper").field("acknowledged", &self.acknowledged()).finish_non_exhaustive()
    }
}

/// Tells those who wait that nobody works for them any more, however the thread ends.
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
