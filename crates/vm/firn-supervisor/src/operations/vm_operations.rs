//! The operations on a running VM: saving it, merging its disk layers, protecting it, ending it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_checkpoint::{
    SaveContext, SaveError, SaveOptions, SaveReport, SaveSteps, SaveStrategy, SavedState,
    WorkingSetEstimator,
};
use firn_epochs::primary::EndRequest;
use firn_image::{Image, ImageError, key_ring};
use firn_memory::PageFaultError;
use firn_types::PAGE_SIZE;
use firn_vmm::{MemoryLayout, QemuVm};
use serde_json::json;

use crate::daemon::event_loop::VmOperations;
use crate::devices::card_filters::FilterContext;
use crate::devices::disk_copies::{self, DiskPolicy};
use crate::devices::disk_layers::{self, LayerMerger};
use crate::devices::disk_snapshots::{self, DiskSnapshots};
use crate::devices::mirrored_disks::{self, DiskMirrors, EpochDiskPlan};
use crate::devices::network::{CardStatus, OUTPUT_BLOCKED, VmNetwork};
use crate::devices::served_disks::ServedDisks;
use crate::hypervisor::qemu::{self, VmMemory};
use crate::hypervisor::{inspection, libvirt};
use crate::operations::access_scan::{self, AccessScan, PageRanges};
use crate::operations::calls::CallService;
use crate::operations::dirty_tracking::{self, DirtyTracking};
use crate::operations::guest_freeze::{self, GuestFreeze};
use crate::operations::huge_page_repair::HugePageRepair;
use crate::operations::image_upload::{self, ImageSender};
use crate::operations::protection::{
    PreparedDevices, ProtectedParts, ProtectionFailure, ProtectionStatus, VmProtection,
};
use crate::operations::save_checks::{
    refuse_blocked, refuse_clear_reference, refuse_filtered_output, refuse_served_disks,
};
use crate::operations::save_tries;
use crate::operations::vm_checks::CheckedVm;
use crate::processes::identity::ProcessHandle;
use crate::processes::runtime::VmDir;
use crate::processes::state_dir::StateDir;
use crate::records::checkpoint_tally::CheckpointNote;
use crate::records::control_protocol::{
    MemberRequest, OperationProgress, ProtectRequest, SaveChoices, SaveRequest, StopRequest,
};
use crate::records::failure::{Failure, FailureContext, FailureKind, image_failure};
use crate::records::journal::{
    FileIdentity, HypervisorRecord, ImageUpload, Journal, JournalFile, VmPhase, unix_seconds,
};
use crate::records::meta::ImageMeta;
use crate::records::origin::{OriginDigest, OriginKey};

/// If a drive has this number of layers, those that no image needs are merged before a save.
const MERGE_LAYERS_MIN: usize = 16;

/// How long the output of a VM that is being moved may take to leave, once it is released.
const SENT_WAIT: Duration = Duration::from_millis(500);

/// The operations on a VM that QEMU runs.
pub(crate) struct QemuOperations {
    journal: Arc<JournalFile>,
    hypervisor: Arc<ProcessHandle>,
    usage: AccessScan,
    changes: Arc<DirtyTracking>,
    huge_pages: HugePageRepair,
    calls: CallService,
    protecting: VmProtection,
    network: Arc<VmNetwork>,
    served: Arc<ServedDisks>,
    vm: VmDir,
}

impl VmOperations for QemuOperations {
    fn save_vm(
        &self,
        request: &SaveRequest,
        then_stop: bool,
        cancel: &AtomicBool,
        progress: &dyn Fn(OperationProgress),
    ) -> Result<serde_json::Value, Failure> {
        let saved = save_tries::repeat_discarded(cancel, |number| {
            let report = |now| progress(save_tries::mark_try(now, number));
            let mut facts = self.save_once(request, then_stop, cancel, &report)?;
            facts["tries"] = number.into();
            Ok(facts)
        });
        let saved = match self.image_upload(request, (cancel, progress)) {
            Some(upload) if !then_stop && saved.is_ok() => upload.send_checkpoint(saved?),
            Some(_) => saved.inspect_err(|_| image_upload::remove_spool_directory(&request.image)),
            None => saved,
        };
        self.count_checkpoint(&saved);
        saved
    }

    fn merge_layers(
        &self,
        all: bool,
        cancel: &AtomicBool,
        progress: &dyn Fn(OperationProgress),
    ) -> Result<serde_json::Value, Failure> {
        let hypervisor_record = self.hypervisor_record()?;
        let mut vm = qemu::connect_monitor(&hypervisor_record)?;
        let (vm, hypervisor_record, journal) = (&mut vm, &hypervisor_record, &*self.journal);
        let mut merging = LayerMerger { vm, hypervisor_record, journal, cancel, progress };
        let merged = match all {
            true => merging.commit_all(),
            false => merging.merge_unneeded().map(|layers| json!({ "merged": layers })),
        };
        merged.map_err(|failure| self.explain_end(failure, "its disk layers were merged"))
    }

