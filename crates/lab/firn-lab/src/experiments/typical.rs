//! Rows `typical` of `cow-downtime` and `cow-writers`: the pause of a VM as libvirt and Proxmox VE make
//! it.
//!
//! A machine `q35` with modern virtio devices, a VGA with 16 MiB of video memory, a balloon, a USB
//! tablet, a qcow2 and a raw disk. It was started by hand, so its memory is private, and Firn attaches
//! to it. During each pause the guest writes to both disks and to memory.
//!
//! **What varies**: RAM, and the system that pauses the guest, alternately: Firn's default checkpoint
//! (`firn`), nothing but stop, device state and cont (`floor`), and QEMU's own methods.
//!
//! **What is measured**, per size: `typical.SIZE.SYSTEM.p50`, `.p95`: the pause in milliseconds, Firn's
//! and the floor's between the hypervisor's events `STOP` and `RESUME`, that of QEMU's methods as QEMU
//! reports it (for a snapshot: between these events). `typical.SIZE.firn.PART.p50`: the parts of
//! Firn's pause. The worst size counts in `typical.pause_ratio_p95` (Firn to floor),
//! `typical.pause_ratio_p50`, and `typical.qemu_ratio` (Firn's 95th percentile to that of QEMU's best
//! method). `typical.flatness_p50` and `typical.flatness_p95` are Firn's longest pause of all sizes to
//! its shortest.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use firn_vmm::QemuVm;
use serde_json::{Value, json};

use crate::experiments::pauses::add_percentiles;
use crate::experiments::synthetic::split_words;
use crate::firn::SaveArgs;
use crate::guest::{GuestControl, GuestImage, QemuArgs, UnmanagedGuest, VirtioDisk, accel};
use crate::lab::{ExperimentOptions, Lab, run_interleaved, wait_for};
use crate::peer::{self, QemuSaveMethod};
use crate::report::Report;
use crate::stats::Sample;

/// The word that selects these rows (`--only`), and the beginning of their keys.
const WORD: &str = "typical";
const BOOT: Duration = Duration::from_secs(180);
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(300);
/// Time between two pauses, in which the guest writes to its disks.
const SETTLE: Duration = Duration::from_millis(500);
const DISK_MIB: u32 = 32;
/// The tag of QEMU's snapshot, and its job.
const SNAPSHOT: &str = "by-qemu";
const PERCENTILES: [(&str, f64); 2] = [("p50", 50.0), ("p95", 95.0)];
/// The parts of Firn's pause.
const PARTS: [&str; 4] = ["device_state_ms", "aux_ms", "protect_ms", "cont_ms"];
/// Each of QEMU's methods is measured once in this many rounds: most of them take seconds.
const ROUNDS_PER_PEER: usize = 3;

/// The devices that every manager of VMs adds. Disks are added apart.
const DEVICES: &str = "-rtc base=utc,driftfix=slew \
    -device pcie-root-port,port=16,chassis=1,id=pci.1,bus=pcie.0,multifunction=on,addr=0x10 \
    -device pcie-root-port,port=17,chassis=2,id=pci.2,bus=pcie.0,addr=0x10.0x1 \
    -device pcie-root-port,port=18,chassis=3,id=pci.3,bus=pcie.0,addr=0x10.0x2 \
    -device qemu-xhci,p2=15,p3=15,id=usb,bus=pci.2 -device usb-tablet,id=input0,bus=usb.0,port=1 \
    -netdev user,id=hostnet0 -device virtio-net-pci,netdev=hostnet0,id=net0,bus=pci.1 \
    -device VGA,id=video0,vgamem_mb=16,bus=pcie.0,addr=0x11 \
    -device virtio-balloon-pci,id=balloon0,bus=pci.3";

/// Whether the user wants these rows, and whether they want no others.
pub(super) fn is_wanted(extent: &ExperimentOptions) -> (bool, bool) {
    let is_named = extent.only.iter().any(|word| word == WORD);
    (is_named || extent.only.is_empty(), is_named && extent.only.len() == 1)
}

/// The system that pauses the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TypicalSystem {
    Floor,
    Firn,
    Qemu(QemuSaveMethod),
    /// QEMU's snapshot in the qcow2 disk (`snapshot-save`).
    Snapshot,
}

impl TypicalSystem {
    fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Firn => "firn",
            Self::Qemu(method) => method.name(),
            Self::Snapshot => "qemu-snapshot",
        }
    }

    fn is_peer(self) -> bool {
        matches!(self, Self::Qemu(_) | Self::Snapshot)
    }
}

