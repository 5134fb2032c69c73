//! The start of a VM, or the attachment to one that runs.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use firn_types::PAGE_SIZE;
use firn_vmm::command_line::{self, AddedPaths, AugmentedCommand, RamPlan, StorePlugin};
use firn_vmm::{Drive, LaunchedProcess, QemuVm, read_log_tail};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde_json::json;

use crate::devices::disk_kinds::check_disk_kinds;
use crate::devices::disk_layers::{self, WantedDisk};
use crate::devices::network::{CardSockets, VmNetwork};
use crate::devices::served_disks::ServedDisks;
use crate::hypervisor::monitor;
use crate::hypervisor::qemu::{self, KnownHypervisor};
use crate::hypervisor::relocation::random_uuid;
use crate::hypervisor::restored_domain;
use crate::operations::restore_task::RestoreTask;
use crate::operations::standby::StandbyControl;
use crate::operations::{calls, process_check};
use crate::processes::identity::{ProcessHandle, ProcessIdentity};
use crate::processes::lock::ProcessRole;
use crate::processes::ownership::QemuOwnership;
use crate::processes::runtime::VmDir;
use crate::records::device_records::NetworkCard;
use crate::records::failure::{Failure, FailureContext, FailureKind, command_line_failure};
use crate::records::journal::{HypervisorRecord, Journal, JournalFile, VmPhase};
use crate::records::meta::ImageMeta;
use crate::records::monitor_address::MonitorAddress;
use crate::records::process_exit::ProcessExit;
use crate::records::restored_domain::RestoredDomain;

/// The maximum amount of QEMU's own output in an error, in bytes.
const TAIL_BYTES: u64 = 2000;

/// The time after a failure within which a QEMU has to end for its end to count as the cause.
const DYING_WAIT: Duration = Duration::from_millis(500);

/// The context in which a VM is started.
pub(crate) struct StartContext<'a> {
    pub(crate) vm: &'a VmDir,
    pub(crate) journal: &'a Arc<JournalFile>,
    /// The working directory of the command.
    pub(crate) directory: PathBuf,
    /// The plugin with which QEMU is to record stores, if it is.
    pub(crate) stores: Option<&'a Path>,
}

impl StartContext<'_> {
    pub(crate) fn clone_journal(&self) -> Arc<JournalFile> {
        Arc::clone(self.journal)
    }
}

/// A VM that has been started or attached to.
pub(crate) struct StartedVm {
    pub(crate) hypervisor: Arc<ProcessHandle>,
    /// The rest of a restore.
    pub(crate) restoring: Option<RestoreTask>,
    /// The control of a standby, if the VM is one.
    pub(crate) standby: Option<Arc<StandbyControl>>,
    /// Its network cards, if they are open already.
    pub(crate) network: Option<Arc<VmNetwork>>,
    /// Its served disks, if they are served already.
    pub(crate) served: Option<Arc<ServedDisks>>,
    /// The facts for the reply.
    pub(crate) facts: serde_json::Value,
    /// Its guards, if they were started with it.
    pub(crate) guards: Vec<(ProcessRole, ProcessHandle)>,
    /// The open files of the image that is being restored.
    pub(crate) files: Vec<File>,
}

/// A hypervisor that Firn has started. It is killed when this value is dropped, unless it was kept.
pub(crate) struct HypervisorChild {
    pub(crate) identity: ProcessIdentity,
    pub(crate) handle: Option<Arc<ProcessHandle>>,
    /// Its network cards whose frames pass through the supervisor.
    pub(crate) cards: Vec<NetworkCard>,
    /// The domain that it runs, if libvirt has started it for this restore.
    pub(crate) domain: Option<RestoredDomain>,
    /// Its RAM: the files stay open here until QEMU has opened them.
    ram: Vec<File>,
}

impl HypervisorChild {
    /// The QEMU of a domain that libvirt has created for a restore.
    pub(crate) fn of_domain(
        identity: ProcessIdentity,
        handle: Arc<ProcessHandle>,
        domain: RestoredDomain,
    ) -> Self {
        let (cards, ram) = Default::default();
        Self { identity, handle: Some(handle), cards, domain: Some(domain), ram }
    }

