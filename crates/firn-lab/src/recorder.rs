//! Recorded restore: uses the same libraries as `firn restore` and returns a complete run record.
//!
//! `firn restore` reports when the guest runs and when all memory is present. Tables and figures
//! need more: each fault and its wait, each read, which prefetched pages were used. Recording that
//! costs the guest time. So timed runs use `firn`, and counted runs use this: `firn-lab
//! restore-recorded`, a separate process, so that a disk profile can apply to it.
//!
//! ```text
//!   -> {"image":"x.firn","mode":"locality","account_use":true,"dir":"/var/tmp/..."}
//!   <- {"running":true}              the guest runs
//!   -> (a line)                      end the recording
//!   <- {"version":1,"mode":...}      the run record; the guest is killed
//! ```

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, ensure};
use firn_image::Image;
use firn_memory::{GuestMemory, PageFaults, Process, RegionLocation, Trace, Tracee};
use firn_restore::{Fill, Mode, Presence, Restore, RestoreError, RestoreOptions, RunRecord};
use firn_types::{PAGE_SIZE, Tid, VcpuId};
use firn_vmm::command_line::{self, Paths, RamPlan};
use firn_vmm::{Launched, Layout, Vm};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::disk_profile::Throttle;

/// The verb that starts the restoring process.
pub const VERB: &str = "restore-recorded";
/// How much of QEMU's output an error contains, in bytes.
const LOG_BYTES: u64 = 2000;

/// Request for a recorded restore.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recorded {
    /// The image.
    pub image: PathBuf,
    /// The restore mode.
    pub mode: Mode,
    /// Whether to find out which prefetched pages are used.
    pub account_use: bool,
    /// Whether memory is filled in the background too.
    pub fill: Fill,
    /// The directory for sockets and logs.
    pub dir: PathBuf,
}

/// The client of a recorded restore. Dropping it ends the guest.
pub struct Recording {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Recording {
    /// Starts a restore and returns once the guest runs. `lab` is the path of the `firn-lab`
    /// program.
    pub fn start(lab: &Path, what: &Recorded, throttle: &Throttle) -> Result<Self> {
        let mut child = throttle
            .command(lab)
            .arg(VERB)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", lab.display()))?;
        let stdin = child.stdin.take().context("no standard input")?;
        let stdout = BufReader::new(child.stdout.take().context("no standard output")?);
        let mut recording = Self { child, stdin, stdout };
        writeln!(recording.stdin, "{}", serde_json::to_string(what)?)?;
        let running: Value = recording.answer()?;
        ensure!(running["running"] == true, "the guest does not run: {running}");
        Ok(recording)
    }

    /// Ends the guest and returns its run record.
    pub fn finish(mut self) -> Result<RunRecord> {
        writeln!(self.stdin)?;
        self.answer()
    }

    fn answer<T: for<'de> Deserialize<'de>>(&mut self) -> Result<T> {
        let mut line = String::new();
        ensure!(self.stdout.read_line(&mut line)? > 0, "the recorded restore has failed");
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // At the end of its input the process kills the guest and ends.
        let _ = writeln!(self.stdin);
        let _ = self.child.wait();
    }
}

/// Serves one restore, which standard input describes.
pub fn serve() -> Result<()> {
    let mut lines = io::stdin().lines();
    let what: Recorded = serde_json::from_str(&lines.next().context("nothing to restore")??)?;
    let guest = RunningGuest::restore(&what)?;
    say(&json!({ "running": true }))?;
    let _enough = lines.next();
    let record = guest.restore.record();
    drop(guest);
    say(&record)
}

fn say(what: &impl Serialize) -> Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, what)?;
    writeln!(out)?;
    Ok(out.flush()?)
}

/// A restored guest. Dropping it ends the threads that serve it, then kills it.
struct RunningGuest {
    restore: Restore,
    _hypervisor: Hypervisor,
}

/// A QEMU process; dropping it kills the process.
struct Hypervisor(Launched);

