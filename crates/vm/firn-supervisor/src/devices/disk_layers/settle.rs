//! Settling of merges: recording the result of a merge when its job, or its hypervisor, has ended.
//!
//! | backing file of the file above | result |
//! |---|---|
//! | the base | merged: the base serves the images, and the files between are removed |
//! | the topmost still | not merged; the files over the base cover the data that it received |

use std::path::{Path, PathBuf};

use firn_files::open_disk;
use firn_vmm::{FileIdentity, read_backing_file};

use super::queries::is_same_content;
use super::record::{ChangedContents, LayerRecord, PartialMerge, PendingMerge};
use super::record_files::record_key;
use super::store::RecordFolder;
use crate::processes::identity::ProcessIdentity;
use crate::records::failure::{Failure, FailureContext};

impl RecordFolder {
    /// Settles the merges of hypervisors that have ended. Returns whether other merges are still
    /// running.
    pub(super) fn settle_dead(&mut self) -> Result<bool, Failure> {
        let (live, dead): (Vec<PendingMerge>, Vec<PendingMerge>) =
            self.record.merges.drain(..).partition(|merge| merge.process.is_alive());
        self.record.merges = live;
        for merge in &dead {
            self.settle_merge(merge, None)?;
        }
        if !dead.is_empty() {
            self.store_record()?;
        }
        Ok(!self.record.merges.is_empty())
    }

    /// Settles the merges of a hypervisor whose jobs have ended. `active`: the files that its
    /// drives write to.
    pub(super) fn settle_process(
        &mut self,
        process: &ProcessIdentity,
        active: &[PathBuf],
    ) -> Result<(), Failure> {
        let (ended, others): (Vec<PendingMerge>, Vec<PendingMerge>) =
            self.record.merges.drain(..).partition(|merge| merge.process == *process);
        self.record.merges = others;
        for merge in &ended {
            self.settle_merge(merge, Some(active))?;
        }
        self.store_record()
    }

    fn settle_merge(
        &mut self,
        merge: &PendingMerge,
        active: Option<&[PathBuf]>,
    ) -> Result<(), Failure> {
        let is_merged = match (&merge.above, active) {
            (Some(above), _) => has_backing_file(above, &merge.base),
            (None, Some(active)) => active.contains(&merge.base),
            // The guest resumes on the base only after the result was recorded, so here the topmost
            // still has all its writes.
            (None, None) => false,
        };
        let settling = || format!("settling the merge into {}", merge.base.display());
        let changed = list_changes(merge, is_merged).while_doing(settling())?;
        match is_merged {
            true => self.record.record_merged(merge, &changed),
            false => self.record.record_unmerged(merge, &changed),
        }
        Ok(())
    }
}

fn has_backing_file(above: &Path, base: &Path) -> bool {
    let below = read_backing_file(above).ok().flatten();
    below.is_some_and(|below| record_key(&below) == *base)
}

/// The current contents of each file.
fn list_changes(merge: &PendingMerge, is_merged: bool) -> std::io::Result<Vec<ChangedContents>> {
    let mut changed = Vec::new();
    for (file, then) in &merge.before {
        let is_top = merge.tops.contains(file);
        if is_top && !is_merged {
            continue;
        }
        let is_in = if is_top { &merge.base } else { file };
        if !is_in.exists() {
            continue;
        }
        open_disk(is_in)?.sync_all()?;
        let now = FileIdentity::from_path(is_in)?;
        let is_base = *is_in == merge.base;
        let format = if is_base { merge.format.clone() } else { "qcow2".to_owned() };
        let (file, then, is_in) = (file.clone(), *then, is_in.clone());
        changed.push(ChangedContents { file, then, is_in, format, now });
    }
    Ok(changed)
}

impl LayerRecord {
    fn record_merged(&mut self, merge: &PendingMerge, changed: &[ChangedContents]) {
        self.add_changes(changed);
        for image in self.images.iter_mut().filter(|image| merge.tops.contains(&image.file)) {
            image.file.clone_from(&merge.base);
        }
        self.layers.retain(|layer| !merge.tops.contains(&layer.file));
        for layer in self.layers.iter_mut().filter(|it| merge.above.as_ref() == Some(&it.file)) {
            layer.below = Some(merge.base.clone());
        }
        self.partial.retain(|partial| partial.base != merge.base);
        self.unused.extend(merge.tops.iter().cloned());
    }

    fn record_unmerged(&mut self, merge: &PendingMerge, changed: &[ChangedContents]) {
        let is_written =
            changed.iter().any(|it| it.file == merge.base && !is_same_content(it.then, it.now));
        self.add_changes(changed);
        self.partial.retain(|partial| partial.base != merge.base);
        if is_written || merge.above.is_none() {
            let (base, tops) = (merge.base.clone(), merge.tops.clone());
            self.partial.push(PartialMerge { base, tops });
        }
    }

    /// Adds changes of contents. Images that knew a file by its identity before now know it by its
    /// new one.
    fn add_changes(&mut self, changed: &[ChangedContents]) {
        for new in changed {
            let same = |it: &&mut ChangedContents| {
                it.is_in == new.file && is_same_content(it.now, new.then)
            };
            for known in self.changed.iter_mut().filter(same) {
                (known.is_in, known.format, known.now) =
                    (new.is_in.clone(), new.format.clone(), new.now);
            }
        }
        let is_news =
            |it: &&ChangedContents| it.file != it.is_in || !is_same_content(it.then, it.now);
        self.changed.extend(changed.iter().filter(is_news).cloned());
    }
}
