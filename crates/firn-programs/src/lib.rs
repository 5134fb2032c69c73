//! Random programs on critical data areas: whatever they do, the committed image that a tracker's changes add up to is that of
//! the same program on plain memory.
//!
//! Areas of all sizes and alignments, stores of every kind (strings, vectors, atomics), several threads, aborted transactions;
//! and operations on thirteen data structures. It is a library for two: `firn-app` tests its trackers with it, and
//! `firn-guest programs` those that need a host below.
//!
//! What is wrong ends the program at once, with what differs and where: it panics.

#![allow(clippy::unwrap_used, clippy::panic, reason = "documented: what is wrong ends the program")]

mod program;
mod running;
mod structures;

use firn_app::Session;
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Transactions of one program.
pub const STEPS: usize = 50;

/// A way to open sessions.
#[derive(Clone, Copy)]
pub struct Variant<'a> {
    /// Whether its sessions can abort.
    pub undo: bool,
    /// Opens one.
    pub open: &'a dyn Fn() -> Session,
}

/// How much is done.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Where randomness starts.
    pub seed: u64,
    /// Random programs, of [`STEPS`] transactions each.
    pub programs: usize,
    /// Transactions on each structure.
    pub operations: usize,
}

impl Extent {
    /// 10,000 transactions in all.
    pub fn new(seed: u64) -> Self {
        Self { seed, programs: 140, operations: 235 }
    }

    /// How many transactions that is.
    pub fn transactions(self) -> usize {
        self.programs * STEPS + self.operations * firn_structures::ALL.len()
    }
}

/// Random programs, with one variant after the other; then the structures.
///
/// # Panics
/// If memory or the committed image is ever another than it should be, or a session does not work.
pub fn run_all(variants: &[Variant<'_>], extent: Extent) {
    let mut seed = [7; 32];
    seed[..8].copy_from_slice(&extent.seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    for number in 0..extent.programs {
        let program = program::programs(STEPS).new_tree(&mut runner).unwrap().current();
        running::run(variants[number % variants.len()], &program);
    }
    structures::run(variants, extent.operations);
}
