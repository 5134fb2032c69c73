//! Merging of layers while the VM runs.
//!
//! ```text
//!   record: merge begins  ->  job in the hypervisor  ->  job ended  ->  record: current contents  ->  files removed
//! ```
//!
//! The last merge of `firn disk commit` changes the file to which the guest writes. Firn pauses the
//! guest for that, and resumes it when the record has the change: whichever process dies in
//! between, the file in the record is the one with the guest's writes.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use firn_vmm::{BlockCommit, Drive, FileIdentity, JOB_PREFIX, JobState, QemuVm};

use super::plan::{LayerChain, MergeStep};
use super::record::PendingMerge;
use super::record_files::{record_dir, record_key};
use super::store::RecordFolder;
use crate::devices::disk_snapshots::named_file;
use crate::records::control_protocol::OperationProgress;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{HypervisorRecord, Journal, JournalFile, VmPhase};

const MERGING: &str = "merging layers of the VM's disks";

/// The polling interval of a job: first, and maximum.
const JOB_RETRY: Duration = Duration::from_millis(1);
const JOB_RETRY_MAX: Duration = Duration::from_millis(50);

/// How long a cancelled job may take to end.
const CANCEL_WAIT: Duration = Duration::from_secs(30);

/// Merges the layers of one VM.
pub(crate) struct LayerMerger<'a> {
    pub(crate) vm: &'a mut QemuVm,
    pub(crate) hypervisor_record: &'a HypervisorRecord,
    pub(crate) journal: &'a JournalFile,
    pub(crate) cancel: &'a AtomicBool,
    pub(crate) progress: &'a dyn Fn(OperationProgress),
}

