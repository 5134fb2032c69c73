//! The operations on a running VM: saving it, merging its disk layers, protecting it, ending it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_checkpoint::{
    Estimator, SaveContext, SaveError, SaveOptions, SaveReport, Steps, Strategy,
};
use firn_epochs::primary::Ending;
use firn_image::{Image, ImageError};
use firn_types::PAGE_SIZE;
use firn_vmm::{Layout, Vm};
use serde_json::json;

use crate::calls::Calls;
use crate::changes::{self, Changes};
use crate::disk_copies::{self, DiskPolicy};
use crate::disk_layers::{self, Merging};
use crate::disks::{self, Cutting};
use crate::failure::{Context, Failure, FailureKind, image_failure};
use crate::identity::ProcessHandle;
use crate::inspection;
use crate::journal::{FileIdentity, Journal, JournalFile, Machine, Phase, now};
use crate::keep::Operations;
use crate::meta::Meta;
use crate::network::{CardStatus, HELD, Network};
use crate::protection::{Protecting, Protection, Unprotected, With};
use crate::protocol::{
    MemberRequest, Progress, ProtectRequest, SaveChoices, SaveRequest, StopRequest,
};
use crate::qemu::{self, Memory};
use crate::runtime::VmDir;
use crate::served::Served;
use crate::usage::{self, Pages, Usage};

/// If a drive has this number of layers, those that no image needs are merged before a save.
const LAYERS_MANY: usize = 16;

/// The operations on a VM that QEMU runs.
pub(crate) struct Qemu {
    journal: Arc<JournalFile>,
    hypervisor: Arc<ProcessHandle>,
    usage: Usage,
    changes: Arc<Changes>,
    calls: Calls,
    protecting: Protecting,
    network: Arc<Network>,
    served: Arc<Served>,
    vm: VmDir,
}

impl Operations for Qemu {
    fn save(
        &self,
        request: &SaveRequest,
        then_stop: bool,
        cancel: &AtomicBool,
        progress: &dyn Fn(Progress),
    ) -> Result<serde_json::Value, Failure> {
        firn_fault::point("save.asked");
        let machine = self.machine()?;
        refuse_served(&machine)?;
        self.shorten_chains(&machine, cancel, progress)?;
        let explain = |failure: Failure| match failure.kind {
            FailureKind::Refused | FailureKind::Interrupted => failure,
            _ => self.unless_ended(failure),
        };
        let accepted = request.choices.accept_unrestorable && !then_stop;
        let prepared = prepare(&machine, accepted, cancel).map_err(explain)?;
        let Prepared { mut vm, paused, was_running, unrestorable, layout, memory } = prepared;
        let open = |path: &PathBuf| open_parent(path, &layout);
        let parent = request.choices.parent.as_ref().map(open).transpose()?;
        let held = self.journal.read().shut || self.network.is_shut();
        let meta = machine.meta.clone().held(held).paused(paused);
        let machine = Machine { meta: meta.marked_unrestorable(unrestorable), ..machine };
        let meta = machine.meta.clone();
        let policy = DiskPolicy::new(&machine, &self.journal.read(), request, parent.as_deref());
        let mut cutting = Cutting::plan(&mut vm, &meta, policy, then_stop).map_err(explain)?;
        // Only one descriptor at a time can register the guest's memory.
        let scanned = self.usage.finish();
        self.begin(request, then_stop, was_running, &mut vm, &layout).map_err(explain)?;
        firn_fault::point("save.journaled");
        let save =
            Save { operations: self, request, then_stop, was_running, cancel, scanned, parent };
        let report = save.run(&mut vm, meta.clone(), &layout, memory, &mut cutting, progress);
        let report = report.map_err(|failure| {
            if !self.journal.image_whole() {
                cutting.stop_copies(&mut vm);
            }
            let failure = self.wind_up(failure, &mut vm, was_running);
            // A failure after the image has its final name does not remove the image's files.
            if !self.journal.image_whole() {
                cutting.undo(&mut vm, &self.journal);
            }
            failure
        });
        if !then_stop {
            close_descriptors(&mut vm);
        }
        self.ended(request, then_stop, &report)?;
        disk_copies::remove_old_bitmaps(&mut vm, &self.journal.read());
        report.map(|report| facts(request, &report, &cutting, &meta.unrestorable))
    }

