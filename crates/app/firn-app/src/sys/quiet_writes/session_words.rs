//! What the session sets for the thread that answers writes.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use crate::span::PageSpan;
use crate::sys::mapping::OwnedMapping;

/// The count of words before the spans, and the maximum count of spans.
const HEADER_WORDS: usize = 4;
const AHEAD_SPANS_MAX: usize = 254;

/// What the session sets, in a mapping of its own.
///
/// ```text
///   word 0   the count of runs that were taken from the log
///   word 1   the thread that commits, and its processor
///   word 2   the count of spans that follow, where more pages may be permitted than are written
///   word 3   1 if the thread must end
///   then     the start and the end of each span
/// ```
#[derive(Debug)]
pub(super) struct SessionWords(OwnedMapping);

impl SessionWords {
    pub(super) fn new() -> Result<Self, Errno> {
        let words = HEADER_WORDS + 2 * AHEAD_SPANS_MAX;
        OwnedMapping::map_anonymous(words * size_of::<u64>()).map(Self)
    }

    fn word(&self, number: usize) -> &AtomicU64 {
        &self.0.atomic_words(number * size_of::<u64>(), 1)[0]
    }

    pub(super) fn taken(&self) -> &AtomicU64 {
        self.word(0)
    }

    pub(super) fn committer(&self) -> &AtomicU64 {
        self.word(1)
    }

    pub(super) fn stop(&self) -> &AtomicU64 {
        self.word(3)
    }

    /// Clears the spans. A write that is being answered may still use them.
    pub(super) fn clear_ahead(&self) {
        self.word(2).store(0, Ordering::SeqCst);
    }

    /// Sets the spans, after they were cleared, so that the thread reads none of them.
    pub(super) fn set_ahead(&self, spans: &[PageSpan]) {
        let spans = &spans[..spans.len().min(AHEAD_SPANS_MAX)];
        for (number, span) in spans.iter().enumerate() {
            let at = HEADER_WORDS + 2 * number;
            self.word(at).store(span.start() as u64, Ordering::Relaxed);
            self.word(at + 1).store(span.end() as u64, Ordering::Relaxed);
        }
        self.word(2).store(spans.len() as u64, Ordering::SeqCst);
    }

    /// The end of the span with an address.
    pub(super) fn ahead_end(&self, address: usize) -> Option<usize> {
        let count = self.word(2).load(Ordering::SeqCst) as usize;
        let span = |number: usize| {
            let at = HEADER_WORDS + 2 * number;
            let bound = |at| self.word(at).load(Ordering::Relaxed) as usize;
            bound(at)..bound(at + 1)
        };
        (0..count).map(span).find(|span| span.contains(&address)).map(|span| span.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::span::PAGE;

    fn pages(first: usize, count: usize) -> PageSpan {
        PageSpan::covering_range(first * PAGE..(first + count) * PAGE)
    }

    #[test]
    fn runs_go_ahead_where_the_session_permits_it() {
        let words = SessionWords::new().unwrap();
        assert_eq!(words.ahead_end(5 * PAGE), None);
        words.set_ahead(&[pages(2, 8), pages(20, 5)]);
        let ends = [1, 2, 9, 10, 24, 25].map(|page| words.ahead_end(page * PAGE));
        assert_eq!(
            ends,
            [None, Some(10), Some(10), None, Some(25), None]
                .map(|it| it.map(|page: usize| page * PAGE))
        );
        words.set_ahead(&vec![pages(100, 1); 2 * AHEAD_SPANS_MAX]);
        words.clear_ahead();
        assert_eq!(words.ahead_end(100 * PAGE), None);
    }
}
