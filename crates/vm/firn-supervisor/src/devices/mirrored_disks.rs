//! The disks of a VM's own that are mirrored to its supervisor while it is protected, so that they
//! belong to the VM's epochs (`firn_vmm::mirror`, `firn_disks::sink`).
//!
//! ```text
//!   protect    each writable drive that Firn does not serve: can QEMU mirror it, and which option makes it?
//!              journal: name of the mirror
//!              node "firn-mirrorN": NBD client of the supervisor; a job is tried, and ended
//!              seed: job "firn-mirrorN"                            from here on each write of the guest reaches the supervisor
//!   successor  ends the jobs, removes the nodes                    while no supervisor lived, the jobs ended by themselves
//!   end        the same, then the journal's entry
//! ```
//!
//! The guest's disk is its own file throughout. What ends with a supervisor is a job.
//!
//! The standby has each of them as a raw disk that it serves (`firn=on`), so after a failover the VM
//! has such disks.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_disks::LoggedDisk;
use firn_disks::nbd::{NbdExports, NbdServer};
use firn_epochs::disks::EpochDisks;
use firn_epochs::guest::{GuestError, MirrorJobs};
use firn_epochs::wire::DiskHello;
use firn_vmm::command_line::{self, MirroredDrive};
use firn_vmm::{Drive, MirrorExtent, MirrorProgress, MirrorState, QemuVm, QmpError, mirror_name};

use crate::devices::disk_snapshots;
use crate::devices::served_disks::ServedDisks;
use crate::records::failure::{self, Failure, FailureContext, FailureKind};
use crate::records::journal::{HypervisorRecord, Journal, JournalFile};
use crate::records::meta::ImageMeta;

const WRITING_JOURNAL: &str = "writing the journal";

/// A drive that is to be mirrored.
struct PlannedMirror {
    /// The id of the standby's disk.
    id: String,
    /// QEMU's names for the drive, and for the node of its topmost image.
    name: String,
    node: String,
    /// Its files on this host, the topmost first.
    chain: Vec<PathBuf>,
    /// The command line's name for its file, if an option has one.
    named: Option<String>,
    log: Arc<LoggedDisk>,
}

/// All disks of a VM that belong to its epochs: those that Firn serves, and those that are to be
/// mirrored.
pub(crate) struct EpochDiskPlan {
    mirrors: Vec<PlannedMirror>,
    /// The VM's command line at its standby.
    args: Vec<String>,
    /// The ids of all disks, in the order of that command line.
    order: Vec<String>,
}

impl EpochDiskPlan {
    /// Plans the mirrors of all drives that the guest can write to and Firn does not serve. Changes
    /// nothing.
    pub(crate) fn plan_drives(
        vm: &mut QemuVm,
        hypervisor_record: &HypervisorRecord,
        served: &ServedDisks,
    ) -> Result<Self, Failure> {
        let meta = &hypervisor_record.meta;
        let order = served.disk_records().into_iter().map(|disk| disk.id).collect();
        let mut plan = Self { mirrors: Vec::new(), args: meta.qemu.user_args.clone(), order };
        for drive in vm.drives().while_doing("querying the VM's disks")? {
            if !served.contains_drive(&drive) {
                let name = drive.name.clone();
                plan.add_drive(drive, meta).map_err(|failure| refuse_drive(&name, failure))?;
            }
        }
        if !plan.mirrors.is_empty() {
            let planned = command_line::plan_command(&plan.args);
            let planned = planned.map_err(failure::command_line_failure)?;
            plan.order = planned.disks().iter().map(|disk| disk.id.clone()).collect();
        }
        Ok(plan)
    }

    fn add_drive(&mut self, drive: Drive, meta: &ImageMeta) -> Result<(), Failure> {
        if let Some(obstacle) = &drive.mirror_obstacle {
            return Err(Failure::new(FailureKind::Refused, obstacle.clone()));
        }
        let named = disk_snapshots::named_file(meta, &drive);
        let (name, node) = (&*drive.name, &*drive.node);
        let mirrored = MirroredDrive { name, node, named: named.as_deref() };
        let (args, id) = command_line::with_standby_disk(&self.args, mirrored)
            .map_err(|error| Failure::from_error(FailureKind::Refused, &error))?;
        self.args = args;
        let log = Arc::new(LoggedDisk::new_mirrored(drive.bytes));
        let Drive { name, node, chain, .. } = drive;
        self.mirrors.push(PlannedMirror { id, name, node, chain, named, log });
        Ok(())
    }

