//! Two of the NAS Parallel Benchmarks, as loads for clusters of VMs: [`ep`] computes and hardly
//! communicates, [`is`] sorts and sends most of its keys to other processes in every iteration.
//!
//! Written from the specification (Bailey et al., "The NAS Parallel Benchmarks", RNR-94-007,
//! sections 2.3.1 and 2.3.5), with its problem sizes and verification values; a run reports whether
//! its result is the specified one. Processes communicate by [`PeerGroup`]: a TCP connection
//! between each two, which is what MPI would use between such VMs.

#![forbid(unsafe_code)]

pub mod ep;
pub mod is;
mod peers;
mod random;

use std::str::FromStr;

pub use peers::{Communicator, PeerGroup, PeersError, SingleProcess};

/// The size of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemClass {
    /// Sample.
    S,
    /// Workstation.
    W,
    /// The smallest full-sized class.
    A,
}

/// No class has this name.
#[derive(Debug, thiserror::Error)]
#[error("no class is called {0:?}; there are S, W and A")]
pub struct UnknownClass(String);

impl FromStr for ProblemClass {
    type Err = UnknownClass;

    fn from_str(name: &str) -> Result<Self, UnknownClass> {
        match name {
            "S" => Ok(Self::S),
            "W" => Ok(Self::W),
            "A" => Ok(Self::A),
            other => Err(UnknownClass(other.to_owned())),
        }
    }
}

/// The range of `total` items that process `rank` of `size` processes has.
fn part_of_rank(total: u64, rank: usize, size: usize) -> std::ops::Range<u64> {
    let at = |rank: usize| total * rank as u64 / size as u64;
    at(rank)..at(rank + 1)
}
