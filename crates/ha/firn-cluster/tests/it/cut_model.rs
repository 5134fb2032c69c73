//! Cut model: epochs, output commit and the cut, in every order of all steps, with the cores of the
//! product.
//!
//! Three VMs, each on a host of its own. Messages are delayed, lost, duplicated and reordered: a
//! message may arrive at any later time, any number of times, or never. A VM's host or the
//! initiator dies at any step. A rollback is one step here; the other model covers how hosts agree
//! on it.
//!
//! Each frame records the generation in which it was made, so that a frame that is sent again
//! differs from another one with the same number.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::rc::Rc;
use std::time::Duration;

use firn_cluster::cut::{
    CheckpointInitiator, CutMarker, FrameStamp, GlobalCheckpoint, InitiatorAction as Cut,
    MarkAnswer, RequestTiming, StampDecision,
};
use firn_cluster::epoch::{
    BackupEpochs, EpochLimits, EpochPieceHeader, PrimaryAction, PrimaryEpochs,
};
use firn_cluster::output::{
    FrameDestination, FrameOutbox, ReceiveCounters, ReceiveDecision, SentFrame,
};
use firn_cluster::{Epoch, FrameNumber, Generation, RequestNumber, VmId};

use crate::explore::{Effort, Model, Wrong, explore, fingerprint};

const VMS: usize = 3;
/// No time passes: the effect of passing time is a step by itself.
const NOW: Duration = Duration::from_secs(1);

/// Rules that can be left out, to show why they are needed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Without {
    Nothing,
    /// Frames to the outside leave when they are sent, as frames inside the cluster do.
    OutputCommit,
    /// A mark is answered before its epoch is in the non-volatile copy.
    WaitingForTheCopy,
    /// A frame may be delivered before its receiver is cut.
    CuttingFirst,
    /// Frames to the outside leave when their epoch is committed.
    WaitingForTheCut,
    /// Frames of an undone generation are accepted.
    Generations,
    /// After a rollback, frames in flight are dropped.
    InFlightFrames,
}

/// The bounds of an exploration.
#[derive(Clone, Debug)]
struct Bounds {
    without: Without,
    /// The pairs of senders and receivers; each sends once per generation.
    sends: Vec<(VmId, FrameDestination)>,
    epochs: u64,
    requests: u32,
    failures: u8,
}

/// A frame is identified by the generation in which it was made, its sender, receiver and number.
type Born = Generation;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Guest {
    sent: BTreeMap<FrameDestination, Vec<Born>>,
    received: BTreeMap<VmId, Vec<Born>>,
}

/// The backup's state of an epoch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Copy {
    guest: Guest,
    outbox: FrameOutbox<Born>,
    counters: ReceiveCounters,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Node {
    up: bool,
    primary: PrimaryEpochs,
    backup: BackupEpochs,
    marker: CutMarker,
    live: Copy,
    copies: BTreeMap<Epoch, Copy>,
}

/// A node, shared by all states in which it is equal, with its fingerprint once that is known.
#[derive(Clone, Debug)]
struct Slot {
    node: Rc<Node>,
    print: Cell<Option<u128>>,
}

impl Slot {
    fn new(node: Node) -> Self {
        Self { node: Rc::new(node), print: Cell::new(None) }
    }

    fn change(&mut self) -> &mut Node {
        self.print.set(None);
        Rc::make_mut(&mut self.node)
    }
}

impl Deref for Slot {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.node
    }
}

