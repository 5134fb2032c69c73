//! Protected guest: a running VM whose dirty pages are tracked, and that is paused again and again.
//!
//! ```text
//!   attach:  arm all ............ from now on the kernel records each first write
//!   pause:   hypervisor stops ... PausedGuest: scan, protect, copy ... hypervisor saves devices
//!   detach:  nothing of Firn is left in the hypervisor
//! ```
//!
//! **Memory before devices.** Memory is copied while the hypervisor saves devices, and before it
//! has saved the last of them: at that point it waits for the copy. If a device wrote to guest
//! memory while it is saved, its state would be newer than memory. QEMU's own migration copies
//! memory first (`qemu_savevm_state_complete_precopy`: RAM, then devices), so no device may do
//! this.
//!
//! **Writes of the kernel for a device model** (a read from disk past the page cache) are recorded
//! when they begin, and change memory when they end. Pages are protected only while the VM is
//! paused, and a hypervisor that stops a VM lets all requests end first. Only the very first
//! protection happens while the VM runs; the VM is then paused for a moment before any page is
//! copied.
//!
//! **The user's own stop.** The user may stop the VM at any time, and it then stays stopped. So
//! Firn pauses it by one command that the hypervisor begins and ends by itself: no `stop` of
//! another client comes in between, and one that came before is respected. A hypervisor that lacks
//! this command is stopped and started by two commands, if the VM ran before; a `stop` between them
//! is lost. If Firn dies between them, its successor reads what a [`PauseJournal`] recorded.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use firn_cluster::Epoch;
use firn_cluster::predict::PageSet;
use firn_disks::{DiskChange, DiskError};
use firn_image::AuxBlock;
use firn_memory::scheduling::RealtimeGuard;
use firn_memory::{
    GuestMemory, KernelFeatures, MemoryError, Process, ProcessError, ScanError, TraceError, Tracee,
    process_memory,
};
use firn_types::{PAGE_SIZE, Page, ThreadId};
use firn_vmm::{AuxRam, DeviceStateError, MirrorProgress, QemuVm, QmpError, WaitMode};
use serde_json::Value;
use thiserror::Error;

use crate::disks::EpochDisks;

mod dirty_pages;
mod health;
mod state_sizes;

use dirty_pages::{DirtyPages, may_give_back};
use health::DeviceSet;
pub use health::{ExitReport, GuestRunTrouble};
use state_sizes::StateSizes;

