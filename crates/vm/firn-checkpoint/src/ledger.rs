//! Copy ledger: which memory blocks are copied. It is the only state that the fault handler and the
//! sweep both change.
//!
//! ```text
//!   Unsaved --claim--> Copying --copied--> Saved
//!     |        |                             ^
//!     |        +-- a second claimer waits ---+        (a copy takes about a microsecond)
//!     '--no backing--> Empty
//! ```
//!
//! The exactness of the image depends on this table. A block may be released to the guest only when
//! it is `Saved`: if the sweep is copying a block that the guest now wants to write, the fault
//! handler waits for that copy to end. That is why `Copying` and `Saved` are two states and not
//! one.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use firn_types::Block;

/// How often a running copy is checked before the thread sleeps, and how long a sleep is.
const SPINS_MAX: u32 = 1000;
const POLL_INTERVAL: Duration = Duration::from_micros(50);

const UNSAVED: u8 = 0;
const COPYING: u8 = 1;
const SAVED: u8 = 2;
const EMPTY: u8 = 3;

/// The result of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockClaim {
    /// The caller must copy the block now, then call [`CopyLedger::mark_saved`].
    Mine,
    /// The block's copy, made before or by another thread, is complete.
    Saved,
    /// The block had no backing at the cut, and needs no copy.
    Empty,
}

/// The state of every memory block of one save.
#[derive(Debug)]
pub(crate) struct CopyLedger {
    states: Vec<AtomicU8>,
    unsaved: AtomicU32,
}

impl CopyLedger {
    /// A ledger of `blocks` blocks, none saved.
    pub(crate) fn new(blocks: u32) -> Self {
        let states = (0..blocks).map(|_| AtomicU8::new(UNSAVED)).collect();
        Self { states, unsaved: AtomicU32::new(blocks) }
    }

    /// Claims a block for copying, or waits until the thread that copies it has done so.
    pub(crate) fn claim_block(&self, block: Block) -> BlockClaim {
        match self.try_claim(block) {
            true => BlockClaim::Mine,
            false => self.wait_saved(block),
        }
    }

    /// Claims a block if no thread has; never waits.
    pub(crate) fn try_claim(&self, block: Block) -> bool {
        let state = &self.states[block.index()];
        state.compare_exchange(UNSAVED, COPYING, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Sleeps if it takes long: the copying thread may be waiting for a processor, and for this
    /// one.
    fn wait_saved(&self, block: Block) -> BlockClaim {
        let state = || self.states[block.index()].load(Ordering::Acquire);
        let mut checks = 0..SPINS_MAX;
        loop {
            match (state(), checks.next()) {
                (SAVED, _) => return BlockClaim::Saved,
                (EMPTY, _) => return BlockClaim::Empty,
                (_, Some(_)) => std::hint::spin_loop(),
                (_, None) => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }

    /// Records that a block needs no copy, unless a thread has claimed it in the meantime.
    pub(crate) fn mark_empty(&self, block: Block) {
        let state = &self.states[block.index()];
        if state.compare_exchange(UNSAVED, EMPTY, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.unsaved.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Ends a claim: the block's copy is complete.
    pub(crate) fn mark_saved(&self, block: Block) {
        let before = self.states[block.index()].swap(SAVED, Ordering::Release);
        debug_assert_eq!(before, COPYING, "{block} was not claimed");
        self.unsaved.fetch_sub(1, Ordering::AcqRel);
    }

    /// The total number of blocks.
    pub(crate) fn block_count(&self) -> u32 {
        self.states.len() as u32
    }

    /// The number of blocks whose copy is not complete.
    pub(crate) fn unsaved_count(&self) -> u32 {
        self.unsaved.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn a_block_is_claimed_once() {
        let ledger = CopyLedger::new(2);
        assert_eq!(ledger.claim_block(Block(0)), BlockClaim::Mine);
        assert!(!ledger.try_claim(Block(0)));
        ledger.mark_saved(Block(0));
        assert_eq!(ledger.claim_block(Block(0)), BlockClaim::Saved);
        assert_eq!(ledger.unsaved_count(), 1);
    }

    #[test]
    fn a_block_without_backing_needs_no_copy() {
        let ledger = CopyLedger::new(3);
        assert!(ledger.try_claim(Block(1)));
        (0..2).map(Block).for_each(|block| ledger.mark_empty(block));
        assert_eq!(ledger.claim_block(Block(0)), BlockClaim::Empty);
        assert_eq!(ledger.unsaved_count(), 2);
        ledger.mark_saved(Block(1));
        assert_eq!(ledger.claim_block(Block(1)), BlockClaim::Saved);
        ledger.mark_empty(Block(1));
        assert_eq!((ledger.unsaved_count(), ledger.claim_block(Block(2))), (1, BlockClaim::Mine));
    }

    #[test]
    fn a_thread_that_does_not_copy_the_block_waits_for_the_copy() {
        let ledger = Arc::new(CopyLedger::new(1000));
        let copies: Arc<Vec<AtomicU64>> = Arc::new((0..1000).map(|_| AtomicU64::new(0)).collect());
        let workers: Vec<_> = (0..4)
            .map(|_| {
                let (ledger, copies) = (Arc::clone(&ledger), Arc::clone(&copies));
                std::thread::spawn(move || claim_all(&ledger, &copies))
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        assert_eq!(ledger.unsaved_count(), 0);
    }

    fn claim_all(ledger: &CopyLedger, copies: &[AtomicU64]) {
        for block in (0..1000).map(Block) {
            if ledger.claim_block(block) == BlockClaim::Mine {
                copies[block.index()].fetch_add(1, Ordering::Relaxed);
                ledger.mark_saved(block);
            }
            assert_eq!(copies[block.index()].load(Ordering::Relaxed), 1);
        }
    }
}
