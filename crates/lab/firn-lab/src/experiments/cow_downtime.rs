//! `cow-downtime`: the pause of an idle guest for a checkpoint, by the system that saves it.
//!
//! Reproduces Figure 2 of Sun and Blough ("Fast, Lightweight Virtual Machine Checkpointing"): an
//! idle guest of 256 MB.
//!
//! **What varies**: the system: each strategy of Firn (`firn-STRATEGY`, and `firn-default` without
//! a strategy option), and QEMU's methods: stop-and-copy (`qemu-stop`), live migration into a file
//! (`qemu-file`), its background snapshot; and the *floor*: nothing but stop, device state and
//! cont, on a monitor connection. **What is held equal**: all systems save the same guest
//! alternately. It was started by hand and has private memory; Firn attaches for its save and
//! detaches afterwards. `firn-shared` is Firn's default for a guest that `firn run` started.
//!
//! **What is measured**: `downtime_ms`: as Firn reports it, and as QEMU does (`query-migrate`),
//! which does not include the time that QEMU's user needs to resume the guest. Firn's and the
//! floor's are the time between the hypervisor's events `STOP` and `RESUME`; that of `qemu-stop` is
//! from the stop command until QEMU has resumed the guest. `stood_still_ms`: for how long the
//! guest's own clock stopped, by heartbeats. Of Firn's two defaults the worse counts
//! (`default_to_best_peer_p95` by the reported pause, `default_to_best_peer_stood_still_p95` by the
//! guest's clock). The rows `typical` are of a VM as managers of VMs make it, of 256 MiB as well
//! ([`typical`]; `--only typical`).

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use firn_report::plot::BarPlot;
use firn_vmm::QemuVm;
use serde_json::{Value, json};

use crate::experiments::synthetic::split_words;
use crate::experiments::typical;
use crate::firn::SaveArgs;
use crate::guest::{GuestControl, GuestImage, QemuArgs, UnmanagedGuest, accel};
use crate::lab::{Lab, run_interleaved};
use crate::peer::{self, QemuSaveMethod};
use crate::prober::GuestClock;
use crate::report::Report;
use crate::stats::Sample;

const VM: &str = "idle";
const MIB: u32 = 256;
const BOOT: Duration = Duration::from_secs(120);
/// Time between two pauses, so that neither affects the next.
const SETTLE: Duration = Duration::from_millis(300);
const BEATS_PER_S: u32 = 500;
/// Pauses of each kind, in quick and in full runs.
const ROUNDS: (usize, usize) = (5, 40);

/// The system that saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DowntimeSystem {
    Floor,
    QemuStop,
    Qemu(QemuSaveMethod),
    /// With a strategy, or with the default.
    Firn(Option<&'static str>),
    FirnShared,
}

impl DowntimeSystem {
    fn name(self) -> String {
        match self {
            Self::Floor => "floor".to_owned(),
            Self::QemuStop => "qemu-stop".to_owned(),
            Self::Qemu(method) => method.name().to_owned(),
            Self::Firn(strategy) => format!("firn-{}", strategy.unwrap_or("default")),
            Self::FirnShared => "firn-shared".to_owned(),
        }
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("cow-downtime");
    let rounds = lab.extent.runs(ROUNDS.0, ROUNDS.1);
    let (has_typical, is_alone) = typical::is_wanted(&lab.extent);
    if has_typical {
        typical::measure_typical(lab, &[MIB], rounds, &mut report)?;
    }
    if is_alone {
        return Ok(report);
    }
    let mut bench = DowntimeBench::start_guests(lab)?;
    let systems = bench.list_systems(&mut report)?;
    run_interleaved(rounds, &systems, |_, &system| bench.measure_pause(system, &mut report))?;
    lab.firn().stop(VM);
    add_numbers(&systems, &mut report);
    let drawing = draw_plot(&systems, &report)?;
    report.add_drawing("cow-downtime", drawing);
    Ok(report)
}

/// The clock of an idle guest.
struct IdleGuest {
    clock: GuestClock,
}

impl IdleGuest {
    fn guest_args(lab: &Lab, name: &str) -> Result<QemuArgs> {
        Ok(QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
            .memory_mib(MIB)
            .vcpus(1)
            .with_console(&lab.file(&format!("{name}.console")))
            .with_agent_socket(&lab.file(&format!("{name}.agent")))
            .with_heartbeat_socket(&lab.file(&format!("{name}.beats"))))
    }

