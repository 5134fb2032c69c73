//! `vpc-downtime`: the downtime of a cluster, from the detection of the loss of its hosts until all
//! of its VMs run.
//!
//! Reproduces Figure 4 of Lu, Ravindran and Kim ("VPC: Scalable, Low Downtime Checkpointing for
//! Virtual Clusters", V.C). They report the time until a consistent checkpoint is found and ready;
//! here all VMs run, and a client gets an answer. 2, 4 and 8 VMs are real: small guests that
//! compute EP, on two hosts, with their standbys on a third. The hosts have an agent each, and
//! share this machine.
//!
//! **What varies**:
//!
//! - `vpc`: `firn cluster protect`, both hosts are killed with all their VMs, `firn cluster
//!   failover`. Time begins with that command.
//! - `vnsnap-like`: a snapshot of all memory of each VM, in a file, and all VMs are restored from
//!   those by the same host, each as a whole before it runs (`firn restore --mode eager`). Time
//!   begins with the commands, which are all given at once. That is what VPC reports of VNsnap
//!   (II); its own code is not available. Firn's version avoids work that would make it slower:
//!   pages of zeros are left out of the files, the other pages are compressed, and the files are in
//!   the page cache.
//!
//! **What is held equal**: the same guests, in the same turn: the failover of the one system leaves
//! them at the host at which the snapshots of the other are made and restored.
//!
//! **What is measured**: `vc_downtime_s.VMS.SYSTEM`: until the last VM runs, by the hypervisor's
//! own event. `first_answer_s`: until a client outside has received the first answer from any of
//! them, to a question that it asked after time began; `all_answer_s`: until it has received one
//! from each.
//!
//! 32 VMs and more are simulated (`simulated`): the protocol's own core decides, and each host is
//! one of the measured turns of 8.

mod outside_client;
mod simulated;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow};
use firn_report::plot::BarPlot;
use firn_vmm::QmpClient;
use serde_json::{Value, json};

use crate::firn::Firn;
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, wait_for};
use crate::report::Report;
use crate::site::{HostSite, SitePlan, vm_network};
use crate::stats::Sample;
use outside_client::OutsideClient;
use simulated::{ProtocolOutcome, RecoveryTimes, run_protocol, simulate_failover};

const MIB: u32 = 128;
/// Numbers of real VMs.
const REAL: [usize; 3] = [2, 4, 8];
const REAL_MAX: usize = REAL[2];
/// Numbers of VMs of simulated clusters.
const SIMULATED: [usize; 4] = [32, 64, 128, 1024];
/// How often each of those fails over.
const SIMULATED_FAILOVERS: u64 = 100;
/// Turns, in quick and in full runs.
const REPETITIONS: (usize, usize) = (2, 6);
/// The hosts; the last is the backup.
const HOSTS: [&str; 3] = ["a", "b", "c"];
const BACKUP_HOST: usize = 2;
const CLUSTER: &str = "shop";
/// Global checkpoints before the hosts are lost.
const CHECKPOINTS: usize = 5;
const TIMEOUT: Duration = Duration::from_secs(120);
/// How long a monitor may take to exist.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(60);

/// The system that recovers the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecoverySystem {
    Vpc,
    VnsnapLike,
}

impl RecoverySystem {
    const ALL: [Self; 2] = [Self::Vpc, Self::VnsnapLike];

    fn name(self) -> &'static str {
        match self {
            Self::Vpc => "vpc",
            Self::VnsnapLike => "vnsnap-like",
        }
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("vpc-downtime");
    let real = lab.extent.select_wanted(&REAL, |vms| vms.to_string());
    let mut cluster = TestCluster::boot_all(lab)?;
    for round in 0..lab.extent.runs(REPETITIONS.0, REPETITIONS.1) {
        for &vms in &real {
            cluster
                .run_turn(vms, &mut report)
                .with_context(|| format!("{vms} VMs, turn {round}"))?;
        }
    }
    real.iter().for_each(|&vms| add_numbers(vms, &measured_turns(&report, vms), &mut report));
    let simulated = real.contains(&REAL_MAX);
    if simulated {
        simulate_clusters(lab, &mut report)?;
    }
    let sizes = [&real[..], if simulated { &SIMULATED[..] } else { &[] }].concat();
    let drawing = draw_plot(&sizes, &report)?;
    report.add_drawing("vpc-downtime", drawing);
    Ok(report)
}

