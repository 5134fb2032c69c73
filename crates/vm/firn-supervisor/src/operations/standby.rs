//! The standby: it receives a VM's epochs into the memory of a waiting hypervisor, and runs the VM
//! when its primary is lost.
//!
//! ```text
//!   listen -> hello -> launch QEMU -S -incoming defer, its RAM emptied -> receive ... receive        phase `standby`
//!                                                                           |  connection ends, or failover
//!                                                                           v
//!                                   `firn failover`: device state, video memory            phase `standby`, started
//!                                                    cont                                            phase `running`
//! ```
//!
//! The hypervisor maps the same files that epochs are folded into, so a failover moves no memory.
//! When the connection ends, committed epochs remain, and the standby waits for a failover. The
//! device state is only in the supervisor: until a failover has loaded it into the hypervisor, the
//! standby is lost with its supervisor. From then on the VM survives the supervisor.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use firn_cluster::member::ClusterMembership;
use firn_epochs::backup::{BackupReceiver, RamFiles};
use firn_epochs::endpoint::{BackupEndpoint, EpochStream};
use firn_epochs::standby::{CommittedState, DiskCopy, StandbyVm};
use firn_epochs::wire::PrimaryHello;
use firn_memory::Process;
use firn_types::{PAGE_SIZE, RamRegion, RegionMap};
use firn_vmm::QemuVm;
use firn_vmm::command_line::{self, CommandLineError, RamPlan};
use serde_json::json;

use crate::devices::card_filters::FilterContext;
use crate::devices::disk_kinds::check_disk_kinds;
use crate::devices::network::{CardSockets, VmNetwork};
use crate::devices::served_disks::ServedDisks;
use crate::hypervisor::qemu::{self, KnownHypervisor};
use crate::operations::restore::{refuse_mismatches, write_aux_blocks};
use crate::operations::restore_task::RestoreTask;
use crate::operations::standby_files::find_free_name;
use crate::operations::vm_start::{self, HypervisorChild, StartContext, StartedVm};
use crate::processes::programs;
use crate::processes::runtime::VmDir;
use crate::records::control_protocol::{FailoverMember, FailoverRequest, OperationProgress};
use crate::records::failure::{self, Failure, FailureContext, FailureKind};
use crate::records::journal::{Journal, JournalFile, VmPhase};
use crate::records::meta::ImageMeta;

pub(crate) mod takeover;
mod waiting;

pub(crate) use takeover::StandbyControl;

/// What a VM has on this host in place of what it has at its primary.
pub(crate) struct StandbyChoices<'a> {
    /// The uplinks of its network cards.
    pub(crate) uplinks: &'a BTreeMap<String, String>,
    /// The files of its disks.
    pub(crate) disks: &'a BTreeMap<String, PathBuf>,
}

impl StandbyChoices<'_> {
    /// The VM's command line on this host. A disk's file is new, and named after the VM unless the
    /// user names it.
    fn command_line(
        &self,
        context: &StartContext<'_>,
        args: &[String],
    ) -> Result<Vec<String>, CommandLineError> {
        let mut uplinks = self.uplinks.iter();
        let args = uplinks.try_fold(args.to_vec(), |args, (id, path)| {
            command_line::with_uplink(&args, id, path)
        })?;
        let mut disks = self.disks.clone();
        for disk in command_line::plan_command(&args)?.disks() {
            let free = || find_free_name(&context.directory, context.vm.name(), disk);
            disks.entry(disk.id.clone()).or_insert_with(free);
        }
        disks.iter().try_fold(args, |args, (id, path)| {
            command_line::with_disk(&args, id, &path.to_string_lossy())
        })
    }
}

/// Starts a standby (`firn standby`): returns once a primary has connected and the hypervisor is
/// ready.
pub(crate) fn start_standby(
    context: &StartContext<'_>,
    listen: &BackupEndpoint,
    here: &StandbyChoices<'_>,
    report: &mut dyn FnMut(OperationProgress),
) -> Result<StartedVm, Failure> {
    report(OperationProgress::new("waiting for the primary", 0, 0));
    let stream = waiting::accept_primary(context, listen)?;
    let (mut receiver, hello) = BackupReceiver::accept_hello(&stream)
        .map_err(|error| Failure::from_error(FailureKind::Refused, &error))
        .map_err(|failure| failure.while_doing("receiving the primary's description"))?;
    match PreparedStandby::from_hello(context, &hello, here) {
        Ok(prepared) => prepared.into_started(context, receiver, stream, hello),
        Err(failure) => {
            receiver.send_refusal(&failure.to_string());
            Err(failure)
        }
    }
}

/// A waiting hypervisor with empty memory.
struct PreparedStandby {
    child: HypervisorChild,
    vm: QemuVm,
    ram: RamFiles,
    process: Arc<Process>,
    network: Arc<VmNetwork>,
    served: ServedDisks,
    copies: Vec<DiskCopy>,
    facts: serde_json::Value,
}

