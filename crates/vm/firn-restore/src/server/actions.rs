//! The actions that the page server asks its threads to take.

use std::ops::Range;
use std::time::Duration;

use firn_types::{Block, Page};

use super::{PageMask, ReadUnit};

/// Where the stored bytes of a unit are. `B` is a handle to bytes in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnitSource<B> {
    /// In memory.
    Held(B),
    /// In the file, and read not long ago: most likely in the page cache, so reading them again
    /// costs no disk access.
    PageCache,
}

/// A memory block to decode and install.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockInstall<B> {
    /// The memory block.
    pub block: Block,
    /// The unit that holds it.
    pub unit: ReadUnit,
    /// Which of its pages.
    pub pages: PageMask,
    /// Where its stored bytes are.
    pub source: UnitSource<B>,
    /// The page that a vCPU waits for, if one does: this page is installed first.
    pub wanted: Option<Page>,
    /// [`super::PageServer::version`] when this was decided. If it has changed, call
    /// [`super::PageServer::missing_in`] again before installing: the guest may have given a page
    /// back.
    pub version: u32,
}

/// How to answer a page fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultAnswer<B> {
    /// These pages are zeros.
    Zero(Range<Page>),
    /// This page has been settled: it is zeros, unless it is present.
    AlreadySettled(Page),
    /// Decode and install this block.
    Install(BlockInstall<B>),
    /// Its unit has not been read: check whether the page cache has it, and report
    /// [`super::PageServer::record_cache_hit`] or [`super::PageServer::record_cache_miss`].
    TryPageCache(BlockInstall<()>),
    /// Its unit has not been read, and the storage has high latency, so that a check of the page
    /// cache would cost an access of its own: report [`super::PageServer::record_cache_miss`].
    RequestRead(BlockInstall<()>),
    /// Its unit is being read; the thread that reads it installs the block first.
    Wait,
}

/// What a thread that installs does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstallWork<B> {
    /// Decode and install this block.
    Install(BlockInstall<B>),
    /// The guest waits for a page that has been settled: it is zeros, unless it is present.
    AlreadySettled(Page),
}

impl<B> InstallWork<B> {
    /// Whether the guest waits for it.
    pub fn is_wanted(&self) -> bool {
        match self {
            Self::Install(install) => install.wanted.is_some(),
            Self::AlreadySettled(_) => true,
        }
    }
}

/// Units to read at once, for a thread that may wait for storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitRead {
    /// Neighbouring units.
    pub units: Range<u32>,
    /// Why they are read.
    pub why: ReadReason,
    /// Whether all that follows in the image is read soon as well, in order.
    pub in_order: bool,
}

impl UnitRead {
    /// Each unit, and why it is read: in a demand read the guest waits for the first unit, and the
    /// others are fill.
    pub fn units_with_reasons(&self) -> impl Iterator<Item = (ReadUnit, ReadReason)> + use<> {
        let beside = match self.why {
            ReadReason::Demand => ReadReason::Fill,
            why => why,
        };
        let (first, why) = (self.units.start, self.why);
        self.units
            .clone()
            .map(move |unit| (ReadUnit(unit), if unit == first { why } else { beside }))
    }
}

/// Why a unit is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadReason {
    /// The guest waits for a page of it.
    Demand,
    /// It is prefetched before the guest touches it: eager and working-set restore.
    Ahead,
    /// Background fill.
    Fill,
}

/// What a reading thread does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadDecision {
    /// Read these units.
    Read(UnitRead),
    /// Call again at this time, or when [`ThreadWakeups`] ask for it.
    At(Duration),
    /// Call again when [`ThreadWakeups`] ask for it.
    Idle,
}

/// The threads that an event gives something to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct ThreadWakeups {
    /// There is something to read that the guest waits for.
    pub demand: bool,
    /// There may be something to read that the guest does not wait for.
    pub background: bool,
    /// There is something to install.
    pub workers: bool,
    /// The last page that was to be [prefetched](ReadReason::Ahead) has just been installed.
    pub ahead: bool,
    /// No page of the image is missing in memory any more.
    pub finished: bool,
}

/// The counts of a restore. Each page is counted once, when it is installed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestoreCounts {
    /// Page faults seen.
    pub faults: u64,
    /// Of these, on pages that hold zeros.
    pub zero_faults: u64,
    /// Of these, on pages that had been installed before the server handled the fault.
    pub late_faults: u64,
    /// Of these, on a unit that was being read already.
    pub joined_faults: u64,
    /// Units brought in because of a fault.
    pub demand_units: u64,
    /// Of these, read by a thread that had to wait for storage; the others came from the page
    /// cache.
    pub demand_reads: u64,
    /// Units prefetched.
    pub ahead_units: u64,
    /// Units read in the background.
    pub fill_units: u64,
    /// Pages that the guest waited for.
    pub on_demand_pages: u64,
    /// Pages that were installed with those, because they are in the same unit.
    pub beside_pages: u64,
    /// Pages installed by prefetching.
    pub ahead_pages: u64,
    /// Pages installed by the background fill.
    pub fill_pages: u64,
    /// Whether prefetching ended because the guest used other pages than predicted.
    pub diverged: bool,
    /// Pages the guest gave back before they were installed.
    pub removed_pages: u64,
    /// With [`super::PageServerRules::account_use`]: pages of `beside` and `ahead` units that the
    /// guest can touch.
    pub prefetched_pages: u64,
    /// Of these, touched by the guest.
    pub prefetched_used_pages: u64,
}
