//! One fault, from VMs that begin to what is in their books at the end.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::audit::{Books, compare};
use super::clients::{self, Clients, Shared};
use super::fault::{Kind, Plan};
use super::ring::Ring;
use super::vms::{self, KEEPER, Vms};
use crate::lab::Lab;
use crate::site::{Inside, Site};

const CLUSTER: &str = "bank";
const INTERVAL: &str = "50ms";
/// How long until a question counts as never answered; with holding, and without, where much is never answered.
const GIVE_UP: Duration = Duration::from_secs(60);
const GIVE_UP_SOON: Duration = Duration::from_secs(12);
/// How long global checkpoints may take to go on by themselves, where they may.
const RECOVERS: Duration = Duration::from_secs(4);
/// How long something may be refused, because what was lost isn't known to be lost yet.
const KNOWN: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often each client is answered, and the token goes round, before the fault and after it.
const ANSWERS: u64 = 2 * clients::COUNT;
const ROUNDS: u64 = 3;

/// VMs at work, protected together.
pub(super) struct Life<'a> {
    lab: &'a Lab,
    site: &'a mut Site,
    outside: Inside,
    clients: Clients,
    ring: Ring,
    failovers: u64,
}

impl<'a> Life<'a> {
    /// All hosts begin anew, the VMs are restored, protected, and have clients.
    pub(super) fn begin(
        lab: &'a Lab,
        site: &'a mut Site,
        vms: &Vms,
        fault: Option<&str>,
        seed: u64,
    ) -> Result<Self> {
        reboot(site)?;
        for number in 0..vms::COUNT {
            vms.restore(site, number, fault).with_context(|| vms::name(number))?;
        }
        let keeper = site.host(KEEPER).firn();
        let names = (0..vms::COUNT).map(|vm| format!("{}@{}", vms::name(vm), site.host(vm).name()));
        let names: Vec<String> = names.flat_map(|name| ["--vm".to_owned(), name]).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        keeper.call("cluster", &[&["create", CLUSTER], &names[..]].concat())?;
        keeper.call("cluster", &["protect", CLUSTER, "--interval", INTERVAL])?;
        let outside = site.outside()?;
        let give_up = if fault.is_some() { GIVE_UP_SOON } else { GIVE_UP };
        let shared = Shared::new(vms::bank_addresses(), vms::start().0.len(), give_up);
        let clients = Clients::start(&shared, &outside, seed);
        let ring = Ring::start(&vms::ring_addresses(), &outside);
        Ok(Self { lab, site, outside, clients, ring, failovers: 0 })
    }

    /// Something is lost. What was seen and found then.
    pub(super) fn suffer(mut self, plan: &Plan) -> Result<Value> {
        ensure!(
            self.goes_on(),
            "clients are not answered, or the token stands still, before the fault"
        );
        thread::sleep(plan.after);
        let struck = self.clients.shared.now();
        plan.strike(self.site).context("the fault")?;
        self.look_after(plan)?;
        let goes_on = self.goes_on();
        self.told(struck, goes_on)
    }

    fn goes_on(&self) -> bool {
        let shared = &self.clients.shared;
        let (before, since) = (shared.answered(), Instant::now());
        while shared.answered() < before + ANSWERS {
            if since.elapsed() > shared.give_up {
                return false;
            }
            thread::sleep(LOOK_EVERY);
        }
        self.ring.goes_round(ROUNDS, shared.give_up)
    }

    /// What an operator does.
    fn look_after(&mut self, plan: &Plan) -> Result<()> {
        thread::sleep(plan.looked_after);
        if let Some(lasts) = plan.lasts {
            thread::sleep(lasts.saturating_sub(plan.looked_after));
            plan.mend(self.site)?;
        }
        if plan.may_pass() && self.is_cutting()? {
            return Ok(());
        }
        if plan.kind == Kind::Keeper {
            self.site.revive(KEEPER..KEEPER + 1)?;
            if plan.goes_on {
                self.have(&["release", CLUSTER])?;
                return self.have(&["protect", CLUSTER, "--interval", INTERVAL]);
            }
        }
        self.fail_over()?;
        // Nothing of it is left to go on.
        if plan.kind == Kind::Link { plan.mend(self.site) } else { Ok(()) }
    }

    /// The number of the newest global checkpoint.
    fn newest(&self) -> Result<Option<u64>> {
        let status = self.site.host(KEEPER).firn().call("cluster", &["status"])?.facts;
        Ok(status.pointer("/kept/0/checkpoint/number").and_then(Value::as_u64))
    }

    /// Whether global checkpoints are made.
    fn is_cutting(&self) -> Result<bool> {
        let (before, since) = (self.newest()?, Instant::now());
        while since.elapsed() < RECOVERS {
            // Two more: one may have been under way.
            if self.newest()? >= before.map(|number| number + 2) {
                return Ok(true);
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(false)
    }

    /// Makes sure that nothing of the VMs runs anywhere, and has them run where their copies are.
    fn fail_over(&mut self) -> Result<()> {
        (0..vms::COUNT).try_for_each(|host| self.site.host(host).kill())?;
        self.failovers += 1;
        self.have(&["failover", CLUSTER])
    }

    /// Has the keeper do something, again if it is refused: what was lost may not be known to be lost yet.
    fn have(&self, words: &[&str]) -> Result<()> {
        let (keeper, since) = (self.site.host(KEEPER).firn(), Instant::now());
        while let Err(error) = keeper.call("cluster", words) {
            if since.elapsed() > KNOWN {
                return Err(error.into());
            }
            self.lab.say(&format!("asked again: {error}"));
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    fn told(self, struck: u64, goes_on: bool) -> Result<Value> {
        let shared = std::sync::Arc::clone(&self.clients.shared);
        let mut seen = self.clients.end()?;
        let (wrong, broken) = self.ring.end()?;
        let (books, looks) = Books::read(&shared, &self.outside)?;
        seen.history.extend(looks.history);
        let mut told = compare(&vms::start(), &seen, &books);
        told["ring_wrong"] = json!(wrong.len());
        told["broken_connections"] =
            json!(told["broken_connections"].as_u64().unwrap_or_default() + broken);
        told["failovers"] = json!(self.failovers);
        told["failed"] = json!(u64::from(!goes_on));
        told["gap_s"] = json!(shared.gap(struck).map(|gap| gap.as_secs_f64()));
        if let Some(why) = told["why"].as_array_mut() {
            why.extend(wrong.into_iter().map(Value::from));
            why.extend(
                (!goes_on).then(|| json!("clients are not answered, or the token stands still")),
            );
        }
        Ok(told)
    }
}

/// As if all hosts had lost their power, and had it back: nothing of a life before is there.
fn reboot(site: &mut Site) -> Result<()> {
    for host in site.hosts() {
        host.kill()?;
        let run = host.file("run");
        match fs::remove_dir_all(&run) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| run.display().to_string());
            }
            _ => (),
        }
    }
    let all = 0..site.hosts().len();
    all.clone().try_for_each(|host| site.connect(host, true))?;
    site.revive(all)
}
