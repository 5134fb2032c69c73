//! `firn disk commit`: merges a VM's layers, so that it writes to its disks' own files again.

use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_vmm::Drive;
use firn_vmm::command_line::{self, DriveFile};
use serde_json::{Value, json};

use super::merge::{LayerMerger, build_commit};
use super::newer::list_paths;
use super::record::{DiskLayer, LayerRecord};
use super::record_files::{record_dir, record_key};
use super::store::{RecordFolder, read_record};
use crate::devices::disk_snapshots::named_file;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{Journal, VmPhase};
use crate::records::meta::ImageMeta;

const COMMITTING: &str = "committing layers of the VM's disks";
const JOB_RETRY: Duration = Duration::from_millis(1);

/// A drive, and the index of the disk's own file in its chain: the files above that are layers.
struct CommitTarget {
    drive: Drive,
    base: usize,
    /// The file that the command line names.
    named: String,
}

impl LayerMerger<'_> {
    /// Merges all layers of all drives into the files that the command line names.
    pub(crate) fn commit_all(&mut self) -> Result<Value, Failure> {
        let drives = self.vm.drives().while_doing("asking for the VM's disks")?;
        let targets =
            drives.into_iter().map(|drive| find_target(&self.hypervisor_record.meta, drive));
        let targets: Vec<CommitTarget> = targets.collect::<Result<_, _>>()?;
        targets.iter().try_for_each(check_uses)?;
        let mut done = Vec::new();
        for target in targets.iter().filter(|target| target.base > 0) {
            let committed = self.commit_drive(target);
            let back = self.journal.update(|it| it.phase = VmPhase::Running);
            committed.and(back.while_doing("writing the journal"))?;
            let file = &target.drive.chain[target.base];
            done.push(json!({ "drive": target.drive.name, "file": file, "layers": target.base }));
        }
        Ok(json!({ "committed": done }))
    }

    fn commit_drive(&mut self, target: &CommitTarget) -> Result<(), Failure> {
        let CommitTarget { drive, base, .. } = target;
        let merge = self.describe_merge(drive, 0, *base).while_doing(COMMITTING)?;
        let dir = record_dir(&merge.base).to_owned();
        let tops = merge.tops.clone();
        self.enter_phase(false)?;
        let mut folder = RecordFolder::lock(&dir)?;
        // An image or a restore may have begun to need a layer meanwhile.
        check_uses(target)?;
        folder.record.merges.push(merge);
        folder.store_record()?;
        drop(folder);
        firn_fault::pass_point("disk-commit.recorded");
        let commit = build_commit(drive, 0, *base);
        let ready = self.run_job(drive, &commit, true);
        firn_fault::pass_point("disk-commit.ready");
        match ready {
            Ok(()) => self.switch_to_base(target, &commit.job, &dir, &tops),
            failed => self.settle_merges(&dir).and(failed),
        }
    }

    /// Switches the drive to its own file. The guest is paused until the record has that change.
    fn switch_to_base(
        &mut self,
        target: &CommitTarget,
        job: &str,
        dir: &Path,
        tops: &[PathBuf],
    ) -> Result<(), Failure> {
        let was_running = self.vm.status().while_doing("asking whether the VM runs")?.running;
        self.enter_phase(was_running)?;
        self.vm.stop().while_doing("pausing the VM")?;
        firn_fault::pass_point("disk-commit.paused");
        let switched = self.complete_job(job);
        firn_fault::pass_point("disk-commit.completed");
        let settled = self
            .close_merged_layers(&target.drive, 0, target.base)
            .and_then(|()| self.settle_merges(dir));
        firn_fault::pass_point("disk-commit.settled");
        if settled.is_ok() && switched.is_ok() {
            let is_gone = |path: &PathBuf| tops.contains(&record_key(path)) || !path.exists();
            let change = |journal: &mut Journal| {
                journal.overlays.retain(|path| !is_gone(path));
                journal
                    .hypervisor_record
                    .iter_mut()
                    .for_each(|it| target.update_command_line(&mut it.meta));
            };
            self.journal.update(change).while_doing("writing the journal")?;
        }
        if was_running {
            self.vm.cont().while_doing("letting the VM run")?;
        }
        switched.and(settled)
    }

    fn complete_job(&mut self, job: &str) -> Result<(), Failure> {
        self.vm.complete_commit(job).while_doing(COMMITTING)?;
        loop {
            let jobs = self.vm.commit_jobs().while_doing(COMMITTING)?;
            match jobs.iter().find(|it| it.id == job) {
                None => return Ok(()),
                Some(job) if job.status == "concluded" => {
                    self.vm.dismiss_commit(&job.id).while_doing(COMMITTING)?;
                    let failed = |error| Failure::new(FailureKind::Other, error);
                    return job.error.clone().map_or(Ok(()), |error| Err(failed(error)));
                }
                Some(_) => std::thread::sleep(JOB_RETRY),
            }
        }
    }
}

