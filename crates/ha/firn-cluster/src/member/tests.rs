//! Three VMs that send numbered frames to each other and to the outside, over a network that loses,
//! duplicates and reorders them; with cuts, global checkpoints and rollbacks at any time.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::cut::MarkAnswer;
use crate::output::{FrameDestination, InputFlow};
use crate::switch::MacAddress;
use crate::{Epoch, FrameNumber, Generation, RequestNumber, VmId};

const VMS: u16 = 3;
const BYTES_MAX: usize = 1 << 20;
/// The first address that belongs to no VM of the cluster.
const OUTSIDE: u16 = 9;
const ALL: u16 = 0xff;

fn mac(vm: u16) -> MacAddress {
    if vm == ALL { MacAddress::BROADCAST } else { MacAddress([2, 0, 0, 0, 0, vm as u8]) }
}

fn frame(from: u16, to: u16, number: u32) -> Vec<u8> {
    [&mac(to).0[..], &mac(from).0, &[8, 0], &number.to_be_bytes()].concat()
}

/// The sender of a frame, and the number of the frame.
fn read(frame: &[u8]) -> (u16, u32) {
    (frame[11].into(), u32::from_be_bytes(frame[14..18].try_into().unwrap()))
}

/// The state of a VM: the frames that it has sent and received.
#[derive(Clone, Debug, Default)]
struct Guest {
    sent: BTreeMap<u16, Vec<u32>>,
    got: BTreeMap<u16, Vec<u32>>,
}

struct Node {
    member: MemberNic,
    guest: Guest,
    kept: StandbyNic,
    /// The states at the ends of epochs.
    states: BTreeMap<Epoch, Guest>,
    complete: Epoch,
    committed: Epoch,
    /// The newest frame that was transmitted to the outside, and the newest one that the backup
    /// knows to have been transmitted.
    out: FrameNumber,
    newest_reported: FrameNumber,
}

struct World {
    nodes: Vec<Node>,
    /// Frames in flight.
    wire: Vec<Vec<u8>>,
    outside: Vec<(u16, u32)>,
    generation: Generation,
    request: RequestNumber,
    marks: BTreeMap<VmId, Epoch>,
    /// The newest global checkpoint.
    global: BTreeMap<VmId, Epoch>,
    now: Duration,
    number: u32,
    is_opened: bool,
}

fn members() -> Vec<(VmId, MacAddress)> {
    (0..VMS).map(|vm| (VmId(vm), mac(vm))).collect()
}

fn begun(vm: u16, generation: Generation, base: Epoch, kept: &StandbyNic) -> MemberNic {
    let (cluster, own, members, layout) = (7, VmId(vm), members(), 0);
    let of = ClusterMembership { cluster, own, members, generation, layout };
    MemberNic::new(&of, MemberTimes::default(), base, kept.clone())
}

impl World {
    fn new() -> Self {
        let generation = Generation(1);
        let node = |vm| {
            let kept = StandbyNic::new(Epoch(0), BYTES_MAX);
            let states = BTreeMap::from([(Epoch(0), Guest::default())]);
            let member = begun(vm, generation, Epoch(0), &kept);
            Node {
                member,
                guest: Guest::default(),
                kept,
                states,
                complete: Epoch(0),
                committed: Epoch(0),
                out: FrameNumber(0),
                newest_reported: FrameNumber(0),
            }
        };
        Self {
            nodes: (0..VMS).map(node).collect(),
            wire: Vec::new(),
            outside: Vec::new(),
            generation,
            request: RequestNumber { term: 1, count: 1 },
            marks: BTreeMap::new(),
            global: (0..VMS).map(|vm| (VmId(vm), Epoch(0))).collect(),
            now: Duration::from_secs(1),
            number: 0,
            is_opened: false,
        }
    }

    /// VMs without backups: there is no state to go back to.
    fn opened() -> Self {
        let mut world = Self { is_opened: true, ..Self::new() };
        for vm in 0..VMS {
            let actions = world.node(vm).member.open_output();
            world.act(vm, actions);
        }
        world
    }

