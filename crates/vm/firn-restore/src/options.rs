//! Options of a restore.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::{Duration, Instant};

use firn_image::Image;
use firn_types::{Block, ThreadId, VcpuId};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::learned::LEARNING_WINDOW;
use crate::server::{PageServerRules, expected_misses, is_working_set_complete};

/// The order in which memory is restored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RestoreMode {
    /// All of it before the guest runs.
    Eager,
    /// One memory block per fault, the others in the background in physical order: the baseline
    /// that Halite is compared with (section 3 there). For one page per fault, as ESXi did, take an
    /// image with memory blocks of one page.
    Lazy,
    /// One locality block per fault, the memory block that faulted first, the others in the
    /// background in stored order (Halite, section 7.1).
    Locality,
    /// The working set that the image lists before the guest runs (Zhang et al., VEE 2011, section
    /// 4.2), all other blocks on demand and in the background, as suits the storage.
    WorkingSet,
    /// As [`RestoreMode::Locality`], and at the same time the working set as fast as storage and
    /// the guest allow, in the order in which it was touched, beginning before the hypervisor runs.
    /// The guest waits for it only if it could do nothing else without it and all of it will be
    /// there soon: because storage has high latency, or because the working set is complete and the
    /// guest uses the same pages again and again. If the guest turns out to need other memory,
    /// prefetching ends.
    #[default]
    Auto,
}

impl RestoreMode {
    const NAMES: [(Self, &'static str); 5] = [
        (Self::Auto, "auto"),
        (Self::Eager, "eager"),
        (Self::Lazy, "lazy"),
        (Self::Locality, "locality"),
        (Self::WorkingSet, "working-set"),
    ];
}

impl fmt::Display for RestoreMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(mode, _)| mode == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

/// A word that is not the name of a restore mode.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is no restore mode; they are auto, eager, lazy, locality and working-set")]
pub struct ModeError(String);

impl FromStr for RestoreMode {
    type Err = ModeError;

    fn from_str(word: &str) -> Result<Self, ModeError> {
        let found = Self::NAMES.iter().find(|(_, name)| *name == word);
        found.map(|(mode, _)| *mode).ok_or_else(|| ModeError(word.to_owned()))
    }
}

/// What is read without the guest waiting for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackgroundFill {
    /// Everything, from the beginning, while the guest seldom waits for storage.
    #[default]
    AtOnce,
    /// Everything, once the guest is responsive, with half of the storage's time: where reads cost
    /// money, or a share of a link that others use.
    WhenResponsive,
    /// As [`Self::WhenResponsive`], but not before [`LEARNING_WINDOW`] is over: what is loaded in the
    /// background is not learned. For the first restore of an image that is restored often. With
    /// [`RestoreOptions::account_use`] nothing that the guest uses is missed.
    AfterLearning,
    /// Nothing: memory that the guest does not touch is never read, and the restore does not end by
    /// itself. For experiments; [`crate::RunningRestore::set_fill`] ends it.
    Off,
}

impl BackgroundFill {
    const NAMES: [(Self, &'static str); 4] = [
        (Self::AtOnce, "at-once"),
        (Self::WhenResponsive, "when-responsive"),
        (Self::AfterLearning, "after-learning"),
        (Self::Off, "off"),
    ];

    /// Whether it waits for the guest.
    pub(crate) fn is_late(self) -> bool {
        matches!(self, Self::WhenResponsive | Self::AfterLearning)
    }
}

/// The user's choices for the background fill of a restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FillChoices {
    /// When it reads; `None` is the default for the image's storage.
    #[serde(default, rename = "fill", skip_serializing_if = "Option::is_none")]
    pub when: Option<BackgroundFill>,
    /// Maximum number of bytes per second that are read from the image. The fill waits, what the guest
    /// requests does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<NonZeroU64>,
}

impl fmt::Display for BackgroundFill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(fill, _)| fill == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

/// A word that is no [`BackgroundFill`] of a user's.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is neither at-once nor when-responsive nor after-learning")]
pub struct BackgroundFillError(String);

impl FromStr for BackgroundFill {
    type Err = BackgroundFillError;

    fn from_str(word: &str) -> Result<Self, BackgroundFillError> {
        let found = Self::NAMES.iter().find(|(_, name)| *name == word);
        let is_for_users = |fill: &Self| *fill != Self::Off;
        let found = found.map(|(fill, _)| *fill).filter(is_for_users);
        found.ok_or_else(|| BackgroundFillError(word.to_owned()))
    }
}

