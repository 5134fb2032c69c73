//! `cow-compile`: how much checkpoints at short intervals slow a guest that compiles.
//!
//! Reproduces Figures 3 and 4 of Sun and Blough ("Fast, Lightweight Virtual Machine Checkpointing",
//! section 5): a guest of 512 MB compiles, and is checkpointed every 10, 30, 60 or 120 seconds.
//! They compile a Linux kernel; here it is zlib with gcc, file by file, over and over, one worker
//! on each of two vCPUs.
//!
//! **What varies**: the interval, and the system that makes the checkpoints. `firn` makes
//! incremental checkpoints, as `firn checkpoint --every` does. All others save everything each
//! time: Firn's default for a single checkpoint (`firn-full`), which also records the working set;
//! its copy-on-write without that (`firn-cow`); its pre-copy (`firn-pre-copy`); QEMU's live
//! migration into a file (`qemu-file`), which is the pre-copy of the paper. **What is held equal**:
//! the guest and its work, which continues all the time; the disk of the images. The systems run
//! alternately, one interval each (`firn` two, of which the first makes the checkpoint that the
//! measured one builds on), in an order that changes:
//!
//! ```text
//!   none             firn-full        firn-cow         firn-pre-copy    qemu-file ...
//!   |-------|________|####___|________|###___|_________|##___|__________|####      # checkpoint    _ after it: window, then quiet
//! ```
//!
//! **What is measured**: `downtime_ms.SYSTEM.INTERVAL`, the pause as the system reports it.
//! Further, the time that a checkpoint took from the guest in the window from its begin until three
//! seconds after its end, against the quiet times of the same round, in seconds:
//!
//! - `cost_s`: the time that the vCPUs spent on page faults (`faults_s`), the time that they were
//!   stopped, for the pause and for pages (`stood_s`), and the processor time of the supervisor and
//!   the hypervisor's other threads (`saver_s`). All are per vCPU. The saver's time is the guest's
//!   loss where vCPUs keep all processors busy, as here; on a larger host it is less. For `firn`, a
//!   sixth of the time to make an image whole is part of it, which `--keep 20` does for one
//!   checkpoint of six (`whole_s`, the processor time of `firn image merge`). `cost`: by how much
//!   this makes compiling longer with such a checkpoint in each interval. Page faults are counted
//!   from a checkpoint's begin to the end of its interval, and each counts as the duration of a
//!   fault on an otherwise idle machine (`fault_us`, measured first).
//! - `waited_s`: all time in the kernel (`kernel_s`), `stood_s`, and the time in which others had
//!   the vCPUs' processors (`delayed_s`): it is measured at the guest alone, so it includes all
//!   other load of the host. `kernel_s` is no part of the cost: the kernel samples it by its clock
//!   ticks, and sometimes reports .3 s more in such a window where a profile of the same seconds
//!   has nothing.
//! - `lost_s`: by how much the work was set back ([`work`]), which includes everything; `overhead`
//!   follows from it. A vCPU runs more slowly, for example, while QEMU tracks its writes.
//!
//! `none` counts the first half of an interval without a checkpoint as a window, which shows how
//! accurate the measures are. A checkpoint that takes longer than the interval stretches it.
//!
//! Comparing whole compilations, one with and one without checkpoints, would take hours: on a
//! shared machine two of the same kind differ by more than a checkpoint a minute costs.

mod fault;
mod ran;
mod work;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use firn_report::plot::BarPlot;
use firn_vmm::QemuVm;
use serde_json::{Value, json};

use self::ran::{CpuTimeSources, CpuTimes, children_seconds};
use self::work::{CompileLog, TimeSpan};
use crate::firn::SaveArgs;
use crate::guest::{GuestControl, GuestImage, JobState, QemuArgs, accel};
use crate::lab::Lab;
use crate::peer::{self, QemuSaveMethod};
use crate::report::Report;
use crate::stats::Sample;

