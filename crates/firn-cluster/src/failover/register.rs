//! The record that all hosts agree on.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::cut::GlobalCheckpoint;
use crate::{Epoch, Generation, Host, Vm};

/// Where a VM is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Place {
    /// Where it runs.
    pub primary: Host,
    /// Where its copies go; nowhere if there is no host for it.
    pub backup: Option<Host>,
}

/// The state of a cluster as far as its hosts have to agree on it. It changes by compare-and-swap on `version`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Register {
    /// Counts the changes.
    pub version: u64,
    /// The timeline.
    pub generation: Generation,
    /// Counts the changes of `places`: a checkpoint of another layout has its copies in other places.
    pub layout: u64,
    /// Where each VM is.
    pub places: BTreeMap<Vm, Place>,
    /// Hosts that may still send in an older timeline. While there are any, nobody runs.
    pub fence: BTreeSet<Host>,
    /// The newest global checkpoint: where this generation began, or better.
    pub checkpoint: GlobalCheckpoint,
}

impl Register {
    /// A cluster whose VMs run, each from its first copy, which its backup has.
    pub fn new(places: BTreeMap<Vm, Place>) -> Self {
        let checkpoint = GlobalCheckpoint {
            marks: places.keys().map(|&vm| (vm, Epoch(0))).collect(),
            ..GlobalCheckpoint::default()
        };
        let (generation, fence) = (checkpoint.generation, BTreeSet::new());
        Self { version: 0, generation, layout: 0, places, fence, checkpoint }
    }

    /// The end of the cluster: nothing runs in the timeline that begins, and whoever ran is fenced. It stays, so that nobody
    /// begins another cluster of the name in a timeline that there was.
    pub fn ended(&self) -> Self {
        let mut next = self.changed();
        next.fence.extend(self.primaries());
        next.begin(BTreeMap::new());
        next
    }

    /// Whether nothing is to run.
    pub fn is_ended(&self) -> bool {
        self.places.is_empty()
    }

    /// A cluster of the name of one that has ended. Nothing runs until nobody of that one can send any more.
    pub fn again(&self, places: BTreeMap<Vm, Place>) -> Self {
        let mut next = self.changed();
        next.begin(places);
        next
    }

    /// Another timeline, that begins with what these places have.
    fn begin(&mut self, places: BTreeMap<Vm, Place>) {
        self.generation = self.generation.next();
        self.layout += 1;
        self.checkpoint = GlobalCheckpoint {
            number: self.checkpoint.number + 1,
            generation: self.generation,
            layout: self.layout,
            marks: places.keys().map(|&vm| (vm, Epoch(0))).collect(),
            ..self.checkpoint.clone()
        };
        self.places = places;
    }

    /// Of one VM: its backup has a copy that it can run from, or it has no backup any more. Nothing is rolled back.
    pub fn backed_by(&self, backup: Option<Host>) -> Self {
        let mut next = self.changed();
        next.layout += 1;
        next.places.values_mut().for_each(|place| place.backup = backup);
        if backup.is_some() {
            next.checkpoint.number += 1;
            (next.checkpoint.generation, next.checkpoint.layout) = (next.generation, next.layout);
        }
        next
    }

    /// The agent of a host was restarted, and looks after what its predecessor ran, which goes on. Its backups have to be found anew.
    pub fn taken_up(&self, before: Host, now: Host) -> Self {
        let mut next = self.backed_by(None);
        let its = next.places.values_mut().filter(|place| place.primary == before);
        its.for_each(|place| place.primary = now);
        next
    }

    /// The agent of a host was started again, which has the copies that its predecessor had, or is to run them. They are where they were.
    pub fn inherited(&self, before: Host, now: Host) -> Self {
        let mut next = self.changed();
        for place in next.places.values_mut() {
            let own = |host| if host == before { now } else { host };
            *place = Place { primary: own(place.primary), backup: place.backup.map(own) };
        }
        next
    }

    /// Hosts that run a VM.
    pub fn primaries(&self) -> BTreeSet<Host> {
        self.places.values().map(|place| place.primary).collect()
    }

    /// Whether the copies of the newest checkpoint are at today's backups.
    pub fn is_protected(&self) -> bool {
        self.checkpoint.layout == self.layout
    }

    /// Whether no primary is a backup.
    pub fn is_separate(&self) -> bool {
        let primaries = self.primaries();
        !self.places.values().filter_map(|place| place.backup).any(|host| primaries.contains(&host))
    }

    /// With a new global checkpoint; `None` if it was made in another timeline or layout, or isn't the next one.
    pub fn with_checkpoint(&self, checkpoint: &GlobalCheckpoint) -> Option<Self> {
        let here = (self.generation, self.layout, self.checkpoint.number + 1);
        let made = (checkpoint.generation, checkpoint.layout, checkpoint.number);
        let all = self.places.keys().eq(checkpoint.marks.keys());
        (made == here && all).then(|| Self { checkpoint: checkpoint.clone(), ..self.changed() })
    }

    /// With every VM at its backup, and new backups on these hosts; `None` if there is nothing to go back to.
    pub fn failed_over(&self, hosts: &BTreeSet<Host>) -> Option<Self> {
        let ready = |place: &Place| place.backup.is_some_and(|backup| hosts.contains(&backup));
        if !self.is_protected() || !self.places.values().all(ready) {
            return None;
        }
        let mut next = self.changed();
        next.generation = self.generation.next();
        next.layout += 1;
        next.fence.extend(self.primaries());
        for place in next.places.values_mut() {
            place.primary = place.backup.take().unwrap_or(place.primary);
        }
        next.choose_backups(hosts);
        Some(next)
    }

    /// With a backup for each VM that has none among these hosts; `None` if that changes nothing.
    pub(super) fn backed_up(&self, hosts: &BTreeSet<Host>) -> Option<Self> {
        let mut next = self.changed();
        for place in next.places.values_mut() {
            place.backup = place.backup.filter(|backup| hosts.contains(backup));
        }
        next.choose_backups(hosts);
        next.layout += 1;
        (next.places != self.places).then_some(next)
    }

    /// Without those of the fenced that can't send any more; `None` if that is nobody.
    pub(super) fn fenced(&self, harmless: impl Fn(Host) -> bool) -> Option<Self> {
        let mut next = self.changed();
        next.fence.retain(|host| !harmless(*host));
        (next.fence != self.fence).then_some(next)
    }

    fn changed(&self) -> Self {
        Self { version: self.version + 1, ..self.clone() }
    }

    /// Spreads VMs without a backup over the hosts that run none.
    fn choose_backups(&mut self, hosts: &BTreeSet<Host>) {
        let primaries = self.primaries();
        let free: Vec<Host> = hosts.difference(&primaries).copied().collect();
        let missing = self.places.values_mut().filter(|place| place.backup.is_none());
        missing.zip(free.iter().cycle()).for_each(|(place, host)| place.backup = Some(*host));
    }
}
