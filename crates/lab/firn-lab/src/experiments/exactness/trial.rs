//! Exactness trial: saves a guest under load, compares the image with a copy, checks the guest at
//! its end, restores it, and checks it again.
//!
//! ```text
//!   boot -> load: writers, DMA of two disks, network DMA, a computation -> checkpoint + reference copy
//!                                                                     |            \
//!          the saved guest runs on: its memory right? its result?  <--'             '--> compare, verify
//!          the restored one: the same checks, at once and when all of its memory is present
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use firn_guest::net::load::{EchoLoad, EchoReport};
use firn_guest::net::{self};
use firn_guest::stamp::{self, PageStamp, PageWords, StampStyle, WORDS};
use firn_guest::{disk, sha};
use serde_json::{Value, json};

use super::drawn::TrialParameters;
use crate::disk_profile::{DiskProfile, DiskThrottle};
use crate::experiments::synthetic::{last_line, split_words};
use crate::guest::{
    GuestControl, GuestImage, HostForward, JobState, QemuArgs, UnmanagedGuest, VirtioDisk, accel,
    free_tcp_port,
};
use crate::lab::{Lab, wait_for};

/// How long a guest may take to boot, to fill its memory, or to check it.
const GUEST_TIMEOUT: Duration = Duration::from_secs(300);
/// Name of the VM under Firn.
const VM: &str = "exact";
const WRITERS: &str = "writers";
const DISK: &str = "disk";
const WRITTEN: &str = "written-disk";
/// Common prefix of the names of the files that the guest writes to.
const WRITTEN_FILE: &str = "written.disk";
const ECHO: &str = "echo";
const SHA: &str = "sha";
const DISK_MIB: u64 = 16;
/// Messages that a guest must echo correctly after a save or a restore.
const ECHOES: u64 = 20;

/// The result of a run.
#[derive(Debug, Default)]
pub(super) struct TrialOutcome {
    pub(super) differing_blocks: u64,
    /// Pages of guest memory or of the disk that the guests found wrong.
    pub(super) wrong_pages: u64,
    pub(super) wrong_echoes: u64,
    /// Both guests computed the result of an uninterrupted guest.
    pub(super) results_equal: bool,
    /// The restored guest had not computed its result yet.
    pub(super) in_the_middle: bool,
    pub(super) facts: Value,
}

impl TrialOutcome {
    pub(super) fn is_exact(&self) -> bool {
        self.differing_blocks + self.wrong_pages + self.wrong_echoes == 0 && self.results_equal
    }
}

/// A guest's reports about itself.
struct GuestCheck {
    wrong_pages: u64,
    wrong_echoes: u64,
    result: String,
    was_computing: bool,
}

/// The lab's part of all runs, which happen one after another.
pub(super) struct TrialBench<'a> {
    lab: &'a Lab,
    image: GuestImage,
    disk: PathBuf,
    throttle: DiskThrottle,
}

impl<'a> TrialBench<'a> {
    pub(super) fn new(lab: &'a Lab) -> Result<Self> {
        let disk = lab.file("disk.raw");
        write_disk(&disk).context("cannot prepare the disk")?;
        let throttle = DiskThrottle::new(DiskProfile::None, lab.dir())?;
        Ok(Self { lab, image: GuestImage::small()?, disk, throttle })
    }

    /// Executes one run. Leaves no guest, whatever the result.
    pub(super) fn run_trial(&self, drawn: &TrialParameters) -> Result<TrialOutcome> {
        let outcome = ExactnessTrial::new(self, drawn).and_then(|trial| trial.run());
        self.lab.firn().stop(VM);
        let below = (0..drawn.below).map(parent_name);
        for file in below.chain(["exact.firn".to_owned(), "exact.ram".to_owned()]) {
            let _ = std::fs::remove_file(self.lab.file(&file));
        }
        self.remove_written();
        outcome
    }

