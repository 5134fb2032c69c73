//! `vpc-failover`: the time from the death of a host, an agent or a VM to the first reply of the
//! VM's backup.
//!
//! Three hosts agree by a raft of their agents, with the default times of `[membership]`. A VM of
//! 128 MiB replies to each datagram with the next number, and is protected at intervals of 100 ms. A
//! client outside sends a question each 10 ms, to the VM's address, whichever host runs it. Then a
//! component is killed:
//!
//! | kind | what is killed |
//! |---|---|
//! | `host` | all processes of the VM's host, the agent among them; in a third of the trials it leads raft |
//! | `agent` | the agent of the VM's host; its VM runs on, and may send until its lease is over |
//! | `vm` | the hypervisor |
//! | `stall` | nothing: all processes of the VM's host are stopped for a second |
//!
//! **What varies**: the kind (`--only KIND`), the host that the VM runs at, and the time of the fault.
//!
//! **What is held equal**: the image that the VM is restored from for each trial, the hosts, the
//! client.
//!
//! **What is measured**, for each kind:
//!
//! - `reply_s`: from the signal until the first reply to a question that was sent after it. A
//!   deployment should stay at 1.2 s (median) and 2 s (95 %).
//! - `undone_replies`: numbers that were received as the replies to two questions. Has to be zero.
//! - `failovers.stall`: stalls after which another host ran the VM. Has to be zero.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use firn_guest::stamp::mix;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::experiments::pauses::add_percentiles;
use crate::firn::SaveArgs;
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, wait_for};
use crate::outside_asker::OutsideAsker;
use crate::report::Report;
use crate::site::{ConsensusKind, HostSite, SitePlan, vm_network};

const HOSTS: [&str; 3] = ["a", "b", "c"];
/// The default of `lease-ms`.
const LEASE: Duration = Duration::from_millis(800);
const INTERVAL: &str = "100ms";
const MIB: u32 = 128;
const VM: &str = "web";
/// The last byte of the VM's address.
const ADDRESS: u8 = 1;
/// Trials of each kind, in quick and in full runs.
const TRIALS: (usize, usize) = (3, 100);
const TIMEOUT: Duration = Duration::from_secs(120);
/// How long after a stall a failover would have happened.
const STALL_WATCH: Duration = Duration::from_secs(4);
const STALL: Duration = Duration::from_secs(1);
const PERCENTILES: [(&str, f64); 3] = [("p50", 50.0), ("p95", 95.0), ("p100", 100.0)];
/// The times until a reply that a run may have, by percentile.
const REPLY_S_MAX: [(&str, f64); 2] = [("p50", 1.2), ("p95", 2.0)];

/// The component that is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailoverCause {
    Host,
    Agent,
    Vm,
    Stall,
}

impl FailoverCause {
    const ALL: [Self; 4] = [Self::Host, Self::Agent, Self::Vm, Self::Stall];

    fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Agent => "agent",
            Self::Vm => "vm",
            Self::Stall => "stall",
        }
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("vpc-failover");
    let agreement = Some(ConsensusKind::Embedded);
    let plan = SitePlan { hosts: &HOSTS, agreement, lease: LEASE };
    let mut site = HostSite::build_site(lab, &plan)?;
    let image = prepare_image(lab, &site)?;
    let causes = lab.extent.select_wanted(&FailoverCause::ALL, |cause| cause.name().to_owned());
    for number in 0..lab.extent.runs(TRIALS.0, TRIALS.1) {
        for cause in &causes {
            let doing = || format!("{}, trial {number}", cause.name());
            let seed = mix(lab.extent.seed.wrapping_add(number as u64));
            let host = number % HOSTS.len();
            let mut trial =
                FailoverTrial::begin_trial(&mut site, &image, host, seed).with_context(doing)?;
            let facts = trial.run_to_end(*cause).with_context(doing)?;
            lab.log_progress(&format!("{}: {facts}", doing()));
            report.add_repetition(facts);
        }
    }
    causes.iter().for_each(|cause| add_numbers(*cause, &mut report));
    Ok(report)
}

/// Boots the VM, has it wait for questions, and saves it.
fn prepare_image(lab: &Lab, site: &HostSite) -> Result<PathBuf> {
    let (agent, image) = (lab.file("web.agent"), lab.file("web.firn"));
    let (card, ip) = vm_network(ADDRESS);
    let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
        .memory_mib(MIB)
        .vcpus(1)
        .append_kernel_arg(&ip)
        .with_agent_socket(&agent)
        .add_args(&card.each_ref().map(String::as_str));
    let firn = site.host(0).firn();
    firn.run_vm(VM, &args)?;
    let mut control = GuestControl::connect(&agent, TIMEOUT)?;
    control.spawn_job("count", &["firn-guest", "net-dma", "count"])?;
    drop(control);
    OutsideAsker::start_asker(site, ADDRESS).context("the guest before it is saved")?;
    firn.checkpoint(VM, &image, &SaveArgs::default().with_option("--strategy", "stop"))?;
    firn.stop(VM);
    Ok(image)
}

/// A protected VM, and its client.
struct FailoverTrial<'a> {
    site: &'a HostSite,
    /// The VM's host.
    host: usize,
    asker: OutsideAsker,
    seed: u64,
}

