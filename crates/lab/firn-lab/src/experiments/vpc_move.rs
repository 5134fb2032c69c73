//! `vpc-move`: planned moves of a VM to its backup and back, while a client asks it.
//!
//! Three hosts agree by a raft of their agents. A VM of 128 MiB computes EP (`--only ep`) or is idle
//! (`--only idle`), and replies to each datagram with the next number. It is protected at intervals
//! of 100 ms, and moved to its backup by `firn move`, to and fro. A client outside sends a question
//! each 10 ms, to the VM's address, whichever host runs it.
//!
//! **What varies**: the load of the guest.
//!
//! **What is held equal**: the hosts, the interval, the client.
//!
//! **What is measured**, for each load:
//!
//! - `lost_replies`: numbers that the guest has given and that were never received;
//!   `repeated_replies`: those received twice; `undone_replies`: numbers received as the answers of
//!   two questions. All have to be zero.
//! - `wait_ms`: the longest wait of the client in a move, from a question until the first reply to
//!   it or to a later one: a client that repeats its question waits as long. `longest_wait_ms`, and
//!   `longest_wait_to_interval`, which should be at most 3; `steady_wait_ms`: the longest wait in
//!   as many periods without a move.
//! - `pause_ms`: from when the VM is paused until its new host may send; `commit_ms`, `run_ms` and
//!   `record_ms`: until the backup has the final epoch, until the VM runs there, and until the
//!   record names the host.
//! - `protected_s`: until the command has returned: the VM is protected again.

use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::experiments::pauses::add_percentiles;
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, wait_for};
use crate::outside_asker::{OutsideAsker, ReplyCounts};
use crate::report::Report;
use crate::site::{ConsensusKind, HostSite, SitePlan, vm_network};

const HOSTS: [&str; 3] = ["a", "b", "c"];
const LEASE: Duration = Duration::from_millis(800);
const INTERVAL_MS: u32 = 100;
const MIB: u32 = 128;
const VM: &str = "web";
/// The last byte of the VM's address.
const ADDRESS: u8 = 1;
/// Moves, in quick and in full runs.
const MOVES: (usize, usize) = (6, 50);
const TIMEOUT: Duration = Duration::from_secs(120);
/// How long the client asks before a move, and after it.
const PERIOD: Duration = Duration::from_secs(2);
const PERCENTILES: [(&str, f64); 2] = [("p50", 50.0), ("p95", 95.0)];
/// The longest wait of a client, in intervals, that a move may cause.
const WAIT_INTERVALS_MAX: f64 = 3.0;

/// The load of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GuestLoad {
    Idle,
    Ep,
}

impl GuestLoad {
    const ALL: [Self; 2] = [Self::Idle, Self::Ep];

    fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Ep => "ep",
        }
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("vpc-move");
    for load in lab.extent.select_wanted(&GuestLoad::ALL, |load| load.name().to_owned()) {
        let mut trial = MoveTrial::begin_trial(lab, load)?;
        for number in 0..lab.extent.runs(MOVES.0, MOVES.1) {
            let facts = trial.move_once(number).with_context(|| format!("move {number}"))?;
            lab.log_progress(&format!("{}, move {number}: {facts}", load.name()));
            report.add_repetition(facts);
        }
        add_numbers(load, &trial.asker.count_replies(), &mut report);
        trial.end_trial();
    }
    Ok(report)
}

/// A protected VM, and its client.
struct MoveTrial {
    load: GuestLoad,
    site: HostSite,
    asker: OutsideAsker,
    /// The VM's backup, which is the host that it moves to next.
    backup: String,
}

impl MoveTrial {
    fn begin_trial(lab: &Lab, load: GuestLoad) -> Result<Self> {
        let agreement = Some(ConsensusKind::Embedded);
        let site = HostSite::build_site(lab, &SitePlan { hosts: &HOSTS, agreement, lease: LEASE })?;
        let image = GuestImage::small()?;
        let (card, address) = vm_network(ADDRESS);
        let agent = lab.file(&format!("{}.agent", load.name()));
        let args = QemuArgs::new(&image, accel::choose_accel().accel)
            .memory_mib(MIB)
            .vcpus(1)
            .append_kernel_arg(&address)
            .with_agent_socket(&agent)
            .add_args(&card.each_ref().map(String::as_str));
        let firn = site.host(0).firn();
        firn.run_vm(VM, &args)?;
        let mut control = GuestControl::connect(&agent, TIMEOUT)?;
        control.spawn_job("count", &["firn-guest", "net-dma", "count"])?;
        if load == GuestLoad::Ep {
            control.spawn_job("ep", &["sh", "-c", "while :; do firn-guest npb ep; done"])?;
        }
        let asker = OutsideAsker::start_asker(&site, ADDRESS)?;
        let interval = format!("{INTERVAL_MS}ms");
        let protect = [VM, "--backup", HOSTS[1], "--interval", &interval];
        wait_for("the VM is protected", TIMEOUT, || Ok(firn.run_verb("protect", &protect).ok()))?;
        wait_for("the record names a backup", TIMEOUT, || {
            let record = site.host(0).cluster_record(VM);
            Ok(record.filter(|it| it["vms"][0]["backup"].is_string()).map(drop))
        })?;
        Ok(Self { load, site, asker, backup: HOSTS[1].to_owned() })
    }