    /// Removes the disk that the guest wrote to, and its overlays.
    fn remove_written(&self) {
        for entry in std::fs::read_dir(self.lab.dir()).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(WRITTEN_FILE) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// Writes the same content as `firn-guest disk-dma prepare`: every run reads the same disk.
fn write_disk(disk: &Path) -> std::io::Result<()> {
    let style = StampStyle::compressing_to(50, false);
    let mut bytes = Vec::new();
    for index in 0..DISK_MIB * 256 {
        let mut page: PageWords = [0; WORDS];
        stamp::fill_page(&mut page, PageStamp { region: disk::REGION, index, sequence: 0 }, style);
        bytes.extend(page.iter().flat_map(|word| word.to_le_bytes()));
    }
    std::fs::write(disk, bytes)
}

/// The name of a parent of the compared image.
fn parent_name(number: usize) -> String {
    format!("below-{number}.firn")
}

struct ExactnessTrial<'a> {
    bench: &'a TrialBench<'a>,
    drawn: &'a TrialParameters,
    agent: PathBuf,
    port: u16,
}

impl<'a> ExactnessTrial<'a> {
    fn new(bench: &'a TrialBench<'a>, drawn: &'a TrialParameters) -> Result<Self> {
        let agent = bench.lab.file("agent");
        Ok(Self { bench, drawn, agent, port: free_tcp_port()? })
    }

    fn run(&self) -> Result<TrialOutcome> {
        let lab = self.bench.lab;
        let expected = sha::compute_digest(&self.drawn.sha)?;
        let machine = self.boot_under_load()?;
        let saved = self.save_guest()?;
        let differences = self.compare_image()?;
        let went_on = self.check_guest(false).context("the guest that was saved")?;
        lab.firn().stop(VM);
        drop(machine);
        self.restore_guest()?;
        let restored = self.check_guest(true).context("the restored guest")?;
        Ok(TrialOutcome {
            differing_blocks: differences["differing_blocks"].as_u64().context("no count")?,
            wrong_pages: went_on.wrong_pages + restored.wrong_pages,
            wrong_echoes: went_on.wrong_echoes + restored.wrong_echoes,
            results_equal: went_on.result == expected && restored.result == expected,
            in_the_middle: restored.was_computing,
            facts: json!({ "save": saved, "differences": differences, "expected": expected,
                "result_saved": went_on.result, "result_restored": restored.result }),
        })
    }

    fn qemu_args(&self) -> QemuArgs {
        let forward = match self.drawn.udp {
            true => HostForward::udp(self.port, net::PORT),
            false => HostForward::tcp(self.port, net::PORT),
        };
        let disk = VirtioDisk { file: self.bench.disk.clone(), format: "raw", read_only: true };
        let written = self.drawn.written.map(|format| VirtioDisk {
            file: self.bench.lab.file(WRITTEN_FILE),
            format,
            read_only: false,
        });
        let args = QemuArgs::new(&self.bench.image, accel::choose_accel().accel)
            .vcpus(self.drawn.vcpus)
            .append_kernel_arg("no_timer_check")
            .with_console(&self.bench.lab.file("console"))
            .with_agent_socket(&self.agent)
            .add_disk(disk)
            .add_network(&[forward]);
        let args = written.into_iter().fold(args, QemuArgs::add_disk);
        self.drawn.ram.add_to(args, self.drawn.private)
    }

    fn connect_control(&self) -> Result<GuestControl> {
        Ok(GuestControl::connect(&self.agent, GUEST_TIMEOUT)?)
    }

    fn create_written_disk(&self) -> Result<()> {
        let Some(format) = self.drawn.written else { return Ok(()) };
        let file = self.bench.lab.file(WRITTEN_FILE);
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", format]).arg(&file);
        let status = command.arg(format!("{DISK_MIB}M")).status().context("cannot run qemu-img")?;
        ensure!(status.success(), "qemu-img cannot create {}", file.display());
        Ok(())
    }

