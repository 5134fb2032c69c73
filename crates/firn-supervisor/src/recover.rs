//! The actions of recovery: a successor carries out what [`crate::recovery_plan`] decides.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use firn_memory::{PageFaults, Tracee};
use serde_json::json;

use crate::disk_layers;
use crate::disks;
use crate::failure::{Context, Failure, FailureKind};
use crate::identity::{self, ProcessHandle, ProcessIdentity};
use crate::journal::{Exit, Journal, JournalFile, Machine, Phase, now};
use crate::keep;
use crate::network::HELD;
use crate::ownership::Ownership;
use crate::protocol::StopRequest;
use crate::qemu;
use crate::recovery::{Recovery, Remains, decide};
use crate::runtime::VmDir;
use crate::serving::TakenOver;
use crate::standby::announce;
use crate::start::Started;

/// The VM that the successor continues to manage, if there is one.
type Found = Option<(Arc<JournalFile>, Started)>;

/// Takes over from a dead supervisor, at the point where the journal ends.
pub(crate) fn take_over(
    vm: &VmDir,
    mut journal: Journal,
    files: Vec<File>,
) -> Result<Found, Failure> {
    let hypervisor = hypervisor(&journal)?;
    if let (Some(hypervisor), Some(machine)) = (&hypervisor, &journal.machine) {
        let owned = Ownership::take_again(&machine.process)?;
        owned.into_iter().for_each(|owned| hypervisor.keep_ownership(owned));
    }
    let remains =
        Remains { hypervisor_lives: hypervisor.is_some(), image_whole: journal.image_whole() };
    let recovery = decide(&journal, remains);
    tracing::warn!("taking over from a dead supervisor: {recovery:?}");
    journal.recoveries += 1;
    // A client that wanted the VM to end has learned that it did not.
    journal.discard &= hypervisor.is_none();
    let journal = JournalFile::create(vm.journal(), journal).doing("writing the journal")?;
    let since = Instant::now();
    let recoverer = Recoverer { vm, journal: Arc::new(journal), files };
    let found = recoverer.perform(recovery, hypervisor)?;
    tracing::info!("taken over within {:?}", since.elapsed());
    Ok(found)
}

/// Finds the hypervisor, if it lives: by its journaled identity, or by the monitor socket on its
/// command line if its supervisor died before it could journal the identity.
fn hypervisor(journal: &Journal) -> Result<Option<ProcessHandle>, Failure> {
    const LOOKING: &str = "finding the hypervisor";
    if let Some(machine) = &journal.machine {
        return machine.process.open().doing(LOOKING);
    }
    let Phase::Starting { launching: Some(socket) } = &journal.phase else { return Ok(None) };
    let found = identity::find_by_argument(&socket.to_string_lossy()).doing(LOOKING)?;
    found.first().map_or(Ok(None), ProcessIdentity::open).doing(LOOKING)
}

struct Recoverer<'a> {
    vm: &'a VmDir,
    journal: Arc<JournalFile>,
    /// The open files of the image that is being restored.
    files: Vec<File>,
}

