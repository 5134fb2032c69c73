//! The restore of a VM: from an image to a running VM, and until all of its memory is installed.
//!
//! ```text
//!    image ---- meta --> launch QEMU -S -incoming defer ---> monitor ---> attach, register, punch out RAM
//!                                                                              |
//!      journal: started <--- video memory and the like <--- device state <-----'
//!         |
//!         '-> (eager: all memory) -> cont -> the guest runs; memory follows
//! ```
//!
//! Until the journal has `started`, a successor discards everything: nothing exists yet that the
//! image does not have. From then on a successor continues to serve page faults.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use firn_image::{AuxBlock, Image, ImageKey};
use firn_memory::{GuestMemory, PageFaults, Process, TraceMode, Tracee, process_memory};
use firn_restore::{
    BackgroundFill, FillChoices, OnFatal, PrefillThreads, PrefilledMemory, PresenceFile,
    ReadFailurePolicy, RestoreError, RestoreMode, RestoreOptions, RunCounts, RunningRestore,
};
use firn_types::{PAGE_SIZE, RamRegion, ThreadId, VcpuId};
use firn_vmm::QemuVm;
use firn_vmm::command_line::{
    self, CommandOverrides, CommandPlan, EndpointRelocation, HostEndpoint, RamPlan,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::devices::disk_kinds::check_disk_kinds;
use crate::devices::disk_layers::LockedLayers;
use crate::devices::disk_snapshots::RestoredDisks;
use crate::devices::network::{CardSockets, OUTPUT_BLOCKED};
use crate::hypervisor::qemu::{self, KnownHypervisor, VmMemory};
use crate::hypervisor::restored_domain;
use crate::operations::auxiliary;
use crate::operations::calls;
use crate::operations::domain_restore::{self, CreatedDomain};
use crate::operations::family::FamilyLink;
use crate::operations::image_origin::{self, TrustChoices};
use crate::operations::learned_blocks::LearnedBlocksFile;
use crate::operations::outage::OutagePauser;
use crate::operations::restore_task::RestoreTask;
use crate::operations::restore_work::{PROGRESS_INTERVAL, RestoreWork, restore_progress};
use crate::operations::storage_latency::ImageStorage;
use crate::operations::vm_start::{self, HypervisorChild, StartContext, StartedVm};
use crate::operations::{guest_clock, guest_freeze};
use crate::processes::endpoints;
use crate::processes::identity::ProcessHandle;
use crate::processes::kept_keys;
use crate::processes::programs;
use crate::records::control_protocol::{OperationProgress, RestoreDisks};
use crate::records::failure::{self, Failure, FailureContext, FailureKind, image_failure};
use crate::records::family::FamilyRecord;
use crate::records::image_ids::ImageIds;
use crate::records::journal::{HypervisorRecord, Journal, JournalFile, VmPhase};
use crate::records::meta::{self, HostMismatch, ImageMeta};
use crate::records::restored_domain::LibvirtTarget;

/// What a failure to restore memory was doing.
pub(crate) const RESTORING: &str = "restoring memory";

/// A hint for hosts on which page faults cannot be handled.
const NEEDS_NO_USERFAULTFD: &str = "`firn restore --mode eager` needs no userfaultfd; `firn doctor` names what is missing for the other modes";

/// The choices of `firn restore`.
pub(crate) struct RestoreChoices<'a> {
    pub(crate) image: &'a Path,
    /// Its keys and those of the images it builds on, if the command found it sealed.
    pub(crate) keys: &'a [ImageKey],
    pub(crate) mode: RestoreMode,
    /// What happens to the VM when its memory can't be read.
    pub(crate) on_error: ReadFailurePolicy,
    /// Continue when QEMU's version or a disk differs.
    pub(crate) force: bool,
    /// The user trusts the image, whatever its origin is.
    pub(crate) trust: bool,
    /// When and how fast memory is filled in the background.
    pub(crate) fill: FillChoices,
    /// Count which prefetched pages the guest uses.
    pub(crate) account_use: bool,
    /// Use the learned blocks of earlier restores, and record those of this one.
    pub(crate) learn: bool,
    /// Start the vCPUs of a VM that was paused when it was saved.
    pub(crate) run: bool,
    /// The files that the VM's drives write to, and the directory in which they are made.
    pub(crate) disks: RestoreDisks,
    pub(crate) disk_dir: Option<&'a Path>,
    /// The file that names the applications that may make guest calls.
    pub(crate) calls: Option<&'a Path>,
    /// Changes to the command line that the image holds.
    pub(crate) overrides: &'a CommandOverrides,
    /// The libvirt that starts QEMU, as a domain.
    pub(crate) libvirt: Option<&'a LibvirtTarget>,
    /// The family of clones that the VM joins.
    pub(crate) family: Option<&'a FamilyRecord>,
}

impl RestoreChoices<'_> {
    fn trust_choices(&self) -> TrustChoices<'_> {
        let (trust, libvirt) = (self.trust, self.libvirt.is_some());
        TrustChoices { trust, overrides: self.overrides, libvirt }
    }
}

