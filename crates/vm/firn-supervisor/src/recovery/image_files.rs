//! The open files of an image, which the guards of a restore keep for the supervisor's successor.
//!
//! ```text
//!   supervisor -- socket, standard input of a guard: descriptors --> guard, watcher
//!        '- dies: its successor receives them in the same way, and can read an image without a name
//! ```
//!
//! If the image is sealed, its keys are in the last of these files, which exists in memory alone
//! (`kept_keys`).
//!
//! A guard closes them once the restore is over according to the journal, so that they do not keep
//! storage in use longer than necessary.

use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::processes::descriptors::{receive_files, receive_once};
use crate::processes::kept_keys;
use crate::processes::runtime::VmDir;
use crate::records::journal::{Journal, VmPhase};

/// The interval at which a guard checks whether the restore is over.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The image files that a guard keeps.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeptImageFiles {
    files: Arc<Mutex<Vec<File>>>,
}

impl KeptImageFiles {
    /// Receives files from standard input and keeps them until the restore is over.
    pub(crate) fn from_stdin(vm: &VmDir) -> Self {
        let held = Self::default();
        let (keeping, vm) = (held.clone(), vm.clone());
        let thread = thread::Builder::new().name("held".into());
        // If there is no thread, a successor can only open the image by its name.
        let _ = thread.spawn(move || keeping.keep_until_restored(&vm));
        held
    }

    fn keep_until_restored(&self, vm: &VmDir) {
        while let Ok(Some(fds)) = receive_once(&rustix::stdio::stdin()) {
            self.lock_files().extend(fds.into_iter().map(File::from));
        }
        while !self.lock_files().is_empty() {
            thread::sleep(CHECK_INTERVAL);
            if !is_restoring(vm) {
                self.lock_files().clear();
            }
        }
    }

    /// Copies of the files, for a successor.
    pub(crate) fn clone_files(&self) -> Vec<File> {
        self.lock_files().iter().filter_map(|file| file.try_clone().ok()).collect()
    }

    fn lock_files(&self) -> std::sync::MutexGuard<'_, Vec<File>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the guards keep the files in this phase.
pub(crate) fn are_kept_in(phase: &VmPhase) -> bool {
    matches!(phase, VmPhase::Starting { .. } | VmPhase::Restoring { .. })
}

/// Whether a restore runs. If the journal can't be read, the files are kept as long as the VM
/// exists.
fn is_restoring(vm: &VmDir) -> bool {
    match Journal::load(&vm.journal_file()) {
        Ok(journal) => journal.is_some_and(|it| are_kept_in(&it.phase)),
        Err(_) => vm.exists(),
    }
}

/// Receives the files from the guard that started this supervisor: none if standard input is no
/// socket.
pub(crate) fn receive_from_guard() -> Vec<File> {
    let files = receive_files(rustix::stdio::stdin()).unwrap_or_default();
    kept_keys::use_keys(&files);
    // The supervisor must not keep the socket open by accident.
    if let Ok(null) = File::open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&null);
    }
    files
}
