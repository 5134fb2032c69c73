//! What the backup holds of a VM. Pure: messages in, progress out, and pages into a [`Ram`].
//!
//! ```text
//!                  pages, devices                end, checksum right
//!     nothing -----------------> arriving(n) ------------------------> kept(n): complete      the newest
//!        |                                                                |
//!        |  epoch 0, the seed:                                            |  n + 1 complete
//!        '--> written as it comes; no state by itself                     v
//!                                                   folded into RAM, devices(n): committed    what a failover runs
//! ```
//!
//! Of a member of a cluster, what is newer than the newest global checkpoint stays apart, for a failover goes back to that:
//!
//! ```text
//!     [ RAM, devices at 7 ]   [ 8 ][ 9 ] .. [ 12 ]    [ 13 ]          Globally(9) folds 8 and 9
//!       a global checkpoint     committed: any of     complete
//!       has it                  them may be marked
//! ```
//!
//! RAM changes only by folding a committed epoch: it always is that of the newest committed one, ready to be mapped by a
//! hypervisor. What arrives is kept apart until it is whole, and then until the next is.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use firn_cluster::epoch::{Arrival, Backup, Piece, Progress, RestoreError};
use firn_cluster::member::{EPOCHS_KEPT_MAX, Kept, Membership, OfEpoch};
use firn_cluster::{Epoch, Seq};
use firn_disks::{Change, Store};
use firn_image::AuxBlock;
use firn_types::{PAGE_SIZE, Page, RegionMap};
use thiserror::Error;

use crate::delta::Patches;
use crate::wire::{Message, Pages};

/// Epochs kept at most: one that is complete, and one that has just become so.
const KEPT_MAX: u64 = 2;
/// Bytes that what is kept of a member's card is counted by; the primary bounds it.
const CARD_BYTES_MAX: usize = 64 << 20;

/// Blocks of memory beside RAM that an epoch has at most, and their bytes in all.
const AUX_MAX: usize = 64;
const AUX_BYTES_MAX: usize = 1 << 30;

/// Where the memory of the committed epoch is.
pub trait Ram {
    /// Gives some bytes of a page new contents, from `at` on.
    ///
    /// # Errors
    /// If there is no room for it.
    fn write(&mut self, page: Page, at: usize, bytes: &[u8]) -> io::Result<()>;
}

/// Why the backup takes nothing more.
#[derive(Debug, Error)]
pub enum StandbyError {
    /// A message of an epoch whose turn it is not, or of another direction.
    #[error("a message of {got} came where {expected} was expected; start protecting the VM anew")]
    Order {
        /// What came.
        got: Epoch,
        /// What should have come.
        expected: Epoch,
    },
    /// A message that no primary sends there.
    #[error("the primary sent a message that only a backup sends, or introduced itself twice")]
    Message,
    /// A page that the VM does not have.
    #[error("{page} is no page of the VM, which has {pages}")]
    Page {
        /// The page.
        page: Page,
        /// How many there are.
        pages: u32,
    },
    /// An epoch of more pages than the VM has, or of more blocks beside them than any has.
    #[error("{epoch} is larger than the VM")]
    Much {
        /// Which one.
        epoch: Epoch,
    },
    /// An epoch that nothing could be run from.
    #[error("{epoch} has no state of the VM's devices")]
    NoDevices {
        /// Which one.
        epoch: Epoch,
    },
    /// An epoch could not be folded: the copy is spoiled.
    #[error("{epoch} could not be written to the VM's memory here; the copy is of no use any more")]
    Ram {
        /// Which one.
        epoch: Epoch,
        /// What the system said.
        source: io::Error,
    },
    /// A disk.
    #[error("the VM's disk here takes nothing more; its copy is of no use")]
    Disk(#[from] firn_disks::standby::StandbyError),
    /// There is no such disk.
    #[error("the VM has no disk {number}; it has {count}")]
    NoDisk {
        /// Which one.
        number: u32,
        /// How many there are.
        count: usize,
    },
    /// A disk and memory disagree, which is a bug.
    #[error("a disk is that of {disk}, memory that of {memory}")]
    Apart {
        /// The disk's epoch.
        disk: Epoch,
        /// Memory's.
        memory: Epoch,
    },
    /// There is nothing that could be run.
    #[error(
        "no epoch is committed: the primary has to be protected for two intervals after the first whole copy"
    )]
    Nothing,
    /// What only a member of a cluster has, or what it has to have.
    #[error("{epoch} has no part of the VM's network card, or one for a VM that is in no cluster")]
    Card {
        /// Which one.
        epoch: Epoch,
    },
    /// An epoch that is not here any more, or not yet.
    #[error(transparent)]
    Restore(#[from] RestoreError),
}

