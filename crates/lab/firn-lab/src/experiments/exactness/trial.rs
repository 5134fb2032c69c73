//! Exactness trial: saves a guest under load, compares the image with a copy, checks the guest at
//! its end, restores it, and checks it again.
//!
//! ```text
//!   boot -> load: writers, DMA of two disks, network DMA, a computation -> checkpoint + reference copy
//!                                                                     |            \
//!          the saved guest runs on: its memory right? its result?  <--'             '--> compare, verify
//!          the restored one: the same checks, at once and when all of its memory is present
//! ```
//!
//! In a run with a memory device ([`super::memory_device`]) the guest gives memory back during the
//! save. Then a save may also fail closed: three tries failed, no image is left, and the guest is
//! right. A VM that Firn refuses has no restore; `--accept-unrestorable` makes its image all the same,
//! and the image is compared.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use firn_guest::net::load::{EchoLoad, EchoReport};
use firn_guest::net::{self};
use firn_guest::stamp::{self, PageStamp, PageWords, StampStyle, WORDS};
use firn_guest::{disk, sha};
use serde_json::{Value, json};

use super::drawn::{DrawnDevice, TrialParameters};
use super::memory_device::{DeviceWork, MemoryDevice};
use crate::disk_profile::{DiskProfile, DiskThrottle};
use crate::experiments::synthetic::{last_line, split_words};
use crate::firn::{FirnError, SaveArgs};
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
/// The program that allocates and frees memory over and over.
const BRIEF: &str = "brief";
/// The end of an error of a save that failed closed: what the guest gave back is lost.
const FAILED_CLOSED: [&str; 2] = ["3 tries failed", "the guest gave memory back"];
/// The exit code of a command that refuses a VM.
const REFUSED: &str = "exit status: 5";
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
    /// The saves of the run.
    pub(super) saves: SaveCounts,
    /// The run's last save failed closed: there is no image to compare.
    pub(super) has_no_image: bool,
    /// Why Firn refuses the VM.
    pub(super) refusal: Option<String>,
    pub(super) facts: Value,
}

/// The saves of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SaveCounts {
    /// Saves that made an image.
    pub(super) succeeded: u64,
    /// Saves that needed more than one try for that.
    pub(super) tried_again: u64,
    /// Saves of which three tries failed.
    pub(super) failed_closed: u64,
}

impl TrialOutcome {
    /// Whether the image and both guests are exact.
    pub(super) fn is_exact(&self) -> bool {
        self.is_right() && !self.has_no_image && self.refusal.is_none()
    }

    /// Whether nothing is wrong: a save may have failed closed, or been refused.
    pub(super) fn is_right(&self) -> bool {
        self.differing_blocks + self.wrong_pages + self.wrong_echoes == 0 && self.results_equal
    }
}