/// How long a hypervisor may take to answer before it counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a VM can't be tracked or paused.
#[derive(Debug, Error)]
pub enum GuestError {
    /// The VM has a part that an epoch can't contain.
    #[error("the VM can't be protected: {0}")]
    Refused(String),
    /// The hypervisor refused a command, or has ended.
    #[error("the hypervisor refused a command")]
    Qmp(#[from] QmpError),
    /// The devices could not be saved.
    #[error("the VM's devices could not be saved")]
    DeviceState(#[from] DeviceStateError),
    /// Dirty tracking failed.
    #[error("the guest's writes could not be tracked")]
    Scan(#[from] ScanError),
    /// Guest RAM could not be read.
    #[error("guest memory could not be read")]
    Memory(#[from] MemoryError),
    /// Firn could not attach to the hypervisor.
    #[error("could not attach to the hypervisor")]
    Attach(#[from] TraceError),
    /// The hypervisor process is not accessible.
    #[error("the hypervisor process is not accessible")]
    Process(#[from] ProcessError),
    /// The pause could not be recorded. A VM is paused by a command only if a successor would know
    /// to start it again.
    #[error("the pause of the VM could not be recorded")]
    Witness(#[source] io::Error),
    /// The changes of a disk can't be logged any more.
    #[error("the changes of a disk of the VM are not logged any more")]
    Disk(#[from] DiskError),
    /// Pages may have been written without a fault since they were protected.
    #[error(
        "a disk was added that is read past the page cache, and such reads cause no page fault while the VM runs: protect it once \
         more, or have its disks in the page cache"
    )]
    PastPageCache,
    /// What the guest gives back may not be recognized.
    #[error(
        "it has a balloon, and this host may keep shared memory in large pages, of which the kernel may clear a part without \
         making a hole: turn them off (shmem_enabled in /sys/kernel/mm/transparent_hugepage, the mount option huge)"
    )]
    LargePages,
    /// A disk is not mirrored any more, or can't be.
    #[error("the VM's disk {disk} is not mirrored: {why}")]
    Mirror {
        /// The disk.
        disk: String,
        /// The reason.
        why: String,
    },
    /// The record of the mirror jobs can't be written.
    #[error("the mirrors of the VM's disks could not be recorded")]
    MirrorRecord(#[source] io::Error),
    /// A device was added or removed: the standby has the devices of the beginning.
    #[error(
        "a device changed, and the standby has those of the beginning ({0}): give devices on the command line of a VM that is to be protected"
    )]
    Devices(String),
    /// The thread that sends epochs has ended.
    #[error("the replication sender has stopped")]
    SenderStopped,
}

impl GuestError {
    /// Whether the hypervisor has not answered in time.
    pub fn is_hang(&self) -> bool {
        let (Self::Qmp(error) | Self::DeviceState(DeviceStateError::Qmp(error))) = self else {
            return false;
        };
        matches!(error, QmpError::TimedOut { .. })
    }
}

/// A record that outlives this process, so that a successor resumes a VM that was left paused.
pub trait PauseJournal: fmt::Debug + Send {
    /// Records that the VM is about to be paused by a command, or runs again.
    ///
    /// # Errors
    /// If a successor would not know it. Then the VM is not stopped.
    fn record_stop(&mut self, is_stopped: bool) -> io::Result<()>;
}

/// A witness for a process without a successor.
impl PauseJournal for () {
    fn record_stop(&mut self, _: bool) -> io::Result<()> {
        Ok(())
    }
}

/// The jobs by which the hypervisor mirrors disks of the VM's own to Firn, while it is protected.
pub trait MirrorJobs: fmt::Debug + Send {
    /// Starts the jobs. Each copies its whole disk, and sends each write of the guest from the
    /// beginning.
    ///
    /// # Errors
    /// If the hypervisor refuses one, or a successor would not know of it.
    fn start(&mut self, vm: &mut QemuVm) -> Result<(), GuestError>;

    /// The state of each job, with the name of its disk.
    ///
    /// # Errors
    /// If a job has ended: the changes of its disk are not logged any more.
    fn query(&mut self, vm: &mut QemuVm) -> Result<Vec<(String, MirrorProgress)>, GuestError>;

    /// Removes the jobs and all that belongs to them from the hypervisor.
    ///
    /// # Errors
    /// If a part may be left.
    fn remove(&mut self, vm: &mut QemuVm) -> Result<(), GuestError>;
}

/// A VM without mirrored disks.
impl MirrorJobs for () {
    fn start(&mut self, _: &mut QemuVm) -> Result<(), GuestError> {
        Ok(())
    }

    fn query(&mut self, _: &mut QemuVm) -> Result<Vec<(String, MirrorProgress)>, GuestError> {
        Ok(Vec::new())
    }

    fn remove(&mut self, _: &mut QemuVm) -> Result<(), GuestError> {
        Ok(())
    }
}

/// The result of a pause, besides memory.
#[derive(Clone, Debug, Default)]
pub struct PauseResult {
    /// The state of devices and vCPUs.
    pub devices: Vec<u8>,
    /// The auxiliary blocks.
    pub aux: Vec<AuxBlock>,
    /// The length of the pause: by the hypervisor's own events, or else from the command to stop
    /// until its report that the VM runs.
    pub downtime: Duration,
}

/// A VM that is paused.
pub struct PausedGuest<'a> {
    dirty: &'a DirtyPages,
    memory: &'a GuestMemory,
    disks: &'a EpochDisks,
}

impl PausedGuest<'_> {
    /// The pages that were written since they were protected, or given back since the last pause.
    pub fn written_pages(&self) -> Result<PageSet, GuestError> {
        Ok(self.dirty.find_dirty()?)
    }

    /// As [`Self::written_pages`], and protects them again.
    pub fn reprotect_written(&self) -> Result<PageSet, GuestError> {
        Ok(self.dirty.reprotect_dirty()?)
    }

    /// Protects these pages.
    pub fn protect_pages(&self, pages: &PageSet) -> Result<(), GuestError> {
        Ok(self.dirty.protect_pages(pages)?)
    }

    /// Protects all pages.
    pub fn protect_all(&self) -> Result<(), GuestError> {
        Ok(self.dirty.protect_all()?)
    }

    /// The changes of each disk in the epoch that ends here.
    pub fn cut_disks(&self, epoch: Epoch) -> Result<Vec<Vec<DiskChange>>, GuestError> {
        Ok(self.disks.cut_logs(epoch)?)
    }

    /// Copies pages one after another, behind the first `at` pages of `out`, which grows if
    /// necessary.
    pub fn copy_pages(
        &self,
        pages: &PageSet,
        at: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), GuestError> {
        copy_pages(self.memory, pages, at, out)
    }
}

/// A protected VM.
#[derive(Debug)]
pub struct ProtectedGuest {
    vm: QemuVm,
    process: Arc<Process>,
    memory: Arc<GuestMemory>,
    aux: Vec<AuxRam>,
    vcpus: Vec<ThreadId>,
    dirty: DirtyPages,
    witness: Box<dyn PauseJournal>,
    disks: EpochDisks,
    mirrors: Box<dyn MirrorJobs>,
    devices: DeviceSet,
    state_sizes: StateSizes,
    /// Nothing of Firn is left in the hypervisor.
    is_detached: bool,
}

impl ProtectedGuest {
    /// Begins to track the VM's writes, if it can be protected.
    ///
    /// # Errors
    /// If it can't be protected, with the reason; if attaching fails, or another program tracks its
    /// memory.
    pub fn attach(
        mut vm: QemuVm,
        process: Arc<Process>,
        memory: Arc<GuestMemory>,
        aux: Vec<AuxRam>,
        disks: EpochDisks,
        witness: Box<dyn PauseJournal>,
    ) -> Result<Self, GuestError> {
        check_protectable(&mut vm, &memory, &disks)?;
        let gives_back = may_give_back(&mut vm, &memory)?;
        let devices = DeviceSet::list_devices(&mut vm)?;
        let aux: Vec<AuxRam> = aux.into_iter().filter(|aux| !aux.rom).collect();
        let vcpus: Vec<ThreadId> = vm.vcpus()?.iter().map(|vcpu| vcpu.tid).collect();
        let mut tracee = Tracee::seize(&process, &vcpus)?;
        let dirty = DirtyPages::register(&mut tracee, &memory, gives_back)?;
        drop(tracee);
        let (state_sizes, is_detached) = (StateSizes::default(), false);
        vm.qmp().set_timeout(HANG_TIMEOUT);
        let mut guest = Self {
            vm,
            process,
            memory,
            aux,
            vcpus,
            dirty,
            witness,
            disks,
            mirrors: Box::new(()),
            devices,
            state_sizes,
            is_detached,
        };
        guest.begin_tracking()?;
        Ok(guest)
    }

