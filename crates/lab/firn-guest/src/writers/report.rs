//! The reply of the writers.

use serde::{Deserialize, Serialize};

/// Maximum number of wrong pages that are described one by one.
pub const DESCRIBED_MAX: usize = 8;

/// The state of all regions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WritersReport {
    /// Pages of all regions.
    pub pages: u64,
    /// Pages written so far, rewrites counted.
    pub writes: u64,
    /// Pages found wrong so far, in verifications and before being overwritten.
    pub wrong: u64,
    /// The first of them, region by region, in words.
    #[serde(rename = "told")]
    pub problems: Vec<String>,
    /// Writes of each region.
    pub region_writes: Vec<u64>,
}

/// The state of one region.
#[derive(Clone, Debug, Default)]
pub struct RegionReport {
    /// Pages of the region.
    pub pages: u64,
    /// Pages written so far.
    pub writes: u64,
    /// Pages found wrong so far.
    pub wrong: u64,
    /// The first of them in words.
    pub problems: Vec<String>,
}

impl WritersReport {
    /// Adds up regions.
    pub fn from_regions(regions: Vec<RegionReport>) -> Self {
        let mut report = Self::default();
        for region in regions {
            report.pages += region.pages;
            report.writes += region.writes;
            report.wrong += region.wrong;
            report.problems.extend(region.problems);
            report.region_writes.push(region.writes);
        }
        report
    }
}
