//! `vpc-solo`: the pause of a VM for each epoch, with prediction, without, and as other systems
//! make it.
//!
//! Reproduces Table I of Lu, Ravindran and Kim ("VPC: Scalable, Low Downtime Checkpointing for
//! Virtual Clusters", V.B): a VM of 512 MB, idle, computing (EP of the NAS Parallel Benchmarks, on
//! each vCPU), and serving pages. nginx replaces Apache. `writers` is not in the paper: pages
//! written at random in a memory much larger than the pages of one interval, so that no prediction
//! is possible.
//!
//! **What varies**, at the same interval between cuts:
//!
//! - `vpc`: Firn's epochs. Dirty pages that are not expected to be written again before the cut are
//!   copied ahead of it, the others in the pause. Pages written at the end of one epoch start the
//!   next writable, and are compared after the pause. This is not the prediction of the paper, from
//!   epoch to epoch, which saves faults, and no time in a pause as Firn makes it.
//! - `no-prediction`: Firn's epochs, but all dirty pages are copied and protected again in the
//!   pause.
//! - `remus-like`: as Remus does according to its paper, with QEMU's commands: `stop`, device
//!   state, find the dirty pages, protect *all* of RAM again (Xen's log-dirty mode is cleaned as a
//!   whole), copy the dirty pages to one of two buffers, `cont`. The buffer is sent while the VM
//!   runs. If it is not sent by the next cut, the cut waits, with the VM running.
//! - `vnsnap-like`: a snapshot of all of memory each time, as VPC describes VNsnap-memory (section
//!   II): it is stored in memory, which needs as much again as the VM has. One pass copies all
//!   backed pages while the VM runs; then `stop`, device state, a copy of the pages dirtied during
//!   the pass, `cont`. VPC does not give the number of passes of its own prototype; more passes
//!   would make the pause shorter. The pass takes longer than the interval if memory is large: the
//!   next begins when the last has ended.
//!
//! **What is held equal**: all systems take turns on the same guest; all attach for their turn and
//! detach after it; the same calls find and copy pages. `vpc`, `no-prediction` and `remus-like`
//! send to a backup in the same process, by a socket. The experiment uses the library of the
//! epochs, because the other systems need its pauses.
//!
//! **What is measured**: `downtime_ms.WORKLOAD.SYSTEM`, percentiles over all cuts but the first of
//! each turn: the time between the hypervisor's events `STOP` and `RESUME`. `turn_ms` is the median
//! of each turn, with its spread over turns. `stood_still_ms`: the longest time in a turn for which
//! the guest's own clock did not advance, the first cut and attaching included. `copied_pages`:
//! pages copied in a pause. `ahead_pages`: pages copied ahead of it and not written again.
//! `faults`: pages found dirty that had been protected.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use firn_cluster::Epoch;
use firn_cluster::predict::PageSet;
use firn_epochs::endpoint::EpochStream;
use firn_epochs::guest::{PauseResult, ProtectedGuest as Followed};
use firn_epochs::primary::{CutMeasurements, EpochOptions};
use firn_epochs::wire::EpochWriter;
use firn_report::plot::BarPlot;
use firn_types::{PAGE_SIZE, Page};
use serde_json::{Value, json};

use crate::experiments::epochs::{attach_guest, hello_for, run_epochs, with_backup};
use crate::experiments::pauses::add_percentiles;
use crate::guest::{GuestControl, GuestImage, HostForward, QemuArgs, accel, free_tcp_port};
use crate::lab::{Lab, run_interleaved};
use crate::prober::GuestClock;
use crate::report::Report;
use crate::stats::Sample;
use crate::web::{WebLoad, wait_for_page};

const INTERVAL: Duration = Duration::from_millis(100);
const MIB: u32 = 512;
/// Memory of the web server's guest, which has its root in memory.
const WEB_MIB: u32 = 1024;
const BOOT: Duration = Duration::from_secs(300);
const SETTLE: Duration = Duration::from_millis(500);
const BEATS_PER_S: u32 = 200;
/// Clients of the web server.
const CLIENTS: u64 = 2;
/// How often a client retries, and how long it waits for a page.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
const PAGE_TIMEOUT: Duration = Duration::from_secs(60);
const HTTP: u16 = 80;
/// Turns of each system, in quick and in full runs, and cuts in each turn.
const REPETITIONS: (usize, usize) = (2, 6);
const CUTS: (usize, usize) = (30, 100);
/// Pages copied at once while the guest runs.
const PASS_PAGES: usize = 1024;
const PERCENTILES: [(&str, f64); 2] = [("p50", 50.0), ("p95", 95.0)];

