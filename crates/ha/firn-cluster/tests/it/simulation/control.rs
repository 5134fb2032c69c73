//! The record with its leases, and the current controller and initiator.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use firn_cluster::cut::{self, CheckpointInitiator, RequestTiming};
use firn_cluster::failover::{
    ControllerDecision, FailoverController, FailoverRecord, GrantedLeases, VmPlacement,
};
use firn_cluster::{Epoch, Generation, HostId, VmId};

use super::Without;
use super::checks::Checks;
use super::host::{TERMS, clock};
use super::network::{Message, Ms, Network};

#[derive(Debug)]
pub struct Control {
    pub register: Rc<FailoverRecord>,
    pub hosts: Vec<HostId>,
    pub lost: bool,
    grants: GrantedLeases,
    controller: FailoverController,
    initiator: CheckpointInitiator,
    /// The generation and layout of the initiator.
    about: (Generation, u64),
    /// The VMs that were stopped to be moved, and their last epochs.
    drained: BTreeMap<VmId, Epoch>,
    term: u32,
    last_report: Ms,
    ppm: i64,
}

const REPORT_MS: Ms = 100;

impl Control {
    pub fn new(register: FailoverRecord, hosts: Vec<HostId>, ppm: i64) -> Self {
        let grants = GrantedLeases::after_takeover(TERMS, hosts.iter().copied(), clock(0, 0, ppm));
        Self {
            grants,
            controller: FailoverController::new(register.clone(), hosts.iter().copied().collect()),
            initiator: initiator(&register, 1),
            about: (register.generation, register.layout),
            register: Rc::new(register),
            hosts,
            lost: false,
            drained: BTreeMap::new(),
            term: 1,
            last_report: 0,
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
        self.grants = GrantedLeases::after_takeover(TERMS, self.hosts.iter().copied(), now);
        let hosts = self.hosts.iter().copied().collect();
        self.controller = FailoverController::new((*self.register).clone(), hosts);
        self.initiator = initiator(&self.register, self.term);
    }

    pub fn join(&mut self, host: HostId, net: &Network) {
        self.hosts.push(host);
        let now = self.clock(net);
        self.grants.grant_lease(host, now);
    }

    pub fn move_over(&mut self) {
        self.controller.plan_failover();
    }

    pub fn tick(&mut self, net: &mut Network, checks: &mut Checks, without: Without) {
        let now = self.clock(net);
        self.controller.set_lease_holders(self.grants.unexpired_hosts(now));
        self.lost = false;
        match self.controller.next_decision() {
            ControllerDecision::Wait => {}
            ControllerDecision::Lost(_) => self.lost = true,
            ControllerDecision::Propose(mut register) => {
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
        if net.now >= self.last_report + REPORT_MS {
            self.tell(net);
        }
        if self.controller.is_failover_planned() {
            self.send_all(net, &Message::Finish(self.register.generation));
        }
        if self.register.fence.is_empty() {
            let actions = self.initiator.advance_time(now);
            self.act(actions, net, checks);
        }
    }

    fn set(&mut self, register: FailoverRecord, net: &mut Network) {
        self.register = Rc::new(register);
        self.controller.learn_record(&self.register);
        let about = (self.register.generation, self.register.layout);
        if about != self.about {
            self.about = about;
            self.term += 1;
            self.initiator = initiator(&self.register, self.term);
        }
        self.tell(net);
    }

    fn tell(&mut self, net: &mut Network) {
        self.last_report = net.now;
        let message = Message::Register(self.register.clone());
        self.send_all(net, &message);
    }

    fn send_all(&self, net: &mut Network, message: &Message) {
        self.hosts.iter().for_each(|host| net.send(None, Some(*host), message.clone()));
    }

    fn act(&mut self, actions: Vec<cut::InitiatorAction>, net: &mut Network, checks: &mut Checks) {
        for action in actions {
            match action {
                cut::InitiatorAction::Ask { generation, request, .. } => {
                    self.send_all(net, &Message::Request { generation, request });
                }
                cut::InitiatorAction::Record(checkpoint) => {
                    if let Some(register) = self.register.with_checkpoint(&checkpoint) {
                        checks.recorded(&checkpoint);
                        self.set(register, net);
                        self.initiator.confirm_recorded();
                    } else {
                        self.initiator.retire_refused();
                    }
                }
                cut::InitiatorAction::Announce(_) => {}
            }
        }
    }

    pub fn arrives(&mut self, message: Message, net: &mut Network, checks: &mut Checks) {
        match message {
            Message::Renew { host, .. } if self.register.fence.contains(&host) => {}
            Message::Renew { host, asked_ns } => {
                let now = self.clock(net);
                self.grants.grant_lease(host, now);
                let register = self.register.clone();
                net.send(None, Some(host), Message::Granted { asked_ns, register });
            }
            Message::Stopped { host, generation } => {
                self.controller.record_stopped(host, generation)
            }
            Message::Drained { vm, epoch, generation } => {
                self.controller.record_drained(vm, epoch, generation);
                if generation == self.register.generation {
                    self.drained.insert(vm, epoch);
                }
            }
            Message::Answer(answer) => {
                let action = self.initiator.record_answer(&answer);
                self.act(action.into_iter().collect(), net, checks);
            }
            _ => {}
        }
    }
}

fn initiator(register: &FailoverRecord, term: u32) -> CheckpointInitiator {
    let ms = Duration::from_millis;
    let pace = RequestTiming { cut_interval: ms(60), retry_after: ms(60), give_up_after: ms(1500) };
    let about = (register.generation, register.layout);
    CheckpointInitiator::new(
        about,
        term,
        register.checkpoint.number,
        register.placements.keys().copied(),
        pace,
    )
}

/// The initial placement: VMs spread over the primaries, standbys over the backups.
pub fn placements(vms: u64, primaries: u64, backups: u64) -> BTreeMap<VmId, VmPlacement> {
    let placement = |vm: u64| VmPlacement {
        primary: HostId((vm % primaries) as u16),
        backup: Some(HostId((primaries + vm % backups) as u16)),
    };
    (0..vms).map(|vm| (VmId(vm as u16), placement(vm))).collect()
}
