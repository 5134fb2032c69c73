//! `vpc-drain`: a host with six protected VMs is drained by one command, while a client asks each VM.
//!
//! Three hosts agree by a raft of their agents. Six idle VMs of 128 MiB run at the first host, half of
//! them with the second as their backup, half with the third. Each replies to each datagram with the
//! next number. `firn agent drain` moves all of them.
//!
//! **What varies**: how many VMs are moved at a time (`--at-once` of the command).
//!
//! **What is held equal**: the hosts, the interval, the clients, which send a question each 10 ms.
//!
//! **What is measured**, for each number of VMs at a time:
//!
//! - `lost_replies`, `repeated_replies`, `undone_replies`, as for `vpc-move`. All have to be zero.
//! - `drain_s`: the time that the command takes. `wait_ms`: the longest wait of each client;
//!   `steady_wait_ms`: the same in as long a time before.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::experiments::pauses::add_percentiles;
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, wait_for};
use crate::outside_asker::{OutsideAsker, ReplyCounts};
use crate::report::Report;
use crate::site::{ConsensusKind, HostSite, SitePlan, vm_network};

const HOSTS: [&str; 3] = ["a", "b", "c"];
const LEASE: Duration = Duration::from_millis(800);
const INTERVAL: &str = "100ms";
const MIB: u32 = 128;
const VMS: u8 = 6;
/// VMs that are moved at a time.
const AT_ONCE: [u32; 2] = [1, 2];
/// Drains, in quick and in full runs.
const DRAINS: (usize, usize) = (1, 5);
const TIMEOUT: Duration = Duration::from_secs(180);
/// How long the clients ask after the drain.
const PERIOD: Duration = Duration::from_secs(2);
const PERCENTILES: [(&str, f64); 3] = [("p50", 50.0), ("p95", 95.0), ("p100", 100.0)];

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("vpc-drain");
    let agreement = Some(ConsensusKind::Embedded);
    for at_once in AT_ONCE {
        for number in 0..lab.extent.runs(DRAINS.0, DRAINS.1) {
            let plan = SitePlan { hosts: &HOSTS, agreement, lease: LEASE };
            let site = HostSite::build_site(lab, &plan)?;
            let facts = drain_once(lab, &site, at_once)?;
            lab.log_progress(&format!("{at_once} at a time, drain {number}: {facts}"));
            report.add_repetition(facts);
        }
        add_numbers(at_once, &mut report);
    }
    Ok(report)
}

fn vm_name(number: u8) -> String {
    format!("web{number}")
}

/// Starts the VMs, drains their host, and returns the observations.
fn drain_once(lab: &Lab, site: &HostSite, at_once: u32) -> Result<Value> {
    let askers: Vec<OutsideAsker> =
        (1..=VMS).map(|number| start_vm(lab, site, number)).collect::<Result<_>>()?;
    let firn = site.host(0).firn();
    let waits = || -> Vec<f64> {
        askers.iter().map(|it| it.take_longest_wait().as_secs_f64() * 1e3).collect()
    };
    thread::sleep(PERIOD);
    waits();
    thread::sleep(3 * PERIOD);
    let (steady, since) = (waits(), Instant::now());
    let count = at_once.to_string();
    let done = firn.run_verb("agent", &["drain", HOSTS[0], "--at-once", &count])?;
    let took = since.elapsed();
    thread::sleep(PERIOD);
    let waited = waits();
    let moved = done.facts["moved"].as_array().map_or(0, Vec::len);
    ensure!(moved == usize::from(VMS), "{moved} of {VMS} VMs were moved: {}", done.facts);
    let counts: Vec<ReplyCounts> = askers.iter().map(OutsideAsker::count_replies).collect();
    let sum = |of: fn(&ReplyCounts) -> u64| counts.iter().map(of).sum::<u64>();
    site.hosts().iter().for_each(|host| host.firn().stop_all());
    Ok(json!({
        "at_once": at_once, "drain_s": took.as_secs_f64(), "wait_ms": waited, "steady_wait_ms": steady,
        "received": sum(|it| it.received), "lost": sum(|it| it.lost),
        "repeated": sum(|it| it.repeated), "undone": sum(|it| it.undone),
    }))
}

/// Starts a VM at the first host, and protects it; returns its client.
fn start_vm(lab: &Lab, site: &HostSite, number: u8) -> Result<OutsideAsker> {
    let (vm, firn) = (vm_name(number), site.host(0).firn());
    let (card, ip) = vm_network(number);
    let agent = lab.file(&format!("{vm}.agent"));
    let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
        .memory_mib(MIB)
        .vcpus(1)
        .append_kernel_arg(&ip)
        .with_agent_socket(&agent)
        .add_args(&card.each_ref().map(String::as_str));
    firn.run_vm(&vm, &args)?;
    let mut control = GuestControl::connect(&agent, TIMEOUT)?;
    control.spawn_job("count", &["firn-guest", "net-dma", "count"])?;
    let asker = OutsideAsker::start_asker(site, number)?;
    let backup = HOSTS[1 + usize::from(number % 2)];
    let protect = [vm.as_str(), "--backup", backup, "--interval", INTERVAL];
    wait_for("the VM is protected", TIMEOUT, || Ok(firn.run_verb("protect", &protect).ok()))?;
    wait_for("the record names a backup", TIMEOUT, || {
        let record = site.host(0).cluster_record(&vm);
        Ok(record.filter(|it| it["vms"][0]["backup"].is_string()).map(drop))
    })?;
    Ok(asker)
}

fn add_numbers(at_once: u32, report: &mut Report) {
    let is_of = |it: &&Value| it["at_once"] == at_once;
    let drains: Vec<Value> = report.repetitions().iter().filter(is_of).cloned().collect();
    let name = format!("at_once_{at_once}");
    let numbers = |key: &str| -> Vec<f64> {
        let values = drains.iter().flat_map(|it| match &it[key] {
            Value::Array(all) => all.clone(),
            one => vec![one.clone()],
        });
        values.filter_map(|it| it.as_f64()).collect()
    };
    for key in ["drain_s", "wait_ms", "steady_wait_ms"] {
        add_percentiles(&format!("{key}.{name}"), numbers(key), &PERCENTILES, report);
    }
    report.add_number(format!("replies.{name}"), numbers("received").iter().sum());
    for key in ["lost", "repeated", "undone"] {
        let count: f64 = numbers(key).iter().sum();
        report.add_number(format!("{key}_replies.{name}"), count);
        if count > 0.0 {
            report.mark_failed(format!("{at_once} at a time: {count} replies were {key}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_reply_fails_a_run() {
        let report = |lost: u64| {
            let mut report = Report::new("vpc-drain", true);
            report.add_repetition(json!({ "at_once": 2, "drain_s": 3.0, "wait_ms": [210.0, 230.0],
                "steady_wait_ms": [200.0, 201.0], "received": 900, "lost": lost, "repeated": 0, "undone": 0 }));
            add_numbers(2, &mut report);
            report
        };
        assert!(report(0).is_complete());
        assert_eq!(report(0).figure_value("wait_ms.at_once_2.p100"), Some(230.0));
        assert!(!report(1).is_complete());
    }
}