    /// Starts the guest by Firn; or by hand, with Firn attached to it: that guest ends when the
    /// returned value is dropped.
    fn start_guest(&self) -> Result<Option<UnmanagedGuest>> {
        let (lab, args) = (self.bench.lab, self.qemu_args());
        if !self.drawn.private {
            lab.firn().run_vm(VM, &args)?;
            return Ok(None);
        }
        let monitor = lab.file("monitor").display().to_string();
        let qmp = format!("unix:{monitor},server=on,wait=off");
        let mut machine = UnmanagedGuest::start(args.add_args(&["-qmp", &qmp]))?;
        machine.wait_ready(GUEST_TIMEOUT)?;
        let pid = machine.pid().to_string();
        lab.firn().attach(VM, &["--pid", &pid, "--qmp", &monitor])?;
        Ok(Some(machine))
    }

    /// Jobs that read or write disks.
    fn disk_jobs(&self) -> impl Iterator<Item = &'static str> {
        [DISK].into_iter().chain(self.drawn.written.map(|_| WRITTEN))
    }

    fn boot_under_load(&self) -> Result<Option<UnmanagedGuest>> {
        self.create_written_disk()?;
        let machine = self.start_guest()?;
        let mut control = self.connect_control()?;
        let given: Vec<&str> = self.drawn.writers.iter().map(String::as_str).collect();
        control.spawn_job(WRITERS, &[&["firn-guest", "writers"], &given[..]].concat())?;
        control.wait_output(WRITERS, "\"ready\":true", GUEST_TIMEOUT)?;
        let (mib, kib) = (DISK_MIB, self.drawn.disk_block_kib);
        let read = format!("firn-guest disk-dma read --mib {mib} --block-kib {kib}");
        let write = format!(
            "firn-guest disk-dma write --mib {mib} --block-kib {kib} --device /dev/vdb --rate 100"
        );
        for job in self.disk_jobs().chain([ECHO]) {
            let line = match job {
                DISK => &*read,
                WRITTEN => &*write,
                _ => "firn-guest net-dma echo",
            };
            control.spawn_job(job, &split_words(line))?;
            control.wait_output(job, "\"ready\":true", GUEST_TIMEOUT)?;
        }
        let sha::ShaArgs { seed, mib, rounds, threads, .. } = self.drawn.sha;
        let compute = format!(
            "firn-guest sha --seed {seed} --mib {mib} --rounds {rounds} --threads {threads}"
        );
        control.spawn_job(SHA, &split_words(&compute))?;
        Ok(machine)
    }

    /// Runs `firn checkpoint` while the network card is in use.
    fn save_guest(&self) -> Result<Value> {
        let lab = self.bench.lab;
        let args = || self.drawn.save_args();
        let before =
            disk_report(&mut self.connect_control()?, DISK)?["progress"].as_u64().unwrap_or(0);
        let (said, echoes) = self.under_network_load(|| {
            std::thread::sleep(Duration::from_millis(self.drawn.lead_ms));
            let mut how = args();
            for number in 0..self.drawn.below {
                let image = lab.file(&parent_name(number));
                lab.firn().checkpoint(VM, &image, &how)?;
                how = args().with_option("--parent", image);
            }
            let how = how.with_option("--reference", lab.file("exact.ram"));
            Ok(lab.firn().checkpoint(VM, &lab.file("exact.firn"), &how)?)
        })?;
        ensure!(echoes.wrong == 0, "{} echoes were wrong during the save", echoes.wrong);
        let requests =
            disk_report(&mut self.connect_control()?, DISK)?["progress"].as_u64().unwrap_or(0)
                - before;
        Ok(json!({ "report": said.facts["report"], "took_s": said.took.as_secs_f64(),
            "echoes": echoes.echoed, "disk_requests": requests }))
    }

