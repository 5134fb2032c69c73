//! Verification of a whole image: the headers of the images it builds on, every memory block and
//! every locality block against its checksum, padding against zero.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use serde::{Serialize, Serializer};
use thiserror::Error;

use crate::error::{BlockError, ImageError};
use crate::locality::LocalityBlockId;
use crate::reader::Image;

/// The maximum number of problems that are kept of one locality block.
const PER_LOCALITY_BLOCK_MAX: usize = 256;

/// The maximum number of threads that verify one image.
const THREADS_MAX: usize = 64;

/// The maximum number of problems that are listed; the others are counted.
pub const PROBLEMS_MAX: usize = 1000;

/// The result of verifying an image.
#[derive(Debug, Default, Serialize)]
pub struct VerifyReport {
    /// Locality blocks read.
    pub locality_blocks: u32,
    /// Memory blocks that are intact.
    pub good_blocks: u32,
    /// The problems, in the order of the file: the first [`PROBLEMS_MAX`].
    pub problems: Vec<VerifyProblem>,
    /// The number of all problems.
    pub problem_count: usize,
    /// The number of those that are no damage: the system, or object storage, gave no bytes.
    pub unread_count: usize,
}

impl VerifyReport {
    /// Whether there is no problem.
    pub fn is_clean(&self) -> bool {
        self.problem_count == 0
    }
}

/// A part of an image that differs from what was written.
#[derive(Debug, Error)]
pub enum VerifyProblem {
    /// A memory block is damaged.
    #[error(transparent)]
    Block(BlockError),
    /// Stored bytes have changed, but every memory block in them is intact: codecs can encode the
    /// same bytes in several forms.
    #[error("the stored bytes of {id} have changed (from byte {offset} of {path} on)")]
    Stored {
        /// The locality block.
        id: LocalityBlockId,
        /// Its offset in the file.
        offset: u64,
        /// The image.
        path: PathBuf,
    },
    /// A byte that belongs to no memory block is not zero.
    #[error("a padding byte of {id} is not zero (byte {offset} of {path})")]
    Padding {
        /// The locality block.
        id: LocalityBlockId,
        /// The offset in the file.
        offset: u64,
        /// The image.
        path: PathBuf,
    },
    /// An image that this one builds on has a wrong header, or none.
    #[error(transparent)]
    Header(ImageError),
    /// A section that opening does not parse is damaged.
    #[error(transparent)]
    Section(ImageError),
    /// A locality block cannot be read at all.
    #[error("{id} can't be read")]
    Unreadable {
        /// The locality block.
        id: LocalityBlockId,
        /// The error of the read.
        source: ImageError,
    },
}

impl VerifyProblem {
    /// Why bytes could not be read, if that is all. A file that is too short is damaged.
    fn unread_error(&self) -> Option<&ImageError> {
        match self {
            Self::Unreadable { source: error @ ImageError::Read { source, .. }, .. }
            | Self::Section(error @ ImageError::Read { source, .. })
            | Self::Header(error @ ImageError::Read { source, .. }) => {
                (source.kind() != std::io::ErrorKind::UnexpectedEof).then_some(error)
            }
            _ => None,
        }
    }
}

impl Serialize for VerifyProblem {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Reads and checks every locality block, including those of the images it builds on. `progress` is
/// called with (done, total) in locality blocks, on this thread.
pub fn verify_image(image: &Image, threads: usize, progress: &dyn Fn(u32, u32)) -> VerifyReport {
    let mut report = verify_blocks(image, image.locality_blocks(), threads, progress);
    let headers = wrong_headers(image).collect();
    report.add_problems_first(headers);
    report
}

/// As [`verify_image()`], but without the images that it builds on: for a caller that verifies
/// each file of a chain once.
pub fn verify_own_file(image: &Image, threads: usize, progress: &dyn Fn(u32, u32)) -> VerifyReport {
    let own = image.layers().get(1).map_or(image.locality_blocks(), |parent| parent.first);
    verify_blocks(image, own, threads, progress)
}

/// Checks the first `total` locality blocks, and the sections of the image's own file.
fn verify_blocks(
    image: &Image,
    total: u32,
    threads: usize,
    progress: &dyn Fn(u32, u32),
) -> VerifyReport {
    let next = AtomicU32::new(0);
    let mut checked: Vec<LocalityBlockCheck> = thread::scope(|scope| {
        let (sender, receiver) = channel();
        for _ in 0..threads.clamp(1, THREADS_MAX) {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || check_some(image, next, total, &sender));
        }
        drop(sender);
        let counted = (1..).zip(receiver);
        counted.inspect(|(done, _)| progress(*done, total)).map(|(_, checked)| checked).collect()
    });
    checked.sort_by_key(|checked| checked.id);
    let mut report = VerifyReport {
        locality_blocks: checked.len() as u32,
        good_blocks: checked.iter().map(|checked| checked.good_blocks).sum(),
        ..VerifyReport::default()
    };
    report.add_problems(image.aux_list().err().map(VerifyProblem::Section).into_iter().collect());
    for found in checked {
        report.problem_count += found.left_out;
        report.add_problems(found.problems);
    }
    report
}