    fn protect_vm(
        &self,
        request: &ProtectRequest,
        ending: &EndRequest,
        begun: &dyn Fn(),
        progress: &dyn Fn(OperationProgress),
    ) -> Result<serde_json::Value, Failure> {
        let hypervisor_record = self.hypervisor_record()?;
        self.refuse_protection(&hypervisor_record)?;
        if request.lease.is_some() {
            self.apply_lease(request.lease)?;
        }
        // Only one descriptor at a time can register the guest's memory.
        self.usage.finish_scan();
        self.changes.stop_tracking();
        let (_, memory) = qemu::open_journaled(&hypervisor_record)?;
        self.huge_pages.note_huge_pages(&memory);
        self.enter_phase(VmPhase::Protecting { paused_by_us: false }, |journal| {
            (journal.protection_end, journal.hung) = (None, false);
        })?;
        let (end, ended) = match self.prepare_devices(&hypervisor_record, request.lease) {
            Ok(prepared) => {
                let context = ProtectedParts {
                    hypervisor: &self.hypervisor,
                    network: &self.network,
                    served: &self.served,
                    prepared,
                };
                let records = (&hypervisor_record, &self.journal);
                self.protecting.run_protection(records, request, context, ending, begun, progress)
            }
            Err(failure) => (None, Err(failure.into())),
        };
        let is_hung = ended.as_ref().is_err_and(|it| it.is_hung);
        if !is_hung {
            self.remove_mirrors_later();
        }
        if ended.as_ref().is_err_and(|it| it.is_declined) && self.is_output_ungoverned() {
            // No other host can run the VM.
            self.network.release_output();
        }
        let ended = ended.map_err(|ProtectionFailure { failure, is_hung, .. }| match is_hung {
            true => failure,
            false => self.explain_end_during_save(failure),
        });
        let shut = self.network.is_output_blocked();
        if !shut && self.is_output_ungoverned() {
            self.remove_filters_later();
        }
        let held = if shut { OUTPUT_BLOCKED } else { "" };
        self.enter_phase(VmPhase::Running, |journal| {
            journal.shut |= shut;
            journal.protection_end = end;
            journal.hung = is_hung;
            match &ended {
                Ok(()) => journal.record_success(format!("released{held}")),
                Err(failure) => {
                    journal.record_failure(format!("not protected any more: {failure}{held}"));
                }
            }
        })?;
        ended.map(|()| json!({ "released": true }))
    }

    fn protection(&self) -> Option<ProtectionStatus> {
        self.protecting.current_status()
    }

    fn network_cards(&self) -> Vec<CardStatus> {
        self.network.card_statuses()
    }

    fn release_output(&self) -> Result<bool, Failure> {
        let was_shut = self.network.is_output_blocked() || self.network.has_filters();
        let change = |journal: &mut Journal| {
            (journal.shut, journal.lease) = (false, None);
            journal
                .last
                .iter_mut()
                .for_each(|note| note.text = note.text.replace(OUTPUT_BLOCKED, ""));
        };
        let had_lease = self.journal.current_journal().lease.is_some();
        self.journal.update(change).while_doing("writing the journal")?;
        self.network.release_output();
        self.network.set_lease(&self.vm.lease_file(), None);
        self.remove_filters()?;
        Ok(was_shut || had_lease)
    }

    fn resume_output(&self) -> Result<(), Failure> {
        let change = |journal: &mut Journal| {
            journal.shut = false;
            journal
                .last
                .iter_mut()
                .for_each(|note| note.text = note.text.replace(OUTPUT_BLOCKED, ""));
        };
        self.journal.update(change).while_doing("writing the journal")?;
        self.network.release_output();
        match self.journal.current_journal().lease {
            // The filters obey it.
            Some(_) => Ok(()),
            None => self.remove_filters(),
        }
    }

    fn cut_finally(&self, hold: Duration) -> Result<serde_json::Value, Failure> {
        let failed = |why| {
            let failure = Failure::new(FailureKind::Refused, format!("it can't be moved: {why}"));
            failure.with_hint("`firn status` shows the state of its protection")
        };
        let cut = self.protecting.final_cut().request_cut(hold).map_err(failed)?;
        if !self.network.wait_until_sent(SENT_WAIT) {
            self.protecting.final_cut().resume_vm();
            let text = "its uplink does not accept what the VM has sent";
            return Err(Failure::new(FailureKind::Host, text)
                .with_hint("`firn status` shows its network cards"));
        }
        let commit_ms = cut.commit_time.as_secs_f64() * 1e3;
        Ok(json!({ "epoch": cut.epoch, "commit_ms": commit_ms }))
    }

    fn resume_after_cut(&self) -> Result<serde_json::Value, Failure> {
        self.protecting.final_cut().resume_vm();
        Ok(serde_json::Value::Null)
    }

    fn answer_member_request(&self, request: &MemberRequest) -> Result<serde_json::Value, Failure> {
        self.network.answer_member_request(request, &self.hypervisor_record()?)
    }

    fn is_member(&self) -> bool {
        self.network.membership().is_some()
    }

    fn has_filters(&self) -> bool {
        self.network.has_filters()
    }

    fn start_idle_work(&self) {
        let Ok(hypervisor_record) = self.hypervisor_record() else { return };
        if hypervisor_record.calls.is_some() {
            if let Err(failure) = self.start_guest_calls(&hypervisor_record) {
                tracing::error!("{}", failure.while_doing("answering guest calls"));
            }
        }
        // Only one descriptor at a time can register the guest's memory.
        if !self.changes.is_tracking() {
            self.usage.start_scan(&hypervisor_record);
            self.huge_pages.start_repair(&hypervisor_record);
        }
    }

    fn stop_idle_work(&self) {
        disk_copies::remove_all_bitmaps(&self.journal);
        if let Ok(record) = self.hypervisor_record() {
            guest_freeze::thaw_before_detach(&self.journal, record.process.pid);
        }
        self.calls.stop_service();
        self.usage.finish_scan();
        self.huge_pages.stop_repair();
        self.changes.stop_tracking();
        if let Ok(hypervisor_record) = self.hypervisor_record() {
            close_left_descriptors(&hypervisor_record);
        }
    }

