//! What a tracker follows, and the parts of it. Spans without a gap between them are one.
//!
//! ```text
//!   part          |      7      |      8      |      9      |     10      |
//!   span               |p|--------------------------|p|   |-------------------|
//!   pieces of 7 to 9      |-------------------------|     |-|
//! ```
//!
//! `p`: the first and the last page of memory that the application has already may have data beside
//! an area. They belong to no piece.

use std::ops::Range;

use crate::span::{PAGE, PageSpan};

/// See the module documentation.
#[derive(Debug)]
pub(super) struct FollowedSpans {
    spans: Vec<PageSpan>,
    /// What the library allocated of them.
    own: Vec<PageSpan>,
    part_bytes: usize,
}

impl FollowedSpans {
    pub(super) fn new(part_bytes: usize) -> Self {
        Self { spans: Vec::new(), own: Vec::new(), part_bytes }
    }

    pub(super) fn add_span(&mut self, span: PageSpan, is_own: bool) {
        span.add_to(&mut self.spans);
        if is_own {
            span.add_to(&mut self.own);
        }
    }

    pub(super) fn remove_span(&mut self, span: PageSpan) {
        span.remove_from(&mut self.spans);
        span.remove_from(&mut self.own);
    }

    /// All spans, in order.
    pub(super) fn all(&self) -> &[PageSpan] {
        &self.spans
    }

    pub(super) fn page_count(&self) -> usize {
        self.spans.iter().map(|span| span.page_count()).sum()
    }

    /// The number of the part with an address.
    pub(super) fn part_of(&self, address: usize) -> usize {
        address / self.part_bytes
    }

    /// The numbers of the parts that a span touches.
    pub(super) fn parts_of(&self, span: PageSpan) -> Range<usize> {
        self.part_of(span.start())..self.part_of(span.end() - 1) + 1
    }

    /// What is followed of some parts, without the pages that may have data beside an area.
    pub(super) fn pieces_of(&self, parts: Range<usize>) -> Vec<PageSpan> {
        let (start, end) = (parts.start * self.part_bytes, parts.end * self.part_bytes);
        let first = self.spans.partition_point(|span| span.end() <= start);
        let spans = self.spans[first..].iter().take_while(|span| span.start() < end);
        let pieces = spans.filter_map(|span| {
            let inner = self.without_shared_pages(*span)?;
            let range = inner.start().max(start)..inner.end().min(end);
            (range.start < range.end).then(|| PageSpan::covering_range(range))
        });
        pieces.collect()
    }

    /// A span without its first and its last page, unless the library allocated them.
    pub(super) fn without_shared_pages(&self, span: PageSpan) -> Option<PageSpan> {
        let is_own = |page: usize| {
            let before = self.own[..self.own.partition_point(|own| own.start() <= page)].last();
            before.is_some_and(|own| page < own.end())
        };
        let start = span.start() + if is_own(span.start()) { 0 } else { PAGE };
        let end = span.end() - if is_own(span.end() - PAGE) { 0 } else { PAGE };
        (start < end).then(|| PageSpan::covering_range(start..end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_clipped() {
        let pages =
            |range: Range<usize>| PageSpan::covering_range(range.start * PAGE..range.end * PAGE);
        let mut followed = FollowedSpans::new(4 * PAGE);
        followed.add_span(pages(6..14), false);
        followed.add_span(pages(15..22), true);
        assert_eq!(followed.parts_of(pages(6..14)), 1..4);
        assert_eq!(followed.pieces_of(1..2), [pages(7..8)]);
        assert_eq!(followed.pieces_of(1..4), [pages(7..13), pages(15..16)]);
        assert_eq!(followed.pieces_of(6..9), []);
        // Now the pages between them belong to one span.
        followed.add_span(pages(14..15), false);
        assert_eq!(followed.pieces_of(0..9), [pages(7..22)]);
        followed.remove_span(pages(20..22));
        assert_eq!((followed.pieces_of(0..9), followed.page_count()), (vec![pages(7..20)], 14));
    }
}
