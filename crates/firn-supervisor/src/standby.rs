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

use firn_cluster::member::Membership;
use firn_epochs::backup::{RamFiles, Receiver};
use firn_epochs::endpoint::{Endpoint, Stream};
use firn_epochs::standby::{Committed, DiskCopy, Standby};
use firn_epochs::wire::Hello;
use firn_memory::Process;
use firn_types::{PAGE_SIZE, RamRegion, RegionMap};
use firn_vmm::Vm;
use firn_vmm::command_line::{self, CommandLineError, RamPlan};
use serde_json::json;

use crate::failure::{Context, Failure, FailureKind};
use crate::journal::{Journal, JournalFile, Phase};
use crate::keep::Restoring;
use crate::meta::Meta;
use crate::network::{Network, Sockets};
use crate::programs;
use crate::protocol::{FailoverMember, FailoverRequest, Progress};
use crate::qemu::{self, Known};
use crate::restore::{look, refuse, write_aux};
use crate::served::Served;
use crate::standby_files::free_file;
use crate::start::{self, Child, Place, Started};

mod takeover;
mod waiting;

pub use takeover::Readiness;
pub(crate) use takeover::Takeover;

/// What a VM has on this host in place of what it has at its primary.
pub(crate) struct Here<'a> {
    /// The uplinks of its network cards.
    pub(crate) uplinks: &'a BTreeMap<String, String>,
    /// The files of its disks.
    pub(crate) disks: &'a BTreeMap<String, PathBuf>,
}

impl Here<'_> {
    /// The VM's command line on this host. A disk's file is new, and named after the VM unless the
    /// user names it.
    fn command(&self, place: &Place<'_>, args: &[String]) -> Result<Vec<String>, CommandLineError> {
        let mut uplinks = self.uplinks.iter();
        let args = uplinks.try_fold(args.to_vec(), |args, (id, path)| {
            command_line::with_uplink(&args, id, path)
        })?;
        let mut disks = self.disks.clone();
        for disk in command_line::plan(&args)?.disks() {
            let free = || free_file(&place.directory, place.vm.name(), disk);
            disks.entry(disk.id.clone()).or_insert_with(free);
        }
        disks.iter().try_fold(args, |args, (id, path)| {
            command_line::with_disk(&args, id, &path.to_string_lossy())
        })
    }
}

/// Starts a standby (`firn standby`): returns once a primary has connected and the hypervisor is
/// ready.
pub(crate) fn standby(
    place: &Place<'_>,
    listen: &Endpoint,
    here: &Here<'_>,
    tell: &mut dyn FnMut(Progress),
) -> Result<Started, Failure> {
    tell(Progress::new("waiting for the primary", 0, 0));
    let stream = waiting::accept(place, listen)?;
    let (mut receiver, hello) = Receiver::meet(&stream)
        .map_err(|error| Failure::from_error(FailureKind::Refused, &error))
        .map_err(|failure| failure.while_doing("receiving the primary's description"))?;
    match Prepared::of(place, &hello, here) {
        Ok(prepared) => prepared.started(place, receiver, stream, hello),
        Err(failure) => {
            receiver.refuse(&failure.to_string());
            Err(failure)
        }
    }
}

/// A waiting hypervisor with empty memory.
struct Prepared {
    child: Child,
    vm: Vm,
    ram: RamFiles,
    process: Arc<Process>,
    network: Arc<Network>,
    served: Served,
    copies: Vec<DiskCopy>,
    facts: serde_json::Value,
}

impl Prepared {
    fn of(place: &Place<'_>, hello: &Hello, here: &Here<'_>) -> Result<Self, Failure> {
        let meta: Meta = serde_json::from_value(hello.meta.clone())
            .doing_or(FailureKind::Refused, "decoding the primary's description of its VM")?;
        refuse(&meta.disk_mismatches(|disk| look(&meta, Path::new(&disk.file))), false)?;
        let user_args = here.command(place, &meta.qemu.user_args).map_err(start::refused)?;
        let plan = command_line::plan(&user_args).map_err(start::refused)?;
        let (directory, socket) = (&place.directory, place.vm.disks());
        let (served, copies) = Served::standby(plan.disks(), &hello.disks, directory, &socket)?;
        let name = user_args.first().map_or("", String::as_str);
        let program = programs::allowed(name, &meta.qemu.directory)?;
        let plan = plan.with_disks(&socket).with_program(&program);
        let files = served.list().into_iter().map(|disk| disk.file);
        let change = |journal: &mut Journal| journal.overlays = files.collect();
        place.journal.update(change).doing("writing the journal")?;
        let sockets = Sockets::make(plan.cards(), &meta.qemu.directory, place.vm)?;
        let ram = start::ram_files(plan.ram()).doing("making the VM's memory")?;
        let paths = start::paths(place, &ram, &sockets);
        let augmented = plan.for_restore(&paths).map_err(start::refused)?;
        let files = ram.iter().map(std::fs::File::try_clone).collect::<Result<_, _>>();
        let files = files.doing("making the VM's memory")?;
        start::enter(&meta.qemu.directory);
        let child = start::launch(place.vm, &augmented, ram, &sockets)?;
        let mut vm =
            child.connect(place.vm).map_err(|failure| start::with_output(failure, place.vm))?;
        refuse(meta.qemu_mismatch(&vm.version().to_string()).as_slice(), false)?;
        let layout = vm.layout().doing("finding the guest's memory")?;
        if layout.map.regions() != hello.regions.regions() {
            let text = "QEMU arranges the VM's memory differently from the primary";
            return Err(Failure::new(FailureKind::Refused, text));
        }
        let known = Known {
            process: child.identity.clone(),
            qmp: place.vm.qmp(),
            launched: true,
            user_args,
            args: augmented.args,
            directory: meta.qemu.directory.clone(),
            drives: meta.drives.clone(),
            cards: child.cards.clone(),
            served: served.list(),
        };
        let machine = qemu::describe(&mut vm, known, &layout, place.vm.name().as_str())?;
        let facts = start::facts(&machine, &[]);
        let memory = qemu::open_memory(machine.process.pid, &layout)?;
        // Its firmware has written to memory.
        memory.guest.punch_out(memory.guest.all()).doing("emptying the VM's memory")?;
        let change = |journal: &mut Journal| {
            journal.machine = Some(machine);
            journal.phase = Phase::Standby { started: false };
        };
        place.journal.update(change).doing("writing the journal")?;
        firn_fault::point("standby.ready");
        let ram = ram_of(&hello.regions, plan.ram(), files)?;
        let network = Network::open(child.identity.pid, &child.cards, Vec::new(), true)?;
        let (process, network) = (memory.process, Arc::new(network));
        Ok(Self { child, vm, ram, process, network, served, copies, facts })
    }

