//! The rest of a restore once its guest may run: its memory is served until all of it is installed.
//!
//! ```text
//!   started here ----------------------------------.
//!   recovered: adopt the descriptor -> open image --+-> wait, report, record -> release the memory -> "running"
//!                                  ^        | fails
//!                                  '- pause '   the guest waits meanwhile; the supervisor answers requests
//! ```

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use firn_image::Image;
use firn_memory::{GuestMemory, PageFaults, Process, Tracee};
use firn_restore::{Mode, OnError, Presence, Restore, RestoreError, RestoreOptions, RunCounts};
use firn_types::{PAGE_SIZE, RegionMap, Tid};
use serde_json::json;

use crate::failure::{Context, Failure, FailureKind, image_failure};
use crate::identity::ProcessHandle;
use crate::journal::{JournalFile, Machine, Phase, now};
use crate::keep::Restoring;
use crate::learned::{self, Learning};
use crate::outage::{self, Pauser};
use crate::protocol::{Progress, RestoreNow, Waiting};
use crate::qemu;
use crate::restore::{self, RESTORING, journal, on_fatal, restore_failure, vcpus};
use crate::runtime::VmDir;
use crate::storage::Storage;

/// The interval between progress reports.
pub(crate) const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// The time of the first run record that is written while memory is still being restored.
const FIRST_RECORD: Duration = Duration::from_secs(1);

/// The interval between attempts to open an image that can't be opened.
const REOPEN_EVERY: Duration = Duration::from_millis(500);

/// The progress of a restore, and its outage if there is one.
pub(crate) fn progress(restore: &Restore, waiting: Option<Waiting>) -> Progress {
    let now = restore.progress();
    let stage = match &waiting {
        Some(waiting) if waiting.guest_waits => "waiting for storage",
        _ => "restoring",
    };
    Progress {
        stage: stage.to_owned(),
        done: now.present * PAGE_SIZE as u64,
        total: now.total * PAGE_SIZE as u64,
        waiting,
        restore: Some(RestoreNow {
            vcpus: restore.vcpus(),
            waited_us: now.waited.as_micros() as u64,
            faults: now.demand_faults,
            demand_reads: now.disk_reads,
            prefetched_pages: now.prefetched,
        }),
    }
}

/// What a successor needs to continue a restore.
pub(crate) struct TakenOver {
    pub(crate) machine: Machine,
    pub(crate) journal: Arc<JournalFile>,
    pub(crate) vm: VmDir,
    pub(crate) hypervisor: Arc<ProcessHandle>,
    /// The image: its path, its identity, and its open files if a guard had them.
    pub(crate) image: PathBuf,
    pub(crate) identity: String,
    pub(crate) files: Vec<File>,
    pub(crate) mode: Mode,
    pub(crate) on_error: OnError,
    /// Whether the guest is to run: it was not paused when it was saved.
    pub(crate) cont: bool,
}

/// A restore that a successor continues.
pub(crate) struct Resumed {
    pub(crate) restoring: Restoring,
    /// The open files of the image, if it could be opened.
    pub(crate) files: Vec<File>,
}

/// The guest's memory, adopted from the hypervisor.
struct Adopted {
    process: Arc<Process>,
    memory: Arc<GuestMemory>,
    faults: PageFaults,
}

impl TakenOver {
    /// Continues a restore whose supervisor died. `None` if the restore was over and only the
    /// journal did not record it.
    pub(crate) fn resume(self) -> Result<Option<Resumed>, Failure> {
        const ADOPTING: &str = "adopting the guest's memory";
        let (process, memory) = qemu::open_journaled(&self.machine)?;
        let Some(faults) = PageFaults::adopt(&process, Arc::clone(&memory)).doing(ADOPTING)? else {
            return Ok(None);
        };
        let adopted = Adopted { process, memory, faults };
        match self.open() {
            // At once, because the guest may be waiting.
            Ok(image) => {
                let files = image.try_clone_files().unwrap_or_default();
                let restoring = self.serve(image, adopted)?.boxed();
                Ok(Some(Resumed { restoring, files }))
            }
            Err(failure) if self.on_error == OnError::Kill => Err(failure),
            Err(_) => {
                let files = Vec::new();
                let restoring: Restoring =
                    Box::new(move |tell| self.serve_when_open(adopted, tell));
                Ok(Some(Resumed { restoring, files }))
            }
        }
    }