    /// Gives back what QEMU has written to its RAM files, of a clone: it does not use them any more.
    pub(crate) fn empty_ram_files(&self) -> io::Result<()> {
        self.ram.iter().try_for_each(firn_memory::template::empty_file)
    }

    /// The address of its monitor.
    pub(crate) fn monitor_address(&self, vm: &VmDir) -> MonitorAddress {
        match &self.domain {
            Some(domain) => MonitorAddress::Domain(domain.address.clone()),
            None => vm.qmp_socket().into(),
        }
    }

    pub(crate) fn process_handle(&self) -> Result<&Arc<ProcessHandle>, Failure> {
        let gone = || Failure::new(FailureKind::Ended, "QEMU has ended");
        self.handle.as_ref().ok_or_else(gone)
    }

    /// Connects to its monitor, as soon as that exists.
    pub(crate) fn connect_monitor(&self, vm: &VmDir) -> Result<QemuVm, Failure> {
        let pid = self.identity.pid;
        match self.domain {
            Some(_) => monitor::connect_checked(pid, &self.monitor_address(vm), qemu::ANSWER_WAIT),
            None => qemu::connect_new((pid, self.process_handle()?), &vm.qmp_socket()),
        }
    }

    /// Keeps it alive when this value is dropped.
    pub(crate) fn keep_running(mut self) -> Result<Arc<ProcessHandle>, Failure> {
        let gone = || Failure::new(FailureKind::Ended, "QEMU has ended");
        self.handle.take().ok_or_else(gone)
    }

    /// Explains why a step failed: if QEMU has ended by itself, that is the reason.
    pub(crate) fn explain_failure(&self, failure: Failure, vm: &VmDir) -> Failure {
        use FailureKind::{Damaged, Refused, Usage};
        let is_explained = matches!(failure.kind, Damaged | Refused | Usage);
        match &self.handle {
            Some(handle) if !is_explained && matches!(handle.wait_gone(DYING_WAIT), Ok(true)) => {
                let ended = qemu::end_during_start(handle.reap_exit());
                match &self.domain {
                    Some(domain) => ended.with_hint(format!(
                        "libvirt's log of the domain has the reason: /var/log/libvirt/qemu/{}.log",
                        domain.address.domain
                    )),
                    None => with_output(ended, vm),
                }
            }
            _ => failure,
        }
    }
}

impl Drop for HypervisorChild {
    fn drop(&mut self) {
        if let Some(handle) = &self.handle {
            self.domain.iter().for_each(restored_domain::log_end);
            let _ = handle.send_kill();
            let _ = handle.wait_gone_forever();
            handle.reap_exit();
        }
    }
}

/// Devices that `firn run` adds to a VM.
pub(crate) struct Additions<'a> {
    /// The file that names the applications that may make guest calls, if the VM gets that device.
    pub(crate) calls: Option<&'a Path>,
    /// Whether the VM gets a generation ID where its machine supports one.
    pub(crate) generation_id: bool,
}

impl Additions<'_> {
    /// Adds the devices to the user's command line. Returns a note for each one that the user did
    /// not request.
    fn add_to(&self, args: Vec<String>) -> Result<(Vec<String>, Vec<String>), Failure> {
        let args = match self.calls {
            Some(_) => command_line::with_calls(&args),
            None => args,
        };
        if !self.generation_id {
            return Ok((args, Vec::new()));
        }
        let added = command_line::with_generation_id(&args, &random_uuid()?);
        Ok(match added.map_err(command_line_failure)? {
            Some(args) => {
                let device = args.last().map(String::as_str).unwrap_or_default();
                let note = format!(
                    "added -device {device}: by this a restored guest notices that it is a copy"
                );
                (args, vec![note])
            }
            None => (args, Vec::new()),
        })
    }
}