/// An epoch that is not yet in RAM.
#[derive(Debug, Default)]
struct Apart {
    pages: Vec<Pages>,
    /// Parts of others.
    patches: Vec<Patches>,
    /// How many pages both take.
    count: u64,
    devices: Vec<u8>,
    aux: Vec<AuxBlock>,
    card: Option<OfEpoch>,
}

/// The state of a VM that can be run.
#[derive(Debug)]
pub struct Committed<R> {
    /// At the end of which epoch.
    pub epoch: Epoch,
    /// Its memory.
    pub ram: R,
    /// Devices and vCPUs.
    pub devices: Vec<u8>,
    /// Small RAM blocks beside guest RAM.
    pub aux: Vec<AuxBlock>,
    /// Its network card, if it belongs to a cluster.
    pub card: Option<(Membership, Kept)>,
}

/// The copies of one VM.
#[derive(Debug)]
pub struct Standby<R> {
    regions: RegionMap,
    ram: R,
    epochs: Backup,
    is_seeded: bool,
    is_spoiled: bool,
    arriving: Apart,
    kept: BTreeMap<Epoch, Apart>,
    /// Devices and the like of the newest committed epoch.
    committed: Apart,
    disks: Vec<DiskCopy>,
    member: Option<(Membership, Kept)>,
    /// The newest epoch that a global checkpoint has.
    global: Epoch,
}

/// The copy of a disk.
pub type DiskCopy = firn_disks::Standby<Arc<dyn Store>>;

impl<R: Ram> Standby<R> {
    /// Of a VM with this RAM, of which nothing is known: `ram` is all zeros.
    pub fn new(regions: RegionMap, ram: R) -> Self {
        Self::with_disks(regions, ram, Vec::new())
    }

    /// The same, of a VM that has disks as well, of which nothing is known either.
    pub fn with_disks(regions: RegionMap, ram: R, disks: Vec<DiskCopy>) -> Self {
        Self {
            regions,
            ram,
            epochs: Backup::new(Epoch(0), KEPT_MAX),
            is_seeded: false,
            is_spoiled: false,
            arriving: Apart::default(),
            kept: BTreeMap::new(),
            committed: Apart::default(),
            disks,
            member: None,
            global: Epoch(0),
        }
    }

    /// The same, of a VM that belongs to a cluster, if it does.
    pub fn of_member(mut self, of: Option<Membership>) -> Self {
        if let Some(of) = of {
            self.epochs = Backup::new(Epoch(0), EPOCHS_KEPT_MAX);
            self.member = Some((of, Kept::new(Epoch(0), CARD_BYTES_MAX)));
        }
        self
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.epochs.progress()
    }

    /// Takes a message. The progress is to be told to the primary.
    pub fn receive(&mut self, message: Message) -> Result<Option<Progress>, StandbyError> {
        match message {
            Message::Pages(epoch, pages) => self.pages(epoch, pages)?,
            Message::Patches(epoch, patches) => self.patches(epoch, patches)?,
            Message::Devices(epoch, devices) => self.expect(epoch)?.devices = devices,
            Message::Aux(epoch, block) => self.aux(epoch, block)?,
            Message::Changes(epoch, disk, changes) => self.changes(epoch, disk, changes)?,
            Message::Card(epoch, of) => self.expect(epoch)?.card = Some(of),
            Message::Globally(epoch) => self.globally(epoch)?,
            Message::Gone(seq) => self.gone(seq)?,
            Message::End { epoch, last } => return self.end(epoch, last).map(Some),
            Message::Hello(_)
            | Message::Progress(_)
            | Message::Refusal(_)
            | Message::Release
            | Message::PrimaryEnd(_)
            | Message::EndNoted
            | Message::Decline(_) => return Err(StandbyError::Message),
        }
        Ok(None)
    }