/// Measures VMs with these sizes of RAM, in MiB, and adds their figures.
pub(super) fn measure_typical(
    lab: &Lab,
    sizes: &[u32],
    rounds: usize,
    report: &mut Report,
) -> Result<()> {
    let mut guests = Vec::new();
    for &mib in sizes {
        let mut guest = TypicalGuest::boot(lab, mib)?;
        guest.bare.stop()?;
        guests.push(guest);
    }
    let systems = list_systems(&mut guests[0], report)?;
    let numbers: Vec<usize> = (0..guests.len()).collect();
    run_interleaved(rounds, &numbers, |round, &number| {
        let guest = &mut guests[number];
        guest.bare.cont()?;
        std::thread::sleep(SETTLE);
        let due = |system: &&TypicalSystem| !system.is_peer() || round % ROUNDS_PER_PEER == 0;
        systems.iter().filter(due).try_for_each(|&system| guest.measure_pause(system, report))?;
        Ok(guest.bare.stop()?)
    })?;
    guests.iter_mut().try_for_each(TypicalGuest::check_guest)?;
    add_numbers(sizes, &systems, report);
    Ok(())
}

/// The systems that work on such a VM: each of QEMU's methods is tried once.
fn list_systems(guest: &mut TypicalGuest<'_>, report: &mut Report) -> Result<Vec<TypicalSystem>> {
    let mut systems = vec![TypicalSystem::Floor, TypicalSystem::Firn];
    guest.bare.cont()?;
    let peers = QemuSaveMethod::ALL.map(TypicalSystem::Qemu).into_iter();
    for peer in peers.chain([TypicalSystem::Snapshot]) {
        match guest.pause_by(peer) {
            Ok(_) => systems.push(peer),
            Err(error) => {
                guest.bare.cont()?;
                report.add_remark(format!("typical: no {}: {error:#}", peer.name()));
            }
        }
    }
    guest.bare.stop()?;
    Ok(systems)
}

/// A VM with its programs, and the experiment's own monitor connection.
struct TypicalGuest<'a> {
    lab: &'a Lab,
    mib: u32,
    _machine: UnmanagedGuest,
    control: GuestControl,
    bare: QemuVm,
}

impl<'a> TypicalGuest<'a> {
    fn boot(lab: &'a Lab, mib: u32) -> Result<Self> {
        let file = |name: &str| lab.file(&format!("{WORD}-{mib}.{name}"));
        let [bare, monitor, agent] = ["bare", "monitor", "agent"].map(file);
        let qmp = |path: &Path| format!("unix:{},server=on,wait=off", path.display());
        let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
            .memory_mib(mib)
            .vcpus(2)
            .append_kernel_arg("no_timer_check")
            .with_console(&file("console"))
            .with_agent_socket(&agent)
            .add_args(&split_words(DEVICES))
            .add_args(&["-qmp", &qmp(&bare), "-qmp", &qmp(&monitor)])
            .add_disk(create_disk(file("disk0"), "qcow2")?)
            .add_disk(create_disk(file("disk1"), "raw")?);
        let mut machine = UnmanagedGuest::start(args)?;
        machine.wait_ready(BOOT)?;
        let mut control = GuestControl::connect(&agent, BOOT)?;
        start_load(&mut control)?;
        let (pid, monitor) = (machine.pid().to_string(), monitor.display().to_string());
        lab.firn().attach(&vm_name(mib), &["--pid", &pid, "--qmp", &monitor])?;
        lab.log_progress(&format!("typical: a VM of {mib} MiB runs"));
        Ok(Self { lab, mib, _machine: machine, control, bare: QemuVm::connect(&bare)? })
    }

    fn measure_pause(&mut self, system: TypicalSystem, report: &mut Report) -> Result<()> {
        let (pause_ms, parts) = self.pause_by(system).with_context(|| system.name())?;
        std::thread::sleep(SETTLE);
        let (mib, name) = (self.mib, system.name());
        self.lab.log_progress(&format!("typical, {mib} MiB: {name} {pause_ms:.2} ms {parts}"));
        report.add_repetition(json!({ "row": WORD, "mib": mib, "by": name,
            "pause_ms": pause_ms, "parts": parts }));
        Ok(())
    }

