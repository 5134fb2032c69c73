//! Options of every verb that begins to look after a VM: whether to keep track of what its guest uses.

use clap::Args as ClapArgs;
use firn_checkpoint::{Estimator, EstimatorError};

use crate::units;

/// How it is known what a guest uses.
#[derive(Debug, ClapArgs)]
pub struct WorkingSetArgs {
    /// Keep track of what the guest uses: access-bits. Without it, a suspend watches the guest for a second first.
    #[arg(long, value_name = "HOW", value_parser = while_running)]
    working_set: Option<Estimator>,
    /// How fast this host restores memory, in bytes a second: what the guest uses in the time of a restore is kept track of.
    #[arg(long, value_name = "SIZE", default_value = "100M", requires = "working_set", value_parser = speed)]
    restore_speed: u64,
}

impl WorkingSetArgs {
    /// Bytes to scan a second, if anything is to be scanned.
    pub fn access_bits(&self) -> Option<u64> {
        self.working_set.map(|_| self.restore_speed)
    }
}

/// Tracing is done by a checkpoint; only access bits are scanned all the time.
fn while_running(text: &str) -> Result<Estimator, String> {
    match text.parse() {
        Ok(Estimator::AccessBits) => Ok(Estimator::AccessBits),
        Ok(Estimator::Trace) => {
            Err("a checkpoint traces by itself; what can be kept track of is `access-bits`"
                .to_owned())
        }
        Err(_) => Err(format!("{text:?} can't be kept track of; what can is `access-bits`")),
    }
}

fn speed(text: &str) -> Result<u64, String> {
    match units::parse_bytes(text)? {
        slow if slow < 1 << 20 => Err("at least 1M".to_owned()),
        bytes_per_s => Ok(bytes_per_s),
    }
}

/// An estimator by its name.
pub fn estimator(text: &str) -> Result<Estimator, String> {
    text.parse().map_err(|error: EstimatorError| error.to_string())
}
