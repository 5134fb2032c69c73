//! Compare: every byte may have been written; the session compares all of it with the committed
//! copy.
//!
//! No faults, no system calls, any kernel, any memory. A commit costs the time to read the areas
//! twice.

use super::interface::{Tracker, WrittenRuns};
use super::kind::TrackerKind;
use crate::error::Error;
use crate::span::PageSpan;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct CompareTracker {
    spans: Vec<PageSpan>,
}

impl Tracker for CompareTracker {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Compare
    }

    fn watch_span(&mut self, span: PageSpan) -> Result<(), Error> {
        self.spans.push(span);
        Ok(())
    }

    fn forget_span(&mut self, span: PageSpan) -> Result<(), Error> {
        span.remove_from(&mut self.spans);
        Ok(())
    }

    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        for span in &self.spans {
            found.push_run(span.start(), span.byte_count());
        }
        Ok(())
    }
}
