//! Which pages of a template are filled: a bit for each page, in memory that the holder and the
//! supervisors share. No hypervisor gets it.
//!
//! ```text
//!   word 0                  word 1 ...
//!   | bit n: page n         | bit n: page 32 + n
//! ```
//!
//! A bit is set after all bytes of its page are in the template, and never cleared. So a page
//! without its bit may be in any state, and a page with it is final.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use firn_types::Page;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::sys::shared_words::SharedWords;

const WORD_BITS: u32 = u32::BITS;

/// The name of the file, as `/proc/PID/maps` shows it.
const FILE_NAME: &str = "firn-filled-pages";

/// The bits of all pages.
#[derive(Debug)]
pub(super) struct FilledPages {
    words: SharedWords,
}

impl FilledPages {
    /// A file in which no page is filled.
    pub(super) fn create_file(pages: u32) -> io::Result<File> {
        let file = memfd_create(FILE_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, u64::from(pages.div_ceil(WORD_BITS).max(1)) * 4)?;
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok(file.into())
    }

    /// Maps a file that [`Self::create_file`] made.
    pub(super) fn map_file(file: &File) -> io::Result<Self> {
        Ok(Self { words: SharedWords::map_file(file)? })
    }

    pub(super) fn contains(&self, page: Page) -> bool {
        let word = self.words.words().get((page.0 / WORD_BITS) as usize);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (page.0 % WORD_BITS) & 1 == 1)
    }

    /// Records that all bytes of these pages are in the template.
    pub(super) fn record_filled(&self, pages: Range<Page>) {
        let (words, first, end) = (self.words.words(), pages.start.0, pages.end.0);
        if pages.is_empty() {
            return;
        }
        for index in first / WORD_BITS..end.div_ceil(WORD_BITS) {
            let Some(word) = words.get(index as usize) else { return };
            let from = first.max(index * WORD_BITS) - index * WORD_BITS;
            let to = end.min(index * WORD_BITS + WORD_BITS) - index * WORD_BITS;
            word.fetch_or(mask_of_bits(from..to), Ordering::Release);
        }
    }

    /// The pages that are filled and not in `seen`, in runs of at most `pages_max`; they are in
    /// `seen` afterwards. `seen` is empty before the first call.
    pub(super) fn take_new_runs(&self, seen: &mut Vec<u32>, pages_max: u32) -> Vec<Range<Page>> {
        let words = self.words.words();
        seen.resize(words.len(), 0);
        let mut runs: Vec<Range<Page>> = Vec::new();
        for ((index, word), seen) in (0..).zip(words).zip(seen) {
            let new = word.load(Ordering::Acquire) & !*seen;
            *seen |= new;
            for page in (0..WORD_BITS).filter(|bit| new >> bit & 1 == 1) {
                let page = Page(index * WORD_BITS + page);
                match runs.last_mut() {
                    Some(run) if run.end == page && page.0 - run.start.0 < pages_max => {
                        run.end = Page(page.0 + 1);
                    }
                    _ => runs.push(page..Page(page.0 + 1)),
                }
            }
        }
        runs
    }
}

/// A word with these bits set. The range is not empty, and ends at 32 at most.
fn mask_of_bits(bits: Range<u32>) -> u32 {
    u32::MAX >> (WORD_BITS - (bits.end - bits.start)) << bits.start
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(runs: &[Range<u32>]) -> FilledPages {
        let pages = FilledPages::map_file(&FilledPages::create_file(200).unwrap()).unwrap();
        runs.iter().for_each(|run| pages.record_filled(Page(run.start)..Page(run.end)));
        pages
    }

    #[test]
    fn exactly_the_recorded_pages_are_filled() {
        for run in [0..1, 0..32, 31..33, 5..150, 64..96, 199..200, 7..7, 32..32] {
            let pages = filled(std::slice::from_ref(&run));
            for page in 0..300 {
                assert_eq!(pages.contains(Page(page)), run.contains(&page), "{run:?}, {page}");
            }
        }
    }

    #[test]
    fn new_runs_are_taken_once_and_are_bounded() {
        let (pages, mut seen) = (filled(&[0..10, 30..70]), Vec::new());
        let runs = pages.take_new_runs(&mut seen, 32);
        assert_eq!(runs, [Page(0)..Page(10), Page(30)..Page(62), Page(62)..Page(70)]);
        assert_eq!(pages.take_new_runs(&mut seen, 32), []);
        pages.record_filled(Page(8)..Page(12));
        assert_eq!(pages.take_new_runs(&mut seen, 32), [Page(10)..Page(12)]);
    }

    #[test]
    fn pages_past_the_end_are_never_filled() {
        let pages = filled(std::slice::from_ref(&(190..4000)));
        assert!(pages.contains(Page(199)) && !pages.contains(Page(3000)));
    }

    #[test]
    fn two_processes_share_the_bits() {
        let file = FilledPages::create_file(40).unwrap();
        let [one, other] = [(); 2].map(|()| FilledPages::map_file(&file).unwrap());
        one.record_filled(Page(33)..Page(34));
        assert!(other.contains(Page(33)) && !other.contains(Page(32)));
        assert!(file.set_len(0).is_err(), "the file can't be truncated");
    }
}
