//! What a clone's guest RAM uses of the host's memory, from `/proc/PID/smaps` (proc(5)).
//!
//! ```text
//!   7f1c40000000-7f1c80000000 rw-p 00000000 00:01 2049    /memfd:firn-template (deleted)
//!   Rss:              139012 kB       pages in the page tables
//!   Pss:               34918 kB       the same, a shared page counted once for all that have it
//!   Anonymous:          1204 kB       of Rss: written, so this clone's own
//! ```

use std::fs;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::records::journal::HypervisorRecord;

/// The use of memory by guest RAM, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// Pages of the template.
    pub shared_bytes: u64,
    /// Pages that the guest has written.
    pub private_bytes: u64,
    /// The private pages, and this clone's part of the shared ones.
    pub pss_bytes: u64,
}

impl MemoryUse {
    /// Reads it; `None` if the process has ended or can't be inspected.
    pub(crate) fn of_hypervisor(record: &HypervisorRecord) -> Option<Self> {
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", record.process.pid)).ok()?;
        let address = |id: &str| record.locations.iter().find(|(it, _)| it == id).map(|it| it.1.0);
        let range = |region: &firn_types::RamRegion| {
            let start = address(&region.id)?;
            Some(start..start + region.byte_len())
        };
        let ranges: Vec<_> = record.map.regions().iter().filter_map(range).collect();
        Some(Self::sum_mappings(&smaps, &ranges))
    }

    /// The sum over the mappings that begin in one of these ranges.
    fn sum_mappings(smaps: &str, ranges: &[Range<u64>]) -> Self {
        let (mut sum, mut is_ram) = (Self::default(), false);
        for line in smaps.lines() {
            let Some((key, value)) = line.split_once(char::is_whitespace) else { continue };
            let kib = || value.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) << 10;
            match key {
                "Rss:" if is_ram => sum.shared_bytes += kib(),
                "Pss:" if is_ram => sum.pss_bytes += kib(),
                "Anonymous:" if is_ram => sum.private_bytes += kib(),
                _ => {
                    let start =
                        key.split_once('-').map(|(start, _)| u64::from_str_radix(start, 16));
                    if let Some(Ok(start)) = start {
                        is_ram = ranges.iter().any(|range| range.contains(&start));
                    }
                }
            }
        }
        sum.shared_bytes = sum.shared_bytes.saturating_sub(sum.private_bytes);
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_ram_are_summed() {
        let mapping = |start: u64, end: u64| {
            format!(
                "{start:x}-{end:x} rw-p 00000000 00:01 2049    /memfd:firn-template (deleted)\n\
                 Size:   64 kB\nRss:    48 kB\nPss:    20 kB\nPss_Dirty:   9 kB\nAnonymous:   8 kB\n"
            )
        };
        let smaps = mapping(0x1000, 0x2000) + &mapping(0x2000, 0x4000) + &mapping(0x8000, 0x9000);
        let found = MemoryUse::sum_mappings(&smaps, &[0x1000..0x2000, 0x2000..0x4000]);
        let (shared_bytes, private_bytes, pss_bytes) = (80 << 10, 16 << 10, 40 << 10);
        assert_eq!(found, MemoryUse { shared_bytes, private_bytes, pss_bytes });
    }
}
