//! The supervisor process, from its start, or from the end of its predecessor, to the event loop.
//!
//! ```text
//!   firn run ---- plan ---> take the role -> journal "starting" -> guard -> QEMU -> journal "running" -> socket -> loop
//!            <--- reply ----------------------------------------------------------------------------------'
//!
//!   guard ---- --recover -> take the role -> read journal -> decide -> recover -> socket -> loop
//! ```

use std::fs::File;
use std::io::{self, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_image::key_ring;

use crate::client::StartReplyWriter;
use crate::daemon::event_loop::VmSupervisor;
use crate::devices::card_filters::FilterContext;
use crate::devices::network::VmNetwork;
use crate::devices::served_disks::ServedDisks;
use crate::hypervisor::qemu;
use crate::operations::restore::{self, RestoreChoices};
use crate::operations::standby;
use crate::operations::vm_operations::QemuOperations;
use crate::operations::vm_start::{self, Additions, StartContext, StartedVm};
use crate::processes::descriptors;
use crate::processes::identity::ProcessHandle;
use crate::processes::lock::{ProcessRole, RoleLock};
use crate::processes::runtime::{RuntimeDir, VmDir};
use crate::processes::spawn;
use crate::records::control_protocol::{self, LINE_BYTES_MAX, SupervisorPlan, SupervisorReply};
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{HypervisorRecord, Journal, JournalFile, VmPhase};
use crate::records::name::VmName;
use crate::recovery::guard;
use crate::recovery::image_files;
use crate::recovery::recovery_run::take_over;

/// The maximum wait for a role that another process holds without managing a VM.
const ROLE_WAIT: Duration = Duration::from_secs(1);

/// The interval between attempts to take the role.
const ROLE_RETRY: Duration = Duration::from_millis(1);

/// Runs the first supervisor of a VM: it reads its plan from standard input and replies on standard
/// output.
pub fn run_supervisor(base: &RuntimeDir, name: &VmName) -> io::Result<()> {
    let since = Instant::now();
    spawn::detach_session();
    firn_memory::heap::return_large_blocks_when_freed();
    let mut replies = StartReplyWriter::new(io::stdout());
    let vm = base.vm_dir(name);
    let begun = read_plan().and_then(|plan| {
        let begun = NewSupervisor::claim_name(base, &vm, &plan)?;
        Ok((plan, begun))
    });
    let (plan, begun) = match begun {
        Ok(begun) => begun,
        Err(failure) => {
            replies.send_reply(&SupervisorReply::Failed(failure));
            return Ok(());
        }
    };
    match begun.start_vm(base, &plan, since, &mut replies) {
        Ok(started) => {
            let facts = started.facts.clone();
            begun.manage_vm(base, started, move || {
                replies.send_reply(&SupervisorReply::Done { facts });
                let _ = to_background();
            })
        }
        Err(failure) => {
            tracing::error!("{failure}");
            // Undone before the client gets a reply, so that the name is free by then.
            let undone = begun.undo_start();
            replies.send_reply(&SupervisorReply::Failed(failure));
            undone
        }
    }
}

fn read_plan() -> Result<SupervisorPlan, Failure> {
    let mut from = BufReader::new(io::stdin());
    match control_protocol::read_line(&mut from, LINE_BYTES_MAX)? {
        Some(line) => Ok(control_protocol::decode_message(&line)?),
        None => Err(Failure::new(FailureKind::Usage, "there is no plan on standard input")),
    }
}

/// A new supervisor, which has the role and a journal.
struct NewSupervisor {
    vm: VmDir,
    journal: Arc<JournalFile>,
    /// The journal of a VM that Firn is detached from and is now to attach to again.
    before: Option<Journal>,
    role: RoleLock,
}

impl NewSupervisor {
    /// Claims a name that is free, or that of a VM which is over.
    fn claim_name(base: &RuntimeDir, vm: &VmDir, plan: &SupervisorPlan) -> Result<Self, Failure> {
        vm.create_private().while_doing_as(FailureKind::Host, "creating the runtime directory")?;
        let role = take_role(vm)?.ok_or_else(|| name_taken(vm))?;
        let left = Journal::load(&vm.journal_file()).while_doing("reading the old journal")?;
        let before = left.filter(is_in_use);
        match &before {
            Some(journal) if !is_reattached_by(journal, plan) => return Err(name_taken(vm)),
            Some(_) => {}
            None => vm.remove_contents().while_doing("clearing the runtime directory")?,
        }
        crate::processes::log::open_log(vm).while_doing("opening the log")?;
        tracing::info!("supervisor of {} in {}", vm.name(), base.path().display());
        let launching = (!matches!(plan, SupervisorPlan::Attach { .. })).then(|| vm.qmp_socket());
        let hypervisor_record =
            before.as_ref().and_then(|journal| journal.hypervisor_record.clone());
        let overlays = before.as_ref().map(|it| it.overlays.clone()).unwrap_or_default();
        let shut = before.as_ref().is_some_and(|journal| journal.shut);
        let lease = before.as_ref().and_then(|journal| journal.lease);
        let filters = before.as_ref().map(|it| it.filters.clone()).unwrap_or_default();
        let mirrors = before.as_ref().map(|it| it.mirrors.clone()).unwrap_or_default();
        let new = Journal::new(vm.name().clone(), launching);
        let journal = Journal { hypervisor_record, overlays, shut, lease, filters, mirrors, ..new };
        let journal =
            JournalFile::create(vm.journal_file(), journal).while_doing("writing the journal")?;
        Ok(Self { vm: vm.clone(), journal: Arc::new(journal), before, role })
    }

    fn start_vm(
        &self,
        base: &RuntimeDir,
        plan: &SupervisorPlan,
        since: Instant,
        replies: &mut StartReplyWriter<io::Stdout>,
    ) -> Result<StartedVm, Failure> {
        let directory = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
        let stores = plan.stores_plugin();
        let context = StartContext { vm: &self.vm, journal: &self.journal, directory, stores };
        // The run record of an earlier VM of this name.
        let _ = std::fs::remove_file(self.vm.run_record());
        // The guards start while QEMU does, because they need not wait for anything.
        let guards = self.start_guards(base).while_doing("starting the guards")?;
        let mut report = |progress| replies.send_reply(&SupervisorReply::Progress(progress));
        let started = match plan {
            SupervisorPlan::Standby { listen, uplinks, disks } => {
                let choices = standby::StandbyChoices { uplinks, disks };
                standby::start_standby(&context, listen, &choices, &mut report)
            }
            SupervisorPlan::Run { args, old_disk, generation_id, .. } => {
                let additions =
                    Additions { calls: plan.calls_file(), generation_id: *generation_id };
                vm_start::run_vm(&context, args, &additions, *old_disk)
            }
            SupervisorPlan::Attach { pid, qmp, old_disk, .. } => {
                let before =
                    self.before.as_ref().and_then(|journal| journal.hypervisor_record.as_ref());
                vm_start::attach_vm(&context, *pid, qmp, before, *old_disk)
            }
            SupervisorPlan::Restore {
                image,
                keys,
                mode,
                on_error,
                fill,
                force,
                trust,
                account_use,
                learn,
                run,
                disks,
                disk_dir,
                overrides,
                libvirt,
                family,
                ..
            } => {
                let (mode, force, account_use, learn) = (*mode, *force, *account_use, *learn);
                let (on_error, fill, run, trust) = (*on_error, *fill, *run, *trust);
                let (disks, disk_dir) = (*disks, disk_dir.as_deref());
                let calls = plan.calls_file();
                key_ring().add_keys(keys);
                let choices = RestoreChoices {
                    image,
                    keys,
                    mode,
                    on_error,
                    fill,
                    force,
                    trust,
                    account_use,
                    learn,
                    run,
                    disks,
                    disk_dir,
                    calls,
                    overrides,
                    libvirt: libvirt.as_ref(),
                    family: family.as_deref(),
                };
                restore::restore_vm(&context, &choices, since, &mut report)
            }
        };
        self.record_idle_work(plan)?;
        let started = started?;
        let mut handles = Vec::new();
        for (role, handle, to) in guards {
            // If a guard has died already, the event loop starts another one.
            let _ = descriptors::send_files(&to, &started.files);
            handles.extend(handle.map(|handle| (role, handle)));
        }
        Ok(StartedVm { guards: handles, ..started })
    }

    /// Starts the guards, each with the socket by which it receives open files.
    fn start_guards(
        &self,
        base: &RuntimeDir,
    ) -> io::Result<Vec<(ProcessRole, Option<ProcessHandle>, UnixStream)>> {
        let start = |role| {
            let (child, to) = spawn::spawn_guard(base, &self.vm, role)?;
            Ok((role, guard::handle_of(&child)?, to))
        };
        [ProcessRole::Guard, ProcessRole::Watcher].into_iter().map(start).collect()
    }

    /// Records which work the supervisor is to do while no operation runs, before it does it.
    fn record_idle_work(&self, plan: &SupervisorPlan) -> Result<(), Failure> {
        let (access_bits, calls) = (plan.access_bits(), plan.calls_file());
        let change = |journal: &mut Journal| {
            if let Some(hypervisor_record) = &mut journal.hypervisor_record {
                hypervisor_record.access_bits = access_bits;
                hypervisor_record.calls = calls.map(Path::to_owned);
            }
        };
        match access_bits.is_some() || calls.is_some() {
            true => self.journal.update(change).while_doing("writing the journal"),
            false => Ok(()),
        }
    }

    /// Reverts the start. If the VM was forgotten already, nothing is left of it, and what
    /// has its name now belongs to another VM.
    fn undo_start(self) -> io::Result<()> {
        match self.before {
            _ if !self.role.is_current() => Ok(()),
            Some(journal) => journal.write_file(&self.vm.journal_file()).map_err(io::Error::other),
            None => self.vm.remove_dir().map_err(io::Error::other),
        }
    }

    fn manage_vm(
        self,
        base: &RuntimeDir,
        started: StartedVm,
        ready: impl FnOnce(),
    ) -> io::Result<()> {
        manage_vm(base, &self.vm, self.journal, started, ready)
    }
}

/// Whether the name is in use. A VM that runs without Firn after a detach keeps its name, so that
/// its monitor socket is not lost.
fn is_in_use(journal: &Journal) -> bool {
    let alive = journal
        .hypervisor_record
        .as_ref()
        .is_some_and(|hypervisor_record| hypervisor_record.process.is_alive());
    !journal.phase.is_over() || (alive && journal.phase == VmPhase::Detached)
}

/// Whether the plan attaches to the VM that Firn detached from.
fn is_reattached_by(journal: &Journal, plan: &SupervisorPlan) -> bool {
    let hypervisor_record = journal.hypervisor_record.as_ref();
    let same = |wanted: i32| {
        hypervisor_record.is_some_and(|hypervisor_record| hypervisor_record.process.pid == wanted)
    };
    journal.phase == VmPhase::Detached
        && matches!(plan, SupervisorPlan::Attach { pid, .. } if same(*pid))
}

/// Takes the role, unless the process that has it manages a VM. A supervisor whose VM has ended,
/// and a successor of an earlier VM of that name which has found nothing to manage, have it only
/// briefly.
fn take_role(vm: &VmDir) -> Result<Option<RoleLock>, Failure> {
    const TAKING: &str = "taking the supervisor's role";
    let deadline = Instant::now() + ROLE_WAIT;
    loop {
        let role = RoleLock::try_take(vm.path(), ProcessRole::Supervisor).while_doing(TAKING)?;
        let settled = is_managed(vm) || Instant::now() >= deadline;
        if role.is_some() || settled {
            return Ok(role);
        }
        std::thread::sleep(ROLE_RETRY);
        vm.create_private().while_doing_as(FailureKind::Host, "creating the runtime directory")?;
    }
}

fn is_managed(vm: &VmDir) -> bool {
    match Journal::load(&vm.journal_file()) {
        Ok(journal) => journal.is_some_and(|journal| !journal.phase.is_over()),
        Err(_) => true,
    }
}

fn name_taken(vm: &VmDir) -> Failure {
    let name = vm.name();
    let text = format!("there is a VM called {name} already");
    let hint = format!(
        "choose another name; `firn stop {name}` ends that VM, `firn rm {name}` forgets one that has ended"
    );
    Failure::new(FailureKind::Busy, text).with_hint(hint)
}

fn manage_vm(
    base: &RuntimeDir,
    vm: &VmDir,
    journal: Arc<JournalFile>,
    started: StartedVm,
    ready: impl FnOnce(),
) -> io::Result<()> {
    let hypervisor = started.hypervisor;
    let network = started.network.unwrap_or_else(|| open_network(vm, &journal));
    network.set_lease(&vm.lease_file(), journal.current_journal().lease);
    if started.standby.is_none() {
        network.plug_uplinks();
    }
    let served = started.served.unwrap_or_default();
    let (journals, hypervisors) = (Arc::clone(&journal), Arc::clone(&hypervisor));
    let operations = Arc::new(QemuOperations::new(journals, hypervisors, network, served, vm));
    let supervisor = VmSupervisor {
        base: base.clone(),
        vm: vm.clone(),
        journal,
        hypervisor,
        operations,
        restoring: started.restoring,
        standby: started.standby,
        guards: started.guards,
        files: started.files,
    };
    supervisor.run_event_loop(ready)
}

/// Opens the network cards. If that fails, the VM continues without them, and the journal records
/// it.
fn open_network(vm: &VmDir, journal: &JournalFile) -> Arc<VmNetwork> {
    let Journal { hypervisor_record, shut, .. } = journal.current_journal();
    let open = |hypervisor_record: &HypervisorRecord| {
        VmNetwork::open_cards(
            hypervisor_record.process.pid,
            &hypervisor_record.cards,
            Vec::new(),
            !shut,
        )
    };
    let opened = hypervisor_record.as_ref().map_or_else(|| Ok(VmNetwork::default()), open);
    let network = opened.unwrap_or_else(|failure| {
        record_network_failure(journal, &failure);
        VmNetwork::default()
    });
    if let Err(failure) = take_over_filters(vm, journal, &network) {
        record_network_failure(journal, &failure);
    }
    Arc::new(network)
}

/// Continues with the filters of a dead supervisor, or removes them.
fn take_over_filters(
    vm: &VmDir,
    journal: &JournalFile,
    network: &VmNetwork,
) -> Result<(), Failure> {
    let Journal { hypervisor_record, shut, lease, filters, .. } = journal.current_journal();
    let Some(hypervisor_record) = hypervisor_record.filter(|_| !filters.is_empty()) else {
        return Ok(());
    };
    let mut qemu = qemu::connect_monitor(&hypervisor_record)?;
    let context = FilterContext { qemu: &mut qemu, vm, journal };
    network.take_over_filters(context, shut || lease.is_some(), !shut)
}

fn record_network_failure(journal: &JournalFile, failure: &Failure) {
    let text = format!("the VM has no network: {failure}");
    tracing::error!("{text}");
    if let Err(error) = journal.update(|journal| journal.record_failure(text)) {
        tracing::error!("{error}");
    }
}

/// Serves again the disks of a VM that lives.
fn reopen_disks(vm: &VmDir, journal: &Journal) -> Result<ServedDisks, Failure> {
    let hypervisor_record = journal
        .hypervisor_record
        .as_ref()
        .filter(|hypervisor_record| hypervisor_record.process.is_alive());
    hypervisor_record.map_or_else(
        || Ok(ServedDisks::default()),
        |it| ServedDisks::reopen_disks(&it.served, &vm.disks_socket()),
    )
}

/// Records that a VM waits for its disks because they can't be served.
fn record_disk_failure(journal: &JournalFile, failure: &Failure) {
    let text = format!("the VM waits for its disks, which can't be served: {failure}");
    tracing::error!("{text}");
    if let Err(error) = journal.update(|journal| journal.record_failure(text)) {
        tracing::error!("{error}");
    }
}

/// Runs a successor: it takes the role of a dead supervisor, recovers the VM, and manages it if
/// there is one. It is no error if another successor was faster.
pub fn run_successor(base: &RuntimeDir, name: &VmName) -> io::Result<()> {
    spawn::detach_session();
    firn_memory::heap::return_large_blocks_when_freed();
    let vm = base.vm_dir(name);
    if !vm.exists() {
        return Ok(());
    }
    let Some(_role) = RoleLock::try_take(vm.path(), ProcessRole::Supervisor)? else {
        return Ok(());
    };
    crate::processes::log::open_log(&vm)?;
    let files = image_files::receive_from_guard();
    let Some(journal) = Journal::load(&vm.journal_file()).map_err(io::Error::other)? else {
        return Ok(());
    };
    // Disks first: a hypervisor that waits for its disks answers no command.
    let served = reopen_disks(&vm, &journal);
    match take_over(&vm, journal, files) {
        Ok(Some((journal, started))) => {
            let (served, why) = match served {
                Ok(served) => (Some(Arc::new(served)), None),
                Err(failure) => (None, Some(failure)),
            };
            why.into_iter().for_each(|failure| record_disk_failure(&journal, &failure));
            manage_vm(base, &vm, journal, StartedVm { served, ..started }, || ())
        }
        Ok(None) => Ok(()),
        Err(failure) => {
            tracing::error!("{failure}");
            Err(io::Error::other(failure))
        }
    }
}

/// Closes the pipes to the process that started this supervisor, and leaves its directory.
pub(crate) fn to_background() -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    std::env::set_current_dir("/")
}