/// All VMs: the hosts, and the images from which each turn begins.
struct TestCluster<'a> {
    lab: &'a Lab,
    site: HostSite,
    station: OutsideClient,
}

impl<'a> TestCluster<'a> {
    fn boot_all(lab: &'a Lab) -> Result<Self> {
        let plan = SitePlan { hosts: &HOSTS, agreement: None, lease: TIMEOUT };
        let site = HostSite::build_site(lab, &plan)?;
        let station = OutsideClient::start_client(&site, (0..REAL_MAX).map(address_number))?;
        let cluster = Self { lab, site, station };
        let image = GuestImage::small()?;
        at_once(REAL_MAX, |vm| cluster.boot_one(&image, vm))?;
        at_once(REAL_MAX, |vm| cluster.start_work(vm))?;
        cluster.ask_all(REAL_MAX)?;
        lab.log_progress(&format!("{REAL_MAX} guests of {MIB} MiB compute EP"));
        at_once(REAL_MAX, |vm| cluster.suspend_vm(cluster.primary_host(vm), vm))?;
        Ok(cluster)
    }

    fn agent_socket(&self, vm: usize) -> PathBuf {
        self.lab.file(&format!("{}.agent", vm_name(vm)))
    }

    fn boot_one(&self, image: &GuestImage, vm: usize) -> Result<()> {
        let (card, address) = vm_network(address_number(vm));
        let monitor = format!("unix:{},server=on,wait=off", self.monitor_socket(vm).display());
        let args = QemuArgs::new(image, accel::choose_accel().accel)
            .memory_mib(MIB)
            .vcpus(1)
            .append_kernel_arg(&address)
            .with_agent_socket(&self.agent_socket(vm))
            .add_args(&card.each_ref().map(String::as_str))
            .add_args(&["-qmp", &monitor]);
        self.primary_host(vm).run_vm(&vm_name(vm), &args)?;
        Ok(GuestControl::connect(&self.agent_socket(vm), TIMEOUT).map(drop)?)
    }

    fn start_work(&self, vm: usize) -> Result<()> {
        let mut control = GuestControl::connect(&self.agent_socket(vm), TIMEOUT)?;
        control.spawn_job("count", &["firn-guest", "net-dma", "count"])?;
        control.spawn_job("ep", &["sh", "-c", "while :; do firn-guest npb ep; done"])?;
        Ok(())
    }

    /// The host that runs a VM before its loss: the two hosts alternate.
    fn primary_host(&self, vm: usize) -> &Firn {
        self.site.host(vm % BACKUP_HOST).firn()
    }

    fn backup_host(&self) -> &Firn {
        self.site.host(BACKUP_HOST).firn()
    }

    fn image_path(&self, vm: usize) -> PathBuf {
        self.lab.file(&format!("{}.firn", vm_name(vm)))
    }

    fn monitor_socket(&self, vm: usize) -> PathBuf {
        self.lab.file(&format!("{}.monitor", vm_name(vm)))
    }

    /// Waits until each of the first `vms` VMs has answered a question that is asked from now on.
    fn ask_all(&self, vms: usize) -> Result<Vec<Instant>> {
        self.station.ask_anew();
        self.wait_for_answers(vms)
    }

    fn wait_for_answers(&self, vms: usize) -> Result<Vec<Instant>> {
        wait_for("an answer from each VM", TIMEOUT, || Ok(self.station.first_answers(vms)))
    }

    /// Suspends a VM to its image.
    fn suspend_vm(&self, firn: &Firn, vm: usize) -> Result<()> {
        // An image that exists is from an earlier turn.
        let _ = std::fs::remove_file(self.image_path(vm));
        let image = self.image_path(vm);
        firn.run_verb("suspend", &[&vm_name(vm), "-o", &image.to_string_lossy()])?;
        Ok(())
    }

    fn restore_vm(&self, firn: &Firn, vm: usize, how: &[&str]) -> Result<()> {
        let (image, name) = (self.image_path(vm).to_string_lossy().into_owned(), vm_name(vm));
        let words = [&[image.as_str(), "--name", &name, "--no-learn"], how].concat();
        firn.run_verb("restore", &words)?;
        Ok(())
    }

