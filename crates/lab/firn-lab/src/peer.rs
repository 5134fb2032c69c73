//! QEMU's own methods to save and restore a VM, used as QEMU's documentation describes.
//!
//! ```text
//!   file                  migrate to exec:cat > FILE, pre-copy          -incoming exec:cat FILE
//!   background-snapshot   the same with the capability of that name     the same
//!   mapped-ram            migrate to file:FILE, pages at fixed offsets  migrate-incoming file:FILE (QEMU 9.0)
//! ```
//!
//! Bandwidth is unlimited: otherwise the measurement would be of QEMU's default limit. Each method
//! restores all memory before the guest runs.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use firn_vmm::QmpClient;
use serde::Serialize;
use serde_json::{Value, json};

use crate::disk_profile::DiskThrottle;
use crate::guest::QemuArgs;
use crate::lab::wait_for;

/// How long a save or a restore may take.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(300);
/// A limit that no storage reaches, in bytes per second.
const BANDWIDTH: u64 = 100 << 30;

/// A method of QEMU to save a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QemuSaveMethod {
    /// Live migration into a file.
    File,
    /// The guest continues to run while its memory is written, write-protected by userfaultfd.
    BackgroundSnapshot,
    /// Migration with each page at a fixed offset in the file.
    MappedRam,
}

impl QemuSaveMethod {
    /// All methods.
    pub const ALL: [Self; 3] = [Self::File, Self::BackgroundSnapshot, Self::MappedRam];

    /// The method's name here, which is also QEMU's where QEMU has one.
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "qemu-file",
            Self::BackgroundSnapshot => "qemu-background-snapshot",
            Self::MappedRam => "qemu-mapped-ram",
        }
    }

    /// The migration capability that the method needs.
    fn capability(self) -> Option<&'static str> {
        match self {
            Self::File => None,
            Self::BackgroundSnapshot => Some("background-snapshot"),
            Self::MappedRam => Some("mapped-ram"),
        }
    }

    fn outgoing_uri(self, file: &Path) -> String {
        match self {
            Self::MappedRam => format!("file:{}", file.display()),
            _ => format!("exec:cat > '{}'", file.display()),
        }
    }

    fn incoming_uri(self, file: &Path) -> String {
        match self {
            Self::MappedRam => format!("file:{}", file.display()),
            _ => format!("exec:cat '{}'", file.display()),
        }
    }

    /// Whether this QEMU has the method.
    pub fn is_supported_by(self, qmp: &mut QmpClient) -> Result<bool> {
        let Some(wanted) = self.capability() else { return Ok(true) };
        let known = qmp.execute("query-migrate-capabilities", Value::Null)?;
        let mut names = known.as_array().into_iter().flatten();
        Ok(names.any(|entry| entry["capability"] == wanted))
    }

    fn set_capability(self, qmp: &mut QmpClient, on: bool) -> Result<()> {
        let Some(capability) = self.capability() else { return Ok(()) };
        let capabilities = json!({ "capabilities": [{ "capability": capability, "state": on }] });
        qmp.execute("migrate-set-capabilities", capabilities)?;
        Ok(())
    }
}

impl fmt::Display for QemuSaveMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The result of a save, as QEMU reports it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QemuSaveReport {
    /// How long the vCPUs were paused, in milliseconds.
    pub downtime_ms: f64,
    /// From the command to the end, in milliseconds.
    pub total_ms: f64,
    /// Size of the file, in bytes.
    pub image_bytes: u64,
}

/// Saves the VM of this monitor. The VM continues to run afterwards.
pub fn save_vm(qmp: &mut QmpClient, method: QemuSaveMethod, file: &Path) -> Result<QemuSaveReport> {
    method.set_capability(qmp, true)?;
    qmp.execute("migrate-set-parameters", json!({ "max-bandwidth": BANDWIDTH }))?;
    let start = Instant::now();
    qmp.execute("migrate", json!({ "uri": method.outgoing_uri(file) }))?;
    let end = wait_for_migration(qmp, method.name())?;
    let total_ms = start.elapsed().as_secs_f64() * 1e3;
    method.set_capability(qmp, false)?;
    qmp.execute("cont", Value::Null)?;
    File::open(file)?.sync_all()?;
    let downtime_ms = end["downtime"].as_f64().unwrap_or(f64::NAN);
    Ok(QemuSaveReport { downtime_ms, total_ms, image_bytes: fs::metadata(file)?.len() })
}

/// Waits for the end of a migration, outgoing or incoming.
pub(crate) fn wait_for_migration(qmp: &mut QmpClient, what: &str) -> Result<Value> {
    wait_for(what, MIGRATION_TIMEOUT, || {
        let state = qmp.execute("query-migrate", Value::Null)?;
        match state["status"].as_str() {
            Some("completed") => Ok(Some(state)),
            Some("failed" | "cancelled") => bail!("{what} failed: {state}"),
            _ => Ok(None),
        }
    })
}

/// A QEMU that restores a VM, or has restored it. Dropping it kills the process.
#[derive(Debug)]
pub struct QemuRestore {
    child: Child,
    log: PathBuf,
}

