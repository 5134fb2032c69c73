//! `firn disk commit`: merges a VM's layers, so that it writes to its disks' own files again.

use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_vmm::Drive;
use firn_vmm::command_line::{self, DriveFile};
use serde_json::{Value, json};

use super::merge::{Merging, commit};
use super::newer::listed;
use super::record::{Layer, Record};
use super::store::{Folder, read};
use super::{dir_of, key};
use crate::disks::named;
use crate::failure::{Context, Failure, FailureKind};
use crate::journal::{Journal, Phase};
use crate::meta::Meta;

const COMMITTING: &str = "committing layers of the VM's disks";
const JOB_RETRY: Duration = Duration::from_millis(1);

/// A drive, and the index of the disk's own file in its chain: the files above that are layers.
struct Target {
    drive: Drive,
    base: usize,
    /// The file that the command line names.
    named: String,
}

impl Merging<'_> {
    /// Merges all layers of all drives into the files that the command line names.
    pub(crate) fn commit_all(&mut self) -> Result<Value, Failure> {
        let drives = self.vm.drives().doing("asking for the VM's disks")?;
        let targets = drives.into_iter().map(|drive| target(&self.machine.meta, drive));
        let targets: Vec<Target> = targets.collect::<Result<_, _>>()?;
        targets.iter().try_for_each(check)?;
        let mut done = Vec::new();
        for target in targets.iter().filter(|target| target.base > 0) {
            let committed = self.commit_one(target);
            let back = self.journal.update(|it| it.phase = Phase::Running);
            committed.and(back.doing("writing the journal"))?;
            let file = &target.drive.chain[target.base];
            done.push(json!({ "drive": target.drive.name, "file": file, "layers": target.base }));
        }
        Ok(json!({ "committed": done }))
    }

    fn commit_one(&mut self, target: &Target) -> Result<(), Failure> {
        let Target { drive, base, .. } = target;
        let merge = self.merge_of(drive, 0, *base).doing(COMMITTING)?;
        let dir = dir_of(&merge.base).to_owned();
        let tops = merge.tops.clone();
        self.enter(false)?;
        let mut folder = Folder::lock(&dir)?;
        // An image or a restore may have begun to need a layer meanwhile.
        check(target)?;
        folder.record.merges.push(merge);
        folder.store()?;
        drop(folder);
        firn_fault::point("commit.noted");
        let commit = commit(drive, 0, *base);
        let ready = self.run(drive, &commit, true);
        firn_fault::point("commit.ready");
        match ready {
            Ok(()) => self.turn(target, &commit.job, &dir, &tops),
            failed => self.settle(&dir).and(failed),
        }
    }

    /// Switches the drive to its own file. The guest is paused until the record has that change.
    fn turn(
        &mut self,
        target: &Target,
        job: &str,
        dir: &Path,
        tops: &[PathBuf],
    ) -> Result<(), Failure> {
        let was_running = self.vm.status().doing("asking whether the VM runs")?.running;
        self.enter(was_running)?;
        self.vm.stop().doing("pausing the VM")?;
        firn_fault::point("commit.paused");
        let turned = self.complete(job);
        firn_fault::point("commit.completed");
        let settled = self.close(&target.drive, 0, target.base).and_then(|()| self.settle(dir));
        firn_fault::point("commit.settled");
        if settled.is_ok() && turned.is_ok() {
            let is_gone = |path: &PathBuf| tops.contains(&key(path)) || !path.exists();
            let change = |journal: &mut Journal| {
                journal.overlays.retain(|path| !is_gone(path));
                journal.machine.iter_mut().for_each(|it| target.rename(&mut it.meta));
            };
            self.journal.update(change).doing("writing the journal")?;
        }
        if was_running {
            self.vm.cont().doing("letting the VM run")?;
        }
        turned.and(settled)
    }

    fn complete(&mut self, job: &str) -> Result<(), Failure> {
        self.vm.complete_commit(job).doing(COMMITTING)?;
        loop {
            let jobs = self.vm.commit_jobs().doing(COMMITTING)?;
            match jobs.iter().find(|it| it.id == job) {
                None => return Ok(()),
                Some(job) if job.status == "concluded" => {
                    self.vm.dismiss_commit(&job.id).doing(COMMITTING)?;
                    let failed = |error| Failure::new(FailureKind::Other, error);
                    return job.error.clone().map_or(Ok(()), |error| Err(failed(error)));
                }
                Some(_) => std::thread::sleep(JOB_RETRY),
            }
        }
    }
}

