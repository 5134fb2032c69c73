//! A running VM whose writes are followed, and that is paused again and again.
//!
//! ```text
//!   attach:  arm all ............ from now on the kernel remembers each first write
//!   pause:   hypervisor stops ... Still: written, protect, copy ... hypervisor saves devices, goes on
//!   detach:  nothing is left in the hypervisor
//! ```
//!
//! **Memory before devices.** Memory is copied while the hypervisor saves devices, and before it has saved the last of them: there it waits for
//! the copy. A device that wrote to guest memory while it is saved would be newer than memory. QEMU's own migration copies memory first
//! (`qemu_savevm_state_complete_precopy`: RAM, then devices), so no device may.
//!
//! **What the kernel writes for a device model** (a read from disk past the page cache) is told when it begins, and changes memory
//! when it ends. Pages are protected only while the VM stands still, and a hypervisor that stops a VM lets all requests end first.
//! Only the very first protection comes while the VM runs; the VM then stands still for a moment before anything is copied.
//!
//! **Who stopped it.** Its user may stop the VM at any time, and it then stays stopped. So Firn has it stand still by one command that
//! the hypervisor begins and ends by itself: nobody else's `stop` comes in between, and one that came before is respected. A
//! hypervisor that can't do that is stopped and started by two commands, if it ran before; a `stop` between them is lost. Whoever comes
//! after a death between them is told by what a [`Witness`] wrote down.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use firn_cluster::Epoch;
use firn_cluster::predict::PageSet;
use firn_disks::{Change, DiskError};
use firn_image::AuxBlock;
use firn_memory::urgency::First;
use firn_memory::{
    Features, GuestMemory, MemoryError, PageScan, Process, ProcessError, ScanError, TraceError,
    Tracee, process_memory,
};
use firn_types::{PAGE_SIZE, Page, Tid};
use firn_vmm::{AuxRam, DeviceStateError, Look, QmpError, Vm};
use serde_json::Value;
use thiserror::Error;

use crate::disks::Disks;

mod health;
mod state_sizes;

use health::Devices;
pub use health::{LastWords, RunTrouble};
use state_sizes::StateSizes;

/// How long a hypervisor may take to answer: one that takes longer counts as hung.
const HANG: Duration = Duration::from_secs(10);

