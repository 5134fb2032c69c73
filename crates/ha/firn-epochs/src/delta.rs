//! Page delta: the bytes of a page that differ from its copy of the epoch before. Pure.
//!
//! ```text
//!   before   | aaaa | bbbb | cccc | ....     the backup has it, or will after it folds this epoch
//!   now      | aaaa | bXbb | cccc | ....
//!   patch             ^ page, offset, length, bytes
//! ```
//!
//! A page that is written in every epoch is a stack, a counter or a list: mostly only a few words
//! of it change. The idea is that of QEMU's XBZRLE (`docs/devel/migration`), with runs of differing
//! words instead of runs of zeros.

use std::ops::Range;

use firn_types::{PAGE_SIZE, Page};

/// The unit of comparison, in bytes. Runs that are not further apart are joined.
const WORD_BYTES: usize = 8;
/// The maximum size of a delta. A page with a larger one is sent as a whole.
const DELTA_BYTES_MAX: usize = PAGE_SIZE / 2;
/// The header of a run: page (4 bytes), offset (2), length (2).
const RUN_HEADER_BYTES: usize = 8;

/// The ranges in which a page differs from its earlier contents.
pub fn changed_runs(before: &[u8], now: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let words = before.chunks_exact(WORD_BYTES).zip(now.chunks_exact(WORD_BYTES)).enumerate();
    for (at, _) in words.filter(|(_, (before, now))| before != now) {
        let word = at * WORD_BYTES..(at + 1) * WORD_BYTES;
        match runs.last_mut() {
            Some(run) if word.start <= run.end + WORD_BYTES => run.end = word.end,
            _ => runs.push(word),
        }
    }
    runs
}

/// Whether these runs are smaller than the limit for a delta; otherwise the whole page is sent.
pub fn is_small_delta(runs: &[Range<usize>]) -> bool {
    runs.iter().map(|run| RUN_HEADER_BYTES + run.len()).sum::<usize>() <= DELTA_BYTES_MAX
}

/// Runs of bytes in pages, encoded for sending: each behind its header, one after another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PagePatches(Vec<u8>);

impl PagePatches {
    /// Adds runs of a page with the contents `now`.
    pub fn add_runs(&mut self, page: Page, runs: &[Range<usize>], now: &[u8]) {
        for run in runs {
            self.0.extend(page.0.to_le_bytes());
            self.0.extend((run.start as u16).to_le_bytes());
            self.0.extend((run.len() as u16).to_le_bytes());
            self.0.extend(&now[run.clone()]);
        }
    }

    /// Parses received bytes. `None` if they are invalid.
    pub fn parse(bytes: Vec<u8>) -> Option<Self> {
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (_, offset, bytes) = take_run(&mut rest)?;
            let is_within = !bytes.is_empty() && offset + bytes.len() <= PAGE_SIZE;
            is_within.then_some(())?;
        }
        Some(Self(bytes))
    }

    /// The encoded bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// For each run, the page, the offset and the bytes.
    pub fn iter(&self) -> impl Iterator<Item = (Page, usize, &[u8])> {
        let mut rest = &self.0[..];
        std::iter::from_fn(move || take_run(&mut rest))
    }
}

/// Removes the first run from the front.
fn take_run<'a>(rest: &mut &'a [u8]) -> Option<(Page, usize, &'a [u8])> {
    let (head, behind) = rest.split_first_chunk::<RUN_HEADER_BYTES>()?;
    let [p0, p1, p2, p3, o0, o1, l0, l1] = *head;
    let length = u16::from_le_bytes([l0, l1]);
    let (bytes, behind) = behind.split_at_checked(usize::from(length))?;
    *rest = behind;
    let offset = usize::from(u16::from_le_bytes([o0, o1]));
    Some((Page(u32::from_le_bytes([p0, p1, p2, p3])), offset, bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_that_differ_are_found_and_joined() {
        let before = vec![0; PAGE_SIZE];
        let mut now = before.clone();
        assert_eq!(changed_runs(&before, &now), []);
        [3, 17, 4095].into_iter().for_each(|at| now[at] = 1);
        assert_eq!(changed_runs(&before, &now), [0..24, 4088..4096]);
        assert!(is_small_delta(&changed_runs(&before, &now)));
        now.fill(2);
        let all = changed_runs(&before, &now);
        assert!(all == std::slice::from_ref(&(0..PAGE_SIZE)) && !is_small_delta(&all));
    }

    #[test]
    fn an_invalid_delta_is_refused() {
        let mut patches = PagePatches::default();
        patches.add_runs(Page(7), &[4080..4088, 4088..4096], &[9; PAGE_SIZE]);
        let bytes = patches.bytes().to_vec();
        assert_eq!(PagePatches::parse(bytes.clone()), Some(patches));
        assert_eq!(PagePatches::parse(bytes[..bytes.len() - 1].to_vec()), None, "too short");
        assert_eq!(PagePatches::parse(bytes[..3].to_vec()), None, "half a head");
        let mut beyond = bytes.clone();
        beyond[RUN_HEADER_BYTES + 8 + 4] += 1;
        assert_eq!(PagePatches::parse(beyond), None, "beyond the page");
        assert_eq!(PagePatches::parse(vec![0; RUN_HEADER_BYTES]), None, "nothing");
    }

    proptest! {
        #[test]
        fn applying_a_delta_gives_the_new_page(
            edits in prop::collection::vec((0..PAGE_SIZE, any::<u8>()), 0..40),
        ) {
            let before = vec![1; PAGE_SIZE];
            let mut now = before.clone();
            edits.into_iter().for_each(|(at, byte)| now[at] = byte);
            let mut patches = PagePatches::default();
            patches.add_runs(Page(1), &changed_runs(&before, &now), &now);
            let mut patched = before;
            for (page, at, bytes) in PagePatches::parse(patches.bytes().to_vec()).unwrap().iter() {
                prop_assert_eq!(page, Page(1));
                patched[at..at + bytes.len()].copy_from_slice(bytes);
            }
            prop_assert_eq!(patched, now);
        }
    }
}