    /// Gives up what is newer than `at`, the newest that is committed if it is not said, and everything else to whoever runs it.
    pub fn take_up(mut self, at: Option<Epoch>) -> Result<Committed<R>, StandbyError> {
        let epoch = at.unwrap_or(self.progress().committed);
        if epoch == Epoch(0) || self.is_spoiled {
            return Err(StandbyError::Nothing);
        }
        let fold = self.epochs.restore(epoch)?.fold;
        self.fold(fold)?;
        if self.member.is_some() {
            self.fold_disks(epoch)?;
        }
        let card = self.member.map(|(of, mut kept)| {
            kept.roll_back(epoch);
            (of, kept)
        });
        for disk in self.disks {
            let (disk, _) = disk.take_up()?;
            if disk != epoch {
                return Err(StandbyError::Apart { disk, memory: epoch });
            }
        }
        let Apart { devices, aux, .. } = self.committed;
        Ok(Committed { epoch, ram: self.ram, devices, aux, card })
    }

    /// What has arrived of an epoch, if it is its turn.
    fn expect(&mut self, got: Epoch) -> Result<&mut Apart, StandbyError> {
        let expected = match self.is_seeded {
            true => self.progress().complete.next(),
            false => Epoch(0),
        };
        match got == expected {
            true => Ok(&mut self.arriving),
            false => Err(StandbyError::Order { got, expected }),
        }
    }

    fn pages(&mut self, epoch: Epoch, pages: Pages) -> Result<(), StandbyError> {
        self.expect(epoch)?;
        self.check(epoch, pages.numbers.iter().copied())?;
        match self.is_seeded {
            true => {
                self.arriving.count += pages.numbers.len() as u64;
                self.arriving.pages.push(pages);
            }
            false => self.write(epoch, &pages)?,
        }
        Ok(())
    }

    /// What is patched is in the epoch before, so the seed can't be.
    fn patches(&mut self, epoch: Epoch, patches: Patches) -> Result<(), StandbyError> {
        self.expect(epoch)?;
        self.check(epoch, patches.iter().map(|(page, ..)| page))?;
        if !self.is_seeded {
            return Err(StandbyError::Message);
        }
        self.arriving.count += patches.bytes().len().div_ceil(PAGE_SIZE) as u64;
        self.arriving.patches.push(patches);
        Ok(())
    }

    /// Whether the VM has these pages, and could have that many.
    fn check(
        &self,
        epoch: Epoch,
        mut pages: impl Iterator<Item = Page>,
    ) -> Result<(), StandbyError> {
        let count = self.regions.total_pages();
        if let Some(page) = pages.find(|page| self.regions.region_of(*page).is_none()) {
            return Err(StandbyError::Page { page, pages: count });
        }
        match self.arriving.count > u64::from(count) {
            true => Err(StandbyError::Much { epoch }),
            false => Ok(()),
        }
    }

    fn aux(&mut self, epoch: Epoch, block: AuxBlock) -> Result<(), StandbyError> {
        let arriving = self.expect(epoch)?;
        arriving.aux.push(block);
        let bytes: usize = arriving.aux.iter().map(|block| block.bytes.len()).sum();
        match arriving.aux.len() <= AUX_MAX && bytes <= AUX_BYTES_MAX {
            true => Ok(()),
            false => Err(StandbyError::Much { epoch }),
        }
    }

    fn changes(
        &mut self,
        epoch: Epoch,
        number: u32,
        changes: Vec<Change>,
    ) -> Result<(), StandbyError> {
        self.expect(epoch)?;
        let count = self.disks.len();
        let disk = self.disks.get_mut(number as usize);
        let disk = disk.ok_or(StandbyError::NoDisk { number, count })?;
        Ok(disk.receive(epoch, changes)?)
    }

    fn end(&mut self, epoch: Epoch, last: bool) -> Result<Progress, StandbyError> {
        let mut arrived = std::mem::take(self.expect(epoch)?);
        if !self.is_seeded {
            self.is_seeded = true;
            self.disks.iter_mut().try_for_each(|disk| disk.complete(epoch))?;
            return Ok(self.progress());
        }
        if arrived.devices.is_empty() {
            return Err(StandbyError::NoDevices { epoch });
        }
        if arrived.card.is_some() != self.member.is_some() {
            return Err(StandbyError::Card { epoch });
        }
        let expected = self.progress().complete.next();
        match self.epochs.arrived(Piece { epoch, index: 0, of: 1, last }) {
            Arrival::Store => {
                self.disks.iter_mut().try_for_each(|disk| disk.complete(epoch))?;
                if let (Some(of), Some((_, kept))) = (arrived.card.take(), &mut self.member) {
                    kept.complete(epoch, of);
                }
                self.kept.insert(epoch, arrived)
            }
            Arrival::Known | Arrival::Refused => {
                return Err(StandbyError::Order { got: epoch, expected });
            }
        };
        if self.member.is_none() {
            self.fold_up_to(self.progress().committed)?;
        }
        Ok(self.progress())
    }

