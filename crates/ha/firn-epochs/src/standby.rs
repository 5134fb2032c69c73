//! Standby: the state of a VM at its backup. Pure: messages in, progress out, and pages into a
//! [`StandbyRam`].
//!
//! ```text
//!                 pages, devices                end, checksum right
//!     nothing ----------------> arriving(n) --------------------> stored(n): complete, the newest
//!        |                                                            |
//!        |  epoch 0, the seed:                                        |  n + 1 complete
//!        '--> written as it arrives; no state by itself               v
//!                                         folded into RAM, devices(n): committed; failover runs it
//! ```
//!
//! For a member of a cluster, epochs after the newest global checkpoint are stored apart, because a
//! failover goes back to that checkpoint:
//!
//! ```text
//!     [ RAM, devices at 7 ]   [ 8 ][ 9 ] .. [ 12 ]    [ 13 ]          Globally(9) folds 8 and 9
//!       a global checkpoint     committed: any of     complete
//!       has it                  them may be marked
//! ```
//!
//! RAM changes only by folding a committed epoch: it always has the state of the newest folded
//! epoch, ready to be mapped by a hypervisor. An arriving epoch is stored apart until it is whole,
//! and then until the next one is.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use firn_cluster::epoch::{
    BackupEpochs, EpochPieceHeader, EpochProgress, PieceHandling, RollbackError,
};
use firn_cluster::member::{ClusterMembership, EPOCHS_KEPT_MAX, NicEpoch, StandbyNic};
use firn_cluster::{Epoch, FrameNumber};
use firn_disks::{DiskChange, DiskStore};
use firn_image::AuxBlock;
use firn_types::{PAGE_SIZE, Page, RegionMap};
use thiserror::Error;

use crate::delta::PagePatches;
use crate::wire::{EpochMessage, PageBatch};

/// The maximum number of stored epochs: a complete one, and one that has just become complete.
const EPOCHS_STORED_MAX: u64 = 2;
/// The bound of the stored state of a member's card, in bytes. The primary enforces it.
const CARD_BYTES_MAX: usize = 64 << 20;

/// The maximum number of auxiliary blocks of an epoch, and their maximum size in all.
const AUX_BLOCKS_MAX: usize = 64;
const AUX_BYTES_MAX: usize = 1 << 30;

/// The memory of the committed epoch.
pub trait StandbyRam {
    /// Writes new contents to a part of a page, from offset `at` on.
    ///
    /// # Errors
    /// If the memory can't be written.
    fn write_bytes(&mut self, page: Page, at: usize, bytes: &[u8]) -> io::Result<()>;
}

/// Why the standby refuses a message.
#[derive(Debug, Error)]
pub enum StandbyVmError {
    /// A message of an epoch that arrived out of order.
    #[error("a message of {got} came where {expected} was expected; start protecting the VM anew")]
    Order {
        /// The epoch that arrived.
        got: Epoch,
        /// The epoch that was expected.
        expected: Epoch,
    },
    /// A message that no primary may send at this point.
    #[error(
        "protocol error: the primary sent a message that only a backup may send, or a second hello"
    )]
    Message,
    /// A page number beyond the VM's memory.
    #[error("{page} is no page of the VM, which has {pages}")]
    Page {
        /// The page.
        page: Page,
        /// The number of pages of the VM.
        pages: u32,
    },
    /// An epoch with more pages than the VM has, or with too many auxiliary blocks.
    #[error("{epoch} is larger than the VM")]
    Much {
        /// The epoch.
        epoch: Epoch,
    },
    /// An epoch without device state, from which the VM could not run.
    #[error("{epoch} has no state of the VM's devices")]
    NoDevices {
        /// The epoch.
        epoch: Epoch,
    },
    /// An epoch could not be folded. The standby is damaged.
    #[error("{epoch} could not be written to the VM's memory here; the standby is unusable")]
    Ram {
        /// The epoch.
        epoch: Epoch,
        /// The error of the system.
        source: io::Error,
    },
    /// A disk refuses changes.
    #[error("the VM's disk here takes nothing more; its copy is unusable")]
    Disk(#[from] firn_disks::standby::StandbyDiskError),
    /// The disk number is unknown.
    #[error("the VM has no disk {number}; it has {count}")]
    NoDisk {
        /// The disk number.
        number: u32,
        /// The number of disks.
        count: usize,
    },
    /// A disk and memory have different epochs, which is a bug.
    #[error("a disk has the state of {disk}, but memory that of {memory}")]
    Apart {
        /// The disk's epoch.
        disk: Epoch,
        /// The memory's epoch.
        memory: Epoch,
    },
    /// No epoch is committed, or the standby is damaged.
    #[error(
        "no epoch is committed: the primary has to be protected for two intervals after the first whole copy"
    )]
    Nothing,
    /// A member's epoch lacks the state of its card, or the epoch of another VM has one.
    #[error(
        "{epoch} lacks the state of the VM's network card, or has one though the VM is in no cluster"
    )]
    Card {
        /// The epoch.
        epoch: Epoch,
    },
    /// An epoch that is not stored any more, or not yet committed.
    #[error(transparent)]
    Restore(#[from] RollbackError),
}

