//! Failover record: the state on which all hosts agree.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::cut::GlobalCheckpoint;
use crate::{Epoch, Generation, HostId, VmId};

/// The hosts of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VmPlacement {
    /// The host that runs it.
    pub primary: HostId,
    /// The host of its standby; `None` if no host is available.
    pub backup: Option<HostId>,
}

/// The state of a cluster on which its hosts have to agree. It changes by compare-and-swap on
/// `version`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FailoverRecord {
    /// Counts the changes.
    pub version: u64,
    /// The generation.
    pub generation: Generation,
    /// Counts the changes of `placements`: a checkpoint of another layout has its standbys on other
    /// hosts.
    pub layout: u64,
    /// The hosts of each VM.
    #[serde(rename = "places")]
    pub placements: BTreeMap<VmId, VmPlacement>,
    /// Hosts that may still send in an older generation. While there are any, no VM runs.
    pub fence: BTreeSet<HostId>,
    /// The newest global checkpoint: the one with which this generation began, or a newer one.
    pub checkpoint: GlobalCheckpoint,
}

impl FailoverRecord {
    /// A cluster whose VMs run, each from its first epoch, which its backup has.
    pub fn new(placements: BTreeMap<VmId, VmPlacement>) -> Self {
        let checkpoint = GlobalCheckpoint {
            marks: placements.keys().map(|&vm| (vm, Epoch(0))).collect(),
            ..GlobalCheckpoint::default()
        };
        let (generation, fence) = (checkpoint.generation, BTreeSet::new());
        Self { version: 0, generation, layout: 0, placements, fence, checkpoint }
    }

    /// The end of the cluster: no VM runs in the generation that begins, and all primaries are
    /// fenced. The record remains, so that another cluster of the name can't begin in a generation
    /// that existed before.
    pub fn with_end(&self) -> Self {
        let mut next = self.next_version();
        next.fence.extend(self.primaries());
        next.begin_generation(BTreeMap::new());
        next
    }

    /// Whether no VM is to run.
    pub fn is_ended(&self) -> bool {
        self.placements.is_empty()
    }

    /// A new cluster with the name of one that has ended. No VM runs until no host of the old one
    /// can send any more.
    pub fn with_restart(&self, placements: BTreeMap<VmId, VmPlacement>) -> Self {
        let mut next = self.next_version();
        next.begin_generation(placements);
        next
    }

    /// Begins another generation, in which VMs start from the first epochs of these hosts.
    fn begin_generation(&mut self, placements: BTreeMap<VmId, VmPlacement>) {
        self.generation = self.generation.next();
        self.layout += 1;
        self.checkpoint = GlobalCheckpoint {
            number: self.checkpoint.number + 1,
            generation: self.generation,
            layout: self.layout,
            marks: placements.keys().map(|&vm| (vm, Epoch(0))).collect(),
            ..self.checkpoint.clone()
        };
        self.placements = placements;
    }

    /// For a single VM: its backup has a standby from which it can run, or it has no backup any
    /// more. Nothing is rolled back.
    pub fn with_backup(&self, backup: Option<HostId>) -> Self {
        let mut next = self.next_version();
        next.layout += 1;
        next.placements.values_mut().for_each(|placement| placement.backup = backup);
        if backup.is_some() {
            next.checkpoint.number += 1;
            (next.checkpoint.generation, next.checkpoint.layout) = (next.generation, next.layout);
        }
        next
    }

    /// The agent of a host was restarted, and manages the VMs of its predecessor, which continue to
    /// run. Their backups have to be chosen again.
    pub fn with_adopting_host(&self, before: HostId, now: HostId) -> Self {
        let mut next = self.with_backup(None);
        let its = next.placements.values_mut().filter(|placement| placement.primary == before);
        its.for_each(|placement| placement.primary = now);
        next
    }

    /// The agent of a host was restarted, and has the standbys of its predecessor, or is to run
    /// them. They are where they were.
    pub fn with_inheriting_host(&self, before: HostId, now: HostId) -> Self {
        let mut next = self.next_version();
        for placement in next.placements.values_mut() {
            let own = |host| if host == before { now } else { host };
            *placement =
                VmPlacement { primary: own(placement.primary), backup: placement.backup.map(own) };
        }
        next
    }

