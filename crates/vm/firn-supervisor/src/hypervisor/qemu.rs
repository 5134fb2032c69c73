//! A QEMU that a supervisor manages: it is described once, then ended, paused or saved on request.
//!
//! The monitor is connected for each operation and released afterwards, because it serves one
//! client at a time, and that of a VM that Firn attached to belongs to its user.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_memory::{GuestMemory, Process, RegionLocation};
use firn_types::ThreadId;
use firn_vmm::command_line::PlainCommand;
use firn_vmm::{AcceleratorKind, MemoryLayout, QemuVm, QmpError, command_line};
use serde_json::Value;

use crate::hypervisor::monitor;
use crate::processes::identity::{ProcessHandle, ProcessIdentity};
use crate::records::control_protocol::StopRequest;
use crate::records::cpu::CpuFacts;
use crate::records::device_records::{NetworkCard, ServedDisk};
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{HypervisorRecord, unix_seconds};
use crate::records::meta::{self, FrozenDrive, ImageMeta, QemuFacts};
use crate::records::monitor_address::MonitorAddress;
use crate::records::process_exit::ProcessExit;

/// The maximum time that QEMU may take to answer a monitor command.
pub(crate) const ANSWER_WAIT: Duration = Duration::from_secs(30);

/// The maximum time that QEMU may take to answer if an answer is needed at once, or if QEMU is
/// about to be killed anyway.
pub(crate) const SHORT_WAIT: Duration = Duration::from_secs(2);

/// The maximum time that a QEMU that is known to hang may take to answer.
const HUNG_WAIT: Duration = Duration::from_millis(200);

/// The maximum time that QEMU may take to end after `quit`: it flushes its disks.
const QUIT_WAIT: Duration = Duration::from_secs(20);

/// The largest option file of QEMU that is read. Known ones have a few KiB.
const OPTION_FILE_BYTES_MAX: u64 = 1 << 20;

/// The interval between attempts to connect to a monitor that does not exist yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// The memory of a VM, opened.
pub(crate) struct VmMemory {
    pub(crate) process: Arc<Process>,
    pub(crate) guest: Arc<GuestMemory>,
}

/// Connects to the monitor of a QEMU that has just been started. Waits for the monitor as long as
/// QEMU lives.
pub(crate) fn connect_new(
    (pid, hypervisor): (i32, &ProcessHandle),
    qmp: &Path,
) -> Result<QemuVm, Failure> {
    let deadline = Instant::now() + ANSWER_WAIT;
    let stream = loop {
        match UnixStream::connect(qmp) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() >= deadline => {
                return Err(error).while_doing("waiting for QEMU's monitor");
            }
            Err(_) => {}
        }
        if hypervisor.wait_gone(RETRY_INTERVAL).while_doing("waiting for QEMU")? {
            return Err(end_during_start(hypervisor.reap_exit()));
        }
    };
    monitor::check_peer(&stream, pid, qmp)?;
    match monitor::negotiate_qmp(stream, ANSWER_WAIT) {
        Err(QmpError::Closed { .. }) => {
            hypervisor.wait_gone(SHORT_WAIT).while_doing("waiting for QEMU")?;
            Err(end_during_start(hypervisor.reap_exit()))
        }
        connected => connected.while_doing(monitor::CONNECTING),
    }
}

pub(crate) fn end_during_start(exit: ProcessExit) -> Failure {
    Failure::new(FailureKind::Ended, format!("QEMU ended while it was starting ({exit})"))
}

/// Connects to the monitor of a running VM.
pub(crate) fn connect_monitor(hypervisor_record: &HypervisorRecord) -> Result<QemuVm, Failure> {
    connect_within(hypervisor_record, ANSWER_WAIT)
}

pub(crate) fn connect_within(
    hypervisor_record: &HypervisorRecord,
    timeout: Duration,
) -> Result<QemuVm, Failure> {
    monitor::connect_checked(hypervisor_record.process.pid, &hypervisor_record.qmp, timeout)
}

/// Connects for an answer that a command can do without, unless another process uses the monitor.
pub(crate) fn connect_if_free(hypervisor_record: &HypervisorRecord) -> Result<QemuVm, Failure> {
    monitor::connect_if_free(hypervisor_record.process.pid, &hypervisor_record.qmp, SHORT_WAIT)
}

/// Finds a VM's memory, with the names that its regions would have after a restore.
pub(crate) fn find_layout(vm: &mut QemuVm, user_args: &[String]) -> Result<MemoryLayout, Failure> {
    let layout = vm.layout().while_doing("finding the guest's memory")?;
    // A command line that can't be restored has other names.
    Ok(match command_line::plan_command(user_args) {
        Ok(plan) => layout.named_by(&plan),
        Err(_) => layout,
    })
}

