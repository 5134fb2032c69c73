//! The rest of a restore once its guest may run: its memory is served until all of it is installed.
//!
//! ```text
//!   started here ----------------------------------.
//!   recovered: adopt the descriptor -> open image --+-> wait, report, record -> close the userfaultfd -> "running"
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
use firn_restore::{
    BackgroundFill, FillChoices, PresenceFile, ReadFailurePolicy, RestoreError, RestoreMode,
    RestoreOptions, RunCounts, RunningRestore,
};
use firn_types::{PAGE_SIZE, RegionMap, ThreadId};
use serde_json::json;

use crate::hypervisor::qemu;
use crate::operations::family::FamilyLink;
use crate::operations::learned_blocks::LearnedBlocksFile;
use crate::operations::outage::{self, OutagePauser};
use crate::operations::restore::{
    self, RESTORING, fatal_error_handler, numbered_vcpus, restore_failure, update_journal,
};
use crate::operations::restore_task::RestoreTask;
use crate::operations::storage_latency::ImageStorage;
use crate::processes::identity::ProcessHandle;
use crate::processes::kept_keys;
use crate::processes::runtime::VmDir;
use crate::records::control_protocol::{OperationProgress, RestoreOutage, RestoreProgress};
use crate::records::failure::{Failure, FailureContext, FailureKind, image_failure};
use crate::records::image_ids::ImageIds;
use crate::records::journal::{HypervisorRecord, JournalFile, VmPhase, unix_seconds};

/// The interval between progress reports.
pub(crate) const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// The time of the first run record that is written while memory is still being restored.
const FIRST_RECORD_AFTER: Duration = Duration::from_secs(1);

/// The interval between attempts to open an image that can't be opened.
const REOPEN_INTERVAL: Duration = Duration::from_millis(500);

/// The progress of a restore, and its outage if there is one.
pub(crate) fn restore_progress(
    restore: &RunningRestore,
    waiting: Option<RestoreOutage>,
) -> OperationProgress {
    let now = restore.progress();
    let stage = match &waiting {
        Some(waiting) if waiting.guest_waits => "waiting for storage",
        _ => "restoring",
    };
    OperationProgress {
        stage: stage.to_owned(),
        done: now.present * PAGE_SIZE as u64,
        total: now.total * PAGE_SIZE as u64,
        waiting,
        restore: Some(RestoreProgress {
            vcpus: restore.vcpu_count(),
            waited_us: now.waited.as_micros() as u64,
            faults: now.demand_faults,
            demand_reads: now.disk_reads,
            prefetched_pages: now.prefetched,
        }),
    }
}

/// What a successor needs to continue a restore.
pub(crate) struct InheritedRestore {
    pub(crate) hypervisor_record: HypervisorRecord,
    pub(crate) journal: Arc<JournalFile>,
    pub(crate) vm: VmDir,
    pub(crate) hypervisor: Arc<ProcessHandle>,
    /// The image: its path, its numbers, and its open files if a guard had them.
    pub(crate) image: PathBuf,
    pub(crate) ids: ImageIds,
    pub(crate) files: Vec<File>,
    pub(crate) mode: RestoreMode,
    pub(crate) on_error: ReadFailurePolicy,
    pub(crate) fill: FillChoices,
    /// Whether the guest is to run: it was not paused when it was saved.
    pub(crate) cont: bool,
}

/// A restore that a successor continues.
pub(crate) struct ContinuedRestore {
    pub(crate) restoring: RestoreTask,
    /// The open files of the image, if it could be opened.
    pub(crate) files: Vec<File>,
}

/// The guest's memory, adopted from the hypervisor.
struct AdoptedMemory {
    process: Arc<Process>,
    memory: Arc<GuestMemory>,
    faults: PageFaults,
    /// Whether another process fills it in the background: the holder of a family's template.
    has_holder: bool,
}

impl InheritedRestore {
    /// Continues a restore whose supervisor died. `None` if the restore was over and only the
    /// journal did not record it.
    pub(crate) fn continue_restore(self) -> Result<Option<ContinuedRestore>, Failure> {
        const ADOPTING: &str = "adopting the guest's memory";
        let (process, memory) = qemu::open_journaled(&self.hypervisor_record)?;
        let adopted = PageFaults::adopt(&process, Arc::clone(&memory)).while_doing(ADOPTING)?;
        let Some(mut faults) = adopted else { return Ok(None) };
        let has_holder = self.rejoin_family(&mut faults);
        let adopted = AdoptedMemory { process, memory, faults, has_holder };
        match self.open_image() {
            // At once, because the guest may be waiting.
            Ok(image) => {
                let files = kept_keys::files_to_keep(&image).unwrap_or_default();
                let restoring = self.begin_page_server(image, adopted)?.into_task();
                Ok(Some(ContinuedRestore { restoring, files }))
            }
            Err(failure) if self.on_error == ReadFailurePolicy::Kill => Err(failure),
            Err(_) => {
                // Its own successor may be able to read them.
                let files = self.files.iter().filter_map(|file| file.try_clone().ok()).collect();
                let restoring: RestoreTask =
                    Box::new(move |report| self.serve_when_open(adopted, report));
                Ok(Some(ContinuedRestore { restoring, files }))
            }
        }
    }