/// The duration of each step of a restore, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RestoreTimings {
    /// Opening the image and checking its index.
    pub image_open: f64,
    /// Starting the QEMU process.
    pub spawn: f64,
    /// Until QEMU's monitor answered.
    pub qmp: f64,
    /// Finding memory; attaching, registering and emptying it.
    pub attach: f64,
    /// Loading the device state and auxiliary blocks.
    pub device_state: f64,
    /// Reading memory before the guest runs (eager and working-set restore).
    pub prefill: f64,
    /// Starting the vCPUs.
    pub cont: f64,
    /// The whole restore, from the supervisor's first instruction.
    pub total: f64,
}

/// A stopwatch with laps.
struct PhaseTimer {
    since: Instant,
    lap: Instant,
}

impl PhaseTimer {
    fn take_lap(&mut self) -> f64 {
        let now = Instant::now();
        let lap = now - std::mem::replace(&mut self.lap, now);
        to_milliseconds(lap)
    }
}

fn to_milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// Restores a VM: `firn restore`.
pub(crate) fn restore_vm(
    context: &StartContext<'_>,
    wanted: &RestoreChoices<'_>,
    since: Instant,
    report: &mut dyn FnMut(OperationProgress),
) -> Result<StartedVm, Failure> {
    let mut watch = PhaseTimer { since, lap: Instant::now() };
    let mut timings = RestoreTimings::default();
    let (image, meta) = open_image(wanted.image)?;
    ImageIds::from_image(&image).check_keys(wanted.image, wanted.keys)?;
    let origin = image_origin::check_origin(&image, &meta, &wanted.trust_choices())?;
    refuse_unrestorable(&meta, wanted.force)?;
    let meta = meta.with_overrides(wanted.overrides)?;
    let held = LockedLayers::lock(&meta)?;
    let meta = held.resolve_disks(meta);
    wanted.calls.map(|policy| check_calls(&meta, policy)).transpose()?;
    context.stores.map(|_| vm_start::check_stores(&meta)).transpose()?;
    let mismatches = meta.file_mismatches();
    timings.image_open = watch.take_lap();
    refuse_mismatches(&mismatches, wanted.force)?;
    keep_output_blocked(context, meta.held)?;
    let join = |record| FamilyLink::join_family(record, &image, context.journal);
    let family = wanted.family.map(join).transpose()?;
    let must_stay_paused = must_stay_paused(&meta, wanted);
    // A guest that does not run causes no page faults.
    let learns = wanted.learn && !must_stay_paused && family.is_none();
    let learning = LearnedBlocksFile::for_image(&image, wanted.mode).filter(|_| learns);
    let is_in_store = image.is_in_store();
    // The latency of a store is not that of the device that the cache is on.
    let runtime = context.vm.path().parent().filter(|_| !is_in_store);
    let storage =
        runtime.and_then(|runtime| ImageStorage::from_files(image.chain_paths(), runtime));
    let fill = choose_fill(wanted.fill.when, &image);
    if fill == BackgroundFill::AfterLearning {
        forget_cached_pages(&image);
    }
    let options = RestoreOptions {
        mode: wanted.mode,
        on_error: wanted.on_error,
        known_latency: storage.as_ref().and_then(ImageStorage::recorded_latency),
        found_late: meta.found_late,
        also_expected: learning
            .as_ref()
            .map(|learning| learning.request_expected_blocks(&image))
            .unwrap_or_default(),
        // Of pages that are loaded beside others, only a fault shows that the guest uses them.
        account_use: wanted.account_use || fill == BackgroundFill::AfterLearning,
        // The holder of a family's template fills it for all clones.
        fill: if family.is_some() { BackgroundFill::Off } else { fill },
        bandwidth: wanted.fill.bandwidth,
        is_in_store,
        since,
        ..RestoreOptions::default()
    };
    // libvirt chooses the program of its domain.
    let program = match wanted.libvirt {
        Some(_) => PathBuf::new(),
        None => choose_program(&meta, wanted.overrides)?,
    };
    let disks = (wanted.disks, wanted.disk_dir);
    let own = RestoredDisks::create_for_restore(
        (&meta, &program),
        context.vm.name().as_str(),
        disks,
        context.journal,
        held,
    )?;
    let meta = if origin.is_known() { meta } else { meta.without_directory() };
    let StartedQemu { child, args, early, notes } = match wanted.libvirt {
        Some(target) => create_domain(context, wanted, &meta, target, &own)?,
        None => {
            let started = (&meta, &image, &*program);
            start_qemu(context, started, &options, &own, family.as_ref())?
        }
    };
    firn_fault::pass_point("restore.spawned");
    timings.spawn = watch.take_lap();
    let files = kept_keys::files_to_keep(&image)?;
    let lives = Arc::new(AtomicBool::new(false));
    let child_ref = &child;
    let load = RestoreRun {
        context,
        wanted,
        image,
        meta,
        child: child_ref,
        options,
        learning,
        storage,
        notes,
        lives,
        family,
    };
    let loaded = load.load_vm(args, early, mismatches, (&mut watch, &mut timings), report);
    let (restoring, mut facts) = loaded?;
    facts["timings_ms"] = json!(timings);
    facts["overlays"] = json!(context.journal.current_journal().overlays);
    let restoring = Some(restoring);
    let hypervisor = child.keep_running()?;
    own.keep_files();
    let (standby, network, served) = (None, None, None);
    let guards = Vec::new();
    Ok(StartedVm { hypervisor, restoring, standby, network, served, facts, guards, files })
}

