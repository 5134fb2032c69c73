//! `disk-pauses`: the pause of a checkpoint while the guest writes to two disks, against what the hypervisor itself needs.
//!
//! **What varies**: the system that pauses the guest: each strategy of Firn (`firn-STRATEGY`), and the *floor*: stop, device
//! state and cont on a monitor connection of the experiment's own. **What is held equal**: all systems take turns on one
//! guest, which was started by hand, has shared memory, a raw and a qcow2 disk, and writes to both all the time with direct I/O. Firn
//! stays attached, and copies the disks beside the image by backup jobs.
//!
//! **What is measured**: `pause_ms`: the time between the hypervisor's events `STOP` and `RESUME`, as Firn reports it and as
//! the experiment reads it for the floor. `round_pause_ms`: the pauses of pre-copy's rounds, each a value of its own. The
//! bar is the ratio of 95th percentiles, `to_floor_p95.STRATEGY`. Between turns the guest writes for [`SETTLE`].

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use firn_vmm::QemuVm;
use serde_json::json;

use crate::experiments::synthetic::split_words;
use crate::firn::SaveArgs;
use crate::guest::{
    GuestControl, GuestImage, JobState, QemuArgs, UnmanagedGuest, VirtioDisk, accel,
};
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;
use crate::stats::Sample;

const VM: &str = "disks";
const MIB: u32 = 256;
const DISK_MIB: u64 = 64;
/// Blocks of 4 KiB that the guest writes to each disk in a second.
const WRITES_PER_S: u32 = 200;
const BOOT: Duration = Duration::from_secs(120);
/// Time between two pauses, so that each finds disks that have been written to.
const SETTLE: Duration = Duration::from_millis(700);
/// Pauses of each kind, in quick and in full runs.
const ROUNDS: (usize, usize) = (5, 40);

const STRATEGIES: [&str; 4] = ["trace", "cow", "pre-copy", "stop"];

/// The system that pauses the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PausingSystem {
    Floor,
    Firn(&'static str),
}

impl PausingSystem {
    fn name(self) -> String {
        match self {
            Self::Floor => "floor".to_owned(),
            Self::Firn(strategy) => format!("firn-{strategy}"),
        }
    }
}

/// Runs it.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("disk-pauses");
    let mut bench = DiskPauseBench::start_guest(lab)?;
    let systems: Vec<PausingSystem> =
        [PausingSystem::Floor].into_iter().chain(STRATEGIES.map(PausingSystem::Firn)).collect();
    run_interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &systems, |_, &system| {
        bench.measure_pause(system, &mut report)
    })?;
    bench.check_disks()?;
    lab.firn().detach(VM)?;
    add_numbers(&systems, &mut report);
    Ok(report)
}

/// The guest, and the experiment's own monitor connection.
struct DiskPauseBench<'a> {
    lab: &'a Lab,
    _machine: UnmanagedGuest,
    control: GuestControl,
    bare: QemuVm,
}

impl<'a> DiskPauseBench<'a> {
    fn start_guest(lab: &'a Lab) -> Result<Self> {
        let [bare, monitor] = ["bare.qmp", "firn.qmp"].map(|name| lab.file(name));
        let qmp = |path: &PathBuf| format!("unix:{},server=on,wait=off", path.display());
        let (agent, console) = (lab.file("agent"), lab.file("console"));
        let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
            .memory_mib(MIB)
            .vcpus(2)
            .with_console(&console)
            .with_agent_socket(&agent)
            .add_args(&["-qmp", &qmp(&bare), "-qmp", &qmp(&monitor)])
            // Strategy `trace` needs shared memory.
            .add_args(&["-object", &shared_memory(), "-machine", "memory-backend=ram"]);
        let disks = [("disk0.raw", "raw"), ("disk1.qcow2", "qcow2")];
        let args = disks.iter().try_fold(args, |args, (name, format)| {
            let file = lab.file(name);
            create_disk(&file, format)?;
            Ok::<_, anyhow::Error>(args.add_disk(VirtioDisk { file, format, read_only: false }))
        })?;
        let mut machine = UnmanagedGuest::start(args)?;
        machine.wait_ready(BOOT)?;
        let mut control = GuestControl::connect(&agent, BOOT)?;
        for (number, device) in ["/dev/vda", "/dev/vdb"].iter().enumerate() {
            let write =
                format!("firn-guest disk-dma write --rate {WRITES_PER_S} --device {device}");
            control.spawn_job(&job_name(number), &split_words(&write))?;
            control.wait_output(&job_name(number), "progress", BOOT)?;
        }
        let pid = machine.pid().to_string();
        lab.firn().attach(VM, &["--pid", &pid, "--qmp", &monitor.display().to_string()])?;
        std::thread::sleep(SETTLE);
        Ok(Self { lab, _machine: machine, control, bare: QemuVm::connect(&bare)? })
    }