/// Opens a VM's memory at the addresses in the layout.
pub(crate) fn open_memory(pid: i32, layout: &MemoryLayout) -> Result<VmMemory, Failure> {
    let process = Process::open(pid)
        .while_doing_as(FailureKind::Host, "opening the hypervisor process")
        .map_err(with_doctor_hint)?;
    let process = Arc::new(process);
    let addresses = layout.locations.iter().map(|location| (location.id.clone(), location.hva));
    let locations = locate_regions(layout.map.regions(), &addresses.collect::<Vec<_>>());
    let guest = GuestMemory::open_any(Arc::clone(&process), layout.map.clone(), &locations)
        .while_doing_as(FailureKind::Host, "opening the guest's memory")?;
    Ok(VmMemory { process, guest: Arc::new(guest) })
}

/// Opens a VM's memory at the addresses in the journal, without a query to a hypervisor that may
/// not be able to answer.
pub(crate) fn open_journaled(
    hypervisor_record: &HypervisorRecord,
) -> Result<(Arc<Process>, Arc<GuestMemory>), Failure> {
    let process = Process::open(hypervisor_record.process.pid)
        .while_doing("opening the hypervisor process")?;
    let process = Arc::new(process);
    let locations = locate_regions(hypervisor_record.map.regions(), &hypervisor_record.locations);
    let memory =
        GuestMemory::open_any(Arc::clone(&process), hypervisor_record.map.clone(), &locations)
            .while_doing("opening the guest's memory")?;
    Ok((process, Arc::new(memory)))
}

pub(crate) fn locate_regions(
    regions: &[firn_types::RamRegion],
    host_addresses: &[(String, firn_types::HostVirt)],
) -> Vec<RegionLocation> {
    let location = |region: &firn_types::RamRegion| {
        let (_, hva) = host_addresses.iter().find(|(id, _)| *id == region.id)?;
        Some(RegionLocation { region: region.clone(), hva: *hva })
    };
    regions.iter().filter_map(location).collect()
}

fn with_doctor_hint(failure: Failure) -> Failure {
    failure.with_hint("`firn doctor` lists what this host and user lack")
}

/// What is known of a QEMU before it is queried.
pub(crate) struct KnownHypervisor {
    pub(crate) process: ProcessIdentity,
    pub(crate) qmp: MonitorAddress,
    pub(crate) launched: bool,
    pub(crate) user_args: Vec<String>,
    pub(crate) args: Vec<String>,
    pub(crate) directory: PathBuf,
    /// The drives of the image that it was restored from.
    pub(crate) drives: Vec<FrozenDrive>,
    /// Its network cards whose frames pass through the supervisor.
    pub(crate) cards: Vec<NetworkCard>,
    /// Its disks that the supervisor serves.
    pub(crate) served: Vec<ServedDisk>,
}

/// Queries a QEMU for the facts that the journal, and later an image, contain about it.
pub(crate) fn describe_hypervisor(
    vm: &mut QemuVm,
    known: KnownHypervisor,
    layout: &MemoryLayout,
    name: &str,
) -> Result<HypervisorRecord, Failure> {
    const QUERYING: &str = "querying QEMU about the VM";
    let vcpus: Vec<ThreadId> =
        vm.vcpus().while_doing(QUERYING)?.iter().map(|vcpu| vcpu.tid).collect();
    let accel = match vm.accel().while_doing(QUERYING)? {
        AcceleratorKind::Kvm => "kvm",
        AcceleratorKind::Tcg => "tcg",
    };
    let cpu = CpuFacts::seen_by_guest(accel, &known.args);
    let meta = ImageMeta {
        version: meta::VERSION,
        name: name.to_owned(),
        created: unix_seconds(),
        frozen: false,
        connections: Vec::new(),
        firn: env!("CARGO_PKG_VERSION").to_owned(),
        machine: vm.machine_type().while_doing(QUERYING)?,
        qemu: QemuFacts {
            version: vm.version().to_string(),
            accel: accel.to_owned(),
            user_args: known.user_args,
            args: known.args,
            directory: known.directory,
        },
        memory_bytes: layout.map.ram_bytes(),
        vcpus: vcpus.len() as u32,
        disks: vm.disks().while_doing(QUERYING)?,
        drives: known.drives,
        found_late: None,
        held: false,
        paused: None,
        cpu,
        unrestorable: Vec::new(),
        domain_xml: None,
        domain_definition: None,
    };
    Ok(HypervisorRecord {
        process: known.process,
        qmp: known.qmp,
        launched: known.launched,
        map: layout.map.clone(),
        locations: layout
            .locations
            .iter()
            .map(|location| (location.id.clone(), location.hva))
            .collect(),
        vcpus,
        meta,
        since: unix_seconds(),
        access_bits: None,
        calls: None,
        cards: known.cards,
        served: known.served,
        followed: false,
    })
}

/// Ends a QEMU. If QEMU does not quit on request it is killed only by force; if its guest ignores
/// the power button, it is not killed.
pub(crate) fn end_hypervisor(
    hypervisor_record: &HypervisorRecord,
    hypervisor: &ProcessHandle,
    request: StopRequest,
) -> Result<(), Failure> {
    match request.powerdown_s {
        Some(seconds) => power_down(hypervisor_record, hypervisor, Duration::from_secs(seconds)),
        None => quit_qemu(hypervisor_record, hypervisor, request.force),
    }
}

