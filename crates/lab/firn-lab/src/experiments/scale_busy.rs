//! `scale-busy`: how long a save and the background fill of a restore take beside a busy guest.
//!
//! Halite (section 6) runs background work when the checkpoint or restore does not progress by
//! itself. A guest that touches one new page now and then must not count as progress.
//!
//! **What varies**: the guest's load. Both fill half of their RAM. The *idle* guest then only sends
//! heartbeats. The *busy* one touches one new page of it each millisecond, and rewrites hot pages as
//! fast as it can, on one of its two vCPUs. And the system: `now`, the `firn` of the lab; and, if the
//! environment variable `FIRN_BEFORE` names another `firn`, that one as `before`: one with the
//! throttles of an earlier commit. **What is held equal**: default options; all guests exist all
//! the time, and run alternately, one at a time. Each is saved, ended, restored from its image out
//! of the page cache, and saved again in the next round.
//!
//! **What is measured**: `save_s`, from the command until all memory is copied; where the program
//! does not report that, until the image is finished, which includes the time for which the guest
//! is watched. `fill_s`, from the start of the restored vCPUs until all memory is present.
//! `throughput_save` and `throughput_fill`, the rate of the rewrites in these times, as a share of
//! their rate right before the save. `stall_save_ms` and `stall_fill_ms`, percentiles over all
//! heartbeats in these times: how late a write of any vCPU was, by a program on each vCPU that
//! writes a page each millisecond. `save_ratio`, `fill_ratio`: the busy guest against the idle one.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use firn_vmm::QemuVm;
use serde_json::{Value, json};

use crate::disk_profile::{DiskProfile, DiskThrottle, warm_file};
use crate::experiments::pauses::add_percentiles;
use crate::experiments::synthetic::{last_line, split_words};
use crate::firn::{Firn, SaveArgs};
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, run_interleaved, wait_for};
use crate::prober::GuestClock;
use crate::report::Report;
use crate::stats::Sample;

/// Environment variable that names a `firn` to compare with.
const BEFORE_VARIABLE: &str = "FIRN_BEFORE";
/// RAM in MiB, in quick and in full runs.
const MIB: (u32, u32) = (512, 4096);
/// Rounds of all guests.
const ROUNDS: (usize, usize) = (3, 10);
const VCPUS: u32 = 2;
/// New pages per second that a busy guest touches, and an idle one: hardly any.
const BUSY_RATE: f64 = 1000.0;
const IDLE_RATE: f64 = 0.01;
/// Memory that is rewritten as fast as possible, in MiB.
const HOT_MIB: u32 = 8;
/// How long a guest may take to boot and to fill its memory.
const BOOT: Duration = Duration::from_secs(600);
/// How long a restore may take.
const FILL: Duration = Duration::from_secs(1200);
/// Time before a save in which the rate of the rewrites is measured.
const STEADY: Duration = Duration::from_secs(2);
const STALLS: [(&str, f64); 3] = [("p50", 50.0), ("p99", 99.0), ("p999", 99.9)];

/// A guest of the experiment: its load, and the `firn` that saves and restores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BusyCase {
    system: &'static str,
    is_busy: bool,
}

impl BusyCase {
    fn name(self) -> String {
        format!("{}.{}", self.system, if self.is_busy { "busy" } else { "idle" })
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("scale-busy");
    let before = std::env::var_os(BEFORE_VARIABLE).map(PathBuf::from);
    let systems: &[&'static str] = if before.is_some() { &["now", "before"] } else { &["now"] };
    let all: Vec<BusyCase> = systems
        .iter()
        .flat_map(|&system| [false, true].map(|is_busy| BusyCase { system, is_busy }))
        .collect();
    let cases = lab.extent.select_wanted(&all, BusyCase::name);
    let disk = DiskThrottle::new(DiskProfile::None, lab.dir())?;
    let mut guests = Vec::new();
    for &case in &cases {
        let firn = match before.as_deref().filter(|_| case.system == "before") {
            Some(program) => lab.firn().with_program(program),
            None => lab.firn().clone(),
        };
        let guest = BusyGuest::boot_guest(lab, firn, case)?;
        guest.monitor()?.stop()?;
        guests.push(guest);
    }
    let numbers: Vec<usize> = (0..guests.len()).collect();
    run_interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &numbers, |round, &number| {
        guests[number].run_round(round, &disk, &mut report)
    })?;
    cases.iter().for_each(|&case| add_case_figures(case, &mut report));
    systems.iter().for_each(|system| add_ratios(system, &cases, &mut report));
    Ok(report)
}

/// A guest, which runs or is stopped.
struct BusyGuest<'a> {
    lab: &'a Lab,
    firn: Firn,
    case: BusyCase,
}

/// The guest's work, and how late its vCPUs are, since an instant.
struct GuestWatch {
    control: GuestControl,
    clock: GuestClock,
    since: Instant,
    /// Pages that were rewritten until then.
    writes: u64,
}