impl Recoverer<'_> {
    fn perform(
        self,
        recovery: Recovery,
        hypervisor: Option<ProcessHandle>,
    ) -> Result<Found, Failure> {
        match (recovery, hypervisor) {
            (Recovery::Over, _) => Ok(None),
            (Recovery::Forget { kill }, hypervisor) => self.forget(kill, hypervisor),
            (Recovery::StayDetached, _) => self.stay_detached(),
            (Recovery::RecordEnd { unfinished }, _) => self.record_end(unfinished.as_deref()),
            (_, None) => self.record_end(None),
            (Recovery::GoOn, Some(hypervisor)) => self.go_on(hypervisor),
            (Recovery::AbortSave { cont, unfinished }, Some(hypervisor)) => {
                self.abort_save(cont, &unfinished)?;
                self.go_on(hypervisor)
            }
            (Recovery::EndProtection { cont }, Some(hypervisor)) => {
                self.end_protection(cont)?;
                self.go_on(hypervisor)
            }
            (Recovery::EndMerge { cont }, Some(hypervisor)) => {
                self.end_merge(cont)?;
                self.go_on(hypervisor)
            }
            (Recovery::FinishFailover, Some(hypervisor)) => {
                self.finish_failover()?;
                self.go_on(hypervisor)
            }
            (Recovery::FinishSave { cont, stop: false, image }, Some(hypervisor)) => {
                self.finish_save(cont, &image)?;
                self.go_on(hypervisor)
            }
            (Recovery::FinishSave { image, .. }, Some(hypervisor)) => {
                self.finish_suspend(&image, &hypervisor)
            }
            (serve_on @ Recovery::ServeOn { .. }, Some(hypervisor)) => {
                self.serve_on(hypervisor, serve_on)
            }
        }
    }

    /// Removes everything of a VM that never ran. Memory that a restore had filled ends with the
    /// process.
    fn forget(self, kill: bool, hypervisor: Option<ProcessHandle>) -> Result<Found, Failure> {
        if let (true, Some(hypervisor)) = (kill, hypervisor) {
            hypervisor.kill().doing("ending a QEMU whose VM never ran")?;
        }
        let journal = self.journal.read();
        match journal.phase {
            // A VM that Firn was only attaching to has its own files.
            Phase::Starting { launching: None } => {}
            // Its memory is lost, but the disks may be all that is left of its primary.
            Phase::Standby { .. } => kept(&journal.overlays),
            _ => disks::discard(&journal),
        }
        self.vm.remove().doing("removing what was left of the VM")?;
        Ok(None)
    }

    fn stay_detached(self) -> Result<Found, Failure> {
        let change = |journal: &mut Journal| journal.phase = Phase::Detached;
        self.journal.update(change).doing("writing the journal")?;
        Ok(None)
    }

    fn record_end(self, unfinished: Option<&Path>) -> Result<Found, Failure> {
        let text = unfinished.map(|image| {
            remove_unfinished(image);
            format!("the checkpoint to {} was aborted: the VM ended", image.display())
        });
        if unfinished.is_some() {
            disks::give_up(&self.journal, None);
        }
        if unfinished.is_none() {
            self.journal.update(disks::hand_over).doing("writing the journal")?;
        }
        let journal = self.journal.read();
        if journal.discard {
            disks::discard(&journal);
        }
        let change = |journal: &mut Journal| {
            journal.phase = Phase::Ended { exit: Exit::Unknown, at: now() };
            text.into_iter().for_each(|text| journal.note_failure(text));
        };
        self.journal.update(change).doing("writing the journal")?;
        keep::remove_sockets(self.vm).doing("removing sockets")?;
        Ok(None)
    }

    fn go_on(self, hypervisor: ProcessHandle) -> Result<Found, Failure> {
        let is_registered = |it: &Machine| it.access_bits.is_some() || it.followed;
        if let Some(machine) = self.journal.read().machine.filter(is_registered) {
            let_go_of_memory(&machine)?;
        }
        let hypervisor = Arc::new(hypervisor);
        let (restoring, standby, network, served) = (None, None, None, None);
        let (guards, files) = Default::default();
        let facts = json!(null);
        let started =
            Started { hypervisor, restoring, standby, network, served, facts, guards, files };
        Ok(Some((self.journal, started)))
    }

    /// Serves page faults first, because a hypervisor whose main thread waits for a page answers no
    /// command. A VM that Firn paused is resumed as soon as it waits for no page; one that was
    /// paused when it was saved stays paused.
    fn serve_on(self, hypervisor: ProcessHandle, serve_on: Recovery) -> Result<Found, Failure> {
        let machine = self.machine()?;
        let hypervisor = Arc::new(hypervisor);
        let Recovery::ServeOn { image, identity, mode, on_error, cont } = serve_on else {
            return Ok(None);
        };
        let taken_over = TakenOver {
            machine: machine.clone(),
            journal: Arc::clone(&self.journal),
            vm: self.vm.clone(),
            hypervisor: Arc::clone(&hypervisor),
            image,
            identity,
            files: self.files,
            mode,
            on_error,
            cont,
        };
        let resumed = taken_over.resume()?;
        if resumed.is_none() {
            resume(&machine, cont)?;
            self.journal
                .update(|journal| journal.phase = Phase::Running)
                .doing("writing the journal")?;
        }
        let (standby, network, served) = (None, None, None);
        let (restoring, files) = match resumed {
            Some(resumed) => (Some(resumed.restoring), resumed.files),
            None => (None, Vec::new()),
        };
        let (guards, facts) = (Vec::new(), json!(null));
        let started =
            Started { hypervisor, restoring, standby, network, served, facts, guards, files };
        Ok(Some((self.journal, started)))
    }

    /// Ends a save that can't be finished. The guest comes first: it may wait for a page, or be
    /// paused.
    fn abort_save(&self, cont: bool, unfinished: &Path) -> Result<(), Failure> {
        let machine = self.machine()?;
        let_go_of_memory(&machine)?;
        resume(&machine, cont)?;
        remove_unfinished(unfinished);
        self.give_up_drives(&machine)?;
        let text = format!(
            "the checkpoint to {} was aborted: the supervisor died; the VM runs on",
            unfinished.display()
        );
        self.running(|journal| journal.note_failure(text))
    }

    /// Ends a protection. A pause within the hypervisor ends by itself, and a VM that was stopped
    /// by a command is started by one (`cont`). A VM that is paused for another reason was paused
    /// by its user, as far as can be known.
    fn end_protection(&self, cont: bool) -> Result<(), Failure> {
        let machine = self.machine()?;
        let_go_of_memory(&machine)?;
        resume(&machine, cont)?;
        let state = qemu::connect(&machine)?.status().doing("querying whether the VM runs")?;
        let how = if state.running { "the VM runs on" } else { "the VM stands still" };
        // The standby may run any epoch that it has, except the newest.
        let is_shut = !machine.cards.is_empty();
        let held = if is_shut { HELD } else { "" };
        let text = format!("the VM is not protected any more: the supervisor died; {how}{held}");
        self.running(|journal| {
            journal.shut |= is_shut;
            journal.note_failure(text);
        })
    }

    /// Ends a merge. Its record is settled before the guest runs again.
    fn end_merge(&self, cont: bool) -> Result<(), Failure> {
        let machine = self.machine()?;
        disk_layers::end_merges(&mut qemu::connect(&machine)?, &machine)?;
        resume(&machine, cont)?;
        self.running(|journal| {
            journal.overlays.retain(|path| path.exists());
            journal
                .note_failure("a merge of disk layers was ended: the supervisor died; the VM runs");
        })
    }

    fn finish_failover(&self) -> Result<(), Failure> {
        let machine = self.machine()?;
        resume(&machine, true)?;
        match qemu::connect(&machine) {
            Ok(mut vm) => announce(&mut vm),
            Err(failure) => tracing::warn!("the VM's addresses are not announced: {failure}"),
        }
        self.running(|journal| journal.note_success("the standby runs"))
    }

    fn finish_save(&self, cont: bool, image: &Path) -> Result<(), Failure> {
        let machine = self.machine()?;
        let_go_of_memory(&machine)?;
        resume(&machine, cont)?;
        let text = format!("checkpoint {} is whole", image.display());
        self.running(|journal| {
            disks::hand_over(journal);
            journal.note_success(text);
        })
    }

    /// Removes the disk files of a save that failed.
    fn give_up_drives(&self, machine: &Machine) -> Result<(), Failure> {
        match disks::has_made(&self.journal.read()) {
            (true, true) => {
                disks::give_up(&self.journal, Some(&mut qemu::connect(machine)?));
            }
            (true, false) => disks::give_up(&self.journal, None),
            (false, _) => {}
        }
        Ok(())
    }

    fn finish_suspend(self, image: &Path, hypervisor: &ProcessHandle) -> Result<Found, Failure> {
        let machine = self.machine()?;
        let_go_of_memory(&machine)?;
        // It is paused, its disks are flushed, and the image has the rest: killing QEMU loses
        // nothing.
        let by_force = StopRequest { force: true, ..StopRequest::default() };
        qemu::end(&machine, hypervisor, by_force)?;
        let text = format!("suspended to {}", image.display());
        let change = |journal: &mut Journal| {
            disks::hand_over(journal);
            journal.phase = Phase::Ended { exit: Exit::Stopped, at: now() };
            journal.note_success(text);
        };
        self.journal.update(change).doing("writing the journal")?;
        keep::remove_sockets(self.vm).doing("removing sockets")?;
        Ok(None)
    }

    fn running(&self, note: impl FnOnce(&mut Journal)) -> Result<(), Failure> {
        let change = |journal: &mut Journal| {
            note(journal);
            journal.phase = Phase::Running;
        };
        self.journal.update(change).doing("writing the journal")
    }

    fn machine(&self) -> Result<Machine, Failure> {
        let none = || Failure::new(FailureKind::Other, "the journal names no hypervisor");
        self.journal.read().machine.ok_or_else(none)
    }
}