/// What happens to a VM whose guest needs a page that can't be read or installed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReadFailurePolicy {
    /// The guest waits: the page is tried again until it is installed.
    #[default]
    Stop,
    /// The restore fails after a few attempts.
    Kill,
}

impl ReadFailurePolicy {
    const NAMES: [(Self, &'static str); 2] = [(Self::Stop, "stop"), (Self::Kill, "kill")];
}

impl fmt::Display for ReadFailurePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name =
            Self::NAMES.iter().find(|(choice, _)| choice == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

/// A word that is not the name of a [`ReadFailurePolicy`].
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is neither stop nor kill")]
pub struct ReadFailurePolicyError(String);

impl FromStr for ReadFailurePolicy {
    type Err = ReadFailurePolicyError;

    fn from_str(word: &str) -> Result<Self, ReadFailurePolicyError> {
        let found = Self::NAMES.iter().find(|(_, name)| *name == word);
        found.map(|(choice, _)| *choice).ok_or_else(|| ReadFailurePolicyError(word.to_owned()))
    }
}

/// Maximum number of bytes that a guest waits for, from low-latency storage: one or two seconds'
/// worth.
const AWAITED_BYTES_MAX: u64 = 256 << 20;

/// How to restore.
#[derive(Clone, Debug)]
pub struct RestoreOptions {
    /// The order in which memory is restored.
    pub mode: RestoreMode,
    /// What happens to a VM whose guest may run and whose memory can't be read. Before that, a
    /// restore fails.
    pub on_error: ReadFailurePolicy,
    /// Memory blocks that are expected to be used beside the working set of the image; see
    /// [`crate::LearnedBlocks`].
    pub also_expected: Vec<Block>,
    /// Threads that decode and install what the guest does not wait for; at least one.
    pub workers: usize,
    /// Threads that wait for storage; at least two, one of which does the background fill.
    pub readers: usize,
    /// The latency of the image's storage that earlier restores found
    /// ([`crate::RunningRestore::found_latency`]), if it is high.
    pub known_latency: Option<Duration>,
    /// The share of the working set that was found in the last eighth of the time in which the
    /// guest was traced, if it was.
    pub found_late: Option<f64>,
    /// What is read without the guest waiting for it.
    pub fill: BackgroundFill,
    /// Maximum number of bytes per second that are read from the image, if there is a limit: the
    /// background fill waits for it.
    pub bandwidth: Option<NonZeroU64>,
    /// Bytes of the image are in object storage. There, requests run beside each other, and another
    /// process has requested the working set already: nothing is gained by long reads in stored order,
    /// and what is read beside them costs money.
    pub is_in_store: bool,
    /// Maximum number of bytes of the image held in memory, besides what is being read.
    pub held_bytes_max: u64,
    /// Count which prefetched pages the guest touches later (Halite, section 8.1.2; Zhang et al.,
    /// section 5.4.1). Until everything else is read, prefetched pages are not installed, and each
    /// first touch is a fault answered from the page cache. For experiments: it costs the guest
    /// time.
    pub account_use: bool,
    /// When the user requested the restore: the zero of all times in the run record.
    pub since: Instant,
    /// Which thread runs which vCPU, for the run record.
    pub vcpus: Vec<(ThreadId, VcpuId)>,
}

impl Default for RestoreOptions {
    fn default() -> Self {
        Self {
            mode: RestoreMode::default(),
            on_error: ReadFailurePolicy::default(),
            also_expected: Vec::new(),
            workers: 2,
            readers: 4,
            known_latency: None,
            found_late: None,
            fill: BackgroundFill::default(),
            bandwidth: None,
            is_in_store: false,
            held_bytes_max: 16 << 20,
            account_use: false,
            since: Instant::now(),
            vcpus: Vec::new(),
        }
    }
}

/// Maximum number of bytes of one background read: enough that a disk spends its time reading, not
/// seeking. And few enough for one request: a virtio disk takes 254 pages that are not contiguous
/// (`/sys/block/*/queue/max_segments`), and storage with a limit on requests would count a mebibyte
/// twice.
const RUN_BYTES_MAX: u32 = 960 << 10;

impl RestoreOptions {
    /// The options with this mode and defaults otherwise.
    pub fn new(mode: RestoreMode) -> Self {
        Self { mode, ..Self::default() }
    }

    /// Maximum number of read units of `unit_bytes` in one background read.
    pub(crate) fn run_max(&self, unit_bytes: u32) -> u32 {
        match self.mode {
            RestoreMode::Lazy => 1,
            _ => (RUN_BYTES_MAX / unit_bytes.max(1)).max(1),
        }
    }

    /// Whether the restore adapts to the storage.
    pub(crate) fn is_adaptive_to_storage(&self) -> bool {
        matches!(self.mode, RestoreMode::Auto | RestoreMode::WorkingSet) && !self.is_in_store
    }

    /// Whether prefetching may read everything.
    pub(crate) fn may_read_all(&self) -> bool {
        let is_unlimited = self.fill == BackgroundFill::AtOnce && self.bandwidth.is_none();
        self.mode == RestoreMode::Auto && is_unlimited && !self.account_use
    }

    /// The memory blocks that are expected to be used, in the order in which they are wanted.
    pub(crate) fn expected_blocks(&self, image: &Image) -> Vec<Block> {
        image.working_set().iter().chain(&self.also_expected).copied().collect()
    }

    /// How many units the guest is expected to request beside the working set.
    pub(crate) fn expected_misses(&self) -> u32 {
        expected_misses(self.found_late)
    }

    /// Whether the guest gains if it does not run before its expected `units` units are installed,
    /// though storage has low latency: a guest that uses the same pages again and again would wait
    /// for each of them.
    pub(crate) fn must_guest_wait(&self, units: usize, unit_bytes: u32) -> bool {
        let bytes = units as u64 * u64::from(unit_bytes);
        self.mode == RestoreMode::Auto
            && is_working_set_complete(self.found_late)
            && bytes <= AWAITED_BYTES_MAX
    }

    /// The page server's limits, for read units of `unit_bytes`.
    pub(crate) fn server_rules(&self, unit_bytes: u32) -> PageServerRules {
        let held_max = self.held_bytes_max / u64::from(unit_bytes.max(1));
        PageServerRules {
            run_max: self.run_max(unit_bytes),
            held_max: u32::try_from(held_max).unwrap_or(u32::MAX).max(1),
            fill: self.fill != BackgroundFill::Off,
            is_fill_late: self.fill.is_late(),
            fill_delay: match self.fill {
                BackgroundFill::AfterLearning => LEARNING_WINDOW,
                _ => Duration::ZERO,
            },
            account_use: self.account_use,
            unit_bytes,
            expected_misses: self.expected_misses(),
            known_latency: self.known_latency.filter(|_| self.is_adaptive_to_storage()),
            is_adaptive: self.is_adaptive_to_storage(),
            guest_runs: self.mode == RestoreMode::Auto,
            may_read_all: self.may_read_all(),
            ..PageServerRules::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_have_names() {
        for (mode, name) in RestoreMode::NAMES {
            assert_eq!(mode.to_string(), name);
            assert_eq!(name.parse(), Ok(mode));
            assert_eq!(serde_json::to_value(mode).unwrap(), name);
        }
        assert!("lazily".parse::<RestoreMode>().is_err());
    }

    #[test]
    fn a_user_does_not_turn_the_fill_off() {
        for (fill, name) in BackgroundFill::NAMES {
            assert_eq!(fill.to_string(), name);
            assert_eq!(serde_json::to_value(fill).unwrap(), name);
        }
        assert_eq!("when-responsive".parse(), Ok(BackgroundFill::WhenResponsive));
        assert_eq!("after-learning".parse(), Ok(BackgroundFill::AfterLearning));
        assert!("off".parse::<BackgroundFill>().is_err());
    }

    #[test]
    fn what_is_in_a_store_is_not_read_whole() {
        let options = RestoreOptions {
            fill: BackgroundFill::WhenResponsive,
            is_in_store: true,
            known_latency: Some(Duration::from_millis(20)),
            ..RestoreOptions::default()
        };
        let rules = options.server_rules(65_536);
        assert!(rules.fill && rules.is_fill_late);
        assert!(!rules.may_read_all && !rules.is_adaptive && rules.known_latency.is_none());
    }

    #[test]
    fn a_restore_that_learns_loads_nothing_else_meanwhile() {
        let fill = BackgroundFill::AfterLearning;
        let rules = RestoreOptions { fill, ..RestoreOptions::default() }.server_rules(65_536);
        assert!(rules.fill && rules.is_fill_late && rules.fill_delay == LEARNING_WINDOW);
    }

    #[test]
    fn lazy_reads_one_block_at_a_time() {
        let lazy = RestoreOptions { mode: RestoreMode::Lazy, ..RestoreOptions::default() };
        assert_eq!(lazy.server_rules(8192).run_max, 1);
        assert_eq!(RestoreOptions::default().server_rules(65_536).run_max, 15);
    }
}
