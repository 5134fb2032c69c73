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

use crate::client::Starter;
use crate::failure::{Context, Failure, FailureKind};
use crate::guard;
use crate::held;
use crate::identity::ProcessHandle;
use crate::journal::{Journal, JournalFile, Machine, Phase};
use crate::keep::Keeper;
use crate::lock::{Role, RoleLock};
use crate::name::VmName;
use crate::network::Network;
use crate::operations::Qemu;
use crate::protocol::{self, LINE_BYTES_MAX, Plan, Reply};
use crate::recover::take_over;
use crate::restore::{self, Wanted};
use crate::runtime::{RuntimeDir, VmDir};
use crate::served::Served;
use crate::spawn;
use crate::standby;
use crate::start::{self, Place, Started};

/// The maximum wait for a role that another process holds without managing a VM.
const ROLE_WAIT: Duration = Duration::from_secs(1);

/// The interval between attempts to take the role.
const ROLE_RETRY: Duration = Duration::from_millis(1);

/// Runs the first supervisor of a VM: it reads its plan from standard input and replies on standard
/// output.
pub fn supervise(base: &RuntimeDir, name: &VmName) -> io::Result<()> {
    let since = Instant::now();
    spawn::detach_session();
    firn_memory::heap::give_back_large_blocks();
    let mut starter = Starter::new(io::stdout());
    let vm = base.vm(name);
    let begun = read_plan().and_then(|plan| {
        let begun = Begun::at(base, &vm, &plan)?;
        Ok((plan, begun))
    });
    let (plan, begun) = match begun {
        Ok(begun) => begun,
        Err(failure) => {
            starter.tell(&Reply::Failed(failure));
            return Ok(());
        }
    };
    match begun.start(base, &plan, since, &mut starter) {
        Ok(started) => {
            let facts = started.facts.clone();
            begun.keep(base, started, move || {
                starter.tell(&Reply::Done { facts });
                let _ = to_background();
            })
        }
        Err(failure) => {
            tracing::error!("{failure}");
            // Undone before the client gets a reply, so that the name is free by then.
            let undone = begun.undo();
            starter.tell(&Reply::Failed(failure));
            undone
        }
    }
}

fn read_plan() -> Result<Plan, Failure> {
    let mut from = BufReader::new(io::stdin());
    match protocol::read_line(&mut from, LINE_BYTES_MAX)? {
        Some(line) => Ok(protocol::decode(&line)?),
        None => Err(Failure::new(FailureKind::Usage, "there is no plan on standard input")),
    }
}

/// A new supervisor, which has the role and a journal.
struct Begun {
    vm: VmDir,
    journal: Arc<JournalFile>,
    /// The journal of a VM that Firn is detached from and is now to attach to again.
    before: Option<Journal>,
    role: RoleLock,
}

impl Begun {
    /// Claims a name that is free, or that of a VM which is over.
    fn at(base: &RuntimeDir, vm: &VmDir, plan: &Plan) -> Result<Self, Failure> {
        vm.create().doing_or(FailureKind::Host, "creating the runtime directory")?;
        let role = take_role(vm)?.ok_or_else(|| taken(vm))?;
        let left = Journal::load(&vm.journal()).doing("reading the old journal")?;
        let before = left.filter(is_in_use);
        match &before {
            Some(journal) if !is_taken_up_by(journal, plan) => return Err(taken(vm)),
            Some(_) => {}
            None => vm.clear().doing("clearing the runtime directory")?,
        }
        crate::log::open(vm).doing("opening the log")?;
        tracing::info!("supervisor of {} in {}", vm.name(), base.path().display());
        let launching = (!matches!(plan, Plan::Attach { .. })).then(|| vm.qmp());
        let machine = before.as_ref().and_then(|journal| journal.machine.clone());
        let overlays = before.as_ref().map(|it| it.overlays.clone()).unwrap_or_default();
        let shut = before.as_ref().is_some_and(|journal| journal.shut);
        let lease = before.as_ref().and_then(|journal| journal.lease);
        let new = Journal::new(vm.name().clone(), launching);
        let journal = Journal { machine, overlays, shut, lease, ..new };
        let journal = JournalFile::create(vm.journal(), journal).doing("writing the journal")?;
        Ok(Self { vm: vm.clone(), journal: Arc::new(journal), before, role })
    }