/// Runs a VM: `firn run`.
pub(crate) fn run_vm(
    context: &StartContext<'_>,
    args: &[String],
    additions: &Additions<'_>,
    old_disk: bool,
) -> Result<StartedVm, Failure> {
    additions.calls.map(calls::read_policy).transpose()?;
    let args = command_line::expand_option_files(args, |file| {
        qemu::read_option_file(&context.directory.join(file))
    });
    let (args, added) = additions.add_to(args.map_err(command_line_failure)?)?;
    let args = &args;
    let plan = command_line::plan_command(args).map_err(command_line_failure)?;
    let files = plan.disk_files();
    check_disk_kinds(&files, &context.directory)?;
    let wanted = files.into_iter();
    let wanted = wanted.map(|named| WantedDisk { file: context.directory.join(&named), named });
    let notes = disk_layers::check_old_disks(&wanted.collect::<Vec<_>>(), old_disk)?;
    let served =
        ServedDisks::open_planned(plan.disks(), &context.directory, &context.vm.disks_socket())?;
    let plan = plan.with_disks(&context.vm.disks_socket());
    let ram = create_ram_files(plan.ram()).while_doing("creating the VM's memory")?;
    let mut sockets = CardSockets::create_pairs(plan.cards(), &context.directory, context.vm)?;
    sockets.connect_uplinks()?;
    let augmented =
        plan.augment(&qemu_paths(context, &ram, &sockets)).map_err(command_line_failure)?;
    let child = launch_qemu(context.vm, &augmented, (ram, &[]), &sockets)?;
    let qemu_log = |failure| with_output(failure, context.vm);
    let mut vm = child.connect_monitor(context.vm).map_err(qemu_log)?;
    let hypervisor_record = describe_vm(context, args, &augmented, &child, &served, &mut vm)
        .map_err(|failure| child.explain_failure(failure, context.vm))?;
    let facts = start_facts(&hypervisor_record, &[notes, added, augmented.notes].concat());
    record_running(context.journal, hypervisor_record)?;
    let (pid, connections) = (child.identity.pid, sockets.uplink_connections());
    let network = VmNetwork::open_cards(pid, &child.cards, connections, true)
        .map_err(|failure| child.explain_failure(failure, context.vm))?;
    let (network, served) = (Some(Arc::new(network)), Some(Arc::new(served)));
    let (restoring, standby) = (None, None);
    let (guards, files) = Default::default();
    let hypervisor = child.keep_running()?;
    Ok(StartedVm { hypervisor, restoring, standby, network, served, facts, guards, files })
}

fn describe_vm(
    context: &StartContext<'_>,
    args: &[String],
    augmented: &AugmentedCommand,
    child: &HypervisorChild,
    served: &ServedDisks,
    vm: &mut QemuVm,
) -> Result<HypervisorRecord, Failure> {
    let layout = vm.layout().while_doing("finding the guest's memory")?;
    qemu::open_memory(child.identity.pid, &layout)?;
    let known = KnownHypervisor {
        process: child.identity.clone(),
        qmp: context.vm.qmp_socket().into(),
        launched: true,
        user_args: args.to_vec(),
        args: augmented.args.clone(),
        directory: context.directory.clone(),
        drives: Vec::new(),
        cards: child.cards.clone(),
        served: served.disk_records(),
    };
    let hypervisor_record =
        qemu::describe_hypervisor(vm, known, &layout, context.vm.name().as_str())?;
    context.stores.map(|_| check_stores(&hypervisor_record.meta)).transpose()?;
    Ok(hypervisor_record)
}

/// Checks whether stores can be recorded in this VM.
pub(crate) fn check_stores(meta: &ImageMeta) -> Result<(), Failure> {
    if meta.qemu.accel == "tcg" {
        return Ok(());
    }
    let text = format!("stores can't be recorded in a VM that runs under {}", meta.qemu.accel);
    let hint = "omit --stores: Firn then reports to applications which pages they wrote";
    Err(Failure::new(FailureKind::Usage, text).with_hint(hint))
}