    fn start_heartbeats(lab: &Lab, name: &str) -> Result<Self> {
        let mut control = GuestControl::connect(&lab.file(&format!("{name}.agent")), BOOT)?;
        let clock = GuestClock::start(&lab.file(&format!("{name}.beats")))?;
        let beats = format!("firn-guest heartbeat --rate {BEATS_PER_S} --work-mib 0");
        control.spawn_job("beats", &split_words(&beats))?;
        std::thread::sleep(SETTLE);
        Ok(Self { clock })
    }
}

/// Two guests: one started by hand, one by Firn.
struct DowntimeBench<'a> {
    lab: &'a Lab,
    plain: IdleGuest,
    machine: UnmanagedGuest,
    /// The experiment's own monitor connection, and the monitor that Firn is given.
    bare: QemuVm,
    monitor: PathBuf,
    shared: IdleGuest,
}

impl<'a> DowntimeBench<'a> {
    fn start_guests(lab: &'a Lab) -> Result<Self> {
        let [bare, monitor] = ["bare.qmp", "firn.qmp"].map(|name| lab.file(name));
        let qmp = |path: &PathBuf| format!("unix:{},server=on,wait=off", path.display());
        let args = IdleGuest::guest_args(lab, "plain")?.add_args(&[
            "-qmp",
            &qmp(&bare),
            "-qmp",
            &qmp(&monitor),
        ]);
        let mut machine = UnmanagedGuest::start(args)?;
        machine.wait_ready(BOOT)?;
        let plain = IdleGuest::start_heartbeats(lab, "plain")?;
        lab.firn().run_vm(VM, &IdleGuest::guest_args(lab, "shared")?)?;
        let shared = IdleGuest::start_heartbeats(lab, "shared")?;
        Ok(Self { lab, plain, machine, bare: QemuVm::connect(&bare)?, monitor, shared })
    }

    fn list_systems(&mut self, report: &mut Report) -> Result<Vec<DowntimeSystem>> {
        let strategies = ["stop", "pre-copy", "cow"].map(|it| DowntimeSystem::Firn(Some(it)));
        let mut systems = vec![DowntimeSystem::Floor, DowntimeSystem::QemuStop];
        for method in QemuSaveMethod::ALL {
            match method.is_supported_by(self.bare.qmp())? {
                true => systems.push(DowntimeSystem::Qemu(method)),
                false => report.add_remark(format!("this QEMU has no {method}")),
            }
        }
        systems.extend(strategies);
        systems.extend([DowntimeSystem::Firn(None), DowntimeSystem::FirnShared]);
        Ok(systems)
    }

    fn measure_pause(&mut self, system: DowntimeSystem, report: &mut Report) -> Result<()> {
        let before = Instant::now() - SETTLE;
        let pause_ms = self.save_by(system).with_context(|| system.name())?;
        std::thread::sleep(SETTLE);
        let guest = if system == DowntimeSystem::FirnShared { &self.shared } else { &self.plain };
        let still_ms = guest.clock.paused_since(before).map(to_ms);
        let name = system.name();
        let clock = still_ms.unwrap_or(f64::NAN);
        self.lab.log_progress(&format!("{name}: {pause_ms:.1} ms, guest's clock {clock:.1} ms"));
        report
            .add_repetition(json!({ "system": name, "pause_ms": pause_ms, "still_ms": still_ms }));
        Ok(())
    }

    fn save_by(&mut self, system: DowntimeSystem) -> Result<f64> {
        let file = self.lab.file("image");
        match system {
            DowntimeSystem::Floor => self.measure_floor(),
            DowntimeSystem::QemuStop => self.stop_and_migrate(&file),
            DowntimeSystem::Qemu(method) => {
                Ok(peer::save_vm(self.bare.qmp(), method, &file)?.downtime_ms)
            }
            DowntimeSystem::Firn(strategy) => {
                let how = SaveArgs::default();
                let how = strategy.map_or(how.clone(), |it| how.with_option("--strategy", it));
                self.attach_and_save("plain", &how)
            }
            DowntimeSystem::FirnShared => self.checkpoint_vm(VM, &SaveArgs::default()),
        }
    }

    /// Measures the pause that the hypervisor itself needs.
    fn measure_floor(&mut self) -> Result<f64> {
        self.bare.prepare_save()?;
        let saved = self.bare.stop_and_save_device_state();
        self.bare.cont()?;
        let pause = self.bare.last_pause();
        saved?;
        self.bare.finish_save()?;
        Ok(to_ms(pause.context("the hypervisor did not report that it stopped or resumed")?))
    }

