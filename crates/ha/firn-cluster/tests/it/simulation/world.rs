//! One run: a cluster, its failures, and the time without failures afterwards.

use std::collections::BTreeMap;
use std::rc::Rc;

use firn_cluster::epoch::BackupEpochs;
use firn_cluster::failover::FailoverRecord;
use firn_cluster::output::FrameDestination;
use firn_cluster::{Epoch, Generation, HostId, VmId};

use super::checks::{Checks, orphan};
use super::control::{Control, placements};
use super::dice::Dice;
use super::host::{Around, Copy, Guest, Health, Node, Store, TICK_MS};
use super::network::{Event, Message, Ms, Network};
use super::{Tally, Without};

/// How long failures occur, and how long none occur afterwards.
const TROUBLE_MS: Ms = 4000;
const CALM_MS: Ms = 4000;

#[derive(Debug)]
pub struct World {
    without: Without,
    net: Network,
    control: Control,
    nodes: BTreeMap<HostId, Node>,
    checks: Checks,
}

impl World {
    pub fn new(seed: u64, without: Without) -> Self {
        let mut dice = Dice::new(seed);
        let (vms, primaries) = (3 + dice.roll(6), 2 + dice.roll(3));
        let (backups, spares) = (1 + dice.roll(2), dice.roll(3));
        let register = FailoverRecord::new(placements(vms, primaries, backups));
        let hosts: Vec<HostId> =
            (0..primaries + backups + spares).map(|host| HostId(host as u16)).collect();
        let ppm = dice.roll(901) as i64 - 450;
        let mut world = Self {
            without,
            control: Control::new(register, hosts.clone(), ppm),
            net: Network::new(dice),
            nodes: BTreeMap::new(),
            checks: Checks::default(),
        };
        hosts.into_iter().for_each(|host| world.add(host));
        world.first_copies();
        world.net.after(1, Event::Tick(None));
        world.net.after(300, Event::Trouble);
        world.net.after(TROUBLE_MS, Event::Calm);
        world
    }

    fn add(&mut self, host: HostId) {
        let dice = &mut self.net.dice;
        let (ahead_ms, ppm) = (dice.roll(100_000), dice.roll(901) as i64 - 450);
        let first = dice.roll(TICK_MS);
        // A host begins with the initial record, and learns the current one.
        let register = FailoverRecord { version: 0, ..(*self.control.register).clone() };
        self.nodes.insert(host, Node::new(host, Rc::new(register), ahead_ms, ppm));
        self.net.after(first, Event::Tick(Some(host)));
    }

    fn first_copies(&mut self) {
        for (&vm, placement) in &self.control.register.placements {
            let copies = BTreeMap::from([(Epoch(0), Rc::new(Copy::first()))]);
            let store = Store { backup: BackupEpochs::new(Epoch(0), 12), copies };
            let backup = placement.backup.and_then(|backup| self.nodes.get_mut(&backup));
            backup.map(|node| node.stores.insert((vm, Generation(0)), store));
        }
    }