    /// Pauses the VM, and returns for how long; with the parts of Firn's pause.
    fn pause_by(&mut self, system: TypicalSystem) -> Result<(f64, Value)> {
        let pause_ms = match system {
            TypicalSystem::Floor => self.measure_floor()?,
            TypicalSystem::Firn => return self.measure_checkpoint(),
            TypicalSystem::Snapshot => self.measure_snapshot()?,
            TypicalSystem::Qemu(method) => {
                ensure!(method.is_supported_by(self.bare.qmp())?, "this QEMU has none");
                let file = self.lab.file("typical.state");
                peer::save_vm(self.bare.qmp(), method, &file)?.downtime_ms
            }
        };
        Ok((pause_ms, Value::Null))
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

    fn measure_checkpoint(&self) -> Result<(f64, Value)> {
        let image = self.lab.file("typical.firn");
        let saved = self.lab.firn().checkpoint(&vm_name(self.mib), &image, &SaveArgs::default())?;
        let pause = saved.facts.pointer("/report/pause").context("no pause is reported")?.clone();
        Ok((pause["downtime_ms"].as_f64().context("no downtime is reported")?, pause))
    }

    /// `savevm` refuses a VM with a raw disk. A snapshot with only the qcow2 disk lacks the raw one.
    fn measure_snapshot(&mut self) -> Result<f64> {
        let node = self.node_of_qcow2()?;
        let snapshot = json!({ "job-id": SNAPSHOT, "tag": SNAPSHOT, "devices": [node] });
        let mut save = snapshot.clone();
        save["vmstate"] = json!(node);
        self.run_job("snapshot-save", save)?;
        let pause = self.bare.last_pause().context("the VM was not paused")?;
        self.run_job("snapshot-delete", snapshot)?;
        Ok(to_ms(pause))
    }

    fn node_of_qcow2(&mut self) -> Result<String> {
        let disks: Value = self.bare.qmp().query("query-block")?;
        let mut nodes = disks.as_array().into_iter().flatten().map(|disk| &disk["inserted"]);
        let node = nodes.find(|node| node["drv"] == "qcow2").context("no disk is qcow2")?;
        Ok(node["node-name"].as_str().context("the disk has no node")?.to_owned())
    }

    fn run_job(&mut self, command: &str, arguments: Value) -> Result<()> {
        self.bare.qmp().execute(command, arguments)?;
        let job = wait_for(command, SNAPSHOT_TIMEOUT, || {
            let jobs: Value = self.bare.qmp().query("query-jobs")?;
            let mut jobs = jobs.as_array().cloned().unwrap_or_default().into_iter();
            Ok(jobs.find(|job| job["id"] == SNAPSHOT && job["status"] == "concluded"))
        })?;
        self.bare.qmp().execute("job-dismiss", json!({ "id": SNAPSHOT }))?;
        ensure!(job["error"].is_null(), "{command}: {}", job["error"]);
        Ok(())
    }

    /// The guest has found its memory and its disks as it wrote them.
    fn check_guest(&mut self) -> Result<()> {
        use crate::experiments::exactness::trial::{count_wrong_pages, disk_report};
        self.bare.cont()?;
        let mut wrong = count_wrong_pages(&mut self.control)?;
        for disk in DISKS {
            wrong += disk_report(&mut self.control, disk)?["wrong"].as_u64().unwrap_or(0);
        }
        ensure!(wrong == 0, "the guest of {} MiB found {wrong} pages wrong", self.mib);
        self.lab.firn().detach(&vm_name(self.mib))?;
        self.bare.stop()?;
        Ok(())
    }
}

/// The programs that write to the disks.
const DISKS: [&str; 2] = ["vda", "vdb"];

fn start_load(control: &mut GuestControl) -> Result<()> {
    for disk in DISKS {
        let line = format!(
            "firn-guest disk-dma write --mib 16 --block-kib 16 --rate 50 --device /dev/{disk}"
        );
        control.spawn_job(disk, &split_words(&line))?;
        control.wait_output(disk, "\"ready\":true", BOOT)?;
    }
    let writers = "firn-guest writers --mib 48 --rate 500 --compresses-to 30 --order random";
    control.spawn_job("writers", &split_words(writers))?;
    control.wait_output("writers", "\"ready\":true", BOOT)?;
    Ok(())
}

fn vm_name(mib: u32) -> String {
    format!("{WORD}-{mib}")
}

fn create_disk(file: PathBuf, format: &'static str) -> Result<VirtioDisk> {
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", format]).arg(&file).arg(format!("{DISK_MIB}M"));
    let status = create.status().context("cannot run qemu-img")?;
    ensure!(status.success(), "qemu-img cannot create {}", file.display());
    Ok(VirtioDisk { file, format, read_only: false })
}

fn to_ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn add_numbers(sizes: &[u32], systems: &[TypicalSystem], report: &mut Report) {
    for &mib in sizes {
        for system in systems {
            let values = measured_values(report, mib, *system, "/pause_ms");
            let key = format!("{WORD}.{mib}MiB.{}", system.name());
            add_percentiles(&key, values, &PERCENTILES, report);
        }
        for part in PARTS {
            let values =
                measured_values(report, mib, TypicalSystem::Firn, &format!("/parts/{part}"));
            let key = format!("{WORD}.{mib}MiB.firn.{part}");
            add_percentiles(&key, values, &PERCENTILES, report);
        }
    }
    let of = |system: TypicalSystem, mib: u32, percent: f64| {
        let values = measured_values(report, mib, system, "/pause_ms");
        Sample::new(values).map_or(f64::NAN, |sample| sample.percentile(percent))
    };
    let firn = |mib: u32, percent| of(TypicalSystem::Firn, mib, percent);
    let to_floor = |percent| {
        let ratio = |&mib: &u32| firn(mib, percent) / of(TypicalSystem::Floor, mib, percent);
        max_of(sizes.iter().map(ratio))
    };
    let best_peer = |mib: u32| {
        let peers = systems.iter().filter(|system| system.is_peer());
        peers.map(|&peer| of(peer, mib, 95.0)).fold(f64::INFINITY, f64::min)
    };
    let flatness = |percent| {
        let pauses = || sizes.iter().map(|&mib| firn(mib, percent));
        max_of(pauses()) / pauses().fold(f64::INFINITY, f64::min)
    };
    let figures = [
        ("pause_ratio_p95", to_floor(95.0)),
        ("pause_ratio_p50", to_floor(50.0)),
        ("qemu_ratio", max_of(sizes.iter().map(|&mib| firn(mib, 95.0) / best_peer(mib)))),
        ("flatness_p50", flatness(50.0)),
        ("flatness_p95", flatness(95.0)),
    ];
    figures.into_iter().for_each(|(key, value)| report.add_number(format!("{WORD}.{key}"), value));
}

/// The largest value. A value that could not be measured counts as the largest.
fn max_of(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |max, value| if value.is_nan() { value } else { value.max(max) })
}