/// A QEMU that waits for the state of the VM.
struct StartedQemu {
    child: HypervisorChild,
    args: Vec<String>,
    /// The threads that fill its memory already.
    early: Option<PrefillThreads>,
    /// The changes to the command line.
    notes: Vec<String>,
}

/// Starts QEMU with the command line of the image, and begins to fill its memory.
fn start_qemu(
    context: &StartContext<'_>,
    (meta, image, program): (&ImageMeta, &Arc<Image>, &Path),
    options: &RestoreOptions,
    own: &RestoredDisks,
    family: Option<&FamilyLink>,
) -> Result<StartedQemu, Failure> {
    let plan = command_line::plan_command(&meta.qemu.user_args)
        .and_then(|plan| plan.with_program(program).with_drives(own.files()))
        .map_err(failure::command_line_failure)?;
    check_disk_kinds(&plan.disk_files(), &meta.qemu.directory)?;
    let (plan, notes) = avoid_used_endpoints(context, meta, plan, family.is_some())?;
    let (child, args, early) = launch_qemu(context, meta, image, options, &plan, family)?;
    Ok(StartedQemu { child, args, early, notes })
}

/// Has libvirt start QEMU, as a domain.
fn create_domain(
    context: &StartContext<'_>,
    wanted: &RestoreChoices<'_>,
    meta: &ImageMeta,
    target: &LibvirtTarget,
    own: &RestoredDisks,
) -> Result<StartedQemu, Failure> {
    let (files, overrides) = (own.files(), wanted.overrides);
    let created = domain_restore::create_domain(context.journal, meta, target, files, overrides)?;
    let CreatedDomain { domain, identity, handle, args, notes } = created;
    let child = HypervisorChild::of_domain(identity, Arc::new(handle), domain);
    Ok(StartedQemu { child, args, early: None, notes })
}

/// When memory is filled in the background, if it is. A user chooses that, or else the image's storage.
/// It is not in the journal: a successor chooses by the storage.
pub(crate) fn choose_fill(wanted: Option<BackgroundFill>, image: &Image) -> BackgroundFill {
    wanted.unwrap_or(match image.is_in_store() {
        true => BackgroundFill::WhenResponsive,
        false => BackgroundFill::AtOnce,
    })
}

/// Has the kernel forget what it has of the image in the page cache. A guest that waits for storage
/// runs code of its kernel that it does not need otherwise, so a restore that learns has to wait for
/// storage as later ones will.
fn forget_cached_pages(image: &Image) {
    for file in image.try_clone_files().into_iter().flatten() {
        // Less is learned if that fails.
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    }
}

/// Whether the VM is paused after the restore, as it was when it was saved.
fn must_stay_paused(meta: &ImageMeta, wanted: &RestoreChoices<'_>) -> bool {
    meta.paused.is_some() && !wanted.run
}

/// Refuses an image that was made although it can't be restored.
fn refuse_unrestorable(meta: &ImageMeta, force: bool) -> Result<(), Failure> {
    if meta.unrestorable.is_empty() || force {
        return Ok(());
    }
    let (kind, chain) = (FailureKind::Refused, meta.unrestorable.clone());
    let failure = Failure { kind, chain, hint: None };
    Err(failure
        .while_doing("the image was made with --accept-unrestorable")
        .with_hint("--force tries it anyway, at your own risk"))
}

/// Keeps output that was buffered at the save blocked until `firn release`, on whatever host the VM
/// continues.
fn keep_output_blocked(context: &StartContext<'_>, held: bool) -> Result<(), Failure> {
    let change = |journal: &mut Journal| {
        journal.shut = true;
        journal.record_success(format!("restored{OUTPUT_BLOCKED}"));
    };
    match held {
        true => context.journal.update(change).while_doing("writing the journal"),
        false => Ok(()),
    }
}

/// Checks whether applications of this VM can make guest calls, and which of them may.
fn check_calls(meta: &ImageMeta, policy: &Path) -> Result<(), Failure> {
    calls::read_policy(policy)?;
    let mut words = meta.qemu.user_args.iter();
    if words.any(|word| word.contains(command_line::CALLS_ID)) {
        return Ok(());
    }
    let text = "the VM of this image has no device for guest calls";
    let hint = "start a VM with one: `firn run --calls POLICY`";
    Err(Failure::new(FailureKind::Usage, text).with_hint(hint))
}

/// A restore into a QEMU that has been started, up to the guest's first instruction.
struct RestoreRun<'a> {
    context: &'a StartContext<'a>,
    wanted: &'a RestoreChoices<'a>,
    image: Arc<Image>,
    meta: ImageMeta,
    child: &'a HypervisorChild,
    options: RestoreOptions,
    learning: Option<LearnedBlocksFile>,
    storage: Option<ImageStorage>,
    /// The changes to the command line.
    notes: Vec<String>,
    /// The guest may run, and failures do not end it.
    lives: Arc<AtomicBool>,
    /// The template that the VM shares.
    family: Option<FamilyLink>,
}

