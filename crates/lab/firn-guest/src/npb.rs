//! `firn-guest npb`: EP or IS of the NAS Parallel Benchmarks, alone or among several guests (see
//! `firn_npb`).
//!
//! ```text
//!   {"begun":true,"rank":0}
//!   {"done":true,"program":"is","class":"S","rank":0,"size":2,"seconds":0.41,"right":true}
//! ```

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use firn_npb::{Communicator, PeerGroup, ProblemClass, SingleProcess, ep, is};
use serde_json::json;

/// Runs a benchmark. Exit code 1 if its result is not the specified one.
#[derive(Args, Clone, Debug)]
pub struct NpbArgs {
    /// The benchmark.
    program: NpbProgram,
    /// S, W or A.
    #[arg(long, default_value = "S")]
    class: ProblemClass,
    /// Addresses of all processes, by rank; without any, the benchmark runs alone.
    #[arg(long, value_delimiter = ',')]
    peers: Vec<SocketAddr>,
    /// The rank of this process.
    #[arg(long, default_value_t = 0)]
    rank: usize,
}

/// A benchmark.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum NpbProgram {
    /// Embarrassingly parallel: computes, and hardly communicates.
    Ep,
    /// Integer sort: sends most of its keys to other processes.
    Is,
}

impl NpbProgram {
    fn name(self) -> &'static str {
        match self {
            Self::Ep => "ep",
            Self::Is => "is",
        }
    }

    fn run_benchmark(self, class: ProblemClass, talk: &mut impl Communicator) -> Result<bool> {
        Ok(match self {
            Self::Ep => ep::run(class, talk)?.is_right,
            Self::Is => is::run(class, talk)?.is_right,
        })
    }
}

/// Runs to the end. False if the result is wrong.
///
/// # Errors
/// If another process can't be reached, or has ended.
pub fn run(args: &NpbArgs) -> Result<bool> {
    let mut peers = match args.peers.len() {
        0 if args.rank > 0 => bail!("there is no rank {} without --peers", args.rank),
        0 => None,
        _ => Some(PeerGroup::connect_all(args.rank, &args.peers)?),
    };
    // All processes are connected: the time to start them does not count.
    println!("{}", json!({ "begun": true, "rank": args.rank }));
    let since = Instant::now();
    let right = match &mut peers {
        None => args.program.run_benchmark(args.class, &mut SingleProcess)?,
        Some(peers) => args.program.run_benchmark(args.class, peers)?,
    };
    println!(
        "{}",
        json!({ "done": true, "program": args.program.name(), "class": format!("{:?}", args.class),
            "rank": args.rank, "size": args.peers.len().max(1),
            "seconds": since.elapsed().as_secs_f64(), "right": right })
    );
    Ok(right)
}