    fn end_hypervisor(&self, request: StopRequest) -> Result<(), Failure> {
        let discard = |discard| self.journal.update(|journal| journal.discard = discard);
        if request.discard {
            discard(true).while_doing("writing the journal")?;
        }
        let ended = match request.powerdown_s.filter(|_| self.protecting.press_power_button()) {
            Some(seconds) => qemu::wait_powerdown(&self.hypervisor, Duration::from_secs(seconds)),
            None => qemu::end_hypervisor(&self.hypervisor_record()?, &self.hypervisor, request),
        };
        match ended.is_err() && request.discard {
            true => ended.and(discard(false).while_doing("writing the journal")),
            false => ended,
        }
    }

    fn command_line(&self) -> Result<serde_json::Value, Failure> {
        let hypervisor_record = self.hypervisor_record()?;
        let mut vm = qemu::connect_if_free(&hypervisor_record)?;
        disk_layers::restart_command_line(&mut vm, &hypervisor_record.meta)
    }

    fn check_operations(&self) -> Result<serde_json::Value, Failure> {
        let hypervisor_record = self.hypervisor_record()?;
        let mut vm = qemu::connect_if_free(&hypervisor_record)?;
        let (journal, served) = (&self.journal.current_journal(), &*self.served);
        let checked = CheckedVm { hypervisor_record: &hypervisor_record, journal, served };
        let checks =
            checked.check_operations(&mut vm, self.refuse_protection(&hypervisor_record))?;
        serde_json::to_value(checks).while_doing("writing the checks")
    }

    fn is_paused(&self) -> Option<bool> {
        qemu::is_paused(&self.hypervisor_record().ok()?)
    }

    fn is_hung(&self) -> bool {
        if !self.journal.current_journal().hung {
            return false;
        }
        let answers = self
            .hypervisor_record()
            .is_ok_and(|hypervisor_record| qemu::is_answering(&hypervisor_record));
        if answers {
            let change = |journal: &mut Journal| journal.hung = false;
            if let Err(error) = self.journal.update(change) {
                tracing::warn!("can't record that QEMU answers again: {error}");
            }
        }
        !answers
    }
}

impl QemuOperations {
    pub(crate) fn new(
        journal: Arc<JournalFile>,
        hypervisor: Arc<ProcessHandle>,
        network: Arc<VmNetwork>,
        served: Arc<ServedDisks>,
        vm: &VmDir,
    ) -> Self {
        let (usage, changes, huge_pages, calls, protecting) = Default::default();
        let vm = vm.clone();
        Self {
            journal,
            hypervisor,
            usage,
            changes,
            huge_pages,
            calls,
            protecting,
            network,
            served,
            vm,
        }
    }

    /// Refuses a protection for reasons that need no monitor.
    fn refuse_protection(&self, hypervisor_record: &HypervisorRecord) -> Result<(), Failure> {
        if hypervisor_record.calls.is_some() {
            let text = "Firn tracks the guest's writes for its applications (--calls)";
            let failure = Failure::new(FailureKind::Refused, text);
            return Err(failure.with_hint("protect a VM that was started without --calls"));
        }
        if self.network.is_output_blocked() {
            let text =
                "output is still blocked from the previous protection: its backup may run this VM";
            let failure = Failure::new(FailureKind::Refused, text);
            return Err(
                failure.with_hint("`firn release` releases it, if that backup never runs the VM")
            );
        }
        if !self.network.is_new() {
            let text = "the VM's cluster was protected before";
            let failure = Failure::new(FailureKind::Refused, text);
            return Err(failure.with_hint("`firn cluster protect` protects the whole cluster anew"));
        }
        Ok(())
    }

    /// Whether neither a lease nor a cluster decides what output leaves the VM.
    fn is_output_ungoverned(&self) -> bool {
        self.journal.current_journal().lease.is_none() && !self.is_member()
    }

    /// Adds filters to the network cards that are not Firn's own, and connects QEMU to the targets
    /// of mirrors for the disks that Firn does not serve.
    fn prepare_devices(
        &self,
        hypervisor_record: &HypervisorRecord,
        lease: Option<u32>,
    ) -> Result<PreparedDevices, Failure> {
        let mut qemu = qemu::connect_monitor(hypervisor_record)?;
        // A VM that is refused keeps its cards and disks as they are.
        inspection::check_protectable(&mut qemu, hypervisor_record)?;
        // A mirror that an earlier protection has left, or a Firn that is gone with its journal, would
        // be a job that is in the way.
        mirrored_disks::remove_left_mirrors(&mut qemu, &self.journal)?;
        let disks = EpochDiskPlan::plan_drives(&mut qemu, hypervisor_record, &self.served)?;
        let pid = hypervisor_record.process.pid;
        let mirrors = DiskMirrors::prepare(&mut qemu, pid, &self.journal, &disks)?;
        let context = self.filter_context(&mut qemu);
        let not_held = self.network.add_filters(context, hypervisor_record)?;
        self.network.set_lease(&self.vm.lease_file(), lease);
        Ok(PreparedDevices { not_held, disks, mirrors })
    }

    /// Removes mirrors that the end of a protection has left, because it could not be begun.
    fn remove_mirrors_later(&self) {
        let is_gone = || self.hypervisor.wait_gone(Duration::ZERO).unwrap_or(false);
        if self.journal.current_journal().mirrors.is_empty() || is_gone() {
            return;
        }
        let removed = self
            .hypervisor_record()
            .and_then(|it| qemu::connect_monitor(&it))
            .and_then(|mut qemu| mirrored_disks::remove_left_mirrors(&mut qemu, &self.journal));
        if let Err(failure) = removed {
            tracing::warn!("{failure}");
        }
    }

