//! The trial of one fault: from the start of the VMs to the audit of their books at the end.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::ConsistencyVariant;
use super::audit::{BankBooks, compare_books};
use super::clients::{self, ClientThreads, ClientsState};
use super::fault::{FaultPlan, LossKind};
use super::ring::TokenWatchers;
use super::vms::{self, BACKUP_HOST, SavedVms};
use crate::firn::Firn;
use crate::lab::{Lab, wait_for};
use crate::site::{HostSite, NetworkNamespace};

const CLUSTER: &str = "bank";
const INTERVAL: &str = "50ms";
/// How long until a question counts as never answered: with output commit, and without it, where
/// many questions are never answered.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
const SHORT_ANSWER_TIMEOUT: Duration = Duration::from_secs(12);
/// How long global checkpoints may take to continue by themselves, where they may.
const RECOVERY_WAIT: Duration = Duration::from_secs(4);
/// How long a command may be refused, because a loss is not detected yet, or hosts have not agreed
/// yet.
const DETECTION_WAIT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How many answers all clients get, and how many rounds the token makes, before the fault and
/// after it.
const ANSWERS: u64 = 2 * clients::COUNT;
const ROUNDS: u64 = 3;

/// VMs at work, protected as a cluster.
pub(super) struct FaultTrial<'a> {
    lab: &'a Lab,
    site: &'a mut HostSite,
    outside: NetworkNamespace,
    clients: ClientThreads,
    ring: TokenWatchers,
    is_by_record: bool,
    failovers: u64,
}

impl<'a> FaultTrial<'a> {
    /// Starts all hosts anew, restores and protects the VMs, and starts their clients.
    pub(super) fn begin_trial(
        lab: &'a Lab,
        site: &'a mut HostSite,
        vms: &SavedVms,
        variant: ConsistencyVariant,
        seed: u64,
    ) -> Result<Self> {
        let (fault, is_by_record) =
            (variant.armed_fault(), variant == ConsistencyVariant::ByRecord);
        site.reboot_hosts()?;
        for number in 0..vms::COUNT {
            vms.restore_vm(site, number, fault).with_context(|| vms::vm_name(number))?;
        }
        let keeper = site.host(BACKUP_HOST).firn();
        let names =
            (0..vms::COUNT).map(|vm| format!("{}@{}", vms::vm_name(vm), site.host(vm).name()));
        let names: Vec<String> = names.flat_map(|name| ["--vm".to_owned(), name]).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        run_cluster_command(lab, keeper, &[&["create", CLUSTER], &names[..]].concat())?;
        run_cluster_command(lab, keeper, &["protect", CLUSTER, "--interval", INTERVAL])?;
        if is_by_record {
            wait_for("the record that names the copies", DETECTION_WAIT, || {
                Ok(is_named_for_all(site, "backup").then_some(()))
            })?;
        }
        let outside = site.outside_namespace()?;
        let give_up = if fault.is_some() { SHORT_ANSWER_TIMEOUT } else { ANSWER_TIMEOUT };
        let shared = ClientsState::new(vms::bank_addresses(), vms::initial_bank().0.len(), give_up);
        let clients = ClientThreads::start_clients(&shared, &outside, seed);
        let ring = TokenWatchers::start_watchers(&vms::ring_addresses(), &outside);
        Ok(Self { lab, site, outside, clients, ring, is_by_record, failovers: 0 })
    }

    /// Injects a fault; returns the observations and the results of the audit.
    pub(super) fn run_to_end(mut self, plan: &FaultPlan) -> Result<Value> {
        ensure!(
            self.is_progressing(),
            "clients are not answered, or the token does not move, before the fault"
        );
        thread::sleep(plan.after);
        let struck = self.clients.shared.elapsed_ns();
        plan.inject_fault(self.site).context("the fault")?;
        match self.is_by_record {
            true => self.recover_by_record(plan)?,
            false => self.recover_by_operator(plan)?,
        }
        let goes_on = self.is_progressing();
        self.trial_facts(struck, goes_on)
    }

    fn is_progressing(&self) -> bool {
        let shared = &self.clients.shared;
        let (before, since) = (shared.answer_count(), Instant::now());
        while shared.answer_count() < before + ANSWERS {
            if since.elapsed() > shared.give_up {
                return false;
            }
            thread::sleep(POLL_INTERVAL);
        }
        self.ring.has_completed_rounds(ROUNDS, shared.give_up)
    }

