//! State of store recording: whether the host's plugin records the application's stores, and the
//! reader of its reports.
//!
//! ```text
//!   not recording ---begin---> recording ---collect: an epoch is reported---> recording
//!      ^                     |
//!      `--- nothing is reported, or not the stores themselves (too many for a reply, pages that moved)
//! ```
//!
//! If the epochs of an application are never reported, a request to record stores in each
//! transaction would be in vain. After a few failed attempts the application requests it only
//! rarely.

use std::time::{Duration, Instant};

use firn_calls::{ReportReader, StoreReport, WindowSlot, WordRun};

/// The count of failed attempts in a row after which the application waits.
const FAILURES_MAX: u32 = 3;
/// The time it waits then.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct StoreRecording {
    reader: Option<ReportReader>,
    /// Attempts since an epoch was last reported.
    failures: u32,
    last_attempt: Option<Instant>,
}

impl StoreRecording {
    /// Records that an attempt is made.
    pub(super) fn record_attempt(&mut self) {
        self.reader = None;
        self.failures += 1;
        self.last_attempt = Some(Instant::now());
    }

    /// Records that stores are recorded from now on.
    pub(super) fn begin_recording(&mut self, reader: ReportReader) {
        self.reader = Some(reader);
    }

    /// Records that stores are no longer recorded.
    pub(super) fn end_recording(&mut self) {
        self.reader = None;
    }

    /// Whether to request recording, if it is off.
    pub(super) fn is_due(&self) -> bool {
        let is_rested = || self.last_attempt.is_none_or(|tried| tried.elapsed() >= RETRY_INTERVAL);
        self.reader.is_none() && (self.failures < FAILURES_MAX || is_rested())
    }

    /// Ends an epoch, and returns its stores. `None` if they are not reported.
    pub(super) fn collect_epoch(&mut self, slot: WindowSlot<'_>) -> Option<Vec<WordRun>> {
        let mut reader = self.reader.take()?;
        let (epoch, token) = reader.current_epoch();
        slot.end_epoch(token);
        match slot.read_report(epoch).and_then(|report| reader.open_report(&report)) {
            Some(StoreReport::Words(runs)) => {
                self.failures = 0;
                self.reader = Some(reader);
                Some(runs)
            }
            _ => None,
        }
    }
}
