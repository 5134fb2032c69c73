//! `firn-guest mem-report`: the guest kernel's report on its memory, as one JSON line.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, Result};
use serde_json::json;

/// Prints the report. Sizes in KiB, as in /proc/meminfo(5); free blocks per zone and order from
/// /proc/buddyinfo.
pub fn run() -> Result<()> {
    let meminfo = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let buddies = fs::read_to_string("/proc/buddyinfo").unwrap_or_default();
    let report = json!({ "kib": parse_sizes(&meminfo), "free_blocks": free_blocks(&buddies) });
    println!("{report}");
    Ok(())
}

fn parse_sizes(meminfo: &str) -> BTreeMap<&str, u64> {
    meminfo
        .lines()
        .filter_map(|line| {
            let (name, rest) = line.split_once(':')?;
            Some((name, rest.split_whitespace().next()?.parse().ok()?))
        })
        .collect()
}

fn free_blocks(buddyinfo: &str) -> BTreeMap<&str, Vec<u64>> {
    buddyinfo
        .lines()
        .filter_map(|line| {
            let (_, zone) = line.split_once("zone")?;
            let mut words = zone.split_whitespace();
            Some((words.next()?, words.filter_map(|word| word.parse().ok()).collect()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_writes() {
        assert_eq!(parse_sizes("MemTotal:  1000 kB\nHugePages_Total: 2\n")["MemTotal"], 1000);
        assert_eq!(free_blocks("Node 0, zone    DMA32   3  4  5\n")["DMA32"], [3, 4, 5]);
    }
}