/// An epoch that is not folded into RAM yet.
#[derive(Debug, Default)]
struct PendingEpoch {
    pages: Vec<PageBatch>,
    /// Parts of other pages.
    patches: Vec<PagePatches>,
    /// The number of pages that both occupy.
    count: u64,
    devices: Vec<u8>,
    aux: Vec<AuxBlock>,
    card: Option<NicEpoch>,
}

/// The state from which a VM can run.
#[derive(Debug)]
pub struct CommittedState<R> {
    /// The epoch at whose end the VM had this state.
    pub epoch: Epoch,
    /// The memory.
    pub ram: R,
    /// The state of devices and vCPUs.
    pub devices: Vec<u8>,
    /// The auxiliary blocks.
    pub aux: Vec<AuxBlock>,
    /// The network card, if the VM belongs to a cluster.
    pub card: Option<(ClusterMembership, StandbyNic)>,
}

/// The standby of one VM.
#[derive(Debug)]
pub struct StandbyVm<R> {
    regions: RegionMap,
    ram: R,
    epochs: BackupEpochs,
    is_seeded: bool,
    is_spoiled: bool,
    arriving: PendingEpoch,
    kept: BTreeMap<Epoch, PendingEpoch>,
    /// Devices and auxiliary blocks of the newest folded epoch.
    committed: PendingEpoch,
    disks: Vec<DiskCopy>,
    member: Option<(ClusterMembership, StandbyNic)>,
    /// The newest epoch that belongs to a global checkpoint.
    global: Epoch,
}

/// The standby's copy of a disk.
pub type DiskCopy = firn_disks::StandbyDisk<Arc<dyn DiskStore>>;

impl<R: StandbyRam> StandbyVm<R> {
    /// A standby of a VM with this RAM, with nothing received: `ram` is all zeros.
    pub fn new(regions: RegionMap, ram: R) -> Self {
        Self::with_disks(regions, ram, Vec::new())
    }

    /// The same for a VM with disks, whose copies are all zeros as well.
    pub fn with_disks(regions: RegionMap, ram: R, disks: Vec<DiskCopy>) -> Self {
        Self {
            regions,
            ram,
            epochs: BackupEpochs::new(Epoch(0), EPOCHS_STORED_MAX),
            is_seeded: false,
            is_spoiled: false,
            arriving: PendingEpoch::default(),
            kept: BTreeMap::new(),
            committed: PendingEpoch::default(),
            disks,
            member: None,
            global: Epoch(0),
        }
    }

    /// The same for a VM that belongs to a cluster; unchanged for `None`.
    pub fn with_membership(mut self, of: Option<ClusterMembership>) -> Self {
        if let Some(of) = of {
            self.epochs = BackupEpochs::new(Epoch(0), EPOCHS_KEPT_MAX);
            self.member = Some((of, StandbyNic::new(Epoch(0), CARD_BYTES_MAX)));
        }
        self
    }

    /// The progress of the replication.
    pub fn progress(&self) -> EpochProgress {
        self.epochs.progress()
    }

