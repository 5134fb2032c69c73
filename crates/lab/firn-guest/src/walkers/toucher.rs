//! `firn-guest toucher`: every vCPU touches pages of its own, and only those.
//!
//! Each page records its writer ([`crate::stamp::read_stamp`]), so a check of an image shows
//! whether one vCPU touched all pages of one locality block.

use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};

use super::MemoryWalk;
use super::path::WalkPath;
use crate::stamp::StampStyle;
use crate::threads;

/// Touches memory from every vCPU, each its own pages only.
#[derive(Args, Clone, Debug)]
pub struct ToucherArgs {
    /// Threads; one per vCPU unless given.
    #[arg(long)]
    threads: Option<usize>,
    /// Memory of each thread.
    #[arg(long, default_value_t = 32)]
    mib_each: usize,
    /// The order of the pages.
    #[arg(long, value_enum, default_value_t = TouchOrder::Forwards)]
    order: TouchOrder,
    /// Chooses a shuffled order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How often each page is touched; 0 runs for ever.
    #[arg(long, default_value_t = 0)]
    passes: u64,
    /// Pages that each thread touches per second; 0 is as fast as possible.
    #[arg(long, default_value_t = 0.0)]
    rate: f64,
    /// Write every page, not only read it.
    #[arg(long)]
    write: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TouchOrder {
    Forwards,
    Backwards,
    Shuffled,
}

/// Runs to the end. False if a page was wrong.
pub fn run(args: &ToucherArgs) -> Result<bool> {
    let pages = (args.mib_each * 256).max(1);
    MemoryWalk {
        threads: args.threads.unwrap_or_else(threads::vcpu_count).max(1),
        pages,
        style: StampStyle::compressing_to(50, false),
        path: match args.order {
            TouchOrder::Forwards => WalkPath::Forwards,
            TouchOrder::Backwards => WalkPath::Backwards,
            TouchOrder::Shuffled => WalkPath::Shuffled { seed: args.seed },
        },
        visits: if args.passes == 0 { u64::MAX } else { args.passes * pages as u64 },
        rate: args.rate,
        work: 1,
        write_every: args.write.into(),
        progress: Duration::from_secs(1),
    }
    .run()
}