    fn merge(
        &self,
        all: bool,
        cancel: &AtomicBool,
        progress: &dyn Fn(Progress),
    ) -> Result<serde_json::Value, Failure> {
        let machine = self.machine()?;
        let mut vm = qemu::connect(&machine)?;
        let (vm, machine, journal) = (&mut vm, &machine, &*self.journal);
        let mut merging = Merging { vm, machine, journal, cancel, progress };
        let merged = match all {
            true => merging.commit_all(),
            false => merging.merge_unneeded().map(|layers| json!({ "merged": layers })),
        };
        merged.map_err(|failure| self.unless_gone(failure, "its disk layers were merged"))
    }

    fn protect(
        &self,
        request: &ProtectRequest,
        ending: &Ending,
        begun: &dyn Fn(),
        progress: &dyn Fn(Progress),
    ) -> Result<serde_json::Value, Failure> {
        let machine = self.machine()?;
        if machine.calls.is_some() {
            let text = "Firn tracks the guest's writes for its applications (--calls)";
            let failure = Failure::new(FailureKind::Refused, text);
            return Err(failure.hint("protect a VM that was started without --calls"));
        }
        if self.network.is_shut() {
            let text = "output is still blocked from the previous protection: its backup may run this VM";
            let failure = Failure::new(FailureKind::Refused, text);
            return Err(failure.hint("`firn release` releases it, if that backup never runs the VM"));
        }
        if !self.network.is_new() {
            let text = "the VM's cluster was protected before";
            let failure = Failure::new(FailureKind::Refused, text);
            return Err(failure.hint("`firn cluster protect` protects the whole cluster anew"));
        }
        if request.lease.is_some() {
            self.obey(request.lease)?;
        }
        // Only one descriptor at a time can register the guest's memory.
        self.usage.finish();
        self.changes.finish();
        self.enter(Phase::Protecting { paused_by_us: false }, |journal| {
            (journal.protection_end, journal.hung) = (None, false);
        })?;
        let with =
            With { hypervisor: &self.hypervisor, network: &self.network, served: &self.served };
        let of = (&machine, &self.journal);
        let (end, ended) = self.protecting.run(of, request, &with, ending, begun, progress);
        let is_hung = ended.as_ref().is_err_and(|it| it.is_hung);
        if ended.as_ref().is_err_and(|it| it.is_declined) && self.is_alone() {
            // No other host can run the VM.
            self.network.let_out();
        }
        let ended = ended.map_err(|Unprotected { failure, is_hung, .. }| match is_hung {
            true => failure,
            false => self.unless_ended(failure),
        });
        let shut = self.network.is_shut();
        let held = if shut { HELD } else { "" };
        self.enter(Phase::Running, |journal| {
            journal.shut |= shut;
            journal.protection_end = end;
            journal.hung = is_hung;
            match &ended {
                Ok(()) => journal.note_success(format!("released{held}")),
                Err(failure) => {
                    journal.note_failure(format!("not protected any more: {failure}{held}"));
                }
            }
        })?;
        ended.map(|()| json!({ "released": true }))
    }

    fn protection(&self) -> Option<Protection> {
        self.protecting.now()
    }

    fn network(&self) -> Vec<CardStatus> {
        self.network.now()
    }

    fn let_out(&self) -> Result<bool, Failure> {
        let was_shut = self.network.is_shut();
        let change = |journal: &mut Journal| {
            (journal.shut, journal.lease) = (false, None);
            journal.last.iter_mut().for_each(|note| note.text = note.text.replace(HELD, ""));
        };
        let had_lease = self.journal.read().lease.is_some();
        self.journal.update(change).doing("writing the journal")?;
        self.network.let_out();
        self.network.obey(&self.vm.lease(), None);
        Ok(was_shut || had_lease)
    }

    fn go_on(&self) -> Result<(), Failure> {
        let change = |journal: &mut Journal| {
            journal.shut = false;
            journal.last.iter_mut().for_each(|note| note.text = note.text.replace(HELD, ""));
        };
        self.journal.update(change).doing("writing the journal")?;
        self.network.let_out();
        Ok(())
    }

    fn member(&self, request: &MemberRequest) -> Result<serde_json::Value, Failure> {
        self.network.member(request, &self.machine()?)
    }

    fn is_member(&self) -> bool {
        self.network.membership().is_some()
    }

    fn rest(&self) {
        let Ok(machine) = self.machine() else { return };
        if machine.calls.is_some() {
            if let Err(failure) = self.answer_calls(&machine) {
                tracing::error!("{}", failure.while_doing("answering guest calls"));
            }
        }
        // Only one descriptor at a time can register the guest's memory.
        if !self.changes.are_followed() {
            self.usage.start(&machine);
        }
    }