    /// Handles a message. A returned progress has to be sent to the primary.
    pub fn handle_message(
        &mut self,
        message: EpochMessage,
    ) -> Result<Option<EpochProgress>, StandbyVmError> {
        match message {
            EpochMessage::Pages(epoch, pages) => self.receive_pages(epoch, pages)?,
            EpochMessage::Patches(epoch, patches) => self.receive_patches(epoch, patches)?,
            EpochMessage::Devices(epoch, devices) => self.expect_epoch(epoch)?.devices = devices,
            EpochMessage::Aux(epoch, block) => self.receive_aux(epoch, block)?,
            EpochMessage::Changes(epoch, disk, changes) => {
                self.receive_changes(epoch, disk, changes)?
            }
            EpochMessage::Card(epoch, of) => self.expect_epoch(epoch)?.card = Some(of),
            EpochMessage::Globally(epoch) => self.record_global_epoch(epoch)?,
            EpochMessage::Gone(seq) => self.record_released(seq)?,
            EpochMessage::End { epoch, last } => return self.complete_epoch(epoch, last).map(Some),
            EpochMessage::Hello(_)
            | EpochMessage::Progress(_)
            | EpochMessage::Refusal(_)
            | EpochMessage::Release
            | EpochMessage::ProtectionEnd(_)
            | EpochMessage::EndRecorded
            | EpochMessage::Decline(_) => return Err(StandbyVmError::Message),
        }
        Ok(None)
    }

    /// Promotes the standby at the end of epoch `at`, or of the newest committed epoch. Later
    /// epochs are dropped.
    pub fn promote_at(mut self, at: Option<Epoch>) -> Result<CommittedState<R>, StandbyVmError> {
        let epoch = at.unwrap_or(self.progress().committed);
        if epoch == Epoch(0) || self.is_spoiled {
            return Err(StandbyVmError::Nothing);
        }
        let fold = self.epochs.roll_back_to(epoch)?.fold;
        self.fold_epochs(fold)?;
        if self.member.is_some() {
            self.fold_disks(epoch)?;
        }
        let card = self.member.map(|(of, mut kept)| {
            kept.roll_back(epoch);
            (of, kept)
        });
        for disk in self.disks {
            let (disk, _) = disk.promote_disk()?;
            if disk != epoch {
                return Err(StandbyVmError::Apart { disk, memory: epoch });
            }
        }
        let PendingEpoch { devices, aux, .. } = self.committed;
        Ok(CommittedState { epoch, ram: self.ram, devices, aux, card })
    }

    /// The arriving epoch, if the message belongs to it.
    fn expect_epoch(&mut self, got: Epoch) -> Result<&mut PendingEpoch, StandbyVmError> {
        let expected = match self.is_seeded {
            true => self.progress().complete.next(),
            false => Epoch(0),
        };
        match got == expected {
            true => Ok(&mut self.arriving),
            false => Err(StandbyVmError::Order { got, expected }),
        }
    }

    fn receive_pages(&mut self, epoch: Epoch, pages: PageBatch) -> Result<(), StandbyVmError> {
        self.expect_epoch(epoch)?;
        self.check_pages(epoch, pages.numbers.iter().copied())?;
        match self.is_seeded {
            true => {
                self.arriving.count += pages.numbers.len() as u64;
                self.arriving.pages.push(pages);
            }
            false => self.write_pages(epoch, &pages)?,
        }
        Ok(())
    }

    /// Receives patches, which modify the epoch before. The seed has none before it, so it can't
    /// have patches.
    fn receive_patches(
        &mut self,
        epoch: Epoch,
        patches: PagePatches,
    ) -> Result<(), StandbyVmError> {
        self.expect_epoch(epoch)?;
        self.check_pages(epoch, patches.iter().map(|(page, ..)| page))?;
        if !self.is_seeded {
            return Err(StandbyVmError::Message);
        }
        self.arriving.count += patches.bytes().len().div_ceil(PAGE_SIZE) as u64;
        self.arriving.patches.push(patches);
        Ok(())
    }

    /// Checks that the VM has these pages, and that the epoch has no more pages than the VM.
    fn check_pages(
        &self,
        epoch: Epoch,
        mut pages: impl Iterator<Item = Page>,
    ) -> Result<(), StandbyVmError> {
        let count = self.regions.total_pages();
        if let Some(page) = pages.find(|page| self.regions.region_of(*page).is_none()) {
            return Err(StandbyVmError::Page { page, pages: count });
        }
        match self.arriving.count > u64::from(count) {
            true => Err(StandbyVmError::Much { epoch }),
            false => Ok(()),
        }
    }

    fn receive_aux(&mut self, epoch: Epoch, block: AuxBlock) -> Result<(), StandbyVmError> {
        let arriving = self.expect_epoch(epoch)?;
        arriving.aux.push(block);
        let bytes: usize = arriving.aux.iter().map(|block| block.bytes.len()).sum();
        match arriving.aux.len() <= AUX_BLOCKS_MAX && bytes <= AUX_BYTES_MAX {
            true => Ok(()),
            false => Err(StandbyVmError::Much { epoch }),
        }
    }

