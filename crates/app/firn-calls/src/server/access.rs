//! The server's access to the guest, and how the guest's page tables are seen through it.
//!
//! ```text
//!   tables above  -->  PartMapping of a part  -->  table of the part  -->  512 pages
//!   read at each look: one entry for 2 MiB         read only if it was written, or the mapping differs
//! ```

use std::ops::Range;

use firn_types::{GuestPhys, PAGE_SIZE, Page};

use crate::key::{Nonce, Proof};
use crate::message::CallRefusal;
use crate::store_recording::PluginOrder;

/// A part of an address space: the 2 MiB of addresses from this number times 2 MiB on. One table of
/// the guest has an entry for each of its pages, unless it is one large page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PartNumber(pub u64);

impl PartNumber {
    /// The count of pages of a part.
    pub const PAGES: u64 = 512;

    /// The part with an address.
    pub(super) fn of_address(address: u64) -> Self {
        Self(address / PAGE_SIZE as u64 / Self::PAGES)
    }

    /// The number of its first page, counted from address 0.
    pub fn first_page(self) -> u64 {
        self.0.wrapping_mul(Self::PAGES)
    }
}

/// How the tables above a part lead to its pages. If two mappings of a part are equal, and the page
/// with its table was not written in between, each page of the part has the same physical page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartMapping {
    /// The page of RAM with the table of the part, if there is such a table.
    pub table: Option<Page>,
    /// Address and rights as a number that only the guest's side understands.
    pub entry: u64,
}

/// The translation of a part, as read once.
#[derive(Clone, Debug)]
pub struct PartTranslation {
    /// The mapping by which the pages were found.
    pub mapping: PartMapping,
    /// The physical pages, if the program owns them and may write them: one result for each page.
    pub pages: Vec<Result<Page, CallRefusal>>,
}

/// The server's access to the guest.
pub trait GuestAccess {
    /// A random number that no program can guess.
    fn random_number(&mut self) -> Nonce;

    /// The address spaces that have these bytes at this address.
    fn find_spaces(&mut self, at: u64, proof: &Proof) -> Vec<GuestPhys>;

    /// Whether this address space has these bytes at this address.
    fn has_proof(&mut self, space: GuestPhys, at: u64, proof: &Proof) -> bool;

    /// The mappings of these parts, in ascending order, as the tables are now: one for each part.
    fn find_mappings(&mut self, space: GuestPhys, parts: &[PartNumber]) -> Vec<PartMapping>;

    /// Translates all pages of a part, as the tables are now.
    fn translate_part(&mut self, space: GuestPhys, part: PartNumber) -> PartTranslation;

    /// Of the pages in these ranges, which are in ascending order and do not overlap, those that
    /// were written since they were last reported, in ascending order; and the era: the number of
    /// the period since whose begin all writes are known. Another era than before means that some
    /// writes were missed in between. `None` if writes cannot be followed now. Other pages may be
    /// reported too: each write is reported once, to the session that asks first.
    fn take_written(&mut self, pages: &[Range<Page>]) -> Option<(u64, Vec<Page>)>;

    /// Sends an order to the plugin. False if no plugin observes stores.
    fn order_plugin(&mut self, order: &PluginOrder) -> bool;
}