    fn serve_when_open(
        self,
        adopted: Adopted,
        tell: &dyn Fn(Progress),
    ) -> Result<serde_json::Value, Failure> {
        let since = now();
        let image = loop {
            match self.open() {
                Ok(image) => break image,
                Err(failure) => tell(self.waiting(&failure, since)),
            }
            let gone = self.hypervisor.wait_gone(REOPEN_EVERY).doing("waiting for storage")?;
            if gone {
                return Err(Failure::new(FailureKind::Ended, "the VM has ended"));
            }
        };
        self.serve(image, adopted)?.finish(tell)
    }

    /// The progress while the image can't be opened. The guest blocks as soon as it touches a
    /// missing page, which it may have done already.
    fn waiting(&self, failure: &Failure, since: u64) -> Progress {
        let waiting = Waiting {
            error: failure.to_string(),
            path: self.image.clone(),
            since,
            address: None,
            guest_waits: true,
        };
        Progress { waiting: Some(waiting), ..Progress::new("waiting for storage", 0, 0) }
    }

    /// Opens the image by its name, or else by its open files. Another file may be the same image:
    /// one that was completed meanwhile.
    fn open(&self) -> Result<Arc<Image>, Failure> {
        let named = restore::open(&self.image).and_then(|(image, _)| self.check(image));
        named.or_else(|failure| match self.files.is_empty() {
            true => Err(failure),
            false => {
                let opened = Image::open_from(&self.image, &self.files);
                let opened = opened.map_err(|error| image_failure(&error))?;
                restore::with_meta(opened).and_then(|(image, _)| self.check(image))
            }
        })
    }

    fn check(&self, image: Arc<Image>) -> Result<Arc<Image>, Failure> {
        if image.identity() == self.identity {
            return Ok(image);
        }
        let path = self.image.display();
        let text = format!("{path} is not the image it was when the restore began");
        Err(Failure::new(FailureKind::Refused, text))
    }

    fn serve(&self, image: Arc<Image>, adopted: Adopted) -> Result<Work, Failure> {
        let Adopted { process, memory, faults } = adopted;
        let presence = Presence::open(&self.vm.presence(), memory.map().total_pages())
            .doing("reading the presence file")?;
        let options = RestoreOptions {
            mode: self.mode,
            on_error: self.on_error,
            vcpus: vcpus(&self.machine),
            ..RestoreOptions::default()
        };
        let (journal, hypervisor) = (Arc::clone(&self.journal), Arc::clone(&self.hypervisor));
        let lives = Arc::new(AtomicBool::new(self.on_error == OnError::Stop));
        let on_fatal = on_fatal(Arc::clone(&journal), &hypervisor, lives);
        let restore = Restore::resume(image, memory, faults, options, presence, on_fatal)
            .doing("adopting the guest's memory")?;
        let pauser = match self.cont {
            true => Pauser::of_paused(Arc::clone(&journal), Arc::clone(&hypervisor)),
            false => Pauser::new(Arc::clone(&journal), Arc::clone(&hypervisor)),
        };
        Ok(Work {
            restore,
            process,
            vcpus: self.machine.vcpus.clone(),
            journal,
            hypervisor,
            run_record: self.vm.run_record(),
            learning: None,
            storage: None,
            image: self.image.clone(),
            map: self.machine.map.clone(),
            pauser,
        })
    }
}