impl RestoreRun<'_> {
    fn load_vm(
        self,
        args: Vec<String>,
        early: Option<PrefillThreads>,
        mut mismatches: Vec<HostMismatch>,
        (watch, timings): (&mut PhaseTimer, &mut RestoreTimings),
        report: &mut dyn FnMut(OperationProgress),
    ) -> Result<(RestoreTask, serde_json::Value), Failure> {
        let Self { context, wanted, child, .. } = self;
        let mut vm = child
            .connect_monitor(context.vm)
            .map_err(|failure| vm_start::with_output(failure, context.vm))?;
        timings.qmp = watch.take_lap();
        let differs = self.meta.qemu_mismatch(&vm.version().to_string());
        refuse_mismatches(differs.as_slice(), wanted.force)?;
        mismatches.extend(differs);
        let explain = |failure| child.explain_failure(failure, context.vm);
        let (hypervisor_record, memory) = self.record_hypervisor(args, &mut vm).map_err(explain)?;
        let process = Arc::clone(&memory.process);
        let prefilled = early.map(PrefillThreads::finish_fill).unwrap_or_default();
        if memory.guest.has_huge_pages() {
            let loading = (&mut vm, hypervisor_record, memory, mismatches);
            let reason = "the VM's RAM is in huge pages".to_owned();
            return self
                .load_vm_eagerly(loading, reason, (watch, timings), report)
                .map_err(explain);
        }
        let attached = self.attach_page_faults(&process, &memory.guest, &hypervisor_record.vcpus);
        let faults = match attached {
            Ok(faults) => faults,
            Err(failure)
                if failure.kind == FailureKind::Host
                    && wanted.mode == RestoreMode::Eager
                    && self.family.is_none() =>
            {
                let loading = (&mut vm, hypervisor_record, memory, mismatches);
                let reason = format!("without userfaultfd ({failure})");
                return self
                    .load_vm_eagerly(loading, reason, (watch, timings), report)
                    .map_err(explain);
            }
            Err(failure) => return Err(explain(failure.with_hint(NEEDS_NO_USERFAULTFD))),
        };
        let restore = self
            .begin_page_server(memory, faults, &prefilled, &hypervisor_record)
            .map_err(explain)?;
        timings.attach = watch.take_lap();
        let why = |failure| self.explain_failure(&restore, failure);
        self.load_devices(&mut vm, &process).map_err(why)?;
        timings.device_state = watch.take_lap();
        prefill_memory(&restore, report).map_err(why)?;
        timings.prefill = watch.take_lap();
        self.mark_started()?;
        self.lives.store(wanted.on_error == ReadFailurePolicy::Stop, Ordering::Release);
        restore.guest_may_run();
        // An earlier failure still ends the VM: the guest has not run.
        restore.wait_timeout(Duration::ZERO).map_err(|error| why(restore_failure(&error)))?;
        self.start_vcpus(&mut vm).map_err(why)?;
        restore.record_resume();
        self.record_start_time((watch, timings));
        let mut notes = [self.notes.clone(), mismatch_warnings(&mismatches)].concat();
        notes.extend(domain_restore::finish_domain(context.journal)?);
        let facts = self.restore_facts(&hypervisor_record, notes);
        let (hypervisor, journal) = (Arc::clone(child.process_handle()?), context.clone_journal());
        let (vcpus, run_record) = (hypervisor_record.vcpus, context.vm.run_record());
        let (learning, storage, map) = (self.learning, self.storage, hypervisor_record.map);
        let image = wanted.image.to_owned();
        let pauser = OutagePauser::new(Arc::clone(&journal), Arc::clone(&hypervisor));
        let work = RestoreWork {
            restore,
            process,
            vcpus,
            journal,
            hypervisor,
            run_record,
            learning,
            storage,
            image,
            map,
            pauser,
        };
        Ok((work.into_task(), facts))
    }

    /// Restores eagerly, for this reason, without userfaultfd: all memory is written before the vCPUs
    /// run.
    fn load_vm_eagerly(
        &self,
        (vm, hypervisor_record, memory, mismatches): (
            &mut QemuVm,
            HypervisorRecord,
            VmMemory,
            Vec<HostMismatch>,
        ),
        reason: String,
        (watch, timings): (&mut PhaseTimer, &mut RestoreTimings),
        report: &mut dyn FnMut(OperationProgress),
    ) -> Result<(RestoreTask, serde_json::Value), Failure> {
        tracing::warn!("an eager restore: {reason}");
        timings.attach = watch.take_lap();
        fill_memory(&self.image, &memory.guest, &self.options, report)?;
        timings.prefill = watch.take_lap();
        self.load_devices(vm, &memory.process)?;
        timings.device_state = watch.take_lap();
        self.mark_started()?;
        self.start_vcpus(vm)?;
        self.record_start_time((watch, timings));
        let mut notes = mismatch_warnings(&mismatches);
        notes.extend(domain_restore::finish_domain(self.context.journal)?);
        notes.push(format!("{reason}: memory was restored before the VM started"));
        let journal_file = self.context.clone_journal();
        let finish = move |_: &dyn Fn(OperationProgress)| {
            update_journal(&journal_file, |journal| journal.phase = VmPhase::Running)?;
            Ok(json!({ "restored": RunCounts::default() }))
        };
        Ok((Box::new(finish), self.restore_facts(&hypervisor_record, notes)))
    }

    /// Records that a successor is to keep the VM, from here on.
    fn mark_started(&self) -> Result<(), Failure> {
        firn_fault::pass_point("restore.device-state");
        update_journal(self.context.journal, |journal| {
            set_started(journal);
            journal.frozen = self.meta.frozen;
        })
    }

    fn start_vcpus(&self, vm: &mut QemuVm) -> Result<(), Failure> {
        if must_stay_paused(&self.meta, self.wanted) {
            return Ok(());
        }
        match &self.child.domain {
            Some(domain) => restored_domain::resume_domain(&domain.address)?,
            None => {
                vm.cont().while_doing("starting the vCPUs")?;
                self.repair_guest();
            }
        }
        self.probe_connections(vm);
        Ok(())
    }

    /// Has the guest find out which connections it has lost. They end later if this fails.
    fn probe_connections(&self, vm: &mut QemuVm) {
        if let Err(error) = vm.probe_connections(&self.meta.connections) {
            tracing::warn!("the guest's connections to the outside were not ended: {error}");
        }
    }

    /// Has a guest that was saved frozen thawed, and then its clock set, unless the VM is to be the one
    /// that was saved in each respect.
    fn repair_guest(&self) {
        let pid = self.child.identity.pid;
        let thaw = guest_freeze::thaw_in_background(&self.context.clone_journal(), pid);
        if !self.wanted.overrides.same_identity {
            guest_clock::set_in_background(pid, thaw);
        }
    }

    fn record_start_time(&self, (watch, timings): (&mut PhaseTimer, &mut RestoreTimings)) {
        timings.cont = watch.take_lap();
        timings.total = to_milliseconds(watch.since.elapsed());
        firn_fault::pass_point("restore.resumed");
    }

    fn restore_facts(
        &self,
        hypervisor_record: &HypervisorRecord,
        notes: Vec<String>,
    ) -> serde_json::Value {
        let mut facts = vm_start::start_facts(hypervisor_record, &notes);
        facts["mode"] = json!(self.wanted.mode);
        facts["fill"] = json!(choose_fill(self.wanted.fill.when, &self.image));
        facts["bandwidth"] = json!(self.wanted.fill.bandwidth);
        facts["image"] = json!(self.wanted.image);
        facts["domain"] = json!(self.child.domain.as_ref().map(|it| &it.address.domain));
        let is_paused = must_stay_paused(&self.meta, self.wanted);
        facts["paused"] = json!(self.meta.paused.as_ref().filter(|_| is_paused));
        facts
    }

    /// Examines the QEMU and records it in the journal, so that a successor finds it from here on.
    fn record_hypervisor(
        &self,
        args: Vec<String>,
        vm: &mut QemuVm,
    ) -> Result<(HypervisorRecord, VmMemory), Failure> {
        let known = known_hypervisor(self.context, &self.meta, self.child, args);
        let layout = match self.child.domain {
            Some(_) => {
                let layout = qemu::find_layout(vm, &known.user_args)?;
                domain_restore::check_firmware(&layout.aux, &self.image)?;
                layout
            }
            None => vm.layout().while_doing("finding the guest's memory")?,
        };
        let name = self.context.vm.name().as_str();
        let hypervisor_record = qemu::describe_hypervisor(vm, known, &layout, name)?;
        update_journal(self.context.journal, |journal| {
            journal.hypervisor_record = Some(hypervisor_record.clone());
            journal.phase = self.restoring_phase();
        })?;
        firn_fault::pass_point("restore.journaled");
        self.map_template(vm, &hypervisor_record)?;
        let memory = qemu::open_memory(hypervisor_record.process.pid, &layout)?;
        Ok((hypervisor_record, memory))
    }

    /// Maps the template of a clone's family over its RAM, which its guest has not used.
    fn map_template(&self, vm: &mut QemuVm, record: &HypervisorRecord) -> Result<(), Failure> {
        let Some(family) = &self.family else { return Ok(()) };
        refuse_balloon(vm)?;
        let process = Process::open(record.process.pid)
            .while_doing_as(FailureKind::Host, "opening the hypervisor process")?;
        let locations = qemu::locate_regions(record.map.regions(), &record.locations);
        family.map_over_ram(&process, &locations, &record.vcpus)?;
        self.child.empty_ram_files().while_doing("emptying the VM's own memory")
    }

    fn attach_page_faults(
        &self,
        process: &Process,
        memory: &Arc<GuestMemory>,
        vcpus: &[ThreadId],
    ) -> Result<PageFaults, Failure> {
        let (mut tracee, mut faults) = attach_page_faults(process, memory, vcpus)?;
        if let Some(family) = &self.family {
            family.share_memory(&mut faults, memory, &mut tracee)?;
        }
        Ok(faults)
    }

    fn restoring_phase(&self) -> VmPhase {
        VmPhase::Restoring {
            image: self.wanted.image.to_owned(),
            ids: ImageIds::from_image(&self.image),
            mode: self.wanted.mode,
            started: false,
            must_stay_paused: must_stay_paused(&self.meta, self.wanted),
            on_error: self.wanted.on_error,
            fill: self.wanted.fill,
            paused_by_us: false,
        }
    }

    /// Starts the page server, which answers page faults from here on.
    fn begin_page_server(
        &self,
        memory: VmMemory,
        faults: PageFaults,
        prefilled: &PrefilledMemory,
        hypervisor_record: &HypervisorRecord,
    ) -> Result<RunningRestore, Failure> {
        let Self { context, child, .. } = self;
        let options =
            RestoreOptions { vcpus: numbered_vcpus(hypervisor_record), ..self.options.clone() };
        let pages = memory.guest.region_map().total_pages();
        let presence = PresenceFile::create(&context.vm.presence_file(), pages)
            .while_doing("making the presence file")?;
        firn_fault::pass_point("restore.attached");
        let lives = Arc::clone(&self.lives);
        let on_fatal = fatal_error_handler(context.clone_journal(), child.process_handle()?, lives);
        let (image, guest) = (Arc::clone(&self.image), memory.guest);
        RunningRestore::begin_prefilled(
            image, guest, faults, options, presence, prefilled, on_fatal,
        )
        .map_err(|error| restore_failure(&error))
    }

    fn load_devices(&self, vm: &mut QemuVm, process: &Process) -> Result<(), Failure> {
        let state = self.image.device_state();
        let loaded = match self.child.domain {
            Some(_) => vm.load_device_state_of(&self.meta.machine, state),
            None => vm.load_device_state(state),
        };
        loaded
            .while_doing("loading the VM's devices")
            .map_err(|failure| vm_start::with_output(failure, self.context.vm))?;
        auxiliary::write_image_aux(vm, process, &self.image)
    }

    /// Explains why a step failed. If memory can't be restored, everything else fails, and QEMU
    /// ends.
    fn explain_failure(&self, restore: &RunningRestore, failure: Failure) -> Failure {
        match restore.wait_timeout(Duration::ZERO) {
            Err(error) if !error.is_hypervisor_gone() => restore_failure(&error),
            _ => self.child.explain_failure(failure, self.context.vm),
        }
    }
}