impl VerifyReport {
    fn add_problems_first(&mut self, mut problems: Vec<VerifyProblem>) {
        self.unread_count += problems.iter().filter(|it| it.unread_error().is_some()).count();
        let found = std::mem::take(&mut self.problems);
        self.problem_count += problems.len();
        problems.extend(found);
        problems.truncate(PROBLEMS_MAX);
        self.problems = problems;
    }

    /// The reason why bytes could not be read, if there is no other problem.
    pub fn find_unread(&self) -> Option<&ImageError> {
        let is_all = self.unread_count > 0 && self.unread_count == self.problem_count;
        self.problems.iter().filter(|_| is_all).find_map(VerifyProblem::unread_error)
    }

    fn add_problems(&mut self, problems: Vec<VerifyProblem>) {
        self.unread_count += problems.iter().filter(|it| it.unread_error().is_some()).count();
        self.problem_count += problems.len();
        let room = PROBLEMS_MAX - self.problems.len();
        self.problems.extend(problems.into_iter().take(room));
    }
}

/// Checks the headers of parents: opening a chain reads the first header only.
fn wrong_headers(image: &Image) -> impl Iterator<Item = VerifyProblem> + '_ {
    let builds_on = image.layers().iter().skip(1);
    builds_on.filter_map(|layer| layer.check_header().err()).map(VerifyProblem::Header)
}

/// The result of checking one locality block.
struct LocalityBlockCheck {
    id: LocalityBlockId,
    good_blocks: u32,
    problems: Vec<VerifyProblem>,
    /// The number of further problems.
    left_out: usize,
}

impl LocalityBlockCheck {
    fn add_problem(&mut self, problem: VerifyProblem) {
        // These problems of one locality block are enough.
        match self.problems.len() < PER_LOCALITY_BLOCK_MAX {
            true => self.problems.push(problem),
            false => self.left_out += 1,
        }
    }
}

/// Checks locality blocks until there are no more, or the receiver is gone.
fn check_some(image: &Image, next: &AtomicU32, total: u32, results: &Sender<LocalityBlockCheck>) {
    let mut stored = Vec::new();
    let mut out = vec![0; image.geometry().block_size.byte_count()];
    loop {
        let id = LocalityBlockId(next.fetch_add(1, Ordering::Relaxed));
        if id.0 >= total {
            return;
        }
        if results.send(check_one(image, id, &mut stored, &mut out)).is_err() {
            return;
        }
    }
}

/// Checks a locality block; twice, if its wrong bytes may be a copy of right ones in object storage.
fn check_one(
    image: &Image,
    id: LocalityBlockId,
    stored: &mut Vec<u8>,
    out: &mut [u8],
) -> LocalityBlockCheck {
    let checked = check_stored(image, id, stored, out);
    match !checked.problems.is_empty() && image.mark_for_refetch(id) {
        true => check_stored(image, id, stored, out),
        false => checked,
    }
}

fn check_stored(
    image: &Image,
    id: LocalityBlockId,
    stored: &mut Vec<u8>,
    out: &mut [u8],
) -> LocalityBlockCheck {
    let mut checked = LocalityBlockCheck { id, good_blocks: 0, problems: Vec::new(), left_out: 0 };
    if let Err(source) = image.read_whole_locality_block(id, stored) {
        checked.add_problem(VerifyProblem::Unreadable { id, source });
        return checked;
    }
    for entry in image.entries(id) {
        let bytes = stored.get(entry.range()).unwrap_or_default();
        match image.decode_block(entry, bytes, out) {
            Ok(()) => checked.good_blocks += 1,
            Err(error) => checked.add_problem(VerifyProblem::Block(error)),
        }
    }
    if checked.problems.is_empty()
        && let Some(problem) = changed_bytes(image, id, stored)
    {
        checked.add_problem(problem);
    }
    if let Some(problem) = dirty_padding(image, id, stored) {
        checked.add_problem(problem);
    }
    checked
}

/// Finds a change of stored bytes that no memory block's own checksum shows.
fn changed_bytes(image: &Image, id: LocalityBlockId, stored: &[u8]) -> Option<VerifyProblem> {
    if image.has_checksum(id, stored.get(..image.used_bytes(id))?) {
        return None;
    }
    let (source, offset) = image.file_and_offset(id);
    Some(VerifyProblem::Stored { id, offset, path: source.path.clone() })
}

/// Finds the first byte behind the memory blocks that is not zero, if any.
fn dirty_padding(image: &Image, id: LocalityBlockId, stored: &[u8]) -> Option<VerifyProblem> {
    let used = image.used_bytes(id);
    let at = stored.get(used..)?.iter().position(|&byte| byte != 0)?;
    let (source, start) = image.file_and_offset(id);
    let offset = start + (used + at) as u64;
    Some(VerifyProblem::Padding { id, offset, path: source.path.clone() })
}
