//! The threads of a restore.

use std::sync::Arc;
use std::thread::JoinHandle;

use crate::error::RestoreError;
use crate::handler::Handler;
use crate::pool;
use crate::shared::{Shared, Waiter};

/// All threads of one restore. Dropping this value ends them, at the latest when the reads in
/// progress end.
pub(crate) struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Crew {
    /// Starts the fault handler, the filler, and the numbers of other readers and of workers that
    /// the options give.
    pub(crate) fn start(shared: Arc<Shared>) -> Result<Self, RestoreError> {
        let (readers, workers) = (shared.options.readers.max(2), shared.options.workers.max(1));
        let mut crew = Self { shared, threads: Vec::new() };
        crew.spawn("firn-faults", |shared| match Handler::new(shared).run() {
            Ok(()) | Err(RestoreError::Stopped) => {}
            Err(error) => shared.fail(error),
        })?;
        crew.spawn("firn-fill", |shared| pool::read(shared, Waiter::Filler))?;
        for _ in 1..readers {
            crew.spawn("firn-read", |shared| pool::read(shared, Waiter::Reader))?;
        }
        for _ in 0..workers {
            crew.spawn("firn-install", pool::work)?;
        }
        Ok(crew)
    }

    fn spawn(
        &mut self,
        name: &'static str,
        run: impl FnOnce(&Shared) + Send + 'static,
    ) -> Result<(), RestoreError> {
        let alarm = Alarm { shared: self.shared.clone(), name };
        let thread = std::thread::Builder::new().name(name.to_owned());
        let spawned = thread.spawn(move || run(&alarm.shared));
        self.threads.push(spawned.map_err(|source| RestoreError::Spawn { name, source })?);
        Ok(())
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.stop();
        // A thread that panicked has reported it.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Reports a panic of its thread: the guest must not wait without a report.
struct Alarm {
    shared: Arc<Shared>,
    name: &'static str,
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.fail(RestoreError::Died { name: self.name });
        }
    }
}