fn power_down(
    hypervisor_record: &HypervisorRecord,
    hypervisor: &ProcessHandle,
    wait: Duration,
) -> Result<(), Failure> {
    let mut vm = connect_monitor(hypervisor_record)?;
    vm.qmp().execute("system_powerdown", Value::Null).while_doing("pressing the power button")?;
    drop(vm);
    wait_powerdown(hypervisor, wait)
}

/// Waits until a guest whose power button was pressed has shut down.
pub(crate) fn wait_powerdown(hypervisor: &ProcessHandle, wait: Duration) -> Result<(), Failure> {
    if hypervisor.wait_gone(wait).while_doing("waiting for the VM to end")? {
        return Ok(());
    }
    let text = format!("the guest did not power down within {} s", wait.as_secs());
    let failure = Failure::new(FailureKind::Interrupted, text);
    Err(failure.with_hint("`firn stop` without --powerdown ends the VM without its guest"))
}

fn quit_qemu(
    hypervisor_record: &HypervisorRecord,
    hypervisor: &ProcessHandle,
    force: bool,
) -> Result<(), Failure> {
    let wait = if force { SHORT_WAIT } else { QUIT_WAIT };
    let asked = connect_within(hypervisor_record, wait)
        .and_then(|mut vm| vm.quit().while_doing("sending `quit` to QEMU"));
    let quits = match &asked {
        Ok(()) => hypervisor.wait_gone(QUIT_WAIT).while_doing("waiting for QEMU to end")?,
        // It may have ended already.
        Err(failure) => {
            tracing::warn!("{failure}");
            hypervisor.wait_gone(Duration::ZERO).while_doing("waiting for QEMU to end")?
        }
    };
    match (quits, asked) {
        (true, _) => Ok(()),
        (false, _) if force => hypervisor.send_kill().while_doing("killing QEMU"),
        (false, Ok(())) => Err(still_running(hypervisor_record, "did not end")),
        (false, Err(failure)) => Err(Failure {
            chain: [still_running(hypervisor_record, "can't be asked to end").chain, failure.chain]
                .concat(),
            ..still_running(hypervisor_record, "")
        }),
    }
}

/// The failure for a QEMU that continues to run: it is not killed, because data that it has not
/// written to its disks would be lost.
fn still_running(hypervisor_record: &HypervisorRecord, how: &str) -> Failure {
    let text = format!("QEMU (process {}) {how}", hypervisor_record.process.pid);
    let hint = format!(
        "run the command again, or `firn stop --force {}` kills it: what it has not written to its disks is lost",
        hypervisor_record.meta.name
    );
    Failure::new(FailureKind::Interrupted, text).with_hint(hint)
}

/// Whether the vCPUs are paused; `None` if QEMU does not report that at once.
pub(crate) fn is_paused(hypervisor_record: &HypervisorRecord) -> Option<bool> {
    let mut vm = connect_if_free(hypervisor_record).ok()?;
    Some(!vm.status().ok()?.running)
}

/// Whether a QEMU that did not answer before answers now.
pub(crate) fn is_answering(hypervisor_record: &HypervisorRecord) -> bool {
    connect_within(hypervisor_record, HUNG_WAIT).is_ok()
}

/// The command line that a restore starts from, of a VM that was started by `args` without Firn as
/// process `pid`. An option file that cannot be read stays, with a note: such a VM cannot be saved.
pub(crate) fn restorable_command(
    monitor: &MonitorAddress,
    pid: i32,
    args: &[String],
) -> PlainCommand {
    let seen_by_qemu = |file: &str| match Path::new(file).strip_prefix("/") {
        Ok(inner) => PathBuf::from(format!("/proc/{pid}/root")).join(inner),
        Err(_) => PathBuf::from(format!("/proc/{pid}/cwd")).join(file),
    };
    let read = |file: &str| read_option_file(&seen_by_qemu(file));
    let (args, notes) = match command_line::expand_option_files(args, read) {
        Ok(args) => (args, Vec::new()),
        Err(error) => (args.to_vec(), vec![format!("the VM can't be saved: {error}")]),
    };
    match monitor {
        MonitorAddress::Socket(_) => PlainCommand { args, notes },
        MonitorAddress::Domain(_) => {
            let plain = command_line::without_libvirt(&args);
            PlainCommand { notes: [notes, plain.notes].concat(), ..plain }
        }
    }
}

/// Reads an option file (`-readconfig`).
pub(crate) fn read_option_file(path: &Path) -> io::Result<String> {
    firn_files::read_text(path, OPTION_FILE_BYTES_MAX)
}

/// The command line and working directory of a process, with which a VM was started that Firn
/// attaches to.
pub(crate) fn command_line(pid: i32) -> io::Result<(Vec<String>, PathBuf)> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline"))?;
    let words = line.strip_suffix(b"\0").unwrap_or(&line).split(|&byte| byte == 0);
    let args = words.map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    Ok((args, std::fs::read_link(format!("/proc/{pid}/cwd"))?))
}
