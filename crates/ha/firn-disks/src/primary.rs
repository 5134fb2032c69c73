//! Primary disk: records the changes of a disk in a log for each epoch. Pure: changes in, logs out.
//!
//! ```text
//!              begin_protection           whole, cut_log            cut_log
//!   unprotected ----------> seeding -------------------------> epoch 2 -----> epoch 3 ...
//!        ^                     |                                  |
//!        '---------------------+---------- end_protection --------'
//! ```
//!
//! While the disk is copied to the standby (*seeding*, epoch 0), a change is logged only as far as
//! it lies in the range that was copied already. The rest will be read later.
//!
//! ```text
//!   0            seeded          size
//!   |###############|..............|
//!        [ log  ]
//!              [ log |   no   ]         of a change across the boundary, the first part
//! ```
//!
//! The boundary is advanced *before* a piece is read, so a write during the read is logged. The
//! logged changes are sent after the pieces that were read before them, so the standby ends up with
//! the newer data.
//!
//! A *mirrored* disk stays where it is, and Firn can't read it: a job of the hypervisor sends the
//! copy, and each write of the guest, in an order with the same result. So all changes are logged
//! from the beginning, and the seed is whole when the job reports that it has copied everything. The
//! standby's disk begins with zeros, and the job sends zeros for all of it first. Zeros where only
//! zeros have been logged are not logged again.

use std::ops::Range;

use firn_cluster::Epoch;
use thiserror::Error;

use crate::change::DiskChange;
use crate::written::WrittenPieces;

/// Why a log can't be returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PrimaryDiskError {
    /// The disk is not protected, and no changes are logged.
    #[error("the disk is not protected any more: protect the VM anew")]
    Unprotected,
    /// The standby has no whole copy to which a log could be applied.
    #[error(
        "the standby has {copied} of the disk's {size} bytes: an epoch can't end before it has all"
    )]
    Seeding {
        /// The number of bytes that were copied.
        copied: u64,
        /// The size of the disk.
        size: u64,
    },
    /// The disk is seeded only in epoch 0.
    #[error("the disk is not copied any more: {0} has begun")]
    Seeded(Epoch),
}

/// All changes of one epoch, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpochLog {
    /// The epoch.
    pub epoch: Epoch,
    /// The changes.
    pub changes: Vec<DiskChange>,
}

/// The maximum number of bytes by which a log exceeds its bound while the VM is being stopped.
/// Without a limit, a VM that is stopped repeatedly to slow it down would fill all memory.
const OVERSHOOT_BYTES_MAX: usize = 512 << 20;

/// The bound of the log of a mirrored disk while it is seeded. A write of the guest waits behind
/// what the job has copied: with this bound for milliseconds, whatever the network.
const MIRROR_SEED_BOUND: usize = 4 << 20;

/// A step of the seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeedStep {
    /// Changes since the last step, in the range already copied. To be sent before the piece.
    pub changes: Vec<DiskChange>,
    /// The range to read now.
    pub piece: Option<Range<u64>>,
    /// There is no data left to read.
    pub is_whole: bool,
}

#[derive(Debug)]
struct ProtectionState {
    /// The running epoch; 0 until the first cut.
    epoch: Epoch,
    /// The end of the range that has been read, or is being read.
    copied: u64,
    log: Vec<DiskChange>,
    /// The bytes of memory that the log occupies.
    log_bytes: usize,
    bound: usize,
    is_draining: bool,
    /// Of a mirrored disk.
    mirror: Option<MirrorFill>,
}

/// How far the job of a mirrored disk has come.
#[derive(Debug)]
struct MirrorFill {
    copied: u64,
    is_whole: bool,
    /// Where the standby's disk may have other bytes than zeros.
    written: WrittenPieces,
}

/// The log of one disk at the primary.
#[derive(Debug)]
pub struct PrimaryDisk {
    size: u64,
    is_mirrored: bool,
    protected: Option<ProtectionState>,
}

impl ProtectionState {
    /// Whether there is nothing left to copy.
    fn is_whole(&self, size: u64) -> bool {
        self.copied == size && self.mirror.as_ref().is_none_or(|mirror| mirror.is_whole)
    }

    fn current_bound(&self) -> usize {
        match self.mirror.is_some() && self.epoch == Epoch(0) {
            true => self.bound.min(MIRROR_SEED_BOUND),
            false => self.bound,
        }
    }