    fn started(
        self,
        place: &Place<'_>,
        receiver: Receiver,
        stream: Stream,
        hello: Hello,
    ) -> Result<Started, Failure> {
        let takeover = Takeover::new(stream, &hello);
        let standby = Standby::with_disks(hello.regions, self.ram, self.copies);
        let standby = standby.of_member(hello.member);
        let (vm, process, journal) = (self.vm, self.process, place.journal_handle());
        let network = Arc::clone(&self.network);
        let taking = Arc::clone(&takeover);
        let page = place.vm.lease();
        let work =
            Work { receiver, standby, vm, process, journal, network, takeover: taking, page };
        let restoring = Some(work.boxed());
        let hypervisor = self.child.keep()?;
        let standby = Some(takeover);
        let (network, served) = (Some(self.network), Some(Arc::new(self.served)));
        let (facts, guards, files) = (self.facts, Vec::new(), Vec::new());
        Ok(Started { hypervisor, restoring, standby, network, served, facts, guards, files })
    }
}

/// Maps regions to files: regions come in the order of guest addresses, files in that of the
/// command line.
fn ram_of(regions: &RegionMap, plans: &[RamPlan], files: Vec<File>) -> Result<RamFiles, Failure> {
    let is_planned = |region: &RamRegion| {
        let bytes = |plan: &RamPlan| plan.bytes.next_multiple_of(PAGE_SIZE as u64);
        plans.iter().any(|plan| plan.id == region.id && bytes(plan) == region.bytes())
    };
    let files = plans.iter().map(|plan| plan.id.as_str()).zip(files).collect();
    let are_planned = regions.regions().iter().all(is_planned);
    are_planned.then(|| RamFiles::named(regions, files)).flatten().ok_or_else(|| {
        let text = "the VM's memory does not match its command line";
        Failure::new(FailureKind::Refused, text)
    })
}

/// The task of a standby: to receive epochs, and then to run the VM.
struct Work {
    receiver: Receiver,
    standby: Standby<RamFiles>,
    vm: Vm,
    process: Arc<Process>,
    journal: Arc<JournalFile>,
    network: Arc<Network>,
    takeover: Arc<Takeover>,
    /// The lease file.
    page: PathBuf,
}

impl Work {
    fn boxed(self) -> Restoring {
        Box::new(move |_| self.run())
    }

    fn run(mut self) -> Result<serde_json::Value, Failure> {
        let takeover = Arc::clone(&self.takeover);
        let (told, ends) = (&mut |far| takeover.hear(far), &mut |end: &_| takeover.note(end));
        let ended = self.receiver.receive(&mut self.standby, told, ends);
        takeover.part(&mut self.receiver);
        let FailoverRequest { lease, member: to, .. } = self.takeover.wait(&ended);
        let since = Instant::now();
        let Self { standby, mut vm, process, journal, network, page, .. } = self;
        let committed = standby
            .take_up(to.map(|to| to.epoch))
            .map_err(|error| Failure::from_error(FailureKind::Other, &error))?;
        let Committed { epoch, devices, aux, card, .. } = committed;
        vm.load_device_state(&devices).doing("loading the VM's devices")?;
        write_aux(&mut vm, &process, &aux)?;
        firn_fault::point("failover.loaded");
        let enter = |phase| journal.update(|it| it.phase = phase).doing("writing the journal");
        // From here on the disks belong to the VM, and may not be discarded.
        let own = |journal: &mut Journal| {
            journal.phase = Phase::Standby { started: true };
            journal.lease = lease;
            journal.overlays.clear();
        };
        journal.update(own).doing("writing the journal")?;
        firn_fault::point("failover.started");
        network.obey(&page, lease);
        if let (Some((of, kept)), Some(FailoverMember { generation, .. })) = (card, to) {
            network.go_on(&Membership { generation, ..of }, epoch, &kept);
        }
        network.plug();
        vm.cont().doing("starting the vCPUs")?;
        announce(&mut vm);
        firn_fault::point("failover.running");
        enter(Phase::Running)?;
        let took_ms = since.elapsed().as_secs_f64() * 1e3;
        tracing::info!("runs from the end of {epoch}, after {took_ms:.1} ms");
        Ok(json!({ "epoch": epoch, "took_ms": took_ms }))
    }
}

/// Announces the VM's addresses to switches. A switch that misses this learns them from the VM's
/// first frame.
pub(crate) fn announce(vm: &mut Vm) {
    if let Err(error) = vm.announce() {
        tracing::warn!("the VM's addresses are not announced: {error}");
    }
}
