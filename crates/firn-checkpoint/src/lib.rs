//! Saving a running VM to an image.
//!
//! The default strategy is copy-on-access (*lazy save*; Halite, section 7.1): the vCPUs stand still for the moment
//! that device state takes, and memory is copied while the guest runs on. Each memory block is copied once, by
//! whoever comes first: the fault handler, when the guest touches it, or the background sweep. The image equals guest
//! memory at the instant of the pause, exactly.
//!
//! | module | what it decides or does |
//! |---|---|
//! | `save` | the order of events, and what is undone when one fails |
//! | `cut` | the pause |
//! | `armed`, `trace` | protecting, unmapping, answering faults (system calls by `firn-memory`) |
//! | `ledger` | who copies a block, and when it may be released |
//! | `written` | what to protect again, and when that is little enough to pause |
//! | `lane`, `worker` | which vCPU a first touch belongs to |
//! | `order`, `spaces`, `pace`, `sweep`, `still` | what the sweep copies, in which order, how fast |
//! | `pre_copy` | copying in rounds, and what was written since the last checkpoint |
//! | `access_bits` | what the guest used before the pause, for when nothing runs after it |
//! | `pipeline` | compressing, packing, writing |
//! | `turns`, `demand` | when all of that rests, by what vCPUs have to do |

#![forbid(unsafe_code)]

mod access_bits;
mod armed;
mod buffers;
mod cut;
mod demand;
mod lane;
mod ledger;
mod options;
mod order;
mod pace;
mod pipeline;
mod pre_copy;
mod reference;
mod report;
mod save;
mod spaces;
mod still;
mod sweep;
mod touches;
mod trace;
mod turns;
mod worker;
mod written;

pub use access_bits::{Scanner, watch};
pub use cut::{NoSteps, Steps};
pub use options::{Estimator, EstimatorError, SaveOptions, Strategy, StrategyError};
pub use pre_copy::Tracker;
pub use report::{FaultCounts, Pause, Progress, SaveReport};
pub use save::{Describe, SaveContext, SaveError, save};