    /// Has jobs mirror those of its disks that Firn does not serve. They are started with the seed,
    /// and removed when Firn detaches.
    pub fn with_mirrors(mut self, mirrors: Box<dyn MirrorJobs>) -> Self {
        self.mirrors = mirrors;
        self
    }

    fn begin_tracking(&mut self) -> Result<(), GuestError> {
        self.dirty.begin()?;
        if !self.dirty.tracks_holes() {
            self.memory.open_window()?;
        }
        self.pause_for(Duration::ZERO)?;
        firn_fault::pass_io_point("protect.tracking")
            .map_err(|error| GuestError::Refused(error.to_string()))
    }

    /// The RAM of the VM.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The disks that are replicated with its epochs.
    pub fn disks(&self) -> &EpochDisks {
        &self.disks
    }

    /// Begins to log the changes of its disks, and starts the jobs that mirror some of them.
    pub(crate) fn begin_disk_logs(&mut self) -> Result<(), GuestError> {
        self.disks.begin_protection();
        self.mirrors.start(&mut self.vm)
    }

    /// Queries the jobs that mirror disks.
    ///
    /// # Errors
    /// If one of them has ended.
    pub(crate) fn poll_mirrors(&mut self) -> Result<(), GuestError> {
        for (disk, progress) in self.mirrors.query(&mut self.vm)? {
            self.disks.record_fill(&disk, progress.copied, progress.is_synced);
        }
        Ok(())
    }

