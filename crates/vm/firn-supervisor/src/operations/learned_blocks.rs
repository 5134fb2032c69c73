//! The learned blocks of an image, kept beside it: `web.firn` has `web.firn.learned`. An image that is
//! pushed to object storage has them there as well, so that what one host has learned helps others.
//!
//! They only make restores faster, so no error here is an error of a restore: a file that can't be
//! read counts as nothing learned, and one that can't be written is not updated. Of two restores at
//! the same time, the one that writes last is remembered.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use firn_image::Image;
use firn_restore::{
    AnswerKind, FaultRecord, LEARNING_WINDOW, LearnedBlocks, RestoreMode, RunRecord,
};
use firn_types::{Block, BlockSize};

use crate::records::failure::{Failure, FailureKind};

/// The size limit of a file: somewhat more than for the maximum number of learned blocks.
const BYTES_MAX: u64 = 1 << 20;

/// The learned blocks of one image, and what is needed to update them.
pub(crate) struct LearnedBlocksFile {
    path: PathBuf,
    learned: LearnedBlocks,
    /// The working set in the image.
    working_set: HashSet<Block>,
    block_size: BlockSize,
}

impl LearnedBlocksFile {
    /// `None` if a restore in this mode neither uses learned blocks nor learns any. So does none of
    /// a sealed image: which memory the guest uses is not written beside it in clear.
    pub(crate) fn for_image(image: &Image, mode: RestoreMode) -> Option<Self> {
        if image.is_sealed() || !matches!(mode, RestoreMode::Auto | RestoreMode::WorkingSet) {
            return None;
        }
        let (path, identity) = (learned_path(image.path()), image.identity());
        let known = read_file(&path).unwrap_or_else(|error| {
            tracing::debug!("nothing learned from {}: {error}", path.display());
            None
        });
        let learned = known.filter(|learned| learned.is_about(&identity));
        Some(Self {
            learned: learned.unwrap_or_else(|| LearnedBlocks::new(&identity)),
            working_set: image.working_set().iter().copied().collect(),
            block_size: image.geometry().block_size,
            path,
        })
    }

    /// The blocks that the guest is expected to use, beside the working set of the image. Those of
    /// an image in object storage are requested at once.
    pub(crate) fn request_expected_blocks(&self, image: &Image) -> Vec<Block> {
        let blocks = self.learned.expected_blocks();
        if let Err(error) = image.prefetch_blocks(&blocks) {
            tracing::debug!("learned blocks are not requested: {error}");
        }
        blocks
    }

    /// Updates the file, when a restore is over or has run for the learning window.
    pub(crate) fn update_file(mut self, record: &RunRecord) {
        let asked = self.demanded_blocks(record);
        let before = self.learned.clone();
        self.learned.learn_from(&asked);
        if self.learned == before {
            return;
        }
        if let Err(error) = self.write_file() {
            tracing::debug!("{} can't be written: {error}", self.path.display());
        }
    }

    /// The blocks that the guest waited for, or the hypervisor while it loaded the devices, and that
    /// are not in the working set.
    fn demanded_blocks(&self, record: &RunRecord) -> Vec<Block> {
        let Some(resumed_us) = record.resumed_us else { return Vec::new() };
        let until_us = resumed_us + LEARNING_WINDOW.as_micros() as u64;
        let mut seen = HashSet::new();
        let faults =
            record.faults.iter().filter(|fault| fault.t_us < until_us && is_image_block(fault));
        let blocks = faults.map(|fault| self.block_size.block_of(fault.page));
        blocks.filter(|block| !self.working_set.contains(block) && seen.insert(*block)).collect()
    }

    fn write_file(&self) -> io::Result<()> {
        firn_files::replace_private(&self.path, &serde_json::to_vec(&self.learned)?)
    }
}

/// The blocks that restores of an image need first: those that they have learned, then those of its
/// working set.
pub fn blocks_needed_first(image: &Image) -> Result<Vec<Block>, Failure> {
    let file = LearnedBlocksFile::for_image(image, RestoreMode::Auto);
    let learned = file.map(|it| it.learned.all_blocks()).unwrap_or_default();
    if learned.is_empty() {
        return Err(nothing_learned(image));
    }
    let mut seen = HashSet::new();
    let blocks = learned.into_iter().chain(image.working_set().iter().copied());
    Ok(blocks.filter(|block| seen.insert(*block)).collect())
}