    fn under_network_load<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<(T, EchoReport)> {
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let echoes = scope.spawn(|| self.exchange_until(&|_| is_done.load(Ordering::Relaxed)));
            let done = work();
            is_done.store(true, Ordering::Relaxed);
            let report = echoes.join().map_err(|_| anyhow!("the network load panicked"))?;
            Ok((done?, report))
        })
    }

    fn exchange_until(&self, enough: &dyn Fn(EchoReport) -> bool) -> EchoReport {
        let to = ([127, 0, 0, 1], self.port).into();
        let mut load = EchoLoad::new(to, self.drawn.udp, self.drawn.echo_bytes);
        loop {
            load.exchange_one();
            let report = load.run_for(Duration::ZERO, 0.0);
            if enough(report) {
                return report;
            }
        }
    }

    fn compare_image(&self) -> Result<Value> {
        let (image, copy) = (self.bench.lab.file("exact.firn"), self.bench.lab.file("exact.ram"));
        let firn = self.bench.lab.firn();
        firn.run_image_verb("verify", &[image.as_os_str()])?;
        Ok(firn.compare_images(&image, &copy)?)
    }

    fn restore_guest(&self) -> Result<()> {
        let lab = self.bench.lab;
        let mode = self.drawn.mode.to_string();
        let image = lab.file("exact.firn");
        lab.firn().restore(&image, VM, &["--mode", &mode], &self.bench.throttle)?;
        Ok(())
    }

    /// Lets a guest check its memory, and reads its result. A restored guest is checked at once,
    /// and again when all of its memory is present.
    fn check_guest(&self, is_restored: bool) -> Result<GuestCheck> {
        let mut control = self.connect_control()?;
        let was_computing = matches!(control.poll_job(SHA)?, JobState::Running { .. });
        let mut wrong_pages = 0;
        if is_restored {
            wrong_pages += count_wrong_pages(&mut control)?;
            self.wait_for_memory()?;
        }
        control.run_within(&split_words("firn-guest verify stop"), "", GUEST_TIMEOUT)?;
        // The writers' last output covers all of their memory, from the start.
        let writers = last_line(&control.wait_job(WRITERS, GUEST_TIMEOUT)?.stdout)?;
        wrong_pages = wrong_pages.max(writers["wrong"].as_u64().context("no count")?);
        let result = control.wait_job(SHA, GUEST_TIMEOUT)?.stdout.trim().to_owned();
        for job in self.disk_jobs() {
            wrong_pages += disk_report(&mut control, job)?["wrong"].as_u64().unwrap_or(0);
        }
        let echoes = self.exchange_until(&|report| report.echoed + report.wrong >= ECHOES);
        Ok(GuestCheck { wrong_pages, wrong_echoes: echoes.wrong, result, was_computing })
    }

    fn wait_for_memory(&self) -> Result<()> {
        wait_for("the end of the restore", GUEST_TIMEOUT, || {
            let status = self.bench.lab.firn().status(VM)?;
            ensure!(status["state"] != "ended", "the VM has ended: {status}");
            Ok((status["state"] == "running").then_some(()))
        })
    }
}

/// The last progress line of a disk job of the guest.
pub(in crate::experiments) fn disk_report(control: &mut GuestControl, job: &str) -> Result<Value> {
    match control.poll_job(job)? {
        JobState::Running { stdout, .. } => last_line(&stdout),
        JobState::Ended(ended) => Err(anyhow!("{job} has ended: {ended:?}")),
    }
}

/// Pages that running writers have found wrong so far; they first check all their pages.
pub(in crate::experiments) fn count_wrong_pages(control: &mut GuestControl) -> Result<u64> {
    let ended = control.run_within(&split_words("firn-guest verify"), "", GUEST_TIMEOUT)?;
    let report = last_line(&ended.stdout).with_context(|| format!("{ended:?}"))?;
    report["wrong"].as_u64().context("no count")
}