    /// The control channel of the VM.
    pub fn vm(&mut self) -> &mut QemuVm {
        &mut self.vm
    }

    /// The pages that were written since they were protected. The VM continues to run, and pages
    /// that it has given back may be missing.
    pub fn scan_written(&self) -> Result<PageSet, GuestError> {
        Ok(self.dirty.find_written()?)
    }

    /// Protects pages while the VM runs. From then on each write to them is recorded.
    ///
    /// # Errors
    /// If that can't be guaranteed: the VM [can't be copied ahead](Self::can_be_copied_ahead). This
    /// is checked after the protection. A disk that is added later asks the kernel for reads after
    /// the protection, too.
    pub fn protect_running(&mut self, pages: &PageSet) -> Result<(), GuestError> {
        self.dirty.protect_pages(pages)?;
        match self.can_be_copied_ahead()? {
            true => Ok(()),
            false => Err(GuestError::PastPageCache),
        }
    }

    /// Whether each write to the VM's memory is recorded from the moment of its protection, also
    /// while it runs. This is not so if a device model reads a disk past the page cache: it gave
    /// the kernel the address before that moment, and the kernel may write after it.
    pub fn can_be_copied_ahead(&mut self) -> Result<bool, GuestError> {
        Ok(!self.vm.reads_past_page_cache()?)
    }

    /// The pages that were written since they were protected, or given back; they are protected again
    /// while the VM runs. Then the VM is paused for a moment, so that requests of its devices have ended.
    pub fn reprotect_running(&mut self) -> Result<PageSet, GuestError> {
        let written = self.dirty.reprotect_dirty()?;
        self.pause_for(Duration::ZERO)?;
        Ok(written)
    }

    /// Protects all pages again while the VM runs, as after attaching.
    pub fn reset_tracking(&mut self) -> Result<(), GuestError> {
        self.dirty.protect_all()?;
        self.pause_for(Duration::ZERO)
    }

    /// Copies pages while the VM runs. Concurrent writes may be in the copy, also in part.
    pub fn copy_running(&self, pages: &PageSet, out: &mut Vec<u8>) -> Result<(), GuestError> {
        copy_pages(&self.memory, pages, 0, out)
    }

    /// Pauses the VM for a time. A VM that its user has stopped stays stopped.
    pub fn pause_for(&mut self, time: Duration) -> Result<(), GuestError> {
        let stood_still = self.pause_for_drained(time);
        self.disks.cancel_drain();
        stood_still
    }

    fn pause_for_drained(&mut self, time: Duration) -> Result<(), GuestError> {
        // A hypervisor that waits for a full log, while it resets the guest, would not answer.
        self.disks.begin_drain();
        if let Some(held) =
            self.vm.begin_pause_with(&mut || self.disks.begin_drain(), WaitMode::Spin)?
        {
            thread::sleep(time);
            held.resume_vm()?;
            return Ok(());
        }
        match self.vm.status()?.running {
            true => self.with_stopped(|guest| {
                guest.vm.stop()?;
                thread::sleep(time);
                Ok(())
            }),
            false => Ok(()),
        }
    }

    /// Whether the VM runs.
    pub fn is_running(&mut self) -> Result<bool, GuestError> {
        Ok(self.vm.status()?.running)
    }

    /// Stops the VM by a command. It stays stopped until [`Self::resume_stopped`], also if it is
    /// cut; a successor of this process resumes it.
    pub fn stop_for_move(&mut self) -> Result<(), GuestError> {
        self.witness.record_stop(true).map_err(GuestError::Witness)?;
        Ok(self.vm.stop()?)
    }

    /// Resumes a VM that [`Self::stop_for_move`] has stopped.
    pub fn resume_stopped(&mut self) -> Result<(), GuestError> {
        self.vm.cont()?;
        if let Err(error) = self.witness.record_stop(false) {
            tracing::warn!("it could not be recorded that the VM runs again: {error}");
        }
        Ok(())
    }

    /// Runs `work`, which stops the running VM, and starts the VM again in every case.
    fn with_stopped<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, GuestError>,
    ) -> Result<T, GuestError> {
        self.witness.record_stop(true).map_err(GuestError::Witness)?;
        let done = work(self);
        self.resume_stopped()?;
        done
    }