    /// Measures each system once, with so many VMs. The VMs end as they began: as images.
    fn run_turn(&mut self, vms: usize, report: &mut Report) -> Result<()> {
        at_once(vms, |vm| self.restore_vm(self.primary_host(vm), vm, &["--wait"]))?;
        self.ask_all(vms)?;
        self.protect_cluster(vms)?;
        self.kill_primary_hosts(vms)?;
        let round_s = self.backup_host().run_verb("agent", &["status"])?.took.as_secs_f64();
        let vpc = self.time_recovery(vms, RecoverySystem::Vpc)?;
        at_once(vms, |vm| self.suspend_vm(self.backup_host(), vm))?;
        let vnsnap = self.time_recovery(vms, RecoverySystem::VnsnapLike)?;
        (0..vms).for_each(|vm| self.backup_host().stop(&vm_name(vm)));
        for (system, turn) in [(RecoverySystem::Vpc, vpc), (RecoverySystem::VnsnapLike, vnsnap)] {
            let times = [turn.downtime(), turn.first_answer(), turn.all_answer()];
            let [ran, first, all] = times.map(|time| format!("{time:.3}"));
            let system = system.name();
            let said = format!("all run after {ran} s, answers after {first} to {all} s");
            self.lab.log_progress(&format!("{vms} VMs, {system}: {said}"));
            report.add_repetition(json!({ "vms": vms, "system": system, "ran_s": turn.ran,
                "answered_s": turn.answered, "round_s": round_s }));
        }
        Ok(())
    }

    /// Protects the VMs, until there have been several global checkpoints.
    fn protect_cluster(&self, vms: usize) -> Result<()> {
        let keeper = self.backup_host();
        let placed: Vec<String> =
            (0..vms).map(|vm| format!("{}@{}", vm_name(vm), HOSTS[vm % BACKUP_HOST])).collect();
        let words = placed.iter().flat_map(|placed| ["--vm", placed.as_str()]);
        let words: Vec<&str> = ["create", CLUSTER].into_iter().chain(words).collect();
        keeper.run_verb("cluster", &words)?;
        keeper.run_verb("cluster", &["protect", CLUSTER])?;
        for _ in 0..CHECKPOINTS {
            keeper.run_verb("cluster", &["checkpoint", CLUSTER])?;
        }
        Ok(())
    }

    /// Kills both primary hosts, and revives them without their VMs when the loss has been noticed.
    fn kill_primary_hosts(&mut self, vms: usize) -> Result<()> {
        (0..BACKUP_HOST).try_for_each(|host| self.site.host(host).kill_all())?;
        for vm in 0..vms {
            wait_for("the loss is noticed", TIMEOUT, || {
                let status = self.backup_host().status(&vm_name(vm))?;
                Ok(status["standby"]["ended"].is_string().then_some(()))
            })?;
        }
        for vm in 0..vms {
            self.primary_host(vm).stop(&vm_name(vm));
            // Remove the rest of it, if there is any.
            let _ = self.primary_host(vm).run_verb("rm", &[&vm_name(vm)]);
        }
        self.site.restart_hosts(0..BACKUP_HOST)
    }

    /// Recovers the VMs, and measures when each runs and answers.
    fn time_recovery(&self, vms: usize, system: RecoverySystem) -> Result<RecoveryTimes> {
        let run = |begun: &RecoveryStart| match system {
            RecoverySystem::Vpc => {
                self.backup_host().run_verb("cluster", &["failover", CLUSTER])?;
                Ok(())
            }
            RecoverySystem::VnsnapLike => at_once(vms, |vm| {
                self.restore_vm(self.backup_host(), vm, &["--mode", "eager"])
                    .with_context(|| format!("after {:?}", begun.at.elapsed()))
            }),
        };
        // A standby's monitor exists already; that of a VM which is restored does not yet.
        let waiting = (0..vms).map(|vm| match system {
            RecoverySystem::Vpc => {
                Some(QmpClient::connect(&self.monitor_socket(vm), MONITOR_TIMEOUT)).transpose()
            }
            RecoverySystem::VnsnapLike => Ok(None),
        });
        let waiting = waiting.collect::<Result<Vec<_>, _>>()?;
        self.station.ask_anew();
        let begun = RecoveryStart::now();
        let (ran, done) = thread::scope(|scope| {
            let watched = waiting.into_iter().enumerate().map(|(vm, monitor)| {
                let path = self.monitor_socket(vm);
                scope.spawn(move || running_since(monitor, &path))
            });
            let watched: Vec<_> = watched.collect();
            let done = run(&begun);
            let ran = watched.into_iter().map(|one| join_result(one.join()));
            (ran.collect::<Result<Vec<_>>>(), done)
        });
        done?;
        let answered = self.wait_for_answers(vms)?;
        Ok(RecoveryTimes {
            ran: ran?.into_iter().map(|at| begun.seconds_until(at)).collect(),
            answered: answered.into_iter().map(|at| (at - begun.at).as_secs_f64()).collect(),
        })
    }
}