    fn receive_changes(
        &mut self,
        epoch: Epoch,
        number: u32,
        changes: Vec<DiskChange>,
    ) -> Result<(), StandbyVmError> {
        self.expect_epoch(epoch)?;
        let count = self.disks.len();
        let disk = self.disks.get_mut(number as usize);
        let disk = disk.ok_or(StandbyVmError::NoDisk { number, count })?;
        Ok(disk.receive_changes(epoch, changes)?)
    }

    fn complete_epoch(
        &mut self,
        epoch: Epoch,
        last: bool,
    ) -> Result<EpochProgress, StandbyVmError> {
        let mut arrived = std::mem::take(self.expect_epoch(epoch)?);
        if !self.is_seeded {
            self.is_seeded = true;
            self.disks.iter_mut().try_for_each(|disk| disk.complete_epoch(epoch))?;
            return Ok(self.progress());
        }
        if arrived.devices.is_empty() {
            return Err(StandbyVmError::NoDevices { epoch });
        }
        if arrived.card.is_some() != self.member.is_some() {
            return Err(StandbyVmError::Card { epoch });
        }
        let expected = self.progress().complete.next();
        match self.epochs.receive_piece(EpochPieceHeader {
            epoch,
            index: 0,
            pieces: 1,
            is_last_epoch: last,
        }) {
            PieceHandling::Store => {
                self.disks.iter_mut().try_for_each(|disk| disk.complete_epoch(epoch))?;
                if let (Some(of), Some((_, kept))) = (arrived.card.take(), &mut self.member) {
                    kept.complete_epoch(epoch, of);
                }
                self.kept.insert(epoch, arrived)
            }
            PieceHandling::Drop | PieceHandling::Refuse => {
                return Err(StandbyVmError::Order { got: epoch, expected });
            }
        };
        if self.member.is_none() {
            self.fold_up_to(self.progress().committed)?;
        }
        Ok(self.progress())
    }

    /// Records that a global checkpoint includes this epoch.
    fn record_global_epoch(&mut self, epoch: Epoch) -> Result<(), StandbyVmError> {
        if self.member.is_none() {
            return Err(StandbyVmError::Card { epoch });
        }
        self.fold_up_to(epoch)?;
        if let Some((_, kept)) = self.member.as_mut().filter(|_| epoch > self.global) {
            kept.record_global_checkpoint(epoch);
            self.global = epoch;
        }
        Ok(())
    }

    /// Records that frames were sent. They need not be sent again, whichever epoch a failover goes
    /// back to.
    fn record_released(&mut self, seq: FrameNumber) -> Result<(), StandbyVmError> {
        let epoch = self.progress().complete;
        let (_, kept) = self.member.as_mut().ok_or(StandbyVmError::Card { epoch })?;
        kept.record_released(seq);
        Ok(())
    }

    fn fold_up_to(&mut self, epoch: Epoch) -> Result<(), StandbyVmError> {
        let fold = self.epochs.fold_up_to(epoch)?;
        self.fold_epochs(fold)?;
        self.fold_disks(epoch)
    }

    /// Folds the disks up to a committed epoch. The primary is not informed of the commit before:
    /// while the epoch could not be folded, none of its output has left the primary.
    fn fold_disks(&mut self, committed: Epoch) -> Result<(), StandbyVmError> {
        let folded = self.disks.iter_mut().try_for_each(|disk| {
            disk.commit_epoch(committed)?;
            while disk.fold_epoch()?.is_some() {}
            Ok::<_, firn_disks::standby::StandbyDiskError>(())
        });
        self.is_spoiled |= folded.is_err();
        Ok(folded?)
    }

    /// Writes these epochs to RAM, in order.
    fn fold_epochs(&mut self, epochs: Vec<Epoch>) -> Result<(), StandbyVmError> {
        for epoch in epochs {
            let Some(apart) = self.kept.remove(&epoch) else { continue };
            let PendingEpoch { pages, patches, .. } = &apart;
            pages.iter().try_for_each(|pages| self.write_pages(epoch, pages))?;
            patches
                .iter()
                .flat_map(PagePatches::iter)
                .try_for_each(|it| self.write_patch(epoch, it))?;
            self.committed = PendingEpoch { pages: Vec::new(), patches: Vec::new(), ..apart };
        }
        Ok(())
    }