    fn stop_and_migrate(&mut self, file: &std::path::Path) -> Result<f64> {
        let started = Instant::now();
        self.bare.stop()?;
        // Saving by QEMU resumes the guest.
        peer::save_vm(self.bare.qmp(), QemuSaveMethod::File, file)?;
        Ok(to_ms(started.elapsed()))
    }

    fn attach_and_save(&self, name: &str, how: &SaveArgs) -> Result<f64> {
        let pid = self.machine.pid().to_string();
        let monitor = self.monitor.display().to_string();
        self.lab.firn().attach(name, &["--pid", &pid, "--qmp", &monitor])?;
        let pause_ms = self.checkpoint_vm(name, how);
        self.lab.firn().detach(name)?;
        pause_ms
    }

    fn checkpoint_vm(&self, name: &str, how: &SaveArgs) -> Result<f64> {
        let save_output = self.lab.firn().checkpoint(name, &self.lab.file("pause.firn"), how)?;
        save_output.number("/report/pause/downtime_ms").context("no downtime is reported")
    }
}

fn to_ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn add_numbers(systems: &[DowntimeSystem], report: &mut Report) {
    for system in systems {
        let name = system.name();
        let key = |what: &str| match system {
            DowntimeSystem::Floor => format!("floor_{what}"),
            _ => format!("{what}.{name}"),
        };
        let pause = if *system == DowntimeSystem::Floor { "ms" } else { "downtime_ms" };
        for (key, field) in [(key(pause), "pause_ms"), (key("stood_still_ms"), "still_ms")] {
            add_percentiles(&key, measured_values(report, &name, field), report);
        }
    }
    let p95 = |key: &str| report.figure_value(&format!("{key}.p95"));
    let is_peer = |system: &&DowntimeSystem| {
        matches!(system, DowntimeSystem::QemuStop | DowntimeSystem::Qemu(_))
    };
    let peers: Vec<String> = systems.iter().filter(is_peer).map(|peer| peer.name()).collect();
    let against = |what: &str, floor: &str| {
        let of = |name: &str| p95(&format!("{what}.{name}")).unwrap_or(f64::NAN);
        let default = of("firn-default").max(of("firn-shared"));
        let best = peers.iter().map(|peer| of(peer)).fold(f64::INFINITY, f64::min);
        (default / best, default / p95(floor).unwrap_or(f64::NAN))
    };
    let reported = against("downtime_ms", "floor_ms");
    let stood_still = against("stood_still_ms", "floor_stood_still_ms");
    for (key, (to_best_peer, to_floor)) in [("", reported), ("stood_still_", stood_still)] {
        report.add_number(format!("default_to_best_peer_{key}p95"), to_best_peer);
        report.add_number(format!("default_to_floor_{key}p95"), to_floor);
    }
}

fn add_percentiles(key: &str, values: Vec<f64>, report: &mut Report) {
    match Sample::new(values) {
        Some(sample) => {
            report.add_number(format!("{key}.p50"), sample.p50());
            report.add_number(format!("{key}.p95"), sample.p95());
            report.add_number(format!("{key}.n"), sample.count() as f64);
        }
        None => ["p50", "p95"].iter().for_each(|which| {
            report.add_missing(format!("{key}.{which}"), "no pause could be measured");
        }),
    }
}

fn measured_values(report: &Report, name: &str, field: &str) -> Vec<f64> {
    let is_it = |run: &&Value| run["system"] == name;
    report.repetitions().iter().filter(is_it).filter_map(|run| run[field].as_f64()).collect()
}

fn draw_plot(systems: &[DowntimeSystem], report: &Report) -> Result<String> {
    let names: Vec<String> = systems.iter().map(|system| system.name()).collect();
    let series = |title: &str, field: &str| {
        let p95 =
            |name: &String| Sample::new(measured_values(report, name, field)).map(|it| it.p95());
        (title.to_owned(), names.iter().map(|name| p95(name).unwrap_or(0.0)).collect())
    };
    let plot = BarPlot {
        title: "Pause of an idle guest of 256 MB by who saves it, 95th percentile".into(),
        y: "milliseconds".into(),
        series: vec![series("as reported", "pause_ms"), series("by the guest's clock", "still_ms")],
        groups: names,
    };
    plot.to_svg().context("the pauses")
}
