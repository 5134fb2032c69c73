//! `vpc-overhead`: how much longer programs take whose VMs are protected as a cluster.
//!
//! Reproduces Figure 5 of Lu, Ravindran and Kim ("VPC: Scalable, Low Downtime Checkpointing for
//! Virtual Clusters", V.E), and the memory of V.D: EP and IS of the NAS Parallel Benchmarks
//! (`firn_npb`), as one program in two guests on two hosts, which communicate by the guests'
//! network. EP (class W in quick runs, A in full ones) computes, and combines its sums at the end.
//! IS (class W) exchanges keys in each of ten iterations; it is so short that three runs of it
//! count as one. A third host is the backup.
//!
//! **What varies**:
//!
//! - `none`: no VM is protected.
//! - `vpc`: `firn cluster protect`. A frame from one guest to the other waits until its own epoch
//!   is committed.
//! - `remus-like`: each VM is protected alone, without prediction (`firn protect --no-prediction`);
//!   all frames that it sends wait.
//!
//! each at 50, 100 and 500 ms from one cut to the next.
//!
//! **What is held equal**: the same two guests (512 MiB, one vCPU each) run in all turns, in each
//! round anew, which begins with another turn. A machine's speed drifts, so there is a turn of
//! `none` before and after each protected one. The run begins when the first of the two guests
//! reports that they have met, and ends when both are done, by this machine's clock: a guest's own
//! clock does not advance in pauses. A run whose result is not the specified one does not count.
//!
//! **What is measured**: `normalized_time.PROGRAM.SYSTEM.INTERVAL`: of each turn, the ratio of the
//! run's time to the mean of both turns of `none` beside it. `normalized_cpu`: the same with the
//! processor time of both hypervisors, which is the cost of protection for the guests where
//! supervisors have processors of their own; `beside_cpu`: the ratio for all other processes at the
//! three hosts. `memory_overhead.PROGRAM.SYSTEM.INTERVAL`: the ratio of the memory of a VM's
//! supervisor and its guards while it is protected, each page divided among the processes that
//! share it (Pss), without guest RAM, to the guest's RAM; the larger of both VMs', the maximum of
//! all samples. `memory_overhead`: the maximum of `vpc`.
//!
//! All processes of the three hosts run on this machine's processors, of which hypervisors get some
//! for themselves ([`crate::processors`]), as in the paper's measurements (machines of 24
//! processors). On a machine with two, both guests share one: processor time that protection takes
//! from it counts twice as much as where each guest has its own. With one processor, all processes
//! share it.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use firn_report::plot::BarPlot;
use procfs::process::{MMapPath, Process};
use serde_json::{Value, json};

use crate::firn::Firn;
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::Lab;
use crate::processors::ProcessorSplit;
use crate::report::Report;
use crate::site::{HostSite, SitePlan, vm_network};
use crate::stats::Sample;

const MIB: u32 = 512;
const PROGRAMS: [&str; 2] = ["ep", "is"];
/// Their problem sizes. In quick runs EP is so short that the few messages at its end, which are
/// buffered, have an effect; in full ones they have not.
const EP: (&str, &str) = ("W", "A");
const IS: &str = "W";
/// IS takes a second or two, which is too short to measure: so many runs, one after another, count
/// as one.
const IS_TIMES: usize = 3;
/// Time from one cut to the next, in milliseconds.
const INTERVALS: [u64; 3] = [50, 100, 500];
/// Rounds, in quick and in full runs.
const ROUNDS: (usize, usize) = (3, 5);
/// The hosts; the last is the backup.
const HOSTS: [&str; 3] = ["a", "b", "c"];
const BACKUP_HOST: usize = 2;
const VMS: [&str; 2] = ["one", "other"];
const CLUSTER: &str = "pair";
/// The port at which the programs listen.
const PORT: u16 = 7100;
const TIMEOUT: Duration = Duration::from_secs(120);
/// How long a program may take.
const RUN_TIMEOUT: Duration = Duration::from_secs(600);
/// How long the VMs are protected before a program begins.
const SETTLE: Duration = Duration::from_secs(1);
/// Time between two reads of a console, and between two samples of memory.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
const MEMORY_SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// The name of guest RAM in memory maps.
const RAM_NAME: &str = "firn-ram";

