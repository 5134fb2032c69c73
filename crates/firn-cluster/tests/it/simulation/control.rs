//! The record with its leases, and the current controller and initiator.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use firn_cluster::cut::{self, Initiator, Pace};
use firn_cluster::failover::{Controller, Grants, Next, Place, Register};
use firn_cluster::{Epoch, Generation, Host, Vm};

use super::Without;
use super::checks::Checks;
use super::host::{TERMS, clock};
use super::network::{Message, Ms, Network};

#[derive(Debug)]
pub struct Control {
    pub register: Rc<Register>,
    pub hosts: Vec<Host>,
    pub lost: bool,
    grants: Grants,
    controller: Controller,
    initiator: Initiator,
    /// The generation and layout of the initiator.
    about: (Generation, u64),
    /// The VMs that were stopped to be moved, and their last epochs.
    drained: BTreeMap<Vm, Epoch>,
    term: u32,
    told: Ms,
    ppm: i64,
}

const TELL_MS: Ms = 100;

impl Control {
    pub fn new(register: Register, hosts: Vec<Host>, ppm: i64) -> Self {
        let grants = Grants::taken_over(TERMS, hosts.iter().copied(), clock(0, 0, ppm));
        Self {
            grants,
            controller: Controller::new(register.clone(), hosts.iter().copied().collect()),
            initiator: initiator(&register, 1),
            about: (register.generation, register.layout),
            register: Rc::new(register),
            hosts,
            lost: false,
            drained: BTreeMap::new(),
            term: 1,
            told: 0,
            ppm,
        }
    }

    fn clock(&self, net: &Network) -> Duration {
        clock(net.now, 0, self.ppm)
    }

    /// Another controller and initiator take office, and know only the record.
    pub fn restart(&mut self, net: &Network) {
        self.term += 1;
        let now = self.clock(net);
        self.grants = Grants::taken_over(TERMS, self.hosts.iter().copied(), now);
        let hosts = self.hosts.iter().copied().collect();
        self.controller = Controller::new((*self.register).clone(), hosts);
        self.initiator = initiator(&self.register, self.term);
    }

    pub fn join(&mut self, host: Host, net: &Network) {
        self.hosts.push(host);
        let now = self.clock(net);
        self.grants.grant(host, now);
    }

    pub fn move_over(&mut self) {
        self.controller.move_over();
    }

    pub fn tick(&mut self, net: &mut Network, checks: &mut Checks, without: Without) {
        let now = self.clock(net);
        self.controller.leases(self.grants.not_over(now));
        self.lost = false;
        match self.controller.next() {
            Next::Wait => {}
            Next::Lost(_) => self.lost = true,
            Next::Propose(mut register) => {
                if without == Without::Fencing {
                    register.fence.clear();
                }
                if register.generation > self.register.generation {
                    checks.tally.failovers += 1;
                    if self.drained == self.register.checkpoint.marks {
                        checks.tally.moves += 1;
                        checks.moved.insert(register.generation);
                    }
                    self.drained.clear();
                }
                self.set(register, net);
            }
        }
        if net.now >= self.told + TELL_MS {
            self.tell(net);
        }
        if self.controller.is_moving() {
            self.send_all(net, &Message::Finish(self.register.generation));
        }
        if self.register.fence.is_empty() {
            let actions = self.initiator.tick(now);
            self.act(actions, net, checks);
        }
    }

    fn set(&mut self, register: Register, net: &mut Network) {
        self.register = Rc::new(register);
        self.controller.learned(&self.register);
        let about = (self.register.generation, self.register.layout);
        if about != self.about {
            self.about = about;
            self.term += 1;
            self.initiator = initiator(&self.register, self.term);
        }
        self.tell(net);
    }

    fn tell(&mut self, net: &mut Network) {
        self.told = net.now;
        let message = Message::Register(self.register.clone());
        self.send_all(net, &message);
    }

    fn send_all(&self, net: &mut Network, message: &Message) {
        self.hosts.iter().for_each(|host| net.send(None, Some(*host), message.clone()));
    }

    fn act(&mut self, actions: Vec<cut::Action>, net: &mut Network, checks: &mut Checks) {
        for action in actions {
            match action {
                cut::Action::Ask { generation, request, .. } => {
                    self.send_all(net, &Message::Request { generation, request });
                }
                cut::Action::Record(checkpoint) => {
                    if let Some(register) = self.register.with_checkpoint(&checkpoint) {
                        checks.recorded(&checkpoint);
                        self.set(register, net);
                        self.initiator.recorded();
                    } else {
                        self.initiator.refused();
                    }
                }
                cut::Action::Announce(_) => {}
            }
        }
    }

    pub fn arrives(&mut self, message: Message, net: &mut Network, checks: &mut Checks) {
        match message {
            Message::Renew { host, .. } if self.register.fence.contains(&host) => {}
            Message::Renew { host, asked_ns } => {
                let now = self.clock(net);
                self.grants.grant(host, now);
                let register = self.register.clone();
                net.send(None, Some(host), Message::Granted { asked_ns, register });
            }
            Message::Stopped { host, generation } => self.controller.stopped(host, generation),
            Message::Drained { vm, epoch, generation } => {
                self.controller.drained(vm, epoch, generation);
                if generation == self.register.generation {
                    self.drained.insert(vm, epoch);
                }
            }
            Message::Answer(answer) => {
                let action = self.initiator.answered(&answer);
                self.act(action.into_iter().collect(), net, checks);
            }
            _ => {}
        }
    }
}

fn initiator(register: &Register, term: u32) -> Initiator {
    let ms = Duration::from_millis;
    let pace = Pace { every: ms(60), again_after: ms(60), give_up_after: ms(1500) };
    let about = (register.generation, register.layout);
    Initiator::new(about, term, register.checkpoint.number, register.places.keys().copied(), pace)
}

/// The initial placement: VMs spread over the primaries, standbys over the backups.
pub fn places(vms: u64, primaries: u64, backups: u64) -> BTreeMap<Vm, Place> {
    let place = |vm: u64| Place {
        primary: Host((vm % primaries) as u16),
        backup: Some(Host((primaries + vm % backups) as u16)),
    };
    (0..vms).map(|vm| (Vm(vm as u16), place(vm))).collect()
}