    /// Whether a change changes something at the standby: there, zeros may be zeros already.
    fn is_news(&mut self, change: &DiskChange) -> bool {
        let Some(mirror) = &mut self.mirror else { return true };
        let range = change.start_offset()..change.start_offset() + change.length();
        match change {
            DiskChange::Zero { .. } => mirror.written.intersects(range),
            DiskChange::Write { .. } => {
                mirror.written.insert_range(range);
                true
            }
        }
    }
}

impl PrimaryDisk {
    /// An unprotected disk of `size` bytes.
    pub fn new(size: u64) -> Self {
        Self { size, is_mirrored: false, protected: None }
    }

    /// An unprotected disk of `size` bytes whose contents a job of the hypervisor will send.
    pub fn new_mirrored(size: u64) -> Self {
        Self { size, is_mirrored: true, protected: None }
    }

    /// Begins a protection with an empty seed and log. From now on changes in the range that was
    /// copied to the standby are logged, in logs of about `bound` bytes of memory.
    pub fn begin_protection(&mut self, bound: usize) {
        let (log, cost) = (Vec::new(), 0);
        let epoch = Epoch(0);
        let written = WrittenPieces::default();
        let mirror = MirrorFill { copied: 0, is_whole: false, written };
        self.protected = Some(ProtectionState {
            epoch,
            copied: if self.is_mirrored { self.size } else { 0 },
            log,
            log_bytes: cost,
            bound,
            is_draining: false,
            mirror: self.is_mirrored.then_some(mirror),
        });
    }

    /// Records how far the job of a mirrored disk has come. Once it has copied everything, the seed
    /// is whole with the log up to now.
    pub fn record_fill(&mut self, copied: u64, is_whole: bool) {
        let mirror = self.protected.as_mut().and_then(|it| it.mirror.as_mut());
        if let Some(mirror) = mirror {
            mirror.copied = copied.min(self.size);
            mirror.is_whole |= is_whole;
        }
    }

    /// The number of bytes that the standby has, or that are on their way; of a mirrored disk, as
    /// its job reports.
    ///
    /// # Errors
    /// If the disk is not being seeded.
    pub fn seed_progress(&self) -> Result<u64, PrimaryDiskError> {
        let copied = self.seeded_bytes()?;
        let mirror = self.protected.as_ref().and_then(|it| it.mirror.as_ref());
        Ok(mirror.map_or(copied, |mirror| mirror.copied))
    }

    /// Ends the protection, and logging with it.
    pub fn end_protection(&mut self) {
        self.protected = None;
    }

    /// Whether a change may be made now. The change may be larger than the remaining room.
    pub fn has_room(&self) -> bool {
        self.protected.as_ref().is_none_or(|it| it.is_draining || it.log_bytes < it.current_bound())
    }

    /// The bytes of memory of the running log, and its bound.
    pub fn log_usage(&self) -> (usize, usize) {
        self.protected.as_ref().map_or((0, 0), |it| (it.log_bytes, it.bound))
    }

    /// Sets whether the VM is about to be stopped. QEMU then waits for all requests in flight, so
    /// the log has room for them. It is reset by the next cut.
    pub fn set_draining(&mut self, is_draining: bool) {
        if let Some(protected) = &mut self.protected {
            protected.is_draining = is_draining;
        }
    }

    /// Records a change. A log that is far beyond its bound, because no cut comes, is given up: the
    /// next cut is an error.
    pub fn record_change(&mut self, change: DiskChange) {
        let Some(protected) = &mut self.protected else { return };
        if !protected.is_news(&change) {
            return;
        }
        if let Some(change) = change.truncated_at(protected.copied) {
            protected.log_bytes += change.memory_bytes();
            protected.log.push(change);
        }
        if protected.log_bytes > protected.bound.saturating_add(OVERSHOOT_BYTES_MAX) {
            self.protected = None;
        }
    }

    /// The offset at which the next seed step continues.
    ///
    /// # Errors
    /// If the disk is not being seeded.
    pub fn seeded_bytes(&self) -> Result<u64, PrimaryDiskError> {
        let protected = self.protected.as_ref().ok_or(PrimaryDiskError::Unprotected)?;
        match protected.epoch == Epoch(0) {
            true => Ok(protected.copied),
            false => Err(PrimaryDiskError::Seeded(protected.epoch)),
        }
    }

