//! Pauses of a guest under load: shared by `halite-save` and `cow-writers`.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use firn_vmm::QemuVm;
use serde_json::{Value, json};

use crate::experiments::synthetic::{last_line, split_words};
use crate::firn::SaveArgs;
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::Lab;
use crate::prober::GuestClock;
use crate::report::Report;
use crate::stats::Sample;

const VCPUS: u32 = 2;
/// How long a guest may take to boot.
const BOOT: Duration = Duration::from_secs(120);
/// How long a guest may take to fill its memory.
const FILL: Duration = Duration::from_secs(600);
/// Time between two pauses, so that neither affects the next.
const SETTLE: Duration = Duration::from_millis(300);
/// Heartbeats per second.
const BEATS_PER_S: u32 = 500;
/// Memory that the stall watch of each vCPU writes to, in MiB.
const STALL_MIB: u32 = 4;

/// A guest and its load.
#[derive(Clone, Debug)]
pub struct PauseCase {
    /// The case's name in keys.
    pub name: String,
    /// Its RAM.
    pub mib: u32,
    /// The load of its vCPUs.
    pub load: GuestLoad,
}

/// The load of a guest's vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestLoad {
    /// Only heartbeats.
    Idle,
    /// Each writes random pages at a fixed rate.
    Paced {
        /// The memory that they write to, in MiB.
        mib: u32,
        /// Pages per second, of each.
        rate: u32,
    },
    /// They write random pages as fast as they can.
    FlatOut {
        /// The memory that they write to, in MiB.
        mib: u32,
    },
}

/// The system that pauses the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseSystem {
    /// Firn, by a checkpoint.
    Firn,
    /// Nothing but stop, device state and cont.
    Floor,
}

impl PauseSystem {
    /// Both systems.
    pub const ALL: [Self; 2] = [Self::Firn, Self::Floor];

    /// The system's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Firn => "firn",
            Self::Floor => "floor",
        }
    }
}

/// A running guest under load.
pub struct LoadedGuest<'a> {
    lab: &'a Lab,
    case: PauseCase,
    vm: String,
    image: PathBuf,
    clock: GuestClock,
    /// The experiment's own monitor connection.
    bare: QemuVm,
}