/// The system that protects the VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProtectionSystem {
    Vpc,
    RemusLike,
}

impl ProtectionSystem {
    const ALL: [Self; 2] = [Self::Vpc, Self::RemusLike];

    fn name(self) -> &'static str {
        match self {
            Self::Vpc => "vpc",
            Self::RemusLike => "remus-like",
        }
    }
}

/// The system and its interval; `None` without protection.
type ProtectionSetup = Option<(ProtectionSystem, u64)>;

fn setup_labels(how: ProtectionSetup) -> (&'static str, u64) {
    how.map_or(("none", 0), |(system, interval)| (system.name(), interval))
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("vpc-overhead");
    let programs = lab.extent.select_wanted(&PROGRAMS, str::to_owned);
    let systems =
        lab.extent.select_wanted(&ProtectionSystem::ALL, |system| system.name().to_owned());
    let protected = INTERVALS.into_iter().flat_map(|at| systems.iter().map(move |it| (*it, at)));
    let mut hows: Vec<(ProtectionSystem, u64)> = protected.collect();
    let mut pair = GuestPair::boot_guests(lab)?;
    report.add_remark(pair.describe_processors());
    pair.run_turn(None, &programs, &mut report)?;
    for _ in 0..lab.extent.runs(ROUNDS.0, ROUNDS.1) {
        for &how in &hows {
            pair.run_turn(Some(how), &programs, &mut report).with_context(|| format!("{how:?}"))?;
            pair.run_turn(None, &programs, &mut report).context("without protection")?;
        }
        hows.rotate_left(1);
    }
    programs.iter().for_each(|program| add_numbers(program, &mut report));
    add_memory_overhead(&mut report);
    let drawing = draw_plot(&programs, &report)?;
    report.add_drawing("vpc-overhead", drawing);
    Ok(report)
}

/// The guests, and the hosts.
struct GuestPair<'a> {
    lab: &'a Lab,
    /// Retained as long as any process runs.
    split: Option<ProcessorSplit>,
    /// Connected before there are standbys, which replace these sockets by their own.
    guests: [GuestControl; 2],
    site: HostSite,
    turns: u64,
    runs: usize,
}

/// The measurements of a run with the right result.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ProgramRun {
    seconds: f64,
    /// Processor time of both hypervisors, and of all other processes.
    cpu_s: f64,
    beside_cpu_s: f64,
    /// The ratio of the supervisors' memory to guest RAM.
    memory: f64,
}

impl ProgramRun {
    /// The measurements of this run and the next one as one run.
    fn followed_by(self, next: Self) -> Self {
        Self {
            seconds: self.seconds + next.seconds,
            cpu_s: self.cpu_s + next.cpu_s,
            beside_cpu_s: self.beside_cpu_s + next.beside_cpu_s,
            memory: self.memory.max(next.memory),
        }
    }
}

impl<'a> GuestPair<'a> {
    fn boot_guests(lab: &'a Lab) -> Result<Self> {
        let split = ProcessorSplit::new(VMS.len())?;
        let plan = SitePlan { hosts: &HOSTS, agreement: None, lease: TIMEOUT };
        let site = HostSite::build_site(lab, &plan)?;
        let image = GuestImage::small()?;
        let guests = [boot_one(lab, &site, &image, 0)?, boot_one(lab, &site, &image, 1)?];
        if let Some(split) = &split {
            for (host, vm) in VMS.iter().enumerate() {
                split.move_hypervisor(read_pid(&site.host(host).firn().status(vm)?, "pid")?)?;
            }
        }
        lab.log_progress(&format!("two guests of {MIB} MiB run"));
        Ok(Self { lab, split, guests, site, turns: 0, runs: 0 })
    }

    fn describe_processors(&self) -> String {
        match &self.split {
            Some(ProcessorSplit { for_guests, for_others, .. }) => format!(
                "both hypervisors have {for_guests} processor(s) for themselves, all else of three hosts has {for_others}"
            ),
            None => "hypervisors share one processor with all else".into(),
        }
    }