impl Hash for Slot {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let print = self.print.get().unwrap_or_else(|| fingerprint(&*self.node));
        self.print.set(Some(print));
        print.hash(hasher);
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Flying {
    from: VmId,
    to: VmId,
    seq: FrameNumber,
    born: Born,
    stamp: FrameStamp,
}

#[derive(Clone, Debug, Hash)]
struct State {
    nodes: Vec<Slot>,
    initiator: CheckpointInitiator,
    term: u32,
    generation: Generation,
    register: GlobalCheckpoint,
    /// Messages, which remain forever.
    frames: BTreeSet<Flying>,
    requests: BTreeSet<(Generation, RequestNumber)>,
    answers: BTreeSet<MarkAnswer>,
    records: BTreeSet<GlobalCheckpoint>,
    /// The frames of each VM that the outside has received.
    outside: Vec<Vec<Born>>,
    failures: u8,
    wrong: Option<&'static str>,
}

#[derive(Clone, Debug)]
enum Step {
    Send(VmId, FrameDestination),
    Cut(VmId),
    /// The oldest unacknowledged epoch arrives, and so does the answer.
    Transfer(VmId),
    Ask,
    Request(VmId, Generation, RequestNumber),
    Answer(MarkAnswer),
    Record(GlobalCheckpoint),
    /// A host learns the record.
    Hear(VmId),
    Frame(Flying),
    Fail(VmId),
    FailInitiator,
    RollBack,
}

fn vms() -> impl Iterator<Item = VmId> {
    (0..VMS as u16).map(VmId)
}

fn limits() -> EpochLimits {
    EpochLimits { error_latency_max: Duration::ZERO, ..EpochLimits::default() }
}

fn initiator(generation: Generation, term: u32, number: u64) -> CheckpointInitiator {
    let pace = RequestTiming { cut_interval: NOW, retry_after: NOW, give_up_after: NOW };
    CheckpointInitiator::new((generation, 0), term, number, vms(), pace)
}

impl Node {
    fn new(vm: VmId, generation: Generation, epoch: Epoch, live: Copy) -> Self {
        Self {
            up: true,
            primary: PrimaryEpochs::new(limits(), epoch, Duration::ZERO),
            backup: BackupEpochs::new(epoch, 99),
            marker: CutMarker::new(generation, 0, vm, epoch),
            copies: BTreeMap::from([(epoch, live.clone())]),
            live,
        }
    }

    fn in_transfer(&self) -> Option<Epoch> {
        let next = self.backup.progress().complete.next();
        (next < self.primary.running_epoch()).then_some(next)
    }
}

impl State {
    fn node(&mut self, vm: VmId) -> &mut Node {
        self.nodes[vm.0 as usize].change()
    }

    fn fly(&mut self, from: VmId, sent: Vec<SentFrame<Born>>) {
        let stamp = self.node(from).marker.current_stamp();
        for SentFrame { to, seq, frame: born } in sent {
            match to {
                FrameDestination::Vm(to) => {
                    self.frames.insert(Flying { from, to, seq, born, stamp });
                }
                FrameDestination::Outside => self.seen_outside(from, seq, born),
            }
        }
    }

    fn seen_outside(&mut self, from: VmId, seq: FrameNumber, born: Born) {
        let seen = &mut self.outside[from.0 as usize];
        match seen.get(seq.0 as usize - 1) {
            Some(before) if *before != born => self.wrong = Some("output was replaced"),
            Some(_) => {}
            None if seen.len() as u64 + 1 == seq.0 => seen.push(born),
            None => self.wrong = Some("output was lost"),
        }
    }
}

impl Bounds {
    fn send(&self, state: &mut State, vm: VmId, to: FrameDestination) {
        let generation = state.generation;
        let node = state.node(vm);
        node.live.guest.sent.entry(to).or_default().push(generation);
        let epoch = node.primary.running_epoch();
        node.live.outbox.push_frame(epoch, to, generation, 1);
        if to != FrameDestination::Outside {
            node.marker.record_sent(epoch);
        }
        let globally = if self.without == Without::OutputCommit { epoch } else { Epoch(0) };
        self.release(state, vm, epoch, globally);
    }

    fn release(&self, state: &mut State, vm: VmId, inside: Epoch, globally: Epoch) {
        let outbox = &mut state.node(vm).live.outbox;
        let mut sent = outbox.release_inside(inside);
        sent.extend(outbox.release_outside(globally));
        state.fly(vm, sent);
    }

    fn cut(&self, state: &mut State, vm: VmId) {
        let node = state.node(vm);
        let epoch = node.primary.running_epoch();
        assert_eq!(node.primary.request_cut(NOW), [PrimaryAction::Cut(epoch)]);
        node.live.counters.record_cut(epoch);
        node.marker.record_cut(epoch);
        node.copies.insert(epoch, node.live.clone());
        node.primary.finish_cut(Duration::ZERO, 1);
    }

