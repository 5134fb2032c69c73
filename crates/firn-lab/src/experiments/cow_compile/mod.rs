//! `cow-compile`: what checkpoints at short intervals cost a guest that compiles.
//!
//! Reproduces Figures 3 and 4 of Sun and Blough ("Fast, Lightweight Virtual Machine Checkpointing", section 5): a guest of 512 MB
//! compiles, and is checkpointed every 10, 30, 60 or 120 seconds. They compile a Linux kernel; here it is zlib with gcc, file by
//! file, over and over, a worker on each of two vCPUs.
//!
//! **What varies**: the interval, and who makes the checkpoints: Firn's default (`firn`), which notes what a restore brings in first;
//! its copy-on-write without that (`firn-cow`) and its rounds (`firn-pre-copy`); or QEMU's live migration into a file (`qemu-file`),
//! which is the pre-copy of the paper. **What is held equal**: the guest and its work,
//! which goes on all the time; the disk that images go to. Systems take turns, one interval each, in an order that changes:
//!
//! ```text
//!   none             firn             firn-cow         firn-pre-copy    qemu-file ...
//!   |-------|________|####___|________|###___|_________|##___|__________|####      # checkpoint    _ after it: window, then quiet
//! ```
//!
//! **What is measured**: `downtime_ms.SYSTEM.INTERVAL`, the pause as its maker reports it. `lost_s.SYSTEM.INTERVAL`: by how much a
//! checkpoint set the work back, in seconds: what was done in the window from its begin until three seconds after its end, against
//! the quiet times of the same round of turns ([`work`]). `waited_s`: the same by processor time of the vCPUs, which tells less and more
//! exactly: not that a vCPU runs more slowly, as when QEMU notes what it writes. It is the sum of what they were in the kernel, for a page
//! fault (`kernel_s`), waited for a processor that somebody else had (`delayed_s`), and stood still (`stood_s`), for the pause, for pages,
//! or for want of work. `overhead.SYSTEM.INTERVAL`: how much longer one compiles with such a checkpoint in each interval, by what was
//! lost. `none` counts the first half of an interval in which nothing happened as a window: how far the measures are to be
//! believed. A checkpoint that takes longer than the interval stretches it.
//!
//! Whole compilations, one with and one without checkpoints, would have to be compared for hours: on a shared machine two of the same
//! kind differ by more than a checkpoint a minute costs.

mod work;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use firn_report::plot::BarPlot;
use firn_vmm::Vm;
use procfs::process::{Process, Task};
use serde_json::{Value, json};

use self::work::{Span, Work};
use crate::firn::SaveArgs;
use crate::guest::{Control, GuestImage, JobState, QemuArgs, accel};
use crate::lab::Lab;
use crate::peer::{self, Way};
use crate::report::Report;
use crate::stats::Sample;

const VM: &str = "compile";
const JOB: &str = "compile";
const MIB: u32 = 512;
const BOOT: Duration = Duration::from_secs(300);
/// How long the guest compiles before anything is measured: its programs are in its page cache then.
const WARM: Duration = Duration::from_secs(25);
/// Rounds of turns at each interval (in seconds), in quick and in full runs.
const QUICK: &[(u64, usize)] = &[(10, 2)];
const FULL: &[(u64, usize)] = &[(10, 12), (30, 6), (60, 4), (120, 3)];
/// Up to this interval, in seconds, there are turns of none: later ones have enough quiet time after their checkpoints.
const NONE_UNTIL_S: u64 = 30;
/// What of the time after a checkpoint still belongs to it.
const SETTLE: Duration = Duration::from_secs(3);

/// What is measured of each turn.
const FIELDS: [&str; 8] = [
    "downtime_ms",
    "lost_s",
    "waited_s",
    "kernel_s",
    "delayed_s",
    "stood_s",
    "saved_s",
    "overhead",
];

/// Who makes checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum System {
    None,
    Firn,
    FirnCow,
    FirnPreCopy,
    QemuFile,
}

impl System {
    const ALL: [Self; 5] =
        [Self::None, Self::Firn, Self::FirnCow, Self::FirnPreCopy, Self::QemuFile];

    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Firn => "firn",
            Self::FirnCow => "firn-cow",
            Self::FirnPreCopy => "firn-pre-copy",
            Self::QemuFile => Way::File.name(),
        }
    }

    /// Those that have a turn in a round.
    fn of_round(round: usize, interval_s: u64) -> Vec<Self> {
        let has_turn = |system: &Self| *system != Self::None || interval_s <= NONE_UNTIL_S;
        let mut systems: Vec<Self> = Self::ALL.into_iter().filter(has_turn).collect();
        let first = round % systems.len();
        systems.rotate_left(first);
        systems
    }
}

/// What the vCPUs did, on average, in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Ran {
    seconds: f64,
    kernel_s: f64,
    delayed_s: f64,
    stood_s: f64,
}