    /// Removes all filters. The output is open.
    fn remove_filters(&self) -> Result<(), Failure> {
        if !self.network.has_filters() {
            return Ok(());
        }
        let hint = "the VM's output is released; `firn release` tries again";
        let mut qemu = qemu::connect_monitor(&self.hypervisor_record()?)
            .map_err(|failure| failure.with_hint(hint))?;
        self.network
            .remove_filters(self.filter_context(&mut qemu))
            .map_err(|failure| failure.with_hint(hint))
    }

    /// The same, at the end of a protection, whose result is not that of the removal.
    fn remove_filters_later(&self) {
        if self.hypervisor.wait_gone(Duration::ZERO).unwrap_or(false) {
            return;
        }
        if let Err(failure) = self.remove_filters() {
            tracing::warn!("{failure}");
        }
    }

    fn filter_context<'a>(&'a self, qemu: &'a mut QemuVm) -> FilterContext<'a> {
        FilterContext { qemu, vm: &self.vm, journal: &self.journal }
    }

    /// Merges layers before a drive has more of them than a save accepts.
    fn shorten_chains(
        &self,
        hypervisor_record: &HypervisorRecord,
        cancel: &AtomicBool,
        progress: &dyn Fn(OperationProgress),
    ) -> Result<(), Failure> {
        let mut vm = qemu::connect_monitor(hypervisor_record)
            .map_err(|failure| self.explain_end_during_save(failure))?;
        let drives = vm.drives().while_doing("querying the VM's disks")?;
        if drives.iter().all(|drive| drive.chain.len() < MERGE_LAYERS_MIN) {
            return Ok(());
        }
        let (vm, journal) = (&mut vm, &*self.journal);
        let merged =
            LayerMerger { vm, hypervisor_record, journal, cancel, progress }.merge_unneeded();
        merged.map(drop).map_err(|failure| self.explain_end_during_save(failure))
    }

    /// Lets the VM's output leave only while this lease is held. The journal records that first,
    /// because a successor may have to know.
    fn apply_lease(&self, lease: Option<u32>) -> Result<(), Failure> {
        self.journal.update(|journal| journal.lease = lease).while_doing("writing the journal")?;
        self.network.set_lease(&self.vm.lease_file(), lease);
        Ok(())
    }

    /// Tracks what the guest writes, and answers the guest calls of its applications with it.
    fn start_guest_calls(&self, hypervisor_record: &HypervisorRecord) -> Result<(), Failure> {
        let followed = |journal: &mut Journal| {
            journal
                .hypervisor_record
                .iter_mut()
                .for_each(|hypervisor_record| hypervisor_record.followed = true);
        };
        self.journal.update(followed).while_doing("writing the journal")?;
        self.calls.start_service(hypervisor_record, &self.vm, &self.changes)?;
        self.changes.start_tracking(hypervisor_record)
    }

    fn enter_phase(&self, phase: VmPhase, note: impl FnOnce(&mut Journal)) -> Result<(), Failure> {
        let change = |journal: &mut Journal| {
            journal
                .hypervisor_record
                .iter_mut()
                .for_each(|hypervisor_record| hypervisor_record.followed = false);
            journal.phase = phase;
            note(journal);
        };
        self.journal.update(change).while_doing("writing the journal")
    }