fn target(meta: &Meta, drive: Drive) -> Result<Target, Failure> {
    if let Some(obstacle) = &drive.obstacle {
        let text = format!("{}: {obstacle}", drive.name);
        return Err(Failure::new(FailureKind::Refused, text));
    }
    let named = named(meta, &drive);
    let file = named.as_ref().map(|named| key(&meta.qemu.directory.join(named)));
    let base = drive.chain.iter().position(|layer| Some(key(layer)) == file);
    match (base, named) {
        (Some(base), Some(named)) => {
            let base = lowest(&drive, base)?;
            Ok(Target { drive, base, named })
        }
        _ => {
            let text =
                format!("{}: the file of the command line is not below its layers", drive.name);
            let hint = "the VM was restored from copies of its disks: they belong to the VM, and stay";
            Err(Failure::new(FailureKind::Refused, text).hint(hint))
        }
    }
}

/// The index of the disk's own file. A VM may have been started with a layer in its command line;
/// the disk's own file is below all layers.
fn lowest(drive: &Drive, named: usize) -> Result<usize, Failure> {
    let files: Vec<PathBuf> = drive.chain.iter().map(|file| key(file)).collect();
    let mut lowest = named;
    for at in named + 1..files.len() {
        let record = read(dir_of(&files[at]))?.unwrap_or_default();
        let is_on = |layer: &Layer| layer.below.as_ref() == Some(&files[at]);
        if !record.layer(&files[at - 1]).is_some_and(is_on) {
            break;
        }
        lowest = at;
    }
    Ok(lowest)
}

impl Target {
    /// Changes the command line so that it names the disk's own file.
    fn rename(&self, meta: &mut Meta) {
        let file = &self.drive.chain[self.base];
        if key(&meta.qemu.directory.join(&self.named)) == key(file) {
            return;
        }
        let format = self.drive.formats.get(self.base).cloned().unwrap_or_default();
        let (named, file) = (self.named.clone(), file.to_string_lossy().into_owned());
        let plan = command_line::plan(&meta.qemu.user_args);
        let plan = plan.and_then(|plan| plan.with_drives(&[DriveFile { named, file, format }]));
        match plan {
            Ok(plan) => meta.qemu.user_args = plan.words(),
            Err(error) => tracing::warn!("{error}"),
        }
    }
}

/// Refuses to merge files that images or other VMs need.
fn check(target: &Target) -> Result<(), Failure> {
    let files: Vec<PathBuf> = target.drive.chain[..=target.base].iter().map(|it| key(it)).collect();
    for (at, file) in files.iter().enumerate().filter(|_| target.base > 0) {
        let record = read(dir_of(file))?.unwrap_or_default();
        let over = at.checked_sub(1).map(|at| &files[at]);
        check_file(&record, file, over)?;
    }
    Ok(())
}

fn check_file(record: &Record, file: &Path, over: Option<&PathBuf>) -> Result<(), Failure> {
    let images: Vec<PathBuf> = record.images_of(file).map(Path::to_owned).collect();
    if !images.is_empty() {
        let text = format!("{} needs {} as it is", listed(&images), file.display());
        let hint = "`firn image rm` removes images that are not wanted any more";
        return Err(Failure::new(FailureKind::Refused, text).hint(hint));
    }
    if let Some(other) = record.on(file).find(|layer| Some(&layer.file) != over) {
        let (other, vm) = (other.file.display(), &other.vm);
        let text = format!("{other}, of the VM {vm}, has {} as its backing file", file.display());
        return Err(Failure::new(FailureKind::Refused, text).hint("remove it if it is not wanted"));
    }
    let is_known = |over: &PathBuf| record.layer(over).is_some();
    if let Some(over) = over.filter(|over| !is_known(over)) {
        let text = format!("the record does not list {}: images may need it", over.display());
        return Err(Failure::new(FailureKind::Refused, text).hint(
            "it was made by an older Firn; `qemu-img convert` makes one file of the disk of a VM that has ended",
        ));
    }
    Ok(())
}
