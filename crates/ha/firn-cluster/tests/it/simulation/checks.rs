//! Checks that are made at every step, with knowledge of all hosts.

use std::collections::{BTreeMap, BTreeSet};

use firn_cluster::cut::GlobalCheckpoint;
use firn_cluster::output::FrameDestination;
use firn_cluster::{Epoch, FrameNumber, Generation, VmId};

use super::Tally;
use super::host::{Frame, Guest};

#[derive(Debug, Default)]
pub struct Checks {
    pub wrong: Option<String>,
    pub tally: Tally,
    frames: Frame,
    /// The state of each VM at each cut of each generation.
    cuts: BTreeMap<(Generation, VmId, Epoch), Guest>,
    outside: BTreeMap<VmId, Vec<Frame>>,
    ran: BTreeMap<VmId, Generation>,
    /// The state of each VM when it was stopped to be moved.
    finished: BTreeMap<(Generation, VmId), Guest>,
    /// Generations that began with a move.
    pub moved: BTreeSet<Generation>,
}

impl Checks {
    pub fn fail(&mut self, wrong: String) {
        self.wrong.get_or_insert(wrong);
    }

    pub fn new_frame(&mut self) -> Frame {
        self.frames += 1;
        self.frames
    }

    pub fn cut(&mut self, generation: Generation, vm: VmId, epoch: Epoch, guest: &Guest) {
        self.cuts.insert((generation, vm, epoch), guest.clone());
    }

    /// A VM is paused and is to be moved.
    pub fn finished(&mut self, generation: Generation, vm: VmId, guest: &Guest) {
        self.finished.insert((generation, vm), guest.clone());
    }

    /// A VM begins to run in a generation.
    pub fn runs(&mut self, generation: Generation, vm: VmId, epoch: Epoch, guest: &Guest) {
        let before = self.ran.insert(vm, generation);
        if generation > Generation(0) && before.is_none_or(|before| before >= generation) {
            self.fail(format!("{vm} runs twice in {generation:?}"));
        }
        if self.moved.contains(&generation) {
            let before = Generation(generation.0 - 1);
            if self.finished.get(&(before, vm)) != Some(guest) {
                self.fail(format!("{vm} has lost something by being moved"));
            }
        }
        self.cut(generation, vm, epoch, guest);
    }

    /// A frame has left the cluster.
    pub fn outside(&mut self, vm: VmId, generation: Generation, seq: FrameNumber, frame: Frame) {
        if self.ran.get(&vm).is_some_and(|ran| *ran > generation) {
            self.fail(format!("{vm} sends in an undone timeline, {generation:?}"));
        }
        let seen = self.outside.entry(vm).or_default();
        let known = seen.get(seq.0 as usize - 1).copied();
        match known {
            Some(before) if before == frame => self.tally.outside_again += 1,
            Some(_) => self.fail(format!("output {seq:?} of {vm} was undone and replaced")),
            None if seen.len() as u64 + 1 == seq.0 => {
                seen.push(frame);
                self.tally.outside += 1;
            }
            None => self.fail(format!("output of {vm} before {seq:?} was lost")),
        }
    }

    /// A checkpoint is recorded: from now on the cluster may go back to it, and not to an older
    /// one.
    pub fn recorded(&mut self, checkpoint: &GlobalCheckpoint) {
        self.tally.checkpoints += 1;
        let mut guests = BTreeMap::new();
        for (&vm, &epoch) in &checkpoint.marks {
            match self.cuts.get(&(checkpoint.generation, vm, epoch)) {
                Some(guest) => drop(guests.insert(vm, guest.clone())),
                None => return self.fail(format!("{vm} was never cut at {epoch}")),
            }
        }
        if let Some((from, to)) = orphan(&guests) {
            self.fail(format!("the cut {checkpoint:?} has an orphan from {from} to {to}"));
        }
        self.undone(&guests);
        let (generation, marks) = (checkpoint.generation, &checkpoint.marks);
        self.cuts.retain(|(of, vm, epoch), _| *of == generation && *epoch >= marks[vm]);
    }

    fn undone(&mut self, guests: &BTreeMap<VmId, Guest>) {
        for (vm, seen) in &self.outside {
            let sent =
                guests[vm].sent.get(&FrameDestination::Outside).map_or(&[][..], Vec::as_slice);
            if !sent.starts_with(seen) {
                let wrong = format!("output of {vm} isn't in the newest checkpoint");
                self.wrong.get_or_insert(wrong);
            }
        }
    }

    /// How many of a VM's frames to the outside were received there.
    pub fn seen(&self, vm: VmId) -> usize {
        self.outside.get(&vm).map_or(0, Vec::len)
    }
}

/// Two VMs of which one has received frames that the other hasn't sent.
pub fn orphan(guests: &BTreeMap<VmId, Guest>) -> Option<(VmId, VmId)> {
    let received = |(to, guest): (&VmId, &Guest)| {
        let received = guest.received.iter();
        received.map(|(from, frames)| (*from, *to, frames.clone())).collect::<Vec<_>>()
    };
    let bad = guests.iter().flat_map(received).find(|(from, to, frames)| {
        let sent = guests.get(from).and_then(|guest| guest.sent.get(&FrameDestination::Vm(*to)));
        !sent.map_or(&[][..], Vec::as_slice).starts_with(frames)
    });
    bad.map(|(from, to, _)| (from, to))
}
