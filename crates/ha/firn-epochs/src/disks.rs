//! Epoch disks: the disks of a VM that are replicated with its epochs, at the primary
//! (`firn-disks`).
//!
//! ```text
//!   seed    each disk is copied while the VM runs, then its changes while memory is copied
//!   pause   the hypervisor is ordered to stop: begin_drain ... VM paused: cut_logs
//! ```
//!
//! A hypervisor that is ordered to stop waits for its disks first, so their logs have no bound from
//! that moment until the cut. The bound is lifted after the hypervisor got the order, and also if
//! the VM is paused without a cut.
//!
//! Some of them Firn serves, others are mirrored by jobs of the hypervisor
//! ([`MirrorJobs`](crate::guest::MirrorJobs)).

use std::sync::Arc;

use firn_cluster::Epoch;
use firn_disks::{DiskChange, DiskError, LoggedDisk};
use firn_vmm::Drive;

/// The bytes of memory that the log of a disk may take in an epoch before changes have to wait.
const LOG_BYTES: usize = 32 << 20;

/// All replicated disks of a VM, with QEMU's names for them. Dropping it ends the logging.
#[derive(Default)]
pub struct EpochDisks(Vec<(String, Arc<LoggedDisk>)>);

impl EpochDisks {
    /// These disks, in the order in which the backup numbers them.
    pub fn new(disks: Vec<(String, Arc<LoggedDisk>)>) -> Self {
        Self(disks)
    }

    /// Whether a drive of the VM is among them: by its own name, or by that of its node.
    pub fn contains_drive(&self, drive: &Drive) -> bool {
        self.0.iter().any(|(name, _)| *name == drive.name || *name == drive.node)
    }

    /// Records how far the job has come that mirrors the disk of this name.
    pub(crate) fn record_fill(&self, name: &str, copied: u64, is_whole: bool) {
        let named = self.0.iter().filter(|(it, _)| it == name);
        named.for_each(|(_, disk)| disk.record_fill(copied, is_whole));
    }

    /// The numbers of the disks.
    pub(crate) fn disk_numbers(&self) -> std::ops::Range<u32> {
        0..self.0.len() as u32
    }

    /// Begins a protection, for a backup that has no copy of them.
    pub(crate) fn begin_protection(&self) {
        self.0.iter().for_each(|(_, disk)| disk.begin_protection(LOG_BYTES));
    }

    /// Takes the next seed step of one disk. Also returns whether all of it has been read.
    pub(crate) fn seed_step(&self, number: u32) -> Result<(Vec<DiskChange>, bool), DiskError> {
        let Some((_, disk)) = self.0.get(number as usize) else { return Ok((Vec::new(), true)) };
        disk.seed_step().map(|seed| (seed.changes, seed.is_whole))
    }

    /// The number of bytes that have been read of all disks, and of all bytes.
    pub(crate) fn seeded_bytes(&self) -> (u64, u64) {
        let copied = |disk: &Arc<LoggedDisk>| disk.seeded_bytes().unwrap_or_default();
        self.0.iter().fold((0, 0), |(done, all), (_, it)| (done + copied(it), all + it.size()))
    }

    /// Lifts the bounds: the hypervisor has been ordered to stop the VM.
    pub(crate) fn begin_drain(&self) {
        self.0.iter().for_each(|(_, disk)| disk.begin_drain());
    }

    /// Restores the bounds: the VM runs again, and there was no cut.
    pub(crate) fn cancel_drain(&self) {
        self.0.iter().for_each(|(_, disk)| disk.cancel_drain());
    }

    /// Cuts the logs at the end of an epoch, while the VM is paused, and returns the changes of
    /// each disk.
    pub(crate) fn cut_logs(&self, epoch: Epoch) -> Result<Vec<Vec<DiskChange>>, DiskError> {
        let cut = |(_, disk): &(String, Arc<LoggedDisk>)| {
            let log = disk.cut_log()?;
            debug_assert_eq!(log.epoch, epoch, "disks and memory are cut together");
            Ok(log.changes)
        };
        self.0.iter().map(cut).collect()
    }

    /// Ends the protection, and logging with it.
    pub(crate) fn end_protection(&self) {
        self.0.iter().for_each(|(_, disk)| disk.end_protection());
    }
}

impl Drop for EpochDisks {
    fn drop(&mut self) {
        self.end_protection();
    }
}

impl std::fmt::Debug for EpochDisks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(id, _)| id)).finish()
    }
}