/// Attaches to a VM: `firn attach`. `before` is the record of a VM that Firn was detached from.
pub(crate) fn attach_vm(
    context: &StartContext<'_>,
    pid: i32,
    qmp: &MonitorAddress,
    before: Option<&HypervisorRecord>,
    old_disk: bool,
) -> Result<StartedVm, Failure> {
    let no_process = || process_check::no_process(pid);
    let process = ProcessIdentity::from_pid(pid).map_err(|_| no_process())?;
    let hypervisor =
        process.open_handle().while_doing("opening the process")?.ok_or_else(no_process)?;
    refuse_known_process(context, &process)?;
    hypervisor.keep_ownership(QemuOwnership::take_process(&process)?);
    let mut vm = monitor::connect_checked(pid, qmp, qemu::ANSWER_WAIT)?;
    let drives = vm.drives().while_doing("querying the VM's disks")?;
    let wanted =
        |drive: &Drive| WantedDisk { named: drive.name.clone(), file: drive.top_file().to_owned() };
    let notes =
        disk_layers::check_old_disks(&drives.iter().map(wanted).collect::<Vec<_>>(), old_disk)?;
    let (args, directory) = qemu::command_line(pid).while_doing("reading QEMU's command line")?;
    let plain = qemu::restorable_command(qmp, pid, &args);
    let user_args = before.map_or(plain.args, |it| it.meta.qemu.user_args.clone());
    let layout = qemu::find_layout(&mut vm, &user_args)?;
    qemu::open_memory(pid, &layout)?;
    let known = KnownHypervisor {
        process,
        qmp: qmp.clone(),
        launched: before.is_some_and(|before| before.launched),
        user_args,
        args,
        directory: before.map_or(directory, |it| it.meta.qemu.directory.clone()),
        drives: before.map(|it| it.meta.drives.clone()).unwrap_or_default(),
        cards: before.map(|it| it.cards.clone()).unwrap_or_default(),
        // Firn does not detach from a VM with served disks.
        served: Vec::new(),
    };
    let hypervisor_record =
        qemu::describe_hypervisor(&mut vm, known, &layout, context.vm.name().as_str())?;
    let facts = start_facts(&hypervisor_record, &[notes, plain.notes].concat());
    record_running(context.journal, hypervisor_record)?;
    let hypervisor = Arc::new(hypervisor);
    let (restoring, standby, network, served) = (None, None, None, None);
    let (guards, files) = Default::default();
    Ok(StartedVm { hypervisor, restoring, standby, network, served, facts, guards, files })
}

/// Refuses a process that another VM of this runtime directory has, even if that VM has no
/// supervisor at the moment.
fn refuse_known_process(
    context: &StartContext<'_>,
    process: &ProcessIdentity,
) -> Result<(), Failure> {
    for vm in context.vm.runtime_dir().list_vms().while_doing("listing the other VMs")? {
        let journal = Journal::load(&vm.journal_file()).ok().flatten();
        let is_it = |journal: &Journal| {
            let hypervisor_record = journal.hypervisor_record.as_ref();
            hypervisor_record.is_some_and(|hypervisor_record| hypervisor_record.process == *process)
                && !matches!(journal.phase, VmPhase::Ended { .. })
        };
        let Some(journal) = journal.filter(is_it).filter(|_| vm.name() != context.vm.name()) else {
            continue;
        };
        let (pid, name) = (process.pid, vm.name());
        let text = format!("process {pid} is VM {name} already");
        let hint = match journal.phase {
            VmPhase::Detached => format!("`firn attach {name}` attaches to it again"),
            _ => format!("`firn detach {name}` releases it"),
        };
        return Err(Failure::new(FailureKind::Busy, text).with_hint(hint));
    }
    Ok(())
}

fn record_running(
    journal: &JournalFile,
    hypervisor_record: HypervisorRecord,
) -> Result<(), Failure> {
    let change = |journal: &mut Journal| {
        journal.hypervisor_record = Some(hypervisor_record);
        journal.phase = VmPhase::Running;
    };
    journal.update(change).while_doing("writing the journal")
}