    /// Gets the template of a clone's family again. False if its holder has ended, or the VM has no
    /// family: then its memory is installed and filled for itself.
    fn rejoin_family(&self, faults: &mut PageFaults) -> bool {
        let record = self.journal.current_journal().family;
        let record = record.filter(|_| faults.memory().has_template());
        let map = &self.hypervisor_record.map;
        let joined = record.map(|it| FamilyLink::connect(&it, map, &self.ids));
        let family = joined.transpose().unwrap_or_else(|failure| {
            tracing::warn!("{failure}: the VM's memory is loaded without the template");
            None
        });
        family.iter().for_each(|family| family.fill_through(faults));
        family.is_some()
    }

    fn serve_when_open(
        self,
        adopted: AdoptedMemory,
        report: &dyn Fn(OperationProgress),
    ) -> Result<serde_json::Value, Failure> {
        let since = unix_seconds();
        let image = loop {
            match self.open_image() {
                Ok(image) => break image,
                Err(failure) => report(self.outage_progress(&failure, since)),
            }
            let gone =
                self.hypervisor.wait_gone(REOPEN_INTERVAL).while_doing("waiting for storage")?;
            if gone {
                return Err(Failure::new(FailureKind::Ended, "the VM has ended"));
            }
        };
        self.begin_page_server(image, adopted)?.serve_until_complete(report)
    }

    /// The progress while the image can't be opened. The guest blocks as soon as it touches a
    /// missing page, which it may have done already.
    fn outage_progress(&self, failure: &Failure, since: u64) -> OperationProgress {
        let waiting = RestoreOutage {
            error: failure.to_string(),
            path: self.image.clone(),
            since,
            address: None,
            guest_waits: true,
        };
        OperationProgress {
            waiting: Some(waiting),
            ..OperationProgress::new("waiting for storage", 0, 0)
        }
    }

    /// Opens the image by its name, or else by its open files. Another file may be the same image:
    /// one that was completed meanwhile.
    fn open_image(&self) -> Result<Arc<Image>, Failure> {
        let named = restore::open_image(&self.image).and_then(|(image, _)| self.check_ids(image));
        named.or_else(|failure| match self.files.is_empty() {
            true => Err(failure),
            false => {
                let opened = Image::open_from(&self.image, &self.files);
                let opened = opened.map_err(|error| image_failure(&error))?;
                restore::with_meta(opened).and_then(|(image, _)| self.check_ids(image))
            }
        })
    }

    /// Its identity alone is not enough: any user can write an image with it, sealed or not.
    fn check_ids(&self, image: Arc<Image>) -> Result<Arc<Image>, Failure> {
        if ImageIds::from_image(&image) == self.ids {
            return Ok(image);
        }
        let path = self.image.display();
        let text = format!("{path} is not the image it was when the restore began");
        Err(Failure::new(FailureKind::Refused, text))
    }

    fn begin_page_server(
        &self,
        image: Arc<Image>,
        adopted: AdoptedMemory,
    ) -> Result<RestoreWork, Failure> {
        let AdoptedMemory { process, memory, faults, has_holder } = adopted;
        let fill = match has_holder {
            true => BackgroundFill::Off,
            false => restore::choose_fill(self.fill.when, &image),
        };
        let is_in_store = image.is_in_store();
        let presence =
            PresenceFile::open(&self.vm.presence_file(), memory.region_map().total_pages())
                .while_doing("reading the presence file")?;
        let options = RestoreOptions {
            mode: self.mode,
            on_error: self.on_error,
            vcpus: numbered_vcpus(&self.hypervisor_record),
            fill,
            bandwidth: self.fill.bandwidth,
            is_in_store,
            ..RestoreOptions::default()
        };
        let (journal, hypervisor) = (Arc::clone(&self.journal), Arc::clone(&self.hypervisor));
        let lives = Arc::new(AtomicBool::new(self.on_error == ReadFailurePolicy::Stop));
        let on_fatal = fatal_error_handler(Arc::clone(&journal), &hypervisor, lives);
        let restore = RunningRestore::resume(image, memory, faults, options, presence, on_fatal)
            .while_doing("adopting the guest's memory")?;
        let pauser = match self.cont {
            true => OutagePauser::for_paused_vm(Arc::clone(&journal), Arc::clone(&hypervisor)),
            false => OutagePauser::new(Arc::clone(&journal), Arc::clone(&hypervisor)),
        };
        Ok(RestoreWork {
            restore,
            process,
            vcpus: self.hypervisor_record.vcpus.clone(),
            journal,
            hypervisor,
            run_record: self.vm.run_record(),
            learning: None,
            storage: None,
            image: self.image.clone(),
            map: self.hypervisor_record.map.clone(),
            pauser,
        })
    }
}