impl<'a> BusyGuest<'a> {
    fn boot_guest(lab: &'a Lab, firn: Firn, case: BusyCase) -> Result<Self> {
        let guest = Self { lab, firn, case };
        let mib = lab.extent.pick(MIB.0, MIB.1);
        let monitor = guest.file("monitor");
        let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
            .memory_mib(mib)
            .vcpus(VCPUS)
            .with_console(&guest.file("console"))
            .with_agent_socket(&guest.file("agent"))
            .with_heartbeat_socket(&guest.file("beats"))
            .add_args(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        guest.firn.run_vm(&case.name(), &args)?;
        let mut control = GuestControl::connect(&guest.file("agent"), BOOT)?;
        control.spawn_job(
            "beats",
            &[
                "sh",
                "-c",
                "renice -n -20 -p $$ >/dev/null; exec firn-guest \
            heartbeat --rate 500 --work-mib 0 --stall-mib 4",
            ],
        )?;
        start_load(&mut control, mib / 2, case.is_busy)?;
        lab.log_progress(&format!("{} runs", case.name()));
        Ok(guest)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.lab.file(&format!("{name}.{}", self.case.name()))
    }

    fn monitor(&self) -> Result<QemuVm> {
        Ok(QemuVm::connect(&self.file("monitor"))?)
    }

    /// Begins to watch the guest.
    fn start_watch(&self) -> Result<GuestWatch> {
        let mut control = GuestControl::connect(&self.file("agent"), BOOT)?;
        let clock = GuestClock::start(&self.file("beats"))?;
        let writes = self.count_writes(&mut control)?;
        Ok(GuestWatch { control, clock, since: Instant::now(), writes })
    }

    fn count_writes(&self, control: &mut GuestControl) -> Result<u64> {
        if !self.case.is_busy {
            return Ok(0);
        }
        let said = control.run_program(&["firn-guest", "verify", "status"])?;
        last_line(&said)?["writes"].as_u64().context("no count of writes")
    }

    /// The pages rewritten per second, and the stalls, since the last call.
    fn read_watch(&self, watch: &mut GuestWatch) -> Result<(f64, Vec<f64>)> {
        let writes = self.count_writes(&mut watch.control)?;
        let now = Instant::now();
        let rate = (writes - watch.writes) as f64 / (now - watch.since).as_secs_f64();
        let stalls = watch.clock.stalls_since(watch.since);
        (watch.since, watch.writes) = (now, writes);
        Ok((rate, stalls))
    }

    /// Saves the guest, ends it, restores it, and leaves it stopped.
    fn run_round(&mut self, round: usize, disk: &DiskThrottle, report: &mut Report) -> Result<()> {
        self.monitor()?.cont()?;
        let mut watch = self.start_watch()?;
        std::thread::sleep(STEADY);
        let (steady, steady_stalls) = self.read_watch(&mut watch)?;
        let (name, image) = (self.case.name(), self.file("image"));
        let save = self.firn.checkpoint(&name, &image, &SaveArgs::default())?;
        let (save_rate, save_stalls) = self.read_watch(&mut watch)?;
        let ms = |pointer| save.number(pointer).filter(|ms| *ms > 0.0);
        let save_ms = ms("/report/copied_ms").or_else(|| ms("/report/total_ms"));
        drop(watch);
        self.firn.stop(&name);
        warm_file(&image)?;
        self.firn.restore(&image, &name, &["--mode", "locality"], disk)?;
        let mut watch = self.start_watch()?;
        let (fill_s, counts) = self.wait_for_fill()?;
        let (fill_rate, fill_stalls) = self.read_watch(&mut watch)?;
        self.monitor()?.stop()?;
        let save_s = save_ms.context("no duration is reported")? / 1e3;
        let share = |rate: f64| (steady > 0.0).then(|| rate / steady);
        let [of_save, of_fill] = [save_rate, fill_rate].map(share);
        self.lab.log_progress(&format!(
            "{name}: save {save_s:.2} s, fill {fill_s:.2} s; work {of_save:.2?}, {of_fill:.2?} of \
             {steady:.0} pages/s"
        ));
        report.add_repetition(json!({ "case": name, "round": round, "save_s": save_s,
            "fill_s": fill_s, "steady_rate": steady, "throughput_save": of_save,
            "throughput_fill": of_fill, "steady_stalls_ms": steady_stalls,
            "stall_save_ms": save_stalls, "stall_fill_ms": fill_stalls,
            "save": save.facts["report"], "fill": counts }));
        Ok(())
    }

    /// Waits until all memory is present. Returns the time since the vCPUs run, in seconds, and the
    /// counts of the restore.
    fn wait_for_fill(&self) -> Result<(f64, Value)> {
        let path = self.firn.run_record(&self.case.name());
        let record = wait_for("the background fill", FILL, || {
            std::thread::sleep(Duration::from_millis(20));
            let text = std::fs::read(&path).unwrap_or_default();
            let record: Value = serde_json::from_slice(&text).unwrap_or_default();
            Ok(record["finished_us"].is_u64().then_some(record))
        })?;
        let us = |key: &str| record[key].as_f64().with_context(|| format!("no {key}"));
        Ok(((us("finished_us")? - us("resumed_us")?) / 1e6, record["counts"].clone()))
    }
}

/// Fills memory; in a busy guest, also touches a page of it each millisecond, and rewrites hot pages.
fn start_load(control: &mut GuestControl, mib: u32, is_busy: bool) -> Result<()> {
    let rate = if is_busy { BUSY_RATE } else { IDLE_RATE };
    let toucher = format!("firn-guest toucher --threads 1 --mib-each {mib} --rate {rate} --write");
    control.spawn_job("toucher", &split_words(&toucher))?;
    control.wait_output("toucher", "\"ready\":true", BOOT)?;
    if !is_busy {
        return Ok(());
    }
    let writers = format!(
        "firn-guest writers --threads 1 --mib {HOT_MIB} --compresses-to 10 --light --no-check"
    );
    control.spawn_job("writers", &split_words(&writers))?;
    control.wait_output("writers", "\"ready\":true", BOOT).map(drop)?;
    Ok(())
}

/// All numbers of a case under a field, which is a number or a list of numbers in each run.
fn measured(report: &Report, case: &str, field: &str) -> Vec<f64> {
    let runs = report.repetitions().iter().filter(|run| run["case"] == case);
    let numbers = |run: &Value| match &run[field] {
        Value::Array(list) => list.iter().filter_map(Value::as_f64).collect(),
        one => one.as_f64().into_iter().collect::<Vec<f64>>(),
    };
    runs.flat_map(numbers).collect()
}

fn add_case_figures(case: BusyCase, report: &mut Report) {
    let name = case.name();
    for field in ["save_s", "fill_s"] {
        report.add_sample(format!("{field}.{name}"), measured(report, &name, field));
    }
    for field in ["throughput_save", "throughput_fill"].iter().filter(|_| case.is_busy) {
        report.add_sample(format!("{field}.{name}"), measured(report, &name, field));
    }
    for field in ["steady_stalls_ms", "stall_save_ms", "stall_fill_ms"] {
        let values = measured(report, &name, field);
        add_percentiles(&format!("{field}.{name}"), values, &STALLS, report);
    }
}

/// The busy guest against the idle one, by medians.
fn add_ratios(system: &'static str, cases: &[BusyCase], report: &mut Report) {
    let [idle, busy] = [false, true].map(|is_busy| BusyCase { system, is_busy });
    if !cases.contains(&idle) || !cases.contains(&busy) {
        return;
    }
    for (key, field) in [("save_ratio", "save_s"), ("fill_ratio", "fill_s")] {
        let median = |case: BusyCase| {
            Sample::new(measured(report, &case.name(), field)).map_or(f64::NAN, |it| it.median())
        };
        let ratio = median(busy) / median(idle);
        report.add_number(format!("{key}.{system}"), ratio);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_medians_of_runs_and_percentiles_of_all_beats() {
        let mut report = Report::new("scale-busy", true);
        let cases = [false, true].map(|is_busy| BusyCase { system: "now", is_busy });
        for (case, save_s) in [(cases[0], 1.0), (cases[1], 1.25), (cases[0], 3.0), (cases[1], 1.75)]
        {
            report.add_repetition(json!({ "case": case.name(), "save_s": save_s,
                "fill_s": 2.0 * save_s, "throughput_save": case.is_busy.then_some(0.5),
                "throughput_fill": case.is_busy.then_some(0.75), "steady_stalls_ms": [0.5],
                "stall_save_ms": [1.0, 2.0 * save_s], "stall_fill_ms": [4.0] }));
        }
        cases.iter().for_each(|&case| add_case_figures(case, &mut report));
        add_ratios("now", &cases, &mut report);
        assert_eq!(report.figure_value("save_s.now.busy"), Some(1.5));
        assert_eq!(report.figure_value("save_ratio.now"), Some(0.75));
        assert_eq!(report.figure_value("fill_ratio.now"), Some(0.75));
        assert_eq!(report.figure_value("throughput_save.now.busy"), Some(0.5));
        assert_eq!(report.figure_value("throughput_save.now.idle"), None);
        assert_eq!(report.figure_value("stall_save_ms.now.busy.p999"), Some(3.5));
        assert!(report.is_complete());
    }

    #[test]
    fn a_case_alone_has_no_ratio() {
        let mut report = Report::new("scale-busy", true);
        add_ratios("now", &[BusyCase { system: "now", is_busy: true }], &mut report);
        assert!(report.is_complete());
        assert_eq!(report.figure_value("save_ratio.now"), None);
    }
}