    /// One pause, which becomes a repetition of the report.
    fn measure_pause(&mut self, system: PausingSystem, report: &mut Report) -> Result<()> {
        let (pause_ms, rounds_ms) = match system {
            PausingSystem::Floor => (self.measure_floor()?, Vec::new()),
            PausingSystem::Firn(strategy) => self.checkpoint_vm(strategy)?,
        };
        std::thread::sleep(SETTLE);
        self.lab
            .log_progress(&format!("{}: {pause_ms:.1} ms, rounds {rounds_ms:?}", system.name()));
        report.add_repetition(
            json!({ "system": system.name(), "pause_ms": pause_ms, "rounds_ms": rounds_ms }),
        );
        Ok(())
    }

    /// The time that the hypervisor itself needs.
    fn measure_floor(&mut self) -> Result<f64> {
        self.bare.prepare_save()?;
        let saved = self.bare.stop_and_save_device_state();
        self.bare.cont()?;
        let pause = self.bare.last_pause();
        saved?;
        self.bare.finish_save()?;
        let pause = pause.context("the hypervisor reported no STOP or no RESUME")?;
        Ok(pause.as_secs_f64() * 1e3)
    }

    fn checkpoint_vm(&self, strategy: &str) -> Result<(f64, Vec<f64>)> {
        let how = SaveArgs::default().with_option("--strategy", strategy);
        let said = self.lab.firn().checkpoint(VM, &self.lab.file("pause.firn"), &how)?;
        let pause = said.number("/report/pause/downtime_ms").context("no pause is reported")?;
        let rounds = said.facts.pointer("/report/round_pauses_ms").cloned();
        Ok((pause, rounds.map(serde_json::from_value).transpose()?.unwrap_or_default()))
    }

    /// The guest has found on its disks what it wrote.
    fn check_disks(&mut self) -> Result<()> {
        for number in 0..2 {
            let JobState::Running { stdout, .. } = self.control.poll_job(&job_name(number))? else {
                bail!("the program that writes to disk {number} has ended");
            };
            let last = stdout.lines().rfind(|line| line.contains("progress"));
            let last = last.unwrap_or_default().to_owned();
            let written: serde_json::Value = serde_json::from_str(&last).context(last)?;
            ensure!(written["wrong"] == 0, "disk {number}: {written}");
        }
        Ok(())
    }
}

fn shared_memory() -> String {
    format!("memory-backend-memfd,id=ram,share=on,size={MIB}M")
}

fn job_name(number: usize) -> String {
    format!("disk{number}")
}

fn create_disk(file: &std::path::Path, format: &str) -> Result<()> {
    let size = format!("{DISK_MIB}M");
    let mut create = std::process::Command::new("qemu-img");
    let status = create.args(["create", "-q", "-f", format]).arg(file).arg(size).status()?;
    ensure!(status.success(), "qemu-img cannot create {}", file.display());
    Ok(())
}

fn add_numbers(systems: &[PausingSystem], report: &mut Report) {
    for system in systems {
        let name = system.name();
        let pauses = measured_values(report, &name, "pause_ms");
        add_percentiles(&format!("pause_ms.{name}"), pauses, report);
    }
    let rounds = measured_values(report, "firn-pre-copy", "rounds_ms");
    add_percentiles("round_pause_ms.firn-pre-copy", rounds, report);
    let p95 =
        |report: &Report, key: &str| report.figure_value(&format!("{key}.p95")).unwrap_or(f64::NAN);
    let floor = p95(report, "pause_ms.floor");
    for strategy in STRATEGIES {
        let ratio = p95(report, &format!("pause_ms.firn-{strategy}")) / floor;
        report.add_number(format!("to_floor_p95.{strategy}"), ratio);
    }
    let ratio = p95(report, "round_pause_ms.firn-pre-copy") / floor;
    report.add_number("to_floor_p95.pre-copy-rounds".to_owned(), ratio);
}

/// The values of a field, which is a number or a list of numbers.
fn measured_values(report: &Report, name: &str, field: &str) -> Vec<f64> {
    let is_it = |run: &&serde_json::Value| run["system"] == name;
    let values = |run: &serde_json::Value| match run[field].as_array() {
        Some(list) => list.iter().filter_map(serde_json::Value::as_f64).collect(),
        None => run[field].as_f64().into_iter().collect::<Vec<_>>(),
    };
    report.repetitions().iter().filter(is_it).flat_map(values).collect()
}

fn add_percentiles(key: &str, values: Vec<f64>, report: &mut Report) {
    match Sample::new(values) {
        Some(sample) => {
            report.add_number(format!("{key}.p50"), sample.p50());
            report.add_number(format!("{key}.p95"), sample.p95());
            report.add_number(format!("{key}.n"), sample.count() as f64);
        }
        None => report.add_missing(format!("{key}.p95"), "no pause was reported"),
    }
}
