//! PT assisted by the operating system, and PT for areas that userfaultfd cannot follow, such as a
//! shared mapping of a file on some kernels.
//!
//! No area changes from one to the other while transactions run: with PT, a system call that writes
//! to the area (`read(2)` of a request into a cache, for example) fails with EFAULT.

use std::sync::Arc;

use super::assisted::AssistedTracker;
use super::interface::{Tracker, TrackerCounts, WrittenRuns};
use super::kind::TrackerKind;
use super::pages::PageTracker;
use crate::error::Error;
use crate::memory::AreaMemory;
use crate::span::PageSpan;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct FallbackTracker {
    assisted: AssistedTracker,
    pages: PageTracker,
}

impl FallbackTracker {
    pub(super) fn new(assisted: AssistedTracker) -> Self {
        Self { assisted, pages: PageTracker::default() }
    }
}

impl Tracker for FallbackTracker {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Assisted
    }

    fn set_comparing(&mut self, compares: bool) {
        self.assisted.set_comparing(compares);
        self.pages.set_comparing(compares);
    }

    fn watch_span(&mut self, span: PageSpan) -> Result<(), Error> {
        match self.assisted.watch_span(span) {
            Ok(()) => Ok(()),
            Err(error) => self.pages.watch_span(span).map_err(|_| error),
        }
    }

    fn allocate_memory(&mut self, bytes: usize) -> Result<Arc<AreaMemory>, Error> {
        self.assisted.allocate_memory(bytes)
    }

    fn forget_span(&mut self, span: PageSpan) -> Result<(), Error> {
        self.pages.forget_span(span)?;
        self.assisted.forget_span(span)
    }

    fn check_working(&self) -> Result<(), Error> {
        match self.pages.is_empty() {
            true => Ok(()),
            false => self.pages.check_working(),
        }
    }

    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        self.assisted.collect_writes(found)?;
        self.pages.collect_writes(found)
    }

    fn restriction(&self) -> Option<&str> {
        self.assisted.restriction()
    }

    fn counts(&self) -> TrackerCounts {
        self.assisted.counts()
    }
}
