//! How long the guest stands still, by the size of its RAM.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use firn_vmm::Vm;
use serde_json::{Value, json};

use crate::experiments::synthetic::{last_line, words};
use crate::firn::SaveArgs;
use crate::guest::{Control, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, interleaved};
use crate::prober::GuestClock;
use crate::report::Report;
use crate::stats::Sample;
use firn_report::plot::BarPlot;

/// A guest.
#[derive(Clone, Copy, Debug)]
struct Size {
    name: &'static str,
    mib: u32,
    /// How much of it is written all the time, in quick and in full runs.
    written_mib: (u32, u32),
    /// Pauses of either kind, in quick and in full runs.
    rounds: (usize, usize),
}

const SIZES: [Size; 4] = [
    Size { name: "256MiB", mib: 256, written_mib: (128, 128), rounds: (20, 40) },
    Size { name: "1GiB", mib: 1024, written_mib: (512, 768), rounds: (12, 40) },
    Size { name: "4GiB", mib: 4096, written_mib: (2048, 3072), rounds: (9, 40) },
    Size { name: "8GiB", mib: 8192, written_mib: (4096, 6144), rounds: (8, 40) },
];
const VM: &str = "pause";
const VCPUS: u32 = 2;
/// How long a guest may take to boot.
const BOOT: Duration = Duration::from_secs(120);
/// How long it may take to fill its memory.
const FILL: Duration = Duration::from_secs(600);
/// Time between two pauses, so that neither feels the one before.
const SETTLE: Duration = Duration::from_millis(300);
/// Heartbeats per second.
const BEATS_PER_S: u32 = 500;

/// Who pauses the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum System {
    Firn,
    Floor,
}

impl System {
    const ALL: [Self; 2] = [Self::Firn, Self::Floor];

    fn name(self) -> &'static str {
        match self {
            Self::Firn => "firn",
            Self::Floor => "floor",
        }
    }

    /// The key of its pauses.
    fn pause_key(self) -> &'static str {
        match self {
            Self::Firn => "downtime_ms",
            Self::Floor => "floor_ms",
        }
    }

    /// The key of its pauses as the guest's clock tells them.
    fn still_key(self) -> &'static str {
        match self {
            Self::Firn => "stood_still_ms",
            Self::Floor => "floor_stood_still_ms",
        }
    }
}

/// Measures every size, and says what came of it.
pub(super) fn run(lab: &Lab, report: &mut Report) -> Result<()> {
    for size in SIZES {
        let mut guest = Guest::start(lab, size)?;
        let (quick, full) = size.rounds;
        let rounds = lab.extent.runs(quick, full);
        let written = guest.written_mib;
        report
            .note(format!("{}: {VCPUS} vCPUs write {written} MiB at random, flat out", size.name));
        interleaved(rounds, &System::ALL, |_, &system| guest.pause(system, report))?;
        lab.firn().stop(VM);
        figures(size, report);
    }
    let drawing = drawing(report)?;
    report.drawing("halite-save-downtime", drawing);
    Ok(())
}

/// A running guest under load.
struct Guest<'a> {
    lab: &'a Lab,
    size: Size,
    written_mib: u32,
    image: PathBuf,
    clock: GuestClock,
    /// The experiment's own monitor connection.
    bare: Vm,
}