impl PreparedStandby {
    fn from_hello(
        context: &StartContext<'_>,
        hello: &PrimaryHello,
        here: &StandbyChoices<'_>,
    ) -> Result<Self, Failure> {
        let meta: ImageMeta = serde_json::from_value(hello.meta.clone())
            .while_doing_as(FailureKind::Refused, "decoding the primary's description of its VM")?;
        refuse_mismatches(
            &meta.disk_mismatches(|disk| meta.disk_identity(Path::new(&disk.file))),
            false,
        )?;
        let user_args = here
            .command_line(context, &meta.qemu.user_args)
            .map_err(failure::command_line_failure)?;
        let plan = command_line::plan_command(&user_args).map_err(failure::command_line_failure)?;
        check_disk_kinds(&plan.disk_files(), &meta.qemu.directory)?;
        let (directory, socket) = (&context.directory, context.vm.disks_socket());
        let (served, copies) =
            ServedDisks::create_for_standby(plan.disks(), &hello.disks, directory, &socket)?;
        let name = user_args.first().map_or("", String::as_str);
        let program = programs::allowed_program(name, &meta.qemu.directory)?;
        let plan = plan.with_disks(&socket).with_program(&program);
        let files = served.disk_records().into_iter().map(|disk| disk.file);
        let change = |journal: &mut Journal| journal.overlays = files.collect();
        context.journal.update(change).while_doing("writing the journal")?;
        let sockets = CardSockets::create_pairs(plan.cards(), &meta.qemu.directory, context.vm)?;
        let ram = vm_start::create_ram_files(plan.ram()).while_doing("making the VM's memory")?;
        let paths = vm_start::qemu_paths(context, &ram, &sockets);
        let augmented = plan.for_restore(&paths).map_err(failure::command_line_failure)?;
        let files = ram.iter().map(std::fs::File::try_clone).collect::<Result<_, _>>();
        let files = files.while_doing("making the VM's memory")?;
        vm_start::enter_directory(&meta.qemu.directory);
        let child = vm_start::launch_qemu(context.vm, &augmented, (ram, &[]), &sockets)?;
        let mut vm = child
            .connect_monitor(context.vm)
            .map_err(|failure| vm_start::with_output(failure, context.vm))?;
        refuse_mismatches(meta.qemu_mismatch(&vm.version().to_string()).as_slice(), false)?;
        let layout = vm.layout().while_doing("finding the guest's memory")?;
        if layout.map.regions() != hello.regions.regions() {
            let text = "QEMU arranges the VM's memory differently from the primary";
            return Err(Failure::new(FailureKind::Refused, text));
        }
        let known = KnownHypervisor {
            process: child.identity.clone(),
            qmp: context.vm.qmp_socket().into(),
            launched: true,
            user_args,
            args: augmented.args,
            directory: meta.qemu.directory.clone(),
            drives: meta.drives.clone(),
            cards: child.cards.clone(),
            served: served.disk_records(),
        };
        let hypervisor_record =
            qemu::describe_hypervisor(&mut vm, known, &layout, context.vm.name().as_str())?;
        let facts = vm_start::start_facts(&hypervisor_record, &[]);
        let memory = qemu::open_memory(hypervisor_record.process.pid, &layout)?;
        // Its firmware has written to memory.
        memory.guest.punch_out(memory.guest.all_pages()).while_doing("emptying the VM's memory")?;
        let change = |journal: &mut Journal| {
            journal.hypervisor_record = Some(hypervisor_record);
            journal.phase = VmPhase::Standby { started: false };
        };
        context.journal.update(change).while_doing("writing the journal")?;
        firn_fault::pass_point("standby.ready");
        let ram = match_ram_files(&hello.regions, plan.ram(), files)?;
        let network = VmNetwork::open_cards(child.identity.pid, &child.cards, Vec::new(), true)?;
        let (process, network) = (memory.process, Arc::new(network));
        Ok(Self { child, vm, ram, process, network, served, copies, facts })
    }

    fn into_started(
        self,
        context: &StartContext<'_>,
        receiver: BackupReceiver,
        stream: EpochStream,
        hello: PrimaryHello,
    ) -> Result<StartedVm, Failure> {
        let takeover = StandbyControl::new(stream, &hello);
        let standby = StandbyVm::with_disks(hello.regions, self.ram, self.copies);
        let standby = standby.with_membership(hello.member);
        let (vm, process, journal) = (self.vm, self.process, context.clone_journal());
        let network = Arc::clone(&self.network);
        let taking = Arc::clone(&takeover);
        let dir = context.vm.clone();
        let work =
            StandbyTask { receiver, standby, vm, process, journal, network, takeover: taking, dir };
        let restoring = Some(work.into_task());
        let hypervisor = self.child.keep_running()?;
        let standby = Some(takeover);
        let (network, served) = (Some(self.network), Some(Arc::new(self.served)));
        let (facts, guards, files) = (self.facts, Vec::new(), Vec::new());
        Ok(StartedVm { hypervisor, restoring, standby, network, served, facts, guards, files })
    }
}

