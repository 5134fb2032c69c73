//! Random programs on critical data areas: the sum of a tracker's changes must be the committed
//! image that the same program produces on plain memory.
//!
//! Areas of all sizes and alignments, stores of every kind (strings, vectors, atomics), several
//! threads, aborted transactions; and operations on thirteen data structures. Two programs use this
//! library: `firn-app` tests its trackers with it, and `firn-guest programs` those that need Firn
//! on a host.
//!
//! A difference ends the program at once: it panics with the position and the bytes that differ.

#![allow(clippy::unwrap_used, clippy::panic, reason = "documented: what is wrong ends the program")]

mod program;
mod running;
mod structures;

use firn_app::Session;
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// The count of transactions of one program.
pub const STEPS: usize = 50;

/// A variant of sessions: a tracker and its options.
#[derive(Clone, Copy)]
pub struct SessionVariant<'a> {
    /// Whether its sessions can abort.
    pub can_abort: bool,
    /// Opens a session.
    pub open: &'a dyn Fn() -> Session,
}

/// The extent of a test run.
#[derive(Clone, Copy, Debug)]
pub struct TestExtent {
    /// The seed of all random choices.
    pub seed: u64,
    /// The count of random programs, of [`STEPS`] transactions each.
    pub programs: usize,
    /// The count of transactions on each data structure.
    pub structure_transactions: usize,
}

impl TestExtent {
    /// 10,000 transactions in all.
    pub fn new(seed: u64) -> Self {
        Self { seed, programs: 140, structure_transactions: 235 }
    }

    /// The total count of transactions.
    pub fn transaction_count(self) -> usize {
        self.programs * STEPS + self.structure_transactions * firn_structures::ALL.len()
    }
}

/// Runs random programs, then the data structures: each program and each structure with one of the
/// variants, in turn.
///
/// # Panics
/// If memory or the committed image ever differs from its expected content, or a session does not
/// work.
pub fn run_all(variants: &[SessionVariant<'_>], extent: TestExtent) {
    let mut seed = [7; 32];
    seed[..8].copy_from_slice(&extent.seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    for number in 0..extent.programs {
        let program = program::program_strategy(STEPS).new_tree(&mut runner).unwrap().current();
        running::run_program(variants[number % variants.len()], &program);
    }
    structures::run_structures(variants, extent.structure_transactions);
}