    fn transfer(&self, state: &mut State, vm: VmId) {
        let node = state.node(vm);
        let Some(epoch) = node.in_transfer() else { return };
        node.backup.receive_piece(EpochPieceHeader {
            epoch,
            index: 0,
            pieces: 1,
            is_last_epoch: false,
        });
        let progress = node.backup.progress();
        for action in node.primary.record_progress(Duration::ZERO, progress) {
            if let PrimaryAction::Committed(epoch) = action {
                node.marker.record_commit(epoch);
            }
        }
        if self.without == Without::WaitingForTheCut {
            let committed = node.primary.committed_epoch();
            self.release(state, vm, Epoch(0), committed);
        }
    }

    fn frame(&self, state: &mut State, frame: &Flying) {
        let node = state.node(frame.to);
        let mut stamp = frame.stamp;
        match self.without {
            Without::CuttingFirst => stamp.mark = RequestNumber::default(),
            Without::Generations => stamp.generation = node.marker.current_stamp().generation,
            _ => {}
        }
        if node.marker.check_frame(stamp) != StampDecision::Deliver {
            return;
        }
        if node.live.counters.accept_frame(frame.from, frame.seq) == ReceiveDecision::Deliver {
            node.live.guest.received.entry(frame.from).or_default().push(frame.born);
        }
    }

    /// A VM's answer to a request for a mark, and its marker afterwards.
    fn asked(
        &self,
        node: &Node,
        of: Generation,
        request: RequestNumber,
    ) -> (Option<MarkAnswer>, CutMarker) {
        let mut marker = node.marker.clone();
        if self.without == Without::WaitingForTheCopy {
            marker.record_commit(node.primary.running_epoch().previous());
        }
        (marker.request_mark(of, request), marker)
    }

    fn record(&self, state: &mut State, checkpoint: &GlobalCheckpoint) {
        let register = &state.register;
        let next = register.number + 1 == checkpoint.number;
        if checkpoint.generation == state.generation && next {
            state.register = checkpoint.clone();
            if state.initiator.confirm_recorded().is_none() {
                // Another initiator's checkpoint: the present initiator reads it and continues from
                // there.
                state.term += 1;
                let number = checkpoint.number;
                state.initiator = initiator(state.generation, state.term, number);
            }
        }
    }

    fn hear(&self, state: &mut State, vm: VmId) {
        let epoch = state.register.marks[&vm];
        let node = state.node(vm);
        if node.backup.fold_up_to(epoch).is_err() {
            state.wrong = Some("a checkpoint isn't kept");
            return;
        }
        node.copies = node.copies.split_off(&epoch);
        let trims = node.live.counters.drop_cuts_before(epoch);
        for (from, seq) in trims {
            let outbox = &mut state.node(from).live.outbox;
            outbox.trim_up_to(FrameDestination::Vm(vm), seq);
        }
        self.release(state, vm, Epoch(0), epoch);
    }

    fn roll_back(&self, state: &mut State) {
        state.generation = state.generation.next();
        state.term += 1;
        let marks = state.register.marks.clone();
        for vm in vms() {
            let (epoch, generation) = (marks[&vm], state.generation);
            let node = state.node(vm);
            if node.backup.roll_back_to(epoch).is_err() {
                state.wrong = Some("a checkpoint can't be restored");
                return;
            }
            let mut live = node.copies[&epoch].clone();
            live.outbox.roll_back(epoch);
            live.counters.roll_back(epoch);
            *node = Node::new(vm, generation, epoch, live);
        }
        state.initiator = initiator(state.generation, state.term, state.register.number);
        for vm in vms() {
            match self.without {
                Without::InFlightFrames => {
                    drop(state.node(vm).live.outbox.release_inside(marks[&vm]))
                }
                _ => self.release(state, vm, marks[&vm], marks[&vm]),
            }
        }
    }

    fn send_is_due(&self, state: &State, vm: VmId, to: FrameDestination) -> bool {
        let guest = &state.nodes[vm.0 as usize].live.guest;
        let times = self.sends.iter().filter(|send| **send == (vm, to)).count();
        guest.sent.get(&to).map_or(0, Vec::len) < times
    }

