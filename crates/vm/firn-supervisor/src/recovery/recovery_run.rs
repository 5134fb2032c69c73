//! The actions of recovery: a successor carries out what [`crate::recovery::recovery_plan`] decides.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use firn_memory::{PageFaults, Tracee};
use firn_vmm::{FilterSide, QemuVm};
use serde_json::json;

use crate::daemon::event_loop;
use crate::devices::disk_layers;
use crate::devices::disk_snapshots;
use crate::devices::mirrored_disks;
use crate::devices::network::OUTPUT_BLOCKED;
use crate::hypervisor::{qemu, restored_domain};
use crate::operations::domain_restore;
use crate::operations::guest_freeze;
use crate::operations::image_upload;
use crate::operations::restore_work::InheritedRestore;
use crate::operations::standby::announce_addresses;
use crate::operations::vm_start::StartedVm;
use crate::processes::identity::{self, ProcessHandle, ProcessIdentity};
use crate::processes::ownership::QemuOwnership;
use crate::processes::runtime::VmDir;
use crate::records::checkpoint_tally::CheckpointNote;
use crate::records::control_protocol::StopRequest;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{HypervisorRecord, Journal, JournalFile, VmPhase, unix_seconds};
use crate::records::process_exit::ProcessExit;
use crate::recovery::recovery_plan::{RecoveryAction, SurvivingParts, decide_recovery};

/// The VM that the successor continues to manage, if there is one.
type RecoveredVm = Option<(Arc<JournalFile>, StartedVm)>;

/// Takes over from a dead supervisor, at the point where the journal ends.
pub(crate) fn take_over(
    vm: &VmDir,
    mut journal: Journal,
    files: Vec<File>,
) -> Result<RecoveredVm, Failure> {
    let hypervisor = find_hypervisor(&journal)?;
    if let (Some(hypervisor), Some(hypervisor_record)) = (&hypervisor, &journal.hypervisor_record) {
        let owned = QemuOwnership::take_again(&hypervisor_record.process)?;
        owned.into_iter().for_each(|owned| hypervisor.keep_ownership(owned));
    }
    let remains = SurvivingParts {
        is_hypervisor_alive: hypervisor.is_some(),
        image_whole: journal.is_image_complete(),
    };
    let recovery = decide_recovery(&journal, remains);
    tracing::warn!("taking over from a dead supervisor: {}", recovery.describe());
    journal.recoveries += 1;
    // A client that wanted the VM to end has learned that it did not.
    journal.discard &= hypervisor.is_none();
    let journal =
        JournalFile::create(vm.journal_file(), journal).while_doing("writing the journal")?;
    let since = Instant::now();
    let recoverer = RecoveryRun { vm, journal: Arc::new(journal), files };
    let found = recoverer.perform_recovery(recovery, hypervisor)?;
    found.iter().for_each(|(journal, _)| thaw_guest(journal));
    tracing::info!("taken over within {:.1} ms", since.elapsed().as_secs_f64() * 1e3);
    Ok(found)
}

/// Has the guest thawed if the dead supervisor has left it frozen. The VM runs by now.
fn thaw_guest(journal: &Arc<JournalFile>) {
    if let Some(record) = journal.current_journal().hypervisor_record {
        guest_freeze::thaw_in_background(journal, record.process.pid);
    }
}

/// Finds the hypervisor, if it lives: by its journaled identity, or by the monitor socket on its
/// command line if its supervisor died before it could journal the identity.
fn find_hypervisor(journal: &Journal) -> Result<Option<ProcessHandle>, Failure> {
    const FINDING: &str = "finding the hypervisor";
    if let Some(hypervisor_record) = &journal.hypervisor_record {
        return hypervisor_record.process.open_handle().while_doing(FINDING);
    }
    let VmPhase::Starting { launching: Some(socket) } = &journal.phase else { return Ok(None) };
    let found = identity::find_by_argument(&socket.to_string_lossy()).while_doing(FINDING)?;
    found.first().map_or(Ok(None), ProcessIdentity::open_handle).while_doing(FINDING)
}