    /// Moves the VM to its backup.
    fn move_once(&mut self, number: usize) -> Result<Value> {
        thread::sleep(PERIOD);
        let steady = self.asker.take_longest_wait();
        let to = self.backup.clone();
        let by = self.site.host(number % HOSTS.len()).firn();
        let done = by.run_verb("move", &[VM, "--to", &to])?;
        thread::sleep(PERIOD);
        let wait = self.asker.take_longest_wait();
        let time = |key: &str| done.facts[key].as_f64();
        let backup = done.facts["backup"].as_str().context("it is not protected again")?;
        self.backup = backup.to_owned();
        Ok(json!({
            "load": self.load.name(), "to": to, "backup": backup,
            "wait_ms": wait.as_secs_f64() * 1e3, "steady_wait_ms": steady.as_secs_f64() * 1e3,
            "pause_ms": time("pause_ms"), "commit_ms": time("commit_ms"), "run_ms": time("run_ms"),
            "record_ms": time("record_ms"), "protected_s": done.took.as_secs_f64(),
        }))
    }

    fn end_trial(self) {
        self.site.hosts().iter().for_each(|host| host.firn().stop_all());
    }
}

fn add_numbers(load: GuestLoad, counts: &ReplyCounts, report: &mut Report) {
    let name = load.name();
    let is_of_load = |it: &&Value| it["load"] == name;
    let moves: Vec<Value> = report.repetitions().iter().filter(is_of_load).cloned().collect();
    let values =
        |key: &str| -> Vec<f64> { moves.iter().filter_map(|it| it[key].as_f64()).collect() };
    report.add_number(format!("moves.{name}"), moves.len() as f64);
    for (key, count) in [
        ("replies", counts.received),
        ("lost_replies", counts.lost),
        ("repeated_replies", counts.repeated),
        ("undone_replies", counts.undone),
    ] {
        report.add_number(format!("{key}.{name}"), count as f64);
    }
    for key in ["wait_ms", "steady_wait_ms", "pause_ms", "commit_ms", "run_ms", "record_ms"] {
        add_percentiles(&format!("{key}.{name}"), values(key), &PERCENTILES, report);
    }
    add_percentiles(&format!("protected_s.{name}"), values("protected_s"), &PERCENTILES, report);
    let longest = values("wait_ms").into_iter().fold(0.0, f64::max);
    let intervals = longest / f64::from(INTERVAL_MS);
    report.add_number(format!("longest_wait_ms.{name}"), longest);
    report.add_number(format!("longest_wait_to_interval.{name}"), intervals);
    if counts.lost + counts.repeated + counts.undone > 0 {
        report.mark_failed(format!("{name}: replies were lost, repeated or undone: {counts:?}"));
    }
    if intervals > WAIT_INTERVALS_MAX {
        report.mark_failed(format!("{name}: a client waited for {intervals:.1} intervals"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(counts: ReplyCounts, wait_ms: f64) -> Report {
        let mut report = Report::new("vpc-move", true);
        for wait_ms in [150.0, wait_ms] {
            report.add_repetition(json!({ "load": "ep", "wait_ms": wait_ms, "pause_ms": 90.0,
                "steady_wait_ms": 140.0, "commit_ms": 20.0, "run_ms": 60.0, "record_ms": 80.0,
                "protected_s": 2.0 }));
        }
        add_numbers(GuestLoad::Ep, &counts, &mut report);
        report
    }

    #[test]
    fn a_lost_reply_or_a_long_wait_fails_a_run() {
        let good = ReplyCounts { received: 900, ..ReplyCounts::default() };
        assert!(report(good, 200.0).is_complete());
        assert_eq!(report(good, 200.0).figure_value("longest_wait_to_interval.ep"), Some(2.0));
        assert!(!report(good, 301.0).is_complete());
        assert!(!report(ReplyCounts { lost: 1, ..good }, 200.0).is_complete());
        assert!(!report(ReplyCounts { undone: 1, ..good }, 200.0).is_complete());
    }
}