impl Ran {
    fn of(vcpus: &[Task], since: Instant) -> Result<Self> {
        let mut all = Self { seconds: since.elapsed().as_secs_f64(), ..Self::default() };
        let share = |nanoseconds: u64| nanoseconds as f64 / 1e9 / vcpus.len() as f64;
        for vcpu in vcpus {
            let (stat, times) = (vcpu.stat()?, vcpu.schedstat()?);
            let ticks = (stat.utime + stat.stime).max(1) as f64;
            all.kernel_s += share(times.sum_exec_runtime) * stat.stime as f64 / ticks;
            all.delayed_s += share(times.run_delay);
            all.stood_s -= share(times.sum_exec_runtime + times.run_delay);
        }
        all.stood_s += all.seconds;
        Ok(all)
    }

    fn until(self, then: Self) -> Self {
        then.plus(self, -1.0)
    }

    fn plus(self, other: Self, factor: f64) -> Self {
        Self {
            seconds: self.seconds + factor * other.seconds,
            kernel_s: self.kernel_s + factor * other.kernel_s,
            delayed_s: self.delayed_s + factor * other.delayed_s,
            stood_s: self.stood_s + factor * other.stood_s,
        }
    }

    fn waited_s(self) -> f64 {
        self.kernel_s + self.delayed_s + self.stood_s
    }
}

/// An interval in which one system had its turn.
#[derive(Clone, Copy, Debug)]
struct Turn {
    system: System,
    interval_s: u64,
    round: usize,
    downtime_ms: Option<f64>,
    /// By the guest's clock.
    from: f64,
    saved: f64,
    until: f64,
    /// At the begin, the end of the window, and the end.
    ran: [Ran; 3],
}

impl Turn {
    /// What its checkpoint may have slowed.
    fn window(&self) -> Span {
        let until = match self.system {
            System::None => f64::midpoint(self.from, self.until),
            _ => (self.saved + SETTLE.as_secs_f64()).min(self.until),
        };
        Span { from: self.from, until }
    }

    fn quiet(&self) -> Span {
        Span { from: self.window().until, until: self.until }
    }

    fn seconds(&self) -> f64 {
        self.until - self.from
    }

    /// By how much less the vCPUs ran in the window than in the quiet times of these turns, as seconds of such times.
    fn waited(&self, beside: &[&Self]) -> Ran {
        let window = self.ran[0].until(self.ran[1]);
        let quiet = beside.iter().map(|turn| turn.ran[1].until(turn.ran[2]));
        let quiet = quiet.fold(Ran::default(), |sum, it| sum.plus(it, 1.0));
        let more = window.plus(quiet, -window.seconds / quiet.seconds);
        let work = 1.0 - quiet.waited_s() / quiet.seconds;
        Ran::default().plus(more, 1.0 / work)
    }

    fn is_beside(&self, other: &Self) -> bool {
        (self.interval_s, self.round) == (other.interval_s, other.round)
    }
}

/// Runs it.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("cow-compile");
    let plan = lab.extent.pick(QUICK, FULL);
    let plan = lab.extent.wanted(plan, |(interval_s, _)| format!("{interval_s}s"));
    let mut guest = Guest::boot(lab)?;
    for &(interval_s, rounds) in &plan {
        for round in 0..rounds * lab.extent.runs(1, 1) {
            for system in System::of_round(round, interval_s) {
                guest.turn(system, interval_s, round)?;
            }
        }
    }
    let (turns, log) = guest.finish()?;
    lab.firn().stop(VM);
    tell(&turns, &log, &mut report)?;
    let intervals: Vec<u64> = plan.iter().map(|(interval_s, _)| *interval_s).collect();
    figures(&intervals, &mut report);
    let drawing = drawing(&intervals, &report)?;
    report.drawing("cow-compile", drawing);
    Ok(report)
}

/// A guest that compiles all the time.
struct Guest<'a> {
    lab: &'a Lab,
    control: Control,
    /// The experiment's own monitor connection.
    bare: Vm,
    vcpus: Vec<Task>,
    since: Instant,
    turns: Vec<Turn>,
}

