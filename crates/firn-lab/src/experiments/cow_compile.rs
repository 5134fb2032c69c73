//! `cow-compile`: what checkpoints at short intervals cost a guest that compiles.
//!
//! Reproduces Figures 3 and 4 of Sun and Blough ("Fast, Lightweight Virtual Machine Checkpointing", section 5): a guest of 512 MB
//! compiles, and is checkpointed every 10, 30, 60 or 120 seconds. They compile a Linux kernel; here it is zlib with make and gcc,
//! over and over, a fixed number of times.
//!
//! **What varies**: the interval, and who makes the checkpoints: Firn's default (`firn`), Firn's rounds (`firn-pre-copy`), or QEMU's
//! live migration into a file (`qemu-file`), which is the pre-copy of the paper. **What is held equal**: the guest and its work,
//! which begins anew for each row; the disk that images go to. A checkpoint that is not done when the next one is due delays it.
//!
//! **What is measured**: `downtime_ms.SYSTEM.INTERVAL`, the pause as its maker reports it; `compile_s`, by the guest's own clock, and
//! `overhead`, how much longer than without checkpoints; and how many checkpoints there were in that time, since who takes long
//! makes fewer of them (`checkpoints`).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use firn_report::plot::BarPlot;
use firn_vmm::Vm;
use serde_json::{Value, json};

use super::workload;
use crate::firn::SaveArgs;
use crate::guest::{Control, GuestImage, JobState, QemuArgs, accel};
use crate::lab::Lab;
use crate::peer::{self, Way};
use crate::report::Report;
use crate::stats::Sample;

const VM: &str = "compile";
const MIB: u32 = 512;
const BOOT: Duration = Duration::from_secs(300);
/// How long the guest may take for its work.
const LIMIT: Duration = Duration::from_secs(3600);
/// Between two checkpoints, in seconds, in quick and in full runs.
const INTERVALS_S: (&[u64], &[u64]) = (&[10], &[10, 30, 60, 120]);
/// How often zlib is compiled, in quick and in full runs.
const TIMES: (u32, u32) = (1, 6);

/// Who makes checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum System {
    Firn,
    FirnPreCopy,
    QemuFile,
}

impl System {
    const ALL: [Self; 3] = [Self::Firn, Self::FirnPreCopy, Self::QemuFile];

    fn name(self) -> &'static str {
        match self {
            Self::Firn => "firn",
            Self::FirnPreCopy => "firn-pre-copy",
            Self::QemuFile => Way::File.name(),
        }
    }
}

/// Runs it.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("cow-compile");
    let intervals: &[u64] = if lab.extent.quick { INTERVALS_S.0 } else { INTERVALS_S.1 };
    let mut guest = Guest::boot(lab)?;
    guest.compile("first", None)?;
    for round in 0..lab.extent.runs(1, 2) {
        guest.row(&format!("none-{round}"), None, &mut report)?;
        for &interval_s in intervals {
            for system in System::ALL {
                let job = format!("{}-{interval_s}-{round}", system.name());
                guest.row(&job, Some((system, interval_s)), &mut report)?;
            }
        }
    }
    lab.firn().stop(VM);
    figures(intervals, &mut report);
    let drawing = drawing(intervals, &report)?;
    report.drawing("cow-compile", drawing);
    Ok(report)
}

/// A guest that has compiled before, so that its programs are in its page cache.
struct Guest<'a> {
    lab: &'a Lab,
    agent: PathBuf,
    times: u32,
    /// The experiment's own monitor connection.
    bare: Vm,
}