/// Maps regions to files: regions come in the order of guest addresses, files in that of the
/// command line.
fn match_ram_files(
    regions: &RegionMap,
    plans: &[RamPlan],
    files: Vec<File>,
) -> Result<RamFiles, Failure> {
    let is_planned = |region: &RamRegion| {
        let bytes = |plan: &RamPlan| plan.bytes.next_multiple_of(PAGE_SIZE as u64);
        plans.iter().any(|plan| plan.id == region.id && bytes(plan) == region.byte_len())
    };
    let files = plans.iter().map(|plan| plan.id.as_str()).zip(files).collect();
    let are_planned = regions.regions().iter().all(is_planned);
    are_planned.then(|| RamFiles::from_named_files(regions, files)).flatten().ok_or_else(|| {
        let text = "the VM's memory does not match its command line";
        Failure::new(FailureKind::Refused, text)
    })
}

/// The task of a standby: to receive epochs, and then to run the VM.
struct StandbyTask {
    receiver: BackupReceiver,
    standby: StandbyVm<RamFiles>,
    vm: QemuVm,
    process: Arc<Process>,
    journal: Arc<JournalFile>,
    network: Arc<VmNetwork>,
    takeover: Arc<StandbyControl>,
    dir: VmDir,
}

impl StandbyTask {
    fn into_task(self) -> RestoreTask {
        Box::new(move |_| self.receive_then_run())
    }

    fn receive_then_run(mut self) -> Result<serde_json::Value, Failure> {
        let takeover = Arc::clone(&self.takeover);
        let (on_progress, on_end) =
            (&mut |progress| takeover.record_progress(progress), &mut |end: &_| {
                takeover.record_protection_end(end)
            });
        let ended = self.receiver.receive_epochs(&mut self.standby, on_progress, on_end);
        takeover.part_from_primary(&mut self.receiver);
        let FailoverRequest { lease, member: to, .. } = self.takeover.wait_for_failover(&ended);
        let since = Instant::now();
        let Self { standby, mut vm, process, journal, network, dir, .. } = self;
        let committed = standby
            .promote_at(to.map(|to| to.epoch))
            .map_err(|error| Failure::from_error(FailureKind::Other, &error))?;
        let CommittedState { epoch, devices, aux, card, .. } = committed;
        vm.load_device_state(&devices).while_doing("loading the VM's devices")?;
        write_aux_blocks(&mut vm, &process, &aux)?;
        firn_fault::pass_point("failover.loaded");
        let enter =
            |phase| journal.update(|it| it.phase = phase).while_doing("writing the journal");
        // From here on the disks belong to the VM, and may not be discarded.
        let own = |journal: &mut Journal| {
            journal.phase = VmPhase::Standby { started: true };
            journal.lease = lease;
            journal.overlays.clear();
        };
        journal.update(own).while_doing("writing the journal")?;
        firn_fault::pass_point("failover.started");
        if lease.is_some() {
            add_leased_filters(&mut vm, &dir, &journal, &network);
        }
        network.set_lease(&dir.lease_file(), lease);
        if let (Some((of, kept)), Some(FailoverMember { generation, .. })) = (card, to) {
            network.resume_as_member(&ClusterMembership { generation, ..of }, epoch, &kept);
        }
        network.plug_uplinks();
        vm.cont().while_doing("starting the vCPUs")?;
        announce_addresses(&mut vm);
        firn_fault::pass_point("failover.running");
        enter(VmPhase::Running)?;
        let took_ms = since.elapsed().as_secs_f64() * 1e3;
        tracing::info!("runs from the end of {epoch}, after {took_ms:.1} ms");
        Ok(json!({ "epoch": epoch, "took_ms": took_ms }))
    }
}

/// Adds filters to the network cards that are not Firn's own, because the VM's frames may leave only
/// while a lease is held. If that fails, the VM runs all the same, as one whose cards can't have
/// filters.
fn add_leased_filters(qemu: &mut QemuVm, vm: &VmDir, journal: &JournalFile, network: &VmNetwork) {
    let Some(hypervisor_record) = journal.current_journal().hypervisor_record else { return };
    let context = FilterContext { qemu, vm, journal };
    match network.add_filters(context, &hypervisor_record) {
        Ok(unfiltered) => unfiltered
            .iter()
            .for_each(|card| tracing::warn!("no lease holds back what the VM sends by {card}")),
        Err(failure) => tracing::warn!("no lease holds back what the VM sends: {failure}"),
    }
}

/// Announces the VM's addresses to switches. A switch that misses this learns them from the VM's
/// first frame.
pub(crate) fn announce_addresses(vm: &mut QemuVm) {
    if let Err(error) = vm.announce_self() {
        tracing::warn!("the VM's addresses are not announced: {error}");
    }
}
