//! Parts of large areas, busy or quiet: whether a commit scans a part, or the first write of each
//! of its pages waits for a thread of the library.
//!
//! ```text
//!   busy: each commit scans it, 2 us                  quiet: a commit costs nothing, a first write 10 us
//!     |                                                 ^   |
//!     `--- not written for some commits ----------------'   `--- several writes in few commits ---> busy
//! ```
//!
//! The unit of cost is the scan of one part. A write of a quiet part adds [`HEAT_PER_WRITE`] to its
//! *heat*, each commit removes one: so a part becomes busy where scans cost less than waiting, and
//! the heat has paid for the move.
//!
//! A part has a number: its address divided by its size. Numbers are the input, moves are the
//! output: no system calls here.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// What a write of a quiet part costs, in scans of a part.
const HEAT_PER_WRITE: u64 = 4;
const BUSY_FROM: u64 = 32;
/// The maximum count of parts that become quiet in one commit: a commit must not take long.
const MOVES_MAX: usize = 128;
/// The maximum count of runs of quiet parts. Each is a mapping, and has a neighbor that is one; a
/// process has 65,530.
const RUNS_MAX: usize = 8192;

/// How parts become quiet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartSettings {
    /// The pages of a part.
    pub(crate) pages: usize,
    /// Areas with no more pages in all are scanned: that costs less than one write that waits.
    pub(crate) scanned_max: usize,
    /// The count of commits without a write after which a part becomes quiet.
    pub(crate) idle: u64,
}

impl Default for PartSettings {
    fn default() -> Self {
        // What one page of page tables maps.
        Self { pages: 512, scanned_max: 9 * 512, idle: 32 }
    }
}

/// Parts that change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PartMoves {
    pub(super) to_busy: Vec<Range<usize>>,
    pub(super) to_quiet: Vec<Range<usize>>,
}

/// All parts. See the module documentation.
#[derive(Clone, Debug)]
pub(super) struct AreaParts {
    settings: PartSettings,
    now: u64,
    next_check: u64,
    /// Busy parts, and the last commit that had a write of each.
    busy: BTreeMap<usize, u64>,
    /// Quiet parts, as runs: the first number, and the number after the last.
    quiet: BTreeMap<usize, usize>,
    /// The heat of quiet parts, and the commit in which it was counted.
    heat: HashMap<usize, (u64, u64)>,
    hot: Vec<usize>,
}

impl AreaParts {
    pub(super) fn new(settings: PartSettings) -> Self {
        let (busy, quiet, heat) = (BTreeMap::new(), BTreeMap::new(), HashMap::new());
        Self { settings, now: 0, next_check: settings.idle, busy, quiet, heat, hot: Vec::new() }
    }

    pub(super) fn is_quiet(&self, part: usize) -> bool {
        self.quiet.range(..=part).next_back().is_some_and(|(_, end)| part < *end)
    }

    /// The quiet parts among some parts.
    pub(super) fn quiet_among(&self, parts: Range<usize>) -> Vec<Range<usize>> {
        let before = self.quiet.range(..=parts.start).next_back();
        let after = self.quiet.range(parts.start + 1..parts.end.max(parts.start + 1));
        let clip =
            |(start, end): (&usize, &usize)| (*start).max(parts.start)..(*end).min(parts.end);
        before.into_iter().chain(after).map(clip).filter(|run| !run.is_empty()).collect()
    }