impl<'a> Guest<'a> {
    fn start(lab: &'a Lab, size: Size) -> Result<Self> {
        let [agent, beats, monitor] = ["agent", "beats", "monitor"].map(|name| lab.file(name));
        let args = QemuArgs::new(&GuestImage::small()?, accel::decide().accel)
            .memory_mib(size.mib)
            .vcpus(VCPUS)
            .console(&lab.file("console"))
            .agent(&agent)
            .heartbeat(&beats)
            .more(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        lab.firn().run(VM, &args)?;
        let mut control = Control::connect(&agent, BOOT)?;
        let clock = GuestClock::start(&beats)?;
        let written_mib = lab.extent.pick(size.written_mib.0, size.written_mib.1);
        load(&mut control, written_mib)?;
        let bare = Vm::connect(&monitor)?;
        lab.say(&format!("{}: the guest writes {written_mib} MiB", size.name));
        std::thread::sleep(SETTLE);
        Ok(Self { lab, size, written_mib, image: lab.file("pause.firn"), clock, bare })
    }

    /// One pause.
    fn pause(&mut self, system: System, report: &mut Report) -> Result<()> {
        let before = Instant::now() - SETTLE;
        let (pause_ms, facts) = match system {
            System::Firn => self.checkpoint()?,
            System::Floor => (self.floor()?, Value::Null),
        };
        std::thread::sleep(SETTLE);
        let still_ms = self.clock.stood_still_since(before).map(ms);
        let said = format!("{}: {} {pause_ms:.1} ms", self.size.name, system.name());
        self.lab.say(&format!("{said}, guest's clock {:.1} ms", still_ms.unwrap_or(f64::NAN)));
        report.repetition(json!({ "system": system.name(), "size": self.size.name,
            "pause_ms": pause_ms, "still_ms": still_ms, "facts": facts }));
        Ok(())
    }

    /// The sweep need not yield: it comes after the pause.
    fn checkpoint(&self) -> Result<(f64, Value)> {
        let how = SaveArgs::default().flag("--no-throttle");
        let said = self.lab.firn().checkpoint(VM, &self.image, &how)?;
        let pause = said.number("/report/pause/downtime_ms").context("no downtime is reported")?;
        Ok((pause, said.facts["report"].clone()))
    }

    /// What the hypervisor itself needs. Firn would take back a file that is left with it.
    fn floor(&mut self) -> Result<f64> {
        self.bare.prepare_save()?;
        let started = Instant::now();
        let saved = self.bare.stop_and_save_device_state();
        self.bare.cont()?;
        let pause_ms = ms(started.elapsed());
        saved?;
        self.bare.finish_save()?;
        Ok(pause_ms)
    }
}

/// Starts heartbeats, ahead of all else in the guest, and writers, and waits until memory is filled.
fn load(control: &mut Control, written_mib: u32) -> Result<()> {
    let beats = format!(
        "renice -n -20 -p $$ >/dev/null; exec firn-guest heartbeat --rate {BEATS_PER_S} --work-mib 0"
    );
    control.spawn("beats", &["sh", "-c", &beats])?;
    let writers = format!(
        "firn-guest writers --mib {written_mib} --compresses-to 10 --light --no-check --order random"
    );
    control.spawn("writers", &words(&writers))?;
    let said = control.wait_output("writers", "\"ready\":true", FILL)?;
    last_line(&said).map(drop)
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn figures(size: Size, report: &mut Report) {
    let name = size.name;
    for system in System::ALL {
        for (key, field) in [(system.pause_key(), "pause_ms"), (system.still_key(), "still_ms")] {
            percentiles(&format!("{key}.{name}"), measured(report, size, system, field), report);
        }
    }
    for (key, of, to) in [
        ("downtime_to_floor_p95", System::Firn.pause_key(), System::Floor.pause_key()),
        ("stood_still_to_floor_p95", System::Firn.still_key(), System::Floor.still_key()),
    ] {
        let p95 = |key: &str| report.value(&format!("{key}.{name}.p95")).unwrap_or(f64::NAN);
        report.number(format!("{key}.{name}"), p95(of) / p95(to));
    }
}

fn percentiles(key: &str, values: Vec<f64>, report: &mut Report) {
    match Sample::new(values) {
        Some(sample) => {
            report.number(format!("{key}.p50"), sample.p50());
            report.number(format!("{key}.p95"), sample.p95());
            report.number(format!("{key}.n"), sample.count() as f64);
        }
        None => ["p50", "p95"].iter().for_each(|which| {
            report.missing(format!("{key}.{which}"), "no pause could be told");
        }),
    }
}

fn measured(report: &Report, size: Size, system: System, field: &str) -> Vec<f64> {
    let is_it = |run: &&Value| run["size"] == size.name && run["system"] == system.name();
    report.repetitions().iter().filter(is_it).filter_map(|run| run[field].as_f64()).collect()
}

fn drawing(report: &Report) -> Result<String> {
    let p95 = |system: System| {
        let value = |size: Size| report.value(&format!("{}.{}.p95", system.pause_key(), size.name));
        (system.name().to_owned(), SIZES.map(|size| value(size).unwrap_or(f64::NAN)).into())
    };
    let plot = BarPlot {
        title: "Pause of a write-heavy guest by RAM size, 95th percentile".into(),
        y: "milliseconds".into(),
        groups: SIZES.map(|size| size.name.to_owned()).into(),
        series: System::ALL.map(p95).into(),
    };
    plot.svg().context("the pauses")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(floor_still_ms: Option<f64>) -> Report {
        let mut report = Report::new("halite-save", true);
        for pause_ms in [3.0, 1.0, 2.0] {
            report.repetition(json!({ "system": "firn", "size": SIZES[0].name,
                "pause_ms": pause_ms, "still_ms": pause_ms / 2.0 }));
            report.repetition(json!({ "system": "floor", "size": SIZES[0].name,
                "pause_ms": 2.0 * pause_ms, "still_ms": floor_still_ms }));
        }
        figures(SIZES[0], &mut report);
        report
    }

    #[test]
    fn percentiles_of_both_are_compared() {
        let report = report(Some(1.5));
        assert_eq!(report.value("downtime_ms.256MiB.p50"), Some(2.0));
        assert_eq!(report.value("floor_ms.256MiB.p95"), Some(6.0));
        assert_eq!(report.value("downtime_to_floor_p95.256MiB"), Some(0.5));
        assert_eq!(report.value("stood_still_to_floor_p95.256MiB"), Some(1.0));
        assert!(report.is_complete());
    }

    #[test]
    fn a_clock_that_could_not_be_read_is_missing() {
        let json = report(None).json();
        assert!(json["floor_stood_still_ms.256MiB.p95"].is_null());
        assert!(json["stood_still_to_floor_p95.256MiB"].is_null());
        assert_eq!(json["downtime_to_floor_p95.256MiB"], 0.5);
    }
}