    /// Whether all VMs have a committed epoch that could be marked.
    fn is_begun(&self) -> bool {
        self.nodes.iter().all(|node| node.committed > Epoch(0))
    }

    fn node(&mut self, vm: u16) -> &mut Node {
        &mut self.nodes[usize::from(vm)]
    }

    fn send(&mut self, from: u16, to: u16) {
        self.number += 1;
        let number = self.number;
        let reached: Vec<u16> =
            if to == ALL { (0..VMS).chain([OUTSIDE]).collect() } else { vec![to] };
        let node = self.node(from);
        for to in reached.into_iter().filter(|to| *to != from) {
            node.guest.sent.entry(to).or_default().push(number);
        }
        let actions = node.member.send_frame(&frame(from, to, number));
        self.act(from, actions);
    }

    fn cut(&mut self, vm: u16) {
        let node = self.node(vm);
        let epoch = node.complete.next();
        let of = node.member.cut_epoch();
        let gone = of
            .trimmed
            .iter()
            .filter(|(to, _)| *to == FrameDestination::Outside)
            .map(|(_, seq)| *seq);
        node.newest_reported = gone.max().unwrap_or_default().max(node.newest_reported);
        node.kept.complete_epoch(epoch, of);
        node.states.insert(epoch, node.guest.clone());
        node.complete = epoch;
        let now = self.now;
        while self.node(vm).member.has_deliverable() {
            let actions = self.node(vm).member.deliver_waiting(now);
            self.act(vm, actions);
        }
    }

    fn commit(&mut self, vm: u16) {
        let base = self.global[&VmId(vm)];
        let node = self.node(vm);
        let committed = node.complete.previous().max(base);
        node.committed = committed;
        let actions = node.member.commit_epoch(committed);
        self.act(vm, actions);
    }

    fn act(&mut self, vm: u16, actions: Vec<MemberAction>) {
        for action in actions {
            match action {
                MemberAction::Send(frame) => self.wire.push(frame),
                MemberAction::Out(seq, frame) => {
                    let node = self.node(vm);
                    assert!(seq > node.newest_reported, "the backup knew that {seq:?} had left");
                    node.out = seq;
                    self.outside.push(read(&frame));
                }
                MemberAction::Deliver(frame) => {
                    let (from, number) = read(&frame);
                    self.node(vm).guest.got.entry(from).or_default().push(number);
                }
            }
        }
    }

    fn request(&mut self, vm: u16) {
        if self.is_opened && !self.is_begun() {
            return;
        }
        let (generation, request) = (self.generation, self.request);
        if let Some(answer) = self.node(vm).member.request_mark(generation, request) {
            self.answered(&answer);
        }
    }

    /// Makes a global checkpoint of the present state.
    fn record(&mut self) {
        for _ in 0..3 {
            for vm in 0..VMS {
                self.request(vm);
                self.cut(vm);
                self.commit(vm);
            }
        }
    }

    /// Reports that frames to the outside were sent. The backup is informed at once, or with the
    /// next epoch.
    fn gone(&mut self, vm: u16, at_once: bool) {
        let node = self.node(vm);
        node.member.record_released(node.out);
        if at_once {
            node.kept.record_released(node.out);
            node.newest_reported = node.out.max(node.newest_reported);
        }
    }

    fn answered(&mut self, answer: &MarkAnswer) {
        if (answer.generation, answer.request) != (self.generation, self.request) {
            return;
        }
        self.marks.extend(answer.marks.iter().copied());
        if self.marks.len() == usize::from(VMS) {
            self.global = std::mem::take(&mut self.marks);
            self.request = self.request.next();
            self.is_consistent();
            for (vm, epoch) in self.global.clone() {
                let node = self.node(vm.0);
                node.kept.record_global_checkpoint(epoch);
                let actions = node.member.record_global_checkpoint(epoch);
                self.act(vm.0, actions);
            }
        }
    }

