//! `vpc-size`: the number of pages of an epoch, by program and interval, with prediction and
//! without.
//!
//! Reproduces Table II of Lu, Ravindran and Kim ("VPC: Scalable, Low Downtime Checkpointing for
//! Virtual Clusters", V.D): perl, bzip2, gcc and Xalan. They are not those of SPEC CPU2006 but the
//! distribution's own, on inputs that the guest makes (`vpc_size.sh`): words are counted and
//! sorted, a text is packed and unpacked, a file of C is compiled, a catalogue is transformed, over
//! and over. A page that is written in an interval counts once, whichever program writes it. The
//! number of such pages depends on the speed of the guest, so tables of two machines should be
//! compared by how they grow, not by their numbers.
//!
//! **What varies**: the program; the interval, 50, 100 and 500 ms; prediction.
//!
//! **What is held equal**: the guest (1 GiB, its root in memory, one vCPU). All programs take turns
//! in it: each turn attaches, makes the same number of cuts, and detaches. The library sends to a
//! backup in this process, as in `vpc-solo`.
//!
//! **What is measured**, each as percentiles over all cuts but the first of each turn:
//! `pages.PROGRAM.INTERVAL`: pages copied at the cut or ahead of it, which is the memory that an
//! epoch needs; `pages_np`, the same without prediction: pages that were written. `faults` (and
//! `faults_np`): pages found dirty that had been protected. `sent`: pages that were sent to the
//! backup, without those that hold the same bytes as before.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use firn_epochs::primary::EpochOptions;
use firn_report::plot::BarPlot;
use serde_json::{Value, json};

use crate::experiments::epochs::{EpochMeasurements, attach_guest, run_epochs};
use crate::experiments::pauses::add_percentiles;
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;
use crate::stats::Sample;

const MIB: u32 = 1024;
const BOOT: Duration = Duration::from_secs(300);
/// How long the guest may take to make the programs' inputs.
const MAKE: Duration = Duration::from_secs(300);
/// How long a program runs before it is measured.
const SETTLE: Duration = Duration::from_secs(2);
const SCRIPT: &str = include_str!("vpc_size.sh");
const VM: &str = "size";
const PROGRAMS: [&str; 4] = ["perl", "bzip2", "gcc", "xalan"];
/// Time from one cut to the next, in milliseconds.
const INTERVALS: [u64; 3] = [50, 100, 500];
/// Minimum duration of a turn, and its minimum number of cuts, in quick and in full runs.
const REPETITION_TIME: (Duration, Duration) = (Duration::from_secs(3), Duration::from_secs(10));
const CUTS: (usize, usize) = (15, 50);
/// Turns of each program, in quick and in full runs.
const REPETITIONS: (usize, usize) = (1, 3);
const PERCENTILES: [(&str, f64); 2] = [("p50", 50.0), ("p95", 95.0)];
/// The values that are reported of each epoch.
const FIELDS: [&str; 3] = ["pages", "faults", "sent"];
const SIGKILL: i32 = 9;

/// Whether pages are predicted, and the ending of keys.
const SYSTEMS: [(bool, &str); 2] = [(true, ""), (false, "_np")];

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("vpc-size");
    let programs = lab.extent.select_wanted(&PROGRAMS, str::to_owned);
    let mut guest = SizeGuest::start_guest(lab)?;
    for &program in &programs {
        guest.start_program(program)?;
        let turns: Vec<(u64, bool)> = INTERVALS
            .into_iter()
            .flat_map(|interval| SYSTEMS.map(|(predicts, _)| (interval, predicts)))
            .collect();
        run_interleaved(
            lab.extent.runs(REPETITIONS.0, REPETITIONS.1),
            &turns,
            |_, &(interval, predicts)| guest.run_turn(program, interval, predicts, &mut report),
        )?;
        guest.end_program(program)?;
        add_numbers(program, &mut report);
    }
    lab.firn().stop(VM);
    let drawing = draw_plot(&programs, &report)?;
    report.add_drawing("vpc-size", drawing);
    Ok(report)
}

struct SizeGuest<'a> {
    lab: &'a Lab,
    control: GuestControl,
    monitor: PathBuf,
    pid: i32,
}