fn find_target(meta: &ImageMeta, drive: Drive) -> Result<CommitTarget, Failure> {
    if let Some(obstacle) = &drive.obstacle {
        let text = format!("{}: {obstacle}", drive.name);
        return Err(Failure::new(FailureKind::Refused, text));
    }
    let named = named_file(meta, &drive);
    let file = named.as_ref().map(|named| record_key(&meta.qemu.directory.join(named)));
    let base = drive.chain.iter().position(|layer| Some(record_key(layer)) == file);
    match (base, named) {
        (Some(base), Some(named)) => {
            let base = find_own_file(&drive, base)?;
            Ok(CommitTarget { drive, base, named })
        }
        _ => {
            let text =
                format!("{}: the file of the command line is not below its layers", drive.name);
            let hint =
                "the VM was restored from copies of its disks: they belong to the VM, and stay";
            Err(Failure::new(FailureKind::Refused, text).with_hint(hint))
        }
    }
}

/// The index of the disk's own file. A VM may have been started with a layer in its command line;
/// the disk's own file is below all layers.
fn find_own_file(drive: &Drive, named: usize) -> Result<usize, Failure> {
    let files: Vec<PathBuf> = drive.chain.iter().map(|file| record_key(file)).collect();
    let mut lowest = named;
    for at in named + 1..files.len() {
        let record = read_record(record_dir(&files[at]))?.unwrap_or_default();
        let is_on = |layer: &DiskLayer| layer.below.as_ref() == Some(&files[at]);
        if !record.find_layer(&files[at - 1]).is_some_and(is_on) {
            break;
        }
        lowest = at;
    }
    Ok(lowest)
}

impl CommitTarget {
    /// Changes the command line so that it names the disk's own file.
    fn update_command_line(&self, meta: &mut ImageMeta) {
        let file = &self.drive.chain[self.base];
        if record_key(&meta.qemu.directory.join(&self.named)) == record_key(file) {
            return;
        }
        let format = self.drive.formats.get(self.base).cloned().unwrap_or_default();
        let (named, file) = (self.named.clone(), file.to_string_lossy().into_owned());
        let plan = command_line::plan_command(&meta.qemu.user_args);
        let plan = plan.and_then(|plan| plan.with_drives(&[DriveFile { named, file, format }]));
        match plan {
            Ok(plan) => meta.qemu.user_args = plan.words(),
            Err(error) => tracing::warn!("{error}"),
        }
    }
}

/// Refuses to merge files that images or other VMs need.
fn check_uses(target: &CommitTarget) -> Result<(), Failure> {
    let files: Vec<PathBuf> =
        target.drive.chain[..=target.base].iter().map(|it| record_key(it)).collect();
    for (at, file) in files.iter().enumerate().filter(|_| target.base > 0) {
        let record = read_record(record_dir(file))?.unwrap_or_default();
        let over = at.checked_sub(1).map(|at| &files[at]);
        check_file(&record, file, over)?;
    }
    Ok(())
}

fn check_file(record: &LayerRecord, file: &Path, over: Option<&PathBuf>) -> Result<(), Failure> {
    let images: Vec<PathBuf> = record.images_of(file).map(Path::to_owned).collect();
    if !images.is_empty() {
        let text = format!("{} needs {} as it is", list_paths(&images), file.display());
        let hint = "`firn image rm` removes images that are not wanted any more";
        return Err(Failure::new(FailureKind::Refused, text).with_hint(hint));
    }
    if let Some(other) = record.layers_over(file).find(|layer| Some(&layer.file) != over) {
        let (other, vm) = (other.file.display(), &other.vm);
        let text = format!("{other}, of the VM {vm}, has {} as its backing file", file.display());
        return Err(
            Failure::new(FailureKind::Refused, text).with_hint("remove it if it is not wanted")
        );
    }
    let is_known = |over: &PathBuf| record.find_layer(over).is_some();
    if let Some(over) = over.filter(|over| !is_known(over)) {
        let text = format!("the record does not list {}: images may need it", over.display());
        return Err(Failure::new(FailureKind::Refused, text).with_hint(
            "it was made by an older Firn; `qemu-img convert` makes one file of the disk of a VM that has ended",
        ));
    }
    Ok(())
}
