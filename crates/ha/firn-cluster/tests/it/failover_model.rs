//! Failover model: leases, fencing and the record, in every order of all steps, with the cores of
//! the product.
//!
//! Three VMs, two on one host and one on another, and a backup. Hosts crash. A report to a host or
//! a controller may be late by any number of steps, arrive twice, or not at all: so a host that is
//! slow for any time and then continues is also one that was frozen, and one that was cut off.
//! Controllers come and go: one is made for each decision, knows some of the reports, and its
//! proposal arrives at any later time.
//!
//! A user may request a failover from a backup at any time, and declare any primaries dead, rightly
//! or wrongly.
//!
//! Time passes in ticks; a lease lasts one, and is over for the granter after two. Clocks agree
//! here (the simulation has clocks that differ). Leases are granted at the moment of their request,
//! which is when they end soonest for the granter. Only the first host's answers are late; it
//! stands for any old primary.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::rc::Rc;
use std::time::Duration;

use firn_cluster::failover::{
    ControllerDecision, FailoverController, FailoverRecord, GrantedLeases, GuardAction, HostGuard,
    LeaseTerms, ManualDecision, VmPlacement, decide_manual_failover,
};
use firn_cluster::{Epoch, Generation, HostId, VmId};

use crate::explore::{Effort, Model, Wrong, explore};

/// The shortest time: between two ticks.
const TICK: Duration = Duration::from_secs(1);

fn terms() -> LeaseTerms {
    LeaseTerms { ttl: TICK, drift_ppm_max: 0 }
}

/// Rules that can be left out, to show why they are needed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Without {
    Nothing,
    /// Backups run without waiting for old primaries.
    Fencing,
    /// A manual failover does not fence primaries that a user declares dead.
    FencingByHand,
    /// A frame leaves without a check of the clock.
    LookingAtTheLease,
    /// A lease counts from the moment it arrives.
    CountingFromTheAsking,
    /// A lease is used before the record that came with it is obeyed.
    ObeyingBeforeSending,
}

#[derive(Clone, Copy, Debug)]
struct Bounds {
    without: Without,
    crashes: u8,
    /// The number of generations after the first.
    rollbacks: u32,
    /// A user requests failovers.
    by_hand: bool,
}

#[derive(Clone, Debug)]
struct Node {
    crashed: bool,
    guard: HostGuard,
    /// The newest record that it has learned.
    known: u64,
    /// A lease that was granted and is in flight: the time of its request, and the record at that
    /// time.
    reply: Option<(u32, Rc<FailoverRecord>)>,
}

#[derive(Clone, Debug)]
struct State {
    now: u32,
    nodes: Vec<Node>,
    /// The times at which the leases that aren't over were granted.
    granted: BTreeMap<HostId, u32>,
    register: Rc<FailoverRecord>,
    /// An earlier record, which may still be learned.
    before: Rc<FailoverRecord>,
    /// Messages. Those before the newest of them have no effect any more.
    stopped: BTreeSet<(HostId, Generation)>,
    /// A proposal in flight. Of several for one version at most one is accepted, so the others need
    /// not exist.
    proposal: Option<Rc<FailoverRecord>>,
    /// The newest generation that ever ran.
    ran: Generation,
    crashes: u8,
}

#[derive(Clone, Debug)]
enum Step {
    Tick,
    Ask(HostId),
    Granted(HostId),
    Learn(HostId, Rc<FailoverRecord>),
    /// A controller reads the leases and the record, knows that these hosts have stopped, and
    /// decides.
    Decide(Vec<HostId>),
    /// A user requests a failover from the backup, and declares these primaries dead.
    ByHand(Vec<HostId>),
    Propose(Rc<FailoverRecord>),
    /// All VMs have standbys at their backups, and a global checkpoint is recorded.
    Checkpoint,
    Crash(HostId),
}

const HOSTS: usize = 3;
/// The host whose leases may be in flight for a long time.
const LATE: HostId = HostId(0);