impl<'a> SizeGuest<'a> {
    fn start_guest(lab: &'a Lab) -> Result<Self> {
        let image = GuestImage::full()?;
        let [monitor, agent, console] = ["monitor", "agent", "console"].map(|it| lab.file(it));
        let args = QemuArgs::new(&image, accel::choose_accel().accel)
            .memory_mib(MIB)
            .vcpus(1)
            .append_kernel_arg("firn.services=none")
            .cached_root_in_memory(&image)
            .with_console(&console)
            .with_agent_socket(&agent)
            .add_args(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        lab.firn().run_vm(VM, &args)?;
        let mut control = GuestControl::connect(&agent, BOOT)?;
        control.run_within(&["sh", "-c", "cat > /tmp/work"], SCRIPT, MAKE)?;
        let made = control.run_within(&["sh", "/tmp/work", "make"], "", MAKE)?;
        ensure!(made.exit == 0, "the guest can't make what programs read: {}", made.stderr);
        lab.log_progress("the guest has made what programs read");
        let pid = lab.firn().status(VM)?["pid"].as_i64().context("no process")?;
        Ok(Self { lab, control, monitor, pid: i32::try_from(pid)? })
    }

    /// Starts a program, and lets it run for a while.
    fn start_program(&mut self, program: &str) -> Result<()> {
        self.control.spawn_job(program, &["sh", "/tmp/work", program])?;
        std::thread::sleep(SETTLE);
        self.check_running(program)
    }

    /// Fails if a program has ended: it was not measured then.
    fn check_running(&mut self, program: &str) -> Result<()> {
        match self.control.poll_job(program)? {
            crate::guest::JobState::Running { .. } => Ok(()),
            crate::guest::JobState::Ended(ended) => {
                anyhow::bail!("{program} has ended: {} {}", ended.exit, ended.stderr)
            }
        }
    }

    fn end_program(&mut self, program: &str) -> Result<()> {
        self.check_running(program)?;
        Ok(self.control.signal_job(program, SIGKILL)?)
    }

    fn run_turn(
        &self,
        program: &str,
        interval: u64,
        predicts: bool,
        report: &mut Report,
    ) -> Result<()> {
        let long = self.lab.extent.pick(REPETITION_TIME.0, REPETITION_TIME.1).as_millis() as u64
            / interval;
        let cuts = self.lab.extent.pick(CUTS.0, CUTS.1).max(usize::try_from(long)?);
        let interval_of = Duration::from_millis(interval);
        let options = EpochOptions { interval: interval_of, predicts, ..EpochOptions::default() };
        let epochs = run_epochs(attach_guest(&self.monitor, self.pid)?, options, cuts)?;
        let turn = turn_facts(program, interval, predicts, &epochs);
        let pages = turn["pages"].as_array().into_iter().flatten().filter_map(Value::as_f64);
        let median = Sample::new(pages).context("no epoch")?.median();
        let how = if predicts { "" } else { ", without prediction" };
        self.lab.log_progress(&format!("{program}, {interval} ms{how}: {median:.0} pages"));
        report.add_repetition(turn);
        Ok(())
    }
}

fn turn_facts(program: &str, interval: u64, predicts: bool, epochs: &[EpochMeasurements]) -> Value {
    let rest = || epochs.iter().skip(1);
    json!({ "program": program, "interval": interval, "predicts": predicts,
        "pages": rest().map(|it| it.cut.copied + it.cut.ahead).collect::<Vec<_>>(),
        "faults": rest().map(|it| it.cut.written).collect::<Vec<_>>(),
        "sent": rest().filter_map(|it| it.sent).collect::<Vec<_>>() })
}

/// The reported values of all epochs.
fn epoch_values(
    report: &Report,
    program: &str,
    interval: u64,
    predicts: bool,
    field: &str,
) -> Vec<f64> {
    let is_it = |turn: &&Value| {
        turn["program"] == program && turn["interval"] == interval && turn["predicts"] == predicts
    };
    let turns = report.repetitions().iter().filter(is_it);
    let values = turns.filter_map(|turn| turn[field].as_array()).flatten();
    values.filter_map(Value::as_f64).collect()
}

fn add_numbers(program: &str, report: &mut Report) {
    for interval in INTERVALS {
        for field in FIELDS {
            for (predicts, ending) in SYSTEMS {
                let values = epoch_values(report, program, interval, predicts, field);
                let key = format!("{field}{ending}.{program}.{interval}");
                add_percentiles(&key, values, &PERCENTILES, report);
            }
        }
    }
}

fn draw_plot(programs: &[&str], report: &Report) -> Result<String> {
    let series = SYSTEMS.into_iter().flat_map(|(_, ending)| {
        INTERVALS.map(|interval| {
            let of = |program: &&str| {
                let key = format!("pages{ending}.{program}.{interval}.p50");
                report.figure_value(&key).unwrap_or(f64::NAN)
            };
            (format!("vpc{ending} {interval} ms"), programs.iter().map(of).collect())
        })
    });
    let plot = BarPlot {
        title: "Pages of an epoch, median".into(),
        y: "pages".into(),
        groups: programs.iter().map(|&program| program.to_owned()).collect(),
        series: series.collect(),
    };
    plot.to_svg().context("the pages")
}

#[cfg(test)]
mod tests {
    use firn_epochs::primary::CutMeasurements;

    use super::*;

    #[test]
    fn epochs_of_all_turns_count_but_for_the_first_of_each() {
        let mut report = Report::new("vpc-size", true);
        let numbers = |copied, ahead, sent| EpochMeasurements {
            cut: CutMeasurements { copied, ahead, written: copied, ..CutMeasurements::default() },
            sent,
        };
        let seed = numbers(9000, 0, Some(9000));
        for (predicts, pages) in [(true, 100), (false, 80), (true, 300)] {
            let turn = [seed, numbers(pages, 20, Some(pages)), numbers(pages, 20, None)];
            report.add_repetition(turn_facts("gcc", 100, predicts, &turn));
        }
        add_numbers("gcc", &mut report);
        assert_eq!(report.figure_value("pages.gcc.100.p50"), Some(120.0));
        assert_eq!(report.figure_value("pages.gcc.100.p95"), Some(320.0));
        assert_eq!(report.figure_value("pages.gcc.100.n"), Some(4.0));
        assert_eq!(report.figure_value("pages_np.gcc.100.p95"), Some(100.0));
        assert_eq!(report.figure_value("faults.gcc.100.p95"), Some(300.0));
        assert_eq!(report.figure_value("sent.gcc.100.n"), Some(2.0));
        assert!(report.to_json()["pages.gcc.50.p50"].is_null(), "it was not measured");
    }
}