struct RecoveryRun<'a> {
    vm: &'a VmDir,
    journal: Arc<JournalFile>,
    /// The open files of the image that is being restored.
    files: Vec<File>,
}

impl RecoveryRun<'_> {
    fn perform_recovery(
        self,
        recovery: RecoveryAction,
        hypervisor: Option<ProcessHandle>,
    ) -> Result<RecoveredVm, Failure> {
        match (recovery, hypervisor) {
            (RecoveryAction::Over, _) => Ok(None),
            (RecoveryAction::Forget { kill }, hypervisor) => self.forget_vm(kill, hypervisor),
            (RecoveryAction::StayDetached, _) => self.record_detached(),
            (RecoveryAction::RecordEnd { unfinished }, _) => self.record_end(unfinished.as_deref()),
            (_, None) => self.record_end(None),
            (RecoveryAction::GoOn, Some(hypervisor)) => self.continue_vm(hypervisor),
            (RecoveryAction::AbortSave { cont, unfinished }, Some(hypervisor)) => {
                self.abort_save(cont, &unfinished)?;
                self.continue_vm(hypervisor)
            }
            (RecoveryAction::EndProtection { cont }, Some(hypervisor)) => {
                self.end_protection(cont)?;
                self.continue_vm(hypervisor)
            }
            (RecoveryAction::EndMerge { cont }, Some(hypervisor)) => {
                self.end_merge(cont)?;
                self.continue_vm(hypervisor)
            }
            (RecoveryAction::FinishFailover, Some(hypervisor)) => {
                self.finish_failover()?;
                self.continue_vm(hypervisor)
            }
            (RecoveryAction::FinishSave { cont, stop: false, image }, Some(hypervisor)) => {
                self.finish_save(cont, &image)?;
                self.continue_vm(hypervisor)
            }
            (RecoveryAction::FinishSave { image, .. }, Some(hypervisor)) => {
                self.finish_suspend(&image, &hypervisor)
            }
            (serve_on @ RecoveryAction::ServeOn { .. }, Some(hypervisor)) => {
                self.resume_page_server(hypervisor, serve_on)
            }
        }
    }

    /// Removes everything of a VM that never ran. Memory that a restore had filled ends with the
    /// process.
    fn forget_vm(
        self,
        kill: bool,
        hypervisor: Option<ProcessHandle>,
    ) -> Result<RecoveredVm, Failure> {
        let journal = self.journal.current_journal();
        if let Some(domain) = &journal.domain {
            let wait = restored_domain::APPEAR_WAIT;
            restored_domain::end_domain(domain, wait)
                .unwrap_or_else(|failure| tracing::warn!("{failure}"));
        }
        if let (true, Some(hypervisor)) = (kill || journal.domain.is_some(), hypervisor) {
            hypervisor.send_kill().while_doing("ending a QEMU whose VM never ran")?;
        }
        match journal.phase {
            // A VM that Firn was only attaching to has its own files.
            VmPhase::Starting { launching: None } => {}
            // Its memory is lost, but the disks may be all that is left of its primary.
            VmPhase::Standby { .. } => warn_of_kept_disks(&journal.overlays),
            _ => disk_snapshots::discard_overlays(&journal),
        }
        self.vm.remove_dir().while_doing("removing what was left of the VM")?;
        Ok(None)
    }

    fn record_detached(self) -> Result<RecoveredVm, Failure> {
        let change = |journal: &mut Journal| journal.phase = VmPhase::Detached;
        self.journal.update(change).while_doing("writing the journal")?;
        Ok(None)
    }

    fn record_end(self, unfinished: Option<&Path>) -> Result<RecoveredVm, Failure> {
        let text = unfinished.map(|image| {
            remove_unfinished(image);
            format!("the checkpoint to {} was aborted: the VM ended", image.display())
        });
        let unsent = self.describe_unsent().filter(|_| unfinished.is_none());
        let text = text.or(unsent.map(|text| format!("{text}: the VM ended")));
        if unfinished.is_some() {
            disk_snapshots::abandon_snapshots(&self.journal, None);
        }
        if unfinished.is_none() {
            self.journal
                .update(disk_snapshots::hand_over_files)
                .while_doing("writing the journal")?;
        }
        let journal = self.journal.current_journal();
        if journal.discard {
            disk_snapshots::discard_overlays(&journal);
        }
        let change = |journal: &mut Journal| {
            journal.phase = VmPhase::Ended { exit: ProcessExit::Unknown, at: unix_seconds() };
            text.into_iter().for_each(|text| journal.record_failure(text));
        };
        self.journal.update(change).while_doing("writing the journal")?;
        event_loop::remove_sockets(self.vm).while_doing("removing sockets")?;
        Ok(None)
    }

    fn continue_vm(self, hypervisor: ProcessHandle) -> Result<RecoveredVm, Failure> {
        let is_registered = |it: &HypervisorRecord| it.access_bits.is_some() || it.followed;
        if let Some(hypervisor_record) =
            self.journal.current_journal().hypervisor_record.filter(is_registered)
        {
            close_page_faults(&hypervisor_record)?;
        }
        let hypervisor = Arc::new(hypervisor);
        let (restoring, standby, network, served) = (None, None, None, None);
        let (guards, files) = Default::default();
        let facts = json!(null);
        let started =
            StartedVm { hypervisor, restoring, standby, network, served, facts, guards, files };
        Ok(Some((self.journal, started)))
    }

    /// Serves page faults first, because a hypervisor whose main thread waits for a page answers no
    /// command. A VM that Firn paused is resumed as soon as it waits for no page; one that was
    /// paused when it was saved stays paused.
    fn resume_page_server(
        self,
        hypervisor: ProcessHandle,
        serve_on: RecoveryAction,
    ) -> Result<RecoveredVm, Failure> {
        let hypervisor_record = self.hypervisor_record()?;
        let hypervisor = Arc::new(hypervisor);
        let RecoveryAction::ServeOn { image, ids, mode, on_error, fill, cont } = serve_on else {
            return Ok(None);
        };
        let taken_over = InheritedRestore {
            hypervisor_record: hypervisor_record.clone(),
            journal: Arc::clone(&self.journal),
            vm: self.vm.clone(),
            hypervisor: Arc::clone(&hypervisor),
            image,
            ids,
            files: self.files,
            mode,
            on_error,
            fill,
            cont,
        };
        let resumed = taken_over.continue_restore()?;
        domain_restore::finish_domain(&self.journal)?;
        if resumed.is_none() {
            resume_vm(&hypervisor_record, cont)?;
            self.journal
                .update(|journal| journal.phase = VmPhase::Running)
                .while_doing("writing the journal")?;
        }
        let (standby, network, served) = (None, None, None);
        let (restoring, files) = match resumed {
            Some(resumed) => (Some(resumed.restoring), resumed.files),
            None => (None, Vec::new()),
        };
        let (guards, facts) = (Vec::new(), json!(null));
        let started =
            StartedVm { hypervisor, restoring, standby, network, served, facts, guards, files };
        Ok(Some((self.journal, started)))
    }

    /// Ends a save that can't be finished. The guest comes first: it may wait for a page, or be
    /// paused.
    fn abort_save(&self, cont: bool, unfinished: &Path) -> Result<(), Failure> {
        let hypervisor_record = self.hypervisor_record()?;
        close_page_faults(&hypervisor_record)?;
        resume_vm(&hypervisor_record, cont)?;
        remove_unfinished(unfinished);
        if self.describe_unsent().is_some() {
            image_upload::remove_spooled(unfinished);
        }
        self.abandon_drive_files(&hypervisor_record)?;
        let text = format!(
            "the checkpoint to {} was aborted: the supervisor died; the VM runs on",
            unfinished.display()
        );
        self.record_running(|journal| {
            journal.checkpoints.add_failed(unix_seconds(), &text);
            journal.record_failure(text);
        })
    }

    /// Ends a protection. A pause within the hypervisor ends by itself, and a VM that was stopped
    /// by a command is started by one (`cont`). A VM that is paused for another reason was paused
    /// by its user, as far as can be known.
    fn end_protection(&self, cont: bool) -> Result<(), Failure> {
        let hypervisor_record = self.hypervisor_record()?;
        close_page_faults(&hypervisor_record)?;
        resume_vm(&hypervisor_record, cont)?;
        let mut vm = qemu::connect_monitor(&hypervisor_record)?;
        let state = vm.status().while_doing("querying whether the VM runs")?;
        let how = if state.running { "the VM runs on" } else { "the VM stands still" };
        // What can't be removed stays in the journal, for the next protection.
        if let Err(failure) = mirrored_disks::remove_left_mirrors(&mut vm, &self.journal) {
            tracing::warn!("{failure}");
        }
        // The standby may run any epoch that it has, except the newest.
        let is_output_blocked =
            !hypervisor_record.cards.is_empty() || self.has_filter_in_force(&mut vm)?;
        let held = if is_output_blocked { OUTPUT_BLOCKED } else { "" };
        let text = format!("the VM is not protected any more: the supervisor died; {how}{held}");
        self.record_running(|journal| {
            journal.shut |= is_output_blocked;
            journal.record_failure(text);
        })
    }

    /// Whether a filter gives Firn the frames of a card. Before all cards have one there was no cut.
    fn has_filter_in_force(&self, vm: &mut QemuVm) -> Result<bool, Failure> {
        for filter in self.journal.current_journal().filters {
            let is_there = vm.has_filter(filter.number, FilterSide::Captured);
            if is_there.while_doing("querying the filters of a network card")? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Ends a merge. Its record is settled before the guest runs again.
    fn end_merge(&self, cont: bool) -> Result<(), Failure> {
        let hypervisor_record = self.hypervisor_record()?;
        disk_layers::end_merges(
            &mut qemu::connect_monitor(&hypervisor_record)?,
            &hypervisor_record,
        )?;
        resume_vm(&hypervisor_record, cont)?;
        self.record_running(|journal| {
            journal.overlays.retain(|path| path.exists());
            journal.record_failure(
                "a merge of disk layers was ended: the supervisor died; the VM runs",
            );
        })
    }

    fn finish_failover(&self) -> Result<(), Failure> {
        let hypervisor_record = self.hypervisor_record()?;
        resume_vm(&hypervisor_record, true)?;
        match qemu::connect_monitor(&hypervisor_record) {
            Ok(mut vm) => announce_addresses(&mut vm),
            Err(failure) => tracing::warn!("the VM's addresses are not announced: {failure}"),
        }
        self.record_running(|journal| journal.record_success("the standby runs"))
    }

    fn finish_save(&self, cont: bool, image: &Path) -> Result<(), Failure> {
        let hypervisor_record = self.hypervisor_record()?;
        close_page_faults(&hypervisor_record)?;
        resume_vm(&hypervisor_record, cont)?;
        let text = format!("checkpoint {} is whole", image.display());
        let unsent = self.describe_unsent().map(|text| format!("{text}: the supervisor died"));
        self.record_running(|journal| {
            disk_snapshots::hand_over_files(journal);
            match unsent {
                Some(text) => {
                    journal.checkpoints.add_failed(unix_seconds(), &text);
                    journal.record_failure(text);
                }
                None => {
                    journal.checkpoints.add_saved(CheckpointNote::new(unix_seconds(), image));
                    journal.record_success(text);
                }
            }
        })
    }

    /// Removes the disk files of a save that failed.
    fn abandon_drive_files(&self, hypervisor_record: &HypervisorRecord) -> Result<(), Failure> {
        match disk_snapshots::has_snapshot_files(&self.journal.current_journal()) {
            (true, true) => {
                disk_snapshots::abandon_snapshots(
                    &self.journal,
                    Some(&mut qemu::connect_monitor(hypervisor_record)?),
                );
            }
            (true, false) => disk_snapshots::abandon_snapshots(&self.journal, None),
            (false, _) => {}
        }
        Ok(())
    }

    fn finish_suspend(
        self,
        image: &Path,
        hypervisor: &ProcessHandle,
    ) -> Result<RecoveredVm, Failure> {
        let hypervisor_record = self.hypervisor_record()?;
        close_page_faults(&hypervisor_record)?;
        // It is paused, its disks are flushed, and the image has the rest: killing QEMU loses
        // nothing.
        let by_force = StopRequest { force: true, ..StopRequest::default() };
        qemu::end_hypervisor(&hypervisor_record, hypervisor, by_force)?;
        let phase = self.journal.current_journal().phase;
        let text = match phase {
            VmPhase::Saving { upload: Some(upload), .. } => {
                image_upload::remove_spooled(image);
                format!("suspended to {}", upload.location)
            }
            _ => format!("suspended to {}", image.display()),
        };
        let change = |journal: &mut Journal| {
            disk_snapshots::hand_over_files(journal);
            journal.phase = VmPhase::Ended { exit: ProcessExit::Stopped, at: unix_seconds() };
            journal.record_success(text);
        };
        self.journal.update(change).while_doing("writing the journal")?;
        event_loop::remove_sockets(self.vm).while_doing("removing sockets")?;
        Ok(None)
    }

    /// Which file has an image that is not in its store. `None` if there is none.
    fn describe_unsent(&self) -> Option<String> {
        match self.journal.current_journal().phase {
            VmPhase::Saving { image, upload: Some(upload), .. } if !upload.is_complete => {
                Some(image_upload::describe_unsent(&image, &upload.location))
            }
            _ => None,
        }
    }

    fn record_running(&self, note: impl FnOnce(&mut Journal)) -> Result<(), Failure> {
        let change = |journal: &mut Journal| {
            note(journal);
            journal.phase = VmPhase::Running;
        };
        self.journal.update(change).while_doing("writing the journal")
    }

    fn hypervisor_record(&self) -> Result<HypervisorRecord, Failure> {
        let none = || Failure::new(FailureKind::Other, "the journal names no hypervisor");
        self.journal.current_journal().hypervisor_record.ok_or_else(none)
    }
}

/// Ends the handling of the guest's page faults: wakes every thread that waits for a page, drops all
/// write protection, and closes the userfaultfd in the hypervisor.
fn close_page_faults(hypervisor_record: &HypervisorRecord) -> Result<(), Failure> {
    const RELEASING: &str = "releasing the guest's memory";
    let (process, memory) = qemu::open_journaled(hypervisor_record)?;
    let adopted = PageFaults::adopt(&process, memory).while_doing(RELEASING)?;
    if let Some(faults) = &adopted {
        // At once, because with this the guest runs, even if a later step fails.
        faults.unregister_all().while_doing(RELEASING)?;
    }
    let mut tracee = Tracee::seize(&process, &hypervisor_record.vcpus).while_doing(RELEASING)?;
    if let Some(faults) = adopted {
        faults.close(&mut tracee).while_doing(RELEASING)?;
    }
    // One more may follow the writes to video memory.
    PageFaults::close_stale(&mut tracee).while_doing(RELEASING)?;
    Ok(())
}

/// Resumes a VM that the dead supervisor has paused.
fn resume_vm(hypervisor_record: &HypervisorRecord, cont: bool) -> Result<(), Failure> {
    if !cont {
        return Ok(());
    }
    let mut vm = qemu::connect_monitor(hypervisor_record)?;
    let running = vm.status().while_doing("querying whether the VM runs")?.running;
    if running { Ok(()) } else { vm.cont().while_doing("resuming the VM") }
}

/// Removes an unfinished image. If that fails now, the next checkpoint to that name removes it.
fn remove_unfinished(image: &Path) {
    if let Err(error) = firn_image::remove_partial(image) {
        tracing::warn!("{}", Failure::from_error(FailureKind::Other, &error));
    }
}
/// Logs which disks of a standby are kept after its memory is lost.
fn warn_of_kept_disks(files: &[PathBuf]) {
    for file in files {
        tracing::warn!("the standby's memory is lost; its disk stays: {}", file.display());
    }
}