/// What came of compiling once.
struct Compiled {
    seconds: f64,
    downtimes_ms: Vec<f64>,
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
        Control::connect(&agent, BOOT)?;
        let times = lab.extent.pick(TIMES.0, TIMES.1);
        Ok(Self { lab, agent, times, bare: Vm::connect(&monitor)? })
    }

    fn row(
        &mut self,
        job: &str,
        checkpoints: Option<(System, u64)>,
        report: &mut Report,
    ) -> Result<()> {
        let Compiled { seconds, downtimes_ms } = self.compile(job, checkpoints)?;
        let pause = Sample::new(downtimes_ms.iter().copied()).map(|it| it.median());
        let system = checkpoints.map_or("none", |(system, _)| system.name());
        self.lab.say(&format!(
            "{job}: {seconds:.1} s, {} checkpoints, pause {:.1} ms",
            downtimes_ms.len(),
            pause.unwrap_or(f64::NAN)
        ));
        report.repetition(json!({ "system": system, "interval_s": checkpoints.map(|(_, it)| it),
            "compile_s": seconds, "downtimes_ms": downtimes_ms }));
        Ok(())
    }

    fn compile(&mut self, job: &str, checkpoints: Option<(System, u64)>) -> Result<Compiled> {
        let script = format!("times={}\n{SCRIPT}", self.times);
        let mut control = Control::connect(&self.agent, BOOT)?;
        control.spawn(job, &["bash", "-c", &script])?;
        control.wait_output(job, "\"ready\":true", BOOT)?;
        let (begun, mut downtimes_ms) = (Instant::now(), Vec::new());
        let interval = checkpoints.map(|(_, seconds)| Duration::from_secs(seconds));
        let mut due = interval.map(|it| begun + it);
        loop {
            match control.poll(job)? {
                JobState::Ended(ended) => {
                    let seconds = workload::seconds(&ended.stdout)?;
                    return Ok(Compiled { seconds, downtimes_ms });
                }
                JobState::Running { .. } if begun.elapsed() > LIMIT => {
                    bail!("{job} takes too long")
                }
                JobState::Running { .. } => {}
            }
            if let (Some((system, _)), true) =
                (checkpoints, due.is_some_and(|it| it <= Instant::now()))
            {
                downtimes_ms.push(self.save(system).with_context(|| job.to_owned())?);
                due = due.zip(interval).map(|(due, interval)| (due + interval).max(Instant::now()));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn save(&mut self, system: System) -> Result<f64> {
        let file = self.lab.file("compile.image");
        match system {
            System::Firn => self.checkpoint(&file, &SaveArgs::default()),
            System::FirnPreCopy => {
                self.checkpoint(&file, &SaveArgs::default().with("--strategy", "pre-copy"))
            }
            System::QemuFile => Ok(peer::save(self.bare.qmp(), Way::File, &file)?.downtime_ms),
        }
    }

    fn checkpoint(&self, file: &Path, how: &SaveArgs) -> Result<f64> {
        let said = self.lab.firn().checkpoint(VM, file, how)?;
        said.number("/report/pause/downtime_ms").context("no downtime is reported")
    }
}

/// The guest's work. It says when it has begun, and how long it took by its own clock.
const SCRIPT: &str = r#"set -e
rm -rf /tmp/compiled
cp -r /usr/src/zlib /tmp/compiled
cd /tmp/compiled
from=$(cut -d' ' -f1 /proc/uptime)
echo '{"ready":true}'
for round in $(seq $times); do
    make -s clean > /dev/null 2>&1
    make -s -j2 libz.a > /dev/null 2>&1
done
test -s libz.a
echo "{\"from\":$from,\"until\":$(cut -d' ' -f1 /proc/uptime)}"
"#;

fn rows<'r>(report: &'r Report, system: &str, interval_s: Option<u64>) -> Vec<&'r Value> {
    let is_it = |run: &&Value| run["system"] == system && run["interval_s"].as_u64() == interval_s;
    report.repetitions().iter().filter(is_it).collect()
}

fn compile_s(rows: &[&Value]) -> Vec<f64> {
    rows.iter().filter_map(|row| row["compile_s"].as_f64()).collect()
}

fn downtimes_ms(rows: &[&Value]) -> Vec<f64> {
    let all = rows.iter().filter_map(|row| row["downtimes_ms"].as_array()).flatten();
    all.filter_map(Value::as_f64).collect()
}

fn figures(intervals: &[u64], report: &mut Report) {
    report.sample("compile_s.none", compile_s(&rows(report, "none", None)));
    let alone = report.value("compile_s.none").unwrap_or(f64::NAN);
    for system in System::ALL.map(System::name) {
        for &interval_s in intervals {
            let rows = rows(report, system, Some(interval_s));
            let (seconds, pauses) = (compile_s(&rows), downtimes_ms(&rows));
            let count = pauses.len() as f64 / rows.len().max(1) as f64;
            report.sample(format!("compile_s.{system}.{interval_s}s"), seconds.iter().copied());
            let overheads = seconds.iter().map(|it| it / alone - 1.0);
            report.sample(format!("overhead.{system}.{interval_s}s"), overheads);
            report.sample(format!("downtime_ms.{system}.{interval_s}s"), pauses);
            report.number(format!("checkpoints.{system}.{interval_s}s"), count);
        }
    }
}

fn drawing(intervals: &[u64], report: &Report) -> Result<String> {
    let overhead = |system: System| {
        let value = |interval_s: &u64| {
            report.value(&format!("overhead.{}.{interval_s}s", system.name())).unwrap_or(f64::NAN)
        };
        (system.name().to_owned(), intervals.iter().map(|it| 100.0 * value(it)).collect())
    };
    let plot = BarPlot {
        title: "How much longer a guest compiles, by the interval between checkpoints".into(),
        y: "percent".into(),
        groups: intervals.iter().map(|interval_s| format!("{interval_s} s")).collect(),
        series: System::ALL.map(overhead).into(),
    };
    plot.svg().context("the figure")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overheads_are_those_over_compiling_alone() {
        let mut report = Report::new("cow-compile", true);
        report.repetition(json!({ "system": "none", "interval_s": null, "compile_s": 50.0,
            "downtimes_ms": [] }));
        for system in System::ALL {
            report.repetition(json!({ "system": system.name(), "interval_s": 10,
                "compile_s": 60.0, "downtimes_ms": [2.0, 4.0, 9.0] }));
        }
        figures(&[10], &mut report);
        assert_eq!(report.value("overhead.firn.10s").map(|it| (it * 100.0).round()), Some(20.0));
        assert_eq!(report.value("downtime_ms.qemu-file.10s"), Some(4.0));
        assert_eq!(report.value("checkpoints.firn-pre-copy.10s"), Some(3.0));
    }
}
