//! `firn-guest random`: random access over a part of memory, the hardest case for any prefetching.

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;

use super::MemoryWalk;
use super::path::WalkPath;
use crate::stamp::StampStyle;
use crate::threads;

/// Visits random pages of a part of its memory.
#[derive(Args, Clone, Debug)]
pub struct RandomArgs {
    /// Threads; one per vCPU unless given.
    #[arg(long)]
    threads: Option<usize>,
    /// Memory of all threads together; all of it is filled.
    #[arg(long, default_value_t = 256)]
    mib: usize,
    /// The part of it that is visited, in percent.
    #[arg(long, default_value_t = 50)]
    percent: usize,
    /// Writes the page at one visit in this many; 0 for never.
    #[arg(long, default_value_t = 0)]
    write_every: u64,
    /// Pages visited by all threads together; 0 runs for ever.
    #[arg(long, default_value_t = 0)]
    count: u64,
    /// Pages that each thread visits per second; 0 is as fast as possible.
    #[arg(long, default_value_t = 0.0)]
    rate: f64,
    /// Chooses the pages.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Milliseconds between progress lines; 0 for none.
    #[arg(long, default_value_t = 500)]
    progress_ms: u64,
}

/// Walks to the end. False if a page was wrong.
pub fn run(args: &RandomArgs) -> Result<bool> {
    ensure!((1..=100).contains(&args.percent), "percent is 1 to 100");
    let threads = args.threads.unwrap_or_else(threads::vcpu_count).max(1);
    let pages = (args.mib * 256 / threads).max(1);
    MemoryWalk {
        threads,
        pages,
        style: StampStyle::compressing_to(50, false),
        path: WalkPath::Random { among: (pages * args.percent / 100).max(1), seed: args.seed },
        visits: if args.count == 0 { u64::MAX } else { args.count.div_ceil(threads as u64) },
        rate: args.rate,
        work: 1,
        write_every: args.write_every,
        progress: Duration::from_millis(args.progress_ms),
    }
    .run()
}