impl<'a> Guest<'a> {
    fn boot(lab: &'a Lab) -> Result<Self> {
        let (agent, monitor) = (lab.file("agent"), lab.file("monitor"));
        let image = GuestImage::full()?;
        let args = QemuArgs::new(&image, accel::decide().accel)
            .memory_mib(MIB)
            .vcpus(2)
            .append("firn.services=none")
            .root_in_memory(&image)
            .console(&lab.file("console"))
            .agent(&agent)
            .more(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        lab.firn().run(VM, &args)?;
        let mut control = Control::connect(&agent, BOOT)?;
        control.spawn(JOB, &["bash", "-c", SCRIPT])?;
        std::thread::sleep(WARM);
        let mut bare = Vm::connect(&monitor)?;
        let pid = lab.firn().status(VM)?["pid"].as_i64().context("the VM has no process")?;
        let hypervisor = Process::new(i32::try_from(pid)?)?;
        let threads = bare.vcpus()?.into_iter().map(|vcpu| hypervisor.task_from_tid(vcpu.tid.0));
        let vcpus = threads.collect::<Result<_, _>>()?;
        Ok(Self { lab, control, bare, vcpus, since: Instant::now(), turns: Vec::new() })
    }

    fn turn(&mut self, system: System, interval_s: u64, round: usize) -> Result<()> {
        let (began, from, before) = (Instant::now(), self.now()?, self.ran()?);
        let name = system.name();
        let downtime_ms = self
            .save(system)
            .with_context(|| format!("{name}, each {interval_s} s, round {round}"))?;
        let saved = self.now()?;
        let interval = Duration::from_secs(interval_s);
        let left = || interval.saturating_sub(began.elapsed());
        let settle = if system == System::None { interval / 2 } else { SETTLE };
        std::thread::sleep(settle.min(left()));
        let window = self.ran()?;
        std::thread::sleep(left());
        let (until, ran) = (self.now()?, [before, window, self.ran()?]);
        let pause = downtime_ms.unwrap_or(f64::NAN);
        let took = saved - from;
        self.lab.say(&format!("{interval_s} s: {name} in {took:.1} s, pause {pause:.1} ms"));
        self.turns.push(Turn { system, interval_s, round, downtime_ms, from, saved, until, ran });
        self.is_at_work()
    }

    /// The guest's clock, in seconds since it booted.
    fn now(&mut self) -> Result<f64> {
        let said = self.control.run(&["cat", "/proc/uptime"])?;
        let seconds = said.split(' ').next().and_then(|word| word.parse().ok());
        seconds.with_context(|| format!("{said:?} is no time of a guest"))
    }

    fn ran(&self) -> Result<Ran> {
        Ran::of(&self.vcpus, self.since)
    }

    fn is_at_work(&mut self) -> Result<()> {
        match self.control.poll(JOB)? {
            JobState::Running { .. } => Ok(()),
            JobState::Ended(ended) => bail!("the guest compiles no more: {ended:?}"),
        }
    }

    fn save(&mut self, system: System) -> Result<Option<f64>> {
        let file = self.lab.file("compile.image");
        let strategy = |name| SaveArgs::default().with("--strategy", name);
        match system {
            System::None => Ok(None),
            System::Firn => self.checkpoint(&file, &SaveArgs::default()).map(Some),
            System::FirnCow => self.checkpoint(&file, &strategy("cow")).map(Some),
            System::FirnPreCopy => self.checkpoint(&file, &strategy("pre-copy")).map(Some),
            System::QemuFile => {
                Ok(Some(peer::save(self.bare.qmp(), Way::File, &file)?.downtime_ms))
            }
        }
    }

    fn checkpoint(&self, file: &Path, how: &SaveArgs) -> Result<f64> {
        let said = self.lab.firn().checkpoint(VM, file, how)?;
        said.number("/report/pause/downtime_ms").context("no downtime is reported")
    }

    fn finish(mut self) -> Result<(Vec<Turn>, String)> {
        let log = self.control.run(&["cat", "/tmp/compiled"])?;
        Ok((self.turns, log))
    }
}

/// The guest's work: two workers, each with all of zlib's files, one half ahead of the other.
const SCRIPT: &str = r#"set -e
cd /usr/src/zlib
files=(*.c)
half=$((${#files[@]} / 2))
worker() {
    read -r now rest < /proc/uptime
    echo "$1 begun $now"
    while true; do
        for file in "${files[@]:$2}" "${files[@]:0:$2}"; do
            gcc -O3 -D_LARGEFILE64_SOURCE=1 -DHAVE_UNISTD_H -c -o /tmp/worker$1.o "$file" 2> /tmp/worker$1.err || kill 0
            read -r now rest < /proc/uptime
            echo "$1 $file $now"
        done
    done
}
exec >> /tmp/compiled
worker 0 0 &
worker 1 $half &
wait
"#;

/// Each turn becomes a repetition.
fn tell(turns: &[Turn], log: &str, report: &mut Report) -> Result<()> {
    let quiet: Vec<Span> = turns.iter().map(Turn::quiet).collect();
    let work = Work::read(log, &quiet)?;
    for turn in turns {
        let beside: Vec<&Turn> = turns.iter().filter(|it| it.is_beside(turn)).collect();
        let quiet: Vec<Span> = beside.iter().map(|turn| turn.quiet()).collect();
        let lost_s = work.lost_in(turn.window(), &quiet);
        let waited = turn.waited(&beside);
        let overhead = lost_s / (turn.seconds() - lost_s);
        report.repetition(json!({ "system": turn.system.name(), "interval_s": turn.interval_s,
            "round": turn.round, "downtime_ms": turn.downtime_ms, "saved_s": turn.saved - turn.from,
            "turn_s": turn.seconds(), "lost_s": lost_s, "waited_s": waited.waited_s(), "kernel_s": waited.kernel_s,
            "delayed_s": waited.delayed_s, "stood_s": waited.stood_s, "overhead": overhead }));
    }
    report.file("compiled.log", log);
    Ok(())
}

fn measured(report: &Report, system: System, interval_s: u64, field: &str) -> Vec<f64> {
    let is_it = |run: &&Value| run["system"] == system.name() && run["interval_s"] == interval_s;
    report.repetitions().iter().filter(is_it).filter_map(|run| run[field].as_f64()).collect()
}

fn figures(intervals: &[u64], report: &mut Report) {
    for system in System::ALL {
        for &interval_s in intervals {
            for field in FIELDS {
                let values = measured(report, system, interval_s, field);
                let key = format!("{field}.{}.{interval_s}s", system.name());
                interval_of_median(&key, &values, report);
                if !values.is_empty() {
                    report.sample(key, values);
                }
            }
        }
    }
}

/// What the median lies between, where there are enough values.
fn interval_of_median(key: &str, values: &[f64], report: &mut Report) {
    if let Some((low, high)) =
        Sample::new(values.iter().copied()).and_then(|it| it.median_interval())
    {
        report.number(format!("{key}.low"), low);
        report.number(format!("{key}.high"), high);
    }
}

fn drawing(intervals: &[u64], report: &Report) -> Result<String> {
    let overhead = |system: System| {
        let value = |interval_s: &u64| {
            report.value(&format!("overhead.{}.{interval_s}s", system.name())).unwrap_or(0.0)
        };
        (system.name().to_owned(), intervals.iter().map(|it| 100.0 * value(it)).collect())
    };
    let plot = BarPlot {
        title: "How much longer a guest compiles, by the interval between checkpoints".into(),
        y: "percent".into(),
        groups: intervals.iter().map(|interval_s| format!("{interval_s} s")).collect(),
        series: System::ALL[1..].iter().map(|system| overhead(*system)).collect(),
    };
    plot.svg().context("the figure")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(system: System, from: f64, saved: f64) -> Turn {
        let downtime_ms = (system != System::None).then_some(2.0);
        let until = from + 10.0;
        // At work three quarters of the time, but a second less in the window.
        let ran = |seconds, less| Ran {
            seconds,
            kernel_s: 0.05 * seconds,
            delayed_s: 0.1 * seconds + less,
            stood_s: 0.1 * seconds,
        };
        let less = if system == System::None { 0.0 } else { 0.75 };
        let ran = [ran(0.0, 0.0), ran(5.0, less), ran(10.0, less)];
        Turn { system, interval_s: 10, round: 0, downtime_ms, from, saved, until, ran }
    }

    /// Two workers, a second for each file but between 10 and 12, when none gets on.
    fn log() -> String {
        let done = (0..=20).filter(|second| !(11..=12).contains(second));
        done.flat_map(|second| [0, 1].map(|worker| format!("{worker} a.c {second}\n"))).collect()
    }

    #[test]
    fn an_overhead_is_what_was_lost_against_what_was_done() {
        let turns = [turn(System::None, 0.0, 0.1), turn(System::Firn, 10.0, 12.0)];
        let mut report = Report::new("cow-compile", true);
        tell(&turns, &log(), &mut report).unwrap();
        figures(&[10], &mut report);
        let percent = |key: &str| report.value(key).map(|it| (it * 100.0).round());
        assert_eq!(percent("lost_s.firn.10s"), Some(200.0));
        assert_eq!(percent("overhead.firn.10s"), Some(25.0));
        assert_eq!(percent("overhead.none.10s"), Some(0.0));
        assert_eq!(percent("waited_s.firn.10s"), Some(100.0));
        assert_eq!(percent("delayed_s.firn.10s"), Some(100.0));
        assert_eq!(percent("stood_s.firn.10s"), Some(0.0));
        assert_eq!(percent("waited_s.none.10s"), Some(0.0));
        assert_eq!(report.value("downtime_ms.firn.10s"), Some(2.0));
        assert_eq!(report.value("downtime_ms.none.10s"), None);
    }

    #[test]
    fn each_system_comes_first_in_its_turn() {
        assert_eq!(System::of_round(0, 10), System::ALL);
        assert_eq!(System::of_round(6, 10)[0], System::Firn);
        let late = [System::FirnCow, System::FirnPreCopy, System::QemuFile, System::Firn];
        assert_eq!(System::of_round(1, 60), late);
    }
}
