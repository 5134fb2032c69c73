//! Comparison of bytes with an older copy, by words.

use std::ops::Range;

/// Bytes per word; words are counted from the start of the area.
pub(crate) const WORD: usize = 8;
/// Bytes compared at once before a finer comparison; there are two steps.
const BLOCKS: [usize; 2] = [1024, 64];

/// Calls `each` with every run of words that differ in a range of two slices of equal length.
/// Ranges are widened to whole words and clipped at the end of the slices.
pub(crate) fn find_changed_words(
    now: &[u8],
    before: &[u8],
    range: Range<usize>,
    mut each: impl FnMut(Range<usize>),
) {
    let end = range.end.next_multiple_of(WORD).min(now.len());
    let mut run = 0..0;
    for outer in split_range(range.start / WORD * WORD..end, BLOCKS[0]) {
        if now[outer.clone()] == before[outer.clone()] {
            continue;
        }
        for inner in split_range(outer, BLOCKS[1]) {
            if now[inner.clone()] == before[inner.clone()] {
                continue;
            }
            for word in split_range(inner, WORD) {
                if now[word.clone()] == before[word.clone()] {
                    continue;
                }
                if run.end != word.start {
                    report_run(&run, &mut each);
                    run.start = word.start;
                }
                run.end = word.end;
            }
        }
    }
    report_run(&run, &mut each);
}

/// Splits a range into pieces of a size; the last one may be shorter.
fn split_range(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(size).map(move |start| start..(start + size).min(end))
}

fn report_run(run: &Range<usize>, each: &mut impl FnMut(Range<usize>)) {
    if !run.is_empty() {
        each(run.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn found(now: &[u8], before: &[u8], range: Range<usize>) -> Vec<Range<usize>> {
        let mut runs = Vec::new();
        find_changed_words(now, before, range, |run| runs.push(run));
        runs
    }

    #[test]
    fn runs_are_whole_words() {
        let before = [0; 100];
        let mut now = before;
        now[0] = 1;
        now[9] = 1;
        now[98] = 1;
        assert_eq!(found(&now, &before, 0..100), [0..16, 96..100]);
        assert_eq!(found(&now, &before, 10..97), [8..16, 96..100]);
        assert_eq!(found(&now, &before, 16..90), []);
    }

    proptest! {
        #[test]
        fn applying_them_gives_the_new_bytes(
            before in prop::collection::vec(any::<u8>(), 1..5000),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..20),
        ) {
            let mut now = before.clone();
            for (at, value) in changes {
                let at = at.index(now.len());
                now[at] = value;
            }
            let mut applied = before.clone();
            let runs = found(&now, &before, 0..now.len());
            for run in &runs {
                applied[run.clone()].copy_from_slice(&now[run.clone()]);
                prop_assert!(now[run.clone()].chunks(WORD).zip(before[run.clone()].chunks(WORD)).all(|(a, b)| a != b));
            }
            prop_assert_eq!(&applied, &now);
            prop_assert!(runs.is_sorted_by(|a, b| a.end < b.start));
        }
    }
}