    /// Checks the conditions of a cut. Returns why the VM does not run, if it is in trouble.
    ///
    /// # Errors
    /// If a device was added or removed since Firn attached, a disk is not mirrored any more, or the
    /// host may have begun to keep shared memory in large pages.
    pub fn check_before_cut(&mut self) -> Result<Option<GuestRunTrouble>, GuestError> {
        self.dirty.check_host()?;
        self.devices.check_unchanged(&mut self.vm)?;
        self.poll_mirrors()?;
        Ok(GuestRunTrouble::from_state(&self.vm.status()?))
    }

    /// Presses the VM's power button. The monitor serves one client, which is this one.
    pub fn press_power_button(&mut self) -> Result<(), GuestError> {
        self.vm.qmp().execute("system_powerdown", Value::Null)?;
        Ok(())
    }

    /// The last reports of the hypervisor, also if it has ended.
    pub fn exit_report(&mut self) -> ExitReport {
        ExitReport::read_events(&mut self.vm)
    }

    /// Leaves a hypervisor that does not answer as it is: another command would wait as long again.
    /// None of its threads waits for Firn.
    pub fn abandon(mut self) {
        self.is_detached = true;
        if self.dirty.tracks_holes()
            && let Err(error) = self.dirty.unregister()
        {
            tracing::warn!("the memory of a hypervisor is still registered: {error}");
        }
        self.disks.end_protection();
    }

    /// Prepares the hypervisor for [`Self::pause_and_save`], which makes the pause shorter.
    pub fn prepare_pause(&mut self) -> Result<(), GuestError> {
        self.disks.begin_drain();
        Ok(self.vm.prepare_late_pause(self.state_sizes.expected_minimum())?)
    }

