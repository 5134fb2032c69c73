//! Clones by QEMU itself: several QEMUs map one file with guest RAM privately, and load the device
//! state of a VM that had its RAM in that file. Kata Containers starts VMs so.
//!
//! ```text
//!   source      memory-backend-file, share=on     runs, stops, saves its devices (x-ignore-shared), ends
//!                      |
//!   FILE on tmpfs      [ RAM ]
//!                      ^ share=off     ^ share=off
//!   clones             QEMU 1          QEMU 2      -incoming defer, x-ignore-shared, device state
//! ```
//!
//! From the same source a migration file is made, with all of RAM in it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use firn_vmm::QmpClient;
use serde_json::{Value, json};

use crate::guest::QemuArgs;
use crate::peer::{self, QemuSaveMethod, ignore_shared, wait_for_migration};

/// The name that QEMU gives to guest RAM by default, so that a migration finds it.
const RAM_ID: &str = "pc.ram";

/// How long a QEMU may take until it answers.
const MONITOR_LIMIT: Duration = Duration::from_secs(120);

/// Hypervisors that end with this value, or earlier.
#[derive(Clone, Debug, Default)]
pub struct OwnedProcesses {
    children: Arc<Mutex<Vec<Child>>>,
}

impl OwnedProcesses {
    /// Starts a process. Returns its number.
    fn spawn(&self, command: &mut Command) -> Result<i32> {
        let child = command.spawn().context("cannot start QEMU")?;
        let pid = child.id() as i32;
        self.children.lock().unwrap_or_else(PoisonError::into_inner).push(child);
        Ok(pid)
    }

    fn is_running(&self, pid: i32) -> bool {
        let mut children = self.children.lock().unwrap_or_else(PoisonError::into_inner);
        let child = children.iter_mut().find(|child| child.id() as i32 == pid);
        child.is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Ends all of them.
    pub fn end_all(&self) {
        let mut children = self.children.lock().unwrap_or_else(PoisonError::into_inner);
        // One may have ended by itself; either way it is reaped.
        children.iter_mut().for_each(|child| drop(child.kill()));
        children.drain(..).for_each(|mut child| drop(child.wait()));
    }
}

/// How a clone gets its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerClone {
    /// From the file that all of them map.
    Template,
    /// From a migration file, which it reads to the end.
    MigrationFile,
}

/// A saved VM from which QEMU starts clones. Dropping it removes its RAM file.
#[derive(Debug)]
pub struct QemuTemplate {
    directory: PathBuf,
    ram: PathBuf,
    memory_bytes: u64,
}

impl QemuTemplate {
    /// Starts a VM with its RAM in a file of a tmpfs, lets `prepare` change it, and saves it. The VM
    /// ends then.
    pub fn save(
        args: &QemuArgs,
        (directory, ram): (&Path, &Path),
        processes: &OwnedProcesses,
        prepare: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let (directory, ram) = (directory.to_owned(), ram.to_owned());
        let saved = Self { directory, ram, memory_bytes: args.memory_bytes() };
        let (pid, mut qmp) = saved.start_qemu(args, &saved.ram_words("on"), "source", processes)?;
        prepare()?;
        peer::save_vm(&mut qmp, QemuSaveMethod::File, &saved.migration_file())?;
        qmp.execute("stop", Value::Null)?;
        ignore_shared(&mut qmp)?;
        let uri = format!("exec:cat > '{}'", saved.state_file().display());
        qmp.execute("migrate", json!({ "uri": uri }))?;
        wait_for_migration(&mut qmp, "saving device state")?;
        ensure!(processes.is_running(pid), "QEMU ended while it was saved");
        processes.end_all();
        Ok(saved)
    }

    /// Starts a clone. Returns its process number when its vCPUs run.
    pub fn start_clone(
        &self,
        kind: PeerClone,
        args: &QemuArgs,
        name: &str,
        processes: &OwnedProcesses,
    ) -> Result<i32> {
        let mut words = match kind {
            PeerClone::Template => self.ram_words("off"),
            PeerClone::MigrationFile => Vec::new(),
        };
        words.extend(["-incoming", "defer"].map(str::to_owned));
        let (pid, mut qmp) = self.start_qemu(args, &words, name, processes)?;
        let file = match kind {
            PeerClone::Template => {
                ignore_shared(&mut qmp)?;
                self.state_file()
            }
            PeerClone::MigrationFile => self.migration_file(),
        };
        let uri = format!("exec:cat '{}'", file.display());
        qmp.execute("migrate-incoming", json!({ "uri": uri }))?;
        wait_for_migration(&mut qmp, "loading a clone")?;
        qmp.execute("cont", Value::Null)?;
        Ok(pid)
    }

    /// The file with guest RAM.
    pub fn ram_file(&self) -> &Path {
        &self.ram
    }

    fn state_file(&self) -> PathBuf {
        self.directory.join("template.state")
    }

    fn migration_file(&self) -> PathBuf {
        self.directory.join("template.migration")
    }

    fn ram_words(&self, share: &str) -> Vec<String> {
        let (bytes, path) = (self.memory_bytes, self.ram.display());
        let object =
            format!("memory-backend-file,id={RAM_ID},size={bytes},mem-path={path},share={share}");
        let machine = format!("memory-backend={RAM_ID}");
        vec!["-object".to_owned(), object, "-machine".to_owned(), machine]
    }

    fn start_qemu(
        &self,
        args: &QemuArgs,
        more: &[String],
        name: &str,
        processes: &OwnedProcesses,
    ) -> Result<(i32, QmpClient)> {
        let file = |kind: &str| self.directory.join(format!("{name}.{kind}"));
        let monitor = format!("unix:{},server=on,wait=off", file("qmp").display());
        let mut command = Command::new(args.program_name());
        command.args(args.args()).args(more).args(["-qmp", &monitor]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(file("log"))?);
        let pid = processes.spawn(&mut command)?;
        let mut is_alive = || processes.is_running(pid);
        let qmp = QmpClient::connect_started(&file("qmp"), MONITOR_LIMIT, &mut is_alive);
        let output = || std::fs::read_to_string(file("log")).unwrap_or_default();
        Ok((pid, qmp.with_context(|| format!("QEMU does not answer: {}", output().trim()))?))
    }
}

impl Drop for QemuTemplate {
    fn drop(&mut self) {
        // Only memory of this machine is lost with the file.
        let _ = std::fs::remove_file(&self.ram);
    }
}
