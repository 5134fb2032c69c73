//! First-level guest start: boots the guest once and saves it; later runs restore it.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use firn_vmm::Qmp;
use rustix::fs::{FlockOperation, flock};
use serde_json::json;
use tempfile::TempDir;

use super::KvmHost;
use super::error::KvmHostError;
use super::task::Task;

/// QEMU for the first level: the system's own, whatever the second level uses.
const QEMU: &str = "qemu-system-x86_64";
/// How long a boot may take on a busy host.
const BOOT: Duration = Duration::from_secs(180);
/// How long writing a state of about 100 MB may take.
const SAVE: Duration = Duration::from_secs(120);

/// A first-level guest to start, with a directory for its sockets.
pub(super) struct Boot<'a> {
    host: &'a KvmHost,
    directory: TempDir,
}

impl<'a> Boot<'a> {
    pub(super) fn new(host: &'a KvmHost) -> Result<Self, KvmHostError> {
        let told = "make a directory for the first-level guest";
        let directory = tempfile::Builder::new()
            .prefix("firn-kvm-host-")
            .tempdir_in(std::env::temp_dir())
            .map_err(KvmHostError::file(told))?;
        Ok(Self { host, directory })
    }

    /// A file that is removed when the guest ends.
    pub(super) fn place(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The file with the booted guest. Boots and saves the guest if the file does not exist.
    pub(super) fn saved_state(&self) -> Result<PathBuf, KvmHostError> {
        let state = self.host.disk.with_file_name(format!("state-{:016x}", self.key()?));
        let told = || format!("lock {}", state.display());
        let lock =
            File::create(state.with_extension("lock")).map_err(KvmHostError::file(told()))?;
        let locked = flock(&lock, FlockOperation::LockExclusive);
        locked.map_err(|errno| KvmHostError::file(told())(errno.into()))?;
        if !state.exists() {
            self.boot_and_save(&state)?;
        }
        Ok(state)
    }

    /// Starts the guest from a saved state, with a payload on its second disk.
    pub(super) fn restore(&self, payload: &Path, state: &Path) -> Result<Task, KvmHostError> {
        let incoming = format!("exec:cat '{}'", state.display());
        self.start(payload, &["-incoming", &incoming])
    }

    fn boot_and_save(&self, state: &Path) -> Result<(), KvmHostError> {
        let empty = self.place("empty");
        let made = File::create(&empty).and_then(|file| file.set_len(super::payload::DISK_BYTES));
        made.map_err(KvmHostError::file(format!("make {}", empty.display())))?;
        let mut task = self.start(&empty, &[])?;
        task.ready(BOOT)?;
        let unfinished = state.with_extension("new");
        save(&self.place("qmp"), &unfinished)?;
        let told = format!("keep {}", state.display());
        fs::rename(&unfinished, state).map_err(KvmHostError::file(told))
    }

    fn start(&self, payload: &Path, more: &[&str]) -> Result<Task, KvmHostError> {
        let log = self.place("qemu.log");
        let told = || format!("start {QEMU}");
        let child = Command::new(QEMU)
            .args(self.args(payload))
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).map_err(KvmHostError::file(told()))?)
            .spawn()
            .map_err(KvmHostError::file(told()))?;
        Task::connect(child, self.directory.path(), BOOT)
    }

    /// The command line. Values that a saved state depends on must not differ between runs, so it
    /// includes no path.
    fn args(&self, payload: &Path) -> Vec<String> {
        let at = |name: &str| self.place(name).display().to_string();
        let mut args: Vec<String> = machine().iter().map(|&word| word.to_owned()).collect();
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

    /// Hash of QEMU and machine. A saved state is valid only for the very same guest files, QEMU
    /// and machine.
    fn key(&self) -> Result<u64, KvmHostError> {
        let version = Command::new(QEMU).arg("--version").output();
        let version = version.map_err(KvmHostError::file(format!("run {QEMU}")))?;
        let mut hasher = DefaultHasher::new();
        (version.stdout, machine(), self.host.cpus, super::task::PORTS).hash(&mut hasher);
        Ok(hasher.finish())
    }
}

/// A machine whose processor has AMD's virtualization, as far as QEMU emulates it.
fn machine() -> &'static [&'static str] {
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
fn save(qmp: &Path, state: &Path) -> Result<(), KvmHostError> {
    let mut qmp = Qmp::connect(qmp, SAVE)?;
    let to = format!("exec:cat > '{}'", state.display());
    let unlimited = json!({ "max-bandwidth": i64::MAX });
    qmp.execute("migrate-set-parameters", unlimited)?;
    qmp.execute("migrate", json!({ "uri": to }))?;
    let start = Instant::now();
    loop {
        let told = qmp.execute("query-migrate", json!({}))?;
        match told["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => return Err(KvmHostError::Migration(told.to_string())),
            _ if start.elapsed() > SAVE => {
                return Err(KvmHostError::Migration("it takes too long".into()));
            }
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