    /// Runs all programs under one protection.
    fn run_turn(
        &mut self,
        how: ProtectionSetup,
        programs: &[&str],
        report: &mut Report,
    ) -> Result<()> {
        self.turns += 1;
        let turn = self.turns;
        self.protect_pair(how)?;
        thread::sleep(SETTLE);
        let (system, interval) = setup_labels(how);
        for program in programs {
            let ProgramRun { seconds, cpu_s, beside_cpu_s, memory } =
                self.run_repeatedly(program)?;
            self.lab.log_progress(&format!(
                "{program}, {system} {interval} ms: {seconds:.2} s, hypervisors {cpu_s:.2} s, beside them {beside_cpu_s:.2} s, \
                 memory {:.1} %",
                100.0 * memory
            ));
            report.add_repetition(json!({ "program": program, "system": system, "interval": interval, "turn": turn,
                "seconds": seconds, "cpu_s": cpu_s, "beside_cpu_s": beside_cpu_s, "memory": memory }));
        }
        self.release_pair(how)
    }

    fn backup_host(&self) -> &Firn {
        self.site.host(BACKUP_HOST).firn()
    }

    fn protect_pair(&self, how: ProtectionSetup) -> Result<()> {
        let Some((system, interval)) = how else { return Ok(()) };
        let interval = format!("{interval}ms");
        match system {
            ProtectionSystem::Vpc => {
                let vms: Vec<String> =
                    VMS.iter().zip(HOSTS).map(|(vm, host)| format!("{vm}@{host}")).collect();
                let create = ["create", CLUSTER, "--vm", &vms[0], "--vm", &vms[1]];
                self.backup_host().run_verb("cluster", &create)?;
                self.backup_host()
                    .run_verb("cluster", &["protect", CLUSTER, "--interval", &interval])?;
            }
            ProtectionSystem::RemusLike => {
                for (host, vm) in VMS.iter().enumerate() {
                    let words = [vm, "--backup", HOSTS[BACKUP_HOST], "--interval", &interval];
                    let words = [&words[..], &["--no-prediction"]].concat();
                    self.site.host(host).firn().run_verb("protect", &words)?;
                }
            }
        }
        Ok(())
    }

    fn release_pair(&self, how: ProtectionSetup) -> Result<()> {
        match how {
            None => {}
            Some((ProtectionSystem::Vpc, _)) => {
                self.backup_host().run_verb("cluster", &["release", CLUSTER])?;
            }
            Some((ProtectionSystem::RemusLike, _)) => {
                for (host, vm) in VMS.iter().enumerate() {
                    self.site.host(host).firn().run_verb("release", &[vm])?;
                    // The standby never runs, and would be in the way of the next one.
                    self.backup_host().stop(vm);
                }
            }
        }
        Ok(())
    }

    /// Runs a program as often as one measurement needs.
    fn run_repeatedly(&mut self, program: &str) -> Result<ProgramRun> {
        let times = if program == "is" { IS_TIMES } else { 1 };
        (0..times).try_fold(ProgramRun::default(), |all, _| {
            Ok(all.followed_by(self.run_program(program)?))
        })
    }