    /// Pauses the VM, runs `inside`, saves the devices, and resumes the VM, also after a failure.
    pub fn pause_and_save<T>(
        &mut self,
        mut inside: impl FnMut(&PausedGuest<'_>) -> Result<T, GuestError>,
    ) -> Result<(T, PauseResult), GuestError> {
        match self.pause_by_hold(&mut inside)? {
            Some(done) => Ok(done),
            None => self.pause_by_commands(inside),
        }
    }

    /// Pauses by one command: the hypervisor stops and starts the VM by itself. `None` if it can't.
    fn pause_by_hold<T>(
        &mut self,
        inside: &mut impl FnMut(&PausedGuest<'_>) -> Result<T, GuestError>,
    ) -> Result<Option<(T, PauseResult)>, GuestError> {
        let started = Instant::now();
        let drain = &mut || self.disks.begin_drain();
        let first = RealtimeGuard::enter();
        let wait_mode = if first.is_some() { WaitMode::Sleep } else { WaitMode::Spin };
        let Some(held) = self.vm.begin_pause_with(drain, wait_mode)? else { return Ok(None) };
        let aux = read_aux(&self.process, &self.aux)?;
        let (dirty, memory, disks) = (&self.dirty, &*self.memory, &self.disks);
        let value = inside(&PausedGuest { dirty, memory, disks })?;
        let released = held.resume_vm()?;
        self.state_sizes.add_save(released.device_state.len());
        let downtime = released.paused_for.unwrap_or_else(|| started.elapsed());
        Ok(Some((value, PauseResult { devices: released.device_state, aux, downtime })))
    }

    /// Pauses by two commands, which stop and start the VM, as QEMU's own migration does.
    pub fn pause_by_commands<T>(
        &mut self,
        mut inside: impl FnMut(&PausedGuest<'_>) -> Result<T, GuestError>,
    ) -> Result<(T, PauseResult), GuestError> {
        self.vm.prepare_save()?;
        let is_to_run = self.vm.status()?.running;
        let started = Instant::now();
        let (value, pause) = match is_to_run {
            true => self.with_stopped(|guest| guest.save_stopped(&mut inside))?,
            false => self.save_stopped(&mut inside)?,
        };
        let downtime = self.vm.last_pause().unwrap_or_else(|| started.elapsed());
        Ok((value, PauseResult { downtime, ..pause }))
    }

    fn save_stopped<T>(
        &mut self,
        inside: &mut impl FnMut(&PausedGuest<'_>) -> Result<T, GuestError>,
    ) -> Result<(T, PauseResult), GuestError> {
        self.disks.begin_drain();
        let devices = self.vm.stop_and_save_device_state()?;
        let aux = read_aux(&self.process, &self.aux)?;
        let (dirty, memory, disks) = (&self.dirty, &*self.memory, &self.disks);
        let value = inside(&PausedGuest { dirty, memory, disks })?;
        Ok((value, PauseResult { devices, aux, ..PauseResult::default() }))
    }

    /// Detaches from the VM, which continues to run.
    pub fn detach(mut self) -> Result<(), GuestError> {
        self.detach_all()
    }

    fn detach_all(&mut self) -> Result<(), GuestError> {
        self.is_detached = true;
        // A write of the guest may wait for room in a log.
        self.disks.end_protection();
        let unmirrored = self.mirrors.remove(&mut self.vm);
        let gave_back = self.vm.finish_save();
        let unregistered = self.dirty.unregister();
        self.dirty.close(&self.process, &self.vcpus)?;
        unmirrored?;
        gave_back?;
        Ok(unregistered?)
    }
}

impl Drop for ProtectedGuest {
    fn drop(&mut self) {
        if self.is_detached {
            return;
        }
        // The caller that drops it reports another error. A hypervisor that has ended has nothing
        // of Firn left.
        if let Err(error) = self.detach_all() {
            tracing::warn!("could not detach from a protected VM: {error}");
        }
    }
}

/// Checks that an epoch can contain all parts of this VM. Changes nothing.
///
/// # Errors
/// If a part of the VM can't be in an epoch, or the kernel can't track writes.
pub fn check_protectable(
    vm: &mut QemuVm,
    memory: &GuestMemory,
    disks: &EpochDisks,
) -> Result<(), GuestError> {
    let refused = |why: String| Err(GuestError::Refused(why));
    if !vm.status()?.running {
        return refused("it is paused".into());
    }
    if let Some(blocker) = vm.migration_blockers()?.first() {
        return refused(format!("its state can't be saved ({blocker})"));
    }
    if let Some(drive) = vm.drives()?.iter().find(|drive| !disks.contains_drive(drive)) {
        let name = &drive.name;
        return refused(format!("the guest can write to its disk {name}, which is not replicated"));
    }
    if memory.has_huge_pages() {
        return refused(
            "its memory is in huge pages (hugetlbfs): Firn protects the pages of an epoch one by one, and the kernel \
             protects a huge page as a whole; start it with ordinary RAM"
                .into(),
        );
    }
    may_give_back(vm, memory)?;
    if let Some(other) = memory.other_users()?.first() {
        return refused(format!(
            "its memory is also mapped by {other}, whose writes are not tracked"
        ));
    }
    let features = KernelFeatures::of_kernel().map_err(ScanError::from)?;
    match features.write_protect_async && features.pagemap_scan {
        true => Ok(()),
        false => Err(ScanError::Unsupported.into()),
    }
}

fn copy_pages(
    memory: &GuestMemory,
    pages: &PageSet,
    at: usize,
    out: &mut Vec<u8>,
) -> Result<(), GuestError> {
    let (from, until) = (at * PAGE_SIZE, (at + pages.len()) * PAGE_SIZE);
    if out.len() < until {
        out.resize(until, 0);
    }
    let mut rest = &mut out[from..until];
    for run in pages.page_runs() {
        let (part, after) = rest.split_at_mut(Page::count_in(&run) * PAGE_SIZE);
        memory.read_pages(run.start, part)?;
        rest = after;
    }
    Ok(())
}

fn read_aux(process: &Process, aux: &[AuxRam]) -> Result<Vec<AuxBlock>, GuestError> {
    let read = |aux: &AuxRam| {
        let nowhere = || GuestError::Refused(format!("{} is mapped nowhere", aux.id));
        let mut bytes = vec![0; aux.bytes as usize];
        process_memory::read_memory(process, aux.hva.ok_or_else(nowhere)?, &mut bytes)?;
        Ok(AuxBlock { id: aux.id.clone(), bytes })
    };
    aux.iter().map(read).collect()
}