pub(crate) fn restore_failure(error: &RestoreError) -> Failure {
    let kind = match error {
        error if error.is_hypervisor_gone() => FailureKind::Ended,
        RestoreError::Image(error) => image_failure(error).kind,
        RestoreError::Block(_) | RestoreError::NoEntry { .. } => FailureKind::Damaged,
        RestoreError::Regions { .. } => FailureKind::Refused,
        _ => FailureKind::Other,
    };
    Failure::from_error(kind, error).while_doing(RESTORING)
}

pub(crate) fn open_image(path: &Path) -> Result<(Arc<Image>, ImageMeta), Failure> {
    let opening = format!("opening {}", path.display());
    let image = Image::open(path).map_err(|error| image_failure(&error).while_doing(&*opening))?;
    with_meta(image)
}

pub(crate) fn with_meta(image: Image) -> Result<(Arc<Image>, ImageMeta), Failure> {
    let meta: ImageMeta = serde_json::from_value(image.meta().clone())
        .while_doing_as(FailureKind::Damaged, "reading the image's description of its VM")?;
    match meta.version {
        meta::VERSION..=meta::VERSION_FROZEN => Ok((Arc::new(image), meta)),
        other => {
            let text = format!(
                "the image describes its VM in version {other}, not {}",
                meta::VERSION_FROZEN
            );
            Err(Failure::new(FailureKind::Refused, text).with_hint("use the Firn that wrote it"))
        }
    }
}