    fn write_pages(&mut self, epoch: Epoch, pages: &PageBatch) -> Result<(), StandbyVmError> {
        pages.iter().try_for_each(|(page, bytes)| self.write_patch(epoch, (page, 0, bytes)))
    }

    fn write_patch(
        &mut self,
        epoch: Epoch,
        (page, at, bytes): (Page, usize, &[u8]),
    ) -> Result<(), StandbyVmError> {
        let written = self.ram.write_bytes(page, at, bytes);
        self.is_spoiled |= written.is_err();
        written.map_err(|source| StandbyVmError::Ram { epoch, source })
    }
}

#[cfg(test)]
mod tests {
    use firn_cluster::member::{MemberNic, MemberTimes};
    use firn_cluster::output::{FrameDestination, SentFrame};
    use firn_cluster::switch::MacAddress;
    use firn_cluster::{Generation, VmId};

    use super::*;

    /// The first byte of each page.
    #[derive(Debug, Default, PartialEq)]
    struct Bytes([u8; 4]);

    impl StandbyRam for Bytes {
        fn write_bytes(&mut self, page: Page, at: usize, bytes: &[u8]) -> io::Result<()> {
            if at == 0 {
                self.0[page.index()] = bytes[0];
            }
            Ok(())
        }
    }

    fn standby() -> StandbyVm<Bytes> {
        let regions = RegionMap::lay_out([("ram", 4 * PAGE_SIZE as u64)]).unwrap();
        StandbyVm::new(regions, Bytes::default())
    }

    fn pages(epoch: u64, page: u32, fill: u8) -> EpochMessage {
        let pages = PageBatch { numbers: vec![Page(page)], bytes: vec![fill; PAGE_SIZE] };
        EpochMessage::Pages(Epoch(epoch), pages)
    }

    fn devices(epoch: u64) -> EpochMessage {
        EpochMessage::Devices(Epoch(epoch), vec![epoch as u8])
    }

    fn end(epoch: u64) -> EpochMessage {
        EpochMessage::End { epoch: Epoch(epoch), last: false }
    }

    fn received(
        standby: &mut StandbyVm<Bytes>,
        messages: Vec<EpochMessage>,
    ) -> Option<EpochProgress> {
        messages.into_iter().fold(None, |_, message| standby.handle_message(message).unwrap())
    }

    #[test]
    fn memory_is_that_of_the_epoch_before_the_newest() {
        let mut standby = standby();
        received(&mut standby, vec![pages(0, 0, 1), end(0)]);
        assert_eq!(standby.ram, Bytes([1, 0, 0, 0]), "the seed is written as it comes");
        received(&mut standby, vec![pages(1, 1, 2), devices(1), end(1)]);
        assert_eq!(standby.ram, Bytes([1, 0, 0, 0]), "1 is complete, not committed");
        let progress =
            received(&mut standby, vec![pages(2, 1, 3), pages(2, 2, 3), devices(2), end(2)]);
        assert_eq!(progress, Some(EpochProgress { complete: Epoch(2), committed: Epoch(1) }));
        let committed = standby.promote_at(None).unwrap();
        assert_eq!(committed.ram, Bytes([1, 2, 0, 0]));
        assert_eq!((committed.epoch, committed.devices), (Epoch(1), vec![1]));
    }

    #[test]
    fn an_epoch_that_has_not_ended_changes_nothing() {
        let mut standby = standby();
        received(&mut standby, vec![end(0), devices(1), end(1), pages(2, 0, 9)]);
        assert_eq!(standby.ram, Bytes::default());
        assert!(matches!(standby.promote_at(None), Err(StandbyVmError::Nothing)));
    }

    #[test]
    fn the_last_epoch_is_committed_at_once() {
        let mut standby = standby();
        let last = EpochMessage::End { epoch: Epoch(1), last: true };
        received(&mut standby, vec![end(0), devices(1), pages(1, 3, 7), last]);
        assert_eq!(standby.promote_at(None).unwrap().ram, Bytes([0, 0, 0, 7]));
    }

