//! The disks of a VM that belong to its epochs, where the VM runs (`firn-disks`).
//!
//! ```text
//!   seed    each disk copied while the VM runs, then what it changed while memory is copied      epoch 0
//!   pause   the hypervisor is told to stop: drain ... it stands still: cut                       the log of an epoch
//! ```
//!
//! A hypervisor that is told to stop waits for its disks first, so their logs have no bound from that moment until the cut. It is lifted
//! after the hypervisor was told, and also where the VM is to stand still without a cut.

use std::sync::Arc;

use firn_cluster::Epoch;
use firn_disks::{Change, Disk, DiskError};

/// Bytes of memory that the log of a disk takes in an epoch before its changes wait.
const LOG_BYTES: usize = 32 << 20;

/// All disks of a VM that Firn serves, with their ids. Nothing is noted any more when it is dropped.
#[derive(Default)]
pub struct Disks(Vec<(String, Arc<Disk>)>);

impl Disks {
    /// These, in the order in which the backup knows them.
    pub fn new(disks: Vec<(String, Arc<Disk>)>) -> Self {
        Self(disks)
    }

    /// Whether this is one of them.
    pub fn has(&self, id: &str) -> bool {
        self.0.iter().any(|(it, _)| it == id)
    }

    /// Their numbers.
    pub(crate) fn numbers(&self) -> std::ops::Range<u32> {
        0..self.0.len() as u32
    }

    /// The backup has nothing of them.
    pub(crate) fn begin(&self) {
        self.0.iter().for_each(|(_, disk)| disk.protect(LOG_BYTES));
    }

    /// The next step of copying one, and whether all of it has been read.
    pub(crate) fn seed(&self, number: u32) -> Result<(Vec<Change>, bool), DiskError> {
        let Some((_, disk)) = self.0.get(number as usize) else { return Ok((Vec::new(), true)) };
        disk.seed().map(|seed| (seed.changes, seed.is_whole))
    }

    /// Bytes that have been read of all, and how many there are.
    pub(crate) fn seeded(&self) -> (u64, u64) {
        let copied = |disk: &Arc<Disk>| disk.copied().unwrap_or_default();
        self.0.iter().fold((0, 0), |(done, all), (_, it)| (done + copied(it), all + it.size()))
    }

    /// The hypervisor has been told to stop the VM.
    pub(crate) fn drain(&self) {
        self.0.iter().for_each(|(_, disk)| disk.drain());
    }

    /// The VM goes on, and nothing was cut.
    pub(crate) fn go_on(&self) {
        self.0.iter().for_each(|(_, disk)| disk.go_on());
    }

    /// The VM stands still at the end of an epoch: what it changed.
    pub(crate) fn cut(&self, epoch: Epoch) -> Result<Vec<Vec<Change>>, DiskError> {
        let cut = |(_, disk): &(String, Arc<Disk>)| {
            let log = disk.cut()?;
            debug_assert_eq!(log.epoch, epoch, "disks and memory are cut together");
            Ok(log.changes)
        };
        self.0.iter().map(cut).collect()
    }

    /// Nothing is noted any more.
    pub(crate) fn release(&self) {
        self.0.iter().for_each(|(_, disk)| disk.release());
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        self.release();
    }
}

impl std::fmt::Debug for Disks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(id, _)| id)).finish()
    }
}
