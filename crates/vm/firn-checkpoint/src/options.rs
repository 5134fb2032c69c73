//! Options of a save.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use firn_image::Codec;
use firn_types::BlockSize;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How the contents of guest memory at the cut are kept while they are written to the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SaveStrategy {
    /// Copy-on-access: the guest runs, and each memory block is copied at its first touch or by the
    /// sweep, whichever is first (Halite, section 7.1).
    #[default]
    Trace,
    /// Copy-on-write: as [`Self::Trace`], but only writes are traced. The guest's reads cost
    /// nothing, and its memory may be private to the hypervisor; the working set is not learned
    /// (Sun, Blough, section 4.3).
    Cow,
    /// Pre-copy: memory is copied while the guest runs, and pages that it writes in that time
    /// again, until little is left for the pause. The guest waits only in the pause, which is the
    /// longer the more it writes. Its writes are tracked afterwards too, so that the next
    /// checkpoint can consist of the dirty pages.
    PreCopy,
    /// The guest is paused until everything is copied.
    Stop,
}

/// A word that is not the name of a strategy.
#[derive(Debug, Error)]
#[error("no save strategy is called {0:?}; there are `trace`, `cow`, `pre-copy` and `stop`")]
pub struct StrategyError(String);

impl FromStr for SaveStrategy {
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

/// The method that finds the memory that a restore should read first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkingSetEstimator {
    /// By the touches of the guest after the cut, in their order (Zhang et al., VEE 2011, section
    /// 4.1.2).
    #[default]
    Trace,
    /// By the pages that it used before the cut (section 4.1.1 there): the only method if it does
    /// not run afterwards.
    AccessBits,
}

/// A word that is not the name of an estimator.
#[derive(Debug, Error)]
#[error("no working set estimator is called {0:?}; there are `trace` and `access-bits`")]
pub struct EstimatorError(String);

impl FromStr for WorkingSetEstimator {
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
    /// How the contents of memory at the cut are kept.
    pub strategy: SaveStrategy,
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
    /// The maximum of bytes that background work writes in a second, to the image and to copies of
    /// disks.
    pub bandwidth: Option<NonZeroU64>,
    /// The time in which the sweep is to end: once it is behind, it does not yield to the guest.
    pub finish_within: Option<Duration>,
    /// The minimum time for which the guest is watched after the cut, though everything may be
    /// copied sooner: a restore reads first what it touches in this time
    /// ([`WorkingSetEstimator::Trace`], and no other).
    pub watch: Duration,
    /// The maximum time for which it is watched, while it touches more and more.
    pub watch_max: Duration,
    /// Maximum number of bytes of copied memory blocks that are not compressed yet. A guest that
    /// touches memory faster than it can be written waits for a buffer.
    pub buffer_bytes_max: usize,
    /// The number of address spaces, of those that vCPUs used last, whose written pages are copied
    /// first, and may then be written again without a fault ([`SaveStrategy::Cow`]; Sun, Blough,
    /// section 4.4).
    pub first_spaces: usize,
    /// Leaves the VM stopped at the cut: a suspend rather than a checkpoint. Needs
    /// [`SaveStrategy::Stop`].
    pub leave_stopped: bool,
    /// For tests: while paused, also copy all of RAM to this file, flat, in the order of the RAM
    /// page space. The image must equal it.
    pub reference: Option<PathBuf>,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self {
            strategy: SaveStrategy::default(),
            codec: Codec::default(),
            block_size: BlockSize::default(),
            locality_block_bytes: 64 << 10,
            compressors: default_compressors(),
            throttle: true,
            bandwidth: None,
            finish_within: None,
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