    /// All quiet parts.
    pub(super) fn quiet_runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.quiet.iter().map(|(start, end)| *start..*end)
    }

    /// Adds parts, or makes parts busy.
    pub(super) fn set_busy(&mut self, parts: Range<usize>) {
        for run in self.quiet_among(parts.clone()) {
            self.cut_quiet(run);
        }
        self.busy.extend(parts.map(|part| (part, self.now)));
    }

    /// Makes parts quiet.
    pub(super) fn set_quiet(&mut self, parts: Range<usize>) {
        self.remove_parts(parts.clone());
        let mut run = parts;
        if let Some((&start, &end)) = self.quiet.range(..=run.start).next_back() {
            if end >= run.start {
                run = start..run.end.max(end);
            }
        }
        while let Some((&start, &end)) = self.quiet.range(run.start..=run.end).next() {
            self.quiet.remove(&start);
            run.end = run.end.max(end);
        }
        self.quiet.insert(run.start, run.end);
    }

    /// Forgets parts, which must be busy.
    pub(super) fn remove_parts(&mut self, parts: Range<usize>) {
        for part in parts {
            self.busy.remove(&part);
        }
    }

    fn cut_quiet(&mut self, parts: Range<usize>) {
        let Some((&start, &end)) = self.quiet.range(..=parts.start).next_back() else { return };
        self.quiet.remove(&start);
        if start < parts.start {
            self.quiet.insert(start, parts.start);
        }
        if parts.end < end {
            self.quiet.insert(parts.end, end);
        }
        for part in parts {
            self.heat.remove(&part);
        }
    }

    /// Records writes of a part; of a quiet one, how many of them waited.
    pub(super) fn record_writes(&mut self, part: usize, count: u64) {
        if let Some(last) = self.busy.get_mut(&part) {
            *last = self.now;
            return;
        }
        let (heat, seen) = self.heat.entry(part).or_insert((0, self.now));
        let left = heat.saturating_sub(self.now - *seen);
        (*heat, *seen) = (left + HEAT_PER_WRITE * count, self.now);
        if *heat >= BUSY_FROM {
            self.hot.push(part);
        }
    }

    /// Counts the end of a transaction, and decides which parts change. `may_rest` permits parts to
    /// become quiet. The caller moves them, and calls [`AreaParts::set_busy`] and
    /// [`AreaParts::set_quiet`].
    pub(super) fn end_transaction(&mut self, may_rest: bool) -> PartMoves {
        let to_busy = self.take_hot();
        self.now += 1;
        let to_quiet = match may_rest && self.now >= self.next_check {
            true => self.choose_idle(),
            false => Vec::new(),
        };
        PartMoves { to_busy, to_quiet }
    }

    fn take_hot(&mut self) -> Vec<Range<usize>> {
        let mut hot = std::mem::take(&mut self.hot);
        if self.quiet.len() + hot.len() > 2 * RUNS_MAX {
            hot.clear();
        }
        join_numbers(hot)
    }

    fn choose_idle(&mut self) -> Vec<Range<usize>> {
        let idle = self.settings.idle;
        self.next_check = self.now + idle;
        let is_idle = |(_, last): &(&usize, &u64)| self.now - **last > idle;
        let mut parts: Vec<_> = self.busy.iter().filter(is_idle).map(|(part, _)| *part).collect();
        if self.quiet.len() >= RUNS_MAX {
            return Vec::new();
        }
        if parts.len() > MOVES_MAX {
            // The others follow in the next commit.
            self.next_check = self.now + 1;
            parts.truncate(MOVES_MAX);
        }
        if self.heat.len() > 2 * MOVES_MAX {
            let now = self.now;
            self.heat.retain(|_, (heat, seen)| *heat > now - *seen);
        }
        join_numbers(parts)
    }
}