    /// One try of a save.
    fn save_once(
        &self,
        request: &SaveRequest,
        then_stop: bool,
        cancel: &AtomicBool,
        progress: &dyn Fn(OperationProgress),
    ) -> Result<serde_json::Value, Failure> {
        firn_fault::pass_point("save.asked");
        refuse_clear_reference(&request.choices)?;
        key_ring().add_keys(&request.keys);
        // A later checkpoint may build on the image.
        request.choices.seal.iter().for_each(|seal| key_ring().add_key(seal.key.clone()));
        let hypervisor_record = self.hypervisor_record()?;
        refuse_served_disks(&hypervisor_record)?;
        refuse_filtered_output(&self.journal.current_journal())?;
        self.shorten_chains(&hypervisor_record, cancel, progress)?;
        let explain = |failure: Failure| match failure.kind {
            FailureKind::Refused | FailureKind::Interrupted => failure,
            _ => self.explain_end_during_save(failure),
        };
        let accepted = request.choices.accept_unrestorable && !then_stop;
        let prepared = prepare_save(&hypervisor_record, accepted, cancel).map_err(explain)?;
        let PreparedSave { mut vm, paused, was_running, unrestorable, layout, memory } = prepared;
        let open = |path: &PathBuf| open_parent(path, &layout);
        let parent = request.choices.parent.as_ref().map(open).transpose()?;
        let held = self.journal.current_journal().shut || self.network.is_output_blocked();
        let meta =
            hypervisor_record.meta.clone().with_output_blocked(held).with_paused_state(paused);
        let freeze = self.plan_freeze(request, &hypervisor_record, was_running)?;
        let frozen = freeze.is_some() || self.journal.current_journal().frozen;
        let meta = meta.with_frozen(frozen);
        let (domain_xml, definition) =
            libvirt::read_domain_xml(&hypervisor_record.qmp).map_err(explain)?;
        let meta = meta.with_obstacles(unrestorable).with_domain_xml(domain_xml, definition);
        let hypervisor_record = HypervisorRecord { meta, ..hypervisor_record };
        let meta = hypervisor_record.meta.clone();
        let policy = DiskPolicy::new(
            &hypervisor_record,
            &self.journal.current_journal(),
            request,
            parent.as_deref(),
        );
        let mut cutting =
            DiskSnapshots::plan_drives(&mut vm, &meta, policy, then_stop).map_err(explain)?;
        refuse_clear_disks(&request.choices, &cutting)?;
        image_upload::refuse_stored_disks(request, &cutting)?;
        // Only one descriptor at a time can register the guest's memory.
        let scanned = self.usage.finish_scan();
        self.huge_pages.note_huge_pages(&memory.guest);
        self.record_save_begin(request, then_stop, was_running, &mut vm, &layout)
            .map_err(explain)?;
        firn_fault::pass_point("save.journaled");
        let key = StateDir::from_env().and_then(|state| state.get_key());
        let save = SaveRun {
            operations: self,
            request,
            then_stop,
            was_running,
            cancel,
            scanned,
            parent,
            key: key.as_ref().ok(),
            freeze: freeze.as_ref(),
        };
        let report = save.run_save(&mut vm, meta.clone(), &layout, memory, &mut cutting, progress);
        let send = |report| match then_stop {
            true => {
                let upload = self.image_upload(request, (cancel, progress));
                let sent = upload.map(|upload| upload.send_suspended()).transpose();
                sent.map(|sent| (report, sent))
            }
            false => Ok((report, None)),
        };
        let report = report.and_then(send).map_err(|failure| {
            let failure = freeze.iter().fold(failure, |it, freeze| freeze.explain_failure(it));
            if !self.journal.is_image_complete() {
                cutting.stop_copies(&mut vm);
            }
            let failure = self.recover_from_failure(failure, &mut vm, was_running);
            // A failure after the image has its final name does not remove the image's files.
            if !self.journal.is_image_complete() {
                cutting.undo_save(&mut vm, &self.journal);
            }
            failure
        });
        // In any case, and after a VM that was paused runs again.
        let thawed = freeze.as_ref().and_then(GuestFreeze::finish);
        if !then_stop {
            close_descriptors(&mut vm);
        }
        self.record_save_end(request, then_stop, report.as_ref().err())?;
        disk_copies::remove_old_bitmaps(&mut vm, &self.journal.current_journal());
        let (report, sent) = report?;
        let mut facts = save_facts(request, &report, &cutting, &meta.unrestorable);
        if let (Some(sent), Some(store)) = (sent, &request.store) {
            facts["upload"] = sent;
            facts["image"] = json!(store.location);
        }
        facts["freeze"] = json!(thawed);
        // The image is good all the same.
        facts["unmarked"] = json!(key.err().map(|failure| failure.to_string()));
        Ok(facts)
    }

    /// The freeze of the guest's file systems, if the user wants it.
    fn plan_freeze(
        &self,
        request: &SaveRequest,
        record: &HypervisorRecord,
        was_running: bool,
    ) -> Result<Option<GuestFreeze>, Failure> {
        let Some(ms) = request.choices.freeze_ms else { return Ok(None) };
        if record.qmp.domain().is_some() {
            let text = "libvirt is connected to the guest agent of its domains, so Firn can't freeze this VM";
            let hint =
                "save it without --freeze: the disks are as they would be after a loss of power";
            return Err(Failure::new(FailureKind::Refused, text).with_hint(hint));
        }
        let (pid, limit) = (record.process.pid, Duration::from_millis(ms));
        GuestFreeze::plan(&self.journal, pid, limit, was_running).map(Some)
    }

    fn hypervisor_record(&self) -> Result<HypervisorRecord, Failure> {
        let none = || Failure::new(FailureKind::Other, "the journal names no hypervisor");
        self.journal.current_journal().hypervisor_record.ok_or_else(none)
    }

    /// Records what a successor has to know: where memory is, and what is about to happen to it.
    fn record_save_begin(
        &self,
        request: &SaveRequest,
        then_stop: bool,
        was_running: bool,
        vm: &mut QemuVm,
        layout: &MemoryLayout,
    ) -> Result<(), Failure> {
        let vcpus = vm.vcpus().while_doing("querying the vCPUs")?;
        let locations =
            layout.locations.iter().map(|location| (location.id.clone(), location.hva)).collect();
        let phase = VmPhase::Saving {
            image: request.image.clone(),
            replaces: FileIdentity::from_path(&request.image),
            paused_by_us: then_stop && was_running,
            then_stop,
            upload: request
                .store
                .as_ref()
                .map(|store| ImageUpload { location: store.location.clone(), is_complete: false }),
            drives: Vec::new(),
        };
        let change = |journal: &mut Journal| {
            disk_snapshots::finish_unrecorded_save(journal);
            if let Some(hypervisor_record) = &mut journal.hypervisor_record {
                hypervisor_record.map = layout.map.clone();
                hypervisor_record.locations = locations;
                hypervisor_record.vcpus = vcpus.iter().map(|vcpu| vcpu.tid).collect();
            }
            journal.phase = phase;
        };
        self.journal.update(change).while_doing("writing the journal")
    }

    /// The failure, or, if the VM has ended, a failure that states only that.
    fn explain_end_during_save(&self, failure: Failure) -> Failure {
        self.explain_end(failure, "it was being saved")
    }

    fn explain_end(&self, failure: Failure, what: &str) -> Failure {
        // A monitor that another process uses is that of a QEMU that lives.
        if matches!(failure.kind, FailureKind::Refused | FailureKind::Busy) {
            return failure;
        }
        match self.hypervisor.wait_gone(qemu::SHORT_WAIT) {
            Ok(true) => Failure::new(FailureKind::Ended, format!("the VM ended while {what}")),
            _ => failure,
        }
    }