    /// Checks that in the newest global checkpoint each received frame was sent.
    fn is_consistent(&self) {
        let state = |vm: u16| &self.nodes[usize::from(vm)].states[&self.global[&VmId(vm)]];
        for (from, to) in (0..VMS).flat_map(|from| (0..VMS).map(move |to| (from, to))) {
            let nothing = Vec::new();
            let sent = state(from).sent.get(&to).unwrap_or(&nothing);
            let got = state(to).got.get(&from).unwrap_or(&nothing);
            assert!(sent.starts_with(got), "{to} has {got:?} of {from}, which has sent {sent:?}");
        }
    }

    fn arrive(&mut self, at: usize) {
        let frame = self.wire.swap_remove(at);
        let to = u16::from(frame[5]);
        let now = self.now;
        let actions = self.node(to).member.receive_frame(&frame, now);
        self.act(to, actions);
    }

    /// Rolls all VMs back to the newest global checkpoint. Frames in flight stay in flight.
    fn roll_back(&mut self) {
        self.generation = self.generation.next();
        self.marks.clear();
        for (vm, base) in self.global.clone() {
            let generation = self.generation;
            let node = self.node(vm.0);
            node.kept.roll_back(base);
            node.member = begun(vm.0, generation, base, &node.kept);
            node.guest = node.states[&base].clone();
            node.complete = base;
            node.out = FrameNumber(0);
        }
        for (vm, base) in self.global.clone() {
            for actions in [
                self.node(vm.0).member.commit_epoch(base),
                self.node(vm.0).member.record_global_checkpoint(base),
            ] {
                self.act(vm.0, actions);
            }
        }
    }

    fn tick(&mut self) {
        self.now += Duration::from_millis(60);
        for vm in 0..VMS {
            let now = self.now;
            let actions = self.node(vm).member.advance_time(now);
            self.act(vm, actions);
        }
    }

    /// Continues without failures: every frame arrives.
    fn settle(&mut self) {
        for _ in 0..40 {
            for vm in 0..VMS {
                self.cut(vm);
                self.commit(vm);
                self.request(vm);
                self.gone(vm, false);
            }
            self.tick();
            while !self.wire.is_empty() {
                self.arrive(0);
            }
        }
    }