    pub fn play(mut self) -> Result<Tally, String> {
        while let Some(event) = self.net.next() {
            if self.net.now > TROUBLE_MS + CALM_MS {
                break;
            }
            self.happens(event);
            if let Some(wrong) = self.checks.wrong.take() {
                return Err(format!("at {} ms: {wrong}", self.net.now));
            }
        }
        self.gets_on().map(|()| self.checks.tally)
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Tick(None) => {
                self.net.after(TICK_MS, Event::Tick(None));
                self.control.tick(&mut self.net, &mut self.checks, self.without);
            }
            Event::Tick(Some(host)) => self.tick(host),
            Event::Arrives { to: None, message } => {
                self.control.arrives(message, &mut self.net, &mut self.checks);
            }
            Event::Arrives { to: Some(host), message } => self.arrives(host, message),
            Event::Trouble => self.trouble(),
            Event::Wake(host) => self.wake(host),
            Event::Heal => self.net.heal(),
            Event::Calm => self.calm(),
        }
        if self.net.now % 50 == 0 {
            self.nobody_has_what_nobody_sent();
        }
    }

    fn tick(&mut self, host: HostId) {
        let Some(node) = self.nodes.get_mut(&host) else { return };
        if node.health == Health::Crashed {
            return;
        }
        self.net.after(TICK_MS, Event::Tick(Some(host)));
        if node.health == Health::Well {
            let (net, checks) = (&mut self.net, &mut self.checks);
            node.tick(&mut Around { net, checks, without: self.without });
        }
    }

    fn arrives(&mut self, host: HostId, message: Message) {
        let Some(node) = self.nodes.get_mut(&host) else { return };
        let (net, checks) = (&mut self.net, &mut self.checks);
        match node.health {
            Health::Well => {
                node.arrives(message, &mut Around { net, checks, without: self.without })
            }
            Health::Frozen => node.waiting.push(message),
            Health::Crashed => {}
        }
    }

    fn well(&self) -> Vec<HostId> {
        let well = self.nodes.values().filter(|node| node.health == Health::Well);
        well.map(|node| node.host).collect()
    }

    fn trouble(&mut self) {
        if self.net.calm {
            return;
        }
        let next = 100 + self.net.dice.roll(1500);
        self.net.after(next, Event::Trouble);
        let well = self.well();
        let Some(host) = self.net.dice.pick(&well) else { return };
        match self.net.dice.roll(10) {
            0 | 1 => self.crash(host),
            2 | 3 => self.freeze(host),
            4 => self.cut_off(host, true),
            5 => self.cut_off(host, false),
            6 => {
                let other = self.net.dice.pick(&well);
                self.net.cut(Some(host), other);
                self.heal_later();
            }
            7 => self.control.restart(&self.net),
            _ => self.control.move_over(),
        }
    }

    fn crash(&mut self, host: HostId) {
        // The host restarts, or a spare one starts, later.
        let new = HostId(self.nodes.len() as u16);
        self.nodes.entry(host).and_modify(|node| node.health = Health::Crashed);
        self.add(new);
        self.control.join(new, &self.net);
    }

    fn freeze(&mut self, host: HostId) {
        self.nodes.entry(host).and_modify(|node| node.health = Health::Frozen);
        let wake = 50 + self.net.dice.roll(1500);
        self.net.after(wake, Event::Wake(host));
    }

    fn cut_off(&mut self, host: HostId, from_all: bool) {
        self.net.cut(Some(host), None);
        if from_all {
            let others: Vec<HostId> = self.nodes.keys().copied().collect();
            others.into_iter().for_each(|other| self.net.cut(Some(host), Some(other)));
        }
        self.heal_later();
    }

    fn heal_later(&mut self) {
        let heal = 50 + self.net.dice.roll(1200);
        self.net.after(heal, Event::Heal);
    }

    /// A frozen host continues: first with its timers, or first with the messages that have arrived
    /// meanwhile.
    fn wake(&mut self, host: HostId) {
        let Some(node) = self.nodes.get_mut(&host) else { return };
        if node.health != Health::Frozen {
            return;
        }
        node.health = Health::Well;
        for message in std::mem::take(&mut node.waiting) {
            let soon = self.net.dice.roll(30);
            self.net.after(soon, Event::Arrives { to: Some(host), message });
        }
        if self.net.dice.chance(50) {
            let (net, checks) = (&mut self.net, &mut self.checks);
            node.tick(&mut Around { net, checks, without: self.without });
        }
    }

    fn calm(&mut self) {
        self.net.calm = true;
        self.net.heal();
        let all: Vec<HostId> = self.nodes.keys().copied().collect();
        all.into_iter().for_each(|host| self.wake(host));
    }

    /// The VMs of the newest generation, if all run.
    fn guests(&self) -> Option<BTreeMap<VmId, Guest>> {
        let register = &self.control.register;
        let here = |node: &&Node| {
            node.health != Health::Crashed && node.runs() == Some(register.generation)
        };
        let nodes = self.nodes.values().filter(here);
        let guests: BTreeMap<VmId, Guest> =
            nodes.flat_map(|node| node.guests().map(|(vm, guest)| (vm, guest.clone()))).collect();
        (guests.len() == register.placements.len()).then_some(guests)
    }

    fn nobody_has_what_nobody_sent(&mut self) {
        let found = self.guests().and_then(|guests| orphan(&guests));
        if let Some((from, to)) = found {
            self.checks.fail(format!("{to} has an orphan from {from}"));
        }
    }

    /// Whether the final state is correct.
    fn gets_on(&mut self) -> Result<(), String> {
        let register = self.control.register.clone();
        let crashed =
            |host: &HostId| self.nodes.get(host).is_none_or(|node| node.health == Health::Crashed);
        if self.control.lost && register.primaries().iter().any(crashed) {
            self.checks.tally.lost += 1;
            return Ok(());
        }
        let guests = self.guests().ok_or_else(|| format!("not all run: {register:?}"))?;
        if register.placements.values().any(|placement| placement.backup.is_none()) {
            return Ok(()); // No host is left for standbys: it runs, and waits for one.
        }
        if register.checkpoint.generation != register.generation || !register.is_protected() {
            return Err(format!("there is no checkpoint of the end: {register:?}"));
        }
        for (vm, guest) in &guests {
            let sent = guest.sent.get(&FrameDestination::Outside).map_or(0, Vec::len);
            if self.checks.seen(*vm) + 40 < sent {
                return Err(format!("output of {vm} doesn't leave"));
            }
            for (to, frames) in &guest.sent {
                let FrameDestination::Vm(to) = to else { continue };
                let received = guests[to].received.get(vm).map_or(0, Vec::len);
                if received + 40 < frames.len() {
                    return Err(format!("frames from {vm} to {to} don't arrive"));
                }
            }
        }
        Ok(())
    }
}