    /// Resumes a VM that a failed save has left paused.
    fn recover_from_failure(
        &self,
        failure: Failure,
        vm: &mut QemuVm,
        was_running: bool,
    ) -> Failure {
        match vm.status() {
            Ok(state) if was_running && !state.running => resume_vm(vm),
            Ok(_) => {}
            Err(error) => {
                tracing::error!("{}", Failure::from_error(FailureKind::Other, &error));
                return self.explain_end_during_save(failure);
            }
        }
        failure
    }

    /// The upload of an image that is to be in object storage.
    fn image_upload<'a>(
        &'a self,
        request: &'a SaveRequest,
        (cancel, progress): (&'a AtomicBool, &'a dyn Fn(OperationProgress)),
    ) -> Option<ImageSender<'a>> {
        let (journal, hypervisor) = (&*self.journal, &*self.hypervisor);
        let store = request.store.as_ref()?;
        Some(ImageSender { journal, hypervisor, request, store, cancel, progress })
    }

    /// Counts a checkpoint, for metrics. The checkpoint is what it is if that can't be written.
    fn count_checkpoint(&self, saved: &Result<serde_json::Value, Failure>) {
        let at = unix_seconds();
        let counted = self.journal.update(|journal| match saved {
            Ok(facts) => journal.checkpoints.add_saved(CheckpointNote::from_facts(at, facts)),
            Err(failure) => journal.checkpoints.add_failed(at, &failure.to_string()),
        });
        if let Err(error) = counted {
            tracing::warn!("a checkpoint is not counted: {error}");
        }
    }

    /// Records the result of a save. A suspend stays in the journal until the VM has ended.
    fn record_save_end(
        &self,
        request: &SaveRequest,
        then_stop: bool,
        failure: Option<&Failure>,
    ) -> Result<(), Failure> {
        let image = request.image.display();
        let change = |journal: &mut Journal| match failure {
            None if then_stop => disk_snapshots::hand_over_files(journal),
            None => {
                disk_snapshots::hand_over_files(journal);
                journal.phase = VmPhase::Running;
                match &request.store {
                    // Until it is there.
                    Some(store) => journal.record_failure(image_upload::describe_unsent(
                        &request.image,
                        &store.location,
                    )),
                    None => journal.record_success(format!("checkpoint {image} is whole")),
                }
            }
            Some(failure) => {
                // A VM that was to end, and continues, writes to disks that the image would build
                // on.
                if journal.is_image_complete() && !then_stop {
                    disk_snapshots::hand_over_files(journal);
                }
                journal.phase = VmPhase::Running;
                journal.record_failure(format!("no checkpoint to {image}: {failure}"));
            }
        };
        let followed = self.changes.is_tracking();
        let change = |journal: &mut Journal| {
            journal
                .hypervisor_record
                .iter_mut()
                .for_each(|hypervisor_record| hypervisor_record.followed = followed);
            change(journal);
        };
        self.journal.update(change).while_doing("writing the journal")
    }
}

/// A VM that has been checked and is ready to be saved.
struct PreparedSave {
    vm: QemuVm,
    was_running: bool,
    /// QEMU's name for the run state, if the VM does not run.
    paused: Option<String>,
    /// The reasons why the image could not be restored, if the user accepts them.
    unrestorable: Vec<String>,
    layout: MemoryLayout,
    memory: VmMemory,
}

/// Checks a VM, without changing it.
fn prepare_save(
    hypervisor_record: &HypervisorRecord,
    accepted: bool,
    cancel: &AtomicBool,
) -> Result<PreparedSave, Failure> {
    let mut vm = qemu::connect_monitor(hypervisor_record)?;
    refuse_blocked(vm.migration_blockers().while_doing("querying migration blockers")?)?;
    let state = vm.status().while_doing("querying whether the VM runs")?;
    let (was_running, paused) = (state.running, inspection::paused_state(&state));
    let unrestorable = inspection::check_restorable(&mut vm, hypervisor_record, accepted)?;
    let layout = inspection::mapped_layout(&mut vm, hypervisor_record, was_running, cancel)?;
    let layout = match hypervisor_record.qmp.domain() {
        // The QEMU of a restored domain waits for a migration.
        Some(_) => layout.with_firmware_saved(),
        None => layout,
    };
    let memory = qemu::open_memory(hypervisor_record.process.pid, &layout)?;
    Ok(PreparedSave { vm, was_running, paused, unrestorable, layout, memory })
}

/// One save of a VM.
struct SaveRun<'a> {
    operations: &'a QemuOperations,
    request: &'a SaveRequest,
    then_stop: bool,
    was_running: bool,
    cancel: &'a AtomicBool,
    /// The pages that the guest used recently, if an access scan ran.
    scanned: Option<PageRanges>,
    /// The image that the new one builds on.
    parent: Option<Arc<Image>>,
    /// The key that marks the image as one of this user.
    key: Option<&'a OriginKey>,
    /// The freeze of the guest's file systems, if the user wants it.
    freeze: Option<&'a GuestFreeze>,
}