impl LayerMerger<'_> {
    /// Merges the layers that no image needs. Returns the number of layers that were merged away.
    pub(crate) fn merge_unneeded(&mut self) -> Result<usize, Failure> {
        let (mut merged, mut failed) = (0, Vec::new());
        while let Some((drive, step)) = self.find_next(&failed)? {
            self.enter_phase(false)?;
            let ended = self.merge_layers(&drive, step);
            self.journal
                .update(|it| it.phase = VmPhase::Running)
                .while_doing("writing the journal")?;
            match ended {
                Ok(()) => merged += step.base - step.top,
                Err(failure) if failure.kind.is_cut_short() => return Err(failure),
                // Another process may have a file open. The other drives are merged all the same.
                Err(failure) => {
                    tracing::warn!("{failure}");
                    failed.push(drive.name);
                }
            }
        }
        Ok(merged)
    }

    /// Finds a merge that is possible, on a drive for which none has failed.
    fn find_next(&mut self, failed: &[String]) -> Result<Option<(Drive, MergeStep)>, Failure> {
        let drives = self.vm.drives().while_doing("asking for the VM's disks")?;
        for drive in drives.into_iter().filter(|it| it.obstacle.is_none()) {
            if failed.contains(&drive.name) || drive.chain.len() < 3 {
                continue;
            }
            let chain = layer_chain(self.hypervisor_record, &drive);
            let kept = self.journal.current_journal().overlays;
            let kept: Vec<PathBuf> = kept.iter().map(|file| record_key(file)).collect();
            let chain = LayerChain { kept: &kept, ..chain };
            let Some(base) = chain.files.first().map(|file| record_dir(file).to_owned()) else {
                continue;
            };
            let Some(mut folder) = RecordFolder::lock_existing(&base)? else { continue };
            folder.settle_dead()?;
            if let Some(step) = chain.plan_steps(&folder.record).first() {
                return Ok(Some((drive, *step)));
            }
        }
        Ok(None)
    }

    fn merge_layers(&mut self, drive: &Drive, step: MergeStep) -> Result<(), Failure> {
        let merge = self.describe_merge(drive, step.top, step.base).while_doing(MERGING)?;
        let dir = record_dir(&merge.base).to_owned();
        let mut folder = RecordFolder::lock(&dir)?;
        let chain = layer_chain(self.hypervisor_record, drive);
        let kept: Vec<PathBuf> =
            self.journal.current_journal().overlays.iter().map(|it| record_key(it)).collect();
        // An image or a restore may have begun to need a layer meanwhile.
        if !(LayerChain { kept: &kept, ..chain }).plan_steps(&folder.record).contains(&step) {
            return Err(
                Failure::new(FailureKind::Refused, "layers are needed again").while_doing(MERGING)
            );
        }
        folder.record.merges.push(merge);
        folder.store_record()?;
        drop(folder);
        firn_fault::pass_point("merge.recorded");
        let commit = build_commit(drive, step.top, step.base);
        let ended = self.run_job(drive, &commit, false);
        firn_fault::pass_point("merge.ended");
        self.close_merged_layers(drive, step.top, step.base)?;
        self.settle_merges(&dir)?;
        firn_fault::pass_point("merge.settled");
        ended
    }

    /// Describes a merge for the record, before it begins.
    pub(super) fn describe_merge(
        &self,
        drive: &Drive,
        top: usize,
        base: usize,
    ) -> std::io::Result<PendingMerge> {
        let files: Vec<PathBuf> = drive.chain.iter().map(|file| record_key(file)).collect();
        let above = top.checked_sub(1).map(|at| files[at].clone());
        let mut before = Vec::new();
        for (at, file) in files.iter().enumerate().take(base + 1).skip(top.saturating_sub(1)) {
            // The guest writes to the first file, so its identity changes.
            if at > 0 {
                before.push((file.clone(), FileIdentity::from_path(file)?));
            }
        }
        Ok(PendingMerge {
            process: self.hypervisor_record.process.clone(),
            vm: self.hypervisor_record.meta.name.clone(),
            base: files[base].clone(),
            format: drive.formats.get(base).cloned().unwrap_or_default(),
            tops: files[top..base].to_vec(),
            above,
            before,
        })
    }

    /// Runs a job until it ends, or until it is `ready`.
    pub(super) fn run_job(
        &mut self,
        drive: &Drive,
        commit: &BlockCommit,
        until_ready: bool,
    ) -> Result<(), Failure> {
        self.vm.begin_commit(drive, commit).while_doing(MERGING)?;
        firn_fault::pass_point("merge.begun");
        let (mut wait, mut is_cancelled) = (JOB_RETRY, false);
        loop {
            let job = self.find_job(&commit.job)?;
            (self.progress)(OperationProgress::new("merging", job.done, job.total));
            match &*job.status {
                "concluded" => return self.conclude_job(&job, is_cancelled),
                "ready" if until_ready => return Ok(()),
                _ => {}
            }
            if self.cancel.load(Ordering::Relaxed) && !is_cancelled {
                self.vm.cancel_commit(&commit.job).while_doing(MERGING)?;
                is_cancelled = true;
            }
            std::thread::sleep(wait);
            wait = (wait * 2).min(JOB_RETRY_MAX);
        }
    }

    fn find_job(&mut self, id: &str) -> Result<JobState, Failure> {
        let gone = || Failure::new(FailureKind::Other, "QEMU does not know the merge any more");
        let jobs = self.vm.commit_jobs().while_doing(MERGING)?;
        jobs.into_iter().find(|job| job.id == id).ok_or_else(gone)
    }

    fn conclude_job(&mut self, job: &JobState, is_cancelled: bool) -> Result<(), Failure> {
        self.vm.dismiss_commit(&job.id).while_doing(MERGING)?;
        match &job.error {
            Some(_) if is_cancelled => {
                Err(Failure::new(FailureKind::Interrupted, "merging layers was cancelled"))
            }
            Some(error) => {
                Err(Failure::new(FailureKind::Other, error.clone()).while_doing(MERGING))
            }
            None => Ok(()),
        }
    }

    /// Closes the files that are no longer part of the drive.
    pub(super) fn close_merged_layers(
        &mut self,
        drive: &Drive,
        top: usize,
        base: usize,
    ) -> Result<(), Failure> {
        let now = self.vm.drives().while_doing("asking for the VM's disks")?;
        let is_used = |file: &&PathBuf| now.iter().any(|drive| drive.chain.contains(file));
        let unused: Vec<PathBuf> =
            drive.chain[top..base].iter().filter(|file| !is_used(file)).cloned().collect();
        self.vm.close_layers(&unused).while_doing("closing merged layers")
    }

    /// Records the results of merges, and removes files.
    pub(super) fn settle_merges(&mut self, dir: &std::path::Path) -> Result<(), Failure> {
        let drives = self.vm.drives().while_doing("asking for the VM's disks")?;
        let active: Vec<PathBuf> =
            drives.iter().map(|drive| record_key(drive.top_file())).collect();
        RecordFolder::lock(dir)?.settle_process(&self.hypervisor_record.process, &active)
    }

    pub(super) fn enter_phase(&self, paused_by_us: bool) -> Result<(), Failure> {
        let change = |journal: &mut Journal| journal.phase = VmPhase::Merging { paused_by_us };
        self.journal.update(change).while_doing("writing the journal")
    }
}