fn hosts() -> impl Iterator<Item = HostId> {
    (0..HOSTS as u16).map(HostId)
}

fn first_register() -> FailoverRecord {
    let placement = |primary| VmPlacement { primary: HostId(primary), backup: Some(HostId(2)) };
    FailoverRecord::new(BTreeMap::from([
        (VmId(0), placement(0)),
        (VmId(1), placement(0)),
        (VmId(2), placement(1)),
    ]))
}

fn clock(tick: u32) -> Duration {
    (tick + 10) * TICK
}

/// Times, versions, layouts and numbers of checkpoints matter only by their differences: so time
/// has no end.
impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let version = self.register.version;
        for node in &self.nodes {
            let behind = version.saturating_sub(node.known);
            let behind = if node.known < self.before.version { u64::MAX } else { behind };
            let guard = &node.guard;
            (node.crashed, guard.running_generation(), guard.generation(), behind).hash(hasher);
            guard.holds_lease(clock(self.now)).hash(hasher);
            let reply = node.reply.as_ref();
            reply.map(|(asked, of)| (self.now - asked, version - of.version)).hash(hasher);
        }
        self.granted.iter().for_each(|(host, at)| (host, self.now - at).hash(hasher));
        for register in [Some(&self.register), Some(&self.before), self.proposal.as_ref()] {
            let essence = |of: &Rc<FailoverRecord>| {
                let FailoverRecord { generation, placements, fence, .. } = &**of;
                (*generation, placements.clone(), fence.clone(), of.is_protected())
            };
            register.map(essence).hash(hasher);
        }
        (version - self.before.version, &self.stopped, self.ran, self.crashes).hash(hasher);
    }
}

impl State {
    fn grants(&self) -> GrantedLeases {
        let mut grants = GrantedLeases::after_takeover(terms(), [], Duration::ZERO);
        self.granted.iter().for_each(|(host, at)| grants.grant_lease(*host, clock(*at)));
        grants
    }

    fn tick(&mut self, late_replies: bool) {
        self.now += 1;
        let not_over = self.grants().unexpired_hosts(clock(self.now));
        self.granted.retain(|host, _| not_over.contains(host));
        // A request that is a tick old gives no lease any more.
        if !late_replies {
            self.nodes.iter_mut().for_each(|node| node.reply = None);
        }
    }

    fn node(&mut self, host: HostId) -> &mut Node {
        &mut self.nodes[host.0 as usize]
    }

    fn runs(&self, host: HostId) -> Option<Generation> {
        self.nodes[host.0 as usize].guard.running_generation()
    }

    fn crashed(&self, host: HostId) -> bool {
        self.nodes[host.0 as usize].crashed
    }

    fn set(&mut self, register: Rc<FailoverRecord>) {
        self.before = std::mem::replace(&mut self.register, register);
        let generation = self.register.generation;
        self.proposal = None;
        self.stopped.retain(|(_, at)| *at >= generation);
    }

    fn act(&mut self, host: HostId, actions: Vec<GuardAction>) {
        for action in actions {
            match action {
                GuardAction::Stop(_) => {}
                GuardAction::Stopped(generation) => drop(self.stopped.insert((host, generation))),
                GuardAction::Run { generation, .. } => self.ran = generation.max(self.ran),
            }
        }
    }
}

impl Bounds {
    fn may_send(&self, state: &State, host: HostId) -> bool {
        let node = &state.nodes[host.0 as usize];
        let may = match self.without {
            Without::LookingAtTheLease => node.guard.running_generation().is_some(),
            _ => node.guard.may_send(clock(state.now)),
        };
        may && !node.crashed
    }

    fn ask(&self, state: &mut State, host: HostId) {
        if state.register.fence.contains(&host) {
            return;
        }
        let (now, register) = (state.now, state.register.clone());
        state.granted.insert(host, now);
        state.node(host).reply = Some((now, register));
        if host != LATE {
            self.granted(state, host);
        }
    }

