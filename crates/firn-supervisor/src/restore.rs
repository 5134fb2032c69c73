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

use firn_image::{AuxBlock, Image};
use firn_memory::{GuestMemory, PageFaults, Process, Trace, Tracee, process_memory};
use firn_restore::{
    Mode, OnError, OnFatal, Prefill, Prefilled, Presence, Restore, RestoreError, RestoreOptions,
    RunCounts,
};
use firn_types::{PAGE_SIZE, RamRegion, Tid, VcpuId};
use firn_vmm::command_line::{self, Beside, Endpoint, Overrides, Plan, RamPlan};
use firn_vmm::{FileIdentity as DiskIdentity, Layout, Vm};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::auxiliary;
use crate::calls;
use crate::disk_layers::Held;
use crate::disks::Own;
use crate::endpoints;
use crate::failure::{Context, Failure, FailureKind, image_failure};
use crate::identity::ProcessHandle;
use crate::journal::{Journal, JournalFile, Machine, Phase};
use crate::keep::Restoring;
use crate::learned::Learning;
use crate::meta::{self, Meta, Mismatch};
use crate::network::{HELD, Sockets};
use crate::outage::Pauser;
use crate::programs;
use crate::protocol::{Progress, RestoreDisks};
use crate::qemu::{self, Known, Memory};
use crate::serving::{PROGRESS_EVERY, Work, progress};
use crate::start::{self, Child, Place, Started};
use crate::storage::Storage;

/// What a failure to restore memory was doing.
pub(crate) const RESTORING: &str = "restoring memory";

/// A hint for hosts on which page faults cannot be handled.
const NEEDS_NO_USERFAULTFD: &str = "`firn restore --mode eager` needs no userfaultfd; `firn doctor` names what is missing for the other modes";

/// The choices of `firn restore`.
pub(crate) struct Wanted<'a> {
    pub(crate) image: &'a Path,
    pub(crate) mode: Mode,
    /// What happens to the VM when its memory can't be read.
    pub(crate) on_error: OnError,
    /// Continue when QEMU's version or a disk differs.
    pub(crate) force: bool,
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
    pub(crate) overrides: &'a Overrides,
}

/// The duration of each step of a restore, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timings {
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
struct Watch {
    since: Instant,
    lap: Instant,
}

impl Watch {
    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let lap = now - std::mem::replace(&mut self.lap, now);
        milliseconds(lap)
    }
}

fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// Restores a VM: `firn restore`.
pub(crate) fn restore(
    place: &Place<'_>,
    wanted: &Wanted<'_>,
    since: Instant,
    tell: &mut dyn FnMut(Progress),
) -> Result<Started, Failure> {
    let mut watch = Watch { since, lap: Instant::now() };
    let mut timings = Timings::default();
    let (image, meta) = open(wanted.image)?;
    refuse_unrestorable(&meta, wanted.force)?;
    let meta = meta.with_overrides(wanted.overrides)?;
    let program = program(&meta, wanted.overrides)?;
    let held = Held::lock(&meta)?;
    let meta = held.resolve(meta);
    wanted.calls.map(|policy| check_calls(&meta, policy)).transpose()?;
    place.stores.map(|_| start::check_stores(&meta)).transpose()?;
    let mismatches = meta.file_mismatches();
    timings.image_open = watch.lap();
    refuse(&mismatches, wanted.force)?;
    keep_held(place, meta.held)?;
    let stays_paused = stays_paused(&meta, wanted);
    // A guest that does not run causes no page faults.
    let learns = wanted.learn && !stays_paused;
    let learning = Learning::about(&image, wanted.mode).filter(|_| learns);
    let storage = place.vm.path().parent().and_then(|runtime| Storage::of(image.chain(), runtime));
    let options = RestoreOptions {
        mode: wanted.mode,
        on_error: wanted.on_error,
        way: storage.as_ref().and_then(Storage::way),
        found_late: meta.found_late,
        also_expected: learning.as_ref().map(Learning::expected).unwrap_or_default(),
        account_use: wanted.account_use,
        since,
        ..RestoreOptions::default()
    };
    let disks = (wanted.disks, wanted.disk_dir);
    let own = Own::make(&meta, place.vm.name().as_str(), disks, place.journal, held)?;
    let plan = command_line::plan(&meta.qemu.user_args)
        .and_then(|plan| plan.with_program(&program).with_drives(own.files()))
        .map_err(start::refused)?;
    let (plan, notes) = beside(place, &meta, plan)?;
    let (child, args, early) = launch(place, &meta, &image, &options, &plan)?;
    firn_fault::point("restore.spawned");
    timings.spawn = watch.lap();
    let files = image.try_clone_files().map_err(|error| image_failure(&error))?;
    let lives = Arc::new(AtomicBool::new(false));
    let child_ref = &child;
    let load = Load {
        place,
        wanted,
        image,
        meta,
        child: child_ref,
        options,
        learning,
        storage,
        notes,
        lives,
    };
    let loaded = load.run(args, early, mismatches, (&mut watch, &mut timings), tell);
    let (restoring, mut facts) = loaded?;
    facts["timings_ms"] = json!(timings);
    facts["overlays"] = json!(place.journal.read().overlays);
    let restoring = Some(restoring);
    let hypervisor = child.keep()?;
    own.keep();
    let (standby, network, served) = (None, None, None);
    let guards = Vec::new();
    Ok(Started { hypervisor, restoring, standby, network, served, facts, guards, files })
}