/// The system that makes the cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CutSystem {
    Vpc,
    NoPrediction,
    RemusLike,
    VnsnapLike,
}

impl CutSystem {
    const ALL: [Self; 4] = [Self::Vpc, Self::NoPrediction, Self::RemusLike, Self::VnsnapLike];

    fn name(self) -> &'static str {
        match self {
            Self::Vpc => "vpc",
            Self::NoPrediction => "no-prediction",
            Self::RemusLike => "remus-like",
            Self::VnsnapLike => "vnsnap-like",
        }
    }
}

/// The workload of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SoloWorkload {
    Idle,
    Ep,
    Writers,
    Nginx,
}

impl SoloWorkload {
    const ALL: [Self; 4] = [Self::Idle, Self::Ep, Self::Writers, Self::Nginx];

    fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Ep => "ep",
            Self::Writers => "writers",
            Self::Nginx => "nginx",
        }
    }

    /// The command for a shell in the guest.
    fn command(self) -> Option<&'static str> {
        match self {
            Self::Idle | Self::Nginx => None,
            Self::Ep => Some(
                "for process in 1 2; do (while firn-guest npb ep --class A; do :; done) & done; wait",
            ),
            Self::Writers => Some(
                "exec firn-guest writers --mib 128 --rate 1000 --compresses-to 10 --light --no-check --order random",
            ),
        }
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("vpc-solo");
    report.set_host_fact("interval_ms", INTERVAL.as_millis() as u64);
    let workloads =
        lab.extent.select_wanted(&SoloWorkload::ALL, |workload| workload.name().to_owned());
    for &workload in &workloads {
        let guest = CutGuest::start_guest(lab, workload)?;
        run_interleaved(
            lab.extent.runs(REPETITIONS.0, REPETITIONS.1),
            &CutSystem::ALL,
            |_, &system| guest.run_turn(system, &mut report).with_context(|| system.name()),
        )?;
        lab.firn().stop(workload.name());
        add_numbers(workload, &mut report);
    }
    let drawing = draw_plot(&workloads, &report)?;
    report.add_drawing("vpc-solo", drawing);
    Ok(report)
}

/// A guest at work, whose VM is cut.
struct CutGuest<'a> {
    lab: &'a Lab,
    workload: SoloWorkload,
    clock: GuestClock,
    monitor: PathBuf,
    pid: i32,
    /// The clients of a web server.
    _load: Option<WebLoad>,
}