    /// Runs a program once, in both guests.
    fn run_program(&mut self, program: &str) -> Result<ProgramRun> {
        self.runs += 1;
        let job = format!("run{}", self.runs);
        let consoles = [0, 1].map(|vm| console_path(self.lab, vm));
        let begun = consoles.each_ref().map(|console| count_on_console(console, BEGUN));
        let statuses = (0..VMS.len()).map(|host| self.site.host(host).firn().status(VMS[host]));
        let statuses = statuses.collect::<Result<Vec<Value>, _>>()?;
        for (rank, guest) in self.guests.iter_mut().enumerate() {
            let command = program_command(program, self.lab.extent.quick, rank);
            guest.spawn_job(&job, &["sh", "-c", &command])?;
        }
        poll_until("the programs meet", || {
            let now = consoles.each_ref().map(|console| count_on_console(console, BEGUN));
            (now != begun).then_some(())
        })?;
        let (since, before) = (Instant::now(), self.processor_times(&statuses)?);
        let is_over = AtomicBool::new(false);
        let guests = &mut self.guests;
        let (ended, memory) = thread::scope(|scope| {
            let memory = scope.spawn(|| most_memory(&statuses, &is_over));
            let job = &job;
            let waiting = guests.each_mut().map(|guest| {
                scope.spawn(move || {
                    guest.wait_job(job, RUN_TIMEOUT).map(|ended| (ended, Instant::now()))
                })
            });
            let ended = waiting.map(|one| one.join().map_err(|_| "the thread that waits panicked"));
            is_over.store(true, Ordering::Relaxed);
            (ended, memory.join())
        });
        let after = self.processor_times(&statuses)?;
        let mut last = since;
        for ended in ended {
            let (ended, at) = ended.map_err(anyhow::Error::msg)??;
            let what = format!("{program}: {}{}", ended.stdout, ended.stderr);
            ensure!(ended.exit == 0, "the result is not the specified one: {what}");
            last = last.max(at);
        }
        let memory =
            memory.map_err(|_| anyhow::anyhow!("the thread that samples memory panicked"))??;
        Ok(ProgramRun {
            seconds: (last - since).as_secs_f64(),
            cpu_s: after.hypervisors - before.hypervisors,
            beside_cpu_s: after.others_since(&before),
            memory,
        })
    }

    fn processor_times(&self, statuses: &[Value]) -> Result<ProcessorTimes> {
        let primaries: Vec<i32> =
            statuses.iter().map(|status| read_pid(status, "pid")).collect::<Result<_>>()?;
        let mut cpu = ProcessorTimes::default();
        for host in self.site.hosts() {
            for process in host.list_processes()? {
                // The process may have ended.
                let Ok(seconds) = cpu_seconds(process.pid) else { continue };
                match primaries.contains(&process.pid) {
                    true => cpu.hypervisors += seconds,
                    false => drop(cpu.others.insert(process.pid, seconds)),
                }
            }
        }
        Ok(cpu)
    }
}

/// Processor times since the processes began.
#[derive(Debug, Default)]
struct ProcessorTimes {
    hypervisors: f64,
    others: BTreeMap<i32, f64>,
}

impl ProcessorTimes {
    /// The time of all present processes since `before`. A process that did not exist then has
    /// begun since.
    fn others_since(&self, before: &Self) -> f64 {
        let of = |(pid, now): (&i32, &f64)| now - before.others.get(pid).copied().unwrap_or(0.0);
        self.others.iter().map(of).sum()
    }
}

fn cpu_seconds(pid: i32) -> Result<f64> {
    let stat = Process::new(pid)?.stat()?;
    Ok((stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64)
}

const BEGUN: &str = "\"begun\"";

fn boot_one(lab: &Lab, site: &HostSite, image: &GuestImage, vm: usize) -> Result<GuestControl> {
    let agent = lab.file(&format!("{}.agent", VMS[vm]));
    let (card, address) = vm_network(address_number(vm));
    let args = QemuArgs::new(image, accel::choose_accel().accel)
        .with_lean_machine()
        .memory_mib(MIB)
        .vcpus(1)
        .append_kernel_arg(&address)
        .with_console(&console_path(lab, vm))
        .with_agent_socket(&agent)
        .add_args(&card.each_ref().map(String::as_str));
    site.host(vm).firn().run_vm(VMS[vm], &args)?;
    Ok(GuestControl::connect(&agent, TIMEOUT)?)
}

/// The last byte of a VM's address.
fn address_number(vm: usize) -> u8 {
    vm as u8 + 1
}

fn console_path(lab: &Lab, vm: usize) -> PathBuf {
    lab.file(&format!("{}.console", VMS[vm]))
}

/// How often a text occurs on a console. The start of a VM's standby empties the file.
fn count_on_console(console: &PathBuf, words: &str) -> usize {
    let text = fs::read(console).unwrap_or_default();
    String::from_utf8_lossy(&text).matches(words).count()
}

/// The command of one rank. It reports on the console that it has met the other, for console output
/// is not buffered.
fn program_command(program: &str, quick: bool, rank: usize) -> String {
    let class = match (program, quick) {
        ("ep", true) => EP.0,
        ("ep", false) => EP.1,
        _ => IS,
    };
    let peers =
        [0, 1].map(|vm| format!("{}:{PORT}", HostSite::vm_address(address_number(vm)))).join(",");
    format!("firn-guest npb {program} --class {class} --peers {peers} --rank {rank} > /dev/ttyS0")
}

fn poll_until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> Result<T> {
    let since = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return Ok(answer);
        }
        ensure!(since.elapsed() < TIMEOUT, "{what}: not within {} s", TIMEOUT.as_secs());
        thread::sleep(POLL_INTERVAL);
    }
}

