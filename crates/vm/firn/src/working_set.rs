//! Options of every verb that begins to manage a VM: whether to scan the guest's accesses all the
//! time.

use clap::Args as ClapArgs;
use firn_checkpoint::WorkingSetEstimator;

use crate::choices::{Choice, parse_choice};
use crate::units;

/// A checkpoint traces by itself; only access bits are scanned all the time.
const ESTIMATORS: &[Choice] = &[("access-bits", "by the access bits of the guest's page tables")];

/// The estimator of the guest's working set.
#[derive(Debug, ClapArgs)]
pub struct WorkingSetArgs {
    /// Scan the guest's accesses all the time, so that a later suspend knows its working set. Without
    /// this option a suspend first scans for a second.
    #[arg(long, value_name = "HOW", value_parser = parse_choice::<WorkingSetEstimator>(ESTIMATORS))]
    working_set: Option<WorkingSetEstimator>,
    /// The speed of the scan, in bytes a second. Give the speed at which this host restores memory:
    /// then one round of the scan takes as long as a restore of all memory. The working set is the
    /// memory that the guest used during the last round.
    #[arg(long, value_name = "SIZE", default_value = "100M", requires = "working_set", value_parser = parse_speed)]
    restore_speed: u64,
}

impl WorkingSetArgs {
    /// Bytes to scan a second; `None` if nothing is scanned.
    pub fn access_bits(&self) -> Option<u64> {
        self.working_set.map(|_| self.restore_speed)
    }
}

fn parse_speed(text: &str) -> Result<u64, String> {
    match units::parse_bytes(text)? {
        slow if slow < 1 << 20 => Err("at least 1M".to_owned()),
        bytes_per_s => Ok(bytes_per_s),
    }
}