    fn start(
        &self,
        base: &RuntimeDir,
        plan: &Plan,
        since: Instant,
        starter: &mut Starter<io::Stdout>,
    ) -> Result<Started, Failure> {
        let directory = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
        let stores = plan.stores();
        let place = Place { vm: &self.vm, journal: &self.journal, directory, stores };
        // The run record of an earlier VM of this name.
        let _ = std::fs::remove_file(self.vm.run_record());
        // The guards start while QEMU does, because they need not wait for anything.
        let guards = self.start_guards(base).doing("starting the guards")?;
        let mut tell = |progress| starter.tell(&Reply::Progress(progress));
        let started = match plan {
            Plan::Standby { listen, uplinks, disks } => {
                let here = standby::Here { uplinks, disks };
                standby::standby(&place, listen, &here, &mut tell)
            }
            Plan::Run { args, old_disk, .. } => start::run(&place, args, plan.calls(), *old_disk),
            Plan::Attach { pid, qmp, old_disk, .. } => {
                let before = self.before.as_ref().and_then(|journal| journal.machine.as_ref());
                start::attach(&place, *pid, qmp, before, *old_disk)
            }
            Plan::Restore {
                image,
                mode,
                on_error,
                force,
                account_use,
                learn,
                run,
                disks,
                disk_dir,
                overrides,
                ..
            } => {
                let (mode, force, account_use, learn) = (*mode, *force, *account_use, *learn);
                let (on_error, run) = (*on_error, *run);
                let (disks, disk_dir) = (*disks, disk_dir.as_deref());
                let calls = plan.calls();
                let wanted = Wanted {
                    image,
                    mode,
                    on_error,
                    force,
                    account_use,
                    learn,
                    run,
                    disks,
                    disk_dir,
                    calls,
                    overrides,
                };
                restore::restore(&place, &wanted, since, &mut tell)
            }
        };
        self.note_wishes(plan)?;
        let started = started?;
        let mut handles = Vec::new();
        for (role, handle, to) in guards {
            // If a guard has died already, the event loop starts another one.
            let _ = held::send(&to, &started.files);
            handles.extend(handle.map(|handle| (role, handle)));
        }
        Ok(Started { guards: handles, ..started })
    }

    /// Starts the guards, each with the socket by which it receives open files.
    fn start_guards(
        &self,
        base: &RuntimeDir,
    ) -> io::Result<Vec<(Role, Option<ProcessHandle>, UnixStream)>> {
        let start = |role| {
            let (child, to) = spawn::guard(base, &self.vm, role)?;
            Ok((role, guard::handle_of(&child)?, to))
        };
        [Role::Guard, Role::Watcher].into_iter().map(start).collect()
    }

    /// Records which work the supervisor is to do while no operation runs, before it does it.
    fn note_wishes(&self, plan: &Plan) -> Result<(), Failure> {
        let (access_bits, calls) = (plan.access_bits(), plan.calls());
        let change = |journal: &mut Journal| {
            if let Some(machine) = &mut journal.machine {
                machine.access_bits = access_bits;
                machine.calls = calls.map(Path::to_owned);
            }
        };
        match access_bits.is_some() || calls.is_some() {
            true => self.journal.update(change).doing("writing the journal"),
            false => Ok(()),
        }
    }

    /// Reverts the start. If the VM was forgotten already, nothing is left of it, and what
    /// has its name now belongs to another VM.
    fn undo(self) -> io::Result<()> {
        match self.before {
            _ if !self.role.is_current() => Ok(()),
            Some(journal) => journal.store(&self.vm.journal()).map_err(io::Error::other),
            None => self.vm.remove().map_err(io::Error::other),
        }
    }

    fn keep(self, base: &RuntimeDir, started: Started, ready: impl FnOnce()) -> io::Result<()> {
        keep(base, &self.vm, self.journal, started, ready)
    }
}

/// Whether the name is in use. A VM that runs without Firn after a detach keeps its name, so that
/// its monitor socket is not lost.
fn is_in_use(journal: &Journal) -> bool {
    let alive = journal.machine.as_ref().is_some_and(|machine| machine.process.is_alive());
    !journal.phase.is_over() || (alive && journal.phase == Phase::Detached)
}

/// Whether the plan attaches to the VM that Firn detached from.
fn is_taken_up_by(journal: &Journal, plan: &Plan) -> bool {
    let machine = journal.machine.as_ref();
    let same = |wanted: i32| machine.is_some_and(|machine| machine.process.pid == wanted);
    journal.phase == Phase::Detached && matches!(plan, Plan::Attach { pid, .. } if same(*pid))
}

