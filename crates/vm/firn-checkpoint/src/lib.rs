//! Checkpoint: saves a running VM to an image.
//!
//! The default strategy is copy-on-access (Halite, section 7.1, where it is called *lazy save*):
//! the vCPUs are paused for the time that saving device state takes, and memory is copied while the
//! guest runs. Each memory block is copied once, either by the fault handler, when the guest
//! touches the block, or by the background sweep, whichever is first. The image equals guest memory
//! at the instant of the pause, exactly.
//!
//! | module | its task |
//! |---|---|
//! | `save` | the order of events, and what is undone when one fails |
//! | `cut` | the pause |
//! | `traced_memory`, `trace` | protecting, unmapping, answering faults (system calls by `firn-memory`) |
//! | `ledger` | which thread copies a block, and when it may be released |
//! | `discards` | what a guest gives back during a save, and whether it was lost |
//! | `written` | what to protect again, and when that is little enough to pause |
//! | `lane`, `worker` | which vCPU a first touch belongs to |
//! | `order`, `spaces`, `sweep_throttle`, `sweep`, `stop_and_copy` | what the sweep copies, in which order, how fast |
//! | `pre_copy` | copying in rounds, and what was written since the last checkpoint |
//! | `access_bits` | which pages the guest used before a suspend, after which nothing runs that could be traced |
//! | `pipeline` | compressing, packing, writing |
//! | `duty_cycle` | when background work pauses, because vCPUs wait for processors |

#![forbid(unsafe_code)]

mod access_bits;
mod auxiliary;
mod buffers;
mod context;
mod cut;
mod discards;
mod duty_cycle;
mod error;
mod lane;
mod ledger;
mod options;
mod order;
mod pipeline;
mod pre_copy;
mod reference;
mod report;
mod save;
mod spaces;
mod stop_and_copy;
mod sweep;
mod sweep_throttle;
mod touches;
mod trace;
mod traced_memory;
mod worker;
mod written;

pub use access_bits::{AccessScanner, watch_accesses};
pub use context::{DescribeVm, SaveContext, SavedState};
pub use cut::{SaveSteps, WithoutSaveSteps};
pub use discards::check_discards;
pub use error::SaveError;
pub use options::{EstimatorError, SaveOptions, SaveStrategy, StrategyError, WorkingSetEstimator};
pub use pre_copy::WriteTracker;
pub use report::{FaultCounts, PauseReport, SaveProgress, SaveReport};
pub use save::save_vm;