/// The job that performs a merge.
pub(super) fn build_commit(drive: &Drive, top: usize, base: usize) -> BlockCommit {
    let files = &drive.chain;
    BlockCommit {
        job: format!("{JOB_PREFIX}{}-{base}", std::process::id()),
        top: files[top].clone(),
        base: files[base].clone(),
        above: top.checked_sub(1).map(|at| files[at].clone()),
    }
}

/// The chain of a drive for planning. In a restored VM, the files below its own layers belong to
/// the image.
fn layer_chain<'a>(hypervisor_record: &'a HypervisorRecord, drive: &Drive) -> LayerChain<'a> {
    let is_restored = !hypervisor_record.meta.drives.is_empty();
    let named = named_file(&hypervisor_record.meta, drive).filter(|_| !is_restored);
    let named = named.map(|named| record_key(&hypervisor_record.meta.qemu.directory.join(named)));
    let files = drive.chain.iter().map(|file| record_key(file)).collect();
    LayerChain { files, vm: &hypervisor_record.meta.name, named, kept: &[] }
}

/// After a supervisor has died: ends its jobs, and records the results of its merges.
pub(crate) fn end_merges(
    vm: &mut QemuVm,
    hypervisor_record: &HypervisorRecord,
) -> Result<(), Failure> {
    end_jobs(vm)?;
    let drives = vm.drives().while_doing("asking for the VM's disks")?;
    let active: Vec<PathBuf> = drives.iter().map(|drive| record_key(drive.top_file())).collect();
    let files: Vec<PathBuf> =
        drives.iter().flat_map(|it| &it.chain).map(|it| record_key(it)).collect();
    let mut dirs: Vec<_> = files.iter().map(|file| record_dir(file)).collect();
    dirs.sort_unstable();
    dirs.dedup();
    for dir in dirs {
        let Some(mut folder) = RecordFolder::lock_existing(dir)? else { continue };
        let of_vm =
            folder.record.merges.iter().filter(|it| it.process == hypervisor_record.process);
        let tops = of_vm.flat_map(|it| &it.tops).filter(|top| !files.contains(top));
        let tops: Vec<PathBuf> = tops.cloned().collect();
        vm.close_layers(&tops).while_doing("closing merged layers")?;
        folder.settle_process(&hypervisor_record.process, &active)?;
    }
    Ok(())
}

fn end_jobs(vm: &mut QemuVm) -> Result<(), Failure> {
    const ENDING: &str = "ending the merge of a dead supervisor";
    let deadline = Instant::now() + CANCEL_WAIT;
    loop {
        let jobs = vm.commit_jobs().while_doing(ENDING)?;
        if jobs.is_empty() {
            return Ok(());
        }
        for job in jobs {
            match &*job.status {
                "concluded" => vm.dismiss_commit(&job.id).while_doing(ENDING)?,
                // The job may end by itself meanwhile.
                _ => drop(vm.cancel_commit(&job.id)),
            }
        }
        if Instant::now() >= deadline {
            return Err(
                Failure::new(FailureKind::Other, "the job does not end").while_doing(ENDING)
            );
        }
        std::thread::sleep(JOB_RETRY);
    }
}