const VM: &str = "compile";
const JOB: &str = "compile";
/// Images of a series: the parent of the next one, that one, and the merged image when its parent
/// is removed.
const BASE: &str = "base.image";
const NEXT: &str = "next.image";
const WHOLE: &str = "whole.image";
const MIB: u32 = 512;
const BOOT: Duration = Duration::from_secs(300);
/// How long the guest compiles before the first measurement: then its programs are in its page
/// cache.
const WARM: Duration = Duration::from_secs(25);
/// Number of rounds at each interval (in seconds), in quick and in full runs.
const QUICK: &[(u64, usize)] = &[(10, 2)];
const FULL: &[(u64, usize)] = &[(10, 6), (30, 4), (60, 3), (120, 3)];
/// `none` and `firn-full` run only at intervals up to this, in seconds: later ones have enough
/// quiet time after their checkpoints.
const ALL_UNTIL_S: u64 = 30;
/// From this interval on, all systems run in the first round only, except those that the experiment
/// is about.
const FEW_FROM_S: u64 = 60;
/// One checkpoint in this many of a series is made whole (`firn checkpoint --keep 20`).
const CHECKPOINTS_PER_FULL: f64 = 6.0;
/// The time after a checkpoint that still belongs to it.
const SETTLE: Duration = Duration::from_secs(3);

/// The figures of each interval.
const FIELDS: [&str; 13] = [
    "downtime_ms",
    "cost",
    "cost_s",
    "faults_s",
    "kernel_s",
    "stood_s",
    "saver_s",
    "whole_s",
    "waited_s",
    "delayed_s",
    "lost_s",
    "overhead",
    "saved_s",
];

/// The system that makes checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CompileSystem {
    None,
    QemuFile,
    FirnPreCopy,
    Firn,
    FirnFull,
    FirnCow,
}

impl CompileSystem {
    const ALL: [Self; 6] =
        [Self::None, Self::QemuFile, Self::FirnPreCopy, Self::Firn, Self::FirnFull, Self::FirnCow];

    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Firn => "firn",
            Self::FirnFull => "firn-full",
            Self::FirnCow => "firn-cow",
            Self::FirnPreCopy => "firn-pre-copy",
            Self::QemuFile => QemuSaveMethod::File.name(),
        }
    }

    /// The systems that run in a round.
    fn systems_in_round(round: usize, interval_s: u64) -> Vec<Self> {
        let has_turn = |system: &Self| match system {
            Self::QemuFile | Self::Firn => true,
            Self::None | Self::FirnFull => interval_s <= ALL_UNTIL_S,
            Self::FirnPreCopy | Self::FirnCow => round == 0 || interval_s < FEW_FROM_S,
        };
        let mut systems: Vec<Self> = Self::ALL.into_iter().filter(has_turn).collect();
        let first = round % systems.len();
        systems.rotate_left(first);
        systems
    }
}

/// An interval in which one system made a checkpoint.
#[derive(Clone, Debug)]
struct MeasuredInterval {
    system: CompileSystem,
    interval_s: u64,
    round: usize,
    downtime_ms: Option<f64>,
    /// The report of the save.
    report: Value,
    /// Time to make an image whole, per vCPU, if that is done at all.
    whole_s: Option<f64>,
    /// Times by the guest's clock.
    from: f64,
    saved: f64,
    until: f64,
    /// At the begin, at the end of the window, and at the end.
    ran: [CpuTimes; 3],
}

impl MeasuredInterval {
    /// The span in which the checkpoint may have slowed the guest.
    fn window_span(&self) -> TimeSpan {
        let until = match self.system {
            CompileSystem::None => f64::midpoint(self.from, self.until),
            _ => (self.saved + SETTLE.as_secs_f64()).min(self.until),
        };
        TimeSpan { from: self.from, until }
    }

    fn quiet_span(&self) -> TimeSpan {
        TimeSpan { from: self.window_span().until, until: self.until }
    }

    fn duration_s(&self) -> f64 {
        self.until - self.from
    }

