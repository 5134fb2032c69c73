//! Emul: the application's mapping stays write-protected; each store is performed through a second
//! mapping of the same memory, and its words are recorded.
//!
//! A store that cannot be performed (an unknown instruction, or the log is full) makes its page
//! writable until commit, as PT does; the page is then reported as a whole.

use std::sync::Arc;

use super::interface::{Tracker, TrackerCounts, WrittenRuns};
use super::kind::TrackerKind;
use super::pages::push_pages;
use crate::error::Error;
use crate::memory::AreaMemory;
use crate::span::PageSpan;
use crate::sys::fault::{self, WatchedSpan};
use crate::sys::write_log::RecordedStore;

/// The unit in which recorded stores are reported, in bytes.
const WORD: usize = 8;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct EmulationTracker {
    /// Watches end before their memory does.
    watched: Vec<(WatchedSpan, Arc<AreaMemory>)>,
    pages: Vec<u32>,
    stores: Vec<RecordedStore>,
}

impl Tracker for EmulationTracker {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Emulate
    }

    fn reports_words(&self) -> bool {
        true
    }

    fn watch_span(&mut self, _: PageSpan) -> Result<(), Error> {
        Err(Error::Foreign { kind: TrackerKind::Emulate })
    }

    fn allocate_memory(&mut self, bytes: usize) -> Result<Arc<AreaMemory>, Error> {
        let memory = Arc::new(AreaMemory::map_twice(bytes)?);
        let watched = WatchedSpan::new(memory.span(), memory.second_address());
        let watched = watched.map_err(Error::system("write-protecting an area"))?;
        self.watched.push((watched, memory.clone()));
        Ok(memory)
    }

    fn forget_span(&mut self, span: PageSpan) -> Result<(), Error> {
        // Areas have memory of their own here: a span is all pages of one.
        self.watched.retain(|(_, memory)| memory.span() != span);
        Ok(())
    }

    fn check_working(&self) -> Result<(), Error> {
        match fault::is_handler_installed() {
            true => Ok(()),
            false => Err(Error::HandlerReplaced { kind: self.kind() }),
        }
    }

    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        for (watched, _) in &self.watched {
            let taken = watched.write_log().take_log(&mut self.pages, &mut self.stores);
            taken.map_err(Error::system("write-protecting pages"))?;
            push_pages(watched.write_log().span(), &self.pages, found);
            for stored in &self.stores {
                let start = stored.address / WORD * WORD;
                let end = (stored.address + stored.len).next_multiple_of(WORD);
                found.push_run(start, end - start);
            }
        }
        Ok(())
    }

    fn counts(&self) -> TrackerCounts {
        let sum = |count: fn(&WatchedSpan) -> u64| self.watched.iter().map(|(w, _)| count(w)).sum();
        TrackerCounts {
            emulated: sum(|watched| watched.write_log().emulated_stores()),
            unsupported: sum(|watched| watched.write_log().unsupported_instructions()),
            ..TrackerCounts::default()
        }
    }
}
