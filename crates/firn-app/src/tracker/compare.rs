//! Compare: every byte may have been written; the session compares all of it with the committed
//! copy.
//!
//! No faults, no system calls, any kernel, any memory. A commit costs the time to read the areas
//! twice.

use super::{Found, Kind, Tracker};
use crate::error::Error;
use crate::span::Span;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Compare {
    spans: Vec<Span>,
}

impl Tracker for Compare {
    fn kind(&self) -> Kind {
        Kind::Compare
    }

    fn watch(&mut self, span: Span) -> Result<(), Error> {
        self.spans.push(span);
        Ok(())
    }

    fn collect(&mut self, found: &mut Found) -> Result<(), Error> {
        for span in &self.spans {
            found.push(span.start(), span.bytes());
        }
        Ok(())
    }
}
