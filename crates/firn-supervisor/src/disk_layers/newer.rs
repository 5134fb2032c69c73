//! The check for old disk states: whether a VM has written to newer layers over a file.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::record::{Layer, LayerKind, Record};
use super::store::{Folder, read};
use super::{dir_of, key};
use crate::failure::{Failure, FailureKind};

/// A file that a VM uses, or will use, as a disk.
pub(crate) struct Wanted {
    /// The file as its user names it.
    pub(crate) named: String,
    /// The file.
    pub(crate) file: PathBuf,
}

/// Refuses files that are old states of disks, unless their user returns to them on purpose.
/// Returns notes for the user.
pub(crate) fn check(files: &[Wanted], old_disk: bool) -> Result<Vec<String>, Failure> {
    let mut notes = Vec::new();
    for wanted in files.iter().filter(|wanted| wanted.file.is_file()) {
        let file = key(&wanted.file);
        let Some(mut folder) = Folder::lock_existing(dir_of(&file))? else { continue };
        folder.settle_dead()?;
        let record = folder.record.clone();
        drop(folder);
        refuse_partial(&record, wanted, &file)?;
        let newer = newer(&file)?;
        let images = images_of(&record, &file);
        match (newer.last(), old_disk) {
            (None, _) => {}
            (Some(newest), false) => return Err(refusal(wanted, newest, &images)),
            (Some(_), true) => {
                abandon(&file)?;
                notes.extend(newer.iter().map(|it| abandoned(wanted, it)));
            }
        }
        notes.extend(images.iter().map(|image| spoiled(wanted, image)));
    }
    Ok(notes)
}

/// The layers over a file that have no layer over them; the newest of them last.
fn newer(file: &Path) -> Result<Vec<Layer>, Failure> {
    let (mut tips, mut seen) = (Vec::new(), HashSet::new());
    let mut open = layers_on(file)?;
    while let Some(layer) = open.pop() {
        if !seen.insert(layer.file.clone()) {
            continue;
        }
        let over = layers_on(&layer.file)?;
        match over.is_empty() {
            true => tips.push(layer),
            false => open.extend(over),
        }
    }
    tips.sort_unstable_by_key(|layer| layer.made);
    Ok(tips)
}

fn layers_on(file: &Path) -> Result<Vec<Layer>, Failure> {
    let Some(record) = read(dir_of(file))? else { return Ok(Vec::new()) };
    let is_written = |layer: &&Layer| layer.kind == LayerKind::Overlay && !layer.abandoned;
    Ok(record.on(file).filter(is_written).cloned().collect())
}

fn images_of(record: &Record, file: &Path) -> Vec<PathBuf> {
    record.images_of(file).filter(|image| image.exists()).map(Path::to_owned).collect()
}

/// Records that the layers over a file are no longer the newest state of the disk.
fn abandon(file: &Path) -> Result<(), Failure> {
    let mut folder = Folder::lock(dir_of(file))?;
    let on = |layer: &&mut Layer| layer.below.as_deref() == Some(file);
    folder.record.layers.iter_mut().filter(on).for_each(|layer| layer.abandoned = true);
    folder.store()
}

fn refuse_partial(record: &Record, wanted: &Wanted, file: &Path) -> Result<(), Failure> {
    let merges = record.merges.iter().map(|merge| (&merge.base, &merge.tops));
    let partial = record.partial.iter().map(|partial| (&partial.base, &partial.tops));
    let found = merges.chain(partial).find(|(base, _)| *base == file);
    let Some(top) = found.and_then(|(_, tops)| tops.first()) else { return Ok(()) };
    let text =
        format!("{} holds a part of {}, which is not merged yet", wanted.named, top.display());
    let hint = format!("start the VM with {} in its place", top.display());
    Err(Failure::new(FailureKind::Refused, text).hint(hint))
}

fn refusal(wanted: &Wanted, newest: &Layer, images: &[PathBuf]) -> Failure {
    let (named, file) = (&wanted.named, newest.file.display());
    let text = format!(
        "{named} is an old state of the disk: the VM {} has written to {file} since",
        newest.vm
    );
    let spoils = match images.is_empty() {
        true => String::new(),
        false => format!(", and then {} can't be restored any more", listed(images)),
    };
    let hint = format!(
        "start the VM with {file} (qcow2) in place of {named}; `firn disk commit` returns it to {named} when it runs; \
         --old-disk returns to the old state on purpose{spoils}"
    );
    Failure::new(FailureKind::Refused, text).hint(hint)
}

/// Formats paths for a sentence.
pub(super) fn listed(paths: &[PathBuf]) -> String {
    let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    paths.join(", ")
}

fn abandoned(wanted: &Wanted, layer: &Layer) -> String {
    let (named, file) = (&wanted.named, layer.file.display());
    format!("old disk: the VM writes to {named} again; {file} is useless from now on")
}

fn spoiled(wanted: &Wanted, image: &Path) -> String {
    let (named, image) = (&wanted.named, image.display());
    format!(
        "{image} needs {named} as it is: it can't be restored any more when the VM writes to it"
    )
}