fn read_pid(status: &Value, what: &str) -> Result<i32> {
    let pid = status[what].as_i64().with_context(|| format!("the VM has no {what}"))?;
    Ok(i32::try_from(pid)?)
}

/// The maximum memory of a VM's supervisor and guards until the run is over, as a ratio to the VM's
/// RAM.
fn most_memory(statuses: &[Value], is_over: &AtomicBool) -> Result<f64> {
    let mut most = 0.0;
    let bytes = f64::from(MIB) * f64::from(1 << 20);
    loop {
        for status in statuses {
            let own = [
                read_pid(status, "supervisor_pid")?,
                read_pid(status, "guard_pid")?,
                read_pid(status, "watcher_pid")?,
            ];
            let own = own.map(own_memory).into_iter().collect::<Result<Vec<u64>>>()?;
            most = f64::max(most, own.iter().sum::<u64>() as f64 / bytes);
        }
        if is_over.load(Ordering::Relaxed) {
            return Ok(most);
        }
        thread::sleep(MEMORY_SAMPLE_INTERVAL);
    }
}

/// Bytes of a process's memory (Pss), without guest RAM.
fn own_memory(pid: i32) -> Result<u64> {
    let maps = Process::new(pid)?.smaps()?;
    let is_ram = |path: &MMapPath| match path {
        MMapPath::Path(path) => path.to_string_lossy().contains(RAM_NAME),
        MMapPath::Other(name) => name.contains(RAM_NAME),
        _ => false,
    };
    let own = maps.iter().filter(|map| !is_ram(&map.pathname));
    Ok(own.filter_map(|map| map.extension.map.get("Pss")).sum())
}

/// The measured values of a program under a protection, by turn.
fn values_by_turn(
    report: &Report,
    program: &str,
    how: ProtectionSetup,
    field: &str,
) -> BTreeMap<u64, f64> {
    let (system, interval) = setup_labels(how);
    let is_it = |run: &&Value| {
        run["program"] == program && run["system"] == system && run["interval"] == interval
    };
    let runs = report.repetitions().iter().filter(is_it);
    runs.filter_map(|run| Some((run["turn"].as_u64()?, run[field].as_f64()?))).collect()
}

/// The ratio of each turn's value to those of the turns beside it, without protection.
fn normalized_values(
    report: &Report,
    program: &str,
    how: ProtectionSetup,
    field: &str,
    to: &str,
) -> Vec<f64> {
    let bare = values_by_turn(report, program, None, to);
    let beside = |turn: u64| {
        let both = [turn.checked_sub(1), turn.checked_add(1)].into_iter().flatten();
        Sample::new(both.filter_map(|turn| bare.get(&turn).copied())).map(|sample| sample.mean())
    };
    let protected = values_by_turn(report, program, how, field);
    protected.into_iter().filter_map(|(turn, it)| Some(it / beside(turn)?)).collect()
}

fn add_numbers(program: &str, report: &mut Report) {
    let seconds = values_by_turn(report, program, None, "seconds");
    report.add_sample(format!("seconds.{program}.none"), seconds.into_values());
    for (system, interval) in all_setups() {
        let how = Some((system, interval));
        let of = format!("{program}.{}.{interval}", system.name());
        for (key, field, to) in [
            ("normalized_time", "seconds", "seconds"),
            ("normalized_cpu", "cpu_s", "cpu_s"),
            ("beside_cpu", "beside_cpu_s", "cpu_s"),
        ] {
            let values = normalized_values(report, program, how, field, to);
            report.add_sample(format!("{key}.{of}"), values);
        }
        let memory = values_by_turn(report, program, how, "memory");
        report.add_sample(format!("memory_overhead.{of}"), memory.into_values());
    }
}