/// Whether the VM is paused after the restore, as it was when it was saved.
fn stays_paused(meta: &Meta, wanted: &Wanted<'_>) -> bool {
    meta.paused.is_some() && !wanted.run
}

/// Refuses an image that was made although it can't be restored.
fn refuse_unrestorable(meta: &Meta, force: bool) -> Result<(), Failure> {
    if meta.unrestorable.is_empty() || force {
        return Ok(());
    }
    let (kind, chain) = (FailureKind::Refused, meta.unrestorable.clone());
    let failure = Failure { kind, chain, hint: None };
    Err(failure
        .while_doing("the image was made with --accept-unrestorable")
        .hint("--force tries it anyway, at your own risk"))
}

/// Keeps output that was buffered at the save blocked until `firn release`, on whatever host the VM
/// continues.
fn keep_held(place: &Place<'_>, held: bool) -> Result<(), Failure> {
    let change = |journal: &mut Journal| {
        journal.shut = true;
        journal.note_success(format!("restored{HELD}"));
    };
    match held {
        true => place.journal.update(change).doing("writing the journal"),
        false => Ok(()),
    }
}

/// Checks whether applications of this VM can make guest calls, and which of them may.
fn check_calls(meta: &Meta, policy: &Path) -> Result<(), Failure> {
    calls::policy(policy)?;
    let mut words = meta.qemu.user_args.iter();
    if words.any(|word| word.contains(command_line::CALLS_ID)) {
        return Ok(());
    }
    let text = "the VM of this image has no device for guest calls";
    let hint = "start a VM with one: `firn run --calls POLICY`";
    Err(Failure::new(FailureKind::Usage, text).hint(hint))
}

/// A restore into a QEMU that has been started, up to the guest's first instruction.
struct Load<'a> {
    place: &'a Place<'a>,
    wanted: &'a Wanted<'a>,
    image: Arc<Image>,
    meta: Meta,
    child: &'a Child,
    options: RestoreOptions,
    learning: Option<Learning>,
    storage: Option<Storage>,
    /// The changes to the command line.
    notes: Vec<String>,
    /// The guest may run, and failures do not end it.
    lives: Arc<AtomicBool>,
}