    #[test]
    fn an_inconsistent_message_is_refused() {
        let mut standby = standby();
        assert!(matches!(standby.handle_message(end(1)), Err(StandbyVmError::Order { .. })));
        assert!(matches!(standby.handle_message(pages(0, 4, 1)), Err(StandbyVmError::Page { .. })));
        let refusal = EpochMessage::Refusal("no".into());
        assert!(matches!(standby.handle_message(refusal), Err(StandbyVmError::Message)));
        received(&mut standby, vec![end(0)]);
        assert!(matches!(
            standby.handle_message(pages(2, 0, 1)),
            Err(StandbyVmError::Order { .. })
        ));
        assert!(matches!(standby.handle_message(end(1)), Err(StandbyVmError::NoDevices { .. })));
    }

    fn patch(epoch: u64, page: u32, fill: u8) -> EpochMessage {
        let mut patches = PagePatches::default();
        patches.add_runs(Page(page), &[0..1, 8..9], &[fill; PAGE_SIZE]);
        EpochMessage::Patches(Epoch(epoch), patches)
    }

    #[test]
    fn a_delta_applies_to_the_previous_epoch() {
        let mut standby = standby();
        received(&mut standby, vec![pages(0, 0, 1), end(0)]);
        received(&mut standby, vec![pages(1, 1, 2), devices(1), end(1)]);
        received(&mut standby, vec![patch(2, 1, 3), patch(2, 0, 4), devices(2), end(2)]);
        assert_eq!(standby.ram, Bytes([1, 2, 0, 0]), "2 is complete, not committed");
        received(&mut standby, vec![patch(3, 0, 5), devices(3), end(3)]);
        assert_eq!(standby.ram, Bytes([4, 3, 0, 0]));
    }

    #[test]
    fn patches_of_nothing_are_refused() {
        let mut standby = standby();
        assert!(matches!(standby.handle_message(patch(0, 0, 1)), Err(StandbyVmError::Message)));
        received(&mut standby, vec![end(0)]);
        assert!(matches!(standby.handle_message(patch(1, 4, 1)), Err(StandbyVmError::Page { .. })));
        assert!(matches!(
            standby.handle_message(patch(2, 0, 1)),
            Err(StandbyVmError::Order { .. })
        ));
        let mut again = (0..20).map(|_| standby.handle_message(patch(1, 0, 1)));
        assert!(again.any(|it| matches!(it, Err(StandbyVmError::Much { .. }))));
    }

    #[test]
    fn an_epoch_is_no_larger_than_the_vm() {
        let mut one = standby();
        received(&mut one, vec![end(0)]);
        let mut again = (0..20).map(|_| one.handle_message(pages(1, 0, 1)));
        assert!(again.any(|it| matches!(it, Err(StandbyVmError::Much { .. }))));
        let mut other = standby();
        received(&mut other, vec![end(0)]);
        let block = AuxBlock { id: "vga".into(), bytes: vec![0] };
        let mut again = (0..=AUX_BLOCKS_MAX)
            .map(|_| other.handle_message(EpochMessage::Aux(Epoch(1), block.clone())));
        assert!(again.any(|it| matches!(it, Err(StandbyVmError::Much { .. }))));
    }

    #[test]
    fn a_copy_without_room_is_not_run() {
        struct Full;
        impl StandbyRam for Full {
            fn write_bytes(&mut self, _: Page, _: usize, _: &[u8]) -> io::Result<()> {
                Err(io::ErrorKind::StorageFull.into())
            }
        }
        let regions = RegionMap::lay_out([("ram", 4 * PAGE_SIZE as u64)]).unwrap();
        let mut standby = StandbyVm::new(regions, Full);
        for message in [end(0), pages(1, 0, 1), devices(1), end(1), devices(2)] {
            standby.handle_message(message).unwrap();
        }
        assert!(matches!(standby.handle_message(end(2)), Err(StandbyVmError::Ram { .. })));
        assert!(matches!(standby.promote_at(None), Err(StandbyVmError::Nothing)));
    }

    fn member() -> StandbyVm<Bytes> {
        let members = [0, 1].map(|vm| (VmId(vm), MacAddress([2, 0, 0, 0, 0, vm as u8]))).into();
        let (cluster, own, generation, layout) = (1, VmId(0), Generation(1), 0);
        standby().with_membership(Some(ClusterMembership {
            cluster,
            own,
            members,
            generation,
            layout,
        }))
    }