/// Replaces a file, so that a reader sees the old or the new content completely.
fn replace_file(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let new = path.with_extension("new");
    std::fs::write(&new, content)?;
    std::fs::rename(&new, path)
}

/// A restore whose guest runs.
pub(crate) struct RestoreWork {
    pub(crate) restore: RunningRestore,
    pub(crate) process: Arc<Process>,
    pub(crate) vcpus: Vec<ThreadId>,
    pub(crate) journal: Arc<JournalFile>,
    pub(crate) hypervisor: Arc<ProcessHandle>,
    pub(crate) run_record: PathBuf,
    /// Records which blocks the guest waited for.
    pub(crate) learning: Option<LearnedBlocksFile>,
    /// Records the storage latency.
    pub(crate) storage: Option<ImageStorage>,
    pub(crate) image: PathBuf,
    pub(crate) map: RegionMap,
    pub(crate) pauser: OutagePauser,
}

impl RestoreWork {
    pub(crate) fn into_task(self) -> RestoreTask {
        Box::new(move |report| self.serve_until_complete(report))
    }

    /// Does the whole rest of the restore. It waits until the page server has installed all memory, and
    /// reports progress meanwhile. Then it stores what the restore found out, closes the userfaultfd
    /// and records in the journal that the VM runs as if it had never been restored.
    fn serve_until_complete(
        mut self,
        report: &dyn Fn(OperationProgress),
    ) -> Result<serde_json::Value, Failure> {
        self.wait_for_memory(report).map_err(|error| restore_failure(&error))?;
        self.pauser.end_pause();
        let (hypervisor, journal_file) = (Arc::clone(&self.hypervisor), Arc::clone(&self.journal));
        self.store_learned_and_latency();
        let counts = self.write_run_record();
        self.close_page_faults().map_err(|failure| {
            match hypervisor.wait_gone(qemu::SHORT_WAIT) {
                Ok(true) => Failure { kind: FailureKind::Ended, ..failure },
                _ => failure,
            }
        })?;
        firn_fault::pass_point("restore.finished");
        update_journal(&journal_file, |journal| journal.phase = VmPhase::Running)?;
        Ok(json!({ "restored": counts }))
    }

    /// Writes the run record so far. The guest does not depend on it.
    fn write_run_record(&self) -> RunCounts {
        let record = self.restore.record();
        let written = serde_json::to_vec(&record)
            .map_err(std::io::Error::from)
            .and_then(|json| replace_file(&self.run_record, &json));
        if let Err(error) = written {
            tracing::warn!("no run record in {}: {error}", self.run_record.display());
        }
        record.counts
    }

    /// Stores the learned blocks and the storage latency, once.
    fn store_learned_and_latency(&mut self) {
        if let Some(learning) = self.learning.take() {
            if !self.restore.has_read_all() {
                learning.update_file(&self.restore.record());
            }
        }
        if let Some(storage) = self.storage.take() {
            storage.update_record(self.restore.found_latency(), self.restore.is_adaptive());
        }
    }

    /// Waits until all memory is installed. Meanwhile the run record is written at growing
    /// intervals, so that a long restore can be examined and its record costs at most twice what it
    /// costs at the end.
    fn wait_for_memory(
        &mut self,
        report: &dyn Fn(OperationProgress),
    ) -> Result<(), Arc<RestoreError>> {
        let since = Instant::now();
        let mut record_at = FIRST_RECORD_AFTER;
        self.update_pause_and_report(report);
        while !self.restore.wait_timeout(PROGRESS_INTERVAL)? {
            self.update_pause_and_report(report);
            if since.elapsed() >= record_at {
                self.write_run_record();
                record_at *= 2;
            }
            if since.elapsed() >= firn_restore::LEARNING_WINDOW {
                self.store_learned_and_latency();
            }
        }
        Ok(())
    }

    /// Pauses the other vCPUs if the guest waits for storage, or resumes them if it does not any more;
    /// then reports the progress.
    fn update_pause_and_report(&mut self, report: &dyn Fn(OperationProgress)) {
        let outage = self.restore.outage();
        let waiting = outage.map(|outage| outage::describe_outage(&outage, &self.image, &self.map));
        self.pauser.update_wait(waiting.as_ref().is_some_and(|waiting| waiting.guest_waits));
        report(restore_progress(&self.restore, waiting));
    }

    /// Stops the page server, and closes the userfaultfd in the hypervisor. Guest memory stays as it
    /// is; Firn handles its page faults no more.
    fn close_page_faults(self) -> Result<(), Failure> {
        let stopped = self.restore.stop().while_doing(RESTORING)?;
        let mut tracee = Tracee::seize(&self.process, &self.vcpus).while_doing(RESTORING)?;
        stopped.faults.close(&mut tracee).while_doing(RESTORING)
    }
}
