//! `firn-guest synthetic`: the synthetic workload of Halite, section 8.1.
//!
//! Memory is allocated at a stride of 16 pages and the working set is a quarter of it, so the
//! working set is the first four pages of every sixteen. Sixteen neighbours in physical memory then
//! contain four pages that are used: grouping by physical address reads twelve useless pages every
//! time (the paper: 36 % of prefetched pages used, 14,501 reads; by locality 83 % and 6,908).

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;

use super::MemoryWalk;
use super::path::WalkPath;
use crate::stamp::StampStyle;
use crate::threads;

/// Walks through a working set spread over memory, one thread per vCPU (Halite, section 8.1).
#[derive(Args, Clone, Debug)]
pub struct SyntheticArgs {
    /// Threads; one per vCPU unless given.
    #[arg(long)]
    threads: Option<usize>,
    /// Memory of all threads together.
    #[arg(long, default_value_t = 1024)]
    mib: usize,
    /// The part of it that is visited, in MiB.
    #[arg(long, default_value_t = 256)]
    working_set_mib: usize,
    /// Pages from one group of visited pages to the next.
    #[arg(long, default_value_t = 16)]
    stride: usize,
    /// The percentage of its size to which a page compresses.
    #[arg(long, default_value_t = 50)]
    compresses_to: u8,
    /// Pages visited by all threads together; 0 runs for ever.
    #[arg(long, default_value_t = 100_000)]
    count: u64,
    /// Pages that each thread visits per second; 0 is as fast as possible.
    #[arg(long, default_value_t = 0.0)]
    rate: f64,
    /// How often a page is read per visit: more raises the share of the guest's own work.
    #[arg(long, default_value_t = 1)]
    work: u32,
    /// Milliseconds between progress lines; 0 for none.
    #[arg(long, default_value_t = 500)]
    progress_ms: u64,
}

/// Walks to the end. False if a page was wrong.
pub fn run(args: &SyntheticArgs) -> Result<bool> {
    ensure!(
        (1..=args.mib).contains(&args.working_set_mib),
        "the working set is part of the memory"
    );
    let threads = args.threads.unwrap_or_else(threads::vcpu_count).max(1);
    let used = (args.stride * args.working_set_mib / args.mib).max(1);
    MemoryWalk {
        threads,
        pages: args.mib * 256 / threads / args.stride * args.stride,
        style: StampStyle::compressing_to(args.compresses_to, false),
        path: WalkPath::Stride { stride: args.stride, used },
        visits: if args.count == 0 { u64::MAX } else { args.count.div_ceil(threads as u64) },
        rate: args.rate,
        work: args.work,
        write_every: 0,
        progress: Duration::from_millis(args.progress_ms),
    }
    .run()
}