impl QemuRestore {
    /// Starts a QEMU with the arguments of the saved one. The guest runs once all memory has been
    /// read.
    pub fn start(
        guest: &QemuArgs,
        method: QemuSaveMethod,
        file: &Path,
        throttle: &DiskThrottle,
        dir: &Path,
    ) -> Result<Self> {
        let log = dir.join("peer.log");
        let qmp = dir.join("peer.qmp");
        let monitor = format!("unix:{},server=on,wait=off", qmp.display());
        let mut command = throttle.command(guest.program_name());
        command.args(guest.args()).args(["-qmp", &monitor]);
        match method {
            QemuSaveMethod::MappedRam => command.args(["-incoming", "defer"]),
            _ => command.args(["-incoming", &method.incoming_uri(file)]),
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        let mut restored = Self { child: command.spawn().context("cannot start QEMU")?, log };
        if method == QemuSaveMethod::MappedRam {
            restored.start_incoming(method, file, &qmp)?;
        }
        Ok(restored)
    }

    fn start_incoming(&mut self, method: QemuSaveMethod, file: &Path, path: &Path) -> Result<()> {
        let mut alive = || matches!(self.child.try_wait(), Ok(None));
        let mut qmp = QmpClient::connect_started(path, Duration::from_secs(20), &mut alive)?;
        method.set_capability(&mut qmp, true)?;
        qmp.execute("migrate-incoming", json!({ "uri": method.incoming_uri(file) }))?;
        Ok(())
    }

    /// Fails with QEMU's own messages if QEMU has ended.
    pub fn check_running(&mut self) -> Result<()> {
        let ended = self.child.try_wait()?;
        let output = || fs::read_to_string(&self.log).unwrap_or_default();
        ensure!(ended.is_none(), "QEMU ended while restoring: {}", output().trim());
        Ok(())
    }
}

impl Drop for QemuRestore {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A guest whose memory stays in a shared file, and of which only the device state was saved. The
/// time in which QEMU starts it is a lower bound for every restore.
#[derive(Debug)]
pub struct SharedMemory {
    guest: QemuArgs,
    state: PathBuf,
    dir: PathBuf,
    ram: PathBuf,
}

impl SharedMemory {
    /// Boots the guest with its memory in a file, and saves its device state.
    pub fn boot_and_save(guest: &QemuArgs, dir: &Path) -> Result<Self> {
        let ram = PathBuf::from(format!("/dev/shm/firn-lab-{}.ram", std::process::id()));
        let saved =
            Self { guest: guest.clone(), state: dir.join("start.state"), dir: dir.to_owned(), ram };
        let mut source = saved.spawn_qemu(&[])?;
        let mut qmp = saved.connect_monitor(&mut source)?;
        std::thread::sleep(Duration::from_secs(3));
        ignore_shared(&mut qmp)?;
        qmp.execute("stop", Value::Null)?;
        qmp.execute(
            "migrate",
            json!({ "uri": format!("exec:cat > '{}'", saved.state.display()) }),
        )?;
        wait_for_migration(&mut qmp, "saving device state")?;
        Ok(saved)
    }

    /// Measures the time from starting QEMU until QEMU reports that the vCPUs run. Ends the guest
    /// then, because its memory has changed since the save.
    pub fn start(&self) -> Result<Duration> {
        let since = Instant::now();
        let mut child = self.spawn_qemu(&["-incoming", "defer"])?;
        let mut qmp = self.connect_monitor(&mut child)?;
        ignore_shared(&mut qmp)?;
        let uri = format!("exec:cat '{}'", self.state.display());
        qmp.execute("migrate-incoming", json!({ "uri": uri }))?;
        wait_for_migration(&mut qmp, "loading device state")?;
        qmp.execute("cont", Value::Null)?;
        Ok(since.elapsed())
    }

    fn spawn_qemu(&self, more: &[&str]) -> Result<KilledChild> {
        let size = self.guest.memory_bytes();
        let object = format!(
            "memory-backend-file,id=lab.ram,size={size},mem-path={},share=on",
            self.ram.display()
        );
        let monitor = format!("unix:{},server=on,wait=off", self.qmp_path().display());
        let mut command = Command::new(self.guest.program_name());
        command.args(self.guest.args());
        command.args(["-object", &object, "-machine", "memory-backend=lab.ram", "-qmp", &monitor]);
        command.args(more).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(self.dir.join("start.log"))?);
        Ok(KilledChild(command.spawn().context("cannot start QEMU")?))
    }

    fn qmp_path(&self) -> PathBuf {
        self.dir.join("start.qmp")
    }

    fn connect_monitor(&self, child: &mut KilledChild) -> Result<QmpClient> {
        let mut alive = || matches!(child.0.try_wait(), Ok(None));
        Ok(QmpClient::connect_started(&self.qmp_path(), Duration::from_secs(20), &mut alive)?)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // Only memory of this machine is lost with the file.
        let _ = fs::remove_file(&self.ram);
    }
}

pub(crate) fn ignore_shared(qmp: &mut QmpClient) -> Result<()> {
    let capability = json!({ "capability": "x-ignore-shared", "state": true });
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": [capability] }))?;
    Ok(())
}

/// A process that is killed when the value is dropped.
#[derive(Debug)]
struct KilledChild(Child);

impl Drop for KilledChild {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is reaped.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_connections_decode_their_own_messages() {
        let file = Path::new("/x/y");
        assert_eq!(QemuSaveMethod::File.outgoing_uri(file), "exec:cat > '/x/y'");
        assert_eq!(QemuSaveMethod::BackgroundSnapshot.incoming_uri(file), "exec:cat '/x/y'");
        assert_eq!(
            QemuSaveMethod::MappedRam.outgoing_uri(file),
            QemuSaveMethod::MappedRam.incoming_uri(file)
        );
    }
}