pub(crate) fn refuse_mismatches(mismatches: &[HostMismatch], force: bool) -> Result<(), Failure> {
    if mismatches.is_empty() || force {
        return Ok(());
    }
    let chain = mismatches.iter().map(ToString::to_string).collect();
    let failure = Failure { kind: FailureKind::Refused, chain, hint: None };
    Err(failure
        .while_doing("the restored guest would find another QEMU or other disks than it had")
        .with_hint("provide what is named here, or continue at your own risk with --force"))
}

fn mismatch_warnings(mismatches: &[HostMismatch]) -> Vec<String> {
    mismatches.iter().map(|mismatch| format!("forced: {mismatch}")).collect()
}

/// The program that the image names, if it may be started; or the one that the user names.
fn choose_program(meta: &ImageMeta, overrides: &CommandOverrides) -> Result<PathBuf, Failure> {
    let name = meta.qemu.user_args.first().map_or("", String::as_str);
    match overrides.program {
        Some(_) => programs::chosen_program(name, &meta.qemu.directory),
        None => programs::allowed_program(name, &meta.qemu.directory),
    }
}

/// Changes endpoints that another process uses: a VM with the same command line may run here.
fn avoid_used_endpoints(
    context: &StartContext<'_>,
    meta: &ImageMeta,
    plan: CommandPlan,
    is_clone: bool,
) -> Result<(CommandPlan, Vec<String>), Failure> {
    let of_cards = plan.network_endpoints();
    let holder = |endpoint: &HostEndpoint| match is_clone && !of_cards.contains(endpoint) {
        true => Some("the other clones".to_owned()),
        false => endpoints::endpoint_holder(endpoint, &meta.qemu.directory),
    };
    let beside = EndpointRelocation { directory: context.vm.path(), holder: &holder };
    plan.relocate_endpoints(&beside).map_err(|error| {
        let failure = Failure::from_error(FailureKind::Busy, &error);
        failure.with_hint("--netdev ID=user,hostfwd=... gives the restored VM other ports")
    })
}

