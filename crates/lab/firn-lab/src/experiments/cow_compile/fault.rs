//! Fault duration: the time of the first write to a page after dirty tracking has been restarted.

use anyhow::{Context as _, Result};
use firn_memory::PageScan;
use firn_types::Page;

use crate::stats::Sample;
use crate::toucher::Toucher;

/// 64 MiB, mapped as a guest's RAM is.
const PAGES: u32 = 16 << 10;
const ROUNDS: usize = 5;

/// Measures the duration in seconds, with a system call instead of the trap: the median of some
/// rounds in which each page is written once.
pub(super) fn measure_fault_s() -> Result<f64> {
    let mut toucher = Toucher::start(&std::env::current_exe()?, PAGES)?;
    let memory = toucher.memory().clone();
    let scan = PageScan::create(&mut toucher.seize_thread()?, memory.clone())?;
    let pages: Vec<Page> = (0..PAGES).map(Page).collect();
    toucher.write_pages(&pages)?;
    let round = |_| -> Result<f64> {
        scan.arm_all()?;
        Ok(toucher.write_pages(&pages)?.iter().sum::<f64>() / 1e6 / f64::from(PAGES))
    };
    let rounds = (0..ROUNDS).map(round).collect::<Result<Vec<_>>>()?;
    Sample::new(rounds).map(|rounds| rounds.p50()).context("no rounds")
}
