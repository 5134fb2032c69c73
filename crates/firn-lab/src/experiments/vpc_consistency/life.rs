//! The trial of one fault: from the start of the VMs to the audit of their books at the end.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::Way;
use super::audit::{Books, compare};
use super::clients::{self, Clients, Shared};
use super::fault::{Kind, Plan};
use super::ring::Ring;
use super::vms::{self, KEEPER, Vms};
use crate::firn::Firn;
use crate::lab::{Lab, wait_for};
use crate::site::{Inside, Site};

const CLUSTER: &str = "bank";
const INTERVAL: &str = "50ms";
/// How long until a question counts as never answered: with output commit, and without it, where
/// many questions are never answered.
const GIVE_UP: Duration = Duration::from_secs(60);
const GIVE_UP_SOON: Duration = Duration::from_secs(12);
/// How long global checkpoints may take to continue by themselves, where they may.
const RECOVERS: Duration = Duration::from_secs(4);
/// How long a command may be refused, because a loss is not detected yet, or hosts have not agreed
/// yet.
const KNOWN: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How many answers all clients get, and how many rounds the token makes, before the fault and
/// after it.
const ANSWERS: u64 = 2 * clients::COUNT;
const ROUNDS: u64 = 3;

/// VMs at work, protected as a cluster.
pub(super) struct Life<'a> {
    lab: &'a Lab,
    site: &'a mut Site,
    outside: Inside,
    clients: Clients,
    ring: Ring,
    is_by_record: bool,
    failovers: u64,
}

impl<'a> Life<'a> {
    /// Starts all hosts anew, restores and protects the VMs, and starts their clients.
    pub(super) fn begin(
        lab: &'a Lab,
        site: &'a mut Site,
        vms: &Vms,
        way: Way,
        seed: u64,
    ) -> Result<Self> {
        let (fault, is_by_record) = (way.fault(), way == Way::ByRecord);
        reboot(site)?;
        for number in 0..vms::COUNT {
            vms.restore(site, number, fault).with_context(|| vms::name(number))?;
        }
        let keeper = site.host(KEEPER).firn();
        let names = (0..vms::COUNT).map(|vm| format!("{}@{}", vms::name(vm), site.host(vm).name()));
        let names: Vec<String> = names.flat_map(|name| ["--vm".to_owned(), name]).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        have(lab, keeper, &[&["create", CLUSTER], &names[..]].concat())?;
        have(lab, keeper, &["protect", CLUSTER, "--interval", INTERVAL])?;
        if is_by_record {
            wait_for("the record that names the copies", KNOWN, || {
                Ok(is_at(site, "backup").then_some(()))
            })?;
        }
        let outside = site.outside()?;
        let give_up = if fault.is_some() { GIVE_UP_SOON } else { GIVE_UP };
        let shared = Shared::new(vms::bank_addresses(), vms::start().0.len(), give_up);
        let clients = Clients::start(&shared, &outside, seed);
        let ring = Ring::start(&vms::ring_addresses(), &outside);
        Ok(Self { lab, site, outside, clients, ring, is_by_record, failovers: 0 })
    }

    /// Injects a fault; returns the observations and the results of the audit.
    pub(super) fn suffer(mut self, plan: &Plan) -> Result<Value> {
        ensure!(
            self.goes_on(),
            "clients are not answered, or the token does not move, before the fault"
        );
        thread::sleep(plan.after);
        let struck = self.clients.shared.now();
        plan.strike(self.site).context("the fault")?;
        match self.is_by_record {
            true => self.leave_alone(plan)?,
            false => self.look_after(plan)?,
        }
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

    /// Recovers without an operator. A host that was cut off or stopped returns: some time later,
    /// or when it has been replaced.
    fn leave_alone(&mut self, plan: &Plan) -> Result<()> {
        match (plan.kind, plan.lasts) {
            (Kind::Link | Kind::Frozen, None) => ensure!(self.goes_on(), "it was not replaced"),
            (_, lasts) => thread::sleep(lasts.unwrap_or_default()),
        }
        plan.mend(self.site)?;
        if plan.kind == Kind::Keeper && plan.goes_on {
            thread::sleep(plan.looked_after);
            self.site.revive(KEEPER..KEEPER + 1)?;
        }
        ensure!(self.goes_on(), "clients are not answered, or the token does not move");
        self.failovers = u64::from(is_at(self.site, "primary"));
        Ok(())
    }

    /// Recovers as an operator does.
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
        // No process of that host is left to continue.
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

    /// Ends all processes of the primaries' hosts, and runs the VMs at their backup.
    fn fail_over(&mut self) -> Result<()> {
        (0..vms::COUNT).try_for_each(|host| self.site.host(host).kill())?;
        self.failovers += 1;
        self.have(&["failover", CLUSTER])
    }

    fn have(&self, words: &[&str]) -> Result<()> {
        have(self.lab, self.site.host(KEEPER).firn(), words)
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
                (!goes_on).then(|| json!("clients are not answered, or the token does not move")),
            );
        }
        Ok(told)
    }
}

/// Runs a cluster command at a host; repeats it while it is refused.
fn have(lab: &Lab, firn: &Firn, words: &[&str]) -> Result<()> {
    let since = Instant::now();
    while let Err(error) = firn.call("cluster", words) {
        if since.elapsed() > KNOWN {
            return Err(error.into());
        }
        lab.say(&format!("asked again: {error}"));
        thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// Whether the record names the backup's host as `what` of all VMs.
fn is_at(site: &Site, what: &str) -> bool {
    let (keeper, record) = (site.host(KEEPER).name(), site.host(KEEPER).cluster(CLUSTER));
    let vms = record.as_ref().and_then(|it| it["vms"].as_array());
    let is_named =
        |vm: &Value| vm[what].as_str().is_some_and(|it| it.split(' ').next() == Some(keeper));
    vms.is_some_and(|vms| vms.len() == vms::COUNT && vms.iter().all(is_named))
}

/// Restarts all hosts, as after a power failure, without any state: no file of an earlier trial is
/// left.
fn reboot(site: &mut Site) -> Result<()> {
    for host in site.hosts() {
        host.kill()?;
        [host.file("run"), host.file("state")].iter().try_for_each(|dir| remove(dir))?;
    }
    let all = 0..site.hosts().len();
    all.clone().try_for_each(|host| site.connect(host, true))?;
    site.revive(all)
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| dir.display().to_string())
        }
        _ => Ok(()),
    }
}