    fn cost_s(&self, beside: &[&Self]) -> f64 {
        let waited = self.excess_times(beside);
        let whole_s = self.whole_s.unwrap_or_default() / CHECKPOINTS_PER_FULL;
        self.faults_s() + waited.stopped_s + waited.saver_s + whole_s
    }

    fn faults_s(&self) -> f64 {
        self.ran[0].difference_until(self.ran[2]).faults_s
    }

    /// By how much less the vCPUs ran in the window than in the quiet times of the same round, as
    /// seconds of such times.
    fn excess_times(&self, beside: &[&Self]) -> CpuTimes {
        let window = self.ran[0].difference_until(self.ran[1]);
        let quiet = beside.iter().map(|turn| turn.ran[1].difference_until(turn.ran[2]));
        let quiet = quiet.fold(CpuTimes::default(), |sum, it| sum.add_scaled(it, 1.0));
        let more = window.add_scaled(quiet, -window.seconds / quiet.seconds);
        let work = 1.0 - quiet.waited_s() / quiet.seconds;
        CpuTimes::default().add_scaled(more, 1.0 / work)
    }

    fn is_beside(&self, other: &Self) -> bool {
        (self.interval_s, self.round) == (other.interval_s, other.round)
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("cow-compile");
    let plan = lab.extent.pick(QUICK, FULL);
    let plan = lab.extent.select_wanted(plan, |(interval_s, _)| format!("{interval_s}s"));
    let fault_s = fault::measure_fault_s()?;
    report.add_number("fault_us", fault_s * 1e6);
    let mut guest = CompilingGuest::boot_guest(lab, fault_s)?;
    for &(interval_s, rounds) in &plan {
        for round in 0..rounds * lab.extent.runs(1, 1) {
            for system in CompileSystem::systems_in_round(round, interval_s) {
                guest.measure_interval(system, interval_s, round)?;
            }
        }
    }
    let (turns, log) = guest.into_results()?;
    lab.firn().stop(VM);
    add_repetitions(&turns, &log, &mut report)?;
    let intervals: Vec<u64> = plan.iter().map(|(interval_s, _)| *interval_s).collect();
    add_numbers(&intervals, &mut report);
    let drawing = draw_plot(&intervals, &report)?;
    report.add_drawing("cow-compile", drawing);
    Ok(report)
}

/// A guest that compiles all the time.
struct CompilingGuest<'a> {
    lab: &'a Lab,
    control: GuestControl,
    /// The experiment's own monitor connection.
    bare: QemuVm,
    threads: CpuTimeSources,
    turns: Vec<MeasuredInterval>,
}