impl SaveRun<'_> {
    fn run_save(
        &self,
        vm: &mut QemuVm,
        meta: ImageMeta,
        layout: &MemoryLayout,
        memory: VmMemory,
        cutting: &mut DiskSnapshots<'_>,
        progress: &dyn Fn(OperationProgress),
    ) -> Result<SaveReport, Failure> {
        let parent = self.parent.as_deref();
        let options =
            save_options(&self.request.choices, self.then_stop, memory.guest.is_shared(), parent);
        let changes = &self.operations.changes;
        changes.release_for_save(options.strategy, &memory.guest);
        let used = self.used_pages(vm, &memory, options.strategy)?;
        if self.then_stop {
            // Before the disks are examined: a running VM may write to them afterwards.
            vm.stop().while_doing("stopping the VM")?;
        }
        let mut disks = vm.disks().while_doing("querying the VM's disks")?;
        disks.retain(|disk| !cutting.covers_disk(disk));
        let firn = env!("CARGO_PKG_VERSION").to_owned();
        let connections = vm.user_connections().while_doing("querying the guest's connections")?;
        let mut meta = ImageMeta {
            created: unix_seconds(),
            firn,
            disks,
            drives: Vec::new(),
            connections,
            ..meta
        };
        firn_fault::pass_point("save.disks");
        let journal = &self.operations.journal;
        cutting.prepare_files(vm, journal)?;
        let layers = cutting.find_layers()?;
        meta.add_disks(layers);
        let cutting = &*cutting;
        let was_running = self.was_running;
        let describe = |state: &SavedState<'_>| {
            // While the guest is paused, only QEMU can have touched pages.
            let found_late = state.found_late.filter(|_| was_running);
            let meta = ImageMeta { found_late, ..meta.clone() };
            let mut meta = serde_json::to_value(meta.with_drives(cutting.frozen_drives()?))?;
            if let Some(key) = self.key {
                let sealed = self.request.choices.seal.as_ref().map(|seal| seal.key.id());
                let digest = OriginDigest::of_parts(&meta, state.regions, state.device_state)
                    .with_key(sealed);
                key.mark(&digest).add_to(&mut meta);
            }
            Ok(meta)
        };
        let (paused, cancel) = (self.was_running, self.cancel);
        let steps = JournalSteps { journal, paused, cancel, cutting, freeze: self.freeze };
        let mut context = SaveContext {
            vm,
            process: memory.process,
            memory: memory.guest,
            aux: &layout.aux,
            used,
            parent: self.parent.clone(),
            seal: self.request.choices.seal.as_ref(),
            tracker: changes.take_tracker(),
            drives: cutting.drive_cut(),
            steps: &steps,
        };
        let image = &self.request.image;
        let block_bytes = options.block_size.byte_count() as u64;
        let report = |now: firn_checkpoint::SaveProgress| {
            let stage = if self.then_stop { "suspending" } else { "saving" };
            let bytes = |blocks: u32| u64::from(blocks) * block_bytes;
            progress(OperationProgress::new(
                stage,
                bytes(now.blocks_done),
                bytes(now.blocks_total),
            ));
        };
        let saved = firn_checkpoint::save_vm(
            &mut context,
            &self.request.image,
            &describe,
            &options,
            &report,
        );
        changes.return_tracker(context.tracker.take());
        saved
            .map_err(|error| save_failure(&error))
            .map_err(|failure| failure.while_doing(format!("saving to {}", image.display())))
    }
}

impl SaveRun<'_> {
    /// The pages that the guest used before the pause: from the access scan, or else from a short
    /// scan now. `None` if the working set consists of what the guest touches after the cut.
    fn used_pages(
        &self,
        vm: &mut QemuVm,
        memory: &VmMemory,
        strategy: SaveStrategy,
    ) -> Result<Option<PageRanges>, Failure> {
        let after = match strategy {
            SaveStrategy::Trace | SaveStrategy::Cow | SaveStrategy::PreCopy => {
                WorkingSetEstimator::Trace
            }
            SaveStrategy::Stop => WorkingSetEstimator::AccessBits,
        };
        match self.request.choices.working_set.unwrap_or(after) {
            WorkingSetEstimator::Trace => Ok(None),
            WorkingSetEstimator::AccessBits
                if self.scanned.is_some()
                    || !self.was_running
                    || strategy == SaveStrategy::PreCopy =>
            {
                Ok(self.scanned.clone())
            }
            WorkingSetEstimator::AccessBits => {
                let vcpus = vm.vcpus().while_doing("querying the vCPUs")?;
                let vcpus = vcpus.iter().map(|vcpu| vcpu.tid).collect();
                Ok(access_scan::scan_briefly(memory, vcpus, &|| {
                    self.cancel.load(Ordering::Relaxed)
                }))
            }
        }
    }
}

/// Updates the journal around the pause of a save.
struct JournalSteps<'a> {
    journal: &'a JournalFile,
    /// Whether the VM ran when the save began; otherwise its user has paused it.
    paused: bool,
    cancel: &'a AtomicBool,
    cutting: &'a DiskSnapshots<'a>,
    freeze: Option<&'a GuestFreeze>,
}

impl JournalSteps<'_> {
    fn set_paused_by_us(&self, paused: bool) -> io::Result<()> {
        let change = |journal: &mut Journal| {
            if let VmPhase::Saving { paused_by_us, then_stop: false, .. } = &mut journal.phase {
                *paused_by_us = paused;
            }
        };
        self.journal.update(change).map_err(io::Error::other)
    }
}

impl SaveSteps for JournalSteps<'_> {
    fn about_to_stop(&self) -> io::Result<()> {
        if let Some(freeze) = self.freeze {
            freeze.begin().map_err(io::Error::other)?;
        }
        self.set_paused_by_us(self.paused)?;
        self.cutting.mark_pause_begun();
        Ok(())
    }

    fn record_resume(&self) -> io::Result<()> {
        self.set_paused_by_us(false)?;
        self.freeze.map_or(Ok(()), GuestFreeze::end).map_err(io::Error::other)
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed) || self.freeze.is_some_and(GuestFreeze::is_late)
    }
}