fn nothing_learned(image: &Image) -> Failure {
    let path = image.path().display();
    let text = match image.is_sealed() {
        true => format!("{path} is sealed: what its restores need is written to no file"),
        false => {
            format!("{}: no restore has learned anything", learned_path(image.path()).display())
        }
    };
    let failure = Failure::new(FailureKind::Refused, text);
    match image.is_sealed() {
        true => failure.with_hint("reorder an image that is not sealed, and seal a checkpoint of its restored VM"),
        false => failure.with_hint(format!(
            "restore it once, with the load that it is made for: `firn restore {path} --fill after-learning`"
        )),
    }
}

fn is_image_block(fault: &FaultRecord) -> bool {
    match fault.answered {
        AnswerKind::Zero | AnswerKind::Late => false,
        AnswerKind::Memory | AnswerKind::PageCache | AnswerKind::Storage => true,
    }
}

fn learned_path(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(".learned");
    path.into()
}

/// `None` if there is no such file.
fn read_file(path: &Path) -> io::Result<Option<LearnedBlocks>> {
    match firn_files::read_input(path, BYTES_MAX) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => Ok(Some(serde_json::from_slice(&text?)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_types::Page;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn learning(dir: &Path) -> LearnedBlocksFile {
        LearnedBlocksFile {
            path: dir.join("web.firn.learned"),
            learned: LearnedBlocks::new("1f"),
            working_set: [Block(1), Block(2)].into(),
            block_size: BlockSize::default(),
        }
    }

    /// Faults on pages of memory blocks of two pages.
    fn record(faults: &[(u64, u32, &str)]) -> RunRecord {
        let fault = |&(t_us, page, answered): &(u64, u32, &str)| serde_json::json!({ "t_us": t_us, "page": Page(page), "tid": 1, "wait_us": 5, "answered": answered });
        serde_json::from_value(serde_json::json!({
            "version": firn_restore::RUN_RECORD_VERSION, "mode": "auto", "ram_pages": 64, "stored_pages": 64,
            "vcpus": [], "prefilled_us": null, "resumed_us": 1_000, "finished_us": null,
            "prefetched": [], "counts": firn_restore::RunCounts::default(), "faults_left_out": 0,
            "reads": [], "reads_left_out": 0,
            "faults": faults.iter().map(fault).collect::<Vec<_>>(),
        }))
        .unwrap()
    }

    #[test]
    fn requested_blocks_are_learned() {
        let dir = tempfile::tempdir().unwrap();
        let late = 1_000 + LEARNING_WINDOW.as_micros() as u64;
        learning(dir.path()).update_file(&record(&[
            (10, 40, "storage"),
            (2_000, 21, "storage"),
            (2_100, 20, "storage"),
            (2_200, 3, "storage"),
            (2_300, 30, "zero"),
            (2_400, 12, "page-cache"),
            (late, 50, "storage"),
        ]));
        let path = dir.path().join("web.firn.learned");
        let learned = read_file(&path).unwrap().unwrap();
        assert_eq!(learned.expected_blocks(), [Block(20), Block(10), Block(6)]);
        assert!(learned.is_about("1f"));
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_missing_cache_directory_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        learning(&dir.path().join("none")).update_file(&record(&[(2_000, 21, "storage")]));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        learning(dir.path()).update_file(&record(&[]));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_invalid_file_counts_as_empty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web.firn.learned");
        assert!(read_file(&path).unwrap().is_none());
        fs::write(&path, "{}").unwrap();
        assert!(read_file(&path).is_err());
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert!(read_file(&path).is_err());
        learning(dir.path()).update_file(&record(&[(2_000, 21, "storage")]));
        assert!(path.is_symlink(), "it stays");
        assert_eq!(learned_path(Path::new("/a/web.firn")), Path::new("/a/web.firn.learned"));
    }
}
