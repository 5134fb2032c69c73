//! Emul: the application's mapping stays write-protected; each store is performed through a second
//! mapping of the same memory, and its words are noted.
//!
//! A store that cannot be performed (an unknown instruction, or the log is full) makes its page
//! writable until commit, as PT does; the page is then reported as a whole.

use std::sync::Arc;

use super::pages::push_pages;
use super::{Counts, Found, Kind, Tracker};
use crate::error::Error;
use crate::memory::Memory;
use crate::span::Span;
use crate::sys::fault::Watched;
use crate::sys::notes::Noted;

/// The unit in which noted stores are reported, in bytes.
const WORD: usize = 8;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Emulate {
    /// Watches end before their memory does.
    watched: Vec<(Watched, Arc<Memory>)>,
    pages: Vec<u32>,
    stores: Vec<Noted>,
}

impl Tracker for Emulate {
    fn kind(&self) -> Kind {
        Kind::Emulate
    }

    fn tells_words(&self) -> bool {
        true
    }

    fn watch(&mut self, _: Span) -> Result<(), Error> {
        Err(Error::Foreign { kind: Kind::Emulate })
    }

    fn allocate(&mut self, bytes: usize) -> Result<Arc<Memory>, Error> {
        let memory = Arc::new(Memory::twice(bytes)?);
        let watched = Watched::new(memory.span(), memory.alias());
        let watched = watched.map_err(Error::system("write-protecting an area"))?;
        self.watched.push((watched, memory.clone()));
        Ok(memory)
    }

    fn collect(&mut self, found: &mut Found) -> Result<(), Error> {
        for (watched, _) in &self.watched {
            let taken = watched.notes().take(&mut self.pages, &mut self.stores);
            taken.map_err(Error::system("write-protecting pages"))?;
            push_pages(watched.notes().span(), &self.pages, found);
            for stored in &self.stores {
                let start = stored.address / WORD * WORD;
                let end = (stored.address + stored.len).next_multiple_of(WORD);
                found.push(start, end - start);
            }
        }
        Ok(())
    }

    fn counts(&self) -> Counts {
        let sum = |count: fn(&Watched) -> u64| self.watched.iter().map(|(w, _)| count(w)).sum();
        Counts {
            emulated: sum(|watched| watched.notes().emulated()),
            unsupported: sum(|watched| watched.notes().unsupported()),
            ..Counts::default()
        }
    }
}
