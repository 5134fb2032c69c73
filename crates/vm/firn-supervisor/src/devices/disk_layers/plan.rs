//! The plan of a drive's merges, from its chain and the record, before any file is changed.
//!
//! ```text
//!   active  <- frozen, needed <- frozen, free <- frozen, needed <- named by the command line, free
//!      0            1                2               3                     4
//!                   '---- merged ----'               '------- merged ------'
//! ```
//!
//! A file that no image needs receives the files over it, up to and including the first file that
//! an image needs. From then on the lower file serves that image. Firn merges nothing into a file,
//! or past one, that is the backing file of a file outside of this chain.

use std::path::{Path, PathBuf};

use super::record::LayerRecord;
use super::record_files::record_dir;

/// The chain of a drive, for planning merges.
#[derive(Clone, Debug)]
pub(super) struct LayerChain<'a> {
    /// Its files by their keys, the topmost first: the one that the guest writes to.
    pub(super) files: Vec<PathBuf>,
    /// The VM.
    pub(super) vm: &'a str,
    /// The file of the command line, if it belongs to the VM.
    pub(super) named: Option<PathBuf>,
    /// Files that are removed when the VM is stopped with `--discard`.
    pub(super) kept: &'a [PathBuf],
}

/// A possible merge in a chain: `top` and the files down to `base` are merged into `base`. Indices
/// count from the topmost file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MergeStep {
    pub(super) top: usize,
    pub(super) base: usize,
}

impl LayerChain<'_> {
    /// The merges that images do not prevent, the lowest first.
    pub(super) fn plan_steps(&self, record: &LayerRecord) -> Vec<MergeStep> {
        let mut steps = Vec::new();
        let mut base = self.lowest_base(record);
        while base >= 2 {
            match self.plan_step(record, base) {
                Some(step) => {
                    steps.push(step);
                    base = step.top.saturating_sub(1);
                }
                None => base -= 1,
            }
        }
        steps
    }

    fn plan_step(&self, record: &LayerRecord, base: usize) -> Option<MergeStep> {
        if !self.is_own(record, base) || is_needed(record, &self.files[base]) {
            return None;
        }
        let mut top = None;
        for at in (1..base).rev() {
            if !self.can_merge_away(record, at) {
                break;
            }
            top = Some(at);
            if is_needed(record, &self.files[at]) {
                break;
            }
        }
        top.map(|top| MergeStep { top, base })
    }

    /// The lowest file that may receive a merge: below it the record does not know the files, or
    /// they are backing files of others.
    fn lowest_base(&self, record: &LayerRecord) -> usize {
        let dir = self.files.first().map_or(Path::new("/"), |file| record_dir(file));
        let mut lowest = 0;
        for at in 0..self.files.len() {
            let file = &self.files[at];
            let over = at.checked_sub(1).map(|at| &self.files[at]);
            let is_fork = record.layers_over(file).any(|layer| Some(&layer.file) != over);
            let is_known = over.is_none_or(|over| {
                record.find_layer(over).is_some_and(|layer| layer.below.as_ref() == Some(file))
            });
            if is_fork || !is_known || record_dir(file) != dir {
                break;
            }
            lowest = at;
        }
        lowest
    }

    fn is_own(&self, record: &LayerRecord, at: usize) -> bool {
        let file = &self.files[at];
        let is_mine = record.find_layer(file).is_some_and(|layer| layer.vm == self.vm);
        (is_mine || self.named.as_ref() == Some(file)) && !self.kept.contains(file)
    }

    fn can_merge_away(&self, record: &LayerRecord, at: usize) -> bool {
        let file = &self.files[at];
        record.find_layer(file).is_some_and(|layer| layer.vm == self.vm)
            && !self.kept.contains(file)
    }
}

fn is_needed(record: &LayerRecord, file: &Path) -> bool {
    record.images_of(file).next().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::disk_layers::record::{DiskLayer, ImageUse, LayerKind};

    /// A chain of files `0`, the topmost, to `count - 1`, and images that need some of them.
    struct Case {
        dir: tempfile::TempDir,
        record: LayerRecord,
        count: usize,
    }

    impl Case {
        fn new(count: usize, needed: &[usize]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let mut case = Self { dir, record: LayerRecord::default(), count };
            for at in 0..count {
                std::fs::write(case.path(at), "").unwrap();
            }
            for at in 0..count - 1 {
                case.layer(at, at + 1, "web");
            }
            for &at in needed {
                let (file, chain) = (case.path(at), vec![case.path(at)]);
                let image = case.dir.path().join(format!("{at}.firn"));
                case.record.images.push(ImageUse { image, file, chain, replaced: None });
            }
            case
        }

        fn path(&self, at: usize) -> PathBuf {
            self.dir.path().join(at.to_string())
        }

        fn layer(&mut self, file: usize, below: usize, vm: &str) {
            let (file, below, vm) = (self.path(file), Some(self.path(below)), vm.to_owned());
            std::fs::write(&file, "").unwrap();
            let (made, kind, abandoned, restored) = (1, LayerKind::Overlay, false, false);
            self.record.layers.push(DiskLayer { file, below, vm, made, kind, abandoned, restored });
        }

        fn steps(&self, is_named_own: bool, kept: &[PathBuf]) -> Vec<(usize, usize)> {
            let files: Vec<PathBuf> = (0..self.count).map(|at| self.path(at)).collect();
            let named = files.last().cloned().filter(|_| is_named_own);
            let chain = LayerChain { files, vm: "web", named, kept };
            chain.plan_steps(&self.record).iter().map(|step| (step.top, step.base)).collect()
        }
    }

    #[test]
    fn a_free_file_receives_the_layers_above_it() {
        assert_eq!(Case::new(5, &[1, 2, 3, 4]).steps(true, &[]), []);
        assert_eq!(Case::new(5, &[1, 2, 3]).steps(true, &[]), [(3, 4)]);
        assert_eq!(Case::new(5, &[1]).steps(true, &[]), [(1, 4)], "several at once");
        assert_eq!(Case::new(5, &[1, 3]).steps(true, &[]), [(3, 4), (1, 2)]);
        assert_eq!(Case::new(5, &[]).steps(true, &[]), [(1, 4)], "all but the active one");
        assert_eq!(Case::new(5, &[4]).steps(true, &[]), [(1, 3)]);
        assert_eq!(Case::new(2, &[]).steps(true, &[]), []);
        assert_eq!(Case::new(1, &[]).steps(true, &[]), []);
    }

    #[test]
    fn files_of_others_stay() {
        assert_eq!(Case::new(5, &[]).steps(false, &[]), [(1, 3)], "its own layers alone");
        let case = Case::new(5, &[]);
        assert_eq!(case.steps(true, &[case.path(2)]), [(3, 4)], "`--discard` removes 2");
        let mut case = Case::new(6, &[]);
        case.layer(7, 3, "copy");
        assert_eq!(case.steps(true, &[]), [(1, 2)], "another VM stands on 3");
        case.layer(8, 1, "copy");
        assert_eq!(case.steps(true, &[]), []);
        std::fs::remove_file(case.path(7)).unwrap();
        std::fs::remove_file(case.path(8)).unwrap();
        assert_eq!(case.steps(true, &[]), [(1, 5)]);
        case.record.layers.remove(2);
        assert_eq!(case.steps(true, &[]), [], "what Firn did not note is not known");
    }
}