/// Numbers as ranges, sorted.
fn join_numbers(mut numbers: Vec<usize>) -> Vec<Range<usize>> {
    numbers.sort_unstable();
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some(last) if number < last.end => {}
            Some(last) if number == last.end => last.end += 1,
            _ => ranges.push(number..number + 1),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends a transaction that wrote `written`, and moves parts as decided.
    fn commit(parts: &mut AreaParts, written: &[usize]) -> PartMoves {
        written.iter().for_each(|part| parts.record_writes(*part, 1));
        let moves = parts.end_transaction(true);
        moves.to_busy.iter().for_each(|run| parts.set_busy(run.clone()));
        moves.to_quiet.iter().for_each(|run| parts.set_quiet(run.clone()));
        moves
    }

    fn one_run(run: Range<usize>) -> [Range<usize>; 1] {
        [run]
    }

    fn quiet_parts(count: usize) -> AreaParts {
        let mut parts = AreaParts::new(PartSettings::default());
        parts.set_busy(0..count);
        (0..100).for_each(|_| drop(commit(&mut parts, &[])));
        assert_eq!(parts.quiet_among(0..count), one_run(0..count));
        parts
    }

    /// Of how many commits a part is busy, if every `every`th one writes it.
    fn busy_commits(every: usize) -> usize {
        let mut parts = quiet_parts(5);
        let is_busy = |number: &usize| {
            let written: &[usize] = if number % every == 0 { &[3] } else { &[] };
            commit(&mut parts, written);
            !parts.is_quiet(3)
        };
        (0..1000).filter(is_busy).count()
    }

    #[test]
    fn a_part_that_is_written_often_is_busy() {
        assert!(busy_commits(1) > 980);
        assert!(busy_commits(2) > 950);
        assert_eq!(busy_commits(5), 0);
    }

    #[test]
    fn a_part_that_is_no_longer_written_becomes_quiet() {
        let mut parts = quiet_parts(5);
        parts.record_writes(3, 100);
        assert_eq!(commit(&mut parts, &[]).to_busy, one_run(3..4));
        assert_eq!(parts.quiet_among(0..9), [0..3, 4..5]);
        let commits = (0..).take_while(|_| commit(&mut parts, &[]).to_quiet.is_empty()).count();
        assert!((32..65).contains(&commits), "{commits}");
        assert_eq!(parts.quiet, BTreeMap::from([(0, 5)]));
    }

    #[test]
    fn a_commit_moves_a_bounded_count_of_parts() {
        let mut parts = AreaParts::new(PartSettings::default());
        parts.set_busy(0..300);
        let moves = std::iter::repeat_with(|| commit(&mut parts, &[]).to_quiet);
        let moves: Vec<_> = moves.filter(|moves| !moves.is_empty()).take(3).collect();
        assert_eq!(moves, [0..128, 128..256, 256..300].map(one_run));
    }

    #[test]
    fn runs_of_quiet_parts_are_bounded() {
        let mut parts = AreaParts::new(PartSettings::default());
        parts.set_busy(0..4 * RUNS_MAX);
        let odd: Vec<_> = (0..4 * RUNS_MAX).filter(|part| part % 2 == 1).collect();
        (0..150).for_each(|_| drop(commit(&mut parts, &odd)));
        assert!((RUNS_MAX..RUNS_MAX + MOVES_MAX).contains(&parts.quiet.len()));
    }

    proptest::proptest! {
        #[test]
        fn each_part_is_busy_or_quiet(
            orders in proptest::collection::vec((0..3_usize, 0..20_usize, 1..9_usize), 0..40),
        ) {
            let mut parts = AreaParts::new(PartSettings::default());
            let mut model = [None; 30];
            for (what, first, count) in orders {
                let run = first..first + count;
                match what {
                    0 => parts.set_busy(run.clone()),
                    1 => parts.set_quiet(run.clone()),
                    _ => {
                        parts.set_busy(run.clone());
                        parts.remove_parts(run.clone());
                    }
                }
                model[run].fill([Some(false), Some(true), None][what]);
            }
            for (part, state) in model.into_iter().enumerate() {
                proptest::prop_assert_eq!(parts.is_quiet(part), state == Some(true));
                proptest::prop_assert_eq!(parts.busy.contains_key(&part), state == Some(false));
            }
            let quiet: usize = parts.quiet_among(3..25).iter().map(|run| run.len()).sum();
            let expected = model[3..25].iter().filter(|it| **it == Some(true)).count();
            proptest::prop_assert_eq!(quiet, expected);
        }
    }
}