fn save_failure(error: &SaveError) -> Failure {
    let kind = match error {
        SaveError::Cancelled => FailureKind::Interrupted,
        SaveError::Image(error) => image_failure(error).kind,
        SaveError::StopThreads(_) => FailureKind::Host,
        SaveError::Discarded { .. } => FailureKind::Discarded,
        SaveError::Fault(PageFaultError::Private)
        | SaveError::HugePagesGivenBack { .. }
        | SaveError::PartlyShared
        | SaveError::LargePages => FailureKind::Refused,
        _ => FailureKind::Other,
    };
    let failure = Failure::from_error(kind, error);
    match error {
        SaveError::CopyDisks(_) => failure.with_hint(disk_snapshots::DISK_DIR_HINT),
        SaveError::Fault(PageFaultError::Private) => {
            failure.with_hint("`--strategy cow` saves it as it is")
        }
        _ => failure,
    }
}

/// Refuses a VM with migration blockers: what QEMU could not migrate can't be saved either, even if
/// saving seems to work.
/// Closes QEMU's copies of Firn's descriptors. QEMU closes them by itself only when no monitor at
/// all is connected.
fn close_descriptors(vm: &mut QemuVm) {
    if let Err(error) = vm.finish_save() {
        tracing::debug!("{}", Failure::from_error(FailureKind::Other, &error));
    }
}

/// Closes descriptors that an earlier operation left in QEMU because it failed or because the VM
/// was paused.
fn close_left_descriptors(hypervisor_record: &HypervisorRecord) {
    let closed = qemu::connect_within(hypervisor_record, qemu::SHORT_WAIT)
        .and_then(|mut vm| vm.remove_left_descriptors().while_doing("closing descriptors in QEMU"));
    if let Err(failure) = closed {
        tracing::debug!("{failure}");
    }
}

fn resume_vm(vm: &mut QemuVm) {
    if let Err(error) = vm.cont() {
        tracing::error!("{}", Failure::from_error(FailureKind::Other, &error));
    }
}

/// Chooses the strategy. In private memory only writes can be tracked. What changed since another
/// image is found quickly if writes are tracked from one checkpoint to the next.
fn choose_strategy(choices: &SaveChoices, then_stop: bool, is_shared: bool) -> SaveStrategy {
    let fitting = match is_shared {
        _ if choices.parent.is_some() && dirty_tracking::can_track_writes() => {
            SaveStrategy::PreCopy
        }
        true => SaveStrategy::Trace,
        false => SaveStrategy::Cow,
    };
    match then_stop {
        true => SaveStrategy::Stop,
        false => choices.strategy.unwrap_or(fitting),
    }
}

/// Refuses to put snapshots of disks beside a sealed image, unless the user accepts that they are
/// not encrypted.
fn refuse_clear_disks(choices: &SaveChoices, cutting: &DiskSnapshots<'_>) -> Result<(), Failure> {
    if choices.seal.is_none() || choices.disks_in_clear || !cutting.makes_snapshots() {
        return Ok(());
    }
    let text =
        "the image is to be sealed, and the snapshots of the VM's disks would not be encrypted";
    Err(Failure::new(FailureKind::Refused, text)
        .with_hint("accept that with --disks-in-clear, or name the disks only: --disks reference"))
}

fn open_parent(path: &Path, layout: &MemoryLayout) -> Result<Arc<Image>, Failure> {
    let image = Image::open(path).and_then(|image| match image.regions().regions() {
        regions if regions == layout.map.regions() => Ok(image),
        _ => Err(ImageError::OtherRam { parent: path.to_owned() }),
    });
    let image = image.map_err(|error| image_failure(&error));
    image.map(Arc::new).map_err(|failure| failure.while_doing("opening the image to build on"))
}

fn save_options(
    choices: &SaveChoices,
    then_stop: bool,
    is_shared: bool,
    parent: Option<&Image>,
) -> SaveOptions {
    let mut default = SaveOptions::default();
    if let Some(parent) = parent.map(Image::geometry) {
        default.block_size = parent.block_size;
        default.locality_block_bytes = parent.locality_block_bytes;
    }
    SaveOptions {
        strategy: choose_strategy(choices, then_stop, is_shared),
        codec: choices.codec.unwrap_or(default.codec),
        block_size: choices.block_size.unwrap_or(default.block_size),
        locality_block_bytes: choices.locality_block_bytes.unwrap_or(default.locality_block_bytes),
        compressors: choices.compressors.unwrap_or(default.compressors),
        throttle: choices.throttle.unwrap_or(default.throttle),
        bandwidth: choices.bandwidth,
        finish_within: choices.finish_within_ms.map(Duration::from_millis),
        first_spaces: choices.first_spaces.unwrap_or(default.first_spaces),
        leave_stopped: then_stop,
        reference: choices.reference.clone(),
        ..default
    }
}

fn save_facts(
    request: &SaveRequest,
    report: &SaveReport,
    cutting: &DiskSnapshots<'_>,
    unrestorable: &[String],
) -> serde_json::Value {
    json!({
        "image": request.image,
        "unrestorable": unrestorable,
        "parent": request.choices.parent,
        "page_bytes": PAGE_SIZE,
        "drives": cutting.drive_facts(),
        "report": report,
    })
}