fn measured_values(report: &Report, mib: u32, system: TypicalSystem, field: &str) -> Vec<f64> {
    let is_it =
        |run: &&Value| run["row"] == WORD && run["mib"] == mib && run["by"] == system.name();
    let values = report.repetitions().iter().filter(is_it);
    values.filter_map(|run| run.pointer(field)?.as_f64()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_size_counts() {
        let mut report = Report::new("cow-writers", true);
        let snapshot = TypicalSystem::Snapshot;
        for (mib, firn, floor, peer) in [(256, 2.0, 2.0, 40.0), (512, 3.0, 1.5, 6.0)] {
            let systems = [TypicalSystem::Firn, TypicalSystem::Floor, snapshot];
            for (system, pause_ms) in systems.into_iter().zip([firn, floor, peer]) {
                report.add_repetition(json!({ "row": WORD, "mib": mib, "by": system.name(),
                    "pause_ms": pause_ms, "parts": { "aux_ms": 0.25 } }));
            }
        }
        add_numbers(
            &[256, 512],
            &[TypicalSystem::Floor, TypicalSystem::Firn, snapshot],
            &mut report,
        );
        assert_eq!(report.figure_value("typical.pause_ratio_p95"), Some(2.0));
        assert_eq!(report.figure_value("typical.qemu_ratio"), Some(0.5));
        assert_eq!(report.figure_value("typical.flatness_p50"), Some(1.5));
        assert_eq!(report.figure_value("typical.512MiB.firn.aux_ms.p50"), Some(0.25));
    }

    #[test]
    fn a_system_that_was_not_measured_gives_no_ratio() {
        let mut report = Report::new("cow-writers", true);
        add_numbers(&[256], &[TypicalSystem::Floor, TypicalSystem::Firn], &mut report);
        assert_eq!(report.figure_value("typical.pause_ratio_p95"), None);
        assert_eq!(report.figure_value("typical.qemu_ratio"), None);
    }

    #[test]
    fn a_word_selects_these_rows() {
        let only = |words: &[&str]| ExperimentOptions {
            only: words.iter().map(|&word| word.to_owned()).collect(),
            ..ExperimentOptions::default()
        };
        assert_eq!(is_wanted(&only(&[])), (true, false));
        assert_eq!(is_wanted(&only(&["typical"])), (true, true));
        assert_eq!(is_wanted(&only(&["typical", "256MiB-idle"])), (true, false));
        assert_eq!(is_wanted(&only(&["256MiB-idle"])), (false, false));
    }
}