impl<'a> CutGuest<'a> {
    fn start_guest(lab: &'a Lab, workload: SoloWorkload) -> Result<Self> {
        let name = workload.name();
        let file = |what: &str| lab.file(&format!("{name}.{what}"));
        let [monitor, agent, beats] = ["monitor", "agent", "beats"].map(file);
        let (args, server) = guest_args(workload)?;
        let args = args
            .vcpus(2)
            .with_console(&file("console"))
            .with_agent_socket(&agent)
            .with_heartbeat_socket(&beats)
            .add_args(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        lab.firn().run_vm(name, &args)?;
        let mut control = GuestControl::connect(&agent, BOOT)?;
        let clock = GuestClock::start(&beats)?;
        let heartbeat = format!(
            "renice -n -20 -p $$ >/dev/null; exec firn-guest heartbeat --rate {BEATS_PER_S} --work-mib 0"
        );
        control.spawn_job("beats", &["sh", "-c", &heartbeat])?;
        let work = |command| control.spawn_job("work", &["sh", "-c", command]);
        workload.command().map_or(Ok(()), work)?;
        let load = server.map(|address| start_clients(address, lab.extent.seed)).transpose()?;
        let pid = lab.firn().status(name)?["pid"].as_i64().context("no process")?;
        thread::sleep(4 * SETTLE);
        lab.log_progress(&format!("{name} runs"));
        Ok(Self { lab, workload, clock, monitor, pid: i32::try_from(pid)?, _load: load })
    }

    fn run_turn(&self, system: CutSystem, report: &mut Report) -> Result<()> {
        let before = Instant::now();
        let cuts = self.lab.extent.pick(CUTS.0, CUTS.1);
        let cuts = match system {
            CutSystem::Vpc => self.run_epochs(true, cuts)?,
            CutSystem::NoPrediction => self.run_epochs(false, cuts)?,
            CutSystem::RemusLike => self.run_remus_like(cuts)?,
            CutSystem::VnsnapLike => self.run_vnsnap_like(cuts)?,
        };
        thread::sleep(SETTLE);
        let still_ms = self.clock.paused_since(before).map(as_ms);
        let of =
            |field: fn(&CutMeasurements) -> f64| cuts.iter().skip(1).map(field).collect::<Vec<_>>();
        let downtime_ms = of(|cut| cut.downtime_ms);
        let median = Sample::new(downtime_ms.iter().copied()).context("no cut")?.median();
        let (workload, name) = (self.workload.name(), system.name());
        let clock = still_ms.unwrap_or(f64::NAN);
        self.lab.log_progress(&format!(
            "{workload}, {name}: {median:.2} ms, guest's clock {clock:.1} ms"
        ));
        report.add_repetition(json!({ "workload": workload, "system": name, "still_ms": still_ms,
            "turn_ms": median, "downtime_ms": downtime_ms,
            "copied_pages": of(|cut| cut.copied as f64),
            "ahead_pages": of(|cut| cut.ahead as f64), "faults": of(|cut| cut.written as f64),
            "scan_ms": of(|cut| cut.scan_ms), "protect_ms": of(|cut| cut.protect_ms),
            "copy_ms": of(|cut| cut.copy_ms) }));
        Ok(())
    }

    fn attach_guest(&self) -> Result<Followed> {
        attach_guest(&self.monitor, self.pid)
    }

    /// Firn's own epochs.
    fn run_epochs(&self, predicts: bool, cuts: usize) -> Result<Vec<CutMeasurements>> {
        let options = EpochOptions { interval: INTERVAL, predicts, ..EpochOptions::default() };
        let epochs = run_epochs(self.attach_guest()?, options, cuts)?;
        Ok(epochs.into_iter().map(|epoch| epoch.cut).collect())
    }

    fn run_remus_like(&self, cuts: usize) -> Result<Vec<CutMeasurements>> {
        let mut guest = self.attach_guest()?;
        let hello = hello_for(&guest);
        let numbers = with_backup(|stream| {
            let mut writer = EpochWriter::new(stream.try_clone()?);
            writer.write_hello(&hello)?;
            writer.write_end(Epoch(0), &[], &[], false)?;
            let (full, filled) = std::sync::mpsc::sync_channel::<CopiedEpoch>(0);
            let (empty, emptied) = std::sync::mpsc::channel();
            [Vec::new(), Vec::new()].into_iter().try_for_each(|buffer| empty.send(buffer))?;
            let sending = thread::spawn(move || -> Result<()> {
                for copied in filled {
                    copied.send_epoch(&mut writer)?;
                    // The receiver may be gone.
                    let _ = empty.send(copied.bytes);
                }
                Ok(())
            });
            let mut numbers = Vec::new();
            for epoch in 1..=cuts as u64 + 1 {
                thread::sleep(INTERVAL);
                let mut copied = CopiedEpoch {
                    epoch: Epoch(epoch),
                    bytes: emptied.recv()?,
                    ..CopiedEpoch::default()
                };
                let mut times = CutMeasurements::default();
                let (pages, pause) = guest.pause_by_commands(|paused| {
                    let pages = time_call(&mut times.scan_ms, || paused.written_pages())?;
                    time_call(&mut times.protect_ms, || paused.protect_all())?;
                    time_call(&mut times.copy_ms, || {
                        paused.copy_pages(&pages, 0, &mut copied.bytes)
                    })?;
                    Ok(pages)
                })?;
                numbers.push(cut_numbers(times, &pages, &pause));
                (copied.pages, copied.devices) = (pages.iter().collect(), pause.devices);
                full.send(copied).context("the sender has ended")?;
            }
            drop(full);
            sending.join().map_err(|_| anyhow::anyhow!("the sender panicked"))??;
            Ok(numbers)
        });
        guest.detach()?;
        numbers
    }

    fn run_vnsnap_like(&self, cuts: usize) -> Result<Vec<CutMeasurements>> {
        let mut guest = self.attach_guest()?;
        let pages = guest.memory().region_map().total_pages() as usize;
        let mut snapshot = vec![0; pages * PAGE_SIZE];
        let (mut buffer, mut numbers) = (Vec::new(), Vec::new());
        for _ in 0..=cuts {
            let begun = Instant::now();
            guest.reset_tracking()?;
            copy_backed_pages(&guest, &mut snapshot, &mut buffer)?;
            let mut times = CutMeasurements::default();
            let (pages, pause) = guest.pause_by_commands(|paused| {
                let pages = time_call(&mut times.scan_ms, || paused.written_pages())?;
                time_call(&mut times.copy_ms, || paused.copy_pages(&pages, 0, &mut buffer))?;
                Ok(pages)
            })?;
            store_pages(&pages.iter().collect::<Vec<_>>(), &buffer, &mut snapshot);
            numbers.push(cut_numbers(times, &pages, &pause));
            thread::sleep(INTERVAL.saturating_sub(begun.elapsed()));
        }
        guest.detach()?;
        Ok(numbers)
    }
}

/// A guest's command line, and the address of its web server if it has one.
fn guest_args(workload: SoloWorkload) -> Result<(QemuArgs, Option<SocketAddr>)> {
    let accel = accel::choose_accel().accel;
    if workload != SoloWorkload::Nginx {
        return Ok((
            QemuArgs::new(&GuestImage::small()?, accel).with_lean_machine().memory_mib(MIB),
            None,
        ));
    }
    let (image, port) = (GuestImage::full()?, free_tcp_port()?);
    let args = QemuArgs::new(&image, accel)
        .with_lean_machine()
        .memory_mib(WEB_MIB)
        .append_kernel_arg("firn.services=nginx")
        .cached_root_in_memory(&image)
        .add_network(&[HostForward::tcp(port, HTTP)]);
    Ok((args, Some((Ipv4Addr::LOCALHOST, port).into())))
}

fn start_clients(address: SocketAddr, seed: u64) -> Result<WebLoad> {
    wait_for_page(address, 0, RETRY_INTERVAL, BOOT).context("no page")?;
    Ok(WebLoad::start(address, CLIENTS, seed, PAGE_TIMEOUT))
}

/// The contents of one of the two buffers.
#[derive(Default)]
struct CopiedEpoch {
    epoch: Epoch,
    pages: Vec<Page>,
    bytes: Vec<u8>,
    devices: Vec<u8>,
}

impl CopiedEpoch {
    fn send_epoch(&self, writer: &mut EpochWriter<EpochStream>) -> Result<()> {
        let pages = self.pages.iter().copied().zip(self.bytes.chunks_exact(PAGE_SIZE));
        writer.write_pages(self.epoch, pages)?;
        Ok(writer.write_end(self.epoch, &self.devices, &[], false)?)
    }
}

/// Copies all backed pages while the guest runs.
fn copy_backed_pages(guest: &Followed, snapshot: &mut [u8], buffer: &mut Vec<u8>) -> Result<()> {
    let backed: Vec<Page> =
        guest.memory().backed_runs()?.into_iter().flat_map(Page::iter_range).collect();
    for pages in backed.chunks(PASS_PAGES) {
        guest.copy_running(&pages.iter().copied().collect(), buffer)?;
        store_pages(pages, buffer, snapshot);
    }
    Ok(())
}

fn store_pages(pages: &[Page], bytes: &[u8], snapshot: &mut [u8]) {
    for (page, bytes) in pages.iter().zip(bytes.chunks_exact(PAGE_SIZE)) {
        let at = page.index() * PAGE_SIZE;
        snapshot[at..at + PAGE_SIZE].copy_from_slice(bytes);
    }
}

fn time_call<T, E>(took_ms: &mut f64, run: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let started = Instant::now();
    let done = run();
    *took_ms = as_ms(started.elapsed());
    done
}

fn cut_numbers(times: CutMeasurements, pages: &PageSet, pause: &PauseResult) -> CutMeasurements {
    let pages = pages.len() as u64;
    let device_bytes = pause.devices.len() as u64;
    let downtime_ms = as_ms(pause.downtime);
    CutMeasurements { downtime_ms, copied: pages, written: pages, device_bytes, ..times }
}

fn as_ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// The turns of one system.
fn turns_of(
    report: &Report,
    workload: SoloWorkload,
    system: CutSystem,
) -> impl Iterator<Item = &Value> {
    let is_it =
        move |turn: &&Value| turn["workload"] == workload.name() && turn["system"] == system.name();
    report.repetitions().iter().filter(is_it)
}

/// The measured values of all cuts.
fn cut_values(report: &Report, workload: SoloWorkload, system: CutSystem, field: &str) -> Vec<f64> {
    let values = turns_of(report, workload, system).filter_map(|turn| turn[field].as_array());
    values.flatten().filter_map(Value::as_f64).collect()
}

fn add_numbers(workload: SoloWorkload, report: &mut Report) {
    for system in CutSystem::ALL {
        let of = format!("{}.{}", workload.name(), system.name());
        for field in [
            "downtime_ms",
            "copied_pages",
            "ahead_pages",
            "faults",
            "scan_ms",
            "protect_ms",
            "copy_ms",
        ] {
            let values = cut_values(report, workload, system, field);
            add_percentiles(&format!("{field}.{of}"), values, &PERCENTILES, report);
        }
        for (key, field) in [("turn_ms", "turn_ms"), ("stood_still_ms", "still_ms")] {
            let values: Vec<f64> = turns_of(report, workload, system)
                .filter_map(|turn| turn[field].as_f64())
                .collect();
            report.add_sample(format!("{key}.{of}"), values);
        }
    }
    let p50 = |system: CutSystem| {
        let key = format!("downtime_ms.{}.{}.p50", workload.name(), system.name());
        report.figure_value(&key).unwrap_or(f64::NAN)
    };
    let ratios = [CutSystem::NoPrediction, CutSystem::RemusLike, CutSystem::VnsnapLike]
        .map(|other| (other, p50(CutSystem::Vpc) / p50(other)));
    for (other, ratio) in ratios {
        report.add_number(format!("vpc_to_{}.{}", other.name(), workload.name()), ratio);
    }
}

fn draw_plot(workloads: &[SoloWorkload], report: &Report) -> Result<String> {
    let series = |system: CutSystem| {
        let p50 = |workload: &SoloWorkload| {
            let key = format!("downtime_ms.{}.{}.p50", workload.name(), system.name());
            report.figure_value(&key).unwrap_or(f64::NAN)
        };
        (system.name().to_owned(), workloads.iter().map(p50).collect())
    };
    let plot = BarPlot {
        title: "Downtime of one epoch, median".into(),
        y: "milliseconds".into(),
        groups: workloads.iter().map(|workload| workload.name().to_owned()).collect(),
        series: CutSystem::ALL.map(series).into(),
    };
    plot.to_svg().context("the downtimes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_of_all_turns_count_together() {
        let mut report = Report::new("vpc-solo", true);
        for (system, downtime) in
            [(CutSystem::Vpc, 1.0), (CutSystem::VnsnapLike, 4.0), (CutSystem::Vpc, 3.0)]
        {
            report.add_repetition(
                json!({ "workload": "idle", "system": system.name(), "turn_ms": downtime,
                "downtime_ms": [downtime, downtime], "still_ms": null }),
            );
        }
        add_numbers(SoloWorkload::Idle, &mut report);
        assert_eq!(report.figure_value("downtime_ms.idle.vpc.p50"), Some(1.0));
        assert_eq!(report.figure_value("downtime_ms.idle.vpc.p95"), Some(3.0));
        assert_eq!(report.figure_value("downtime_ms.idle.vpc.n"), Some(4.0));
        assert_eq!(report.figure_value("turn_ms.idle.vpc"), Some(2.0));
        assert_eq!(report.figure_value("vpc_to_vnsnap-like.idle"), Some(0.25));
    }
}