    /// The hosts that run a VM.
    pub fn primaries(&self) -> BTreeSet<HostId> {
        self.placements.values().map(|placement| placement.primary).collect()
    }

    /// Whether today's backups have the standbys of the newest checkpoint.
    pub fn is_protected(&self) -> bool {
        self.checkpoint.layout == self.layout
    }

    /// Whether no primary is a backup.
    pub fn is_separate(&self) -> bool {
        let primaries = self.primaries();
        !self
            .placements
            .values()
            .filter_map(|placement| placement.backup)
            .any(|host| primaries.contains(&host))
    }

    /// The record with a new global checkpoint; `None` if it was made in another generation or
    /// layout, or isn't the next one.
    pub fn with_checkpoint(&self, checkpoint: &GlobalCheckpoint) -> Option<Self> {
        let here = (self.generation, self.layout, self.checkpoint.number + 1);
        let made = (checkpoint.generation, checkpoint.layout, checkpoint.number);
        let all = self.placements.keys().eq(checkpoint.marks.keys());
        (made == here && all)
            .then(|| Self { checkpoint: checkpoint.clone(), ..self.next_version() })
    }

    /// The record with every VM at its backup, and new backups on these hosts; `None` if there are
    /// no standbys to go back to.
    pub fn with_failover(&self, hosts: &BTreeSet<HostId>) -> Option<Self> {
        let ready = |placement: &VmPlacement| {
            placement.backup.is_some_and(|backup| hosts.contains(&backup))
        };
        if !self.is_protected() || !self.placements.values().all(ready) {
            return None;
        }
        let mut next = self.next_version();
        next.generation = self.generation.next();
        next.layout += 1;
        next.fence.extend(self.primaries());
        for placement in next.placements.values_mut() {
            placement.primary = placement.backup.take().unwrap_or(placement.primary);
        }
        next.choose_backups(hosts);
        Some(next)
    }

    /// A planned move of a single VM from its primary to its backup, which the primary proposes;
    /// `None` if that host is not its primary, or the other one has no copy of it.
    ///
    /// The primary has given up its lease before
    /// ([`HostGuard::give_up_lease`](super::HostGuard::give_up_lease)), and requests none in this
    /// version of the record. So it is not fenced, and the VM may run at once.
    pub fn with_move(&self, from: HostId, to: HostId) -> Option<Self> {
        let is_ready = self.fence.is_empty() && self.is_protected() && self.placements.len() == 1;
        let here = VmPlacement { primary: from, backup: Some(to) };
        if !is_ready || self.placements.values().any(|placement| *placement != here) {
            return None;
        }
        let mut next = self.next_version();
        next.generation = self.generation.next();
        next.layout += 1;
        let moved = VmPlacement { primary: to, backup: None };
        next.placements.values_mut().for_each(|placement| *placement = moved);
        Some(next)
    }

    /// The record with a backup on these hosts for each VM that has none among them; `None` if that
    /// changes nothing.
    pub(super) fn with_missing_backups(&self, hosts: &BTreeSet<HostId>) -> Option<Self> {
        let mut next = self.next_version();
        for placement in next.placements.values_mut() {
            placement.backup = placement.backup.filter(|backup| hosts.contains(backup));
        }
        next.choose_backups(hosts);
        next.layout += 1;
        (next.placements != self.placements).then_some(next)
    }

    /// The record without fenced hosts that can't send any more; `None` if there are none.
    pub(super) fn without_harmless_changes(
        &self,
        harmless: impl Fn(HostId) -> bool,
    ) -> Option<Self> {
        let mut next = self.next_version();
        next.fence.retain(|host| !harmless(*host));
        (next.fence != self.fence).then_some(next)
    }

    fn next_version(&self) -> Self {
        Self { version: self.version + 1, ..self.clone() }
    }

    /// Spreads VMs without a backup over the hosts that run none.
    fn choose_backups(&mut self, hosts: &BTreeSet<HostId>) {
        let primaries = self.primaries();
        let free: Vec<HostId> = hosts.difference(&primaries).copied().collect();
        let missing = self.placements.values_mut().filter(|placement| placement.backup.is_none());
        missing
            .zip(free.iter().cycle())
            .for_each(|(placement, host)| placement.backup = Some(*host));
    }
}
