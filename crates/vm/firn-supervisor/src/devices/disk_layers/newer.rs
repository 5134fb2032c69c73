//! The check for old disk states: whether a VM has written to newer layers over a file.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::record::{DiskLayer, LayerKind, LayerRecord};
use super::record_files::{record_dir, record_key};
use super::store::{RecordFolder, read_record};
use crate::records::failure::{Failure, FailureKind};

/// A file that a VM uses, or will use, as a disk.
pub(crate) struct WantedDisk {
    /// The file as its user names it.
    pub(crate) named: String,
    /// The file.
    pub(crate) file: PathBuf,
}

/// Refuses files that are old states of disks, unless their user returns to them on purpose.
/// Returns notes for the user.
pub(crate) fn check_old_disks(
    files: &[WantedDisk],
    old_disk: bool,
) -> Result<Vec<String>, Failure> {
    let mut notes = Vec::new();
    for wanted in files.iter().filter(|wanted| wanted.file.is_file()) {
        let file = record_key(&wanted.file);
        let Some(mut folder) = RecordFolder::lock_existing(record_dir(&file))? else { continue };
        folder.settle_dead()?;
        let record = folder.record.clone();
        drop(folder);
        refuse_partial(&record, wanted, &file)?;
        let newer = newest_layers(&file)?;
        let images = existing_images_of(&record, &file);
        match (newer.last(), old_disk) {
            (None, _) => {}
            (Some(newest), false) => return Err(refuse_old_state(wanted, newest, &images)),
            (Some(_), true) => {
                abandon_layers(&file)?;
                notes.extend(newer.iter().map(|it| abandoned_note(wanted, it)));
            }
        }
        notes.extend(images.iter().map(|image| spoiled_note(wanted, image)));
    }
    Ok(notes)
}

/// The layers over a file that have no layer over them; the newest of them last.
fn newest_layers(file: &Path) -> Result<Vec<DiskLayer>, Failure> {
    let (mut tips, mut seen) = (Vec::new(), HashSet::new());
    let mut open = overlays_over(file)?;
    while let Some(layer) = open.pop() {
        if !seen.insert(layer.file.clone()) {
            continue;
        }
        let over = overlays_over(&layer.file)?;
        match over.is_empty() {
            true => tips.push(layer),
            false => open.extend(over),
        }
    }
    tips.sort_unstable_by_key(|layer| layer.made);
    Ok(tips)
}

fn overlays_over(file: &Path) -> Result<Vec<DiskLayer>, Failure> {
    let Some(record) = read_record(record_dir(file))? else { return Ok(Vec::new()) };
    let is_written = |layer: &&DiskLayer| layer.kind == LayerKind::Overlay && !layer.abandoned;
    Ok(record.layers_over(file).filter(is_written).cloned().collect())
}

fn existing_images_of(record: &LayerRecord, file: &Path) -> Vec<PathBuf> {
    record.images_of(file).filter(|image| image.exists()).map(Path::to_owned).collect()
}

/// Records that the layers over a file are no longer the newest state of the disk.
fn abandon_layers(file: &Path) -> Result<(), Failure> {
    let mut folder = RecordFolder::lock(record_dir(file))?;
    let on = |layer: &&mut DiskLayer| layer.below.as_deref() == Some(file);
    folder.record.layers.iter_mut().filter(on).for_each(|layer| layer.abandoned = true);
    folder.store_record()
}

fn refuse_partial(record: &LayerRecord, wanted: &WantedDisk, file: &Path) -> Result<(), Failure> {
    let merges = record.merges.iter().map(|merge| (&merge.base, &merge.tops));
    let partial = record.partial.iter().map(|partial| (&partial.base, &partial.tops));
    let found = merges.chain(partial).find(|(base, _)| *base == file);
    let Some(top) = found.and_then(|(_, tops)| tops.first()) else { return Ok(()) };
    let text =
        format!("{} holds a part of {}, which is not merged yet", wanted.named, top.display());
    let hint = format!("start the VM with {} in its place", top.display());
    Err(Failure::new(FailureKind::Refused, text).with_hint(hint))
}

fn refuse_old_state(wanted: &WantedDisk, newest: &DiskLayer, images: &[PathBuf]) -> Failure {
    let (named, file) = (&wanted.named, newest.file.display());
    let text = format!(
        "{named} is an old state of the disk: the VM {} has written to {file} since",
        newest.vm
    );
    let spoils = match images.is_empty() {
        true => String::new(),
        false => format!(", and then {} can't be restored any more", list_paths(images)),
    };
    let hint = format!(
        "start the VM with {file} (qcow2) in place of {named}; `firn disk commit` returns it to {named} when it runs; \
         --old-disk returns to the old state on purpose{spoils}"
    );
    Failure::new(FailureKind::Refused, text).with_hint(hint)
}

/// Formats paths for a sentence.
pub(super) fn list_paths(paths: &[PathBuf]) -> String {
    let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    paths.join(", ")
}

fn abandoned_note(wanted: &WantedDisk, layer: &DiskLayer) -> String {
    let (named, file) = (&wanted.named, layer.file.display());
    format!("old disk: the VM writes to {named} again; {file} is useless from now on")
}

fn spoiled_note(wanted: &WantedDisk, image: &Path) -> String {
    let (named, image) = (&wanted.named, image.display());
    format!(
        "{image} needs {named} as it is: it can't be restored any more when the VM writes to it"
    )
}