pub(crate) fn start_facts(
    hypervisor_record: &HypervisorRecord,
    notes: &[String],
) -> serde_json::Value {
    json!({
        "name": hypervisor_record.meta.name,
        "pid": hypervisor_record.process.pid,
        "qmp": hypervisor_record.qmp,
        "qemu": hypervisor_record.meta.qemu.version,
        "accel": hypervisor_record.meta.qemu.accel,
        "memory_bytes": hypervisor_record.meta.memory_bytes,
        "vcpus": hypervisor_record.meta.vcpus,
        "args": hypervisor_record.meta.qemu.args,
        "notes": notes,
    })
}

/// Creates a memory file for each region of RAM. QEMU inherits them, so that they end with it.
pub(crate) fn create_ram_files(plans: &[RamPlan]) -> io::Result<Vec<File>> {
    let file = |plan: &RamPlan| {
        let file = memfd_create("firn-ram", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, plan.bytes.next_multiple_of(PAGE_SIZE as u64))?;
        Ok(File::from(file))
    };
    plans.iter().map(file).collect()
}

pub(crate) fn qemu_paths(
    context: &StartContext<'_>,
    ram: &[File],
    sockets: &CardSockets,
) -> AddedPaths {
    let path = |file: &File| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let vm = context.vm;
    let plugin =
        |library: &Path| StorePlugin { library: library.to_owned(), orders: vm.stores_socket() };
    let stores = context.stores.map(plugin);
    let (qmp, calls, cards) = (vm.qmp_socket(), vm.calls_file(), sockets.descriptor_numbers());
    AddedPaths { qmp, ram: ram.iter().map(path).collect(), calls, stores, cards }
}

/// Changes to the former working directory of a QEMU that is to be started, if that still exists.
pub(crate) fn enter_directory(directory: &Path) {
    if std::env::set_current_dir(directory).is_err() {
        tracing::warn!("the directory in which the VM was started does not exist any more");
    }
}

/// Starts QEMU. It inherits its RAM files, and the files of the template if it is a clone.
pub(crate) fn launch_qemu(
    vm: &VmDir,
    augmented: &AugmentedCommand,
    (ram, template): (Vec<File>, &[File]),
    sockets: &CardSockets,
) -> Result<HypervisorChild, Failure> {
    let cards = sockets.card_records()?;
    let inherit: Vec<_> =
        ram.iter().chain(template).map(AsFd::as_fd).chain(sockets.descriptors()).collect();
    let launched = firn_vmm::launch_hypervisor(&augmented.args, &inherit, &vm.qemu_log())
        .while_doing("starting QEMU")
        .map_err(|failure| failure.with_hint("is QEMU installed? `firn doctor` checks it"))?;
    let (identity, handle) = identify_qemu(launched, vm)?;
    let handle = Some(Arc::new(handle));
    Ok(HypervisorChild { identity, handle, cards, domain: None, ram })
}

/// Opens a pidfd, which reports the end of the process from here on; [`ProcessHandle::reap_exit`]
/// reaps it.
fn identify_qemu(
    mut launched: LaunchedProcess,
    vm: &VmDir,
) -> Result<(ProcessIdentity, ProcessHandle), Failure> {
    let identity = ProcessIdentity::from_pid(launched.pid());
    let handle = identity.as_ref().ok().and_then(|identity| identity.open_handle().ok().flatten());
    match (identity, handle) {
        (Ok(identity), Some(handle)) => {
            let owned = QemuOwnership::take_process(&identity);
            let owned = owned.inspect_err(|_| drop(launched.kill()))?;
            handle.keep_ownership(owned);
            Ok((identity, handle))
        }
        _ => {
            let exit = launched.kill().map_or(ProcessExit::Unknown, ProcessExit::from);
            Err(with_output(qemu::end_during_start(exit), vm))
        }
    }
}

/// Adds the last lines of QEMU's output to a failure.
pub(crate) fn with_output(mut failure: Failure, vm: &VmDir) -> Failure {
    let output = read_log_tail(&vm.qemu_log(), TAIL_BYTES).unwrap_or_default();
    let lines: Vec<&str> = output.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines.len().saturating_sub(5);
    failure.chain.extend(lines[last..].iter().map(|line| (*line).to_owned()));
    failure
}
