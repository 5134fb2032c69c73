//! Reports of a save to its caller: the progress while it runs, the facts at its end.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::lane::FaultAttribution;

/// The progress of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveProgress {
    /// Memory blocks copied or known to need no copy.
    pub blocks_done: u32,
    /// The total number of memory blocks.
    pub blocks_total: u32,
    /// Bytes written to the image.
    pub bytes_written: u64,
}

/// Faults of one save, by how they were attributed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultCounts {
    /// Before the cut, while RAM was being write-protected.
    pub while_arming: u64,
    /// After the cut, by a vCPU's own thread.
    pub by_vcpu: u64,
    /// After the cut, by a kernel worker; attributed to a vCPU by the processor both ran on.
    #[serde(default)]
    pub by_worker: u64,
    /// After the cut, by a kernel worker; attributed to a vCPU by a neighbouring block.
    pub by_neighbour: u64,
    /// After the cut, by devices and everything else.
    pub by_others: u64,
}

impl FaultCounts {
    pub(crate) fn count_fault(&mut self, how: FaultAttribution) {
        match how {
            FaultAttribution::Thread => self.by_vcpu += 1,
            FaultAttribution::Worker => self.by_worker += 1,
            FaultAttribution::Neighbour => self.by_neighbour += 1,
            FaultAttribution::None => self.by_others += 1,
        }
    }

    /// Faults after the cut.
    pub fn after_cut(&self) -> u64 {
        self.by_vcpu + self.by_worker + self.by_neighbour + self.by_others
    }
}

/// The parts of the pause, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PauseReport {
    /// The whole pause, by the hypervisor's own events: from when it had stopped the vCPUs until it
    /// started them. Where it sent no events, from the command to stop until it reported that the
    /// VM runs.
    pub downtime_ms: f64,
    /// Saving device state; and, where commands stop the VM, stopping the vCPUs. If the hypervisor
    /// saves while Firn works, only the time until it begins to.
    pub device_state_ms: f64,
    /// Cloning the files of disks, where that can be done.
    #[serde(default)]
    pub clone_ms: f64,
    /// Copying the small RAM blocks beside guest RAM (video memory).
    pub aux_ms: f64,
    /// Write-protecting the pages that were written last.
    pub protect_ms: f64,
    /// Starting the vCPUs, until the hypervisor reported it.
    pub cont_ms: f64,
    /// Pages protected during the pause.
    pub protected_pages: u64,
}

/// Facts about a finished save.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SaveReport {
    /// The parts of the pause.
    pub pause: PauseReport,
    /// Rounds of re-protecting, or of copying, before the pause.
    pub rounds: u32,
    /// The total time for which the VM was paused before the cut: once in each round of copying, so
    /// that the requests of its devices end. In milliseconds.
    #[serde(default)]
    pub drained_ms: f64,
    /// Each of these pauses, in milliseconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub round_pauses_ms: Vec<f64>,
    /// From the command to the pause, in milliseconds.
    pub arm_ms: f64,
    /// From the command until every block was copied, in milliseconds; 0 where all are copied in the
    /// pause or before. The guest may be watched for longer.
    #[serde(default)]
    pub copied_ms: f64,
    /// From the command to the finished file, in milliseconds.
    pub total_ms: f64,
    /// Faults.
    pub faults: FaultCounts,
    /// The total number of memory blocks.
    pub blocks_total: u32,
    /// Memory blocks that the guest touched before the sweep reached them or after.
    pub blocks_touched: u32,
    /// Memory blocks that were copied before the guest wrote to them, and then unprotected
    /// ([`crate::SaveOptions::first_spaces`]).
    #[serde(default)]
    pub blocks_let_go: u32,
    /// Whether the guest had touched all that it uses when everything was copied and the minimum
    /// watch time was over: of the blocks that it had touched by then, the share found in the last
    /// eighth of the time. None where that was not measured.
    #[serde(default)]
    pub found_late: Option<f64>,
    /// Size of the image, in bytes.
    pub image_bytes: u64,
    /// Memory blocks that equal those of the parent image, and are not stored in this one.
    #[serde(default)]
    pub blocks_inherited: u32,
}

pub(crate) fn to_ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}