    fn steps_of(&self, state: &State, vm: VmId, steps: &mut Vec<Step>) {
        let node = &state.nodes[vm.0 as usize];
        if !node.up {
            return;
        }
        let sends: BTreeSet<FrameDestination> =
            self.sends.iter().filter(|(from, _)| *from == vm).map(|(_, to)| *to).collect();
        let due = sends.into_iter().filter(|&to| self.send_is_due(state, vm, to));
        steps.extend(due.map(|to| Step::Send(vm, to)));
        if node.primary.running_epoch() <= Epoch(self.epochs) {
            steps.push(Step::Cut(vm));
        }
        steps.extend(node.in_transfer().map(|_| Step::Transfer(vm)));
        let news = |&&(of, request): &&(Generation, RequestNumber)| {
            let (answer, marker) = self.asked(node, of, request);
            marker != node.marker || answer.is_some_and(|it| !state.answers.contains(&it))
        };
        let requests = state.requests.iter().filter(news);
        steps.extend(requests.map(|&(of, request)| Step::Request(vm, of, request)));
        if node.backup.base_epoch() < state.register.marks[&vm] {
            steps.push(Step::Hear(vm));
        }
        if state.failures < self.failures {
            steps.push(Step::Fail(vm));
        }
    }

    /// Whether a frame would change anything.
    fn matters(&self, state: &State, frame: &Flying) -> bool {
        let node = &state.nodes[frame.to.0 as usize];
        let stamp = node.marker.current_stamp();
        let (of_now, known) = (
            frame.stamp.generation == stamp.generation,
            node.live.counters.newest_received(frame.from),
        );
        let of_now = of_now || self.without == Without::Generations;
        let waits = frame.stamp.mark > stamp.mark && node.marker.is_cut_needed();
        node.up && of_now && (frame.seq > known || frame.stamp.mark > stamp.mark) && !waits
    }

    /// No failures from here on: every message is delivered, and epochs and cuts continue.
    fn play_on(&self, state: &mut State) {
        if state.nodes.iter().any(|node| !node.up) {
            self.take(state, &Step::RollBack);
        }
        // A mark is committed two cuts after its request.
        for round in 0..12 {
            for vm in vms() {
                self.cut(state, vm);
                self.transfer(state, vm);
                self.transfer(state, vm);
            }
            if round % 3 == 0 {
                self.take(state, &Step::Ask);
            }
            self.deliver_all(state);
        }
    }

    fn deliver_all(&self, state: &mut State) {
        for frame in state.frames.clone() {
            self.frame(state, &frame);
        }
        for (generation, request) in state.requests.clone() {
            vms().for_each(|vm| self.take(state, &Step::Request(vm, generation, request)));
        }
        for answer in state.answers.clone() {
            self.take(state, &Step::Answer(answer));
        }
        for checkpoint in state.records.clone() {
            self.record(state, &checkpoint);
        }
        vms().for_each(|vm| self.hear(state, vm));
    }
}

fn is_prefix(shorter: &[Born], longer: &[Born]) -> bool {
    longer.starts_with(shorter)
}

/// Whether one VM has received frames from another that the other has not sent.
fn orphan(guests: &[&Guest]) -> bool {
    let nothing = Vec::new();
    vms().any(|to| {
        guests[to.0 as usize].received.iter().any(|(from, received)| {
            let sent =
                guests[from.0 as usize].sent.get(&FrameDestination::Vm(to)).unwrap_or(&nothing);
            !is_prefix(received, sent)
        })
    })
}

impl Model for Bounds {
    type State = State;
    type Step = Step;

    fn start(&self) -> State {
        let live = Copy {
            guest: Guest::default(),
            outbox: FrameOutbox::new(99),
            counters: ReceiveCounters::new(Epoch(0)),
        };
        let generation = Generation(1);
        let register = GlobalCheckpoint {
            number: 0,
            generation,
            layout: 0,
            request: RequestNumber::default(),
            marks: vms().map(|vm| (vm, Epoch(0))).collect(),
        };
        let node = |vm| Slot::new(Node::new(vm, generation, Epoch(0), live.clone()));
        State {
            nodes: vms().map(node).collect(),
            initiator: initiator(generation, 1, 0),
            term: 1,
            generation,
            register,
            frames: BTreeSet::new(),
            requests: BTreeSet::new(),
            answers: BTreeSet::new(),
            records: BTreeSet::new(),
            outside: vec![Vec::new(); VMS],
            failures: 0,
            wrong: None,
        }
    }