    /// An epoch of a member: one page, and one frame to the other member.
    fn epoch(number: u64) -> Vec<EpochMessage> {
        let bytes = [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 8, 0][..], &[number as u8]].concat();
        let sent = vec![SentFrame {
            to: FrameDestination::Vm(VmId(1)),
            seq: FrameNumber(number),
            frame: bytes.into(),
        }];
        let of = NicEpoch { sent, ..NicEpoch::default() };
        let card = EpochMessage::Card(Epoch(number), of);
        vec![pages(number, 0, number as u8), card, devices(number), end(number)]
    }

    #[test]
    fn a_member_goes_back_to_any_epoch_since_the_newest_global_checkpoint() {
        let run = |globally: Option<u64>, at: u64| {
            let mut standby = member();
            received(&mut standby, vec![end(0)]);
            let epochs = (1..=6).flat_map(epoch);
            let far = received(&mut standby, epochs.collect());
            assert_eq!(far, Some(EpochProgress { complete: Epoch(6), committed: Epoch(5) }));
            assert_eq!(standby.ram, Bytes::default(), "all of them are kept");
            let message = globally.map(|epoch| EpochMessage::Globally(Epoch(epoch)));
            received(&mut standby, message.into_iter().collect());
            standby.promote_at(Some(Epoch(at)))
        };
        for (globally, at) in [(None, 1), (None, 5), (Some(3), 3), (Some(3), 5)] {
            let CommittedState { epoch, ram, devices, card, .. } = run(globally, at).unwrap();
            assert_eq!((epoch, ram.0[0], devices), (Epoch(at), at as u8, vec![at as u8]));
            let (of, kept) = card.unwrap();
            let again =
                MemberNic::new(&of, MemberTimes::default(), epoch, kept).commit_epoch(epoch).len();
            assert_eq!(again, at as usize, "what was in flight is there");
        }
        assert!(matches!(run(Some(3), 2), Err(StandbyVmError::Restore(_))), "it is folded");
        assert!(matches!(run(None, 6), Err(StandbyVmError::Restore(_))), "it is not committed");
    }

    #[test]
    fn sent_frames_stay_known_after_a_rollback() {
        let run = |gone: Vec<EpochMessage>| {
            let mut standby = member();
            received(&mut standby, vec![end(0)]);
            for number in 1..=4 {
                let bytes = vec![2; 60];
                let sent = SentFrame {
                    to: FrameDestination::Outside,
                    seq: FrameNumber(number),
                    frame: bytes.into(),
                };
                // The last epoch reports that the first frame had been sent.
                let trimmed = if number == 4 {
                    vec![(FrameDestination::Outside, FrameNumber(1))]
                } else {
                    Vec::new()
                };
                let of = NicEpoch { sent: vec![sent], trimmed, ..NicEpoch::default() };
                let card = EpochMessage::Card(Epoch(number), of);
                received(&mut standby, vec![card, devices(number), end(number)]);
            }
            received(&mut standby, vec![EpochMessage::Globally(Epoch(2))]);
            received(&mut standby, gone);
            let CommittedState { epoch, card, .. } = standby.promote_at(Some(Epoch(2))).unwrap();
            let (of, kept) = card.unwrap();
            MemberNic::new(&of, MemberTimes::default(), epoch, kept)
                .record_global_checkpoint(epoch)
                .len()
        };
        assert_eq!(run(Vec::new()), 1);
        assert_eq!(run(vec![EpochMessage::Gone(FrameNumber(2))]), 0);
        let mut alone = standby();
        assert!(matches!(
            alone.handle_message(EpochMessage::Gone(FrameNumber(1))),
            Err(StandbyVmError::Card { .. })
        ));
    }

    #[test]
    fn a_global_checkpoint_needs_a_committed_epoch_of_a_member() {
        let mut standby = member();
        received(&mut standby, vec![end(0)]);
        received(&mut standby, (1..=3).flat_map(epoch).collect());
        received(&mut standby, vec![EpochMessage::Globally(Epoch(2))]);
        assert_eq!(standby.ram, Bytes([2, 0, 0, 0]));
        received(&mut standby, vec![EpochMessage::Globally(Epoch(1))]);
        let early = standby.handle_message(EpochMessage::Globally(Epoch(3)));
        assert!(matches!(early, Err(StandbyVmError::Restore(_))));
        let mut alone = self::standby();
        received(&mut alone, vec![end(0)]);
        let wrong = alone.handle_message(EpochMessage::Globally(Epoch(1)));
        assert!(matches!(wrong, Err(StandbyVmError::Card { .. })));
        let mut bare = member();
        received(&mut bare, vec![end(0), devices(1)]);
        assert!(matches!(bare.handle_message(end(1)), Err(StandbyVmError::Card { .. })));
    }
}