impl Load<'_> {
    fn run(
        self,
        args: Vec<String>,
        early: Option<Prefill>,
        mut mismatches: Vec<Mismatch>,
        (watch, timings): (&mut Watch, &mut Timings),
        tell: &mut dyn FnMut(Progress),
    ) -> Result<(Restoring, serde_json::Value), Failure> {
        let Self { place, wanted, child, .. } = self;
        let mut vm =
            child.connect(place.vm).map_err(|failure| start::with_output(failure, place.vm))?;
        timings.qmp = watch.lap();
        let differs = self.meta.qemu_mismatch(&vm.version().to_string());
        refuse(differs.as_slice(), wanted.force)?;
        mismatches.extend(differs);
        let explain = |failure| child.explain(failure, place.vm);
        let (machine, memory) = self.get_to_know(args, &mut vm).map_err(explain)?;
        let process = Arc::clone(&memory.process);
        let prefilled = early.map(Prefill::finish).unwrap_or_default();
        let faults = match attach(&process, &memory.guest, &machine.vcpus) {
            Ok(faults) => faults,
            Err(failure) if failure.kind == FailureKind::Host && wanted.mode == Mode::Eager => {
                let loading = (&mut vm, machine, memory, mismatches);
                return self.run_filled(loading, &failure, (watch, timings), tell).map_err(explain);
            }
            Err(failure) => return Err(explain(failure.hint(NEEDS_NO_USERFAULTFD))),
        };
        let restore = self.begin(memory, faults, &prefilled, &machine).map_err(explain)?;
        timings.attach = watch.lap();
        let why = |failure| self.why(&restore, failure);
        self.devices(&mut vm, &process).map_err(why)?;
        timings.device_state = watch.lap();
        prefill(&restore, tell).map_err(why)?;
        timings.prefill = watch.lap();
        self.mark_started()?;
        self.lives.store(wanted.on_error == OnError::Stop, Ordering::Release);
        restore.guest_may_run();
        // An earlier failure still ends the VM: the guest has not run.
        restore.wait_timeout(Duration::ZERO).map_err(|error| restore_failure(&error))?;
        self.start_vcpus(&mut vm).map_err(why)?;
        restore.resumed();
        self.note_start((watch, timings));
        let notes = [self.notes.clone(), warnings(&mismatches)].concat();
        let facts = self.facts(&machine, notes);
        let (hypervisor, journal) = (Arc::clone(child.handle()?), place.journal_handle());
        let (vcpus, run_record) = (machine.vcpus, place.vm.run_record());
        let (learning, storage, map) = (self.learning, self.storage, machine.map);
        let image = wanted.image.to_owned();
        let pauser = Pauser::new(Arc::clone(&journal), Arc::clone(&hypervisor));
        let work = Work {
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
        Ok((work.boxed(), facts))
    }

    /// Restores eagerly without userfaultfd: all memory is written before the vCPUs run.
    fn run_filled(
        &self,
        (vm, machine, memory, mismatches): (&mut Vm, Machine, Memory, Vec<Mismatch>),
        reason: &Failure,
        (watch, timings): (&mut Watch, &mut Timings),
        tell: &mut dyn FnMut(Progress),
    ) -> Result<(Restoring, serde_json::Value), Failure> {
        tracing::warn!("an eager restore without userfaultfd: {reason}");
        timings.attach = watch.lap();
        fill(&self.image, &memory.guest, &self.options, tell)?;
        timings.prefill = watch.lap();
        self.devices(vm, &memory.process)?;
        timings.device_state = watch.lap();
        self.mark_started()?;
        self.start_vcpus(vm)?;
        self.note_start((watch, timings));
        let mut notes = warnings(&mismatches);
        notes.push(format!(
            "without userfaultfd ({reason}): memory was restored before the VM started"
        ));
        let journal_file = self.place.journal_handle();
        let finish = move |_: &dyn Fn(Progress)| {
            journal(&journal_file, |journal| journal.phase = Phase::Running)?;
            Ok(json!({ "restored": RunCounts::default() }))
        };
        Ok((Box::new(finish), self.facts(&machine, notes)))
    }

    /// Records that a successor is to keep the VM, from here on.
    fn mark_started(&self) -> Result<(), Failure> {
        firn_fault::point("restore.device-state");
        journal(self.place.journal, started)
    }

    fn start_vcpus(&self, vm: &mut Vm) -> Result<(), Failure> {
        match stays_paused(&self.meta, self.wanted) {
            true => Ok(()),
            false => vm.cont().doing("starting the vCPUs"),
        }
    }

    fn note_start(&self, (watch, timings): (&mut Watch, &mut Timings)) {
        timings.cont = watch.lap();
        timings.total = milliseconds(watch.since.elapsed());
        firn_fault::point("restore.resumed");
    }

    fn facts(&self, machine: &Machine, notes: Vec<String>) -> serde_json::Value {
        let mut facts = start::facts(machine, &notes);
        facts["mode"] = json!(self.wanted.mode);
        facts["image"] = json!(self.wanted.image);
        let is_paused = stays_paused(&self.meta, self.wanted);
        facts["paused"] = json!(self.meta.paused.as_ref().filter(|_| is_paused));
        facts
    }

    /// Examines the QEMU and records it in the journal, so that a successor finds it from here on.
    fn get_to_know(&self, args: Vec<String>, vm: &mut Vm) -> Result<(Machine, Memory), Failure> {
        let layout = vm.layout().doing("finding the guest's memory")?;
        let machine = describe(self.place, &self.meta, self.child, args, vm, &layout)?;
        journal(self.place.journal, |journal| {
            journal.machine = Some(machine.clone());
            journal.phase = self.phase();
        })?;
        firn_fault::point("restore.journaled");
        let memory = qemu::open_memory(machine.process.pid, &layout)?;
        Ok((machine, memory))
    }

    fn phase(&self) -> Phase {
        Phase::Restoring {
            image: self.wanted.image.to_owned(),
            identity: self.image.identity(),
            mode: self.wanted.mode,
            started: false,
            stays_paused: stays_paused(&self.meta, self.wanted),
            on_error: self.wanted.on_error,
            paused_by_us: false,
        }
    }

    /// Starts the page server, which answers page faults from here on.
    fn begin(
        &self,
        memory: Memory,
        faults: PageFaults,
        prefilled: &Prefilled,
        machine: &Machine,
    ) -> Result<Restore, Failure> {
        let Self { place, child, .. } = self;
        let options = RestoreOptions { vcpus: vcpus(machine), ..self.options.clone() };
        let pages = memory.guest.map().total_pages();
        let presence =
            Presence::create(&place.vm.presence(), pages).doing("making the presence file")?;
        firn_fault::point("restore.attached");
        let lives = Arc::clone(&self.lives);
        let on_fatal = on_fatal(place.journal_handle(), child.handle()?, lives);
        let (image, guest) = (Arc::clone(&self.image), memory.guest);
        Restore::begin_prefilled(image, guest, faults, options, presence, prefilled, on_fatal)
            .map_err(|error| restore_failure(&error))
    }

    fn devices(&self, vm: &mut Vm, process: &Process) -> Result<(), Failure> {
        vm.load_device_state(self.image.device_state())
            .doing("loading the VM's devices")
            .map_err(|failure| start::with_output(failure, self.place.vm))?;
        auxiliary::write_image_aux(vm, process, &self.image)
    }

    /// Explains why a step failed. If memory can't be restored, everything else fails, and QEMU
    /// ends.
    fn why(&self, restore: &Restore, failure: Failure) -> Failure {
        match restore.wait_timeout(Duration::ZERO) {
            Err(error) if !error.is_hypervisor_gone() => restore_failure(&error),
            _ => self.child.explain(failure, self.place.vm),
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

pub(crate) fn open(path: &Path) -> Result<(Arc<Image>, Meta), Failure> {
    let opening = format!("opening {}", path.display());
    let image = Image::open(path).map_err(|error| image_failure(&error).while_doing(&*opening))?;
    with_meta(image)
}

pub(crate) fn with_meta(image: Image) -> Result<(Arc<Image>, Meta), Failure> {
    let meta: Meta = serde_json::from_value(image.meta().clone())
        .doing_or(FailureKind::Damaged, "reading the image's description of its VM")?;
    match meta.version {
        meta::VERSION..=meta::VERSION_MARKED => Ok((Arc::new(image), meta)),
        other => {
            let text = format!(
                "the image describes its VM in version {other}, not {}",
                meta::VERSION_MARKED
            );
            Err(Failure::new(FailureKind::Refused, text).hint("use the Firn that wrote it"))
        }
    }
}

/// The current identity of a disk; relative paths start in QEMU's working directory.
pub(crate) fn look(meta: &Meta, file: &Path) -> Option<DiskIdentity> {
    DiskIdentity::of(&meta.qemu.directory.join(file)).ok()
}

pub(crate) fn refuse(mismatches: &[Mismatch], force: bool) -> Result<(), Failure> {
    if mismatches.is_empty() || force {
        return Ok(());
    }
    let chain = mismatches.iter().map(ToString::to_string).collect();
    let failure = Failure { kind: FailureKind::Refused, chain, hint: None };
    Err(failure
        .while_doing("the restored guest would find another QEMU or other disks than it had")
        .hint("provide what is named here, or continue at your own risk with --force"))
}

fn warnings(mismatches: &[Mismatch]) -> Vec<String> {
    mismatches.iter().map(|mismatch| format!("forced: {mismatch}")).collect()
}

/// The program that the image names, if it may be started; or the one that the user names.
fn program(meta: &Meta, overrides: &Overrides) -> Result<PathBuf, Failure> {
    let name = meta.qemu.user_args.first().map_or("", String::as_str);
    match overrides.program {
        Some(_) => programs::chosen(name, &meta.qemu.directory),
        None => programs::allowed(name, &meta.qemu.directory),
    }
}

/// Changes endpoints that another process uses: a VM with the same command line may run here.
fn beside(place: &Place<'_>, meta: &Meta, plan: Plan) -> Result<(Plan, Vec<String>), Failure> {
    let holder = |endpoint: &Endpoint| endpoints::holder(endpoint, &meta.qemu.directory);
    let beside = Beside { directory: place.vm.path(), holder: &holder };
    plan.beside(&beside).map_err(|error| {
        let failure = Failure::from_error(FailureKind::Busy, &error);
        failure.hint("--netdev ID=user,hostfwd=... gives the restored VM other ports")
    })
}

/// Starts QEMU in its former working directory, if that still exists, and begins to fill its
/// memory.
fn launch(
    place: &Place<'_>,
    meta: &Meta,
    image: &Arc<Image>,
    options: &RestoreOptions,
    plan: &Plan,
) -> Result<(Child, Vec<String>, Option<Prefill>), Failure> {
    let ram = start::ram_files(plan.ram()).doing("making the VM's memory")?;
    let sockets = Sockets::make(plan.cards(), &meta.qemu.directory, place.vm)?;
    let paths = start::paths(place, &ram, &sockets);
    let augmented = plan.for_restore(&paths).map_err(start::refused)?;
    start::enter(&meta.qemu.directory);
    let prefill = prefill_of(image, options, plan.ram(), &ram);
    let child = start::launch(place.vm, &augmented, ram, &sockets)?;
    Ok((child, augmented.args, prefill))
}

/// Starts to prefill RAM. `None` where the files are not those of the image: the restore will be
/// refused, with the reason. Also `None` if the use of pages is counted, because the use of pages
/// that are present from the start can't be seen.
fn prefill_of(
    image: &Arc<Image>,
    options: &RestoreOptions,
    plans: &[RamPlan],
    ram: &[File],
) -> Option<Prefill> {
    let regions = image.regions().regions();
    let is_same = |(region, plan): (&RamRegion, &RamPlan)| {
        region.id == plan.id && region.bytes() == plan.bytes.next_multiple_of(PAGE_SIZE as u64)
    };
    let are_same = regions.len() == plans.len() && regions.iter().zip(plans).all(is_same);
    if options.account_use || !are_same {
        return None;
    }
    let files = ram.iter().map(File::try_clone).collect::<Result<_, _>>().ok()?;
    Some(Prefill::start(Arc::clone(image), options, files))
}

fn describe(
    place: &Place<'_>,
    meta: &Meta,
    child: &Child,
    args: Vec<String>,
    vm: &mut Vm,
    layout: &Layout,
) -> Result<Machine, Failure> {
    let known = Known {
        process: child.identity.clone(),
        qmp: place.vm.qmp(),
        launched: true,
        user_args: meta.qemu.user_args.clone(),
        args,
        directory: meta.qemu.directory.clone(),
        drives: meta.drives.clone(),
        cards: child.cards.clone(),
        // No image has served disks.
        served: Vec::new(),
    };
    qemu::describe(vm, known, layout, place.vm.name().as_str())
}

pub(crate) fn vcpus(machine: &Machine) -> Vec<(Tid, VcpuId)> {
    machine.vcpus.iter().zip(0..).map(|(&tid, id)| (tid, VcpuId(id))).collect()
}

fn attach(
    process: &Process,
    memory: &Arc<GuestMemory>,
    vcpus: &[Tid],
) -> Result<PageFaults, Failure> {
    const ATTACHING: &str = "attaching to QEMU";
    firn_fault::io("restore.userfaultfd").doing_or(FailureKind::Host, ATTACHING)?;
    let mut tracee = Tracee::seize(process, vcpus).doing_or(FailureKind::Host, ATTACHING)?;
    PageFaults::create(&mut tracee, Arc::clone(memory), Trace::Restore)
        .doing_or(FailureKind::Host, ATTACHING)
        .map_err(|failure| failure.hint("`firn doctor` lists what this host and user lack"))
}

/// What to do when a page can't be restored, because QEMU would wait for it for ever. A VM that has
/// not run, or that such a failure is to end, is ended, and the reason is recorded. If the VM
/// `lives`, the supervisor exits instead, and its successor tries again.
pub(crate) fn on_fatal(
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
        let _ = journal.update(|journal| journal.note_end(failure));
        let _ = hypervisor.kill();
    })
}

/// Writes the auxiliary blocks that are not in the device state. QEMU has mapped all of them only
/// now.
pub(crate) fn write_aux(
    vm: &mut Vm,
    process: &Process,
    blocks: &[AuxBlock],
) -> Result<(), Failure> {
    if blocks.is_empty() {
        return Ok(());
    }
    let places = vm.layout().doing("finding video memory")?.aux;
    for block in blocks {
        let place = places
            .iter()
            .find(|place| place.id == block.id && place.bytes == block.bytes.len() as u64);
        let Some(hva) = place.and_then(|place| place.hva) else {
            let text = format!("QEMU has no block of {} bytes for {}", block.bytes.len(), block.id);
            return Err(Failure::new(FailureKind::Other, text));
        };
        process_memory::write(process, hva, &block.bytes).doing(format!("writing {}", block.id))?;
    }
    Ok(())
}

/// Installs the memory that has to be present before the guest runs, and reports progress.
fn prefill(restore: &Restore, tell: &mut dyn FnMut(Progress)) -> Result<(), Failure> {
    let is_over = AtomicBool::new(false);
    let filled = thread::scope(|scope| {
        let filling = scope.spawn(|| {
            let filled = restore.prefill();
            is_over.store(true, Ordering::Release);
            filled
        });
        let mut told = Instant::now();
        while !is_over.load(Ordering::Acquire) && !filling.is_finished() {
            thread::park_timeout(Duration::from_millis(1));
            if told.elapsed() >= PROGRESS_EVERY {
                told = Instant::now();
                tell(progress(restore, None));
            }
        }
        filling.join()
    });
    match filled {
        Ok(filled) => filled.map_err(|error| restore_failure(&error)),
        Err(_) => Err(Failure::new(FailureKind::Other, "a bug in Firn ended the restore of memory")),
    }
}

/// Writes all memory before the vCPUs run, and reports progress.
fn fill(
    image: &Arc<Image>,
    memory: &GuestMemory,
    options: &RestoreOptions,
    tell: &mut dyn FnMut(Progress),
) -> Result<(), Failure> {
    let (done, total) = (AtomicU64::new(0), AtomicU64::new(0));
    let note = |written: u64, all: u64| {
        done.fetch_max(written, Ordering::Relaxed);
        total.store(all, Ordering::Relaxed);
    };
    let filled = thread::scope(|scope| {
        let filling = scope.spawn(|| firn_restore::fill_all(image, memory, options, &note));
        while !filling.is_finished() {
            thread::park_timeout(PROGRESS_EVERY);
            let (done, total) = (done.load(Ordering::Relaxed), total.load(Ordering::Relaxed));
            tell(Progress::new("restoring", done, total));
        }
        filling.join()
    });
    match filled {
        Ok(filled) => filled.map_err(|error| restore_failure(&error)),
        Err(_) => Err(Failure::new(FailureKind::Other, "a bug in Firn ended the restore of memory")),
    }
}

fn started(journal: &mut Journal) {
    if let Phase::Restoring { started, .. } = &mut journal.phase {
        *started = true;
    }
}

pub(crate) fn journal(
    file: &JournalFile,
    change: impl FnOnce(&mut Journal),
) -> Result<(), Failure> {
    file.update(change).doing("writing the journal")
}
