//! How many pages a write makes writable.

use crate::span::{PAGE, PageSpan};

/// The maximum count of pages.
const RUN_PAGES_MAX: usize = 512;

/// Chooses how many pages a write makes writable.
#[derive(Debug)]
pub(super) struct WriteAhead {
    /// The bytes of an aligned block, which no run leaves.
    block: usize,
    /// The address after the last run, and its count of pages.
    end: usize,
    pages: usize,
}

impl WriteAhead {
    pub(super) fn new(block: usize) -> Self {
        Self { block, end: 0, pages: 0 }
    }

    /// The run that begins with a page. `end`: where it has to end; `None`: after this page.
    pub(super) fn choose_run(&mut self, page: PageSpan, end: Option<usize>) -> PageSpan {
        let is_next = page.start() == self.end;
        let pages = if is_next { (self.pages * 2).min(RUN_PAGES_MAX) } else { 1 };
        let block_end = page.start() / self.block * self.block + self.block;
        let end = block_end.min(end.unwrap_or(page.end())).min(page.start() + pages * PAGE);
        (self.end, self.pages) = (end, pages);
        PageSpan::covering_range(page.start()..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(first: usize, count: usize) -> PageSpan {
        PageSpan::covering_range(first * PAGE..(first + count) * PAGE)
    }

    #[test]
    fn a_run_doubles_while_pages_are_written_in_order() {
        let mut ahead = WriteAhead::new(16 * PAGE);
        let end = Some(42 * PAGE);
        let runs = [5, 6, 8, 12, 40, 41, 3].map(|page| ahead.choose_run(pages(page, 1), end));
        let expected = [(5, 1), (6, 2), (8, 4), (12, 4), (40, 1), (41, 1), (3, 1)];
        assert_eq!(runs, expected.map(|(first, count)| pages(first, count)));
        let one = [5, 6, 7].map(|page| ahead.choose_run(pages(page, 1), None).page_count());
        assert_eq!(one, [1; 3]);
    }
}