    fn leave(&self) {
        disk_copies::remove_all_bitmaps(&self.journal);
        self.calls.finish();
        self.usage.finish();
        self.changes.finish();
        if let Ok(machine) = self.machine() {
            close_left_descriptors(&machine);
        }
    }

    fn end(&self, request: StopRequest) -> Result<(), Failure> {
        let discard = |discard| self.journal.update(|journal| journal.discard = discard);
        if request.discard {
            discard(true).doing("writing the journal")?;
        }
        let ended = match request.powerdown_s.filter(|_| self.protecting.press_power_button()) {
            Some(seconds) => qemu::wait_powerdown(&self.hypervisor, Duration::from_secs(seconds)),
            None => qemu::end(&self.machine()?, &self.hypervisor, request),
        };
        match ended.is_err() && request.discard {
            true => ended.and(discard(false).doing("writing the journal")),
            false => ended,
        }
    }

    fn command_line(&self) -> Result<serde_json::Value, Failure> {
        let machine = self.machine()?;
        let mut vm = qemu::connect_within(&machine, qemu::SHORT_WAIT)?;
        disk_layers::command_line(&mut vm, &machine.meta)
    }

    fn is_paused(&self) -> Option<bool> {
        qemu::is_paused(&self.machine().ok()?)
    }

    fn is_hung(&self) -> bool {
        if !self.journal.read().hung {
            return false;
        }
        let answers = self.machine().is_ok_and(|machine| qemu::answers(&machine));
        if answers {
            let change = |journal: &mut Journal| journal.hung = false;
            if let Err(error) = self.journal.update(change) {
                tracing::warn!("can't record that QEMU answers again: {error}");
            }
        }
        !answers
    }
}

impl Qemu {
    pub(crate) fn new(
        journal: Arc<JournalFile>,
        hypervisor: Arc<ProcessHandle>,
        network: Arc<Network>,
        served: Arc<Served>,
        vm: &VmDir,
    ) -> Self {
        let (usage, changes, calls, protecting) = Default::default();
        let vm = vm.clone();
        Self { journal, hypervisor, usage, changes, calls, protecting, network, served, vm }
    }

    /// Whether neither a lease nor a cluster decides what output leaves the VM.
    fn is_alone(&self) -> bool {
        self.journal.read().lease.is_none() && !self.is_member()
    }

    /// Merges layers before a drive has more of them than a save accepts.
    fn shorten_chains(
        &self,
        machine: &Machine,
        cancel: &AtomicBool,
        progress: &dyn Fn(Progress),
    ) -> Result<(), Failure> {
        let mut vm = qemu::connect(machine).map_err(|failure| self.unless_ended(failure))?;
        let drives = vm.drives().doing("querying the VM's disks")?;
        if drives.iter().all(|drive| drive.chain.len() < LAYERS_MANY) {
            return Ok(());
        }
        let (vm, journal) = (&mut vm, &*self.journal);
        let merged = Merging { vm, machine, journal, cancel, progress }.merge_unneeded();
        merged.map(drop).map_err(|failure| self.unless_ended(failure))
    }

    /// Lets the VM's output leave only while this lease is held. The journal records that first,
    /// because a successor may have to know.
    fn obey(&self, lease: Option<u32>) -> Result<(), Failure> {
        self.journal.update(|journal| journal.lease = lease).doing("writing the journal")?;
        self.network.obey(&self.vm.lease(), lease);
        Ok(())
    }

    /// Tracks what the guest writes, and answers the guest calls of its applications with it.
    fn answer_calls(&self, machine: &Machine) -> Result<(), Failure> {
        let followed = |journal: &mut Journal| {
            journal.machine.iter_mut().for_each(|machine| machine.followed = true);
        };
        self.journal.update(followed).doing("writing the journal")?;
        self.calls.start(machine, &self.vm, &self.changes)?;
        self.changes.follow(machine)
    }

    fn enter(&self, phase: Phase, note: impl FnOnce(&mut Journal)) -> Result<(), Failure> {
        let change = |journal: &mut Journal| {
            journal.machine.iter_mut().for_each(|machine| machine.followed = false);
            journal.phase = phase;
            note(journal);
        };
        self.journal.update(change).doing("writing the journal")
    }

    fn machine(&self) -> Result<Machine, Failure> {
        let none = || Failure::new(FailureKind::Other, "the journal names no hypervisor");
        self.journal.read().machine.ok_or_else(none)
    }