/// Takes the role, unless the process that has it manages a VM. A supervisor whose VM has ended,
/// and a successor of an earlier VM of that name which has found nothing to manage, have it only
/// briefly.
fn take_role(vm: &VmDir) -> Result<Option<RoleLock>, Failure> {
    const TAKING: &str = "taking the supervisor's role";
    let deadline = Instant::now() + ROLE_WAIT;
    loop {
        let role = RoleLock::try_take(vm.path(), Role::Supervisor).doing(TAKING)?;
        let settled = is_looked_after(vm) || Instant::now() >= deadline;
        if role.is_some() || settled {
            return Ok(role);
        }
        std::thread::sleep(ROLE_RETRY);
        vm.create().doing_or(FailureKind::Host, "creating the runtime directory")?;
    }
}

fn is_looked_after(vm: &VmDir) -> bool {
    match Journal::load(&vm.journal()) {
        Ok(journal) => journal.is_some_and(|journal| !journal.phase.is_over()),
        Err(_) => true,
    }
}

fn taken(vm: &VmDir) -> Failure {
    let text = format!("there is a VM called {} already", vm.name());
    Failure::new(FailureKind::Busy, text)
        .hint("choose another name, or end it: `firn stop`, `firn rm`")
}

fn keep(
    base: &RuntimeDir,
    vm: &VmDir,
    journal: Arc<JournalFile>,
    started: Started,
    ready: impl FnOnce(),
) -> io::Result<()> {
    let hypervisor = started.hypervisor;
    let network = started.network.unwrap_or_else(|| network_of(&journal));
    network.obey(&vm.lease(), journal.read().lease);
    if started.standby.is_none() {
        network.plug();
    }
    let served = started.served.unwrap_or_default();
    let (journals, hypervisors) = (Arc::clone(&journal), Arc::clone(&hypervisor));
    let operations = Arc::new(Qemu::new(journals, hypervisors, network, served, vm));
    let keeper = Keeper {
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
    keeper.keep(ready)
}

/// Opens the network cards. If that fails, the VM continues without them, and the journal records
/// it.
fn network_of(journal: &JournalFile) -> Arc<Network> {
    let Journal { machine, shut, .. } = journal.read();
    let open =
        |machine: &Machine| Network::open(machine.process.pid, &machine.cards, Vec::new(), !shut);
    let opened = machine.as_ref().map_or_else(|| Ok(Network::default()), open);
    Arc::new(opened.unwrap_or_else(|failure| {
        let text = format!("the VM has no network: {failure}");
        tracing::error!("{text}");
        if let Err(error) = journal.update(|journal| journal.note_failure(text)) {
            tracing::error!("{error}");
        }
        Network::default()
    }))
}

/// Serves again the disks of a VM that lives.
fn served_of(vm: &VmDir, journal: &Journal) -> Result<Served, Failure> {
    let machine = journal.machine.as_ref().filter(|machine| machine.process.is_alive());
    machine.map_or_else(|| Ok(Served::default()), |it| Served::again(&it.served, &vm.disks()))
}

/// Records that a VM waits for its disks because they can't be served.
fn note_disks(journal: &JournalFile, failure: &Failure) {
    let text = format!("the VM waits for its disks, which can't be served: {failure}");
    tracing::error!("{text}");
    if let Err(error) = journal.update(|journal| journal.note_failure(text)) {
        tracing::error!("{error}");
    }
}

/// Runs a successor: it takes the role of a dead supervisor, recovers the VM, and manages it if
/// there is one. It is no error if another successor was faster.
pub fn recover(base: &RuntimeDir, name: &VmName) -> io::Result<()> {
    spawn::detach_session();
    firn_memory::heap::give_back_large_blocks();
    let vm = base.vm(name);
    if !vm.exists() {
        return Ok(());
    }
    let Some(_role) = RoleLock::try_take(vm.path(), Role::Supervisor)? else { return Ok(()) };
    crate::log::open(&vm)?;
    let files = held::given();
    let Some(journal) = Journal::load(&vm.journal()).map_err(io::Error::other)? else {
        return Ok(());
    };
    // Disks first: a hypervisor that waits for its disks answers no command.
    let served = served_of(&vm, &journal);
    match take_over(&vm, journal, files) {
        Ok(Some((journal, started))) => {
            let (served, why) = match served {
                Ok(served) => (Some(Arc::new(served)), None),
                Err(failure) => (None, Some(failure)),
            };
            why.into_iter().for_each(|failure| note_disks(&journal, &failure));
            keep(base, &vm, journal, Started { served, ..started }, || ())
        }
        Ok(None) => Ok(()),
        Err(failure) => {
            tracing::error!("{failure}");
            Err(io::Error::other(failure))
        }
    }
}

/// Closes the pipes to the process that started this supervisor, and leaves its directory.
fn to_background() -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    std::env::set_current_dir("/")
}