/// Replaces a file, so that a reader sees the old or the new content completely.
fn replace(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let new = path.with_extension("new");
    std::fs::write(&new, content)?;
    std::fs::rename(&new, path)
}

/// A restore whose guest runs.
pub(crate) struct Work {
    pub(crate) restore: Restore,
    pub(crate) process: Arc<Process>,
    pub(crate) vcpus: Vec<Tid>,
    pub(crate) journal: Arc<JournalFile>,
    pub(crate) hypervisor: Arc<ProcessHandle>,
    pub(crate) run_record: PathBuf,
    /// Records which blocks the guest waited for.
    pub(crate) learning: Option<Learning>,
    /// Records the storage latency.
    pub(crate) storage: Option<Storage>,
    pub(crate) image: PathBuf,
    pub(crate) map: RegionMap,
    pub(crate) pauser: Pauser,
}

impl Work {
    pub(crate) fn boxed(self) -> Restoring {
        Box::new(move |tell| self.finish(tell))
    }

    /// Waits until all memory is installed, then leaves the VM as if it had never been restored.
    fn finish(mut self, tell: &dyn Fn(Progress)) -> Result<serde_json::Value, Failure> {
        self.wait(tell).map_err(|error| restore_failure(&error))?;
        self.pauser.finish();
        let (hypervisor, journal_file) = (Arc::clone(&self.hypervisor), Arc::clone(&self.journal));
        self.learn();
        let counts = self.keep_record();
        self.let_go().map_err(|failure| match hypervisor.wait_gone(qemu::SHORT_WAIT) {
            Ok(true) => Failure { kind: FailureKind::Ended, ..failure },
            _ => failure,
        })?;
        firn_fault::point("restore.finished");
        journal(&journal_file, |journal| journal.phase = Phase::Running)?;
        Ok(json!({ "restored": counts }))
    }

    /// Writes the run record so far. The guest does not depend on it.
    fn keep_record(&self) -> RunCounts {
        let record = self.restore.record();
        let written = serde_json::to_vec(&record)
            .map_err(std::io::Error::from)
            .and_then(|json| replace(&self.run_record, &json));
        if let Err(error) = written {
            tracing::warn!("no run record in {}: {error}", self.run_record.display());
        }
        record.counts
    }

    /// Records learned blocks and the storage latency, once.
    fn learn(&mut self) {
        if let Some(learning) = self.learning.take() {
            if !self.restore.has_read_all() {
                learning.keep(&self.restore.record());
            }
        }
        if let Some(storage) = self.storage.take() {
            storage.keep(self.restore.way(), self.restore.adapts());
        }
    }

    /// Waits until all memory is installed. Meanwhile the run record is written at growing
    /// intervals, so that a long restore can be examined and its record costs at most twice what it
    /// costs at the end.
    fn wait(&mut self, tell: &dyn Fn(Progress)) -> Result<(), Arc<RestoreError>> {
        let since = Instant::now();
        let mut record_at = FIRST_RECORD;
        self.report(tell);
        while !self.restore.wait_timeout(PROGRESS_EVERY)? {
            self.report(tell);
            if since.elapsed() >= record_at {
                self.keep_record();
                record_at *= 2;
            }
            if since.elapsed() >= learned::WINDOW {
                self.learn();
            }
        }
        Ok(())
    }

    fn report(&mut self, tell: &dyn Fn(Progress)) {
        let outage = self.restore.outage();
        let waiting = outage.map(|outage| outage::report(&outage, &self.image, &self.map));
        self.pauser.update(waiting.as_ref().is_some_and(|waiting| waiting.guest_waits));
        tell(progress(&self.restore, waiting));
    }

    fn let_go(self) -> Result<(), Failure> {
        let stopped = self.restore.stop().doing(RESTORING)?;
        let mut tracee = Tracee::seize(&self.process, &self.vcpus).doing(RESTORING)?;
        stopped.faults.close(&mut tracee).doing(RESTORING)
    }
}