fn all_setups() -> impl Iterator<Item = (ProtectionSystem, u64)> {
    ProtectionSystem::ALL
        .into_iter()
        .flat_map(|system| INTERVALS.map(|interval| (system, interval)))
}

/// Adds the maximum memory overhead of a VM of a cluster.
fn add_memory_overhead(report: &mut Report) {
    let is_vpc = |run: &&Value| run["system"] == ProtectionSystem::Vpc.name();
    let all = report.repetitions().iter().filter(is_vpc).filter_map(|run| run["memory"].as_f64());
    match Sample::new(all) {
        Some(sample) => report.add_number("memory_overhead", sample.max()),
        None => report.add_missing("memory_overhead", "nothing was protected"),
    }
}

fn draw_plot(programs: &[&str], report: &Report) -> Result<String> {
    let series = all_setups().map(|(system, interval)| {
        let of = |program: &&str| {
            let key = format!("normalized_time.{program}.{}.{interval}", system.name());
            report.figure_value(&key).unwrap_or(f64::NAN)
        };
        let name = format!("{} {interval} ms", system.name());
        (name, programs.iter().map(of).collect())
    });
    let plot = BarPlot {
        title: "Time of a program, to that without protection".into(),
        y: "times".into(),
        groups: programs.iter().map(|&program| program.to_owned()).collect(),
        series: series.collect(),
    };
    plot.to_svg().context("the times")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_compared_with_those_beside_it() {
        let mut report = Report::new("vpc-overhead", true);
        let mut ran = |how: ProtectionSetup, turn: u64, seconds: f64| {
            let (system, interval) = setup_labels(how);
            report.add_repetition(json!({ "program": "ep", "system": system, "interval": interval, "turn": turn,
                "seconds": seconds, "cpu_s": 2.0 * seconds, "beside_cpu_s": 1.0, "memory": seconds / 100.0 }));
        };
        for (turn, bare) in [(1, 4.0), (3, 8.0), (5, 6.0)] {
            ran(None, turn, bare);
        }
        for (turn, seconds) in [(2, 6.6), (4, 8.75), (6, 7.5)] {
            ran(Some((ProtectionSystem::Vpc, 100)), turn, seconds);
        }
        ran(Some((ProtectionSystem::RemusLike, 50)), 4, 14.0);
        ran(Some((ProtectionSystem::RemusLike, 50)), 8, 99.0);
        add_numbers("ep", &mut report);
        add_memory_overhead(&mut report);
        assert_eq!(report.figure_value("normalized_time.ep.vpc.100"), Some(1.25));
        assert_eq!(report.to_json()["normalized_time.ep.vpc.100.n"], 3);
        let remus = "normalized_time.ep.remus-like.50";
        assert_eq!(
            report.figure_value(remus),
            Some(2.0),
            "its other turn has nothing to compare with"
        );
        assert_eq!(report.figure_value("beside_cpu.ep.vpc.100.max"), None);
        assert_eq!(report.to_json()["beside_cpu.ep.vpc.100.max"], 1.0 / 12.0);
        assert_eq!(report.figure_value("memory_overhead"), Some(0.0875));
        assert!(report.to_json()["normalized_time.ep.vpc.50"].is_null(), "it was not measured");
    }

    #[test]
    fn short_lived_processes_count_with_their_cpu_time() {
        let cpu = |beside: &[(i32, f64)]| ProcessorTimes {
            hypervisors: 0.0,
            others: beside.iter().copied().collect(),
        };
        let (before, after) = (cpu(&[(1, 2.0), (2, 5.0)]), cpu(&[(1, 3.0), (3, 0.5)]));
        assert_eq!(after.others_since(&before), 1.5);
    }

    #[test]
    fn own_memory_grows_with_stored_epochs() {
        let pid = std::process::id() as i32;
        let before = own_memory(pid).unwrap();
        let held = std::hint::black_box(vec![1_u8; 64 << 20]);
        let after = own_memory(pid).unwrap();
        drop(std::hint::black_box(held));
        assert!(after > before + (60 << 20), "{before}, then {after}");
    }
}
