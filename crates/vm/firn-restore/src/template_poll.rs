//! The template of a clone: a thread that notices what other processes have put into it.
//!
//! ```text
//!   holder     fills the template in the background ----.
//!   clone 1    installs what its guest requests ---------+--> template <--- polled by clones 1, 2, ...
//!   clone 2    installs what its guest requests ---------'
//! ```
//!
//! A clone needs no page that the template has: the kernel maps it without a fault. So the pages of
//! the template are settled here, and the background fill of a clone is off. It begins when the
//! holder has ended: from then on this clone has to load all that the template lacks, for itself.

use std::ops::Range;
use std::time::Duration;

use firn_types::Page;

use crate::error::RestoreError;
use crate::options::BackgroundFill;
use crate::shared::SharedRestore;

/// The first and the longest interval between two queries of the template.
const INTERVAL_MIN: Duration = Duration::from_millis(5);
const INTERVAL_MAX: Duration = Duration::from_millis(40);

/// Pages that are settled at once, while the lock is held.
const PAGES_MAX: u32 = 4096;

/// Follows the template until the restore is over.
pub(crate) fn follow_template(shared: &SharedRestore) -> Result<(), RestoreError> {
    let (mut seen, mut interval) = (Vec::new(), INTERVAL_MIN);
    let mut is_filling = shared.options.fill == BackgroundFill::Quiet;
    while !shared.is_over() {
        let runs = shared.faults.memory().template_runs()?;
        subtract_runs(&runs, &seen).into_iter().for_each(|run| shared.record_present(run));
        seen = runs;
        if !is_filling && shared.is_template_orphaned() {
            tracing::warn!("the template's holder has ended: this clone loads its memory alone");
            shared.set_fill(BackgroundFill::Quiet);
            is_filling = true;
        }
        std::thread::sleep(interval);
        interval = (interval * 2).min(INTERVAL_MAX);
    }
    Ok(())
}

/// The parts of `runs` that are not in `before`, in pieces. Both are in order, without overlaps.
fn subtract_runs(runs: &[Range<Page>], before: &[Range<Page>]) -> Vec<Range<Page>> {
    let mut new = Vec::new();
    let mut before = before.iter().peekable();
    for run in runs {
        let mut start = run.start;
        while start < run.end {
            while before.next_if(|old| old.end <= start).is_some() {}
            let end = match before.peek() {
                Some(old) if old.start <= start => {
                    start = old.end.min(run.end);
                    continue;
                }
                Some(old) => old.start.min(run.end),
                None => run.end,
            };
            push_pieces(&mut new, start..end);
            start = end;
        }
    }
    new
}

fn push_pieces(pieces: &mut Vec<Range<Page>>, run: Range<Page>) {
    let starts = (run.start.0..run.end.0).step_by(PAGES_MAX as usize);
    let piece = |start: u32| Page(start)..Page(run.end.0.min(start.saturating_add(PAGES_MAX)));
    pieces.extend(starts.map(piece));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(bounds: &[(u32, u32)]) -> Vec<Range<Page>> {
        bounds.iter().map(|&(start, end)| Page(start)..Page(end)).collect()
    }

    #[test]
    fn only_new_pages_remain() {
        let now = runs(&[(0, 10), (20, 30), (40, 50)]);
        assert_eq!(subtract_runs(&now, &[]), now);
        assert_eq!(subtract_runs(&now, &now), []);
        let before = runs(&[(2, 4), (6, 10), (20, 25), (45, 46)]);
        let new = runs(&[(0, 2), (4, 6), (25, 30), (40, 45), (46, 50)]);
        assert_eq!(subtract_runs(&now, &before), new);
    }

    #[test]
    fn runs_come_in_pieces() {
        let new = subtract_runs(&runs(&[(0, 2 * PAGES_MAX + 1)]), &[]);
        assert_eq!(new.len(), 3);
        assert_eq!(new[2], Page(2 * PAGES_MAX)..Page(2 * PAGES_MAX + 1));
    }
}