    /// Records what a successor has to know: where memory is, and what is about to happen to it.
    fn begin(
        &self,
        request: &SaveRequest,
        then_stop: bool,
        was_running: bool,
        vm: &mut Vm,
        layout: &Layout,
    ) -> Result<(), Failure> {
        let vcpus = vm.vcpus().doing("querying the vCPUs")?;
        let places = layout.locations.iter().map(|place| (place.id.clone(), place.hva)).collect();
        let phase = Phase::Saving {
            image: request.image.clone(),
            replaces: FileIdentity::at(&request.image),
            paused_by_us: then_stop && was_running,
            then_stop,
            drives: Vec::new(),
        };
        let change = |journal: &mut Journal| {
            disks::settle(journal);
            if let Some(machine) = &mut journal.machine {
                machine.map = layout.map.clone();
                machine.locations = places;
                machine.vcpus = vcpus.iter().map(|vcpu| vcpu.tid).collect();
            }
            journal.phase = phase;
        };
        self.journal.update(change).doing("writing the journal")
    }

    /// The failure, or, if the VM has ended, a failure that states only that.
    fn unless_ended(&self, failure: Failure) -> Failure {
        self.unless_gone(failure, "it was being saved")
    }

    fn unless_gone(&self, failure: Failure, what: &str) -> Failure {
        if failure.kind == FailureKind::Refused {
            return failure;
        }
        match self.hypervisor.wait_gone(qemu::SHORT_WAIT) {
            Ok(true) => Failure::new(FailureKind::Ended, format!("the VM ended while {what}")),
            _ => failure,
        }
    }

    /// Resumes a VM that a failed save has left paused.
    fn wind_up(&self, failure: Failure, vm: &mut Vm, was_running: bool) -> Failure {
        match vm.status() {
            Ok(state) if was_running && !state.running => run_on(vm),
            Ok(_) => {}
            Err(error) => {
                tracing::error!("{}", Failure::from_error(FailureKind::Other, &error));
                return self.unless_ended(failure);
            }
        }
        failure
    }

    /// Records the result of a save. A suspend stays in the journal until the VM has ended.
    fn ended(
        &self,
        request: &SaveRequest,
        then_stop: bool,
        report: &Result<SaveReport, Failure>,
    ) -> Result<(), Failure> {
        let image = request.image.display();
        let change = |journal: &mut Journal| match report {
            Ok(_) if then_stop => disks::hand_over(journal),
            Ok(_) => {
                disks::hand_over(journal);
                journal.phase = Phase::Running;
                journal.note_success(format!("checkpoint {image} is whole"));
            }
            Err(failure) => {
                // A VM that was to end, and continues, writes to disks that the image would build
                // on.
                if journal.image_whole() && !then_stop {
                    disks::hand_over(journal);
                }
                journal.phase = Phase::Running;
                journal.note_failure(format!("no checkpoint to {image}: {failure}"));
            }
        };
        let followed = self.changes.are_followed();
        let change = |journal: &mut Journal| {
            journal.machine.iter_mut().for_each(|machine| machine.followed = followed);
            change(journal);
        };
        self.journal.update(change).doing("writing the journal")
    }
}

/// Refuses a VM with disks that images can't contain yet.
fn refuse_served(machine: &Machine) -> Result<(), Failure> {
    let Some(disk) = machine.served.first() else { return Ok(()) };
    let text = format!(
        "the disk {} is served by Firn (firn=on), and images can't keep such disks",
        disk.id
    );
    let failure = Failure::new(FailureKind::Refused, text);
    Err(failure.hint("start the VM without firn=on to save it, or protect it instead"))
}

/// A VM that has been checked and is ready to be saved.
struct Prepared {
    vm: Vm,
    was_running: bool,
    /// QEMU's name for the run state, if the VM does not run.
    paused: Option<String>,
    /// The reasons why the image could not be restored, if the user accepts them.
    unrestorable: Vec<String>,
    layout: Layout,
    memory: Memory,
}

/// Checks a VM, without changing it.
fn prepare(machine: &Machine, accepted: bool, cancel: &AtomicBool) -> Result<Prepared, Failure> {
    let mut vm = qemu::connect(machine)?;
    refuse_blocked(vm.blockers().doing("querying migration blockers")?)?;
    let state = vm.status().doing("querying whether the VM runs")?;
    let (was_running, paused) = (state.running, inspection::paused_state(&state));
    let unrestorable = inspection::check_restorable(&mut vm, machine, accepted)?;
    let layout = inspection::mapped_layout(&mut vm, machine, was_running, cancel)?;
    let memory = qemu::open_memory(machine.process.pid, &layout)?;
    Ok(Prepared { vm, was_running, paused, unrestorable, layout, memory })
}