impl Drop for Hypervisor {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is reaped.
        let _ = self.0.kill();
    }
}

impl RunningGuest {
    fn restore(what: &Recorded) -> Result<Self> {
        let since = Instant::now();
        let image = Arc::new(Image::open(&what.image)?);
        let qmp = what.dir.join("recorded.qmp");
        let mut hypervisor = launch(&image, &qmp, &what.dir)?;
        let mut alive = || matches!(hypervisor.0.try_wait(), Ok(None));
        let connected = Vm::connect_started(&qmp, &mut alive);
        let mut vm = connected.with_context(|| log_of(&what.dir))?;
        let vcpus: Vec<Tid> = vm.vcpus()?.iter().map(|vcpu| vcpu.tid).collect();
        let layout = vm.layout()?;
        let process = Arc::new(Process::open(hypervisor.0.pid())?);
        let memory = open_memory(&process, &layout)?;
        let mut tracee = Tracee::seize(&process, &vcpus)?;
        let faults = PageFaults::create(&mut tracee, memory.clone(), Trace::Restore)?;
        drop(tracee);
        let presence = Presence::create(&what.dir.join("presence"), memory.map().total_pages())?;
        let options = RestoreOptions {
            mode: what.mode,
            account_use: what.account_use,
            fill: what.fill,
            since,
            vcpus: vcpus.into_iter().zip((0..).map(VcpuId)).collect(),
            ..RestoreOptions::default()
        };
        let fatal = Box::new(|error: &RestoreError| eprintln!("recorded restore: {error}"));
        let restore = Restore::begin(image.clone(), memory, faults, options, presence, fatal)?;
        vm.load_device_state(image.device_state()).with_context(|| log_of(&what.dir))?;
        restore.prefill().map_err(|error| anyhow!(error))?;
        vm.cont()?;
        Ok(Self { restore, _hypervisor: hypervisor })
    }
}

/// Starts the image's QEMU, which then waits for device state.
fn launch(image: &Image, qmp: &Path, dir: &Path) -> Result<Hypervisor> {
    let args: Vec<String> = serde_json::from_value(image.meta()["qemu"]["user_args"].clone())
        .context("the image does not record how its QEMU was started")?;
    let plan = command_line::plan(&args)?;
    let ram = plan.ram().iter().map(ram_file).collect::<Result<Vec<_>>>()?;
    let path = |file: &File| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let (qmp, calls) = (qmp.to_owned(), qmp.with_extension("calls"));
    let paths =
        Paths { qmp, ram: ram.iter().map(path).collect(), calls, stores: None, cards: Vec::new() };
    let augmented = plan.for_restore(&paths)?;
    let inherit: Vec<_> = ram.iter().map(AsFd::as_fd).collect();
    Ok(Hypervisor(firn_vmm::launch(&augmented.args, &inherit, &dir.join("recorded.log"))?))
}

fn ram_file(plan: &RamPlan) -> Result<File> {
    let file = memfd_create("firn-ram", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, plan.bytes.next_multiple_of(PAGE_SIZE as u64))?;
    Ok(file.into())
}

/// Opens a hypervisor's guest memory at the addresses in its layout.
pub(crate) fn open_memory(process: &Arc<Process>, layout: &Layout) -> Result<Arc<GuestMemory>> {
    let place = |region: &firn_types::RamRegion| {
        let location = layout.locations.iter().find(|location| location.id == region.id)?;
        Some(RegionLocation { region: region.clone(), hva: location.hva })
    };
    let locations: Vec<_> = layout.map.regions().iter().filter_map(place).collect();
    Ok(Arc::new(GuestMemory::open(process.clone(), layout.map.clone(), &locations)?))
}

fn log_of(dir: &Path) -> String {
    let tail = firn_vmm::log_tail(&dir.join("recorded.log"), LOG_BYTES).unwrap_or_default();
    format!("end of QEMU's log: {}", tail.trim())
}
