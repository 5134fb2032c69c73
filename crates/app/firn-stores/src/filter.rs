//! Filter of the pages whose stores must be recorded: a bit for each page, by the low part of its
//! number.
//!
//! Pages with the same low part as a page in the filter are checked in vain; pages of areas are
//! never missed. All vCPUs read the filter concurrently, at each store of the guest.

use std::sync::atomic::{AtomicU64, Ordering};

const BITS: u64 = 1 << 16;
const PAGE: u64 = 4096;
/// The maximum size of a store of a processor, in bytes.
const STORE_MAX: u64 = 64;

pub(crate) struct StoreFilter([AtomicU64; (BITS / 64) as usize]);

impl StoreFilter {
    pub(crate) const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; (BITS / 64) as usize])
    }

    /// Whether a store to this address may reach a page in the filter.
    #[inline]
    pub(crate) fn may_contain(&self, at: u64) -> bool {
        let page = at / PAGE;
        self.contains_page(page) || (at % PAGE > PAGE - STORE_MAX && self.contains_page(page + 1))
    }

    #[inline]
    fn contains_page(&self, page: u64) -> bool {
        self.word_of_page(page).load(Ordering::Relaxed) & 1 << (page % 64) != 0
    }

    #[inline]
    fn word_of_page(&self, page: u64) -> &AtomicU64 {
        &self.0[(page % BITS / 64) as usize]
    }

    /// Replaces the pages in the filter. A vCPU that reads it before this returns may miss any of
    /// them.
    pub(crate) fn replace_pages(&self, pages: impl Iterator<Item = u64>) {
        let mut wanted = vec![0_u64; self.0.len()];
        for page in pages {
            wanted[(page % BITS / 64) as usize] |= 1 << (page % 64);
        }
        for (word, wanted) in self.0.iter().zip(wanted) {
            word.store(wanted, Ordering::SeqCst);
        }
    }
}