    fn granted(&self, state: &mut State, host: HostId) {
        let Some((asked, register)) = state.node(host).reply.take() else { return };
        let now = state.now;
        let asked = if self.without == Without::CountingFromTheAsking { now } else { asked };
        let node = state.node(host);
        let mut actions = Vec::new();
        if self.without == Without::ObeyingBeforeSending {
            actions = node.guard.record_grant(clock(asked), &first_register());
        } else if register.version >= node.known {
            node.known = register.version;
            actions = node.guard.record_grant(clock(asked), &register);
        }
        state.act(host, actions);
    }

    fn learn(&self, state: &mut State, host: HostId, register: &FailoverRecord) {
        let node = state.node(host);
        node.known = node.known.max(register.version);
        let actions = node.guard.learn_record(register);
        state.act(host, actions);
    }

    /// The proposal of a controller that has received these reports.
    fn decision(&self, state: &State, heard: &[HostId]) -> Option<Rc<FailoverRecord>> {
        let hosts = state.grants().unexpired_hosts(clock(state.now));
        let mut controller = FailoverController::new((*state.register).clone(), hosts);
        let heard = state.stopped.iter().filter(|(host, _)| heard.contains(host));
        heard.for_each(|&(host, generation)| controller.record_stopped(host, generation));
        let ControllerDecision::Propose(mut register) = controller.next_decision() else {
            return None;
        };
        if self.without == Without::Fencing {
            register.fence.clear();
        }
        Some(Rc::new(register)).filter(|register| register.generation.0 <= self.rollbacks)
    }

    /// The proposal that follows when a user requests a failover, and declares these primaries
    /// dead.
    fn decision_by_hand(&self, state: &State, dead: &[HostId]) -> Option<Rc<FailoverRecord>> {
        let register = &state.register;
        let backup = register.placements.values().next()?.backup?;
        let dead: BTreeSet<HostId> = dead.iter().copied().collect();
        let leases = state.grants().unexpired_hosts(clock(state.now));
        let decision = decide_manual_failover(register, &leases, backup, &dead);
        let ManualDecision::Propose(mut next) = decision else { return None };
        if self.without == Without::FencingByHand {
            next.fence.retain(|host| !dead.contains(host));
        }
        Some(Rc::new(next)).filter(|next| next.generation.0 <= self.rollbacks)
    }

    fn decisions_by_hand(&self, state: &State, steps: &mut Vec<Step>) {
        let primaries: Vec<HostId> = state.register.primaries().into_iter().collect();
        for subset in 0..1_u32 << primaries.len() {
            let dead = primaries.iter().enumerate().filter(|(bit, _)| subset >> bit & 1 == 1);
            let dead: Vec<HostId> = dead.map(|(_, host)| *host).collect();
            if self.decision_by_hand(state, &dead).is_some() {
                steps.push(Step::ByHand(dead));
            }
        }
    }

    fn checkpoint_is_possible(&self, state: &State) -> bool {
        let register = &state.register;
        let runs = |host| !state.crashed(host) && state.runs(host) == Some(register.generation);
        let good = |placement: &VmPlacement| {
            runs(placement.primary) && placement.backup.is_some_and(|backup| !state.crashed(backup))
        };
        !register.is_protected()
            && register.fence.is_empty()
            && register.placements.values().all(good)
    }

    fn checkpoint(&self, state: &mut State) {
        let register = state.register.clone();
        let mut checkpoint = register.checkpoint.clone();
        (checkpoint.generation, checkpoint.layout) = (register.generation, register.layout);
        checkpoint.number += 1;
        checkpoint.marks.values_mut().for_each(|epoch| *epoch = Epoch(checkpoint.number));
        let next = register.with_checkpoint(&checkpoint).expect("it is of this layout");
        state.set(Rc::new(next));
    }

