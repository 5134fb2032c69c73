//! First-level launcher: boots the first-level guest once and saves it; later runs restore it.
//!
//! The first-level guest is a VM that QEMU emulates (TCG) with the virtualization of a processor.
//! Its Linux has `/dev/kvm`: the second-level guests, which experiments run in it, use KVM.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use firn_vmm::QmpClient;
use rustix::fs::{FlockOperation, flock};
use serde_json::json;
use tempfile::TempDir;

use super::KvmHost;
use super::error::KvmHostError;
use super::task::FirstLevelGuest;

/// QEMU for the first level: the system's own, whatever the second level uses.
const QEMU: &str = "qemu-system-x86_64";
/// How long a boot may take on a busy host.
const BOOT_TIMEOUT: Duration = Duration::from_secs(180);
/// How long writing a state of about 100 MB may take.
const SAVE_TIMEOUT: Duration = Duration::from_secs(120);

/// Starts the first-level guest. Has a directory for its sockets.
pub(super) struct FirstLevelLauncher<'a> {
    host: &'a KvmHost,
    directory: TempDir,
}

impl<'a> FirstLevelLauncher<'a> {
    pub(super) fn new(host: &'a KvmHost) -> Result<Self, KvmHostError> {
        let operation = "make a directory for the first-level guest";
        let directory = tempfile::Builder::new()
            .prefix("firn-kvm-host-")
            .tempdir_in(std::env::temp_dir())
            .map_err(KvmHostError::file_error(operation))?;
        Ok(Self { host, directory })
    }

    /// A file that is removed when the guest ends.
    pub(super) fn file_path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The file with the saved state of the booted guest. If it does not exist, boots and saves the
    /// guest, which may take minutes.
    pub(super) fn ensure_saved_state(&self) -> Result<PathBuf, KvmHostError> {
        let state = self.host.disk.with_file_name(format!("state-{:016x}", self.state_key()?));
        let operation = || format!("lock {}", state.display());
        let lock = File::create(state.with_extension("lock"))
            .map_err(KvmHostError::file_error(operation()))?;
        let locked = flock(&lock, FlockOperation::LockExclusive);
        locked.map_err(|errno| KvmHostError::file_error(operation())(errno.into()))?;
        if !state.exists() {
            self.boot_and_save(&state)?;
        }
        Ok(state)
    }

    /// Starts the guest from a saved state, with a payload on its second disk.
    pub(super) fn restore_guest(
        &self,
        payload: &Path,
        state: &Path,
    ) -> Result<FirstLevelGuest, KvmHostError> {
        let incoming = format!("exec:cat '{}'", state.display());
        self.start_qemu(payload, &["-incoming", &incoming])
    }

    fn boot_and_save(&self, state: &Path) -> Result<(), KvmHostError> {
        let empty = self.file_path("empty");
        let made = File::create(&empty).and_then(|file| file.set_len(super::payload::DISK_BYTES));
        made.map_err(KvmHostError::file_error(format!("make {}", empty.display())))?;
        let mut task = self.start_qemu(&empty, &[])?;
        task.wait_ready(BOOT_TIMEOUT)?;
        let unfinished = state.with_extension("new");
        save_state(&self.file_path("qmp"), &unfinished)?;
        let operation = format!("keep {}", state.display());
        fs::rename(&unfinished, state).map_err(KvmHostError::file_error(operation))
    }

    fn start_qemu(&self, payload: &Path, more: &[&str]) -> Result<FirstLevelGuest, KvmHostError> {
        let log = self.file_path("qemu.log");
        let operation = || format!("start {QEMU}");
        let child = Command::new(QEMU)
            .args(self.qemu_args(payload))
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).map_err(KvmHostError::file_error(operation()))?)
            .spawn()
            .map_err(KvmHostError::file_error(operation()))?;
        FirstLevelGuest::connect(child, self.directory.path(), BOOT_TIMEOUT)
    }

    /// The command line. Paths may differ between runs: a saved state does not contain them. All
    /// other values are in [`machine_args`] or in the hash of [`Self::state_key`].
    fn qemu_args(&self, payload: &Path) -> Vec<String> {
        let at = |name: &str| self.file_path(name).display().to_string();
        let mut args: Vec<String> = machine_args().iter().map(|&word| word.to_owned()).collect();
        args.extend(["-smp".to_owned(), self.host.cpus.to_string()]);
        let mut add = |option: &str, value: String| args.extend([option.to_owned(), value]);
        add("-kernel", self.host.image.kernel.display().to_string());
        add("-initrd", self.host.image.initrd.display().to_string());
        add("-chardev", format!("file,id=console,path={}", at("console")));
        add("-qmp", format!("unix:{},server=on,wait=off", at("qmp")));
        for disk in [&self.host.disk, payload] {
            add("-drive", format!("file={},if=virtio,format=raw,readonly=on", disk.display()));
        }
        for (number, port) in super::task::PORTS.iter().enumerate() {
            add("-chardev", format!("socket,id={port},path={},server=on,wait=off", at(port)));
            add("-device", format!("virtserialport,bus=ports.0,nr={},chardev={port}", number + 1));
        }
        args
    }

    /// Hash of what a saved state depends on: QEMU's version and the machine. It is part of the
    /// name of the state file; the directory of that file belongs to one set of guest files.
    fn state_key(&self) -> Result<u64, KvmHostError> {
        let version = Command::new(QEMU).arg("--version").output();
        let version = version.map_err(KvmHostError::file_error(format!("run {QEMU}")))?;
        let mut hasher = DefaultHasher::new();
        (version.stdout, machine_args(), self.host.cpus, super::task::PORTS).hash(&mut hasher);
        Ok(hasher.finish())
    }
}

/// A machine whose processor has AMD's virtualization, as far as QEMU emulates it.
fn machine_args() -> &'static [&'static str] {
    &[
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
        "-display",
        "none",
        "-machine",
        "pc-i440fx-7.2",
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        "max,-mpx,-pku",
        "-m",
        "2048M",
        "-append",
        "console=ttyS0 quiet panic=-1",
        "-serial",
        "chardev:console",
        "-device",
        "virtio-serial-pci,id=ports",
    ]
}

/// Makes QEMU write its state to a file; the guest is paused afterwards.
fn save_state(qmp: &Path, state: &Path) -> Result<(), KvmHostError> {
    let mut qmp = QmpClient::connect(qmp, SAVE_TIMEOUT)?;
    let to = format!("exec:cat > '{}'", state.display());
    let unlimited = json!({ "max-bandwidth": i64::MAX });
    qmp.execute("migrate-set-parameters", unlimited)?;
    qmp.execute("migrate", json!({ "uri": to }))?;
    let start = Instant::now();
    loop {
        let reply = qmp.execute("query-migrate", json!({}))?;
        match reply["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => return Err(KvmHostError::Migration(reply.to_string())),
            _ if start.elapsed() > SAVE_TIMEOUT => {
                return Err(KvmHostError::Migration("it takes too long".into()));
            }
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