/// Starts QEMU in its former working directory, if that still exists, and begins to fill its
/// memory.
fn launch_qemu(
    context: &StartContext<'_>,
    meta: &ImageMeta,
    image: &Arc<Image>,
    options: &RestoreOptions,
    plan: &CommandPlan,
    family: Option<&FamilyLink>,
) -> Result<(HypervisorChild, Vec<String>, Option<PrefillThreads>), Failure> {
    let ram = vm_start::create_ram_files(plan.ram()).while_doing("making the VM's memory")?;
    let sockets = CardSockets::create_pairs(plan.cards(), &meta.qemu.directory, context.vm)?;
    let paths = vm_start::qemu_paths(context, &ram, &sockets);
    let augmented = plan.for_restore(&paths).map_err(failure::command_line_failure)?;
    vm_start::enter_directory(&meta.qemu.directory);
    let prefill = match family {
        None => start_prefill(image, options, plan.ram(), &ram),
        Some(_) => check_regions(image, plan.ram()).map(|()| None)?,
    };
    let template = family.map(FamilyLink::files).unwrap_or_default();
    let child = vm_start::launch_qemu(context.vm, &augmented, (ram, template), &sockets)?;
    Ok((child, augmented.args, prefill))
}

/// Starts to prefill RAM. `None` where the files are not those of the image: the restore will be
/// refused, with the reason. Also `None` if the use of pages is counted, because the use of pages
/// that are present from the start can't be seen.
fn start_prefill(
    image: &Arc<Image>,
    options: &RestoreOptions,
    plans: &[RamPlan],
    ram: &[File],
) -> Option<PrefillThreads> {
    if options.account_use || !has_regions(image, plans) {
        return None;
    }
    let files = ram.iter().map(File::try_clone).collect::<Result<_, _>>().ok()?;
    Some(PrefillThreads::start_fill(Arc::clone(image), options, files))
}

/// Whether the RAM of a command line is that of the image.
fn has_regions(image: &Image, plans: &[RamPlan]) -> bool {
    let regions = image.regions().regions();
    let is_same = |(region, plan): (&RamRegion, &RamPlan)| {
        region.id == plan.id && region.byte_len() == plan.bytes.next_multiple_of(PAGE_SIZE as u64)
    };
    regions.len() == plans.len() && regions.iter().zip(plans).all(is_same)
}

/// Refuses a clone with other RAM than the image has.
fn check_regions(image: &Image, plans: &[RamPlan]) -> Result<(), Failure> {
    if has_regions(image, plans) {
        return Ok(());
    }
    let text = "the command line has other RAM than the image, so clones can't share the image's";
    Err(Failure::new(FailureKind::Refused, text))
}

/// Refuses a clone with a balloon: memory that its guest gives back would become the template's
/// again, in place of zeros.
fn refuse_balloon(vm: &mut QemuVm) -> Result<(), Failure> {
    match vm.balloon().while_doing("querying the VM's balloon")? {
        None => Ok(()),
        Some(_) => Err(Failure::new(
            FailureKind::Refused,
            "a VM with a balloon can't share memory with its clones",
        )
        .with_hint("restore it without --count")),
    }
}

/// What is known of a QEMU that was started with `args`. A domain belongs to libvirt: its command
/// line for another restore is its own without what libvirt adds.
fn known_hypervisor(
    context: &StartContext<'_>,
    meta: &ImageMeta,
    child: &HypervisorChild,
    args: Vec<String>,
) -> KnownHypervisor {
    let qmp = child.monitor_address(context.vm);
    let is_launched = child.domain.is_none();
    let user_args = match is_launched {
        true => meta.qemu.user_args.clone(),
        false => qemu::restorable_command(&qmp, child.identity.pid, &args).args,
    };
    KnownHypervisor {
        process: child.identity.clone(),
        qmp,
        launched: is_launched,
        user_args,
        args,
        directory: meta.qemu.directory.clone(),
        drives: if is_launched { meta.drives.clone() } else { Vec::new() },
        cards: child.cards.clone(),
        // No image has served disks.
        served: Vec::new(),
    }
}

pub(crate) fn numbered_vcpus(hypervisor_record: &HypervisorRecord) -> Vec<(ThreadId, VcpuId)> {
    hypervisor_record.vcpus.iter().zip(0..).map(|(&tid, id)| (tid, VcpuId(id))).collect()
}