impl<'a> LoadedGuest<'a> {
    /// Boots the guest and puts it under load.
    pub fn boot_under_load(lab: &'a Lab, case: PauseCase) -> Result<Self> {
        let vm = case.name.clone();
        let file = |name: &str| lab.file(&format!("{name}.{vm}"));
        let [agent, beats, monitor] = ["agent", "beats", "monitor"].map(file);
        let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
            .memory_mib(case.mib)
            .vcpus(VCPUS)
            .with_console(&file("console"))
            .with_agent_socket(&agent)
            .with_heartbeat_socket(&beats)
            .add_args(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        lab.firn().run_vm(&vm, &args)?;
        let mut control = GuestControl::connect(&agent, BOOT)?;
        let clock = GuestClock::start(&beats)?;
        case.start_load(&mut control)?;
        let bare = QemuVm::connect(&monitor)?;
        lab.log_progress(&format!("{}: {}", case.name, case.load.describe_load()));
        std::thread::sleep(SETTLE);
        Ok(Self { lab, case, vm, image: lab.file("pause.firn"), clock, bare })
    }

    /// Stops the guest until [`Self::resume_guest`], so that others can be measured.
    pub fn stop_guest(&mut self) -> Result<()> {
        Ok(self.bare.stop()?)
    }

    /// Resumes the guest.
    pub fn resume_guest(&mut self) -> Result<()> {
        self.bare.cont()?;
        // The next measurement uses heartbeats of this much time before it.
        std::thread::sleep(2 * SETTLE);
        Ok(())
    }

    /// Measures one pause, and adds it to the report as a repetition.
    pub fn measure_pause(&mut self, system: PauseSystem, report: &mut Report) -> Result<()> {
        let before = Instant::now() - SETTLE;
        let (pause_ms, facts) = match system {
            PauseSystem::Firn => self.measure_checkpoint()?,
            PauseSystem::Floor => (self.measure_floor()?, Value::Null),
        };
        std::thread::sleep(SETTLE);
        let still_ms = self.clock.paused_since(before).map(to_ms);
        let stall_ms = self.clock.stalled_since(before).map(to_ms);
        let said = format!("{}: {} {pause_ms:.1} ms", self.case.name, system.name());
        let [pause, stall] = [still_ms, stall_ms].map(|ms| ms.unwrap_or(f64::NAN));
        self.lab
            .log_progress(&format!("{said}, guest's clock {pause:.1} ms, a vCPU {stall:.1} ms"));
        report.add_repetition(json!({ "system": system.name(), "case": self.case.name,
            "pause_ms": pause_ms, "still_ms": still_ms, "stall_ms": stall_ms, "facts": facts }));
        Ok(())
    }

    /// Ends the guest.
    pub fn end_guest(self) {
        self.lab.firn().stop(&self.vm);
    }

    fn measure_checkpoint(&self) -> Result<(f64, Value)> {
        let save_output =
            self.lab.firn().checkpoint(&self.vm, &self.image, &SaveArgs::default())?;
        let pause =
            save_output.number("/report/pause/downtime_ms").context("no downtime is reported")?;
        Ok((pause, save_output.facts["report"].clone()))
    }

    /// Measures the pause that the hypervisor itself needs. Takes back the file that is left with
    /// the hypervisor, because Firn would do so otherwise.
    fn measure_floor(&mut self) -> Result<f64> {
        self.bare.prepare_save()?;
        let saved = self.bare.stop_and_save_device_state();
        self.bare.cont()?;
        let pause = self.bare.last_pause();
        saved?;
        self.bare.finish_save()?;
        Ok(to_ms(pause.context("the hypervisor did not report that it stopped or resumed")?))
    }
}

impl PauseCase {
    /// Starts heartbeats and the stall watch of each vCPU, with priority over all else in the
    /// guest. Starts writers, and waits until they have filled memory.
    fn start_load(&self, control: &mut GuestControl) -> Result<()> {
        let beats = format!(
            "renice -n -20 -p $$ >/dev/null; exec firn-guest heartbeat --rate {BEATS_PER_S} --work-mib 0 \
             --stall-mib {STALL_MIB}"
        );
        control.spawn_job("beats", &["sh", "-c", &beats])?;
        let Some((mib, rate)) = self.load.writer_settings() else { return Ok(()) };
        let writers = format!(
            "firn-guest writers --mib {mib} --rate {rate} --compresses-to 10 --light --no-check --order random"
        );
        control.spawn_job("writers", &split_words(&writers))?;
        let output = control.wait_output("writers", "\"ready\":true", FILL)?;
        last_line(&output).map(drop)
    }
}

impl GuestLoad {
    /// How much memory is written, in MiB, and pages per second; 0 is as fast as possible.
    fn writer_settings(self) -> Option<(u32, u32)> {
        match self {
            Self::Idle => None,
            Self::Paced { mib, rate } => Some((mib, rate)),
            Self::FlatOut { mib } => Some((mib, 0)),
        }
    }

    /// Describes the load in words.
    pub fn describe_load(self) -> String {
        match self {
            Self::Idle => format!("{VCPUS} vCPUs are idle"),
            Self::Paced { mib, rate } => {
                format!("{VCPUS} vCPUs write {rate} pages a second each, in {mib} MiB at random")
            }
            Self::FlatOut { mib } => format!("{VCPUS} vCPUs write {mib} MiB at random, flat out"),
        }
    }
}

/// The values that were measured for one system in one case.
pub fn measured_values(report: &Report, case: &str, system: PauseSystem, field: &str) -> Vec<f64> {
    let is_it = |run: &&Value| run["case"] == case && run["system"] == system.name();
    report.repetitions().iter().filter(is_it).filter_map(|run| run[field].as_f64()).collect()
}

/// Adds percentiles under `KEY.p50` and so on, and the number of values under `KEY.n`.
pub fn add_percentiles(key: &str, values: Vec<f64>, of: &[(&str, f64)], report: &mut Report) {
    let Some(sample) = Sample::new(values) else {
        for (name, _) in of {
            report.add_missing(format!("{key}.{name}"), "no pause could be measured");
        }
        return;
    };
    for (name, percent) in of {
        report.add_number(format!("{key}.{name}"), sample.percentile(*percent));
    }
    report.add_number(format!("{key}.n"), sample.count() as f64);
}

fn to_ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