    fn steps(&self, state: &State) -> Vec<Step> {
        let mut steps = Vec::new();
        vms().for_each(|vm| self.steps_of(state, vm, &mut steps));
        let frames = state.frames.iter().filter(|frame| self.matters(state, frame));
        steps.extend(frames.cloned().map(Step::Frame));
        steps.extend(state.answers.iter().cloned().map(Step::Answer));
        steps.extend(state.records.iter().cloned().map(Step::Record));
        if (state.requests.len() as u32) < self.requests {
            steps.push(Step::Ask);
        }
        if state.failures < self.failures {
            steps.push(Step::FailInitiator);
        }
        if state.nodes.iter().any(|node| !node.up) {
            steps.push(Step::RollBack);
        }
        steps
    }

    fn take(&self, state: &mut State, step: &Step) {
        match step {
            Step::Send(vm, to) => self.send(state, *vm, *to),
            Step::Cut(vm) => self.cut(state, *vm),
            Step::Transfer(vm) => self.transfer(state, *vm),
            Step::Ask => {
                for action in state.initiator.begin_request(Duration::ZERO) {
                    if let Cut::Ask { generation, request, .. } = action {
                        state.requests.insert((generation, request));
                    }
                }
            }
            Step::Request(vm, generation, request) => {
                let node = state.node(*vm);
                let (answer, marker) = self.asked(node, *generation, *request);
                node.marker = marker;
                state.answers.extend(answer);
            }
            Step::Answer(answer) => {
                if let Some(Cut::Record(checkpoint)) = state.initiator.record_answer(answer) {
                    state.records.insert(checkpoint);
                }
            }
            Step::Record(checkpoint) => self.record(state, checkpoint),
            Step::Hear(vm) => self.hear(state, *vm),
            Step::Frame(frame) => self.frame(state, frame),
            Step::Fail(vm) => {
                state.failures += 1;
                state.node(*vm).up = false;
            }
            Step::FailInitiator => {
                state.failures += 1;
                state.term += 1;
                state.initiator = initiator(state.generation, state.term, state.register.number);
            }
            Step::RollBack => self.roll_back(state),
        }
    }

    fn wrong(&self, state: &State) -> Option<String> {
        let marks = &state.register.marks;
        let marked = |vm: VmId| &state.nodes[vm.0 as usize].copies[&marks[&vm]].guest;
        let undone = |vm: VmId| {
            let sent =
                marked(vm).sent.get(&FrameDestination::Outside).map_or(&[][..], Vec::as_slice);
            !is_prefix(&state.outside[vm.0 as usize], sent)
        };
        if let Some(wrong) = state.wrong {
            return Some(wrong.to_owned());
        }
        if orphan(&vms().map(marked).collect::<Vec<_>>()) {
            return Some("the cut has an orphan".to_owned());
        }
        if orphan(&state.nodes.iter().map(|slot| &slot.live.guest).collect::<Vec<_>>()) {
            return Some("a VM has what nobody sent".to_owned());
        }
        vms().any(undone).then(|| "output would be undone".to_owned())
    }

