//! The threads of a restore.

use std::sync::Arc;
use std::thread::JoinHandle;

use crate::error::RestoreError;
use crate::handler::FaultHandler;
use crate::helper_threads;
use crate::shared::{SharedRestore, ThreadRole};
use crate::template_poll;

/// All threads of one restore. Dropping this value ends them, at the latest when the reads in
/// progress end.
pub(crate) struct RestoreThreads {
    shared: Arc<SharedRestore>,
    threads: Vec<JoinHandle<()>>,
}

impl RestoreThreads {
    /// Starts the fault handler, the filler, the numbers of other readers and of workers that the
    /// options give, and of a clone the thread that follows its template.
    pub(crate) fn start_all(shared: Arc<SharedRestore>) -> Result<Self, RestoreError> {
        let (readers, workers) = (shared.options.readers.max(2), shared.options.workers.max(1));
        let mut crew = Self { shared, threads: Vec::new() };
        crew.spawn_thread("firn-faults", |shared| {
            match FaultHandler::new(shared).run_until_over() {
                Ok(()) | Err(RestoreError::Stopped) => {}
                Err(error) => shared.fail_restore(error),
            }
        })?;
        crew.spawn_thread("firn-fill", |shared| {
            helper_threads::run_reader(shared, ThreadRole::Filler)
        })?;
        for _ in 1..readers {
            crew.spawn_thread("firn-read", |shared| {
                helper_threads::run_reader(shared, ThreadRole::Reader)
            })?;
        }
        if crew.shared.is_clone() {
            crew.spawn_thread("firn-template", template_poll::follow_template)?;
        }
        for _ in 0..workers {
            crew.spawn_thread("firn-install", helper_threads::run_worker)?;
        }
        Ok(crew)
    }

    fn spawn_thread(
        &mut self,
        name: &'static str,
        run: impl FnOnce(&SharedRestore) + Send + 'static,
    ) -> Result<(), RestoreError> {
        let alarm = PanicAlarm { shared: self.shared.clone(), name };
        let thread = std::thread::Builder::new().name(name.to_owned());
        let spawned = thread.spawn(move || run(&alarm.shared));
        self.threads.push(spawned.map_err(|source| RestoreError::Spawn { name, source })?);
        Ok(())
    }
}

impl Drop for RestoreThreads {
    fn drop(&mut self) {
        self.shared.stop_threads();
        // A thread that panicked has reported it.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Reports a panic of its thread: the guest must not wait without a report.
struct PanicAlarm {
    shared: Arc<SharedRestore>,
    name: &'static str,
}

impl Drop for PanicAlarm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.fail_restore(RestoreError::Died { name: self.name });
        }
    }
}