    fn steps_of(&self, state: &State, host: HostId, steps: &mut Vec<Step>) {
        let node = &state.nodes[host.0 as usize];
        if node.crashed {
            return;
        }
        let asked =
            state.granted.get(&host) == Some(&state.now) && node.known == state.register.version;
        let waits = node.reply.as_ref().is_some_and(|(asked, _)| *asked == state.now);
        if !state.register.fence.contains(&host) && !asked && !waits {
            steps.push(Step::Ask(host));
        }
        steps.extend(node.reply.iter().map(|_| Step::Granted(host)));
        let registers = [&state.before, &state.register].into_iter();
        let news = registers.filter(|register| register.version > node.known);
        steps.extend(news.map(|register| Step::Learn(host, register.clone())));
        if state.crashes < self.crashes {
            steps.push(Step::Crash(host));
        }
    }

    fn decisions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.proposal.is_some() {
            return;
        }
        if self.by_hand {
            self.decisions_by_hand(state, steps);
        }
        let said: Vec<HostId> = state.stopped.iter().map(|(host, _)| *host).collect();
        for subset in 0..1_u32 << said.len() {
            let heard = said.iter().enumerate().filter(|(bit, _)| subset >> bit & 1 == 1);
            let heard: Vec<HostId> = heard.map(|(_, host)| *host).collect();
            if self.decision(state, &heard).is_some() {
                steps.push(Step::Decide(heard));
            }
        }
    }

    fn play_on(&self, state: &mut State) {
        for _ in 0..24 {
            state.tick(false);
            let well: Vec<HostId> = hosts().filter(|&host| !state.crashed(host)).collect();
            for host in well {
                self.ask(state, host);
                self.granted(state, host);
                self.learn(state, host, &state.register.clone());
            }
            let heard: Vec<HostId> = hosts().collect();
            let ever = Bounds { rollbacks: u32::MAX, ..*self };
            if let Some(proposal) = ever.decision(state, &heard) {
                state.set(proposal);
            }
            if self.checkpoint_is_possible(state) {
                self.checkpoint(state);
            }
        }
    }
}

impl Model for Bounds {
    type State = State;
    type Step = Step;

    fn start(&self) -> State {
        let register = Rc::new(first_register());
        let node = |host| {
            let mut guard = HostGuard::new(host, terms());
            guard.record_grant(clock(0), &register);
            Node { crashed: false, guard, known: 0, reply: None }
        };
        State {
            now: 0,
            nodes: hosts().map(node).collect(),
            granted: hosts().map(|host| (host, 0)).collect(),
            before: register.clone(),
            register,
            stopped: BTreeSet::new(),
            proposal: None,
            ran: Generation(0),
            crashes: 0,
        }
    }

    fn steps(&self, state: &State) -> Vec<Step> {
        let mut steps = Vec::new();
        hosts().for_each(|host| self.steps_of(state, host, &mut steps));
        self.decisions(state, &mut steps);
        steps.extend(state.proposal.iter().cloned().map(Step::Propose));
        if self.checkpoint_is_possible(state) {
            steps.push(Step::Checkpoint);
        }
        steps.push(Step::Tick);
        steps
    }

    fn take(&self, state: &mut State, step: &Step) {
        match step {
            Step::Tick => state.tick(self.without == Without::CountingFromTheAsking),
            Step::Ask(host) => self.ask(state, *host),
            Step::Granted(host) => self.granted(state, *host),
            Step::Learn(host, register) => self.learn(state, *host, register),
            Step::Decide(heard) => {
                state.proposal = self.decision(state, heard);
            }
            Step::ByHand(dead) => {
                state.proposal = self.decision_by_hand(state, dead);
            }
            Step::Propose(register) => {
                if register.version == state.register.version + 1 {
                    state.set(register.clone());
                }
            }
            Step::Checkpoint => self.checkpoint(state),
            Step::Crash(host) => {
                state.crashes += 1;
                let guard = HostGuard::new(*host, terms());
                *state.node(*host) = Node { crashed: true, guard, known: 0, reply: None };
            }
        }
    }