    fn stuck(&self, state: &State) -> Option<String> {
        let mut state = state.clone();
        self.play_on(&mut state);
        if let Some(wrong) = self.wrong(&state) {
            return Some(format!("{wrong}, when all is well again"));
        }
        let guest = |vm: VmId| &state.nodes[vm.0 as usize].live.guest;
        let sent = |from: VmId, to: FrameDestination| guest(from).sent.get(&to).map_or(0, Vec::len);
        let received = |from: VmId, to: VmId| guest(to).received.get(&from).map_or(0, Vec::len);
        if vms()
            .any(|to| vms().any(|from| sent(from, FrameDestination::Vm(to)) != received(from, to)))
        {
            return Some("a frame inside the cluster is lost".to_owned());
        }
        let left =
            |vm: VmId| sent(vm, FrameDestination::Outside) == state.outside[vm.0 as usize].len();
        (!vms().all(left)).then(|| "output never leaves".to_owned())
    }
}

const A: VmId = VmId(0);
const B: VmId = VmId(1);
const C: VmId = VmId(2);

fn bounds(without: Without, sends: &[(VmId, FrameDestination)], failures: u8) -> Bounds {
    Bounds { without, sends: sends.to_vec(), epochs: 2, requests: 1, failures }
}

fn all_is_well(bounds: &Bounds, try_one_in: u128) {
    let effort = Effort { states_max: 40_000_000, try_one_in };
    let explored = explore(bounds, effort).unwrap_or_else(|wrong| panic!("{wrong:#?}"));
    println!("{bounds:?}: {explored}");
}

fn goes_wrong(bounds: &Bounds, try_one_in: u128) -> Wrong<Step> {
    let wrong = explore(bounds, Effort { states_max: 10_000_000, try_one_in });
    let wrong = wrong.expect_err("a rule was left out and nothing went wrong");
    println!("{:?}: {} after {} steps", bounds.without, wrong.what, wrong.steps.len());
    wrong.steps.iter().for_each(|step| println!("    {step:?}"));
    wrong
}

#[test]
fn one_frame_one_failure() {
    all_is_well(&bounds(Without::Nothing, &[(A, FrameDestination::Vm(B))], 1), 256);
}

#[test]
fn a_chain_of_frames() {
    all_is_well(
        &bounds(Without::Nothing, &[(A, FrameDestination::Vm(B)), (B, FrameDestination::Vm(C))], 0),
        256,
    );
}

#[test]
fn an_answer_to_the_outside() {
    all_is_well(
        &bounds(
            Without::Nothing,
            &[(A, FrameDestination::Vm(B)), (B, FrameDestination::Outside)],
            0,
        ),
        256,
    );
}

#[test]
#[ignore = "a minute or two"]
fn one_frame_two_failures() {
    all_is_well(&bounds(Without::Nothing, &[(A, FrameDestination::Vm(B))], 2), 16);
}

#[test]
#[ignore = "a minute or two"]
fn an_answer_to_the_outside_one_failure() {
    all_is_well(
        &bounds(
            Without::Nothing,
            &[(A, FrameDestination::Vm(B)), (B, FrameDestination::Outside)],
            1,
        ),
        16,
    );
}

#[test]
#[ignore = "several minutes, and several gigabytes"]
fn an_answer_to_the_outside_two_failures() {
    all_is_well(
        &bounds(
            Without::Nothing,
            &[(A, FrameDestination::Vm(B)), (B, FrameDestination::Outside)],
            2,
        ),
        64,
    );
}

#[test]
#[ignore = "several minutes, and several gigabytes"]
fn two_cuts_one_failure() {
    let bounds =
        Bounds { requests: 2, ..bounds(Without::Nothing, &[(A, FrameDestination::Vm(B))], 1) };
    all_is_well(&bounds, 64);
}

#[test]
fn without_cutting_first_a_cut_has_an_orphan() {
    let wrong = goes_wrong(&bounds(Without::CuttingFirst, &[(A, FrameDestination::Vm(B))], 0), 0);
    assert!(wrong.what.contains("the cut has an orphan"));
}

#[test]
fn without_output_commit_output_is_undone() {
    goes_wrong(&bounds(Without::OutputCommit, &[(A, FrameDestination::Outside)], 1), 0);
}

#[test]
fn without_waiting_for_the_copy_a_checkpoint_is_not_there() {
    goes_wrong(&bounds(Without::WaitingForTheCopy, &[(A, FrameDestination::Vm(B))], 1), 0);
}

#[test]
fn without_waiting_for_the_cut_output_is_undone() {
    goes_wrong(&bounds(Without::WaitingForTheCut, &[(A, FrameDestination::Outside)], 1), 0);
}

#[test]
fn without_generations_a_vm_receives_frames_that_were_never_sent() {
    goes_wrong(&bounds(Without::Generations, &[(A, FrameDestination::Vm(B))], 1), 8);
}

#[test]
fn without_in_flight_frames_a_frame_is_lost() {
    goes_wrong(&bounds(Without::InFlightFrames, &[(A, FrameDestination::Vm(B))], 1), 64);
}
