//! Resolution of an image's disks to the files that have their contents now.

use std::collections::BTreeSet;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_vmm::FileIdentity;

use super::record::{ChangedContents, DiskLayer, LayerKind, LayerRecord};
use super::record_files::{record_dir, record_key};
use super::register::now_ms;
use super::store::{RecordFolder, is_read_only, read_record};
use crate::records::failure::{Failure, FailureKind};
use crate::records::meta::ImageMeta;

/// How long a restore waits while layers that its image needs are being merged.
const MERGE_WAIT: Duration = Duration::from_secs(60);
const MERGE_RETRY: Duration = Duration::from_millis(10);

/// The locked records of an image's disks: no layer is merged while a restore makes its files.
pub(crate) struct LockedLayers {
    folders: Vec<(PathBuf, RecordFolder)>,
}

impl LockedLayers {
    /// Locks the records, and waits until none of the layers is being merged.
    pub(crate) fn lock(meta: &ImageMeta) -> Result<Self, Failure> {
        let deadline = Instant::now() + MERGE_WAIT;
        loop {
            let (held, is_busy) = Self::try_lock(meta)?;
            if !is_busy {
                return Ok(held);
            }
            if Instant::now() >= deadline {
                let text = "layers of the image's disks are being merged";
                let failure = Failure::new(FailureKind::Busy, text);
                return Err(
                    failure.with_hint("try again when the VM that merges them has ended the merge")
                );
            }
            drop(held);
            std::thread::sleep(MERGE_RETRY);
        }
    }

    fn try_lock(meta: &ImageMeta) -> Result<(Self, bool), Failure> {
        let mut folders = Vec::new();
        let mut is_busy = false;
        for dir in disk_dirs(meta) {
            let Some(mut folder) = RecordFolder::lock_existing(&dir)? else { continue };
            is_busy |= folder.settle_dead()?;
            folders.push((dir, folder));
        }
        Ok((Self { folders }, is_busy))
    }

    /// Replaces the image's disks by the files that have their contents now.
    pub(crate) fn resolve_disks(&self, meta: ImageMeta) -> ImageMeta {
        let records = self.folders.iter().map(|(dir, folder)| (dir.as_path(), &folder.record));
        resolve_with(meta, &records.collect::<Vec<_>>())
    }

    /// Records the files that the restored VM writes to. The files exist; the VM does not use them
    /// yet.
    pub(crate) fn record_restore(
        mut self,
        vm: &str,
        pairs: &[(&Path, &Path)],
    ) -> Result<(), Failure> {
        for (file, below) in pairs {
            let (file, below) = (record_key(file), record_key(below));
            // A snapshot on a device has no directory of disk files, and no layer is merged into it.
            if is_block_device(&below) {
                continue;
            }
            let Some(folder) = self.lock_folder(record_dir(&below))? else { continue };
            let (vm, made, kind) = (vm.to_owned(), now_ms(), LayerKind::Overlay);
            let (below, abandoned, restored) = (Some(below), false, true);
            folder.record.layers.push(DiskLayer {
                file,
                below,
                vm,
                made,
                kind,
                abandoned,
                restored,
            });
        }
        for (dir, folder) in &mut self.folders {
            match folder.store_record() {
                Err(_) if is_read_only(dir) => {}
                stored => stored?,
            }
        }
        Ok(())
    }
}

fn is_block_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|it| it.file_type().is_block_device())
}

impl LockedLayers {
    /// The locked record of a directory. `None` in a read-only directory: no layer can be merged or
    /// removed there either.
    fn lock_folder(&mut self, dir: &Path) -> Result<Option<&mut RecordFolder>, Failure> {
        if !self.folders.iter().any(|(it, _)| it == dir) && !is_read_only(dir) {
            self.folders.push((dir.to_owned(), RecordFolder::lock(dir)?));
        }
        Ok(self.folders.iter_mut().find(|(it, _)| it == dir).map(|(_, folder)| folder))
    }
}

/// The current files of an image's disks, without a lock, for display only.
pub fn resolve_current_disks(meta: ImageMeta) -> Result<ImageMeta, Failure> {
    let dirs: Vec<PathBuf> = disk_dirs(&meta).into_iter().collect();
    let mut records = Vec::new();
    for dir in &dirs {
        records.extend(read_record(dir)?.map(|record| (dir.as_path(), record)));
    }
    let records: Vec<_> = records.iter().map(|(dir, record)| (*dir, record)).collect();
    Ok(resolve_with(meta, &records))
}

/// The directories of an image's disks, in the order in which they are locked.
fn disk_dirs(meta: &ImageMeta) -> BTreeSet<PathBuf> {
    let drives = meta.drives.iter().map(|drive| meta.qemu.directory.join(&drive.file));
    let local = meta.disks.iter().filter(|disk| disk.identity.is_some() && !meta.drives.is_empty());
    let disks = local.map(|disk| meta.qemu.directory.join(&disk.file));
    let dirs = drives.chain(disks).map(|file| record_dir(&record_key(&file)).to_owned());
    dirs.filter(|dir| dir.is_dir()).collect()
}

fn resolve_with(mut meta: ImageMeta, records: &[(&Path, &LayerRecord)]) -> ImageMeta {
    let directory = meta.qemu.directory.clone();
    let find = |file: &Path, then: FileIdentity| -> Option<ChangedContents> {
        let file = record_key(&directory.join(file));
        let (_, record) = records.iter().find(|(dir, _)| *dir == record_dir(&file))?;
        record.find_changed(&file, then).cloned()
    };
    for drive in &mut meta.drives {
        if let Some(now) = find(&drive.file, drive.identity) {
            (drive.file, drive.format, drive.identity) = (now.is_in, now.format, now.now);
        }
    }
    for disk in &mut meta.disks {
        let then = disk.identity;
        if let Some(now) = then.and_then(|then| find(Path::new(&disk.file), then)) {
            disk.file = now.is_in.to_string_lossy().into_owned();
            (disk.format, disk.identity) = (now.format, Some(now.now));
        }
    }
    meta
}
