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
use firn_memory::{GuestMemory, PageFaults, Process, RegionLocation, TraceMode, Tracee};
use firn_restore::{
    BackgroundFill, PresenceFile, RestoreError, RestoreMode, RestoreOptions, RunRecord,
    RunningRestore,
};
use firn_types::{PAGE_SIZE, ThreadId, VcpuId};
use firn_vmm::command_line::{self, AddedPaths, RamPlan};
use firn_vmm::{LaunchedProcess, MemoryLayout, QemuVm};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::disk_profile::DiskThrottle;

/// The verb that starts the restoring process.
pub const VERB: &str = "restore-recorded";
/// How much of QEMU's output an error contains, in bytes.
const LOG_BYTES: u64 = 2000;

/// Request for a recorded restore.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RecordedRestoreRequest {
    /// The image.
    pub image: PathBuf,
    /// The restore mode.
    pub mode: RestoreMode,
    /// Whether to find out which prefetched pages are used.
    pub account_use: bool,
    /// Whether memory is filled in the background too.
    pub fill: BackgroundFill,
    /// The directory for sockets and logs.
    pub dir: PathBuf,
}

/// The client of a recorded restore. Dropping it ends the guest.
pub struct RestoreRecording {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl RestoreRecording {
    /// Starts a restore and returns once the guest runs. `lab` is the path of the `firn-lab`
    /// program.
    pub fn start_restore(
        lab: &Path,
        what: &RecordedRestoreRequest,
        throttle: &DiskThrottle,
    ) -> Result<Self> {
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
        let running: Value = recording.read_answer()?;
        ensure!(running["running"] == true, "the guest does not run: {running}");
        Ok(recording)
    }

    /// Ends the guest and returns its run record.
    pub fn finish_restore(mut self) -> Result<RunRecord> {
        writeln!(self.stdin)?;
        self.read_answer()
    }

    fn read_answer<T: for<'de> Deserialize<'de>>(&mut self) -> Result<T> {
        let mut line = String::new();
        ensure!(self.stdout.read_line(&mut line)? > 0, "the recorded restore has failed");
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for RestoreRecording {
    fn drop(&mut self) {
        // At the end of its input the process kills the guest and ends.
        let _ = writeln!(self.stdin);
        let _ = self.child.wait();
    }
}

/// Serves one restore, which standard input describes.
pub fn serve_restore() -> Result<()> {
    let mut lines = io::stdin().lines();
    let what: RecordedRestoreRequest =
        serde_json::from_str(&lines.next().context("nothing to restore")??)?;
    let guest = RunningGuest::restore_image(&what)?;
    write_json_line(&json!({ "running": true }))?;
    let _enough = lines.next();
    let record = guest.restore.record();
    drop(guest);
    write_json_line(&record)
}

fn write_json_line(what: &impl Serialize) -> Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, what)?;
    writeln!(out)?;
    Ok(out.flush()?)
}

/// A restored guest. Dropping it ends the threads that serve it, then kills it.
struct RunningGuest {
    restore: RunningRestore,
    _hypervisor: QemuProcess,
}

/// A QEMU process; dropping it kills the process.
struct QemuProcess(LaunchedProcess);

impl Drop for QemuProcess {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is reaped.
        let _ = self.0.kill();
    }
}

impl RunningGuest {
    fn restore_image(what: &RecordedRestoreRequest) -> Result<Self> {
        let since = Instant::now();
        let image = Arc::new(Image::open(&what.image)?);
        let qmp = what.dir.join("recorded.qmp");
        let mut hypervisor = launch_qemu(&image, &qmp, &what.dir)?;
        let mut alive = || matches!(hypervisor.0.try_wait(), Ok(None));
        let connected = QemuVm::connect_started(&qmp, &mut alive);
        let mut vm = connected.with_context(|| describe_log(&what.dir))?;
        let vcpus: Vec<ThreadId> = vm.vcpus()?.iter().map(|vcpu| vcpu.tid).collect();
        let layout = vm.layout()?;
        let process = Arc::new(Process::open(hypervisor.0.pid())?);
        let memory = open_memory(&process, &layout)?;
        let mut tracee = Tracee::seize(&process, &vcpus)?;
        let faults = PageFaults::create(&mut tracee, memory.clone(), TraceMode::Restore)?;
        drop(tracee);
        let presence =
            PresenceFile::create(&what.dir.join("presence"), memory.region_map().total_pages())?;
        let options = RestoreOptions {
            mode: what.mode,
            account_use: what.account_use,
            fill: what.fill,
            since,
            vcpus: vcpus.into_iter().zip((0..).map(VcpuId)).collect(),
            ..RestoreOptions::default()
        };
        let fatal = Box::new(|error: &RestoreError| eprintln!("recorded restore: {error}"));
        let restore =
            RunningRestore::begin(image.clone(), memory, faults, options, presence, fatal)?;
        vm.load_device_state(image.device_state()).with_context(|| describe_log(&what.dir))?;
        restore.await_prefill().map_err(|error| anyhow!(error))?;
        vm.cont()?;
        Ok(Self { restore, _hypervisor: hypervisor })
    }
}

/// Starts the image's QEMU, which then waits for device state.
fn launch_qemu(image: &Image, qmp: &Path, dir: &Path) -> Result<QemuProcess> {
    let args: Vec<String> = serde_json::from_value(image.meta()["qemu"]["user_args"].clone())
        .context("the image does not record how its QEMU was started")?;
    let plan = command_line::plan_command(&args)?;
    let ram = plan.ram().iter().map(ram_file).collect::<Result<Vec<_>>>()?;
    let path = |file: &File| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let (qmp, calls) = (qmp.to_owned(), qmp.with_extension("calls"));
    let paths = AddedPaths {
        qmp,
        ram: ram.iter().map(path).collect(),
        calls,
        stores: None,
        cards: Vec::new(),
    };
    let augmented = plan.for_restore(&paths)?;
    let inherit: Vec<_> = ram.iter().map(AsFd::as_fd).collect();
    Ok(QemuProcess(firn_vmm::launch_hypervisor(
        &augmented.args,
        &inherit,
        &dir.join("recorded.log"),
    )?))
}

fn ram_file(plan: &RamPlan) -> Result<File> {
    let file = memfd_create("firn-ram", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, plan.bytes.next_multiple_of(PAGE_SIZE as u64))?;
    Ok(file.into())
}

/// Opens a hypervisor's guest memory at the addresses in its layout.
pub(crate) fn open_memory(
    process: &Arc<Process>,
    layout: &MemoryLayout,
) -> Result<Arc<GuestMemory>> {
    let locate = |region: &firn_types::RamRegion| {
        let location = layout.locations.iter().find(|location| location.id == region.id)?;
        Some(RegionLocation { region: region.clone(), hva: location.hva })
    };
    let locations: Vec<_> = layout.map.regions().iter().filter_map(locate).collect();
    Ok(Arc::new(GuestMemory::open(process.clone(), layout.map.clone(), &locations)?))
}

fn describe_log(dir: &Path) -> String {
    let tail = firn_vmm::read_log_tail(&dir.join("recorded.log"), LOG_BYTES).unwrap_or_default();
    format!("end of QEMU's log: {}", tail.trim())
}
