//! Settling of merges: recording the result of a merge when its job, or its hypervisor, has ended.
//!
//! | backing file of the file above | result |
//! |---|---|
//! | the base | merged: the base serves the images, and the files between are removed |
//! | the topmost still | not merged; the files over the base cover the data that it received |

use std::fs::File;
use std::path::{Path, PathBuf};

use firn_vmm::{FileIdentity, file_below};

use super::key;
use super::queries::is_same;
use super::record::{Changed, Merge, Partial, Record};
use super::store::Folder;
use crate::failure::{Context, Failure};
use crate::identity::ProcessIdentity;

impl Folder {
    /// Settles the merges of hypervisors that have ended. Returns whether other merges are still
    /// running.
    pub(super) fn settle_dead(&mut self) -> Result<bool, Failure> {
        let (live, dead): (Vec<Merge>, Vec<Merge>) =
            self.record.merges.drain(..).partition(|merge| merge.process.is_alive());
        self.record.merges = live;
        for merge in &dead {
            self.settle(merge, None)?;
        }
        if !dead.is_empty() {
            self.store()?;
        }
        Ok(!self.record.merges.is_empty())
    }

    /// Settles the merges of a hypervisor whose jobs have ended. `active`: the files that its
    /// drives write to.
    pub(super) fn settle_of(
        &mut self,
        process: &ProcessIdentity,
        active: &[PathBuf],
    ) -> Result<(), Failure> {
        let (ended, others): (Vec<Merge>, Vec<Merge>) =
            self.record.merges.drain(..).partition(|merge| merge.process == *process);
        self.record.merges = others;
        for merge in &ended {
            self.settle(merge, Some(active))?;
        }
        self.store()
    }

    fn settle(&mut self, merge: &Merge, active: Option<&[PathBuf]>) -> Result<(), Failure> {
        let is_merged = match (&merge.above, active) {
            (Some(above), _) => names(above, &merge.base),
            (None, Some(active)) => active.contains(&merge.base),
            // The guest resumes on the base only after the result was recorded, so here the topmost
            // still has all its writes.
            (None, None) => false,
        };
        let settling = || format!("settling the merge into {}", merge.base.display());
        let changed = changes(merge, is_merged).doing(settling())?;
        match is_merged {
            true => self.record.merged(merge, &changed),
            false => self.record.not_merged(merge, &changed),
        }
        Ok(())
    }
}

fn names(above: &Path, base: &Path) -> bool {
    let below = file_below(above).ok().flatten();
    below.is_some_and(|below| key(&below) == *base)
}

/// The current contents of each file.
fn changes(merge: &Merge, is_merged: bool) -> std::io::Result<Vec<Changed>> {
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
        File::open(is_in)?.sync_all()?;
        let now = FileIdentity::of(is_in)?;
        let is_base = *is_in == merge.base;
        let format = if is_base { merge.format.clone() } else { "qcow2".to_owned() };
        let (file, then, is_in) = (file.clone(), *then, is_in.clone());
        changed.push(Changed { file, then, is_in, format, now });
    }
    Ok(changed)
}

impl Record {
    fn merged(&mut self, merge: &Merge, changed: &[Changed]) {
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

    fn not_merged(&mut self, merge: &Merge, changed: &[Changed]) {
        let is_written =
            changed.iter().any(|it| it.file == merge.base && !is_same(it.then, it.now));
        self.add_changes(changed);
        self.partial.retain(|partial| partial.base != merge.base);
        if is_written || merge.above.is_none() {
            let (base, tops) = (merge.base.clone(), merge.tops.clone());
            self.partial.push(Partial { base, tops });
        }
    }

    /// Adds changes of contents. Images that knew a file by its identity before now know it by its
    /// new one.
    fn add_changes(&mut self, changed: &[Changed]) {
        for new in changed {
            let same = |it: &&mut Changed| it.is_in == new.file && is_same(it.now, new.then);
            for known in self.changed.iter_mut().filter(same) {
                (known.is_in, known.format, known.now) =
                    (new.is_in.clone(), new.format.clone(), new.now);
            }
        }
        let is_news = |it: &&Changed| it.file != it.is_in || !is_same(it.then, it.now);
        self.changed.extend(changed.iter().filter(is_news).cloned());
    }
}