    fn wrong(&self, state: &State) -> Option<String> {
        if !state.register.is_separate() {
            return Some("a primary is a backup".to_owned());
        }
        let old = |host: HostId| state.runs(host) < Some(state.ran);
        let split = hosts().any(|host| self.may_send(state, host) && old(host));
        split.then(|| "a host sends in a timeline that was undone".to_owned())
    }

    fn stuck(&self, state: &State) -> Option<String> {
        let mut state = state.clone();
        self.play_on(&mut state);
        if let Some(wrong) = self.wrong(&state) {
            return Some(format!("{wrong}, when all is well again"));
        }
        let register = &state.register;
        let runs = |placement: &VmPlacement| {
            let now = state.runs(placement.primary) == Some(register.generation);
            now && register.fence.is_empty() && self.may_send(&state, placement.primary)
        };
        let all_run = register.placements.values().all(runs);
        let copy =
            |placement: &VmPlacement| placement.backup.is_some_and(|backup| !state.crashed(backup));
        let copies = register.is_protected() && register.placements.values().all(copy);
        let lost = register.primaries().into_iter().any(|host| state.crashed(host)) && !copies;
        (!all_run && !lost).then(|| "the cluster stands still".to_owned())
    }
}

fn all_is_well(bounds: Bounds, try_one_in: u128) {
    let effort = Effort { states_max: 40_000_000, try_one_in };
    let explored = explore(&bounds, effort).unwrap_or_else(|wrong| panic!("{wrong:#?}"));
    println!("{bounds:?}: {explored}");
}

fn goes_wrong(without: Without) -> Wrong<Step> {
    let by_hand = without == Without::FencingByHand;
    let bounds = Bounds { without, crashes: 0, rollbacks: 1, by_hand };
    let wrong = explore(&bounds, Effort { states_max: 10_000_000, try_one_in: 0 });
    let wrong = wrong.expect_err("a rule was left out and nothing went wrong");
    println!("{without:?}: {} after {} steps", wrong.what, wrong.steps.len());
    wrong.steps.iter().for_each(|step| println!("    {step:?}"));
    assert!(wrong.what.contains("undone"));
    wrong
}

fn with(crashes: u8, rollbacks: u32) -> Bounds {
    Bounds { without: Without::Nothing, crashes, rollbacks, by_hand: false }
}

#[test]
fn one_rollback_without_a_crash() {
    all_is_well(with(0, 1), 64);
}

#[test]
#[ignore = "half a minute"]
fn two_crashes_one_rollback() {
    all_is_well(with(2, 1), 16);
}

#[test]
#[ignore = "a minute"]
fn two_crashes_two_rollbacks() {
    all_is_well(with(2, 2), 64);
}

/// Whatever a user requests, also if a living host is declared dead.
#[test]
fn failovers_by_hand_without_a_crash() {
    all_is_well(Bounds { by_hand: true, ..with(0, 1) }, 64);
}

#[test]
#[ignore = "half a minute"]
fn failovers_by_hand_with_a_crash() {
    all_is_well(Bounds { by_hand: true, ..with(1, 2) }, 64);
}

#[test]
fn without_manual_fencing_two_primaries_send() {
    goes_wrong(Without::FencingByHand);
}

#[test]
fn without_fencing_two_primaries_send() {
    goes_wrong(Without::Fencing);
}

#[test]
fn without_looking_at_the_lease_a_host_that_was_frozen_sends() {
    goes_wrong(Without::LookingAtTheLease);
}

#[test]
fn without_counting_from_the_asking_two_primaries_send() {
    goes_wrong(Without::CountingFromTheAsking);
}

#[test]
fn without_obeying_before_sending_two_primaries_send() {
    goes_wrong(Without::ObeyingBeforeSending);
}