    /// Recovers without an operator. A host that was cut off or stopped returns: some time later,
    /// or when it has been replaced.
    fn recover_by_record(&mut self, plan: &FaultPlan) -> Result<()> {
        match (plan.kind, plan.duration) {
            (LossKind::Link | LossKind::Frozen, None) => {
                ensure!(self.is_progressing(), "it was not replaced")
            }
            (_, lasts) => thread::sleep(lasts.unwrap_or_default()),
        }
        plan.repair_fault(self.site)?;
        if plan.kind == LossKind::Keeper && plan.is_reprotected {
            thread::sleep(plan.operator_delay);
            self.site.restart_hosts(BACKUP_HOST..BACKUP_HOST + 1)?;
        }
        ensure!(self.is_progressing(), "clients are not answered, or the token does not move");
        self.failovers = u64::from(is_named_for_all(self.site, "primary"));
        Ok(())
    }

    /// Recovers as an operator does.
    fn recover_by_operator(&mut self, plan: &FaultPlan) -> Result<()> {
        thread::sleep(plan.operator_delay);
        if let Some(lasts) = plan.duration {
            thread::sleep(lasts.saturating_sub(plan.operator_delay));
            plan.repair_fault(self.site)?;
        }
        if plan.is_transient() && self.makes_checkpoints()? {
            return Ok(());
        }
        if plan.kind == LossKind::Keeper {
            self.site.restart_hosts(BACKUP_HOST..BACKUP_HOST + 1)?;
            if plan.is_reprotected {
                self.run_at_backup(&["release", CLUSTER])?;
                return self.run_at_backup(&["protect", CLUSTER, "--interval", INTERVAL]);
            }
        }
        self.fail_over()?;
        // No process of that host is left to continue.
        if plan.kind == LossKind::Link { plan.repair_fault(self.site) } else { Ok(()) }
    }

    /// The number of the newest global checkpoint.
    fn newest_checkpoint(&self) -> Result<Option<u64>> {
        let status = self.site.host(BACKUP_HOST).firn().run_verb("cluster", &["status"])?.facts;
        Ok(status.pointer("/kept/0/checkpoint/number").and_then(Value::as_u64))
    }

    /// Whether global checkpoints are made.
    fn makes_checkpoints(&self) -> Result<bool> {
        let (before, since) = (self.newest_checkpoint()?, Instant::now());
        while since.elapsed() < RECOVERY_WAIT {
            // Two more: one may have been under way.
            if self.newest_checkpoint()? >= before.map(|number| number + 2) {
                return Ok(true);
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(false)
    }

    /// Ends all processes of the primaries' hosts, and runs the VMs at their backup.
    fn fail_over(&mut self) -> Result<()> {
        (0..vms::COUNT).try_for_each(|host| self.site.host(host).kill_all())?;
        self.failovers += 1;
        self.run_at_backup(&["failover", CLUSTER])
    }

    fn run_at_backup(&self, words: &[&str]) -> Result<()> {
        run_cluster_command(self.lab, self.site.host(BACKUP_HOST).firn(), words)
    }

    fn trial_facts(self, struck: u64, goes_on: bool) -> Result<Value> {
        let shared = std::sync::Arc::clone(&self.clients.shared);
        let mut seen = self.clients.end_clients()?;
        let (wrong, broken) = self.ring.end_watchers()?;
        let (books, reads) = BankBooks::read_books(&shared, &self.outside)?;
        seen.history.extend(reads.history);
        let mut facts = compare_books(&vms::initial_bank(), &seen, &books);
        facts["ring_wrong"] = json!(wrong.len());
        facts["broken_connections"] =
            json!(facts["broken_connections"].as_u64().unwrap_or_default() + broken);
        facts["failovers"] = json!(self.failovers);
        facts["failed"] = json!(u64::from(!goes_on));
        facts["gap_s"] = json!(shared.longest_gap(struck).map(|gap| gap.as_secs_f64()));
        if let Some(why) = facts["why"].as_array_mut() {
            why.extend(wrong.into_iter().map(Value::from));
            why.extend(
                (!goes_on).then(|| json!("clients are not answered, or the token does not move")),
            );
        }
        Ok(facts)
    }
}

/// Runs a cluster command at a host; repeats it while it is refused.
fn run_cluster_command(lab: &Lab, firn: &Firn, words: &[&str]) -> Result<()> {
    let since = Instant::now();
    while let Err(error) = firn.run_verb("cluster", words) {
        if since.elapsed() > DETECTION_WAIT {
            return Err(error.into());
        }
        lab.log_progress(&format!("asked again: {error}"));
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Whether the record names the backup's host as `what` of all VMs.
fn is_named_for_all(site: &HostSite, what: &str) -> bool {
    let (keeper, record) =
        (site.host(BACKUP_HOST).name(), site.host(BACKUP_HOST).cluster_record(CLUSTER));
    let vms = record.as_ref().and_then(|it| it["vms"].as_array());
    let is_named =
        |vm: &Value| vm[what].as_str().is_some_and(|it| it.split(' ').next() == Some(keeper));
    vms.is_some_and(|vms| vms.len() == vms::COUNT && vms.iter().all(is_named))
}