    fn is_complete(&self, rolled_back: bool) {
        for (vm, node) in (0..).zip(&self.nodes) {
            assert_eq!(node.member.input_flow(), InputFlow::Go);
            assert_eq!(
                (node.member.buffered_bytes(), node.kept.buffered_bytes()),
                (0, 0),
                "everything is trimmed"
            );
            for (to, sent) in &node.guest.sent {
                let left = self.outside.iter().filter(|(from, _)| *from == vm).map(|(_, it)| *it);
                let mut left: Vec<u32> = left.collect();
                if rolled_back {
                    // The outside may receive the last frames twice.
                    let mut seen = std::collections::BTreeSet::new();
                    left.retain(|number| seen.insert(*number));
                }
                match *to {
                    OUTSIDE => assert_eq!(&left, sent, "outside, of {vm}"),
                    to => {
                        let got = self.nodes[usize::from(to)].guest.got.get(&vm);
                        assert_eq!(got, Some(sent), "{to} of {vm}");
                    }
                }
            }
            assert!(node.guest.got.iter().all(|(from, got)| {
                self.nodes[usize::from(*from)].guest.sent.get(&vm) == Some(got)
            }));
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Send(u16, u16),
    Cut(u16),
    Commit(u16),
    Request(u16),
    Gone(u16, bool),
    Arrive(usize),
    Lose(usize),
    Double(usize),
    Tick,
    RollBack,
}

fn step() -> impl Strategy<Value = Step> {
    let to = prop_oneof![6 => 0..VMS, 1 => Just(OUTSIDE), 1 => Just(ALL)];
    prop_oneof![
        6 => (0..VMS, to).prop_map(|(from, to)| Step::Send(from, to)),
        6 => (0..VMS).prop_map(Step::Cut),
        6 => (0..VMS).prop_map(Step::Commit),
        4 => (0..VMS).prop_map(Step::Request),
        2 => (0..VMS, any::<bool>()).prop_map(|(vm, at_once)| Step::Gone(vm, at_once)),
        12 => any::<usize>().prop_map(Step::Arrive),
        1 => any::<usize>().prop_map(Step::Lose),
        1 => any::<usize>().prop_map(Step::Double),
        1 => Just(Step::Tick),
        1 => Just(Step::RollBack),
    ]
}

fn play(mut world: World, steps: Vec<Step>) {
    let mut rolled_back = false;
    for step in steps {
        let some = world.wire.len().max(1);
        match step {
            Step::Send(from, to) if from != to => world.send(from, to),
            Step::Cut(vm) => world.cut(vm),
            Step::Commit(vm) => world.commit(vm),
            Step::Request(vm) => world.request(vm),
            Step::Gone(vm, at_once) => world.gone(vm, at_once),
            Step::Tick => world.tick(),
            Step::RollBack if world.is_opened && world.global[&VmId(0)] == Epoch(0) => {}
            Step::RollBack => {
                rolled_back = true;
                world.roll_back();
            }
            Step::Arrive(at) if !world.wire.is_empty() => world.arrive(at % some),
            Step::Lose(at) if !world.wire.is_empty() => drop(world.wire.swap_remove(at % some)),
            Step::Double(at) if !world.wire.is_empty() => {
                let again = world.wire[at % some].clone();
                world.wire.push(again);
            }
            _ => {}
        }
    }
    world.settle();
    world.is_complete(rolled_back);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Every global checkpoint is consistent. In the end each VM has received the frames of the
    /// others in order, each once, however often all were rolled back.
    #[test]
    fn nothing_between_members_is_lost_or_doubled(steps in prop::collection::vec(step(), 0..250)) {
        play(World::new(), steps);
    }

    /// The same for VMs that are members before they have a backup: frames that are in flight at
    /// their first cuts are stored too.
    #[test]
    fn nothing_under_way_when_protection_begins_is_lost(steps in prop::collection::vec(step(), 0..250)) {
        play(World::opened(), steps);
    }

    #[test]
    fn garbage_does_nothing(mut frame in prop::collection::vec(any::<u8>(), 0..80), says in 0..6_u8) {
        let mut world = World::new();
        if frame.len() > 16 {
            frame[12..16].copy_from_slice(&[0x88, 0xb5, 1, says]);
            prop_assert_eq!(world.nodes[0].member.receive_frame(&frame, world.now), []);
        }
    }
}

/// The example of the documentation of `cut`: the request is late at the receiver.
#[test]
fn a_frame_from_behind_a_cut_makes_its_receiver_be_cut_first() {
    let mut world = World::new();
    world.request(0);
    world.cut(0);
    world.send(0, 1);
    assert_eq!(world.wire.len(), 1, "it leaves at once");
    world.arrive(0);
    assert!(world.nodes[1].guest.got.is_empty() && world.nodes[1].member.is_cut_needed());
    world.cut(1);
    assert_eq!(world.nodes[1].guest.got[&0], [1]);
    world.request(2);
    world.cut(2);
    for vm in 0..VMS {
        world.cut(vm);
        world.commit(vm);
        world.request(vm);
    }
    let states = |vm: u16| &world.nodes[usize::from(vm)].states[&world.global[&VmId(vm)]];
    assert!(states(1).got.is_empty() && states(0).sent.is_empty());
    assert_eq!(world.global[&VmId(0)], Epoch(1));
}

/// The VM that has the copy sends frames again that were in flight in the cut.
#[test]
fn a_lost_frame_of_the_cut_is_there_after_a_rollback() {
    let mut world = World::new();
    world.send(0, 1);
    world.wire.clear();
    world.record();
    world.roll_back();
    assert_eq!(world.wire.len(), 1);
    world.arrive(0);
    assert_eq!(world.nodes[1].guest.got[&0], [1]);
}

/// Frames that arrived before the first cut are not in the first copy, and later frames keep their
/// numbers nevertheless.
#[test]
fn the_first_epoch_has_the_start_of_each_lane() {
    let mut world = World::opened();
    (0..2).for_each(|_| world.send(0, 1));
    for _ in 0..3 {
        world.tick();
        while !world.wire.is_empty() {
            world.arrive(0);
        }
    }
    assert_eq!(world.nodes[0].member.buffered_bytes(), 0, "an open one has them for good");
    world.send(0, 1);
    world.wire.clear();
    for vm in 0..VMS {
        (0..2).for_each(|_| world.cut(vm));
        world.commit(vm);
    }
    world.record();
    world.roll_back();
    while !world.wire.is_empty() {
        world.arrive(0);
    }
    assert_eq!(world.nodes[1].guest.got[&0], [1, 2, 3]);
}

/// Frames that a VM without a backup has received will never be needed again, even if the sender's
/// epoch has not ended.
#[test]
fn committed_frames_are_numbered_before_the_cut() {
    let mut world = World::opened();
    world.cut(0);
    world.send(0, 1);
    for _ in 0..3 {
        world.tick();
        while !world.wire.is_empty() {
            world.arrive(0);
        }
    }
    assert_eq!(
        (world.nodes[0].member.buffered_bytes(), world.nodes[1].guest.got[&0].len()),
        (0, 1)
    );
    world.send(0, 1);
    world.wire.clear();
    for vm in 0..VMS {
        (0..2).for_each(|_| world.cut(vm));
        world.commit(vm);
    }
    world.record();
    world.roll_back();
    while !world.wire.is_empty() {
        world.arrive(0);
    }
    assert_eq!(world.nodes[1].guest.got[&0], [1, 2]);
}

#[test]
fn a_copy_that_everybody_gets_is_not_taken_twice() {
    let mut world = World::new();
    let now = world.now;
    let member = &mut world.nodes[1].member;
    assert_eq!(member.receive_frame(&frame(0, ALL, 1), now), [], "it comes wrapped");
    let plain = frame(OUTSIDE, 1, 2);
    assert_eq!(member.receive_frame(&plain, now), [MemberAction::Deliver(plain.clone())]);
}

/// A missing frame is reported once, then again after a while.
#[test]
fn a_missing_frame_is_requested_and_sent_again() {
    let mut world = World::new();
    (0..4).for_each(|_| world.send(0, 1));
    world.wire.remove(0);
    for _ in 0..3 {
        let frame = world.wire.remove(0);
        let now = world.now;
        let actions = world.nodes[1].member.receive_frame(&frame, now);
        world.act(1, actions);
    }
    assert_eq!(world.wire.len(), 1, "one complaint");
    assert!(world.nodes[1].guest.got.is_empty());
    world.arrive(0);
    assert_eq!(world.wire.len(), 4);
    // The last frame takes the position of the removed one.
    for at in [0, 0, 0, 0] {
        world.wire.sort();
        world.arrive(at);
    }
    assert_eq!(world.nodes[1].guest.got[&0], [1, 2, 3, 4]);
}

/// The outside receives those frames twice that the backup does not know to have been sent.
#[test]
fn only_frames_without_a_sent_report_are_sent_twice() {
    for (is_gone, at_once, cuts, twice) in
        [(false, false, 1, 2), (true, false, 0, 2), (true, false, 1, 0), (true, true, 0, 0)]
    {
        let mut world = World::new();
        (0..2).for_each(|_| world.send(0, OUTSIDE));
        world.record();
        assert_eq!(world.outside.len(), 2);
        if is_gone {
            world.gone(0, at_once);
        }
        // An epoch that is complete, and is undone.
        (0..cuts).for_each(|_| world.cut(0));
        world.roll_back();
        assert_eq!(world.outside.len(), 2 + twice, "{is_gone} {at_once} {cuts}");
    }
}

/// Frames sent after the output was opened don't count as buffered or in flight.
#[test]
fn a_settled_member_may_still_send() {
    let mut world = World::new();
    world.send(0, 1);
    let actions = world.node(0).member.open_output();
    world.act(0, actions);
    assert!(!world.nodes[0].member.is_output_received());
    world.tick();
    while !world.wire.is_empty() {
        world.arrive(0);
    }
    world.send(0, 1);
    assert!(world.nodes[0].member.is_output_received());
    let actions = world.node(0).member.open_output();
    world.act(0, actions);
    assert!(world.nodes[0].member.is_output_received(), "it was open");
}