fn attach_page_faults<'p>(
    process: &'p Process,
    memory: &Arc<GuestMemory>,
    vcpus: &[ThreadId],
) -> Result<(Tracee<'p>, PageFaults), Failure> {
    const ATTACHING: &str = "attaching to QEMU";
    firn_fault::pass_io_point("restore.userfaultfd")
        .while_doing_as(FailureKind::Host, ATTACHING)?;
    let mut tracee = Tracee::seize(process, vcpus).while_doing_as(FailureKind::Host, ATTACHING)?;
    let faults = PageFaults::create(&mut tracee, Arc::clone(memory), TraceMode::Restore)
        .while_doing_as(FailureKind::Host, ATTACHING)
        .map_err(|failure| failure.with_hint("`firn doctor` lists what this host and user lack"))?;
    Ok((tracee, faults))
}

/// What to do when a page can't be restored, because QEMU would wait for it for ever. A VM that has
/// not run, or that such a failure is to end, is ended, and the reason is recorded. If the VM
/// `lives`, the supervisor exits instead, and its successor tries again.
pub(crate) fn fatal_error_handler(
    journal: Arc<JournalFile>,
    hypervisor: &Arc<ProcessHandle>,
    lives: Arc<AtomicBool>,
) -> OnFatal {
    let hypervisor = Arc::clone(hypervisor);
    Box::new(move |error| {
        if error.is_hypervisor_gone() || lives.load(Ordering::Acquire) {
            return;
        }
        let failure = restore_failure(error);
        tracing::error!("{failure}");
        let _ = journal.update(|journal| journal.record_end_reason(failure));
        let _ = hypervisor.send_kill();
    })
}

/// Writes the auxiliary blocks that are not in the device state. QEMU has mapped all of them only
/// now.
pub(crate) fn write_aux_blocks(
    vm: &mut QemuVm,
    process: &Process,
    blocks: &[AuxBlock],
) -> Result<(), Failure> {
    if blocks.is_empty() {
        return Ok(());
    }
    let locations = vm.layout().while_doing("finding video memory")?.aux;
    for block in blocks {
        let location = locations
            .iter()
            .find(|context| context.id == block.id && context.bytes == block.bytes.len() as u64);
        let Some(hva) = location.and_then(|context| context.hva) else {
            let text = format!("QEMU has no block of {} bytes for {}", block.bytes.len(), block.id);
            return Err(Failure::new(FailureKind::Other, text));
        };
        process_memory::write_memory(process, hva, &block.bytes)
            .while_doing(format!("writing {}", block.id))?;
    }
    Ok(())
}

/// Installs the memory that has to be present before the guest runs, and reports progress.
fn prefill_memory(
    restore: &RunningRestore,
    report: &mut dyn FnMut(OperationProgress),
) -> Result<(), Failure> {
    let is_over = AtomicBool::new(false);
    let filled = thread::scope(|scope| {
        let filling = scope.spawn(|| {
            let filled = restore.await_prefill();
            is_over.store(true, Ordering::Release);
            filled
        });
        let mut reported_at = Instant::now();
        while !is_over.load(Ordering::Acquire) && !filling.is_finished() {
            thread::park_timeout(Duration::from_millis(1));
            if reported_at.elapsed() >= PROGRESS_INTERVAL {
                reported_at = Instant::now();
                report(restore_progress(restore, None));
            }
        }
        filling.join()
    });
    match filled {
        Ok(filled) => filled.map_err(|error| restore_failure(&error)),
        Err(_) => {
            Err(Failure::new(FailureKind::Other, "a bug in Firn ended the restore of memory"))
        }
    }
}

/// Writes all memory before the vCPUs run, and reports progress.
fn fill_memory(
    image: &Arc<Image>,
    memory: &GuestMemory,
    options: &RestoreOptions,
    report: &mut dyn FnMut(OperationProgress),
) -> Result<(), Failure> {
    let (done, total) = (AtomicU64::new(0), AtomicU64::new(0));
    let note = |written: u64, all: u64| {
        done.fetch_max(written, Ordering::Relaxed);
        total.store(all, Ordering::Relaxed);
    };
    let filled = thread::scope(|scope| {
        let filling = scope.spawn(|| firn_restore::fill_all(image, memory, options, &note));
        while !filling.is_finished() {
            thread::park_timeout(PROGRESS_INTERVAL);
            let (done, total) = (done.load(Ordering::Relaxed), total.load(Ordering::Relaxed));
            report(OperationProgress::new("restoring", done, total));
        }
        filling.join()
    });
    match filled {
        Ok(filled) => filled.map_err(|error| restore_failure(&error)),
        Err(_) => {
            Err(Failure::new(FailureKind::Other, "a bug in Firn ended the restore of memory"))
        }
    }
}

fn set_started(journal: &mut Journal) {
    if let VmPhase::Restoring { started, .. } = &mut journal.phase {
        *started = true;
    }
}

pub(crate) fn update_journal(
    file: &JournalFile,
    change: impl FnOnce(&mut Journal),
) -> Result<(), Failure> {
    file.update(change).while_doing("writing the journal")
}