    /// QEMU's names for the drives that are to be mirrored.
    pub(crate) fn mirrored_names(&self) -> Vec<String> {
        self.mirrors.iter().map(|mirror| mirror.name.clone()).collect()
    }

    /// All disks, for the VM's epochs.
    pub(crate) fn epoch_disks(&self, served: &ServedDisks) -> EpochDisks {
        let disk = |id: &String| match self.find_mirror(id) {
            Some(mirror) => Some((mirror.name.clone(), Arc::clone(&mirror.log))),
            None => served.find_disk(id).map(|disk| (id.clone(), Arc::clone(disk))),
        };
        EpochDisks::new(self.order.iter().filter_map(disk).collect())
    }

    /// The descriptions of all disks, for the standby.
    pub(crate) fn disk_hellos(&self, served: &ServedDisks) -> Result<Vec<DiskHello>, Failure> {
        let hello = |id: &String| match self.find_mirror(id) {
            Some(mirror) => {
                Ok(DiskHello { id: id.clone(), size: mirror.log.size(), head: Vec::new() })
            }
            None => served.disk_hello(id),
        };
        self.order.iter().map(hello).collect()
    }

    /// The description of the VM for its standby, which has the mirrored disks as raw ones that Firn
    /// serves, and none of their files.
    pub(crate) fn standby_meta(&self, meta: &ImageMeta) -> ImageMeta {
        let mut meta = meta.clone();
        let directory = meta.qemu.directory.clone();
        let is_mirrored = |file: &Path| {
            let file = directory.join(file);
            self.mirrors.iter().any(|mirror| mirror.chain.contains(&file))
        };
        meta.disks.retain(|disk| !is_mirrored(Path::new(&disk.file)));
        let is_named =
            |named: &String| self.mirrors.iter().any(|it| it.named.as_ref() == Some(named));
        meta.drives.retain(|drive| !is_named(&drive.named));
        meta.qemu.user_args.clone_from(&self.args);
        meta
    }

    fn find_mirror(&self, id: &str) -> Option<&PlannedMirror> {
        self.mirrors.iter().find(|mirror| mirror.id == id)
    }
}

/// The mirrors of a VM's disks, which QEMU has or is about to get.
#[derive(Debug)]
pub(crate) struct DiskMirrors {
    journal: Arc<JournalFile>,
    mirrors: Vec<ActiveMirror>,
    /// Serves the targets.
    _server: NbdServer,
}

#[derive(Debug)]
struct ActiveMirror {
    /// The name of its job and of its target's node.
    name: String,
    /// QEMU's names for the drive and its node.
    drive: String,
    source: String,
}

impl DiskMirrors {
    /// Connects QEMU to the targets, and tries whether it mirrors the drives. After that nothing is
    /// mirrored yet. After an error QEMU has nothing of the mirrors any more.
    pub(crate) fn prepare(
        vm: &mut QemuVm,
        pid: i32,
        journal: &Arc<JournalFile>,
        plan: &EpochDiskPlan,
    ) -> Result<Box<dyn MirrorJobs>, Failure> {
        if plan.mirrors.is_empty() {
            return Ok(Box::new(()));
        }
        let exports: NbdExports =
            plan.mirrors.iter().map(|it| (it.id.clone(), Arc::clone(&it.log))).collect();
        let (server, socket) = NbdServer::start_for_process(pid, exports)
            .while_doing("making a socket for the VM's disks")?;
        let active = |(number, planned): (usize, &PlannedMirror)| ActiveMirror {
            name: mirror_name(number as u32),
            drive: planned.name.clone(),
            source: planned.node.clone(),
        };
        let mirrors: Vec<_> = plan.mirrors.iter().enumerate().map(active).collect();
        for (mirror, planned) in mirrors.iter().zip(&plan.mirrors) {
            let tried = mirror.try_with(vm, journal, (&*socket, &*planned.id));
            if let Err(failure) = tried {
                if let Err(failure) = remove_left_mirrors(vm, journal) {
                    tracing::warn!("{failure}");
                }
                return Err(refuse_drive(&mirror.drive, failure));
            }
        }
        Ok(Box::new(Self { journal: Arc::clone(journal), mirrors, _server: server }))
    }
}