    /// A global checkpoint has this epoch.
    fn globally(&mut self, epoch: Epoch) -> Result<(), StandbyError> {
        if self.member.is_none() {
            return Err(StandbyError::Card { epoch });
        }
        self.fold_up_to(epoch)?;
        if let Some((_, kept)) = self.member.as_mut().filter(|_| epoch > self.global) {
            kept.globally(epoch);
            self.global = epoch;
        }
        Ok(())
    }

    /// It need not be sent again, whichever epoch a failover goes back to.
    fn gone(&mut self, seq: Seq) -> Result<(), StandbyError> {
        let epoch = self.progress().complete;
        let (_, kept) = self.member.as_mut().ok_or(StandbyError::Card { epoch })?;
        kept.gone(seq);
        Ok(())
    }

    fn fold_up_to(&mut self, epoch: Epoch) -> Result<(), StandbyError> {
        let fold = self.epochs.globally(epoch)?;
        self.fold(fold)?;
        self.fold_disks(epoch)
    }

    /// Brings disks to an epoch that is committed. Nobody is told that it is committed before: of what could not be folded nothing
    /// has left the primary.
    fn fold_disks(&mut self, committed: Epoch) -> Result<(), StandbyError> {
        let folded = self.disks.iter_mut().try_for_each(|disk| {
            disk.commit(committed)?;
            while disk.fold()?.is_some() {}
            Ok::<_, firn_disks::standby::StandbyError>(())
        });
        self.is_spoiled |= folded.is_err();
        Ok(folded?)
    }

    /// Writes these to RAM, in order.
    fn fold(&mut self, epochs: Vec<Epoch>) -> Result<(), StandbyError> {
        for epoch in epochs {
            let Some(apart) = self.kept.remove(&epoch) else { continue };
            let Apart { pages, patches, .. } = &apart;
            pages.iter().try_for_each(|pages| self.write(epoch, pages))?;
            patches.iter().flat_map(Patches::iter).try_for_each(|it| self.write_some(epoch, it))?;
            self.committed = Apart { pages: Vec::new(), patches: Vec::new(), ..apart };
        }
        Ok(())
    }

    fn write(&mut self, epoch: Epoch, pages: &Pages) -> Result<(), StandbyError> {
        pages.iter().try_for_each(|(page, bytes)| self.write_some(epoch, (page, 0, bytes)))
    }

    fn write_some(
        &mut self,
        epoch: Epoch,
        (page, at, bytes): (Page, usize, &[u8]),
    ) -> Result<(), StandbyError> {
        let written = self.ram.write(page, at, bytes);
        self.is_spoiled |= written.is_err();
        written.map_err(|source| StandbyError::Ram { epoch, source })
    }
}

#[cfg(test)]
mod tests {
    use firn_cluster::member::{Member, Times};
    use firn_cluster::output::{Sent, To};
    use firn_cluster::switch::Mac;
    use firn_cluster::{Generation, Vm};

    use super::*;

    /// The first byte of each page.
    #[derive(Debug, Default, PartialEq)]
    struct Bytes([u8; 4]);

    impl Ram for Bytes {
        fn write(&mut self, page: Page, at: usize, bytes: &[u8]) -> io::Result<()> {
            if at == 0 {
                self.0[page.index()] = bytes[0];
            }
            Ok(())
        }
    }

    fn standby() -> Standby<Bytes> {
        let regions = RegionMap::lay_out([("ram", 4 * PAGE_SIZE as u64)]).unwrap();
        Standby::new(regions, Bytes::default())
    }

    fn pages(epoch: u64, page: u32, fill: u8) -> Message {
        let pages = Pages { numbers: vec![Page(page)], bytes: vec![fill; PAGE_SIZE] };
        Message::Pages(Epoch(epoch), pages)
    }

    fn devices(epoch: u64) -> Message {
        Message::Devices(Epoch(epoch), vec![epoch as u8])
    }

    fn end(epoch: u64) -> Message {
        Message::End { epoch: Epoch(epoch), last: false }
    }