/// The time at which a recovery began, by both clocks.
struct RecoveryStart {
    at: Instant,
    epoch: Duration,
}

impl RecoveryStart {
    fn now() -> Self {
        Self { at: Instant::now(), epoch: since_epoch() }
    }

    fn seconds_until(&self, epoch: Duration) -> f64 {
        epoch.as_secs_f64() - self.epoch.as_secs_f64()
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// When the VM behind a monitor began to run, since 1970: by its event, or, if it ran before this
/// program could receive that, when it was found running.
fn running_since(monitor: Option<QmpClient>, path: &Path) -> Result<Duration> {
    let mut monitor = match monitor {
        Some(monitor) => monitor,
        None => QmpClient::connect_started(path, MONITOR_TIMEOUT, || true)?,
    };
    let status: Value = monitor.query("query-status")?;
    if status["running"] == true {
        let event = monitor.last_event_time("RESUME");
        return Ok(event.unwrap_or_else(since_epoch));
    }
    let event = monitor.wait_event("RESUME", TIMEOUT, |_| true)?.context("it does not run")?;
    Ok(event.at.unwrap_or_else(since_epoch))
}

fn vm_name(vm: usize) -> String {
    format!("vm{vm}")
}

/// The last byte of a VM's address.
fn address_number(vm: usize) -> u8 {
    vm as u8 + 1
}

/// Runs the same for each of so many VMs, in threads of their own.
fn at_once(vms: usize, run: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    let run = &run;
    thread::scope(|scope| {
        let each = |vm| scope.spawn(move || run(vm).with_context(|| vm_name(vm)));
        let running: Vec<_> = (0..vms).map(each).collect();
        let ended: Vec<Result<()>> =
            running.into_iter().map(|one| join_result(one.join())).collect();
        ended.into_iter().collect()
    })
}

fn join_result<T>(ended: thread::Result<Result<T>>) -> Result<T> {
    ended.unwrap_or_else(|_| Err(anyhow!("a thread panicked")))
}

/// The measured turns with a number of VMs, by system.
fn measured_turns(report: &Report, vms: usize) -> [Vec<RecoveryTimes>; 2] {
    RecoverySystem::ALL.map(|system| {
        let is_it = |turn: &&Value| turn["vms"] == vms && turn["system"] == system.name();
        let times = |turn: &Value, field: &str| -> Vec<f64> {
            turn[field].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
        };
        let turns = report.repetitions().iter().filter(is_it);
        turns
            .map(|turn| RecoveryTimes {
                ran: times(turn, "ran_s"),
                answered: times(turn, "answered_s"),
            })
            .collect()
    })
}

fn add_numbers(vms: usize, turns: &[Vec<RecoveryTimes>; 2], report: &mut Report) {
    for (system, turns) in RecoverySystem::ALL.iter().zip(turns) {
        for (key, time) in [
            ("vc_downtime_s", RecoveryTimes::downtime as fn(&RecoveryTimes) -> f64),
            ("first_answer_s", RecoveryTimes::first_answer),
            ("all_answer_s", RecoveryTimes::all_answer),
        ] {
            report.add_sample(format!("{key}.{vms}.{}", system.name()), turns.iter().map(time));
        }
    }
    for key in ["vc_downtime_s", "first_answer_s", "all_answer_s"] {
        let value = |system: RecoverySystem| {
            report.figure_value(&format!("{key}.{vms}.{}", system.name())).unwrap_or(f64::NAN)
        };
        let ratio = value(RecoverySystem::Vpc) / value(RecoverySystem::VnsnapLike);
        report.add_number(format!("vpc_to_vnsnap-like.{key}.{vms}"), ratio);
    }
}

/// Simulates clusters of more hosts, each of which behaves as this machine did with the most VMs.
fn simulate_clusters(lab: &Lab, report: &mut Report) -> Result<()> {
    let decided = SIMULATED.map(|vms| run_protocol(vms, REAL_MAX, lab.dir()));
    let decided = decided.into_iter().collect::<Result<Vec<_>>>()?;
    add_simulated(&decided, lab.extent.seed, report)
}

fn add_simulated(decided: &[ProtocolOutcome], seed: u64, report: &mut Report) -> Result<()> {
    let measured = measured_turns(report, REAL_MAX);
    let rounds = report.repetitions().iter().filter(|turn| turn["vms"] == REAL_MAX);
    let rounds = rounds.filter_map(|turn| turn["round_s"].as_f64());
    let round_s = Sample::new(rounds).context("hosts were never asked")?.median();
    report.add_number("round_s", round_s);
    for (vms, decided) in SIMULATED.into_iter().zip(decided) {
        report.add_number(format!("cores_s.{vms}"), decided.cores_s);
        let drawn = measured.each_ref().map(|turns| draw_failovers(decided, turns, round_s, seed));
        add_numbers(vms, &drawn, report);
    }
    report.add_remark(format!(
        "{} VMs and more are simulated: hosts of {REAL_MAX}, each as one of the measured turns of {REAL_MAX}, behind the protocol's decisions: its \
         own time, and twice that of asking all hosts ({:.0} ms)",
        SIMULATED[0],
        1e3 * round_s
    ));
    Ok(())
}

fn draw_failovers(
    decided: &ProtocolOutcome,
    turns: &[RecoveryTimes],
    round_s: f64,
    seed: u64,
) -> Vec<RecoveryTimes> {
    (0..SIMULATED_FAILOVERS)
        .map(|draw| simulate_failover(decided, turns, round_s, seed + draw))
        .collect()
}

fn draw_plot(sizes: &[usize], report: &Report) -> Result<String> {
    let series = |system: RecoverySystem| {
        let of = |vms: &usize| {
            let key = format!("vc_downtime_s.{vms}.{}", system.name());
            report.figure_value(&key).unwrap_or(f64::NAN)
        };
        (system.name().to_owned(), sizes.iter().map(of).collect())
    };
    let plot = BarPlot {
        title: "Cluster down, from detection until all VMs run".into(),
        y: "seconds".into(),
        groups: sizes.iter().map(|vms| format!("{vms} VMs")).collect(),
        series: RecoverySystem::ALL.map(series).into(),
    };
    plot.to_svg().context("the downtimes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn close(report: &Report, key: &str, value: f64) {
        let found = report.figure_value(key).unwrap();
        assert!((found - value).abs() < 1e-9, "{key} is {found}");
    }

    #[test]
    fn figures_are_of_the_last_vm_and_of_the_first_answer() {
        let mut report = Report::new("vpc-downtime", true);
        for (system, ran) in [("vpc", 0.2), ("vnsnap-like", 0.8), ("vpc", 0.4)] {
            report.add_repetition(json!({ "vms": 8, "system": system, "ran_s": [0.1, ran],
                "answered_s": [ran + 0.2, 0.5], "round_s": 0.05 }));
        }
        add_numbers(8, &measured_turns(&report, 8), &mut report);
        assert_eq!(report.to_json()["vc_downtime_s.8.vpc.n"], 2);
        close(&report, "vc_downtime_s.8.vpc", 0.3);
        close(&report, "first_answer_s.8.vpc", 0.45);
        close(&report, "all_answer_s.8.vnsnap-like", 1.0);
        close(&report, "vpc_to_vnsnap-like.vc_downtime_s.8", 0.375);
        let decided =
            |vms: usize| ProtocolOutcome { rounds: 2, cores_s: 0.5, hosts: vec![8; vms / 8] };
        add_simulated(&SIMULATED.map(decided), 7, &mut report).unwrap();
        close(&report, "round_s", 0.05);
        close(&report, "vc_downtime_s.1024.vpc", 1.0);
        close(&report, "first_answer_s.32.vpc", 1.0);
        assert_eq!(report.to_json()["vc_downtime_s.32.vnsnap-like.n"], SIMULATED_FAILOVERS);
        let table = report.to_table();
        assert!(table.contains("32 VMs and more are simulated"), "{table}");
    }
}
