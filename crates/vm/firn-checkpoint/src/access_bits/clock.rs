//! Scan clock: which chunk is scanned next, and which pages were used in each.

use std::ops::Range;

use firn_types::Page;

/// Scan rounds over all of RAM, chunk by chunk.
#[derive(Debug)]
pub(super) struct ScanClock {
    chunks: Vec<ScanChunk>,
    hand: usize,
}

#[derive(Debug)]
struct ScanChunk {
    pages: Range<Page>,
    /// The pages used between the last two visits; `None` before there were two.
    used: Option<Vec<Range<Page>>>,
    visited: bool,
}

impl ScanClock {
    /// A clock over these regions, in chunks of this many pages.
    pub(super) fn new(regions: impl IntoIterator<Item = Range<Page>>, chunk_pages: u32) -> Self {
        let chunk = |pages| ScanChunk { pages, used: None, visited: false };
        let split = |region: Range<Page>| {
            let starts = (region.start.0..region.end.0).step_by(chunk_pages.max(1) as usize);
            let end = region.end.0;
            starts.map(move |start| Page(start)..Page(end.min(start.saturating_add(chunk_pages))))
        };
        Self { chunks: regions.into_iter().flat_map(split).map(chunk).collect(), hand: 0 }
    }

    /// The chunk to scan now.
    pub(super) fn current_chunk(&self) -> Option<Range<Page>> {
        self.chunks.get(self.hand).map(|chunk| chunk.pages.clone())
    }

    /// Whether the chunk at the hand was scanned before.
    pub(super) fn was_visited(&self) -> bool {
        self.chunks.get(self.hand).is_some_and(|chunk| chunk.visited)
    }

    /// The chunk at the hand was scanned: these of its pages had entries, which are dropped now.
    /// The first round shows nothing: entries may be as old as the VM.
    pub(super) fn record_visit(&mut self, touched: Vec<Range<Page>>) {
        let Some(chunk) = self.chunks.get_mut(self.hand) else { return };
        if std::mem::replace(&mut chunk.visited, true) {
            chunk.used = Some(touched);
        }
        self.hand = (self.hand + 1) % self.chunks.len();
    }

    /// Whether every chunk's entries were dropped at least once: a page that has one now was used
    /// since.
    pub(super) fn is_round_complete(&self) -> bool {
        self.chunks.iter().all(|chunk| chunk.visited)
    }

    /// The pages that were used in the last round.
    pub(super) fn used_pages(&self) -> impl Iterator<Item = Range<Page>> + '_ {
        self.chunks.iter().filter_map(|chunk| chunk.used.as_ref()).flatten().cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(start: u32, end: u32) -> Range<Page> {
        Page(start)..Page(end)
    }

    fn used(clock: &ScanClock) -> Vec<Range<Page>> {
        clock.used_pages().collect()
    }

    #[test]
    fn the_hand_goes_round_and_chunks_end_with_their_region() {
        let mut clock = ScanClock::new([pages(0, 10), pages(16, 20)], 4);
        let round = [pages(0, 4), pages(4, 8), pages(8, 10), pages(16, 20), pages(0, 4)];
        for chunk in round {
            assert_eq!(clock.current_chunk(), Some(chunk));
            clock.record_visit(Vec::new());
        }
    }

    #[test]
    fn the_first_round_gives_no_accesses() {
        let mut clock = ScanClock::new([pages(0, 8)], 4);
        clock.record_visit(vec![pages(0, 4)]);
        assert!(!clock.is_round_complete());
        clock.record_visit(vec![pages(4, 8)]);
        assert!(clock.is_round_complete());
        assert_eq!(used(&clock), []);
        clock.record_visit(vec![pages(1, 2)]);
        assert_eq!(used(&clock), [pages(1, 2)]);
    }

    #[test]
    fn unused_pages_are_forgotten_after_a_round() {
        let mut clock = ScanClock::new([pages(0, 8)], 4);
        let rounds = [[0..0, 0..0], [1..2, 5..7], [0..0, 6..7]];
        for chunk in rounds.into_iter().flatten() {
            clock.record_visit(vec![pages(chunk.start, chunk.end)]);
        }
        clock.record_visit(vec![pages(3, 4)]);
        assert_eq!(used(&clock), [pages(3, 4), pages(6, 7)]);
    }

    #[test]
    fn a_guest_without_memory_is_scanned_at_once() {
        let mut clock = ScanClock::new([], 4);
        assert_eq!(clock.current_chunk(), None);
        clock.record_visit(Vec::new());
        assert!(clock.is_round_complete());
    }
}
