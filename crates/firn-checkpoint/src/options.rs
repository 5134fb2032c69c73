//! What a user may choose about a save.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use firn_image::Codec;
use firn_types::BlockSize;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How guest memory is kept as it was at the cut while it is being written out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Copy-on-access: the guest runs on, and each memory block is copied at its first touch or by the sweep,
    /// whichever comes first (Halite, section 7.1).
    #[default]
    Trace,
    /// Copy-on-write: as [`Self::Trace`], but only writes are followed. The guest's reads cost nothing, and its memory may be
    /// private to the hypervisor; what the guest uses is not learned (Sun, Blough, section 4.3).
    Cow,
    /// Pre-copy: copied while the guest runs, and what it writes meanwhile again, until little is left for the pause. The
    /// guest waits for nothing but the pause, which is as long as it writes much. Its writes are followed on afterwards,
    /// so that the next checkpoint can be of what changed.
    PreCopy,
    /// The guest stands still until everything is copied.
    Stop,
}

/// A strategy's name that is not one.
#[derive(Debug, Error)]
#[error("no save strategy is called {0:?}; there are `trace`, `cow`, `pre-copy` and `stop`")]
pub struct StrategyError(String);

impl FromStr for Strategy {
    type Err = StrategyError;

    fn from_str(name: &str) -> Result<Self, StrategyError> {
        match name {
            "trace" => Ok(Self::Trace),
            "cow" => Ok(Self::Cow),
            "pre-copy" => Ok(Self::PreCopy),
            "stop" => Ok(Self::Stop),
            other => Err(StrategyError(other.to_owned())),
        }
    }
}

/// How it is found out which memory a restore should bring in first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Estimator {
    /// By what the guest touches after the cut, in that order (Zhang et al., VEE 2011, section 4.1.2).
    #[default]
    Trace,
    /// By what it used before the cut (section 4.1.1 there): all there is to go by if it does not run afterwards.
    AccessBits,
}

/// An estimator's name that is not one.
#[derive(Debug, Error)]
#[error("no working set estimator is called {0:?}; there are `trace` and `access-bits`")]
pub struct EstimatorError(String);

impl FromStr for Estimator {
    type Err = EstimatorError;

    fn from_str(name: &str) -> Result<Self, EstimatorError> {
        match name {
            "trace" => Ok(Self::Trace),
            "access-bits" => Ok(Self::AccessBits),
            other => Err(EstimatorError(other.to_owned())),
        }
    }
}

/// Options of one save.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SaveOptions {
    /// How memory is kept as it was.
    pub strategy: Strategy,
    /// How memory blocks are compressed.
    pub codec: Codec,
    /// Pages in a memory block.
    pub block_size: BlockSize,
    /// Bytes in a locality block: a power of two from 16 KiB to 1 MiB.
    pub locality_block_bytes: u32,
    /// Threads that compress.
    pub compressors: usize,
    /// Whether the sweep yields to the guest.
    pub throttle: bool,
    /// How long the guest is watched after the cut at least, though everything may be copied sooner: what it touches
    /// is what a restore brings in first ([`Estimator::Trace`], and no other).
    pub watch: Duration,
    /// How long it is watched at most, while it touches more and more.
    pub watch_max: Duration,
    /// Bytes of copied, not yet compressed memory blocks held at most. A guest that touches memory faster than it can
    /// be written waits for a buffer.
    pub buffer_bytes_max: usize,
    /// Of so many address spaces, those that vCPUs used last, what was written is copied first, and may be written again without a
    /// fault ([`Strategy::Cow`]; Sun, Blough, section 4.4).
    pub first_spaces: usize,
    /// Leaves the VM stopped at the cut: a suspend rather than a checkpoint. Needs [`Strategy::Stop`].
    pub leave_stopped: bool,
    /// For tests: while paused, also copy all of RAM to this file, flat, in the order of the RAM page space. The
    /// image must equal it.
    pub reference: Option<PathBuf>,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self {
            strategy: Strategy::default(),
            codec: Codec::default(),
            block_size: BlockSize::default(),
            locality_block_bytes: 64 << 10,
            compressors: default_compressors(),
            throttle: true,
            watch: Duration::from_secs(1),
            watch_max: Duration::from_secs(4),
            buffer_bytes_max: 64 << 20,
            first_spaces: 0,
            leave_stopped: false,
            reference: None,
        }
    }
}

fn default_compressors() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(1, 4))
}