/// The images of a run.
struct SavedImages {
    counts: SaveCounts,
    /// The compared image was made.
    is_made: bool,
    facts: Value,
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
        let expected = sha::compute_digest(&self.drawn.sha)?;
        let machine = self.boot_under_load()?;
        let refusal = self.check_refusal()?;
        let saved = self.save_guest(refusal.is_some())?;
        let differences = if saved.is_made { self.compare_image()? } else { Value::Null };
        let went_on = self.check_guest(false).context("the guest that was saved")?;
        self.bench.lab.firn().stop(VM);
        drop(machine);
        let mut outcome = TrialOutcome {
            differing_blocks: differences["differing_blocks"].as_u64().unwrap_or_default(),
            wrong_pages: went_on.wrong_pages,
            wrong_echoes: went_on.wrong_echoes,
            results_equal: went_on.result == expected,
            in_the_middle: false,
            saves: saved.counts,
            has_no_image: !saved.is_made,
            refusal,
            facts: json!({ "save": saved.facts, "differences": differences, "expected": expected,
                "result_saved": went_on.result }),
        };
        if saved.is_made && outcome.refusal.is_none() {
            self.check_restored(&expected, &mut outcome)?;
        }
        Ok(outcome)
    }

    /// Restores the image, and adds what the restored guest finds.
    fn check_restored(&self, expected: &str, outcome: &mut TrialOutcome) -> Result<()> {
        self.restore_guest()?;
        let restored = self.check_guest(true).context("the restored guest")?;
        outcome.wrong_pages += restored.wrong_pages;
        outcome.wrong_echoes += restored.wrong_echoes;
        outcome.results_equal &= restored.result == expected;
        outcome.in_the_middle = restored.was_computing;
        outcome.facts["result_restored"] = json!(restored.result);
        Ok(())
    }

    /// The reason for which Firn refuses the VM: `firn checkpoint` and `firn doctor` have the same.
    fn check_refusal(&self) -> Result<Option<String>> {
        if self.drawn.device.is_none_or(|drawn| drawn.device != MemoryDevice::VirtioMem) {
            return Ok(None);
        }
        let firn = self.bench.lab.firn();
        let doctor = firn.doctor_rows(VM)?;
        let row = doctor.iter().find(|row| row["operation"] == "checkpoint");
        let is_foreseen =
            row.context("firn doctor has no row `checkpoint`")?["verdict"] == "refused";
        match firn.checkpoint(VM, &self.bench.lab.file("exact.firn"), &self.drawn.save_args()) {
            Ok(_) if is_foreseen => {
                bail!("firn doctor foresaw that a checkpoint is refused: {row:?}")
            }
            Ok(_) => Ok(None),
            Err(FirnError::Failed { status, said, .. }) if status == REFUSED => {
                ensure!(is_foreseen, "firn doctor did not foresee this: {said}");
                Ok(Some(said))
            }
            Err(error) => Err(error.into()),
        }
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
        let args = self.drawn.ram.add_to(args, self.drawn.private);
        match self.drawn.device {
            Some(drawn) => drawn.device.add_to(args, self.drawn.private, &self.second_monitor()),
            None => args,
        }
    }

    /// The monitor of the client that changes the memory device.
    fn second_monitor(&self) -> PathBuf {
        self.bench.lab.file("second-monitor")
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
        if let Some(drawn) = self.drawn.device {
            start_brief_writers(&mut control, drawn)?;
        }
        Ok(machine)
    }

    /// Runs `firn checkpoint` while the network card and the memory device are in use.
    fn save_guest(&self, is_marked: bool) -> Result<SavedImages> {
        let requests = || -> Result<u64> {
            let report = disk_report(&mut self.connect_control()?, DISK)?;
            Ok(report["progress"].as_u64().unwrap_or(0))
        };
        let before = requests()?;
        let ((mut saved, changes), echoes) = self.under_network_load(|| {
            std::thread::sleep(Duration::from_millis(self.drawn.lead_ms));
            self.under_device_work(|| self.save_images(is_marked))
        })?;
        ensure!(echoes.wrong == 0, "{} echoes were wrong during the save", echoes.wrong);
        saved.facts["echoes"] = json!(echoes.echoed);
        saved.facts["disk_requests"] = json!(requests()? - before);
        saved.facts["size_changes"] = json!(changes);
        Ok(saved)
    }

    /// Makes the images that the compared one builds on, and that one.
    fn save_images(&self, is_marked: bool) -> Result<SavedImages> {
        let lab = self.bench.lab;
        let (mut counts, mut parent, mut facts) = (SaveCounts::default(), None, json!({}));
        for number in 0..=self.drawn.below {
            let is_last = number == self.drawn.below;
            let name = if is_last { "exact.firn".to_owned() } else { parent_name(number) };
            let image = lab.file(&name);
            let how = self.drawn.save_args();
            let how = if is_marked { how.with_flag("--accept-unrestorable") } else { how };
            let how = match &parent {
                Some(parent) => how.with_option("--parent", parent),
                None => how,
            };
            let how = match is_last {
                true => how.with_option("--reference", lab.file("exact.ram")),
                false => how,
            };
            if let Some(report) = self.save_image(&image, &how, &mut counts)? {
                parent = Some(image);
                facts = report;
            } else if is_last {
                return Ok(SavedImages { counts, is_made: false, facts });
            }
        }
        Ok(SavedImages { counts, is_made: true, facts })
    }

    /// Makes an image, and returns the report; `None` if the save failed closed.
    fn save_image(
        &self,
        image: &Path,
        how: &SaveArgs,
        counts: &mut SaveCounts,
    ) -> Result<Option<Value>> {
        match self.bench.lab.firn().checkpoint(VM, image, how) {
            Ok(saved) => {
                counts.succeeded += 1;
                counts.tried_again += u64::from(saved.facts["tries"].as_u64() > Some(1));
                let took_s = saved.took.as_secs_f64();
                Ok(Some(json!({ "report": saved.facts["report"], "tries": saved.facts["tries"],
                    "took_s": took_s })))
            }
            Err(error) if self.drawn.device.is_some() && is_failed_closed(&error) => {
                ensure!(self.drawn.strategy != "pre-copy", "pre-copy can lose nothing: {error}");
                ensure!(!image.exists(), "a save that failed has left an image: {error}");
                counts.failed_closed += 1;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Runs `work` while the memory device changes its size. Returns the number of changes.
    fn under_device_work<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
        let Some(drawn) = self.drawn.device else { return Ok((work()?, 0)) };
        let device = DeviceWork {
            device: drawn.device,
            monitor: self.second_monitor(),
            ram_bytes: self.drawn.ram.total_kib() << 10,
            step_bytes: drawn.step_mib << 20,
            interval: Duration::from_millis(drawn.interval_ms),
        };
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let changing = scope.spawn(|| device.run_until(&is_done));
            let done = work();
            is_done.store(true, Ordering::Relaxed);
            let changes = changing.join().map_err(|_| anyhow!("the device's work panicked"))?;
            Ok((done?, changes.context("the memory device")?))
        })
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
        if self.drawn.device.is_some() {
            wrong_pages += count_wrong_brief_pages(&mut control)?;
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

/// Starts a program that allocates memory, fills it, checks it after a second and frees it, over and
/// over. It ends when it finds a wrong page.
fn start_brief_writers(control: &mut GuestControl, drawn: DrawnDevice) -> Result<()> {
    let line = format!(
        "while firn-guest writers --threads 1 --mib {} --rate 500 --seconds 1 --order random \
         --socket /run/firn/brief.sock; do :; done",
        drawn.brief_mib
    );
    control.spawn_job(BRIEF, &["sh", "-c", &line])?;
    control.wait_output(BRIEF, "\"wrong\"", GUEST_TIMEOUT)?;
    Ok(())
}

/// The pages that the brief writers have found wrong, once they have checked the memory that they
/// have now.
fn count_wrong_brief_pages(control: &mut GuestControl) -> Result<u64> {
    let mut checks_min = None;
    wait_for("a check of the brief writers", GUEST_TIMEOUT, || {
        let (output, is_running) = match control.poll_job(BRIEF)? {
            JobState::Running { stdout, .. } => (stdout, true),
            JobState::Ended(ended) => (ended.stdout, false),
        };
        let (checks, wrong) = sum_of_checks(&output);
        let least = *checks_min.get_or_insert(checks + 1);
        ensure!(is_running || wrong > 0, "the brief writers have ended: {output}");
        Ok((checks >= least || wrong > 0).then_some(wrong))
    })
}

/// The number of checks in the output of the brief writers, and the pages that they found wrong.
fn sum_of_checks(output: &str) -> (u64, u64) {
    let lines = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let found: Vec<u64> = lines.filter_map(|line| line["wrong"].as_u64()).collect();
    (found.len() as u64, found.iter().sum())
}

/// Whether a save failed because of memory that the guest gave back, after all its tries.
fn is_failed_closed(error: &FirnError) -> bool {
    match error {
        FirnError::Failed { said, .. } => FAILED_CLOSED.iter().all(|words| said.contains(words)),
        _ => false,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_the_brief_writers_found_wrong_are_added_up() {
        let output = "{\"ready\":true,\"threads\":1,\"pages\":2048}\n\
            {\"pages\":2048,\"writes\":10,\"wrong\":0,\"told\":[],\"region_writes\":[10]}\n\
            {\"pages\":2048,\"writes\":9,\"wrong\":3,\"told\":[],\"region_writes\":[9]}\n{\"pages\":20";
        assert_eq!(sum_of_checks(output), (2, 3));
    }

    #[test]
    fn only_lost_memory_is_a_save_that_failed_closed() {
        let failed = |said: &str| {
            let (verb, status) = ("checkpoint".to_owned(), "exit status: 1".to_owned());
            is_failed_closed(&FirnError::Failed { verb, status, said: said.to_owned() })
        };
        assert!(failed(
            "saving to a.firn: 3 tries failed: the guest gave memory back (balloon ..."
        ));
        assert!(!failed("saving to a.firn: the guest gave memory back (balloon ..."));
        assert!(!failed("3 tries failed: no space"));
    }
}