/// One save of a VM.
struct Save<'a> {
    operations: &'a Qemu,
    request: &'a SaveRequest,
    then_stop: bool,
    was_running: bool,
    cancel: &'a AtomicBool,
    /// The pages that the guest used recently, if an access scan ran.
    scanned: Option<Pages>,
    /// The image that the new one builds on.
    parent: Option<Arc<Image>>,
}

impl Save<'_> {
    fn run(
        &self,
        vm: &mut Vm,
        meta: Meta,
        layout: &Layout,
        memory: Memory,
        cutting: &mut Cutting<'_>,
        progress: &dyn Fn(Progress),
    ) -> Result<SaveReport, Failure> {
        let parent = self.parent.as_deref();
        let options =
            options(&self.request.choices, self.then_stop, memory.guest.is_shared(), parent);
        let changes = &self.operations.changes;
        changes.make_way_for(options.strategy, &memory.guest);
        let used = self.used(vm, &memory, options.strategy)?;
        if self.then_stop {
            // Before the disks are examined: a running VM may write to them afterwards.
            vm.stop().doing("stopping the VM")?;
        }
        let mut disks = vm.disks().doing("querying the VM's disks")?;
        disks.retain(|disk| !cutting.covers(disk.identity));
        let firn = env!("CARGO_PKG_VERSION").to_owned();
        let mut meta = Meta { created: now(), firn, disks, drives: Vec::new(), ..meta };
        firn_fault::point("save.disks");
        let journal = &self.operations.journal;
        cutting.prepare(vm, journal)?;
        let layers = cutting.find_layers()?;
        meta.add_disks(layers);
        let cutting = &*cutting;
        let was_running = self.was_running;
        let describe = |found_late: Option<f64>| {
            // While the guest is paused, only QEMU can have touched pages.
            let found_late = found_late.filter(|_| was_running);
            let meta = Meta { found_late, ..meta.clone() };
            Ok(serde_json::to_value(meta.with(cutting.frozen()?))?)
        };
        let (paused, cancel) = (self.was_running, self.cancel);
        let steps = JournalSteps { journal, paused, cancel, cutting };
        let mut context = SaveContext {
            vm,
            process: memory.process,
            memory: memory.guest,
            aux: &layout.aux,
            used,
            parent: self.parent.clone(),
            tracker: changes.take(),
            drives: cutting.cut(),
            steps: &steps,
        };
        let image = &self.request.image;
        let block_bytes = options.block_size.bytes() as u64;
        let report = |now: firn_checkpoint::Progress| {
            let stage = if self.then_stop { "suspending" } else { "saving" };
            let bytes = |blocks: u32| u64::from(blocks) * block_bytes;
            progress(Progress::new(stage, bytes(now.blocks_done), bytes(now.blocks_total)));
        };
        let saved =
            firn_checkpoint::save(&mut context, &self.request.image, &describe, &options, &report);
        changes.keep(context.tracker.take());
        saved
            .map_err(|error| save_failure(&error))
            .map_err(|failure| failure.while_doing(format!("saving to {}", image.display())))
    }
}

impl Save<'_> {
    /// The pages that the guest used before the pause: from the access scan, or else from a short
    /// scan now. `None` if the working set consists of what the guest touches after the cut.
    fn used(
        &self,
        vm: &mut Vm,
        memory: &Memory,
        strategy: Strategy,
    ) -> Result<Option<Pages>, Failure> {
        let after = match strategy {
            Strategy::Trace | Strategy::Cow | Strategy::PreCopy => Estimator::Trace,
            Strategy::Stop => Estimator::AccessBits,
        };
        match self.request.choices.working_set.unwrap_or(after) {
            Estimator::Trace => Ok(None),
            Estimator::AccessBits
                if self.scanned.is_some() || !self.was_running || strategy == Strategy::PreCopy =>
            {
                Ok(self.scanned.clone())
            }
            Estimator::AccessBits => {
                let vcpus = vm.vcpus().doing("querying the vCPUs")?;
                let vcpus = vcpus.iter().map(|vcpu| vcpu.tid).collect();
                Ok(usage::watch(memory, vcpus, &|| self.cancel.load(Ordering::Relaxed)))
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
    cutting: &'a Cutting<'a>,
}

impl JournalSteps<'_> {
    fn set(&self, paused: bool) -> io::Result<()> {
        let change = |journal: &mut Journal| {
            if let Phase::Saving { paused_by_us, then_stop: false, .. } = &mut journal.phase {
                *paused_by_us = paused;
            }
        };
        self.journal.update(change).map_err(io::Error::other)
    }
}

impl Steps for JournalSteps<'_> {
    fn about_to_stop(&self) -> io::Result<()> {
        self.set(self.paused)?;
        self.cutting.begin();
        Ok(())
    }

    fn resumed(&self) -> io::Result<()> {
        self.set(false)
    }

    fn cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }
}

