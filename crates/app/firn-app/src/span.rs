//! Page spans: address ranges of whole pages.

use std::ops::Range;

/// Bytes per page.
pub const PAGE: usize = 4096;

/// Whole pages of this process that a session follows.
///
/// Only a session makes a span, out of memory that it was given: code that has a span may protect
/// its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageSpan {
    start: usize,
    end: usize,
}

impl PageSpan {
    /// The pages that contain a range of addresses.
    pub(crate) fn covering_range(range: Range<usize>) -> Self {
        let end = range.end.max(range.start + 1).next_multiple_of(PAGE);
        Self { start: range.start / PAGE * PAGE, end }
    }

    /// The first address.
    pub fn start(self) -> usize {
        self.start
    }

    /// The address after the last.
    pub fn end(self) -> usize {
        self.end
    }

    /// The count of pages.
    pub fn page_count(self) -> usize {
        (self.end - self.start) / PAGE
    }

    /// The count of bytes.
    pub(crate) fn byte_count(self) -> usize {
        self.end - self.start
    }

    /// The sub-span of some of its pages, by number.
    pub(crate) fn sub_span(self, pages: Range<usize>) -> Self {
        let end = self.start + pages.end.min(self.page_count()) * PAGE;
        Self { start: (self.start + pages.start * PAGE).min(end), end }
    }

    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// The pages that both have.
    pub(crate) fn common_pages(self, other: Self) -> Option<Self> {
        let common = Self { start: self.start.max(other.start), end: self.end.min(other.end) };
        self.overlaps(other).then_some(common)
    }

    /// The span without the pages that are `taken`.
    pub(crate) fn without_spans(self, taken: &[Self]) -> Vec<Self> {
        let cut = |pieces: Vec<Self>, hole: &Self| {
            pieces.iter().flat_map(|p| p.without_span(*hole)).collect()
        };
        taken.iter().fold(vec![self], cut)
    }

    /// Adds pages to sorted spans. Spans without a gap between them become one.
    pub(crate) fn add_to(self, spans: &mut Vec<Self>) {
        spans.insert(spans.partition_point(|span| span.start < self.start), self);
        spans.dedup_by(|next, kept| {
            let joins = kept.end == next.start;
            if joins {
                kept.end = next.end;
            }
            joins
        });
    }

    /// Removes pages from spans.
    pub(crate) fn remove_from(self, spans: &mut Vec<Self>) {
        *spans = spans.iter().flat_map(|span| span.without_spans(&[self])).collect();
    }

    fn without_span(self, hole: Self) -> impl Iterator<Item = Self> {
        let before = Self { start: self.start, end: self.end.min(hole.start) };
        let after = Self { start: self.start.max(hole.end), end: self.end };
        [before, after].into_iter().filter(|piece| piece.start < piece.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_covers_its_bytes() {
        let span = PageSpan::covering_range(4095..4097);
        assert_eq!((span.start(), span.end(), span.page_count()), (0, 8192, 2));
        assert_eq!(PageSpan::covering_range(8192..8192).page_count(), 1);
    }

    #[test]
    fn spans_without_a_gap_are_one() {
        let pages =
            |range: Range<usize>| PageSpan::covering_range(range.start * PAGE..range.end * PAGE);
        let mut spans = Vec::new();
        for range in [5..6, 1..2, 9..12, 2..5] {
            pages(range).add_to(&mut spans);
        }
        assert_eq!(spans, [pages(1..6), pages(9..12)]);
        pages(3..4).remove_from(&mut spans);
        assert_eq!(spans, [pages(1..3), pages(4..6), pages(9..12)]);
    }

    #[test]
    fn holes_are_cut_out() {
        let pages =
            |range: Range<usize>| PageSpan::covering_range(range.start * PAGE..range.end * PAGE);
        let left = pages(0..10).without_spans(&[pages(2..3), pages(5..20)]);
        assert_eq!(left, [pages(0..2), pages(3..5)]);
        assert_eq!(pages(3..4).without_spans(&[pages(0..9)]), []);
        assert_eq!(pages(3..8).common_pages(pages(5..9)), Some(pages(5..8)));
        assert_eq!(pages(3..5).common_pages(pages(5..9)), None);
    }
}