    /// Advances the seed by a piece of at most `most` bytes. `data` is the first range at or after
    /// [`PrimaryDisk::seeded_bytes`] that may contain other bytes than zeros. The disk must not
    /// have changed since the caller determined it.
    ///
    /// # Errors
    /// If the disk is not being seeded.
    pub fn advance_seed(
        &mut self,
        data: Option<Range<u64>>,
        most: u64,
    ) -> Result<SeedStep, PrimaryDiskError> {
        let from = self.seeded_bytes()?;
        let protected = self.protected.as_mut().ok_or(PrimaryDiskError::Unprotected)?;
        let piece = data.map(|data| data.start.max(from)..data.end.min(self.size));
        let piece = piece.map(|piece| piece.start..piece.end.min(piece.start.saturating_add(most)));
        let piece = piece.filter(|piece| !piece.is_empty());
        protected.copied = piece.as_ref().map_or(self.size, |piece| piece.end);
        protected.log_bytes = 0;
        let is_whole = protected.is_whole(self.size);
        Ok(SeedStep { changes: std::mem::take(&mut protected.log), piece, is_whole })
    }

    /// Ends the running epoch and returns its log. The first log is that of epoch 1, and has what
    /// changed since the last seed step.
    ///
    /// # Errors
    /// If the disk is not protected, or its seed is not whole.
    pub fn cut_log(&mut self) -> Result<EpochLog, PrimaryDiskError> {
        let protected = self.protected.as_mut().ok_or(PrimaryDiskError::Unprotected)?;
        if !protected.is_whole(self.size) {
            let copied = self.seed_progress()?;
            return Err(PrimaryDiskError::Seeding { copied, size: self.size });
        }
        let protected = self.protected.as_mut().ok_or(PrimaryDiskError::Unprotected)?;
        let epoch = protected.epoch.max(Epoch(1));
        protected.epoch = epoch.next();
        protected.log_bytes = 0;
        protected.is_draining = false;
        Ok(EpochLog { epoch, changes: std::mem::take(&mut protected.log) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zero(at: u64, length: u64) -> DiskChange {
        DiskChange::Zero { at, length, hole: false }
    }

    fn seeded(bound: usize) -> PrimaryDisk {
        let mut primary = PrimaryDisk::new(100);
        primary.begin_protection(bound);
        assert!(primary.advance_seed(None, 10).unwrap().is_whole);
        primary
    }

    #[test]
    fn a_change_is_logged_only_in_the_copied_part() {
        let mut primary = PrimaryDisk::new(100);
        primary.record_change(zero(0, 1));
        primary.begin_protection(1000);
        primary.record_change(zero(0, 5));
        let step = primary.advance_seed(Some(20..90), 10).unwrap();
        assert_eq!(step, SeedStep { changes: vec![], piece: Some(20..30), is_whole: false });
        for change in [zero(0, 5), zero(25, 20), zero(30, 5)] {
            primary.record_change(change);
        }
        let seeding = Err(PrimaryDiskError::Seeding { copied: 30, size: 100 });
        assert_eq!(primary.cut_log(), seeding);
        let step = primary.advance_seed(Some(30..90), 100).unwrap();
        assert_eq!(step.changes, [zero(0, 5), zero(25, 5)]);
        assert_eq!((step.piece, step.is_whole), (Some(30..90), false));
        assert!(primary.advance_seed(None, 100).unwrap().is_whole);
        primary.record_change(zero(90, 10));
        assert_eq!(
            primary.advance_seed(None, 100).unwrap().changes,
            [zero(90, 10)],
            "while memory is copied"
        );
        primary.record_change(zero(90, 9));
        assert_eq!(primary.cut_log(), Ok(EpochLog { epoch: Epoch(1), changes: vec![zero(90, 9)] }));
        assert_eq!(primary.advance_seed(None, 100), Err(PrimaryDiskError::Seeded(Epoch(2))));
    }

    #[test]
    fn epochs_are_counted_and_their_logs_apart() {
        let mut primary = seeded(1000);
        for epoch in 1..4 {
            primary.record_change(zero(epoch, 1));
            let log = EpochLog { epoch: Epoch(epoch), changes: vec![zero(epoch, 1)] };
            assert_eq!(primary.cut_log(), Ok(log));
        }
        primary.end_protection();
        primary.record_change(zero(0, 1));
        assert_eq!(primary.cut_log(), Err(PrimaryDiskError::Unprotected));
    }

    #[test]
    fn a_full_log_has_room_for_pending_writes() {
        let mut primary = seeded(100);
        primary.record_change(DiskChange::Write { at: 0, bytes: vec![1; 100] });
        assert!(!primary.has_room());
        primary.set_draining(true);
        assert!(primary.has_room());
        primary.set_draining(false);
        assert!(!primary.has_room());
        primary.set_draining(true);
        primary.cut_log().unwrap();
        primary.record_change(DiskChange::Write { at: 0, bytes: vec![1; 100] });
        assert!(!primary.has_room(), "draining ends with the epoch");
        primary.end_protection();
        assert!(primary.has_room());
    }

    fn write(at: u64, bytes: usize) -> DiskChange {
        DiskChange::Write { at, bytes: vec![1; bytes] }
    }

    #[test]
    fn a_mirrored_disk_is_whole_when_its_job_has_copied_everything() {
        let mut primary = PrimaryDisk::new_mirrored(100);
        primary.record_change(write(0, 1));
        primary.begin_protection(1000);
        primary.record_change(write(90, 10));
        let step = primary.advance_seed(None, 10).unwrap();
        assert_eq!(step, SeedStep { changes: vec![write(90, 10)], piece: None, is_whole: false });
        primary.record_fill(60, false);
        assert_eq!(primary.seed_progress(), Ok(60));
        let seeding = Err(PrimaryDiskError::Seeding { copied: 60, size: 100 });
        assert_eq!(primary.cut_log(), seeding);
        primary.record_change(write(0, 2));
        primary.record_fill(100, true);
        let step = primary.advance_seed(None, 10).unwrap();
        assert_eq!((step.changes, step.is_whole), (vec![write(0, 2)], true));
        // The job may have more to do for writes of the guest.
        primary.record_fill(90, false);
        assert!(primary.cut_log().unwrap().changes.is_empty());
    }

    #[test]
    fn zeros_of_a_mirrored_disk_are_logged_only_where_data_was() {
        const PIECE: u64 = crate::written::PIECE_BYTES;
        let mut primary = PrimaryDisk::new_mirrored(8 * PIECE);
        primary.begin_protection(1 << 30);
        primary.record_change(zero(0, 8 * PIECE));
        primary.record_change(write(PIECE + 5, 1));
        primary.record_change(zero(0, PIECE));
        primary.record_change(zero(2 * PIECE, 6 * PIECE));
        primary.record_change(zero(PIECE, 1));
        let step = primary.advance_seed(None, 10).unwrap();
        assert_eq!(step.changes, [write(PIECE + 5, 1), zero(PIECE, 1)]);
        // Another standby begins with zeros again.
        primary.begin_protection(1 << 30);
        primary.record_change(zero(0, 8 * PIECE));
        assert!(primary.advance_seed(None, 10).unwrap().changes.is_empty());
        let mut served = seeded(1000);
        served.record_change(zero(0, 5));
        assert_eq!(served.cut_log().unwrap().changes, [zero(0, 5)]);
    }

    #[test]
    fn a_mirrored_disk_has_a_small_log_while_it_is_seeded() {
        let mut primary = PrimaryDisk::new_mirrored(1 << 30);
        primary.begin_protection(32 << 20);
        primary.record_change(write(0, MIRROR_SEED_BOUND));
        assert!(!primary.has_room());
        primary.record_fill(0, true);
        primary.advance_seed(None, 10).unwrap();
        primary.cut_log().unwrap();
        primary.record_change(write(0, MIRROR_SEED_BOUND));
        assert!(primary.has_room());
    }

    #[test]
    fn a_log_without_cuts_is_abandoned() {
        let mut primary = PrimaryDisk::new(1 << 40);
        primary.begin_protection(100);
        assert!(primary.advance_seed(None, 10).unwrap().is_whole);
        primary.set_draining(true);
        primary
            .record_change(DiskChange::Write { at: 0, bytes: vec![0; OVERSHOOT_BYTES_MAX - 1000] });
        assert!(primary.log_usage().0 > OVERSHOOT_BYTES_MAX - 1000);
        primary.record_change(DiskChange::Write { at: 0, bytes: vec![0; 2000] });
        assert_eq!(primary.cut_log(), Err(PrimaryDiskError::Unprotected));
        assert!(primary.has_room());
    }
}
