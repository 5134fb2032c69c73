//! Filter of the pages whose stores must be noted: a bit for each page, by the low part of its
//! number.
//!
//! Pages with the same low part as a page in the filter are checked in vain; pages of areas are
//! never missed. All vCPUs read the filter concurrently, at each store of the guest.

use std::sync::atomic::{AtomicU64, Ordering};

const BITS: u64 = 1 << 16;
const PAGE: u64 = 4096;
/// The maximum size of a store of a processor, in bytes.
const STORE_MAX: u64 = 64;

pub(crate) struct Filter([AtomicU64; (BITS / 64) as usize]);

impl Filter {
    pub(crate) const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; (BITS / 64) as usize])
    }

    /// Whether a store to this address may reach a page in the filter.
    #[inline]
    pub(crate) fn may_have(&self, at: u64) -> bool {
        let page = at / PAGE;
        self.has(page) || (at % PAGE > PAGE - STORE_MAX && self.has(page + 1))
    }

    #[inline]
    fn has(&self, page: u64) -> bool {
        self.word(page).load(Ordering::Relaxed) & 1 << (page % 64) != 0
    }

    #[inline]
    fn word(&self, page: u64) -> &AtomicU64 {
        &self.0[(page % BITS / 64) as usize]
    }

    /// Replaces the pages in the filter. A vCPU that reads it before this returns may miss any of
    /// them.
    pub(crate) fn set(&self, pages: impl Iterator<Item = u64>) {
        let mut wanted = vec![0_u64; self.0.len()];
        for page in pages {
            wanted[(page % BITS / 64) as usize] |= 1 << (page % 64);
        }
        for (word, wanted) in self.0.iter().zip(wanted) {
            word.store(wanted, Ordering::SeqCst);
        }
    }
}