    fn received(standby: &mut Standby<Bytes>, messages: Vec<Message>) -> Option<Progress> {
        messages.into_iter().fold(None, |_, message| standby.receive(message).unwrap())
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
        assert_eq!(progress, Some(Progress { complete: Epoch(2), committed: Epoch(1) }));
        let committed = standby.take_up(None).unwrap();
        assert_eq!(committed.ram, Bytes([1, 2, 0, 0]));
        assert_eq!((committed.epoch, committed.devices), (Epoch(1), vec![1]));
    }

    #[test]
    fn an_epoch_that_has_not_ended_changes_nothing() {
        let mut standby = standby();
        received(&mut standby, vec![end(0), devices(1), end(1), pages(2, 0, 9)]);
        assert_eq!(standby.ram, Bytes::default());
        assert!(matches!(standby.take_up(None), Err(StandbyError::Nothing)));
    }

    #[test]
    fn the_last_epoch_is_committed_at_once() {
        let mut standby = standby();
        let last = Message::End { epoch: Epoch(1), last: true };
        received(&mut standby, vec![end(0), devices(1), pages(1, 3, 7), last]);
        assert_eq!(standby.take_up(None).unwrap().ram, Bytes([0, 0, 0, 7]));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let mut standby = standby();
        assert!(matches!(standby.receive(end(1)), Err(StandbyError::Order { .. })));
        assert!(matches!(standby.receive(pages(0, 4, 1)), Err(StandbyError::Page { .. })));
        let refusal = Message::Refusal("no".into());
        assert!(matches!(standby.receive(refusal), Err(StandbyError::Message)));
        received(&mut standby, vec![end(0)]);
        assert!(matches!(standby.receive(pages(2, 0, 1)), Err(StandbyError::Order { .. })));
        assert!(matches!(standby.receive(end(1)), Err(StandbyError::NoDevices { .. })));
    }

    fn patch(epoch: u64, page: u32, fill: u8) -> Message {
        let mut patches = Patches::default();
        patches.add(Page(page), &[0..1, 8..9], &[fill; PAGE_SIZE]);
        Message::Patches(Epoch(epoch), patches)
    }

    #[test]
    fn what_is_patched_is_what_was_there_before() {
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
        assert!(matches!(standby.receive(patch(0, 0, 1)), Err(StandbyError::Message)));
        received(&mut standby, vec![end(0)]);
        assert!(matches!(standby.receive(patch(1, 4, 1)), Err(StandbyError::Page { .. })));
        assert!(matches!(standby.receive(patch(2, 0, 1)), Err(StandbyError::Order { .. })));
        let mut again = (0..20).map(|_| standby.receive(patch(1, 0, 1)));
        assert!(again.any(|it| matches!(it, Err(StandbyError::Much { .. }))));
    }

    #[test]
    fn an_epoch_is_no_larger_than_the_vm() {
        let mut one = standby();
        received(&mut one, vec![end(0)]);
        let mut again = (0..20).map(|_| one.receive(pages(1, 0, 1)));
        assert!(again.any(|it| matches!(it, Err(StandbyError::Much { .. }))));
        let mut other = standby();
        received(&mut other, vec![end(0)]);
        let block = AuxBlock { id: "vga".into(), bytes: vec![0] };
        let mut again = (0..=AUX_MAX).map(|_| other.receive(Message::Aux(Epoch(1), block.clone())));
        assert!(again.any(|it| matches!(it, Err(StandbyError::Much { .. }))));
    }

    #[test]
    fn a_copy_without_room_is_not_run() {
        struct Full;
        impl Ram for Full {
            fn write(&mut self, _: Page, _: usize, _: &[u8]) -> io::Result<()> {
                Err(io::ErrorKind::StorageFull.into())
            }
        }
        let regions = RegionMap::lay_out([("ram", 4 * PAGE_SIZE as u64)]).unwrap();
        let mut standby = Standby::new(regions, Full);
        for message in [end(0), pages(1, 0, 1), devices(1), end(1), devices(2)] {
            standby.receive(message).unwrap();
        }
        assert!(matches!(standby.receive(end(2)), Err(StandbyError::Ram { .. })));
        assert!(matches!(standby.take_up(None), Err(StandbyError::Nothing)));
    }

    fn member() -> Standby<Bytes> {
        let members = [0, 1].map(|vm| (Vm(vm), Mac([2, 0, 0, 0, 0, vm as u8]))).into();
        let (cluster, own, generation, layout) = (1, Vm(0), Generation(1), 0);
        standby().of_member(Some(Membership { cluster, own, members, generation, layout }))
    }

