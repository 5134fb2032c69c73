//! Hot pages: pages written so often that a fault at their first write costs more than comparing
//! them every time.
//!
//! A page's *heat* rises by [`HEAT_PER_WRITE`] when a transaction writes it, and falls by one with
//! every transaction. A page written in more than half of them becomes hot in the end. (A fault
//! costs about a microsecond; comparing a page a tenth of that, and half a microsecond more if it
//! has no hot neighbor, as the kernel then walks more mappings.) Nothing reports writes to a hot
//! page any more, so it is protected again after some transactions, and has to become hot again;
//! after more transactions each time.
//!
//! Page addresses and transactions are the input, decisions are the output: no system calls here.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::span::PageSpan;

const HEAT_PER_WRITE: u32 = 2;
const HOT_FROM: u32 = 12;
const HEAT_MAX: u32 = 20;
/// The maximum count of hot pages: each costs a commit about a tenth of a microsecond.
const PAGES_MAX: usize = 32;
/// The count of transactions for which a page stays hot: the first time, and the maximum.
const HOT_TRANSACTIONS: (u64, u64) = (256, 1 << 16);
/// The heat with which a page that was hot starts again.
const HEAT_AFTER_COOLING: u32 = 9;

#[derive(Clone, Copy, Debug)]
struct HeatEntry {
    heat: u32,
    seen: u64,
    /// The count of transactions for which it will be hot next time.
    stay: u64,
}

/// The heat of pages. A page is identified by its address.
#[derive(Clone, Debug, Default)]
pub(super) struct PageHeat {
    now: u64,
    pages: HashMap<usize, HeatEntry, BuildHasherDefault<AddressHasher>>,
    /// Hot pages, and the transaction until which they are hot.
    hot: Vec<(usize, u64)>,
}

/// A hasher for addresses. No attacker chooses them: a multiplication spreads them well enough.
#[derive(Clone, Copy, Debug, Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_usize(usize::from(*byte)));
    }

    fn write_usize(&mut self, address: usize) {
        self.0 = (self.0 ^ (address >> 12) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl PageHeat {
    /// The addresses of hot pages.
    pub(super) fn hot_pages(&self) -> impl Iterator<Item = usize> + '_ {
        self.hot.iter().map(|(page, _)| *page)
    }

    /// Counts the end of a transaction.
    pub(super) fn end_transaction(&mut self) {
        self.now += 1;
    }

    /// Records that the transaction wrote a page that is not hot. True if the page is hot from now
    /// on.
    pub(super) fn record_write(&mut self, page: usize) -> bool {
        let new = HeatEntry { heat: 0, seen: self.now, stay: HOT_TRANSACTIONS.0 };
        let entry = self.pages.entry(page).or_insert(new);
        let passed = u32::try_from(self.now - entry.seen).unwrap_or(u32::MAX);
        entry.heat = (entry.heat.saturating_sub(passed) + HEAT_PER_WRITE).min(HEAT_MAX);
        entry.seen = self.now;
        if entry.heat < HOT_FROM || self.hot.len() >= PAGES_MAX {
            return false;
        }
        self.hot.push((page, self.now + entry.stay));
        entry.stay = (entry.stay * 2).min(HOT_TRANSACTIONS.1);
        true
    }

    /// Forgets pages that are no longer followed.
    pub(super) fn forget_span(&mut self, span: PageSpan) {
        let is_left = |page: usize| !(span.start()..span.end()).contains(&page);
        self.pages.retain(|page, _| is_left(*page));
        self.hot.retain(|(page, _)| is_left(*page));
    }

    /// Removes one page whose hot period is over, and returns it.
    pub(super) fn cool_page(&mut self) -> Option<usize> {
        let over = self.hot.iter().position(|(_, until)| *until <= self.now)?;
        let (page, _) = self.hot.swap_remove(over);
        if let Some(entry) = self.pages.get_mut(&page) {
            (entry.heat, entry.seen) = (HEAT_AFTER_COOLING, self.now);
        }
        Some(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a page in every `every`th transaction, and counts those in which it was hot.
    fn hot_transactions(every: u64, transactions: u64) -> u64 {
        let mut heat = PageHeat::default();
        let mut count = 0;
        for number in 0..transactions {
            let is_hot = heat.hot_pages().any(|page| page == 7);
            count += u64::from(is_hot);
            if !is_hot && number % every == 0 {
                heat.record_write(7);
            }
            heat.end_transaction();
            heat.cool_page();
        }
        count
    }

    #[test]
    fn a_page_that_is_written_often_becomes_hot() {
        assert!(hot_transactions(1, 10_000) > 9_900);
        assert_eq!(hot_transactions(3, 10_000), 0);
    }

    #[test]
    fn there_are_never_too_many() {
        let mut heat = PageHeat::default();
        for _ in 0..100 {
            for page in 0..100 {
                if !heat.hot_pages().any(|hot| hot == page) {
                    heat.record_write(page);
                }
            }
            heat.end_transaction();
        }
        assert_eq!(heat.hot_pages().count(), PAGES_MAX);
    }

    #[test]
    fn a_page_that_is_no_longer_written_cools() {
        let mut heat = PageHeat::default();
        while !heat.record_write(3) {
            heat.end_transaction();
        }
        let mut transactions = 0;
        while heat.cool_page().is_none() {
            heat.end_transaction();
            transactions += 1;
        }
        assert_eq!(transactions, HOT_TRANSACTIONS.0);
        assert_eq!(heat.hot_pages().count(), 0);
    }
}
