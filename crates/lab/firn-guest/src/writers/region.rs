//! The memory of one writer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};

use clap::ValueEnum;

use super::report::{DESCRIBED_MAX, RegionReport};
use crate::arena::PageArena;
use crate::rate_limiter::RateLimiter;
use crate::stamp::{self, PageStamp, StampStyle, mix};

/// Pages written between checks of the clock and of requests.
const BATCH: u32 = 32;

/// The order in which a writer visits its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum WriteOrder {
    /// One after the other, from the first again after the last.
    Sequential,
    /// Any page, each as likely as the others.
    Random,
}

/// A request to a writer: whether to check its memory (true) or only to count (false), and the
/// channel for the reply.
pub(super) type WriterRequest = (bool, Sender<RegionReport>);

/// A region: pages, and the expected sequence number of each.
pub(super) struct WriterRegion {
    number: u32,
    arena: PageArena,
    sequences: Vec<u64>,
    style: StampStyle,
    order: WriteOrder,
    check_first: bool,
    steps: u64,
    report: RegionReport,
}

impl WriterRegion {
    /// A region of `pages` pages, all filled by the calling thread, in ascending order.
    pub(super) fn new(
        number: u32,
        pages: usize,
        style: StampStyle,
        order: WriteOrder,
        check: bool,
    ) -> Self {
        let mut arena = PageArena::new(pages);
        for (index, page) in arena.all_pages_mut().iter_mut().enumerate() {
            stamp::fill_page(
                page,
                PageStamp { region: number, index: index as u64, sequence: 0 },
                style,
            );
        }
        let report = RegionReport { pages: pages as u64, ..RegionReport::default() };
        let sequences = vec![0; pages];
        Self { number, arena, sequences, style, order, check_first: check, steps: 0, report }
    }

    /// Writes at `rate` pages per second and serves requests in between, until `stop` is set.
    pub(super) fn run_writer(
        &mut self,
        rate: f64,
        questions: &Receiver<WriterRequest>,
        stop: &AtomicBool,
    ) {
        let batch = if rate > 0.0 { BATCH.min((rate / 20.0).ceil() as u32).max(1) } else { BATCH };
        let mut limiter = RateLimiter::new(rate);
        while !stop.load(Ordering::Relaxed) {
            (0..batch).for_each(|_| self.write_next());
            if let Ok((check, answer)) = questions.try_recv() {
                let report = if check { self.verify_all() } else { self.report.clone() };
                // The client may have disconnected.
                let _ = answer.send(report);
            }
            limiter.wait_for(batch);
        }
    }

    /// Checks one page and rewrites it.
    fn write_next(&mut self) {
        let index = self.next_index();
        if self.check_first {
            self.check_page(index);
        }
        self.sequences[index] += 1;
        let stamp = self.expected_stamp(index);
        stamp::rewrite_page(self.arena.page_mut(index), stamp, self.style);
        self.report.writes += 1;
    }

    fn next_index(&mut self) -> usize {
        let step = self.steps;
        self.steps += 1;
        let wide = match self.order {
            WriteOrder::Sequential => step,
            WriteOrder::Random => mix(step ^ u64::from(self.number) << 32),
        };
        (wide % self.sequences.len() as u64) as usize
    }

    /// Checks every page.
    pub(super) fn verify_all(&mut self) -> RegionReport {
        (0..self.sequences.len()).for_each(|index| self.check_page(index));
        self.report.clone()
    }

    fn expected_stamp(&self, index: usize) -> PageStamp {
        PageStamp { region: self.number, index: index as u64, sequence: self.sequences[index] }
    }

    fn check_page(&mut self, index: usize) {
        let expected = self.expected_stamp(index);
        let problem = match stamp::check_page(self.arena.page(index)) {
            Ok(found) if found == expected => return,
            Ok(found) => format!("{expected:?} expected, found {found:?}"),
            Err(broken) => format!("{expected:?} expected: {broken}"),
        };
        self.report.wrong += 1;
        if self.report.problems.len() < DESCRIBED_MAX {
            self.report.problems.push(problem);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(order: WriteOrder) -> WriterRegion {
        let mut region =
            WriterRegion::new(1, 16, StampStyle::compressing_to(50, false), order, true);
        (0..100).for_each(|_| region.write_next());
        region
    }

    #[test]
    fn written_pages_pass_the_check() {
        for order in [WriteOrder::Sequential, WriteOrder::Random] {
            let report = region(order).verify_all();
            assert_eq!((report.pages, report.writes, report.wrong), (16, 100, 0));
        }
    }

    #[test]
    fn an_older_page_is_found() {
        let mut region = region(WriteOrder::Sequential);
        let old = *region.arena.page(5);
        (0..16).for_each(|_| region.write_next());
        *region.arena.page_mut(5) = old;
        let report = region.verify_all();
        assert_eq!(report.wrong, 1);
        assert!(report.problems[0].contains("index: 5"), "{:?}", report.problems);
    }

    #[test]
    fn a_page_that_became_zero_is_found_before_it_is_overwritten() {
        let mut region = region(WriteOrder::Sequential);
        region.arena.page_mut(5).fill(0);
        (0..16).for_each(|_| region.write_next());
        assert_eq!(region.verify_all().wrong, 1);
    }
}