fn save_failure(error: &SaveError) -> Failure {
    let kind = match error {
        SaveError::Cancelled => FailureKind::Interrupted,
        SaveError::Image(error) => image_failure(error).kind,
        SaveError::Attach(_) => FailureKind::Host,
        _ => FailureKind::Other,
    };
    let failure = Failure::from_error(kind, error);
    match error {
        SaveError::Copies(_) => failure.hint(disks::DISK_DIR),
        _ => failure,
    }
}

/// Refuses a VM with migration blockers: what QEMU could not migrate can't be saved either, even if
/// saving seems to work.
fn refuse_blocked(blockers: Vec<String>) -> Result<(), Failure> {
    if blockers.is_empty() {
        return Ok(());
    }
    let mut failure = Failure::new(FailureKind::Other, "QEMU can't save the state of this VM");
    failure.chain.extend(blockers);
    Err(failure.hint("start the VM without the device or CPU feature named here"))
}

/// Closes QEMU's copies of Firn's descriptors. QEMU closes them by itself only when no monitor at
/// all is connected.
fn close_descriptors(vm: &mut Vm) {
    if let Err(error) = vm.finish_save() {
        tracing::debug!("{}", Failure::from_error(FailureKind::Other, &error));
    }
}

/// Closes descriptors that an earlier operation left in QEMU because it failed or because the VM
/// was paused.
fn close_left_descriptors(machine: &Machine) {
    let closed = qemu::connect_within(machine, qemu::SHORT_WAIT)
        .and_then(|mut vm| vm.close_left_descriptors().doing("closing descriptors in QEMU"));
    if let Err(failure) = closed {
        tracing::debug!("{failure}");
    }
}

fn run_on(vm: &mut Vm) {
    if let Err(error) = vm.cont() {
        tracing::error!("{}", Failure::from_error(FailureKind::Other, &error));
    }
}

/// Chooses the strategy. In private memory only writes can be tracked. What changed since another
/// image is found quickly if writes are tracked from one checkpoint to the next.
fn strategy(choices: &SaveChoices, then_stop: bool, is_shared: bool) -> Strategy {
    let fitting = match is_shared {
        _ if choices.parent.is_some() && changes::can_be_followed() => Strategy::PreCopy,
        true => Strategy::Trace,
        false => Strategy::Cow,
    };
    match then_stop {
        true => Strategy::Stop,
        false => choices.strategy.unwrap_or(fitting),
    }
}

fn open_parent(path: &Path, layout: &Layout) -> Result<Arc<Image>, Failure> {
    let image = Image::open(path).and_then(|image| match image.regions().regions() {
        regions if regions == layout.map.regions() => Ok(image),
        _ => Err(ImageError::OtherRam { parent: path.to_owned() }),
    });
    let image = image.map_err(|error| image_failure(&error));
    image.map(Arc::new).map_err(|failure| failure.while_doing("opening the image to build on"))
}

fn options(
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
        strategy: strategy(choices, then_stop, is_shared),
        codec: choices.codec.unwrap_or(default.codec),
        block_size: choices.block_size.unwrap_or(default.block_size),
        locality_block_bytes: choices.locality_block_bytes.unwrap_or(default.locality_block_bytes),
        compressors: choices.compressors.unwrap_or(default.compressors),
        throttle: choices.throttle.unwrap_or(default.throttle),
        first_spaces: choices.first_spaces.unwrap_or(default.first_spaces),
        leave_stopped: then_stop,
        reference: choices.reference.clone(),
        ..default
    }
}

fn facts(
    request: &SaveRequest,
    report: &SaveReport,
    cutting: &Cutting<'_>,
    unrestorable: &[String],
) -> serde_json::Value {
    json!({
        "image": request.image,
        "unrestorable": unrestorable,
        "parent": request.choices.parent,
        "page_bytes": PAGE_SIZE,
        "drives": cutting.facts(),
        "report": report,
    })
}