    /// An epoch of a member: one page, and one frame to the other.
    fn epoch(number: u64) -> Vec<Message> {
        let bytes = [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 8, 0][..], &[number as u8]].concat();
        let sent = vec![Sent { to: To::Vm(Vm(1)), seq: Seq(number), frame: bytes.into() }];
        let of = OfEpoch { sent, ..OfEpoch::default() };
        let card = Message::Card(Epoch(number), of);
        vec![pages(number, 0, number as u8), card, devices(number), end(number)]
    }

    #[test]
    fn a_member_goes_back_to_any_epoch_since_the_newest_global_checkpoint() {
        let run = |globally: Option<u64>, at: u64| {
            let mut standby = member();
            received(&mut standby, vec![end(0)]);
            let epochs = (1..=6).flat_map(epoch);
            let far = received(&mut standby, epochs.collect());
            assert_eq!(far, Some(Progress { complete: Epoch(6), committed: Epoch(5) }));
            assert_eq!(standby.ram, Bytes::default(), "all of them are kept");
            let told = globally.map(|epoch| Message::Globally(Epoch(epoch)));
            received(&mut standby, told.into_iter().collect());
            standby.take_up(Some(Epoch(at)))
        };
        for (globally, at) in [(None, 1), (None, 5), (Some(3), 3), (Some(3), 5)] {
            let Committed { epoch, ram, devices, card, .. } = run(globally, at).unwrap();
            assert_eq!((epoch, ram.0[0], devices), (Epoch(at), at as u8, vec![at as u8]));
            let (of, kept) = card.unwrap();
            let again = Member::new(&of, Times::default(), epoch, kept).committed(epoch).len();
            assert_eq!(again, at as usize, "what was in flight is there");
        }
        assert!(matches!(run(Some(3), 2), Err(StandbyError::Restore(_))), "it is folded");
        assert!(matches!(run(None, 6), Err(StandbyError::Restore(_))), "it is not committed");
    }

    #[test]
    fn what_has_left_is_known_whatever_is_undone() {
        let run = |gone: Vec<Message>| {
            let mut standby = member();
            received(&mut standby, vec![end(0)]);
            for number in 1..=4 {
                let bytes = vec![2; 60];
                let sent = Sent { to: To::Outside, seq: Seq(number), frame: bytes.into() };
                // The last one says that the first had left.
                let trimmed = if number == 4 { vec![(To::Outside, Seq(1))] } else { Vec::new() };
                let of = OfEpoch { sent: vec![sent], trimmed, ..OfEpoch::default() };
                let card = Message::Card(Epoch(number), of);
                received(&mut standby, vec![card, devices(number), end(number)]);
            }
            received(&mut standby, vec![Message::Globally(Epoch(2))]);
            received(&mut standby, gone);
            let Committed { epoch, card, .. } = standby.take_up(Some(Epoch(2))).unwrap();
            let (of, kept) = card.unwrap();
            Member::new(&of, Times::default(), epoch, kept).globally(epoch).len()
        };
        assert_eq!(run(Vec::new()), 1);
        assert_eq!(run(vec![Message::Gone(Seq(2))]), 0);
        let mut alone = standby();
        assert!(matches!(alone.receive(Message::Gone(Seq(1))), Err(StandbyError::Card { .. })));
    }

    #[test]
    fn a_global_checkpoint_is_of_what_is_committed_and_of_members() {
        let mut standby = member();
        received(&mut standby, vec![end(0)]);
        received(&mut standby, (1..=3).flat_map(epoch).collect());
        received(&mut standby, vec![Message::Globally(Epoch(2))]);
        assert_eq!(standby.ram, Bytes([2, 0, 0, 0]));
        received(&mut standby, vec![Message::Globally(Epoch(1))]);
        let early = standby.receive(Message::Globally(Epoch(3)));
        assert!(matches!(early, Err(StandbyError::Restore(_))));
        let mut alone = self::standby();
        received(&mut alone, vec![end(0)]);
        let wrong = alone.receive(Message::Globally(Epoch(1)));
        assert!(matches!(wrong, Err(StandbyError::Card { .. })));
        let mut bare = member();
        received(&mut bare, vec![end(0), devices(1)]);
        assert!(matches!(bare.receive(end(1)), Err(StandbyError::Card { .. })));
    }
}