impl<'a> CompilingGuest<'a> {
    fn boot_guest(lab: &'a Lab, fault_s: f64) -> Result<Self> {
        let (agent, monitor) = (lab.file("agent"), lab.file("monitor"));
        let image = GuestImage::full()?;
        let args = QemuArgs::new(&image, accel::choose_accel().accel)
            .memory_mib(MIB)
            .vcpus(2)
            .append_kernel_arg("firn.services=none")
            .root_in_memory(&image)
            .with_console(&lab.file("console"))
            .with_agent_socket(&agent)
            .add_args(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        lab.firn().run_vm(VM, &args)?;
        let mut control = GuestControl::connect(&agent, BOOT)?;
        control.spawn_job(JOB, &["bash", "-c", SCRIPT])?;
        std::thread::sleep(WARM);
        let mut bare = QemuVm::connect(&monitor)?;
        let status = lab.firn().status(VM)?;
        let pid = |of: &str| status[of].as_i64().with_context(|| format!("no {of}"));
        let (hypervisor, supervisor) = (pid("pid")?, pid("supervisor_pid")?);
        let pids = (i32::try_from(hypervisor)?, i32::try_from(supervisor)?);
        let threads = CpuTimeSources::from_vm(&mut bare, pids, fault_s)?;
        Ok(Self { lab, control, bare, threads, turns: Vec::new() })
    }

    fn measure_interval(
        &mut self,
        system: CompileSystem,
        interval_s: u64,
        round: usize,
    ) -> Result<()> {
        let interval = Duration::from_secs(interval_s);
        let (name, begun) = (system.name(), Instant::now());
        let failed = || format!("{name}, each {interval_s} s, round {round}");
        if system == CompileSystem::Firn {
            self.begin_series().with_context(failed)?;
            std::thread::sleep(interval.saturating_sub(begun.elapsed()));
        }
        let (began, from, before) =
            (Instant::now(), self.guest_seconds()?, self.threads.read_times()?);
        let report = self.save_by(system).with_context(failed)?;
        let downtime_ms = report["pause"]["downtime_ms"].as_f64();
        let saved = self.guest_seconds()?;
        let left = || interval.saturating_sub(began.elapsed());
        let settle = if system == CompileSystem::None { interval / 2 } else { SETTLE };
        std::thread::sleep(settle.min(left()));
        let window = self.threads.read_times()?;
        std::thread::sleep(left());
        let (until, ran) = (self.guest_seconds()?, [before, window, self.threads.read_times()?]);
        let pause = downtime_ms.unwrap_or(f64::NAN);
        let took = saved - from;
        self.lab
            .log_progress(&format!("{interval_s} s: {name} in {took:.1} s, pause {pause:.1} ms"));
        let whole_s = (system == CompileSystem::Firn).then(|| self.end_series()).transpose()?;
        self.turns.push(MeasuredInterval {
            system,
            interval_s,
            round,
            downtime_ms,
            report,
            whole_s,
            from,
            saved,
            until,
            ran,
        });
        self.is_at_work()
    }

    /// The guest's clock, in seconds since it booted.
    fn guest_seconds(&mut self) -> Result<f64> {
        let said = self.control.run_program(&["cat", "/proc/uptime"])?;
        let seconds = said.split(' ').next().and_then(|word| word.parse().ok());
        seconds.with_context(|| format!("{said:?} is no time of a guest"))
    }

    fn is_at_work(&mut self) -> Result<()> {
        match self.control.poll_job(JOB)? {
            JobState::Running { .. } => Ok(()),
            JobState::Ended(ended) => bail!("the guest compiles no more: {ended:?}"),
        }
    }

    /// Makes a checkpoint and returns its report.
    fn save_by(&mut self, system: CompileSystem) -> Result<Value> {
        let file = self.lab.file("compile.image");
        let strategy = |name| SaveArgs::default().with_option("--strategy", name);
        match system {
            CompileSystem::None => Ok(Value::Null),
            CompileSystem::Firn => {
                let on = SaveArgs::default().with_option("--parent", self.lab.file(BASE));
                self.checkpoint_vm(&self.lab.file(NEXT), &on)
            }
            CompileSystem::FirnFull => self.checkpoint_vm(&file, &SaveArgs::default()),
            CompileSystem::FirnCow => self.checkpoint_vm(&file, &strategy("cow")),
            CompileSystem::FirnPreCopy => self.checkpoint_vm(&file, &strategy("pre-copy")),
            CompileSystem::QemuFile => {
                let downtime_ms =
                    peer::save_vm(self.bare.qmp(), QemuSaveMethod::File, &file)?.downtime_ms;
                Ok(json!({ "pause": { "downtime_ms": downtime_ms } }))
            }
        }
    }

    /// Makes the checkpoint that the next one builds on.
    fn begin_series(&self) -> Result<()> {
        let rounds = SaveArgs::default().with_option("--strategy", "pre-copy");
        self.checkpoint_vm(&self.lab.file(BASE), &rounds).map(drop)
    }

    /// Makes the newest checkpoint of the series whole, and ends dirty tracking, which costs the
    /// guest a little. Returns the processor time of the former.
    fn end_series(&self) -> Result<f64> {
        let whole_s = self.make_whole()?;
        let plain = SaveArgs::default().with_option("--strategy", "cow");
        self.checkpoint_vm(&self.lab.file(BASE), &plain)?;
        std::thread::sleep(SETTLE);
        Ok(whole_s)
    }

    /// Merges the newest checkpoint with its parent. Returns the processor time of that, per vCPU.
    fn make_whole(&self) -> Result<f64> {
        let before = children_seconds()?;
        let next = self.lab.file(NEXT);
        self.lab.firn().run_image_verb(
            "merge",
            &[next.as_os_str(), "-o".as_ref(), self.lab.file(WHOLE).as_os_str()],
        )?;
        Ok((children_seconds()? - before) / self.threads.vcpu_count() as f64)
    }

    fn checkpoint_vm(&self, file: &Path, how: &SaveArgs) -> Result<Value> {
        let mut save_output = self.lab.firn().checkpoint(VM, file, how)?;
        save_output.number("/report/pause/downtime_ms").context("no downtime is reported")?;
        Ok(save_output.facts["report"].take())
    }

    fn into_results(mut self) -> Result<(Vec<MeasuredInterval>, String)> {
        let log = self.control.run_program(&["cat", "/tmp/compiled"])?;
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

/// Adds each interval to the report as a repetition.
fn add_repetitions(turns: &[MeasuredInterval], log: &str, report: &mut Report) -> Result<()> {
    let quiet: Vec<TimeSpan> = turns.iter().map(MeasuredInterval::quiet_span).collect();
    let work = CompileLog::parse_log(log, &quiet)?;
    for turn in turns {
        let beside: Vec<&MeasuredInterval> = turns.iter().filter(|it| it.is_beside(turn)).collect();
        let quiet: Vec<TimeSpan> = beside.iter().map(|turn| turn.quiet_span()).collect();
        let lost_s = work.lost_seconds_in(turn.window_span(), &quiet);
        let waited = turn.excess_times(&beside);
        let cost_s = turn.cost_s(&beside);
        let longer = |by_s: f64| by_s / (turn.duration_s() - by_s);
        report.add_repetition(json!({ "system": turn.system.name(), "interval_s": turn.interval_s,
            "round": turn.round, "downtime_ms": turn.downtime_ms, "saved_s": turn.saved - turn.from,
            "turn_s": turn.duration_s(), "lost_s": lost_s, "overhead": longer(lost_s),
            "waited_s": waited.waited_s(), "delayed_s": waited.delayed_s, "kernel_s": waited.kernel_s,
            "faults_s": turn.faults_s(), "stood_s": waited.stopped_s, "saver_s": waited.saver_s,
            "whole_s": turn.whole_s, "cost_s": cost_s, "cost": longer(cost_s), "report": turn.report }));
    }
    report.add_file("compiled.log", log);
    Ok(())
}

fn measured_values(
    report: &Report,
    system: CompileSystem,
    interval_s: u64,
    field: &str,
) -> Vec<f64> {
    let is_it = |run: &&Value| run["system"] == system.name() && run["interval_s"] == interval_s;
    report.repetitions().iter().filter(is_it).filter_map(|run| run[field].as_f64()).collect()
}

fn add_numbers(intervals: &[u64], report: &mut Report) {
    for system in CompileSystem::ALL {
        for &interval_s in intervals {
            for field in FIELDS {
                let values = measured_values(report, system, interval_s, field);
                let key = format!("{field}.{}.{interval_s}s", system.name());
                add_median_interval(&key, &values, report);
                if !values.is_empty() {
                    report.add_sample(key, values);
                }
            }
        }
    }
}

/// Adds the confidence interval of the median, where there are enough values.
fn add_median_interval(key: &str, values: &[f64], report: &mut Report) {
    if let Some((low, high)) =
        Sample::new(values.iter().copied()).and_then(|it| it.median_interval())
    {
        report.add_number(format!("{key}.low"), low);
        report.add_number(format!("{key}.high"), high);
    }
}

fn draw_plot(intervals: &[u64], report: &Report) -> Result<String> {
    let cost = |system: CompileSystem| {
        let value = |interval_s: &u64| {
            report.figure_value(&format!("cost.{}.{interval_s}s", system.name())).unwrap_or(0.0)
        };
        (system.name().to_owned(), intervals.iter().map(|it| 100.0 * value(it)).collect())
    };
    let plot = BarPlot {
        title: "How much longer a guest compiles, by the interval between checkpoints".into(),
        y: "percent".into(),
        groups: intervals.iter().map(|interval_s| format!("{interval_s} s")).collect(),
        series: CompileSystem::ALL[1..].iter().map(|system| cost(*system)).collect(),
    };
    plot.to_svg().context("the figure")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(system: CompileSystem, from: f64, saved: f64) -> MeasuredInterval {
        let downtime_ms = (system != CompileSystem::None).then_some(2.0);
        let until = from + 10.0;
        // The guest runs three quarters of the time, but a second less in the window.
        let ran = |seconds, less| CpuTimes {
            seconds,
            kernel_s: 0.05 * seconds,
            faults_s: less / 3.0,
            delayed_s: 0.1 * seconds + less,
            stopped_s: 0.1 * seconds,
            saver_s: 0.01 * seconds + less,
        };
        let less = if system == CompileSystem::None { 0.0 } else { 0.75 };
        let ran = [ran(0.0, 0.0), ran(5.0, less), ran(10.0, less)];
        let whole_s = (system == CompileSystem::Firn).then_some(0.6);
        MeasuredInterval {
            system,
            interval_s: 10,
            round: 0,
            downtime_ms,
            report: Value::Null,
            whole_s,
            from,
            saved,
            until,
            ran,
        }
    }

    /// Two workers, a second for each file, except between 10 and 12, when neither makes progress.
    fn log() -> String {
        let done = (0..=20).filter(|second| !(11..=12).contains(second));
        done.flat_map(|second| [0, 1].map(|worker| format!("{worker} a.c {second}\n"))).collect()
    }

    #[test]
    fn the_overhead_is_lost_work_per_work_done() {
        let turns = [turn(CompileSystem::None, 0.0, 0.1), turn(CompileSystem::Firn, 10.0, 12.0)];
        let mut report = Report::new("cow-compile", true);
        add_repetitions(&turns, &log(), &mut report).unwrap();
        add_numbers(&[10], &mut report);
        let percent = |key: &str| report.figure_value(key).map(|it| (it * 100.0).round());
        assert_eq!(percent("lost_s.firn.10s"), Some(200.0));
        assert_eq!(percent("overhead.firn.10s"), Some(25.0));
        assert_eq!(percent("overhead.none.10s"), Some(0.0));
        assert_eq!(percent("waited_s.firn.10s"), Some(100.0));
        assert_eq!(percent("delayed_s.firn.10s"), Some(100.0));
        assert_eq!(percent("stood_s.firn.10s"), Some(0.0));
        assert_eq!(percent("saver_s.firn.10s"), Some(100.0));
        assert_eq!(
            percent("cost_s.firn.10s"),
            Some(135.0),
            "with its page faults, and a sixth of what makes an image whole"
        );
        assert_eq!(percent("cost.firn.10s"), Some(16.0));
        assert_eq!(percent("waited_s.none.10s"), Some(0.0));
        assert_eq!(percent("cost_s.none.10s"), Some(0.0));
        assert_eq!(report.figure_value("downtime_ms.firn.10s"), Some(2.0));
        assert_eq!(report.figure_value("downtime_ms.none.10s"), None);
    }

    #[test]
    fn each_system_is_first_in_some_round() {
        assert_eq!(CompileSystem::systems_in_round(0, 10), CompileSystem::ALL);
        assert_eq!(CompileSystem::systems_in_round(9, 10)[0], CompileSystem::Firn);
        let late = [
            CompileSystem::FirnPreCopy,
            CompileSystem::Firn,
            CompileSystem::FirnCow,
            CompileSystem::QemuFile,
        ];
        assert_eq!(CompileSystem::systems_in_round(1, 59), late);
        assert_eq!(CompileSystem::systems_in_round(0, 120).len(), 4);
        assert_eq!(
            CompileSystem::systems_in_round(1, 120),
            [CompileSystem::Firn, CompileSystem::QemuFile]
        );
    }
}