/// Releases the guest's memory: wakes every thread that waits for a page, drops all write
/// protection, and closes the descriptor in the hypervisor.
fn let_go_of_memory(machine: &Machine) -> Result<(), Failure> {
    const LETTING_GO: &str = "releasing the guest's memory";
    let (process, memory) = qemu::open_journaled(machine)?;
    let adopted = PageFaults::adopt(&process, memory).doing(LETTING_GO)?;
    if let Some(faults) = &adopted {
        // At once, because with this the guest runs, even if a later step fails.
        faults.unregister().doing(LETTING_GO)?;
    }
    let mut tracee = Tracee::seize(&process, &machine.vcpus).doing(LETTING_GO)?;
    match adopted {
        Some(faults) => faults.close(&mut tracee).doing(LETTING_GO)?,
        None => drop(PageFaults::close_stale(&mut tracee).doing(LETTING_GO)?),
    }
    Ok(())
}

/// Resumes a VM that the dead supervisor has paused.
fn resume(machine: &Machine, cont: bool) -> Result<(), Failure> {
    if !cont {
        return Ok(());
    }
    let mut vm = qemu::connect(machine)?;
    let running = vm.status().doing("querying whether the VM runs")?.running;
    if running { Ok(()) } else { vm.cont().doing("resuming the VM") }
}

/// Removes an unfinished image. If that fails now, the next checkpoint to that name removes it.
fn remove_unfinished(image: &Path) {
    if let Err(error) = firn_image::remove_partial(image) {
        tracing::warn!("{}", Failure::from_error(FailureKind::Other, &error));
    }
}
/// Logs which disks of a standby are kept after its memory is lost.
fn kept(files: &[PathBuf]) {
    for file in files {
        tracing::warn!("the standby's memory is lost; its disk stays: {}", file.display());
    }
}