impl<'a> FailoverTrial<'a> {
    fn begin_trial(site: &'a mut HostSite, image: &Path, host: usize, seed: u64) -> Result<Self> {
        site.reboot_hosts()?;
        let firn = site.host(host).firn();
        let image = image.to_string_lossy();
        firn.run_verb(
            "restore",
            &[&*image, "--name", VM, "--mode", "eager", "--no-learn", "--wait"],
        )?;
        let asker = OutsideAsker::start_asker(site, ADDRESS)?;
        let protect = [VM, "--backup", HOSTS[(host + 1) % HOSTS.len()], "--interval", INTERVAL];
        wait_for("the VM is protected", TIMEOUT, || Ok(firn.run_verb("protect", &protect).ok()))?;
        wait_for("the record names a backup", TIMEOUT, || {
            let record = site.host(host).cluster_record(VM);
            Ok(record.filter(|it| it["vms"][0]["backup"].is_string()).map(drop))
        })?;
        Ok(Self { site, host, asker, seed })
    }

    /// Injects the fault; returns the observations.
    fn run_to_end(&mut self, cause: FailoverCause) -> Result<Value> {
        thread::sleep(Duration::from_millis(1000 + self.seed % 1000));
        let leader = self.leader();
        self.asker.watch_reply();
        match cause {
            FailoverCause::Host => self.site.host(self.host).kill_all()?,
            FailoverCause::Agent => self.signal("firn-agent", Signal::SIGKILL)?,
            FailoverCause::Vm => self.signal("qemu", Signal::SIGKILL)?,
            FailoverCause::Stall => return self.stall_host(),
        }
        let reply = wait_for("a reply", TIMEOUT, || Ok(self.asker.time_to_reply()))?;
        thread::sleep(Duration::from_secs(1));
        let counts = self.asker.count_replies();
        Ok(json!({ "cause": cause.name(), "reply_s": reply.as_secs_f64(),
            "undone": counts.undone, "was_leader": leader.as_deref() == Some(HOSTS[self.host]) }))
    }

    fn stall_host(&self) -> Result<Value> {
        self.signal("", Signal::SIGSTOP)?;
        thread::sleep(STALL);
        self.signal("", Signal::SIGCONT)?;
        thread::sleep(STALL_WATCH);
        let is_there = self.site.host(self.host).firn().status(VM)?["state"] == "protected";
        let reply = self.asker.time_to_reply().context("no reply after the stall")?;
        Ok(json!({ "cause": FailoverCause::Stall.name(), "reply_s": reply.as_secs_f64(),
            "undone": self.asker.count_replies().undone, "failed_over": !is_there }))
    }

    fn leader(&self) -> Option<String> {
        let status = self.site.host(self.host).firn().run_verb("cluster", &["status"]).ok()?;
        status.facts["leader"].as_str().map(str::to_owned)
    }

    /// Sends a signal to the processes of the VM's host whose name begins so.
    fn signal(&self, name: &str, signal: Signal) -> Result<()> {
        let processes = self.site.host(self.host).list_processes()?.into_iter();
        let named: Vec<_> = processes.filter(|it| it.name.starts_with(name)).collect();
        if named.is_empty() {
            bail!("the host has no process {name}");
        }
        named.iter().try_for_each(|it| match kill(Pid::from_raw(it.pid), signal) {
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(error) => Err(error).with_context(|| format!("{signal} for {}", it.name)),
        })
    }
}

fn add_numbers(cause: FailoverCause, report: &mut Report) {
    let name = cause.name();
    let is_of_cause = |it: &&Value| it["cause"] == name;
    let trials: Vec<Value> = report.repetitions().iter().filter(is_of_cause).cloned().collect();
    let replies = trials.iter().filter_map(|it| it["reply_s"].as_f64()).collect();
    add_percentiles(&format!("reply_s.{name}"), replies, &PERCENTILES, report);
    let undone: u64 = trials.iter().filter_map(|it| it["undone"].as_u64()).sum();
    report.add_number(format!("undone_replies.{name}"), undone as f64);
    if undone > 0 {
        report.mark_failed(format!("{name}: {undone} replies were undone"));
    }
    if cause == FailoverCause::Stall {
        let moved = trials.iter().filter(|it| it["failed_over"] == true).count();
        report.add_number("failovers.stall", moved as f64);
        if moved > 0 {
            report.mark_failed(format!("{moved} of {} stalls were a failover", trials.len()));
        }
        return;
    }
    for (percentile, max) in REPLY_S_MAX {
        let value = report.figure_value(&format!("reply_s.{name}.{percentile}"));
        if value.is_some_and(|value| value > max) {
            report.mark_failed(format!("{name}: {percentile} of reply_s is above {max} s"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(cause: FailoverCause, facts: Value) -> Report {
        let mut report = Report::new("vpc-failover", true);
        let mut facts = facts;
        facts["cause"] = cause.name().into();
        report.add_repetition(facts);
        add_numbers(cause, &mut report);
        report
    }

    #[test]
    fn a_slow_failover_or_one_for_a_stall_fails_a_run() {
        let host = FailoverCause::Host;
        assert!(report(host, json!({ "reply_s": 1.1, "undone": 0 })).is_complete());
        assert!(!report(host, json!({ "reply_s": 2.1, "undone": 0 })).is_complete());
        assert!(!report(host, json!({ "reply_s": 1.1, "undone": 1 })).is_complete());
        let stall =
            |failed_over| json!({ "reply_s": 3.0, "undone": 0, "failed_over": failed_over });
        assert!(report(FailoverCause::Stall, stall(false)).is_complete());
        assert!(!report(FailoverCause::Stall, stall(true)).is_complete());
    }
}