/// Why a VM can't be followed or paused.
#[derive(Debug, Error)]
pub enum GuestError {
    /// What the VM has can't be in an epoch.
    #[error("the VM can't be protected: {0}")]
    Refused(String),
    /// The hypervisor refused a command, or is gone.
    #[error("the hypervisor refused a command")]
    Qmp(#[from] QmpError),
    /// The devices could not be saved.
    #[error("the VM's devices could not be saved")]
    DeviceState(#[from] DeviceStateError),
    /// What the guest writes could not be followed.
    #[error("what the guest writes could not be followed")]
    Scan(#[from] ScanError),
    /// Guest RAM could not be read.
    #[error("guest memory could not be read")]
    Memory(#[from] MemoryError),
    /// The hypervisor could not be attached to.
    #[error("the hypervisor could not be attached to")]
    Attach(#[from] TraceError),
    /// The hypervisor is out of reach.
    #[error("the hypervisor is out of reach")]
    Process(#[from] ProcessError),
    /// A VM is not stopped by a command without somebody knowing that it has to be started again.
    #[error("that the VM is to stand still could not be written down")]
    Witness(#[source] io::Error),
    /// What the VM writes to a disk can't be followed.
    #[error("a disk of the VM is not followed any more")]
    Disk(#[from] DiskError),
    /// Pages may have been written without a fault since they were protected.
    #[error(
        "a disk has come that is read past the page cache, which no page fault tells of while the VM runs: protect it once more, or \
         have its disks in the page cache"
    )]
    PastPageCache,
    /// A device came or went: the standby has those of the beginning.
    #[error(
        "a device changed, and the standby has those of the beginning ({0}): give devices on the command line of a VM that is to be protected"
    )]
    Devices(String),
    /// Whoever was to have what was copied has gone.
    #[error("nobody takes what is copied any more")]
    NobodyTakes,
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

/// Somebody who outlives this process, and lets a VM go on that it left standing still.
pub trait Witness: fmt::Debug + Send {
    /// The VM is about to be stopped by a command, or goes on again.
    ///
    /// # Errors
    /// If that is not known now to whoever comes after. Then the VM is not stopped.
    fn note(&mut self, is_stopped: bool) -> io::Result<()>;
}

/// Nobody comes after.
impl Witness for () {
    fn note(&mut self, _: bool) -> io::Result<()> {
        Ok(())
    }
}

/// What a pause gave beside memory.
#[derive(Clone, Debug, Default)]
pub struct Pause {
    /// Devices and vCPUs.
    pub devices: Vec<u8>,
    /// Small RAM blocks beside guest RAM.
    pub aux: Vec<AuxBlock>,
    /// How long the VM stood still: by the hypervisor's own events, or else from asking it to stop until it said that it goes on.
    pub downtime: Duration,
}

/// A VM that stands still.
pub struct Still<'a> {
    scan: &'a PageScan,
    memory: &'a GuestMemory,
    disks: &'a Disks,
}

impl Still<'_> {
    /// The pages that were written since they were protected.
    pub fn written(&self) -> Result<PageSet, GuestError> {
        pages(|out| self.scan.written(self.memory.all(), out))
    }

    /// As [`Self::written`], and protects them again.
    pub fn written_and_protect(&self) -> Result<PageSet, GuestError> {
        pages(|out| self.scan.written_and_rearm(self.memory.all(), out))
    }

    /// Protects these pages.
    pub fn protect(&self, pages: &PageSet) -> Result<(), GuestError> {
        protect(self.scan, pages)
    }

    /// Protects all pages.
    pub fn protect_all(&self) -> Result<(), GuestError> {
        Ok(self.scan.arm()?)
    }

    /// What was changed on each disk in the epoch that ends here.
    pub fn cut_disks(&self, epoch: Epoch) -> Result<Vec<Vec<Change>>, GuestError> {
        Ok(self.disks.cut(epoch)?)
    }

    /// Copies pages one after another, behind the first `at` pages of `out`, which grows if it must.
    pub fn copy(&self, pages: &PageSet, at: usize, out: &mut Vec<u8>) -> Result<(), GuestError> {
        copy(self.memory, pages, at, out)
    }
}

/// A VM that runs.
#[derive(Debug)]
pub struct Guest {
    vm: Vm,
    process: Arc<Process>,
    memory: Arc<GuestMemory>,
    aux: Vec<AuxRam>,
    vcpus: Vec<Tid>,
    scan: PageScan,
    witness: Box<dyn Witness>,
    disks: Disks,
    devices: Devices,
    state_sizes: StateSizes,
    /// Nothing is left in the hypervisor.
    is_let_go: bool,
}

impl Guest {
    /// Begins to follow its writes, if it can be protected at all.
    ///
    /// # Errors
    /// If it can't, with the reason; if the hypervisor can't be attached to, or something else follows its memory.
    pub fn attach(
        mut vm: Vm,
        process: Arc<Process>,
        memory: Arc<GuestMemory>,
        aux: Vec<AuxRam>,
        disks: Disks,
        witness: Box<dyn Witness>,
    ) -> Result<Self, GuestError> {
        check(&mut vm, &memory, &disks)?;
        let devices = Devices::list(&mut vm)?;
        let aux: Vec<AuxRam> = aux.into_iter().filter(|aux| !aux.rom).collect();
        let vcpus: Vec<Tid> = vm.vcpus()?.iter().map(|vcpu| vcpu.tid).collect();
        let mut tracee = Tracee::seize(&process, &vcpus)?;
        // `check` has refused what gives memory back.
        let scan = PageScan::create(&mut tracee, Arc::clone(&memory))?.with_lasting_tables();
        drop(tracee);
        let (state_sizes, is_let_go) = (StateSizes::default(), false);
        vm.qmp().set_timeout(HANG);
        let mut guest = Self {
            vm,
            process,
            memory,
            aux,
            vcpus,
            scan,
            witness,
            disks,
            devices,
            state_sizes,
            is_let_go,
        };
        guest.begin()?;
        Ok(guest)
    }

    fn begin(&mut self) -> Result<(), GuestError> {
        self.scan.arm()?;
        self.memory.open_window()?;
        self.stand_still(Duration::ZERO)?;
        firn_fault::io("protect.armed").map_err(|error| GuestError::Refused(error.to_string()))
    }

    /// Its RAM.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Its disks that belong to its epochs.
    pub fn disks(&self) -> &Disks {
        &self.disks
    }

    /// Its control channel.
    pub fn vm(&mut self) -> &mut Vm {
        &mut self.vm
    }

    /// The pages that were written since they were protected. The VM runs on.
    pub fn glance(&self) -> Result<PageSet, GuestError> {
        pages(|out| self.scan.written(self.memory.all(), out))
    }

    /// Protects pages while the VM runs, of which all writes are told from then on.
    ///
    /// # Errors
    /// If that isn't so: the VM [can't be copied ahead](Self::can_be_copied_ahead). A disk that comes after it was asked asks the kernel to
    /// write after that, too.
    pub fn protect_running(&mut self, pages: &PageSet) -> Result<(), GuestError> {
        protect(&self.scan, pages)?;
        match self.can_be_copied_ahead()? {
            true => Ok(()),
            false => Err(GuestError::PastPageCache),
        }
    }

    /// Whether all that is written to its memory is told from the moment that it is protected, also while it runs. Not so where a
    /// device model reads a disk past the page cache: the kernel was told where to write before that moment, and may write after it.
    pub fn can_be_copied_ahead(&mut self) -> Result<bool, GuestError> {
        Ok(!self.vm.reads_past_page_cache()?)
    }

    /// Pages that were written since they were protected, and are protected again while the VM runs. After that it has stood
    /// still for a moment, so that requests of its devices have ended.
    pub fn newly_written(&mut self) -> Result<PageSet, GuestError> {
        let written = pages(|out| self.scan.written_and_rearm(self.memory.all(), out))?;
        self.stand_still(Duration::ZERO)?;
        Ok(written)
    }

    /// Protects everything again while the VM runs, as if it had just been attached to.
    pub fn forget_writes(&mut self) -> Result<(), GuestError> {
        self.scan.arm()?;
        self.stand_still(Duration::ZERO)
    }

    /// Copies pages while the VM runs: what it writes meanwhile may be in the copy, or a part of it.
    pub fn copy_running(&self, pages: &PageSet, out: &mut Vec<u8>) -> Result<(), GuestError> {
        copy(&self.memory, pages, 0, out)
    }

    /// Has it stand still for so long. One that its user has stopped stays so.
    pub fn stand_still(&mut self, time: Duration) -> Result<(), GuestError> {
        let stood_still = self.stand_still_drained(time);
        self.disks.go_on();
        stood_still
    }

    fn stand_still_drained(&mut self, time: Duration) -> Result<(), GuestError> {
        // A hypervisor that waits for a full log, in a reset of the guest's, would not answer.
        self.disks.drain();
        if let Some(held) = self.vm.hold_then(&mut || self.disks.drain(), Look::Awake)? {
            thread::sleep(time);
            held.release()?;
            return Ok(());
        }
        match self.vm.status()?.running {
            true => self.until_cont(|guest| {
                guest.vm.stop()?;
                thread::sleep(time);
                Ok(())
            }),
            false => Ok(()),
        }
    }

    /// Does what stops a VM that runs, and starts it, whatever came of that.
    fn until_cont<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, GuestError>,
    ) -> Result<T, GuestError> {
        self.witness.note(true).map_err(GuestError::Witness)?;
        let done = work(self);
        self.vm.cont()?;
        if let Err(error) = self.witness.note(false) {
            tracing::warn!("that the VM goes on could not be written down: {error}");
        }
        done
    }

    /// What has to be so before each cut; why the VM does not run, if it is in trouble.
    ///
    /// # Errors
    /// If a device came or went since the VM was attached to.
    pub fn check(&mut self) -> Result<Option<RunTrouble>, GuestError> {
        self.devices.check(&mut self.vm)?;
        Ok(RunTrouble::from_state(&self.vm.status()?))
    }

    /// Presses its power button. Its monitor serves one client, which is this one.
    pub fn press_power_button(&mut self) -> Result<(), GuestError> {
        self.vm.qmp().execute("system_powerdown", Value::Null)?;
        Ok(())
    }

    /// What the hypervisor reported last, also if it is gone.
    pub fn last_words(&mut self) -> LastWords {
        LastWords::read(&mut self.vm)
    }

    /// Leaves a hypervisor that does not answer as it is: asking it for anything would wait as long again.
    pub fn abandon(mut self) {
        self.is_let_go = true;
        self.disks.release();
    }

    /// Makes the hypervisor ready for [`Self::pause`], which is shorter for it.
    pub fn prepare(&mut self) -> Result<(), GuestError> {
        self.disks.drain();
        Ok(self.vm.prepare_late_hold(self.state_sizes.least())?)
    }

    /// Pauses it, does `inside`, saves its devices, and has it run on, also if anything fails.
    pub fn pause<T>(
        &mut self,
        mut inside: impl FnMut(&Still<'_>) -> Result<T, GuestError>,
    ) -> Result<(T, Pause), GuestError> {
        match self.pause_held(&mut inside)? {
            Some(done) => Ok(done),
            None => self.pause_by_commands(inside),
        }
    }

    /// The hypervisor stops and starts the VM by itself. `None` if it can't.
    fn pause_held<T>(
        &mut self,
        inside: &mut impl FnMut(&Still<'_>) -> Result<T, GuestError>,
    ) -> Result<Option<(T, Pause)>, GuestError> {
        let started = Instant::now();
        let drain = &mut || self.disks.drain();
        let first = First::now();
        let look = if first.is_some() { Look::Asleep } else { Look::Awake };
        let Some(held) = self.vm.hold_then(drain, look)? else { return Ok(None) };
        let aux = read_aux(&self.process, &self.aux)?;
        let (scan, memory, disks) = (&self.scan, &*self.memory, &self.disks);
        let value = inside(&Still { scan, memory, disks })?;
        let released = held.release()?;
        self.state_sizes.add(released.device_state.len());
        let downtime = released.still.unwrap_or_else(|| started.elapsed());
        Ok(Some((value, Pause { devices: released.device_state, aux, downtime })))
    }

    /// The VM is stopped and started by commands, as QEMU's own migration does.
    pub fn pause_by_commands<T>(
        &mut self,
        mut inside: impl FnMut(&Still<'_>) -> Result<T, GuestError>,
    ) -> Result<(T, Pause), GuestError> {
        self.vm.prepare_save()?;
        let is_to_run = self.vm.status()?.running;
        let started = Instant::now();
        let (value, pause) = match is_to_run {
            true => self.until_cont(|guest| guest.stopped(&mut inside))?,
            false => self.stopped(&mut inside)?,
        };
        let downtime = self.vm.stood_still().unwrap_or_else(|| started.elapsed());
        Ok((value, Pause { downtime, ..pause }))
    }

    fn stopped<T>(
        &mut self,
        inside: &mut impl FnMut(&Still<'_>) -> Result<T, GuestError>,
    ) -> Result<(T, Pause), GuestError> {
        self.disks.drain();
        let devices = self.vm.stop_and_save_device_state()?;
        let aux = read_aux(&self.process, &self.aux)?;
        let (scan, memory, disks) = (&self.scan, &*self.memory, &self.disks);
        let value = inside(&Still { scan, memory, disks })?;
        Ok((value, Pause { devices, aux, ..Pause::default() }))
    }

    /// Lets go of it; it runs on.
    pub fn detach(mut self) -> Result<(), GuestError> {
        self.let_go()
    }

    fn let_go(&mut self) -> Result<(), GuestError> {
        self.is_let_go = true;
        self.disks.release();
        let gave_back = self.vm.finish_save();
        let unregistered = self.scan.unregister();
        self.scan.close(&mut Tracee::seize(&self.process, &self.vcpus)?)?;
        gave_back?;
        Ok(unregistered?)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if self.is_let_go {
            return;
        }
        // Whoever drops it has another error to report. A hypervisor that is gone has nothing left in it.
        if let Err(error) = self.let_go() {
            tracing::warn!("a VM that was followed was not let go of: {error}");
        }
    }
}

/// Whether all that an epoch needs can be had of this VM.
fn check(vm: &mut Vm, memory: &GuestMemory, disks: &Disks) -> Result<(), GuestError> {
    let refused = |why: String| Err(GuestError::Refused(why));
    if !vm.status()?.running {
        return refused("it stands still".into());
    }
    if let Some(blocker) = vm.blockers()?.first() {
        return refused(format!("its state can't be saved ({blocker})"));
    }
    if let Some(drive) = vm.drives()?.iter().find(|drive| !disks.has(&drive.name)) {
        let name = &drive.name;
        return refused(format!(
            "the guest can write to its disk {name}, which Firn does not serve; start the VM with -drive \
             file=PATH,format=raw|qcow2,if=none,id={name},firn=on, or attach the disk read-only"
        ));
    }
    if vm.balloon()?.is_some() {
        return refused("it has a balloon, and what a balloon gives back isn't told".into());
    }
    if let Some(other) = memory.other_users()?.first() {
        return refused(format!("its memory is also mapped by {other}, whose writes aren't told"));
    }
    let features = Features::of_kernel().map_err(ScanError::from)?;
    match features.write_protect_async && features.pagemap_scan {
        true => Ok(()),
        false => Err(ScanError::Unsupported.into()),
    }
}

fn pages(
    scan: impl FnOnce(&mut Vec<std::ops::Range<Page>>) -> Result<(), ScanError>,
) -> Result<PageSet, GuestError> {
    let (mut runs, mut pages) = (Vec::new(), PageSet::new());
    scan(&mut runs)?;
    runs.into_iter().for_each(|run| pages.insert_run(run));
    Ok(pages)
}

fn protect(scan: &PageScan, pages: &PageSet) -> Result<(), GuestError> {
    Ok(pages.runs().into_iter().try_for_each(|run| scan.arm_only(run))?)
}

fn copy(
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
    for run in pages.runs() {
        let (part, after) = rest.split_at_mut(Page::count(&run) * PAGE_SIZE);
        memory.read(run.start, part)?;
        rest = after;
    }
    Ok(())
}

fn read_aux(process: &Process, aux: &[AuxRam]) -> Result<Vec<AuxBlock>, GuestError> {
    let read = |aux: &AuxRam| {
        let nowhere = || GuestError::Refused(format!("{} is mapped nowhere", aux.id));
        let mut bytes = vec![0; aux.bytes as usize];
        process_memory::read(process, aux.hva.ok_or_else(nowhere)?, &mut bytes)?;
        Ok(AuxBlock { id: aux.id.clone(), bytes })
    };
    aux.iter().map(read).collect()
}
