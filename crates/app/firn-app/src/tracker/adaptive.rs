//! Adaptive: PT assisted by the operating system, and PT for what that cannot follow, or follows at
//! a higher cost.
//!
//! ```text
//!   assisted   a commit costs by the size of the areas (a scan), a written page costs little
//!   PT         a commit costs by what was written (a signal for each page)
//!
//!               scans take longer than signals would
//!   assisted -------------------------------------> PT        large areas, after a window of transactions
//!            <-------------------------------------
//!               signals take longer than scans would
//! ```
//!
//! An area that userfaultfd cannot follow, such as a shared mapping of a file, is followed by PT
//! from the start.

use std::time::{Duration, Instant};

use super::assisted::AssistedTracker;
use super::interface::{Tracker, TrackerCounts, WrittenRuns};
use super::kind::TrackerKind;
use super::pages::PageTracker;
use crate::error::Error;
use crate::span::{PAGE, PageSpan};

/// The count of transactions before a decision.
const WINDOW: u32 = 64;
/// The minimum size of a span that PT may follow because its scans cost too much, in bytes.
const LARGE: usize = 4 << 20;
/// A change must be worth it: the other method is cheaper by this factor.
const GAIN: u32 = 2;

/// The time of the first write of a page, by method, as measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageCosts {
    pub(super) assisted: Duration,
    pub(super) pages: Duration,
}

/// Sums of a window of transactions.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    transactions: u32,
    /// The time of scans, and the count of pages that large spans had written.
    scans: Duration,
    written: u32,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct AdaptiveTracker {
    assisted: AssistedTracker,
    pages: PageTracker,
    costs: PageCosts,
    /// Spans that only PT can follow are in none of these.
    on_assisted: Vec<PageSpan>,
    on_pages: Vec<PageSpan>,
    /// Spans that neither could follow after a change: all of them counts as written.
    unfollowed: Vec<PageSpan>,
    window: Window,
    /// The time of the scans of a window, when all spans were scanned.
    scan_cost: Duration,
}

impl AdaptiveTracker {
    pub(super) fn new(assisted: AssistedTracker, costs: PageCosts) -> Self {
        Self {
            assisted,
            pages: PageTracker::default(),
            costs,
            on_assisted: Vec::new(),
            on_pages: Vec::new(),
            unfollowed: Vec::new(),
            window: Window::default(),
            scan_cost: Duration::ZERO,
        }
    }

    fn large_spans(&self) -> Vec<PageSpan> {
        let is_large = |span: &PageSpan| span.byte_count() >= LARGE;
        self.on_assisted.iter().copied().filter(is_large).collect()
    }

    /// Decides at the end of a window. No thread writes the areas meanwhile.
    fn decide(&mut self) -> Result<(), Error> {
        let Window { scans, written, .. } = std::mem::take(&mut self.window);
        let large = self.large_spans();
        if !large.is_empty() && scans > GAIN * written * self.costs.pages {
            self.scan_cost = scans;
            return large.into_iter().try_for_each(|span| self.move_to_pages(span));
        }
        if !self.on_pages.is_empty()
            && written * self.costs.pages > GAIN * (self.scan_cost + written * self.costs.assisted)
        {
            let moved = std::mem::take(&mut self.on_pages);
            return moved.into_iter().try_for_each(|span| self.move_to_assisted(span));
        }
        Ok(())
    }

    fn move_to_pages(&mut self, span: PageSpan) -> Result<(), Error> {
        self.assisted.forget_span(span)?;
        span.remove_from(&mut self.on_assisted);
        if self.pages.watch_span(span).is_ok() {
            self.on_pages.push(span);
        } else if self.assisted.watch_span(span).is_ok() {
            span.add_to(&mut self.on_assisted);
        } else {
            self.unfollowed.push(span);
        }
        Ok(())
    }

    fn move_to_assisted(&mut self, span: PageSpan) -> Result<(), Error> {
        self.pages.forget_span(span)?;
        match self.assisted.watch_span(span) {
            Ok(()) => span.add_to(&mut self.on_assisted),
            Err(_) => self.unfollowed.push(span),
        }
        Ok(())
    }

    /// The pages that a transaction has written in spans that may be moved.
    fn count_pages(&self, found: &WrittenRuns) -> u32 {
        let spans = || self.on_assisted.iter().chain(&self.on_pages);
        let is_large = |start| {
            spans().any(|span| {
                span.byte_count() >= LARGE && (span.start()..span.end()).contains(&start)
            })
        };
        let large = found.runs().iter().filter(|(start, _)| is_large(*start));
        let pages: usize = large.map(|(_, len)| len.div_ceil(PAGE)).sum();
        u32::try_from(pages).unwrap_or(u32::MAX / WINDOW)
    }
}

impl Tracker for AdaptiveTracker {
    fn kind(&self) -> TrackerKind {
        match self.on_assisted.is_empty() && !self.on_pages.is_empty() {
            true => TrackerKind::Pages,
            false => TrackerKind::Assisted,
        }
    }

    fn set_comparing(&mut self, compares: bool) {
        self.assisted.set_comparing(compares);
        self.pages.set_comparing(compares);
    }

    fn watch_span(&mut self, span: PageSpan) -> Result<(), Error> {
        match self.assisted.watch_span(span) {
            Ok(()) => span.add_to(&mut self.on_assisted),
            Err(error) => self.pages.watch_span(span).map_err(|_| error)?,
        }
        Ok(())
    }

    fn forget_span(&mut self, span: PageSpan) -> Result<(), Error> {
        self.pages.forget_span(span)?;
        self.assisted.forget_span(span)?;
        span.remove_from(&mut self.on_assisted);
        span.remove_from(&mut self.on_pages);
        span.remove_from(&mut self.unfollowed);
        Ok(())
    }

    fn check_working(&self) -> Result<(), Error> {
        match self.pages.is_empty() {
            true => Ok(()),
            false => self.pages.check_working(),
        }
    }

    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        let start = Instant::now();
        self.assisted.collect_writes(found)?;
        self.window.scans += start.elapsed();
        self.pages.collect_writes(found)?;
        self.unfollowed.iter().for_each(|span| found.push_run(span.start(), span.byte_count()));
        if self.large_spans().is_empty() && self.on_pages.is_empty() {
            return Ok(());
        }
        let pages = self.count_pages(found);
        self.window.written = self.window.written.saturating_add(pages);
        self.window.transactions += 1;
        match self.window.transactions < WINDOW {
            true => Ok(()),
            false => self.decide(),
        }
    }

    fn counts(&self) -> TrackerCounts {
        self.assisted.counts()
    }
}