impl ActiveMirror {
    /// Connects to the target, and starts a job for a moment.
    fn try_with(
        &self,
        vm: &mut QemuVm,
        journal: &JournalFile,
        at: (&str, &str),
    ) -> Result<(), Failure> {
        const CONNECTING: &str = "connecting QEMU to Firn's server";
        const TRYING: &str = "starting a job that mirrors it";
        let record = |journal: &mut Journal| journal.mirrors.push(self.name.clone());
        journal.update(record).while_doing(WRITING_JOURNAL)?;
        firn_fault::pass_point("mirror.recorded");
        vm.add_mirror_target(&self.name, at).while_doing_as(FailureKind::Refused, CONNECTING)?;
        firn_fault::pass_point("mirror.added");
        vm.begin_mirror(&self.name, &self.source, MirrorExtent::Writes)
            .while_doing_as(FailureKind::Refused, TRYING)?;
        vm.end_mirror(&self.name).while_doing(TRYING)?;
        firn_fault::pass_point("mirror.tried");
        Ok(())
    }

    fn start(&self, vm: &mut QemuVm) -> Result<(), GuestError> {
        match vm.begin_mirror(&self.name, &self.source, MirrorExtent::Whole) {
            Err(QmpError::Refused { desc, .. }) => Err(self.ended(desc)),
            started => Ok(started?),
        }
    }

    fn progress(&self, vm: &mut QemuVm) -> Result<(String, MirrorProgress), GuestError> {
        match vm.query_mirror(&self.name)? {
            MirrorState::Works(progress) => Ok((self.drive.clone(), progress)),
            MirrorState::Ended(why) => Err(self.ended(why)),
        }
    }

    fn ended(&self, why: String) -> GuestError {
        GuestError::Mirror { disk: self.drive.clone(), why }
    }
}

impl MirrorJobs for DiskMirrors {
    fn start(&mut self, vm: &mut QemuVm) -> Result<(), GuestError> {
        for mirror in &self.mirrors {
            mirror.start(vm)?;
            firn_fault::pass_point("mirror.started");
        }
        Ok(())
    }

    fn query(&mut self, vm: &mut QemuVm) -> Result<Vec<(String, MirrorProgress)>, GuestError> {
        self.mirrors.iter().map(|mirror| mirror.progress(vm)).collect()
    }

    fn remove(&mut self, vm: &mut QemuVm) -> Result<(), GuestError> {
        for mirror in &self.mirrors {
            remove_parts(vm, &mirror.name)?;
            forget_mirror(&self.journal, &mirror.name).map_err(GuestError::MirrorRecord)?;
            firn_fault::pass_point("mirror.removed");
        }
        Ok(())
    }
}

/// Removes all mirrors that QEMU has parts of, and those that the journal has.
pub(crate) fn remove_left_mirrors(vm: &mut QemuVm, journal: &JournalFile) -> Result<(), Failure> {
    const REMOVING: &str = "removing the mirrors of the VM's disks";
    let mut names = vm.list_mirrors().while_doing(REMOVING)?;
    names.extend(journal.current_journal().mirrors);
    for name in names {
        remove_parts(vm, &name).while_doing(REMOVING)?;
        forget_mirror(journal, &name).while_doing(WRITING_JOURNAL)?;
    }
    Ok(())
}

/// Removes what is there of a mirror from QEMU.
fn remove_parts(vm: &mut QemuVm, name: &str) -> Result<(), QmpError> {
    vm.end_mirror(name)?;
    firn_fault::pass_point("mirror.ended");
    vm.remove_mirror_target(name)
}

fn forget_mirror(journal: &JournalFile, name: &str) -> io::Result<()> {
    let forget = |journal: &mut Journal| journal.mirrors.retain(|it| it != name);
    journal.update(forget).map_err(io::Error::other)
}

fn refuse_drive(name: &str, failure: Failure) -> Failure {
    let failure = Failure { kind: FailureKind::Refused, ..failure };
    failure
        .while_doing(format!("the guest can write to its disk {name}, which can't be mirrored"))
        .with_hint("attach it read-only, or start the VM with firn=on for that disk")
}
