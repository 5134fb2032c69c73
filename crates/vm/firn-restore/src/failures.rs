//! Current failures: the errors of reads and installs that are tried again, for reports.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::SystemTime;

use firn_types::{Block, Page};

use crate::error::RestoreError;
use crate::server::{PageServer, ReadUnit};

/// Memory that can't be read or installed at present.
#[derive(Clone, Debug)]
pub struct MemoryOutage {
    /// The error of the last attempt.
    pub error: Arc<RestoreError>,
    /// When the first attempt failed.
    pub since: SystemTime,
    /// A page that a vCPU waits for, if one does; otherwise the outage affects only the background
    /// fill.
    pub page: Option<Page>,
}

/// The last error of something that failed, and when it first failed.
#[derive(Clone, Debug)]
struct RepeatedFailure {
    error: Arc<RestoreError>,
    since: SystemTime,
}

impl RepeatedFailure {
    /// The first failure. It is logged; later failures of the same unit or block are not, for they
    /// may repeat for hours.
    fn log_first(error: RestoreError) -> Self {
        let cause = &error as &dyn std::error::Error;
        tracing::warn!(
            error = cause,
            "memory cannot be read or installed; retrying until it succeeds"
        );
        Self { error: Arc::new(error), since: SystemTime::now() }
    }

    fn record_error(entry: Entry<'_, u32, Self>, error: RestoreError) {
        match entry {
            Entry::Occupied(mut before) => before.get_mut().error = Arc::new(error),
            Entry::Vacant(new) => {
                new.insert(Self::log_first(error));
            }
        }
    }
}

/// The errors of everything that failed and has not succeeded since.
#[derive(Debug, Default)]
pub(crate) struct CurrentFailures {
    units: BTreeMap<u32, RepeatedFailure>,
    blocks: BTreeMap<u32, RepeatedFailure>,
    /// The host has no memory for pages; with the page that a vCPU waits for.
    memory: Option<(RepeatedFailure, Option<Page>)>,
}

impl CurrentFailures {
    /// A unit could not be read.
    pub(crate) fn record_unit(&mut self, unit: ReadUnit, error: RestoreError) {
        RepeatedFailure::record_error(self.units.entry(unit.0), error);
    }

    /// A block could not be installed.
    pub(crate) fn record_block(&mut self, block: Block, error: RestoreError) {
        RepeatedFailure::record_error(self.blocks.entry(block.0), error);
    }

    /// The host had no memory for a page.
    pub(crate) fn record_no_memory(&mut self, error: RestoreError, requested: Option<Page>) {
        match &mut self.memory {
            Some((failure, page)) => {
                failure.error = Arc::new(error);
                *page = page.or(requested);
            }
            none => *none = Some((RepeatedFailure::log_first(error), requested)),
        }
    }

    /// The host has memory again.
    pub(crate) fn clear_no_memory(&mut self) {
        self.memory = None;
    }

    /// The outage to report, given what the page server still tries.
    pub(crate) fn current_outage<B: Clone>(
        &mut self,
        server: &PageServer<B>,
    ) -> Option<MemoryOutage> {
        if !server.has_failed() {
            self.units.clear();
            self.blocks.clear();
        }
        let requested = server.failed_request();
        let of_page = requested.and_then(|(unit, block, page)| {
            let failure = self.blocks.get(&block.0).or_else(|| self.units.get(&unit.0))?;
            Some((failure, Some(page)))
        });
        let memory = self.memory.as_ref().map(|(failure, page)| (failure, *page));
        let any = || self.units.values().chain(self.blocks.values()).next();
        let (failure, page) = of_page.or(memory).or_else(|| Some((any()?, None)))?;
        Some(MemoryOutage { error: Arc::clone(&failure.error), since: failure.since, page })
    }
}
